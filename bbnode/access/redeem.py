"""Turning an invitation into a membership: the inviting peer's side of `bbnode join`.

Rule: a ticket is good for `uses` different peers; one that comes again gets its membership anew
and uses nothing up, so that a lost answer does no harm. The ledger counts, and is written
before the answer leaves: a crash never gives a use twice. It is bounded, forgets tickets only
once they have expired, and refuses when it is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from bbnode.access import sealed
from bbnode.access.errors import Refusal, TicketRefused
from bbnode.access.revocation import RevocationList
from bbnode.access.sealed import Kind
from bbnode.access.signing import SigningKey
from bbnode.access.statement import Membership, grant
from bbnode.access.ticket import NONCE_BYTES, TICKET, Ticket
from bbnode.ir.caps import CLOCK_SKEW_S, MAX_REDEEMERS, MAX_TICKETS, MAX_USES
from bbnode.ir.peer import PeerId

LEDGER = Kind(
    name="ledger of tickets",
    context=b"",
    prefix="",
    version=1,
    fields=1,
    # A PeerId is up to 66 bytes with its header.
    max_bytes=MAX_REDEEMERS * 70 + MAX_TICKETS * 64,
    error=TicketRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeemed:
    """One ticket in the ledger: when it ends, and who has used it."""

    expires_s: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Who redeemed which ticket, by the ticket's nonce."""

    tickets: Mapping[bytes, Redeemed] = field(default_factory=dict)

    def has_use(self, ticket: Ticket, peer: PeerId) -> bool:
        """Whether `peer` could redeem a ticket: a use is left, or it is one that it had."""
        entry = self.tickets.get(ticket.nonce)
        if entry is None or peer in entry.peers:
            return True
        return ticket.invitation is not None and len(entry.peers) < ticket.invitation.uses

    def to_bytes(self) -> bytes:
        """The ledger as its file holds it."""
        rows = [
            [nonce, entry.expires_s, [peer.to_bytes() for peer in entry.peers]]
            for nonce, entry in sorted(self.tickets.items())
        ]
        packed: bytes = msgpack.packb([LEDGER.version, rows])
        return packed

    @classmethod
    def from_bytes(cls, raw: bytes) -> Ledger:
        """Read it back; raises TicketRefused (MALFORMED) when the file is damaged."""
        with sealed.boundary(LEDGER):
            return cls._of(raw)

    @classmethod
    def _of(cls, raw: bytes) -> Ledger:
        if len(raw) > LEDGER.max_bytes:
            raise LEDGER.refuse(Refusal.TOO_LARGE, f"{len(raw)} bytes are over its bound")
        items = sealed.unpack_list(LEDGER, raw)
        if len(items) != 2 or items[0] != LEDGER.version:
            raise sealed.malformed(LEDGER, "it is not of this version")
        tickets = {}
        for row in sealed.take_list(LEDGER, "the tickets", items[1], MAX_TICKETS):
            if not isinstance(row, list) or len(row) != 3:
                raise sealed.malformed(LEDGER, "a ticket is not three fields")
            nonce = sealed.take_bytes(LEDGER, "a nonce", row[0], NONCE_BYTES, NONCE_BYTES)
            peers = sealed.take_list(LEDGER, "the peers", row[2], MAX_USES)
            tickets[nonce] = Redeemed(
                expires_s=sealed.take_int(LEDGER, "an end", row[1], sealed.MAX_UNIX_S),
                peers=tuple(sealed.take_peer(LEDGER, "a peer", peer) for peer in peers),
            )
        return cls(tickets=tickets)

    def with_use(self, ticket: Ticket, uses: int, peer: PeerId, unix_s: float) -> Ledger:
        """The ledger after `peer` used the ticket: itself when it had before.

        Raises TicketRefused (USED_UP, LEDGER_FULL).
        """
        entry = self.tickets.get(ticket.nonce)
        used = () if entry is None else entry.peers
        if peer in used:
            return self
        if len(used) >= uses:
            raise TICKET.refuse(
                Refusal.USED_UP,
                f"all of its {uses} uses are used up; ask for a new one (`bbnode invite`)",
            )
        # A ticket leaves the ledger only when nobody can redeem it any more.
        kept = {
            nonce: row
            for nonce, row in self.tickets.items()
            if unix_s < row.expires_s + CLOCK_SKEW_S
        }
        held = sum(len(row.peers) for row in kept.values())
        if held >= MAX_REDEEMERS or (entry is None and len(kept) >= MAX_TICKETS):
            raise TICKET.refuse(
                Refusal.LEDGER_FULL,
                "the inviter keeps as many tickets as it can; try again when some have expired, or "
                "ask the owner for a statement of your own",
            )
        kept[ticket.nonce] = Redeemed(expires_s=ticket.expires_s, peers=(*used, peer))
        return Ledger(tickets=kept)


def redeem(
    ticket: Ticket,
    joiner: PeerId,
    *,
    key: SigningKey,
    ledger: Ledger,
    unix_s: float,
    serial: int,
    granter: Membership | None = None,
    revoked: RevocationList | None = None,
) -> tuple[Membership, Ledger]:
    """The membership for `joiner`, and the ledger that has to be written before it is sent.

    `key` is the inviting peer's, `granter` its own membership (None when it is the owner).
    Raises TicketRefused; StatementRefused when the granter's own has ended or was revoked; and
    GrantError when it may not grant.
    """
    invitation = ticket.invitation
    if ticket.inviter != key.peer_id or invitation is None:
        raise TICKET.refuse(
            Refusal.NOT_GRANTED,
            f"{key.peer_id} cannot redeem it; it was made by {ticket.inviter}"
            + ("" if invitation is not None else " and invites nobody"),
        )
    network = key.peer_id if granter is None else granter.own.network
    if ticket.network != network:
        raise TICKET.refuse(
            Refusal.WRONG_NETWORK, f"it is for network {ticket.network}, this node's is {network}"
        )
    ticket.check(unix_s)
    if granter is not None:
        granter.check(unix_s, revoked)
    if revoked is not None and joiner in revoked.peers:
        raise TICKET.refuse(Refusal.REVOKED, f"the owner revoked {joiner}; ask it to be reinstated")
    after = ledger.with_use(ticket, invitation.uses, joiner, unix_s)
    membership = grant(
        key,
        member=joiner,
        not_before_s=int(unix_s),
        expires_s=int(unix_s) + invitation.member_s,
        serial=serial,
        classes=invitation.classes,
        granter=granter,
    )
    return membership, after
