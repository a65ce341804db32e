"""js-libp2p on the other side, in both roles: negotiations, Noise and Yamux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.address import peer_of_address
from tests.interop.installed import JS_FOLDER, needs
from tests.patience import PATIENCE_S
from tests.transport.hosts import ECHO, LOOPBACK, OurHost
from tests.transport.test_foreign import OPEN
from tests.transport.test_libp2p_backend import make

SIZE = 3 * 1024 * 1024
FOLDER = JS_FOLDER
pytestmark = needs("js-libp2p", FOLDER)


def node(*arguments: str, script: str = "echo.mjs") -> list[str]:
    """The command of a js-libp2p host; it finds its modules beside the script."""
    copied = Path(FOLDER) / script
    shutil.copy(Path(__file__).parent / script, copied)
    return ["node", str(copied), *arguments]


async def test_js_dials_us():
    host = OurHost(1)
    async with host.running([LOOPBACK]):
        address = f"{host.address}/p2p/{host.peer_id}"
        with trio.fail_after(PATIENCE_S):
            done = await trio.run_process(node(address, str(SIZE)), capture_stdout=True)
    assert int(done.stdout) == SIZE


async def test_we_dial_js():
    host = OurHost(1)
    async with host.running([]), trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(trio.run_process, node(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        with trio.fail_after(PATIENCE_S):
            address = Multiaddr((await process.stdout.receive_some()).decode().strip())
            connection = await host.dial(address, peer_of_address(address))
            stream = await connection.open_protocol(ECHO)
            body, got = os.urandom(SIZE), bytearray()

            async def write() -> None:
                await stream.write(body)
                await stream.end()

            nursery.start_soon(write)
            while data := await stream.read(65_536):
                got += data
        assert bytes(got) == body
        await process.stdin.aclose()


@pytest.mark.slow
async def test_js_stays_as_a_guest_and_pings_for_long(nursery):
    """Each ping is a stream: it is slowed to its share, for longer than a debt may last."""
    backend = make("a", limits=replace(OPEN, hello_timeout_s=1.0))
    await nursery.start(backend.run)
    command = node(str(backend.listen_addresses()[0]), "2000", script="guest.mjs")
    with trio.fail_after(10 * PATIENCE_S):
        done = await trio.run_process(command, capture_stdout=True)
    said = json.loads(done.stdout)
    assert (said["pings"], said["ends"], said["connections"]) == (2_000, 0, 1)
    assert "/ipfs/ping/1.0.0" in said["protocols"]
    counters = backend.counters()
    assert counters["foreign.taken"] == 1
    assert (counters["hello.refused"], counters["protocol.violations"]) == (0, 0)
