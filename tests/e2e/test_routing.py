"""Finding and joining where nobody says where: real processes, the real command line."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.daemon.testbed.nodes import choose_port
from tests.e2e.cluster import wait_for_ready
from tests.e2e.test_join import Machine, Server

pytestmark = pytest.mark.slow


class Member:
    """A member that others can dial, with a place in the DHT; it knows one peer."""

    def __init__(self, folder: Path, name: str, ticket: str, shard: int) -> None:
        self.machine = Machine(folder / name)
        self.listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
        settings = {
            "network.listen": json.dumps([self.listen]),
            "routing.dht": "server",
            "slots.data.shards": "3",
            "slots.data.shard": str(shard),
        }
        words = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
        self.machine.line("join", ticket, "--yes", "--no-run", *words)
        (self.config,) = (self.machine.home / "state" / "bbnode").glob("*/node.toml")
        self.peer = self.machine.peer
        self.address = f"{self.listen}/p2p/{self.peer}"

    def knows_only(self, address: str) -> None:
        text, count = re.subn(
            r"bootstrap = \[[^]]*\]",
            f"bootstrap = {json.dumps([address])}",
            self.config.read_text(),
        )
        assert count == 1
        self.config.write_text(text)

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        with wait_for_ready(folder, 1) as environment:
            process = subprocess.Popen(
                [sys.executable, "-m", "bbnode", "run", "-c", str(self.config)],
                env={**self.machine.environment, "NOTIFY_SOCKET": environment["NOTIFY_SOCKET"]},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def until_routed(self, peers: int) -> None:
        """Wait until it knows so many, and has told one of its program."""
        while True:
            status = json.loads(self.machine.line("status", "--json", "-c", self.config))
            routing = status["routing"]
            if routing["peers"] >= peers and all(routing["providing"].values()):
                return


def test_a_laptop_joins_through_members_alone(tmp_path: Path) -> None:
    """The inviter is off; the laptop knows one member, who knows one, who knows one."""
    server = Server(tmp_path)
    with server.running(tmp_path):
        ticket = server.bb("invite --target client --uses 3")
        members = [Member(tmp_path, name, ticket, n) for n, name in enumerate(("a", "b", "c"))]
    for here, there in itertools.pairwise(members):
        here.knows_only(there.address)
    # Its own address: a node of its own network dials nobody else.
    members[-1].knows_only(members[-1].address)
    laptop = Machine(tmp_path / "laptop")
    with ExitStack() as running:
        for number, member in enumerate(reversed(members)):
            folder = tmp_path / f"run{number}"
            folder.mkdir()
            running.enter_context(member.running(folder))
        for member in members:
            member.until_routed(2)
        first, _, last = members
        found = first.machine.line("peers", "find", last.peer, "-c", first.config, "--json")
        assert "reached" in [row["outcome"] for row in json.loads(found)["addresses"]]

        told = json.loads(server.machine.line("network", "show", "--json"))
        network = told["networks"][0]["network"]
        digest = json.loads(first.machine.line("status", "--json", "-c", first.config))
        digest = digest["artifact_sha256"]
        words = ("join", digest, "--network", network, "--via", first.address, "--target", "client")
        data = ("--set", "slots.data.shards=3", "--set", "slots.data.shard=0")
        code, _, err = laptop.bbnode(*words, *data, "--yes", "--no-run")
        assert code == exits.USAGE
        granted = server.machine.line("network", "grant", laptop.peer)
        code, _, err = laptop.bbnode(
            *words, *data, "--yes", "--no-run", "--membership", granted.splitlines()[-1]
        )
        assert code == 0, err
        assert digest[:8] in err
