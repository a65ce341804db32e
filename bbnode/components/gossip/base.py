"""A vector and the checks of what peers send, which the components of gossip share.

Rule: what a peer sent is checked before it is kept, and a refusal names the peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import OpContext, ProtocolComponent
from bbnode.components.errors import ComponentError, ContributionRefused
from bbnode.components.vectors import vector_problem
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, Value

Vector = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

MOST_TOLD = 8  # peers that the stats of one round name


class StaleRound(ContributionRefused):
    """A peer sent what belongs to a round that is over."""


class RoundUnderWay(ComponentError):
    """A peer is to begin a round before its last one has ended."""


class GossipComponent(ProtocolComponent):
    """Base: settings `size` and `max_abs`, and checks by them."""

    config: Any  # has `size` and `max_abs`
    positive: ClassVar[tuple[str, ...]] = ()  # settings that have to be numbers above 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(config.size >= 1, f"size is {config.size}; 1 or more")
        for name in ("max_abs", *self.positive):
            value = getattr(config, name)
            self.require(0 < value < math.inf, f"{name} is {value}; a number above 0")

    def problem(self, tensor: Value) -> str | None:
        """Return why a vector can't be averaged."""
        return vector_problem(tensor, self.config.size, self.config.max_abs)

    def checked(self, ctx: OpContext, tensor: Value) -> Vector:
        """Return a vector of this node's; ContributionRefused names it."""
        reason = self.problem(tensor)
        if reason is not None:
            raise self.refusal(ctx.self_peer, reason)
        assert isinstance(tensor, np.ndarray)
        return tensor

    def refusal(self, peer: PeerId, reason: str) -> ContributionRefused:
        """Return the error for what a peer sent."""
        return ContributionRefused(component=self.TYPE_NAME, peer=str(peer), reason=reason)


def numbers_of(value: Value, count: int) -> tuple[int, ...] | None:
    """Return the numbers of an int64 [count] of at least -1 each; None for anything else."""
    if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.shape != (count,):
        return None
    found = tuple(int(each) for each in value)
    return found if min(found) >= -1 else None


def listed(peers: Iterable[object]) -> str:
    """Return peers as text, no more than `MOST_TOLD` of them."""
    names = [str(peer) for peer in peers]
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return ", ".join(names[:MOST_TOLD]) + more


def frozen(vector: npt.NDArray[Any]) -> Vector:
    """Return a vector as float32 that nobody changes."""
    found = vector.astype(np.float32)
    found.flags.writeable = False
    return found


def told(**entries: float | str) -> Metadata:
    """Return Metadata, without the texts that are empty."""
    return Metadata(**{name: value for name, value in entries.items() if value != ""})
