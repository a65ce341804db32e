"""The artifact that a peer offers: from the cache, or fetched over the connection with it.

Rule: the digest is its name everywhere. The cache, `<cache>/artifacts/<sha256>.onnx`, is shared by
all nodes of a user, and its content is checked each time it is read; an unfinished download belongs
to its node.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import Artifact, ArtifactRejected, load_artifact
from bbnode.daemon.join.dial import Dialled
from bbnode.daemon.join.invitation import InviterLost
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.artifact_exchange import Progress, fetch
from bbnode.transport.errors import NotConnectedError, StreamBrokenError

# Connections that may break during a fetch; each continues where the last one ended.
MAX_ATTEMPTS: Final = 5
# The pause for the transport to dial again.
_RECONNECT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Obtained:
    """An artifact with its place in the cache; `fetched` is False if it was cached already."""

    artifact: Artifact
    file: Path
    fetched: bool


def cache_file(state_dir: Path, sha256: str) -> Path:
    """Return the place of the artifact of that digest in the cache."""
    return paths.cache_dir(state_dir) / "artifacts" / f"{sha256}.onnx"


async def obtain(
    dialled: Dialled,
    inviter: PeerId,
    sha256: str,
    *,
    own: PeerId,
    state_dir: Path,
    progress: Progress | None = None,
    max_bytes: int = MAX_ARTIFACT_BYTES,
) -> Obtained:
    """Return the artifact of at most `max_bytes`, digest checked, parsed with its bounds.

    Raises ArtifactRejected, ArtifactUnreadable, ArtifactFetchError, ArtifactNotStored,
    StorageError, InviterLost.
    """
    file = cache_file(state_dir, sha256)
    cached = await trio.to_thread.run_sync(_cached, file, sha256)
    if cached is not None:
        return Obtained(artifact=cached, file=file, fetched=False)
    paths.make_state_dir(file.parent)
    # In the node's own directory until it is complete, as two nodes may fetch it at once.
    draft = file.with_name(f".{sha256}.{str(own)[-16:]}")
    await _fetch(dialled, inviter, sha256, draft, progress, max_bytes)
    artifact = await trio.to_thread.run_sync(_load, draft, sha256)
    try:
        draft.replace(file)
    except OSError as error:
        raise paths.StorageError(f"{file}: {error.strerror}; make it writable") from error
    return Obtained(artifact=artifact, file=file, fetched=True)


async def _fetch(
    dialled: Dialled,
    inviter: PeerId,
    sha256: str,
    draft: Path,
    progress: Progress | None,
    max_bytes: int,
) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            await fetch(
                dialled.backend, inviter, sha256, draft, progress=progress, max_bytes=max_bytes
            )
        except (NotConnectedError, StreamBrokenError) as error:
            if attempt == MAX_ATTEMPTS:
                raise InviterLost(
                    f"the connection with {inviter} broke {MAX_ATTEMPTS} times while the artifact "
                    f"came ({error}); join again, and the fetch continues from there"
                ) from error
            await trio.sleep(_RECONNECT_S)
        else:
            return


def _cached(file: Path, sha256: str) -> Artifact | None:
    """Return the cached artifact, or None; a file that was changed there is removed."""
    try:
        return load_artifact(file, expected_sha256=sha256) if file.exists() else None
    except ArtifactRejected:
        with contextlib.suppress(OSError):  # the new file replaces it, or fails with the reason
            file.unlink(missing_ok=True)
        return None


def _load(draft: Path, sha256: str) -> Artifact:
    try:
        return load_artifact(draft, expected_sha256=sha256)
    except ArtifactRejected:
        # The digest is right but it is no artifact: useless to every node.
        draft.unlink(missing_ok=True)
        raise
