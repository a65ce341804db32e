"""Each role killed, or stopped for ten seconds, at each phase of a round."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bbnode.daemon.state import checkpoint
from tests.chaos.cluster import Cluster, Daemon, Owned, Rounds
from tests.patience import PATIENCE_S

FROZEN_S = 10.0
# Of a round. One that lost a client takes all of it; who is frozen sleeps past it.
KILLED_DEADLINE_S = 8.0
FROZEN_DEADLINE_S = 4.0
# 4 MB of weights: a checkpoint takes long enough to be met while it is written.
LARGE = 1_000_000
# What a process may have beyond what it had when all were connected, after the fault.
MORE_FILES = 3
MORE_RSS_MB = 12.0
# With large weights also what several rounds hold that a sleeper runs at once.
MORE_LARGE_RSS_MB = MORE_RSS_MB + 7 * LARGE * 4 / 1e6
QUICK = {("server", "aggregating"), ("client", "training"), ("server", "writing")}


@contextmanager
def sent(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """The request has come to a client, and is not loaded."""
    with cluster.gates.hold("load", "client-0"):
        yield


@contextmanager
def training(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """A client computes."""
    with cluster.gates.hold("train", "client-0"):
        yield


@contextmanager
def responses(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """One client has answered, the others have not."""
    others = [client.name for client in cluster.clients[1:]]
    cluster.gates.close_for("train", *others)
    held = [cluster.gates.wait() for _ in others]
    try:
        rounds.until("request.response", peer=cluster.clients[0].peer)
        yield
    finally:
        cluster.gates.open_for("train", *others)
        for each in held:
            each.release()


@contextmanager
def aggregating(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """The server computes the mean."""
    with cluster.gates.hold("aggregate", "server"):
        yield


@contextmanager
def checkpointing(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """The server collects its state."""
    with cluster.gates.hold("save", "server"):
        yield


@contextmanager
def writing(cluster: Cluster, rounds: Rounds) -> Iterator[None]:
    """The server's new checkpoint is on disk in part, or just whole."""
    fresh = checkpoint.checkpoint_file(cluster.server.state_dir).parent
    with cluster.gates.hold("save", "server"):
        before = {path.name for path in fresh.iterdir()}
    end = time.monotonic() + PATIENCE_S
    while {path.name for path in fresh.iterdir()} <= before:
        assert time.monotonic() < end
    yield


PHASES: dict[str, Callable[[Cluster, Rounds], object]] = {
    "sent": sent,
    "training": training,
    "responses": responses,
    "aggregating": aggregating,
    "checkpointing": checkpointing,
    "writing": writing,
}
CASES = [
    pytest.param(role, phase, marks=[] if (role, phase) in QUICK else [pytest.mark.slow])
    for role in ("server", "client")
    for phase in PHASES
]


def victim_of(cluster: Cluster, role: str) -> Daemon:
    return cluster.server if role == "server" else cluster.clients[0]


def more_mb(phase: str) -> float:
    return MORE_LARGE_RSS_MB if phase == "writing" else MORE_RSS_MB


def compare(
    cluster: Cluster, before: dict[str, Owned], *restarted: Daemon, more_mb: float = MORE_RSS_MB
) -> None:
    """Who was not restarted has what it had."""
    for daemon in cluster.all:
        if daemon in restarted:
            continue
        had, has = before[daemon.name], daemon.owned()
        assert has.files <= had.files + MORE_FILES, daemon.name
        assert has.rss_mb <= had.rss_mb + more_mb, daemon.name


@pytest.mark.parametrize(("role", "phase"), CASES)
def test_killed(make_cluster: Callable[..., Cluster], role: str, phase: str) -> None:
    cluster = make_cluster(size=LARGE if phase == "writing" else 4, deadline_s=KILLED_DEADLINE_S)
    cluster.start(*cluster.all)
    victim = victim_of(cluster, role)
    with cluster.events() as rounds:
        rounds.with_all()
        last = rounds.next()
        before = {daemon.name: daemon.owned() for daemon in cluster.all}
        with PHASES[phase](cluster, rounds):
            victim.kill()
        if victim is not cluster.server:
            rounds.without(victim)
            cluster.start(victim)
            rounds.with_all()
            compare(cluster, before, victim, more_mb=more_mb(phase))
            return
    cluster.check_files()
    cluster.start(victim)
    with cluster.events() as rounds:
        # It goes on with the round that was not checkpointed, or the one after: not from 1.
        assert rounds.next()["round"] >= last["round"]
        rounds.with_all()
    compare(cluster, before, victim, more_mb=more_mb(phase))


@pytest.mark.slow
@pytest.mark.parametrize(("role", "phase"), [case.values for case in CASES])
def test_stopped_for_ten_seconds(
    make_cluster: Callable[..., Cluster], role: str, phase: str
) -> None:
    cluster = make_cluster(size=LARGE if phase == "writing" else 4, deadline_s=FROZEN_DEADLINE_S)
    cluster.start(*cluster.all)
    victim = victim_of(cluster, role)
    # Who sleeps past a round's deadline wakes to find it over.
    cluster.may_fail = victim is cluster.server
    with cluster.events() as rounds:
        rounds.with_all()
        before = {daemon.name: daemon.owned() for daemon in cluster.all}
        with PHASES[phase](cluster, rounds):
            victim.signal(signal.SIGSTOP)
        if victim is cluster.server:
            victim.lives_on_for(FROZEN_S)
        else:
            rounds.for_seconds(FROZEN_S)
        victim.signal(signal.SIGCONT)
        rounds.with_all()
        rounds.with_all()
        compare(cluster, before, more_mb=more_mb(phase))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["server", "client"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_while_it_waits_for_peers(cluster: Cluster, role: str, number: signal.Signals) -> None:
    victim = victim_of(cluster, role)
    cluster.start(cluster.server, cluster.clients[0])
    with cluster.events() as rounds:
        victim.signal(number)
        if number is signal.SIGSTOP:
            victim.lives_on_for(FROZEN_S)
            victim.signal(signal.SIGCONT)
            cluster.start(*cluster.clients[1:])
            assert rounds.with_all()["round"] >= 1
            return
        victim.kill()
    cluster.start(victim, *cluster.clients[1:])
    with cluster.events() as rounds:
        rounds.with_all()
