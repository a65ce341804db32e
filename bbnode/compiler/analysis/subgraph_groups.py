"""Groups of backend ops that run as one graph.

Rule: fusion must not be observable. Ops share a group if they are connected, no path leads out of
the group and back in, and every value that is read outside the group would be available at the
same time without it, and be skipped or lost for the same reasons. Two sets of sources describe
that. A source is something that can be late or absent: an input, a receiver, an op that suspends,
skips or fails by itself. A value *waits* for some sources, and it *needs* those without which it
is never made. An order edge adds to the first set alone. An op that takes the first of several
values (`any_of`) is a source itself: it is unknown which of its inputs it waits for.

Algorithm: along every edge the number of times that a path has left a group (`level`) only grows,
and so do both sets, which start anew only after an op that is in no group. Connected ops of one
slot with equal marks form a group; a cycle of groups would contain an edge between equal marks,
and such an edge lies inside a group. An op that only its own group reads may wait for the group
and takes its readers' marks, unless it can fail at run time: its failure would then be seen late,
or never. A failing backend op of another group is no source, since the engine then runs the ops
of a group one by one. All of it is linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bbnode.compiler.analysis.content_hash import AttributePrints
from bbnode.compiler.typing.peer_lists import moves_peers
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, Tensor, annotations_on, is_onnx_op
from bbnode.ir.slices import starts_executions
from bbnode.ir.types import TENSOR_DOUBLE, TENSOR_FLOAT, TENSOR_STRING, TypeKind

# Ops that hand on their input, or a value available from the start: they add no stage.
TRANSPARENT = frozenset(
    {*keys.GATE_OPS, "PassThrough", "Tee", "Constant", "OnTrigger", "Clock", "RngU64"}
)
# Ops that fire without some of their inputs, unless they count all of them.
_FIRST_OF = frozenset({keys.OP_ANY, keys.OP_DEADLINE_MATCH, keys.OP_THRESHOLD})
# A constant up to this size is copied into each group that reads it, so that shapes and axes
# are constants there; a larger one (weights) stays a value that groups share.
MAX_COPIED_CONSTANT_BYTES = 4096

Marks = tuple[int, int, int]  # level, sources waited for, sources needed

# Unary ops that never fail, whatever the shape, the values and the numeric type.
_TAKES_ANY = frozenset(
    {"Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu",
     "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
     "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shape",
     "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh"}
)  # fmt: skip
_FLOATS = frozenset({TENSOR_DOUBLE, TENSOR_FLOAT})  # integer division by 0 fails
# Binary ops that fail only if their inputs do not broadcast.
_BROADCASTS = frozenset(
    {"Add", "And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mul", "Or", "Sub",
     "Xor"}
)  # fmt: skip


@dataclass(slots=True)
class Groups:
    """Groups of node indices, in node order.

    Attributes:
        members: indices of each group; groups in the order of their first nodes.
        copied: indices of constants that are copied into the groups of all their readers.
        needs: the dependencies of each node of the function, as `needs_of` returns them.
    """

    members: list[list[int]] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    needs: list[list[int]] = field(default_factory=list)


def annotation_parameters(node: OpNode) -> set[str]:
    """Return the values that the quantization annotations of a node name as parameters."""
    if keys.QUANTIZATION_KEY not in node.metadata:
        return set()
    return {name for held in annotations_on(node).values() for name in held.values()}


def backend_slot(node: OpNode) -> str | None:
    """Return the backend slot that runs an upstream ONNX op, or None for every other op."""
    if not is_onnx_op(node):
        return None
    if any(attribute.reference for attribute in node.attributes.values()):
        return None  # it refers to attributes of its function
    return node.metadata.get(keys.SLOT_KEY)


def is_infallible(node: OpNode, function: Function) -> bool:
    """Return True if an upstream op is known not to fail at run time."""
    if node.op_type == "Constant":
        return True
    kinds = [function.kind_of(name) for name in node.inputs]
    if any(
        kind is None or kind.kind is not TypeKind.TENSOR or kind is TENSOR_STRING for kind in kinds
    ):
        return False  # a value of another type may arrive
    if node.op_type in _TAKES_ANY:
        return len(kinds) == 1
    if node.op_type not in _BROADCASTS and (node.op_type != "Div" or kinds[0] not in _FLOATS):
        return False
    return node.inputs[0] == node.inputs[-1] or any(
        _is_scalar(function.producer(name)) for name in node.inputs
    )


def _is_scalar(maker: OpNode | None) -> bool:
    """Return True if a value is a one-element constant, which broadcasts to every shape.

    Declared shapes do not count: they are not checked between two ops.
    """
    tensor = maker.attr("value") if maker is not None and maker.op_type == "Constant" else None
    return isinstance(tensor, Tensor) and all(axis == 1 for axis in tensor.shape)


def find_groups(function: Function, needs: list[list[int]], prints: AttributePrints) -> Groups:
    """Return the groups of a function in topological order; `needs` as from `needs_of`."""
    nodes = list(function.nodes)
    slots = [None if moves_peers(node, function.kind_of) else backend_slot(node) for node in nodes]
    if not any(slots):
        return Groups(needs=needs)
    return _Finder(function, nodes, slots, needs, prints).find()


class _Finder:
    def __init__(
        self,
        function: Function,
        nodes: Sequence[OpNode],
        slots: Sequence[str | None],
        needs: list[list[int]],
        prints: AttributePrints,
    ) -> None:
        self._prints = prints
        self._function = function
        self._nodes = nodes
        self._makers = {n: index for index, node in enumerate(nodes) for n in node.outputs if n}
        self._slots = slots
        self._needs = needs
        # Values that ops wait for but do not read.
        self._waited_for = {n for node in nodes for n in node.after if n not in node.inputs}
        self._inputs = {name: 1 << bit for bit, name in enumerate(function.inputs)}
        outputs = set(function.outputs)
        self._is_output = [not outputs.isdisjoint(node.outputs) for node in nodes]
        self._readers: list[list[int]] = [[] for _ in nodes]
        for index, before in enumerate(self._needs):
            for need in set(before):
                self._readers[need].append(index)

    def find(self) -> Groups:
        marks = self._marks()
        copied = self._raise(marks)
        parents = list(range(len(self._nodes)))
        slots = self._slots
        for index, before in enumerate(self._needs):
            slot = slots[index]
            for need in before if slot is not None else ():
                if slots[need] == slot and marks[need] == marks[index] and need not in copied:
                    parents[_top(parents, need)] = _top(parents, index)
        members: dict[int, list[int]] = {}
        for index, slot in enumerate(self._slots):
            if slot is not None and index not in copied:
                members.setdefault(_top(parents, index), []).append(index)
        return Groups(list(members.values()), copied, self._needs)

    def _marks(self) -> list[Marks]:
        bits = _Bits(len(self._inputs))
        marks: list[Marks] = []
        slots, inputs = self._slots, self._inputs
        for index, node in enumerate(self._nodes):
            level = waits = needs = 0
            slot = slots[index]
            data = self._data_of(node)
            for need in self._needs[index]:
                before, waited, needed = marks[need]
                if slots[need] is not None and slots[need] != slot:
                    before += 1
                    late = bits.of(slots[need])  # its backend may suspend its ops
                    waits, needs = waits | late, needs | late
                if before > level:
                    level = before
                if waited is not waits:  # masks are long in a long program, and mostly one object
                    waits = waits | waited if waits else waited
                if needed is not needs and (data is None or need in data):
                    needs = needs | needed if needs else needed
            if inputs:
                for name in node.reads:
                    if name in inputs:
                        waits, needs = waits | inputs[name], needs | inputs[name]
            if slot is None and not _is_transparent(node):
                bit = bits.next()
                if _is_apart(node):
                    waits = needs = bit
                else:
                    waits, needs = waits | bit, needs | bit
            else:
                # A value that a graph may lose is no source, and nothing waits inside a graph: an
                # op with an order edge from such a value gets a mark for it, to join another graph.
                for name in node.after:
                    if name not in node.inputs and self._may_be_lost(name):
                        bit = bits.of(name)
                        waits, needs = waits | bit, needs | bit
            marks.append((level, waits, needs))
        return marks

    def _data_of(self, node: OpNode) -> set[int] | None:
        """Return the makers of an op's inputs; None if it only follows those."""
        if keys.CONTROL_AFTER_KEY not in node.metadata:
            return None
        return {self._makers[name] for name in node.reads if name in self._makers}

    def _may_be_lost(self, name: str) -> bool:
        """Return True if a graph makes a value, directly or through ops that hand it on."""
        seen: set[int] = set()
        stack = [name]
        while stack:
            index = self._makers.get(stack.pop())
            if index is None or index in seen:
                continue
            seen.add(index)
            node = self._nodes[index]
            if self._slots[index] is not None or node.op_type == "PassThrough":
                return True  # a PassThrough may check a shape
            if _is_transparent(node):
                stack += node.reads
        return False

    def _can_fail(self, index: int) -> bool:
        return not is_infallible(self._nodes[index], self._function)

    def _is_same_for_all(self, first: Marks, second: Marks) -> bool:
        """Return True if marks differ only in inputs, which all arrive with one invoke."""
        inputs = (1 << len(self._inputs)) - 1
        return all(
            one | inputs == other | inputs for one, other in zip(first[1:], second[1:], strict=True)
        )

    def _raise(self, marks: list[Marks]) -> set[int]:
        """Assign a group's marks to ops that only it reads; return the constants to copy.

        An op that can fail keeps its own marks, unless it runs in the same executions anyway.
        """
        copied = set()
        parameters = {
            name
            for node in self._nodes if keys.QUANTIZATION_KEY in node.metadata
            for name in annotation_parameters(node)
        }  # fmt: skip
        slots = self._slots
        for index in range(len(self._nodes) - 1, -1, -1):
            readers = self._readers[index]
            slot = slots[index]
            if slot is None or self._is_output[index]:
                continue
            if not readers:
                node = self._nodes[index]
                if node.op_type == "Constant" and not parameters.isdisjoint(node.outputs):
                    copied.add(index)  # only an annotation refers to it
                continue
            if {slots[reader] for reader in readers} != {slot}:
                continue
            first = marks[readers[0]]
            if not self._waited_for.isdisjoint(self._nodes[index].outputs):
                continue
            if len(readers) == 1 or all(marks[reader] == first for reader in readers):
                if self._is_same_for_all(marks[index], first) or not self._can_fail(index):
                    marks[index] = first
            elif self._is_small_constant(self._nodes[index]):
                copied.add(index)
        return copied

    def _is_small_constant(self, node: OpNode) -> bool:
        if node.op_type != "Constant" or node.inputs or node.after:
            return False
        if node.graphs:
            return False
        size = sum(self._prints.of(attribute).size for attribute in node.attributes.values())
        return size <= MAX_COPIED_CONSTANT_BYTES


class _Bits:
    """Allocates the bits of marks, except those of the inputs."""

    def __init__(self, inputs: int) -> None:
        self._next = 1 << inputs
        self._known: dict[str | None, int] = {}

    def next(self) -> int:
        """Return a fresh bit."""
        bit = self._next
        self._next <<= 1
        return bit

    def of(self, name: str | None) -> int:
        """Return the bit of a value or a slot."""
        if name not in self._known:
            self._known[name] = self.next()
        return self._known[name]


def _top(parents: list[int], index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index


def _is_apart(node: OpNode) -> bool:
    """Return True if an op's outputs may arrive without some of its inputs, or elsewhere."""
    if starts_executions(node):
        return True
    if node.domain != keys.SYSCALL_DOMAIN or node.op_type not in _FIRST_OF:
        return False
    inputs = sum(1 for name in node.inputs if name)
    return inputs > 1 and (node.op_type != keys.OP_THRESHOLD or node.attr("n") != inputs)


def _is_transparent(node: OpNode) -> bool:
    if node.domain in (keys.SYSCALL_DOMAIN, "", keys.ONNX_DOMAIN):
        return node.op_type in TRANSPARENT
    return False
