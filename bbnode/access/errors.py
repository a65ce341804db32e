"""Errors and refusals of access.

Rule: a signed document of somebody else is refused with a `Refusal`, whose value is the stable
label that logs, metrics and `bbnode peers --why` show; the message says what to do about it.
"""

from __future__ import annotations

import enum

from bbnode.ir.errors import DeploymentError, EnvironmentFault, PeerError


class Refusal(enum.Enum):
    """The reason why a signed document is refused; the value is the label that users match on."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    UNKNOWN_VERSION = "unknown_version"
    BAD_SIGNATURE = "bad_signature"
    WRONG_NETWORK = "wrong_network"
    WRONG_PEER = "wrong_peer"
    NOT_GRANTED = "not_granted"  # the signer had no right to grant
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    REVOKED = "revoked"
    NO_STATEMENT = "no_statement"
    STALE = "stale"  # a newer one is known
    USED_UP = "used_up"
    LEDGER_FULL = "ledger_full"


class AccessRefused(PeerError):
    """A document of a peer or a user is refused; `reason` says why."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StatementRefused(AccessRefused):
    """A membership statement, or a chain of them, is refused."""


class RevocationRefused(AccessRefused):
    """A revocation list is refused."""


class TicketRefused(AccessRefused):
    """A ticket is refused."""


class ReleaseRefused(AccessRefused):
    """A release is refused."""


class GrantError(DeploymentError):
    """A signature that the user asked for is not possible: a bound, a date, or a missing right."""


class PolicyError(DeploymentError):
    """A list or a limit of the policy is over its bound."""


class IdentityError(EnvironmentFault):
    """A private key, or the file of one, cannot be read, written, trusted or understood."""
