"""js-libp2p on the other side of our own Noise packets and Yamux, in both roles.

Set BBNODE_JS to a folder in which `npm install libp2p @libp2p/tcp @libp2p/yamux
@chainsafe/libp2p-noise` was run; without it the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.transport.libp2p.workarounds import running
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_workarounds import ECHO, LOOPBACK, make

SIZE = 3 * 1024 * 1024
FOLDER = os.environ.get("BBNODE_JS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER or shutil.which("node") is None, reason="BBNODE_JS is not set"),
]


def node(*arguments: str) -> list[str]:
    """The command of a js-libp2p host; it finds its modules beside the script."""
    script = Path(FOLDER) / "echo.mjs"
    shutil.copy(Path(__file__).parent / "echo.mjs", script)
    return ["node", str(script), *arguments]


def ours():
    host = make(1)

    async def echo(stream) -> None:
        try:
            while True:
                await stream.write(await stream.read(65_536))
        except StreamEOF:
            await stream.close()

    host.set_stream_handler(ECHO, echo)
    return host


async def test_js_dials_us():
    host = ours()
    async with running(host, [LOOPBACK]):
        address = f"{host.get_transport_addrs()[0]}/p2p/{host.get_id()}"
        with trio.fail_after(PATIENCE_S):
            done = await trio.run_process(node(address, str(SIZE)), capture_stdout=True)
    assert int(done.stdout) == SIZE


async def test_we_dial_js():
    host = ours()
    async with running(host, []), trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(trio.run_process, node(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        with trio.fail_after(PATIENCE_S):
            address = Multiaddr((await process.stdout.receive_some()).decode().strip())
            peer = ID.from_base58(address.value_for_protocol("p2p"))
            await host.get_network().dial_addr(address.decapsulate_code(0x01A5), peer)
            stream = await host.new_stream(peer, [ECHO])
            body, got = os.urandom(SIZE), bytearray()

            async def write() -> None:
                await stream.write(body)
                await stream.close_write()

            nursery.start_soon(write)
            while len(got) < SIZE:
                got += await stream.read(65_536)
            with pytest.raises(StreamEOF):
                await stream.read(1)
        assert bytes(got) == body
        await process.stdin.aclose()
