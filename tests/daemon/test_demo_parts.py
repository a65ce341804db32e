"""The demo's folders, ports, configurations and report, without starting anything."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bbnode.daemon.config import sources
from bbnode.daemon.demo import nodes as demo_nodes
from bbnode.daemon.demo import report as demo_report
from bbnode.daemon.demo.view import DemoView, summary_table


def record(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number,
        "ok": True,
        "seconds": 0.5,
        "bytes": 123_456,
        "responded": ["A", "B"],
        "missing": [],
        "missing_why": {},
        "failures": [],
        "outputs": {"accuracy": 0.9, "loss": 0.25, "model": {"sha256": f"{number:064}"}},
        **changes,
    }


def test_a_folder_of_an_earlier_demo_is_cleared(tmp_path: Path) -> None:
    nodes = demo_nodes.make_folder(tmp_path / "out")
    (nodes / "old").write_text("x")
    assert demo_nodes.make_folder(tmp_path / "out") == nodes
    assert not (nodes / "old").exists()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    with pytest.raises(demo_nodes.DemoFolderRefused, match="--out"):
        demo_nodes.make_folder(tmp_path)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((demo_nodes.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(demo_nodes.PortRefused, match=f"port {port}.*--port"):
            demo_nodes.choose_port(port)


def test_shards_follow_the_order_of_the_peer_ids(tmp_path: Path) -> None:
    server, clients = demo_nodes.make_nodes(
        demo_nodes.make_folder(tmp_path),
        artifact=tmp_path / "a.onnx",
        artifact_sha256="a" * 64,
        clients=5,
        port=4001,
        rounds=3,
        quorum=4,
        wait_s=20.0,
        data={"dataset": "digits", "partition": "iid", "seed": 7},
    )
    resolved = {node.name: sources.resolve(node.config, environ={}) for node in clients}
    by_shard = sorted(clients, key=lambda node: resolved[node.name].config.slots["data"]["shard"])
    peers = [node.identity.peer_id for node in by_shard]
    assert peers == sorted(peers)
    assert len({node.state_dir for node in [server, *clients]}) == 6
    config = sources.resolve(server.config, environ={}).config
    assert config.slots["data"]["split"] == "test"
    assert config.invoke[0].times == 3
    assert config.invoke[0].wait_for is not None
    assert config.invoke[0].wait_for.enough_peers == 4
    bootstrap = resolved["client-0"].config.network.bootstrap
    assert bootstrap == [f"/ip4/127.0.0.1/tcp/4001/p2p/{server.peer}"]


def test_the_report_tells_the_last_good_round(tmp_path: Path) -> None:
    failed = record(3, ok=False, outputs={}, failures=["op: QuorumNotReached: 1 of 2"])
    rows = [demo_report.round_row(r) for r in (record(1), record(2), failed)]
    path = demo_report.write_report(
        tmp_path,
        options={"clients": 2},
        rounds=rows,
        peers=[{"name": "server"}],
        artifact_sha256="b" * 64,
        seconds=1.5,
    )
    report = json.loads(path.read_text())
    assert report["model_sha256"] == f"{2:064}"
    assert report["final_accuracy"] == 0.9
    assert report["rounds"][2]["failures"] == ["op: QuorumNotReached: 1 of 2"]
    assert report["versions"]["bbnode"] != "not installed"
    assert demo_report.draw_accuracy(tmp_path, rows).stat().st_size > 1000


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view_shows_rounds_names_and_failures(terminal: bool) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    names = {"A": "client-0", "B": "client-1"}
    with DemoView(console, rounds=2, names=names) as view:
        view.note("client-1 ended (SIGKILL)")
        view.round_started(1)
        view.answered("A")
        view.round_finished(demo_report.round_row(record(1, responded=["A"], missing=["B"])))
        failed = record(2, ok=False, outputs={}, failures=["too few"])
        view.round_finished(demo_report.round_row(failed))
    text = out.getvalue()
    for word in ("SIGKILL", "90.00%", "123.5 KB", "too few"):
        assert word in text


def test_the_table_names_who_is_missing() -> None:
    out = StringIO()
    rows = [demo_report.round_row(record(1, responded=["A"], missing=["C", "B"]))]
    Console(file=out, width=120).print(summary_table(rows, {"B": "client-1", "C": "client-2"}))
    assert "client-1, client-2" in out.getvalue()
