"""What a recorded program means: an interpreter of its own over the recorded functions.

Rule: nothing of the compiler or the engine is used here, only docs/ir.md: the global program
is one list of ops, a send starts an execution on each peer that it goes to, and a request
waits for what its executions answer. Ops run in the order in which they were recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, ModelProto, NodeProto

Value = Any
PREFIX = "ai.bytesandbrains."
# Ops that change their component, of those that are drawn.
CHANGES = {"LoadParameters", "ApplyDelta", "Forward", "ContributeAll", "Aggregate", "Add"}
SOURCE_SCOPE = 0  # of `invoke`


class Nothing(Enum):
    """Why there is no value."""

    SKIPPED = "a condition did not hold"
    NEVER = "a request has failed"


class Meaningless(Exception):
    """A program in which an op can never have all that it reads."""


@dataclass(frozen=True)
class Composite:
    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Batch:
    """Answers by peer."""

    answers: tuple[tuple[str, Value], ...]


@dataclass
class Flat:
    """One op of the program with every call inlined."""

    node: NodeProto
    inputs: list[str]
    outputs: list[str]
    after: list[str]
    names: Mapping[str, str]


@dataclass
class Execution:
    """One run of one scope on one peer."""

    scope: int
    peer: str
    values: dict[str, Value]
    source: str = ""  # the peer whose message started it
    answer: Value = Nothing.NEVER
    # Of the last op of each that changed its component.
    slots: dict[str, Nothing | None] = field(default_factory=dict)


def meta(proto: Any, key: str) -> str | None:
    return {entry.key: entry.value for entry in proto.metadata_props}.get(PREFIX + key)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    for one in node.attribute:
        if one.name == name:
            return onnx.helper.get_attribute_value(one)
    return default


def flatten(model: ModelProto) -> list[Flat]:
    """All ops of the root, calls replaced by what they call."""
    bodies = {(f.domain, f.name): f for f in model.functions}
    flat: list[Flat] = []

    def walk(function: FunctionProto, scope: str, names: dict[str, str], waits: list[str]) -> None:
        def named(name: str) -> str:
            return names.setdefault(name, scope + name) if name else ""

        for node in function.node:
            after = [named(n) for n in (meta(node, "after") or "").split(",") if n] + waits
            inputs = [named(n) for n in node.input]
            body = bodies.get((node.domain, node.op_type))
            if body is None:
                outputs = [named(n) for n in node.output]
                flat.append(Flat(node, inputs, outputs, after, names))
                continue
            inner = dict(zip(body.input, inputs, strict=True))
            inner_scope = f"{scope}{node.name}|"
            walk(body, inner_scope, inner, after)
            for formal, actual in zip(body.output, node.output, strict=True):
                names[actual] = inner[formal]

    walk(model.functions[0], "", {name: name for name in model.functions[0].input}, [])
    return flat


@dataclass
class Oracle:
    """Runs a recorded program on named peers.

    Attributes:
        peers: names of the peers of each class, in PeerId order.
        events: what every peer hands out, by topic.
        skipped: outputs without a value, by peer and name, and how often.
        failed: requests that fewer answered than had to.
        first: the topics of which the invoked execution itself hands out a value.
    """

    model: ModelProto
    peers: Mapping[str, list[str]]
    events: dict[str, dict[str, list[Value]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    executions: int = 0
    first: set[str] = field(default_factory=set)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: int = 0

    def __post_init__(self) -> None:
        self.ops = flatten(self.model)
        self.outputs = set(self.model.functions[0].output)
        self.state: dict[tuple[str, str], Value] = {}
        self.gathered: dict[tuple[str, int], list[tuple[str, Value]]] = defaultdict(list)
        self._find_scopes()

    # -- which op belongs to which execution ---------------------------------------------------

    def _find_scopes(self) -> None:
        """A scope per send; an op is of the scope of what it reads, or of its slot."""
        scope_of: dict[str, int] = dict.fromkeys(self.model.functions[0].input, SOURCE_SCOPE)
        self.everywhere: set[str] = set()  # values made from constants alone
        self.op_scope: list[int | None] = []
        slot_scopes: dict[str, set[int]] = defaultdict(set)
        self.port: dict[int, int] = {}  # a send -> the first send of its port
        self.delivered: dict[int, list[list[str]]] = defaultdict(list)  # by the first send
        self.reads: list[list[str]] = []
        for index, op in enumerate(self.ops):
            reads = [n for n in (*op.inputs, *op.after, *self._captured(op)) if n]
            self.reads.append(reads)
            scopes = {scope_of[n] for n in reads if n not in self.everywhere}
            if len(scopes) > 1:
                raise Meaningless(f"{op.node.name} reads from several executions")
            slot = meta(op.node, "slot")
            is_role = op.node.domain.startswith(PREFIX + "role.")
            scope = next(iter(scopes), None)
            if scope is None and not is_role and op.node.domain != PREFIX + "wire":
                self.everywhere.update(op.outputs)
            elif scope is not None and is_role and slot:
                slot_scopes[slot].add(scope)
            elif scope is None and is_role and slot:
                known = slot_scopes[slot]
                scope = next(iter(known)) if len(known) == 1 else SOURCE_SCOPE
            self.op_scope.append(scope)
            if op.node.domain == PREFIX + "wire":
                joined = meta(op.node, "fan_in")
                first = index if joined is None else scope_of[op.names[joined]] - 1
                self.port[index] = first
                self.delivered[first].append(op.outputs[0 if op.node.op_type == "Send" else 2 :])
            for position, name in enumerate(op.outputs):
                remote = op.node.op_type == "Send" or position >= 2
                is_wire = op.node.domain == PREFIX + "wire"
                at = self.port[index] + 1 if is_wire and remote else scope
                if op.node.op_type == "Collect":
                    at = index + 1  # what reads the batch is an execution of its own
                scope_of[name] = at  # type: ignore[assignment]

    def _captured(self, op: Flat) -> list[str]:
        return [op.names[name] for name in _free(op.node)]

    # -- running ---------------------------------------------------------------------------

    def invoke(self, peer: str, inputs: Mapping[str, Value]) -> None:
        self._run(Execution(SOURCE_SCOPE, peer, dict(inputs)))

    def _run(self, run: Execution) -> Value:
        self.executions += 1
        for index, op in enumerate(self.ops):
            if self.op_scope[index] == run.scope:
                self._fire(index, op, run)
        return run.answer

    def _get(self, name: str, run: Execution) -> Value:
        if name not in run.values and name in self.everywhere:
            index = next(i for i, op in enumerate(self.ops) if name in op.outputs)
            self._fire(index, self.ops[index], run)
        return run.values[name]

    def _fire(self, index: int, op: Flat, run: Execution) -> None:
        given = [self._get(n, run) if n else None for n in op.inputs]
        nothing = self._nothing(index, op, given, run)
        slot = meta(op.node, "slot")
        if slot is not None and op.node.domain.startswith(PREFIX + "role."):
            if not self.reads[index]:  # it continues the change before it
                nothing = run.slots.get(slot)
            if op.node.op_type in CHANGES:
                run.slots[slot] = nothing
        if nothing is not None:
            run.values.update(dict.fromkeys(op.outputs, nothing))
            if nothing is Nothing.SKIPPED:
                self.skipped.update((run.peer, n) for n in op.outputs if n in self.outputs)
            if op.node.op_type == "SendResp":
                run.answer = nothing
            return
        domain = op.node.domain.removeprefix(PREFIX)
        if op.node.domain in ("", "ai.onnx"):
            made = self._onnx(op, given, run)
        elif domain == "wire":
            made = self._wire(index, op, given, run)
        elif domain == "composite":
            made = [Composite(tuple(given))] if op.node.op_type == "Bundle" else given[0].parts
        elif domain == "syscall":
            made = self._syscall(index, op, given, run)
        else:
            made = self._component(op, given, run)
        for name, value in zip(op.outputs, made, strict=False):
            run.values[name] = value
            if name in self.outputs:
                self._hand_out(run, name, value)

    def _hand_out(self, run: Execution, topic: str, value: Value) -> None:
        self.events[run.peer][topic].append(value)
        if run.scope == SOURCE_SCOPE:
            self.first.add(topic)

    def _nothing(self, index: int, op: Flat, given: list[Value], run: Execution) -> Nothing | None:
        """Why an op does not fire, if it does not: what it reads is not there."""
        if op.node.op_type == "Any":
            if any(not isinstance(value, Nothing) for value in given):
                given = []
            reads = {*op.after}
        else:
            reads = {*self.reads[index]}
        found = [*given, *(self._get(n, run) for n in reads - {*op.inputs})]
        reasons = {value for value in found if isinstance(value, Nothing)}
        # An op is skipped when its turn comes, and that waits for what never comes.
        for reason in (Nothing.NEVER, Nothing.SKIPPED):
            if reason in reasons:
                return reason
        return None

    def _wire(self, index: int, op: Flat, given: list[Value], run: Execution) -> list[Value]:
        kind = op.node.op_type
        if kind == "SendResp":
            run.answer = given[0]
            return []
        data, peers = given
        first = self.port[index]
        answers = []
        for peer in [peers] if isinstance(peers, str) else peers:
            inner = Execution(first + 1, peer, {}, run.peer)
            for received, sender, *_ in self.delivered[first]:
                inner.values.update({received: data, sender: run.peer})
            if kind != "Send":
                inner.values[op.outputs[4]] = run
            answers.append((peer, self._run(inner)))
        # Whatever the order of the list, a batch is in peer order.
        order = {name: at for group in self.peers.values() for at, name in enumerate(group)}
        answers.sort(key=lambda answer: order[answer[0]])
        if kind == "Send":
            return []
        there = tuple((who, value) for who, value in answers if not isinstance(value, Nothing))
        if len(there) < (attribute(op.node, "quorum", 0) or len(answers)):
            self.failed += 1
            return [Nothing.NEVER] * 2
        return [None, Batch(there)]

    def _collect(self, index: int, op: Flat, value: Value, run: Execution) -> None:
        found = self.gathered[run.peer, index]
        found.append((run.source, value))
        if len(found) == attribute(op.node, "n"):
            batch = Batch(tuple(sorted(found, key=lambda each: self._rank(each[0]))))
            found.clear()
            inner = Execution(index + 1, run.peer, {op.outputs[0]: batch})
            self._run(inner)

    def _rank(self, peer: str) -> int:
        return next(group.index(peer) for group in self.peers.values() if peer in group)

    def _syscall(self, index: int, op: Flat, given: list[Value], run: Execution) -> list[Value]:
        kind = op.node.op_type
        if kind == "Constant":
            return [onnx.numpy_helper.to_array(attribute(op.node, "value"))]
        if kind == "AppEmit":
            self._hand_out(run, attribute(op.node, "name").decode(), given[0])
        if kind == "Collect":
            self._collect(index, op, given[0], run)
            return []
        if kind == "When":
            holds = bool(given[0]) == bool(attribute(op.node, "expect", 1))
            return [None if holds else Nothing.SKIPPED]
        if kind == "Any":
            return [next(value for value in given if not isinstance(value, Nothing))]
        return [given[0]] * len(op.outputs)

    def _component(self, op: Flat, given: list[Value], run: Execution) -> list[Value]:
        at = (run.peer, meta(op.node, "slot") or "")
        match op.node.op_type:
            case "CurrentView":
                peers = self.peers[meta(op.node, "peer_class") or ""]
                return [[name for name in peers if name != run.peer]]
            case "LoadParameters":
                self.state[at] = given[0]
            case "ApplyDelta":
                self.state[at] = self.state[at] + given[0]
            case "Params":
                return [self.state[at]]
            case "Forward":
                return [given[0] + self.state[at]]
            case "ContributeAll":
                self.state[at] = sum((v for _, v in given[0].answers), np.zeros(1, np.float32))
            case "Aggregate":
                return [self.state[at], {}]
            case "Encode":
                return [given[0] + 1]
            case "Decode":
                return [given[0] - 1]
            case "Add":
                self.state[at] = [*self.state.get(at, []), given[0]]
            case "Search":
                known = self.state[at][: attribute(op.node, "k")]
                total = np.sum(given[0])
                return [tuple((n, float(np.sum(v) + total)) for n, v in enumerate(known))]
            case other:
                raise AssertionError(f"the oracle does not know {other}")
        return [None]

    def _onnx(self, op: Flat, given: list[Value], run: Execution) -> list[Value]:
        return compute(op.node, given, lambda name: self._get(op.names[name], run))


def _free(node: NodeProto) -> list[str]:
    """What the graphs of a node read of the values around it."""
    found = []
    for one in node.attribute:
        own = {port.name for port in one.g.input}
        for inner in one.g.node:
            found += [n for n in (*inner.input, *_free(inner)) if n and n not in own]
            own.update(inner.output)
    return found


Around = Callable[[str], Value]  # values around a graph, by their recorded names


def compute(node: NodeProto, given: list[Value], around: Around) -> list[Value]:
    """One ONNX op, on tensors or on lists of peers."""
    kind = node.op_type
    if given and isinstance(given[0], list | str):
        return [_ON_PEERS[kind](*given)]
    if kind == "If":
        return _graph(attribute(node, "then_branch" if given[0] else "else_branch"), [], around)
    if kind == "Loop":
        return _loop(attribute(node, "body"), given, around)
    if kind == "Constant":
        return [onnx.numpy_helper.to_array(attribute(node, "value"))]
    if kind == "Split":
        return list(np.split(given[0], len(node.output)))
    if kind == "Concat":
        return [np.concatenate(given)]
    if kind == "ReduceSum":
        axes = tuple(given[1].tolist()) if len(given) > 1 else None
        return [np.sum(given[0], axis=axes, keepdims=bool(attribute(node, "keepdims", 1)))]
    return [_PLAIN[kind](*given)]


def _loop(body: onnx.GraphProto, given: list[Value], around: Around) -> list[Value]:
    trips, _, *carried = given
    go = np.True_
    scans: list[list[Value]] = []
    for number in range(int(trips)):
        if not go:
            break
        made = _graph(body, [np.int64(number), go, *carried], around)
        go, carried = made[0], made[1 : 1 + len(carried)]
        scans.append(made[1 + len(carried) :])
    return [*carried, *(np.stack(column) for column in zip(*scans, strict=True))]


def _graph(graph: onnx.GraphProto, given: list[Value], around: Around) -> list[Value]:
    own = dict(zip((port.name for port in graph.input), given, strict=True))

    def value(name: str) -> Value:
        return own[name] if name in own else around(name)

    for node in graph.node:
        made = compute(node, [value(name) for name in node.input], value)
        own.update(zip(node.output, made, strict=False))
    return [value(port.name) for port in graph.output]


_PLAIN = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum,
    "Neg": np.negative, "Abs": np.abs, "Identity": lambda x: x, "Greater": np.greater,
    "Where": np.where, "Relu": lambda x: np.maximum(x, 0),
}  # fmt: skip


def _sliced(peers: list[str], start: Value, stop: Value, _: Value, step: Value) -> list[str]:
    return peers[int(start[0]) : int(stop[0]) : int(step[0])]


_ON_PEERS = {
    "Slice": _sliced,
    "Gather": lambda peers, at: [peers[i] for i in at.tolist()],
    "Concat": lambda *lists: [peer for one in lists for peer in one],
    "Squeeze": lambda peers: peers[0],
    "Unsqueeze": lambda peer, _: [peer],
}
