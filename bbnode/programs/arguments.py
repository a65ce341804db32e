"""Arguments of ready programs: given to the constructor, or set in a subclass.

Rule: what a subclass sets is the default of its constructor, so that both ways, and `--arg` of the
command line, mean the same; a name that no argument has is refused, and so are an argument that
nothing reads and a base that would have no effect.

Some arguments are parts (`client=Proximal(0.5)`). The settings of a program's parts are arguments
of it too, by their names: `proximal=0.5` sets that of whatever part has it.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from onnx import ModelProto

from bbnode.components import Aggregator, concrete
from bbnode.dsl import AggregatorSlot, BadArgument, Module, RecordingError
from bbnode.programs import steps
from bbnode.programs.composing import (
    REQUIRED,
    ArgumentChecks,
    RoundPart,
    as_parts,
    bad_argument,
    bringer,
    brought,
    contradiction,
    is_authors,
    is_ours,
    label_of,
    parts_of,
    refuse_unknown,
    set_setting,
    settings_of,
    steps_of,
)


@dataclass(kw_only=True, eq=False, init=False)
class ReadyProgram(ArgumentChecks, Module):
    """A Module whose arguments are fields.

    ```python
    class Mine(FederatedTraining):
        model = "model.onnx"
        clients = 8
    ```

    Values that a subclass sets need no annotation: they are those of the fields that it inherits,
    or settings of its parts. Its own fields have one.

    Attributes:
        PARTS: the arguments that are parts, outermost first.
    """

    PARTS: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = {
            field.name: field.type
            for base in reversed(cls.__mro__[1:])
            if dataclasses.is_dataclass(base)
            for field in dataclasses.fields(base)
        }
        annotated = inspect.get_annotations(cls)
        for slot in cls.PARTS:
            if slot in vars(cls):
                setattr(cls, slot, as_parts(cls, slot, vars(cls)[slot]))
            elif len(cls.__bases__) > 1:
                setattr(cls, slot, brought(cls, slot))
        for name in settings_of(cls) & vars(cls).keys():
            value = vars(cls)[name]
            if isinstance(value, property):
                if not is_ours(cls):
                    raise bad_argument(cls, f"{name} is a setting of a part; give it a value")
                continue
            delattr(cls, name)
            set_setting(cls, name, value.default if isinstance(value, dataclasses.Field) else value)
            annotated = {each: kind for each, kind in annotated.items() if each != name}
        for name, value in list(vars(cls).items()):
            if name in inherited and name not in annotated:
                annotated = {**annotated, name: inherited[name]}
                if type(value).__hash__ is None:  # a list, a model: dataclasses want a factory
                    setattr(cls, name, dataclasses.field(default_factory=partial(copy, value)))
            elif not _is_known(cls, name, value):
                refuse_unknown(cls, name)
        for name, kind in inherited.items():
            default = None if name in annotated else _other_default(cls, name)
            if default is not None:
                annotated = {**annotated, name: kind}
                setattr(cls, name, default)
        cls.__annotations__ = annotated
        if "__init__" not in vars(cls):
            # Else `@dataclass` would make one that knows no settings of parts.
            cls.__init__ = ReadyProgram.__init__  # type: ignore[method-assign]
        dataclass(kw_only=True, eq=False)(cls)
        fields = dataclasses.fields(cls)
        keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        parameters = [keyword(each.name, default=_default(each)) for each in fields]
        if cls.PARTS:
            parameters.append(inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD))
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, **arguments: Any) -> None:
        """Take arguments by name.

        Raises BadArgument for one that there is not, and for parts that contradict each other.
        """
        for field in dataclasses.fields(self):
            value = arguments.pop(field.name, _default(field))
            if value is inspect.Parameter.empty:
                raise self.bad(f"{field.name} is missing")
            if field.name in self.PARTS:
                value = as_parts(type(self), field.name, value)
            object.__setattr__(self, field.name, value)
        for name, value in arguments.items():
            if name not in settings_of(self):
                refuse_unknown(self, name)
            set_setting(self, name, value)
        self._refuse_contradictions()
        self._settle()
        self.__post_init__()

    def __getattr__(self, name: str) -> Any:
        """Return a setting of a part."""
        for part in parts_of(self) if not name.startswith("__") else ():
            if name in part.settings():
                return getattr(part, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, or a setting of a part."""
        if name not in type(self).__dataclass_fields__ and name in settings_of(self):
            set_setting(self, name, value)
        else:
            object.__setattr__(self, name, value)

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """Return the names of all arguments with their defaults, settings of parts among them."""
        own = {each.name: _default(each) for each in dataclasses.fields(cls)}
        parts = parts_of(cls)
        return own | {name: getattr(each, name) for each in parts for name in each.settings()}

    def _refuse_contradictions(self) -> None:
        found = contradiction(parts_of(self))
        if found is not None:
            one, other, why = (*(label_of(type(self), each) for each in found[:2]), found[2])
            raise self.bad(f"{one} and {other} do not go together: {why}; leave one of them out")

    def _settle(self) -> None:
        """Set what the author leaves to the parts: to what one of these wishes, or a default."""

    def __post_init__(self) -> None:
        """Refuse a class that joins programs of ours of which one alone would run. BadArgument."""
        ours = [base for base in type(self).__mro__ if "body" in vars(base) and is_ours(base)]
        for other in ours[1:]:
            if not issubclass(ours[0], other):
                raise self.bad(
                    f"{ours[0].__name__} and {other.__name__} each have a kind of round of their "
                    "own, of which one alone would take place; take one of the two"
                )

    def build(self) -> ModelProto:
        """Record the program, as `Module.build`; refuse what it would ignore.

        Raises:
            BadArgument: an argument that is wrong, or that no step of the program reads; two bases
                of which one replaces a step of the other, or which mean different things by one
                argument; or a part whose step an author's class replaces unasked.
            RecordingError: as `Module.build`.
        """
        # The steps of parts that are recorded.
        ran: set[tuple[type[RoundPart], str]] = set()
        object.__setattr__(self, "_ran", ran)
        try:
            recorded = super().build()
        except BadArgument:
            raise  # its own words say more
        except RecordingError:
            self._refuse_what_is_ignored()
            raise
        finally:
            del self._ran
        self._refuse_what_is_ignored()
        self._refuse_parts_that_never_ran(ran)
        return recorded

    def _refuse_parts_that_never_ran(self, ran: set[tuple[type[RoundPart], str]]) -> None:
        for part, name in itertools.product(parts_of(self), REQUIRED):
            if not part.has(name) or (type(part), name) in ran:
                continue
            # Who knows the part has replaced its step knowingly.
            knowing = bringer(type(self), part)
            own = (base for base in type(self).__mro__ if is_authors(base) and steps_of(base))
            by = next((each for each in own if not (knowing and issubclass(each, knowing))), None)
            if by is not None:
                raise self.bad(
                    f"{by.__name__} has its own of {steps_of(by)}, with which the {name} of "
                    f"{label_of(type(self), part)} never takes place; call super() there, or leave "
                    "one of the two out"
                )

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
        return bad_argument(self, what)


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


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    missing = field.default is dataclasses.MISSING
    return inspect.Parameter.empty if missing else field.default


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
