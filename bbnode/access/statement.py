"""Memberships of private networks, and the signed statements that prove them.

Rule: a network is its owner's Ed25519 key, and its id is that key's PeerId. The owner signs a
statement for each member. A statement may say `may_grant`: then its member may sign statements for
others, for at most its own classes and without `may_grant`. So a membership, which is shown in the
hello on every connection, is one statement or two: the member's own, then that of the member who
granted it. `open_membership` checks the signatures, and `Membership.check` dates and revocations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from bbnode.access import sealed
from bbnode.access.errors import GrantError, Refusal, StatementRefused
from bbnode.access.keys import SigningKey
from bbnode.access.revocation import MAX_SERIAL, RevocationList
from bbnode.access.sealed import Kind, Sealed
from bbnode.ir.caps import CLOCK_SKEW_S
from bbnode.ir.peer import PeerId

STATEMENT = Kind(
    name="membership statement",
    context=b"bbnode-membership-v1",
    prefix="bbstatement1",
    fields={
        "network": sealed.take_peer,
        "issuer": sealed.take_peer,
        "member": sealed.take_peer,
        "classes": sealed.take_classes,
        "may_grant": sealed.flag,
        "not_before_s": sealed.integer(sealed.MAX_UNIX_S),
        "expires_s": sealed.integer(sealed.MAX_UNIX_S),
        "serial": sealed.integer(MAX_SERIAL),
    },
    # 16 classes of 128 bytes, three PeerIds, dates and a signature.
    max_bytes=2560,
    error=StatementRefused,
)

# A membership: one or two statements, as shown on a connection and copied by users.
MEMBERSHIP_PREFIX = "bbmember1"
MAX_MEMBERSHIP_BYTES = 2 * STATEMENT.max_bytes + 16
_MEMBERSHIP = Kind(
    name="membership",
    prefix=MEMBERSHIP_PREFIX,
    max_bytes=MAX_MEMBERSHIP_BYTES,
    error=StatementRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement of its issuer on a member. Times are seconds since 1970; it ends at `expires_s`.

    `classes` is sorted, or None for all classes; `serial` is drawn at random, so that owner
    and granters need no common counter.
    """

    network: PeerId
    issuer: PeerId
    member: PeerId
    classes: tuple[str, ...] | None
    may_grant: bool
    not_before_s: int
    expires_s: int
    serial: int

    @property
    def serial_text(self) -> str:
        """The serial as commands take and print it: 16 hex digits."""
        return f"{self.serial:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """An authentic membership: each issuer signed its statement and had the right to.

    `statements` holds the member's own first, then the granter's if there was one.
    """

    statements: tuple[Statement, ...]
    raw: bytes

    @property
    def own(self) -> Statement:
        """The member's own statement."""
        return self.statements[0]

    @property
    def text(self) -> str:
        """The line of text that `bbnode network import` takes."""
        return sealed.to_text(_MEMBERSHIP, self.raw)

    @property
    def valid_from_s(self) -> int:
        """First second in which it is accepted, with the allowed skew."""
        return max(s.not_before_s for s in self.statements) - CLOCK_SKEW_S

    @property
    def valid_until_s(self) -> int:
        """First second in which it is accepted no more, with the allowed skew."""
        return min(s.expires_s for s in self.statements) + CLOCK_SKEW_S

    def check(self, unix_s: float, revoked: RevocationList | None = None) -> None:
        """Raise StatementRefused (REVOKED, NOT_YET_VALID, EXPIRED) unless it holds now."""
        for statement in self.statements:
            if revoked is not None and revoked.revokes(statement.serial, statement.member):
                raise STATEMENT.refuse(
                    Refusal.REVOKED,
                    f"the owner of the network revoked {statement.serial_text} of "
                    f"{statement.member}; ask for a new one",
                )
            if unix_s < statement.not_before_s - CLOCK_SKEW_S:
                early = statement.not_before_s - unix_s
                raise STATEMENT.refuse(
                    Refusal.NOT_YET_VALID,
                    f"{statement.serial_text} begins in {early:.0f} s; check this machine's clock",
                )
            if unix_s >= statement.expires_s + CLOCK_SKEW_S:
                late = unix_s - statement.expires_s
                raise STATEMENT.refuse(
                    Refusal.EXPIRED,
                    f"{statement.serial_text} of {statement.member} ended {late:.0f} s ago; "
                    "ask the network's owner for a new one",
                )


def grant(
    key: SigningKey,
    *,
    member: PeerId,
    not_before_s: int,
    expires_s: int,
    serial: int,
    classes: Iterable[str] | None = None,
    may_grant: bool = False,
    granter: Membership | None = None,
) -> Membership:
    """Sign a membership for `member`: with the owner's key, or a granter's and its membership.

    `classes` None is all classes; from a granter, all that it may play itself. A granter's
    statements end when its own does. Raises GrantError for a statement that peers would refuse.
    """
    names = sealed.classes_to_sign(classes)
    network = key.peer_id
    if granter is not None:
        own = granter.own
        network = own.network
        if own.member != key.peer_id or not own.may_grant or own.issuer != network:
            raise GrantError(
                f"{key.peer_id} may not grant memberships of {network}; the owner can allow it "
                "with: bbnode network grant PEER_ID --may-invite"
            )
        if may_grant:
            raise GrantError("only the owner's key grants the right to grant")
        names = own.classes if names is None else names
        if not _covers(own.classes, names):
            raise GrantError(f"classes {names} are more than the granter's own {own.classes}")
        expires_s = min(expires_s, own.expires_s)
    if not 0 <= not_before_s < expires_s <= sealed.MAX_UNIX_S:
        raise GrantError(f"a statement from {not_before_s} to {expires_s} (unix seconds) is empty")
    if not 0 <= serial <= MAX_SERIAL:
        raise GrantError(f"serial {serial} does not fit 64 bits")
    raw = sealed.seal(
        STATEMENT,
        [
            network.to_bytes(),
            key.peer_id.to_bytes(),
            member.to_bytes(),
            None if names is None else list(names),
            may_grant,
            not_before_s,
            expires_s,
            serial,
        ],
        key,
    )
    chain = [raw] if granter is None else [raw, *sealed.unpack_list(_MEMBERSHIP, granter.raw)]
    return open_membership(msgpack.packb(chain), network, member)


def open_membership(raw: bytes, network: PeerId, member: PeerId) -> Membership:
    """Return the membership of `member` in `network`, signatures checked; raises StatementRefused.

    Dates and revocations are checked by `Membership.check`.
    """
    membership, parts = _decode(raw)
    own = membership.own
    if own.member != member:
        raise STATEMENT.refuse(
            Refusal.WRONG_PEER,
            f"it was granted to {own.member} and not to {member}; each peer has its own",
        )
    for statement, part in zip(membership.statements, parts, strict=True):
        if statement.network != network:
            raise STATEMENT.refuse(
                Refusal.WRONG_NETWORK, f"it is of network {statement.network}, ours is {network}"
            )
        part.check_signature(statement.issuer)
    if len(parts) == 1 and own.issuer != network:
        raise _not_granted(f"{own.issuer} is not the owner of {network}")
    if len(parts) == 2:
        granter = membership.statements[1]
        if own.issuer != granter.member or granter.issuer != network or not granter.may_grant:
            raise _not_granted(f"{own.issuer} had no right to grant")
        if own.may_grant or not _covers(granter.classes, own.classes):
            raise _not_granted(f"{own.issuer} granted more than it may")
    return membership


def membership_from_text(text: str) -> bytes:
    """Return the bytes of a line of text; raises StatementRefused."""
    return sealed.from_text(_MEMBERSHIP, text)


def peek(raw: bytes) -> Statement:
    """Return a membership's own statement, unchecked: to show it, or to learn its network."""
    return _decode(raw)[0].own


@sealed.boundary(STATEMENT)
def _decode(raw: bytes) -> tuple[Membership, tuple[Sealed, ...]]:
    if not raw:
        raise _MEMBERSHIP.refuse(
            Refusal.NO_STATEMENT, "none was shown; get one and: bbnode network import STATEMENT"
        )
    if len(raw) > MAX_MEMBERSHIP_BYTES:
        raise _MEMBERSHIP.refuse(
            Refusal.TOO_LARGE, f"{len(raw)} bytes; at most {MAX_MEMBERSHIP_BYTES} are taken"
        )
    items = sealed.unpack_list(_MEMBERSHIP, raw)
    if not 1 <= len(items) <= 2 or not all(isinstance(item, bytes) for item in items):
        raise sealed.malformed(_MEMBERSHIP, "it is not one statement or two")
    parts = tuple(sealed.unseal(STATEMENT, item) for item in items)
    return Membership(statements=tuple(Statement(**part.read()) for part in parts), raw=raw), parts


def _covers(have: tuple[str, ...] | None, want: tuple[str, ...] | None) -> bool:
    return have is None or (want is not None and set(want) <= set(have))


def _not_granted(why: str) -> Exception:
    return STATEMENT.refuse(Refusal.NOT_GRANTED, f"{why}; ask the network's owner for a statement")
