"""Topics by py-libp2p's GossipSub, with our checks before a message counts.

Rule: GossipSub decides how messages are forwarded; the code here decides which of them it sees. A
message is checked in the order of cost: its form, its size, if it is known, its forwarder's rate,
its signature, its publisher. State that a peer names (topics, ids, back-offs) is kept only for
topics that this node follows or publishes. An exception in a task of GossipSub ends that task
alone.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Any, Final

import msgpack
import trio
from google.protobuf.message import Error as ProtobufError
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.pubsub.gossipsub import PROTOCOL_ID, PROTOCOL_ID_V11, PROTOCOL_ID_V12, GossipSub
from libp2p.pubsub.mcache import MessageCache
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.utils import maybe_consume_signed_record
from libp2p.pubsub.validators import signature_validator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from bbnode.access.statement import MAX_MEMBERSHIP_BYTES
from bbnode.engine.newest import Newest
from bbnode.ir.caps import (
    MAX_DIGEST_BYTES,
    MAX_TOPIC_BYTES,
    MAX_TOPIC_CACHE_BYTES,
    MAX_TOPIC_CHARS,
    MAX_TOPIC_CONTROLS,
    MAX_TOPIC_IDS,
    MAX_TOPIC_PUBLISHERS,
    MAX_TOPIC_QUEUE,
    MAX_TOPIC_RPC_BYTES,
    MAX_TOPIC_SEEN,
    MAX_TOPICS,
    TOPIC_GIVER_RATE,
    TOPIC_PUBLISHER_RATE,
)
from bbnode.ir.decoding import Boundary, unpack
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Authorizer, Counters, Direction, Hello
from bbnode.transport.errors import EnvelopeTooLargeError, QueueFullError
from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p
from bbnode.transport.topics import (
    Receive,
    TopicFault,
    TopicRefused,
    Topics,
    TopicSetup,
    name_on_wire,
)

log = logging.getLogger(__name__)
# Any peer can provoke its log messages, so they are counted here instead.
logging.getLogger("libp2p.pubsub").setLevel(logging.CRITICAL)

_SEQNO_BYTES: Final = 8
_WRAPPED_BYTES: Final = MAX_TOPIC_BYTES + MAX_MEMBERSHIP_BYTES + 16
# The price of a known message, as a fraction of one that has to be checked.
_KNOWN_PRICE: Final = 0.1
_NAME_CHARS: Final = MAX_TOPIC_CHARS + 80  # with the prefix of the network
# GossipSub's heartbeat interval in seconds, as in its specification.
_HEARTBEAT_S: Final = 1
_RETRY_S: Final = 1.0
_NEVER: Final = 2**31
_NEGOTIATE_S: Final = 10


class _GuardedTasks:
    """A service manager whose tasks fail independently of each other and of the service."""

    def __init__(self, manager: Any, start: Callable[..., None]) -> None:
        self._manager = manager
        self._start = start

    def run_task(self, async_fn: Callable[..., Awaitable[Any]], *args: Any, **_names: Any) -> None:
        self._start(async_fn, *args)

    def run_daemon_task(
        self, async_fn: Callable[..., Awaitable[Any]], *args: Any, **_names: Any
    ) -> None:
        async def again() -> None:
            while True:
                try:
                    await async_fn(*args)
                    return
                except Exception:
                    log.exception("a task of GossipSub has failed; it is started again")
                    await trio.sleep(_RETRY_S)

        self._start(again)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _AnonymousHost:
    """The host for Pubsub, which must not trigger an identify of peers."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def set_stream_handler(self, protocol: Any, handler: Any) -> None:
        self._host.get_mux().add_handler(protocol, handler)

    async def new_stream(self, peer: ID, protocols: Sequence[TProtocol]) -> INetStream:
        """Open a stream; raises SwarmException for a retry, _NotSpoken for none."""
        stream: INetStream = await self._host.get_network().new_stream(peer)
        try:
            client = self._host.multiselect_client
            spoken = await client.select_one_of(
                list(protocols), MultiselectCommunicator(stream), _NEGOTIATE_S
            )
        except MultiselectClientError as error:
            await stream.reset()
            raise _NotSpoken(str(error)) from error
        except BaseException:
            with trio.CancelScope(shield=True):
                await stream.reset()
            raise
        stream.set_protocol(spoken)
        return stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class _NotSpoken(Exception):
    """A peer does not speak GossipSub, which is common and not worth a log message."""


class _Seen:
    """The ids of the newest messages; it replaces an unbounded table and its thread.

    An id is a publisher and its sequence number. For numbers that have left the table, the highest
    is kept for each publisher; a message below it is an old one.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._floors: OrderedDict[bytes, int] = OrderedDict()

    def has(self, key: bytes) -> bool:
        return key in self._known

    def add(self, key: bytes) -> bool:
        if key in self._known:
            return False
        self._known[key] = None
        if len(self._known) > MAX_TOPIC_SEEN:
            old, _ = self._known.popitem(last=False)
            publisher, number = old[:-_SEQNO_BYTES], int.from_bytes(old[-_SEQNO_BYTES:], "big")
            self._floors[publisher] = max(number, self._floors.pop(publisher, 0))
            if len(self._floors) > MAX_TOPIC_PUBLISHERS:
                self._floors.popitem(last=False)
        return True

    def is_old(self, msg: rpc_pb2.Message) -> bool:
        """Return True for a message that may have been seen, by its growing sequence number."""
        return int.from_bytes(msg.seqno, "big") <= self._floors.get(msg.from_id, -1)

    def stop(self) -> None:
        """Do nothing: there is no thread."""


class _Cache(MessageCache):
    """Messages for peers that request them again, within a bound."""

    def put(self, msg: rpc_pb2.Message) -> None:
        if sum(len(each.data) for each in self.msgs.values()) < MAX_TOPIC_CACHE_BYTES:
            super().put(msg)


class _Rates:
    """Rate limiters of the newest peers, in messages per second."""

    def __init__(self, per_s: float, burst_s: float = 2.0) -> None:
        self.per_s = per_s
        self.burst_s = burst_s
        self._paid: dict[ID, float] = {}

    def take(self, peer: ID, price: float = 1.0) -> bool:
        """Charge the price of a message; return False if it exceeds the rate."""
        now = time.monotonic()
        paid = max(self._paid.pop(peer, now), now) + price / self.per_s
        fits = paid - now <= self.burst_s
        self._paid[peer] = paid if fits else now + self.burst_s
        if len(self._paid) > MAX_TOPIC_PUBLISHERS:
            del self._paid[next(iter(self._paid))]
        return fits


class _Router(GossipSub):
    """GossipSub for this node's topics, with messages that Pubsub has checked."""

    owner: GossipTopics

    def __init__(self) -> None:
        super().__init__(
            [PROTOCOL_ID_V12, PROTOCOL_ID_V11, PROTOCOL_ID],
            degree=6,
            degree_low=4,
            # Never prune: a peer connected with this node alone would get no messages then.
            degree_high=_NEVER,
            heartbeat_interval=_HEARTBEAT_S,
            # Our checks blame the right peer; these would drop messages that honest peers forward.
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
            adaptive_gossip_enabled=False,
            max_pending_messages_per_peer=MAX_TOPIC_QUEUE // 16,
        )
        self.mcache = _Cache(3, 5)

    @property
    def manager(self) -> Any:
        return _GuardedTasks(self._manager, self.owner.start_soon)

    def _check_equivocation(self, msg: rpc_pb2.Message) -> bool:  # noqa: ARG002
        # It would keep a thousand messages; a second one with the same id is ignored anyway.
        return True

    def _notify_mesh_peer_added(self, peer_id: ID, topic: str) -> None:
        super()._notify_mesh_peer_added(peer_id, topic)
        # Messages published after the peer's subscription and before its graft were sent to others
        # only, and would not be offered to it from now on.
        self.owner.start_soon(self.send_recent_messages, peer_id, topic)

    async def handle_rpc(self, rpc: rpc_pb2.RPC, sender_peer_id: ID) -> None:
        if self.owner.takes_control(rpc.control, sender_peer_id):
            await super().handle_rpc(rpc, sender_peer_id)


class _Pubsub(Pubsub):
    """A Pubsub that lets its owner check each message and each topic."""

    owner: GossipTopics

    def __init__(self, owner: GossipTopics, host: Any, router: _Router) -> None:
        self.owner = owner
        super().__init__(host, router, max_inbound_rpc_size=MAX_TOPIC_RPC_BYTES)
        self.seen_messages.stop()
        self.seen = self.seen_messages = _Seen()  # type: ignore[assignment]
        # In nanoseconds: a counter that starts from seconds could repeat numbers after a restart.
        self.counter = time.time_ns()

    @property
    def manager(self) -> Any:
        return _GuardedTasks(self._manager, self.owner.start_soon)

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Process frames of a peer, one after the other, until it ends the stream."""
        peer = stream.muxed_conn.peer_id
        while True:
            try:
                frame = await read_varint_prefixed_bytes_limited(stream, MAX_TOPIC_RPC_BYTES)
            except (ParseError, MessageTooLarge) as error:
                fault = TopicFault.OVERSIZED
                if isinstance(error, ParseError):
                    fault = TopicFault.MALFORMED
                self.owner.refuse(TopicRefused(fault, _peer(peer), str(error)))
                await stream.reset()
                return
            except IOException:
                return
            try:
                rpc = rpc_pb2.RPC.FromString(frame)
            except ProtobufError as error:
                self.owner.refuse(TopicRefused(TopicFault.MALFORMED, _peer(peer), str(error)))
                await stream.reset()
                return
            if not maybe_consume_signed_record(rpc, self.host, peer):
                refused = TopicRefused(TopicFault.FORGED, _peer(peer), "a record that is not its")
                self.owner.refuse(refused)
                continue
            for msg in rpc.publish:
                if self.owner.takes(peer, msg):
                    self.owner.start_soon(self.router.publish, peer, msg)
            for subscription in rpc.subscriptions:
                self.handle_subscription(peer, subscription)
            if rpc.HasField("control"):
                rpc.ClearField("senderRecord")  # it was checked
                await self.router.handle_rpc(rpc, peer)

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Publish one of this node's own messages."""
        self._mark_msg_seen(msg)
        await self.router.publish(msg_forwarder, msg)

    async def stream_handler(self, stream: INetStream) -> None:
        # A peer without a topic did not speak GossipSub at first, and that was not retried.
        self.owner.start_soon(self.ensure_peer_stream, stream.muxed_conn.peer_id)
        await super().stream_handler(stream)

    def handle_subscription(self, origin_id: ID, sub_message: rpc_pb2.RPC.SubOpts) -> None:
        if self.owner.may_name(origin_id, sub_message):
            super().handle_subscription(origin_id, sub_message)


class GossipTopics(Topics):
    """The topics of one node, by GossipSub on py-libp2p's host; started by the first one."""

    def __init__(
        self, py: PyLibp2p, setup: TopicSetup, authorizer: Authorizer | None, counters: Counters
    ) -> None:
        self._py = py
        self._setup = setup
        self._authorizer = authorizer
        self._counters = counters
        self._receivers: dict[str, Receive] = {}  # by name on the wire
        self._published: Newest[str, None] = Newest(MAX_TOPICS)
        self._givers = _Rates(TOPIC_GIVER_RATE)
        self._publishers = _Rates(TOPIC_PUBLISHER_RATE)
        self._blamed = _Rates(1.0, 1.0)
        self._todo, self._doing = trio.open_memory_channel[tuple[str, str, bytes]](MAX_TOPIC_QUEUE)
        self._pubsub: _Pubsub | None = None
        self.start_soon: Callable[..., None] = py.start_soon
        py.when_running(self._begin)

    # -- calls of the node -----------------------------------------------------------------

    def follow(self, topic: str, receive: Receive) -> None:
        name = name_on_wire(self._setup.network, topic)
        self._receivers[name] = receive
        self._do("follow", name, b"")

    def leave(self, topic: str) -> None:
        name = name_on_wire(self._setup.network, topic)
        self._receivers.pop(name, None)
        self._do("leave", name, b"")

    def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_TOPIC_BYTES:
            raise EnvelopeTooLargeError(
                f"a message of {len(data)} bytes on a topic; at most {MAX_TOPIC_BYTES} are carried"
            )
        if self._setup.network is not None:
            data = bytes(msgpack.packb([self._setup.credentials(), data]))
        self._do("publish", name_on_wire(self._setup.network, topic), data)
        self._counters.add("topics.published")

    def followers(self, topic: str) -> frozenset[PeerId]:
        if self._pubsub is None:
            return frozenset()
        name = name_on_wire(self._setup.network, topic)
        peers = self._pubsub.peer_topics.get(name, set()) & self._pubsub.peers.keys()
        return frozenset(map(_peer, peers))

    def _do(self, what: str, name: str, data: bytes) -> None:
        try:
            self._todo.send_nowait((what, name, data))
        except trio.WouldBlock:
            self._counters.add("topics.dropped")
            raise QueueFullError(
                f"{MAX_TOPIC_QUEUE} messages wait to be published; publish less often"
            ) from None
        self._begin()

    def _begin(self) -> None:
        """Start GossipSub once the host runs and there is something to do."""
        waits = self._todo.statistics().current_buffer_used
        if self._pubsub is None and waits and self._py.is_running:
            router = _Router()
            router.owner = self
            self._pubsub = _Pubsub(self, _AnonymousHost(self._py.host), router)
            self.start_soon(self._run, router, self._pubsub)

    async def _run(self, router: _Router, pubsub: _Pubsub) -> None:
        host = self._py.host
        try:
            await host.start_service(router)
            await host.start_service(pubsub)
            await pubsub.wait_until_ready()
            for peer in host.get_connected_peers():
                self.start_soon(pubsub.ensure_peer_stream, peer)
            async for what, name, data in self._doing:
                try:
                    await self._carry_out(pubsub, what, name, data)
                except Exception:
                    self._counters.add("topics.dropped")
                    log.exception("GossipSub did not %s %s", what, name)
        finally:
            self._pubsub = None

    async def _carry_out(self, pubsub: _Pubsub, what: str, name: str, data: bytes) -> None:
        if what == "follow":
            await pubsub.subscribe(name)
        elif what == "leave":
            await pubsub.unsubscribe(name)
        else:
            self._published.add(name, None)
            await pubsub.publish(name, data)

    # -- inbound ---------------------------------------------------------------------------

    def takes(self, giver: ID, msg: rpc_pb2.Message) -> bool:
        """Deliver a message, and return True if it is to be forwarded; never raises."""
        try:
            checked = self._checked(giver, msg)
            if checked is None:
                return False
            publisher, receive, data = checked
            self._counters.add("topics.received")
            receive(publisher, data)
        except TopicRefused as refused:
            self.refuse(refused)
            return False
        except Exception:
            self._counters.add("topics.malformed")
            log.exception("a message on a topic could not be taken")
            return False
        return True

    def takes_control(self, control: rpc_pb2.ControlMessage, giver: ID) -> bool:
        """Remove other topics than ours from a control message; return False if it is too large."""
        lists: tuple[Sized, ...] = (
            *(control.ihave, control.iwant, control.graft, control.prune),
            *(control.idontwant, control.observe, control.unobserve),
        )
        ids = sum(
            len(each.messageIDs)
            for entries in (control.ihave, control.iwant, control.idontwant)
            for each in entries
        )
        if sum(map(len, lists)) > MAX_TOPIC_CONTROLS or ids > MAX_TOPIC_IDS:
            self.refuse(
                TopicRefused(TopicFault.FLOOD, _peer(giver), "too many control messages at once")
            )
            return False
        named: tuple[Any, ...] = (control.ihave, control.graft, control.prune)
        for entries in named:
            kept = [each for each in entries if self._is_ours(each.topicID)]
            del entries[:]
            entries.extend(kept)
        for each in control.prune:
            del each.peers[:]  # GossipSub's peer exchange is not used
        for name in ("observe", "unobserve", "extensions"):
            control.ClearField(name)
        return True

    def may_name(self, peer: ID, subscription: rpc_pb2.RPC.SubOpts) -> bool:
        """Return True if a peer may subscribe to, or unsubscribe from, a topic."""
        pubsub = self._pubsub
        if pubsub is None:
            return False
        if not subscription.subscribe:
            return True
        # A longer name can't be one of ours, and more topics than that are of no use.
        if len(subscription.topicid) > _NAME_CHARS:
            fault = TopicFault.MALFORMED
        elif pubsub._peer_subscription_count.get(peer, 0) >= MAX_TOPICS:
            if peer in pubsub.peer_topics.get(subscription.topicid, ()):
                return True
            fault = TopicFault.FLOOD
        else:
            return True
        self.refuse(TopicRefused(fault, _peer(peer), "topics that it follows"))
        return False

    def _is_ours(self, name: str) -> bool:
        return name in self._receivers or name in self._published.entries

    def _checked(self, giver: ID, msg: rpc_pb2.Message) -> tuple[PeerId, Receive, bytes] | None:
        """Return publisher, receiver and content of a new message; None for a known one.

        Raises TopicRefused.
        """
        by = _peer(giver)
        if (
            len(msg.topicIDs) != 1
            or len(msg.seqno) != _SEQNO_BYTES
            or not 0 < len(msg.from_id) <= MAX_DIGEST_BYTES
        ):
            raise TopicRefused(TopicFault.MALFORMED, by, "a message that names no topic or peer")
        receive = self._receivers.get(msg.topicIDs[0])
        if receive is None:
            return None  # the node has just left the topic
        is_private = self._setup.network is not None
        if len(msg.data) > (_WRAPPED_BYTES if is_private else MAX_TOPIC_BYTES):
            raise TopicRefused(TopicFault.OVERSIZED, by, f"a message of {len(msg.data)} bytes")
        pubsub = self._pubsub
        assert pubsub is not None
        is_known = pubsub._is_msg_seen(msg) or ID(msg.from_id) == pubsub.my_id
        if not self._givers.take(giver, _KNOWN_PRICE if is_known else 1.0):
            raise TopicRefused(TopicFault.FLOOD, by, "messages that it passes on")
        if is_known:
            self._counters.add("topics.known")
            return None
        # Only in a private network: other implementations use random sequence numbers.
        if is_private and pubsub.seen.is_old(msg):
            raise TopicRefused(TopicFault.REPLAYED, by, "a message of long ago")
        self._check_signature(by, msg)
        publisher = PeerId.from_bytes(msg.from_id)
        if not self._publishers.take(ID(msg.from_id)):
            raise TopicRefused(TopicFault.FLOOD, publisher, "messages that it publishes")
        data = self._content(by, publisher, msg.data)
        pubsub._mark_msg_seen(msg)
        return publisher, receive, data

    def _check_signature(self, by: PeerId, msg: rpc_pb2.Message) -> None:
        try:
            is_signed = signature_validator(msg)
        except Exception:  # noqa: BLE001 - a key that is none
            is_signed = False
        if not is_signed:
            raise TopicRefused(TopicFault.FORGED, by, "a signature that is not its publisher's")

    def _content(self, by: PeerId, publisher: PeerId, data: bytes) -> bytes:
        """Return the content of a message, once its publisher is found to be allowed here."""
        credentials = b""
        if self._setup.network is not None:
            with Boundary(
                "a message of a private network is malformed",
                lambda what: TopicRefused(TopicFault.MALFORMED, by, what),
                TopicRefused,
            ):
                credentials, data = unpack(
                    data, max_bytes=_WRAPPED_BYTES, max_values=4, max_depth=1
                )
            if type(credentials) is not bytes or type(data) is not bytes:
                raise TopicRefused(TopicFault.MALFORMED, by, "no credentials")
            if len(data) > MAX_TOPIC_BYTES:
                raise TopicRefused(TopicFault.OVERSIZED, by, f"a message of {len(data)} bytes")
        if self._authorizer is None:
            return data
        if ID(publisher.raw) not in self._py.host.get_network().connections:
            decision = self._authorizer.hello(
                publisher, Direction.INBOUND, Hello(credentials=credentials)
            )
            if not decision.allowed:
                raise TopicRefused(TopicFault.NOT_ALLOWED, by, decision.detail)
        decision = self._authorizer.envelope(publisher, Direction.INBOUND, len(data))
        if decision.allowed:
            return data
        if decision.wait_s:
            raise TopicRefused(TopicFault.FLOOD, publisher, decision.detail)
        raise TopicRefused(TopicFault.NOT_ALLOWED, by, decision.detail)

    def refuse(self, refused: TopicRefused) -> None:
        """Count a refused message, and report the fault to the node."""
        self._counters.add(f"topics.{refused.fault}")
        log.debug("%s on a topic, of %s: %s", refused.fault, refused.blamed, refused)
        # A flood is one fault a second, not one for each message.
        if refused.fault is not TopicFault.FLOOD or self._blamed.take(ID(refused.blamed.raw)):
            self._setup.on_fault(refused.blamed, refused.fault)


def _peer(peer: ID) -> PeerId:
    return PeerId.from_bytes(peer.to_bytes())
