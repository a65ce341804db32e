"""`PairwiseMean`: the sum over all peers stays, whatever is late, lost, repeated or a lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import ComponentError, ContributionRefused, PairwiseMean, RoundUnderWay
from bbnode.components.errors import InvalidComponentConfig, NothingToAggregate
from bbnode.components.gossip.pairwise import PairwiseMeanConfig
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec, ResponseBatch
from tests.components.fakes import PEERS, Context

A, B = PEERS[:2]
S = 1_000_000_000


class Pair:
    """Components of some peers, and exchanges between them that a test takes apart."""

    def __init__(self, values: list[list[float]], **config: Any) -> None:
        self.parts = {
            peer: PairwiseMean(PairwiseMeanConfig(size=len(value), **config))
            for peer, value in zip(PEERS, values, strict=False)
        }
        self.now_ns, self.execution = 0, 0
        for peer, value in zip(PEERS, values, strict=False):
            self.parts[peer].contribute(self.at(peer), np.array(value, np.float32))

    def at(self, peer: PeerId, source: PeerId | None = None, execution: int = 0) -> Context:
        return Context(self_peer=peer, source_peer=source, now_ns=self.now_ns, execution=execution)

    def offer(self, a: PeerId, b: PeerId) -> tuple[int, Any, Any]:
        self.execution += 1
        context = self.at(a, execution=self.execution)
        return self.execution, *self.parts[a].offer(context, PeerIdVec([b]))

    def answer(self, a: PeerId, b: PeerId, offer: Any, head: Any) -> Any:
        return self.parts[b].answer(self.at(b, a), offer, head)

    def settle(self, a: PeerId, b: PeerId, execution: int, move: Any) -> tuple[Any, Any]:
        answers = ResponseBatch(responses=() if move is None else ((b, move),))
        context = self.at(a, execution=execution)
        closing, _, stats = self.parts[a].settle(context, answers)
        return closing, stats

    def exchange(self, a: PeerId, b: PeerId) -> Any:
        execution, offer, head = self.offer(a, b)
        closing, stats = self.settle(a, b, execution, self.answer(a, b, offer, head))
        self.parts[b].close(self.at(b, a), closing)
        return stats

    @property
    def total(self) -> np.ndarray:
        return sum(part.held for part in self.parts.values())


def test_a_pair_takes_its_mean() -> None:
    pair = Pair([[1.0, -4.0], [2.0, 8.0]])
    assert pair.exchange(A, B)["exchanged"] == 1
    for part in pair.parts.values():
        np.testing.assert_allclose(part.held, [1.5, 2.0], atol=1e-6)


def test_a_value_that_changes_moves_the_sum_by_its_change() -> None:
    pair = Pair([[1.0], [3.0]])
    pair.exchange(A, B)
    pair.parts[A].contribute(pair.at(A), np.array([5.0], np.float32))
    np.testing.assert_allclose(pair.total, [8.0], atol=1e-6)


def test_an_answer_that_is_lost_or_late_is_taken_back() -> None:
    pair = Pair([[0.0], [10.0]])
    execution, offer, head = pair.offer(A, B)
    assert pair.answer(A, B, offer, head) == pytest.approx([-5.0])
    assert pair.total == pytest.approx([5.0])  # on its way
    closing, stats = pair.settle(A, B, execution, None)
    assert (stats["exchanged"], list(closing)) == (0, [1, 0])
    # The message that says so is lost as well; the next offer says it again.
    assert pair.exchange(A, B)["exchanged"] == 1
    assert pair.total == pytest.approx([10.0])
    assert pair.parts[A].held == pytest.approx([5.0])


def test_a_peer_that_forgot_its_exchange_in_a_crash_has_it_taken_back() -> None:
    pair = Pair([[0.0], [10.0]])
    saved = pair.parts[A].serialize()
    pair.exchange(A, B)
    execution, offer, head = pair.offer(A, B)
    pair.settle(A, B, execution, pair.answer(A, B, offer, head))
    restarted = PairwiseMean(PairwiseMeanConfig(size=1))
    restarted.restore(saved)
    pair.parts[A] = restarted
    # B's last move is undecided and A knows nothing of it. The first one is in B, and A's is not.
    pair.exchange(A, B)
    assert pair.parts[A].held == pytest.approx([2.5])


def test_who_waits_answers_nobody_and_the_greater_of_two_gives_way() -> None:
    pair = Pair([[0.0], [10.0], [30.0]])
    c = PEERS[2]
    of_a, from_a, head_a = pair.offer(A, B)
    of_b, from_b, head_b = pair.offer(B, A)
    assert pair.answer(B, A, from_b, head_b).size == 0
    move = pair.answer(A, B, from_a, head_a)
    assert move == pytest.approx([-5.0])
    _, from_c, head_c = pair.offer(c, B)
    assert pair.answer(c, B, from_c, head_c).size == 0
    assert pair.settle(B, A, of_b, np.zeros(0, np.float32))[1]["exchanged"] == 0
    assert pair.settle(A, B, of_a, move)[1]["exchanged"] == 1
    assert pair.total == pytest.approx([40.0])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=6),
    overlapping=st.booleans(),
)
def test_the_sum_stays_in_every_order_of_events(
    data: st.DataObject, values: list[float], overlapping: bool
) -> None:
    """Offers, answers, ends and losses in any order; at last everybody meets once more."""
    pair = Pair([[value] for value in values], overlapping=overlapping, max_undecided=8)
    peers, total = list(pair.parts), pair.total
    spread = np.ptp([part.held[0] for part in pair.parts.values()])
    busy: dict[PeerId, list[Any]] = {}
    for _ in range(data.draw(st.integers(0, 25))):
        a = data.draw(st.sampled_from(peers))
        if a not in busy:
            b = data.draw(st.sampled_from([peer for peer in peers if peer != a]))
            busy[a] = [b, *pair.offer(a, b), None]
            continue
        b, execution, offer, head, move = busy[a]
        if move is None and data.draw(st.booleans()):
            busy[a][4] = pair.answer(a, b, offer, head)
            continue
        del busy[a]
        closing, _ = pair.settle(a, b, execution, data.draw(st.sampled_from([move, None])))
        if data.draw(st.booleans()):
            pair.parts[b].close(pair.at(b, a), closing)
    pair.now_ns += 11 * S
    for a in peers:
        for b in peers:
            if a != b:
                pair.exchange(a, b)
    assert pair.total == pytest.approx(total, abs=1e-3)
    assert np.ptp([part.held[0] for part in pair.parts.values()]) <= spread + 1e-3


LIES = {
    "size": np.zeros(3, np.float32),
    "dtype": np.zeros(2),
    "NaN": np.array([0, np.nan], np.float32),
    "huge": np.array([0, 1e30], np.float32),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_by_name(lie: str) -> None:
    pair = Pair([[1.0, 2.0], [3.0, 4.0]])
    before = pair.parts[B].held
    with pytest.raises(ContributionRefused, match=str(A)):
        pair.answer(A, B, LIES[lie], np.array([1, -1], np.int64))
    np.testing.assert_array_equal(pair.parts[B].held, before)
    execution, _, _ = pair.offer(A, B)
    closing, stats = pair.settle(A, B, execution, LIES[lie])
    assert list(closing) == [1, 0]
    assert str(B) in stats["why"]


def test_exchanges_without_an_end_are_bounded() -> None:
    """Peers that offer and never say how it ended; each keeps a vector."""
    pair = Pair([[float(i)] for i in range(8)], max_undecided=2)
    for liar in PEERS[2:]:
        pair.answer(liar, A, np.zeros(1, np.float32), np.array([1, -1], np.int64))
    execution, *_ = pair.offer(A, B)
    assert pair.settle(A, B, execution, None)[1]["presumed"] == 4
    with pytest.raises(ContributionRefused, match="no numbers"):
        pair.answer(B, A, np.zeros(1, np.float32), np.zeros(7, np.int64))
    with pytest.raises(ContributionRefused, match="no numbers"):
        pair.parts[A].close(pair.at(A, B), np.zeros(2, np.float32))


def test_errors_say_what_to_do() -> None:
    pair = Pair([[1.0], [2.0]])
    pair.offer(A, B)
    with pytest.raises(RoundUnderWay, match="wait for the end of a round"):
        pair.offer(A, B)
    empty = PairwiseMean(PairwiseMeanConfig(size=1))
    with pytest.raises(NothingToAggregate, match="contribute a value first"):
        empty.offer(pair.at(A), PeerIdVec([B]))
    with pytest.raises(InvalidComponentConfig, match="size"):
        PairwiseMean(PairwiseMeanConfig(size=0))
    with pytest.raises(ComponentError):
        empty.restore(b"\x01\x02")


def test_state_is_saved_and_restored() -> None:
    pair = Pair([[1.0], [5.0]])
    _, offer, head = pair.offer(A, B)
    pair.answer(A, B, offer, head)
    for part in pair.parts.values():
        fresh = PairwiseMean(part.config)
        fresh.restore(part.serialize())
        assert fresh.serialize() == part.serialize()
