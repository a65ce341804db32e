"""Random programs with all kinds of ops: `random_programs.py` and what joins, loops and looks up.

Rule: what several sends deliver to one port is read by several executions, on which nothing may
depend that only one of them could own; so the scope of such a port counts as running often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bbnode.dsl import AggregatorSlot, CodecSlot, IndexSlot, LoopStep, peer_lists
from bbnode.dsl.core.graph import Output
from tests.compiler.fuzz.random_programs import VECTOR, Action, Recording, Scope, binary

MAX_JOINED = 3  # each send to a port runs all that follows from it once more
DEADLINE_S = 60.0


@dataclass
class Port:
    """A port that further sends may join; `sent`: the size of its value, `source`: a class."""

    name: str
    cls: str
    source: str
    size: int
    scope: Scope


class WideRecording(Recording):
    """Records every kind of op whose outcome the oracle knows."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.open_ports: list[Port] = []
        self.joined = 0
        self.single_peers = True  # whether one peer may stand for a list of peers
        self.starts: dict[int, list[int]] = {}  # scope -> scopes that its sends start

    def actions(self) -> tuple[Action, ...]:
        return (
            *super().actions(),
            self.loop, self.choice, self.send_joinable, self.send_joinable, self.join, self.join,
            self.encode, self.index, self.list_peers, self.collect, self.collect,
        )  # fmt: skip

    def open(self, scope: Scope, cls: str, count: int, received: Output, size: int) -> Scope:
        made = super().open(scope, cls, count, received, size)
        self._started(scope, made)
        return made

    def _started(self, scope: Scope, made: Scope) -> None:
        self.starts.setdefault(self.scopes.index(scope), []).append(self.scopes.index(made))

    def _follows(self, scope: Scope, first: Scope) -> bool:
        """Whether executions of `scope` come of those of `first`."""
        wanted, todo, seen = self.scopes.index(scope), [self.scopes.index(first)], set()
        while todo:
            at = todo.pop()
            if at == wanted:
                return True
            if at not in seen:
                seen.add(at)
                todo += self.starts.get(at, [])
        return False

    def collect(self, scope: Scope) -> None:
        """Sends to some peers, and gathers what each sends back on its own."""
        if not scope.once or scope.runs != 1:
            return  # how many come would depend on more than one execution
        found = self.peers(scope)
        if found is None:
            return
        peers, cls, count = found
        value, size = scope.tensor(self.tape)
        there = self.open(scope, cls, count, self.g.net_out(self.port(), peers, value), size)
        back = self.g.net_out(self.port(), there.senders[-1][0], there.tensors[-1][0])
        scope = self.open(there, scope.cls, 1, back, size)
        scope.once = count == 1
        value, size = scope.tensor(self.tape)
        batch = self.g.collect(value, n=count)
        if self.tape.pick(2):
            self.g.output(self.output_name(), batch)
        slot = AggregatorSlot(f"sum_{self.port()}")
        total, _ = slot.aggregate(self.g, after=slot.contribute_all(self.g, batch))
        made = Scope(scope.cls, 1, True)
        made.tensors.append((total, size))
        self.scopes.append(made)
        self._started(scope, made)

    # -- ONNX's own control flow --------------------------------------------------------------

    def loop(self, scope: Scope) -> None:
        """A Loop that reads values around it, perhaps ends early, and perhaps stacks."""
        (start, size), (other, _) = scope.tensor(self.tape), scope.tensor(self.tape)
        if size != VECTOR:
            return
        compute, tape = self.compute, self.tape
        stops, stacks = tape.pick(2), tape.pick(2)
        trips = stacks + tape.pick(3)

        def body(b: Any, _: Output, value: Output) -> LoopStep:
            made = binary(tape, b, compute, value, other)
            going = None
            if stops:
                total = compute.reduce_sum(b, made, keepdims=False)
                going = compute.greater(b, b.constant(float(tape.pick(20))), total)
            scans = [compute.neg(b, made)] if stacks else []
            return LoopStep(carried=[made], scans=scans, keep_going=going)

        made = compute.loop(self.g, body, start, trip_count=trips)
        scope.tensors.append((made.carried[0], VECTOR))
        if stacks:
            total = compute.reduce_sum(self.g, made.scans[0], axes=[0], keepdims=False)
            scope.tensors.append((total, VECTOR))

    def choice(self, scope: Scope) -> None:
        """An If whose branches hold ops, constants and another If."""
        (a, size_a), (b, size_b) = scope.tensor(self.tape), scope.tensor(self.tape)
        compute, tape = self.compute, self.tape
        total = compute.reduce_sum(self.g, a, keepdims=False)
        is_large = compute.greater(self.g, total, self.g.constant(float(tape.pick(3))))

        def then(g: Any) -> Output:
            made = binary(tape, g, compute, a, b)
            return compute.mul(g, made, g.constant(2.0))

        def otherwise(g: Any) -> Output:
            if not tape.pick(2):
                return binary(tape, g, compute, b, a)
            return compute.if_(g, is_large, lambda _: a, lambda h: binary(tape, h, compute, a, b))

        # `is_large` is false in there, so the inner If never gives `a`, whose size may be less.
        made = compute.if_(self.g, is_large, then, otherwise, after=self.after(scope))
        scope.tensors.append((made, max(size_a, size_b)))

    # -- the wire -----------------------------------------------------------------------------

    def peers_of(self, scope: Scope, cls: str) -> tuple[Output, str, int] | None:
        found = super().peers_of(scope, cls)
        if found is None or self.tape.pick(3):
            return found
        peers, _, count = found
        kind = self.tape.pick(4)
        if kind == 0:
            wanted = 1 + self.tape.pick(count)
            return peer_lists.slice_list(self.g, peers, 0, wanted), cls, wanted
        if kind == 1:
            at = [(-1 - i) % count for i in range(1 + self.tape.pick(count))]
            return peer_lists.gather_list(self.g, peers, at), cls, len(at)
        if kind == 2:
            one = peer_lists.only_one(self.g, peer_lists.slice_list(self.g, peers, count - 1))
            alone = self.single_peers and self.tape.pick(2)
            return one if alone else peer_lists.list_of_one(self.g, one), cls, 1
        parts = [peer_lists.slice_list(self.g, peers, at, at + 1) for at in range(count)]
        return peer_lists.concat_lists(self.g, *reversed(parts)), cls, count

    def list_peers(self, scope: Scope) -> None:
        """Hands out a list of peers, taken apart and joined; of a class that there is."""
        found = self.peers_of(scope, self.tape.choose(self.scopes).cls)
        if found is not None:
            self.g.output(self.output_name(), found[0])

    def call_sender(self, scope: Scope) -> None:
        self.single_peers = False  # the Module takes a list
        super().call_sender(scope)
        self.single_peers = True

    def terms(self, count: int) -> dict[str, Any]:
        return {"quorum": self.tape.pick(count + 1), "deadline": DEADLINE_S * self.tape.pick(2)}

    def send_joinable(self, scope: Scope) -> None:
        """A send to a port that others may join."""
        found = self.peers(scope)
        if found is None:
            return
        peers, cls, count = found
        value, size = scope.tensor(self.tape)
        port = Port(self.port(), cls, scope.cls, size, scope)
        received = self.g.net_out(port.name, peers, value)
        port.scope = self.open(scope, cls, count, received, size)
        port.scope.once = False
        port.scope.senders = [(received.sender, scope.cls, 2)]
        self.open_ports.append(port)
        if self.tape.pick(2):
            self.join(scope)

    def join(self, scope: Scope) -> None:
        """One more send to a port, from the class of the first one; never in a ring."""
        fitting = [
            port for port in self.open_ports
            if port.source == scope.cls and not self._follows(scope, port.scope)
        ]  # fmt: skip
        if not fitting or self.joined == MAX_JOINED:
            return
        port = self.tape.choose(fitting)
        values = [value for value, size in scope.tensors if size == port.size]
        found = self.peers_of(scope, port.cls) if values else None
        if found is None:
            return
        received = self.g.net_out(port.name, found[0], self.tape.choose(values))
        self._started(scope, port.scope)
        self.joined += 1
        if self.tape.pick(2):
            port.scope.tensors.append((received, port.size))

    # -- slots --------------------------------------------------------------------------------

    def encode(self, scope: Scope) -> None:
        """A codec has no state, so that any execution may use it."""
        codec = CodecSlot("codec")
        value, size = scope.tensor(self.tape)
        code = codec.encode(self.g, value, after=self.after(scope))
        scope.tensors.append((code, size))
        if self.tape.pick(2):
            scope.tensors.append((codec.decode(self.g, code), size))

    def index(self, scope: Scope) -> None:
        """An index of one execution: what is added first is found first."""
        name = f"index{self.tape.pick(2)}"
        if not self.claim(scope, name):
            return
        slot = IndexSlot(name)
        for _ in range(1 + self.tape.pick(2)):
            slot.add(self.g, scope.tensor(self.tape)[0])
        found = slot.search(self.g, scope.tensor(self.tape)[0], k=1 + self.tape.pick(3))
        self.g.output(self.output_name(), found)
