"""The demo's daemons: their folders, configurations and processes.

Rule: each daemon is an ordinary `bbnode run` on an ordinary node.toml that a user can start
by hand; daemons share nothing on disk but the artifact.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bbnode.daemon import paths
from bbnode.daemon.config import NodeConfig, sources
from bbnode.ir.errors import EnvironmentFault
from bbnode.transport.identity import Identity, create_identity

# Marks a folder that an earlier demo made, and that this one may clear.
MARKER = ".bbnode-demo"
HOST = "127.0.0.1"


class DemoFolderRefused(EnvironmentFault):
    """The output folder holds something that no demo made."""


class PortRefused(EnvironmentFault):
    """The TCP port for the server can't be had."""


@dataclass(slots=True, kw_only=True)
class DemoNode:
    """One daemon of the demo."""

    name: str
    folder: Path
    identity: Identity
    config: Path
    process: subprocess.Popen[bytes] | None = None
    exit_reported: bool = False

    @property
    def state_dir(self) -> Path:
        """The folder of the daemon's key, lock and socket."""
        return self.folder / "state"

    @property
    def log(self) -> Path:
        """The file of the daemon's log."""
        return self.folder / "daemon.log"

    @property
    def peer(self) -> str:
        """Its PeerId as text."""
        return str(self.identity.peer_id)

    @property
    def start_command(self) -> str:
        """The command that starts it again."""
        return f"bbnode run --config {self.config}"

    def start(self, *, notify_socket: Path | None = None) -> None:
        """Start the daemon's process, its output going to its log.

        It says READY=1 on the datagram socket `notify_socket`, if one is given.
        """
        environment = dict(os.environ)
        environment.pop("NOTIFY_SOCKET", None)
        if notify_socket is not None:
            environment["NOTIFY_SOCKET"] = os.fspath(notify_socket)
        with self.log.open("ab") as log:
            self.process = _spawn(self.config, log, environment)


def _spawn(config: Path, log: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bbnode", "run", "--config", os.fspath(config)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        # Ctrl-C reaches the demo alone; it stops its daemons in order.
        start_new_session=True,
    )


def make_folder(out: Path) -> Path:
    """Make or clear the demo's folder; returns the folder of the daemons."""
    nodes = out / "nodes"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if nodes.exists():
            if not (nodes / MARKER).exists():
                raise DemoFolderRefused(
                    f"{nodes} exists and no demo made it; choose another folder with --out"
                )
            shutil.rmtree(nodes)
        nodes.mkdir()
        (nodes / MARKER).touch()
    except OSError as error:
        raise DemoFolderRefused(f"{out}: {error.strerror}; choose another with --out") from error
    return nodes


def choose_port(port: int) -> int:
    """Return `port` if it is free, or a free one for 0. Raises PortRefused."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise PortRefused(
                f"port {port} on {HOST}: {error.strerror}; choose another with --port, or leave "
                "it out to take a free one"
            ) from error
        return int(probe.getsockname()[1])


def make_nodes(
    nodes: Path,
    *,
    artifact: Path,
    artifact_sha256: str,
    clients: int,
    port: int,
    rounds: int,
    quorum: int,
    wait_s: float,
    data: dict[str, Any],
) -> tuple[DemoNode, list[DemoNode]]:
    """Write identities and configurations; returns the server and the clients.

    Clients are numbered in PeerId order, so shard i belongs to the i-th PeerId: reductions
    run in PeerId order, and so the same seed gives the same bits whatever the identities are.
    """
    made = []
    for name in ["server", *(f"client-{i}" for i in range(clients))]:
        folder = nodes / name
        paths.make_state_dir(folder / "state")
        made.append((folder, create_identity(paths.identity_file(folder / "state"))))
    (server_folder, server_identity), client_folders = made[0], made[1:]
    by_peer = sorted((identity for _, identity in client_folders), key=lambda i: i.peer_id)
    server_address = f"/ip4/{HOST}/tcp/{port}/p2p/{server_identity.peer_id}"
    source = {"path": str(artifact), "sha256": artifact_sha256}
    server = make_one(
        server_folder,
        server_identity,
        {
            "artifact": {**source, "targets": ["server"]},
            "network": {"listen": [f"/ip4/{HOST}/tcp/{port}"]},
            "slots": {"data": {**data, "split": "test"}},
            "invoke": [
                {
                    "target": "server",
                    "inputs": {"tick": "trigger"},
                    "times": rounds,
                    "wait_for": {
                        "class": "client",
                        "peers": clients,
                        "min_peers": quorum,
                        "timeout_s": wait_s,
                        "on_timeout": "fail",
                    },
                }
            ],
        },
    )
    return server, [
        make_one(
            folder,
            identity,
            {
                "artifact": {**source, "targets": ["client"]},
                "network": {"bootstrap": [server_address]},
                "slots": {
                    "data": {
                        **data,
                        "split": "train",
                        "shards": clients,
                        "shard": by_peer.index(identity),
                    }
                },
            },
        )
        for folder, identity in client_folders
    ]


def make_one(folder: Path, identity: Identity, settings: dict[str, Any]) -> DemoNode:
    """Write the configuration of one node, whose identity is in its folder already."""
    name = folder.name
    config = NodeConfig.model_validate(
        {"node": {"name": name, "state_dir": str(folder / "state")}, **settings}
    )
    file = folder / "node.toml"
    sources.write(file, config, comment=f"{name} of `bbnode demo`")
    return DemoNode(name=name, folder=folder, identity=identity, config=file)
