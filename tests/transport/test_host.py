"""Connections and their streams: what must hold whatever the peer does, on loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.security.insecure import transport as insecure
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.errors import OTHER_KEY, DialError, ListenError, StreamBrokenError
from bbnode.transport.libp2p import host as libp2p_host
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.identify import IDENTIFY_PROTOCOL, PING_PROTOCOL
from bbnode.transport.libp2p.keys import decode_fields
from bbnode.transport.libp2p.tcp import connect, listen_endpoint
from bbnode.transport.libp2p.wire import SocketWire
from tests.patience import PATIENCE_S
from tests.transport.hosts import BOOM, ECHO, LOOPBACK, TAKE, OurHost, dial, echoes
from tests.transport.plain import plain_dial, plain_host, plain_running

# Over both transports.
pytestmark = pytest.mark.usefixtures("each_transport")


async def never(*_: object) -> None:
    await trio.sleep_forever()


async def until(reached) -> None:
    with trio.fail_after(PATIENCE_S):
        while not reached():
            await trio.lowlevel.checkpoint()


async def tcp(address: Multiaddr) -> trio.SocketStream:
    host, port = address.value_for_protocol("ip4"), address.value_for_protocol("tcp")
    return await trio.open_tcp_stream(str(host), int(port))


async def closed(stream: trio.SocketStream) -> None:
    """The other side has closed it."""
    with trio.fail_after(PATIENCE_S), contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(65_536):
            pass


async def ended(stream) -> None:
    """Read to the end; libp2p says by one exception or another that it was reached."""
    with contextlib.suppress(StreamError):
        while await stream.read(4096):
            pass


# -- who is there ----------------------------------------------------------------------------


async def test_plaintext_dialer_with_a_stolen_name_is_refused():
    """The attacker sends a victim's public key; py-libp2p's default host believes it."""
    victim, key = create_new_key_pair(b"v" * 32), create_new_key_pair(b"a" * 32)
    server = OurHost(1)
    attacker = new_host(
        key_pair=key, sec_opt={insecure.PLAINTEXT_PROTOCOL_ID: insecure.InsecureTransport(key)}
    )
    original = insecure.make_exchange_message

    def forged(public_key):
        return original(victim.public_key if public_key == key.public_key else public_key)

    default = new_host(key_pair=create_new_key_pair(b"d" * 32))
    with pytest.MonkeyPatch.context() as patch, trio.fail_after(PATIENCE_S):
        patch.setattr(insecure, "make_exchange_message", forged)
        async with plain_running(default, [LOOPBACK]), plain_running(attacker, []):
            await attacker.get_network().dial_addr(
                default.get_transport_addrs()[0], default.get_id()
            )
            # The attack is real: this is what a host that is left as it comes believes.
            assert list(default.get_network().connections) == [ID.from_pubkey(victim.public_key)]
        async with server.running([LOOPBACK]), plain_running(attacker, []):
            with pytest.raises(SwarmException):
                await plain_dial(attacker, server.address, server.peer_id)
            assert server.connections == set()


async def test_wrong_peer_at_the_address_is_refused():
    server, client, other = OurHost(1), OurHost(2), OurHost(3)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            with pytest.raises(DialError, match=f"{OTHER_KEY}: {server.peer_id}"):
                await client.dial(server.address, other.peer_id)
            with pytest.raises(DialError, match=OTHER_KEY):
                await client.probe(server.address, other.peer_id)
            await client.probe(server.address, server.peer_id)
            assert client.connections == set()
            # The last message that proves the client never came.
            await until(lambda: server.admission.waiting == 0)


@pytest.mark.parametrize("ours_dials", [True, False])
async def test_each_side_knows_the_other(ours_dials):
    ours, plain = OurHost(1), plain_host(b"p" * 32)
    name = PeerId.from_bytes(plain.get_id().to_bytes())
    with trio.fail_after(PATIENCE_S):
        async with (
            ours.running([] if ours_dials else [LOOPBACK]),
            plain_running(plain, [LOOPBACK] if ours_dials else []),
        ):
            if ours_dials:
                address = plain.get_transport_addrs()[0].decapsulate_code(0x01A5)
                connection = await ours.dial(address, name)
                assert connection.address == Multiaddr(f"{address}/p2p/{name}")
            else:
                await plain_dial(plain, ours.address, ours.peer_id)
                connection = ours.connection
            assert connection.peer == name
            await until(lambda: plain.get_network().connections)
            (seen,) = plain.get_network().connections
            assert seen.to_bytes() == ours.peer_id.to_bytes()


async def test_who_asks_is_told_what_we_speak():
    ours, plain = OurHost(1), plain_host(b"p" * 32)
    with trio.fail_after(PATIENCE_S):
        async with ours.running([LOOPBACK]), plain_running(plain, []):
            ours.announced = ours.listening
            await plain_dial(plain, ours.address, ours.peer_id)
            peer = ID(ours.peer_id.to_bytes())
            stream = await plain.new_stream(peer, [IDENTIFY_PROTOCOL])
            (size,) = await stream.read(1)
            if size >= 0x80:
                (more,) = await stream.read(1)
                size = size & 0x7F | more << 7
            message = b""
            while len(message) < size:
                message += await stream.read(size - len(message))
            fields = decode_fields(message)
            assert fields[1] == ours.peer_id.to_bytes()[2:]
            assert fields[2] == ours.address.to_bytes()
            assert fields[6] == b"bbnode"
            stream = await plain.new_stream(peer, [PING_PROTOCOL])
            for number in range(3):
                sent = bytes([number]) * 32
                await stream.write(sent)
                assert await stream.read(32) == sent


# -- what a peer may not end -----------------------------------------------------------------


async def test_handler_errors_and_garbage_do_not_end_the_host():
    server, client = OurHost(1), plain_host(b"c" * 32)
    multistream = b"\x13/multistream/1.0.0\n"
    peer = ID(server.peer_id.to_bytes())

    async def provoke() -> None:
        # The reset may overtake the negotiation.
        with contextlib.suppress(StreamFailure):
            await ended(await client.new_stream(peer, [BOOM]))

    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), plain_running(client, []):
            connection = await plain_dial(client, server.address, server.peer_id)
            await provoke()
            for garbage in (
                b"\xff" * 64,
                b"\x05\xff\xfe\xfd\xfc\n",
                multistream + b"\x05\xff\xfe\xfd\xfc\n",
                multistream + b"\x00",
                multistream + b"\x03abc",
            ):
                raw = await connection.new_stream()
                await raw.write(garbage)
                await raw.close()
                await ended(raw)
            # Garbage under the muxer, and under the encryption.
            for below in (
                connection.muxed_conn.secured_conn,
                connection.muxed_conn.secured_conn.conn.read_writer.read_write_closer,
            ):
                await below.write(b"\x00\x40" + b"\xee" * 64)
            await connection.event_closed.wait()
            # Garbage instead of a handshake.
            stranger = await tcp(server.address)
            await stranger.send_all(b"GET / HTTP/1.1\r\n\r\n" * 8)
            await closed(stranger)
            await stranger.aclose()
            await plain_dial(client, server.address, server.peer_id)
            await provoke()
            assert server.counters.snapshot()["streams.handler_errors"] == 2


async def test_places_come_back():
    """Four places, fourteen connections, closed by either side."""
    server, client = OurHost(1, max_waiting=4), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            for n in range(14):
                connection = await dial(client, server)
                (connection if n % 2 else server.connection).close()
                await until(lambda: server.admission.waiting == 0)
                await until(lambda: not client.connections)
                assert server.connections == set()
            assert await echoes(await dial(client, server))
            assert server.admission.waiting == 1
    assert server.counters.snapshot()["sockets.refused"] == 0


async def test_a_connection_that_is_not_wanted_is_closed():
    server, client = OurHost(1, wanted=lambda _: False), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            connection = await dial(client, server)
            await connection.ended.wait()
            await until(lambda: server.admission.waiting == 0)
        unwilling, host = OurHost(3, wanted=lambda _: False), OurHost(4)
        async with host.running([LOOPBACK]), unwilling.running([]):
            with pytest.raises(DialError, match="too many connections"):
                await dial(unwilling, host)
            assert unwilling.connections == set()


async def test_close_returns_with_a_writer_blocked_on_a_stuck_peer(monkeypatch):
    """The peer's kernel takes bytes, the peer reads none."""
    server, client = OurHost(1), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            connection = await dial(client, server)
            stream = await connection.open_protocol(ECHO)
            frozen = server.connection
            for each in frozen.muxer.streams.values():
                each.set_window(2**31)
            await stream.write(b"ping")
            assert await stream.read(16) == b"ping"
            writer_done = trio.Event()

            async def write() -> None:
                with pytest.raises(StreamBrokenError):
                    await stream.write(bytes(2**30))
                writer_done.set()

            with monkeypatch.context() as patch:
                patch.setattr(SocketWire, "readable", never)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    assert not writer_done.is_set()
                    await connection.hard_close()
                    await writer_done.wait()
                assert client.connections == set()
                frozen.close()
            assert await echoes(await dial(client, server))


async def test_a_host_ends_with_connections_and_handlers_under_way():
    server, client = OurHost(1), OurHost(2)
    begun, over = trio.Event(), []

    async def stays(_connection: Connection, _stream) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            over.append(True)

    server.handlers[TAKE] = stays
    with trio.fail_after(PATIENCE_S):
        async with client.running([]):
            async with server.running([LOOPBACK]):
                connection = await dial(client, server)
                await connection.open_protocol(TAKE)
                silent = await tcp(server.address)
                await begun.wait()
            assert over == [True]
            await connection.ended.wait()
            async with silent:
                await closed(silent)
            assert server.connections == set()
            assert server.admission.waiting == 0


async def test_dead_link_options_on_both_sides():
    server, client = OurHost(1), OurHost(2)
    seen: list[trio.SocketStream] = []
    real = libp2p_host.set_link_options
    with pytest.MonkeyPatch.context() as patch, trio.fail_after(PATIENCE_S):
        patch.setattr(libp2p_host, "set_link_options", lambda each: (real(each), seen.append(each)))
        async with server.running([LOOPBACK]), client.running([]):
            await dial(client, server)
            seen.append(await connect(server.address))
            for each in seen:
                sock = each.socket
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                for name, value in (
                    ("TCP_KEEPIDLE", 10),
                    ("TCP_KEEPINTVL", 5),
                    ("TCP_KEEPCNT", 3),
                    ("TCP_USER_TIMEOUT", 20_000),
                ):
                    option = getattr(socket, name)
                    assert sock.getsockopt(socket.IPPROTO_TCP, option) == value, name
            assert len(seen) == 2
            await seen[-1].aclose()


# -- dials -----------------------------------------------------------------------------------


async def test_failed_and_timed_out_dials_leave_nothing_behind(monkeypatch):
    """Time-outs are inside the dial; nobody is remembered for a failure."""
    server, client = OurHost(1), OurHost(2)
    mute = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nobody = Multiaddr(f"/ip4/127.0.0.1/tcp/{mute[0].socket.getsockname()[1]}")
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            with monkeypatch.context() as patch:
                patch.setattr(libp2p_host, "DIALLED_HANDSHAKE_S", 0.05)
                for _ in range(3):
                    with pytest.raises(DialError, match=r"no handshake within 0\.05 s"):
                        await client.dial(nobody, server.peer_id)
            for listener in mute:
                await listener.aclose()
            for _ in range(3):
                with pytest.raises(DialError, match="refused"):
                    await client.dial(nobody, server.peer_id)
            assert client.connections == set()
            assert await echoes(await dial(client, server))


async def test_a_cancelled_dial_closes_its_socket(nursery):
    client = OurHost(2)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nobody = Multiaddr(f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}")
    with trio.fail_after(PATIENCE_S):
        async with client.running([]):
            with trio.CancelScope() as scope:
                nursery.start_soon(client_cancels, scope, listeners[0])
                await client.dial(nobody, client.peer_id)
            assert scope.cancelled_caught
            assert client.connections == set()


async def client_cancels(scope: trio.CancelScope, listener: trio.SocketListener) -> None:
    """Accept a connection, cancel its dialler, and see its end."""
    async with listener, await listener.accept() as stream:
        await stream.receive_some(1)
        scope.cancel()
        await closed(stream)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/udp/1/quic-v1", "/ip4/127.0.0.1/tcp/1/ws", "/dnsaddr/node.example",
        "/unix/tmp%2fa",
    ],
)  # fmt: skip
async def test_what_is_no_tcp_is_not_dialled(text):
    client = OurHost(2)
    async with client.running([]):
        with pytest.raises(DialError, match="cannot dial"):
            await client.dial(Multiaddr(text), client.peer_id)


@pytest.mark.parametrize("kind", ["dns", "dns4"])
async def test_a_name_is_looked_up(kind):
    server, client = OurHost(1), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            port = server.address.value_for_protocol("tcp")
            name = Multiaddr(f"/{kind}/localhost/tcp/{port}/p2p/{server.peer_id}")
            connection = await client.dial(name, server.peer_id)
            assert connection.address == Multiaddr(f"{server.address}/p2p/{server.peer_id}")


async def test_over_ip6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server, client = OurHost(1), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        try:
            async with server.running([Multiaddr("/ip6/::1/tcp/0")]), client.running([]):
                assert await echoes(await dial(client, server))
                assert "/ip6/::1/tcp/" in str(server.connection.address)
        except ListenError:
            pytest.skip("no IPv6 on loopback here")


# -- listening -------------------------------------------------------------------------------


async def test_a_port_in_use_is_seen_and_never_shared():
    first, second = OurHost(1), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with first.running([LOOPBACK]):
            with pytest.raises(ListenError, match="address already in use"):
                async with second.running([LOOPBACK, first.address]):
                    pass
            # What it had opened before is closed.
            third = OurHost(3)
            async with third.running([LOOPBACK]):
                assert third.address != first.address


@pytest.mark.parametrize(
    "text", ["/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0/ws", "/dns4/localhost/tcp/1"]
)
def test_other_listen_addresses_are_refused(text):
    with pytest.raises(ListenError, match="cannot listen on"):
        listen_endpoint(Multiaddr(text))


async def test_who_stops_accepting_keeps_its_connections():
    server, client = OurHost(1), OurHost(2)
    with trio.fail_after(PATIENCE_S):
        async with server.running([LOOPBACK]), client.running([]):
            connection = await dial(client, server)
            server.stop_accepting()
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(DialError, match="refused"):
                await dial(client, server)
            assert await echoes(connection)


# -- what is imported ------------------------------------------------------------------------


def test_the_transport_needs_no_library_of_libp2p_and_leaves_logging_alone():
    code = """
import logging, sys, trio
from tests.transport.hosts import *
async def main():
    a, b = OurHost(1), OurHost(2)
    async with a.running([LOOPBACK]), b.running([]):
        assert await echoes(await dial(b, a))
trio.run(main)
assert "libp2p" not in sys.modules
assert logging.getLogger().handlers == [], logging.getLogger().handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert logging.getLogger("libp2p").handlers
