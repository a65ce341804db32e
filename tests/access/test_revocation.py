"""Revocation lists: signed by the owner, newer ones only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.access.errors import GrantError, Refusal, RevocationRefused
from bbnode.access.revocation import (
    REVOCATIONS,
    newer,
    open_revocations,
    revocations_from_text,
    revoke,
)
from bbnode.ir.caps import MAX_REVOKED
from bbnode.ir.peer import PeerId
from tests.access.strategies import MEMBER, NETWORK, OTHER, OWNER


@given(st.sets(st.integers(0, 2**64 - 1), max_size=9), st.sets(st.integers(0, 99), max_size=9))
def test_round_trip(serials, seeds):
    peers = {PeerId.from_seed(seed) for seed in seeds}
    made = revoke(OWNER, None, serials=serials, peers=peers)
    assert open_revocations(revocations_from_text(made.text), NETWORK) == made
    assert (made.serials, made.peers, made.sequence) == (serials, peers, 1)


def test_no_byte_can_change():
    raw = revoke(OWNER, None, serials=[1, 2], peers=[MEMBER.peer_id, OTHER.peer_id]).raw
    for at in range(len(raw)):
        for mask in (0x01, 0x80):
            changed = bytearray(raw)
            changed[at] ^= mask
            with pytest.raises(RevocationRefused):
                open_revocations(bytes(changed), NETWORK)
        with pytest.raises(RevocationRefused):
            open_revocations(raw[:at], NETWORK)


def test_it_grows_and_an_older_one_is_refused():
    first = revoke(OWNER, None, serials=[1])
    second = revoke(OWNER, first, peers=[MEMBER.peer_id])
    assert (second.sequence, second.serials) == (2, {1})
    assert second.revokes(1, OTHER.peer_id)
    assert second.revokes(5, MEMBER.peer_id)
    assert not second.revokes(5, OTHER.peer_id)
    assert newer(None, first) is first
    assert newer(first, second) is second
    assert newer(second, second) is None
    for old in (first, revoke(OWNER, first, serials=[9])):
        with pytest.raises(RevocationRefused) as caught:
            newer(second, old)
        assert caught.value.reason is Refusal.STALE
    third = revoke(OWNER, second, reinstate=[MEMBER.peer_id])
    assert not third.revokes(5, MEMBER.peer_id)


def test_only_the_owner_revokes():
    with pytest.raises(GrantError, match="only the owner"):
        revoke(OTHER, revoke(OWNER, None))
    with pytest.raises(RevocationRefused) as caught:
        open_revocations(revoke(OTHER, None).raw, NETWORK)
    assert caught.value.reason is Refusal.WRONG_NETWORK


def test_bounds():
    full = revoke(
        OWNER,
        None,
        serials=range(2**64 - MAX_REVOKED, 2**64),
        peers=[PeerId.from_seed(i) for i in range(MAX_REVOKED)],
    )
    assert len(full.raw) <= REVOCATIONS.max_bytes
    with pytest.raises(GrantError, match="new network"):
        revoke(OWNER, full, serials=[1])
    with pytest.raises(RevocationRefused) as caught:
        open_revocations(b"\0" * (REVOCATIONS.max_bytes + 1), NETWORK)
    assert caught.value.reason is Refusal.TOO_LARGE
