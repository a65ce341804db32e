"""Tickets: one line, signed, bounded; and what redeeming one gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.access.errors import GrantError, Refusal, StatementRefused, TicketRefused
from bbnode.access.revocation import revoke
from bbnode.access.statement import open_membership
from bbnode.access.ticket import (
    Invitation,
    Ledger,
    Redeemed,
    make_ticket,
    parse_ticket,
    redeem,
    ticket_from_bytes,
)
from bbnode.ir.address import parse_address
from bbnode.ir.caps import CLOCK_SKEW_S, MAX_TICKETS
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

ADDRESS = parse_address("/ip4/192.0.2.1/tcp/4001")
INVITATION = Invitation(uses=2, classes=("client",), member_s=DAY_S)


def ticket(**changes):
    arguments = {
        "addresses": [ADDRESS],
        "artifact_sha256": b"d" * 32,
        "target": "client",
        "expires_s": NOW_S + 3600,
        "nonce": b"n" * 16,
        "network": NETWORK,
        "invitation": INVITATION,
        **changes,
    }
    return make_ticket(GRANTER, **arguments)


@given(
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True),
    classes=CLASSES,
    uses=st.integers(1, 1024),
    nonce=st.binary(min_size=16, max_size=16),
)
def test_round_trip(ports, classes, uses, nonce):
    addresses = [parse_address(f"/ip4/192.0.2.1/tcp/{port}") for port in ports]
    names = None if classes is None else tuple(sorted(classes))
    made = ticket(
        addresses=addresses,
        nonce=nonce,
        invitation=Invitation(uses=uses, classes=names, member_s=DAY_S),
    )
    again = parse_ticket(f"  {made.text}\n")
    assert again == made == ticket_from_bytes(made.raw)
    assert list(again.addresses) == addresses
    assert again.invitation == Invitation(uses=uses, classes=names, member_s=DAY_S)
    assert str(again.dial_addresses[0]) == f"{addresses[0]}/p2p/{GRANTER.peer_id}"
    assert made.text.startswith("bbnode1:")
    assert nonce.hex() not in repr(made)


def test_no_character_can_change():
    text = ticket().text
    for at, old in enumerate(text):
        for new in "A_z":
            if new != old:
                with pytest.raises(TicketRefused):
                    parse_ticket(text[:at] + new + text[at + 1 :])
        with pytest.raises(TicketRefused):
            parse_ticket(text[:at])


@given(st.binary(max_size=300))
def test_garbage_is_refused(raw):
    with pytest.raises(TicketRefused):
        ticket_from_bytes(raw)


@pytest.mark.parametrize(
    ("text", "reason", "help_"),
    [
        ("/ip4/192.0.2.1/tcp/1", Refusal.MALFORMED, "begin with 'bbnode1:'"),
        ("bbnode2:AAAA", Refusal.UNKNOWN_VERSION, "same release"),
        ("bbnode1:AA!A", Refusal.MALFORMED, "copy all of it"),
        ("bbnode1:" + "A" * 20_000, Refusal.TOO_LARGE, "too long"),
        (ticket().text[:-9], Refusal.MALFORMED, "copy all of it"),
    ],
)
def test_parse_errors_say_what_to_do(text, reason, help_):
    with pytest.raises(TicketRefused) as caught:
        parse_ticket(text)
    assert caught.value.reason is reason
    assert help_ in str(caught.value)


def test_three_kinds():
    assert ticket(network=None, invitation=None).invitation is None
    finished = member_of(GRANTER, granter=granter())
    made = ticket(invitation=None, membership=finished.raw)
    assert open_membership(made.membership, NETWORK, MEMBER.peer_id) == finished
    for wrong in (
        {"invitation": None},
        {"network": None},
        {"membership": finished.raw},
        {"addresses": []},
        {"addresses": [parse_address(f"/ip4/192.0.2.1/tcp/{p}") for p in range(1, 10)]},
        {"addresses": [parse_address(f"{ADDRESS}/p2p/{OTHER.peer_id}")]},
        {"target": ""},
        {"target": "a\nb"},
        {"artifact_sha256": b""},
        {"nonce": b"short"},
        {"invitation": Invitation(uses=0, classes=None, member_s=1)},
        {"invitation": Invitation(uses=1, classes=None, member_s=DAY_S * 999)},
    ):
        with pytest.raises(GrantError):
            ticket(**wrong)


def test_addresses_lose_our_peer_id_and_keep_a_relays():
    own = parse_address(f"{ADDRESS}/p2p/{GRANTER.peer_id}")
    relay = parse_address(f"{ADDRESS}/p2p/{OTHER.peer_id}/p2p-circuit")
    made = ticket(addresses=[own, ADDRESS, relay])
    assert made.addresses == (ADDRESS, relay)
    assert str(made.dial_addresses[1]).endswith(f"/p2p-circuit/p2p/{GRANTER.peer_id}")


def test_expiry():
    made = ticket()
    made.check(NOW_S + 3600 + CLOCK_SKEW_S - 1)
    with pytest.raises(TicketRefused) as caught:
        made.check(NOW_S + 3600 + CLOCK_SKEW_S)
    assert caught.value.reason is Refusal.EXPIRED


def use(made, joiner, ledger, **changes):
    arguments = {
        "key": GRANTER,
        "ledger": ledger,
        "unix_s": NOW_S,
        "serial": 11,
        "granter": granter(),
        **changes,
    }
    return redeem(made, joiner, **arguments)


def refusal(made, joiner=MEMBER.peer_id, ledger=None, **changes):
    with pytest.raises((TicketRefused, StatementRefused)) as caught:
        use(made, joiner, ledger or Ledger(), **changes)
    return caught.value.reason


def test_redeemed_by_as_many_as_it_says_and_again_by_the_same():
    made, ledger = ticket(), Ledger()
    first, ledger = use(made, MEMBER.peer_id, ledger)
    assert open_membership(first.raw, NETWORK, MEMBER.peer_id).own.classes == ("client",)
    _, again = use(made, MEMBER.peer_id, ledger)
    assert again == ledger
    _, ledger = use(made, OTHER.peer_id, ledger)
    assert refusal(made, PeerId.from_seed(1), ledger) is Refusal.USED_UP
    assert Ledger.from_bytes(ledger.to_bytes()) == ledger


def test_who_may_not_redeem():
    made = ticket()
    assert refusal(made, key=OTHER) is Refusal.NOT_GRANTED
    assert refusal(ticket(network=None, invitation=None)) is Refusal.NOT_GRANTED
    assert refusal(made, granter=None) is Refusal.WRONG_NETWORK
    assert refusal(made, unix_s=NOW_S + 2 * DAY_S) is Refusal.EXPIRED
    assert refusal(ticket(expires_s=NOW_S + 9 * DAY_S), unix_s=NOW_S + 2 * DAY_S) is Refusal.EXPIRED
    assert refusal(made, revoked=revoke(OWNER, None, serials=[3])) is Refusal.REVOKED
    assert refusal(made, revoked=revoke(OWNER, None, peers=[MEMBER.peer_id])) is Refusal.REVOKED


def test_the_ledger_is_bounded_and_forgets_only_what_has_expired():
    live = {
        i.to_bytes(16, "big"): Redeemed(expires_s=NOW_S, peers=(MEMBER.peer_id,))
        for i in range(MAX_TICKETS)
    }
    made = ticket()
    assert refusal(made, ledger=Ledger(tickets=live)) is Refusal.LEDGER_FULL
    later = NOW_S + CLOCK_SKEW_S
    _, after = use(made, MEMBER.peer_id, Ledger(tickets=live), unix_s=later)
    assert list(after.tickets) == [b"n" * 16]


@given(st.binary(max_size=200))
def test_a_damaged_ledger_is_refused(raw):
    with pytest.raises(TicketRefused):
        Ledger.from_bytes(raw)
