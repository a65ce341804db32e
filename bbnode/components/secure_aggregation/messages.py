"""The messages of a round of secure aggregation, and the bodies that are signed.

Rule: a message is a msgpack list of rows, each a list of byte strings of bounded or fixed length,
sorted by peer where it has one row per peer. Reading checks all of it and raises
`RoundViolated`. What is signed names its kind, the plan, the round and the server, and what is
signed after the exchange of keys names all keys of the round (`RoundPlan.session`): these are drawn
anew in each round, so that no signature is worth anything in another one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from bbnode.components.secure_aggregation.errors import RoundViolated
from bbnode.components.secure_aggregation.masking import KEY_BYTES, TAG_BYTES
from bbnode.components.secure_aggregation.shamir import PRIME, SHARE_BYTES
from bbnode.ir.caps import MAX_DIGEST_BYTES, MAX_SCALAR_BYTES
from bbnode.ir.decoding import Boundary, unpack
from bbnode.ir.peer import PeerId

ROUND_ID_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
HASH_BYTES: Final = 32
# Two shares, sealed: of a client's own mask's seed, and of its key for pairs. Behind these are the
# commitments to both, which are for the server too.
SEALED_BYTES: Final = 2 * SHARE_BYTES + TAG_BYTES
LETTER_BYTES: Final = SEALED_BYTES + 2 * HASH_BYTES

_PEER: Final = -1  # the first of a row's lengths
SEED, KEY = b"s", b"k"  # the kinds of a revealed share


@dataclass(frozen=True, slots=True, kw_only=True)
class Advert:
    """The public keys of one client for one round, as it signed them.

    Attributes:
        letters: the X25519 key under which others seal letters to it.
        pairs: the X25519 key of the masks that it shares with its neighbours.
        seed_hash: of the seed of its own mask, by which a wrong share of that shows.
    """

    peer: PeerId
    letters: bytes
    pairs: bytes
    seed_hash: bytes
    signature: bytes

    def signed(self, head: bytes) -> bytes:
        """Return what its signature is over."""
        return b"keys" + head + self.letters + self.pairs + self.seed_hash


def signed_list(session: bytes, survivors: Sequence[PeerId]) -> bytes:
    """Return what each survivor signs: the keys of the round, and the list of all survivors."""
    return b"list" + session + hashlib.sha256(pack_peers(survivors)).digest()


def commitment(route: bytes, kind: bytes, share: bytes) -> bytes:
    """Return the hash by which a share shows to be the one that was sent along a route.

    A share is as good as drawn from 2^256 numbers, so that its hash tells nothing of it.
    """
    return hashlib.sha256(b"share" + route + kind + share).digest()


# -- packing ---------------------------------------------------------------------------------------


def pack_rows(rows: Iterable[Sequence[bytes]]) -> bytes:
    """Return rows as a message."""
    return bytes(msgpack.packb([list(row) for row in rows]))


def pack_peers(peers: Iterable[PeerId]) -> bytes:
    """Return peers as a message, sorted."""
    return pack_rows([peer.to_bytes()] for peer in sorted(peers))


def pack_by_peer(by_peer: Mapping[PeerId, bytes]) -> bytes:
    """Return one byte string per peer as a message."""
    return pack_rows([peer.to_bytes(), by_peer[peer]] for peer in sorted(by_peer))


def pack_adverts(adverts: Iterable[Advert]) -> bytes:
    """Return the keys of all clients as a message."""
    return pack_rows(
        (a.peer.to_bytes(), a.letters, a.pairs, a.seed_hash, a.signature)
        for a in sorted(adverts, key=lambda each: each.peer)
    )


# -- reading ---------------------------------------------------------------------------------------


def read_rows(what: str, payload: Any, lengths: Sequence[int], most: int) -> list[list[Any]]:
    """Return the rows of a message, each with fields of these lengths; raises RoundViolated.

    A first length of -1 is a PeerId.
    """
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise RoundViolated(f"{what} is a {type(payload).__name__}, not bytes")
    with Boundary(f"{what} can't be read", RoundViolated):
        plain = unpack(
            bytes(payload),
            max_bytes=MAX_SCALAR_BYTES,
            max_values=1 + most * (1 + len(lengths)),
            max_depth=2,
        )
        if not isinstance(plain, list) or len(plain) > most:
            raise RoundViolated(f"{what} is no list of up to {most} rows")
        return [_row(what, row, lengths) for row in plain]


def _row(what: str, row: Any, lengths: Sequence[int]) -> list[Any]:
    if not isinstance(row, list) or len(row) != len(lengths):
        raise RoundViolated(f"{what} has a row that is not of {len(lengths)} fields")
    for value, length in zip(row, lengths, strict=True):
        if type(value) is not bytes or (len(value) != length and length != _PEER):
            raise RoundViolated(f"{what} has a field that is not of {length} bytes")
    if lengths[0] == _PEER:
        if len(row[0]) > MAX_DIGEST_BYTES + 2:
            raise RoundViolated(f"{what} has a PeerId of {len(row[0])} bytes")
        row[0] = PeerId.from_bytes(row[0])
    return row


def read_by_peer(what: str, payload: Any, length: int, most: int) -> dict[PeerId, bytes]:
    """Return one byte string per peer; raises RoundViolated."""
    rows = read_rows(what, payload, (_PEER, length), most)
    check_sorted(what, [peer for peer, _ in rows])
    return {peer: value for peer, value in rows}  # noqa: C416 - rows are lists


def read_peers(what: str, payload: Any, most: int) -> tuple[PeerId, ...]:
    """Return a list of peers; raises RoundViolated."""
    peers = [peer for (peer,) in read_rows(what, payload, (_PEER,), most)]
    check_sorted(what, peers)
    return tuple(peers)


def read_adverts(what: str, payload: Any, most: int) -> tuple[Advert, ...]:
    """Return the keys of all clients; raises RoundViolated."""
    lengths = (_PEER, KEY_BYTES, KEY_BYTES, HASH_BYTES, SIGNATURE_BYTES)
    rows = read_rows(what, payload, lengths, most)
    check_sorted(what, [row[0] for row in rows])
    return tuple(
        Advert(peer=peer, letters=letters, pairs=pairs, seed_hash=seed_hash, signature=signature)
        for peer, letters, pairs, seed_hash, signature in rows
    )


def read_share(what: str, raw: bytes) -> int:
    """Return a share as a number of the field; raises RoundViolated."""
    found = int.from_bytes(raw, "big")
    if len(raw) != SHARE_BYTES or found >= PRIME:
        raise RoundViolated(f"{what} is no share")
    return found


def pack_share(share: int) -> bytes:
    """Return the bytes of a share."""
    return share.to_bytes(SHARE_BYTES, "big")


def check_sorted(what: str, peers: Sequence[PeerId]) -> None:
    """Raise RoundViolated unless peers are sorted, each named once."""
    if any(one >= other for one, other in itertools.pairwise(peers)):
        raise RoundViolated(f"{what} is not sorted by peer, or names one twice")
