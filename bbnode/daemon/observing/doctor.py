"""Checks of a node on this machine, which report each fault with its remedy.

Rule: a check changes nothing (except for a temporary file in the state directory) and never raises:
an error is its result. `CHECKS` lists the checks in order; a fault of one may explain later ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multiaddr import Multiaddr

from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.lifecycle import assembly
from bbnode.engine import All, Node, steps
from bbnode.engine.readiness import reasons_text
from bbnode.ir import installation
from bbnode.ir.caps import MIN_FREE_BYTES
from bbnode.ir.errors import BbnodeError
from bbnode.ir.interrupts import let_stop
from bbnode.transport.base import Capability
from bbnode.transport.identity import Identity, create_identity, load_identity
from bbnode.transport.registry import OVER_TCP, transport_names

# Tickets and memberships are checked with five minutes of allowance.
MAX_CLOCK_ERROR_US = 60_000_000
# adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5
# The release date of Python 3.11: an earlier time means that the clock was never set.
_EARLIEST_S = 1_666_569_600


class CheckResult(StrEnum):
    """The result of a check. WARNING works, but not as well as it could."""

    PASSED = "PASSED"
    WARNING = "WARNING"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `remedy` says what to do, and is empty when it passed."""

    verdict: CheckResult
    detail: str
    remedy: str = ""
    check: str = ""

    def as_json(self) -> dict[str, str]:
        """Return it for output."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "remedy": self.remedy,
        }


_passed = partial(Finding, CheckResult.PASSED)
_warning = partial(Finding, CheckResult.WARNING)
_failed = partial(Finding, CheckResult.FAILED)
_skipped = partial(Finding, CheckResult.SKIPPED)


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """The node to check, and the results that earlier checks need."""

    resolved: ResolvedConfig
    running: bool = False  # its daemon holds the state directory and its ports
    identity: Identity | None = None
    artifact: Artifact | None = None
    node: Node | None = None  # installed with the components and settings of this configuration

    @property
    def state_dir(self) -> Path:
        """The node's state directory."""
        return self.resolved.state_dir.absolute()


Check = Callable[[CheckContext], Finding]


def examine(resolved: ResolvedConfig) -> Iterator[Finding]:
    """Run all checks; yield each finding as soon as it is available."""
    context = CheckContext(resolved=resolved)
    for name, check in CHECKS.items():
        try:
            finding = check(context)
        except BbnodeError as error:
            finding = _failed(str(error), "see there")
        yield replace(finding, check=name)


def _state_dir(context: CheckContext) -> Finding:
    """Check that the directory can be written and synced to disk."""
    place = context.state_dir
    try:
        paths.make_state_dir(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor.") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return _failed(f"{place}: {error.strerror}", "free space, or make it writable")
    return _passed(f"{place} can be written")


def _lock(context: CheckContext) -> Finding:
    """Check if a daemon runs on the directory."""
    try:
        with paths.lock_state_dir(context.state_dir):
            return _passed("none runs on this state directory")
    except paths.StateDirInUse as error:
        context.running = True
        return _passed(str(error).partition(";")[0])


def _disk(context: CheckContext) -> Finding:
    """Check free bytes and inodes."""
    free = shutil.disk_usage(context.state_dir).free
    volume = os.statvfs(context.state_dir)
    shown = f"{free // (1024 * 1024)} MiB free at {context.state_dir}"
    if free < MIN_FREE_BYTES:
        return _failed(shown, f"leave {MIN_FREE_BYTES // (1024 * 1024)} MiB or more")
    if volume.f_files and not volume.f_favail:
        return _failed("no inodes are left", "remove files from that file system")
    return _passed(shown)


def _clock(_context: CheckContext) -> Finding:
    """Check that the machine knows the time, since tickets and memberships expire."""
    now = time.time()
    if now < _EARLIEST_S:
        return _failed(f"it is {time.ctime(now)} here", "set the clock, or run NTP")
    state = _kernel_clock()
    if state is None:
        return _skipped("the kernel does not say")
    synchronised, error_us = state
    if not synchronised or error_us > MAX_CLOCK_ERROR_US:
        return _warning(
            "the clock is not kept by NTP",
            "run chrony or systemd-timesyncd: tickets and memberships expire by the clock",
        )
    return _passed(f"kept by NTP, error at most {error_us / 1e6:.3g} s")


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), up to the fields that are read; the rest is padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("rest", ctypes.c_byte * 512),
    )


def _kernel_clock() -> tuple[bool, int] | None:
    """Return whether the clock is synchronised, and its largest error in microseconds."""
    try:
        state = _Timex()  # modes 0: only read
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (AttributeError, OSError):
        return None
    return None if answer < 0 else (answer != _TIME_ERROR, int(state.maxerror))


def _identity(context: CheckContext) -> Finding:
    """Check that the key exists, is readable, and only by its owner."""
    file = paths.identity_file(context.state_dir)
    if not file.exists():
        return _warning(
            f"{file} is not there yet",
            "the first `bbnode run` makes it; keep a copy of it",
        )
    try:
        context.identity = load_identity(file)
    except BbnodeError as error:
        return _failed(str(error), "restore it from a copy, or fix its mode (0600)")
    return _passed(str(context.identity.peer_id))


def _ports(context: CheckContext) -> Finding:
    """Check that the listening addresses are available."""
    network = context.resolved.config.network
    if network.transport not in transport_names():
        return _failed(
            f"no installed package brings the transport {network.transport!r}",
            f"install it, or set network.transport to one of {', '.join(transport_names())}",
        )
    if network.transport == "libp2p" and find_spec("libp2p") is None:
        return _failed(
            "the package libp2p is not installed",
            f'{installation.libp2p_ways()}; or set network.transport = "lean"',
        )
    if network.transport not in OVER_TCP:
        return _skipped(f"the transport {network.transport!r} looks after its own")
    from bbnode.transport.libp2p.tcp import listen_endpoint

    if not context.resolved.config.network.listen:
        return _passed("this node only dials")
    if context.running:
        return _passed("the daemon that runs has them")
    for text in context.resolved.config.network.listen:
        host, port = listen_endpoint(Multiaddr(text))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                # Like the transport, so that sockets of a stopped daemon are no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            except OSError as error:
                cure = "choose another network.listen"
                if error.errno == errno.EADDRINUSE:
                    cure = f"find who has it (ss -ltnp 'sport = :{port}'), or " + cure
                return _failed(f"{text}: {error.strerror}", cure)
    return _passed(f"{', '.join(context.resolved.config.network.listen)} can be had")


def _reach(context: CheckContext) -> Finding:
    """Check that the bootstrap peers' ports answer."""
    entries = context.resolved.config.network.bootstrap
    if not entries:
        return _skipped("no peers are configured")
    if context.resolved.config.network.transport not in OVER_TCP:
        return _skipped("only addresses of libp2p are looked at")
    silent = [f"{text}: {why}" for text in entries if (why := _no_answer(text))]
    if len(silent) == len(entries):
        return _failed("; ".join(silent), "start one of them, or open the way to its port")
    if silent:
        return _warning(
            "; ".join(silent),
            "the others answer; remove it from network.bootstrap if it is gone for good",
        )
    return _passed(f"{len(entries)} of {len(entries)} ports answer")


def _no_answer(text: str) -> str:
    """Return why the port of a bootstrap address does not answer; "" if it does."""
    from bbnode.transport.libp2p.tcp import CONNECT_TIMEOUT_S, dial_endpoint

    # For a peer behind a relay, the relay is dialled.
    family, host, port = dial_endpoint(Multiaddr(text.partition("/p2p/")[0]))
    why = "the name leads to no address"
    try:
        endpoints = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    for kind, _, protocol, _, endpoint in endpoints:
        with socket.socket(kind, socket.SOCK_STREAM, protocol) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(endpoint)
                return ""
            except OSError as error:
                why = error.strerror or str(error)
    return why


def _progress(context: CheckContext) -> Finding:
    """Check that nothing in the running node has stalled."""
    if not context.running:
        return _skipped("no daemon runs")
    from bbnode.daemon.control.client import ControlClient
    from bbnode.daemon.control.errors import ControlError, ControlTimeout, NotRunning
    from bbnode.daemon.control.json_lines import parse_object

    try:
        with ControlClient(paths.control_socket(context.state_dir)) as client:
            answer = parse_object(client.fetch("GET", "/readyz")[1])
    except NotRunning as error:
        return _skipped(str(error))
    except (ControlError, ControlTimeout) as error:
        return _failed(str(error), "the daemon does not answer: read its log")
    return judge_progress(answer)


def judge_progress(readiness: Mapping[str, Any]) -> Finding:
    """Return the finding from a daemon's readiness, the JSON of `GET /readyz`."""
    if not readiness["ready"]:
        reasons = "; ".join(f"{each['what']}: {each['detail']}" for each in readiness["reasons"])
        return _failed(reasons, "see what it waits for with `bbnode status`, and read its log")
    waiting = "; ".join(
        f"{each['target']} waits for {each['for']}" for each in readiness["waiting"]
    )
    if waiting:
        return _warning(
            waiting,
            "start those peers, or see why they do not connect: bbnode peers",
        )
    return _passed("nothing is stalled")


def _upgrade(context: CheckContext) -> Finding:
    """Check that no peer offers another program, and that connected versions agree."""
    if not context.running:
        return _skipped("no daemon runs: nobody is connected")
    answer = _status(context)
    return _skipped(answer) if isinstance(answer, str) else judge_upgrade(answer)


def _status(context: CheckContext) -> Mapping[str, Any] | str:
    """Return the status of the running daemon, or the reason why there is none."""
    from bbnode.daemon.control.client import ControlClient
    from bbnode.daemon.control.errors import ControlError, ControlTimeout, NotRunning

    try:
        with ControlClient(paths.control_socket(context.state_dir)) as client:
            answer: Mapping[str, Any] = client.get("/v1/status")
            return answer
    except (ControlError, ControlTimeout, NotRunning) as error:
        return str(error)


def judge_upgrade(answer: Mapping[str, Any]) -> Finding:
    """Return the finding from a daemon's status, the JSON of `GET /v1/status`."""
    offers = [
        f"an upgrade is offered: program {each['version']} by {each['peer']}"
        for each in answer.get("offers", ())
    ]
    differing = [
        f"{each['peer']} (program {each['version']}): {line}"
        for each in answer["versions"]
        for line in each["differs"]
    ]
    if not offers and not differing:
        return _passed("nobody offers another program")
    cure = "see `bbnode upgrade`" if offers else "give both the same program and model"
    return _warning("; ".join((*offers, *differing)), cure)


def _dial_back(context: CheckContext) -> Finding:
    """Check that a connected peer reaches this node at an address that it announces."""
    if not context.running:
        return _skipped("no daemon runs: nobody is connected")
    if not context.resolved.config.network.listen:
        return _skipped("it listens nowhere and only dials")
    from bbnode.daemon.control.client import ControlClient
    from bbnode.daemon.control.errors import ControlError, ControlTimeout, NotRunning
    from bbnode.daemon.network.dial_back import ANSWER_S, MAX_ASKED, REQUEST_S

    patience_s = MAX_ASKED * (ANSWER_S + REQUEST_S) + REQUEST_S
    socket_path = paths.control_socket(context.state_dir)
    try:
        with ControlClient(socket_path, timeout_s=patience_s) as client:
            answer = client.post("/v1/dial-back", {})
    except (ControlError, ControlTimeout, NotRunning) as error:
        return _skipped(str(error))
    return judge_dial_back(answer)


def judge_dial_back(answer: Mapping[str, Any]) -> Finding:
    """Return the finding from a peer's answer, the JSON of `POST /v1/dial-back`."""
    tried = [row for row in answer["addresses"] if row["outcome"] != "skipped"]
    reached = [row["address"] for row in tried if row["outcome"] == "reached"]
    asked = f"...{answer['peer'][-6:]}"
    if reached:
        return _passed(f"{asked} reached {', '.join(reached)}")
    if not answer["addresses"]:
        return _skipped("it announces no address of its own: it only dials")
    if tried:
        return _failed(
            "; ".join(f"{asked}: {row['detail']}" for row in tried),
            "let the port through firewall and router, or set network.announce to where it is "
            "forwarded; a node that only dials works too, through relays",
        )
    return _warning(
        f"{asked} sees this node at {answer['seen_at'] or 'no address of its own'}, "
        "which it does not announce",
        "forward the port there and set network.announce, if others are to dial this node",
    )


def _routing(context: CheckContext) -> Finding:
    """Check that the DHT runs, has peers, and knows what this node provides."""
    dht = context.resolved.config.routing.dht
    if dht == "off":
        return _skipped("routing.dht is off: nobody is asked about other peers")
    if context.resolved.config.network.transport != "libp2p":
        return _failed(
            f"routing.dht is {dht!r}, and the transport "
            f"{context.resolved.config.network.transport!r} has no DHT",
            'set network.transport to "libp2p", or routing.dht to "off"',
        )
    if not context.running:
        return _skipped("no daemon runs")
    answer = _status(context)
    return _skipped(answer) if isinstance(answer, str) else judge_routing(answer)


def judge_routing(answer: Mapping[str, Any]) -> Finding:
    """Return the finding from a daemon's status, the JSON of `GET /v1/status`."""
    routing = answer["routing"]
    if not routing:
        return _warning("the running daemon has no DHT", "restart it: its configuration is newer")
    if answer["counters"].get("routing.failed"):
        return _failed("the DHT has failed", "read the log of the daemon, and restart it")
    if not answer["peers"]:
        return _skipped("nobody is connected")
    if not routing["peers"]:
        return _warning(
            f"no connected peer answers on {routing['protocol']}",
            'connect with one that has routing.dht = "server"',
        )
    untold = [key for key, peers in routing["providing"].items() if not peers]
    if untold and routing["mode"] == "server":
        return _warning(
            f"nobody was told that this node has {untold[0][:8]}…",
            "see that it has an address to be fetched from: network.listen, network.announce",
        )
    return _passed(f"{routing['mode']}, {routing['peers']} peers on {routing['protocol']}")


def _artifact(context: CheckContext) -> Finding:
    """Check that the artifact is complete, unchanged and compiled."""
    assembly.import_components(context.resolved)
    try:
        context.artifact = assembly.find_artifact(context.resolved)
    except BbnodeError as error:
        return _failed(str(error), "compile it again, or fetch it again")
    return _passed(f"sha256 {context.artifact.sha256}, {context.artifact.size} bytes")


def _components(context: CheckContext) -> Finding:
    """Check that the targets can be installed with the components and settings of this node."""
    if context.artifact is None:
        return _skipped("there is no artifact")
    config = context.resolved.config
    try:
        node = _installed(context, context.artifact)
        if config.network.transport in OVER_TCP:
            lean = config.network.transport == "lean"
            assembly.check_topics(node, config, () if lean else (Capability.TOPICS,))
    except BbnodeError as error:
        return _failed(str(error), "install what is missing, or correct [slots]")
    if not context.running:
        context.node = node
    return _passed(f"{', '.join(node.targets)} can be installed")


def _installed(context: CheckContext, artifact: Artifact) -> Node:
    with tempfile.TemporaryDirectory() as scratch:
        # Any identity will do for a trial installation, so none is created for the node.
        identity = context.identity or create_identity(Path(scratch) / "key")
        network = access_files.load_node(context.state_dir, identity.peer_id).network
        return assembly.install_node(
            context.resolved, artifact, identity, incarnation=0, network=network
        )


def _data(context: CheckContext) -> Finding:
    """Check that the components can be prepared, as at the start: data exist and fit."""
    if context.running:
        answer = _status(context)
        return _skipped(answer) if isinstance(answer, str) else judge_data(answer.get("data") or {})
    if context.node is None:
        return _skipped("nothing is installed")
    node, context.node = context.node, None
    node.run_bootstrap(All(modules=False))
    now_ns = 0
    todo = deque(node.poll(now_ns))
    while todo:
        step = todo.popleft()
        if isinstance(step, steps.RunTask):
            try:
                node.complete(step.token, step.fn())
            except BaseException as error:  # noqa: BLE001 - a component's own code
                let_stop(error)
                node.fail(step.token, error)
            todo.extend(node.poll(now_ns))
    failed = node.not_ready()
    if failed:
        return _failed(
            reasons_text(failed),
            "correct it; the node starts without them, and tries again every minute",
        )
    return _passed("all that the program needs can be prepared")


def judge_data(data: Mapping[str, Any]) -> Finding:
    """Return the finding from a daemon's status of its data and of its peers' data."""
    refused = [
        f"{peer}: {each['reason']}"
        for peer, each in data.get("peers", {}).items()
        if each["standing"] == "refused"
    ]
    if refused:
        cure = "have these peers give the columns, classes and units of the federation"
        return _warning("; ".join(refused), cure)
    unnamed = [s for s, each in data.get("own", {}).items() if each["digest"] and not each["named"]]
    if unnamed:
        listed = ", ".join(unnamed)
        return _warning(
            f"data without names ({listed}): peers compare them by shape and type alone",
            "name their columns and classes (docs/data.md: what peers mean by their numbers)",
        )
    return _passed("the data of all connected peers agree")


CHECKS: dict[str, Check] = {
    "state directory": _state_dir,
    "daemon": _lock,
    "disk": _disk,
    "clock": _clock,
    "identity": _identity,
    "ports": _ports,
    "bootstrap": _reach,
    "progress": _progress,
    "upgrade": _upgrade,
    "dial-back": _dial_back,
    "routing": _routing,
    "artifact": _artifact,
    "components": _components,
    "data": _data,
}
