"""Membership statements: what is accepted, and why each other thing is refused."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.access import sealed
from bbnode.access.errors import GrantError, Refusal, StatementRefused
from bbnode.access.revocation import revoke
from bbnode.access.statement import STATEMENT, grant, membership_from_text, open_membership, peek
from bbnode.ir.caps import CLOCK_SKEW_S
from bbnode.ir.peer import PeerId
from tests.access.strategies import (
    CLASSES,
    DAY_S,
    GRANTER,
    MEMBER,
    NETWORK,
    NOW_S,
    OTHER,
    OWNER,
    granter,
    member_of,
)


def refused(raw: bytes, network: PeerId = NETWORK, peer: PeerId = MEMBER.peer_id) -> Refusal:
    with pytest.raises(StatementRefused) as caught:
        open_membership(raw, network, peer)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@given(
    classes=CLASSES,
    may_grant=st.booleans(),
    begin=st.integers(0, NOW_S),
    length=st.integers(1, 10 * 365 * DAY_S),
    serial=st.integers(0, 2**64 - 1),
)
def test_round_trip(classes, may_grant, begin, length, serial):
    made = member_of(
        classes=classes,
        may_grant=may_grant,
        not_before_s=begin,
        expires_s=begin + length,
        serial=serial,
    )
    again = open_membership(membership_from_text(made.text), NETWORK, MEMBER.peer_id)
    assert again == made
    own = again.own
    assert own.classes == (None if classes is None else tuple(sorted(classes)))
    assert (own.may_grant, own.serial) == (may_grant, serial)
    assert (own.not_before_s, own.expires_s) == (begin, begin + length)
    assert peek(made.raw) == own
    assert own.serial_text == f"{serial:016x}"


CHAIN = member_of(GRANTER, granter=granter(), classes=["client"], serial=9)


@pytest.mark.parametrize("made", [member_of(classes=["client"]), CHAIN])
def test_no_byte_can_change(made):
    for at in range(len(made.raw)):
        for mask in (0x01, 0x80, 0xFF):
            raw = bytearray(made.raw)
            raw[at] ^= mask
            refused(bytes(raw))
    for cut in range(len(made.raw)):
        refused(made.raw[:cut])
    assert refused(made.raw + b"\0") is Refusal.MALFORMED


@given(st.binary(max_size=300))
def test_garbage_is_refused(raw):
    refused(raw)


@given(st.text(max_size=100))
def test_garbage_text_is_refused(text):
    with pytest.raises(StatementRefused):
        membership_from_text(text)


def test_reasons():
    made = member_of()
    assert refused(b"") is Refusal.NO_STATEMENT
    assert refused(made.raw, peer=OTHER.peer_id) is Refusal.WRONG_PEER
    assert refused(made.raw, network=OTHER.peer_id) is Refusal.WRONG_NETWORK
    assert refused(b"\x91\xc4" + b"\0" * 6000) is Refusal.TOO_LARGE
    # Somebody else signs in the owner's name.
    forged = msgpack.unpackb(msgpack.unpackb(made.raw)[0])
    forged[1] = OTHER.sign(STATEMENT.context, forged[0])
    assert refused(msgpack.packb([msgpack.packb(forged)])) is Refusal.BAD_SIGNATURE
    # The right key, in the context of another kind.
    forged[1] = OWNER.sign(b"bbnode-ticket-v1", forged[0])
    assert refused(msgpack.packb([msgpack.packb(forged)])) is Refusal.BAD_SIGNATURE
    body = msgpack.packb([2, *msgpack.unpackb(forged[0])[1:]])
    later = msgpack.packb([body, OWNER.sign(STATEMENT.context, body)])
    assert refused(msgpack.packb([later])) is Refusal.UNKNOWN_VERSION
    with pytest.raises(StatementRefused) as caught:
        membership_from_text(made.text.replace("bbmember1", "bbmember2"))
    assert caught.value.reason is Refusal.UNKNOWN_VERSION


def test_a_signer_without_an_ed25519_key_is_refused():
    unknown = PeerId.from_seed(1)
    body = msgpack.packb(
        [1, unknown.to_bytes(), unknown.to_bytes(), MEMBER.peer_id.to_bytes(), None, False, 0, 9, 1]
    )
    raw = msgpack.packb([msgpack.packb([body, b"s" * 64])])
    assert refused(raw, network=unknown) is Refusal.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (NOW_S - CLOCK_SKEW_S - 1, Refusal.NOT_YET_VALID),
        (NOW_S - CLOCK_SKEW_S, None),
        (NOW_S + DAY_S + CLOCK_SKEW_S - 1, None),
        (NOW_S + DAY_S + CLOCK_SKEW_S, Refusal.EXPIRED),
    ],
)
def test_dates(at, reason):
    made = member_of()
    if reason is None:
        made.check(at)
    else:
        with pytest.raises(StatementRefused) as caught:
            made.check(at)
        assert caught.value.reason is reason
    assert (made.valid_from_s <= at < made.valid_until_s) == (reason is None)


@pytest.mark.parametrize("what", [{"serials": [7]}, {"peers": [MEMBER.peer_id]}])
def test_revoked(what):
    with pytest.raises(StatementRefused) as caught:
        member_of().check(NOW_S, revoke(OWNER, None, **what))
    assert caught.value.reason is Refusal.REVOKED
    member_of().check(NOW_S, revoke(OWNER, None, serials=[8], peers=[OTHER.peer_id]))


def test_who_a_granter_granted_is_a_member_as_long_as_the_granter():
    made = open_membership(CHAIN.raw, NETWORK, MEMBER.peer_id)
    assert [s.issuer for s in made.statements] == [GRANTER.peer_id, NETWORK]
    made.check(NOW_S)
    longer = member_of(GRANTER, granter=granter(), expires_s=NOW_S + 9 * DAY_S)
    assert longer.own.expires_s == NOW_S + DAY_S
    for what in ({"serials": [3]}, {"peers": [GRANTER.peer_id]}):
        with pytest.raises(StatementRefused) as caught:
            made.check(NOW_S, revoke(OWNER, None, **what))
        assert caught.value.reason is Refusal.REVOKED


def test_a_granter_gives_no_more_than_it_has():
    only = granter(classes=["client"])
    assert member_of(GRANTER, granter=only).own.classes == ("client",)
    with pytest.raises(GrantError, match="more than"):
        member_of(GRANTER, granter=only, classes=["client", "server"])
    with pytest.raises(GrantError, match="only the owner"):
        member_of(GRANTER, granter=granter(), may_grant=True)
    with pytest.raises(GrantError, match="--may-invite"):
        member_of(GRANTER, granter=granter(may_grant=False))
    with pytest.raises(GrantError, match="--may-invite"):
        member_of(OTHER, granter=granter())


@pytest.mark.parametrize(
    ("issuer", "classes", "may_grant", "chain"),
    [
        (OTHER, None, False, []),  # no owner's word at all
        (OTHER, None, False, [granter()]),  # a granter's, but not the one who signed
        (GRANTER, None, False, [granter(may_grant=False)]),
        (GRANTER, None, True, [granter()]),  # grants the right to grant
        (GRANTER, ["client", "server"], False, [granter(classes=["client"])]),
        (GRANTER, None, False, [granter(classes=["client"])]),  # all is more than one
    ],
)
def test_what_no_honest_granter_signs_is_refused(issuer, classes, may_grant, chain):
    values = [NETWORK.to_bytes(), issuer.peer_id.to_bytes(), MEMBER.peer_id.to_bytes()]
    values += [classes, may_grant, NOW_S, NOW_S + DAY_S, 1]
    raw = sealed.seal(STATEMENT, values, issuer)
    rest = [part for each in chain for part in msgpack.unpackb(each.raw)]
    assert refused(msgpack.packb([raw, *rest])) is Refusal.NOT_GRANTED


@pytest.mark.parametrize(
    "wrong",
    [
        {"classes": []},
        {"classes": ["two words"]},
        {"classes": [f"c{i}" for i in range(17)]},
        {"expires_s": NOW_S},
        {"not_before_s": -1},
        {"serial": 2**64},
    ],
)
def test_what_nobody_would_accept_is_not_signed(wrong):
    with pytest.raises(GrantError):
        member_of(**wrong)


def test_the_largest_statement_fits():
    classes = [f"{i:x}".rjust(128, "c") for i in range(16)]
    made = grant(
        OWNER,
        member=MEMBER.peer_id,
        not_before_s=CLOCK_SKEW_S,
        expires_s=sealed.MAX_UNIX_S,
        serial=2**64 - 1,
        classes=classes,
    )
    assert len(made.raw) <= STATEMENT.max_bytes
