"""Who is there and who is connected with whom.

Rule: both directions between two nodes come into being together and go up and down together.
A connection is made when somebody wants it, nothing cuts it and both nodes run; both nodes
hear of it, as from a transport, with the other's classes and address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bbnode.ir.peer import PeerId
from bbnode.sim.errors import UnknownSimNode
from bbnode.sim.models import Link, Wire
from bbnode.sim.node import SimNode
from bbnode.sim.trace import Trace


class Topology:
    """Nodes by name and the wires between them; the base of `Network`."""

    def __init__(self, seed: int, link: Link, trace: Trace) -> None:
        self.seed = seed
        self.trace = trace
        self.now_ns = 0
        self._link = link
        self._nodes: dict[str, SimNode] = {}

    def __getitem__(self, name: str) -> SimNode:
        """The node of that name; UnknownSimNode when there is none."""
        found = self._nodes.get(name)
        if found is None:
            known = ", ".join(list(self._nodes)[:10]) or "none"
            raise UnknownSimNode(f"there is no node {name!r}; there are: {known}")
        return found

    @property
    def nodes(self) -> list[SimNode]:
        """All nodes, in the order in which they were added."""
        return list(self._nodes.values())

    @staticmethod
    def peer_id(name: str) -> PeerId:
        """The PeerId of the node of that name, be it there already or not."""
        return PeerId.from_seed(name)

    def find(self, node: SimNode | str) -> SimNode:
        """The node itself, or the one of that name; UnknownSimNode when there is none."""
        if isinstance(node, str):
            return self[node]
        if self._nodes.get(node.name) is not node:
            raise UnknownSimNode(f"the node {node.name!r} belongs to another network")
        return node

    # -- links -------------------------------------------------------------------------------

    def connect(self, one: SimNode | str, other: SimNode | str, link: Link | None = None) -> None:
        """Connect two nodes, and again whenever that is possible after a fault."""
        there, back = self.pair(one, other)
        there.wanted = back.wanted = True
        if link is not None:
            there.link = back.link = link
        self.establish(there)

    def disconnect(self, one: SimNode | str, other: SimNode | str) -> None:
        """End the connection of two nodes, for good."""
        there, back = self.pair(one, other)
        there.wanted = back.wanted = False
        self.sever(there, "disconnected on purpose")

    def set_link(self, source: SimNode | str, target: SimNode | str, link: Link) -> None:
        """Change one direction of a link; what is under way arrives as it would have."""
        self.pair(source, target)[0].link = link

    def set_links(self, link: Link) -> None:
        """Change all links, those to come as well; what is under way arrives as it would have."""
        self._link = link
        for node in self._nodes.values():
            for wire in node.wires.values():
                wire.link = link

    def cut(self, one: SimNode | str, other: SimNode | str) -> None:
        """Break the connection of two nodes and allow none until `heal`."""
        there, back = self.pair(one, other)
        there.cut = back.cut = True
        self.sever(there, "the network was cut")

    def heal(self, one: SimNode | str, other: SimNode | str) -> None:
        """Allow connections of two nodes again; wanted ones come back at once."""
        there, back = self.pair(one, other)
        there.cut = back.cut = False
        self.establish(there)

    def partition(self, *groups: Iterable[SimNode | str]) -> None:
        """Cut every node of a group from all nodes of the other groups."""
        for one, other in self._across(groups):
            self.cut(one, other)

    def heal_all(self) -> None:
        """Undo all cuts."""
        for node in self._nodes.values():
            for wire in list(node.wires.values()):
                if wire.cut:
                    self.heal(node, wire.target)

    # -- wires -------------------------------------------------------------------------------

    def pair(self, one: SimNode | str, other: SimNode | str) -> tuple[Wire, Wire]:
        """Both directions between two nodes."""
        a, b = self.find(one), self.find(other)
        if a is b:
            raise UnknownSimNode(f"{a.name} needs no link with itself; name two nodes")
        if b.peer_id not in a.wires:
            a.wires[b.peer_id] = Wire(a, b, self._link, self.seed)
            b.wires[a.peer_id] = Wire(b, a, self._link, self.seed)
        return a.wires[b.peer_id], b.wires[a.peer_id]

    def establish(self, wire: Wire) -> None:
        """Make a connection that is wanted, if it is possible."""
        a, b = wire.source, wire.target
        if wire.up or wire.cut or not wire.wanted or not (a.is_up and b.is_up):
            return
        self.trace.note(self.now_ns, a.name, f"connect {b.name}")
        for each in self.pair(a, b):
            each.up = True
            each.session += 1
        a.node.peer_connected(b.peer_id, b.classes, (b.address,))
        b.node.peer_connected(a.peer_id, a.classes, (a.address,))

    def sever(self, wire: Wire, reason: str) -> None:
        """End a connection; both sides hear of it, and what is under way is lost."""
        if not wire.up:
            return
        a, b = wire.source, wire.target
        self.trace.note(self.now_ns, a.name, f"disconnect {b.name}")
        for each in self.pair(a, b):
            each.up = False
        a.node.peer_disconnected(b.peer_id, reason)
        b.node.peer_disconnected(a.peer_id, reason)

    def _across(
        self, groups: Iterable[Iterable[SimNode | str]]
    ) -> Iterator[tuple[SimNode, SimNode]]:
        found = [[self.find(node) for node in group] for group in groups]
        for index, group in enumerate(found):
            for later in found[index + 1 :]:
                for one in group:
                    for other in later:
                        yield one, other
