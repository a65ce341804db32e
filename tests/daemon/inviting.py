"""An inviting node in this process: real libp2p on loopback, no engine that runs.

It is made of the daemon's own parts, so that it lets in, grants and serves what a daemon would.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bbnode.access.keys import SigningKey
from bbnode.access.statement import grant
from bbnode.access.ticket import Invitation, make_ticket
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.control import AccessControl
from bbnode.daemon.access.protocol import AccessProtocol
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.network import ping
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionClosed, ConnectionOpened
from bbnode.transport.identity import Identity, create_identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.topics import TopicSetup
from tests.daemon.live import compiled
from tests.patience import PATIENCE_S

OWNER = SigningKey.from_seed(b"o" * 32)
HOUR_S = 3600


@dataclass
class Inviter:
    """One inviting node."""

    identity: Identity
    resolved: ResolvedConfig
    sha256: str
    access: AccessControl
    protocol: AccessProtocol
    backend: Libp2pTransport
    backend_topics: Any
    # Who connected, with the classes it plays, and who left.
    came: list[tuple[PeerId, tuple[str, ...]]] = field(default_factory=list)
    left: list[tuple[PeerId, str]] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    @property
    def address(self) -> str:
        return str(self.backend.listen_addresses()[0])

    def ticket(self, **changes: Any) -> str:
        """A ticket for one stranger, or with those arguments of `make_ticket` changed."""
        network = self.access.network
        arguments: dict[str, Any] = {
            "addresses": self.backend.listen_addresses(),
            "artifact_sha256": bytes.fromhex(self.sha256),
            "target": "client",
            "expires_s": int(time.time()) + HOUR_S,
            "nonce": secrets.token_bytes(16),
            "network": network,
            "invitation": None if network is None else self.invitation(),
            **changes,
        }
        return make_ticket(self.identity, **arguments).text

    @staticmethod
    def invitation(uses: int = 1) -> Invitation:
        return Invitation(uses=uses, classes=("client",), member_s=HOUR_S)

    async def until_came(self) -> None:
        while not self.came:
            await self.news.wait()

    async def until_left(self, count: int) -> None:
        while len(self.left) < count:
            await self.news.wait()

    async def watch(self) -> None:
        async def follow() -> None:
            while True:
                match await self.backend.events.receive():
                    case ConnectionOpened(peer=peer, hello=hello):
                        self.came.append((peer, hello.classes))
                        self.protocol.peer_up(peer)
                    case ConnectionClosed(peer=peer, reason=reason):
                        self.left.append((peer, reason))
                self.news.set()
                self.news = trio.Event()

        try:
            await follow()
        except trio.EndOfChannel:
            return


def make(folder: Path, *, private: bool, name: str = "server", **flags: Any) -> Inviter:
    """An inviting node that does not run yet; of a private network it may invite to."""
    folder.mkdir()
    (folder / "a.onnx").write_bytes(serialize(compiled()))
    resolved = sources.resolve(
        None,
        environ={},
        flags={
            "node.name": name,
            "node.state_dir": str(folder / "state"),
            "artifact.path": str(folder / "a.onnx"),
            "artifact.targets": ["server"],
            **flags,
        },
    )
    paths.make_state_dir(resolved.state_dir)
    identity = create_identity(paths.identity_file(resolved.state_dir))
    if private:
        now_s = int(time.time())
        member = grant(
            OWNER,
            member=identity.peer_id,
            not_before_s=now_s,
            expires_s=now_s + HOUR_S,
            serial=1,
            may_grant=True,
        )
        access_files.save_membership(resolved.state_dir, member)
    access = assembly.make_access(resolved, identity)
    artifact = assembly.find_artifact(resolved)
    node = assembly.install_node(resolved, artifact, identity, incarnation=1, network=None)
    backend = assembly.make_transport(resolved, artifact, identity, node, access)
    topics = None
    if assembly.carries_topics(backend, resolved.config):
        setup = TopicSetup(network=access.network, credentials=lambda: access.credentials)
        topics = backend.topics(setup)
    protocol = AccessProtocol(access, backend, resolved.state_dir, identity, topics=topics)
    ping.register(backend)
    return Inviter(identity, resolved, artifact.sha256, access, protocol, backend, topics)


@asynccontextmanager
async def inviting(folder: Path, *, private: bool = True, **flags: Any) -> AsyncIterator[Inviter]:
    """An inviting node that runs."""
    made = make(folder, private=private, **flags)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(made.backend.run)
            nursery.start_soon(made.watch)
            nursery.start_soon(made.protocol.run)
            yield made
            await made.backend.stop(1)
            nursery.cancel_scope.cancel()
