"""Random programs to fuse, and what they mean: a generator, and an oracle in numpy.

Rule: a program is data (`Step`s in program order). `Recorded` says it in the DSL; `Oracle` runs it
by the meaning that docs/dsl.md and docs/engine.md give, op by op, and knows nothing of graphs,
frames or queues. A value comes at a time, is skipped at a time, or is lost to a failure at a time;
what needs it can't be settled before. All numbers are small integers in float32, so that results
are equal to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from bbnode.components import ComponentError, ConnectedView, Model, OrtBackend
from bbnode.components.registry import component_class, register_component
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Module, Output, PeerSelectorSlot, syscalls
from bbnode.ir import types
from bbnode.ir.errors import BbnodeError

MS = 1_000_000
SIZE = 3  # of most tensors; what is of another size makes ops fail
GAP_NS = 1_000 * MS  # between the executions of a run, longer than all sleeps of one
JOIN_NS = 5_000 * MS

Array = np.ndarray[Any, Any]


class OneVector(Model):
    """A model that holds three numbers, and refuses any other number of them."""

    TYPE_NAME: ClassVar[str] = "tests.OneVector"
    storage: ClassVar[dict[str, Any]] = {"*": types.TENSOR_FLOAT}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.held = np.zeros(SIZE, np.float32)

    def load_parameters(self, ctx: Any, params: Array) -> None:
        if params.shape != (SIZE,):
            raise ComponentError(f"{params.shape} where ({SIZE},) is needed")
        self.held = np.array(params)

    def params(self, ctx: Any) -> Array:
        return self.held.copy()

    def _unused(self, ctx: Any, *given: Any, **named: Any) -> Any:
        raise ComponentError("not used here")

    apply_delta = backward = compute_loss = forward = step = train = _unused

    def serialize(self) -> bytes:
        return self.held.tobytes()

    def restore(self, data: bytes) -> None:
        self.held = np.frombuffer(data, np.float32).copy()


try:
    component_class(OneVector.TYPE_NAME)
except BbnodeError:
    register_component(OneVector)


# --- the program as data --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op: what it reads and makes, by the numbers of values; `after` are needs without data."""

    what: str
    reads: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    slot: str = "compute"
    number: int = 0  # how many, how long, or which
    makes: int = -1
    module: str = ""  # of a call: its steps stand in `Program.modules`


@dataclass
class Program:
    """Steps of the class that is invoked, and of the one that it sends to."""

    inputs: dict[str, Array] = field(default_factory=dict)
    second: dict[str, Array] = field(default_factory=dict)  # those of the second execution
    home: list[Step] = field(default_factory=list)
    away: list[Step] = field(default_factory=list)
    modules: dict[str, list[Step]] = field(default_factory=dict)


FLOATS = ("x", "y", "z")
INTEGERS = ("places", "length")
CONSTANT = 100  # number of the value [1.0]; those of inputs are 0 and on
RECEIVED = 200  # number of the value that the other class gets
ARGUMENT = 300  # number of the argument of a Module


class Generator:
    """Draws a program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.program = Program()
        self.next = 1_000

    def draw(self) -> Program:
        """Return the program of this seed."""
        program = self.program
        program.inputs, program.second = self._inputs(), self._inputs()
        for number in range(self.random.randrange(3)):
            inner = Scope(self, [ARGUMENT], [])
            for _ in range(self.random.randint(1, 3)):
                inner.compute()
            program.modules[f"Inner{number}"] = inner.steps
        home = Scope(self, [*range(len(FLOATS))], [])
        home.fill(self.random.randint(4, 12))
        if self.random.random() < 0.4:
            home.add("send", reads=(home.tensor(),), after=home.after())
            away = Scope(self, [RECEIVED], [])
            away.fill(self.random.randint(1, 5), is_home=False)
            for value in self.random.sample(away.tensors, k=min(2, len(away.tensors))):
                away.add("emit", reads=(value,), after=away.after())
            if self.random.random() < 0.5:
                away.add("join", reads=(away.tensor(),))
            program.away = away.steps
        values = home.tensors[len(FLOATS) :] + home.triggers
        for value in self.random.sample(values, k=min(len(values), self.random.randint(1, 5))):
            home.add("output", reads=(value,), after=home.after())
        program.home = home.steps
        return program

    def _inputs(self) -> dict[str, Array]:
        pick = self.random
        made: dict[str, Array] = {}
        for name in FLOATS:
            size = pick.choice((SIZE, SIZE, SIZE, 1, 4))
            made[name] = np.array([pick.randint(-3, 3) for _ in range(size)], np.float32)
        made["places"] = np.array([pick.choice((0, 0, 1, 2, 3)) for _ in range(SIZE)], np.int64)
        made["length"] = np.array([pick.choice((SIZE, SIZE, 1, 4))], np.int64)
        return made


@dataclass
class Scope:
    """Draws the steps of one execution or Module."""

    generator: Generator
    tensors: list[int]
    triggers: list[int]
    steps: list[Step] = field(default_factory=list)

    def fill(self, count: int, *, is_home: bool = True) -> None:
        """Add some steps of all kinds."""
        kinds: list[Callable[[], None]] = [
            *[self.compute] * 8, *[self.condition] * 3, *[self.first] * 3, self.count, self.match,
            *[self.nap] * 2, self.gate, self.branches, self.late,
        ]  # fmt: skip
        if is_home:
            kinds += [self.load, self.params, self.view, self.call, self.call]
        for _ in range(count):
            self._pick(kinds)()

    def add(self, what: str, **fields: Any) -> int:
        """Add a step; returns the number of what it makes."""
        self.generator.next += 1
        self.steps.append(Step(what=what, makes=self.generator.next, **fields))
        return self.generator.next

    def _pick(self, choices: Sequence[Any]) -> Any:
        return self.generator.random.choice(choices)

    def tensor(self) -> int:
        """Return the number of a tensor, rather a late one."""
        return int(self._pick([*self.tensors, *self.tensors[-3:]]))

    def trigger(self) -> int:
        """Return the number of a trigger, or of a tensor that serves as one."""
        return int(self._pick(self.triggers)) if self.triggers else self.tensor()

    def after(self) -> tuple[int, ...]:
        """Return what an op waits for besides its data: mostly nothing."""
        chance = self.generator.random.random()
        if chance < 0.25 and self.triggers:
            return (self.trigger(),)
        return (self.tensor(),) if chance < 0.35 else ()

    def compute(self) -> None:
        """Add an op of a backend; some can fail."""
        what, slot = self._pick(_UNARY + _BINARY), "compute"
        if self.tensors[0] == 0:  # the program's own: there are integers, and a second slot
            what = self._pick([what, what, "gather", "reshape"])
            slot = self._pick(["compute", "compute", "compute", "other"])
        reads = [self.tensor()]
        if what in _BINARY:
            reads.append(self._pick([self.tensor(), self.tensor(), self.tensor(), CONSTANT]))
        self.tensors.append(self.add(what, reads=tuple(reads), after=self.after(), slot=slot))

    def condition(self) -> None:
        """Add a trigger that fires if the sum of a tensor is large, or small."""
        number = self.generator.random.randint(0, 5)
        self.triggers.append(self.add("when", reads=(self.tensor(),), number=number))

    def first(self) -> None:
        """Add the first of several tensors."""
        reads = tuple(self.tensor() for _ in range(self._pick([2, 2, 3])))
        self.tensors.append(self.add("any", reads=reads, after=self.after()))
        self.beside(self.tensors[-1], reads[-1])

    def count(self) -> None:
        """Add a trigger once some of several are there."""
        reads = tuple(self.trigger() for _ in range(self._pick([1, 2, 3])))
        number = self.generator.random.randint(1, len(reads))
        self.triggers.append(self.add("threshold", reads=reads, number=number, after=self.after()))

    def match(self) -> None:
        """Add the first of two triggers."""
        reads = self.trigger(), self.trigger()
        self.triggers.append(self.add("match", reads=reads, after=self.after()))

    def nap(self) -> None:
        """Add a trigger that comes late."""
        number = self.generator.random.randint(1, 4) * 10 * MS
        self.triggers.append(self.add("sleep", reads=(self.trigger(),), number=number))

    def gate(self) -> None:
        """Add a tensor that waits for a trigger."""
        self.tensors.append(self.add("gate", reads=(self.tensor(), self.trigger())))

    def branches(self) -> None:
        """Add two branches of which one is skipped, and their value."""
        tested, number = self.tensor(), self.generator.random.randint(0, 5)
        made = []
        for side, what in ((number, "neg"), (number ^ 1, "abs")):
            holds = self.add("when", reads=(tested,), number=side)
            made.append(self.add(what, reads=(self.tensor(),), after=(holds,)))
            self.tensors.append(made[-1])
        self.tensors.append(self.add("any", reads=tuple(made)))
        self.beside(self.tensors[-1], self._pick(made))

    def beside(self, value: int, other: int, after: tuple[int, ...] = ()) -> None:
        """Add an op of a value, and one beside it that needs more: often fused if that is wrong."""
        self.tensors.append(self.add("neg", reads=(value,)))
        if self.generator.random.random() < 0.7:
            self.tensors.append(self.add("add", reads=(self.tensors[-1], other), after=after))

    def late(self) -> None:
        """Add a value that comes late, and the first of it and another."""
        early, nap = self.tensor(), self.generator.random.randint(1, 4) * 10 * MS
        slept = self.add("sleep", reads=(self.trigger(),), number=nap)
        late = self.add(self._pick(_UNARY), reads=(self.tensor(),), after=(slept,))
        first = self.add("any", reads=(early, late))
        self.tensors += [late, first]
        self.beside(first, late)

    def load(self) -> None:
        """Add a change of the model."""
        loaded = self.add("load", reads=(self.tensor(),), after=self.after(), slot="model")
        self.triggers.append(loaded)
        if self.generator.random.random() < 0.5:
            self.params()
            self.beside(self.tensors[-1], self.tensors[-1], after=(loaded,))

    def params(self) -> None:
        """Add a look at the model."""
        self.tensors.append(self.add("params", after=(self.trigger(),), slot="model"))

    def view(self) -> None:
        """Add an op of a selector, which changes nothing; its list serves as a trigger."""
        self.triggers.append(self.add("view", after=(self.trigger(),), slot="peers"))

    def call(self) -> None:
        """Add a call of a Module."""
        names = list(self.generator.program.modules)
        if names:
            made = self.add(
                "call", reads=(self.tensor(),), after=self.after(), module=self._pick(names)
            )
            self.tensors.append(made)


_UNARY = ("neg", "abs", "sum")
_BINARY = ("add", "mul", "sub", "concat")


# --- the program in the DSL -----------------------------------------------------------------


class Inner(Module):
    """A Module of steps."""

    def __init__(self, steps: Sequence[Step], name: str) -> None:
        self.steps, self.label = steps, name

    def body(self, g: Graph) -> None:
        recorder = _Recorder(g, {ARGUMENT: g.input("x", types.TENSOR_FLOAT)}, {})
        for step in self.steps:
            recorder.record(step)
        g.output("made", recorder.values[self.steps[-1].makes])


class Recorded(Module):
    """A whole program."""

    home = "home"

    def __init__(self, program: Program) -> None:
        self.program = program

    def body(self, g: Graph) -> None:
        values = {n: g.input(name, types.TENSOR_FLOAT) for n, name in enumerate(FLOATS)}
        integers = {name: g.input(name, types.TENSOR_INT64) for name in INTEGERS}
        home = _Recorder(g, values, integers, self.program.modules)
        for step in self.program.home:
            home.record(step)
        if home.received is not None:
            away = _Recorder(g, {RECEIVED: home.received}, {})
            for step in self.program.away:
                away.record(step)


class _Recorder:
    def __init__(
        self,
        g: Graph,
        values: dict[int, Output],
        integers: Mapping[str, Output],
        modules: Mapping[str, Sequence[Step]] | None = None,
    ) -> None:
        self.g, self.values, self.integers = g, values, integers
        self.modules = modules or {}
        self.received: Output | None = None

    def _value(self, number: int) -> Output:
        if number == CONSTANT and CONSTANT not in self.values:
            self.values[CONSTANT] = self.g.constant(np.ones(1, np.float32))
        return self.values[number]

    def record(self, step: Step) -> None:
        """Record one step."""
        g, reads = self.g, [self._value(number) for number in step.reads]
        after = [self._value(number) for number in step.after] or None
        made = self._record(g, step, reads, after)
        if made is not None:
            self.values[step.makes] = made

    def _record(self, g: Graph, step: Step, reads: list[Output], after: Any) -> Output | None:
        compute = BackendSlot(step.slot)
        match step.what:
            case "concat":
                return compute.concat(g, *reads, axis=0, after=after)
            case "sum":
                return compute.reduce_sum(g, *reads, after=after)
            case "gather":
                return compute.gather(g, *reads, self.integers["places"], after=after)
            case "reshape":
                return compute.reshape(g, *reads, self.integers["length"], after=after)
            case "when":
                total = BackendSlot("compute").reduce_sum(g, *reads, keepdims=False)
                holds = BackendSlot("compute").greater(
                    g, total, g.constant(float(step.number // 2))
                )
                return g.unless(holds) if step.number % 2 else g.when(holds)
            case "any":
                return syscalls.any_of(g, *reads, after=after)
            case "threshold":
                return syscalls.threshold(g, *reads, n=step.number, after=after)
            case "match":
                triggers = [syscalls.threshold(g, value, n=1) for value in reads]
                return syscalls.deadline_match(g, *triggers, after=after)
            case "sleep":
                trigger = syscalls.threshold(g, *reads, n=1)
                return syscalls.sleep(g, trigger, duration_ns=step.number)
            case "gate":
                return syscalls.gate(g, reads[0], syscalls.threshold(g, reads[1], n=1))
            case "load":
                return ModelSlot("model").load_parameters(g, *reads, after=after)
            case "params":
                return ModelSlot("model").params(g, after=after)
            case "view":
                return PeerSelectorSlot("peers", peer_class="away").current_view(g, after=after)
            case "call":
                inner = Inner(self.modules[step.module], step.module)
                return inner.call().input("x", *reads).build(g, after=after).output("made")
            case "send":
                view = PeerSelectorSlot("cohort", peer_class="away").current_view(g, after=reads[0])
                self.received = g.net_out("sent", view, *reads, after=after)
            case "emit":
                syscalls.app_emit(g, *reads, name=name_of(step), after=after)
            case "join":
                batch = g.collect(*reads, n=2, until=JOIN_NS / 1e9, per_peer=False)
                syscalls.app_emit(g, batch, name=name_of(step))
            case "output":
                g.output(name_of(step), *reads, after=after)
            case what:
                return compute.op(g, what.capitalize(), *reads, after=after)
        return None


def name_of(step: Step) -> str:
    """Return the name under which a step hands out a value."""
    return f"{step.what}{step.makes}"


BINDINGS = {
    "compute": OrtBackend, "other": OrtBackend, "model": OneVector, "peers": ConnectedView,
    "cohort": ConnectedView,
}  # fmt: skip


# --- what it means --------------------------------------------------------------------------

CAME, SKIPPED, LOST = "came", "skipped", "lost"


@dataclass(frozen=True)
class Fate:
    """What becomes of a value, when; and what it is."""

    how: str
    at_ns: int
    value: Any = None


@dataclass(frozen=True, order=True)
class Seen:
    """What a host sees of a program."""

    at_ns: int
    what: str  # output, skipped, failed, not run
    name: str  # of the output; of a failure its kind
    text: str = ""  # the value


class Failure(Exception):
    """An op fails."""


class Oracle:
    """Runs a program by its meaning; `seen` by class."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.seen: dict[str, list[Seen]] = {"home": [], "away": []}
        self.held = np.zeros(SIZE, np.float32)
        self.gathered: list[tuple[int, Array]] = []
        self.deliveries: list[tuple[int, Array]] = []

    def run(self) -> None:
        """Run both executions, and what they start on the other class."""
        for at_ns, inputs in ((0, self.program.inputs), (GAP_NS, self.program.second)):
            values = {n: Fate(CAME, at_ns, inputs[name]) for n, name in enumerate(FLOATS)}
            _Execution(self, "home", at_ns, values, inputs).run(self.program.home)
            for sent_ns, value in self.deliveries:
                fates = {RECEIVED: Fate(CAME, sent_ns, value)}
                _Execution(self, "away", sent_ns, fates, {}).run(self.program.away)
            self.deliveries.clear()
        if len(self.gathered) == 1:
            self.seen["away"].append(
                Seen(self.gathered[0][0] + JOIN_NS, "failed", "JoinIncomplete")
            )


class _Execution:
    def __init__(
        self,
        oracle: Oracle,
        cls: str,
        at_ns: int,
        values: dict[int, Fate],
        inputs: Mapping[str, Array],
    ) -> None:
        self.oracle, self.cls, self.at_ns = oracle, cls, at_ns
        self.values, self.inputs = values, inputs
        self.values[CONSTANT] = Fate(CAME, at_ns, np.ones(1, np.float32))
        self.change: Fate | None = None  # the last load
        self.looks: list[Fate] = []  # since then
        self.is_broken = False

    def run(self, steps: Sequence[Step]) -> None:
        """Settle all steps, in program order."""
        # A component is changed and looked at in time, not in program order; but ops of which one
        # changes it wait for each other, so that program order is right for those.
        for step in steps:
            self.values[step.makes] = self._settle(step)

    def _settle(self, step: Step) -> Fate:
        if step.what == "call":
            return self._call(step)
        after = [self.values[n] for n in step.after]
        reads = [self.values[n] for n in step.reads]
        if step.what in ("any", "threshold", "match"):
            needed = step.number if step.what == "threshold" else 1
            first = self._first(reads, after, needed)
            return first if step.what == "any" else Fate(first.how, first.at_ns)
        fate = self._all([*reads, *after])
        if step.slot == "model":
            fate = self._in_order(step, fate)
        if fate.how == CAME:
            fate = self._fire(step, reads, fate.at_ns)
        if step.what == "output" and fate.how == SKIPPED:
            self._see(fate.at_ns, "skipped", name_of(step))
        if step.slot == "model":
            self._remember(step, fate)
        return fate

    def _all(self, needs: Sequence[Fate]) -> Fate:
        """An op settles when all that it needs has, and a failure goes before a skip."""
        at_ns = max([fate.at_ns for fate in needs], default=self.at_ns)
        hows = {fate.how for fate in needs}
        return Fate(next((how for how in (LOST, SKIPPED) if how in hows), CAME), at_ns)

    def _first(self, reads: Sequence[Fate], after: Sequence[Fate], needed: int) -> Fate:
        each = [self._all([fate, *after]) for fate in reads]
        came = sorted(fate.at_ns for fate in each if fate.how == CAME)
        if len(came) >= needed:
            at_ns = came[needed - 1]
            ready = [n for n, fate in enumerate(each) if fate.how == CAME and fate.at_ns == at_ns]
            return Fate(CAME, at_ns, reads[ready[0]].value)
        gone = sorted(fate.at_ns for fate in each if fate.how != CAME)
        at_ns = gone[len(each) - needed]
        lost = any(f.how == LOST and f.at_ns <= at_ns for fate in reads for f in (fate, *after))
        return Fate(LOST if lost else SKIPPED, at_ns)

    def _in_order(self, step: Step, fate: Fate) -> Fate:
        """Wait for what changes the model, or before a change for those that look at it."""
        before = ([] if self.change is None else [self.change]) + (
            self.looks if step.what == "load" else []
        )
        at_ns = max([fate.at_ns, *[other.at_ns for other in before]])
        if fate.how == CAME and self.is_broken:
            self._see(at_ns, "not run", "")
            return Fate(LOST, at_ns)
        return Fate(fate.how, at_ns)

    def _remember(self, step: Step, fate: Fate) -> None:
        if step.what == "load":
            self.change, self.looks = fate, []
            self.is_broken |= fate.how == LOST
        else:
            self.looks.append(fate)

    def _call(self, step: Step) -> Fate:
        """The steps of a Module, of which each waits for what the call does."""
        argument = self.values[step.reads[0]]
        outer, self.values = self.values, {**self.values, ARGUMENT: argument}
        fate = argument
        for inner in self.oracle.program.modules[step.module]:
            waiting = Step(
                what=inner.what, reads=inner.reads, after=(*inner.after, *step.after),
                slot=inner.slot, number=inner.number, makes=inner.makes,
            )  # fmt: skip
            fate = self.values[inner.makes] = self._settle(waiting)
        self.values = outer
        return fate

    def _fire(self, step: Step, reads: Sequence[Fate], at_ns: int) -> Fate:
        given = [fate.value for fate in reads]
        try:
            match step.what:
                case "when":
                    holds = (float(np.sum(given[0])) > step.number // 2) != bool(step.number % 2)
                    return Fate(CAME if holds else SKIPPED, at_ns)
                case "sleep":
                    return Fate(CAME, at_ns + step.number)
                case "load":
                    if given[0].shape != (SIZE,):
                        raise Failure("ComponentError")
                    self.oracle.held = given[0]
                    return Fate(CAME, at_ns)
                case "params":
                    return Fate(CAME, at_ns, self.oracle.held)
                case "view":
                    return Fate(CAME, at_ns)
                case "send":
                    self.oracle.deliveries.append((at_ns, given[0]))
                    return Fate(CAME, at_ns)
                case "emit" | "output":
                    self._see(at_ns, "output", name_of(step), text_of(given[0]))
                    return Fate(CAME, at_ns)
                case "join":
                    self._gather(step, at_ns, given[0])
                    return Fate(CAME, at_ns)
                case "gate":
                    return Fate(CAME, at_ns, given[0])
                case what:
                    return Fate(CAME, at_ns, self._compute(what, given))
        except Failure as failure:
            self._see(at_ns, "failed", str(failure))
            return Fate(LOST, at_ns)

    def _gather(self, step: Step, at_ns: int, value: Array) -> None:
        found = self.oracle.gathered
        found.append((at_ns, value))
        if len(found) == 2:
            self._see(at_ns, "output", name_of(step), " ".join(text_of(v) for _, v in found))
            found.clear()

    def _compute(self, what: str, given: list[Array]) -> Array:
        try:
            match what:
                case "gather":
                    return given[0][self.inputs["places"]]
                case "reshape":
                    return given[0].reshape(self.inputs["length"])
                case "concat":
                    return np.concatenate(given)
                case "sum":
                    return np.sum(given[0], keepdims=True)
                case _:
                    return _NUMPY[what](*given)
        except (IndexError, ValueError) as error:
            raise Failure("BackendError") from error

    def _see(self, at_ns: int, what: str, name: str, text: str = "") -> None:
        self.oracle.seen[self.cls].append(Seen(at_ns, what, name, text))


_NUMPY: Mapping[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "add": np.add, "mul": np.multiply, "sub": np.subtract,
}  # fmt: skip


def text_of(value: Any) -> str:
    """Return a value as text; "-" for what is no tensor."""
    # No -0.0, which sums of one element have or have not.
    return str((value + 0).tolist()) if isinstance(value, np.ndarray) else "-"
