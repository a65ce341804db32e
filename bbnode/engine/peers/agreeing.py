"""The comparison of what nodes of one process mean by their data, when they are connected.

Rule: as daemons do, by the same references: the node that keeps the reference of a class compares
each node of it that is connected, has it take the reference, and holds one that differs. It happens
before either acts on the connection; data that can't be read are compared in nothing, and their ops
say why. Between two nodes of a class that no other keeps, the reference of the one that
was used stands, else that of the older one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from bbnode.components.contracts import ComponentError, DataSource
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.engine.node import Node
from bbnode.engine.peers.references import References
from bbnode.engine.planning.data_slots import DataSlots, declared_schemas


class LocalAgreement:
    """The references that one node keeps, through all of its lives, and whom it has compared."""

    __slots__ = ("_agreed", "_node", "age", "references", "slots")

    def __init__(
        self,
        slots: DataSlots,
        said: Mapping[str, SharedSchema],
        node: Callable[[], Node | None],
        age: int,
    ) -> None:
        """Create it for a node of a program with these slots.

        Args:
            said: what the program says of its data, by slot.
            node: returns the engine's node of its present life; None while it is down.
            age: the least is the oldest.
        """
        self.slots = slots
        self.references = References(declared_schemas(said, slots), slots.measured)
        self.age = age
        self._node = node
        self._agreed: dict[int, LocalAgreement] = {}

    def meet(self, other: LocalAgreement) -> None:
        """Compare the data of two nodes that have just been connected."""
        for keeper, peer in ((self, other), (other, self)):
            node, theirs = keeper._node(), peer._node()
            if node is None or theirs is None:
                continue
            kept = keeper.slots.kept_by(node.classes)
            classes = [each for each in theirs.classes if each in kept]
            classes = [each for each in classes if keeper.slots.groups.get(each)]
            if classes and (not keeper._is_like(classes) or keeper._stands(peer)):
                keeper._compare(peer, classes)

    def _is_like(self, classes: Sequence[str]) -> bool:
        """Return True where peers of these classes compare among themselves."""
        return any(self.slots.keepers[name] == name for name in classes)

    def _stands(self, other: LocalAgreement) -> bool:
        return (not self._is_used(), self.age) < (not other._is_used(), other.age)

    def _is_used(self) -> bool:
        node = self._node()
        return node is not None and node.counters().get("executions", 0) > 0

    def _own(self, classes: Sequence[str]) -> dict[str, str]:
        """Return the data slots of the node among the groups of these classes."""
        node = self._node()
        wanted = {group for name in classes for group in self.slots.groups[name].values()}
        return {
            slot: group
            for slot, group in self.slots.of(() if node is None else node.classes).items()
            if group in wanted and node and isinstance(node.component(slot), DataSource)
        }

    def _compare(self, peer: LocalAgreement, classes: Sequence[str]) -> None:
        node, theirs = self._node(), peer._node()
        if node is None or theirs is None:
            return
        grows = not self._is_used()
        own, groups = self._own(classes), peer._own(classes)
        if own:
            self.references.take(own, _schemas(node, own), grows=grows)
            _adopt(node, own, self.references)
        verdict = self.references.take(groups, _schemas(theirs, groups), grows=grows)
        _adopt(theirs, groups, self.references)
        self._agreed.pop(peer.age, None)
        if verdict.refused:
            node.hold_peer(theirs.peer_id, classes, verdict.refused)
            if self._is_like(classes):
                theirs.hold_peer(node.peer_id, classes, f"this node's {verdict.refused}")
            return
        node.hold_peer(theirs.peer_id, (), "")
        if verdict.grew:
            _adopt(node, own, self.references)
            for each in self._agreed.values():
                if (before := each._node()) is not None:
                    _adopt(before, each._own(classes), self.references)
        self._agreed[peer.age] = peer
        if self._is_like(classes):
            peer._follow(self, classes)

    def _follow(self, other: LocalAgreement, classes: Sequence[str]) -> None:
        """Keep the references of a like node; those that agreed with this one follow it further."""
        moved = False
        for group, reference in other.references.kept.items():
            if self.references.kept.get(group) != reference:
                self.references.put(group, reference)
                moved = True
        for each in [*self._agreed.values()] if moved else ():
            if each is not other:
                self._compare(each, classes)


def _schemas(node: Node, slots: Mapping[str, str]) -> dict[str, SharedSchema | None]:
    found: dict[str, SharedSchema | None] = {}
    for slot in slots:
        found[slot] = None
        with contextlib.suppress(ComponentError):
            found[slot] = node.component(slot).own_schema()
    return found


def _adopt(node: Node, slots: Mapping[str, str], references: References) -> None:
    for slot, group in slots.items():
        reference = references.kept.get(group)
        if reference is not None:
            with contextlib.suppress(ComponentError):  # its ops say so, and the peer is held
                node.component(slot).adopt(reference)
