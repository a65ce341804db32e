"""Arguments of ready programs: given to the constructor, or set in a subclass.

Rule: what a subclass sets is the default of its constructor, so that both ways, and `--arg` of the
command line, mean the same; a name that no argument has is refused, and so are an argument that
nothing reads and a base that would have no effect.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from onnx import ModelProto

from bbnode.components import Aggregator, concrete
from bbnode.dsl import AggregatorSlot, BadArgument, Module, RecordingError
from bbnode.programs import steps


@dataclass(kw_only=True, eq=False)
class ReadyProgram(Module):
    """A Module whose arguments are fields.

    ```python
    class Mine(FederatedTraining):
        model = "model.onnx"
        clients = 8
    ```

    Values that a subclass sets need no annotation: they are those of the fields that it inherits.
    Its own fields have one.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = {
            field.name: field.type
            for base in reversed(cls.__mro__[1:])
            if dataclasses.is_dataclass(base)
            for field in dataclasses.fields(base)
        }
        annotated = inspect.get_annotations(cls)
        for name, value in list(vars(cls).items()):
            if name in inherited and name not in annotated:
                annotated = {**annotated, name: inherited[name]}
                if type(value).__hash__ is None:  # a list, a model: dataclasses want a factory
                    setattr(cls, name, dataclasses.field(default_factory=partial(copy, value)))
            elif not _is_known(cls, name, value):
                near = difflib.get_close_matches(name, inherited, n=1)
                if near:
                    raise BadArgument(
                        f"it has no argument {name!r}; did you mean {near[0]!r}?", cls.__name__
                    )
        for name, kind in inherited.items():
            default = None if name in annotated else _other_default(cls, name)
            if default is not None:
                annotated = {**annotated, name: kind}
                setattr(cls, name, default)
        cls.__annotations__ = annotated
        dataclass(kw_only=True, eq=False)(cls)

    def __post_init__(self) -> None:
        """Refuse a class that joins programs of ours of which one alone would run. BadArgument."""
        ours = [base for base in type(self).__mro__ if "body" in vars(base) and _is_ours(base)]
        for other in ours[1:]:
            if not issubclass(ours[0], other):
                raise self.bad(
                    f"{ours[0].__name__} and {other.__name__} each have a kind of round of their "
                    "own, of which one alone would take place; take one of the two"
                )

    def build(self) -> ModelProto:
        """Record the program, as `Module.build`; refuse what it would ignore.

        Raises:
            BadArgument: an argument that is wrong, or that no step of the program reads; or two
                bases of which one replaces a step of the other, or which mean different things by
                one argument.
            RecordingError: as `Module.build`.
        """
        try:
            recorded = super().build()
        except BadArgument:
            raise  # its own words say more
        except RecordingError:
            self._refuse_what_is_ignored()
            raise
        self._refuse_what_is_ignored()
        return recorded

    def _refuse_what_is_ignored(self) -> None:
        program = type(self)
        lost = steps.dropped(program)
        if lost is not None:
            taken, idle = lost.by.__name__, lost.owner.__name__
            ignored = " and ".join(lost.arguments)
            raise self.bad(
                f"{taken} and {idle} do not go together: with the steps that {taken} replaces, "
                f"{idle}.{lost.step} would never run"
                + (f", and {ignored} would have no effect" if ignored else "")
                + "; leave one of them out"
            )
        for name, one, other in steps.two_meanings(program):
            raise self.bad(
                f"{one.__name__} and {other.__name__} do not go together: each has an argument "
                f"{name} of its own, with another meaning; leave one of them out"
            )
        for name in steps.unread(self):
            raise self.bad(
                f"{name}={getattr(self, name)!r:.60} would have no effect: no step of this program "
                "reads it; leave it out"
            )

    def bad(self, what: str) -> BadArgument:
        """Return the error for an argument; `what` says which, and what it has to be.

        Where a class of the author's joins several programs, they are named: none of them alone is
        at fault.
        """
        return BadArgument(what + _joined(type(self)), self.name)

    def require(self, name: str, good: bool, wanted: str) -> None:
        """Raise BadArgument unless an argument is as it has to be."""
        if not good:
            shown = repr(getattr(self, name))
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise self.bad(f"{name}={shown} has to be {wanted}")

    def require_counts(self, **least: int) -> None:
        """Check that arguments are integers of at least so much."""
        for name, lowest in least.items():
            value = getattr(self, name)
            good = type(value) is int and value >= lowest
            self.require(name, good, f"an integer of at least {lowest}")

    def require_numbers(self, *names: str) -> None:
        """Check that arguments are finite numbers above 0."""
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self.require(name, number and 0 < value < math.inf, "a number above 0")

    def require_not_negative(self, *names: str) -> None:
        """Check that arguments are finite numbers of at least 0."""
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self.require(name, number and 0 <= value < math.inf, "a number of at least 0")

    def require_shares(self, *names: str) -> None:
        """Check that arguments are numbers from 0 to below 1."""
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self.require(name, number and 0 <= value < 1, "a number from 0 to below 1")

    def require_one_of(self, name: str, choices: Iterable[str]) -> None:
        """Check that an argument is one of some words."""
        known = tuple(choices)
        self.require(name, getattr(self, name) in known, f"one of {', '.join(known)}")


def enough(asked: int) -> int:
    """Return the default quorum of so many peers: three of four, rounded up, but not all of them.

    So one peer that answers nonsense, refuses, is late or gone costs its answer and not the round.
    Of one peer, it is one.
    """
    return min(-(-3 * asked // 4), max(1, asked - 1))


def cohort_slot(
    name: str, aggregator: type[Aggregator], clients: int, config: Any = None
) -> AggregatorSlot:
    """Return a slot whose aggregator takes an answer of each of so many clients.

    It has settings of its own where `config` gives some, or its default has not the room.
    """
    given = config or aggregator.Config()
    if given.max_contributors < clients:
        given = dataclasses.replace(given, max_contributors=clients)
    elif config is None:
        return AggregatorSlot(name)
    return AggregatorSlot(name, concrete=concrete(aggregator, given))


def bound_slots(*slots: tuple[AggregatorSlot, type[Aggregator]]) -> dict[str, type[Aggregator]]:
    """Return the classes of those slots that have no settings of their own."""
    return {slot.name: cls for slot, cls in slots if slot.concrete is None}


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(f"{__package__}.")


def _joined(cls: type) -> str:
    """Return which programs a class of an author joins; "" where it is one of ours, or has one."""
    for base in cls.__mro__:
        if _is_ours(base):
            break
        parts = [each.__name__ for each in base.__bases__ if issubclass(each, ReadyProgram)]
        if len(parts) > 1:
            return f" ({base.__name__} joins {', '.join(parts[:-1])} and {parts[-1]})"
    return ""


def _other_default(cls: type, name: str) -> Any:
    """Return the default that an argument has by the order of bases, if dataclasses differ.

    They take that of the first base that has the argument, also where it only inherits it;
    attributes are those of the first base that sets them.
    """
    bases = cls.__mro__[1:]
    known = next(base for base in bases if name in getattr(base, "__dataclass_fields__", {}))
    owner = next(base for base in bases if name in inspect.get_annotations(base))
    taken, own = (base.__dataclass_fields__[name] for base in (known, owner))  # type: ignore[attr-defined]
    if taken.default is own.default and taken.default_factory is own.default_factory:
        return None
    if own.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=own.default_factory)
    return dataclasses.field(default=own.default)


def _is_known(cls: type, name: str, value: object) -> bool:
    """Return True for a class variable that is no misspelt argument: a method, what a base has."""
    return (
        name.startswith("_")
        or callable(value)
        or isinstance(value, property | classmethod | staticmethod)
        or any(name in vars(base) for base in cls.__mro__[1:])
        or name in inspect.get_annotations(cls)
    )
