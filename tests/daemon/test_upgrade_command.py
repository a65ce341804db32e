"""`bbnode upgrade`: what is fetched from whom, shown, asked, switched, and gone back from."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.access.errors import ReleaseRefused
from bbnode.access.keys import SigningKey
from bbnode.access.release import open_release, release_from_text, sign_release
from bbnode.access.statement import grant
from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.compiler import Compiler
from bbnode.components.selectors.views import ConnectedView
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.config import sources
from bbnode.daemon.control.host import NotOffered, RestartRefused
from bbnode.daemon.join.dial import dialled
from bbnode.daemon.join.folder import folder
from bbnode.daemon.join.invitation import read_source
from bbnode.daemon.join.prepare import JoinOptions, prepare
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.upgrade.candidate import make_candidate
from bbnode.daemon.upgrade.offers import UpgradedNode, Upgrades
from bbnode.daemon.upgrade.releases import read_release, release_file
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.ir.peer import PeerId
from bbnode.programs import FederatedTraining
from bbnode.transport.base import ConnectionClosed, ConnectionOpened, Direction, Hello
from bbnode.transport.identity import load_identity
from tests.daemon.inviting import OWNER, Inviter, inviting
from tests.daemon.live import in_thread
from tests.patience import PATIENCE_S
from tests.programs.files import compiled


class Ask(Module):
    """The program of before: the client is not asked back what it was asked."""

    home = "server"

    def body(self, g: Graph) -> None:
        question = g.input("question", types.TENSOR_FLOAT)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=1, after=question)
        g.output("told", g.net_out("tell", peers, question))


@cache
def before() -> ModelProto:
    return Compiler().bind_peer_selector("who", ConnectedView).compile(Ask().build())


OLD = serialize(before())
OLD_SHA256 = parse_artifact(OLD, "old").sha256


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


async def laptop(host: Inviter, tmp_path: Path) -> Path:
    """The configuration of a node that joined while the inviting one ran the program of before."""
    source = read_source(host.ticket(), unix_s=time.time())
    options = JoinOptions(
        source=source, folder=folder(source, name="laptop", directory=tmp_path / "laptop"),
        target="client", settings={},
    )  # fmt: skip
    made = await prepare(options)
    made.write()
    file = options.folder.config_file
    (tmp_path / "laptop" / "artifact.onnx").write_bytes(OLD)
    text = file.read_text().replace(host.sha256, OLD_SHA256)
    file.write_text(f"# mine\n{text}")
    for cached in (tmp_path / "cache" / "bbnode" / "artifacts").iterdir():
        cached.unlink()
    return file


@asynccontextmanager
async def offering(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Inviter, Path]]:
    async with inviting(tmp_path / "server", **options) as host:
        yield host, await laptop(host, tmp_path)


async def bb(*words: object) -> int:
    return await in_thread(main, [str(word) for word in words])


def everything(root: Path) -> dict[str, bytes]:
    """All files of a node but its lock."""
    found = (path for path in root.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


async def test_it_is_fetched_shown_asked_for_and_taken_and_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (host, config):
        untouched = everything(config.parent)
        assert await bb("upgrade", "-c", config) == exits.USAGE  # nobody to ask
        shown = capsys.readouterr().err
        for text in (host.sha256, str(host.identity.peer_id), "taken over", "present"):
            assert text in shown
        assert "run again with --yes" in shown
        assert everything(config.parent) == untouched
        assert await bb("upgrade", "-c", config, "--yes", "--json") == 0
        told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["restarting"]) == ("bbnode/upgrade/1", False)
    new = config.parent / f"artifact.{host.sha256[:8]}.onnx"
    assert Path(told["artifact"]) == new
    node = sources.resolve(config, environ={})
    assert (node.config.artifact.path, node.config.artifact.sha256) == (
        Path(new.name), host.sha256,
    )  # fmt: skip
    assert assembly.find_artifact(node).sha256 == host.sha256
    assert (config.parent / "artifact.onnx").read_bytes() == OLD
    assert config.read_text().startswith("# mine\n")
    # All but the program is as it was.
    texts = (untouched["node.toml"].decode(), config.read_text())
    first, now = map(tomllib.loads, texts)
    assert {k: v for k, v in now.items() if k not in ("artifact", "upgrade")} == {
        k: v for k, v in first.items() if k != "artifact"
    }

    assert await bb("upgrade", "-c", config, "--back") == 0
    assert assembly.find_artifact(sources.resolve(config, environ={})).sha256 == OLD_SHA256
    capsys.readouterr()
    assert await bb("upgrade", "-c", config, "--back", "--json") == 0
    assert json.loads(capsys.readouterr().out)["artifact_sha256"] == host.sha256
    assert assembly.find_artifact(sources.resolve(config, environ={})).sha256 == host.sha256


# --- attacks: nothing is changed, and nothing is kept ---------------------------------------------


def cached(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "bbnode" / "artifacts").iterdir()]


async def test_a_huge_artifact_is_not_fetched_unless_somebody_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bbnode.daemon.upgrade.asking.most_bytes", lambda _present: 100)
    async with offering(tmp_path) as (host, config):
        untouched = everything(config.parent)
        assert await bb("upgrade", "-c", config, "--yes") == exits.FAILURE
        assert "100 are taken at most" in capsys.readouterr().err
        assert everything(config.parent) == untouched
        assert cached(tmp_path) == []
        assert await bb("upgrade", "-c", config, "--yes", "--max-mib", 1) == 0
        assert cached(tmp_path) == [f"{host.sha256}.onnx"]


async def test_a_broken_artifact_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (_, config):
        served = tmp_path / "server" / "a.onnx"
        served.write_bytes(served.read_bytes()[:-1] + b"\x00")
        untouched = everything(config.parent)
        assert await bb("upgrade", "-c", config, "--yes") == exits.USAGE
        assert "something else than the artifact" in capsys.readouterr().err
        assert everything(config.parent) == untouched
        assert cached(tmp_path) == []


async def test_what_cannot_run_here_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (_, config):
        config.write_text(config.read_text().replace('"client"', '"server"'))
        untouched = config.read_text()
        # A slot's settings that the new program has no use for, as those of a slot that is gone.
        config.write_text(f"{untouched}\n[slots.gone]\nx = 1\n")
        assert await bb("upgrade", "-c", config, "--yes") == exits.USAGE
        assert "slot 'gone'" in capsys.readouterr().err
        assert config.read_text() == f"{untouched}\n[slots.gone]\nx = 1\n"


async def test_what_the_node_has_or_had_is_no_offer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (_, config):
        assert await bb("upgrade", "-c", config, "--yes") == 0
        for _ in range(2):
            assert await bb("upgrade", "-c", config, "--yes") == exits.USAGE
            assert "offers nothing else" in capsys.readouterr().err
            assert await bb("upgrade", "-c", config, "--back") == 0


def test_a_program_that_no_file_names_is_not_upgraded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[artifact]\nmodule = "a:B"\ntargets = ["x"]\n')
    for words in ((), ("--back",), ("--auto", "on")):
        assert main(["upgrade", "-c", str(config), *words]) == exits.USAGE
        assert "not one that the configuration's file names" in capsys.readouterr().err


async def test_there_is_no_way_back_before_an_upgrade(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (_, config):
        assert await bb("upgrade", "-c", config, "--back") == exits.USAGE
        assert "no way back" in capsys.readouterr().err
        assert await bb("upgrade", "-c", config, "--yes") == 0
        (config.parent / "artifact.onnx").write_bytes(b"changed")
        untouched = config.read_text()
        assert await bb("upgrade", "-c", config, "--back") == exits.REFUSED
        assert config.read_text() == untouched


async def test_upgrades_by_themselves_are_for_private_networks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path) as (_, config):
        assert await bb("upgrade", "-c", config, "--auto", "on") == 0
        assert sources.resolve(config, environ={}).config.upgrade.auto
        assert await bb("upgrade", "-c", config, "--auto", "off") == 0
        assert not sources.resolve(config, environ={}).config.upgrade.auto
        assert config.read_text().startswith("# mine\n")


async def test_nobody_signs_for_an_open_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with offering(tmp_path, private=False) as (_, config):
        untouched = config.read_text()
        assert await bb("upgrade", "-c", config, "--auto", "on") == exits.USAGE
        assert "this node is in an open one" in capsys.readouterr().err
        assert config.read_text() == untouched
        assert await bb("upgrade", "-c", config, "--yes") == 0


# --- what the owner signed ------------------------------------------------------------------------


def watching(
    host: Inviter, config: Path, backend: Any, events: list[Any], **changes: Any
) -> Upgrades:
    """The upgrades of the laptop, over a connection that there is."""
    parts: dict[str, Any] = {
        "peer": PeerId.from_seed("laptop"),
        "artifact": parse_artifact(OLD, "old"),
        "network": OWNER.peer_id,
        "backend": backend,
        "resolved": lambda: sources.resolve(config, environ={}),
        "is_bootstrap": lambda peer: peer == host.identity.peer_id,
        "is_quiet": lambda: True,
        "publish": events.append,
        "restart": lambda: None,
        **changes,
    }
    return Upgrades(UpgradedNode(**parts))


def opened(peer: PeerId, sha256: str, credentials: bytes = b"") -> ConnectionOpened:
    return ConnectionOpened(
        peer=peer,
        address=Multiaddr("/memory/2"),
        direction=Direction.OUTBOUND,
        hello=Hello(artifact_sha256=sha256, credentials=credentials),
    )


@asynccontextmanager
async def connected(host: Inviter, config: Path) -> AsyncIterator[Any]:
    resolved = sources.resolve(config, environ={})
    state_dir = resolved.state_dir
    identity = load_identity(paths.identity_file(state_dir))
    access = access_files.load_node(state_dir, identity.peer_id)
    source = read_source(host.address, unix_s=time.time())
    async with dialled(identity, source, access.credentials) as connection:
        yield connection.backend


def sign(host: Inviter, tmp_path: Path, key: SigningKey = OWNER, number: int = 5) -> None:
    release = sign_release(key, host.sha256, number=number)
    release_file(tmp_path / "server" / "a.onnx").write_text(f"{release.text}\n")


async def test_what_the_owner_signed_is_taken_at_the_next_quiet_moment(tmp_path: Path) -> None:
    events: list[Any] = []
    restarted, looked = trio.Event(), trio.Event()
    busy = [True]

    def is_quiet() -> bool:
        looked.set()
        return not busy[0]

    async with offering(tmp_path) as (host, config):
        sign(host, tmp_path)
        assert await bb("upgrade", "-c", config, "--auto", "on") == 0
        async with connected(host, config) as backend, trio.open_nursery() as nursery:
            upgrades = watching(
                host, config, backend, events, is_quiet=is_quiet, restart=restarted.set
            )
            nursery.start_soon(upgrades.run)
            upgrades.heard(opened(host.identity.peer_id, host.sha256))
            with trio.fail_after(PATIENCE_S):
                await looked.wait()
                assert not restarted.is_set()
                busy[0] = False
                await restarted.wait()
            nursery.cancel_scope.cancel()
    assert [each["type"] for each in events] == ["upgrade_offered", "upgraded"]
    node = sources.resolve(config, environ={})
    assert node.config.artifact.sha256 == host.sha256
    kept = read_release(node.absolute(node.config.artifact.path or Path(), "artifact.path"))
    assert open_release(kept, OWNER.peer_id, host.sha256).number == 5


@pytest.mark.parametrize("what", ["nothing", "stranger", "other artifact", "stale", "garbage"])
async def test_what_the_owner_did_not_sign_is_not_even_fetched(tmp_path: Path, what: str) -> None:
    async with offering(tmp_path) as (host, config):
        assert await bb("upgrade", "-c", config, "--auto", "on") == 0
        signed = release_file(tmp_path / "server" / "a.onnx")
        match what:
            case "stranger":
                sign(host, tmp_path, SigningKey.from_seed(b"z" * 32))
            case "other artifact":
                signed.write_text(sign_release(OWNER, OLD_SHA256, number=9).text)
            case "garbage":
                signed.write_text("bbrelease1:AAAA" * 40)
            case "stale":
                sign(host, tmp_path)
                running = sign_release(OWNER, OLD_SHA256, number=5)
                release_file(config.parent / "artifact.onnx").write_text(running.text)
        untouched = everything(config.parent)
        events: list[Any] = []
        async with connected(host, config) as backend:
            upgrades = watching(host, config, backend, events)
            upgrades.heard(opened(host.identity.peer_id, host.sha256))
            (offer,) = upgrades.offers()
            assert not await upgrades._take(offer)
    assert [each["type"] for each in events] == ["upgrade_offered"]
    assert everything(config.parent) == untouched
    assert cached(tmp_path) == []


async def test_only_who_may_bring_a_program_offers_one(tmp_path: Path) -> None:
    events: list[Any] = []
    async with offering(tmp_path) as (host, config):
        upgrades = watching(host, config, host.backend, events)
        stranger, other = PeerId.from_seed("stranger"), SigningKey.from_seed(b"m" * 32).peer_id

        def member(*, may_grant: bool, who: PeerId = other) -> bytes:
            return grant(
                OWNER, member=who, not_before_s=0, expires_s=9, serial=2, may_grant=may_grant
            ).raw

        for peer, credentials in (
            (stranger, b""),
            (stranger, b"\xc0"),
            (stranger, member(may_grant=True)),  # somebody else's
            (other, member(may_grant=False)),
        ):
            upgrades.heard(opened(peer, "c" * 64, credentials))
            assert upgrades.as_json() == []
        assert events == []
        for peer, credentials in (
            (other, member(may_grant=True)),
            (OWNER.peer_id, b""),
            (host.identity.peer_id, b""),
        ):
            upgrades.heard(opened(peer, "c" * 64, credentials))
            assert [each["peer"] for each in upgrades.as_json()] == [str(peer)]
            upgrades.heard(ConnectionClosed(peer=peer, reason="", goodbye=True))
            assert upgrades.as_json() == []
        assert len(events) == 1  # said once for each program
        for same in (OLD_SHA256, ""):
            upgrades.heard(opened(host.identity.peer_id, same))
            assert upgrades.as_json() == []
        with pytest.raises(NotOffered):
            upgrades.fetch("d" * 64, None)


async def test_a_running_node_fetches_over_its_connection(tmp_path: Path) -> None:
    async with offering(tmp_path) as (host, config):
        sign(host, tmp_path)
        async with connected(host, config) as backend, trio.open_nursery() as nursery:
            upgrades = watching(host, config, backend, [], restart=None)
            nursery.start_soon(upgrades.run)
            upgrades.heard(opened(host.identity.peer_id, host.sha256))
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(PATIENCE_S):
                assert upgrades.fetch(host.sha256, 10)["done"] is False
                while not (told := upgrades.fetch(host.sha256, 10))["done"]:
                    await trio.testing.wait_all_tasks_blocked()
                assert "10 are taken at most" in told["failure"]
                assert cached(tmp_path) == []
                while not (told := upgrades.fetch(host.sha256, None))["done"]:
                    await trio.testing.wait_all_tasks_blocked()
            assert told["failure"] == ""
            assert open_release(release_from_text(told["release"]), OWNER.peer_id, host.sha256)
            assert cached(tmp_path) == [f"{host.sha256}.onnx"]
            with pytest.raises(RestartRefused, match="stop it, and start it again"):
                upgrades.restart()
            nursery.cancel_scope.cancel()


def test_the_owner_signs_with_numbers_that_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tmp_path / "a.onnx"
    artifact.write_bytes(OLD)
    assert main(["network", "new"]) == 0
    network = PeerId.parse(capsys.readouterr().out.strip())
    numbers = []
    for _ in range(2):
        assert main(["network", "sign", str(artifact), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        numbers.append(told["number"])
        release = open_release(read_release(artifact), network, OLD_SHA256)
        assert (release.number, release.text) == (told["number"], told["release"])
    assert numbers[0] < numbers[1]
    (tmp_path / "b.onnx").write_bytes(b"no model")
    assert main(["network", "sign", str(tmp_path / "b.onnx")]) == exits.REFUSED


def test_a_release_is_of_one_network_and_one_artifact() -> None:
    release = sign_release(OWNER, OLD_SHA256, number=1)
    other = SigningKey.from_seed(b"z" * 32)
    with pytest.raises(ReleaseRefused, match="ours is"):
        open_release(release.raw, other.peer_id, OLD_SHA256)
    with pytest.raises(ReleaseRefused, match="and not of"):
        open_release(release.raw, OWNER.peer_id, "b" * 64)
    forged = sign_release(other, OLD_SHA256, number=1).raw
    body = forged.replace(other.peer_id.to_bytes(), OWNER.peer_id.to_bytes())
    with pytest.raises(ReleaseRefused, match="signature"):
        open_release(body, OWNER.peer_id, OLD_SHA256)
    for cut in range(len(release.raw)):
        with pytest.raises(ReleaseRefused):
            open_release(release.raw[:cut], OWNER.peer_id, OLD_SHA256)


def test_it_says_which_sizes_are_others(tmp_path: Path) -> None:
    """A model with another layer: its peers of before do no work with it."""
    small, large = (
        serialize(compiled(FederatedTraining(model=(4, width, 3), evaluate="none")))
        for width in (5, 6)
    )
    (tmp_path / "artifact.onnx").write_bytes(small)
    new = tmp_path / "new.onnx"
    new.write_bytes(large)
    file = tmp_path / "node.toml"
    file.write_text(
        '[node]\nstate_dir = "state"\n[artifact]\npath = "artifact.onnx"\ntargets = ["client"]\n'
    )
    resolved = sources.resolve(file, environ={})
    shown = make_candidate(resolved, parse_artifact(large, "new"), new).as_json()
    assert shown["resized"] == {
        "slot local": "43 parameters before, 51 now",
        "request port round of class client": "[43] before, [51] now",
        "response port round of class server": "[43], ? before, [51], ? now",
    }
    assert not make_candidate(resolved, parse_artifact(small, "new"), new).resized
