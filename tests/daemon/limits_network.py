"""Limits of connections, and of what nodes ask each other: each with what reaches it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import trio
from multiaddr import Multiaddr

from bbnode.access.keys import SigningKey
from bbnode.daemon.access import protocol
from bbnode.daemon.access.protocol import AccessProtocol, AccessSilent
from bbnode.daemon.join import dial
from bbnode.daemon.join.dial import InviterUnreachable
from bbnode.daemon.network import dial_back, ping
from bbnode.daemon.network.agreeing import Agreeing
from bbnode.daemon.network.dial_back import DialBackRefused, DialBackServer
from bbnode.daemon.network.dial_plan import DialBudget, HintSource, LearnedDialPlan
from bbnode.daemon.network.introductions import Introductions
from bbnode.ir.caps import OWN_WORD_EVERY_S
from bbnode.ir.peer import PeerId
from bbnode.transport import pending_exchange, schema_exchange
from bbnode.transport.base import Direction
from bbnode.transport.errors import DialError, FrameError, NotConnectedError, StreamBrokenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p import host, tcp
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.muxer import Muxer
from bbnode.transport.libp2p.transport import Libp2pTransport
from bbnode.transport.limits import RelaySettings, TransportLimits
from bbnode.transport.links.framing import FrameDecoder, FrameType, Lane, encode_header
from bbnode.transport.links.receiver import Receiver
from bbnode.transport.links.transport import DialBackoff
from bbnode.transport.pending_exchange import PendingUnknown
from bbnode.transport.schema_exchange import SchemaUnanswered
from tests.daemon.limits_reach import Place, Reach, refusing
from tests.daemon.test_restarts import NEW, Room
from tests.engine.support import peer
from tests.transport.fakes import carrier_pair
from tests.transport.test_link import LARGE, SMALL, Side, quiet
from tests.transport.test_muxer import RST, SYN, WINDOW, data, frame, share_of, stream_of
from tests.transport.test_muxer import Peer as Muxed

# --- what nodes ask each other ------------------------------------------------------------------


class Stream:
    """A stream of a peer that has sent `sent` and then no more; `silent`: nor its end."""

    def __init__(
        self, sent: bytes = b"", *, silent: bool = False, who: PeerId | None = None
    ) -> None:
        self.peer = who or peer(1)
        self.sent = sent
        self.silent = silent
        self.written: list[bytes] = []

    async def read(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        part, self.sent = self.sent[:most], self.sent[most:]
        if not part and self.silent:
            await trio.sleep_forever()
        return part

    async def write(self, *data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.written += data

    async def end(self) -> None:
        await trio.lowlevel.checkpoint()


class Connected:
    """A transport that is connected with peers, and whose streams are the test's."""

    def __init__(self, *peers: PeerId, stream: Stream | None = None) -> None:
        self._peers = peers
        self._stream = stream or Stream(silent=True)
        self.asked: list[PeerId] = []

    def peers(self) -> list[Any]:
        address = Multiaddr("/ip4/192.0.2.1/tcp/1")
        return [SimpleNamespace(peer=each, address=address) for each in self._peers]

    def peer_info(self, who: PeerId) -> Any:
        address = Multiaddr("/ip4/192.0.2.1/tcp/1")
        return SimpleNamespace(peer=who, address=address, direction=Direction.OUTBOUND)

    def listen_addresses(self) -> list[Multiaddr]:
        return [Multiaddr("/ip4/192.0.2.2/tcp/1")]

    def register_protocol(self, protocol_id: str, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def register_for_any(self, protocol_id: str, handler: Callable[..., Any]) -> None:
        """Nobody asks as other hosts of libp2p do."""

    @asynccontextmanager
    async def open_stream(self, who: PeerId, protocol_id: str) -> AsyncIterator[Stream]:
        self.asked.append(who)
        yield self._stream


async def _takes(seconds: float, error: type[BaseException], act: Any, *arguments: Any) -> None:
    """See that `act` fails, after so many seconds."""
    began = trio.current_time()
    with pytest.raises(error):
        await act(*arguments)
    assert trio.current_time() - began == pytest.approx(seconds)


async def _access_stalls(most: float) -> None:
    await _takes(most, AccessSilent, protocol.ask, Connected(), peer(1), b"")
    await _takes(most, AccessSilent, protocol._read_all, Stream(b"x", silent=True))


async def _pending(most: float) -> None:
    await _takes(most, PendingUnknown, pending_exchange.lost, Connected(), peer(1), (1,))
    served = Connected()
    pending_exchange.serve(cast("Any", served), lambda *_: ())
    await _takes(most, trio.TooSlowError, served.handler, Stream(silent=True))


async def _schemas(most: float) -> None:
    """Twice the time that a node has to read its own data: both may have to."""
    await _takes(2 * most, SchemaUnanswered, schema_exchange.ask, Connected(), peer(1), b"{}")
    served = Connected()
    schema_exchange.serve(cast("Any", served), lambda _: True, cast("Any", None))
    await _takes(2 * most, trio.TooSlowError, served.handler, Stream(silent=True))
    agreeing = cast("Any", Agreeing.__new__(Agreeing))
    agreeing._told_unnamed, agreeing._threads = set(), None

    class Reads:
        def known_schema(self) -> None:
            return None

        own_schema = known_schema

    agreeing._node = SimpleNamespace(component=lambda _: Reads(), not_ready=dict)
    began = trio.current_time()

    async def reads(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", reads)
        assert await agreeing._own_schema("data") == "they are being read"
    assert trio.current_time() - began == pytest.approx(most)


async def _echoes(most: int) -> None:
    stream = Stream(bytes(ping.PING_BYTES * (most + 2)))
    await ping.echo(cast("Any", stream))
    assert len(stream.written) == most


def _lists(most: int, place: Place) -> None:
    """Revocation lists that wait: of one peer more none is asked for, and the log says so."""
    control = SimpleNamespace(network=peer(0), on_list=None)
    key = SigningKey.from_seed(b"k" * 32)
    made = AccessProtocol(cast("Any", control), cast("Any", Connected()), place.folder, key)
    told: list[Any] = []
    place.patch.setattr(protocol.logger, "info", lambda _, extra: told.append(extra["reason"]))
    for number in range(most):
        made.peer_up(peer(number))
    assert not told
    made.peer_up(peer(most))
    assert told == ["too many"]


async def _request_bytes(most: int) -> None:
    server = DialBackServer(cast("Any", Connected()))
    refused = "sent over"
    for size in (most, most + 1):
        with pytest.raises(DialBackRefused) as caught:
            await server.serve(cast("Any", Stream(b"\x01" * size)))
        assert (refused in str(caught.value)) == (size > most)


async def _answer_bytes(most: int) -> None:
    for size in (most, most + 1):
        with pytest.raises(DialBackRefused) as caught:
            await dial_back._ask_one(cast("Any", Connected(stream=Stream(b"\x01" * size))), peer(1))
        assert ("sent over" in str(caught.value)) == (size > most)


def _waits(made: Any, most_s: float, words: str) -> None:
    """Ask, a little too early, and in time."""
    began = trio.current_time()
    times = iter((began, began + most_s - 0.001, began + most_s))
    for expected in ("", words, ""):
        now = next(times)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trio, "current_time", lambda now=now: now)
            assert (words in made._refusal(peer(1))) == bool(expected)


async def _dialled_back_every(most: float) -> None:
    await trio.lowlevel.checkpoint()
    _waits(DialBackServer(cast("Any", Connected())), most, f"once in {most:g} s")


def _introductions() -> Any:
    made = cast("Any", Introductions.__new__(Introductions))
    made._asked = type(DialBackServer(cast("Any", None))._asked)()
    return made


async def _introduced_every(most: float) -> None:
    await trio.lowlevel.checkpoint()
    _waits(_introductions(), most, f"once in {most:g} s")


async def _askers(made: Any, most: int) -> None:
    await trio.lowlevel.checkpoint()
    assert not any(made._refusal(peer(number)) for number in range(most))
    assert made._refusal(peer(most)) == "too many ask at once; try again later"


async def _dial_back_askers(most: int) -> None:
    await _askers(DialBackServer(cast("Any", Connected())), most)


async def _introduction_askers(most: int) -> None:
    await _askers(_introductions(), most)


async def _dial_backs(most: int, place: Place) -> None:
    """Requests that are worked on: one more is refused."""
    server = cast("Any", DialBackServer(cast("Any", Connected())))
    going = trio.Event()

    async def works(*_: Any) -> list[Any]:
        await going.wait()
        return []

    server._try_all = works
    request = msgpack.packb([Multiaddr("/ip4/192.0.2.1/tcp/1").to_bytes()])
    streams = [Stream(request, who=peer(number)) for number in range(most + 1)]
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(server.serve, stream)
            await quiet()
        going.set()
    said = [msgpack.unpackb(stream.written[0])[0] for stream in streams]
    assert said == [""] * most + ["too many ask at once; try again later"]


async def _asked_to_dial(most: int) -> None:
    """Peers that say nothing useful: no more than these are asked."""
    backend = Connected(*map(peer, range(most + 2)), stream=Stream(b"\x01"))
    with pytest.raises(DialBackRefused) as caught:
        await dial_back.register(cast("Any", backend))(None)
    assert len(backend.asked) == most
    assert str(caught.value).count(": ") >= most


async def _asks_again(most: float, place: Place) -> None:
    """Requests that bring nothing: each waits twice as long, at most so long."""
    made = _introductions()
    made._next, made._counts, made._backend, made._finder = {peer(1): (0.0, 1.0)}, {}, None, None

    async def nobody(*_: Any) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return []

    place.patch.setattr("bbnode.daemon.network.introductions.ask", nobody)
    for _ in range(20):
        await made._ask_now(peer(1))
    due_s, after_s = made._next[peer(1)]
    assert due_s - trio.current_time() == after_s == most


def _learned(most: int) -> None:
    """Peers to dial: of one more, who was wanted longest ago is left."""
    plan = LearnedDialPlan()
    for number in range(most + 1):
        plan.want(peer(number), [], 0.0)
    assert len(plan) == most
    assert peer(0) not in plan


def _words(most: int) -> None:
    """Peers whose own word was used: of one more, that of the first counts again."""
    budget = DialBudget()
    taken = cast("Any", budget)._taken_s
    for number in range(most):
        taken[peer(number)] = 0.0
    soon = OWN_WORD_EVERY_S / 2
    assert not budget.take(HintSource.OWN, peer(0), soon)
    assert budget.take(HintSource.OWN, peer(most), soon)
    assert len(taken) == most
    assert budget.take(HintSource.OWN, peer(0), soon)


def _recognised(most: int, place: Place) -> None:
    """Peers whose last start is known: of one more, the first is like a new one."""
    room = Room(place.patch)
    for number in range(most + 1):
        room.connects(NEW, peer(number))
    known = cast("Any", room.made)._sessions
    assert len(known) == most
    assert peer(0) not in known
    side = Side(SMALL)
    table = cast("Any", side.table)
    for number in range(most + 1):
        table._remember(peer(number))
    assert list(table._known) == [peer(n) for n in range(1, most + 1)]


def _restarted(most: int, place: Place) -> None:
    """Peers to ask: one more is not waited for, and its failures are told at once."""
    made = cast("Any", Room(place.patch).made)
    assert all(made._ask_soon(peer(number)) for number in range(most))
    assert made._ask_soon(peer(0))
    assert not made._ask_soon(peer(most))


# --- joining and dialling -----------------------------------------------------------------------


class Silent:
    """A transport that is dialling, and gets nowhere."""

    def __init__(self) -> None:
        self.events = self

    async def receive(self) -> Any:
        await trio.sleep_forever()

    def wanted(self) -> list[Any]:
        return [SimpleNamespace(failed_dials=0, last_error="")]

    def counters(self) -> dict[str, int]:
        return {"dial.failed": 0}


SOURCE = cast("Any", SimpleNamespace(addresses=["/ip4/192.0.2.1/tcp/1"], inviter=peer(1)))


async def _first_connection(most: float) -> None:
    await _takes(most, InviterUnreachable, dial._first_hello, Silent(), SOURCE)


async def _first_answer(most: float, place: Place) -> None:
    """A connection that is lost again and again, and nobody says why."""

    async def hello(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()

    async def lost(_: PeerId) -> float:
        await trio.lowlevel.checkpoint()
        raise NotConnectedError("gone")

    place.patch.setattr(dial, "_first_hello", hello)
    place.patch.setattr(dial, "_was_cut", lambda _: False)
    place.patch.setattr(ping, "to", lambda _: lost)
    await _takes(most, InviterUnreachable, dial._connected, Silent(), SOURCE)


async def _tcp(most: float, place: Place) -> None:
    """A host that drops what is sent to it."""

    class Drops:
        def setsockopt(self, *_: Any) -> None:
            """Take any option."""

        async def connect(self, _: Any) -> None:
            await trio.sleep_forever()

        def close(self) -> None:
            pass

    place.patch.setattr(trio.socket, "socket", lambda *_: Drops())
    await _takes(most, DialError, tcp.connect, Multiaddr("/ip4/192.0.2.1/tcp/1"))


# --- links --------------------------------------------------------------------------------------


def _frame(lane: Lane, kind: FrameType) -> Callable[[int], None]:
    return lambda size: [*FrameDecoder(lane).feed(encode_header(kind, size))] and None  # type: ignore[func-returns-value, return-value]


def _redialled(*, denied: bool) -> Callable[[float], None]:
    def reach(most: float) -> None:
        backoff = DialBackoff(TransportLimits(), random.Random(1))
        waits = [backoff.next_delay_s(denied=denied) for _ in range(12)]
        assert (max(waits) if denied else min(waits)) == most

    return reach


async def _connections(most: int) -> None:
    side = Side(SMALL)
    async with trio.open_nursery() as nursery:
        for _ in range(most):
            assert side.table.admits(LARGE, Direction.INBOUND)
            out, _ = carrier_pair(SMALL, LARGE, nursery)
            side.link(out, nursery)
        assert not side.table.admits(LARGE, Direction.INBOUND)
        assert side.count("links.refused") == 1
        nursery.cancel_scope.cancel()


async def _failed_writes(most: int) -> None:
    """A stream that breaks whenever it is written to: it is opened again, and then no more."""
    side, other = Side(SMALL), Side(LARGE)
    async with trio.open_nursery() as nursery:
        out, inward = carrier_pair(SMALL, LARGE, nursery)
        open_ = out.open

        async def breaking(lane: Lane) -> Any:
            stream = await open_(lane)
            if lane is Lane.BULK:

                async def fails(*_: bytes) -> None:
                    await stream.reset()
                    raise StreamBrokenError("broken")

                stream.write = fails
            return stream

        out.open = breaking
        link = side.link(out, nursery)
        other.link(inward, nursery)
        await quiet()
        side.table.send(LARGE, bytes(1 << 20), 1)
        with trio.fail_after(60):
            await link.closed.wait()
        assert "writing on the bulk stream failed again" in link.reason
        assert side.count("streams.write_failed") == most
        nursery.cancel_scope.cancel()


def _looks(most: float) -> None:
    """Something is held, and nothing else says when there is room for it."""
    receiver = cast("Any", Receiver.__new__(Receiver))
    receiver.limits = TransportLimits()
    receiver.inbox = SimpleNamespace(clock=lambda: 100.0)
    receiver.lanes = {Lane.CONTROL: SimpleNamespace(held=[1], not_before=0.0)}
    assert receiver.pump_at == 100.0 + most


async def _strangers_turn(most: int, place: Place) -> None:
    """A stranger whose frames come all at once: others have their turns in between."""
    share, turns = share_of(known=False), []
    read = Muxer._turn

    def turn(muxer: Muxer, wire: Any) -> None:
        read(muxer, wire)
        turns.append(share.due_us)

    place.patch.setattr(Muxer, "_turn", turn)
    other = Muxed(share=share)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.muxer.run)
        stream = await stream_of(other)
        await other.send(b"".join(data(1, b"x") for _ in range(1000)))
        assert not stream.failure
        nursery.cancel_scope.cancel()
    assert most <= max(turns) < most + 100


async def _streams(most: int) -> None:
    """Streams of one connection, twice as many as count, with those of circuits: one more."""
    backend = cast("Any", Libp2pTransport(Identity.from_seed(b"s" * 32), listen=[]))
    allowed = backend._host._max_streams
    assert allowed == 2 * (most + 2 * (RelaySettings().circuits_per_peer + 4))
    other = Muxed(share=share_of(), max_streams=allowed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.muxer.run)
        for number in range(allowed + 1):
            assert RST not in {flags for _, flags, _, _ in other.frames()}
            await other.send(frame(WINDOW, SYN, 2 * number + 1, 0))
        assert (WINDOW, RST, 2 * allowed + 1, 0) in other.frames()
        assert not other.ends
        nursery.cancel_scope.cancel()


async def _handshake(most: float, place: Place) -> None:
    """A host that takes a connection, and says nothing on it."""

    async def silent(*_: Any) -> Any:
        await trio.sleep_forever()

    place.patch.setattr(host, "secure_dialled", silent)
    made = cast("Any", Libp2pHost.__new__(Libp2pHost))
    made._keys = None
    await _takes(most, DialError, made._secure_dialled, None, SOURCE.addresses[0], peer(1))


REACHED: dict[str, Reach] = {
    "access_stall_s": _access_stalls,
    "pending_answer_s": _pending,
    "schema_answer_s": _schemas,
    "max_echoes": _echoes,
    "max_lists_waiting": _lists,
    "max_dial_back_request_bytes": _request_bytes,
    "max_dial_back_answer_bytes": _answer_bytes,
    "dial_back_every_s": _dialled_back_every,
    "introductions_every_s": _introduced_every,
    "max_dial_back_askers": _dial_back_askers,
    "max_introduction_askers": _introduction_askers,
    "max_dial_backs": _dial_backs,
    "daemon.network.dial_back.MAX_ASKED": _asked_to_dial,
    "daemon.network.introductions.MAX_ASK_AGAIN_S": _asks_again,
    "max_learned": _learned,
    "max_words": _words,
    "max_recognised": _recognised,
    "daemon.network.restarts._MOST_WAITING": _restarted,
    "daemon.join.dial.CONNECT_TIMEOUT_S": _first_connection,
    "daemon.join.dial.ACCEPT_TIMEOUT_S": _first_answer,
    "transport.libp2p.tcp.CONNECT_TIMEOUT_S": _tcp,
    "max_bye_bytes": refusing(FrameError, _frame(Lane.CONTROL, FrameType.BYE), "are taken"),
    "max_chunk_bytes": refusing(FrameError, _frame(Lane.BULK, FrameType.CHUNK), "are taken"),
    "redial_min_s": _redialled(denied=False),
    "redial_denied_s": _redialled(denied=True),
    "max_connections_per_peer": _connections,
    "write_failures": _failed_writes,
    "room_check_s": _looks,
    "stranger_turn_us": _strangers_turn,
    "max_streams": _streams,
    "dialled_handshake_s": _handshake,
}
