"""The doctor: what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bbnode.daemon import paths
from bbnode.daemon.config.sources import ResolvedConfig, resolve
from bbnode.daemon.observing import doctor
from bbnode.daemon.observing.doctor import CheckResult
from bbnode.transport.identity import create_identity

PEER = "12D3KooWLkHMEPJ3cTgdLCx8X6wT38PaozEnDAmXZnTNyuSyCdJr"


@pytest.fixture
def node(tmp_path: Path):
    def make(**flags: object) -> ResolvedConfig:
        given = {
            "node.state_dir": str(tmp_path / "state"),
            "artifact.module": "bbnode.examples.federated_digits:FederatedRound",
            "artifact.targets": ["server"],
            **{key.replace("__", "."): value for key, value in flags.items()},
        }
        return resolve(None, environ={}, flags=given)

    return make


def _found(resolved: ResolvedConfig) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in doctor.examine(resolved)}


def test_a_healthy_node_passes_and_gets_no_identity(node, tmp_path: Path) -> None:
    found = _found(node())
    assert list(found) == list(doctor.CHECKS)
    for check in ("state directory", "daemon", "disk", "ports", "artifact", "components"):
        assert found[check].verdict is CheckResult.PASSED, found[check]
    assert found["identity"].verdict is CheckResult.WARNING
    assert found["bootstrap"].verdict is CheckResult.SKIPPED
    assert not paths.identity_file(tmp_path / "state").exists()


def test_an_identity_that_others_can_read_fails(node, tmp_path: Path) -> None:
    paths.make_state_dir(tmp_path / "state")
    key = paths.identity_file(tmp_path / "state")
    create_identity(key)
    assert _found(node())["identity"].verdict is CheckResult.PASSED
    key.chmod(0o644)
    assert _found(node())["identity"].verdict is CheckResult.FAILED


def test_ports_that_are_taken_and_peers_that_are_silent(node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as closed:
        port = taken.getsockname()[1]
        closed.bind(("127.0.0.1", 0))
        silent = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{PEER}"
        there = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"
        found = _found(
            node(network__listen=[f"/ip4/127.0.0.1/tcp/{port}"], network__bootstrap=[silent])
        )
        assert found["ports"].verdict is CheckResult.FAILED
        assert str(port) in found["ports"].remedy
        assert found["bootstrap"].verdict is CheckResult.FAILED
        found = _found(node(network__bootstrap=[silent, there]))
        assert found["bootstrap"].verdict is CheckResult.WARNING
        assert silent in found["bootstrap"].detail
        for host in ("/ip4/127.0.0.1", "/dns4/localhost", "/dns/localhost"):
            found = _found(node(network__bootstrap=[f"{host}/tcp/{port}/p2p/{PEER}"]))
            assert found["bootstrap"].verdict is CheckResult.PASSED, host
        nowhere = f"/dns4/nowhere.invalid/tcp/{port}/p2p/{PEER}"
        found = _found(node(network__bootstrap=[nowhere]))
        assert found["bootstrap"].verdict is CheckResult.FAILED
        assert nowhere in found["bootstrap"].detail


def test_a_running_daemon_has_the_ports(node) -> None:
    resolved = node()
    with (
        paths.lock_state_dir(resolved.state_dir),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        taken = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        found = _found(node(network__listen=[taken]))
    assert "in use by process" in found["daemon"].detail
    assert found["ports"].verdict is CheckResult.PASSED


def test_a_missing_artifact_and_wrong_settings(node, tmp_path: Path) -> None:
    missing = resolve(
        None,
        environ={},
        flags={
            "node.state_dir": str(tmp_path / "state"),
            "artifact.path": str(tmp_path / "none.onnx"),
            "artifact.targets": ["server"],
        },
    )
    found = _found(missing)
    assert found["artifact"].verdict is CheckResult.FAILED
    assert found["components"].verdict is CheckResult.SKIPPED
    found = _found(node(artifact__targets=["nobody"]))
    assert found["components"].verdict is CheckResult.FAILED
    assert "nobody" in found["components"].detail


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"network__transport": "lean"}, 'network.transport = "libp2p"'),
        ({"topics__enabled": False}, "set it to true"),
        ({}, ""),
    ],
)
def test_a_program_that_uses_topics_where_none_are_carried(node, settings, remedy) -> None:
    resolved = node(
        artifact__module="bbnode.examples.bulletin:Bulletin",
        artifact__targets=["station"],
        **settings,
    )
    found = _found(resolved)["components"]
    assert found.verdict is (CheckResult.FAILED if remedy else CheckResult.PASSED)
    assert remedy in found.detail


def test_a_disk_that_is_nearly_full(node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 60)
    assert _found(node())["disk"].verdict is CheckResult.FAILED


@pytest.mark.parametrize(
    ("transport", "verdict"),
    [("libp2p", CheckResult.FAILED), ("lean", CheckResult.PASSED), ("memory", CheckResult.SKIPPED)],
)
def test_a_transport_whose_package_is_missing(
    node, monkeypatch: pytest.MonkeyPatch, transport: str, verdict: CheckResult
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    found = _found(node(network__transport=transport))["ports"]
    assert found.verdict is verdict
    if transport == "libp2p":
        assert "uv pip install" in found.remedy
        assert 'network.transport = "lean"' in found.remedy


@pytest.mark.parametrize(
    ("kernel", "verdict"),
    [
        ((True, 1000), CheckResult.PASSED),
        ((False, 1000), CheckResult.WARNING),
        ((True, 10**9), CheckResult.WARNING),
        (None, CheckResult.SKIPPED),
    ],
)
def test_the_clock(node, monkeypatch: pytest.MonkeyPatch, kernel, verdict: CheckResult) -> None:
    monkeypatch.setattr(doctor, "_kernel_clock", lambda: kernel)
    assert _found(node())["clock"].verdict is verdict


@pytest.mark.parametrize(
    ("outcomes", "verdict", "says"),
    [
        (["failed", "reached", "skipped"], CheckResult.PASSED, "/ip4/192.0.2.1/tcp/4001"),
        (["failed", "skipped"], CheckResult.FAILED, "connection refused"),
        (["skipped"], CheckResult.WARNING, "/ip4/198.51.100.7/tcp/50000"),
        ([], CheckResult.SKIPPED, "only dials"),
    ],
)
def test_what_a_peer_that_dialled_back_says(
    outcomes: list[str], verdict: CheckResult, says: str
) -> None:
    rows = [
        {"address": f"/ip4/192.0.2.{n}/tcp/4001", "outcome": each, "detail": "connection refused"}
        for n, each in enumerate(outcomes)
    ]
    found = doctor.judge_dial_back(
        {"peer": PEER, "seen_at": "/ip4/198.51.100.7/tcp/50000", "addresses": rows}
    )
    assert found.verdict is verdict
    assert says in found.detail
    assert bool(found.remedy) is (verdict in (CheckResult.FAILED, CheckResult.WARNING))


def test_nobody_dials_back_while_no_daemon_runs(node) -> None:
    found = _found(node(network__listen=["/ip4/127.0.0.1/tcp/0"]))
    assert found["dial-back"].verdict is CheckResult.SKIPPED


def test_data_that_are_missing_are_found_before_the_start(node, tmp_path: Path) -> None:
    """The server of the example evaluates; a client trains, so its data have to fit too."""
    good = {"slots.data.dataset": "digits"}
    found = _found(node(artifact__targets=["client"], **good))
    assert found["data"].verdict is CheckResult.PASSED, found["data"]
    bad = {"slots.data.dataset": "iris"}
    found = _found(node(artifact__targets=["client"], **bad))
    assert found["components"].verdict is CheckResult.PASSED
    assert found["data"].verdict is CheckResult.FAILED
    assert "takes examples of float32[64], the data have float32[4]" in found["data"].detail
