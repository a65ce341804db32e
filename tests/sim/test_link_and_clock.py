"""Links and clocks alone: what they do to envelopes and to time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.sim import MS, Clock, InvalidClock, InvalidLink, LinkModel, S
from bbnode.sim.models import MAX_DRIFT_PPM
from bbnode.sim.node import Wire

TIMES = st.integers(0, 10 * 365 * 86_400 * S)
CLOCKS = st.builds(
    Clock,
    offset_ns=st.integers(0, 100 * S),
    drift_ppm=st.integers(-MAX_DRIFT_PPM, MAX_DRIFT_PPM),
)


def wire(link: LinkModel, seed: int = 0, source: str = "a", target: str = "b") -> Wire:
    return Wire(SimpleNamespace(name=source), SimpleNamespace(name=target), link, seed)


def test_a_plain_link_adds_its_latency_and_nothing_else() -> None:
    made = wire(LinkModel(latency_ns=5 * MS))
    assert [made.arrivals(at) for at in (0, 1, 7 * MS)] == [[5 * MS], [5 * MS + 1], [12 * MS]]


def test_loss_and_duplication_at_their_ends() -> None:
    assert wire(LinkModel(loss=1.0)).arrivals(0) == []
    assert wire(LinkModel(duplication=1.0)).arrivals(0) == [MS, MS]
    assert wire(LinkModel(loss=1.0, duplication=1.0)).arrivals(0) == []


def test_faults_come_as_often_as_they_should() -> None:
    made = wire(LinkModel(loss=0.25, duplication=0.5))
    counts = [len(made.arrivals(0)) for _ in range(20_000)]
    # Four standard deviations of the binomial: 0.25 ± 0.0123, and half of what is left.
    assert abs(counts.count(0) / 20_000 - 0.25) < 0.0123
    assert abs(counts.count(2) / 20_000 - 0.375) < 0.0137


def test_a_link_keeps_the_order_whatever_its_jitter() -> None:
    made = wire(LinkModel(latency_ns=MS, jitter_ns=10 * MS))
    sent = list(range(0, 100 * MS, MS // 2))
    arrivals = [made.arrivals(at)[0] for at in sent]
    assert arrivals == sorted(arrivals)
    assert len({at - start for at, start in zip(arrivals, sent, strict=True)}) > 50
    assert all(at - start >= MS for at, start in zip(arrivals, sent, strict=True))


def test_a_reordered_envelope_is_overtaken_and_holds_up_nobody() -> None:
    made = wire(LinkModel(reorder=0.3, reorder_ns=5 * MS))
    sent = list(range(0, 100 * MS, MS))
    arrivals = [made.arrivals(at)[0] for at in sent]
    assert arrivals != sorted(arrivals)
    late = [at - start - MS for at, start in zip(arrivals, sent, strict=True)]
    assert all(0 <= delay <= 5 * MS + 1 for delay in late)
    assert sum(delay == 0 for delay in late) > 50


def test_draws_follow_from_seed_and_names_alone() -> None:
    link = LinkModel(loss=0.5, jitter_ns=MS)

    def drawn(**who: object) -> list[list[int]]:
        made = wire(link, **who)
        return [made.arrivals(0) for _ in range(50)]

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    assert drawn(seed=1) != drawn(seed=1, source="b", target="a")
    assert drawn(seed=1, source="ab", target="c") != drawn(seed=1, source="a", target="bc")


@pytest.mark.parametrize(
    "wrong",
    [{"latency_ns": -1}, {"jitter_ns": 0.5}, {"loss": 1.1}, {"duplication": -0.1},
     {"reorder": float("nan")}, {"reorder_ns": True}, {"loss": "half"}],
)  # fmt: skip
def test_a_wrong_link_is_refused_by_the_name_of_its_field(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidLink, match=next(iter(wrong))):
        LinkModel(**wrong)


@pytest.mark.parametrize("wrong", [{"drift_ppm": MAX_DRIFT_PPM + 1}, {"offset_ns": -1}])
def test_a_wrong_clock_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidClock):
        Clock(**wrong)


@given(CLOCKS, TIMES)
def test_a_timer_matures_at_its_time_and_not_before(clock: Clock, local: int) -> None:
    due = clock.true_ns(local)
    assert clock.local_ns(due) >= local
    assert due == 0 or clock.local_ns(due - 1) < local


@given(CLOCKS, TIMES, TIMES)
def test_a_clock_never_goes_back(clock: Clock, one: int, other: int) -> None:
    first, second = sorted((one, other))
    assert clock.local_ns(first) <= clock.local_ns(second)


def test_a_fast_clock_is_fast() -> None:
    assert Clock(drift_ppm=100).local_ns(10 * S) == 10 * S + MS
    assert Clock(offset_ns=S, drift_ppm=-100).local_ns(10 * S) == 11 * S - MS
