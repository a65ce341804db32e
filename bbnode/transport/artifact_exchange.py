"""Fetching a compiled artifact from a peer: by digest, in chunks, resumable.

Rule: the digest is the name, and an artifact is accepted only if it has that digest. An interrupted
fetch continues from the bytes on disk. Time-outs depend on progress: the fetch waits for a slow
peer, but not for a silent one.

    request   32 bytes of SHA-256, 8 bytes big-endian offset
    answer    1 byte status, 8 bytes big-endian size of the whole, then bytes from the offset on
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, Final

import trio

from bbnode.ir.caps import ARTIFACT_STALL_S, MAX_ARTIFACT_BYTES
from bbnode.ir.errors import EnvironmentFault, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport, read_exactly
from bbnode.transport.errors import StreamBrokenError

ARTIFACT_PROTOCOL: Final = "/bbnode/artifact/1.0.0"
# Large enough for libp2p's full speed, while writing one to disk blocks the loop only briefly.
CHUNK_BYTES: Final = 256 * 1024

_REQUEST: Final = struct.Struct(">32sQ")
_ANSWER: Final = struct.Struct(">BQ")


class _Status(enum.IntEnum):
    OK = 0
    UNKNOWN = 1  # no artifact of that digest here
    PAST_END = 2  # the offset is beyond its end


class ArtifactFetchError(PeerError):
    """A peer did not provide the artifact; the message has the reason and the remedy."""


class ArtifactTooLarge(ArtifactFetchError):
    """A peer's artifact is larger than `max_bytes`; nothing of it was fetched."""


class ArtifactNotStored(EnvironmentFault):
    """The fetched artifact cannot be written to disk."""


# Opens the artifact of a digest (lower-case hex) for one request, or returns None. Called in a
# worker thread; it may raise OSError.
Provider = Callable[[str], BinaryIO | None]
# Called with the number of bytes fetched so far and the total size.
Progress = Callable[[int, int], None]


def serve(transport: Transport, provide: Provider) -> None:
    """Answer requests for artifacts on all connections. Call it before the transport runs."""
    transport.register_protocol(ARTIFACT_PROTOCOL, _server(provide))


def _server(provide: Provider) -> Callable[[ProtocolStream], Awaitable[None]]:
    async def handle(stream: ProtocolStream) -> None:
        with trio.fail_after(ARTIFACT_STALL_S):
            digest, offset = _REQUEST.unpack(await read_exactly(stream, _REQUEST.size))
        data = await trio.to_thread.run_sync(provide, digest.hex())
        if data is None:
            await stream.write(_ANSWER.pack(_Status.UNKNOWN, 0))
            return
        with data:
            size = data.seek(0, os.SEEK_END)
            if offset > size:
                await stream.write(_ANSWER.pack(_Status.PAST_END, size))
                return
            data.seek(offset)
            await stream.write(_ANSWER.pack(_Status.OK, size))
            while chunk := await trio.to_thread.run_sync(data.read, CHUNK_BYTES):
                with trio.fail_after(ARTIFACT_STALL_S):
                    await stream.write(chunk)
        # The peer may have read everything and disconnected.
        with contextlib.suppress(StreamBrokenError):
            await stream.end()

    return handle


async def fetch(
    transport: Transport,
    peer: PeerId,
    sha256: str,
    file: Path,
    *,
    progress: Progress | None = None,
    max_bytes: int = MAX_ARTIFACT_BYTES,
) -> None:
    """Fetch an artifact from a connected peer to `file`.

    Args:
        transport: a transport connected with `peer`.
        peer: the peer that has the artifact.
        sha256: the artifact's digest, 64 hex digits.
        file: destination; an unfinished fetch is kept as `<file>.part`, and the next one
            continues from it.
        progress: called after every chunk.
        max_bytes: maximum size; nothing of a larger artifact is fetched.

    Raises:
        ArtifactTooLarge: the artifact has more than `max_bytes`.
        ArtifactFetchError: the peer does not have it, fell silent, or sent something else.
        ArtifactNotStored: it could not be written to disk.
        NotConnectedError, StreamBrokenError: as `open_stream`; the bytes fetched so far are kept.
    """
    partial = file.with_name(file.name + ".part")
    try:
        have = partial.stat().st_size if partial.exists() else 0
        async with transport.open_stream(peer, ARTIFACT_PROTOCOL) as stream:
            await stream.write(_REQUEST.pack(bytes.fromhex(sha256), have))
            await stream.end()
            size = await _read_answer(stream, peer, sha256, partial)
            if size > max_bytes:
                raise ArtifactTooLarge(
                    f"{peer} offers an artifact of {size} bytes, and {max_bytes} are taken at most"
                )
            with partial.open("ab") as out:
                while have < size and (chunk := await _read(stream, peer)):
                    have += len(chunk)
                    if have > size:
                        break
                    await trio.to_thread.run_sync(out.write, chunk)
                    if progress is not None:
                        progress(have, size)
                out.flush()
                await trio.to_thread.run_sync(os.fsync, out.fileno())
        if have < size:
            raise ArtifactFetchError(
                f"{peer} ended after {have} of {size} bytes of the artifact; fetch it again to "
                "continue from there"
            )
        digest = await trio.to_thread.run_sync(_digest, partial)
        if digest != sha256.lower() or have > size:
            _discard(partial)
            raise ArtifactFetchError(
                f"{peer} sent something else than the artifact {sha256} (its digest is {digest}); "
                "ask who gave you the ticket"
            )
        partial.replace(file)
    except OSError as error:
        raise ArtifactNotStored(
            f"{error.filename or file}: {error.strerror}; free space, or make it writable"
        ) from error


async def _read_answer(stream: ProtocolStream, peer: PeerId, sha256: str, partial: Path) -> int:
    """Return the total size of the artifact."""
    with trio.move_on_after(ARTIFACT_STALL_S) as scope:
        status, size = _ANSWER.unpack(await read_exactly(stream, _ANSWER.size))
    if scope.cancelled_caught:
        raise ArtifactFetchError(f"{peer} did not answer within {ARTIFACT_STALL_S:g} s; try again")
    if status == _Status.PAST_END:
        _discard(partial)
        raise ArtifactFetchError(
            f"the part of {sha256} on disk was larger than the whole; it was removed, fetch "
            "it again"
        )
    if status != _Status.OK:
        raise ArtifactFetchError(
            f"{peer} has no artifact {sha256}; it runs another one now, ask for a new ticket"
        )
    if size > MAX_ARTIFACT_BYTES:
        raise ArtifactFetchError(f"{peer} offers {size} bytes, which no artifact has")
    return int(size)


async def _read(stream: ProtocolStream, peer: PeerId) -> bytes:
    with trio.move_on_after(ARTIFACT_STALL_S):
        return await stream.read(CHUNK_BYTES)
    raise ArtifactFetchError(
        f"{peer} sent nothing for {ARTIFACT_STALL_S:g} s; fetch it again to continue from there"
    )


def _discard(partial: Path) -> None:
    """Delete bytes that do not belong to the artifact, so that no fetch continues from them."""
    partial.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
