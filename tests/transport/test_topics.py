"""Topics by GossipSub: through hosts of others, and what peers may not do to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils import encode_varint_prefixed
from libp2p.utils.varint import encode_uvarint

from bbnode.access.decision import Decision, Reason
from bbnode.ir.caps import (
    MAX_TOPIC_BYTES,
    MAX_TOPIC_CONTROLS,
    MAX_TOPIC_IDS,
    MAX_TOPIC_QUEUE,
    MAX_TOPIC_RPC_BYTES,
    MAX_TOPICS,
    TOPIC_GIVER_RATE,
    TOPIC_PUBLISHER_RATE,
)
from bbnode.ir.peer import PeerId
from bbnode.transport import Capability, NotSupportedError, QueueFullError
from bbnode.transport.errors import EnvelopeTooLargeError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.py_libp2p import topics as ours
from bbnode.transport.libp2p.py_libp2p.topics import GossipTopics
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.topics import TopicFault, TopicSetup, name_on_wire
from tests.patience import PATIENCE_S
from tests.transport.hosts import LOOPBACK, OurHost, dial
from tests.transport.plain import plain_host, plain_running
from tests.transport.test_py_libp2p import until, where

NEWS = name_on_wire(None, "news")
NETWORK = PeerId.parse(str(Identity.from_seed(b"n" * 32).peer_id))


class Members:
    """An authorizer that admits by the credentials that are shown."""

    def __init__(self) -> None:
        self.members: set[PeerId] = set()
        self.wait_s = 0.0

    def hello(self, peer: PeerId, direction: Any, hello: Any) -> Decision:
        if hello.credentials == b"member":
            self.members.add(peer)
        return self._decide(peer)

    def envelope(self, peer: PeerId, direction: Any, size: int) -> Decision:
        if self.wait_s:
            return Decision(
                allowed=False,
                reason=Reason.MESSAGE_RATE,
                rule="message_rate",
                detail="slow",
                wait_s=self.wait_s,
            )
        return self._decide(peer)

    def _decide(self, peer: PeerId) -> Decision:
        is_member = peer in self.members
        return Decision(
            allowed=is_member, reason=Reason.NOT_A_MEMBER, rule="membership", detail="by its own"
        )


class Follower:
    """A host of ours that follows a topic."""

    def __init__(self, seed: int, network: PeerId | None = None, authorizer: Any = None) -> None:
        self.host = OurHost(seed, py_libp2p=True)
        self.faults: list[tuple[PeerId, TopicFault]] = []
        self.heard: list[tuple[PeerId, bytes]] = []
        setup = TopicSetup(
            network=network,
            credentials=lambda: b"member",
            on_fault=lambda peer, fault: self.faults.append((peer, fault)),
        )
        self.topics = GossipTopics(self.host.other, setup, authorizer, self.host.counters)
        self.topics.follow("news", lambda peer, data: self.heard.append((peer, data)))

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def count(self, name: str) -> int:
        return self.host.counters.snapshot()[f"topics.{name}"]


def signed(
    seed: bytes, data: bytes, *, number: int = 1, topics: tuple[str, ...] = (NEWS,), **other: Any
) -> rpc_pb2.Message:
    pair = create_new_key_pair(seed)
    fields = {
        "from_id": ID.from_pubkey(pair.public_key).to_bytes(),
        "seqno": number.to_bytes(8, "big"),
        "data": data,
        "topicIDs": list(topics),
        **other,
    }
    message = rpc_pb2.Message(**fields)
    raw = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
    message.signature = pair.private_key.sign(raw)
    return message


class Stranger:
    """An unpatched host that sends frames of GossipSub as they are."""

    def __init__(self, seed: bytes = b"s" * 32) -> None:
        self.host = plain_host(seed)
        self.peer = PeerId.from_bytes(self.host.get_id().to_bytes())
        self.stream: Any = None

    async def say(self, rpc: rpc_pb2.RPC) -> None:
        await self.stream.write(encode_varint_prefixed(rpc.SerializeToString()))

    async def publish(self, *messages: rpc_pb2.Message) -> None:
        await self.say(rpc_pb2.RPC(publish=messages))


@asynccontextmanager
async def attacked(**settings: Any) -> AsyncIterator[tuple[Follower, Stranger]]:
    follower, stranger = Follower(1, **settings), Stranger()
    with trio.fail_after(PATIENCE_S):
        async with follower.host.running([LOOPBACK]), plain_running(stranger.host, [LOOPBACK]):
            await stranger.host.connect(where(follower.host))
            stranger.stream = await stranger.host.new_stream(
                follower.host.py.get_id(), [PROTOCOL_ID_V11]
            )
            await until(lambda: follower.topics._pubsub is not None)
            yield follower, stranger
            # Whatever it was: the next message is heard.
            network = settings.get("network")
            body = b"fine" if network is None else msgpack.packb([b"member", b"fine"])
            names = (name_on_wire(network, "news"),)
            await stranger.publish(signed(b"y" * 32, body, number=10**6, topics=names))
            await until(lambda: follower.heard and follower.heard[-1][1] == b"fine")


# -- messages --------------------------------------------------------------------------------


async def test_a_message_comes_through_an_unpatched_host_as_it_is():
    first, last, plain = Follower(1), Follower(2), plain_host(b"p" * 32)
    pubsub = Pubsub(plain, GossipSub([PROTOCOL_ID_V11], 6, 4, 12, heartbeat_interval=1))
    with trio.fail_after(PATIENCE_S):
        async with (
            first.host.running([LOOPBACK]),
            last.host.running([LOOPBACK]),
            plain_running(plain, [LOOPBACK]),
            background_trio_service(pubsub),
            background_trio_service(pubsub.router),
        ):
            await pubsub.wait_until_ready()
            await plain.connect(where(first.host))
            await plain.connect(where(last.host))
            heard = await pubsub.subscribe(NEWS)
            middle = PeerId.from_bytes(plain.get_id().to_bytes())
            await until(lambda: first.topics.followers("news") == {middle})
            await until(lambda: last.topics.followers("news") == {middle})
            # As it comes it loses what is published before both are in its mesh.
            await until(lambda: len(pubsub.router.mesh[NEWS]) == 2)
            first.topics.publish("news", b"one")
            await until(lambda: last.heard)
            assert last.heard == [(first.peer, b"one")]
            assert (await heard.get()).data == b"one"
            await pubsub.publish(NEWS, b"two")
            await until(lambda: first.heard and len(last.heard) > 1)
            assert first.heard == [(middle, b"two")]
            assert not first.faults
            assert not last.faults


async def test_peers_that_were_connected_before_the_first_topic_hear_of_it():
    first, last = Follower(1), OurHost(2, py_libp2p=True)
    with trio.fail_after(PATIENCE_S):
        async with first.host.running([LOOPBACK]), last.running([LOOPBACK]):
            await dial(last, first.host)
            late = GossipTopics(last.other, TopicSetup(), None, last.counters)
            heard: list[bytes] = []
            late.follow("news", lambda _peer, data: heard.append(data))
            await until(lambda: first.topics.followers("news"))
            first.topics.publish("news", b"one")
            await until(lambda: heard == [b"one"])
            late.leave("news")
            await until(lambda: not first.topics.followers("news"))


async def test_a_member_is_heard_where_it_is_not_connected():
    members = Members()
    async with attacked(network=NETWORK, authorizer=members) as (follower, stranger):
        names = (name_on_wire(NETWORK, "news"),)
        body = msgpack.packb([b"member", b"from afar"])
        await stranger.publish(signed(b"m" * 32, body, topics=names))
        await until(lambda: follower.heard)
        publisher = Identity.from_seed(b"m" * 32).peer_id
        assert follower.heard == [(publisher, b"from afar")]
        assert not follower.faults


def test_what_is_too_large_or_too_much_is_refused_at_once():
    follower = Follower(1)  # it does not run
    with pytest.raises(EnvelopeTooLargeError, match=str(MAX_TOPIC_BYTES)):
        follower.topics.publish("news", bytes(MAX_TOPIC_BYTES + 1))
    for _ in range(MAX_TOPIC_QUEUE - 1):
        follower.topics.publish("news", b"")
    with pytest.raises(QueueFullError, match="publish less often"):
        follower.topics.publish("news", b"")
    assert follower.count("dropped") == 1


def test_a_transport_without_py_libp2p_says_so():
    lean = Libp2pTransport(Identity.from_seed(b"l" * 32), listen=[])
    assert Capability.TOPICS not in lean.capabilities
    with pytest.raises(NotSupportedError, match=r'network\.transport = "libp2p"'):
        lean.topics(TopicSetup())
    full = Libp2pTransport(Identity.from_seed(b"l" * 32), listen=[], py_libp2p=True)
    assert Capability.TOPICS in full.capabilities


# -- what peers may not do -------------------------------------------------------------------


def forged() -> rpc_pb2.Message:
    message = signed(b"x" * 32, b"true")
    message.data = b"changed"
    return message


def unsigned() -> rpc_pb2.Message:
    message = signed(b"x" * 32, b"true")
    message.ClearField("signature")
    return message


def of_another() -> rpc_pb2.Message:
    """Signed by one, in the name of another."""
    victim = ID.from_pubkey(create_new_key_pair(b"v" * 32).public_key)
    return signed(b"x" * 32, b"true", from_id=victim.to_bytes())


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (forged, TopicFault.FORGED),
        (unsigned, TopicFault.FORGED),
        (of_another, TopicFault.FORGED),
        (lambda: signed(b"x" * 32, b"", from_id=b"\x00\x01\x02"), TopicFault.FORGED),
        (lambda: signed(b"x" * 32, b"", from_id=b""), TopicFault.MALFORMED),
        (lambda: signed(b"x" * 32, b"", from_id=bytes(100)), TopicFault.MALFORMED),
        (lambda: signed(b"x" * 32, b"", seqno=b""), TopicFault.MALFORMED),
        (lambda: signed(b"x" * 32, b"", seqno=bytes(9)), TopicFault.MALFORMED),
        (lambda: signed(b"x" * 32, b"", topics=(NEWS, NEWS)), TopicFault.MALFORMED),
        (lambda: signed(b"x" * 32, bytes(MAX_TOPIC_BYTES + 1)), TopicFault.OVERSIZED),
    ],
)
async def test_what_nobody_honest_passes_on_counts_against_the_giver(
    make: Callable[[], rpc_pb2.Message], fault: TopicFault
) -> None:
    async with attacked() as (follower, stranger):
        await stranger.publish(make())
        await until(lambda: follower.faults)
        assert follower.faults == [(stranger.peer, fault)]
        assert follower.count(fault) == 1
        assert not follower.heard


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (msgpack.packb([b"nothing", b"news"]), TopicFault.NOT_ALLOWED),
        (msgpack.packb([b"", b"news"]), TopicFault.NOT_ALLOWED),
        (b"news", TopicFault.MALFORMED),
        (msgpack.packb(["member", b"news"]), TopicFault.MALFORMED),
        (msgpack.packb([b"member", b"news", 1]), TopicFault.MALFORMED),
        (msgpack.packb([b"member", bytes(MAX_TOPIC_BYTES + 1)]), TopicFault.OVERSIZED),
    ],
)
async def test_who_is_no_member_is_not_heard(body: bytes, fault: TopicFault) -> None:
    async with attacked(network=NETWORK, authorizer=Members()) as (follower, stranger):
        await stranger.publish(signed(b"x" * 32, body, topics=(name_on_wire(NETWORK, "news"),)))
        await until(lambda: follower.faults)
        assert follower.faults == [(stranger.peer, fault)]
        assert not follower.heard


async def test_a_publisher_over_its_rate_is_not_heard_for_a_while():
    members = Members()
    async with attacked(network=NETWORK, authorizer=members) as (follower, stranger):
        body, names = msgpack.packb([b"member", b"much"]), (name_on_wire(NETWORK, "news"),)
        members.wait_s = 1.0
        await stranger.publish(signed(b"m" * 32, body, topics=names))
        await until(lambda: follower.faults)
        publisher = Identity.from_seed(b"m" * 32).peer_id
        assert follower.faults == [(publisher, TopicFault.FLOOD)]
        members.wait_s = 0.0


async def test_a_message_counts_once_and_an_old_one_is_a_fault(monkeypatch):
    monkeypatch.setattr(ours, "MAX_TOPIC_SEEN", 2)
    async with attacked(network=NETWORK, authorizer=Members()) as (follower, stranger):
        names = (name_on_wire(NETWORK, "news"),)
        made = [
            signed(b"m" * 32, msgpack.packb([b"member", b"%d" % n]), number=n, topics=names)
            for n in range(1, 5)
        ]
        await stranger.publish(*made, made[3])
        await until(lambda: follower.count("known") == 1)
        assert [data for _, data in follower.heard] == [b"1", b"2", b"3", b"4"]
        assert not follower.faults
        await stranger.publish(made[0])
        await until(lambda: follower.faults)
        assert follower.faults == [(stranger.peer, TopicFault.REPLAYED)]


async def test_one_publisher_that_floods_is_blamed_and_not_who_passes_it_on():
    async with attacked() as (follower, stranger):
        publishers = follower.topics._publishers
        assert publishers.per_s == TOPIC_PUBLISHER_RATE
        publishers.burst_s = 5 / TOPIC_PUBLISHER_RATE  # five messages
        await stranger.publish(*[signed(b"x" * 32, b"", number=n) for n in range(1, 30)])
        await until(lambda: follower.count("flood") + len(follower.heard) >= 29)
        publisher = Identity.from_seed(b"x" * 32).peer_id
        assert set(follower.faults) == {(publisher, TopicFault.FLOOD)}
        assert 0 < len(follower.heard) < 20


async def test_one_giver_that_floods_is_blamed():
    async with attacked() as (follower, stranger):
        assert follower.topics._givers.per_s == TOPIC_GIVER_RATE
        follower.topics._givers.per_s = 1.0
        seeds = [bytes([n]) * 32 for n in range(1, 30)]
        await stranger.publish(*[signed(seed, b"") for seed in seeds])
        await until(lambda: follower.count("flood"))
        assert set(follower.faults) == {(stranger.peer, TopicFault.FLOOD)}
        follower.topics._givers.per_s = 1e9


async def test_a_flood_of_topics_is_kept_within_bounds():
    async with attacked() as (follower, stranger):
        for start in range(0, 4 * MAX_TOPICS, 32):
            said = [
                rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"/other/{n}")
                for n in range(start, start + 32)
            ]
            await stranger.say(rpc_pb2.RPC(subscriptions=said))
        await until(lambda: follower.count("flood") >= 3 * MAX_TOPICS)
        pubsub = follower.topics._pubsub
        assert len(pubsub.peer_topics) == MAX_TOPICS
        assert follower.faults == [(stranger.peer, TopicFault.FLOOD)] * len(follower.faults)
        assert len(follower.faults) < 10  # one a second, not one for each
        long = rpc_pb2.RPC.SubOpts(subscribe=True, topicid="x" * 10_000)
        await stranger.say(rpc_pb2.RPC(subscriptions=[long]))
        await until(lambda: (stranger.peer, TopicFault.MALFORMED) in follower.faults)


async def test_what_is_said_of_topics_that_are_not_ours_is_not_kept():
    async with attacked() as (follower, stranger):
        names = [f"/other/{n}" for n in range(50)]
        control = rpc_pb2.ControlMessage(
            prune=[rpc_pb2.ControlPrune(topicID=name, backoff=2**40) for name in names],
            graft=[rpc_pb2.ControlGraft(topicID=name) for name in names],
            ihave=[rpc_pb2.ControlIHave(topicID=name, messageIDs=[b"00"]) for name in names],
        )
        await stranger.say(rpc_pb2.RPC(control=control))
        mine = rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID=NEWS)])
        await stranger.say(rpc_pb2.RPC(control=mine))
        router = follower.topics._pubsub.router
        await until(lambda: router.mesh[NEWS])
        assert not set(names) & {*router.back_off, *router.mesh}
        assert not any(set(names) & {*each} for each in router.graft_flood_tracking.values())
        too_many = [rpc_pb2.ControlGraft(topicID=NEWS)] * (MAX_TOPIC_CONTROLS + 1)
        await stranger.say(rpc_pb2.RPC(control=rpc_pb2.ControlMessage(graft=too_many)))
        await until(lambda: follower.faults)
        assert follower.faults == [(stranger.peer, TopicFault.FLOOD)]
        ids = rpc_pb2.ControlIWant(messageIDs=[b"0"] * (MAX_TOPIC_IDS + 1))
        await stranger.say(rpc_pb2.RPC(control=rpc_pb2.ControlMessage(iwant=[ids])))
        await until(lambda: follower.count("flood") == 2)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (encode_uvarint(MAX_TOPIC_RPC_BYTES + 1), TopicFault.OVERSIZED),
        (b"\xff" * 10, TopicFault.MALFORMED),
        (b"\x04\xff\xff\xff\xff", TopicFault.MALFORMED),
    ],
)
async def test_a_frame_that_is_none_ends_its_stream_alone(raw: bytes, fault: TopicFault) -> None:
    async with attacked() as (follower, stranger):
        await stranger.stream.write(raw)
        await until(lambda: follower.faults)
        assert follower.faults == [(stranger.peer, fault)]
        stranger.stream = await stranger.host.new_stream(
            follower.host.py.get_id(), [PROTOCOL_ID_V11]
        )
        assert len(follower.host.connections) == 1


async def test_a_record_of_somebody_else_is_forged():
    async with attacked() as (follower, stranger):
        other = plain_host(b"o" * 32)
        record, _ = env_to_send_in_RPC(other)
        await stranger.say(rpc_pb2.RPC(senderRecord=record, publish=[signed(b"x" * 32, b"no")]))
        await stranger.say(rpc_pb2.RPC(senderRecord=b"none"))
        await until(lambda: len(follower.faults) == 2)
        assert set(follower.faults) == {(stranger.peer, TopicFault.FORGED)}
        assert not follower.heard


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(ours, "MAX_TOPIC_CACHE_BYTES", 100)
    monkeypatch.setattr(ours, "MAX_TOPIC_PUBLISHERS", 2)
    monkeypatch.setattr(ours, "MAX_TOPIC_SEEN", 1)
    cache, seen, rates = ours._Cache(3, 5), ours._Seen(), ours._Rates(1.0)
    for number in range(1, 5):
        message = signed(bytes([number]) * 32, bytes(60))
        cache.put(message)
        seen.add(message.from_id + message.seqno)
        rates.take(ID(message.from_id))
    assert len(cache.msgs) == 2
    assert len(seen._known) == 1
    assert len(seen._floors) == len(rates._paid) == 2


async def test_a_task_of_gossipsub_that_fails_ends_alone(monkeypatch, caplog):
    async with attacked() as (follower, stranger):

        async def broken(*_args: Any) -> None:
            raise RuntimeError("as it happens")

        monkeypatch.setattr(follower.topics._pubsub.router, "on_peer_subscribed", broken)
        said = rpc_pb2.RPC.SubOpts(subscribe=True, topicid=NEWS)
        await stranger.say(rpc_pb2.RPC(subscriptions=[said]))
        await until(lambda: "a task of py-libp2p has failed" in caplog.text)
