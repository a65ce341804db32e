"""Bounds of a transport.

Rule: whatever a peer or our own engine can make grow stands here with its default, its unit
and the reason; each bound has a typed failure or a counter.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024

# Envelopes over this travel on the bulk stream in chunks, so that small ones are not held up.
MAX_CONTROL_ENVELOPE_BYTES = 64 * 1024
# The largest message of all; the engine's own cap on envelopes is usually far below it.
MAX_MESSAGE_BYTES = 4096 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds of a backend. Each has a typed failure or a counter."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    # Per peer, not yet acknowledged; the bytes on each lane. What is refused is lost to the
    # execution that sent it, so a burst of what daemons take by default (256 MiB each) has to
    # fit, and to wait until the peer has room. A message is kept by reference, so that one that
    # its op still has costs nothing more here; and one that is alone on its lane is always taken.
    queue_envelopes: int = 1024
    queue_bytes: int = 1024 * _MIB
    # Received and not yet taken by the driver: per peer, and of all peers together (the
    # engine's own ingress budget in FACTS). How much of it who may fill: `room.FILL_SIXTEENTHS`.
    inbox_envelopes_per_peer: int = 1024
    inbox_bytes_per_peer: int = 64 * _MIB
    inbox_bytes: int = 256 * _MIB
    # Messages over `inbox_bytes_per_peer` have a budget of their own, one of each peer at a
    # time: the first is always taken, more while they are within it together.
    inbox_large_bytes: int = 1024 * _MIB
    # Events other than envelopes that lie unread before new connections are refused.
    inbox_notices: int = 4096
    # What a peer may send and we have not acknowledged, by lane. The bulk window is what a
    # small envelope can stand behind in the one TCP queue: 2 MiB are 15 to 25 ms of what
    # py-libp2p moves, and enough for 40 MB/s over a round trip of 50 ms.
    control_window_bytes: int = _MIB
    bulk_window_bytes: int = 2 * _MIB
    # How long the acknowledgement of a small envelope waits for one to travel with.
    ack_delay_s: float = 0.02
    # Unacknowledged messages are kept for this long after the last connection is gone: a
    # cut of 10 s and the redial after it are well within. So is a part of a large message.
    resume_s: float = 30.0
    # What has been received of a peer is remembered for this long after that, so that a
    # sender that noticed the loss later (by `silence_s`) is not taken for a new one.
    remember_s: float = 120.0
    # No progress of a transfer, or in what we sent being acknowledged, while bytes may flow.
    stall_s: float = 60.0
    # A large message has to come at this rate, over no less than `slow_s` and with as long before
    # that to begin: a sixth of a home's uplink of 1 Mbit/s. Longer than `silence_s`, so that a link
    # that is cut is found out as such, and the message goes on. Only time counts in which we
    # would have taken more.
    slow_bytes_per_s: float = 16 * 1024
    slow_s: float = 20.0
    # From the first byte of a frame that is not passed on in parts (64 KiB at most) to its last.
    frame_s: float = 30.0
    # How often it is looked at whether there is room for what is held.
    room_check_s: float = 1.0
    # Buffered by a connection and not read, on all its streams. The other side's window is
    # 256 KiB a stream, and at most 16 MiB once it has grown: twice that is a flood.
    unread_bytes: int = 32 * _MIB
    # The same before the hello, which is one frame of at most 32 KiB.
    opening_unread_bytes: int = 256 * 1024
    # The same of all connections together; of the one that has most the peer is cut off.
    all_unread_bytes: int = 256 * _MIB
    # Writes on one lane that may fail in a row before the connection is given up.
    write_failures: int = 3
    max_connections: int = 1024
    # Of these, what strangers never get (a quarter of all at most): members, wanted peers, and
    # peers that took what we sent always find room, and then at a stranger's expense.
    reserved_connections: int = 256
    # Strangers that are connected from one IPv4 address or IPv6 /64, and from one /24 or /48: an
    # office or a school behind one address fits. Not for addresses that are not global.
    strangers_per_address: int = 128
    strangers_per_network: int = 256
    # A stranger that was of no use for so long may be closed for another one.
    idle_stranger_s: float = 10.0
    # Connections that were accepted and have not said hello: in all, and by prefix as above.
    max_waiting: int = 256
    waiting_per_address: int = 64
    waiting_per_network: int = 128
    # From the accepted socket to the end of the Noise handshake: three round trips, which are
    # 1.8 s over a satellite.
    authenticate_s: float = 3.0
    # Guests of a private network, who show a ticket to redeem it: all of them at once, and how
    # long one stays. Redeeming takes a second.
    max_guests: int = 16
    guest_s: float = 30.0
    # One in use, one that replaces it, and as many again for simultaneous dials.
    max_connections_per_peer: int = 4
    # Streams of other protocols, of one peer and in each direction.
    protocol_streams_per_peer: int = 8
    # A stream of another protocol on which nothing has moved for so long is reset. Circuits
    # carry pings every 5 s.
    stream_idle_s: float = 60.0
    # A stream that belongs to nobody: its negotiation does not end, its lane has a newer one, or
    # our side of it has ended and the other's has not.
    stray_stream_s: float = 20.0
    # From the handshake to the hello of who dialled us: 4.5 round trips, 2.7 s over a satellite.
    hello_timeout_s: float = 5.0
    # The same of whom we dialled, and through a relay.
    dialled_hello_s: float = 10.0
    ping_interval_s: float = 5.0
    # Three pings without any byte in return.
    silence_s: float = 15.0
    # How long two sides take leave before the connection is cut anyway.
    farewell_s: float = 5.0
    redial_min_s: float = 0.2
    redial_max_s: float = 30.0
    # The most between two looks at a peer that our own authorizer denies: dates and lists
    # change here, without a word from the peer.
    redial_denied_s: float = 5.0
    # How often a peer that is connected through a relay is dialled directly.
    direct_retry_s: float = 30.0
