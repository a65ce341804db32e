"""Links that are cut without a word, and a bad one that loses and delays packets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.wire import NEEDS_NAMESPACES, Wire, namespaces

CLIENTS = 3
PORT = 4001
# Of a round: one that misses somebody takes all of it.
DEADLINE_S = 4.0
# A peer that does not answer is noticed after 15 s; nothing may take longer than a minute then.
RECOVERS_S = 60.0

pytestmark = [NEEDS_NAMESPACES, pytest.mark.slow]


@contextmanager
def wired(
    make_cluster: Callable[..., Cluster], *, delay_s: float = 0.0, loss: float = 0.0
) -> Iterator[tuple[Cluster, list[Wire]]]:
    """A server and clients, each in a namespace and with a wire to the server of its own."""
    with ExitStack() as stack:
        names = ["server", *(f"client-{n}" for n in range(CLIENTS))]
        made = stack.enter_context(namespaces(*names))
        wires = [
            stack.enter_context(Wire(n, (made[0], made[1 + n]), delay_s=delay_s, loss=loss))
            for n in range(CLIENTS)
        ]
        cluster = make_cluster(
            clients=CLIENTS,
            deadline_s=DEADLINE_S,
            listen=[f"/ip4/{wire.addresses[0]}/tcp/{PORT}" for wire in wires],
        )
        for daemon, name in zip(cluster.all, made, strict=True):
            daemon.prefix = ["ip", "netns", "exec", name]
        try:
            yield cluster, wires
        finally:
            cluster.end()


@pytest.mark.parametrize("seconds", [1.0, 10.0, 60.0])
def test_cut(make_cluster: Callable[..., Cluster], seconds: float) -> None:
    with wired(make_cluster) as (cluster, wires):
        cluster.start(*cluster.all)
        with cluster.events() as rounds:
            rounds.with_all()
            with wires[0].cut():
                made = rounds.for_seconds(seconds)
            assert made
            if seconds > cluster.deadline_s:
                assert all(len(each["responded"]) >= CLIENTS - 1 for each in made)
                assert any(len(each["responded"]) == CLIENTS - 1 for each in made)
            begun = time.monotonic()
            rounds.with_all()
            assert time.monotonic() - begun < RECOVERS_S


def test_lossy_and_slow(make_cluster: Callable[..., Cluster]) -> None:
    with wired(make_cluster, delay_s=0.1, loss=0.05) as (cluster, wires):
        cluster.start(*cluster.all)
        with cluster.events() as rounds:
            rounds.with_all()
            made = rounds.for_seconds(30.0)
        assert len(made) >= 10
        assert sum(wire.dropped for wire in wires) > 0
