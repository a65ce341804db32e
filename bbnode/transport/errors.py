"""Errors of the transport.

Rule: an error that reaches a caller is typed and says whose fault it is; one that only the
transport's own tasks see (a broken stream) is translated before it leaves the package.
"""

from __future__ import annotations

import enum
from typing import Final

from bbnode.ir.errors import AuthorError, DeploymentError, EnvironmentFault, PeerError


class ListenError(EnvironmentFault):
    """A listen address cannot be used: it is taken, not ours, or of the wrong kind."""


class NotConnectedError(EnvironmentFault):
    """There is no connection with the peer, so nothing can be queued for it."""


class QueueFullError(PeerError):
    """The peer takes its envelopes more slowly than they are sent."""


class EnvelopeTooLargeError(AuthorError):
    """One envelope is over the cap, `max_message_bytes`."""


class NotAllowedError(DeploymentError):
    """The authorizer does not let us send this to the peer."""


class DeniedPeerError(NotConnectedError, NotAllowedError):
    """There is no connection with the peer because our own authorizer did not allow it."""


class TooManyStreamsError(EnvironmentFault):
    """The bound on streams of other protocols with one peer is reached."""


class Libp2pMissing(EnvironmentFault):
    """The transport libp2p needs py-libp2p, which is missing or incomplete here."""


class FrameError(PeerError):
    """The bytes on one of our streams are not valid frames."""


# Part of the message of a HandshakeError, and of the DialError that it becomes.
OTHER_KEY: Final = "another peer answers there"


class HandshakeError(PeerError):
    """The peer sent no valid handshake."""


class NegotiationError(PeerError):
    """The two sides do not agree on a protocol, or the peer negotiates incorrectly."""


class HelloError(PeerError):
    """The first message of a connection is not an acceptable hello."""


class NotSupportedError(DeploymentError):
    """The node's transport does not support this."""


class UnknownTransport(DeploymentError):
    """No installed package brings a transport of this name."""


class StreamBrokenError(EnvironmentFault):
    """A stream was reset, or its connection is gone; the connection may still be usable."""


class DialError(EnvironmentFault):
    """An address could not be dialled, or another peer answered there."""


class RelayRefusedError(DialError):
    """A relay refused a circuit; `status` has the reason (RelayStatus)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class OtherPeerError(HandshakeError):
    """Another peer is at the other end than the one that should be there."""


class RelayFault(enum.StrEnum):
    """A fault of a peer as a relay, or as a user of one; the value is what users see."""

    # Bytes that are no message, one that does not belong there, or is too large.
    MALFORMED = "malformed"
    # A reservation that was over when it was given.
    EXPIRED = "expired"
    # A reservation for longer than MAX_RESERVATION_S.
    ENDLESS = "endless"
    # A circuit that carries less than MIN_CIRCUIT_BYTES.
    USELESS = "useless"
    # Another peer at the other end of a circuit than the relay has said.
    ANOTHER_PEER = "another_peer"
    # A circuit of somebody with whom there is no reservation.
    UNINVITED = "uninvited"
    # An address that it says is its own, at which another peer is.
    ADDRESSES = "addresses"
    # Silence where an answer is due.
    SILENT = "silent"
    # More requests than a peer may send.
    FLOOD = "flood"


class Violation(enum.Enum):
    """The way in which a peer broke the protocol."""

    # A malformed or unexpected frame.
    FRAME = "frame"
    # More data than its window allows.
    FLOOD = "flood"
    # A message or frame that arrives too slowly.
    SLOW = "slow"
