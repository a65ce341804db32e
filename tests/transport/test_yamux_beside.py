"""Our Yamux beside py-libp2p's: on the same frames, and at the two ends of one connection.

Rule: whatever the frames, ours refuses, or both have the same streams with the same bytes and ends,
and have answered alike. What differs on purpose is in DIFFERENCES, of which docs/transport.md has
one line each.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import Yamux

from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.muxer import INITIAL_WINDOW_BYTES, MuxedStream, Muxer, UnreadBytes
from bbnode.transport.libp2p.noise_channel import NoiseChannel
from tests.transport.test_muxer import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    KEYS,
    KIB,
    PING,
    RST,
    SYN,
    WINDOW,
    Pipe,
    data,
    frame,
    share_of,
)

# Opened by each side before anything comes.
OPENED = 2


class PlainConn:
    """What py-libp2p's Yamux takes for a secured connection."""

    def __init__(self, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.closed = False
        self._changed = trio.Event()

    def bring(self, plain: bytes) -> None:
        self.incoming += plain
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def read(self, n: int | None = None) -> bytes:
        while not self.incoming and not self.closed:
            await self._changed.wait()
        got = bytes(self.incoming[:n])
        del self.incoming[:n]
        return got

    async def write(self, plain: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.outgoing += plain

    async def close(self) -> None:
        self.closed = True
        self._change()


@dataclass
class Seen:
    """What one side has of a stream."""

    stream: Any
    got: bytearray = field(default_factory=bytearray)


class Side:
    """One end of a connection: its streams by number, each read as soon as anything comes."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.seen: dict[int, list[Seen]] = {}

    def add(self, stream: Any) -> None:
        """Read a stream from now on."""
        seen = Seen(stream)
        # A number that is given again is another stream.
        self.seen.setdefault(stream.stream_id, []).append(seen)
        self.nursery.start_soon(self._read, seen)

    async def _read(self, seen: Seen) -> None:
        with contextlib.suppress(StreamBrokenError, MuxedStreamError):
            while part := await seen.stream.read(64 * KIB):
                seen.got += part

    def streams(self) -> dict[int, list[tuple[bytes, str]]]:
        """Bytes and end of each stream."""
        return {
            number: [(bytes(each.got), self.end_of(each.stream)) for each in all_seen]
            for number, all_seen in sorted(self.seen.items())
        }

    def end_of(self, stream: Any) -> str:
        raise NotImplementedError


class Ours(Side):
    """Our muxer, and the plaintext that goes in and out."""

    def __init__(self, nursery: trio.Nursery, *, is_initiator: bool) -> None:
        super().__init__(nursery)
        self.wire = Pipe()
        self.refused: list[str] = []
        self._outside = NoiseChannel(*KEYS[::-1])
        self.muxer = Muxer(
            self.wire,
            NoiseChannel(*KEYS),
            is_initiator=is_initiator,
            unread_bytes=2**25,
            max_streams=64,
            share=share_of(),
            all_unread=UnreadBytes(2**40, lambda: False),
            on_stream=self.add,
            on_refused=self.refused.append,
            on_end=lambda _reason: None,
        )
        nursery.start_soon(self.muxer.run)

    @property
    def ended(self) -> bool:
        return bool(self.muxer.ended)

    async def open(self) -> MuxedStream:
        stream = self.muxer.open_stream()
        self.muxer.send()
        self.add(stream)
        return stream

    def bring(self, plain: bytes) -> None:
        if plain and not self.ended:
            out = memoryview(bytearray(len(plain) + 64 + len(plain) // 1000))
            self.wire.bring(bytes(out[: self._outside.seal(plain, out, 0)]))

    def said(self) -> bytes:
        got, packets = bytearray(), bytes(self.wire.outgoing)
        read = self._outside.open(
            memoryview(packets),
            memoryview(bytearray(len(packets))),
            lambda part: not got.extend(part),
        )
        del self.wire.outgoing[:read]
        return bytes(got)

    def end_of(self, stream: MuxedStream) -> str:
        if stream.failure:
            return "reset"
        return "end" if stream.end_in else "open"


class Theirs(Side):
    """py-libp2p's muxer, and the plaintext that goes in and out."""

    def __init__(self, nursery: trio.Nursery, *, is_initiator: bool) -> None:
        super().__init__(nursery)
        self.conn = PlainConn(is_initiator=is_initiator)
        self.muxer = Yamux(self.conn, ID(b"peer"), is_initiator=is_initiator)  # type: ignore[arg-type]
        nursery.start_soon(self.muxer.start)
        nursery.start_soon(self._accept)

    @property
    def ended(self) -> bool:
        return self.muxer.event_shutting_down.is_set()

    async def _accept(self) -> None:
        with contextlib.suppress(Exception):
            while True:
                self.add(await self.muxer.accept_stream())

    async def open(self) -> Any:
        stream = await self.muxer.open_stream()
        self.add(stream)
        return stream

    def bring(self, plain: bytes) -> None:
        if plain:
            self.conn.bring(plain)

    def said(self) -> bytes:
        got = bytes(self.conn.outgoing)
        self.conn.outgoing.clear()
        return got

    def end_of(self, stream: Any) -> str:
        if stream.reset_received:
            return "reset"
        return "end" if stream.recv_closed else "open"


async def settle() -> None:
    """Let both sides do what they can, and what py-libp2p does after 10 ms."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(0.011)
    await trio.testing.wait_all_tasks_blocked()


def run(function: Any, *arguments: Any) -> Any:
    return trio.run(function, *arguments, clock=trio.testing.MockClock())


# -- the same frames to both -----------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a connection."""

    ended: bool
    streams: dict[int, list[tuple[bytes, str]]]
    # ACKs of new streams and of pings, in order.
    answers: list[tuple[int, int, int]]


def headers_in(plain: bytes) -> list[tuple[int, int, int, int, int]]:
    """The headers of frames; the last body may not be there whole."""
    found, at = [], 0
    while len(plain) - at >= HEADER.size:
        found.append(HEADER.unpack_from(plain, at))
        _, kind, _, _, length = found[-1]
        at += HEADER.size + (length if kind == DATA else 0)
    return found


def answers_in(plain: bytes) -> list[tuple[int, int, int]]:
    return [
        (kind, number, length)
        for _, kind, flags, number, length in headers_in(plain)
        if flags & ACK
    ]


async def outcome_of(make: type[Side], pieces: list[bytes], is_initiator: bool) -> Outcome:
    """What a muxer makes of plaintext that comes in these pieces, after it opened streams."""
    async with trio.open_nursery() as nursery:
        side: Any = make(nursery, is_initiator=is_initiator)
        await settle()
        for _ in range(OPENED):
            await side.open()
        await settle()
        side.said()
        said = b""
        for piece in pieces:
            side.bring(piece)
            await settle()
            said += side.said()
        made = Outcome(side.ended, side.streams(), answers_in(said))
        nursery.cancel_scope.cancel()
    return made


def no_more_than(ours: Outcome, theirs: Outcome) -> None:
    """What ours has before it refuses theirs has too."""
    for number, streams in ours.streams.items():
        for (got, _), (other, _) in zip(streams, theirs.streams.get(number, []), strict=False):
            assert got.startswith(other) or other.startswith(got)


def whole(pieces: list[bytes]) -> list[bytes]:
    """The same with the rest of the last body: py-libp2p does nothing before it has it."""
    plain = b"".join(pieces)
    end = sum(
        HEADER.size + (length if kind == DATA else 0) for _, kind, _, _, length in headers_in(plain)
    )
    missing = end - len(plain)
    return [*pieces, bytes(missing)] if 0 < missing <= INITIAL_WINDOW_BYTES else pieces


def differs_on_purpose(pieces: list[bytes]) -> bool:
    """Whether a frame is of those that py-libp2p takes in a way of its own (DIFFERENCES)."""
    return any(
        kind == GO_AWAY
        or (kind in (DATA, WINDOW) and flags & ACK and not flags & SYN and flags & (FIN | RST))
        for _, kind, flags, _, _ in headers_in(b"".join(pieces))
    )


def beside(pieces: list[bytes], is_initiator: bool) -> None:
    """Bring the same to both, and compare."""
    pieces = whole(pieces)
    ours, theirs = (run(outcome_of, make, pieces, is_initiator) for make in (Ours, Theirs))
    if ours.ended or differs_on_purpose(pieces):
        no_more_than(ours, theirs)
        return
    assert not theirs.ended
    # py-libp2p does not answer a stream that comes reset.
    assert set(ours.answers) >= set(theirs.answers)
    pings = [[each for each in made.answers if each[0] == PING] for made in (ours, theirs)]
    assert pings[0] == pings[1]
    assert ours.streams.keys() == theirs.streams.keys()
    for number, streams in ours.streams.items():
        # A number that is given again is no honest peer's: when it is free again is each one's own.
        (got, end), (other, other_end) = streams[0], theirs.streams[number][0]
        assert end == other_end
        # A reset drops what was not read, and when that is depends on the turns of readers.
        assert got == other or (end == "reset" and (got.startswith(other) or other.startswith(got)))


# Those that the peer may give, both that were opened here, and some that nobody gives.
numbers = st.sampled_from([1, 2, 3, 4, 5, 6, 0, 101, 2**32 - 1])
bodies = st.one_of(st.binary(max_size=30), st.builds(bytes, st.sampled_from([1024, 100 * KIB])))
# What is said with an ACK besides is among DIFFERENCES.
flag_sets = st.sampled_from(
    [0, 0, 0, SYN, SYN, ACK, SYN | ACK, FIN, RST, SYN | FIN, SYN | RST, FIN | RST]
)
frames = st.one_of(
    st.builds(data, numbers, bodies, flag_sets),
    st.builds(
        frame,
        st.just(WINDOW),
        flag_sets,
        numbers,
        st.sampled_from([0, 0, 1, 64 * KIB, 2**31, 2**32 - 1]),
    ),
    st.builds(frame, st.just(PING), st.sampled_from([SYN, SYN, ACK, 0]), st.just(0), numbers),
)
# Any header at all, with what may follow it.
damaged_frames = st.one_of(
    st.builds(
        lambda *header_and_body: HEADER.pack(*header_and_body[:5]) + header_and_body[5],
        st.sampled_from([0, 0, 0, 1, 255]),
        st.integers(0, 5),
        st.integers(0, 15),
        numbers,
        st.sampled_from([0, 1, 12, 2**16, 2**18, 2**24, 2**24 + 1, 2**32 - 1]),
        st.binary(max_size=30),
    ),
    st.binary(max_size=20),
)


@st.composite
def conversations(draw: st.DrawFn, parts: st.SearchStrategy[bytes]) -> list[bytes]:
    """Plaintext in pieces: frame by frame, or cut anywhere."""
    made = draw(st.lists(parts, min_size=1, max_size=10))
    if draw(st.booleans()):
        return made
    plain = b"".join(made)
    cuts = sorted(draw(st.lists(st.integers(0, len(plain)), max_size=5)))
    return [plain[start:end] for start, end in itertools.pairwise([0, *cuts, len(plain)])]


# Ended by a FIN, then reset: in one frame too.
RESET_AFTER_END = [frame(WINDOW, SYN | FIN, 1, 0), frame(WINDOW, FIN | RST, 1, 0)]


@pytest.mark.parametrize("is_initiator", [False, True])
@settings(max_examples=40)
@given(conversations(frames))
@example(RESET_AFTER_END)
def test_frames_mean_the_same_to_both(is_initiator, pieces):
    beside(pieces, is_initiator)


@pytest.mark.parametrize("is_initiator", [False, True])
@settings(max_examples=25)
@given(conversations(st.one_of(frames, damaged_frames)))
def test_what_is_damaged_ours_refuses_or_both_take_alike(is_initiator, pieces):
    beside(pieces, is_initiator)


@pytest.mark.slow
@pytest.mark.parametrize("is_initiator", [False, True])
@settings(max_examples=800)
@given(conversations(st.one_of(frames, frames, damaged_frames)))
def test_frames_at_length(is_initiator, pieces):
    beside(pieces, is_initiator)


# -- what differs on purpose -------------------------------------------------------------------

# Where ours and py-libp2p's part: the pieces that come to a side that accepted, whether each ends
# the connection, and the streams that it has then.
Ends = dict[int, str]
OWN: Ends = {2: "open", 4: "open"}
CUT: Ends = {2: "reset", 4: "reset"}
NEW = frame(WINDOW, SYN, 1, 0)
DIFFERENCES: dict[str, tuple[list[bytes], Ends, bool, Ends, bool]] = {
    "another version of the protocol": (
        [struct.pack(">BBHII", 1, WINDOW, SYN, 1, 0)],
        CUT, True, OWN | {1: "open"}, False,
    ),
    "a type that there is not": (
        [frame(4, 0, 0, 0)],
        CUT, True, OWN, False,
    ),
    "a stream of a number that is ours to give": (
        [frame(WINDOW, SYN, 6, 0)],
        CUT, True, OWN | {6: "open"}, False,
    ),
    "a stream of a number that is open": (
        [NEW, NEW],
        CUT | {1: "reset"}, True, OWN | {1: "open"}, False,
    ),
    "a stream of number 0": (
        [frame(WINDOW, SYN, 0, 0)],
        CUT, True, OWN | {0: "open"}, False,
    ),
    "more than the window": (
        [NEW, frame(DATA, 0, 1, INITIAL_WINDOW_BYTES + 1), bytes(INITIAL_WINDOW_BYTES + 1)],
        CUT | {1: "reset"}, True, OWN | {1: "open"}, False,
    ),
    "data after its end": (
        [frame(WINDOW, SYN | FIN, 1, 0), data(1, b"x")],
        CUT | {1: "reset"}, True, OWN | {1: "end"}, False,
    ),
    "a window of over 4 GiB": (
        [NEW, frame(WINDOW, 0, 1, 2**32 - 1)],
        CUT | {1: "reset"}, True, OWN | {1: "open"}, False,
    ),
    "an end or a reset with the ACK": (
        [frame(WINDOW, ACK | FIN, 2, 0), frame(WINDOW, ACK | RST, 4, 0)],
        {2: "end", 4: "reset"}, False, OWN, False,
    ),
    "the peer goes, but has not gone": (
        [frame(GO_AWAY, 0, 0, 0)],
        OWN, False, CUT, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_differences_are_those_of_the_docs(name):
    pieces, our_ends, we_end, their_ends, they_end = DIFFERENCES[name]
    ours, theirs = (run(outcome_of, make, pieces, False) for make in (Ours, Theirs))
    made = [
        ({number: each[0][1] for number, each in side.streams.items()}, side.ended)
        for side in (ours, theirs)
    ]
    assert made == [(our_ends, we_end), (their_ends, they_end)]
    page = (Path(__file__).parents[2] / "docs" / "transport.md").read_text()
    assert f"| {name} |" in page


# -- the two ends of one connection --------------------------------------------------------------


class Windows:
    """The windows of both ends by what is said: nobody sends more than the other has granted."""

    def __init__(self) -> None:
        self._rest = [b"", b""]
        # By end and stream: what it may still send.
        self._room: dict[tuple[int, int], int] = {}

    def said(self, end: int, plain: bytes) -> None:
        """Count what an end has said."""
        plain, at = self._rest[end] + plain, 0
        while len(plain) - at >= HEADER.size:
            _, kind, _, number, length = HEADER.unpack_from(plain, at)
            body = length if kind == DATA else 0
            if len(plain) - at < HEADER.size + body:
                break
            at += HEADER.size + body
            changed = end if kind == DATA else 1 - end
            if kind in (DATA, WINDOW):
                room = self._room.setdefault((changed, number), INITIAL_WINDOW_BYTES)
                self._room[changed, number] = room + (length if kind == WINDOW else -length)
                assert self._room[changed, number] >= 0, (end, number)
        self._rest[end] = plain[at:]


class Pair:
    """Ours at one end and py-libp2p's at the other, and what each has written."""

    def __init__(self, nursery: trio.Nursery, *, we_dialled: bool) -> None:
        self.nursery = nursery
        self.sides: tuple[Any, Any] = (
            Ours(nursery, is_initiator=we_dialled),
            Theirs(nursery, is_initiator=not we_dialled),
        )
        # Of each stream: what was written at each end, and which ends said that it is all.
        self.written: dict[int, tuple[bytearray, bytearray]] = {}
        self.finished: dict[int, set[int]] = {}
        self.reset: set[int] = set()
        self.windows = Windows()

    async def carry(self) -> None:
        """Carry what they say until both are silent."""
        silent = 0
        while silent < 3:
            await settle()
            moved = False
            for end, here in enumerate(self.sides):
                said = here.said()
                self.windows.said(end, said)
                self.sides[1 - end].bring(said)
                moved |= bool(said)
            silent = 0 if moved else silent + 1

    async def open(self, end: int) -> None:
        number = (await self.sides[end].open()).stream_id
        self.written[number] = (bytearray(), bytearray())
        self.finished[number] = set()

    def stream(self, end: int, number: int) -> Any:
        return self.sides[end].seen[number][0].stream

    async def act(self, end: int, number: int, what: str, size: int) -> None:
        """Write, end or reset, where that end still may."""
        if number in self.reset or end in self.finished[number]:
            return
        stream = self.stream(end, number)
        match what:
            case "write":
                body = bytes(at * 7 % 251 for at in range(min(size, 1000))) * (size // 1000 + 1)
                body = body[:size]
                self.written[number][end].extend(body)
                self.nursery.start_soon(stream.write, body)
            case "end":
                self.finished[number].add(end)
                await (stream.close if end else stream.end)()
            case _:
                self.reset.add(number)
                await stream.reset()

    def check(self) -> None:
        """Each end has what the other has written, in order, and its end."""
        for number, written in self.written.items():
            for end, side in enumerate(self.sides):
                ((got, ended),) = side.streams()[number]
                sent = bytes(written[1 - end])
                if number in self.reset:
                    assert sent.startswith(got)
                    assert ended == "reset" or self.finished[number] == {0, 1}
                    continue
                assert got == sent
                assert ended == ("end" if 1 - end in self.finished[number] else "open")
        ours = self.sides[0]
        assert not ours.refused
        assert not ours.ended
        assert not self.sides[1].ended
        gone = {n for n in self.written if n in self.reset or len(self.finished[n]) == 2}
        assert ours.muxer.streams.keys() == self.written.keys() - gone


async def converse(we_dialled: bool, acts: list[tuple[int, int, str, int]]) -> None:
    async with trio.open_nursery() as nursery:
        ends = Pair(nursery, we_dialled=we_dialled)
        await ends.carry()
        for end, which, what, size in acts:
            if what == "open" or not ends.written:
                await ends.open(end)
            else:
                number = list(ends.written)[which % len(ends.written)]
                await ends.act(end, number, what, size)
            # A write, an end and a reset may cross what the other end says.
            await ends.carry()
        ends.check()
        nursery.cancel_scope.cancel()


acts = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 3),
        st.sampled_from(["open", "write", "write", "write", "end", "reset"]),
        st.one_of(st.integers(1, 3000), st.sampled_from([64 * KIB, 300 * KIB, 700 * KIB])),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("we_dialled", [False, True])
@settings(max_examples=25)
@given(acts)
@example([(0, 0, "open", 1), (0, 0, "write", 700 * KIB), (1, 0, "write", 700 * KIB)])
def test_both_ends_have_what_the_other_wrote(we_dialled, acts):
    run(converse, we_dialled, acts)


@pytest.mark.slow
@pytest.mark.parametrize("we_dialled", [False, True])
@settings(max_examples=400)
@given(acts)
def test_both_ends_have_what_the_other_wrote_at_length(we_dialled, acts):
    run(converse, we_dialled, acts)
