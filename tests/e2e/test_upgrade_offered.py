"""A laptop that joined, and what its server runs next: real processes, the real command line."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.daemon.artifacts.artifact import parse_artifact, serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.testbed.demo import PROGRAM
from tests.e2e.test_join import Machine, Server, joined


def released(server: Server, folder: Path, epochs: int, *, signed: bool) -> str:
    """Give the server, which does not run, another version; return its digest."""
    args = {"clients": 2, "quorum": 1, "deadline_s": 3.0, "seed": 0, "epochs": epochs}
    data = serialize(compile_module(PROGRAM, args))
    sha256 = parse_artifact(data, "artifact").sha256
    file = folder / f"epochs-{epochs}.onnx"
    file.write_bytes(data)
    if signed:
        server.machine.line("network", "sign", file)
    config = server.node / "node.toml"
    lines = [
        f"path = {json.dumps(str(file))}" if line.startswith("path = ") else
        f'sha256 = "{sha256}"' if line.startswith("sha256 = ") else line
        for line in config.read_text().splitlines()
    ]  # fmt: skip
    config.write_text("\n".join(lines) + "\n")
    return sha256


def until_it_answers_as(server: Server, peer: str, sha256: str) -> None:
    """Wait for a round in which a peer that runs this version has answered."""
    for _ in range(200):
        with server.events() as events:
            events.until(lambda e: e["type"] == "round_finished" and peer in e["responded"])
        peers = json.loads(server.bb("peers --json"))["peers"]
        if any(each["peer"] == peer and each["version"] == sha256[:8] for each in peers):
            return
    raise AssertionError(f"{peer} never ran {sha256[:8]}")


@pytest.mark.slow
def test_a_laptop_takes_what_is_offered_and_then_what_is_signed(tmp_path: Path) -> None:
    server, laptop = Server(tmp_path), Machine(tmp_path / "laptop")
    runs = [tmp_path / name for name in ("first", "second", "third")]
    for folder in runs:
        folder.mkdir()
    with ExitStack() as until_the_end:
        with server.running(runs[0]):
            ticket = server.bb("invite --target client --uses 1")
            process = until_the_end.enter_context(joined(laptop, ticket, 0))
            with server.events() as events:
                events.until(lambda e: e["type"] == "round_finished" and e["ok"])
        peer = laptop.peer
        (config,) = (laptop.home / "state" / "bbnode").glob("*/node.toml")
        second = released(server, tmp_path, 2, signed=False)
        with server.running(runs[1]):
            with server.events() as events:
                # It answers the rounds of another version; so it has heard of that one.
                events.until(lambda e: e["type"] == "round_finished" and peer in e["responded"])
            said = " ".join(laptop.line("status", "-c", config).split())
            assert f"an upgrade is offered: program {second[:8]}" in said
            code, _, err = laptop.bbnode("upgrade", "-c", config)
            assert (code, "run again with --yes" in err) == (exits.USAGE, True)
            told = json.loads(laptop.line("upgrade", "-c", config, "--yes", "--json"))
            assert (told["artifact_sha256"], told["restarting"]) == (second, True)
            until_it_answers_as(server, peer, second)
            assert process.poll() is None  # it is the same process
            laptop.line("upgrade", "-c", config, "--auto", "on")
        third = released(server, tmp_path, 3, signed=True)
        with server.running(runs[2]):
            until_it_answers_as(server, peer, third)
            status = json.loads(laptop.line("status", "-c", config, "--json"))
            assert status["artifact_sha256"] == third
            assert status["upgrade"]["version"] == second[:8]
            assert status["offers"] == []
        assert process.poll() is None
