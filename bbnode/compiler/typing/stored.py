"""Types of stored values: in components (`storage`), and under a name in a node (`Hold.*`,
`Serialize.*`).

Rule: a name has one type in the whole program, since a node may play several of its classes, and
all of these share what the node stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bbnode.compiler.analysis.slots import component_of, stored_at
from bbnode.compiler.errors import NothingStored, StoredTypesDiffer, TypeConstraintFailed, Where
from bbnode.compiler.typing.constraints import STORE_NAMES, Conflict, FunctionTypes, TypeNetwork
from bbnode.compiler.unit import SlotBinding
from bbnode.ir import keys, opset
from bbnode.ir.graph import OpNode, is_role
from bbnode.ir.types import TypeNode

_PUTS = {"Hold.Flush": "Hold.Stash", "Serialize.Dequeue": "Serialize.Enqueue"}


def unite_stored(functions: Iterable[FunctionTypes], network: TypeNetwork) -> None:
    """Unite the types of the values stored and taken under each name.

    Raises StoredTypesDiffer, and NothingStored if a program takes but never stores.
    """
    puts: dict[tuple[str, str], tuple[OpNode, int]] = {}
    takes: list[tuple[str, OpNode, int]] = []
    for one in functions:
        for node in one.stores:
            name = _name(node)
            if node.op_type in _PUTS:
                takes.append((name, node, one.id_at(node.outputs)))
                continue
            value = one.id_at(node.inputs)
            first, known = puts.setdefault((node.op_type, name), (node, value))
            _unite(network, name, (first, known), (node, value))
    for name, node, value in takes:
        put = puts.get((_PUTS[node.op_type], name))
        if put is None:
            raise NothingStored(
                op=node.name,
                op_type=node.op_type,
                name=name,
                puts=_PUTS[node.op_type],
                where=Where.of(node),
            )
        _unite(network, name, put, (node, value))


def _name(node: OpNode) -> str:
    name = node.attr(STORE_NAMES[node.op_type], b"")
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _unite(
    network: TypeNetwork, name: str, put: tuple[OpNode, int], other: tuple[OpNode, int]
) -> None:
    try:
        network.unite(put[1], other[1])
    except Conflict as conflict:
        raise StoredTypesDiffer(
            op=other[0].name,
            kind=conflict.wanted,
            name=name,
            other_op=put[0].name,
            other_kind=conflict.known,
            other_line=put[0].source_line,
            where=Where.of(other[0]),
        ) from conflict


# --- storage of components ----------------------------------------------------------------


class Choices:
    """Values for which a component offers several types: the program's choice, else the first."""

    def __init__(
        self, functions: Iterable[FunctionTypes], bound: Mapping[str, SlotBinding]
    ) -> None:
        self._values = [
            (one, node, name, choices)
            for one in functions
            for node in one.function.nodes
            if keys.SLOT_KEY in node.metadata and is_role(node)
            for name, choices in _choices(node, bound)
        ]

    def settle(self, network: TypeNetwork) -> None:
        """Narrow each read value that is still open to the first type offered."""
        unread = {one: one.unread() for one, *_ in self._values}
        for one, _, name, choices in self._values:
            number = one.id_of(name)
            if name in unread[one]:
                continue  # its type does not matter: nothing reads it
            if not network.is_foreign(number) and not network.type_of(number).is_leaf:
                network.narrow(number, choices[0])

    def check(self, network: TypeNetwork) -> None:
        """Raise TypeConstraintFailed if the program uses none of the offered types."""
        for one, node, name, choices in self._values:
            kind = network.type_of(one.id_of(name))
            if kind.is_leaf and kind not in choices:
                listed = " or ".join(choice.name for choice in choices)
                raise TypeConstraintFailed(
                    op=node.name,
                    detail=f"{name!r} is taken as {kind.name}; its component gives {listed}",
                    where=Where.of(node),
                )


def _choices(
    node: OpNode, bound: Mapping[str, SlotBinding]
) -> Iterator[tuple[str, tuple[TypeNode, ...]]]:
    component = component_of(node, bound)
    storage = {} if component is None else component.storage
    if not any(isinstance(kinds, tuple) for kinds in storage.values()):
        return
    spec = opset.lookup_op(node.domain, node.op_type)
    if spec is None:
        return
    for names, ports in ((node.inputs, spec.inputs), (node.outputs, spec.outputs)):
        for port, name in zip(ports, names, strict=False):
            choices = stored_at(node, port, storage)
            if name and isinstance(choices, tuple):
                yield name, choices
