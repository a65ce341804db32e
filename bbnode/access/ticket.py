"""Tickets: one line of text that lets a stranger find us, see what runs here, and become a member.

Rule: a ticket is signed by the inviting peer and names its PeerId, so that a dial with Noise
reaches the peer that signed. To a private network it brings membership in one of two ways. A ticket
for a known PeerId carries the finished membership. A ticket for a stranger carries an invitation,
which says how many peers may redeem it and for which classes; the whole ticket, with its 16 random
bytes, is then the secret, and the inviting peer exchanges it for a statement (`redeem`).

A ticket is good for `uses` different peers; a peer that redeems it again gets a new statement and
uses nothing up, so a lost answer does no harm. The ledger counts the uses and is written before
the answer is sent, so that no use is given twice after a crash. It is bounded, forgets tickets only
once they have expired, and refuses when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgpack
from multiaddr import Multiaddr

from bbnode.access import sealed
from bbnode.access.errors import GrantError, Refusal, TicketRefused
from bbnode.access.keys import SigningKey
from bbnode.access.revocation import RevocationList
from bbnode.access.sealed import Kind
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES, Membership, grant
from bbnode.ir.address import address_from_bytes
from bbnode.ir.caps import (
    CLOCK_SKEW_S,
    MAX_ADDRESS_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_MEMBER_DAYS,
    MAX_REDEEMERS,
    MAX_TARGET_BYTES,
    MAX_TICKETS,
    MAX_USES,
)
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId

DIGEST_BYTES = 32
NONCE_BYTES = 16
_DAY_S = 24 * 60 * 60


def _address(kind: Kind, name: str, value: object) -> Multiaddr:
    raw = sealed.octets(MAX_ADDRESS_BYTES, 1)(kind, name, value)
    try:
        return address_from_bytes(raw)
    except DecodeError as error:
        raise sealed.malformed(kind, f"{name} is not an address") from error


def _invitation(kind: Kind, name: str, value: object) -> Invitation:
    readers = {
        "uses": sealed.integer(MAX_USES, 1),
        "classes": sealed.take_classes,
        "member_s": sealed.integer(MAX_MEMBER_DAYS * _DAY_S, 1),
    }
    if not isinstance(value, list) or len(value) != len(readers):
        raise sealed.malformed(kind, f"{name} is not three fields")
    return Invitation(**kind.read(value, readers))


TICKET = Kind(
    name="ticket",
    context=b"bbnode-ticket-v1",
    prefix="bbnode1",
    fields={
        "inviter": sealed.take_peer,
        "addresses": sealed.listed(_address, MAX_CLAIMED_ADDRESSES, 1),
        "artifact_sha256": sealed.octets(DIGEST_BYTES, DIGEST_BYTES),
        "target": sealed.text(MAX_TARGET_BYTES, 1),
        "expires_s": sealed.integer(sealed.MAX_UNIX_S),
        "network": sealed.optional(sealed.take_peer),
        "invitation": sealed.optional(_invitation),
        "membership": sealed.octets(MAX_MEMBERSHIP_BYTES),
        "nonce": sealed.octets(NONCE_BYTES, NONCE_BYTES),
    },
    max_bytes=MAX_CLAIMED_ADDRESSES * (MAX_ADDRESS_BYTES + 3) + MAX_MEMBERSHIP_BYTES + 3072,
    error=TicketRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Membership for the peers that show the ticket.

    `uses` different peers may, each for `classes` (None: all), for `member_s` seconds.
    """

    uses: int
    classes: tuple[str, ...] | None
    member_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """An authentic ticket. `expires_s` is in seconds since 1970.

    `network` is None where the inviter's is open; else `invitation` or `membership` (bytes for
    `open_membership`) is there. The nonce is secret as long as the invitation is good.
    """

    inviter: PeerId
    addresses: tuple[Multiaddr, ...]
    artifact_sha256: bytes
    target: str
    expires_s: int
    network: PeerId | None
    invitation: Invitation | None
    membership: bytes
    nonce: bytes = field(repr=False)
    raw: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """The ticket as one line of text."""
        return sealed.to_text(TICKET, self.raw)

    @property
    def dial_addresses(self) -> tuple[Multiaddr, ...]:
        """The addresses with the inviter's `/p2p/ID` at their end."""
        return tuple(Multiaddr(f"{a}/p2p/{self.inviter}") for a in self.addresses)

    def check(self, unix_s: float) -> None:
        """Raise TicketRefused (EXPIRED) once its time, with the allowed skew, is over."""
        if unix_s >= self.expires_s + CLOCK_SKEW_S:
            raise TICKET.refuse(
                Refusal.EXPIRED,
                f"it ended {unix_s - self.expires_s:.0f} s ago; ask for a new one (`bbnode "
                "invite`), or check this machine's clock",
            )


def make_ticket(
    key: SigningKey,
    *,
    addresses: Iterable[Multiaddr],
    artifact_sha256: bytes,
    target: str,
    expires_s: int,
    nonce: bytes,
    network: PeerId | None = None,
    invitation: Invitation | None = None,
    membership: bytes = b"",
) -> Ticket:
    """Sign a ticket with the inviting peer's key; `nonce` is 16 random bytes.

    A trailing `/p2p/ID` of the addresses has to be the inviter's. Raises GrantError.
    """
    listed = list(dict.fromkeys(_without_peer(a, key.peer_id) for a in addresses))
    if not 0 < len(listed) <= MAX_CLAIMED_ADDRESSES:
        raise GrantError(
            f"a ticket needs 1 to {MAX_CLAIMED_ADDRESSES} addresses, got {len(listed)}: say with "
            "--address how this node is reached"
        )
    if (network is not None) != ((invitation is not None) ^ bool(membership)):
        raise GrantError(
            "a ticket to a private network carries either an invitation or a membership, and one "
            "to an open network neither"
        )
    if not 0 < len(target.encode()) <= MAX_TARGET_BYTES:
        raise GrantError(
            f"the name of the target has {len(target.encode())} bytes, and a ticket takes 1 to "
            f"{MAX_TARGET_BYTES}; compile the program with shorter names of classes"
        )
    offer = None
    if invitation is not None:
        if not 0 < invitation.uses <= MAX_USES:
            raise GrantError(
                f"{invitation.uses} uses of one ticket, which has 1 to {MAX_USES}; make several, "
                "or grant the peers their memberships one by one"
            )
        if not 0 < invitation.member_s <= MAX_MEMBER_DAYS * _DAY_S:
            raise GrantError(
                f"a membership of {invitation.member_s} s, and a ticket makes one of up to "
                f"{MAX_MEMBER_DAYS} days; make it shorter, and renew it"
            )
        classes = sealed.classes_to_sign(invitation.classes)
        offer = [
            invitation.uses,
            None if classes is None else list(classes),
            invitation.member_s,
        ]
    values = [
        key.peer_id.to_bytes(),
        [address.to_bytes() for address in listed],
        artifact_sha256,
        target,
        expires_s,
        None if network is None else network.to_bytes(),
        offer,
        membership,
        nonce,
    ]
    raw = sealed.seal(TICKET, values, key)
    try:
        return _open(raw)
    except TicketRefused as error:
        # The writer applies the reader's rules, so that no ticket is issued that peers would
        # refuse.
        raise GrantError(f"this ticket would be refused: {error}") from error


def parse_ticket(text: str) -> Ticket:
    """Return the ticket in a line of text, its signature checked; raises TicketRefused.

    Its date is checked by `Ticket.check`.
    """
    return _open(sealed.from_text(TICKET, text))


def ticket_from_bytes(raw: bytes) -> Ticket:
    """Return the ticket in the bytes of a message, as `parse_ticket`."""
    return _open(raw)


def invitation_of(raw: bytes, inviter: PeerId, network: PeerId, unix_s: float) -> Ticket | None:
    """Return the ticket in these bytes, if `inviter` invites to `network` with it now."""
    try:
        ticket = _open(raw)
        ticket.check(unix_s)
    except TicketRefused:
        return None
    mine = ticket.inviter == inviter and ticket.network == network
    return ticket if mine and ticket.invitation is not None else None


@sealed.boundary(TICKET)
def _open(raw: bytes) -> Ticket:
    part = sealed.unseal(TICKET, raw)
    part.check_signature(part.peer(0))
    ticket = Ticket(raw=raw, **part.read())
    is_private = ticket.network is not None
    if is_private != ((ticket.invitation is not None) ^ bool(ticket.membership)):
        raise sealed.malformed(TICKET, "network, invitation and membership do not fit together")
    return ticket


def _without_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    head, marker, last = str(address).rpartition("/p2p/")
    if not marker or "/" in last:
        return address  # no peer at its end; a relay's stands before /p2p-circuit
    if last != str(peer):
        raise GrantError(f"{address} is of another peer; this node is {peer}")
    return Multiaddr(head)


# --- redeeming ----------------------------------------------------------------------


def _row(kind: Kind, name: str, value: object) -> tuple[bytes, Redeemed]:
    readers = {
        "nonce": sealed.octets(NONCE_BYTES, NONCE_BYTES),
        "expires_s": sealed.integer(sealed.MAX_UNIX_S),
        "peers": sealed.listed(sealed.take_peer, MAX_USES),
    }
    if not isinstance(value, list) or len(value) != len(readers):
        raise sealed.malformed(kind, f"{name} is not three fields")
    row = kind.read(value, readers)
    return row.pop("nonce"), Redeemed(**row)


LEDGER = Kind(
    name="ledger of tickets",
    fields={"tickets": sealed.listed(_row, MAX_TICKETS)},
    # A PeerId is up to 66 bytes with its header.
    max_bytes=MAX_REDEEMERS * 70 + MAX_TICKETS * 64,
    error=TicketRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeemed:
    """One ticket in the ledger: when it expires, and the peers that have used it."""

    expires_s: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The peers that redeemed each ticket, by the ticket's nonce."""

    tickets: Mapping[bytes, Redeemed] = field(default_factory=dict)

    def has_use(self, ticket: Ticket, peer: PeerId) -> bool:
        """Return True if `peer` could redeem a ticket: a use is left, or the peer has used it."""
        entry = self.tickets.get(ticket.nonce)
        if entry is None or peer in entry.peers:
            return True
        return ticket.invitation is not None and len(entry.peers) < ticket.invitation.uses

    def to_bytes(self) -> bytes:
        """Return the ledger as its file holds it."""
        rows = [
            [nonce, entry.expires_s, [peer.to_bytes() for peer in entry.peers]]
            for nonce, entry in sorted(self.tickets.items())
        ]
        packed: bytes = msgpack.packb([LEDGER.version, rows])
        return packed

    @classmethod
    @sealed.boundary(LEDGER)
    def from_bytes(cls, raw: bytes) -> Ledger:
        """Read it back; raises TicketRefused (MALFORMED) when the file is damaged."""
        if len(raw) > LEDGER.max_bytes:
            raise LEDGER.refuse(Refusal.TOO_LARGE, f"{len(raw)} bytes are over its bound")
        items = sealed.unpack_list(LEDGER, raw)
        if len(items) != 2 or items[0] != LEDGER.version:
            raise sealed.malformed(LEDGER, "it is not of this version")
        return cls(tickets=dict(LEDGER.read(items[1:], LEDGER.fields)["tickets"]))

    def with_use(self, ticket: Ticket, uses: int, peer: PeerId, unix_s: float) -> Ledger:
        """Return the ledger after `peer` used the ticket: itself when it had before.

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
        # A ticket may leave the ledger only when it can no longer be redeemed.
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
    """Return the membership for `joiner`, and the ledger that is to be written before it is sent.

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
