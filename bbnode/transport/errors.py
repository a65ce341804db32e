"""Errors of the transport.

Rule: an error that a caller can get is typed and says whose fault it is; one that only the
transport's own tasks get (a broken stream) is translated before it leaves the package.
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
    """The transport libp2p needs py-libp2p, which is not installed here, or not whole."""


class FrameError(PeerError):
    """Bytes on one of our streams are not the frames that belong there."""


# In the text of a HandshakeError, and of the DialError that it becomes.
OTHER_KEY: Final = "another peer answers there"


class HandshakeError(PeerError):
    """Bytes before a connection was secured are not the handshake that belongs there."""


class NegotiationError(PeerError):
    """The two sides do not agree on a protocol, or the peer does not negotiate as it should."""


class HelloError(PeerError):
    """The first message of a connection is not an acceptable hello."""


class NotSupportedError(DeploymentError):
    """The transport that the node was given cannot do this."""


class UnknownTransport(DeploymentError):
    """No installed package brings a transport of this name."""


class StreamBrokenError(EnvironmentFault):
    """A stream was reset, or its connection is gone; the connection may still be usable."""


class DialError(EnvironmentFault):
    """An address could not be dialled, or somebody else answered there."""


class RelayRefusedError(DialError):
    """A relay made no circuit; `status` says why (RelayStatus)."""

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

    # A malformed frame, or one that does not belong there.
    FRAME = "frame"
    # More than the window that it was given.
    FLOOD = "flood"
    # A message or frame that arrives too slowly.
    SLOW = "slow"
