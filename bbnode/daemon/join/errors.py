"""Errors of joining, one class each.

Rule: one line that says what to do next; a ticket's own faults are `TicketRefused` of
`bbnode.access`, the artifact's are of `bbnode.daemon.artifacts.artifact` and `artifact_exchange`.
"""

from __future__ import annotations

from bbnode.ir.errors import DeploymentError, EnvironmentFault, PeerError


class NotAnInvitation(DeploymentError):
    """The text is neither a ticket nor the address of a peer."""


class InviterUnreachable(EnvironmentFault):
    """No address of the inviting peer answers."""


class WrongPeer(PeerError):
    """Somebody else answers at the inviting peer's address."""


class InviterRefused(PeerError):
    """The inviting peer does not let this one connect, or talk."""


class InviterLost(EnvironmentFault):
    """The connection with the inviting peer broke, again and again."""


class NothingOffered(PeerError):
    """The peer does not say which artifact it runs."""


class TargetNeeded(DeploymentError):
    """The artifact has several targets, and nobody said which one to play."""


class ComponentsMissing(DeploymentError):
    """The target needs component types that are not installed here."""


class SlotsNotConfigured(DeploymentError):
    """Slots of the target need settings that only this machine's user knows."""


class NotConfirmed(DeploymentError):
    """Nobody agreed to run what was offered."""
