"""What a version of a program takes over from the one before, and what is told of others."""

from __future__ import annotations

import errno
import logging
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, ConstantView
from bbnode.daemon.control import views
from bbnode.daemon.network.versions import VersionWatch, other_versions
from bbnode.daemon.paths import StorageError
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state.checkpoint import Checkpoint, restore_or_install
from bbnode.dsl import Graph, IndexSlot, Module, PeerSelectorSlot, types
from bbnode.engine import Node, install, steps
from bbnode.engine.errors import SnapshotRefused, StateRefused
from bbnode.ir.crossing import encode_crossings
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId
from bbnode.programs import FederatedTraining
from bbnode.transport.base import ConnectionOpened, Direction, Hello, PeerInfo
from tests.daemon.live import CLIENT, SERVER, running
from tests.programs.files import compiled
from tests.sim.programs import SlowNotes
from tests.sim.versions import version, version_crossings

OLD, NEW = "a" * 64, "b" * 64
ME, OTHER = PeerId.from_seed("me"), PeerId.from_seed("other")


class Notes(Module):
    """Notes are kept by the keeper in the index "notes"; `edited` adds a second index."""

    home = "keeper"

    def __init__(self, *, edited: bool = False) -> None:
        self.edited = edited

    def body(self, g: Graph) -> None:
        note = g.input("note", types.TENSOR_FLOAT)
        view = PeerSelectorSlot("view", peer_class="keeper").current_view(g, after=note)
        g.output("kept", IndexSlot("notes").add(g, note))
        g.output("view", view)
        if self.edited:
            g.output("more", IndexSlot("more").add(g, note))


@cache
def notes(*, edited: bool) -> ModelProto:
    compiler = Compiler().bind_index("notes", SlowNotes)
    if edited:
        compiler = compiler.bind_index("more", SlowNotes)
    view = ConstantView if edited else ConnectedView
    return compiler.bind_peer_selector("view", view).compile(Notes(edited=edited).build())


def node_of(*, edited: bool, peer: PeerId = ME) -> Node:
    return install(notes(edited=edited), ["keeper"], peer_id=peer)


def written(state_dir: Path, sha256: str = OLD, peer: PeerId = ME) -> None:
    """A checkpoint of the former version, in which two notes are kept."""
    node = node_of(edited=False, peer=peer)
    node.component("notes").seen = [1.0, 2.0]
    saved = node.snapshot(0)
    checkpoint.write(
        state_dir,
        Checkpoint(artifact_sha256=sha256, node=saved, rounds_done={"keeper": 7}),
    )


def test_states_go_where_slot_and_type_agree_and_the_file_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    caplog.set_level(logging.INFO)
    node, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert node.component("notes").seen == [1.0, 2.0]
    assert node.component("more").seen == []
    assert saved is not None
    assert saved.rounds_done == {"keeper": 7}
    assert (saved.rounds_running, saved.unsent) == ({}, ())
    said: Any = caplog.records[-1]
    assert said.message == "upgraded from another version of the program"
    assert said.taken == ["notes"]
    assert said.left == {
        "view": "it is of a bbnode.ConnectedView, and the slot holds a bbnode.ConstantView"
    }
    kept = tmp_path / f"checkpoint.{OLD[:8]}"
    before = kept.read_bytes()
    for number in range(3):  # the new version's own take the places of the old one's
        fresh = Checkpoint(artifact_sha256=NEW, node=b"%d" % number, rounds_done={})
        checkpoint.write(tmp_path, fresh)
    assert kept.read_bytes() == before
    assert list(checkpoint.usable(tmp_path, OLD)) == []


def test_one_of_its_own_goes_before_one_of_another_version(tmp_path: Path) -> None:
    node = node_of(edited=True)
    node.component("more").seen = [3.0]
    mine = Checkpoint(artifact_sha256=NEW, node=node.snapshot(0), rounds_done={"keeper": 9})
    checkpoint.write(tmp_path, mine)
    written(tmp_path)
    node, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert saved == mine
    assert node.component("more").seen == [3.0]


def test_a_state_that_a_component_refuses_is_left_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)

    def refuse(self: object, data: bytes) -> None:
        raise ValueError("not of my size")

    monkeypatch.setattr(SlowNotes, "restore", refuse)
    node, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert node.component("notes").seen == []
    assert saved is not None
    said: Any = caplog.records[-1]
    assert said.levelname == "WARNING"
    assert "not of my size" in said.left["notes"]
    assert (tmp_path / f"checkpoint.{OLD[:8]}").exists()


def test_another_peers_state_is_not_taken_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, peer=OTHER)
    node, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert saved is None
    assert node.component("notes").seen == []
    assert "another peer" in caplog.records[-1].reason  # type: ignore[attr-defined]
    assert (tmp_path / f"checkpoint.{OLD[:8]}").exists()


def kept_files(state_dir: Path) -> set[str]:
    found = {path.name for path in state_dir.glob("checkpoint.*")}
    return {name.removeprefix("checkpoint.") for name in found} - {"previous"}


def test_nothing_is_lost_over_many_upgrades(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {}
    for digit in "acdef01234":
        written(tmp_path, sha256=digit * 64)
        content[digit * 8] = checkpoint.checkpoint_file(tmp_path).read_bytes()
        for _ in range(2):  # as after a crash right after the start
            restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
        assert kept_files(tmp_path) == set(content)
        assert ("many checkpoints" in caplog.text) is (len(content) > checkpoint.MANY_KEPT)
    for name, data in content.items():
        assert (tmp_path / f"checkpoint.{name}").read_bytes() == data


def test_two_versions_whose_digests_begin_alike_are_both_kept(tmp_path: Path) -> None:
    alike = ["a" * 8 + digit * 56 for digit in "123"]
    nodes = {}
    for number, sha256 in enumerate(alike):
        node = node_of(edited=False)
        node.component("notes").seen = [float(number)]
        nodes[sha256] = Checkpoint(artifact_sha256=sha256, node=node.snapshot(0), rounds_done={})
        checkpoint.write(tmp_path, nodes[sha256])
        restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert kept_files(tmp_path) == {"a" * 8, "a" * 8 + ".2", "a" * 8 + ".3"}
    for number, sha256 in enumerate(alike):
        for each in ("checkpoint", "checkpoint.previous"):
            (tmp_path / each).unlink(missing_ok=True)
        checkpoint.write(tmp_path, Checkpoint(artifact_sha256=NEW, node=b"", rounds_done={}))
        node, saved = restore_or_install(tmp_path, sha256, lambda: node_of(edited=False))
        assert saved == nodes[sha256]
        assert node.component("notes").seen == [float(number)]


def test_a_downgrade_finds_its_own_state_and_keeps_the_newer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    written(tmp_path)
    mine = next(checkpoint.usable(tmp_path, OLD))
    node, _ = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    node.component("more").seen = [7.0]
    for number in range(3):
        newer = Checkpoint(artifact_sha256=NEW, node=node.snapshot(number), rounds_done={"k": 9})
        checkpoint.write(tmp_path, newer)
    back, saved = restore_or_install(tmp_path, OLD, lambda: node_of(edited=False))
    assert saved == mine
    assert back.component("notes").seen == [1.0, 2.0]
    assert caplog.records[-1].message == "restored"
    # It goes on from there: the kept one is its newest again, and the other version's is kept.
    assert kept_files(tmp_path) == {NEW[:8]}
    assert next(checkpoint.usable(tmp_path, OLD)) == mine
    checkpoint.write(tmp_path, Checkpoint(artifact_sha256=OLD, node=b"x", rounds_done={}))
    checkpoint.write(tmp_path, mine)
    again, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert saved == newer
    assert again.component("more").seen == [7.0]
    assert kept_files(tmp_path) == {OLD[:8]}


def test_right_after_a_first_checkpoint_a_downgrade_keeps_it(tmp_path: Path) -> None:
    written(tmp_path)
    node, _ = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    newer = Checkpoint(artifact_sha256=NEW, node=node.snapshot(0), rounds_done={"k": 9})
    checkpoint.write(tmp_path, newer)  # the old one's is the one before now
    _, saved = restore_or_install(tmp_path, OLD, lambda: node_of(edited=False))
    assert saved is not None
    assert saved.rounds_done == {"keeper": 7}
    assert kept_files(tmp_path) == {OLD[:8], NEW[:8]}


def test_without_room_to_keep_it_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    before = checkpoint.checkpoint_file(tmp_path).read_bytes()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "hardlink_to", read_only)
    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    with pytest.raises(StorageError, match="Read-only file system"):
        restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert checkpoint.checkpoint_file(tmp_path).read_bytes() == before


def test_a_file_system_without_links_keeps_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)

    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", none)
    for _ in range(2):
        restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    kept = tmp_path / f"checkpoint.{OLD[:8]}"
    assert kept.read_bytes() == checkpoint.checkpoint_file(tmp_path).read_bytes()
    assert kept_files(tmp_path) == {OLD[:8]}


def test_one_that_another_bbnode_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", checkpoint.FORMAT_VERSION + 1)
    written(tmp_path, sha256=NEW)
    monkeypatch.undo()
    before = checkpoint.checkpoint_file(tmp_path).read_bytes()
    _, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert saved is None
    for number in range(2):
        fresh = Checkpoint(artifact_sha256=NEW, node=b"%d" % number, rounds_done={})
        checkpoint.write(tmp_path, fresh)
    (name,) = kept_files(tmp_path)
    assert (tmp_path / f"checkpoint.{name}").read_bytes() == before


def test_after_other_targets_of_the_same_artifact_states_are_carried_over(tmp_path: Path) -> None:
    """A snapshot is of all of a node's targets; the states of components are not."""
    written(tmp_path, sha256=NEW)
    node, saved = restore_or_install(tmp_path, NEW, lambda: node_of(edited=True))
    assert node.component("notes").seen == [1.0, 2.0]
    assert saved is not None
    assert saved.upgrade is not None
    assert saved.upgrade.kept == tmp_path / f"checkpoint.{NEW[:8]}"


def test_a_node_that_has_polled_adopts_nothing_and_a_torn_snapshot_is_refused() -> None:
    data = node_of(edited=False).snapshot(0)
    node = node_of(edited=True)
    with pytest.raises(SnapshotRefused, match="checksum"):
        node.adopt(data[:-1])
    assert set(node.adopt(data).left) == {"view"}
    node.poll(0)
    with pytest.raises(SnapshotRefused, match="has polled"):
        node.adopt(data)
    assert issubclass(StateRefused, DeploymentError)


# --- other versions -----------------------------------------------------------------------------


def hello_of(*edits: str, sha256: str = NEW, tells: bool = True) -> Hello:
    crossings = encode_crossings(version_crossings("client", *edits)) if tells else b""
    return Hello(artifact_sha256=sha256, classes=("client",), crossings=crossings)


def info(hello: Hello) -> PeerInfo:
    address = Multiaddr("/memory/2")
    return PeerInfo(peer=OTHER, direction=Direction.INBOUND, address=address, hello=hello)


@pytest.fixture(scope="module")
def server() -> Node:
    return install(version(), ["server"], peer_id=ME)


@pytest.mark.parametrize(
    ("hello", "found"),
    [
        (hello_of(sha256=OLD), []),
        (Hello(), []),
        (hello_of("client_body"), [(True, 0)]),
        (hello_of("renamed_port"), [(True, 1)]),
        (hello_of(tells=False), [(False, 0)]),
    ],
)
def test_only_peers_of_another_version_are_listed(
    server: Node, hello: Hello, found: list[tuple[bool, int]]
) -> None:
    others = other_versions(server, OLD, [info(hello)])
    assert [(each.tells, len(each.differs)) for each in others] == found
    assert all(each.version == NEW[:8] for each in others)


def test_sizes_that_differ_are_named_when_two_versions_meet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = install(version("sized"), ["server"], peer_id=ME)
    events: list[Any] = []
    opened = ConnectionOpened(
        peer=OTHER, address=Multiaddr("/memory/2"), direction=Direction.INBOUND,
        hello=hello_of("resized"),
    )  # fmt: skip
    VersionWatch(node, OLD, events.append).heard(opened)
    (other,) = other_versions(node, OLD, [info(hello_of("resized"))])
    assert events[0]["differs"] == list(other.differs)
    assert any("it sends Tensor.FLOAT of [5], we take Tensor.FLOAT of [4]" in each
               for each in other.differs)  # fmt: skip
    assert "a version that disagrees" in caplog.text


def test_a_disagreement_is_logged_and_published_once(
    server: Node, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    watch = VersionWatch(server, OLD, events.append)

    def comes(hello: Hello) -> None:
        watch.heard(
            ConnectionOpened(
                peer=OTHER, address=Multiaddr("/memory/2"), direction=Direction.INBOUND, hello=hello
            )
        )

    comes(hello_of("client_body"))
    assert events == []
    comes(hello_of("renamed_port"))
    comes(hello_of("renamed_port"))
    (event,) = events
    assert (event["type"], event["peer"], event["version"]) == (
        "peer_version_differs", str(OTHER), NEW[:8],
    )  # fmt: skip
    assert event["differs"] == [
        "port 'tell' of class 'client': we send Tensor.FLOAT, it takes nothing there"
    ]
    assert caplog.text.count("a version that disagrees") == 1
    comes(hello_of("renamed_port", sha256="c" * 64))  # upgraded again, and no better
    assert len(events) == 2


@cache
def trained(width: int) -> ModelProto:
    return compiled(FederatedTraining(model=(4, width, 3), evaluate="none"))


def install_trained(width: int, role: str, peer: PeerId) -> Node:
    config = {"data": {"path": "none.npz"}} if role == "client" else {}
    return install(trained(width), [role], peer_id=peer, config=config)


@pytest.mark.parametrize("sha256", [OLD, NEW])
def test_a_model_of_another_size_is_listed_whichever_version_it_is_of(
    sha256: str, caplog: pytest.LogCaptureFixture
) -> None:
    node, other = install_trained(5, "server", ME), install_trained(6, "client", OTHER)
    hello = Hello(
        artifact_sha256=sha256, classes=("client",), crossings=encode_crossings(other.crossings)
    )
    (found,) = other_versions(node, OLD, [info(hello)])
    assert (found.version, found.differs) == (
        sha256[:8], ("its model has 51 parameters, ours has 43",),
    )  # fmt: skip
    events: list[Any] = []
    opened = ConnectionOpened(
        peer=OTHER, address=Multiaddr("/memory/2"), direction=Direction.INBOUND, hello=hello
    )
    VersionWatch(node, OLD, events.append).heard(opened)
    # Of one version the engine says it, when it leaves the peer out.
    assert len(events) == ("a version that disagrees" in caplog.text) == (sha256 == NEW)


async def test_a_model_of_another_size_is_shown(tmp_path: Path) -> None:
    node, other = install_trained(5, "server", SERVER), install_trained(6, "client", CLIENT)
    why = "its model has 51 parameters, ours has 43; let both run the same program and model"
    async with running(tmp_path, node=node, others=other) as server:
        host = server.plane.host
        (peer,) = views.peers(host)
        assert peer["not_ready"] == why
        (shown,) = views.versions(host)
        assert shown["differs"] == ["its model has 51 parameters, ours has 43"]
        checks = {each["check"]: (each["ok"], each["detail"]) for each in views.health(host)}
        assert checks["peers"] == (False, f"not ready: {CLIENT.short}: {why}")
        ok, detail = checks["versions"]
        assert not ok
        assert detail.endswith(f"; that disagree: {CLIENT.short}: {shown['differs'][0]}")
        said = [s for s in server.seen if isinstance(s, steps.Telemetry)]
        assert [(s.name, s.attributes["reason"]) for s in said] == [("peer.not_ready", why)]
        assert node.connected_peers("client") == ()
    assert [each.reason for each in other.peers_not_ready().values()] == [
        "its model has 43 parameters, ours has 51; let both run the same program and model"
    ]
