"""The transport of a node is the one that its configuration names, whoever brings it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

import bbnode.transport
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control.host import Host
from bbnode.daemon.lifecycle.app import Daemon
from bbnode.ir import plugins
from bbnode.ir.errors import DeploymentError
from bbnode.ir.plugins import BrokenPlugin
from bbnode.transport import (
    Identity,
    ListenError,
    NotSupportedError,
    ProtocolStream,
    TransportSetup,
)
from bbnode.transport.errors import UnknownTransport
from bbnode.transport.identity import load_or_create_identity
from bbnode.transport.memory import MemoryTransport
from bbnode.transport.registry import GROUP, make_transport, transport_names
from tests.daemon.live import compiled
from tests.daemon.post_transport import SETTINGS
from tests.patience import PATIENCE_S

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package that brings transports: its metadata in a folder of the search path."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def add(**entries: str) -> None:
        info = folder / "post_office-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: post-office\nVersion: 1.0\n")
        listed = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{listed}")
        plugins.rescan()

    yield add
    monkeypatch.undo()
    plugins.rescan()


def configured(folder: Path, role: str, text: str) -> ResolvedConfig:
    """The configuration of a node that plays `role`; `text` begins with keys of [network]."""
    folder.mkdir(exist_ok=True)
    artifact = folder / "ask.onnx"
    artifact.write_bytes(serialize(compiled()))
    file = folder / f"{role}.toml"
    file.write_text(
        f'[node]\nname = "{role}"\nstate_dir = "{folder / role}"\nstop_grace_s = 60.0\n'
        f'[artifact]\npath = "{artifact}"\ntargets = ["{role}"]\n[network]\n{text}'
    )
    return sources.resolve(file, environ={}, flags={})


async def two_daemons(folder: Path, network: str) -> list[str]:
    """Run a round between two daemons of this process; the ends of the server's rounds."""
    identity = load_or_create_identity(paths.identity_file(make_state(folder / "server")))
    bootstrap = f'bootstrap = ["/memory/7/p2p/{identity.peer_id}"]\n'
    invoke = (
        '[[invoke]]\ntarget = "server"\ninputs = { question = 1.0 }\ntimes = 2\n'
        'wait_for = { class = "client", peers = 1 }\n'
    )
    ended: list[str] = []

    async def until_done(client: Daemon, host: Host) -> None:
        def is_end(item: Mapping[str, Any]) -> bool:
            return item["type"] == "rounds_complete"

        with contextlib.closing(host.events.subscribe(last=1, wanted=is_end)) as ends:
            await ends.next()
        rounds = host.rounds[0].finished()
        ended.extend(f"{each['ok']} {len(each['responded'])}" for each in rounds)
        host.stop()
        client.stop()

    client = Daemon(configured(folder, "client", bootstrap + network))
    # Keys of [network] stand before the tables.
    keys, _, tables = network.partition("[")
    server = Daemon(
        configured(folder, "server", keys + (f"[{tables}" if tables else "") + invoke),
        companion=partial(until_done, client),
    )
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            nursery.start_soon(client.run)
    return ended


def make_state(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True)
    return folder


async def test_two_daemons_of_one_process_run_a_program_over_memory(tmp_path: Path) -> None:
    network = 'transport = "memory"\n[network.settings]\nnetwork = "two daemons"\n'
    assert await two_daemons(tmp_path, network) == ["True 1", "True 1"]


async def test_daemons_run_over_the_transport_of_another_package(
    tmp_path: Path, install: Install
) -> None:
    install(post="tests.daemon.post_transport:PostTransport")
    SETTINGS.clear()
    network = 'transport = "post"\n[network.settings]\nstamps = 3\n'
    assert await two_daemons(tmp_path, network) == ["True 1", "True 1"]
    assert SETTINGS == [{"stamps": 3}, {"stamps": 3}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[discovery]\nmdns = true\n", "'memory' has no ip, which discovery.mdns needs"),
        ("[relay]\nserve = true\n", "'memory' has no relays, which relay.serve needs"),
        ("[relay]\nuse = true\n", "'memory' has no relays, which relay.use needs"),
    ],
)
async def test_what_a_transport_lacks_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(NotSupportedError, match=problem):
        Daemon(configured(tmp_path, "server", f'transport = "memory"\n{text}'))


async def test_an_address_that_the_transport_does_not_know_is_refused(tmp_path: Path) -> None:
    text = 'transport = "memory"\nlisten = ["/ip4/127.0.0.1/tcp/0"]\n'
    with pytest.raises(ListenError, match=r"leave network\.listen out"):
        Daemon(configured(tmp_path, "server", text))


@pytest.mark.parametrize("name", ["memory", "libp2p", "lean"])
async def test_settings_that_a_transport_does_not_have_are_refused(name: str) -> None:
    setup = TransportSetup(identity=Identity.generate(), settings={"stamps": 3})
    with pytest.raises(DeploymentError, match="stamps"):
        make_transport(name, setup)


def test_an_unknown_transport_is_told_with_those_that_there_are(install: Install) -> None:
    install(post="tests.daemon.post_transport:PostTransport")
    assert transport_names() == ["lean", "libp2p", "memory", "post"]
    with pytest.raises(
        UnknownTransport, match=r"'pots'; there are: lean, libp2p, memory, post; did you mean"
    ):
        make_transport("pots", TransportSetup(identity=Identity.generate()))


def test_what_makes_no_transport_is_a_broken_plugin(install: Install) -> None:
    install(post="builtins:repr")
    with pytest.raises(BrokenPlugin, match=r"post-office.* gives str"):
        make_transport("post", TransportSetup(identity=Identity.generate()))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("tests.daemon.post_transport:raises", "making it raised ZeroDivisionError: no stamps"),
        ("tests.daemon.post_transport:missing", "missing"),
        ("tests.daemon.no_such_module:made", "no_such_module"),
    ],
)
def test_a_factory_that_fails_is_a_broken_plugin_of_its_package(
    install: Install, entry: str, problem: str
) -> None:
    install(post=entry)
    with pytest.raises(BrokenPlugin, match=f"post-office.*{problem}"):
        make_transport("post", TransportSetup(identity=Identity.generate()))


def test_a_shipped_transport_that_is_not_listed_means_an_old_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "names", lambda _: {"libp2p": "bbnode"})
    with pytest.raises(UnknownTransport, match=r"'memory'; there are: libp2p; .*install it again"):
        make_transport("memory", TransportSetup(identity=Identity.generate()))


async def test_without_streams_nothing_else_is_spoken(tmp_path: Path) -> None:
    made = make_transport("memory", TransportSetup(identity=Identity.generate()))
    assert isinstance(made, MemoryTransport)

    async def serve(stream: ProtocolStream) -> None:
        await stream.end()

    made.register_protocol("/some/1", serve)
    with pytest.raises(NotSupportedError, match="/some/1"):
        made.open_stream(made.peer_id, "/some/1")


def test_what_an_author_needs_is_imported_without_a_transport() -> None:
    assert set(bbnode.transport.__all__) <= set(dir(bbnode.transport))
    script = (
        "import sys, bbnode.transport; "
        "print(sorted({'libp2p', 'trio', 'zeroconf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
