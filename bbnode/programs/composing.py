"""A part of a training program: some steps of a round, as one says them of a method.

Rule: a part says which steps it takes for itself, what it changes for others, and what it does not
go together with; so two that contradict each other are refused by name before anything is recorded.

A step is a method of the program that is marked `step`. A part that has a method of its name is
asked first, with the program and `inner`, which is the same step without this part: what calls
`inner` adds to the step, and what does not has to claim it.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial, wraps
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from bbnode.dsl import BadArgument

Inner: TypeAlias = Callable[..., Any]  # a step without the part that is asked
F = TypeVar("F", bound=Callable[..., Any])

# The steps of a round, and what each is called where one has to be left out.
STEPS: dict[str, str] = {
    "body": "the course of a round",
    "cohort": "the choice of clients",
    "ask": "the requests to clients",
    "heard": "what selectors are told",
    "sent": "what travels to clients",
    "outgoing": "which weights travel to clients",
    "client_loads": "what a client loads",
    "client_update": "what a client answers",
    "local_training": "the training of a client",
    "answer": "how an answer stands for weights",
    "respond": "the answer of a client",
    "protected": "the protection of answers",
    "gathered": "the mean of answers",
    "combined": "what is made of answers",
    "server_update": "the step of the server",
    "results": "the outputs",
}
# Those that a part of which they are takes place by; the others may be left out.
REQUIRED = frozenset(STEPS) - {"heard", "results"}


class ArgumentChecks:
    """ArgumentChecks of arguments by their names."""

    def bad(self, what: str) -> BadArgument:
        """Return the error for an argument; `what` says which, and what it has to be."""
        raise NotImplementedError

    def _value(self, name: str) -> Any:
        """Return an argument."""
        return getattr(self, name)

    def require(self, name: str, good: bool, wanted: str) -> None:
        """Raise BadArgument unless an argument is as it has to be."""
        if not good:
            shown = repr(self._value(name))
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise self.bad(f"{name}={shown} has to be {wanted}")

    def require_counts(self, **least: int) -> None:
        """Check that arguments are integers of at least so much."""
        for name, lowest in least.items():
            value = self._value(name)
            good = type(value) is int and value >= lowest
            self.require(name, good, f"an integer of at least {lowest}")

    def require_numbers(self, *names: str) -> None:
        """Check that arguments are finite numbers above 0."""
        for name in names:
            good = _is_number(self._value(name)) and self._value(name) > 0
            self.require(name, good, "a number above 0")

    def require_not_negative(self, *names: str) -> None:
        """Check that arguments are finite numbers of at least 0."""
        for name in names:
            self.require(name, _is_number(self._value(name)), "a number of at least 0")

    def require_shares(self, *names: str) -> None:
        """Check that arguments are numbers from 0 to below 1."""
        for name in names:
            good = _is_number(self._value(name)) and self._value(name) < 1
            self.require(name, good, "a number from 0 to below 1")

    def require_one_of(self, name: str, choices: Iterable[str]) -> None:
        """Check that an argument is one of some words."""
        known = tuple(choices)
        self.require(name, self._value(name) in known, f"one of {', '.join(known)}")


@dataclass(frozen=True)
class RoundPart:
    """Base of parts; their fields are settings, and arguments of the program by their names.

    Attributes:
        slot: the argument of a program that it is given by.
        claims: steps that it takes for itself, so that no other part has one of them: those that
            it has a method for without calling `inner`, and those that then do not take place.
        guards: steps in which an author's class may not have its own, since a promise rests on
            them.
        wishes: values of other settings, where the author says none.
        needs: values that other settings have to have, each with the reason.
        changes: what it changes that others may depend on, in words that `refuses` of these has.
        refuses: what others may not change, each with the reason.
        lacks: settings that other parts of the slot have, each with the reason why it has none.
        several: a program may have more than one of the slot.
        alone: a program takes the value of its first field in its place.
    """

    slot: ClassVar[str] = ""
    claims: ClassVar[tuple[str, ...]] = ()
    guards: ClassVar[tuple[str, ...]] = ()
    wishes: ClassVar[Mapping[str, Any]] = {}
    needs: ClassVar[Mapping[str, tuple[bool, str]]] = {}
    changes: ClassVar[frozenset[str]] = frozenset()
    refuses: ClassVar[Mapping[str, str]] = {}
    lacks: ClassVar[Mapping[str, str]] = {}
    several: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    def check(self, program: Any, own: ArgumentChecks) -> None:
        """Check the settings, and what they need of the program. Raises BadArgument."""

    def __str__(self) -> str:
        """Return how it is written, with the settings that are not left out."""
        said = {n: getattr(self, n) for n, v in self.settings().items() if getattr(self, n) != v}
        shown = ", ".join(
            f"{n}={getattr(v, 'TYPE_NAME', getattr(v, 'type_name', repr(v)))}"
            for n, v in said.items()
        )
        return f"{self.slot}={type(self).__name__}({shown})"

    @classmethod
    def has(cls, step: str) -> bool:
        """Return True if the part has a method for a step."""
        return step in STEPS and hasattr(cls, step)

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Any]:
        """Return the names of the settings with their defaults."""
        return {each.name: each.default for each in fields(cls)}


def several(value: Any) -> tuple[Any, ...]:
    """Return the values of an argument that may have more than one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def parts_of(of: Any) -> tuple[RoundPart, ...]:
    """Return the parts of a program or of its class, outermost first."""
    values = [each for slot in of.PARTS for each in several(getattr(of, slot))]
    return tuple(each for each in values if isinstance(each, RoundPart))


def settings_of(of: Any) -> set[str]:
    """Return the names of the settings of all parts."""
    return {name for part in parts_of(of) for name in part.settings()}


def step(base: F) -> F:
    """Mark a method of a program as a step, to which its parts add, or which one of them takes."""
    name = base.__name__
    STEPS.setdefault(name, name)

    @wraps(base)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        call: Inner = partial(base, self)
        # What takes the step for itself is asked last, whatever its place.
        having = [each for each in parts_of(self) if each.has(name)]
        having.sort(key=lambda part: name in part.claims)
        for each in reversed(having):
            call = partial(_asked, self, each, name, call)
        return call(*args, **named)

    return cast(F, run)


def _asked(program: Any, part: RoundPart, name: str, inner: Inner, *args: Any, **named: Any) -> Any:
    if "_ran" in vars(program):
        program._ran.add((type(part), name))
    return getattr(part, name)(program, inner, *args, **named)


def contradiction(parts: Iterable[RoundPart]) -> tuple[RoundPart, RoundPart, str] | None:
    """Return two parts that do not go together, with the reason; None where all do."""
    for pair in itertools.combinations(parts, 2):
        for one, other in (pair, pair[::-1]):
            for changed, why in one.refuses.items():
                if changed in other.changes:
                    return one, other, why
        first, second = pair
        for name in first.needs.keys() & second.needs.keys():
            (a, why), (b, other_why) = first.needs[name], second.needs[name]
            if a != b:
                apart = f"one needs {name}={a} ({why}), and one {name}={b} ({other_why})"
                return first, second, apart
        for one, other in (pair, pair[::-1]):
            for name in one.claims:
                if other.has(name) and (name in other.claims or not one.has(name)):
                    return one, other, f"both define {STEPS[name]} ({name})"
    return None


def merged(
    bases: Sequence[RoundPart], plain: type | None
) -> RoundPart | tuple[RoundPart, RoundPart]:
    """Return the part that several bases of a class bring together, or two that exclude each other.

    A part is more than the one that it is a kind of, and anything is more than `plain`. A setting
    that one of them does not leave at its default goes along; of several the first base counts.
    """
    taken = bases[0]
    for other in bases[1:]:
        first = issubclass(type(taken), type(other)) or type(other) is plain
        if not first and not (issubclass(type(other), type(taken)) or type(taken) is plain):
            return taken, other
        more, less = (taken, other) if first else (other, taken)
        own = {name for name, value in more.settings().items() if getattr(more, name) != value}
        along = {
            name: getattr(less, name)
            for name, value in less.settings().items()
            if getattr(less, name) != value and (name not in own or more is other)
        }
        if not along.keys() <= more.settings().keys():
            return more, less
        taken = type(more)(**{**{f: getattr(more, f) for f in more.settings()}, **along})
    return taken


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


# --- parts of a program, or of its class -----------------------------------------------------


def checks_of(program: Any, part: RoundPart) -> ArgumentChecks:
    """Return checks of the settings of a part, whose errors are the program's."""
    return _Own(program, part)


class _Own(ArgumentChecks):
    """ArgumentChecks of the settings of one part."""

    def __init__(self, program: Any, part: RoundPart) -> None:
        self.bad = program.bad  # type: ignore[method-assign]
        self._part = part

    def _value(self, name: str) -> Any:
        return getattr(self._part, name)


def is_ours(cls: type) -> bool:
    """Return True for a class of this package."""
    return cls.__module__.startswith(f"{__package__}.")


def is_authors(cls: type) -> bool:
    """Return True for a program of an author."""
    return hasattr(cls, "PARTS") and not is_ours(cls)


def _joined(cls: type) -> str:
    """Return which programs a class of an author joins; "" where it is one of ours, or has one."""
    for base in cls.__mro__:
        if is_ours(base):
            break
        parts = [each.__name__ for each in base.__bases__ if hasattr(each, "PARTS")]
        if len(parts) > 1:
            return f" ({base.__name__} joins {', '.join(parts[:-1])} and {parts[-1]})"
    return ""


def set_setting(of: Any, name: str, value: Any) -> None:
    """Set a setting of all parts that have it. Raises BadArgument where it differs in meaning."""
    having = [each for each in parts_of(of) if name in each.settings()]
    for each in having[1:]:
        if each.settings()[name] != having[0].settings()[name]:
            listed = " and ".join(f"{each.slot}={type(each).__name__}(…)" for each in having)
            apart = "with a meaning of its own in each; say it in one of these"
            raise bad_argument(of, f"{name} is a setting of {listed}, {apart}")
    for slot in {each.slot for each in having}:
        now = getattr(of, slot)
        new = [
            dataclasses.replace(each, **{name: value}) if each in having else each
            for each in several(now)
        ]
        setattr(of, slot, tuple(new) if isinstance(now, tuple) else new[0])


def _plain(cls: Any, slot: str) -> Any:
    """Return the value that an argument has where nobody says anything."""
    return next(vars(base)[slot] for base in reversed(cls.__mro__) if slot in vars(base))


def as_parts(cls: Any, slot: str, value: Any) -> Any:
    """Return what an argument has as parts. Raises BadArgument for what is none."""
    plain = _plain(cls, slot)
    if plain is not None and plain.alone and not any(map(_is_part, several(value))):
        value = type(plain)(value)
    found = tuple(each for each in several(value) if each is not None or plain is not None)
    wrong = [each for each in found if not _is_part(each) or each.slot != slot]
    if wrong or (plain is not None and not found):
        fitting = ", ".join(sorted({e.__name__ for e in _kinds(RoundPart) if e.slot == slot}))
        near = difflib.get_close_matches(slot, settings_of(cls), n=1, cutoff=0.8)
        hint = f"; this one is {wrong[0]}" if any(map(_is_part, wrong)) else ""
        hint = hint or (f"; or did you mean {near[0]!r}?" if near else "")
        raise bad_argument(cls, f"{slot}={value!r:.60} has to be one of {fitting}{hint}")
    if len(found) > 1 and not all(each.several for each in found):
        names = " and ".join(type(each).__name__ for each in found)
        raise bad_argument(cls, f"{slot}: {names} are the same step of a round; take one of them")
    return found if len(found) > 1 else (found or (None,))[0]


def _is_part(value: object) -> bool:
    return isinstance(value, RoundPart)


def brought(cls: Any, slot: str) -> Any:
    """Return the parts that the bases of a class bring. Raises BadArgument if they contradict."""
    plain = _plain(cls, slot)
    bring: dict[type, list[tuple[type, RoundPart]]] = {}
    for base in cls.__bases__:
        value = getattr(base, slot, plain)
        for each in several(value) if value != plain else ():
            bring.setdefault(type(each) if each.several else RoundPart, []).append((base, each))
    found = []
    for pairs in bring.values():
        one = merged([each for _, each in pairs], type(plain))
        if isinstance(one, tuple):
            names = [next(b.__name__ for b, each in pairs if type(each) is type(p)) for p in one]
            said = ", ".join(f"{slot}={type(each).__name__}(…)" for each in one)
            raise bad_argument(
                cls,
                f"{names[0]} and {names[1]} do not go together: both are the same step of a round "
                f"({said}), of which one alone would take place; leave one of them out, or say "
                f"which by {slot}=…",
            )
        found.append(one)
    return as_parts(cls, slot, tuple(found)) if found else plain


def bringer(cls: type, part: RoundPart) -> type | None:
    """Return the first class that gave a program a part of this kind."""
    for base in reversed(cls.__mro__):
        if type(part) in map(type, several(vars(base).get(part.slot))):
            return base
    return None


def label_of(cls: type, part: RoundPart) -> str:
    """Return the name by which authors know a part: of the program that brings it, or its own."""
    by = bringer(cls, part)
    is_preset = by is not None and is_ours(by) and type(_plain(cls, part.slot)) is not type(part)
    return by.__name__ if by is not None and is_preset else str(part)


def _kinds(of: type[RoundPart]) -> Iterator[type[RoundPart]]:
    for each in of.__subclasses__():
        if not (each.__doc__ or "").startswith("Base of"):
            yield each
        yield from _kinds(each)


def refuse_unknown(of: Any, name: str) -> None:
    """Raise BadArgument for a name that no argument has, unless a class may have it for itself."""
    is_class = isinstance(of, type)
    known = (of.__mro__[1] if is_class else of).arguments()
    near = difflib.get_close_matches(name, known, n=1)
    why = next((each.lacks[name] for each in parts_of(of) if name in each.lacks), None)
    kinds = (each for each in _kinds(RoundPart) if each.slot in of.PARTS)
    other = next((each for each in kinds if name in each.settings()), None)
    if why is not None:
        raise bad_argument(of, f"it has no argument {name!r}: {why}; leave it out")
    if other is not None:
        hint = f"it is of {other.slot}={other.__name__}(…); leave it out, or take that part"
        raise bad_argument(of, f"it has no argument {name!r}; {hint}")
    if near:
        raise bad_argument(of, f"it has no argument {name!r}; did you mean {near[0]!r}?")
    if not is_class:
        raise bad_argument(of, f"it has no argument {name!r}; it has {', '.join(known)}")


def bad_argument(of: Any, what: str) -> BadArgument:
    """Return the error for an argument of a program, or of its class; see `ReadyProgram.bad`."""
    cls = of if isinstance(of, type) else type(of)
    return BadArgument(what + _joined(cls), cls.__name__)


def steps_of(cls: type) -> str:
    """Return the names of the steps that a class itself has."""
    return ", ".join(name for name in STEPS if name in vars(cls))
