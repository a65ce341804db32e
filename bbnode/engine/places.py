"""Places of ops in their author's source, from what the artifact says.

Rule: a place is looked up when an op has failed, never before. A fused graph stands for many ops of
the author's: the backend's error names the one that failed; else the place is all their lines.
Whatever an artifact says here, looking it up raises nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bbnode.components.errors import BackendError
from bbnode.ir import keys
from bbnode.ir.graph import OpNode
from bbnode.ir.reopen import FusedOp, members_of, members_text

_MOST_FILES = 4  # of which lines are listed
# A node of a fused graph is called `<op type>_<number>`. A backend that fuses further adds to the
# name of a node that it starts from: "fused Gemm_0", "MatMul_1/MatmulTransposeFusion/".
_NUMBERED = re.compile(r"(?:^|[^A-Za-z0-9_])[A-Z][A-Za-z0-9]*_(\d{1,9})(?![A-Za-z0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlace:
    """One place: `<file>:<line>`, the Module, and the op inside of a fused graph, where known."""

    line: str = ""
    module: str = ""
    inner: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.inner, self.outer)))

    @property
    def outer(self) -> str:
        """The same without the op inside of a fused graph."""
        module = self.module and f"in Module {self.module}"
        return ", ".join(filter(None, (self.line, module)))


NOWHERE: Final = SourcePlace()


class OpPlace:
    """The place of one op of a plan; of a fused graph, the places of its ops."""

    __slots__ = ("_members", "_place")

    def __init__(self, node: OpNode) -> None:
        module = node.metadata.get(keys.MODULE_INSTANCE_KEY, "")
        self._place = SourcePlace(line=node.source_line, module=module)
        # As text until it is asked for: most graphs never fail.
        self._members: str | Sequence[FusedOp] = members_text(node.metadata)

    def of(self, error: BaseException | None = None) -> SourcePlace:
        """Return the place that an error of the op is about."""
        return self.at(blamed_node(error))

    def at(self, name: str) -> SourcePlace:
        """Return the place of the node `name` of a fused graph; "" for all of it."""
        return self.at_number(number_of(name))

    def at_number(self, number: int | None) -> SourcePlace:
        """Return the place of a node of a fused graph by its position; None for all of it."""
        if not self._members:
            return self._place
        if isinstance(self._members, str):
            self._members = members_of(self._members)
        if number is not None and number < len(self._members):
            found = self._members[number]
            return SourcePlace(line=found.line, module=found.module, inner=found.name)
        lines = listed(member.line for member in self._members)
        return SourcePlace(line=lines or self._place.line, module=self._place.module)


def blamed_node(error: BaseException | None) -> str:
    """Return the node of a graph that a backend's error names, or ""."""
    # No attribute access: a backend's own error class may do anything there.
    name = vars(error).get("node", "") if isinstance(error, BackendError) else ""
    return name if isinstance(name, str) else ""


def number_of(name: str) -> int | None:
    """Return the position in its fused graph of the node that a backend names; None if unknown."""
    number = _NUMBERED.search(name)
    return None if number is None else int(number[1])


def listed(lines: Iterable[str]) -> str:
    """Return `<file>:<line>`s as one text, the lines of each file as a range."""
    ranges: dict[str, tuple[int, int]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        if file and number.isascii() and number.isdigit() and len(number) < 10:
            low, high = ranges.get(file, (int(number), int(number)))
            ranges[file] = min(low, int(number)), max(high, int(number))
    shown = [
        f"{file}:{low}" if low == high else f"{file}:{low}-{high}"
        for file, (low, high) in list(ranges.items())[:_MOST_FILES]
    ]
    more = len(ranges) - len(shown)
    return ", ".join([*shown, f"{more} files more"] if more else shown)
