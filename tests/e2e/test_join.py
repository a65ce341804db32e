"""Laptops that join a private network: real processes, the real command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.testbed.demo import PROGRAM
from bbnode.daemon.testbed.nodes import choose_port
from tests.e2e.cluster import Events, wait_for_ready
from tests.patience import PATIENCE_S, patiently

SERVER_TOML = """
[slots.data]
dataset = "digits"
split = "test"
seed = 0

[[invoke]]
target = "server"
inputs = { tick = "trigger" }
times = 0
every_s = 0.2
wait_for = { class = "client", peers = 2, min_peers = 1, timeout_s = 20.0 }
"""


@dataclass
class Machine:
    """One machine: a home of its own for everything that bbnode keeps."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if "NOTIFY" not in name}
        for name in ("CONFIG", "STATE", "DATA", "CACHE"):
            found[f"XDG_{name}_HOME"] = str(self.home / name.lower())
        return found

    def bbnode(self, *words: object) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "bbnode", *patiently(*words)],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=self.environment,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout, done.stderr

    def line(self, *words: object) -> str:
        code, out, err = self.bbnode(*words)
        assert code == 0, err
        return out.strip()

    @property
    def state_dir(self) -> Path:
        """Of the one node that was joined here."""
        (found,) = (self.home / "state" / "bbnode").iterdir()
        return found / "state"

    @property
    def peer(self) -> str:
        return self.line("id", "--state-dir", self.state_dir)


class Server:
    """The inviting machine: owner of the network, and the one node that can be dialled."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(folder / "server")
        self.node = folder / "server" / "node"
        self._toml = self.node / "node.toml"
        args = {"clients": 2, "quorum": 1, "deadline_s": 3.0, "seed": 0}
        artifact = folder / "a.onnx"
        artifact.write_bytes(serialize(compile_module(PROGRAM, args)))
        listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
        bb = self.machine.line
        self.peer = bb(
            *("init", self.node, "--artifact", artifact, "--target", "server", "--listen", listen)
        )
        self.address = f"{listen}/p2p/{self.peer}"
        network = bb("network", "new")
        statement = bb("network", "grant", self.peer, "--may-invite")
        bb("network", "import", statement, "-c", self._toml)
        with self._toml.open("a") as file:
            file.write(f'{SERVER_TOML}\n[access]\nnetwork = "{network}"\n')

    def bb(self, command: str, *words: object) -> str:
        """A command about this node."""
        return self.machine.line(*command.split(), *words, "-c", self._toml)

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        with wait_for_ready(folder, 1) as environment, (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bbnode", "run", "-c", str(self._toml)],
                env={**self.machine.environment, "NOTIFY_SOCKET": environment["NOTIFY_SOCKET"]},
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def events(self) -> Iterator[Events]:
        """What the node says from now on."""
        socket = paths.control_socket(self.node / "state")
        with ControlClient(socket, timeout_s=PATIENCE_S) as client:
            yield Events(client)


@contextmanager
def joined(machine: Machine, ticket: str, shard: int) -> Iterator[subprocess.Popen[str]]:
    """`bbnode join` in the foreground."""
    settings = ("slots.data.shards=2", f"slots.data.shard={shard}")
    process = subprocess.Popen(
        [sys.executable, "-m", "bbnode", "join", ticket, "--yes"]
        + [word for setting in settings for word in ("--set", setting)],
        env=machine.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str], text: str) -> None:
    """Read what a join says until it has said this."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"it never said {text!r}: {''.join(lines)}")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_laptops_join_a_private_network_and_leave_it(server: Server, tmp_path: Path) -> None:
    one, two, three, four = (Machine(tmp_path / name) for name in ("one", "two", "three", "four"))
    with server.running(tmp_path):
        ticket = server.bb("invite --target client --uses 2")
        with joined(one, ticket, 0) as first, joined(two, ticket, 1) as second:
            with server.events() as events:
                both = events.until(
                    lambda e: e["type"] == "round_finished" and e["ok"] and len(e["responded"]) == 2
                )
            peers = {one.peer, two.peer}
            assert set(both["responded"]) == peers
            assert server.peer not in peers

            # The ticket has given what it had; a stranger without one is hung up on.
            code, out, err = three.bbnode("join", ticket, "--yes")
            assert (code, out) == (exits.FAILURE, "")
            assert "the ticket may be used up" in err
            code, _, err = four.bbnode("join", server.address, "--yes", "--target", "client")
            assert code == exits.FAILURE
            assert "ask it for a ticket" in err
            why = server.bb("peers --why", four.peer)
            assert "not_a_member: no_statement" in " ".join(why.split())

            # Revoked: cut off at once, and rounds go on without it.
            listed = server.machine.line("network", "revoke", one.peer)
            with server.events() as events:
                server.bb("network import", listed)
                gone = events.until(lambda e: e["type"] == "peer_down" and e["peer"] == one.peer)
                assert "not_a_member" in gone["reason"]
                events.until(
                    lambda e: (
                        e["type"] == "round_finished" and e["ok"] and e["responded"] == [two.peer]
                    )
                )
                said(first, "lost ")

                # Ctrl-C: a farewell, which the server hears.
                said(second, "executions")
                second.send_signal(signal.SIGINT)
                left = events.until(lambda e: e["type"] == "peer_down" and e["peer"] == two.peer)
                assert "said goodbye" in left["reason"]
            assert second.wait(PATIENCE_S) == 0
            first.send_signal(signal.SIGINT)
            assert first.wait(PATIENCE_S) == 0

        # What was joined is a node like any other: it goes on, and fetches nothing.
        (config,) = (two.home / "state" / "bbnode").glob("*/node.toml")
        for cached in (two.home / "cache" / "bbnode" / "artifacts").iterdir():
            cached.unlink()
        again = subprocess.Popen(
            [sys.executable, "-m", "bbnode", "run", "-c", str(config)],
            env=two.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with server.events() as events:
                events.until(lambda e: e["type"] == "round_finished" and two.peer in e["responded"])
        finally:
            again.kill()
            again.wait()
