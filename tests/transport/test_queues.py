"""The queue out, the inbox in, and the waits between dials."""

from __future__ import annotations

import random

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.backend import EnvelopeReceived, PeerDisconnected, TransportLimits
from bbnode.transport.errors import EnvelopeTooLargeError, QueueFullError
from bbnode.transport.framing import Lane
from bbnode.transport.inbox import Inbox
from bbnode.transport.outbound import OutboundQueue
from bbnode.transport.redial import Redial

A, B = PeerId.from_seed("a"), PeerId.from_seed("b")
_ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1")


def _envelope(peer: PeerId, size: int) -> EnvelopeReceived:
    return EnvelopeReceived(peer=peer, data=bytes(size), observed_address=_ADDRESS)


async def test_lane_by_size_and_order():
    queue = OutboundQueue(TransportLimits())
    assert queue.put(A, b"x" * 65_536, 1) is Lane.CONTROL
    assert queue.put(A, [b"x" * 65_536, b"y"], 2) is Lane.BULK
    assert queue.put(A, b"z", 3) is Lane.CONTROL
    first = queue.take(Lane.CONTROL)
    assert first is not None
    assert first.tag == 1
    queue.give_back(first)
    assert queue.take(Lane.CONTROL) is first
    queue.done(first)
    assert [item.tag for item in queue.drain()] == [2, 3]
    assert (queue.envelopes, queue.bytes) == (0, 0)
    await queue.wait_idle()


async def test_caller_may_reuse_its_buffer():
    queue = OutboundQueue(TransportLimits())
    buffer = bytearray(b"before")
    queue.put(A, [buffer, memoryview(buffer)], 1)
    buffer[:] = b"after!"
    item = queue.take(Lane.CONTROL)
    assert item is not None
    assert item.parts == (b"before", b"before")


async def test_bounds_of_the_queue():
    limits = TransportLimits(max_envelope_bytes=10, queue_envelopes=2, queue_bytes=15)
    queue = OutboundQueue(limits)
    with pytest.raises(EnvelopeTooLargeError, match="at most 10"):
        queue.put(A, [b"x" * 6, b"x" * 5], 1)
    queue.put(A, b"x" * 10, 1)
    with pytest.raises(QueueFullError):
        queue.put(A, b"x" * 6, 2)
    queue.put(A, b"", 3)
    with pytest.raises(QueueFullError):
        queue.put(A, b"", 4)
    # In flight still counts.
    item = queue.take(Lane.CONTROL)
    with pytest.raises(QueueFullError):
        queue.put(A, b"", 5)
    assert item is not None
    queue.done(item)
    queue.put(A, b"", 6)


async def test_inbox_shares_and_total():
    inbox = Inbox(TransportLimits(inbox_bytes_per_peer=100, inbox_bytes=150))
    assert inbox.offer(_envelope(A, 80))
    assert not inbox.offer(_envelope(A, 30))
    assert inbox.offer(_envelope(B, 60))
    assert not inbox.offer(_envelope(B, 20))
    assert inbox.envelope_bytes == 140
    inbox.receive_nowait()
    assert inbox.offer(_envelope(A, 30))


async def test_an_envelope_over_the_share_gets_through_when_alone():
    inbox = Inbox(TransportLimits(inbox_bytes_per_peer=10, inbox_bytes=10))
    assert inbox.offer(_envelope(A, 50))
    assert not inbox.offer(_envelope(A, 1))
    inbox.receive_nowait()
    assert inbox.offer(_envelope(A, 50))


async def test_deliver_waits_a_bounded_time(autojump_clock):
    inbox = Inbox(TransportLimits(inbox_envelopes_per_peer=1, inbox_patience_s=2.0))
    assert await inbox.deliver(_envelope(A, 1))
    start = trio.current_time()
    assert not await inbox.deliver(_envelope(A, 1))
    assert trio.current_time() - start == pytest.approx(2.0)
    async with trio.open_nursery() as nursery:
        results = []

        async def late() -> None:
            results.append(await inbox.deliver(_envelope(A, 2)))

        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        assert len((await inbox.receive()).data) == 1
    assert results == [True]


async def test_notices_always_go_in_and_say_when_it_is_too_much():
    inbox = Inbox(TransportLimits(inbox_notices=2))
    notice = PeerDisconnected(peer=A, reason="")
    for _ in range(2):
        assert not inbox.crowded
        inbox.notify(notice)
    assert inbox.crowded
    inbox.notify(notice)
    for _ in range(3):
        assert inbox.receive_nowait() is notice
    assert not inbox.crowded
    with pytest.raises(trio.WouldBlock):
        inbox.receive_nowait()
    inbox.close()
    with pytest.raises(trio.EndOfChannel):
        await inbox.receive()


def test_redial_doubles_to_the_maximum_and_is_reset():
    redial = Redial(TransportLimits(), random.Random(1))
    delays = [redial.next_delay_s() for _ in range(60)]
    assert 0.2 <= delays[0] <= 0.24
    for n, delay in enumerate(delays):
        assert 0.8 * min(0.2 * 2**n, 30) <= delay <= 30
    assert len(set(delays[10:20])) > 1
    redial.reset()
    assert redial.next_delay_s() <= 0.24
