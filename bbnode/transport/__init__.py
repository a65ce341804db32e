"""Transports, which move envelopes between peers, and everything that the author of one needs.

A transport is a subclass of `Transport`. A package adds its own by an entry point of the group
`bbnode.transports` that names a factory, which gets a `TransportSetup`; a node uses it if its
configuration says `network.transport = "<name>"`. For a transport that is built from connections,
`bbnode.transport.links.transport.LinkTransport` does most of the work; one that modifies another
wraps it (`TransportWrapper`).
"""

from __future__ import annotations

from bbnode.access.decision import Decision, Standing
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    COUNTERS,
    NOT_ALLOWED,
    PROTOCOL_VERSION,
    Authorizer,
    Buffer,
    Capability,
    ConnectionClosed,
    ConnectionOpened,
    Counters,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    EventStream,
    Hello,
    HelloRefused,
    PeerInfo,
    ProtocolHandler,
    ProtocolStream,
    ProtocolViolation,
    RelayMisused,
    Transport,
    TransportEvent,
    TransportMetrics,
    TransportSetup,
    Unsent,
    WantedPeer,
    read_exactly,
)
from bbnode.transport.errors import (
    DeniedPeerError,
    DialError,
    EnvelopeTooLargeError,
    FrameError,
    HelloError,
    ListenError,
    NotAllowedError,
    NotConnectedError,
    NotSupportedError,
    QueueFullError,
    RelayFault,
    StreamBrokenError,
    TooManyStreamsError,
    UnknownTransport,
    Violation,
)
from bbnode.transport.identity import Identity
from bbnode.transport.limits import RelaySettings, TransportLimits
from bbnode.transport.registry import make_transport, transport_names
from bbnode.transport.wrapper import TransportWrapper

__all__ = [
    "COUNTERS",
    "NOT_ALLOWED",
    "PROTOCOL_VERSION",
    "Authorizer",
    "Buffer",
    "Capability",
    "ConnectionClosed",
    "ConnectionOpened",
    "Counters",
    "Decision",
    "DeliveryFailed",
    "DeniedPeerError",
    "DialError",
    "Direction",
    "EnvelopeReceived",
    "EnvelopeTooLargeError",
    "EventStream",
    "FrameError",
    "Hello",
    "HelloError",
    "HelloRefused",
    "Identity",
    "ListenError",
    "NotAllowedError",
    "NotConnectedError",
    "NotSupportedError",
    "PeerId",
    "PeerInfo",
    "ProtocolHandler",
    "ProtocolStream",
    "ProtocolViolation",
    "RelayFault",
    "RelayMisused",
    "QueueFullError",
    "RelaySettings",
    "Standing",
    "StreamBrokenError",
    "TooManyStreamsError",
    "Transport",
    "TransportEvent",
    "TransportLimits",
    "TransportMetrics",
    "TransportSetup",
    "TransportWrapper",
    "UnknownTransport",
    "Unsent",
    "Violation",
    "WantedPeer",
    "make_transport",
    "read_exactly",
    "transport_names",
]
