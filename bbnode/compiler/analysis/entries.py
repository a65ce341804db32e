"""The entries from which each op of a body can fire.

Rule: an entry is an op that starts executions (`bbnode.ir.slices`), or `invoke` with the
function's inputs. An op that depends on an entry, directly or indirectly, fires in that entry's
executions and in no others. Entries are bits of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, is_role
from bbnode.ir.slices import starts_executions

INVOKE = 1  # the bit of `invoke`; the others follow in node order


@dataclass(slots=True)
class EntryMap:
    """Masks of entries by node index, for a body in topological order.

    Attributes:
        origin: entries that the op depends on, by data or `after`.
        wanted: for an op without an origin: entries of the ops that depend on it.
        beside: for an op without either: entries in which its inputs are made, except
            constants, since those are made everywhere.
    """

    origin: list[int]
    wanted: list[int]
    beside: list[int]

    @classmethod
    def of(cls, function: Function, reads: Sequence[Sequence[str]]) -> EntryMap:
        """Propagate entries through a body once forward and once back; `reads` as `flow.reads`."""
        by_value = dict.fromkeys(function.inputs, INVOKE)  # nobody reads "", which a node may make
        origin = []
        bit = INVOKE
        for node, names in zip(function.nodes, reads, strict=True):
            mask = 0
            if starts_executions(node):  # its inputs belong to earlier executions
                bit <<= 1
                mask = bit
            else:
                for name in names:
                    known = by_value.get(name, 0)
                    if known is not mask:
                        mask = mask | known if mask else known
            origin.append(mask)
            for name in node.outputs:
                by_value[name] = mask
        wanted = _wanted(function.nodes, reads, origin)
        return cls(origin, wanted, _beside(function.nodes, reads, origin, wanted))

    def key(self, index: int) -> int:
        """Return the entries in whose executions an op fires; 0 if undetermined."""
        return self.origin[index] or self.wanted[index]


def _wanted(
    nodes: Sequence[OpNode], reads: Sequence[Sequence[str]], origin: Sequence[int]
) -> list[int]:
    by_value: dict[str, int] = {}
    wanted = [0] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        if not origin[index]:
            for name in nodes[index].outputs:
                wanted[index] |= by_value.get(name, 0)
        mask = origin[index] or wanted[index]
        for name in reads[index] if mask else ():
            known = by_value.get(name, 0)
            if known is not mask:
                by_value[name] = known | mask if known else mask
    return wanted


def _beside(
    nodes: Sequence[OpNode],
    reads: Sequence[Sequence[str]],
    origin: Sequence[int],
    wanted: Sequence[int],
) -> list[int]:
    by_value: dict[str, int] = {}
    beside = [0] * len(nodes)
    for index, node in enumerate(nodes):
        mask = origin[index] or wanted[index]
        if not mask:
            for name in reads[index]:
                mask |= by_value.get(name, 0)
            beside[index] = mask
        if node.op_type != "Constant":
            for name in node.outputs:
                by_value[name] = mask
    return beside


def slot_of(node: OpNode) -> str | None:
    """Return the slot whose component an op changes or reads; None for pure backend ops."""
    if not is_role(node):
        return None
    return node.metadata.get(keys.SLOT_KEY)
