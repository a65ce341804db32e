"""`RoundMixing` and its graphs: weights that sum to 1, rounds that do not mix, and liars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ComponentError,
    ContributionRefused,
    RoundMixing,
    RoundMixingConfig,
    RoundUnderWay,
    StaleRound,
)
from bbnode.components.errors import InvalidComponentConfig, NotEnoughPeers, NothingToAggregate
from bbnode.components.gossip import topology
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, PeerIdVec
from tests.components.fakes import Context

MEMBERS = tuple(sorted(PeerId.from_seed(i) for i in range(12)))
S = 1_000_000_000


def matrix(rows: dict[PeerId, dict[PeerId, float]]) -> np.ndarray:
    """Return W, with what is left on the diagonal."""
    peers = sorted(rows)
    found = np.array([[rows[a].get(b, 0.0) for b in peers] for a in peers])
    return found + np.diag(1 - found.sum(axis=1))


@pytest.mark.parametrize("graph", topology.GRAPHS)
@pytest.mark.parametrize("count", [2, 3, 5, 6, 9, 12])
def test_weights_are_symmetric_and_sum_to_one(graph: str, count: int) -> None:
    members = MEMBERS[:count]
    w = matrix({peer: topology.on_graph(graph, peer, members) for peer in members})
    np.testing.assert_allclose(w, w.T)
    np.testing.assert_allclose(w.sum(axis=0), 1)
    assert w.min() >= 0
    # Connected: one eigenvalue is 1, and the others are smaller.
    sizes = np.sort(np.abs(np.linalg.eigvalsh(w)))
    assert sizes[-1] == pytest.approx(1)
    assert sizes[-2] < 1 - 1e-6


def test_graphs_are_what_they_are_called() -> None:
    assert topology.ring(0, 5) == {1, 4}
    assert topology.torus(0, 9) == {1, 2, 3, 6}
    assert topology.torus(0, 7) == {1, 6}
    assert topology.complete(1, 3) == {0, 2}
    assert topology.on_graph("ring", MEMBERS[0], MEMBERS) == {
        MEMBERS[1]: pytest.approx(1 / 3),
        MEMBERS[11]: pytest.approx(1 / 3),
    }
    a, b, c = MEMBERS[:3]
    star = {(a, b), (a, c)}
    assert topology.on_edges(star, b) == {a: pytest.approx(1 / 3)}
    w = matrix({peer: topology.on_edges(star, peer) for peer in (a, b, c)})
    np.testing.assert_allclose(w.sum(axis=0), 1)


@pytest.mark.parametrize(("side", "axes"), [(3, 2), (2, 3), (2, 1)])
def test_as_many_rounds_as_axes_are_the_mean_of_all(side: int, axes: int) -> None:
    members = MEMBERS[: side**axes]
    product = np.eye(len(members))
    for number in range(5, 5 + axes):
        rows = {peer: topology.on_grid(side, axes, number, peer, members) for peer in members}
        product = matrix(rows) @ product
    np.testing.assert_allclose(product, 1 / len(members), atol=1e-12)


def test_a_grid_has_places() -> None:
    with pytest.raises(topology.TooManyPeers, match="make side at least 4"):
        topology.on_grid(3, 2, 0, MEMBERS[0], MEMBERS)
    assert len(topology.on_grid(0, 2, 0, MEMBERS[0], MEMBERS)) == 3


# -- the component ---------------------------------------------------------------------------

ME, LEFT, RIGHT = MEMBERS[0], MEMBERS[1], MEMBERS[2]
VIEW = PeerIdVec(MEMBERS[:3])


def made(**config: Any) -> RoundMixing:
    return RoundMixing(RoundMixingConfig(**{"size": 2, "deadline_s": 10.0, **config}))


def at(source: PeerId | None = None, now_ns: int = 0) -> Context:
    return Context(self_peer=ME, source_peer=source, now_ns=now_ns)


def vector(*values: float) -> Any:
    return np.array(values, np.float32)


def number(value: int) -> Any:
    return np.array([value], np.int64)


def begun(part: RoundMixing, now_ns: int = 0) -> int:
    found, mask = part.begin(at(now_ns=now_ns), VIEW)
    assert list(mask) == [False, True, True]
    return int(found[0])


def test_a_round_waits_for_all_neighbours_and_says_so_once() -> None:
    part = made()
    assert begun(part) == 1
    assert not part.arrive(at(LEFT), vector(3, 3), number(1))
    assert not part.own(at(), vector(0, 0))
    # Weights of the next round of a neighbour that is ahead do not count for this one.
    assert not part.arrive(at(RIGHT), vector(9, 9), number(2))
    assert part.arrive(at(RIGHT), vector(6, 0), number(1))
    assert not part.overdue(at(), number(1))
    mean, stats = part.mix(at())
    np.testing.assert_allclose(mean, [3, 1], atol=1e-6)
    assert (stats["round"], stats["contributors"], stats["missing"]) == (1, 3, 0)
    assert begun(part) == 2
    assert not part.own(at(), vector(0, 0))
    assert part.arrive(at(LEFT), vector(0, 0), number(2))


def test_who_is_late_leaves_its_weight_with_the_peer() -> None:
    part = made()
    begun(part)
    part.arrive(at(LEFT), vector(3, 3), number(1))
    part.own(at(), vector(0, 6))
    assert part.overdue(at(), number(1))
    assert not part.overdue(at(), number(1))
    mean, stats = part.mix(at())
    np.testing.assert_allclose(mean, [1, 5], atol=1e-6)
    assert (stats["missing"], stats["own_share"]) == (1, pytest.approx(2 / 3))
    assert stats["missing_why"] == str(RIGHT)
    with pytest.raises(StaleRound, match="of round 1, and now is 1"):
        part.arrive(at(RIGHT), vector(0, 0), number(1))


def test_a_group_takes_the_mean_of_those_that_are_there() -> None:
    part = made(graph="grid", side=3, axes=1, absent="present")
    begun(part)
    part.own(at(), vector(0, 6))
    part.arrive(at(LEFT), vector(3, 3), number(1))
    mean, _ = part.mix(at())
    np.testing.assert_allclose(mean, [1.5, 4.5], atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_are_as_old_as_they_may_be(staleness: int) -> None:
    part = made(staleness=staleness)
    for round_ in (1, 2):
        begun(part)
        part.own(at(), vector(0, 0))
        part.arrive(at(LEFT), vector(3 * round_, 0), number(round_))
        if round_ == 1:
            part.arrive(at(RIGHT), vector(30, 0), number(1))
        mean, stats = part.mix(at())
    assert mean[0] == pytest.approx(12 if staleness else 2)
    assert (stats["stale"], stats["missing"]) == (staleness, 1 - staleness)


def test_one_that_fell_behind_goes_on_where_the_others_are() -> None:
    part = made()
    begun(part)
    part.own(at(), vector(0, 0))
    part.mix(at())
    part.arrive(at(LEFT), vector(0, 0), number(1 << 40))
    assert begun(part) == 2, "one peer alone pushes nobody forward"
    part.own(at(), vector(0, 0))
    part.mix(at())
    part.arrive(at(RIGHT), vector(0, 0), number(700))
    saved = part.serialize()
    assert begun(part) == 700
    part.restore(saved)
    assert begun(part, now_ns=10 * S) == 701, "they are beyond a round whose time is over"


LIES = {
    "size": (vector(1), number(1)),
    "dtype": (np.zeros(2), number(1)),
    "NaN": (vector(0, np.nan), number(1)),
    "infinity": (vector(0, -np.inf), number(1)),
    "huge": (vector(0, 1e30), number(1)),
    "text": (Metadata(a=1), number(1)),
    "round 0": (vector(0, 0), number(0)),
    "round -5": (vector(0, 0), number(-5)),
    "rounds": (vector(0, 0), np.zeros(4, np.int64)),
    "float round": (vector(0, 0), np.ones(1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_by_name(lie: str) -> None:
    part = made()
    begun(part)
    with pytest.raises(ContributionRefused, match=str(LEFT)):
        part.arrive(at(LEFT), *LIES[lie])
    part.own(at(), vector(1, 1))
    assert part.mix(at())[1]["missing"] == 2


def test_a_flood_is_bounded() -> None:
    part = made(max_peers=2)
    begun(part)
    for each in range(1, 500):
        part.arrive(at(LEFT), vector(0, 0), number(each))
    with pytest.raises(ContributionRefused, match="already"):
        part.arrive(at(LEFT), vector(0, 0), number(499))
    assert len(part.serialize()) < 1500
    part.arrive(at(RIGHT), vector(0, 0), number(1))
    with pytest.raises(ContributionRefused, match="max_peers"):
        part.arrive(at(MEMBERS[5]), vector(0, 0), number(1))


def test_strangers_are_refused_where_members_are_known() -> None:
    texts = tuple(str(peer) for peer in VIEW)
    for part in (made(members=texts), made(graph="edges", edges=((texts[0], texts[1]),))):
        with pytest.raises(ContributionRefused, match=r"member|edge"):
            part.arrive(at(MEMBERS[7]), vector(0, 0), number(1))
    foreign = made(members=texts[1:])
    with pytest.raises(InvalidComponentConfig, match="none of the members"):
        foreign.begin(at(), VIEW)


def test_errors_say_what_to_do() -> None:
    part = made()
    begun(part)
    with pytest.raises(RoundUnderWay, match="wait for its end"):
        begun(part, now_ns=S)
    assert begun(part, now_ns=30 * S) == 2
    with pytest.raises(NothingToAggregate):
        part.mix(at())
    with pytest.raises(NotEnoughPeers):
        made().begin(at(), PeerIdVec([ME]))
    for wrong in (
        {"graph": "star"}, {"edges": ((str(ME), str(LEFT)),)}, {"graph": "edges"},
        {"members": ("me",)}, {"graph": "edges", "edges": ((str(ME), str(ME)),)},
        {"staleness": -1}, {"deadline_s": 0.0}, {"absent": "nobody"},
    ):  # fmt: skip
        with pytest.raises(InvalidComponentConfig):
            made(**wrong)


def test_state_is_saved_and_restored() -> None:
    part = made()
    begun(part)
    part.own(at(), vector(1, 2))
    part.arrive(at(LEFT), vector(3, 4), number(1))
    part.arrive(at(LEFT), vector(3, 5), number(2))
    fresh = made()
    fresh.restore(part.serialize())
    assert fresh.serialize() == part.serialize()
    assert fresh.arrive(at(RIGHT), vector(5, 6), number(1))
    np.testing.assert_allclose(fresh.mix(at())[0], [3, 4], atol=1e-6)
    with pytest.raises(ComponentError):
        made().restore(b"junk")
