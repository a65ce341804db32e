"""Topics in a node: revocation lists, programs that publish, and transports without."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from multiaddr import Multiaddr

from bbnode.access.conduct import Offence
from bbnode.access.keys import SigningKey
from bbnode.access.revocation import revoke
from bbnode.compiler import Compiler
from bbnode.components import Topic
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.protocol import REVOKED
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.config import sources
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.network.conduct import OFFENCE_ON_TOPIC
from bbnode.engine import install, steps
from bbnode.examples.bulletin import Bulletin, compile_program
from bbnode.ir.caps import MAX_TOPIC_BYTES
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER
from bbnode.transport.driver import Driver
from bbnode.transport.errors import NotSupportedError
from bbnode.transport.identity import Identity, create_identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.topics import TopicFault, TopicSetup
from tests.daemon.inviting import OWNER, Inviter, inviting
from tests.patience import PATIENCE_S
from tests.transport.test_py_libp2p import until

LAPTOP = PeerId.from_seed("laptop")


async def row(stack: AsyncExitStack, folder: Path, *transports: str) -> list[Inviter]:
    """Members of one private network, each connected with the next."""
    made: list[Inviter] = []
    for number, transport in enumerate(transports):
        flags = {"network.transport": transport, "network.listen": ["/ip4/127.0.0.1/tcp/0"]}
        context = inviting(folder / str(number), name=f"n{number}", **flags)
        made.append(await stack.enter_async_context(context))
        if number:
            before = made[number - 1]
            made[-1].backend.keep_connected(
                before.identity.peer_id, before.backend.listen_addresses()
            )
            await until(lambda: made[-1].came and made[-2].came)
    return made


def publish(node: Inviter, listed: Any) -> None:
    """As `bbnode network import` does with a list of the owner's."""
    access_files.save_revocations(node.resolved.state_dir, listed)
    node.access.reload_files()


def sequence(node: Inviter) -> int:
    kept = access_files.load_node(node.resolved.state_dir, node.identity.peer_id).revocations
    return 0 if kept is None else kept.sequence


async def settled(nodes: list[Inviter]) -> None:
    """Wait until each passes on to its neighbours in the row what it hears."""
    peers = [node.identity.peer_id for node in nodes]
    for at, node in enumerate(nodes):
        beside = frozenset(peers[max(at - 1, 0) : at] + peers[at + 1 : at + 2])
        await until(lambda: node.backend_topics.followers(REVOKED) == beside)  # noqa: B023


@pytest.mark.parametrize(
    "transports", [("libp2p", "libp2p", "libp2p"), ("libp2p", "lean", "libp2p"), ("lean",) * 3]
)
async def test_all_members_know_of_a_revoked_one_whatever_their_transport(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    async with AsyncExitStack() as stack:
        nodes = await row(stack, tmp_path, *transports)
        publish(nodes[0], revoke(OWNER, None, peers=[LAPTOP]))
        await until(lambda: [sequence(node) for node in nodes] == [1, 1, 1])
        for node in nodes:
            assert not node.access.policy.decide_outbound(LAPTOP, unix_s=0).allowed


async def test_a_list_is_published_where_all_follow_the_topic(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = await row(stack, tmp_path, "libp2p", "libp2p", "libp2p")
        await settled(nodes)
        asked: list[str] = []
        for node in nodes:
            node.protocol._queue = lambda peer: asked.append(str(peer))  # type: ignore[method-assign]
        publish(nodes[0], revoke(OWNER, None, peers=[LAPTOP]))
        await until(lambda: [sequence(node) for node in nodes] == [1, 1, 1])
        assert not asked
        counts = [node.backend.counters()["topics.published"] for node in nodes]
        assert counts == [1, 0, 0]


async def test_a_list_that_is_too_large_for_a_topic_goes_from_peer_to_peer(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = await row(stack, tmp_path, "libp2p", "libp2p")
        listed = revoke(OWNER, None, peers=[PeerId.from_seed(n) for n in range(2000)])
        assert len(listed.raw) > MAX_TOPIC_BYTES
        publish(nodes[0], listed)
        await until(lambda: sequence(nodes[1]) == 1)
        assert nodes[0].backend.counters()["topics.published"] == 0


async def test_a_list_that_the_owner_has_not_signed_counts_against_its_publisher(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        nodes = await row(stack, tmp_path, "libp2p", "libp2p")
        await settled(nodes)
        other = revoke(SigningKey.from_seed(b"x" * 32), None, peers=[LAPTOP])
        nodes[0].backend_topics.publish(REVOKED, other.raw)
        conduct = nodes[1].access.policy.conduct
        publisher = nodes[0].identity.peer_id
        await until(lambda: publisher in conduct.records)
        assert conduct.records[publisher].offences == {Offence.FORGED: 1}
        assert sequence(nodes[1]) == 0


def test_each_fault_is_an_offence() -> None:
    assert set(OFFENCE_ON_TOPIC) == set(TopicFault)


# -- programs --------------------------------------------------------------------------------


async def test_a_program_publishes_from_node_to_node() -> None:
    compiled = compile_program()
    seen: list[list[steps.Step]] = [[], []]
    drivers, nodes, topics = [], [], []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            backends = []
            for number in range(2):
                identity = Identity.from_seed(bytes([number + 1]) * 32)
                node = install(compiled, ["station"], peer_id=identity.peer_id, seed=1)
                listen = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
                backend = Libp2pTransport(identity, listen=listen, py_libp2p=True)
                carried = backend.topics(TopicSetup())
                driver = Driver(node, backend, observe=seen[number].append, topics=carried)
                await nursery.start(backend.run)
                await nursery.start(driver.run)
                nodes.append(node)
                drivers.append(driver)
                backends.append(backend)
                topics.append(carried)
            backends[1].keep_connected(backends[0].peer_id, backends[0].listen_addresses())
            for node in nodes:
                node.deliver_event("station", "join", TRIGGER)
            name = "/bbnode/open/readings"
            await until(
                lambda: all(each._pubsub and each._pubsub.router.mesh.get(name) for each in topics)
            )
            nodes[0].deliver_event("station", "measured", np.float32([1, 2]))

            def heard() -> list[Any]:
                return [s for s in seen[1] if isinstance(s, steps.AppEvent)]

            await until(lambda: len(heard()) == 2)
            values = {event.topic: event.value for event in heard()}
            assert values["reading"].tolist() == [1, 2]
            assert values["station"] == backends[0].peer_id
            assert not any(isinstance(step, steps.AppEvent) for step in seen[0])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"network.transport": "lean"}, r'set network\.transport = "libp2p"'),
        ({"topics.enabled": False}, r"topics\.enabled is false: set it to true"),
    ],
)
def test_a_node_that_carries_no_topics_refuses_such_a_program(
    tmp_path: Path, flags: dict[str, Any], remedy: str
) -> None:
    (tmp_path / "a.onnx").write_bytes(
        serialize(Compiler().bind_protocol("readings", Topic).compile(Bulletin().build()))
    )
    resolved = sources.resolve(
        None,
        environ={},
        flags={
            "node.state_dir": str(tmp_path / "state"),
            "artifact.path": str(tmp_path / "a.onnx"),
            "artifact.targets": ["station"],
            **flags,
        },
    )
    resolved.state_dir.mkdir()
    identity = create_identity(resolved.state_dir / "identity.key")
    artifact = assembly.find_artifact(resolved)
    node = assembly.install_node(resolved, artifact, identity, incarnation=1, network=None)
    access = assembly.make_access(resolved, identity)
    with pytest.raises(NotSupportedError, match=r"slot 'readings' \(bbnode.Topic\) .*" + remedy):
        assembly.make_transport(resolved, artifact, identity, node, access)
