"""Errors of secure aggregation."""

from __future__ import annotations

from bbnode.components.errors import ComponentError
from bbnode.ir.errors import DeploymentError, PeerError


class RingTooNarrow(ComponentError, DeploymentError):
    """Sums of so many clients with such weights do not fit into 64 bits."""


class RoundViolated(ComponentError, PeerError):
    """A party asked for, or sent, what the protocol forbids; nothing was revealed to it."""


class RoundUnknown(ComponentError):
    """A step of a round that this node is not in: it restarted, gave up, or has finished."""


class TooFewClients(ComponentError):
    """Fewer clients than the threshold are left, so that the round ends without a sum."""

    def __init__(self, *, step: str, left: int, needed: int, why: str = "") -> None:
        self.step, self.left, self.needed = step, left, needed
        super().__init__(
            f"secure aggregation ended at {step}: {left} client(s) left, {needed} needed"
            f"{'; ' if why else ''}{why}; begin another round"
        )


class UnmaskingFailed(ComponentError, PeerError):
    """The shares that were revealed do not give a secret back, or the sum can't be one."""


class NotMaskable(ComponentError):
    """A client's vector can't be part of a sum: by its size or type, or for NaN or infinity."""
