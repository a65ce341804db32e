"""One round of the server, without any I/O.

Rule: what a client says is checked, and a client whose answer is refused counts as one that dropped
out. The server has no secret: it sees public keys, sealed letters, masked vectors and the shares
that survivors reveal.

Who lied about a share is known: a share that was revealed and does not fit the commitment of its
sender is its holder's lie, as an honest holder reveals none that did not fit. Shares that fit their
commitments, and do not give the sender's secret back, are the sender's. `liars` names both.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.access.secrets import signed_as
from bbnode.components.secure_aggregation import shamir
from bbnode.components.secure_aggregation.client_round import (
    CLIENT_TYPE,
    own_purpose,
    pair_purpose,
    route_of,
)
from bbnode.components.secure_aggregation.errors import (
    RoundViolated,
    TooFewClients,
    UnmaskingFailed,
)
from bbnode.components.secure_aggregation.graph import MaskGraph, groups_of
from bbnode.components.secure_aggregation.masking import (
    KEY_BYTES,
    WeakKey,
    add_mask,
    agreed,
    derived,
    public_key,
)
from bbnode.components.secure_aggregation.messages import (
    HASH_BYTES,
    KEY,
    LETTER_BYTES,
    SEALED_BYTES,
    SEED,
    SIGNATURE_BYTES,
    Advert,
    check_sorted,
    commitment,
    pack_adverts,
    pack_by_peer,
    pack_peers,
    read_by_peer,
    read_rows,
    read_share,
    signed_list,
)
from bbnode.components.secure_aggregation.plan import RoundPlan, session
from bbnode.components.secure_aggregation.ring import Words
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import listed

Answers: TypeAlias = Iterable[tuple[PeerId, Any]]
Refused: TypeAlias = dict[PeerId, str]

# With it public keys are tried: of those that agree on nothing, no private key agrees on more.
_ANY_PRIVATE_KEY: Final = bytes([8] * KEY_BYTES)
# Names in a message for people.
_MOST_NAMES: Final = 8


class ServerRound:
    """The clients that are left in one round, and what they sent.

    Each group is a round of its own as far as masks, shares and thresholds go. One that comes to
    nothing is given up, as long as more than half of the groups stay.

    Attributes:
        lost: groups that were given up, by their place, and why.
        liars: clients that lied about shares, as `unmask` found out, and how. Also where it failed.
    """

    def __init__(
        self,
        plan: RoundPlan,
        *,
        me: PeerId,
        round_id: bytes,
        barred: Mapping[PeerId, str] = MappingProxyType({}),
    ) -> None:
        """Begin a round, in which the clients in `barred` have no part, each for a reason."""
        self._plan = plan
        self.round_id = round_id
        self.lost: dict[int, str] = {}
        self.liars: dict[PeerId, str] = {}
        self._barred = barred
        self._head = plan.head(me, round_id)
        self._session = b""
        self._adverts: dict[PeerId, Advert] = {}
        self._neighbours: dict[PeerId, list[PeerId]] = {}
        self._points: dict[PeerId, int] = {}
        self._letters: dict[PeerId, dict[PeerId, bytes]] = {}  # by sender, to receivers
        self._groups: list[list[PeerId]] = []
        self._places: dict[PeerId, int] = {}  # of each client's group
        self._sums: dict[int, Words] = {}  # by group
        self._survivors: list[PeerId] = []

    def take_keys(self, answers: Answers) -> tuple[bytes, Refused]:
        """Take what clients advertise; return the list of all keys. Raises TooFewClients."""

        def take(peer: PeerId, answer: Any) -> None:
            if peer in self._barred:
                raise RoundViolated(f"it lied in an earlier round: {self._barred[peer]}")
            lengths = (KEY_BYTES, KEY_BYTES, HASH_BYTES, SIGNATURE_BYTES)
            rows = read_rows("its advertisement", answer, lengths, 1)
            if len(rows) != 1:
                raise RoundViolated("its advertisement is empty")
            letters, pairs, seed_hash, signature = rows[0]
            advert = Advert(
                peer=peer, letters=letters, pairs=pairs, seed_hash=seed_hash, signature=signature
            )
            if not signed_as(CLIENT_TYPE, peer, advert.signed(self._head), signature):
                raise RoundViolated("its keys are not signed by it, for this round")
            for other in self._adverts.values():
                if {letters, pairs, seed_hash} & {other.letters, other.pairs, other.seed_hash}:
                    raise RoundViolated("another client has the same keys")
            for key in (letters, pairs):
                try:
                    agreed(_ANY_PRIVATE_KEY, key)
                except WeakKey as error:
                    raise RoundViolated(str(error)) from error
            self._adverts[peer] = advert

        refused = _taken(answers, take)
        listing = pack_adverts(self._adverts.values())
        self._session = session(self._head, listing)
        peers = sorted(self._adverts)
        self._points = {peer: at for at, peer in enumerate(peers, 1)}
        self._groups = groups_of(peers, self._plan.config.groups, self._session)
        for place, group in enumerate(self._groups):
            self._places |= dict.fromkeys(group, place)
            graph = MaskGraph(group, self._plan.config.neighbours, self._session)
            self._neighbours |= {peer: graph.neighbours(peer) for peer in group}
        self._enough("the exchange of keys", self._adverts, refused)
        return listing, refused

    def take_letters(self, answers: Answers) -> Refused:
        """Take the letters of clients to their neighbours. Raises TooFewClients."""

        def take(peer: PeerId, answer: Any) -> None:
            neighbours = self._neighbours[peer]
            letters = read_by_peer("its mail", answer, LETTER_BYTES, len(neighbours))
            if letters.keys() != set(neighbours):
                raise RoundViolated("its letters are not to its neighbours")
            self._letters[peer] = letters

        refused = _taken(answers, take, self._adverts)
        self._enough("the exchange of shares", self._letters, refused)
        return refused

    @property
    def writers(self) -> list[PeerId]:
        """The clients whose letters are there, sorted: those that are asked for their vectors."""
        return [peer for peer in sorted(self._letters) if self.has(peer)]

    def has(self, peer: PeerId) -> bool:
        """Return True for a client whose group has not been given up."""
        return self._places.get(peer, -1) not in self.lost

    def mail(self, peer: PeerId) -> bytes:
        """Return the letters to one client. Raises RoundViolated."""
        if peer not in self._letters or not self.has(peer):
            raise RoundViolated(f"{peer} is no client of this round, or dropped out of it")
        return pack_by_peer(
            {
                sender: self._letters[sender][peer]
                for sender in self._neighbours[peer]
                if sender in self._letters
            }
        )

    def take_vectors(self, answers: Answers) -> tuple[bytes, Refused]:
        """Sum up masked vectors; return the list of survivors. Raises TooFewClients."""
        dtype, count = self._plan.ring.dtype, self._plan.config.size + 1

        def take(peer: PeerId, answer: Any) -> None:
            words = _bytes_of(answer)
            if words is None or words.size != count * dtype.itemsize:
                raise RoundViolated(
                    f"its masked vector is not {count} words of {dtype.itemsize} bytes"
                )
            place = self._places[peer]
            if place not in self._sums:
                self._sums[place] = np.zeros(count, dtype)
            self._sums[place] += words.view(dtype)
            self._survivors.append(peer)

        refused = _taken(answers, take, self.writers)
        self._enough("the masked vectors", self._survivors, refused)
        return pack_peers(self.survivors), refused

    def take_signatures(self, answers: Answers) -> tuple[bytes, Refused]:
        """Take what survivors signed; return all signatures. Raises TooFewClients."""
        bodies = {
            place: signed_list(self._session, self._left(place))
            for place in range(len(self._groups))
        }
        signatures: dict[PeerId, bytes] = {}

        def take(peer: PeerId, answer: Any) -> None:
            signature = bytes(answer) if isinstance(answer, bytes | memoryview) else b""
            if not signed_as(CLIENT_TYPE, peer, bodies[self._places[peer]], signature):
                raise RoundViolated("it did not sign the list of survivors")
            signatures[peer] = signature

        refused = _taken(answers, take, self.survivors)
        self._enough("the consistency check", signatures, refused)
        return pack_by_peer(signatures), refused

    def unmask(self, answers: Answers) -> tuple[npt.NDArray[np.float32], int, Refused]:
        """Take the shares that survivors reveal; return the weighted mean and the sum of weights.

        Of several groups it is the median of their means, in each number. `liars` are among the
        refused, though all that they said and that was true has counted.
        Raises TooFewClients and UnmaskingFailed.
        """
        # Shares by whose secret they are of and by who revealed them: each dealer's kind is known.
        shares: dict[PeerId, dict[PeerId, int]] = defaultdict(dict)
        revealed: list[PeerId] = []
        survivors = set(self._survivors)

        def take(peer: PeerId, answer: Any) -> None:
            holders = {*self._neighbours[peer], peer} & self._letters.keys()
            most = len(self._neighbours[peer]) + 1
            rows = read_rows("its shares", answer, (-1, 1, shamir.SHARE_BYTES), most)
            for of, kind, _ in rows:
                if of not in holders or kind != (SEED if of in survivors else KEY):
                    raise RoundViolated("it revealed what it was not asked for")
            check_sorted("the list of its shares", [of for of, _, _ in rows])
            found = {of: (kind, raw, read_share("a share", raw)) for of, kind, raw in rows}
            wrong = [of for of in found if not self._as_sent(of, peer, *found[of][:2])]
            for of in found.keys() - set(wrong):
                shares[of][peer] = found[of][2]
            if wrong:
                self.liars[peer] = (
                    f"{len(wrong)} of the {len(found)} shares that it revealed are not those that "
                    f"it was sent, as that of {wrong[0]}"
                )
            revealed.append(peer)

        refused = _taken(answers, take, self.survivors)
        self._enough("the unmasking", revealed, refused)
        means: list[npt.NDArray[np.float32]] = []
        total = 0
        for place in range(len(self._groups)):
            if place in self.lost:
                continue
            try:
                mean, weight = self._mean_of(place, shares, revealed)
            except UnmaskingFailed as error:
                self.lost[place] = str(error)
                if len(self._groups) - len(self.lost) < self._plan.needed_groups:
                    raise
            else:
                means.append(mean)
                total += weight
        middle = means[0] if len(means) == 1 else np.median(np.stack(means), axis=0)
        return middle.astype(np.float32, copy=False), total, {**refused, **self.liars}

    @property
    def survivors(self) -> list[PeerId]:
        """The clients whose vectors are in the result, sorted."""
        return [peer for peer in sorted(self._survivors) if self.has(peer)]

    @property
    def fewest(self) -> int:
        """The number of survivors in the group that has the fewest."""
        places = [place for place in range(len(self._groups)) if place not in self.lost]
        return min(len(self._left(place)) for place in places)

    # -- parts -------------------------------------------------------------------------------

    def _left(self, place: int) -> list[PeerId]:
        """Return the clients of a group whose vectors are in its sum, sorted."""
        return sorted(set(self._survivors).intersection(self._groups[place]))

    def _enough(self, step: str, left: Iterable[PeerId], refused: Refused) -> None:
        """Drop groups of which too few are left. Raises TooFewClients with too few groups."""
        there, needed, counts = set(left), self._plan.threshold, []
        for place, group in enumerate(self._groups):
            count = len(there.intersection(group))
            if place not in self.lost and count < needed:
                counts.append(count)
                self.lost[place] = f"{count} of its clients were left at {step}, {needed} needed"
        if len(self._groups) - len(self.lost) < self._plan.needed_groups:
            why = "; ".join(f"{peer}: {refused[peer]}" for peer in sorted(refused)[:4])
            raise TooFewClients(step=step, left=min(counts), needed=needed, why=why)

    def _mean_of(
        self,
        place: int,
        shares: Mapping[PeerId, Mapping[PeerId, int]],
        revealed: Sequence[PeerId],
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Return the weighted mean of a group, and the sum of weights. Raises UnmaskingFailed."""
        words, survivors = self._sums[place], self._left(place)
        for peer in survivors:
            seed_hash = self._adverts[peer].seed_hash
            seed = self._recovered(peer, shares.get(peer, {}), revealed, _hash, seed_hash)
            add_mask(words, derived(seed, own_purpose(self._session)), subtract=True)
        for peer in self._groups[place]:
            left = set(survivors).intersection(self._neighbours[peer])
            if peer in survivors or peer not in self._letters or not left:
                continue
            pairs = self._adverts[peer].pairs
            private = self._recovered(peer, shares.get(peer, {}), revealed, public_key, pairs)
            for other in sorted(left):
                shared = agreed(private, self._adverts[other].pairs)
                purpose = pair_purpose(self._session, self._points, peer, other)
                # What `other` added for itself is taken back.
                add_mask(words, derived(shared, purpose), subtract=other < peer)
        return self._plan.ring.mean(words, len(survivors))

    def _as_sent(self, sender: PeerId, holder: PeerId, kind: bytes, share: bytes) -> bool:
        """Return True for a share that its sender committed to; nobody commits to its own."""
        if sender == holder:
            return True
        both = self._letters[sender][holder][SEALED_BYTES:]
        wanted = both[:HASH_BYTES] if kind == SEED else both[HASH_BYTES:]
        route = route_of(self._session, self._points, sender, holder)
        return commitment(route, kind, share) == wanted

    def _recovered(
        self,
        peer: PeerId,
        shares: Mapping[PeerId, int],
        revealed: Sequence[PeerId],
        known_by: Callable[[bytes], bytes],
        known: bytes,
    ) -> bytes:
        """Return a client's secret, of which something is known, from the shares of its holders.

        Raises UnmaskingFailed, which names who can be at fault; `liars` then has who surely is.
        """
        needed = self._plan.share_threshold
        if len(shares) < needed:
            near = {*self._neighbours[peer], peer}
            without = [each for each in revealed if each in near and each not in shares]
            honest = [each for each in without if each not in self.liars]
            if len(honest) >= needed:  # more than can collude
                lie = f"{len(honest)} clients could not read the letters that it sent"
                self.liars.setdefault(peer, lie)
            why = (
                f"; {listed([str(each) for each in without], _MOST_NAMES)} revealed none that fits:"
                " either its letters were no good, or they lied"
            )
            raise UnmaskingFailed(
                f"{len(shares)} of {needed} shares of {peer} are there: too many of its "
                f"neighbours dropped out{why if without else ''}; begin another round"
            )
        # Its own share has no commitment, and a wrong one is its own lie as well. First the same
        # holders as for others, whose weights are known; then those without it.
        order = sorted(shares)
        others = [each for each in order if each != peer]
        for holders in (order, others):
            taken = {self._points[each]: shares[each] for each in holders[:needed]}
            secret = shamir.recover(taken) if len(taken) == needed else None
            if secret is not None and known_by(secret) == known:
                if holders is others:
                    self.liars.setdefault(peer, "the share that it revealed of itself is wrong")
                return secret
        lie = "the shares that it sent do not give the secret back that it announced"
        self.liars.setdefault(peer, lie)
        raise UnmaskingFailed(
            f"the shares of {peer} do not give its secret back: it lied, and is refused from now "
            "on; begin another round"
        )


def _taken(
    answers: Answers,
    take: Callable[[PeerId, Any], None],
    expected: Iterable[PeerId] | None = None,
) -> Refused:
    """Take answers in PeerId order; return why some are refused."""
    known = None if expected is None else set(expected)
    refused: Refused = {}
    heard: set[PeerId] = set()
    for peer, answer in sorted(answers, key=lambda pair: pair[0]):
        try:
            if peer in heard:
                raise RoundViolated("it answered twice; its first answer counts")
            heard.add(peer)
            if known is not None and peer not in known:
                raise RoundViolated("it is no client of this step")
            take(peer, answer)
        except RoundViolated as error:
            refused[peer] = str(error)
    return refused


def _hash(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _bytes_of(answer: Any) -> npt.NDArray[np.uint8] | None:
    fits = isinstance(answer, np.ndarray) and answer.dtype == np.uint8 and answer.ndim == 1
    return np.ascontiguousarray(answer) if fits else None
