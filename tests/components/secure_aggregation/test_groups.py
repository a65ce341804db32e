"""Sums of groups: the median of their means, and what one client that lies can do to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.secure_aggregation.errors import (
    RoundViolated,
    TooFewClients,
    UnmaskingFailed,
)
from bbnode.components.secure_aggregation.graph import groups_of
from bbnode.components.secure_aggregation.messages import pack_by_peer, pack_peers, read_by_peer
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from bbnode.ir.peer import PeerId
from tests.components.secure_aggregation.rounds import Play, group_means, play, quantised_mean

FIVE: dict[str, Any] = {"equal_weights": True, "corrupt": 0.1, "groups": 5}


def five(gone: Any = None, count: int = 25, **settings: Any) -> Play:
    """Five groups of five, of whom four have to stay."""
    p = play(count, size=30, gone=gone, **{**FIVE, **settings})
    p.weights = dict.fromkeys(p.weights, 1)
    return p


def masked(p: Play, liar: int, lie: Any) -> bytes:
    """Run until the vectors are in, where one client changes its masked words."""
    p.letters(p.keys())
    answers = {}
    for n, q in p.parties.items():
        words = q.round.mask(p.server.mail(q.peer), p.vectors[n], p.weights[n], q.draw)
        answers[q.peer] = (lie(words) if n == liar else words).view(np.uint8)
    listing, _ = p.server.take_vectors(answers.items())
    return listing


def test_the_groups_are_dealt_evenly_and_by_the_seed() -> None:
    peers = [PeerId.from_seed(n) for n in range(23)]
    groups = groups_of(peers, 5, b"seed")
    assert sorted(map(len, groups)) == [4, 4, 5, 5, 5]
    assert sorted(peer for group in groups for peer in group) == sorted(peers)
    assert groups_of(peers[::-1], 5, b"seed") == groups
    assert groups_of(peers, 5, b"another") != groups
    assert groups_of(peers, 1, b"seed") == [sorted(peers)]


def test_the_result_is_the_median_of_the_groups_means() -> None:
    p = five(gone={"vectors": [3], "shares": [7]})
    mean, total = p.run()
    means = group_means(p)
    assert len(means) == 5
    np.testing.assert_array_equal(mean, np.median(np.stack(means), axis=0).astype(np.float32))
    assert total == len(p.server.survivors) == 24
    assert (p.server.lost, p.server.fewest) == ({}, 4)


@pytest.mark.parametrize("step", ["keys", "letters", "vectors", "signatures", "shares"])
def test_a_group_of_which_too_few_are_left_is_given_up(step: str) -> None:
    p = five()
    listing = p.keys()
    leavers = [p.number_of(peer) for peer in p.server._groups[2][:2]]
    p.gone = {step: leavers}
    if step == "keys":  # groups are dealt to those that are there
        p = five(gone={"keys": [0, 1, 2, 3, 4, 5]})
        listing = p.keys()
    p.letters(listing)
    mean, total = p.unmask(p.signatures(p.vectors_in()))
    means = group_means(p)
    np.testing.assert_array_equal(mean, np.median(np.stack(means), axis=0).astype(np.float32))
    assert total == sum(len(p.server._left(at)) for at in range(5) if at not in p.server.lost)
    assert list(p.server.lost) == ([4] if step == "keys" else [2])
    assert all(not p.server.has(p.parties[n].peer) for n in leavers) or step == "keys"


def test_with_half_of_the_groups_gone_the_round_fails() -> None:
    p = five()
    listing = p.keys()
    p.gone = {"vectors": [p.number_of(x) for at in (0, 1, 2) for x in p.server._groups[at][:2]]}
    p.letters(listing)
    with pytest.raises(TooFewClients, match=r"3 client\(s\) left, 4 needed"):
        p.vectors_in()


def test_one_client_can_move_a_plain_mean_by_nearly_the_clip() -> None:
    """The known weakness: nobody sees that a contribution is nineteen times too large."""
    p = play(20, size=30, equal_weights=True)
    p.weights = dict.fromkeys(p.weights, 1)
    p.vectors = {n: np.zeros(30, np.float32) for n in p.vectors}

    def lie(words: Any) -> Any:
        words[:-1] += words.dtype.type(19 * p.plan.ring.levels)
        return words

    mean, _ = p.unmask(p.signatures(masked(p, 3, lie)))
    np.testing.assert_allclose(mean, 0.95 * 2.0, rtol=1e-6)


def test_one_client_can_claim_nearly_all_examples_where_these_count() -> None:
    p = play(20, size=30)
    p.weights = dict.fromkeys(p.weights, 10)

    def lie(words: Any) -> Any:
        words[-1] += words.dtype.type(1_800)  # beyond its own cap of 100, within that of all
        return words

    _, total = p.unmask(p.signatures(masked(p, 3, lie)))
    assert total == 2_000


def test_with_groups_it_can_not_leave_the_range_of_the_honest_groups() -> None:
    for sign in (1, -1):
        p = five()

        def lie(words: Any, p: Play = p, sign: int = sign) -> Any:
            words[:-1] += np.array(sign * 3 * p.plan.ring.levels).astype(words.dtype)
            return words

        mean, _ = p.unmask(p.signatures(masked(p, 3, lie)))
        place = p.server._places[p.parties[3].peer]
        honest = [
            quantised_mean(p, [p.number_of(peer) for peer in group])[0]
            for at, group in enumerate(p.server._groups)
            if at != place
        ]
        assert (np.min(honest, axis=0) <= mean).all()
        assert (mean <= np.max(honest, axis=0)).all()


def test_words_that_are_no_contribution_cost_their_group_alone() -> None:
    p = five()
    junk = np.random.default_rng(0)

    def lie(words: Any) -> Any:
        return junk.integers(0, 1 << 31, words.size).astype(words.dtype)

    mean, total = p.unmask(p.signatures(masked(p, 3, lie)))
    place = p.server._places[p.parties[3].peer]
    assert list(p.server.lost) == [place]
    assert "one of them lied" in p.server.lost[place]
    np.testing.assert_array_equal(
        mean, np.median(np.stack(group_means(p)), axis=0).astype(np.float32)
    )
    assert total == 20


def test_with_liars_in_most_groups_the_round_fails() -> None:
    p = five()
    p.letters(p.keys())
    liars = {group[0] for group in p.server._groups[:3]}
    answers = {}
    for n, q in p.parties.items():
        words = q.round.mask(p.server.mail(q.peer), p.vectors[n], 1, q.draw)
        answers[q.peer] = (words + (q.peer in liars)).astype(words.dtype).view(np.uint8)
    listing, _ = p.server.take_vectors(answers.items())
    with pytest.raises(UnmaskingFailed):
        p.unmask(p.signatures(listing))


def test_clients_of_other_groups_do_not_count_for_a_threshold() -> None:
    """Neither as survivors nor by their signatures: a sum is of four of a client's own group."""
    p = five()
    p.letters(p.keys())
    everybody = sorted(q.peer for q in p.parties.values())
    p.vectors_in()
    group = p.server._groups[0]
    client = p.parties[p.number_of(group[0])]
    few = sorted(set(everybody) - set(group[1:3]))
    with pytest.raises(TooFewClients, match=r"3 client\(s\) left, 4 needed"):
        client.round.confirm(pack_peers(few), client.sign)

    p = five()
    p.letters(p.keys())
    signed = p.signatures(p.vectors_in())
    group = p.server._groups[0]
    given = read_by_peer("", signed, 64, 25)
    client = p.parties[p.number_of(group[0])]
    others = {peer: given[peer] for peer in given if peer not in group[:2]}
    with pytest.raises(TooFewClients, match=r"consistency check: 3 client\(s\) left"):
        client.round.reveal(pack_by_peer(others))


def test_signatures_of_strangers_are_refused_with_groups_too() -> None:
    p = five()
    p.letters(p.keys())
    given = read_by_peer("", p.signatures(p.vectors_in()), 64, 25)
    given[PeerId.from_seed("stranger")] = given.pop(min(given))
    for client in list(p.parties.values())[:3]:
        with pytest.raises(RoundViolated, match="not of survivors alone"):
            client.round.reveal(pack_by_peer(given))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"groups": 2}, "groups=2 is not 1, nor 3 to 25"),
        ({"groups": 0}, "groups=0"),
        ({"groups": 26}, "groups=26"),
        ({"corrupt": 0.2}, r"threshold=6 is outside 6 .. 5.*take fewer groups"),
        ({"equal_weights": False}, "groups go with equal_weights"),
        ({"neighbours": 4}, "groups go with equal_weights, and all as neighbours"),
        ({"threshold": 6}, "threshold=6 is outside 4 .. 5"),
    ],
)
def test_groups_that_are_not_safe_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidComponentConfig, match=why):
        RoundPlan.of(SecAggConfig(**{"size": 4, "clients": 25, **FIVE, **wrong}))


def test_the_plan_of_groups() -> None:
    plan = RoundPlan.of(SecAggConfig(size=4, clients=25, **FIVE))
    assert (plan.threshold, plan.corrupt, plan.needed_groups, plan.quorum) == (4, 2, 3, 12)
    assert plan.ring.clients == 5
    one = RoundPlan.of(SecAggConfig(size=4, clients=25, corrupt=0.1))
    assert one.digest != plan.digest
    assert one.quorum == one.threshold == 14
    noisy = SecAggConfig(size=4, clients=25, norm=0.5, client_noise=1.0, **FIVE)
    assert RoundPlan.of(noisy).rho(4) == pytest.approx(0.5, rel=0.02)
