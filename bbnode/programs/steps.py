"""The steps of a ready program that run, found in its classes before it is recorded.

Rule: what a base says, a program does. A method that a base's own round calls is called in the
round of each subclass too, unless a subclass that knows the base replaced it; and an argument that
nothing reads is refused by name.

Methods are read, not run: a step reaches each attribute that its code names. `super().step` is the
next one behind it in the order of bases, whatever else is called.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from bbnode.dsl import Module

Step: TypeAlias = tuple[type, str]  # the class that defines it, and its name

# What runs of a program: its making, its recording, and what binds its slots.
_ROOTS = ("__post_init__", "body", "bootstrap", "bindings")
# `check` refuses arguments, and so reads all of them; the others are each Module's own.
_NOT_STEPS = frozenset({"check", "name", "home"})
# Instructions that take an attribute of what was loaded before them.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER")
# Instructions that load a variable of a method, and no constant or global, whatever it is called.
_VARIABLES = ("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_")


class Dropped(NamedTuple):
    """A step of a base that never runs, and the base that took its place.

    `arguments` are those of the former that nothing reads then.
    """

    owner: type
    step: str
    by: type
    arguments: tuple[str, ...]


def dropped(program: type) -> Dropped | None:
    """Return a step of one of its bases that a program would leave out unasked; None: all run."""
    _walked.cache_clear()  # a method may have been replaced since
    order = _order(program)
    runs = _reached(order)
    for base in order[1:]:
        for owner, step in sorted(_reached(_order(base)) - runs, key=_telling):
            if any(_replaces(each, (owner, step)) for each in order if each is not owner):
                continue
            others = [each for each in order if not issubclass(owner, each) and each is not program]
            without = (
                each
                for each in others
                if (owner, step) in _reached([one for one in order if one is not each])
            )
            by = next(without, others[0] if others else program)
            own = inspect.get_annotations(owner)
            unread = [each for each in _fields(owner) if each in own and each not in _named(order)]
            return Dropped(owner, step, by, tuple(unread))
    return None


def unread(program: Module) -> Iterator[str]:
    """Yield the names of arguments with another value than the default that no step reads.

    An author's class that replaces the step which reads one has done so knowingly.
    """
    order = _order(type(program))
    if any(_is_opaque(*step) for step in _reached(order)):
        return  # an author's method may read any of them
    named = frozenset().union(*(_named(_order(base)) for base in order))
    parts = getattr(program, "PARTS", ())  # which say themselves whether they act
    for each in _fields(type(program)).values():
        if each.name in named or each.name in parts:
            continue
        if getattr(program, each.name) != _first_default(order, each):
            yield each.name
    if "train" in parts:
        train: Any = vars(program)["train"]
        for name, default in train.settings().items():
            if name not in named and getattr(train, name) != default:
                yield name


def two_meanings(program: type) -> Iterator[tuple[str, type, type]]:
    """Yield arguments that two bases declare apart, with defaults of their own.

    One that a common base declares means the same to both.
    """
    order = _order(program)
    for each in _fields(program).values():
        having = [base for base in order if each.name in _fields(base)]
        first = [
            base
            for base in having
            if not any(other is not base and issubclass(base, other) for other in having)
        ]
        defaults = [_default(_fields(base)[each.name]) for base in first]
        for base, default in zip(first[1:], defaults[1:], strict=True):
            if default != defaults[0]:
                yield each.name, first[0], base


def _order(program: type) -> list[type]:
    """Return the bases whose steps are a program's, in the order in which they are looked up."""
    return [each for each in program.__mro__ if each not in Module.__mro__]


def _telling(step: Step) -> tuple[bool, bool, str]:
    """Order steps by how much they say: public methods, then private ones, then attributes."""
    owner, name = step
    return not any(_functions(vars(owner)[name])), name.startswith("_"), name


def _replaces(base: type, step: Step) -> bool:
    """Return True if a base, which knows the class that defines a step, took it out itself."""
    order = _order(base)
    return issubclass(base, step[0]) and step in _reached(order[1:]) and step not in _reached(order)


def _reached(order: Sequence[type]) -> frozenset[Step]:
    return _walked(tuple(order))[0]


def _named(order: Sequence[type]) -> frozenset[str]:
    return _walked(tuple(order))[1]


@lru_cache(maxsize=512)
def _walked(order: tuple[type, ...]) -> tuple[frozenset[Step], frozenset[str]]:
    """Return the steps that run with this order of bases, and all names that their code has."""
    found: set[Step] = set()
    named: set[str] = set()
    left = [(0, name) for name in _ROOTS]
    while left:
        begin, name = left.pop()
        at = next((at for at in range(begin, len(order)) if name in vars(order[at])), None)
        if at is None or name in _NOT_STEPS or (name.startswith("__") and name not in _ROOTS):
            continue
        if name in _fields(order[at]) or (order[at], name) in found:
            continue
        found.add((order[at], name))
        for function in _functions(vars(order[at])[name]):
            names = _names(function.__code__) | _listed(function)
            named |= names
            left += ((0, each) for each in names)
            if "super" in names:
                left += ((at + 1, each) for each in names)
            # `FedProx.local_training(self, …)`
            called = [at for at, base in enumerate(order) if base.__name__ in names]
            left += ((at, each) for at in called for each in names)
    return frozenset(found), frozenset(named)


def _is_opaque(owner: type, name: str) -> bool:
    """Return True for a method from outside of this package that hands its object on."""
    ours = __name__.partition(".")[0]
    return any(
        each.__module__.partition(".")[0] != ours and _hands_itself_on(each)
        for each in _functions(vars(owner)[name])
    )


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of a method or property, and those of its file that it calls.

    None for any other attribute.
    """
    parts: tuple[Any, ...] = (getattr(value, "__func__", value),)
    if isinstance(value, property):
        parts = (value.fget, value.fset)
    elif isinstance(value, cached_property):
        parts = (value.func,)
    left = [each for each in map(inspect.unwrap, filter(callable, parts)) if _is_function(each)]
    seen: set[FunctionType] = set()
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        inner = [function.__globals__.get(name) for name in _names(function.__code__)]
        cells = [each.cell_contents for each in function.__closure__ or () if _is_full(each)]
        left += [
            each
            for each in (*inner, *cells)
            if _is_function(each) and each.__module__ == function.__module__
        ]


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a class that is being made
        return False


def _hands_itself_on(function: FunctionType) -> bool:
    """Return True if a method gives its object away as a whole: to `getattr`, a helper, a list."""
    code = function.__code__
    if not code.co_argcount:
        return False
    own, codes = code.co_varnames[0], [code]
    for each in codes:
        codes += (inner for inner in each.co_consts if isinstance(inner, CodeType))
        steps = [*dis.get_instructions(each)]
        for step, after in itertools.pairwise(steps):
            if not step.opname.startswith(_VARIABLES):
                continue
            # Some instructions load two names, of which the last one is on top.
            *others, top = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if own in others or (top == own and not after.opname.startswith(_ATTRIBUTES)):
                return True
    return False


def _is_function(value: object) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names in a method, also those that it looks up by a text."""
    found = {*code.co_names}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names(each)
        elif isinstance(each, str) and each.isidentifier():
            found.add(each)
    return frozenset(found)


def _listed(function: FunctionType) -> frozenset[str]:
    """Return the names in tuples of arguments that a method goes through, as `_PASSED` is one."""
    found: set[str] = set()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, tuple) and all(
            isinstance(each, str | dataclasses.Field) for each in value
        ):
            found |= {each if isinstance(each, str) else each.name for each in value}
    return frozenset(found)


def _fields(base: type) -> dict[str, dataclasses.Field[Any]]:
    if not dataclasses.is_dataclass(base):
        return {}
    return {each.name: each for each in dataclasses.fields(base)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _first_default(order: Sequence[type], field: dataclasses.Field[Any]) -> Any:
    """Return the default of the base that first declared an argument."""
    (*_, first) = (base for base in order if field.name in _fields(base))
    return _default(_fields(first)[field.name])
