"""Bounds and settings of a transport.

Rule: everything that a peer or our own engine can make grow has a bound here, with its default, its
unit and the reason. Each bound has a typed failure or a counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_MESSAGE_BYTES, bound

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Bounds of a transport. Each has a typed failure or a counter."""

    max_message_bytes: int = bound(
        MAX_MESSAGE_BYTES, "bytes", "one message; a daemon's is its limits.envelope_bytes"
    )
    # A refused message is lost to the execution that sent it, so a burst of messages of the
    # daemon's default bound (256 MiB each) has to fit. Messages are kept by reference: one that its
    # op still has costs nothing more here.
    queue_envelopes: int = bound(1024, "envelopes", "of one peer, not yet acknowledged")
    queue_bytes: int = bound(
        1024 * _MIB, "bytes", "the same, on each lane; a message alone on its lane is always taken"
    )
    # The share that each kind of sender may fill: `inbox.FILL_SIXTEENTHS`.
    inbox_envelopes_per_peer: int = bound(
        1024, "envelopes", "received of one peer and not yet taken by the driver"
    )
    inbox_bytes_per_peer: int = bound(64 * _MIB, "bytes", "the same")
    inbox_bytes: int = bound(
        256 * _MIB, "bytes", "the same of all peers, as the engine's own ingress budget"
    )
    inbox_large_bytes: int = bound(
        1024 * _MIB,
        "bytes",
        "of messages over inbox_bytes_per_peer, one of each peer; the first is always taken",
    )
    inbox_notices: int = bound(
        4096, "events", "other than envelopes that lie unread before new connections are refused"
    )
    # The bulk window is what a small envelope can stand behind in the one TCP queue: 2 MiB are 3
    # to 10 ms of what a core encrypts, and enough for 40 MB/s over a round trip of 50 ms.
    control_window_bytes: int = bound(
        _MIB, "bytes", "of small envelopes that a peer may send and we have not acknowledged"
    )
    bulk_window_bytes: int = bound(2 * _MIB, "bytes", "the same of large ones")
    ack_delay_s: float = bound(
        0.02, "s", "that the acknowledgement of a small envelope waits for one to travel with"
    )
    # Well above a cut of 10 s and the redial after it.
    resume_s: float = bound(
        30.0,
        "s",
        "after the last connection that what is not acknowledged is kept, and parts of large ones",
    )
    remember_s: float = bound(
        120.0,
        "s",
        "after that, that it is remembered what came of a peer: a sender may notice a loss later",
    )
    stall_s: float = bound(60.0, "s", "without progress of a transfer, while bytes may flow")
    # A sixth of a home's uplink of 1 Mbit/s. `slow_s` is longer than `silence_s`, so that a cut
    # link is recognised as one and the message continues on the next. Only time in which we had
    # room for more counts.
    slow_bytes_per_s: float = bound(16 * 1024, "bytes/s", "at which a large message has to come")
    slow_s: float = bound(20.0, "s", "over which that is taken, and as long before that to begin")
    frame_s: float = bound(
        30.0, "s", "from the first byte of a frame that is not passed on in parts to its last"
    )
    room_check_s: float = bound(
        1.0, "s", "between two looks whether there is room for what is held"
    )
    # The other side's window is 256 KiB a stream, and at most 16 MiB once it has grown: twice
    # that is a flood.
    unread_bytes: int = bound(
        32 * _MIB, "bytes", "of one connection that lie unread, on all its streams"
    )
    opening_unread_bytes: int = bound(
        256 * 1024, "bytes", "the same before the hello, which is one frame"
    )
    all_unread_bytes: int = bound(
        256 * _MIB, "bytes", "the same of all connections; whoever has most is cut off at once"
    )
    # Time of the one thread that serves all, by the prices of `links.shares`. What strangers make
    # us do beside their data is never more than a fifth of a core; a hello and all that leads to it
    # takes 3 ms, so a thousand of them may come at once after a quiet time.
    strangers_core: float = bound(0.2, "cores", "for all connections without standing together")
    strangers_burst_s: float = bound(3.0, "s", "of a core that they may take at once")
    stranger_core: float = bound(0.05, "cores", "for each of them")
    member_core: float = bound(0.2, "cores", "for a connection with standing, beside its data")
    core_burst_s: float = bound(0.1, "s", "of a core that a connection may take at once")
    turn_us: int = bound(5_000, "us", "of one turn of a reader, until all others had theirs")
    stranger_turn_us: int = bound(1_000, "us", "the same of a connection without standing")
    indebted_s: float = bound(
        10.0, "s", "for which a stranger may ask for more than its share before it is cut off"
    )
    # What crosses with the end of a stream: some hundred frames, of whoever writes in small ones.
    idle_frames: int = bound(1024, "frames", "that mean nothing, at once, of one connection")
    idle_frames_per_s: float = bound(256.0, "frames/s", "the same, after that")
    cooling_s: float = bound(
        10.0,
        "s",
        "for which a global IPv4 address or IPv6 /64 gets no connection after a stranger there has "
        "flooded us, unless a member is there",
    )
    max_cooling_s: float = bound(600.0, "s", "the same: twice as long each time, at most this")
    write_failures: int = bound(3, "writes", "on one lane that may fail in a row")
    # A thousand clients of an open network, and some.
    max_connections: int = bound(2048, "connections", "in all")
    reserved_connections: int = bound(
        256, "connections", "of these, that strangers never get (a quarter of all at most)"
    )
    # An office or a school behind one address fits.
    strangers_per_address: int = bound(
        128, "connections", "of strangers from one global IPv4 address or IPv6 /64"
    )
    strangers_per_network: int = bound(256, "connections", "the same from one /24 or /48")
    idle_stranger_s: float = bound(
        10.0, "s", "after which a stranger that was of no use may be closed for another one"
    )
    max_waiting: int = bound(256, "connections", "that were accepted and have not said hello")
    waiting_per_address: int = bound(
        64, "connections", "the same from one global IPv4 address or IPv6 /64"
    )
    waiting_per_network: int = bound(128, "connections", "the same from one /24 or /48")
    authenticate_s: float = bound(
        3.0, "s", "from the accepted socket to the end of the handshake: 1.8 s over a satellite"
    )
    max_guests: int = bound(16, "guests", "of a private network, who show a ticket to redeem it")
    guest_s: float = bound(30.0, "s", "that a guest stays; redeeming takes a second")
    # Hosts of libp2p that speak no protocol of bbnode (`network.guests`) have places of their own.
    foreign_hosts: bool = False
    max_foreign: int = bound(64, "hosts", "without a protocol of bbnode that stay connected")
    max_foreign_dialled: int = bound(
        64, "hosts", "the same, that libp2p's services here have dialled"
    )
    foreign_per_address: int = bound(
        8, "hosts", "the same from one global IPv4 address or IPv6 /64"
    )
    foreign_per_network: int = bound(16, "hosts", "the same from one /24 or /48")
    foreign_streams: int = bound(32, "streams", "of such a host at a time, of both sides")
    # What they make us do takes nothing from the share of those who are about to say hello.
    foreign_core: float = bound(0.1, "cores", "for all such hosts together")
    foreign_burst_s: float = bound(1.0, "s", "of a core that they may take at once")
    foreign_bytes_per_s: int = bound(_MIB, "bytes/s", "of data that such a host may send, slowed")
    idle_foreign_s: float = bound(
        120.0, "s", "without a byte after which such a host may be closed for another one"
    )
    max_connections_per_peer: int = bound(
        4, "connections", "one in use, one that replaces it, and as many for simultaneous dials"
    )
    protocol_streams_per_peer: int = bound(
        8, "streams", "of other protocols, of one peer and in each direction"
    )
    stream_idle_s: float = bound(
        60.0, "s", "after which a stream of another protocol is reset; circuits carry pings"
    )
    stray_stream_s: float = bound(
        20.0, "s", "after which one that belongs to nobody, or is half closed, is reset"
    )
    hello_timeout_s: float = bound(
        5.0, "s", "from the handshake to the hello of who dialled us: 2.7 s over a satellite"
    )
    dialled_hello_s: float = bound(10.0, "s", "the same of whom we dialled, and through a relay")
    ping_interval_s: float = bound(
        5.0, "s", "without a byte until who dialled pings; who was dialled waits half as long again"
    )
    silence_s: float = bound(15.0, "s", "without a byte of a peer: three pings of who dialled")
    goodbye_s: float = bound(
        5.0, "s", "that two sides take leave before the connection is cut anyway"
    )
    redial_min_s: float = bound(0.2, "s", "before a peer is dialled again")
    redial_max_s: float = bound(30.0, "s", "the same, at most")
    # Our own dates and lists change without notice from the peer.
    redial_denied_s: float = bound(5.0, "s", "the same of a peer that our own authorizer denies")
    direct_retry_s: float = bound(
        30.0, "s", "between two direct dials of a peer that is connected through a relay"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The settings of relaying, which is off by default, and the bounds of a relay."""

    # Act as a relay for peers that may connect with us.
    serve: bool = False
    # Be reached through relays when nobody can dial us, and dial through them.
    use: bool = False
    # Relays that speak no protocol of bbnode, each with its PeerId, through which we are reached.
    through: tuple[Multiaddr, ...] = ()
    # Peers that may be reached through us, for how long without asking again (an hour, as in
    # libp2p's circuit relay).
    reservations: int = 128
    reservation_s: int = 3600
    # Circuits at a time, in all and with one peer as an end. What one end does not
    # read is kept here, 2 MiB a circuit at most.
    circuits: int = 256
    circuits_per_peer: int = 32
    # A circuit is cut after this time, or this many bytes in both directions. The dialling side
    # replaces it before that, so that nothing waits.
    circuit_s: int = 3600
    circuit_bytes: int = 4 * 1024**3
