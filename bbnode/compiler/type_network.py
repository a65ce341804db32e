"""Values that have to have one type, and what is known of it.

Rule: a union-find over values; each class of values holds the narrowest type that all its
constraints allow. A type outside our lattice (an ONNX sequence, a tensor of strings) marks its
class as foreign: such values exist inside ONNX graphs and are left alone.
"""

from __future__ import annotations

from bbnode.ir import types
from bbnode.ir.types import TypeNode


class Conflict(Exception):
    """Two constraints on one value exclude each other."""

    def __init__(self, known: TypeNode, wanted: TypeNode) -> None:
        super().__init__(f"{known.name} is not {wanted.name}")
        self.known = known
        self.wanted = wanted


class TypeNetwork:
    """Types of values that stand for each other; values are numbered from 0."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._type: list[TypeNode] = []
        self._foreign: list[bool] = []
        self.changes = 0  # grows whenever a type narrows

    def add(self, kind: TypeNode, *, foreign: bool = False) -> int:
        """A new value of a declared type."""
        self._parent.append(len(self._parent))
        self._type.append(kind)
        self._foreign.append(foreign)
        return len(self._parent) - 1

    def find(self, value: int) -> int:
        """The class of a value."""
        parent = self._parent
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    def type_of(self, value: int) -> TypeNode:
        """What is known of a value's type."""
        return self._type[self.find(value)]

    def is_foreign(self, value: int) -> bool:
        """Whether the value is of a type outside our lattice."""
        return self._foreign[self.find(value)]

    def make_foreign(self, value: int) -> None:
        """Note that the value is of a type outside our lattice."""
        self._foreign[self.find(value)] = True

    def narrow(self, value: int, kind: TypeNode) -> None:
        """The value is a `kind`; Conflict when it can't be."""
        root = self.find(value)
        if self._foreign[root] or kind is types.ANY:
            return
        met = types.meet(self._type[root], kind)
        if met is None:
            raise Conflict(self._type[root], kind)
        if met is not self._type[root]:
            self._type[root] = met
            self.changes += 1

    def unite(self, a: int, b: int) -> None:
        """Both values have one type; Conflict when they can't."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        foreign = self._foreign[a] or self._foreign[b]
        met = types.meet(self._type[a], self._type[b])
        if met is None and not foreign:
            raise Conflict(self._type[a], self._type[b])
        keep, drop = min(a, b), max(a, b)
        self._parent[drop] = keep
        self._foreign[keep] = foreign
        before = self._type[keep]
        self._type[keep] = met or before
        self.changes += 1
