"""Fetching an offered program while the node does not run: peers are dialled as in a join.

Rule: the bootstrap peers are asked in their order, and the first that runs another program offers
it.
"""

from __future__ import annotations

from multiaddr import Multiaddr

from bbnode.access.release import Release
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control.host import NotOffered
from bbnode.daemon.join.artifact import Obtained, obtain
from bbnode.daemon.join.dial import Dialled, dialled
from bbnode.daemon.join.invitation import Source
from bbnode.daemon.upgrade import releases
from bbnode.daemon.upgrade.candidate import most_bytes
from bbnode.daemon.upgrade.switch import not_again
from bbnode.ir.address import peer_of_address
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.artifact_exchange import ArtifactTooLarge, Progress
from bbnode.transport.identity import load_identity


async def asked(
    resolved: ResolvedConfig,
    present: Artifact,
    *,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> tuple[PeerId, Obtained, Release | None]:
    """Return the offering peer, the program, and the owner's release if the peer shows one.

    Raises NotOffered with the reason of each peer; ArtifactTooLarge; StateDirInUse; the errors of
    the node's identity and membership.
    """
    sources: dict[PeerId, list[Multiaddr]] = {}
    for text in resolved.config.network.bootstrap:
        address = Multiaddr(text)
        sources.setdefault(peer_of_address(address), []).append(address)
    if not sources:
        raise NotOffered("the node has no bootstrap peers (network.bootstrap): nobody to ask")
    state_dir = resolved.state_dir
    with paths.lock_state_dir(state_dir):
        identity = load_identity(paths.identity_file(state_dir))
        access = access_files.load_node(state_dir, identity.peer_id)
        reasons = []
        for peer, addresses in sources.items():
            source = Source(inviter=peer, addresses=tuple(addresses))
            try:
                async with dialled(identity, source, access.credentials) as connection:
                    digest = connection.hello.artifact_sha256.lower()
                    if digest in ("", present.sha256, not_again(resolved)):
                        reasons.append(f"{peer.short} offers nothing else than this node has")
                        continue
                    release = await _release(connection, peer, access.network, digest)
                    obtained = await obtain(
                        connection,
                        peer,
                        digest,
                        own=identity.peer_id,
                        state_dir=state_dir,
                        progress=progress,
                        max_bytes=most_bytes(present.size) if max_bytes is None else max_bytes,
                    )
                    return peer, obtained, release
            except ArtifactTooLarge:
                raise
            except BbnodeError as error:
                reasons.append(str(error))
    raise NotOffered("; ".join(reasons))


async def _release(
    connection: Dialled, peer: PeerId, network: PeerId | None, sha256: str
) -> Release | None:
    if network is None:
        return None
    try:
        return await releases.ask(connection.backend, peer, network, sha256)
    except BbnodeError:
        return None
