"""The outputs that an execution may give later, through messages that come back.

Rule: it is derived from the whole program: an entry's sends start the entries that receive them, in
any class, and a join starts the entry that continues with the gathered values. The consequences of
requests belong to the execution that asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bbnode.ir import keys
from bbnode.ir.address import parse_site_suffix
from bbnode.ir.flatten import (
    ENGINE_DOMAIN,
    OP_DEPOSIT,
    OP_JOINED,
    FlatFunction,
    FlatOp,
    MalformedFlow,
    check_values,
    flatten,
)
from bbnode.ir.graph import Program
from bbnode.ir.slices import INVOKE, Slice, cut_slices

# A slice, as the names of its target and itself.
_At = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entry of a target: its outputs, the sites it sends to, the joins it adds to."""

    outputs: frozenset[str]
    sites: frozenset[int]
    joins: frozenset[str]


class Reach:
    """The entries of all targets of a program, and the ways that lead from one to another."""

    def __init__(self, program: Program) -> None:
        """Analyse nothing yet: most nodes are never asked."""
        self._program = program

    def later(self, target: str, entry: str | None = None) -> frozenset[str]:
        """Return the outputs of a target that come after an execution of it, by messages or joins.

        `entry` is the input that starts it, None: all of them do. Empty for an unknown target.
        """
        entries = self._entries
        name = next((n for n, _ in entries if target in (n, n.partition("#")[0])), target)
        start = (name, INVOKE if entry is None or (name, entry) not in entries else entry)
        if start not in entries:
            return frozenset()
        seen, stack = {start}, [start]
        while stack:
            for at in self._next(stack.pop()):
                if at not in seen:
                    seen.add(at)
                    stack.append(at)
        outputs = {out for at in seen - {start} if at[0] == name for out in entries[at].outputs}
        return frozenset(outputs - entries[start].outputs)

    def _next(self, at: _At) -> Iterator[_At]:
        entry = self._entries[at]
        for site in entry.sites:
            yield from self._receivers.get(site, ())
        for join in entry.joins:
            if (at[0], join) in self._entries:
                yield at[0], join

    @cached_property
    def _receivers(self) -> dict[int, list[_At]]:
        receivers: dict[int, list[_At]] = {}
        for flat, pieces in self._flat:
            for piece in pieces:
                if piece.source is not None and piece.source.domain == keys.WIRE_DOMAIN:
                    text = piece.source.node.metadata.get(keys.SITE_ID_KEY, "")
                    if text.isascii() and text.isdigit():
                        receivers.setdefault(int(text), []).append((flat.name, piece.name))
        return receivers

    @cached_property
    def _entries(self) -> dict[_At, _Entry]:
        return {
            (flat.name, piece.name): _entry(flat, piece)
            for flat, pieces in self._flat
            for piece in pieces
        }

    @cached_property
    def _flat(self) -> list[tuple[FlatFunction, list[Slice]]]:
        mains, library = [], {}
        for function in self._program.functions:
            if function.metadata.get(keys.TARGET_KEY) == "true":
                mains.append(function)
            elif function.domain != keys.BACKEND_SUBGRAPH_DOMAIN:
                library[function.key] = function
        cut = []
        for main in mains:
            try:
                flat = flatten(main, library)
                cut.append((flat, cut_slices(flat, check_values(flat))[0]))
            except MalformedFlow:
                continue  # a class that this node never installs
        return cut


def _entry(flat: FlatFunction, piece: Slice) -> _Entry:
    ops = [flat.ops[position] for position in piece.positions]
    values = {*piece.seeds, *(name for op in ops for name in op.outputs)}
    return _Entry(
        outputs=frozenset(values.intersection(flat.outputs)),
        sites=frozenset(site for op in ops for site in _sites(op)),
        joins=frozenset(_joined(flat, op).name for op in ops if op.is_a(ENGINE_DOMAIN, OP_DEPOSIT)),
    )


def _joined(flat: FlatFunction, deposit: FlatOp) -> FlatOp:
    """Return the op that continues with the values of a deposit: it follows the last deposit."""
    at = deposit.position
    while not flat.ops[at].is_a(ENGINE_DOMAIN, OP_JOINED):
        at += 1
    return flat.ops[at]


def _sites(op: FlatOp) -> Iterator[int]:
    if op.domain != keys.WIRE_DOMAIN:
        return
    for name, attribute in op.node.attributes.items():
        if name.startswith(keys.DEST_SUFFIX_PREFIX) and isinstance(attribute.value, bytes):
            site = parse_site_suffix(attribute.value)
            if site is not None:
                yield site
