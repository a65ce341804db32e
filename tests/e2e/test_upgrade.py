"""Real daemons of several versions of one program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.testbed.demo import PROGRAM
from bbnode.daemon.testbed.nodes import ChildNode
from tests.e2e.cluster import Cluster, start, stop

DEADLINE_S = 8.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "net", clients=2, rounds=100_000, deadline_s=DEADLINE_S)
    try:
        yield made
    finally:
        for node in made.all:
            stop(node)


def upgrade(cluster: Cluster, node: ChildNode, program: str, **more: object) -> str:
    """Compile a version, and let a node run it from its next start; returns its short name."""
    args = {"clients": 2, "quorum": 1, "deadline_s": DEADLINE_S, "seed": 0, **more}
    data = serialize(compile_module(program, args))
    sha256 = parse_artifact(data, "artifact").sha256
    path = cluster.artifact.with_name(f"{sha256[:8]}.onnx")
    path.write_bytes(data)
    text = node.config.read_text()
    text = re.sub(r"(?m)^path = .*artifact.*$", f'path = "{path}"', text)
    node.config.write_text(re.sub(r"(?m)^sha256 = .*$", f'sha256 = "{sha256}"', text))
    return sha256[:8]


def test_peers_are_upgraded_one_after_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """Clients of both versions answer one server; then the server goes on where it was."""
    former = parse_artifact(cluster.artifact.read_bytes(), "artifact").sha256[:8]
    first = cluster.clients[0]
    fresh = upgrade(cluster, first, PROGRAM, epochs=2)  # another client body
    start(*cluster.all)
    with cluster.events(cluster.server) as events:
        events.until(lambda e: e["type"] == "round_finished" and len(e["responded"]) == 2)
    (other,) = cluster.ask(cluster.server, "status")["versions"]
    assert other == {"peer": first.peer, "version": fresh, "tells": True, "differs": []}
    stop(cluster.server)
    upgrade(cluster, cluster.server, PROGRAM, epochs=2)
    start(cluster.server)
    with cluster.events(cluster.server) as events:
        made = events.until(lambda e: e["type"] == "round_finished" and len(e["responded"]) == 2)
    assert made["round"] > 1  # they are counted on
    assert (cluster.server.state_dir / f"checkpoint.{former}").exists()
    told = cluster.ask(cluster.server, "status")["upgrade"]
    assert (told["version"], told["left"]) == (former, {})
    assert len(told["parameters"]["global"]["taken"]) == 4
    out = tmp_path / "model.onnx"  # while it trains
    assert main(["export", "-c", str(cluster.server.config), "-o", str(out)]) == exits.OK
    onnx.checker.check_model(out)
    names = [tensor.name for tensor in onnx.load(out).graph.initializer]
    assert names == told["parameters"]["global"]["taken"]


def test_a_peer_of_a_version_that_disagrees_is_named_and_the_others_work(
    cluster: Cluster,
) -> None:
    stranger, other = cluster.clients
    version = upgrade(cluster, stranger, "tests.e2e.versions:OtherRound")
    start(cluster.server, stranger)
    with cluster.events(cluster.server) as events:
        start(other)
        events.until(lambda e: e["type"] == "round_finished" and e["responded"] == [other.peer])
    status = cluster.ask(cluster.server, "status")
    (named,) = status["versions"]
    assert (named["peer"], named["version"]) == (stranger.peer, version)
    assert any("port 'round' of class 'client': we send" in line for line in named["differs"])
    (check,) = (each for each in status["health"] if each["check"] == "versions")
    assert not check["ok"]
