"""Room for large messages: charged as they come, and taken from the slowest when it is short."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.access.conduct import Offence
from bbnode.access.decision import PeerRates, Rate
from bbnode.access.policy import Policy, PolicyAuthorizer
from bbnode.ir.caps import BACKOFF_S, ROOM_STEP_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    Counters,
    DeliveryFailed,
    Direction,
    EnvelopeReceived,
    ProtocolViolation,
)
from bbnode.transport.errors import QueueFullError, Violation
from bbnode.transport.inbox import Inbox, Meter
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Gate
from bbnode.transport.links.framing import FrameType, Lane, Open, encode_header, encode_open
from bbnode.transport.links.receiver import Receiver
from tests.patience import PATIENCE_S
from tests.transport.fakes import carrier_pair
from tests.transport.test_link import HELLO, LARGE, SMALL, Side, connect, frame, quiet, small_frame

MIB = 2**20
ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1")
PEERS = [PeerId.from_seed(f"peer {n}") for n in range(8)]
# The same proportions as by default, in less memory.
LIMITS = TransportLimits(
    inbox_bytes=32 * MIB,
    inbox_bytes_per_peer=8 * MIB,
    inbox_large_bytes=24 * MIB,
    bulk_window_bytes=MIB,
    control_window_bytes=256 * 1024,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Sender:
    """A peer that sends one message after the other, by the rules, at the speed it likes."""

    inbox: Inbox
    peer: PeerId
    sizes: list[int]
    # Bytes of each turn.
    at_once: int
    number: int = 1
    sent: int = 0
    done: int = 0
    evictions: int = 0
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.receiver = Receiver(
            peer=self.peer,
            exchange=1,
            record=1,
            limits=LIMITS,
            inbox=self.inbox,
            counters=Counters(),
            admit=lambda _size: 0.0,
            address=ADDRESS,
            on_evicted=self._again,
        )
        self.receiver.announce()

    def _again(self) -> None:
        self.evictions += 1
        bulk = self.receiver.announce().bulk
        self.number, self.sent = bulk.number, bulk.offset

    @property
    def finished(self) -> bool:
        return self.number > len(self.sizes)

    def turn(self) -> None:
        """Send the next bytes, if the window allows it."""
        if self.finished or self.receiver.held_bytes + self.at_once > LIMITS.bulk_window_bytes:
            return
        total, number = self.sizes[self.number - 1], self.number
        if self.sent == 0:
            self.receiver.open(number, Open(total=total, offset=0, anchor=0))
        size = min(self.at_once, total - self.sent)
        self.sent += size
        if self.sent == total:
            self.number, self.sent = number + 1, 0
        self.receiver.chunk(number, memoryview(bytes(size)))


def charges(inbox: Inbox, senders: list[Sender]) -> int:
    return sum(
        sender.receiver._partial.transfer.charged
        for sender in senders
        if sender.receiver._partial is not None and sender.receiver._partial.transfer is not None
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    honest=st.integers(1, 5),
    idle=st.integers(0, 3),
    known=st.booleans(),
)
def test_whatever_the_order_all_that_honest_ones_send_comes_whole(seed, sizes, honest, idle, known):
    draw, clock = random.Random(seed), Clock()
    inbox = Inbox(LIMITS, clock=clock)
    senders = [
        Sender(inbox, peer, [size * MIB for size in sizes], draw.choice([65_536, 262_144, 400_000]))
        for peer in PEERS[:honest]
    ]
    trusted = {each.peer for each in senders} if known else set()
    inbox.is_known = trusted.__contains__
    # They begin what fits each budget, and send a byte now and then.
    idlers = [Sender(inbox, peer, [8 * MIB, 24 * MIB], 1) for peer in PEERS[5 : 5 + idle]]
    everybody = senders + idlers
    for each in idlers:
        each.turn()
    got = dict.fromkeys(PEERS, 0)
    for turn in range(20_000):
        clock.now += 0.01
        draw.choice(senders).turn()
        if turn % 500 == 0:
            for each in idlers:
                each.turn()
        if draw.random() < 0.3:
            try:
                event = inbox.receive_nowait()
            except trio.WouldBlock:
                pass
            else:
                got[event.peer] += len(event.data)
        if turn % 20 == 0:
            for each in everybody:
                each.receiver.pump()
        assert inbox.partial_bytes == charges(inbox, everybody)
        assert 0 <= inbox.partial_bytes <= LIMITS.inbox_bytes + LIMITS.inbox_large_bytes
        if all(each.finished for each in senders) and not inbox.envelopes:
            break
    for each in senders:
        assert got[each.peer] == sum(each.sizes), f"{each.peer} is stuck"
    for each in everybody:
        each.receiver.drop_partial()
    assert (inbox.partial_bytes, inbox.envelope_bytes, inbox.envelopes) == (0, 0, 0)
    assert not inbox._shares


def test_idle_ones_take_no_room_from_others():
    clock = Clock()
    inbox = Inbox(LIMITS, clock=clock)
    inbox.is_known = lambda _peer: False
    idlers = [Sender(inbox, peer, [8 * MIB], 1) for peer in PEERS[:4]]
    for each in idlers:
        each.turn()
    assert inbox.partial_bytes == 2 * ROOM_STEP_BYTES, "the half of it that strangers may have"
    small = EnvelopeReceived(peer=PEERS[5], data=bytes(60_000), observed_address=ADDRESS)
    assert inbox.offer(small)
    clock.now = 5.0
    honest = Sender(inbox, PEERS[6], [8 * MIB], 262_144)
    while not honest.finished:
        honest.turn()
    assert inbox.envelopes == 2
    assert sum(each.evictions for each in idlers) == 0, "there was room for all"


def test_room_is_kept_for_small_ones_and_for_the_known():
    clock = Clock()
    inbox = Inbox(LIMITS, clock=clock)
    known = set(PEERS[4:])
    inbox.is_known = known.__contains__
    strangers = [Sender(inbox, peer, [8 * MIB], 262_144) for peer in PEERS[:4]]
    # Nobody reads: they fill what is theirs.
    for _ in range(40):
        clock.now += 0.1
        for each in strangers:
            each.turn()
    assert inbox.envelope_bytes + inbox.partial_bytes == LIMITS.inbox_bytes // 2
    friends = [Sender(inbox, peer, [8 * MIB], 262_144) for peer in PEERS[4:7]]
    for _ in range(40):
        clock.now += 0.1
        for each in friends:
            each.turn()
    assert inbox.envelope_bytes + inbox.partial_bytes <= LIMITS.inbox_bytes * 14 // 16
    assert friends[0].finished
    for peer in PEERS:
        small = EnvelopeReceived(peer=peer, data=bytes(60_000), observed_address=ADDRESS)
        assert inbox.offer(small)


def test_the_slowest_goes_first_and_begins_again():
    clock = Clock()
    inbox = Inbox(LIMITS, clock=clock)
    inbox.is_known = lambda _peer: False
    # The two slow ones are soon not expected to come whole; the fast ones then fill the room.
    slow = [Sender(inbox, PEERS[n], [8 * MIB], 40_000 + n) for n in range(2)]
    for _ in range(100):
        clock.now += 1.0
        for each in slow:
            each.turn()
    held = inbox.partial_bytes
    assert held == 2 * 2 * ROOM_STEP_BYTES
    fast = [Sender(inbox, PEERS[n], [8 * MIB], 262_144) for n in range(4, 6)]
    for _ in range(40):
        clock.now += 0.02
        for each in fast:
            each.turn()
            each.receiver.pump()
    assert not any(each.finished for each in fast), "they wait a while"
    for _ in range(200):
        clock.now += 0.5
        while inbox.envelopes:
            inbox.receive_nowait()
        for each in fast:
            each.turn()
            each.receiver.pump()
    assert all(each.finished for each in fast)
    assert [each.evictions for each in slow] == [1, 1]
    # Nothing is lost: there is room again, and they begin anew.
    for _ in range(1000):
        clock.now += 1.0
        while inbox.envelopes:
            inbox.receive_nowait()
        for each in slow:
            each.turn()
            each.receiver.pump()
    assert all(each.finished for each in slow)


def test_a_meter_counts_only_time_in_which_more_could_have_come():
    meter = Meter(begun_at=100.0, span_s=10.0)
    meter.add(1000, 101.0)
    assert not meter.is_below(1e9, 119.0), "not before it had the time to show it"
    meter.pause(105.0)
    assert not meter.is_below(1e9, 1000.0)
    meter.go_on(1000.0)
    assert meter.counted_s(1001.0) == 6.0
    meter.discount(1.0)
    assert meter.counted_s(1001.0) == 5.0
    for second in range(60):
        meter.add(2000, 1001.0 + second)
    assert not meter.is_below(1000, 1060.0)
    assert meter.is_below(3000, 1060.0)
    for second in range(30):
        meter.bytes_per_s(1060.0 + second)
    assert meter.bytes_per_s(1090.0) == 0.0


# -- on links --------------------------------------------------------------------------------


async def greeted(side: Side, sender: PeerId, nursery: trio.Nursery):
    """A link of `side`, and both streams of a raw peer that has said hello."""
    out, inward = carrier_pair(side.peer, sender, nursery)
    link = side.link(out, nursery)
    control, bulk = await inward.open(Lane.CONTROL), await inward.open(Lane.BULK)
    await control.write(HELLO + frame(FrameType.START, number=1))
    await bulk.write(frame(FrameType.START, number=1))
    await quiet()
    return link, control, bulk


async def test_what_was_taken_back_is_sent_again_on_the_same_link(nursery):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    bulk = next(s for lane, s in one.carrier.opened if lane is Lane.BULK)
    written, original, go_on = [], bulk.write, trio.Event()

    async def write(*data: bytes) -> None:
        written.append(sum(map(len, data)))
        if sum(written) > MIB:
            await go_on.wait()
        await original(*data)

    bulk.write = write
    message = random.Random(1).randbytes(3 * MIB)
    a.table.send(LARGE, message, 1)
    a.table.send(LARGE, b"small", 2)
    await quiet()
    (transfer,) = b.inbox._transfers
    assert transfer.charged == ROOM_STEP_BYTES
    b.inbox._evict(transfer)
    assert (b.inbox.partial_bytes, b.count("inbound.evicted")) == (0, 1)
    go_on.set()
    with trio.fail_after(PATIENCE_S):
        await a.table.session(LARGE).queue.wait_idle()
    got = [bytes(e.data) for e in b.drain() if isinstance(e, EnvelopeReceived)]
    assert got == [b"small", message]
    assert not one.is_aborted()
    assert not other.is_aborted()
    assert b.inbox.partial_bytes == 0


async def test_a_byte_now_and_then_is_too_slow(nursery, autojump_clock):
    a = Side(SMALL)
    link, _, bulk = await greeted(a, LARGE, nursery)
    await bulk.write(encode_open(1, 64 * MIB, 0) + encode_header(FrameType.CHUNK, MIB, 1))
    start = trio.current_time()
    with trio.fail_after(3 * a.limits.slow_s):
        while not link.is_aborted():
            await bulk.write(b"x")
            await trio.sleep(5)
        await link.closed.wait()
    assert trio.current_time() - start >= 2 * a.limits.slow_s
    assert a.count("links.slow") == 1
    assert a.inbox.partial_bytes == 0
    (told,) = (e for e in a.drain() if isinstance(e, ProtocolViolation))
    assert told.kind is Violation.SLOW


async def test_a_slow_uplink_is_fast_enough(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    one, other = connect(a, b, nursery)
    await quiet()
    bulk = next(s for lane, s in one.carrier.opened if lane is Lane.BULK)
    original = bulk.write

    async def uplink(*data: bytes) -> None:
        view = memoryview(b"".join(data))
        for at in range(0, len(view), 32_768):
            # 100 KiB/s, with a pause of some seconds now and then.
            await trio.sleep(0.32 if random_.random() < 0.98 else 6.0)
            await original(bytes(view[at : at + 32_768]))

    random_ = random.Random(3)
    bulk.write = uplink
    a.table.send(LARGE, bytes(20 * MIB), 1)
    await a.table.session(LARGE).queue.wait_idle()
    assert trio.current_time() > 200
    assert not other.is_aborted()
    assert b.count("links.slow") == 0


async def test_what_we_hold_is_not_slow(nursery, autojump_clock):
    limits = TransportLimits(inbox_bytes_per_peer=4 * MIB)
    a, b = Side(SMALL), Side(LARGE, limits)
    _, other = connect(a, b, nursery)
    await quiet()
    for tag in range(3):
        a.table.send(LARGE, bytes(3 * MIB), tag)
    # Nobody reads for half a minute each time: the next one waits for room.
    for _ in range(3):
        await trio.sleep(30)
        while not isinstance(event := await b.inbox.receive(), EnvelopeReceived):
            pass
        assert len(event.data) == 3 * MIB
    await a.table.session(LARGE).queue.wait_idle()
    assert b.count("links.slow") == b.count("links.stalled") == 0
    assert not other.is_aborted()


async def test_a_frame_has_to_come_whole_in_time(nursery, autojump_clock):
    a = Side(SMALL)
    link, control, _ = await greeted(a, LARGE, nursery)
    for number in range(1, 4):
        # Whole ones in two parts are fine, however many.
        raw = small_frame(number, bytes(1000))
        await control.write(raw[:100])
        await trio.sleep(10)
        await control.write(raw[100:])
    await control.write(encode_header(FrameType.ENVELOPE, 65_536, 4))
    start = trio.current_time()
    with trio.fail_after(2 * a.limits.frame_s):
        while not link.is_aborted():
            await control.write(b"x")
            await trio.sleep(5)
        await link.closed.wait()
    assert trio.current_time() - start >= a.limits.frame_s
    assert a.count("links.slow") == 1
    assert a.inbox.envelopes == 3


def ruled(side: Side, policy: Policy) -> None:
    """Have a policy decide what comes to a side, on trio's clock."""
    authorizer = PolicyAuthorizer(
        policy, monotonic_ns=lambda: int(trio.current_time() * 1e9), unix_s=lambda: 0.0
    )
    side.table.gate = Gate(authorizer, side.counters)


async def test_what_is_over_a_rate_waits_and_comes_in_order(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    policy = Policy(limits=PeerRates(messages=Rate(per_second=10, burst=5)))
    ruled(b, policy)
    connect(a, b, nursery)
    await quiet()
    b.drain()
    small = [f"small {n}".encode() for n in range(95)]
    large = [bytes([n]) * 100_000 for n in range(5)]
    for tag, message in enumerate(small + large):
        a.table.send(LARGE, message, tag)
    start, got = trio.current_time(), []
    while len(got) < 100:
        event = await b.inbox.receive()
        assert isinstance(event, EnvelopeReceived)
        got.append(bytes(event.data))
    # 5 at once, and 95 at 10 a second.
    assert 9.0 <= trio.current_time() - start <= 15.0
    assert [each for each in got if len(each) < 100] == small
    assert [each for each in got if len(each) > 100] == large
    await a.table.session(LARGE).queue.wait_idle()
    assert not any(isinstance(event, DeliveryFailed) for event in a.drain())
    assert b.count("inbound.delayed") > 0
    assert b.count("access.denied") == b.count("links.slow") == b.count("links.stalled") == 0


async def test_a_fast_sender_over_its_rate_fills_its_own_queue_and_no_more(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    ruled(b, Policy(limits=PeerRates(messages=Rate(per_second=10, burst=1))))
    connect(a, b, nursery)
    await quiet()
    for tag in range(a.limits.queue_envelopes):
        a.table.send(LARGE, bytes(10_000), tag)
    await quiet()
    # As many wait as may, but for the few that came in.
    sent = 0
    with contextlib.suppress(QueueFullError):
        while sent < 100:
            a.table.send(LARGE, bytes(10_000), sent)
            sent += 1
    assert sent < 10
    assert b.table.session(SMALL).receiver.held_bytes <= b.limits.control_window_bytes


async def test_who_is_cut_off_is_sent_away_and_gets_nothing_in(nursery, autojump_clock):
    a, b = Side(SMALL), Side(LARGE)
    policy = Policy()
    ruled(b, policy)
    one, _ = connect(a, b, nursery)
    await quiet()
    b.drain()
    while not policy.conduct.note(SMALL, Offence.UNDECODABLE, int(trio.current_time() * 1e9)):
        pass
    a.table.send(LARGE, b"more of it", 1)
    b.table.reauthorize()
    with trio.fail_after(b.limits.goodbye_s + 1):
        await one.closed.wait()
    assert not any(isinstance(event, EnvelopeReceived) for event in b.drain())
    assert b.table.gate.denied["misconduct"] >= 1
    assert not b.table.admits(SMALL, Direction.INBOUND)
    await trio.sleep(BACKOFF_S)
    assert b.table.admits(SMALL, Direction.INBOUND)
