"""Whom to dial, in virtual time: k of the bootstrap peers, and learned ones for a while."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.daemon.network.dial_plan import (
    BOOTSTRAP_MOVES,
    DIAL_RATES,
    GIVE_UP_S,
    MAX_TURNED_AWAY_S,
    PATIENCE_S,
    TURNED_AWAY_S,
    BootstrapDialPlan,
    DialBudget,
    DialState,
    HintSource,
    LearnedDialPlan,
    PeerChange,
    TurnedAway,
)
from bbnode.ir.caps import OWN_WORD_EVERY_S
from bbnode.ir.peer import PeerId

A, B, C, D = PEERS = [PeerId.from_seed(i) for i in range(4)]
HERE = (Multiaddr("/ip4/10.0.0.1/tcp/4001"),)


def test_who_does_not_admit_us_is_left_alone_longer_each_time() -> None:
    away = TurnedAway()
    assert not away.stays_away(A, 0.0)
    assert away.note(A, "revoked", 0.0)
    assert away.stays_away(A, TURNED_AWAY_S - 1)
    assert not away.stays_away(A, TURNED_AWAY_S)
    assert not away.note(A, "revoked", 100.0)
    assert away.next_s(100.0) == 100.0 + 2 * TURNED_AWAY_S
    assert away.note(A, "expired", 200.0)
    for _ in range(10):
        away.note(A, "expired", 300.0)
    assert away.next_s(300.0) == 300.0 + MAX_TURNED_AWAY_S
    away.note(B, "revoked", 300.0)
    assert away.reasons() == {A: "expired", B: "revoked"}
    away.forgive(B)
    away.forgive(C)
    assert away.reasons() == {A: "expired"}
    away.forgive()
    assert not away.stays_away(A, 300.0)
    assert away.next_s(300.0) == math.inf


def test_every_move_of_the_table_is_made_and_no_other() -> None:
    assert len(BOOTSTRAP_MOVES) == 5
    for stand, what in itertools.product(DialState, PeerChange):
        plan = BootstrapDialPlan([A])
        plan._stands[A] = stand
        plan._happens(A, what)
        assert plan.stand(A) is BOOTSTRAP_MOVES.get((stand, what), stand)


def test_all_are_wanted_for_ever_by_default() -> None:
    plan = BootstrapDialPlan(PEERS)
    assert plan.enough == 4
    for connected, now_s in ((set(), 0), ({A}, 1), ({A, B, C, D}, 2), ({B}, 1e6), (set(), 1e7)):
        assert set(plan.advance(connected, now_s)) == set(PEERS)
        assert plan.next_s() == math.inf


def test_one_is_enough_the_others_are_left_and_the_next_is_tried_when_it_goes() -> None:
    plan = BootstrapDialPlan(PEERS, 1)
    assert plan.advance(set(), 0) == [A]
    assert plan.next_s() == PATIENCE_S
    assert plan.advance(set(), PATIENCE_S - 0.1) == [A]
    assert plan.advance(set(), PATIENCE_S) == [A, B]
    assert plan.advance({B}, 6) == [B]
    assert plan.next_s() == math.inf
    assert plan.advance(set(), 100) == [A]  # the turn of B comes after all others'
    assert plan.advance(set(), 100 + PATIENCE_S) == [A, C]
    assert plan.advance(set(), 100 + 2 * PATIENCE_S) == [A, C, D]
    assert plan.advance(set(), 100 + 3 * PATIENCE_S) == [A, C, D, B]
    # Forever while alone.
    assert plan.next_s() == math.inf
    assert set(plan.advance(set(), 1e9)) == set(PEERS)


def test_who_dials_us_counts() -> None:
    plan = BootstrapDialPlan(PEERS, 2)
    assert plan.advance(set(), 0) == [A, B]
    assert plan.advance({C, D}, 1) == [C, D]
    assert plan.advance({C}, 2) == [A, C]
    assert plan.stand(D) is DialState.LEFT
    assert plan.stand(PeerId.from_seed(99)) is None


def test_none_is_enough_when_none_are_asked_for() -> None:
    plan = BootstrapDialPlan(PEERS, 0)
    assert plan.advance(set(), 0) == []
    assert BootstrapDialPlan([], 3).advance({A}, 0) == []


@given(
    k=st.one_of(st.none(), st.integers(0, 5)),
    turns=st.lists(st.tuples(st.sets(st.sampled_from(PEERS)), st.floats(0, 30)), max_size=30),
)
def test_never_too_few_never_more_than_needed(k, turns) -> None:
    plan = BootstrapDialPlan(PEERS, k)
    now_s = 0.0
    for connected, passed_s in turns:
        now_s += passed_s
        wanted = set(plan.advance(connected, now_s))
        assert connected <= wanted
        if len(connected) >= plan.enough:
            assert wanted == connected
            assert plan.next_s() == math.inf
        else:
            assert len(wanted) >= plan.enough
            assert plan.next_s() > now_s
    # Alone for long enough, everybody is tried, unless nobody is wanted.
    now_s += PATIENCE_S * 10
    plan.advance(set(), now_s)
    now_s += PATIENCE_S * 10
    assert set(plan.advance(set(), now_s)) == (set(PEERS) if plan.enough else set())


def test_a_learned_peer_is_dialled_for_a_while() -> None:
    plan = LearnedDialPlan()
    assert plan.want(A, HERE, 0.0, wait_s=2.0)
    assert plan.advance(set(), 0.0) == {}
    assert plan.next_s(0.0) == 2.0
    assert plan.advance(set(), 2.0) == {A: HERE}
    assert not plan.want(A, HERE, 30.0)
    assert plan.advance(set(), 30.0 + GIVE_UP_S - 1) == {A: HERE}
    assert plan.next_s(30.0) == 30.0 + GIVE_UP_S
    assert plan.advance(set(), 30.0 + GIVE_UP_S) == {}
    assert plan.next_s(90.0) == math.inf
    assert len(plan) == 0


def test_a_learned_peer_that_came_is_left_and_one_that_is_told_of_is_kept() -> None:
    plan = LearnedDialPlan()
    plan.want(A, HERE, 0.0)
    plan.want(B, HERE, 0.0, until_dropped=True)
    assert plan.advance({A, B}, 1.0) == {B: HERE}
    plan.want(B, HERE, 2.0)  # a send to it does not end that
    assert plan.advance(set(), 1e6) == {B: HERE}
    plan.drop(B)
    assert plan.advance(set(), 1e6) == {}


def test_learned_peers_are_bounded_and_the_oldest_wish_gives_way() -> None:
    plan = LearnedDialPlan(max_peers=3)
    for peer in (A, B, C):
        plan.want(peer, HERE, 0.0)
    plan.want(A, HERE, 1.0)
    plan.want(D, HERE, 1.0)
    assert set(plan.advance(set(), 1.0)) == {A, C, D}
    for i in range(1000):
        plan.want(PeerId.from_seed(f"flood {i}"), HERE, 2.0)
    assert len(plan) == 3


@given(
    word=st.sampled_from(HintSource),
    waits=st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=200),
)
def test_no_more_are_dialled_than_the_rate_allows(word: HintSource, waits: list[float]) -> None:
    budget, now_s, taken = DialBudget(), 1000.0, 0
    for number, wait_s in enumerate(waits):
        now_s += wait_s
        taken += budget.take(word, PeerId.from_seed(number), now_s)
    rate = DIAL_RATES[word]
    assert taken <= rate.burst + rate.per_second * sum(waits) + 1
    assert taken >= min(len(waits), rate.burst)


@pytest.mark.parametrize("word", [HintSource.OWN, HintSource.STRANGER])
def test_a_peer_that_comes_and_goes_is_taken_at_its_word_once_in_a_while(word: HintSource) -> None:
    budget, peer = DialBudget(), PeerId.from_seed("a")
    assert budget.take(word, peer, 0.0)
    assert not budget.take(word, peer, OWN_WORD_EVERY_S - 0.1)
    assert budget.take(word, peer, OWN_WORD_EVERY_S)
    # What a program asks for is only counted.
    assert budget.take(HintSource.TOLD, peer, OWN_WORD_EVERY_S)
    assert budget.take(HintSource.TOLD, peer, OWN_WORD_EVERY_S)
