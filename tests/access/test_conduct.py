"""What misbehaviour costs: points that fade, a slower rate, a cut, and then a longer one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.access import conduct as conduct_module
from bbnode.access.conduct import OFFENCES, THROTTLED, Conduct, Offence
from bbnode.access.decision import PeerRates, Reason
from bbnode.access.policy import Policy
from bbnode.ir.caps import (
    BACKOFF_S,
    CUT_AT,
    FORGIVEN_AFTER_S,
    HALF_LIFE_S,
    MAX_BACKOFF_S,
    THROTTLED_AT,
)
from bbnode.ir.peer import PeerId

S_NS = 1_000_000_000
PEER, OTHER = PeerId.from_seed("bad"), PeerId.from_seed("good")
# What honest peers may do, in any number.
FORGIVABLE = [each for each in Offence if OFFENCES[each].ceiling < math.inf]


def cut(conduct: Conduct, now_s: float, peer: PeerId = PEER) -> int:
    """Offend until the cut; how many offences that took."""
    for count in range(1, 1000):
        if conduct.note(peer, Offence.UNDECODABLE, int(now_s * S_NS)):
            return count
    raise AssertionError("never cut off")


def test_every_offence_has_its_weight():
    assert set(OFFENCES) == set(Offence)
    assert all(0 < weight.points <= CUT_AT for weight in OFFENCES.values())
    assert all(weight.ceiling in (math.inf, THROTTLED_AT) for weight in OFFENCES.values())


def test_a_cut_lasts_longer_each_time_and_is_forgiven_in_the_end():
    conduct, now_s, lengths = Conduct(), 5.0, []
    for _ in range(9):
        assert cut(conduct, now_s) == math.ceil(CUT_AT / OFFENCES[Offence.UNDECODABLE].points)
        record = conduct.records[PEER]
        lengths.append(record.refused_s(int(now_s * S_NS)))
        # What was under way when it was cut is not held against it.
        assert not any(conduct.note(PEER, Offence.FLOOD, int(now_s * S_NS)) for _ in range(1000))
        now_s += lengths[-1]
        assert record.refused_s(int(now_s * S_NS)) == 0
    doubled = [BACKOFF_S * 2**n for n in range(9)]
    assert lengths == pytest.approx([min(each, MAX_BACKOFF_S) for each in doubled])
    now_s += FORGIVEN_AFTER_S
    cut(conduct, now_s)
    assert conduct.records[PEER].refused_s(int(now_s * S_NS)) == pytest.approx(BACKOFF_S)


@given(
    each=st.sampled_from(FORGIVABLE),
    gaps_ns=st.lists(st.integers(0, 10 * S_NS), min_size=1, max_size=300),
)
def test_what_honest_peers_do_never_cuts_them_off(each, gaps_ns):
    conduct, now_ns = Conduct(), 0
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        for _ in range(50):
            assert not conduct.note(PEER, each, now_ns)
        assert conduct.records[PEER].points_at(now_ns) <= THROTTLED_AT
        # They are slowed, and never for long.
        assert conduct.wait_s(PEER, now_ns) < 1.0


@given(
    seeds=st.lists(
        st.tuples(st.sampled_from(list(Offence)), st.integers(0, 30 * S_NS)), max_size=200
    )
)
def test_the_same_offences_have_the_same_end(seeds):
    one, other, now_ns = Conduct(), Conduct(), 0
    for offence, gap_ns in seeds:
        now_ns += gap_ns
        assert one.note(PEER, offence, now_ns) == other.note(PEER, offence, now_ns)
        record = one.records[PEER]
        assert 0 <= record.points_at(now_ns) < CUT_AT
        assert record.refused_s(now_ns) <= MAX_BACKOFF_S
    assert one.records == other.records


def test_points_fade():
    conduct = Conduct()
    conduct.note(PEER, Offence.FLOOD, 0)
    points = OFFENCES[Offence.FLOOD].points
    assert conduct.records[PEER].points_at(int(HALF_LIFE_S * S_NS)) == pytest.approx(points / 2)
    # Now and then is no matter.
    assert not any(conduct.note(PEER, Offence.PROTOCOL, int(n * 60 * S_NS)) for n in range(1, 1000))


def test_the_records_are_bounded(monkeypatch):
    monkeypatch.setattr(conduct_module, "MAX_OFFENDERS", 10)
    conduct = Conduct()
    for n in range(30):
        conduct.note(PeerId.from_seed(n), Offence.SLOW, n)
        conduct.note(PEER, Offence.UNKNOWN_SITE, n)
    assert len(conduct.records) == 10
    assert PEER in conduct.records, "who goes on is not forgotten"


def decide(policy: Policy, now_s: float, peer: PeerId = PEER):
    return policy.decide_envelope(peer, 10, now_ns=int(now_s * S_NS), unix_s=0.0)


def test_the_policy_throttles_cuts_and_takes_back():
    policy = Policy(limits=PeerRates())
    assert decide(policy, 0).allowed
    while policy.explain(PEER, now_ns=0, unix_s=0.0)[4].detail.startswith("it has") or (
        "throttled" not in policy.explain(PEER, now_ns=0, unix_s=0.0)[4].detail
    ):
        assert not policy.conduct.note(PEER, Offence.UNDECODABLE, 0)
    # Throttled: so many at once, and the rest has to wait, but is not refused.
    passed = [decide(policy, 0) for _ in range(150)]
    assert sum(each.allowed for each in passed) == THROTTLED.burst
    late = passed[-1]
    assert (late.reason, late.rule) == (Reason.MISCONDUCT, "conduct")
    assert 0 < late.wait_s < 0.1
    assert decide(policy, late.wait_s).allowed
    assert policy.decide_peer(PEER, now_ns=0).allowed
    # Cut: refused before it has said anything, and with what it had under way.
    while not policy.conduct.note(PEER, Offence.UNDECODABLE, 0):
        pass
    for decision in (
        policy.decide_peer(PEER, now_ns=0),
        policy.decide_connection(PEER, credentials=b"", classes=(), now_ns=0, unix_s=0.0),
        decide(policy, 0),
    ):
        assert (decision.allowed, decision.reason, decision.wait_s) == (
            False,
            Reason.MISCONDUCT,
            0.0,
        )
        assert f"bbnode peers allow {PEER}" in decision.detail
        assert "undecodable 20" in decision.detail
    assert decide(policy, 0, OTHER).allowed
    assert policy.decide_peer(PEER, now_ns=int(BACKOFF_S * S_NS)).allowed
    policy.conduct.note(PEER, Offence.FLOOD, 0)
    policy.conduct.pardon(PEER)
    assert policy.decide_peer(PEER, now_ns=0).allowed
    assert policy.explain(PEER, now_ns=0, unix_s=0.0)[4].detail == "it has done nothing wrong"


def test_who_is_known():
    policy = Policy()
    assert not policy.is_known(PEER, now_ns=0)
    policy.conduct.make_known(PEER)
    assert policy.is_known(PEER, now_ns=0)
    policy.conduct.note(PEER, Offence.UNKNOWN_SITE, 0)
    assert policy.is_known(PEER, now_ns=0), "one thing is no matter"
    policy.conduct.note(PEER, Offence.FLOOD, 0)
    assert not policy.is_known(PEER, now_ns=0)
    assert policy.is_known(PEER, now_ns=int(HALF_LIFE_S * S_NS))
