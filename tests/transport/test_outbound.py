"""The queue out: lanes, bounds, windows, acknowledgements, and beginning again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.ir.caps import MAX_CONTROL_ENVELOPE_BYTES, MAX_ENVELOPE_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.errors import EnvelopeTooLargeError, FrameError, QueueFullError
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.framing import HEADER_BYTES, Lane, Position, Resume
from bbnode.transport.outbound import CHUNK_BYTES, Outbound, OutboundQueue

A = PeerId.from_seed("a")
BIG = bytes(range(256)) * 4096


def granted(limits: TransportLimits | None = None, **fields) -> OutboundQueue:
    """A queue whose peer has said that it has nothing yet."""
    queue = OutboundQueue(limits or TransportLimits())
    assert queue.resume(resume(**fields)) == []
    return queue


def resume(record: int = 1, control: int = 1, bulk: int = 1, offset: int = 0, **fields) -> Resume:
    return Resume(
        round=1,
        record=record,
        control=Position(number=control),
        bulk=Position(number=bulk, offset=offset),
        **{"control_window": 2**20, "bulk_window": 2**20, **fields},
    )


def body(item: Outbound) -> bytes:
    return b"".join(item.parts)


async def test_lane_by_size_order_and_release():
    queue = granted()
    assert queue.put(A, b"x" * 65_536, 1) is Lane.CONTROL
    assert queue.put(A, [b"x" * 65_536, b"y"], 2) is Lane.BULK
    assert queue.put(A, b"z", 3) is Lane.CONTROL
    first, second = queue.next_control(), queue.next_control()
    assert (first.tag, second.tag, queue.next_control()) == (1, 3, None)
    assert (first.number, second.number) == (1, 2)
    queue.acknowledge(Lane.CONTROL, Position(number=2))
    assert (queue.envelopes, queue.bytes) == (2, 65_538)
    queue.acknowledge(Lane.CONTROL, Position(number=3))
    assert [item.tag for item in queue.drain()] == [2]
    assert (queue.envelopes, queue.bytes, queue.unacknowledged_bytes) == (0, 0, 0)
    await queue.wait_idle()


def test_nothing_goes_before_the_peer_has_said_from_where():
    queue = OutboundQueue(TransportLimits())
    queue.put(A, b"small", 1)
    queue.put(A, BIG, 2)
    assert queue.next_control() is queue.next_piece() is None


def test_writable_buffers_are_copied_and_others_kept():
    queue = granted()
    buffer = bytearray(b"before")
    queue.put(A, [buffer, memoryview(buffer)], 1)
    buffer[:] = b"after!"
    assert body(queue.next_control()) == b"beforebefore"
    queue.put(A, [BIG, memoryview(BIG)], 2)
    item = queue.head(Lane.BULK)
    assert all(part.obj is BIG for part in item.parts)


def test_the_anchor_is_where_the_largest_part_begins():
    queue = granted()
    queue.put(A, [b"head", b"", BIG, b"between", BIG, b"tail"], 1)
    queue.put(A, BIG, 2)
    first = queue.head(Lane.BULK)
    assert first.anchor == 4
    queue.pop(Lane.BULK)
    assert queue.head(Lane.BULK).anchor == 0


def test_a_burst_of_large_messages_waits_by_reference():
    queue = granted()
    largest = MAX_ENVELOPE_BYTES
    tensor = bytes(largest // 16)
    for tag in range(4):
        assert queue.put(A, [tensor] * 16, tag) is Lane.BULK
    assert queue.bytes == 4 * largest
    with pytest.raises(QueueFullError):
        queue.put(A, [tensor] * 16, 4)
    held = {id(part.obj) for item in queue.drain() for part in item.parts}
    assert held == {id(tensor)}


def test_bounds_of_the_queue():
    limits = TransportLimits(max_message_bytes=10, queue_envelopes=2, queue_bytes=15)
    queue = granted(limits)
    with pytest.raises(EnvelopeTooLargeError, match="at most 10"):
        queue.put(A, [b"x" * 6, b"x" * 5], 1)
    queue.put(A, b"x" * 10, 1)
    with pytest.raises(QueueFullError):
        queue.put(A, b"x" * 6, 2)
    queue.put(A, b"", 3)
    with pytest.raises(QueueFullError):
        queue.put(A, b"", 4)
    # Written and not acknowledged still counts.
    assert queue.next_control() is not None
    with pytest.raises(QueueFullError):
        queue.put(A, b"", 5)
    queue.acknowledge(Lane.CONTROL, Position(number=2))
    queue.put(A, b"", 6)


def test_a_large_message_leaves_the_queue_open_for_small_ones():
    queue = granted(TransportLimits(queue_bytes=100_000))
    assert queue.put(A, BIG, 1) is Lane.BULK
    with pytest.raises(QueueFullError):
        queue.put(A, b"x" * 70_000, 2)
    assert queue.put(A, b"small", 3) is Lane.CONTROL


def test_windows_bound_what_is_under_way():
    queue = granted(control_window=100_000, bulk_window=300_000)
    for n in range(3):
        queue.put(A, bytes(MAX_CONTROL_ENVELOPE_BYTES), n)
    assert queue.next_control() is not None
    assert queue.next_control() is None
    queue.acknowledge(Lane.CONTROL, Position(number=2))
    assert queue.next_control() is not None
    queue.put(A, BIG, 9)
    first = queue.next_piece()
    assert (first.opens, first.offset, first.length) == (True, 0, CHUNK_BYTES)
    assert queue.next_piece() is None
    assert queue.unacknowledged_bytes == MAX_CONTROL_ENVELOPE_BYTES + HEADER_BYTES + CHUNK_BYTES
    queue.acknowledge(Lane.BULK, Position(number=1, offset=CHUNK_BYTES))
    second = queue.next_piece()
    assert (second.opens, second.offset) == (False, CHUNK_BYTES)


def test_empty_messages_take_window_too():
    queue = granted(TransportLimits(control_window_bytes=70_000, queue_envelopes=10_000))
    for n in range(6000):
        queue.put(A, b"", n)
    sent = 0
    while queue.next_control() is not None:
        sent += 1
    assert sent == 70_000 // HEADER_BYTES


def test_what_carried_it_is_gone_then_it_goes_on_from_the_last_acknowledgement():
    queue = granted()
    queue.put(A, BIG, 1)
    queue.put(A, b"small", 2)
    queue.next_control()
    for _ in range(2):
        queue.next_piece()
    queue.acknowledge(Lane.BULK, Position(number=1, offset=1000))
    for lane in Lane:
        queue.rewind(lane)
    assert queue.unacknowledged_bytes == 0
    piece = queue.next_piece()
    assert (piece.opens, piece.offset, piece.number) == (True, 1000, 1)
    assert queue.next_control().number == 1
    assert queue.resent == 2
    # An acknowledgement of what went out before overtakes: the stream is told anew.
    queue.rewind(Lane.BULK)
    queue.acknowledge(Lane.BULK, Position(number=1, offset=400_000))
    piece = queue.next_piece()
    assert (piece.opens, piece.offset) == (True, 400_000)


def test_a_receiver_that_remembers_says_from_where():
    queue = granted(record=7)
    for tag in (1, 2):
        queue.put(A, BIG, tag)
        queue.put(A, bytes([tag]), tag)
    for _ in range(2):
        queue.next_control()
        queue.next_piece()
    assert queue.resume(resume(record=7, control=2, offset=2000)) == []
    assert queue.next_control().tag == 2
    assert queue.next_piece().offset == 2000
    # Parts are not kept for ever: it may have less than it had acknowledged.
    assert queue.resume(resume(record=7, control=3)) == []
    assert queue.next_piece().offset == 0
    assert queue.next_control() is None


def test_a_receiver_that_has_forgotten_gets_only_what_was_not_begun():
    queue = granted(record=7)
    for tag in (1, 2):
        queue.put(A, BIG, 10 + tag)
        queue.put(A, bytes([tag]), tag)
    queue.next_control()
    queue.next_piece()
    lost = queue.resume(resume(record=8))
    assert sorted(item.tag for item in lost) == [1, 11]
    assert queue.next_control().tag == 2
    piece = queue.next_piece()
    assert (piece.item.tag, piece.number, piece.offset) == (12, 2, 0)


@pytest.mark.parametrize(
    ("lane", "position"),
    [
        (Lane.CONTROL, Position(number=3)),
        (Lane.CONTROL, Position(number=1, offset=1)),
        (Lane.BULK, Position(number=2)),
        (Lane.BULK, Position(number=1, offset=CHUNK_BYTES + 1)),
        (Lane.BULK, Position(number=3)),
    ],
)
def test_nobody_acknowledges_what_was_not_sent(lane, position):
    queue = granted()
    queue.put(A, BIG, 1)
    queue.put(A, b"small", 2)
    queue.next_control()
    queue.next_piece()
    with pytest.raises(FrameError):
        queue.acknowledge(lane, position)


@given(st.data())
def test_every_message_arrives_once_whatever_breaks(data):
    """A receiver by the book, and streams that break at any time."""
    queue = granted()
    sizes = data.draw(st.lists(st.integers(65_537, 700_000), min_size=1, max_size=3))
    sent = [bytes([n]) * size for n, size in enumerate(sizes)]
    for tag, message in enumerate(sent):
        queue.put(A, message, tag)
    got: list[bytes] = []
    number, stored = 1, bytearray()
    for _ in range(400):
        match data.draw(st.sampled_from(["piece", "piece", "piece", "ack", "break", "resume"])):
            case "piece":
                piece = queue.next_piece()
                if piece is None:
                    queue.acknowledge(Lane.BULK, Position(number=number, offset=len(stored)))
                    continue
                if piece.number < number:
                    continue
                assert piece.number == number
                assert piece.offset == len(stored) or (piece.opens and piece.offset < len(stored))
                del stored[piece.offset :]
                stored += b"".join(piece.item.bytes_from(piece.offset, piece.length))
                if len(stored) == piece.item.size:
                    got.append(bytes(stored))
                    number, stored = number + 1, bytearray()
            case "ack":
                queue.acknowledge(Lane.BULK, Position(number=number, offset=len(stored)))
            case "break":
                queue.rewind(Lane.BULK)
            case "resume":
                assert queue.resume(resume(bulk=number, offset=len(stored))) == []
        if len(got) == len(sent):
            break
    assert got == sent[: len(got)]
    queue.acknowledge(Lane.BULK, Position(number=number, offset=len(stored)))
    assert queue.acknowledged == len(got)
