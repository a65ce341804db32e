"""Our Yamux beside py-libp2p's, in both roles: whatever streams do, the other side sees it."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux

from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.libp2p.muxer import MuxedStream, Muxer, UnreadBytes
from bbnode.transport.libp2p.noise_channel import NoiseChannel
from tests.patience import PATIENCE_S
from tests.transport.test_muxer import KEYS, Pipe, share_of

STEPS = 40
MOST_STREAMS = 6
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))]


class Wire(Pipe):
    """A pipe that tells when ours has sent something, or has closed it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = trio.Event()

    def send(self, data: memoryview) -> int:
        count = super().send(data)
        self.sent.set()
        return count

    def close(self) -> None:
        super().close()
        self.sent.set()


class Between:
    """The secured connection of py-libp2p's side, whose other end is the wire of ours."""

    is_initiator: bool

    def __init__(self, wire: Wire, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self._wire = wire
        self._channel = NoiseChannel(*KEYS[::-1])
        self._plain = bytearray()
        self.closed = False

    async def write(self, data: bytes) -> None:
        out = memoryview(bytearray(len(data) + 64 + len(data) // 1000))
        self._wire.bring(bytes(out[: self._channel.seal(data, out, 0)]))
        await trio.lowlevel.checkpoint()

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._plain:
            packets = bytes(self._wire.outgoing)
            if packets:
                end = self._channel.open(
                    memoryview(packets),
                    memoryview(bytearray(len(packets))),
                    lambda part: not self._plain.extend(part),
                )
                del self._wire.outgoing[:end]
            elif self._wire.closed or self.closed:
                return b""
            else:
                self._wire.sent = trio.Event()
                await self._wire.sent.wait()
        got = bytes(self._plain[: n or len(self._plain)])
        del self._plain[: len(got)]
        return got

    async def close(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


class Pair:
    """Our muxer and theirs, with all streams of both, and what each side has seen of them."""

    def __init__(self, nursery: trio.Nursery, *, ours_dials: bool) -> None:
        self._nursery = nursery
        self.refused: list[str] = []
        wire = Wire()
        self.ours = Muxer(
            wire,
            NoiseChannel(*KEYS),
            is_initiator=ours_dials,
            unread_bytes=2**25,
            max_streams=64,
            share=share_of(),
            all_unread=UnreadBytes(2**40, lambda: False),
            on_stream=lambda stream: self._watch("ours", stream),
            on_refused=self.refused.append,
            on_end=lambda _reason: None,
        )
        self.theirs = Yamux(
            Between(wire, is_initiator=not ours_dials),  # type: ignore[arg-type]
            ID(b"\x12\x20" + bytes(32)),
            is_initiator=not ours_dials,
        )
        # By side and number of the stream.
        self.streams: dict[str, dict[int, Any]] = {"ours": {}, "theirs": {}}
        self.got: defaultdict[tuple[str, int], bytearray] = defaultdict(bytearray)
        self.ends: dict[tuple[str, int], str] = {}

    async def run(self) -> None:
        self._nursery.start_soon(self.ours.run)
        await self._nursery.start(self._start)
        self._nursery.start_soon(self._accept)

    async def _start(self, *, task_status: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.theirs.start)
            await self.theirs.event_started.wait()
            task_status.started()

    async def _accept(self) -> None:
        while True:
            self._watch("theirs", await self.theirs.accept_stream())

    def _watch(self, side: str, stream: Any) -> None:
        self.streams[side][stream.stream_id] = stream
        self._nursery.start_soon(self._read, side, stream)

    async def _read(self, side: str, stream: Any) -> None:
        key = side, stream.stream_id
        try:
            while data := await stream.read(50_000):
                self.got[key] += data
            self.ends[key] = "end"
        except MuxedStreamEOF:
            self.ends[key] = "end"
        except (MuxedStreamReset, StreamBrokenError):
            self.ends[key] = "reset"

    async def open(self, side: str) -> int:
        stream = self.ours.open_stream() if side == "ours" else await self.theirs.open_stream()
        if isinstance(stream, MuxedStream):
            self.ours.send()
        self._watch(side, stream)
        return int(stream.stream_id)


@pytest.mark.parametrize("ours_dials", [True, False], ids=["ours dials", "theirs dials"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_a_side_does_the_other_sees(ours_dials, seed, autojump_clock):
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        pair = Pair(nursery, ours_dials=ours_dials)
        await pair.run()
        said: defaultdict[tuple[str, int], bytearray] = defaultdict(bytearray)
        over: dict[tuple[str, int], str] = {}  # how a side has ended its direction
        numbers: list[int] = []
        with trio.fail_after(PATIENCE_S * 100):
            for _ in range(STEPS):
                side = rng.choice(["ours", "theirs"])
                open_ = [n for n in numbers if (side, n) not in over]
                open_ = [n for n in open_ if "reset" not in (over.get((_other(side), n)),)]
                what = rng.choices(["open", "write", "end", "reset"], [2, 10, 2, 1])[0]
                if what == "open" and len(numbers) < MOST_STREAMS:
                    number = await pair.open(side)
                    numbers.append(number)
                    await trio.sleep(1)
                    assert number in pair.streams[_other(side)]
                elif open_ and what != "open":
                    number = rng.choice(open_)
                    stream = pair.streams[side][number]
                    if what == "write":
                        body = rng.randbytes(rng.choice([1, 12, 1000, 65_536, 300_000]))
                        await stream.write(body)
                        said[side, number] += body
                    else:
                        # What was written before a reset may be lost, so let it arrive.
                        await trio.sleep(1)
                        over[side, number] = what
                        ours_ends = side == "ours" and what == "end"
                        await (stream.end() if ours_ends else stream.close() if what == "end"
                               else stream.reset())  # fmt: skip
                        await trio.sleep(1)
            await trio.sleep(5)
        assert pair.refused == []
        assert pair.ours.ended == ""
        for side in ("ours", "theirs"):
            for number in numbers:
                assert pair.got[_other(side), number] == said[side, number]
                how = over.get((side, number))
                seen = pair.ends.get((_other(side), number))
                if how == "reset":
                    # py-libp2p tells its reader either; ours always tells them apart.
                    assert seen == "reset" or (seen, side) == ("end", "ours")
                elif how == "end" and over.get((_other(side), number)) != "reset":
                    assert seen == "end"
        nursery.cancel_scope.cancel()


def _other(side: str) -> str:
    return "theirs" if side == "ours" else "ours"
