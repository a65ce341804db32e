"""The host for KadDHT: it substitutes our protocol id, checked streams, and our dials.

Rule: a peer's query is read completely, charged and checked before KadDHT gets it, one at a time;
so no idle stream blocks the answers to others. A connection that was opened for a search is
closed after it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError, StreamReset
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from bbnode.ir.caps import (
    MAX_KNOWN_PEERS,
    MAX_ROUTING_ANSWER_BYTES,
    MAX_ROUTING_REQUEST_BYTES,
    MAX_ROUTING_STREAMS,
    ROUTING_ALL_PER_S,
    ROUTING_ANSWER_S,
    ROUTING_BURST,
    ROUTING_IDLE_S,
    ROUTING_LINGER_S,
    ROUTING_PER_S,
)
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.libp2p.py_libp2p.dht.checks import Checks
from bbnode.transport.libp2p.py_libp2p.dht.peers import ours, way_of
from bbnode.transport.libp2p.py_libp2p.dht.stores import KnownPeers
from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p
from bbnode.transport.libp2p.py_libp2p.swarm import NodeSwarm, without_peer
from bbnode.transport.routing import (
    RoutingFault,
    RoutingRefused,
    RoutingSetup,
    dht_protocol,
)

# Time to live of addresses learnt from others.
_ADDRESS_TTL_S: Final = 3600
_ROUNDING_S: Final = 1e-6
# Time-out for handing a new connection to Swarm.
_JOIN_S: Final = 5.0

Reach = Callable[[PeerId, Sequence[Multiaddr]], Awaitable[None]]
Release = Callable[[PeerId], None]


class DhtHost(INotifee):
    """The host interface that KadDHT uses, on our protocol id, checked streams and dials."""

    def __init__(
        self,
        other: PyLibp2p,
        setup: RoutingSetup,
        store: KnownPeers,
        counts: Counter[str],
        addresses: Callable[[], Sequence[Multiaddr]],
    ) -> None:
        self._host = other.host
        self._setup = setup
        self._swarm = cast("NodeSwarm", other.host.get_network())
        self._store = store
        self._counts = counts
        self._addresses = addresses
        self._protocol = TProtocol(dht_protocol(setup.network))
        self._streams: Counter[PeerId] = Counter()
        self._rates = QuestionRates(ROUTING_BURST, ROUTING_PER_S)
        self._all = QuestionRates(ROUTING_BURST, ROUTING_ALL_PER_S)
        self._joining: dict[ID, trio.Event] = {}
        self.checks = Checks(setup, store, counts)
        # Peers dialled for a search -> time of the dial, on trio's clock.
        self._dialled: dict[ID, float] = {}
        self._searches = 0
        self.answer: StreamHandlerFn
        self.reach: Reach
        self.release: Release
        self.joined: Callable[[ID], Awaitable[None]]

    def serve(self) -> None:
        """Answer others, if this node serves."""
        if not self._setup.serves:
            return
        if self._setup.network is None:
            self._host.set_stream_handler(self._protocol, self._serve)
        else:
            # A member's hello replaces identify, so the handler is added without triggering one.
            self._host.get_mux().add_handler(self._protocol, self._serve)

    def stop_serving(self) -> None:
        """Stop answering others."""
        if self._setup.serves:
            self._host.remove_stream_handler(self._protocol)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Keep dialled connections while the context is open."""
        self._searches += 1
        try:
            yield
        finally:
            self._searches -= 1

    async def tidy(self) -> None:
        """Close the connections that were opened for searches, shortly after them."""
        while True:
            await trio.sleep(ROUTING_LINGER_S)
            if self._searches:
                continue
            before_s = trio.current_time() - ROUTING_LINGER_S
            for peer in [each for each, at_s in self._dialled.items() if at_s <= before_s]:
                del self._dialled[peer]
                self.release(ours(peer))

    # The methods that KadDHT calls.

    def get_id(self) -> ID:
        return self._host.get_id()

    def get_private_key(self) -> Any:
        return self._host.get_private_key()

    def get_peerstore(self) -> Any:
        return self._store

    def get_addrs(self) -> list[Multiaddr]:
        return list(self._addresses())

    def get_connected_peers(self) -> list[ID]:
        return [each for each in self._host.get_connected_peers() if self._admits(each)]

    def set_stream_handler(self, _protocol: TProtocol, _handler: StreamHandlerFn) -> None:
        """Do nothing: `serve` answers, and hands on valid queries."""

    async def new_stream(self, peer: ID, protocols: Sequence[TProtocol]) -> Any:
        """Open a stream to a peer, dialling it if necessary; raises SwarmException."""
        if not self._admits(peer):
            raise SwarmException(f"{peer} is not admitted here")
        if not self._swarm.get_connections(peer):
            await self._connect(peer)
        asks = PROTOCOL_ID in protocols
        wanted = [self._protocol] if asks else list(protocols)
        stream = await self._host.new_stream(peer, wanted)
        if not asks:
            return stream
        self._counts["asked"] += 1
        return AskedStream(stream, self.checks)

    async def _connect(self, peer: ID) -> None:
        wanted, ways = ours(peer), self._store.addrs_or_none(peer)
        if not ways:
            raise SwarmException(f"nobody said where {peer} is")
        if not self._setup.may_dial(wanted):
            self._counts["over_budget"] += 1
            raise SwarmException("too many peers are dialled because others told of them")
        self._counts["dialled"] += 1
        self._dialled[peer] = trio.current_time()
        if self._setup.network is None:
            self._swarm.peerstore.add_addrs(peer, list(map(without_peer, ways)), _ADDRESS_TTL_S)
            await self._swarm.dial_peer(peer)
            return
        joined = self._joining.setdefault(peer, trio.Event())
        try:
            await self.reach(wanted, [without_peer(each) for each in ways])
            with trio.move_on_after(_JOIN_S):
                await joined.wait()
        except BbnodeError as error:
            raise SwarmException(str(error)) from error
        finally:
            self._joining.pop(peer, None)

    def _admits(self, peer: ID) -> bool:
        try:
            return self._setup.admits(ours(peer))
        except DecodeError:
            return False

    # INotifee

    async def connected(self, network: INetwork, conn: INetConn) -> None:  # noqa: ARG002
        peer = conn.muxed_conn.peer_id
        waiting = self._joining.pop(peer, None)
        if waiting is not None:
            waiting.set()
        # In the background, since it may ping the peer that the new one would replace.
        self._swarm.start_soon(self.joined, peer)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        pass

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        pass

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        pass

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        pass

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        pass

    # -- answering ---------------------------------------------------------------------------

    async def _serve(self, stream: INetStream) -> None:
        """Answer the queries on one stream, each read completely and checked first."""
        peer = ours(stream.muxed_conn.peer_id)
        if not self._setup.admits(peer) or self._streams[peer] >= MAX_ROUTING_STREAMS:
            self._counts["streams_refused"] += 1
            await stream.reset()
            return
        self._streams[peer] += 1
        try:
            while True:
                raw = await _next_message(stream, MAX_ROUTING_REQUEST_BYTES, ROUTING_IDLE_S)
                if raw is None:
                    break
                if not self._all.take(ours(self.get_id()), trio.current_time()):
                    # No fault of this peer: all peers together exceed this node's rate.
                    self._counts["busy"] += 1
                    await stream.reset()
                    return
                exchange = OneQuestion(stream, self._checked(raw, stream, peer))
                await self.answer(cast("INetStream", exchange))
                if exchange.is_reset:
                    await stream.reset()
                    return
                self._counts["answered"] += 1
            await stream.close()
        except RoutingRefused as error:
            self.checks.blame(peer, error.fault)
            await stream.reset()
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def _checked(self, raw: bytes, stream: INetStream, peer: PeerId) -> bytes:
        now_s = trio.current_time()
        if not self._rates.take(peer, now_s):
            raise RoutingRefused(RoutingFault.FLOOD, "it asks more than it may")
        return self.checks.question(raw, stream.muxed_conn.peer_id, way_of(stream))


class OneQuestion:
    """A stream that holds one message of a peer; answers go to the real stream."""

    metric_send_channel = None

    def __init__(self, stream: INetStream, message: bytes) -> None:
        self.muxed_conn = stream.muxed_conn
        self.is_reset = False
        self._stream = stream
        self._left = encode_varint_prefixed(message)

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        taken, self._left = self._left[:n], self._left[len(self._left[:n]) :]
        return taken

    async def write(self, data: bytes) -> None:
        with trio.fail_after(ROUTING_ANSWER_S):
            await self._stream.write(data)

    async def close(self) -> None:
        """Do nothing: the peer may send more queries on the stream."""

    async def reset(self) -> None:
        self.is_reset = True


class AskedStream:
    """A stream for our query; the answer is checked, and KadDHT reads its valid part."""

    metric_send_channel = None

    def __init__(self, stream: INetStream, checks: Checks) -> None:
        self.muxed_conn = stream.muxed_conn
        self._stream = stream
        self._checks = checks
        self._sent = b""
        self._left = b""

    async def write(self, data: bytes) -> None:
        self._sent += data
        await self._stream.write(data)

    async def read(self, n: int | None = None) -> bytes:
        if not self._left:
            self._left = encode_varint_prefixed(await self._answer())
        taken, self._left = self._left[:n], self._left[len(self._left[:n]) :]
        return taken

    async def _answer(self) -> bytes:
        peer = self.muxed_conn.peer_id
        try:
            raw = await _next_message(self._stream, MAX_ROUTING_ANSWER_BYTES, ROUTING_ANSWER_S)
            if raw is None:
                raise StreamReset("the peer gave no answer")
            return self._checks.answer(raw, _unprefixed(self._sent), peer, way_of(self._stream))
        except RoutingRefused as error:
            self._checks.blame(ours(peer), error.fault)
            raise StreamReset(str(error)) from error

    async def close(self) -> None:
        await self._stream.close()

    async def reset(self) -> None:
        await self._stream.reset()


def _unprefixed(data: bytes) -> bytes:
    """Return a message without its length prefix."""
    at = next(at for at, byte in enumerate(data) if byte < 0x80)
    return data[at + 1 :]


async def _next_message(stream: INetStream, most: int, idle_s: float) -> bytes | None:
    """Return the next message, None at the end or after a time-out; raises RoutingRefused."""
    with trio.move_on_after(idle_s):
        try:
            return await read_varint_prefixed_bytes_limited(stream, most)
        except MessageTooLarge as error:
            raise RoutingRefused(RoutingFault.FLOOD, f"a message of over {most} bytes") from error
        except ParseError as error:
            raise RoutingRefused(RoutingFault.MALFORMED, "a length of no message") from error
        except (StreamError, IncompleteReadError):
            # The stream has ended: before a message, or within one with its connection.
            pass
    return None


class QuestionRates:
    """A rate limiter for each peer's queries: a burst, then a number per second."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst_s = burst / per_s
        self._each_s = 1 / per_s
        # Time on trio's clock up to which each peer's queries are charged.
        self._paid_s: OrderedDict[PeerId, float] = OrderedDict()

    def take(self, peer: PeerId, now_s: float) -> bool:
        """Charge one message; return False if it exceeds the rate."""
        paid_s = max(self._paid_s.get(peer, now_s), now_s) + self._each_s
        if paid_s - now_s > self._burst_s + _ROUNDING_S:
            return False
        self._paid_s[peer] = paid_s
        self._paid_s.move_to_end(peer)
        if len(self._paid_s) > MAX_KNOWN_PEERS:
            self._paid_s.popitem(last=False)
        return True
