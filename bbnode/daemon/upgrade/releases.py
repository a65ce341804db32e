"""Releases beside artifacts, and requests to a peer for that of the artifact that it runs.

Rule: the file is `<artifact>.signed`, one line. A request is a digest of 32 bytes, and the answer
is the release, or nothing; an answer counts only once it is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from bbnode.access.errors import AccessRefused, ReleaseRefused
from bbnode.access.release import DIGEST_BYTES, RELEASE, Release, open_release, release_from_text
from bbnode.daemon.paths import StorageError
from bbnode.ir.caps import ACCESS_STALL_S
from bbnode.ir.errors import PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport, read_exactly
from bbnode.transport.errors import StreamBrokenError

RELEASE_PROTOCOL: Final = "/bbnode/release/1.0.0"
# Base64 turns 3 bytes into 4 characters; the rest is for the prefix and the end of the line.
_LINE_BYTES: Final = RELEASE.max_bytes * 4 // 3 + 64


class NoRelease(PeerError):
    """A peer shows no release of the program that it offers, or did not answer."""


def release_file(artifact: Path) -> Path:
    """Return the file of the release beside an artifact."""
    return artifact.with_name(artifact.name + ".signed")


def read_release(artifact: Path) -> bytes:
    """Return the release beside an artifact, unchecked; empty if there is none.

    Raises StorageError, and ReleaseRefused for a file with other content.
    """
    path = release_file(artifact)
    try:
        with path.open("rb") as stream:
            line = stream.read(_LINE_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return release_from_text(line.decode("utf-8", "replace"))


def release_number(artifact: Path, network: PeerId, sha256: str) -> int:
    """Return the number of an artifact's release by the network's owner; 0 without a good one."""
    try:
        raw = read_release(artifact)
        return open_release(raw, network, sha256).number if raw else 0
    except (AccessRefused, StorageError):
        return 0


def serve(transport: Transport, sha256: str, read: Callable[[], bytes]) -> None:
    """Serve the release of the artifact of that digest; call it before the transport runs."""

    async def handle(stream: ProtocolStream) -> None:
        with trio.fail_after(ACCESS_STALL_S), contextlib.suppress(StreamBrokenError):
            asked = await read_exactly(stream, DIGEST_BYTES)
            raw = b""
            if asked.hex() == sha256:
                with contextlib.suppress(StorageError, ReleaseRefused):
                    raw = await trio.to_thread.run_sync(read)
            if raw:
                await stream.write(raw)
            await stream.end()

    transport.register_protocol(RELEASE_PROTOCOL, handle)


async def ask(transport: Transport, peer: PeerId, network: PeerId, sha256: str) -> Release:
    """Return the release of an artifact that a connected peer shows.

    Raises NoRelease, ReleaseRefused, and the errors of `open_stream`.
    """
    raw = b""
    with trio.move_on_after(ACCESS_STALL_S) as scope:
        async with transport.open_stream(peer, RELEASE_PROTOCOL) as stream:
            await stream.write(bytes.fromhex(sha256))
            await stream.end()
            while part := await stream.read(RELEASE.max_bytes + 1 - len(raw)):
                raw += part
                if len(raw) > RELEASE.max_bytes:
                    break
    if scope.cancelled_caught:
        raise NoRelease(f"{peer} did not answer within {ACCESS_STALL_S:g} s")
    if not raw:
        raise NoRelease(
            f"{peer} shows no release of {sha256}: its owner signs with `bbnode network sign`"
        )
    return open_release(raw, network, sha256)
