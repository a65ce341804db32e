"""Rounds whose messages are replayed, dropped, swapped, doubled, cut and reordered, by either side.

Rule: whatever is done to a message, a round gives the right mean of `threshold` clients or more, or
a typed error; and each client reveals its shares for one list of survivors of one list of keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from bbnode.components.errors import ComponentError, InvalidComponentConfig
from bbnode.components.secure_aggregation.client import MAX_USED, SecAggClient
from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RoundUnknown,
    RoundViolated,
    TooFewClients,
    UnmaskingFailed,
)
from bbnode.components.secure_aggregation.messages import (
    LETTER_BYTES,
    pack_by_peer,
    pack_peers,
    read_by_peer,
    read_peers,
    read_rows,
)
from bbnode.components.secure_aggregation.plan import RoundPlan, SecAggConfig
from bbnode.components.secure_aggregation.server import MAX_LIARS, SecAggServer
from bbnode.components.secure_aggregation.server_round import ServerRound
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Metadata, PeerIdVec, ResponseBatch
from tests.components.secure_aggregation.rounds import (
    ROUND,
    SERVER,
    Party,
    Play,
    drawing,
    group_means,
    key,
    play,
    quantised_mean,
)

TYPED = (RoundViolated, RoundUnknown, TooFewClients, UnmaskingFailed, NotMaskable)
UP = ("keys", "letters", "vectors", "signatures", "shares")  # of clients
DOWN = ("listing", "mail", "survivors", "signed")  # of the server
Messages = dict[str, dict[PeerId, Any]]


class Wire:
    """One round over a wire on which `change(step, messages)` does what it likes."""

    def __init__(self, p: Play, change: Callable[[str, dict[PeerId, Any]], dict[PeerId, Any]]):
        self.p = p
        self.parties = {party.peer: party for party in p.parties.values()}
        self.change = change
        self.seen: Messages = {}
        self.errors: list[BaseException] = []

    def _carried(self, step: str, messages: dict[PeerId, Any]) -> dict[PeerId, Any]:
        self.seen[step] = dict(messages)
        return self.change(step, dict(messages))

    def _answers(
        self, step: str, asked: str, said: dict[PeerId, Any], act: Callable[[Party, Any], Any]
    ) -> Iterable[tuple[PeerId, Any]]:
        """Send a message to each client; return what comes back of those that answer."""
        answers = {}
        for peer, message in sorted(self._carried(asked, said).items()):
            try:
                answers[peer] = act(self.parties[peer], message)
            except TYPED as error:
                self.errors.append(error)
        return self._carried(step, answers).items()

    def run(self) -> tuple[np.ndarray, int]:
        server, peers = self.p.server, list(self.parties)
        keys = {q.peer: q.round.advertise(q.draw, q.sign) for q in self.parties.values()}
        listing, _ = server.take_keys(self._carried("keys", keys).items())
        left = [peer for peer in peers if peer in read_listing(listing) and server.has(peer)]
        letters = self._answers(
            "letters",
            "listing",
            dict.fromkeys(left, listing),
            lambda q, m: q.round.share(m, q.draw),
        )
        server.take_letters(letters)

        def masked(q: Party, mail: Any) -> np.ndarray:
            n = q.number
            return q.round.mask(mail, self.p.vectors[n], self.p.weights[n], q.draw).view(np.uint8)

        mails = {peer: server.mail(peer) for peer in server.writers}
        listing, _ = server.take_vectors(self._answers("vectors", "mail", mails, masked))
        said = dict.fromkeys(server.survivors, listing)
        signed = self._answers(
            "signatures", "survivors", said, lambda q, m: q.round.confirm(m, q.sign)
        )
        signatures, _ = server.take_signatures(signed)
        signers = filter(server.has, read_by_peer("", signatures, 64, 99))
        said = dict.fromkeys(signers, signatures)
        shares = self._answers("shares", "signed", said, lambda q, m: q.round.reveal(m))
        mean, total, _ = server.unmask(shares)
        return mean, total


def read_listing(listing: bytes) -> set[PeerId]:
    return {row[0] for row in read_rows("", listing, (-1, 32, 32, 32, 64), 99)}


def rows_of(message: Any) -> list[Any]:
    return msgpack.unpackb(message)


def with_rows(change: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    """Change the rows of a message; of a vector or a signature, its bytes."""

    def changed(message: Any, **_: Any) -> Any:
        if isinstance(message, np.ndarray):
            return np.array(change(message.tolist()), np.uint8)
        try:
            return msgpack.packb(change(rows_of(message)))
        except (ValueError, TypeError):
            return bytes(change(list(message)))

    return changed


CHANGES: dict[str, Callable[..., Any]] = {
    "of an earlier round": lambda _m, *, old, **_: old,
    "of another client": lambda _m, *, other, **_: other,
    "of the step before": lambda _m, *, before, **_: before,
    "dropped": lambda _m, **_: None,
    "doubled": with_rows(lambda rows: rows + rows),
    "doubled at its end": with_rows(lambda rows: rows + rows[-1:]),
    "cut": with_rows(lambda rows: rows[:-1]),
    "cut by a byte": lambda m, **_: m[:-1],
    "empty": with_rows(lambda rows: rows[:0]),
    "reversed": with_rows(lambda rows: rows[::-1]),
    "flipped": lambda m, **_: (
        m ^ np.uint8(64) if isinstance(m, np.ndarray) else m[:-1] + bytes([m[-1] ^ 1])
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "few": {"count": 4, "equal_weights": True},
    "all": {"count": 7},
    "equal": {"count": 7, "equal_weights": True},
    "neighbours": {"count": 12, "corrupt": 0.0, "neighbours": 8},
    "groups": {"count": 15, "corrupt": 0.1, "groups": 3, "equal_weights": True},
}
MANY = ("all", "equal", "neighbours", "groups")


def made(seed: object, *, count: int, **settings: Any) -> Play:
    """A round whose clients draw other keys and vectors for another seed."""
    p = play(count, size=20, seed=len(str(seed)), **settings)
    if settings.get("equal_weights"):
        p.weights = dict.fromkeys(p.weights, 1)
    for n, party in p.parties.items():
        party.draw = drawing((seed, n))
    return p


@pytest.fixture(scope="module")
def earlier() -> dict[str, Messages]:
    """The messages of one round of all, which took the same id."""
    found = {}
    for name, settings in SETTINGS.items():
        wire = Wire(made("the earlier round", **settings), lambda _step, messages: messages)
        wire.run()
        found[name] = wire.seen
    return found


@pytest.mark.parametrize("whose", ["one", pytest.param("half", marks=pytest.mark.slow), "all"])
@pytest.mark.parametrize("step", [*UP, *DOWN])
@pytest.mark.parametrize(
    "name", ["few", *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)]
)
def test_a_round_gives_the_right_mean_or_a_typed_error(
    name: str, step: str, whose: str, earlier: dict[str, Messages]
) -> None:
    order = ["keys", "listing", "letters", "mail", "vectors", "survivors", "signatures", "signed",
             "shares"]  # fmt: skip
    for change in CHANGES.values():
        p = made("now", **SETTINGS[name])
        wire = Wire(p, lambda _, messages: messages)

        def hostile(at: str, messages: dict[PeerId, Any], wire: Wire = wire, change: Any = change):
            if at != step:
                return messages
            peers = sorted(messages)
            victims = {"one": peers[2:3], "half": peers[::2], "all": peers}[whose]
            before = wire.seen[order[max(0, order.index(step) - 1)]]
            for one, other in zip(victims, (victims[1:] + victims[:1]), strict=True):
                other = other if other != one else peers[-1]
                messages[one] = change(
                    wire.seen[at][one],
                    old=earlier[name][step].get(one),
                    other=wire.seen[at][other],
                    before=before.get(one, b""),
                )
            return {peer: message for peer, message in messages.items() if message is not None}

        wire.change = hostile
        try:
            mean, total = wire.run()
        except TYPED:
            continue
        summed = [p.number_of(peer) for peer in p.server.survivors]
        assert p.server.fewest >= p.plan.threshold
        wanted, weights = quantised_mean(p, summed)
        if name == "groups":
            wanted = np.median(np.stack(group_means(p)), axis=0).astype(np.float32)
        np.testing.assert_array_equal(mean, wanted)
        assert total == weights


# -- signatures of another round ---------------------------------------------------------------


def cut_lists(p: Play) -> tuple[list[PeerId], list[tuple[PeerId, ...]]]:
    """Whom the server wants the sum of, and of each client the list that it is to sign.

    Each of the others is said to have dropped out to `threshold` clients, so that both of its
    secrets come out, and to nobody that it did itself.
    """
    peers = sorted(party.peer for party in p.parties.values())
    n, t = len(peers), p.plan.threshold
    for s in range(1, n):
        told: list[set[PeerId]] = [set() for _ in peers]
        for victim in peers[s:]:
            able = (i for i in range(n) if peers[i] != victim and len(told[i]) < n - t)
            for i in sorted(able, key=lambda i: (len(told[i]), i >= s))[:t]:
                told[i].add(victim)
        if all(sum(victim in each for each in told) >= t for victim in peers[s:]):
            return peers[:s], [tuple(x for x in peers if x not in each) for each in told]
    raise AssertionError("no such lists")


class Context(SimpleNamespace):
    """What a component of a client may use of its node."""

    @staticmethod
    def of(party: Party, server: PeerId = SERVER) -> Any:
        return Context(
            self_peer=party.peer, source_peer=server, random_bytes=party.draw, sign=party.sign
        )


def attacked(clients: int, round_ids: Iterator[bytes]) -> tuple[int, list[BaseException]]:
    """Ask again with signatures of aborted rounds; return whom the server aims at, and errors."""
    config = SecAggConfig(size=8, clients=clients, corrupt=0.0, clip=10.0)
    p = Play(RoundPlan.of(config), dict.fromkeys(range(clients), np.zeros(8, np.float32)), {})
    parties = {party.peer: party for party in p.parties.values()}
    sides = {peer: SecAggClient(config) for peer in parties}
    contexts = {peer: Context.of(party) for peer, party in parties.items()}
    summed, lists = cut_lists(p)

    def session() -> bytes:
        round_id = next(round_ids)
        server = ServerRound(p.plan, me=SERVER, round_id=round_id)
        keys = {
            peer: side.advertise_keys(contexts[peer], round_id + p.plan.digest)
            for peer, side in sides.items()
        }
        listing, _ = server.take_keys(keys.items())
        letters = {
            peer: side.share_keys(contexts[peer], round_id + listing)
            for peer, side in sides.items()
        }
        server.take_letters(letters.items())
        for peer, side in sides.items():
            said = round_id + server.mail(peer), np.zeros(8, np.float32), Metadata(num_samples=1)
            side.mask(contexts[peer], *said)
        return round_id

    signatures: dict[tuple[PeerId, ...], dict[PeerId, bytes]] = {}
    for each in dict.fromkeys(lists):  # a round for each list, which the server ends then
        round_id = session()
        signatures[each] = {
            peer: sides[peer].confirm(contexts[peer], round_id + pack_peers(each))
            for peer in each[: p.plan.threshold]
        }
    round_id = session()
    errors: list[BaseException] = []
    for peer, each in zip(sorted(parties), lists, strict=True):
        sides[peer].confirm(contexts[peer], round_id + pack_peers(each))
        try:
            sides[peer].reveal(contexts[peer], round_id + pack_by_peer(signatures[each]))
        except RoundViolated as error:
            errors.append(error)
    return len(summed), errors


def test_a_server_that_asks_again_with_old_signatures_gets_no_share() -> None:
    """Else it had the sum of 4 of 20 clients, of which 11 are promised; here, 4 of 10, not 6."""
    ids = (b"round %010d" % n for n in itertools.count())
    aimed_at, errors = attacked(10, ids)
    assert aimed_at == 4
    assert len(errors) == 10
    assert all("did not sign this list of survivors for the keys" in str(e) for e in errors)


def test_a_server_that_begins_a_round_again_is_refused() -> None:
    with pytest.raises(RoundViolated, match="the server began round"):
        attacked(4, itertools.repeat(ROUND))


def test_signatures_name_the_keys_even_where_a_round_is_begun_again() -> None:
    """As if a client had forgotten it: the parties have no memory of rounds here."""
    p, again = made("first", count=7), made("again", count=7)
    wire = Wire(p, lambda _step, messages: messages)
    wire.run()
    old = wire.seen["signed"]

    def replayed(step: str, messages: dict[PeerId, Any]) -> dict[PeerId, Any]:
        return {peer: old[peer] for peer in messages} if step == "signed" else messages

    second = Wire(again, replayed)
    with pytest.raises(TooFewClients, match=r"unmasking: 0 client\(s\) left"):
        second.run()
    assert len(second.errors) == 7


def test_clients_that_saw_other_keys_sign_for_other_keys() -> None:
    """The server leaves one client out of the list that half of the others see."""
    p = made("now", count=10, corrupt=0.0)
    victim = p.parties[9].peer

    def split(step: str, messages: dict[PeerId, Any]) -> dict[PeerId, Any]:
        if step == "listing":
            for at, peer in enumerate(sorted(messages)):
                if at % 2 and peer != victim:
                    rows = rows_of(messages[peer])
                    messages[peer] = msgpack.packb(
                        [row for row in rows if row[0] != victim.to_bytes()]
                    )
        if step == "survivors":
            everybody = [peer for peer in messages if peer != victim]
            messages = dict.fromkeys(everybody, pack_peers(everybody))
        return messages

    wire = Wire(p, split)
    with pytest.raises(TYPED):
        wire.run()
    assert "shares" not in wire.seen or not wire.seen["shares"]


def test_a_round_is_begun_once_over_restarts() -> None:
    config = SecAggConfig(size=4, clients=4)
    plan, party = RoundPlan.of(config), Party(0, RoundPlan.of(config))
    ctx, other = Context.of(party), Context.of(party, PeerId.from_seed("another"))
    client = SecAggClient(config)
    client.advertise_keys(ctx, ROUND + plan.digest)
    begun = client._rounds[SERVER][1]
    data = client.serialize()
    assert not any(secret in data for secret in (begun._letters, begun._pairs, begun._seed))
    restarted = SecAggClient(config)
    restarted.restore(data)
    for side in (client, restarted):
        with pytest.raises(RoundViolated, match="began round"):
            side.advertise_keys(ctx, ROUND + plan.digest)
    restarted.advertise_keys(other, ROUND + plan.digest)  # ids are each server's own
    restarted.advertise_keys(ctx, b"another round..." + plan.digest)
    assert len(restarted.serialize()) == 3 * len(data)


def test_what_a_client_remembers_is_bounded() -> None:
    client = SecAggClient(SecAggConfig(size=4, clients=4))
    for n in range(MAX_USED + 5):
        client._use(SERVER, b"round %010d" % n)
    assert len(client.serialize()) == 16 * MAX_USED
    with pytest.raises(RoundViolated):
        client._use(SERVER, b"round %010d" % (MAX_USED + 4))
    restored = SecAggClient(client.config)
    restored.restore(b"")  # of a version that saved nothing
    assert restored.serialize() == b""
    for wrong in (b"x" * 15, b"x" * (16 * MAX_USED + 16)):
        with pytest.raises(ComponentError, match="no list of up to"):
            restored.restore(wrong)


def test_every_step_of_a_component_is_taken_once() -> None:
    config = SecAggConfig(size=4, clients=4)
    plan, party = RoundPlan.of(config), Party(0, RoundPlan.of(config))
    client, ctx = SecAggClient(config), Context.of(party)
    client.advertise_keys(ctx, ROUND + plan.digest)
    with pytest.raises(RoundUnknown, match="of another round"):
        client.share_keys(ctx, b"another round..." + b"\x90")
    with pytest.raises(RoundViolated, match="whose next one is SHARE"):
        client.confirm(ctx, ROUND + b"\x90")
    with pytest.raises(RoundUnknown, match="no round with this server"):
        client.share_keys(ctx, ROUND + b"\x90")


# -- clients that lie about shares -------------------------------------------------------------


def revealed(count: int, gone: Iterable[int], **settings: Any) -> tuple[Play, dict[PeerId, Any]]:
    """A round up to the shares that its clients reveal; those in `gone` do not."""
    p = made("liars", count=count, gone={"shares": list(gone)}, **settings)
    p.letters(p.keys())
    signed = p.signatures(p.vectors_in())
    return p, p._answers("shares", lambda q: q.round.reveal(signed))


def wrong(answer: bytes, only: Iterable[int] | None = None) -> bytes:
    rows = rows_of(answer)
    for at in range(len(rows)) if only is None else only:
        rows[at][2] = bytes(32) + b"\x07"
    return msgpack.packb(rows)


@pytest.mark.parametrize("liars", [(0, 9), (3, 4), (0, 5, 10), (1, 2, 3, 17)])
@pytest.mark.parametrize("only", [None, (0,), (2, 11)])
def test_whoever_reveals_a_wrong_share_is_named_and_costs_nothing(liars: Any, only: Any) -> None:
    """18 of 20 reveal, 14 are needed, and as many as four lie."""
    p, answers = revealed(20, (5, 12))
    assert (len(answers), p.plan.threshold) == (18, 14)
    names = [sorted(answers)[at] for at in liars]
    for peer in names:
        answers[peer] = wrong(answers[peer], only)
    mean, _, refused = p.server.unmask(answers.items())
    np.testing.assert_array_equal(mean, quantised_mean(p, range(20))[0])

    assert refused.keys() == p.server.liars.keys() == set(names)
    assert all("that it revealed" in why for why in refused.values())


def test_with_too_few_good_shares_the_liars_are_named_all_the_same() -> None:
    p, answers = revealed(20, (5, 12))
    names = sorted(answers)[-5:]
    for peer in names:
        answers[peer] = wrong(answers[peer])
    with pytest.raises(UnmaskingFailed, match=r"13 of 14 shares of .* or they lied"):
        p.server.unmask(answers.items())
    assert p.server.liars.keys() == set(names)


def test_whoever_shares_another_secret_than_it_announced_is_named() -> None:
    for kind, gone in (("_seed", []), ("_pairs", [3])):
        p = made("liars", count=10, gone={"vectors": gone})
        listing = p.keys()
        setattr(p.parties[3].round, kind, b"another secret".ljust(32, b"."))
        p.letters(listing)
        signed = p.signatures(p.vectors_in())
        liar = p.parties[3].peer
        with pytest.raises(UnmaskingFailed, match=f"shares of {liar} do not give its secret back"):
            p.unmask(signed)
        assert list(p.server.liars) == [liar]


def test_shares_that_do_not_fit_their_commitments_are_not_held_against_their_holders() -> None:
    """Who sends them is one share short for each, and named where it fails by that."""
    p = made("liars", count=10)
    listing = p.keys()
    answers = {q.peer: q.round.share(listing, q.draw) for q in p.parties.values()}
    liar = p.parties[0].peer
    letters = read_by_peer("", answers[liar], LETTER_BYTES, 10)
    broken = {peer: letter[:-1] + bytes([letter[-1] ^ 1]) for peer, letter in letters.items()}
    p.server.take_letters({**answers, liar: pack_by_peer(broken)}.items())
    signed = p.signatures(p.vectors_in())
    with pytest.raises(UnmaskingFailed, match=f"1 of 7 shares of {liar}"):
        p.unmask(signed)
    assert p.server.liars == {liar: "9 clients could not read the letters that it sent"}


def test_a_wrong_share_of_ones_own_secret_is_ones_own_lie() -> None:
    p, answers = revealed(20, range(14, 20))
    liar = sorted(answers)[4]
    own = [row[0] for row in rows_of(answers[liar])].index(liar.to_bytes())
    answers[liar] = wrong(answers[liar], (own,))
    with pytest.raises(UnmaskingFailed, match=str(liar)):
        p.server.unmask(answers.items())
    assert list(p.server.liars) == [liar]


def test_shares_that_are_doubled_or_out_of_order_are_refused() -> None:
    for change in (lambda rows: rows + rows[-1:], lambda rows: rows[::-1]):
        p, answers = revealed(7, ())
        liar = sorted(answers)[0]
        rows = rows_of(answers[liar])
        answers[liar] = msgpack.packb(change(rows if len(change(rows)) == 7 else rows[1:]))
        _, _, refused = p.server.unmask(answers.items())
        assert "not sorted by peer, or names one twice" in refused[liar]


class Server:
    """The component of a server, asked as its program asks it."""

    def __init__(self, **settings: Any) -> None:
        self.config = SecAggConfig(size=20, clients=7, clip=2.0, **settings)
        self.component = SecAggServer(self.config)
        self.executions = itertools.count()
        self.events: list[tuple[PeerId, str]] = []

    def round(self, lies: Iterable[int] = ()) -> Metadata:
        """Make a round, in which the clients of these numbers reveal wrong shares."""
        plan, number = RoundPlan.of(self.config), next(self.executions)
        ctx = SimpleNamespace(
            execution=number, now_ns=number, self_peer=SERVER,
            refuse=lambda peer, why: self.events.append((peer, why)),
        )  # fmt: skip
        side = self.component
        begun = side.begin(ctx, PeerIdVec([key(n).peer_id for n in range(7)]))
        parties = [Party(n, plan, round_id=begun[:16]) for n in range(7)]
        for party in parties:
            party.draw = drawing((number, party.number))

        def asked(act: Callable[[Party], Any]) -> ResponseBatch:
            given = sorted(((q.peer, act(q)) for q in parties), key=lambda pair: pair[0])
            return ResponseBatch(responses=tuple(given))

        kept, listing = side.collect_keys(ctx, asked(lambda q: q.round.advertise(q.draw, q.sign)))
        order = sorted(parties, key=lambda q: q.peer)
        parties = [q for q, stays in zip(order, kept, strict=True) if stays]
        side.collect_letters(ctx, asked(lambda q: q.round.share(listing[16:], q.draw)))
        vector = np.ones(20, np.float32)
        _, survivors = side.collect_vectors(
            ctx,
            asked(
                lambda q: q.round.mask(
                    side.mail(SimpleNamespace(source_peer=q.peer), begun[:16])[16:],
                    vector, 1, q.draw,
                ).view(np.uint8)
            ),
        )  # fmt: skip
        _, signed = side.collect_signatures(
            ctx, asked(lambda q: q.round.confirm(survivors[16:], q.sign))
        )

        def reveal(q: Party) -> bytes:
            answer = q.round.reveal(signed[16:])
            return wrong(answer) if q.number in lies else answer

        mean, told = side.unmask(ctx, asked(reveal))
        np.testing.assert_allclose(mean, 1.0, rtol=1e-6)
        return told


def test_liars_are_named_and_have_no_part_in_later_rounds(caplog: Any) -> None:
    server, liar = Server(), str(key(2).peer_id)
    told = server.round(lies=[2])
    assert (told["contributors"], told["refused"]) == (7, 1)
    assert liar in told["refused_why"]
    assert liar in caplog.text
    told = server.round()
    assert (told["contributors"], told["refused"]) == (6, 1)
    assert server.events == [(key(2).peer_id, server.events[0][1])]
    assert "it lied in an earlier round: 6 of the 7 shares" in server.events[0][1]

    restarted = Server()
    restarted.component.restore(server.component.serialize())
    assert restarted.round()["contributors"] == 6
    forgiving = Server(pardoned=(liar,))
    forgiving.component.restore(server.component.serialize())
    assert forgiving.round(lies=[2])["contributors"] == 7
    assert forgiving.round()["contributors"] == 7


def test_whom_a_server_refuses_is_bounded_and_checked() -> None:
    side = SecAggServer(SecAggConfig(size=4, clients=4))
    for n in range(MAX_LIARS + 3):
        side._bar(PeerId.from_seed(n), "")
    assert len(read_peers("", side.serialize(), MAX_LIARS)) == MAX_LIARS
    side.restore(b"")
    assert side.serialize() == b""
    with pytest.raises(ComponentError, match="list of liars"):
        side.restore(b"garbage")
    with pytest.raises(InvalidComponentConfig, match="pardoned"):
        SecAggServer(SecAggConfig(size=4, clients=4, pardoned=("nobody",)))


def test_the_digest_says_nothing_of_whom_a_node_believes() -> None:
    plain = SecAggConfig(size=4, clients=4)
    own = dataclasses.replace(
        plain, members=(str(key(0).peer_id),), pardoned=(str(key(1).peer_id),)
    )
    assert RoundPlan.of(plain).digest == RoundPlan.of(own).digest
