"""The daemons of a testbed: their folders, identities, configurations and processes.

Rule: each daemon is an ordinary `bbnode run` on an ordinary node.toml that a user can start
by hand; daemons share nothing on disk but the artifact.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bbnode.daemon import paths
from bbnode.daemon.config import sources
from bbnode.daemon.testbed.plan import ARTIFACT, LocalPlan, PlannedNode, node_config
from bbnode.ir import installation
from bbnode.ir.errors import EnvironmentFault
from bbnode.transport.identity import Identity, create_identity, load_or_create_identity

# Marks a folder of an earlier testbed, which this one may clear; locked while one runs.
MARKER = ".bbnode-testbed"
NODES = "nodes"
# Beside it, the nodes of a failed run if an earlier run was kept in its place.
FAILED = "failed"
# Marks nodes that have not got far enough to be worth keeping.
_UNSETTLED = ".unsettled"
# Folders of the earlier run, so that one run is complete whenever the process is killed: all of it
# until the new one is settled; all of it from then on, until it is removed; entries that are being
# moved.
_BEFORE = ".before"
_OUTDATED = ".outdated"
_MOVING = ".moving"
HOST = "127.0.0.1"
# Below the ports that Linux gives to connections (ip_local_port_range begins at 32768): a port
# that is free now is not taken by an outgoing connection before its node listens there.
PORTS = range(20_000, 32_000)
MAX_PORT_TRIES = 1000
MAX_PID_DIGITS = 10
# Variables that the environment may not set for a node, whose own file sets them.
_OWN_VARIABLES = ("BBNODE_NODE__NAME", "BBNODE_NODE__STATE_DIR", "BBNODE_ARTIFACT__")
_OWN_NETWORK = ("BBNODE_NETWORK__LISTEN", "BBNODE_NETWORK__BOOTSTRAP", "BBNODE_INVOKE")
# Bytes of a log that are read for its last words.
_LAST_WORDS_BYTES = 16_384


class FolderRefused(EnvironmentFault):
    """The output folder holds something else, or can't be written."""


class StillRunning(EnvironmentFault):
    """Another testbed, or a node of an earlier one, runs in the folder."""


class PortRefused(EnvironmentFault):
    """The TCP port for a node can't be had."""


class NodeNotStarted(EnvironmentFault):
    """The process of a node can't be started."""


@dataclass(slots=True, kw_only=True)
class ChildNode:
    """One daemon of a testbed."""

    planned: PlannedNode
    folder: Path
    identity: Identity
    python_path: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    # The end of its standard input, held open while it runs: a testbed that is killed leaves no
    # daemon behind.
    _pipe: int | None = None
    exit_reported: bool = False
    # The offset of this start's log: the logs of earlier starts come before it.
    log_start: int = 0

    @property
    def name(self) -> str:
        """Its name, also that of its folder."""
        return self.planned.name

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.folder / "node.toml"

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
        """The command that starts it again, for a shell."""
        where = ":".join(self.python_path)
        prefix = f"PYTHONPATH={shlex.quote(where)} " if where else ""
        return f"{prefix}{installation.bbnode()} run --config {shlex.quote(os.fspath(self.config))}"

    @property
    def exit_code(self) -> int | None:
        """The exit code of our process, negative for a signal; None while it runs."""
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            self._let_go()
        return code

    def start(self, *, notify_socket: Path | None = None) -> None:
        """Start the daemon's process, with its output going to its log.

        It sends READY=1 on the datagram socket `notify_socket`, if there is one. Raises
        NodeNotStarted.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith((*_OWN_VARIABLES, *_OWN_NETWORK))
        }
        environment.pop("NOTIFY_SOCKET", None)
        if notify_socket is not None:
            environment["NOTIFY_SOCKET"] = os.fspath(notify_socket)
        if self.python_path:
            before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
            environment["PYTHONPATH"] = os.pathsep.join([*self.python_path, *before])
        try:
            with self.log.open("ab") as log:
                self.log_start = log.seek(0, os.SEEK_END)
                self._let_go()
                stdin, self._pipe = os.pipe()
                try:
                    self.process = _spawn(self.config, stdin, log, environment)
                finally:
                    os.close(stdin)
        except OSError as error:
            raise NodeNotStarted(f"{self.name}: {self.log}: {error.strerror}") from error

    def _let_go(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def last_words(self) -> str:
        """Return the last line of its log, or the last error in its end."""
        try:
            with self.log.open("rb") as stream:
                end = stream.seek(0, os.SEEK_END)
                stream.seek(min(max(self.log_start, end - _LAST_WORDS_BYTES), end))
                lines = stream.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return "its log can't be read"
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its log is empty"])[-1].removeprefix("error: ")


def _spawn(
    config: Path, stdin: int, log: IO[bytes], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bbnode", "run", "--stop-at-eof", "--config", os.fspath(config)],
        stdin=stdin,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        # Ctrl-C reaches only the testbed, which stops its daemons cleanly.
        start_new_session=True,
    )


# --- the folder -----------------------------------------------------------------------------------


@contextmanager
def held_folder(out: Path, *, keep: bool = False) -> Iterator[Path]:
    """Create the folder of the daemons, and hold it until the block ends.

    With `keep` it stays as an earlier testbed left it. Without, the block sees an empty one. If
    `settle` is not called in it, an earlier run that was settled comes back when the block ends, or
    at the next start if it was killed, and the nodes of the block move to the folder `failed`.
    Raises FolderRefused or StillRunning.
    """
    nodes = out / NODES
    marker = nodes / MARKER
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not marker.exists() and any(out.iterdir()):
            raise FolderRefused(
                f"{out} holds something that no testbed made; choose another folder with --out"
            )
        nodes.mkdir(exist_ok=True)
        descriptor = paths.open_lock(marker)
    except OSError as error:
        raise FolderRefused(f"{out}: {error.strerror}; choose another with --out") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StillRunning(
                f"a testbed runs in {out} already; stop it, or choose another folder with --out"
            ) from error
        _check_nobody_runs(nodes)
        _put_back(nodes)
        if not keep:
            _set_aside(nodes)
        try:
            yield nodes
        finally:
            _put_back(nodes)
    finally:
        os.close(descriptor)


def _check_nobody_runs(nodes: Path) -> None:
    """Refuse a folder in which a daemon of an earlier testbed still runs, as after a SIGKILL."""
    for lock in sorted(nodes.glob("*/state/lock")):
        holder = holder_of(lock)
        if holder is not None:
            raise StillRunning(
                f"{lock.parent.parent.name} of an earlier testbed still runs as process {holder}; "
                f"stop it (kill {holder}), or choose another folder with --out"
            )


def holder_of(lock: Path) -> int | None:
    """Return the process that holds a daemon's lock file, or None. Raises StorageError."""
    if not lock.exists():
        return None
    descriptor = paths.open_lock(lock)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() and len(text) <= MAX_PID_DIGITS else 0
    finally:
        os.close(descriptor)
    return None


def settle(nodes: Path) -> None:
    """Replace the earlier run, which can then be removed. Raises FolderRefused."""
    with _refusing():
        (nodes / _UNSETTLED).unlink(missing_ok=True)
        if has_earlier(nodes):
            (nodes / _BEFORE).rename(nodes / _OUTDATED)


def has_earlier(nodes: Path) -> bool:
    """Return True while an earlier run is kept, which comes back unless this one is settled."""
    return (nodes / _BEFORE).exists()


def _set_aside(nodes: Path) -> None:
    with _refusing():
        entries = _entries(nodes)
        if entries:
            (nodes / _MOVING).mkdir(mode=0o700)
            for entry in entries:
                entry.rename(nodes / _MOVING / entry.name)
            kept = _OUTDATED if (nodes / _MOVING / _UNSETTLED).exists() else _BEFORE
            (nodes / _MOVING).rename(nodes / kept)
            if kept == _OUTDATED:
                shutil.rmtree(nodes / _OUTDATED)
        (nodes / _UNSETTLED).touch()


def _put_back(nodes: Path) -> None:
    """Remove an earlier run if this one was settled; if it was not, put the earlier one back."""
    with _refusing():
        if (nodes / _OUTDATED).exists():
            shutil.rmtree(nodes / _OUTDATED)
        if has_earlier(nodes):
            newer = _entries(nodes)
            failed = nodes.parent / FAILED
            if newer:
                shutil.rmtree(failed, ignore_errors=True)
                failed.mkdir()
            for entry in newer:
                entry.rename(failed / entry.name)
            (nodes / _BEFORE).rename(nodes / _MOVING)
        if (nodes / _MOVING).exists():
            for entry in _entries(nodes / _MOVING):
                entry.rename(nodes / entry.name)
            (nodes / _MOVING).rmdir()


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a run, first the sign that it is not worth keeping."""
    own = (MARKER, _BEFORE, _OUTDATED, _MOVING)
    return sorted(entry for entry in folder.iterdir() if entry.name not in own)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderRefused(
            f"{error.filename}: {error.strerror}; choose another folder with --out"
        ) from error


# --- ports ----------------------------------------------------------------------------------------


def choose_port(port: int) -> int:
    """Return `port` if it is free, or a free one for 0. Raises PortRefused."""
    return choose_ports(1, first=port)[0]


def choose_ports(count: int, *, first: int = 0) -> list[int]:
    """Return `count` different free ports; the first is `first` unless that is 0.

    Raises PortRefused.
    """
    with ExitStack() as held:
        chosen = [_hold(first, held)] if first and count else []
        # Random, so that two testbeds that start together do not try the same ones.
        draw = random.SystemRandom()
        tries = 0
        while len(chosen) < count:
            tries += 1
            if tries > MAX_PORT_TRIES + count:
                raise PortRefused(
                    f"no {count} free ports on {HOST} between {PORTS.start} and {PORTS.stop}; stop "
                    "what listens there"
                )
            try:
                chosen.append(_hold(draw.choice(PORTS), held))
            except PortRefused:
                continue
        return chosen


def _hold(port: int, held: ExitStack) -> int:
    probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        probe.bind((HOST, port))
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise PortRefused(
            f"port {port} on {HOST}: {why}; choose another with --port, or leave it out to take a "
            "free one"
        ) from error
    return int(probe.getsockname()[1])


# --- writing --------------------------------------------------------------------------------------


def write_nodes(plan: LocalPlan, nodes: Path, *, port: int, wait_s: float) -> list[ChildNode]:
    """Write artifact, identities and configurations; return the nodes in the plan's order.

    `port` is that of the first node that others dial, 0 for any; `wait_s` is how long rounds wait
    for their peers. New nodes of a group are numbered in PeerId order, so number i belongs to the
    i-th PeerId: reductions run in PeerId order, and so the same seed gives the same bits whatever
    the identities are. Raises StorageError, PortRefused, SettingsRefused.
    """
    plan.program.save(nodes / ARTIFACT)
    identities = _identities(plan, nodes)
    dialled = [node.name for node in plan.nodes.values() if node.is_dialled]
    ports = dict(zip(dialled, choose_ports(len(dialled), first=port), strict=True))
    at = {name: f"/ip4/{HOST}/tcp/{ports[name]}/p2p/{identities[name].peer_id}" for name in dialled}
    children = []
    for name, node in plan.nodes.items():
        config = node_config(
            node,
            plan,
            listen=[f"/ip4/{HOST}/tcp/{ports[name]}"] if name in ports else [],
            bootstrap=[at[called] for called in node.dials],
            wait_s=wait_s,
        )
        written = ChildNode(
            planned=node,
            folder=nodes / name,
            identity=identities[name],
            python_path=plan.program.python_path,
        )
        sources.write(written.config, config, comment=f"{name} of a testbed (`bbnode up`)")
        children.append(written)
    return children


def _identities(plan: LocalPlan, nodes: Path) -> dict[str, Identity]:
    identities: dict[str, Identity] = {}
    try:
        for group in plan.groups:
            names = [node.name for node in plan.nodes.values() if node.group is group]
            old = [name for name in names if (nodes / name).exists()]
            for name in old:
                state_dir = nodes / name / "state"
                paths.make_state_dir(state_dir)
                identities[name] = load_or_create_identity(paths.identity_file(state_dir))
            new = [name for name in names if name not in identities]
            drafts = [_draft(nodes, group.name, place) for place in range(len(new))]
            drafts.sort(key=lambda draft: draft[1].peer_id)
            for name, (folder, identity) in zip(new, drafts, strict=True):
                folder.rename(nodes / name)
                identities[name] = identity
    except OSError as error:
        raise paths.StorageError(f"{error.filename or nodes}: {error.strerror}") from error
    return identities


def _draft(nodes: Path, group: str, place: int) -> tuple[Path, Identity]:
    """Create a folder with an identity, under a name that no node can have."""
    folder = nodes / f".{group}.{place}"
    shutil.rmtree(folder, ignore_errors=True)
    paths.make_state_dir(folder / "state")
    return folder, create_identity(paths.identity_file(folder / "state"))


def by_name(nodes: Sequence[ChildNode]) -> dict[str, ChildNode]:
    """Return the nodes by their names."""
    return {node.name: node for node in nodes}
