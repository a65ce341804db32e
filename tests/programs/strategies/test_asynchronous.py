"""Training without rounds, by the formulas of its papers, and against peers that lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    Metadata,
    OnnxModel,
    UpdateBuffer,
    concrete,
    register_component,
    values,
)
from bbnode.components.asynchronous.buffer import StaleUpdate
from bbnode.components.errors import ComponentError, ContributionRefused
from bbnode.dsl import BadArgument, ModelSlot
from bbnode.ir.peer import PeerId
from bbnode.programs import (
    AsynchronousTraining,
    CyclicTraining,
    FedAdam,
    FedAsync,
    FedBuff,
    FedProx,
    Scaffold,
    SecureTraining,
)
from tests.programs.strategies.federation import SIZES, SOFTMAX, Federation, close

ALONE = {name: value for name, value in SOFTMAX.items() if name != "clients"}


def made(base: type[AsynchronousTraining], **given: Any) -> AsynchronousTraining:
    return base(**{**ALONE, **given})


def turn(federation: Federation, client: int) -> None:
    """Make one turn of a client to its end."""
    federation.nodes[client].invoke("client", {"tick": values.TRIGGER})
    federation.net.run_until_idle()


def weights(federation: Federation) -> np.ndarray:
    return np.asarray(federation.server.component("global").params(None)).astype(np.float64)


DISCOUNTS: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 1.0,
    "polynomial": lambda d: (1 + d) ** -0.5,
    "hinge": lambda d: 1.0 if d <= 1 else 1 / (2.0 * (d - 1) + 1),
}


@pytest.mark.parametrize("kind", DISCOUNTS)
def test_fedasync_mixes_each_update_in_by_its_staleness(tmp_path: Path, kind: str) -> None:
    """Three clients fetch version 0 at once; their updates are 0, 1 and 2 versions old."""
    program = made(FedAsync, staleness=kind, hinge_slope=2.0, hinge_at=1)
    federation = Federation(tmp_path, program)
    w = start = federation.start
    for node in federation.nodes:
        node.invoke("client", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    assert federation.server.failures() == []
    stats = federation.server.values("stats")
    assert [told["staleness"] for told in stats] == [0, 1, 2]
    order = [SIZES.index(told["num_samples"]) for told in stats]
    for d, client in enumerate(order):
        a = 0.6 * DISCOUNTS[kind](d)
        w = (1 - a) * w + a * federation.clients[client].trained(start)
    close(weights(federation), w)
    assert [int(version) for version in federation.server.values("version")] == [1, 2, 3]


def test_fedbuff_steps_with_the_mean_of_discounted_moves(tmp_path: Path) -> None:
    """A client that trained at version 0 is late by a version; its move counts for 1/sqrt(2)."""
    federation = Federation(tmp_path, made(FedBuff, buffer=2, server_learning_rate=0.5))
    start = federation.start
    turn(federation, 0)
    assert federation.server.values("version") == []
    # A client that has answered the weights has nothing to do until they are new.
    turn(federation, 0)
    assert len(federation.nodes[0].values("trained")) == 1
    turn(federation, 1)
    moves = [client.trained(start) - start for client in federation.clients]
    first = start + 0.5 * (moves[0] + moves[1]) / 2
    close(weights(federation), first)
    for node in federation.nodes:
        node.invoke("client", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    (_, told) = federation.server.values("stats")
    assert (told["updates"], told["version"], told["staleness"]) == (2, 1, 0.0)
    # The third one's update waits in the buffer, at version 1, and the server is at 2.
    second = weights(federation)
    later = [client.trained(first) - first for client in federation.clients]
    sums = {a + b: {0, 1, 2} - {a, b} for a, b in ((0, 1), (0, 2), (1, 2))}
    of_two = SIZES.index(100 - told["num_samples"])
    assert sums[3 - of_two] == {of_two}
    close(second, first + 0.5 * sum(later[i] for i in range(3) if i != of_two) / 2)
    other = (of_two + 1) % 3
    turn(federation, other)
    told = federation.server.values("stats")[-1]
    assert (told["staleness"], told["max_staleness"]) == (0.5, 1)
    fresh = federation.clients[other].trained(second) - second
    close(weights(federation), second + 0.5 * (later[of_two] / np.sqrt(2) + fresh) / 2)


def test_a_server_that_restarts_keeps_its_buffer_and_versions(tmp_path: Path) -> None:
    """And its optimizer: it goes on to the bit as one that did not."""

    class Both(FedBuff, FedAdam):
        name = "Both"

    through, restarted = (Federation(tmp_path, made(Both, buffer=2, tau=1e-2)) for _ in range(2))
    for federation in (through, restarted):
        for client in (0, 1, 2):
            turn(federation, client)
        if federation is restarted:
            federation.server.checkpoint()
            federation.net.crash("server")
            federation.net.restart("server")
            federation.net.run_until_idle()
        turn(federation, 0)
        assert federation.server.failures() == []
    assert int(restarted.server.values("version")[-1]) == 2
    assert weights(restarted).tobytes() == weights(through).tobytes()


def test_a_client_that_crashes_is_given_the_same_work_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(FedAsync))
    start = federation.start
    federation.nodes[0].checkpoint()
    federation.nodes[0].invoke("client", {"tick": values.TRIGGER})
    federation.net.crash("c0")
    federation.net.run_until_idle()
    federation.net.restart("c0")
    federation.net.run_until_idle()
    turn(federation, 0)
    close(weights(federation), 0.4 * start + 0.6 * federation.clients[0].trained(start))


@dataclass
class Caller:
    """The context of an op that a peer's message calls."""

    source_peer: PeerId
    self_peer: PeerId | None = None
    now_ns: int = 0


def buffer(**given: Any) -> UpdateBuffer:
    return UpdateBuffer(UpdateBuffer.Config(size=2, **given))


ONE = Metadata(num_samples=1)
W = np.zeros(2, np.float32)


def number(value: int) -> np.ndarray:
    return np.array(value, np.int64)


def step(held: UpdateBuffer, ctx: Any) -> None:
    held.collect(ctx)
    held.publish(ctx, W)


def test_one_given_version_is_answered_once() -> None:
    """A client that floods, or names versions that it was not given, fills no buffer."""
    held, a, b = buffer(buffer=2), Caller(PeerId.from_seed(1)), Caller(PeerId.from_seed(2))
    _, version = held.give(a, W)
    assert not held.take(a, W + 1, ONE, version)
    for lie, reason in ((0, "already"), (1, "not given"), (-1, "not given"), (2**62, "not given")):
        with pytest.raises(ContributionRefused, match=reason):
            held.take(a, W + 1, ONE, number(lie))
    with pytest.raises(ContributionRefused, match="not given version 0"):
        held.take(b, W + 1, ONE, version)
    nothing, none = held.give(a, W)
    assert (nothing.size, int(none)) == (0, -1)
    held.give(b, W)
    assert held.take(b, W + 3, ONE, version)
    mean, _, stats = held.collect(b)
    assert (mean.tolist(), stats["contributors"]) == ([2.0, 2.0], 2)


def test_updates_that_are_too_old_are_refused_by_name() -> None:
    held, a, b = (
        buffer(max_staleness=1), Caller(PeerId.from_seed(1)), Caller(PeerId.from_seed(2)),
    )  # fmt: skip
    held.give(a, W)
    for at in range(2):
        held.give(b, W)
        held.take(b, W, ONE, number(at))
        step(held, b)
    with pytest.raises(StaleUpdate, match=r"version 0, and now is 2 \(max_staleness=1\)"):
        held.take(a, W, ONE, number(0))


@pytest.mark.parametrize(
    ("tensor", "told", "version"),
    [
        (np.array([np.nan, 0], np.float32), ONE, number(0)),
        (np.array([np.inf, 0], np.float32), ONE, number(0)),
        (np.array([1e30, 0], np.float32), ONE, number(0)),
        (np.zeros(3, np.float32), ONE, number(0)),
        (np.zeros(2, np.float64), ONE, number(0)),
        (W, Metadata(num_samples=0), number(0)),
        (W, Metadata(num_samples=10**9), number(0)),
        (W, Metadata(), number(0)),
        (W, ONE, np.zeros(2, np.int64)),
    ],
)
def test_a_lie_is_refused_and_its_peer_may_answer_still(
    tensor: Any, told: Any, version: Any
) -> None:
    held, a = buffer(), Caller(PeerId.from_seed(1))
    held.give(a, W)
    with pytest.raises(ContributionRefused):
        held.take(a, tensor, told, version)
    assert held.take(a, W + 1, ONE, number(0))


def test_updates_during_a_step_are_of_the_next_one() -> None:
    """And a step that failed holds up others until its deadline only."""
    held, peers = buffer(step_deadline_s=1.0), [Caller(PeerId.from_seed(i)) for i in range(4)]
    for peer in peers:
        held.give(peer, W)
    assert held.take(peers[0], W, ONE, number(0))
    assert not held.take(peers[1], W + 4, ONE, number(0))
    held.publish(peers[0], W)
    assert held.take(peers[2], W, ONE, number(0))
    peers[3].now_ns = 1_000_000_000
    assert held.take(peers[3], W, ONE, number(0))


def test_the_state_is_restored_whole_or_refused() -> None:
    held, a = buffer(buffer=3, mixing=0.5), Caller(PeerId.from_seed(1))
    held.give(a, W)
    held.take(a, W + 1, ONE, number(0))
    other = buffer(buffer=3, mixing=0.5)
    other.restore(held.serialize())
    assert other.serialize() == held.serialize()
    with pytest.raises(ContributionRefused, match="already"):
        other.take(a, W + 1, ONE, number(0))
    with pytest.raises(ComponentError, match="not ours"):
        other.restore(b"\x01nonsense")


def test_clients_beyond_the_bound_are_forgotten_oldest_first() -> None:
    held, peers = buffer(max_clients=2), [Caller(PeerId.from_seed(i)) for i in range(3)]
    for peer in peers:
        held.give(peer, W)
    with pytest.raises(ContributionRefused, match="not given"):
        held.take(peers[0], W, ONE, number(0))
    assert held.take(peers[2], W, ONE, number(0))


@pytest.mark.parametrize(
    ("base", "given", "says"),
    [
        (FedAsync, {"mixing": 1.5}, "mixing"),
        (FedAsync, {"deltas": True}, "deltas"),
        (FedAsync, {"staleness": "none"}, "staleness"),
        (FedBuff, {"buffer": 0}, "buffer"),
        (FedBuff, {"quorum": 2}, "quorum"),
        (FedBuff, {"evaluate": "clients"}, "evaluate"),
        (FedBuff, {"aggregator": "bbnode.Median"}, "aggregator"),
        (FedBuff, {"clients": 3}, "clients ask by themselves"),
        (FedAsync, {"clients": 3}, "clients ask by themselves"),
        (FedBuff, {"weighted": False}, "counts by its staleness"),
        (FedAsync, {"weighted": True}, "counts by its staleness"),
        ((FedAsync, FedAdam), {}, "FedBuff"),
        ((FedBuff, Scaffold), {}, "round"),
        ((FedBuff, CyclicTraining), {}, "round"),
        ((CyclicTraining, FedBuff), {}, "round"),
        ((FedBuff, SecureTraining), {"codec": None}, "FedBuff and SecureTraining"),
    ],
)
def test_arguments_are_checked(base: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        made(type("Wrong", base, {}) if isinstance(base, tuple) else base, **given).build()


@register_component
class LyingWorker(OnnxModel):
    """A model that answers NaN, once it is trained."""

    TYPE_NAME = "tests.LyingWorker"

    def params(self, ctx: Any) -> Any:
        return np.full(self.size, np.nan, np.float32)


def test_a_liar_is_refused_and_the_others_go_on(tmp_path: Path) -> None:

    class Liar(FedAsync):
        name = "FedAsync"

        @property
        def client_model(self) -> ModelSlot:
            return ModelSlot("local", concrete=concrete(LyingWorker, self._config))

    federation = Federation(tmp_path, made(FedAsync), (None, None, Liar(**ALONE)))
    start = federation.start
    turn(federation, 2)
    (failure,) = federation.server.failures()
    assert "refused: its tensor holds NaN" in str(failure)
    turn(federation, 0)
    close(weights(federation), 0.4 * start + 0.6 * federation.clients[0].trained(start))


def test_other_strategies_and_codecs_go_with_it(tmp_path: Path) -> None:
    class Both(FedBuff, FedProx):
        name = "Both"

    given = {"proximal": 0.5, "codec": "bbnode.Int8Codec", "buffer": 1}
    federation = Federation(tmp_path, made(Both, **given))
    start = federation.start
    turn(federation, 1)
    assert federation.server.failures() == []
    moved = federation.clients[1].trained(start, proximal=0.5, anchor=start) - start
    close(weights(federation), start + moved, float(np.abs(moved).max()) / 100)
