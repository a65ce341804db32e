"""What a daemon leaves out of libp2p; each in a process of its own, since imports stay."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bbnode.transport.libp2p import imports as libp2p_imports

LEAN = """
import sys
from bbnode.transport.libp2p import imports as libp2p_imports
libp2p_imports.import_core()
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LEAN + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_unused_is_not_loaded_and_leaves_no_trace() -> None:
    loaded = run("print(*sys.modules)").split()
    assert "libp2p" in loaded
    unused = [
        name
        for name in loaded
        if any(name == root or name.startswith(f"{root}.") for root in libp2p_imports.UNUSED)
    ]
    assert unused == []


def test_each_root_is_one_that_libp2p_would_load() -> None:
    """An entry that nothing imports any more is to be taken out."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, libp2p; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    assert [root for root in libp2p_imports.UNUSED if root not in loaded] == []


def test_two_hosts_talk() -> None:
    said = run("""
import trio
from multiaddr import Multiaddr
from bbnode.transport.base import EnvelopeReceived, ConnectionOpened
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport

async def main():
    a, b = (
        Libp2pTransport(Identity.from_seed(name * 32), listen=[Multiaddr("/ip4/127.0.0.1/tcp/0")])
        for name in (b"a", b"b")
    )
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            await nursery.start(a.run)
            await nursery.start(b.run)
            b.keep_connected(a.peer_id, a.listen_addresses())
            while not isinstance(await b.events.receive(), ConnectionOpened):
                pass
            b.send(a.peer_id, b"hello", tag=0)
            while not isinstance(event := await a.events.receive(), EnvelopeReceived):
                pass
            print(bytes(event.data).decode())
            nursery.cancel_scope.cancel()

trio.run(main)
""")
    assert said == "hello"


@pytest.mark.parametrize(
    "module", ["aioquic.quic.connection", "requests", "libp2p.relay.circuit_v2.protocol"]
)
def test_who_imports_it_later_gets_the_real_one(module: str) -> None:
    assert run(f"import {module} as m; print(m.__file__)").endswith(".py")


def test_what_was_left_out_says_so_when_it_is_used() -> None:
    said = run("""
import libp2p.host.basic_host as host
try:
    host.is_private_ip("10.0.0.1")
except libp2p_imports.LeftOutOfLibp2p as error:
    print(error)
""")
    assert "libp2p.relay.circuit_v2.nat.is_private_ip is left out" in said


def test_a_libp2p_that_is_there_stays_as_it_is() -> None:
    said = run("""
import libp2p
before = dict(sys.modules)
libp2p_imports.import_core()
print(before == dict(sys.modules))
""")
    assert said == "True"
