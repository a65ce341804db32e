"""Releases: an owner's signed statement that an artifact is the network's program from now on.

Rule: the owner of a private network signs the digest of an artifact with a number that grows. A
node that upgrades by itself takes only what its network's owner signed, and only with a greater
number than that of what it runs or ran before, so that nobody can bring an old release back.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.access import sealed
from bbnode.access.errors import GrantError, Refusal, ReleaseRefused
from bbnode.access.keys import SigningKey
from bbnode.access.sealed import Kind
from bbnode.ir.peer import PeerId

DIGEST_BYTES = 32

RELEASE = Kind(
    name="release",
    context=b"bbnode-release-v1",
    prefix="bbrelease1",
    fields={
        "network": sealed.take_peer,
        "artifact_sha256": sealed.octets(DIGEST_BYTES, DIGEST_BYTES),
        "number": sealed.integer(sealed.MAX_UNIX_S, 1),
    },
    max_bytes=256,
    error=ReleaseRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An authentic release: `network` signed it. `number` is the second since 1970 of signing."""

    network: PeerId
    artifact_sha256: bytes
    number: int
    raw: bytes

    @property
    def text(self) -> str:
        """The line of text that is kept beside the artifact."""
        return sealed.to_text(RELEASE, self.raw)


def sign_release(key: SigningKey, artifact_sha256: str, *, number: int) -> Release:
    """Sign the artifact of a digest (64 hex digits) with the owner's key; raises GrantError."""
    if not 1 <= number <= sealed.MAX_UNIX_S:
        raise GrantError(f"a release's number is from 1 to {sealed.MAX_UNIX_S}, not {number}")
    values = [key.peer_id.to_bytes(), bytes.fromhex(artifact_sha256), number]
    raw = sealed.seal(RELEASE, values, key)
    return open_release(raw, key.peer_id, artifact_sha256)


@sealed.boundary(RELEASE)
def open_release(raw: bytes, network: PeerId, artifact_sha256: str) -> Release:
    """Return the release of that artifact by the owner of `network`; raises ReleaseRefused."""
    part = sealed.unseal(RELEASE, raw)
    owner = part.peer(0)
    if owner != network:
        raise RELEASE.refuse(Refusal.WRONG_NETWORK, f"it is of network {owner}, ours is {network}")
    part.check_signature(owner)
    release = Release(raw=raw, **part.read())
    if release.artifact_sha256.hex() != artifact_sha256.lower():
        raise RELEASE.refuse(
            Refusal.MALFORMED,
            f"it is of the artifact {release.artifact_sha256.hex()} and not of {artifact_sha256}",
        )
    return release


def release_from_text(text: str) -> bytes:
    """Return the bytes of a line of text; raises ReleaseRefused."""
    return sealed.from_text(RELEASE, text)
