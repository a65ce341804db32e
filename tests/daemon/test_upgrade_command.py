"""`bbnode upgrade`: what is fetched from whom, shown, asked, switched, and gone back from."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trio
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
from bbnode.daemon.artifacts.artifact import load_artifact, parse_artifact, serialize
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control.host import NotOffered, RestartRefused
from bbnode.daemon.join.folder import folder
from bbnode.daemon.join.invitation import read_source
from bbnode.daemon.join.prepare import JoinOptions, prepare
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.upgrade import offers as offers_file
from bbnode.daemon.upgrade.offers import Node, Upgrades
from bbnode.daemon.upgrade.releases import read_release, release_file
from bbnode.dsl import Graph, Module, PeerSelectorSlot, types
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionClosed, ConnectionOpened, Direction, Hello
from bbnode.transport.identity import load_identity
from tests.daemon.inviting import OWNER, Inviter, inviting
from tests.daemon.live import in_thread
from tests.patience import PATIENCE_S


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
    """All files of a node but those that each start or try touches."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix not in (".lock",) and path.name != "lock"
    }


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
    first, now = (tomllib.loads(text) for text in (untouched["node.toml"].decode(), config.read_text()))
    assert {k: v for k, v in now.items() if k not in ("artifact", "upgrade")} == {
        k: v for k, v in first.items() if k != "artifact"
    }

    assert await bb("upgrade", "-c", config, "--back") == 0
    assert assembly.find_artifact(sources.resolve(config, environ={})).sha256 == OLD_SHA256
    capsys.readouterr()
    assert await bb("upgrade", "-c", config, "--back", "--json") == 0
    assert json.loads(capsys.readouterr().out)["artifact_sha256"] == host.sha256
    assert assembly.find_artifact(sources.resolve(config, environ={})).sha256 == host.sha256
