"""`Output`: the handle of a value in a recording.

Rule: an Output stands for a value that will exist when the program runs; it belongs to the one
Graph that recorded it and has no content of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from bbnode.dsl.errors import BadArgument, NotReceived
from bbnode.ir.types import TypeNode

if TYPE_CHECKING:
    from bbnode.dsl.graph_core import GraphCore


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A value of a recording: `name` in its function, and `type` as far as it is known."""

    graph: GraphCore = field(repr=False)
    name: str
    type: TypeNode
    from_peer: Output | None = field(default=None, repr=False)

    @property
    def sender(self) -> Output:
        """The peer that a received value came from (PeerId, on the receiver's class).

        Raises:
            NotReceived: no peer sent it; only what `net_out` and `request` give has a sender.
        """
        if self.from_peer is None:
            raise self.graph.error(
                NotReceived,
                f"{self.name!r} was not received, so that it has no sender; only the value that "
                "g.net_out gives, and r.received of a g.request, have one",
            )
        return self.from_peer

    def __bool__(self) -> NoReturn:
        raise self.graph.error(
            BadArgument,
            f"{self.name!r} has no truth value while the program is recorded; "
            "decide at run time with `Where` or `If` of a BackendSlot",
        )


# What `after=` takes: values that must be there before the op fires.
After = Output | list[Output] | tuple[Output, ...] | None
