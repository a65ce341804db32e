"""The history of each value on its way through the passes.

Rule: off by default, since it reads every value after every pass. Values of the root and of the
partition mains are identified by their name, which partitioning keeps; those of other functions
by `<function>::<value>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bbnode.compiler.unit import CompilationUnit
from bbnode.ir import keys
from bbnode.ir.graph import Function


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEvent:
    """One change: the pass ("" = as recorded), and the new state in words."""

    pass_name: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """The state of a value between two passes."""

    made_by: str
    type: str
    home: str

    def since(self, before: _Fact | None) -> Iterator[str]:
        """Yield the differences from `before`, in words."""
        if before is None or before.made_by != self.made_by:
            yield f"made by {self.made_by}" if self.made_by else "an input of the function"
        if self.type and (before is None or before.type != self.type):
            yield f"type {self.type}"
        if self.home and (before is None or before.home != self.home):
            yield f"lives on {self.home}"


@dataclass(slots=True)
class ValueHistory:
    """Traces values through the passes of one compile."""

    _facts: dict[str, _Fact] = field(default_factory=dict)
    _events: dict[str, list[ValueEvent]] = field(default_factory=dict)

    def observe(self, unit: CompilationUnit, pass_name: str) -> None:
        """Record the changes since the last call; `pass_name` is "" for the recorded program."""
        facts: dict[str, _Fact] = {}
        for prefix, function in _scopes(unit):
            for name, fact in _facts(function):
                facts[prefix + name] = fact
        for name, fact in facts.items():
            for what in fact.since(self._facts.get(name)):
                self._add(name, pass_name, what)
        for name in self._facts.keys() - facts.keys():
            self._add(name, pass_name, "gone: its op was replaced or runs inside of a graph")
        self._facts = facts

    def result(self) -> dict[str, tuple[ValueEvent, ...]]:
        """Return the history of each value that ever existed, in order."""
        return {name: tuple(events) for name, events in self._events.items()}

    def _add(self, name: str, pass_name: str, what: str) -> None:
        self._events.setdefault(name, []).append(ValueEvent(pass_name=pass_name, what=what))


def _scopes(unit: CompilationUnit) -> Iterator[tuple[str, Function]]:
    mains = len(unit.partitions)
    for index, function in enumerate(unit.bodies()):
        is_main = (
            index < mains
            or function.metadata.get(keys.TARGET_KEY) is not None
            or function.metadata.get(keys.ROOT_KEY) is not None
        )
        yield "" if is_main else f"{function.name}::", function


def _facts(function: Function) -> Iterator[tuple[str, _Fact]]:
    types = {name: node.name for name, node in function.kinds().items()}
    home = function.metadata.get(keys.HOME_KEY) or ""
    for name in function.inputs:
        yield name, _Fact(made_by="", type=types.get(name, ""), home=home)
    for node in function.nodes:
        where = node.metadata.get(keys.HOME_CLASS_KEY) or ""
        for name in node.outputs:
            if name:
                yield name, _Fact(made_by=node.name, type=types.get(name, ""), home=where)
