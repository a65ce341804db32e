"""Links in virtual time, on pipes instead of sockets: life signs, farewell, duplicates, abuse."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from bbnode.access.decision import Standing
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    Counters,
    DeliveryFailed,
    EnvelopeReceived,
    Hello,
    HelloRefused,
    ProtocolViolation,
)
from bbnode.transport.errors import (
    NotConnectedError,
    QueueFullError,
    StreamBrokenError,
    Violation,
)
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Gate
from bbnode.transport.links.framing import (
    FrameType,
    Lane,
    Position,
    Resume,
    encode_ack,
    encode_header,
    encode_open,
    encode_resume,
)
from bbnode.transport.links.hello import encode_hello
from bbnode.transport.links.link import LINK_MOVES, LaneReader, Link, LinkEvent, LinkState
from bbnode.transport.links.peers import PeerTable
from bbnode.transport.links.shares import FED_DATA_US, FRAME_US, PACKET_US
from tests.patience import PATIENCE_S
from tests.transport.fakes import PipeCarrier, carrier_pair

SMALL, LARGE = sorted((PeerId.from_seed("one"), PeerId.from_seed("two")))


@dataclass
class Side:
    """A peer table with its inbox, without a network."""

    peer: PeerId
    limits: TransportLimits = field(default_factory=TransportLimits)
    session: str = "0" * 16
    made: int = 0
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.inbox = Inbox(self.limits)
        self.table = PeerTable(
            self.peer, limits=self.limits, inbox=self.inbox, counters=self.counters
        )

    def link(self, carrier: PipeCarrier, nursery: trio.Nursery) -> Link:
        self.made += 1
        session = self.table.session(carrier.peer)
        link = Link(
            carrier,
            self.table,
            queue=session.queue,
            hello=encode_hello(
                Hello(
                    link=self.made,
                    session_id=self.session,
                    exchange=session.exchange,
                    classes=self.classes,
                )
            ),
            number=self.made,
            limits=self.limits,
            counters=self.counters,
        )
        carrier.link = link
        self.table.add(link)
        if self.made == 1:
            nursery.start_soon(self.table.looks.run)
        nursery.start_soon(link.run)
        return link

    def count(self, name: str) -> int:
        return self.counters.snapshot()[name]

    def drain(self) -> list[object]:
        events: list[object] = []
        while True:
            try:
                events.append(self.inbox.receive_nowait())
            except trio.WouldBlock:
                return events


def connect(dialler: Side, listener: Side, nursery: trio.Nursery) -> tuple[Link, Link]:
    out, inward = carrier_pair(dialler.peer, listener.peer, nursery)
    # Both links exist before either runs, as both handshakes have ended.
    one, other = dialler.link(out, nursery), listener.link(inward, nursery)
    return one, other


async def never(*_: object) -> None:
    await trio.sleep_forever()


async def quiet() -> None:
    await trio.testing.wait_all_tasks_blocked()


def test_moves_never_leave_closed():
    assert all(state is not LinkState.CLOSED for state, _ in LINK_MOVES)
    for state in (LinkState.OPENING, LinkState.UP, LinkState.CLOSING):
        assert LINK_MOVES[state, LinkEvent.ABORT] is LinkState.CLOSED


async def test_hello_then_envelopes_on_both_lanes(nursery):
    a, b = Side(SMALL), Side(LARGE)
    connect(a, b, nursery)
    await quiet()
    assert [type(e) for e in a.drain()] == [ConnectionOpened]
    assert [type(e) for e in b.drain()] == [ConnectionOpened]
    big = bytes(range(256)) * 2_000
    a.table.send(LARGE, b"small", 1)
    a.table.send(LARGE, [b"", big[:300_000], memoryview(big)[300_000:]], 2)
    a.table.send(LARGE, b"", 3)
    with trio.fail_after(PATIENCE_S):
        await a.table.session(LARGE).queue.wait_idle()
    data = sorted(bytes(e.data) for e in b.drain() if isinstance(e, EnvelopeReceived))
    assert data == [b"", big, b"small"]
    (info,) = a.table.infos()
    assert (info.queued_envelopes, info.queued_bytes) == (0, 0)
    assert info.bytes_out > len(big)
    assert b.count("inbound.envelopes") == 3


async def test_of_a_burst_of_answers_few_carry_an_acknowledgement(nursery, mock_clock):
    a, b = Side(SMALL), Side(LARGE)
    connect(a, b, nursery)
    await quiet()
    begun, turns = a.count("outbound.bytes"), 50
    for _ in range(turns):
        a.table.send(LARGE, b"there", 1)
        await quiet()
        b.table.send(SMALL, b"back", 2)
        await quiet()
    # A header and five bytes each, and little else.
    assert a.count("outbound.bytes") - begun < turns * 21 + 200
    assert len([each for each in b.drain() if isinstance(each, EnvelopeReceived)]) == turns
    # The delay brings the rest.
    mock_clock.jump(1.0)
    await quiet()
    for side in (a, b):
        (info,) = side.table.infos()
        assert (info.queued_envelopes, info.unacknowledged_bytes) == (0, 0)


async def test_between_answers_that_carry_them_no_acknowledgement_goes_alone(
    nursery, autojump_clock, monkeypatch
):
    arrived, take, turns = 0, LaneReader._take, 200

    def counted(reader: LaneReader, data: memoryview) -> None:
        nonlocal arrived
        arrived += 1
        take(reader, data)

    monkeypatch.setattr(LaneReader, "_take", counted)
    a, b = Side(SMALL), Side(LARGE)
    connect(a, b, nursery)
    await quiet()
    begun = arrived
    for _ in range(turns):  # in all, many times `ack_delay_s`
        a.table.send(LARGE, b"there", 1)
        await trio.sleep(0.002)
        b.table.send(SMALL, b"back", 2)
        await trio.sleep(0.002)
    assert arrived - begun == 2 * turns
    await trio.sleep(TransportLimits().ack_delay_s + 0.002)
    assert arrived - begun - 2 * turns <= 2
    for side in (a, b):
        (info,) = side.table.infos()
        assert (info.queued_envelopes, info.unacknowledged_bytes) == (0, 0)


async def test_small_envelopes_pass_large_ones(nursery):
    a, b = Side(SMALL), Side(LARGE, TransportLimits(inbox_envelopes_per_peer=10_000))
    connect(a, b, nursery)
    await quiet()
    b.drain()
    a.table.send(LARGE, bytes(16 * 2**20), 1)
    a.table.send(LARGE, b"first", 2)
    first = await b.inbox.receive()
    assert isinstance(first, EnvelopeReceived)
    assert first.data == b"first"


async def test_rtt_and_long_idle_stays_up(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    one, _ = connect(a, b, nursery)
    with trio.move_on_after(3600):
        await one.closed.wait()
    assert one.state is LinkState.UP
    assert one.heartbeat.rtt_s is not None
    assert a.count("links.silent") == 0


async def test_an_idle_link_has_one_ping_at_a_time_and_both_know_the_round_trip(
    nursery, autojump_clock
):
    a, b = Side(SMALL), Side(LARGE)
    dialled, accepted = connect(a, b, nursery)
    await trio.sleep(12.0)
    # The side that only answers measures now and then.
    assert dialled.heartbeat.rtt_s is not None
    assert accepted.heartbeat.rtt_s is not None
    there, back = dialled.heartbeat.number, accepted.heartbeat.number
    await trio.sleep(60.0)
    assert dialled.heartbeat.number - there == 12
    # Every 30 s, with the next answer.
    assert 1 <= accepted.heartbeat.number - back <= 2
    assert dialled.state is accepted.state is LinkState.UP


async def test_who_was_dialled_pings_a_peer_that_does_not(nursery, autojump_clock):
    a, b = Side(SMALL, limits=TransportLimits(ping_interval_s=1000.0)), Side(LARGE)
    dialled, accepted = connect(a, b, nursery)
    await trio.sleep(60.0)
    # But for the round trip.
    assert dialled.heartbeat.number <= 2
    assert accepted.heartbeat.number >= 6
    assert dialled.state is accepted.state is LinkState.UP


async def test_silent_peer_is_gone_after_15_s(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    a.drain()
    start = trio.current_time()
    # The other process stands still: it neither reads nor writes.
    for _, stream in other.carrier.opened:
        stream.write = never
    with trio.fail_after(20):
        await one.closed.wait()
    assert trio.current_time() - start == pytest.approx(15, abs=0.5)
    (gone,) = a.drain()
    assert isinstance(gone, ConnectionClosed)
    assert "silent" in gone.reason
    assert a.count("links.silent") == 1


async def test_no_hello_within_10_s(nursery, autojump_clock):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    start = trio.current_time()
    with trio.fail_after(11):
        await link.closed.wait()
    assert trio.current_time() - start == pytest.approx(10, abs=0.1)
    (refused,) = a.drain()
    assert isinstance(refused, HelloRefused)
    assert "no hello within 10 s" in refused.reason
    assert inward.closed
    assert a.table.links() == []


def frame(frame_type: FrameType, body: bytes = b"", number: int = 0) -> bytes:
    return encode_header(frame_type, len(body), number) + body


HELLO = frame(FrameType.HELLO, encode_hello(Hello()))


@pytest.mark.parametrize(
    ("raw", "event", "counter"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", HelloRefused, "hello.refused"),
        (frame(FrameType.HELLO, b"\xc1garbage"), HelloRefused, "hello.refused"),
        (frame(FrameType.PING), HelloRefused, "hello.refused"),
        (frame(FrameType.ENVELOPE, b"x"), HelloRefused, "hello.refused"),
        (HELLO + b"\xff" * 16, ProtocolViolation, "protocol.violations"),
        (
            HELLO + frame(FrameType.HELLO, encode_hello(Hello(link=9))),
            ProtocolViolation,
            "protocol.violations",
        ),
        (HELLO + frame(FrameType.BYE_ACK, number=7), ProtocolViolation, "protocol.violations"),
        (HELLO + frame(FrameType.BYE) * 2, ProtocolViolation, "protocol.violations"),
        (HELLO + frame(FrameType.BYE, b"\x1b[2J"), ProtocolViolation, "protocol.violations"),
        (
            HELLO + encode_header(FrameType.ENVELOPE, 2**31),
            ProtocolViolation,
            "protocol.violations",
        ),
        (
            HELLO + encode_ack(Lane.BULK, Position(number=1)),
            ProtocolViolation,
            "protocol.violations",
        ),
        (
            HELLO + frame(FrameType.START, number=2) + frame(FrameType.ENVELOPE, b"x", 1),
            ProtocolViolation,
            "protocol.violations",
        ),
        (HELLO + frame(FrameType.RESUME, bytes(40), 1), ProtocolViolation, "protocol.violations"),
    ],
)
async def test_garbage_is_a_counted_drop(nursery, raw, event, counter):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    stream = await inward.open(Lane.CONTROL)
    await stream.write(raw)
    with trio.fail_after(PATIENCE_S):
        await link.closed.wait()
    assert [type(e) for e in a.drain()].count(event) == 1
    assert a.count(counter) == 1
    assert inward.closed


async def test_writing_on_our_stream_is_a_violation(nursery):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    # What a opened is a's to write on: b answers on it.
    _, stream = one.carrier.opened[0]
    stream._inward.buffer += b"x"
    stream._inward._change()
    with trio.fail_after(PATIENCE_S):
        await one.closed.wait()
        await other.closed.wait()
    assert a.count("protocol.violations") == 1


async def test_farewell_loses_nothing_in_either_direction(nursery):
    for _ in range(20):
        a, b = Side(SMALL), Side(LARGE)
        one, other = connect(a, b, nursery)
        await quiet()
        a.drain(), b.drain()
        for n in range(5):
            a.table.send(LARGE, bytes([n]) * 100_000, n)
            b.table.send(SMALL, bytes([n]) * 10, n)
        await a.table.session(LARGE).queue.wait_idle()
        await b.table.session(SMALL).queue.wait_idle()
        one.close("enough")
        with trio.fail_after(PATIENCE_S):
            await one.closed.wait()
            await other.closed.wait()
        got_b, got_a = b.drain(), a.drain()
        assert sum(isinstance(e, EnvelopeReceived) for e in got_b) == 5
        assert sum(isinstance(e, EnvelopeReceived) for e in got_a) == 5
        assert got_a[-1] == ConnectionClosed(peer=LARGE, reason="enough", goodbye=True)
        assert got_b[-1] == ConnectionClosed(
            peer=SMALL, reason="the peer said goodbye: enough", goodbye=True
        )


async def test_farewell_of_a_peer_that_does_not_answer_is_bounded(nursery, autojump_clock):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    await (await inward.open(Lane.CONTROL)).write(HELLO)
    await link.settled.wait()
    link.close("enough")
    start = trio.current_time()
    with trio.fail_after(6):
        await link.closed.wait()
    assert trio.current_time() - start == pytest.approx(5, abs=0.1)


async def test_a_peer_that_does_not_come_back_fails_its_queue_in_order(nursery, autojump_clock):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    await (await inward.open(Lane.CONTROL)).write(HELLO)
    await link.settled.wait()
    # Nobody reads: the first large one stays in flight.
    for tag in (10, 11):
        a.table.send(LARGE, bytes(2**20), tag)
    await quiet()
    await inward.hard_close()
    with trio.fail_after(PATIENCE_S):
        await link.closed.wait()
    assert [type(e) for e in a.drain()] == [ConnectionOpened, ConnectionClosed]
    # It may come back, so more is taken for it, for a while.
    a.table.send(LARGE, b"meanwhile", 12)
    lost_at = trio.current_time()
    assert a.table.expire(lost_at + 29) == lost_at + 30
    assert a.drain() == []
    a.table.expire(lost_at + 30)
    assert [e.tag for e in a.drain() if isinstance(e, DeliveryFailed)] == [12, 10, 11]
    with pytest.raises(NotConnectedError):
        a.table.send(LARGE, b"too late", 13)
    assert a.table.known(LARGE) is not None
    a.table.expire(lost_at + 120)
    assert a.table.known(LARGE) is None


@pytest.mark.parametrize("small_first", [True, False])
async def test_simultaneous_dials_keep_the_link_of_the_smaller_id(nursery, small_first):
    a, b = Side(SMALL), Side(LARGE)
    pairs = [(a, b), (b, a)] if small_first else [(b, a), (a, b)]
    links = [connect(dialler, listener, nursery) for dialler, listener in pairs]
    for n in range(10):
        await quiet()
        a.table.send(LARGE, bytes([n]) * (n * 20_000), n)
        b.table.send(SMALL, bytes([n]) * 10, n)
    kept, dropped = links if small_first else reversed(links)
    with trio.fail_after(PATIENCE_S):
        for link in dropped:
            await link.closed.wait()
    await quiet()
    assert {link.state for link in kept} == {LinkState.UP}
    for side in (a, b):
        events = side.drain()
        assert sum(isinstance(e, EnvelopeReceived) for e in events) == 10
        assert sum(isinstance(e, ConnectionOpened) for e in events) == 1
        assert not any(isinstance(e, ConnectionClosed | DeliveryFailed) for e in events)
        assert side.count("links.duplicate") == 1


async def test_second_dial_of_one_side_replaces_the_first(nursery):
    a, b = Side(SMALL), Side(LARGE)
    for dialler, listener in ((a, b), (b, a)):
        first = connect(dialler, listener, nursery)
        await quiet()
        second = connect(dialler, listener, nursery)
        with trio.fail_after(PATIENCE_S):
            for link in first:
                await link.closed.wait()
        assert {link.state for link in second} == {LinkState.UP}
        for link in second:
            link.abort("end of this half of the test")
        await quiet()


@pytest.mark.parametrize("it_dials_last", [True, False])
async def test_the_newest_word_on_the_classes_counts(nursery, it_dials_last):
    a, b = Side(SMALL), Side(LARGE, classes=("server",))
    connect(*((a, b) if it_dials_last else (b, a)), nursery)
    await quiet()
    b.classes = ("client",)
    connect(*((b, a) if it_dials_last else (a, b)), nursery)
    await quiet()
    played = [e.hello.classes if isinstance(e, ConnectionOpened) else None for e in a.drain()]
    # A bbnode process never changes its classes: one that does may end both connections itself.
    assert played[:3] == [("server",), None, ("client",)]
    assert set(played[3:]) <= {None}


async def test_restarted_peer_replaces_its_old_self_whoever_dialled(nursery):
    for old_dialler_is_small in (True, False):
        a, old = Side(SMALL), Side(LARGE)
        stale, _ = connect(*((a, old) if old_dialler_is_small else (old, a)), nursery)
        await quiet()
        if not old_dialler_is_small:
            stale = a.table.links()[0]
        a.drain()
        new = Side(LARGE, session="1" * 16)
        connect(new, a, nursery)
        with trio.fail_after(PATIENCE_S):
            await stale.closed.wait()
        await quiet()
        events = a.drain()
        assert [type(e) for e in events] == [ConnectionClosed, ConnectionOpened]
        assert events[0].reason == "the peer has restarted"
        a.table.send(LARGE, b"to the new one", 1)
        await quiet()
        assert new.drain()[-1].data == b"to the new one"


async def test_slow_driver_is_waited_for_and_its_sender_feels_it(nursery, autojump_clock):
    limits = TransportLimits(inbox_envelopes_per_peer=4, queue_envelopes=3)
    a, b = Side(SMALL, limits), Side(LARGE, limits)
    one, other = connect(a, b, nursery)
    await quiet()
    b.drain()
    for n in range(4):
        a.table.send(LARGE, bytes([n]), n)
        await a.table.session(LARGE).queue.wait_idle()
    sizes = (1, 100_000, 2)
    for n, size in enumerate(sizes):
        a.table.send(LARGE, bytes([n]) * size, n)
    await trio.sleep(limits.stall_s - 6)
    # Nobody took anything for most of a minute: the links stand, what was sent is held and
    # not acknowledged, and that is all that there is room for.
    assert {one.state, other.state} == {LinkState.UP}
    assert b.table.session(SMALL).receiver.held_bytes > 100_000
    with pytest.raises(QueueFullError):
        a.table.send(LARGE, b"", 9)
    got = [e.data[0] for e in b.drain()]
    with trio.fail_after(PATIENCE_S):
        await a.table.session(LARGE).queue.wait_idle()
    got += [e.data[0] for e in b.drain()]
    assert sorted(got) == [0, 0, 1, 1, 2, 2, 3]
    assert b.count("inbound.flooded") == 0
    assert b.table.session(SMALL).receiver.held_bytes == 0


def small_frame(number: int, body: bytes) -> bytes:
    return frame(FrameType.ENVELOPE, body, number)


@pytest.mark.parametrize("lane", Lane)
async def test_who_ignores_its_window_goes(nursery, lane):
    a = Side(SMALL, TransportLimits(inbox_envelopes_per_peer=1))
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    control = await inward.open(Lane.CONTROL)
    await control.write(
        HELLO + frame(FrameType.START, number=1) + small_frame(1, b"fills the inbox")
    )
    await quiet()
    with trio.fail_after(PATIENCE_S):
        with contextlib.suppress(StreamBrokenError):
            if lane is Lane.CONTROL:
                for number in range(2, 20):
                    await control.write(small_frame(number, bytes(65_536)))
            else:
                bulk = await inward.open(Lane.BULK)
                await bulk.write(frame(FrameType.START, number=1) + encode_open(1, 2**24, 0))
                for _ in range(12):
                    await bulk.write(frame(FrameType.CHUNK, bytes(2**18), 1))
        await link.closed.wait()
    assert "ignores its window" in link.reason
    assert a.count("inbound.flooded") == 1
    assert a.inbox.partial_bytes == 0


async def test_broken_stream_is_opened_again_and_the_envelope_sent_again(nursery):
    a, b = Side(SMALL), Side(LARGE)
    one, _ = connect(a, b, nursery)
    await quiet()
    b.drain()
    stream = next(s for lane, s in one.carrier.opened if lane is Lane.BULK)
    writes = 0
    original = stream.write

    async def breaks(*parts: bytes) -> None:
        nonlocal writes
        data = b"".join(parts)
        writes += 1
        if writes == 2:
            # The other side has read the first part by now, and a little more.
            await original(data[:1000])
            await quiet()
            await stream.reset()
        await original(data)

    stream.write = breaks
    big = bytes(range(256)) * 4096
    a.table.send(LARGE, big, 1)
    a.table.send(LARGE, big[::-1], 2)
    with trio.fail_after(PATIENCE_S):
        got = [await b.inbox.receive(), await b.inbox.receive()]
    assert [bytes(e.data) for e in got] == [big, big[::-1]]
    assert a.count("streams.write_failed") == 1
    assert b.count("streams.truncated") == 1
    assert one.state is LinkState.UP


@pytest.mark.parametrize("lane", Lane)
async def test_what_was_written_before_its_stream_broke_is_sent_again(nursery, lane):
    a, b = Side(SMALL), Side(LARGE)
    one, _ = connect(a, b, nursery)
    await quiet()
    b.drain()
    stream = next(s for each, s in one.carrier.opened if each is lane)
    lost = []

    async def loses(*parts: bytes) -> None:
        await trio.lowlevel.checkpoint()
        lost.extend(parts)

    stream.write = loses
    data = bytes(200_000 if lane is Lane.BULK else 200)
    a.table.send(LARGE, data, 1)
    await quiet()
    assert sum(map(len, lost)) > len(data)
    # Nothing more is to be written that would find out.
    await stream.reset()
    with trio.fail_after(PATIENCE_S):
        assert bytes((await b.inbox.receive()).data) == data


async def test_end_of_stream_without_goodbye_is_the_death_of_the_peer(nursery):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    for pipe in other.carrier._pipes:
        pipe.end()
    with trio.fail_after(PATIENCE_S):
        await one.closed.wait()
    assert "without a goodbye" in one.reason


async def test_cancelled_from_outside_still_closes_and_reports():
    a, b = Side(SMALL), Side(LARGE)
    async with trio.open_nursery() as inner:
        one, _ = connect(a, b, inner)
        await quiet()
        inner.cancel_scope.cancel()
    assert one.state is LinkState.CLOSED
    assert one.carrier.closed
    assert a.table.links() == []
    assert [type(e) for e in a.drain()] == [ConnectionOpened, ConnectionClosed]


class Guests:
    """An authorizer to whom everybody is a guest."""

    allowed, reason, standing = True, "", Standing.GUEST

    def connection(self, *_: object) -> Guests:
        return self

    hello = envelope = connection


async def test_a_guest_stays_for_30_s_and_few_are_there(nursery, autojump_clock):
    a = Side(SMALL, TransportLimits(max_guests=1))
    a.table.gate = Gate(Guests(), a.counters)
    first, second = Side(LARGE), Side(PeerId.from_seed("three"))
    begun = trio.current_time()
    _, guest = connect(first, a, nursery)
    await guest.settled.wait()
    assert guest.state is LinkState.UP
    _, refused = connect(second, a, nursery)
    await refused.closed.wait()
    assert "as many guests as may be" in refused.reason
    await guest.closed.wait()
    assert "guest's time" in guest.reason
    assert 30 <= trio.current_time() - begun <= 30 + 2 * guest.limits.goodbye_s
    assert a.table.admission.settled == a.table.admission.waiting == 0


def lane_frame(kind: FrameType, number: int = 0, body: bytes = b"") -> bytes:
    return encode_header(kind, len(body), number) + body


HELLO_AGAIN = lane_frame(FrameType.HELLO, 0, encode_hello(Hello(session_id="1" * 16)))


@pytest.mark.parametrize(
    "senseless",
    [
        lane_frame(FrameType.PING, 7),
        lane_frame(FrameType.PONG, 99),
        lane_frame(FrameType.PONG, 0),
        encode_ack(Lane.CONTROL, Position(1)),
        encode_ack(Lane.BULK, Position(1)),
        lane_frame(FrameType.START, 1),
        lane_frame(FrameType.BYE_ACK, Lane.CONTROL),
        HELLO_AGAIN,
    ],
    ids=["ping", "pong", "old pong", "ack", "bulk ack", "start", "bye ack", "hello"],
)
async def test_a_flood_of_frames_that_say_nothing_ends_the_link(nursery, autojump_clock, senseless):
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    control = await inward.open(Lane.CONTROL)
    resume = Resume(
        round=1,
        record=1,
        control=Position(1),
        bulk=Position(1),
        control_window=2**20,
        bulk_window=2**20,
    )
    await control.write(HELLO_AGAIN + lane_frame(FrameType.START, 1) + encode_resume(resume))
    await quiet()
    # Now and then, they are nobody's fault.
    for _ in range(200):
        await control.write(senseless)
        await trio.sleep(0.05)
    assert link.state is LinkState.UP
    a.drain()
    with contextlib.suppress(StreamBrokenError):
        for _ in range(200):
            await control.write(senseless * 20)
            await trio.sleep(0.001)
    assert link.is_aborted()
    assert "frames that mean nothing" in link.reason
    (violation,) = (e for e in a.drain() if isinstance(e, ProtocolViolation))
    assert violation.kind is Violation.FLOOD
    assert a.count("inbound.flooded") == 1


async def test_a_flood_before_the_hello_is_one_as_well(nursery):
    a = Side(SMALL)
    out, _ = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    await quiet()
    link.flooded("frames that mean nothing")
    assert [e.kind for e in a.drain() if isinstance(e, ProtocolViolation)] == [Violation.FLOOD]


async def test_the_time_in_which_a_peer_was_not_read_is_not_its_delay(nursery, autojump_clock):
    a = Side(LARGE)
    _, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(inward, nursery)
    await quiet()
    assert link.place is not None
    share = link.place.share
    # Behind others, who have taken the share of all strangers for six seconds.
    taken_us = (TransportLimits().strangers_burst_s + 1.2) * 1e6
    share._shares.strangers.account.take(taken_us, trio.current_time())
    nursery.start_soon(share.begin)
    await trio.sleep(TransportLimits().hello_timeout_s + 3)
    assert not link.is_aborted()
    await trio.sleep(60)
    assert "no hello" in link.reason


async def test_messages_pay_for_their_turns(nursery, autojump_clock):
    """Ten thousand, each alone, with an acknowledgement for some: nobody is in debt."""
    a = Side(SMALL)
    out, inward = carrier_pair(SMALL, LARGE, nursery)
    link = a.link(out, nursery)
    control = await inward.open(Lane.CONTROL)
    await control.write(HELLO_AGAIN)
    await quiet()
    await control.write(lane_frame(FrameType.START, 1))
    assert link.place is not None
    share = link.place.share
    share.due_us = 0
    for number in range(1, 10_001):
        await control.write(lane_frame(FrameType.ENVELOPE, number, b"x" * 100))
        # As the muxer has it for one packet with one frame.
        share.due_us += PACKET_US + FRAME_US + FED_DATA_US
        share.pay()
        if number % 500 == 0:
            a.drain()
            await quiet()
    assert share.is_free
    assert share.due_us < 500
