"""A node's answers over the access protocol, with its files on disk."""

from __future__ import annotations

import pytest

from bbnode.access.errors import Refusal
from bbnode.access.exchange import Member, Redeem, Refused, Revocations, decode_message
from bbnode.access.exchange import encode_message as encode
from bbnode.access.revocation import revoke
from bbnode.access.statement import open_membership
from bbnode.access.ticket import Invitation, Ledger, make_ticket
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.protocol import AccessService
from bbnode.daemon.paths import StorageError
from bbnode.ir.address import parse_address
from tests.access.strategies import (
    DAY_S,
    GRANTER,
    MEMBER,
    NETWORK,
    NOW_S,
    OTHER,
    OWNER,
    granter,
)


def ticket():
    return make_ticket(
        GRANTER,
        addresses=[parse_address("/ip4/192.0.2.1/tcp/4001")],
        artifact_sha256=b"d" * 32,
        target="client",
        expires_s=NOW_S + 60,
        nonce=b"n" * 16,
        network=NETWORK,
        invitation=Invitation(uses=1, classes=None, member_s=DAY_S),
    )


class Node:
    def __init__(self, state_dir) -> None:
        self.state_dir = state_dir
        self.told: list[int] = []
        self.redeemed: list[Ledger] = []
        self.service = AccessService(
            state_dir,
            GRANTER,
            unix_s=lambda: NOW_S,
            serial=lambda: 11,
            on_revocations=lambda listed: self.told.append(listed.sequence),
            on_redeemed=self.redeemed.append,
        )

    def ask(self, message, peer=MEMBER.peer_id):
        raw = message if isinstance(message, bytes) else encode(message)
        return decode_message(self.service.answer(peer, raw))


@pytest.fixture
def node(tmp_path):
    access_files.save_membership(tmp_path, granter())
    return Node(tmp_path)


def test_a_use_survives_a_restart(node, tmp_path):
    answer = node.ask(Redeem(ticket=ticket().raw))
    assert isinstance(answer, Member)
    assert open_membership(answer.membership, NETWORK, MEMBER.peer_id).own.serial == 11
    again = Node(tmp_path)
    assert isinstance(again.ask(Redeem(ticket=ticket().raw)), Member)
    refused = again.ask(Redeem(ticket=ticket().raw), OTHER.peer_id)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.USED_UP


def test_nothing_is_granted_that_cannot_be_written(node, monkeypatch):
    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(access_files, "save_ledger", full)
    with pytest.raises(StorageError):
        node.ask(Redeem(ticket=ticket().raw))


def test_lists_go_both_ways_and_only_forward(node):
    first = revoke(OWNER, None, serials=[1])
    second = revoke(OWNER, first, serials=[2])
    assert node.ask(Revocations(revocations=b"")) == Revocations(revocations=b"")
    assert node.ask(Revocations(revocations=second.raw)) == Revocations(revocations=second.raw)
    # Who lags behind learns of ours.
    assert node.ask(Revocations(revocations=first.raw)) == Revocations(revocations=second.raw)
    assert decode_message(node.service.offer()) == Revocations(revocations=second.raw)
    assert node.told == [2]
    assert node.ask(Redeem(ticket=ticket().raw)).revocations == second.raw
    foreign = node.ask(Revocations(revocations=revoke(OTHER, None).raw))
    assert isinstance(foreign, Refused)
    assert foreign.reason is Refusal.WRONG_NETWORK


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"rubbish", Refusal.MALFORMED),
        (Redeem(ticket=b"rubbish"), Refusal.MALFORMED),
        (Member(membership=b"", revocations=b""), Refusal.MALFORMED),
    ],
)
def test_what_is_refused_is_an_answer(node, message, reason):
    answer = node.ask(message)
    assert isinstance(answer, Refused)
    assert answer.reason is reason


def test_a_node_without_the_right_to_grant_says_so(tmp_path):
    access_files.save_membership(tmp_path, granter(may_grant=False))
    answer = Node(tmp_path).ask(Redeem(ticket=ticket().raw))
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.NOT_GRANTED
