"""Circuit relay beside js-libp2p: as who dials, as who is reached, and as a relay."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived
from tests.interop.installed import JS_FOLDER, needs
from tests.interop.test_js_libp2p import node
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import LOOPBACK, next_event
from tests.transport.test_relay import join, payload, until
from tests.transport.test_relay_beside import make

pytestmark = needs("js-libp2p", JS_FOLDER)
BOTH = pytest.mark.parametrize("py_libp2p", [False, True], ids=["lean", "libp2p"])


@asynccontextmanager
async def js(role: str, *address: Multiaddr) -> AsyncIterator[Multiaddr]:
    """A js-libp2p host, and where it says that it is."""
    command = node(role, *map(str, address), script="relay.mjs")
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = await nursery.start(run)
        with trio.fail_after(PATIENCE_S):
            yield Multiaddr((await process.stdout.receive_some()).decode().strip())
        await process.stdin.aclose()


@BOTH
async def test_js_reaches_a_node_through_our_relay(nursery, py_libp2p):
    r, b = make("r", listen=[LOOPBACK], serve=True), make("b", use=True, py_libp2p=py_libp2p)
    for each in (r, b):
        await nursery.start(each.run)
    await join([r], b)
    (address,) = b.listen_addresses()
    with trio.fail_after(PATIENCE_S):
        command = node("dial", str(address), script="relay.mjs")
        done = await trio.run_process(command, capture_stdout=True)
    assert json.loads(done.stdout)["remote"] == str(address)
    # js may open two circuits at once, and keep one.
    assert b.counters()["foreign.taken"] in (1, 2)


async def test_a_node_reaches_js_through_our_relay(nursery):
    r, b = make("r", listen=[LOOPBACK], serve=True), make("b", use=True, py_libp2p=True)
    for each in (r, b):
        await nursery.start(each.run)
    async with js("listen", r.listen_addresses()[0]) as address:
        peer = ID(peer_of_address(address).to_bytes())
        await b.libp2p_host.get_network().dial_addr(address, peer)
        assert len(await PingService(b.libp2p_host).ping(peer, 2)) == 2
    assert r.counters()["relay.reserved"] == 2
    assert r.counters()["relay.malformed"] == 0


@BOTH
async def test_two_nodes_meet_through_a_relay_of_js(nursery, py_libp2p):
    """It lets 128 KiB through: what is more goes over several circuits."""
    async with js("serve") as relay:
        a = make("a", use=True, through=(relay,), py_libp2p=py_libp2p)
        b = make("b", use=True, py_libp2p=py_libp2p)
        for each in (a, b):
            await nursery.start(each.run)
        await until(lambda: len(a.listen_addresses()) == 1)
        b.keep_connected(a.peer_id, a.listen_addresses())
        await next_event(b, ConnectionOpened)
        for number in range(6):
            data = payload(50_000, seed=number)
            b.send(a.peer_id, data, tag=number)
            with trio.fail_after(PATIENCE_S):
                assert bytes((await next_event(a, EnvelopeReceived)).data) == data
    for each in (a, b):
        assert not any(each.counters()[f"relay.{name}"] for name in ("malformed", "expired"))
