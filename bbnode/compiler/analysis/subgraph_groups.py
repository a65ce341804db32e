"""Which backend ops run as one graph.

Rule: fusing must not be seen. Ops share a group when they are connected, no path leads out of
the group and back in, and every value that others read from the group would come at the same
time without it. That time is a *stage*: the set of things a value waits for that can come
late or not at all (inputs, receivers, ops that suspend or fail by themselves).

How: along every edge two marks only grow, the number of times a path has left a group
(`level`) and the stage. Ops of one slot with equal marks that are connected form a group; a
ring of groups would have to pass an edge between equal marks, which lies inside a group. An
op that only its own group reads may wait for the group, and takes its readers' marks.
All of it is linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bbnode.compiler.analysis.content_hash import AttributePrints
from bbnode.compiler.typing.peer_lists import moves_peers
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, annotations_on, is_onnx_op

# Ops that hand on what they read, or what was there from the start: they add no stage.
TRANSPARENT = frozenset(
    {*keys.GATE_OPS, "PassThrough", "Tee", "Constant", "OnTrigger", "Clock", "RngU64"}
)
# A constant up to this size is copied into each group that reads it, so that shapes and axes
# are constants there; a larger one (weights) stays a value that groups share.
MAX_COPIED_CONSTANT_BYTES = 4096

Marks = tuple[int, int]  # level, stage


@dataclass(slots=True)
class Groups:
    """Groups of node indices, in node order.

    Attributes:
        members: indices of each group; groups in the order of their first nodes.
        copied: indices of constants that belong to no group but to all their readers'.
        needs: what each node of the function waits for, as `needs_of` gives it.
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
        return None  # it needs the attributes of the function that it stands in
    return node.metadata.get(keys.SLOT_KEY)


def find_groups(function: Function, needs: list[list[int]], prints: AttributePrints) -> Groups:
    """Return the groups of a function in topological order; `needs` as `needs_of`."""
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
        self._nodes = nodes
        self._slots = slots
        self._needs = needs
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
        bit = 1 << len(self._inputs)
        marks: list[Marks] = []
        slots, inputs = self._slots, self._inputs
        for index, node in enumerate(self._nodes):
            level = stage = 0
            slot = slots[index]
            for need in self._needs[index]:
                before, known = marks[need]
                if slots[need] is not None and slots[need] != slot:
                    before += 1
                if before > level:
                    level = before
                if known is not stage:  # long numbers in a long program: most are one object
                    stage = stage | known if stage else known
            if inputs:
                for name in node.reads:
                    if name in inputs:
                        stage |= inputs[name]
            if slot is None and not _is_transparent(node):
                stage |= bit
                bit <<= 1
            marks.append((level, stage))
        return marks

    def _raise(self, marks: list[Marks]) -> set[int]:
        """Copy the marks of a group to ops that only it reads; return the constants to copy."""
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
                    copied.add(index)  # nothing but an annotation names it
                continue
            if {slots[reader] for reader in readers} != {slot}:
                continue
            first = marks[readers[0]]
            if len(readers) == 1 or all(marks[reader] == first for reader in readers):
                marks[index] = first
            elif self._is_small_constant(self._nodes[index]) and not self._is_waited_for(index):
                copied.add(index)
        return copied

    def _is_waited_for(self, index: int) -> bool:
        names = set(self._nodes[index].outputs)
        return any(names & set(self._nodes[r].after) for r in self._readers[index])

    def _is_small_constant(self, node: OpNode) -> bool:
        if node.op_type != "Constant" or node.inputs or node.after:
            return False
        if node.graphs:
            return False
        size = sum(self._prints.of(attribute).size for attribute in node.attributes.values())
        return size <= MAX_COPIED_CONSTANT_BYTES


def _top(parents: list[int], index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index


def _is_transparent(node: OpNode) -> bool:
    if node.domain in (keys.SYSCALL_DOMAIN, "", keys.ONNX_DOMAIN):
        return node.op_type in TRANSPARENT
    return False
