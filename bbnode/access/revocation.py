"""Revocation lists: the statements and members that a network's owner has revoked.

Rule: the owner signs one list of serial numbers and of peers, with a sequence number that
grows by one at each change. A node keeps the newest that it has seen and takes only a newer
one, so that nobody can bring back an old list. A revoked peer is not a member, whatever
statement it shows; revoking a granter also revokes the members that it granted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bbnode.access import sealed
from bbnode.access.errors import GrantError, Refusal, RevocationRefused
from bbnode.access.keys import SigningKey
from bbnode.access.sealed import Kind
from bbnode.ir.caps import MAX_REVOKED
from bbnode.ir.peer import PeerId

MAX_SERIAL = 2**64 - 1

REVOCATIONS = Kind(
    name="revocation list",
    context=b"bbnode-revocation-v1",
    prefix="bbrevoked1",
    fields={
        "network": sealed.take_peer,
        "sequence": sealed.integer(MAX_SERIAL, 1),
        "serials": sealed.listed(sealed.integer(MAX_SERIAL), MAX_REVOKED),
        "peers": sealed.listed(sealed.take_peer, MAX_REVOKED),
    },
    max_bytes=256 * 1024,
    error=RevocationRefused,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationList:
    """An authentic list: `network` signed it. Serials and peers are distinct."""

    network: PeerId
    sequence: int
    serials: frozenset[int] = field(repr=False)
    peers: frozenset[PeerId] = field(repr=False)
    raw: bytes = field(repr=False)

    def revokes(self, serial: int, member: PeerId) -> bool:
        """Return True if a statement with that serial, or each of that member, is void."""
        return serial in self.serials or member in self.peers

    @property
    def text(self) -> str:
        """The line of text that `bbnode network import` takes."""
        return sealed.to_text(REVOCATIONS, self.raw)


def revoke(
    key: SigningKey,
    previous: RevocationList | None,
    *,
    serials: Iterable[int] = (),
    peers: Iterable[PeerId] = (),
    reinstate: Iterable[PeerId] = (),
) -> RevocationList:
    """Return the owner's next list: `previous` with these added, and `reinstate` taken off it.

    Raises GrantError for a key that is not the owner's, and beyond the bound.
    """
    if previous is not None and previous.network != key.peer_id:
        raise GrantError(f"only the owner's key of {previous.network} can revoke there")
    old_serials = previous.serials if previous is not None else frozenset[int]()
    old_peers = previous.peers if previous is not None else frozenset[PeerId]()
    all_serials = sorted(old_serials.union(serials))
    all_peers = sorted(old_peers.union(peers).difference(reinstate))
    if any(not 0 <= serial <= MAX_SERIAL for serial in all_serials):
        raise GrantError("a serial does not fit 64 bits")
    if max(len(all_serials), len(all_peers)) > MAX_REVOKED:
        raise GrantError(
            f"a revocation list holds {MAX_REVOKED} serials and as many peers; make a new network"
        )
    sequence = 1 if previous is None else previous.sequence + 1
    raw = sealed.seal(
        REVOCATIONS,
        [key.peer_id.to_bytes(), sequence, all_serials, [peer.to_bytes() for peer in all_peers]],
        key,
    )
    return open_revocations(raw, key.peer_id)


@sealed.boundary(REVOCATIONS)
def open_revocations(raw: bytes, network: PeerId) -> RevocationList:
    """Return the list of `network` in these bytes, signature checked; raises RevocationRefused."""
    part = sealed.unseal(REVOCATIONS, raw)
    owner = part.peer(0)
    if owner != network:
        raise REVOCATIONS.refuse(
            Refusal.WRONG_NETWORK, f"it is of network {owner}, ours is {network}"
        )
    part.check_signature(owner)
    values = part.read()
    for name in ("serials", "peers"):
        if list(values[name]) != sorted(set(values[name])):
            raise sealed.malformed(REVOCATIONS, "it is not sorted")
        values[name] = frozenset(values[name])
    return RevocationList(raw=raw, **values)


def newer(current: RevocationList | None, offered: RevocationList) -> RevocationList | None:
    """Return `offered` if it is newer, None if it is the current list.

    Raises RevocationRefused (STALE) for an older one, and for another of the same number.
    """
    if current is None or offered.sequence > current.sequence:
        return offered
    if offered.raw == current.raw:
        return None
    raise REVOCATIONS.refuse(
        Refusal.STALE,
        f"number {offered.sequence} is not newer than number {current.sequence}, which is kept; "
        "ask the owner for the newest",
    )


def revocations_from_text(text: str) -> bytes:
    """Return the bytes of a line of text; raises RevocationRefused."""
    return sealed.from_text(REVOCATIONS, text)
