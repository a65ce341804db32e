"""Artifacts from peer to peer: whole, resumed, and not believed when they are wrong."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from bbnode.ir.caps import ARTIFACT_STALL_S
from bbnode.ir.peer import PeerId
from bbnode.transport.artifact_exchange import (
    CHUNK_BYTES,
    ArtifactFetchError,
    ArtifactNotStored,
    fetch,
    serve,
)
from bbnode.transport.base import ProtocolHandler

PEER = PeerId.parse("12D3KooWLkHMEPJ3cTgdLCx8X6wT38PaozEnDAmXZnTNyuSyCdJr")
ARTIFACT = bytes(range(256)) * (CHUNK_BYTES // 64)  # four chunks
SHA256 = hashlib.sha256(ARTIFACT).hexdigest()


class _Stream:
    """One end of a stream, of which the other end may be cut after some bytes."""

    peer = PEER

    def __init__(self, end: trio.abc.HalfCloseableStream, cut_after: int) -> None:
        self._end, self._left = end, cut_after

    async def read(self, max_bytes: int) -> bytes:
        return bytes(await self._end.receive_some(max_bytes))

    async def write(self, data: bytes) -> None:
        data = bytes(data)[: self._left]
        self._left -= len(data)
        await self._end.send_all(data)

    async def end(self) -> None:
        await self._end.send_eof()


class _Host:
    """Serves and opens streams in one process."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._handlers: dict[str, ProtocolHandler] = {}
        self.cut_after = 1 << 40
        self.sent = 0

    def register_protocol(self, protocol_id: str, handler: ProtocolHandler) -> None:
        self._handlers[protocol_id] = handler

    @asynccontextmanager
    async def open_stream(self, peer: PeerId, protocol_id: str) -> AsyncIterator[_Stream]:
        assert peer == PEER
        ours, theirs = trio.testing.memory_stream_pair()

        async def handle() -> None:
            stream = _Stream(theirs, self.cut_after)
            await self._handlers[protocol_id](stream)
            self.sent = self.cut_after - stream._left
            await theirs.send_eof()

        self._nursery.start_soon(handle)
        yield _Stream(ours, 1 << 40)


@pytest.fixture
async def host() -> AsyncIterator[_Host]:
    async with trio.open_nursery() as nursery:
        made = _Host(nursery)
        serve(made, lambda digest: io.BytesIO(ARTIFACT) if digest == SHA256 else None)
        yield made
        nursery.cancel_scope.cancel()


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_whole_artifact(host: _Host, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    await fetch(host, PEER, SHA256, tmp_path / "a", progress=lambda *row: seen.append(row))
    assert (tmp_path / "a").read_bytes() == ARTIFACT
    assert seen[-1] == (len(ARTIFACT), len(ARTIFACT))
    assert _names(tmp_path) == ["a"]


async def test_one_that_broke_goes_on_from_there(host: _Host, tmp_path: Path) -> None:
    host.cut_after = CHUNK_BYTES + 100
    with pytest.raises(ArtifactFetchError, match="continue from there"):
        await fetch(host, PEER, SHA256, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    have = (tmp_path / "a.part").stat().st_size
    assert have == CHUNK_BYTES + 100 - 9
    host.cut_after = 1 << 40
    await fetch(host, PEER, SHA256, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == ARTIFACT
    await trio.testing.wait_all_tasks_blocked()
    assert host.sent == len(ARTIFACT) - have + 9


@pytest.mark.parametrize("there", [b"\x07" * 300, ARTIFACT[:-1] + b"\x00"])
async def test_what_does_not_fit_the_digest_is_thrown_away(
    host: _Host, tmp_path: Path, there: bytes
) -> None:
    (tmp_path / "a.part").write_bytes(there)
    with pytest.raises(ArtifactFetchError, match="something else"):
        await fetch(host, PEER, SHA256, tmp_path / "a")
    assert _names(tmp_path) == []


async def test_more_on_disk_than_the_whole(host: _Host, tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(ARTIFACT + b"x")
    with pytest.raises(ArtifactFetchError, match="larger than the whole"):
        await fetch(host, PEER, SHA256, tmp_path / "a")
    await fetch(host, PEER, SHA256, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == ARTIFACT


async def test_an_artifact_that_is_not_there(host: _Host, tmp_path: Path) -> None:
    with pytest.raises(ArtifactFetchError, match="ask for a new ticket"):
        await fetch(host, PEER, "00" * 32, tmp_path / "a")
    assert not (tmp_path / "a").exists()


async def test_a_folder_that_is_not_there(host: _Host, tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotStored, match="No such file"):
        await fetch(host, PEER, SHA256, tmp_path / "no" / "a")


@pytest.mark.parametrize("answers", [0, 9, 5000])
async def test_a_peer_that_falls_silent(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, answers: int
) -> None:
    async def silent(stream: _Stream) -> None:
        await stream.write((b"\x00" + (10_000).to_bytes(8, "big") + b"x" * 9000)[:answers])
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        host = _Host(nursery)
        host.register_protocol("/bbnode/artifact/1.0.0", silent)
        began = trio.current_time()
        with pytest.raises(ArtifactFetchError, match=f"{ARTIFACT_STALL_S:g} s"):
            await fetch(host, PEER, SHA256, tmp_path / "a")
        assert trio.current_time() - began == pytest.approx(ARTIFACT_STALL_S)
        nursery.cancel_scope.cancel()
