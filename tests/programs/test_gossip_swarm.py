"""Swarm learning: the coordinator changes, one that is down is passed over, and liars are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ContributionRefused,
    RoundUnderWay,
    StaleRound,
    SwarmRounds,
    SwarmRoundsConfig,
    values,
)
from bbnode.components.errors import NotEnoughPeers
from bbnode.components.gossip.swarm import ranked
from bbnode.dsl import BadArgument
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, PeerIdVec
from bbnode.programs import SwarmTraining
from tests.components.fakes import Context
from tests.programs.files import CLASSES, FEATURES
from tests.programs.strategies.federation import close
from tests.programs.test_gossip_rounds import TRAINING, Peers


def swarm(folder: Path, **given: Any) -> Peers:
    return Peers(folder, SwarmTraining(**TRAINING, peers=4, evaluate=False, **given), 4)


def tick(peers: Peers) -> list[dict[str, Any]]:
    up = [node for node in peers.nodes if node.is_up]
    executions = [node.invoke("peer", {"tick": values.TRIGGER}) for node in up]
    peers.net.run_until_idle()
    return [node.outputs(each) for node, each in zip(up, executions, strict=True)]


def test_a_round_is_fedavg_and_the_coordinator_follows_from_its_number(tmp_path: Path) -> None:
    peers = swarm(tmp_path)
    shares = np.array([client.count for client in peers.clients], float)
    w, shares = peers.weights[0], shares / shares.sum()
    seen = set()
    for number in range(1, 5):
        w = shares @ np.stack([client.trained(w) for client in peers.clients])
        coordinator = ranked(peers.ids, number, 0)[0]
        seen.add(coordinator)
        for told in tick(peers):
            close(told["model"], w, 1e-5)
            stats = told["stats"]
            assert (stats["round"], stats["contributors"], stats["attempt"]) == (number, 4, 0)
            assert stats["coordinator"] == str(coordinator)
    assert len(seen) > 1
    assert not any(node.failures() for node in peers.nodes)


def test_a_coordinator_that_is_down_is_passed_over(tmp_path: Path) -> None:
    """It is gone, and the others do not know it yet: its connections hang."""
    peers = swarm(tmp_path, collect_s=1.0, deadline_s=2.0, attempts=3)
    first, second, *_ = ranked(peers.ids, 1, 0)
    dead = next(node for node in peers.nodes if node.peer_id == first)
    others = [node for node in peers.nodes if node is not dead]
    began = [node.invoke("peer", {"tick": values.TRIGGER}) for node in others]
    peers.net.crash(dead)
    peers.net.run_until_idle()
    for node, execution in zip(others, began, strict=True):
        stats = node.outputs(execution)["stats"]
        assert (stats["round"], stats["contributors"], stats["alone"]) == (1, 3, 0)
        assert stats["coordinator"] == str(second)
    assert len({node.values("model")[0].tobytes() for node in others}) == 1


def test_without_a_quorum_each_goes_on_alone(tmp_path: Path) -> None:
    peers = swarm(tmp_path, quorum=4, collect_s=0.5, deadline_s=1.0)
    peers.net.crash(peers.nodes[0])
    start = peers.weights[0]
    for client, told in zip(peers.clients[1:], tick(peers), strict=True):
        assert (told["stats"]["alone"], told["stats"]["contributors"]) == (1, 1)
        close(told["model"], client.trained(start), 1e-6)


def test_a_peer_that_restarts_goes_on_with_the_others(tmp_path: Path) -> None:
    peers = swarm(tmp_path, quorum=2, collect_s=0.5, deadline_s=1.0)
    tick(peers)
    lagging = peers.nodes[1]
    lagging.checkpoint()
    peers.net.crash(lagging)
    for _ in range(3):
        tick(peers)
    peers.net.restart(lagging)
    peers.net.run_until_idle()
    for _ in range(8):
        told = tick(peers)
    assert len({each["stats"]["round"] for each in told}) == 1
    assert len({each["model"].tobytes() for each in told}) == 1


# -- the component ---------------------------------------------------------------------------

MEMBERS = PeerIdVec(sorted(PeerId.from_seed(i) for i in range(5)))
ME = MEMBERS[0]
TOLD = Metadata(num_samples=3)


def at(source: PeerId | None = None, now_ns: int = 0) -> Context:
    return Context(self_peer=ME, source_peer=source, now_ns=now_ns)


def number(value: int) -> Any:
    return np.array([value], np.int64)


W = np.ones(2, np.float32)


def begun(**config: Any) -> SwarmRounds:
    part = SwarmRounds(SwarmRoundsConfig(size=2, attempts=1, **config))
    part.begin(at(), MEMBERS, W)
    part.keep(at(), W, TOLD)
    return part


def coordinator(round_: int) -> PeerId:
    return ranked(MEMBERS, round_, 0)[0]


LIES = {
    "size": (np.ones(1, np.float32), number(1)),
    "NaN": (np.array([0, np.nan], np.float32), number(1)),
    "huge": (np.array([0, 1e30], np.float32), number(1)),
    "round 0": (W, number(0)),
    "rounds": (W, np.ones(3, np.int64)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_by_name(lie: str) -> None:
    part, (weights, round_) = begun(), LIES[lie]
    with pytest.raises(ContributionRefused, match=str(MEMBERS[1])):
        part.accept(at(MEMBERS[1]), MEMBERS, weights, Metadata(), round_)
    with pytest.raises(ContributionRefused, match=str(MEMBERS[1])):
        part.admit(at(MEMBERS[1]), MEMBERS, weights, TOLD, round_)


def test_weights_are_taken_once_and_from_coordinators_alone() -> None:
    part, right = begun(), coordinator(1)
    wrong = next(peer for peer in MEMBERS if peer not in (right, ME))
    with pytest.raises(ContributionRefused, match="does not coordinate round 1"):
        part.accept(at(wrong), MEMBERS, W, Metadata(), number(1))
    assert part.accept(at(right), MEMBERS, 2 * W, Metadata(text="x" * 999), number(1))
    with pytest.raises(StaleRound):
        part.accept(at(right), MEMBERS, 3 * W, Metadata(), number(1))
    weights, stats = part.result(at())
    assert list(weights) == [2, 2]
    assert "text" not in stats


def test_one_peer_alone_pushes_nobody_forward() -> None:
    part = begun()
    liar = coordinator(1 + 777)
    with pytest.raises(ContributionRefused, match="no other peer has said so"):
        part.accept(at(liar), MEMBERS, W, Metadata(), number(1 + 777))
    honest = next(n for n in range(50, 99) if coordinator(n) not in (liar, ME))
    assert part.accept(at(coordinator(honest)), MEMBERS, W, Metadata(), number(honest))
    with pytest.raises(ContributionRefused, match="no other peer has said so"):
        part.accept(at(liar), MEMBERS, W, Metadata(), number(1 + 777))


def test_a_coordinator_collects_one_round_at_a_time() -> None:
    mine = next(n for n in range(1, 99) if coordinator(n) == ME)
    part = begun(collect_s=1.0)
    with pytest.raises(ContributionRefused, match=r"is ahead|does not coordinate"):
        part.admit(at(MEMBERS[1]), MEMBERS, W, TOLD, number(mine + 500))
    part._round = mine
    assert part.admit(at(MEMBERS[1]), MEMBERS, W, TOLD, number(mine))
    assert list(part.publish(at(), W)) == [mine]
    with pytest.raises(StaleRound):
        part.admit(at(MEMBERS[2]), MEMBERS, W, TOLD, number(mine))
    fresh = SwarmRounds(part.config)
    fresh.restore(part.serialize())
    assert fresh.serialize() == part.serialize()


def test_errors_say_what_to_do() -> None:
    part = begun()
    with pytest.raises(RoundUnderWay, match="wait for its end"):
        part.begin(at(), MEMBERS, W)
    with pytest.raises(NotEnoughPeers):
        SwarmRounds(SwarmRoundsConfig(size=2)).begin(at(), PeerIdVec([ME]), W)
    good: dict[str, Any] = {"model": (FEATURES, CLASSES)}
    for wrong in (
        {"peers": 1}, {"quorum": 9}, {"attempts": 0}, {"collect_s": 20.0}, {"deadline_s": 0},
        {"aggregator": "bbnode.OrtBackend"}, {"aggregator": "bbnode.NormClipping"},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            SwarmTraining(**good, **wrong).build()
    SwarmTraining(**good, aggregator="bbnode.Median").build()
