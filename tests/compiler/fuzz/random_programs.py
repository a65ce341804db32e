"""Random valid programs, recorded through the DSL.

Rule: what is recorded is a program by the rules of docs/dsl.md and of docs/ir.md, "Executions":
an op combines values of one execution only. A `Scope` is what one execution can read; each
send opens one on the class that it goes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.dsl.core.graph import Output, Request
from tests.compiler.fuzz.tape import Tape

CLASSES = ("alpha", "beta", "gamma")
VECTOR = 3  # lengths of the tensors: this or 1
COMPUTE = "compute"
MAX_SCOPES = 8  # sends multiply: two peers each time

Action = Callable[["Scope"], None]


@dataclass
class Scope:
    """One execution: its class, and what it can read.

    `runs`: on how many peers; `once`: at most once on each of them, so that state of its own
    cannot be mixed with that of another execution.
    """

    cls: str
    runs: int
    once: bool
    tensors: list[tuple[Output, int]] = field(default_factory=list)
    composites: list[tuple[Output, tuple[int, ...]]] = field(default_factory=list)
    triggers: list[Output] = field(default_factory=list)
    senders: list[tuple[Output, str, int]] = field(default_factory=list)  # class, how many
    to_answer: list[tuple[Request, Scope]] = field(default_factory=list)

    def any_value(self, tape: Tape) -> Output:
        values = [value for value, _ in self.tensors] + self.triggers
        return tape.choose(values)

    def tensor(self, tape: Tape) -> tuple[Output, int]:
        return self.tensors[-1 - tape.pick(len(self.tensors))]


class Pure(Module):
    """Only ONNX ops; perhaps around another pure Module."""

    def __init__(self, name: str, tape: list[int], inner: Pure | None) -> None:
        self.name = name
        self.tape = tape
        self.inner = inner

    def body(self, g: Graph) -> None:
        tape = Tape(self.tape)
        compute = BackendSlot(COMPUTE)
        x, y = g.input("x", types.TENSOR_FLOAT), g.input("y")
        values = [x, y]
        for _ in range(1 + tape.pick(3)):
            values.append(binary(tape, g, compute, tape.choose(values), values[-1]))
        if self.inner is not None:
            call = self.inner.call().input("x", values[-1]).input("y", x).build(g)
            values.append(call.output("z"))
        g.output("z", values[-1])


class Stateful(Module):
    """Sets a model, changes it, and reads it."""

    def __init__(self, name: str, slot: str, inner: Pure | None) -> None:
        self.name = name
        self.slot = slot
        self.inner = inner

    def body(self, g: Graph) -> None:
        model = ModelSlot(self.slot)
        x = g.input("x", types.TENSOR_FLOAT)
        model.load_parameters(g, x)
        if self.inner is not None:
            x = self.inner.call().input("x", x).input("y", x).build(g).output("z")
        model.apply_delta(g, x)
        g.output("z", model.params(g, after=x))


class Sender(Module):
    """Sends what it is given; perhaps changes it there, perhaps sends it back first."""

    def __init__(self, name: str, tape: list[int], inner: Pure | None) -> None:
        self.name = name
        self.tape = tape
        self.inner = inner

    def body(self, g: Graph) -> None:
        tape = Tape(self.tape)
        data, peers = g.input("data", types.TENSOR_FLOAT), g.input("peers", types.PEER_ID_VEC)
        there = g.net_out("out", peers, data)
        sender = there.sender
        if tape.pick(2):
            back = g.net_out("back", sender, there)
            there = g.net_out("again", back.sender, back)
            sender = there.sender
        value = there
        if self.inner is not None:
            value = self.inner.call().input("x", value).input("y", there).build(g).output("z")
        g.output("there", value)
        g.output("who", sender)


def binary(tape: Tape, g: Graph, compute: BackendSlot, a: Output, b: Output) -> Output:
    op = tape.choose(("Add", "Sub", "Max", "Min", "Mul"))
    return compute.op(g, op, a, b)


class RandomProgram(Module):
    """The program of a tape.

    `peers` says how many peers play each class; one of class `home` is invoked, with a tensor
    `x`, and with the peers of the classes in `peer_inputs`. `recording` says which kinds of
    ops there are; a tape means the same program as long as it is the same recording.
    """

    name = "Random"

    def __init__(
        self,
        numbers: list[int],
        *,
        bootstrap: bool = False,
        recording: type[Recording] | None = None,
    ) -> None:
        tape = Tape(numbers)
        self.classes = CLASSES[: 1 + tape.pick(len(CLASSES))]
        self.home = self.classes[0]
        self.peers = {name: 1 + tape.pick(2) for name in self.classes}
        self.peer_inputs = [name for name in self.classes if tape.pick(4) == 1]
        self.with_bootstrap = bootstrap
        self.recording = recording or Recording
        pure: list[Pure | None] = [None]
        for number in range(tape.pick(3)):
            pure.append(Pure(f"Pure{number}", tape.cut(4), tape.choose(pure)))
        self.pure = [one for one in pure if one is not None]
        self.senders = [Sender(f"Sender{n}", tape.cut(1), tape.choose(pure)) for n in range(2)]
        self.stateful = [Stateful(f"Keeper{n}", f"kept{n}", tape.choose(pure)) for n in range(2)]
        self._numbers = tape.cut(len(numbers))

    def bootstrap(self, g: Graph) -> None:
        if self.with_bootstrap:
            ModelSlot("booted").load_parameters(g, g.constant(np.zeros(VECTOR, np.float32)))

    def body(self, g: Graph) -> None:
        tape = Tape(self._numbers)
        recording = self.recording(self, g, tape)
        while tape and len(recording.scopes) <= MAX_SCOPES:
            recording.step()
        recording.finish()


class Recording:
    """Records a random op at a time."""

    def __init__(self, program: RandomProgram, g: Graph, tape: Tape) -> None:
        self.program, self.g, self.tape = program, g, tape
        self.compute = BackendSlot(COMPUTE)
        first = Scope(program.home, 1, True)
        first.tensors.append((g.input("x", types.TENSOR_FLOAT), VECTOR))
        self.inputs = {c: g.input(c, types.PEER_ID_VEC) for c in program.peer_inputs}
        self.scopes = [first]
        self.ports = 0
        self.outputs = 0
        self.claimed: dict[tuple[str, str], int] = {}  # (slot, class) -> its one scope

    def step(self) -> None:
        scope = self.scopes[-1 - self.tape.pick(len(self.scopes))]
        self.tape.choose(self.actions())(scope)

    def actions(self) -> tuple[Action, ...]:
        return (
            self.unary, self.binary, self.split, self.constant, self.where, self.branch,
            self.send, self.send, self.request, self.answer, self.reply,
            self.bundle, self.unbundle, self.call_pure, self.call_sender, self.call_keeper,
            self.model, self.syscall, self.emit, self.output,
        )  # fmt: skip

    def finish(self) -> None:
        for scope in self.scopes:
            while scope.to_answer:
                self.answer(scope)
        self.output(self.scopes[-1])

    # -- ONNX ---------------------------------------------------------------------------------

    def unary(self, scope: Scope) -> None:
        value, size = scope.tensor(self.tape)
        op = self.tape.choose(("Neg", "Abs", "Relu", "Identity", "ReduceSum"))
        if op == "ReduceSum":
            scope.tensors.append((self.compute.op(self.g, op, value, keepdims=1), 1))
        else:
            scope.tensors.append(
                (self.compute.op(self.g, op, value, after=self.after(scope)), size)
            )

    def after(self, scope: Scope) -> Output | None:
        return scope.any_value(self.tape) if self.tape.pick(4) == 1 else None

    def binary(self, scope: Scope) -> None:
        (a, size_a), (b, size_b) = scope.tensor(self.tape), scope.tensor(self.tape)
        scope.tensors.append((binary(self.tape, self.g, self.compute, a, b), max(size_a, size_b)))

    def split(self, scope: Scope) -> None:
        value, size = scope.tensor(self.tape)
        if size != VECTOR:
            return
        parts = self.compute.op(self.g, "Split", value, num_outputs=VECTOR, axis=0)
        scope.tensors.extend((part, 1) for part in parts)
        order = [parts[(i + self.tape.pick(3)) % 3] for i in range(VECTOR)]
        scope.tensors.append((self.compute.op(self.g, "Concat", *order, axis=0), VECTOR))

    def constant(self, scope: Scope) -> None:
        number = np.full(VECTOR, self.tape.pick(5) - 2, np.float32)
        value = self.g.constant(number, after=self.after(scope))
        if self.tape.pick(2):
            value = self.compute.op(self.g, "Neg", value)
        mixed = self.compute.op(self.g, "Add", scope.tensor(self.tape)[0], value)
        scope.tensors.append((mixed, VECTOR))

    def where(self, scope: Scope) -> None:
        (a, size_a), (b, size_b) = scope.tensor(self.tape), scope.tensor(self.tape)
        greater = self.compute.op(self.g, "Greater", a, b)
        scope.tensors.append((self.compute.op(self.g, "Where", greater, a, b), max(size_a, size_b)))

    def branch(self, scope: Scope) -> None:
        """An If whose branches read values of the outside."""
        (a, size), (b, _) = scope.tensor(self.tape), scope.tensor(self.tape)
        zero = self.g.constant(np.zeros((), np.float32))
        total = self.compute.op(self.g, "ReduceSum", b, keepdims=0)
        positive = self.compute.op(self.g, "Greater", total, zero)
        out = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        branches = [
            helper.make_graph([helper.make_node(op, [a.name], ["r"])], name, [], [out])
            for name, op in (("then", "Neg"), ("else", "Abs"))
        ]
        made = self.compute.op(
            self.g, "If", positive, then_branch=branches[0], else_branch=branches[1]
        )
        # The branches read `a` by its name, so this op has to wait for nothing more.
        scope.tensors.append((made, size))

    # -- the wire -----------------------------------------------------------------------------

    def peers(self, scope: Scope) -> tuple[Output, str, int] | None:
        """Peers to send to, their class, and how many they are."""
        return self.peers_of(scope, self.tape.choose(self.program.classes))

    def peers_of(self, scope: Scope, cls: str) -> tuple[Output, str, int] | None:
        count = self.program.peers[cls]
        if scope is self.scopes[0] and cls in self.inputs and self.tape.pick(2):
            return self.inputs[cls], cls, count
        count -= cls == scope.cls
        if not count:
            return None
        slot = PeerSelectorSlot(f"view_{self.scopes.index(scope)}_{cls}", peer_class=cls)
        anchored = scope is not self.scopes[0] or self.tape.pick(2)
        after = scope.any_value(self.tape) if anchored else None
        return slot.current_view(self.g, after=after), cls, count

    def port(self) -> str:
        self.ports += 1
        return f"port{self.ports}"

    def open(self, scope: Scope, cls: str, count: int, received: Output, size: int) -> Scope:
        alone = scope.once and scope.runs == 1
        made = Scope(cls, count, alone)
        made.tensors.append((received, size))
        if received.from_peer is not None:
            made.senders.append((received.sender, scope.cls, 1 if alone else 2))
        self.scopes.append(made)
        return made

    def send(self, scope: Scope) -> None:
        found = self.peers(scope)
        if found is None:
            return
        peers, cls, count = found
        value, size = scope.tensor(self.tape)
        if scope.composites and self.tape.pick(3) == 1:
            composite, sizes = scope.composites[-1]
            received = self.g.net_out(self.port(), peers, composite)
            parts = self.g.unbundle(received, [types.TENSOR_FLOAT] * len(sizes))
            made = self.open(scope, cls, count, parts[0], sizes[0])
            made.tensors.extend(zip(parts[1:], sizes[1:], strict=True))
            made.composites.append((received, sizes))
            return
        received = self.g.net_out(self.port(), peers, value, after=self.after(scope))
        self.open(scope, cls, count, received, size)

    def reply(self, scope: Scope) -> None:
        """Send to who sent."""
        if not scope.senders:
            return
        peer, cls, count = self.tape.choose(scope.senders)
        value, size = scope.tensor(self.tape)
        received = self.g.net_out(self.port(), peer, value)
        made = self.open(scope, cls, count, received, size)
        made.once = made.once and count == 1

    def request(self, scope: Scope) -> None:
        found = self.peers(scope)
        if found is None:
            return
        peers, cls, count = found
        value, size = scope.tensor(self.tape)
        asked = self.g.request(self.port(), peers, value, **self.terms(count))
        made = self.open(scope, cls, count, asked.received, size)
        made.to_answer.append((asked, scope))

    def terms(self, count: int) -> dict[str, Any]:
        """What else a request to so many peers says."""
        return {}

    def answer(self, scope: Scope) -> None:
        if not scope.to_answer:
            return
        asked, asker = scope.to_answer.pop()
        value, size = scope.tensor(self.tape)
        asked.respond(value, after=self.after(scope))
        if self.tape.pick(2) and asker.once:
            slot = AggregatorSlot(f"sum_{self.port()}")
            taken = slot.contribute_all(self.g, asked.responses)
            total, _ = slot.aggregate(self.g, after=taken if self.tape.pick(2) else None)
            asker.tensors.append((total, size))
        else:
            self.g.output(self.output_name(), asked.responses)

    # -- composites, calls, slots, framework ops ----------------------------------------------

    def bundle(self, scope: Scope) -> None:
        parts = [scope.tensor(self.tape) for _ in range(1 + self.tape.pick(3))]
        composite = self.g.bundle([value for value, _ in parts])
        scope.composites.append((composite, tuple(size for _, size in parts)))

    def unbundle(self, scope: Scope) -> None:
        if scope.composites:
            composite, sizes = self.tape.choose(scope.composites)
            parts = self.g.unbundle(composite, [types.TENSOR_FLOAT] * len(sizes))
            scope.tensors.extend(zip(parts, sizes, strict=True))

    def call_pure(self, scope: Scope) -> None:
        if self.program.pure:
            (x, size_x), (y, size_y) = scope.tensor(self.tape), scope.tensor(self.tape)
            call = self.tape.choose(self.program.pure).call().input("x", x).input("y", y)
            made = call.build(self.g, after=self.after(scope)).output("z")
            scope.tensors.append((made, max(size_x, size_y)))

    def call_sender(self, scope: Scope) -> None:
        found = self.peers(scope)
        if found is None:
            return
        peers, cls, count = found
        value, size = scope.tensor(self.tape)
        module = self.tape.choose(self.program.senders)
        call = module.call().input("data", value).input("peers", peers).build(self.g)
        made = self.open(scope, cls, count, call.output("there"), size)
        alone = scope.once and scope.runs == 1
        made.senders.append((call.output("who"), scope.cls, 1 if alone else 2))

    def call_keeper(self, scope: Scope) -> None:
        module = self.tape.choose(self.program.stateful)
        if self.claim(scope, module.slot):
            value, size = scope.tensor(self.tape)
            made = module.call().input("x", value).build(self.g, after=self.after(scope))
            scope.tensors.append((made.output("z"), size))

    def claim(self, scope: Scope, slot: str) -> bool:
        """Whether a slot on this class is, or becomes, this scope's alone."""
        index = self.scopes.index(scope)
        return scope.once and self.claimed.setdefault((slot, scope.cls), index) == index

    def model(self, scope: Scope) -> None:
        """State of one scope: shared names are anchored by `after`, private ones by their ops."""
        if not scope.once:
            return
        shared = f"shared{self.tape.pick(2)}"
        private = f"own_{self.scopes.index(scope)}"
        name = shared if self.tape.pick(2) and self.claim(scope, shared) else private
        slot = ModelSlot(name)
        value, size = scope.tensor(self.tape)
        taken = slot.load_parameters(self.g, value)
        if self.tape.pick(2):
            delta, size_delta = scope.tensor(self.tape)
            slot.apply_delta(self.g, delta)
            size = max(size, size_delta)
        kept = slot.params(self.g, after=taken if name == shared else self.after(scope))
        scope.tensors.append((kept, size))
        if self.tape.pick(2):
            batch, size_batch = scope.tensor(self.tape)
            scope.tensors.append((slot.forward(self.g, batch), max(size, size_batch)))

    def syscall(self, scope: Scope) -> None:
        value, size = scope.tensor(self.tape)
        kind = self.tape.pick(3)
        if kind == 0:
            scope.tensors.append((syscalls.pass_through(self.g, value), size))
        elif kind == 1:
            made = syscalls.tee(self.g, value, fanout=1 + self.tape.pick(3))
            scope.tensors.extend((one, size) for one in made)
        else:
            syscalls.record(self.g, value, name="seen")

    def emit(self, scope: Scope) -> None:
        value, _ = scope.tensor(self.tape)
        syscalls.app_emit(self.g, value, name=self.output_name(), after=self.after(scope))

    def output_name(self) -> str:
        self.outputs += 1
        return f"out{self.outputs}"

    def output(self, scope: Scope) -> None:
        self.g.output(self.output_name(), scope.tensor(self.tape)[0])
