"""One round of a client, without any I/O.

Rule: each step is taken once and in order, whatever comes of it, and no secret outlives the last.
Of each other client it reveals the share of its mask's seed or the share of its key, never both,
and only for one list of survivors, which at least `threshold` of them have signed. What they sign
names the keys of all clients, its own fresh ones among them: a signature of another round, or of a
client that was shown other keys, is no signature here.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from bbnode.access.secrets import signed_as
from bbnode.components.secure_aggregation import noise, shamir
from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RoundViolated,
    TooFewClients,
)
from bbnode.components.secure_aggregation.graph import MaskGraph, groups_of
from bbnode.components.secure_aggregation.masking import (
    KEY_BYTES,
    WeakKey,
    add_mask,
    agreed,
    derived,
    public_key,
    seal,
    unseal,
)
from bbnode.components.secure_aggregation.messages import (
    KEY,
    LETTER_BYTES,
    SEALED_BYTES,
    SEED,
    SIGNATURE_BYTES,
    Advert,
    commitment,
    pack_by_peer,
    pack_rows,
    pack_share,
    read_adverts,
    read_by_peer,
    read_peers,
    signed_list,
)
from bbnode.components.secure_aggregation.plan import RoundPlan, session
from bbnode.components.secure_aggregation.ring import Words
from bbnode.ir.peer import PeerId

# Signatures are by components of this type.
CLIENT_TYPE = "bbnode.SecAggClient"

Draw = Callable[[int], bytes]
Sign = Callable[[bytes], bytes]


class Step(enum.IntEnum):
    """The steps of a client, in order."""

    ADVERTISE, SHARE, MASK, CONFIRM, REVEAL, OVER = range(6)


class ClientRound:
    """The keys, masks and shares of one client in one round."""

    def __init__(self, plan: RoundPlan, *, me: PeerId, server: PeerId, round_id: bytes) -> None:
        self._plan = plan
        self._me = me
        self.server = server
        self._round_id = round_id
        self._head = plan.head(server, round_id)
        self._session = b""
        self._next = Step.ADVERTISE
        self._letters = self._pairs = self._seed = b""
        self._adverts: dict[PeerId, Advert] = {}
        self._points: dict[PeerId, int] = {}
        self._group: frozenset[PeerId] = frozenset()
        self._graph = MaskGraph((), 0, b"")
        self._neighbours: tuple[PeerId, ...] = ()
        self._masked_with: tuple[PeerId, ...] = ()
        self._held: dict[PeerId, tuple[bytes, bytes]] = {}  # the shares of others, and its own
        self._agreed: dict[PeerId, tuple[bytes, bytes]] = {}  # for letters, and for pairs
        self._survivors: tuple[PeerId, ...] = ()

    def __repr__(self) -> str:
        return f"ClientRound({self._round_id.hex()}, {self._next.name})"

    def advertise(self, draw: Draw, sign: Sign) -> bytes:
        """Draw the keys of the round; return the public ones, signed."""
        self._take(Step.ADVERTISE)
        self._letters, self._pairs, self._seed = (draw(KEY_BYTES) for _ in range(3))
        unsigned = Advert(
            peer=self._me,
            letters=public_key(self._letters),
            pairs=public_key(self._pairs),
            seed_hash=hashlib.sha256(self._seed).digest(),
            signature=b"",
        )
        self._adverts[self._me] = unsigned
        said = (unsigned.letters, unsigned.pairs, unsigned.seed_hash)
        return pack_rows([(*said, sign(unsigned.signed(self._head)))])

    def share(self, listing: Any, draw: Draw) -> bytes:
        """Check the keys of all clients; return a sealed letter with shares to each neighbour.

        Raises TooFewClients and RoundViolated.
        """
        self._take(Step.SHARE)
        adverts = read_adverts("the list of keys", listing, self._plan.config.clients)
        mine = self._adverts[self._me]
        self._adverts = {each.peer: each for each in adverts}
        self._check_keys(mine)
        peers = list(self._adverts)
        self._session = session(self._head, bytes(listing))
        groups = groups_of(peers, self._plan.config.groups, self._session)
        (group,) = (each for each in groups if self._me in each)
        self._enough("the exchange of keys", len(group))
        self._group = frozenset(group)
        self._graph = MaskGraph(group, self._plan.config.neighbours, self._session)
        self._points = {peer: at for at, peer in enumerate(peers, 1)}
        self._neighbours = tuple(self._graph.neighbours(self._me))
        self._check_signatures()

        holders = sorted((*self._neighbours, self._me))
        points = [self._points[peer] for peer in holders]
        parts = [
            shamir.split(secret, points, self._plan.share_threshold, draw)
            for secret in (self._seed, self._pairs)
        ]
        letters: dict[PeerId, bytes] = {}
        for holder, of_seed, of_key in zip(holders, *parts, strict=True):
            pair = (pack_share(of_seed), pack_share(of_key))
            if holder == self._me:
                self._held[holder] = pair
            else:
                route = self._route(self._me, holder)
                sealed = seal(self._letter_key(self._me, holder), b"".join(pair), route)
                letters[holder] = sealed + _commitments(route, pair)
        return pack_by_peer(letters)

    def mask(self, mail: Any, vector: npt.NDArray[Any], weight: int, draw: Draw) -> Words:
        """Return the contribution [P + 1] of a vector [P], masked with those who sent letters.

        It is clipped to the norm before, and noise is added, as the plan says.

        Raises TooFewClients, RoundViolated and NotMaskable.
        """
        self._take(Step.MASK)
        letters = read_by_peer("the mail", mail, LETTER_BYTES, len(self._neighbours))
        if not letters.keys() <= set(self._neighbours):
            raise RoundViolated("the mail has a letter of a client that is no neighbour")
        # Of so many letters and as many survivors, one honest client is in both, so that its mask
        # stays; in the complete graph this client counts as one itself.
        own = 0 if self._plan.config.neighbours else 1
        self._enough("the exchange of shares", len(letters) + own, self._plan.share_threshold)
        if vector.shape != (self._plan.config.size,):
            raise NotMaskable(
                f"a vector of shape {list(vector.shape)}, not [{self._plan.config.size}] (size)"
            )
        norm, deviation = self._plan.config.norm, self._plan.deviation
        words = self._plan.ring.words(noise.clipped(vector, norm) if norm else vector, weight)
        if deviation:
            of_noise = noise.drawn(vector.size, deviation, draw(noise.KEY_BYTES))
            words[:-1] += of_noise.astype(words.dtype)
        for peer in letters:
            key = derived(
                self._agreed[peer][1], pair_purpose(self._session, self._points, self._me, peer)
            )
            add_mask(words, key, subtract=peer < self._me)
        add_mask(words, derived(self._seed, own_purpose(self._session)))
        self._masked_with = tuple(letters)
        for peer, letter in letters.items():
            pair = self._opened(peer, letter)
            if pair is not None:  # else its sender lied, and has one share less
                self._held[peer] = pair
        return words

    def confirm(self, listing: Any, sign: Sign) -> bytes:
        """Sign the list of survivors, whose masked vectors the server says that it has.

        Raises TooFewClients and RoundViolated.
        """
        self._take(Step.CONFIRM)
        everybody = read_peers("the list of survivors", listing, self._plan.config.clients)
        if not set(everybody) <= self._adverts.keys():
            raise RoundViolated("the list of survivors names a client without keys")
        survivors = tuple(peer for peer in everybody if peer in self._group)
        self._enough("the masked vectors", len(survivors))
        if self._me not in survivors:
            raise RoundViolated("the list of survivors leaves out a client that is there")
        if not set(survivors).intersection(self._neighbours) <= set(self._masked_with):
            raise RoundViolated("a neighbour survived whose letter was held back")
        if not self._graph.is_connected(survivors):
            raise RoundViolated("the list of survivors falls apart into groups")
        self._survivors = survivors
        return sign(signed_list(self._session, survivors))

    def reveal(self, signatures: Any) -> bytes:
        """Return a share of each neighbour: of its seed if it survived, of its key if not.

        Raises TooFewClients and RoundViolated. All secrets of the round are gone afterwards.
        """
        self._take(Step.REVEAL)
        held, survivors = self._held, set(self._survivors)
        self.forget()
        most = self._plan.config.clients
        everybody = read_by_peer("the signatures", signatures, SIGNATURE_BYTES, most)
        others = self._adverts.keys() - self._group
        if not everybody.keys() <= survivors | others:
            raise RoundViolated("the signatures are not of survivors alone")
        given = {peer: everybody[peer] for peer in everybody if peer in survivors}
        body = signed_list(self._session, self._survivors)
        needed = self._plan.threshold
        self._enough("the consistency check", len(given))
        # Checking one takes a tenth of a millisecond; as many as are needed say enough.
        for peer in list(given)[:needed]:
            if not signed_as(CLIENT_TYPE, peer, body, given[peer]):
                raise RoundViolated(
                    f"{peer} did not sign this list of survivors for the keys of this round: the "
                    "server has shown others another list or other keys, or forged a signature"
                )
        rows = []
        for peer in sorted(held):
            of_seed, of_key = held[peer]
            alive = peer in survivors
            rows.append((peer.to_bytes(), SEED if alive else KEY, of_seed if alive else of_key))
        return pack_rows(rows)

    def forget(self) -> None:
        """Drop all secrets; no step of the round can follow but the one under way."""
        self._letters = self._pairs = self._seed = b""
        self._held, self._agreed = {}, {}
        self._next = Step.OVER

    # -- parts -------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        if self._next is not step:
            raise RoundViolated(
                f"the server asks for step {step.name} of a round whose next one is "
                f"{self._next.name}; each is taken once"
            )
        self._next = Step(step + 1)

    def _enough(self, step: str, left: int, needed: int = 0) -> None:
        needed = needed or self._plan.threshold
        if left < needed:
            raise TooFewClients(step=step, left=left, needed=needed)

    def _check_keys(self, mine: Advert) -> None:
        listed = self._adverts.get(self._me)
        if listed is None or listed.signed(b"") != mine.signed(b""):
            raise RoundViolated("the list of keys has not this client's own keys")
        for what in ("letters", "pairs", "seed_hash"):
            if len({getattr(each, what) for each in self._adverts.values()}) < len(self._adverts):
                raise RoundViolated(f"two clients have the same key ({what})")
        members = self._plan.members
        for peer in self._adverts:
            if members and peer not in members:
                raise RoundViolated(f"{peer} is none of this client's members")

    def _check_signatures(self) -> None:
        for peer in self._neighbours:
            advert = self._adverts[peer]
            if not signed_as(CLIENT_TYPE, peer, advert.signed(self._head), advert.signature):
                raise RoundViolated(f"the keys of {peer} are not signed by it")
            try:
                self._agreed[peer] = (
                    agreed(self._letters, advert.letters),
                    agreed(self._pairs, advert.pairs),
                )
            except WeakKey as error:
                raise RoundViolated(f"{peer}: {error}") from error

    def _opened(self, sender: PeerId, letter: bytes) -> tuple[bytes, bytes] | None:
        """Return the shares of a letter; None unless they are those that its sender committed to.

        So a share that this client reveals and that is another one is this client's own lie.
        """
        route = self._route(sender, self._me)
        sealed, commitments = letter[:SEALED_BYTES], letter[SEALED_BYTES:]
        plain = unseal(self._letter_key(sender, self._me), sealed, route)
        if plain is None:
            return None
        half = len(plain) // 2
        pair = plain[:half], plain[half:]
        return pair if _commitments(route, pair) == commitments else None

    def _letter_key(self, sender: PeerId, receiver: PeerId) -> bytes:
        other = receiver if sender == self._me else sender
        return derived(self._agreed[other][0], b"letter" + self._route(sender, receiver))

    def _route(self, sender: PeerId, receiver: PeerId) -> bytes:
        return route_of(self._session, self._points, sender, receiver)


def route_of(
    session: bytes, points: Mapping[PeerId, int], sender: PeerId, receiver: PeerId
) -> bytes:
    """Return what a letter from one client to another is bound to."""
    return session + b"".join(points[peer].to_bytes(4, "big") for peer in (sender, receiver))


def pair_purpose(session: bytes, points: Mapping[PeerId, int], one: PeerId, other: PeerId) -> bytes:
    """Return what the key of the mask of two clients is derived for."""
    low, high = sorted((points[one], points[other]))
    return b"pair" + session + low.to_bytes(4, "big") + high.to_bytes(4, "big")


def own_purpose(session: bytes) -> bytes:
    """Return what the key of a client's own mask is derived from its seed for."""
    return b"own" + session


def _commitments(route: bytes, pair: tuple[bytes, bytes]) -> bytes:
    """Return the commitments to the shares of a seed and of a key, one after the other."""
    return b"".join(commitment(route, *each) for each in zip((SEED, KEY), pair, strict=True))
