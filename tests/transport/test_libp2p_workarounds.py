"""Each work-around against real hosts on loopback. A newer libp2p shows here what it mended."""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import sys

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError, StreamReset
from libp2p.peer.id import ID
from libp2p.security.insecure import transport as insecure
from multiaddr import Multiaddr

from bbnode.ir.caps import MAX_STREAMS
from bbnode.transport.errors import InsecureTransportError, ListenError
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p import workarounds as libp2p_workarounds
from bbnode.transport.libp2p.carrier import Libp2pCarrier, socket_of
from bbnode.transport.libp2p.tcp import BoundedTcp, listen_endpoint
from bbnode.transport.libp2p.wire import SocketWire
from bbnode.transport.libp2p.workarounds import (
    bound_handshakes,
    build_host,
    hard_close,
    require_noise_alone,
    running,
)
from tests.patience import PATIENCE_S
from tests.transport.plain import plain_host, plain_running

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
ECHO = "/test/echo/1"
BOOM = "/test/boom/1"
TAKE = "/test/take/1"


def make(seed: int, *, max_connections: int = 100, tcp: BoundedTcp | None = None):
    host = build_host(
        Identity.from_seed(bytes([seed]) * 32),
        tcp or BoundedTcp(),
        max_connections=max_connections,
        max_per_peer=4,
    )

    async def echo(stream) -> None:
        while data := await stream.read(4096):
            await stream.write(data)

    async def boom(stream) -> None:
        raise ValueError("on purpose")

    host.set_stream_handler(ECHO, echo)
    host.set_stream_handler(BOOM, boom)
    return host


async def dial(client, server):
    return await client.get_network().dial_addr(server.get_transport_addrs()[0], server.get_id())


async def never(*_: object) -> None:
    await trio.sleep_forever()


async def ended(stream) -> None:
    """Read to the end; libp2p says by one exception or another that it was reached."""
    with contextlib.suppress(StreamError):
        while await stream.read(4096):
            pass


async def provoke(client, server) -> None:
    """Open a stream whose handler raises; its reset may overtake the negotiation."""
    with contextlib.suppress(StreamFailure):
        await ended(await client.new_stream(server.get_id(), [BOOM]))


async def echo_once(stream) -> bool:
    await stream.write(b"ping")
    return await stream.read(16) == b"ping"


async def echoes(client, server) -> bool:
    stream = await client.new_stream(server.get_id(), [ECHO])
    answered = await echo_once(stream)
    await stream.reset()
    return answered


async def test_plaintext_dialer_with_a_stolen_name_is_refused():
    """S1: the attacker sends a victim's public key; the default host believes it."""
    victim, key = create_new_key_pair(b"v" * 32), create_new_key_pair(b"a" * 32)
    server = make(1)
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
            await dial(attacker, default)
            # The attack is real: this is what a host that is left as it comes believes.
            assert list(default.get_network().connections) == [ID.from_pubkey(victim.public_key)]
        async with running(server, [LOOPBACK]), plain_running(attacker, []):
            with pytest.raises(SwarmException):
                await dial(attacker, server)
            assert server.get_network().get_connections() == []


async def test_nothing_but_noise_and_yamux_passes_the_check():
    require_noise_alone(make(1))
    with pytest.raises(InsecureTransportError, match="plaintext"):
        require_noise_alone(new_host(key_pair=create_new_key_pair(b"k" * 32)))


async def test_handler_errors_and_garbage_do_not_end_the_host():
    """S2: each of these ended the host, or a task of it."""
    faults = []
    server = build_host(
        Identity.from_seed(b"1" * 32),
        BoundedTcp(),
        max_connections=10,
        max_per_peer=4,
        on_fault=lambda: faults.append(1),
    )

    async def boom(stream) -> None:
        raise ValueError("on purpose")

    server.set_stream_handler(BOOM, boom)
    client = plain_host(b"c" * 32)
    multistream = b"\x13/multistream/1.0.0\n"
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), plain_running(client, []):
            connection = await dial(client, server)
            await provoke(client, server)
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
            address = server.get_transport_addrs()[0]
            tcp = await trio.open_tcp_stream("127.0.0.1", int(address.value_for_protocol("tcp")))
            await tcp.send_all(b"GET / HTTP/1.1\r\n\r\n" * 8)
            with contextlib.suppress(trio.BrokenResourceError):
                while await tcp.receive_some(4096):
                    pass
            await tcp.aclose()
            await dial(client, server)
            await provoke(client, server)
            assert len(faults) >= 2


async def test_inbound_slots_come_back():
    """S3: six slots, fourteen connections, closed by either side, softly and hard."""
    server, client = make(1, max_connections=6), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            network = server.get_network()
            for n in range(14):
                connection = await dial(client, server)
                if n % 2:
                    await hard_close(client, connection)
                else:
                    await hard_close(server, network.get_connections(client.get_id())[0])
                while network._inbound_limiter.borrowed_tokens:
                    await trio.lowlevel.checkpoint()
            await dial(client, server)
            assert await echoes(client, server)
            assert network._inbound_limiter.borrowed_tokens == 1


async def test_hard_close_returns_with_a_writer_blocked_on_a_stuck_peer(monkeypatch):
    """S5: the peer's kernel takes bytes, the peer reads none."""
    # It comes back by itself, and not because it is cut off.
    monkeypatch.setattr(libp2p_workarounds, "_HARD_CLOSE_S", math.inf)
    server, client = make(1), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            connection = await dial(client, server)
            stream = await client.new_stream(server.get_id(), [ECHO])
            frozen = server.get_network().get_connections(client.get_id())[0]
            for each in frozen.muxed_conn.streams.values():
                each.set_window(2**31)
            await echo_once(stream)
            writer_done = trio.Event()

            async def write() -> None:
                with pytest.raises(StreamReset):
                    await stream.write(bytes(2**30))
                writer_done.set()

            with monkeypatch.context() as patch:
                patch.setattr(SocketWire, "readable", never)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    assert not writer_done.is_set()
                    await hard_close(client, connection)
                    await writer_done.wait()
                assert client.get_network().get_connections() == []
                await hard_close(server, frozen)
            await dial(client, server)
            assert await echoes(client, server)


async def test_dead_link_options_on_both_sides():
    """S6."""
    import socket

    server, client = make(1), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            ends = [await dial(client, server), server.get_network().get_connections()[0]]
            for end in ends:
                sock = socket_of(end)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                for name, value in (
                    ("TCP_KEEPIDLE", 10),
                    ("TCP_KEEPINTVL", 5),
                    ("TCP_KEEPCNT", 3),
                    ("TCP_USER_TIMEOUT", 20_000),
                ):
                    option = getattr(socket, name)
                    assert sock.getsockopt(socket.IPPROTO_TCP, option) == value, name


async def test_failed_and_timed_out_dials_leave_nothing_behind():
    """S7, S8: no slot is lost, no peer is blacklisted, time-outs are inside the dial."""
    server = make(1)
    client = make(2, max_connections=4)
    upgrader = client.get_network().upgrader
    patient = upgrader.upgrade_security
    bound_handshakes(client, 0.05)
    mute = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = mute[0].socket.getsockname()[1]
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            network = client.get_network()
            for _ in range(8):
                with pytest.raises(SwarmException):
                    await network.dial_addr(
                        Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), server.get_id()
                    )
            await mute[0].aclose()
            for _ in range(8):
                with pytest.raises(SwarmException):
                    await network.dial_addr(
                        Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), server.get_id()
                    )
            # A good handshake may take its time.
            upgrader.upgrade_security = patient
            await dial(client, server)
            assert await echoes(client, server)


async def test_wrong_peer_at_the_address_is_refused():
    server, client = make(1), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            with pytest.raises(SwarmException):
                await client.get_network().dial_addr(
                    server.get_transport_addrs()[0], make(3).get_id()
                )


async def test_unread_bytes_are_seen():
    """S9: libp2p buffers what nobody reads; we count it."""
    server, client = make(1), make(2)
    reading = trio.Event()

    async def idle(stream) -> None:
        await reading.wait()

    server.set_stream_handler("/test/idle/1", idle)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            await dial(client, server)
            carrier = Libp2pCarrier(
                server, server.get_network().get_connections()[0], lambda _: None
            )
            stream = await client.new_stream(server.get_id(), ["/test/idle/1"])
            await stream.write(bytes(100_000))
            while carrier.unread_bytes() < 100_000:
                await trio.lowlevel.checkpoint()
            reading.set()


async def test_known_peers_are_not_dialled_unasked():
    """S10: even when libp2p's auto-connector is called, and below all its watermarks."""
    server, client = make(1), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            client.get_peerstore().add_addrs(server.get_id(), server.get_transport_addrs(), 600)
            network = client.get_network()
            network.connection_config.min_connections = 5
            network.connection_config.low_watermark = 5
            await network.auto_connector.maybe_connect()
            assert network.get_connections() == []
            assert server.get_network().get_connections() == []


async def test_a_connection_with_too_many_streams_goes():
    server, client = make(1), make(2)
    with trio.fail_after(PATIENCE_S):
        async with running(server, [LOOPBACK]), running(client, []):
            connection = await dial(client, server)
            for _ in range(MAX_STREAMS + 2):
                try:
                    await client.new_stream(server.get_id(), [ECHO])
                except (StreamError, StreamFailure):
                    break
            await connection.event_closed.wait()
            while server.get_network().get_connections():
                await trio.lowlevel.checkpoint()


async def test_a_port_in_use_is_seen_and_never_shared():
    first = make(1)
    with trio.fail_after(PATIENCE_S):
        async with running(first, [LOOPBACK]):
            address = first.get_transport_addrs()[0]
            tcp = BoundedTcp()
            second = make(2, tcp=tcp)
            async with running(second, [Multiaddr(f"{address}".split("/p2p/")[0])]):
                assert second.get_transport_addrs() == []
                assert next(iter(tcp.listen_failures.values())).errno is not None


@pytest.mark.parametrize(
    "text", ["/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0/ws", "/dns4/localhost/tcp/1"]
)
def test_other_listen_addresses_are_refused(text):
    with pytest.raises(ListenError, match="cannot listen on"):
        listen_endpoint(Multiaddr(text))


def test_no_log_handlers_and_no_noise_on_stderr():
    code = """
import logging, trio
from tests.transport.test_libp2p_workarounds import *
async def main():
    a, b = make(1), make(2)
    async with running(a, [LOOPBACK]), running(b, []):
        c = await dial(b, a)
        await hard_close(b, c)
        try:
            await b.get_network().dial_addr(Multiaddr("/ip4/127.0.0.1/tcp/1"), a.get_id())
        except SwarmException: pass
before = list(logging.getLogger().handlers)
trio.run(main)
assert logging.getLogger().handlers == before == [], logging.getLogger().handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert logging.getLogger("libp2p").handlers
