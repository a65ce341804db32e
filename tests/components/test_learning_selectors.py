"""Selectors that count and learn: whose turn it is, how much liars get, what survives a restart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components import (
    ByDataSize,
    ByDataSizeConfig,
    ComponentError,
    Composite,
    DrawingConfig,
    Metadata,
    Oort,
    OortConfig,
    PowerOfTwoChoices,
    PowerOfTwoChoicesConfig,
    ResponseBatch,
    RoundRobin,
)
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.selectors.learned import weighted_draw
from bbnode.ir.peer import PeerId
from tests.components.fakes import Context, Peers

MANY = sorted(PeerId.from_seed(i) for i in range(40))
LEARNING = {
    ByDataSize: ByDataSizeConfig,
    Oort: OortConfig,
    PowerOfTwoChoices: PowerOfTwoChoicesConfig,
    RoundRobin: DrawingConfig,
}


def among(peers: Sequence[PeerId]) -> Context:
    return Context(peer_class="c", peers=Peers({"c": list(peers)}))


def heard(answers: dict[PeerId, dict[str, Any]], missing: Sequence[PeerId] = (), took_s=None):
    return ResponseBatch(
        responses=tuple((p, Composite((b"", Metadata(**answers[p])))) for p in sorted(answers)),
        missing=tuple(missing),
        took_ns=tuple((p, int((took_s or {}).get(p, 1.0) * 1e9)) for p in sorted(answers)),
    )


# --- turns ---------------------------------------------------------------------------------


@given(st.integers(1, 5), st.lists(st.sets(st.integers(1, 9)), min_size=9, max_size=20))
def test_who_stays_has_a_turn_within_the_line_whoever_comes_and_goes(n, presences) -> None:
    selector, since, known = RoundRobin(DrawingConfig()), 0, 0
    seen: set[int] = {0}
    for there in presences:
        present = {0, *there}
        known = known if since else len(seen | present)  # when its place in the line was taken
        chosen = selector.sample(among([MANY[i] for i in present]), n=n)
        seen |= present
        since = 0 if MANY[0] in chosen else since + 1
        assert since < math.ceil(known / n)


def test_a_newcomer_waits_and_a_returner_keeps_its_place() -> None:
    selector = RoundRobin(DrawingConfig())
    first = [selector.sample(among(MANY[:4]), n=1)[0] for _ in range(4)]
    assert sorted(first) == MANY[:4]
    away = first[0]
    others = [p for p in MANY[:4] if p != away]
    assert selector.sample(among([*others, MANY[9]]), n=1)[0] == first[1]
    assert selector.sample(among([*MANY[:4], MANY[9]]), n=2) == tuple(sorted([away, first[2]]))
    assert selector.sample(among([*MANY[:4], MANY[9]]), n=2) == tuple(sorted([first[3], MANY[9]]))


def test_two_choices_share_out_more_evenly_than_one() -> None:
    draws = 400
    two = PowerOfTwoChoices(PowerOfTwoChoicesConfig(seed=3))
    counts = Counter(two.sample(among(MANY), n=1)[0] for _ in range(draws))
    # The mean is 10; single draws over 40 peers have a maximum of about 18 (Mitzenmacher 2001).
    assert max(counts.values()) <= 13
    newcomer = PeerId.from_seed("new")
    later = Counter(two.sample(among([*MANY, newcomer]), n=1)[0] for _ in range(41))
    assert later[newcomer] <= 4  # it catches up with the least loaded, not with all that was


def test_two_choices_leave_those_alone_that_have_not_answered() -> None:
    two = PowerOfTwoChoices(PowerOfTwoChoicesConfig(choices=4))
    busy = two.sample(among(MANY[:4]), n=2)
    free = two.sample(among(MANY[:4]), n=2)
    assert sorted([*busy, *free]) == MANY[:4]
    two.observed(among(MANY), ResponseBatch(responses=((busy[0], b""),), missing=(busy[1],)))
    assert two.sample(among(MANY[:4]), n=2) == busy


# --- numbers of examples ---------------------------------------------------------------------


def test_draws_follow_the_numbers_of_examples() -> None:
    selector = ByDataSize(ByDataSizeConfig(seed=1))
    sizes = dict(zip(MANY[:4], (100, 200, 300, 400), strict=True))
    selector.observed(among(MANY), heard({p: {"num_samples": n} for p, n in sizes.items()}))
    counts = Counter(selector.sample(among(MANY[:4]), n=1)[0] for _ in range(2000))
    for peer, size in sizes.items():  # mean 2 * size, a deviation of at most 22
        assert abs(counts[peer] - 2 * size) < 80


def test_a_lie_about_examples_is_bounded_and_fades_without_answers() -> None:
    selector = ByDataSize(ByDataSizeConfig(max_ratio=5))
    told = {p: {"num_samples": 100} for p in MANY[:9]}
    liar = MANY[9]
    for lie in (10**18, 1e300):
        selector.observed(among(MANY), heard({**told, liar: {"num_samples": lie}}))
        assert selector.weights(MANY[:10])[liar] == 500
    for lie in (-1, math.nan, math.inf, "many", True, 0):
        selector.observed(among(MANY), heard({**told, liar: {"num_samples": lie}}))
    selector.observed(among(MANY), heard(told, missing=[liar]))
    assert selector.weights(MANY[:10])[liar] == 500 / 2**7
    selector.observed(among(MANY), ResponseBatch(responses=((liar, b"no metadata"),)))
    assert selector.weights(MANY[:11])[MANY[10]] == 100  # nobody has heard of it: the median


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_a_weighted_draw_is_distinct_and_does_not_depend_on_order(counter, n) -> None:
    weights = {p: 1.0 + i for i, p in enumerate(MANY[:8])}
    drawn = weighted_draw(weights, n, 7, counter)
    assert drawn == weighted_draw(dict(reversed(weights.items())), n, 7, counter)
    assert len(set(drawn)) == len(drawn) == min(n, 8)


# --- Oort ------------------------------------------------------------------------------------


def explored(config: OortConfig, losses: Sequence[float], took_s: Sequence[float] = ()) -> Oort:
    """Return a selector that has heard of each of the first peers once."""
    selector, peers = Oort(config), MANY[: len(losses)]
    selector.sample(among(peers), n=len(peers))
    answers = {p: {"num_samples": 10, "loss": x} for p, x in zip(peers, losses, strict=True)}
    times = dict(zip(peers, took_s or [1.0] * len(peers), strict=True))
    selector.observed(among(peers), heard(answers, took_s=times))
    return selector


EXPLOIT = {"exploration": 0.0, "min_exploration": 0.0}


def test_the_paper_s_utility() -> None:
    config = OortConfig(clip=100, pace=50, **EXPLOIT)
    selector = explored(config, [1, 2, 3, 4, 5], [1, 1, 2, 4, 1])
    for _ in range(3):
        selector.sample(among(MANY[:5]), n=1)
    ucb = math.sqrt(0.1 * math.log(4) / 1)
    expected = [0, 0.25, 0.5, 0.75, 1]
    expected = [u + ucb for u in expected]
    expected[2] *= (1 / 2) ** 2  # the preferred time is 1 s, the median of 1, 1, 1, 2, 4
    expected[3] *= (1 / 4) ** 2
    scores = selector.scores(selector._arms)
    assert [scores[p] for p in MANY[:5]] == pytest.approx(expected)


def test_high_losses_are_preferred_and_slow_peers_are_not() -> None:
    selector = explored(OortConfig(**EXPLOIT), [0.1] * 10 + [5.0] * 10, [1.0] * 19 + [50.0])
    picked = Counter(p for _ in range(40) for p in selector.sample(among(MANY[:20]), n=5))
    assert set(picked) <= set(MANY[10:19])


def test_the_unknown_are_explored_less_and_less() -> None:
    selector = Oort(OortConfig(exploration_decay=0.5))
    parts = []
    for _ in range(4):
        new = {p for p in MANY if p not in selector._arms}
        chosen = selector.sample(among(MANY), n=5)
        parts.append(len(new & set(chosen)))
        answers = {p: {"num_samples": 10, "loss": 1.0} for p in chosen}
        selector.observed(among(MANY), heard(answers))
    assert parts == [5, 2, 1, 1]


def test_a_pacer_allows_more_time_when_utility_falls() -> None:
    selector = explored(OortConfig(window=2, pace=20, pacer_step=30, **EXPLOIT), [9.0] * 5)
    for loss in (9.0, 1.0, 1.0):
        answers = {p: {"num_samples": 10, "loss": loss} for p in MANY[:5]}
        selector.observed(among(MANY[:5]), heard(answers))
    assert selector._pace == 50
    for _ in range(2):
        selector.observed(among(MANY[:5]), heard(answers))
    assert selector._pace == 50  # it did not fall any more


@pytest.mark.parametrize("liars", [1, 3])
def test_liars_do_not_own_the_draw(liars: int) -> None:
    selector = explored(OortConfig(**EXPLOIT), [1e308] * liars + [1.0 + i / 20 for i in range(17)])
    scores = selector.scores(selector._arms)
    honest = [scores[p] for p in MANY[liars : 17 + liars]]
    assert max(scores.values()) <= 1.0 + 1e-9
    assert max(honest) > 0.05
    for nonsense in (math.nan, -1.0, math.inf, "high", None):
        told = {"num_samples": 10, "loss": nonsense} if nonsense is not None else {}
        selector.observed(among(MANY), heard({p: dict(told) for p in MANY[:liars]}))
    for _ in range(10):
        assert not set(MANY[:liars]) & set(selector.sample(among(MANY[: 17 + liars]), n=5))


def test_who_never_answers_fades_out_of_the_exploration() -> None:
    selector, mute = Oort(OortConfig()), set(MANY[30:])
    wasted = []
    for _ in range(60):
        chosen = selector.sample(among(MANY), n=5)
        wasted.append(len(mute & set(chosen)))
        answers = {p: {"num_samples": 10, "loss": 1.0} for p in chosen if p not in mute}
        selector.observed(among(MANY), heard(answers, missing=[p for p in chosen if p in mute]))
    assert sum(wasted[-20:]) <= 10  # of 100


def test_turns_run_out() -> None:
    selector = explored(OortConfig(max_turns=1, **EXPLOIT), [9.0, 9.0])
    other = selector.sample(among(MANY[:4]), n=2)
    assert set(other) == set(MANY[2:4])


# --- all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LEARNING)
def test_a_restart_changes_no_draw(kind: Any) -> None:
    def drawn(restart: bool) -> list[Any]:
        selector, draws = kind(LEARNING[kind](seed=5)), []
        for number in range(12):
            if restart:
                fresh = kind(LEARNING[kind](seed=5))
                fresh.restore(selector.serialize())
                selector = fresh
            chosen = selector.sample(among(MANY[: 8 + number]), n=4)
            draws.append(chosen)
            told = {p: {"num_samples": 10 + MANY.index(p), "loss": 1.0} for p in chosen[1:]}
            times = {p: float(MANY.index(p)) for p in chosen}
            selector.observed(among(MANY), heard(told, chosen[:1], times))
        return draws

    assert drawn(restart=True) == drawn(restart=False)


@pytest.mark.parametrize("kind", LEARNING)
@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**62))
def test_draws_are_distinct_ordered_and_as_many_as_there_are(kind, count, n, seed) -> None:
    selector = kind(LEARNING[kind](seed=seed))
    drawn = selector.sample(among(MANY[:count]), n=n)
    assert list(drawn) == sorted(set(drawn))
    assert len(drawn) == min(n, count)


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("data", [b"\xc1", b"\x81\xa5draws\x01", b"\x80", b"\x93\x01\x02\x03"])
def test_bytes_that_are_no_state_of_it_are_refused(kind: Any, data: bytes) -> None:
    with pytest.raises(ComponentError):
        kind(LEARNING[kind]()).restore(data)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ByDataSize, {"max_ratio": math.nan}),
        (ByDataSize, {"max_samples": 0}),
        (Oort, {"exploration": 1.5}),
        (Oort, {"window": 0}),
        (Oort, {"clip": -1.0}),
        (Oort, {"penalty": math.inf}),
        (PowerOfTwoChoices, {"choices": 1}),
        (RoundRobin, {"seed": -1}),
    ],
)
def test_settings_have_bounds(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidComponentConfig, match=next(iter(wrong))):
        kind(LEARNING[kind](**wrong))
