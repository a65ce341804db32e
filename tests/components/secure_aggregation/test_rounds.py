"""Whole rounds without a network: drop-outs at every step, and parties that lie."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.components.secure_aggregation.errors import (
    NotMaskable,
    RoundViolated,
    TooFewClients,
    UnmaskingFailed,
)
from bbnode.components.secure_aggregation.masking import public_key
from bbnode.components.secure_aggregation.messages import (
    KEY,
    LETTER_BYTES,
    SEED,
    pack_by_peer,
    pack_peers,
    pack_rows,
    read_adverts,
    read_by_peer,
    read_peers,
    read_rows,
    signed_list,
)
from bbnode.components.secure_aggregation.plan import RoundPlan
from bbnode.components.secure_aggregation.shamir import PRIME, SHARE_BYTES
from bbnode.ir.peer import PeerId
from tests.components.secure_aggregation.rounds import (
    ROUND,
    SERVER,
    Party,
    Play,
    drawing,
    key,
    play,
    quantised_mean,
)

STEPS = ("keys", "letters", "vectors", "signatures", "shares")


def check(p: Play) -> None:
    mean, total = p.run()
    summed = [p.number_of(peer) for peer in p.server.survivors]
    wanted, weights = quantised_mean(p, summed)
    np.testing.assert_array_equal(mean, wanted)
    assert total == weights
    assert not any(p.refused.values())


# -- sums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_clients_may_drop_out_at_any_step(step: str) -> None:
    p = play(10, gone={step: [0, 4, 9]})
    check(p)
    assert len(p.server.survivors) == (7 if step in ("keys", "letters", "vectors") else 10)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_whoever_drops_out_whenever_the_sum_is_that_of_the_survivors(data: Any) -> None:
    count = data.draw(st.integers(4, 9))
    most = count - RoundPlan.of(play(count).plan.config).threshold
    leavers = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, most))]
    gone: dict[str, list[int]] = {}
    for n in leavers:
        gone.setdefault(data.draw(st.sampled_from(STEPS)), []).append(n)
    check(play(count, size=5, seed=count, gone=gone))


def test_neighbours_alone_are_enough() -> None:
    gone = {"letters": [1], "vectors": [2, 5], "signatures": [3], "shares": [9]}
    p = play(40, neighbours=30, corrupt=0.1, gone=gone)
    check(p)
    assert len(p.server.survivors) == 37
    assert all(len(found) == 30 for found in p.server._neighbours.values())


def test_words_of_all_widths() -> None:
    for levels, bits in ((2, 16), (1 << 12, 32), (1 << 24, 64)):
        p = play(12, levels=levels)
        assert p.plan.ring.bits == bits
        check(p)


def test_equal_weights_hide_the_numbers_of_examples() -> None:
    p = play(4, equal_weights=True)
    p.weights = dict.fromkeys(p.weights, 1)
    check(p)


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_the_round_fails_by_name(step: str) -> None:
    p = play(10, gone={step: [0, 1, 2, 3]})
    with pytest.raises(TooFewClients, match=r"6 client\(s\) left, 7 needed; begin another"):
        p.run()


def test_a_masked_vector_says_nothing() -> None:
    """Of one and the same vector, and over vectors, the masked words are uniform."""
    p = play(4, size=4000)
    for n in p.vectors:
        p.vectors[n][:] = 0.5
    p.run()
    for raw in p.masked.values():
        words = raw.view(p.plan.ring.dtype)[:-1].astype(np.float64) / 2.0**32
        counts, _ = np.histogram(words, bins=16, range=(0, 1))
        assert ((counts - 250.0) ** 2 / 250).sum() < 45  # chi-squared, 15 degrees: p < 1e-4
    first, second, *_ = p.masked.values()
    assert (first != second).mean() > 0.95


# -- what is revealed ------------------------------------------------------------------------


def test_of_each_client_one_secret_is_revealed_and_never_both() -> None:
    p = play(10, gone={"vectors": [2, 6]})
    p.run()
    gone = {p.parties[n].peer for n in (2, 6)}
    for answer in p.revealed.values():
        rows = read_rows("", answer, (-1, 1, SHARE_BYTES), 10)
        kinds = {of: kind for of, kind, _ in rows}
        assert len(kinds) == len(rows) == 10
        assert {of for of, kind in kinds.items() if kind == KEY} == gone


def test_no_secret_outlives_the_round() -> None:
    p = play(5)
    p.run()
    for party in p.parties.values():
        state = {name: value for name, value in vars(party.round).items() if value}
        assert not {"_letters", "_pairs", "_seed", "_held", "_agreed"} & state.keys()
        assert "OVER" in repr(party.round)


def to_signatures(p: Play) -> tuple[bytes, bytes]:
    p.letters(p.keys())
    listing = p.vectors_in()
    return listing, p.signatures(listing)


def test_a_second_request_for_shares_gets_nothing() -> None:
    p = play(5)
    listing, signatures = to_signatures(p)
    client = p.parties[0]
    client.round.reveal(signatures)
    for again in (
        lambda: client.round.reveal(signatures),
        lambda: client.round.confirm(listing, client.sign),
    ):
        with pytest.raises(RoundViolated, match="each is taken once"):
            again()


def test_a_failed_request_for_shares_is_the_last() -> None:
    p = play(5)
    _, signatures = to_signatures(p)
    client = p.parties[0]
    with pytest.raises(RoundViolated):
        client.round.reveal(b"garbage")
    with pytest.raises(RoundViolated, match="next one is OVER"):
        client.round.reveal(signatures)


@pytest.mark.parametrize("skipped", ["share", "mask", "confirm", "reveal"])
def test_no_step_can_be_skipped(skipped: str) -> None:
    party = Party(0, play(4).plan)
    act = {
        "share": lambda: party.round.share(b"", party.draw),
        "mask": lambda: party.round.mask(b"", np.zeros(50, np.float32), 1, drawing(0)),
        "confirm": lambda: party.round.confirm(b"", party.sign),
        "reveal": lambda: party.round.reveal(b""),
    }
    with pytest.raises(RoundViolated, match="next one is ADVERTISE"):
        act[skipped]()


# -- a server that lies ------------------------------------------------------------------------


def test_two_lists_of_survivors_are_caught_by_the_signatures() -> None:
    """The server tells one half that a client survived, and the other that it dropped out."""
    p = play(10)
    p.letters(p.keys())
    p.vectors_in()
    everybody = p.server.survivors
    lists = [pack_peers(everybody), pack_peers(everybody[1:])]
    signed: list[dict[PeerId, bytes]] = [{}, {}]
    for at, peer in enumerate(everybody[1:]):
        party = p.parties[p.number_of(peer)]
        signed[at % 2][peer] = party.round.confirm(lists[at % 2], party.sign)
    given = pack_by_peer({**signed[0], **signed[1]})
    for peer in everybody[1:]:
        with pytest.raises(RoundViolated, match="did not sign this list"):
            p.parties[p.number_of(peer)].round.reveal(given)
    # Those who saw one list are too few to be enough by themselves.
    assert max(map(len, signed)) < p.plan.threshold


def test_too_few_signatures_reveal_nothing() -> None:
    p = play(10)
    _, signatures = to_signatures(p)
    given = read_by_peer("", signatures, 64, 10)
    some = dict(list(given.items())[:6])
    with pytest.raises(TooFewClients, match=r"consistency check: 6 client\(s\) left, 7 needed"):
        p.parties[0].round.reveal(pack_by_peer(some))


@pytest.mark.parametrize("forge", ["stranger", "flipped", "other round"])
def test_forged_signatures_reveal_nothing(forge: str) -> None:
    p = play(4, gone={"vectors": [3]})
    _, signatures = to_signatures(p)
    given = read_by_peer("", signatures, 64, 10)
    first = min(given)
    if forge == "stranger":
        given[key(99).peer_id] = given.pop(first)
    elif forge == "flipped":
        given[first] = given[first][:-1] + bytes([given[first][-1] ^ 1])
    else:
        head = p.plan.head(SERVER, b"another round..x")
        party = p.parties[p.number_of(first)]
        given[first] = party.sign(signed_list(head, p.server.survivors))
    with pytest.raises(RoundViolated, match=r"did not sign|not of survivors"):
        p.parties[0].round.reveal(pack_by_peer(given))


def test_lists_of_survivors_that_lie_are_not_signed() -> None:
    def confirming(change: Any, **gone: Any) -> None:
        p = play(6, gone=gone)
        p.letters(p.keys())
        survivors = read_peers("", p.vectors_in(), 6)
        me = p.parties[0]
        me.round.confirm(pack_peers(change(list(survivors), me.peer)), me.sign)

    with pytest.raises(RoundViolated, match="leaves out a client that is there"):
        confirming(lambda s, me: [x for x in s if x != me])
    with pytest.raises(RoundViolated, match="names a client without keys"):
        confirming(lambda s, _: [*s[:-1], PeerId.from_seed(7)], vectors=[5])
    with pytest.raises(RoundViolated, match="letter was held back"):
        confirming(lambda s, _: sorted({*s, *(key(n).peer_id for n in range(6))}), letters=[5])
    with pytest.raises(TooFewClients, match=r"3 client\(s\) left, 5 needed"):
        confirming(lambda s, me: [me, *[x for x in s if x != me][:2]])


def test_survivors_in_two_groups_are_no_list() -> None:
    """A server that says the right clients dropped out would learn two sums of parts."""
    p = play(40, neighbours=4, corrupt=0.0)
    p.letters(p.keys())
    p.vectors_in()
    graph = p.server._neighbours
    walk = [p.server.survivors[0]]
    while len(walk) < 40:  # along the ring: those two steps away are not neighbours of both
        last, known = walk[-1], set(walk)
        near = [x for x in graph[last] if x not in known]
        walk.append(max(near, key=lambda x: len(set(graph[x]) & known)))
    cut = {walk[5], walk[6], walk[20], walk[21]}
    me = p.parties[p.number_of(walk[0])]
    with pytest.raises(RoundViolated, match="falls apart into groups"):
        me.round.confirm(pack_peers(set(walk) - cut), me.sign)


def test_keys_that_the_server_made_up_are_not_believed() -> None:
    def sharing(change: Any, **settings_: Any) -> None:
        p = play(4, **settings_)
        adverts = {a.peer: a for a in read_adverts("", p.keys(), 4)}
        me, other = p.parties[0].peer, p.parties[1].peer
        rows = change(adverts, me, other)
        p.parties[0].round.share(pack_rows(rows), p.parties[0].draw)

    def row(a: Any, **changed: bytes) -> list[bytes]:
        names = ("letters", "pairs", "seed_hash", "signature")
        return [a.peer.to_bytes(), *(changed.get(n, getattr(a, n)) for n in names)]

    def swap(which: str, value: bytes) -> Any:
        return lambda all_, _, other: [
            row(a, **({which: value} if peer == other else {})) for peer, a in all_.items()
        ]

    for which in ("letters", "pairs"):
        with pytest.raises(RoundViolated, match="are not signed by it"):
            sharing(swap(which, public_key(b"of the server".ljust(32))))
    with pytest.raises(RoundViolated, match="has not this client's own keys"):
        sharing(lambda all_, me, _: [row(a) for peer, a in all_.items() if peer != me])
    with pytest.raises(RoundViolated, match="has not this client's own keys"):
        sharing(
            lambda all_, me, _: [
                row(a, **({"pairs": b"x" * 32} if peer == me else {})) for peer, a in all_.items()
            ]
        )
    with pytest.raises(RoundViolated, match="the same key"):
        sharing(
            lambda all_, me, other: [
                row(a, **({"pairs": all_[me].pairs} if peer == other else {}))
                for peer, a in all_.items()
            ]
        )
    with pytest.raises(RoundViolated, match="not sorted by peer"):
        sharing(lambda all_, *_: [row(a) for a in list(all_.values())[::-1]])
    with pytest.raises(TooFewClients, match=r"exchange of keys: 2 client\(s\) left, 3 needed"):
        sharing(lambda all_, me, other: [row(a) for p, a in all_.items() if p in (me, other)])
    with pytest.raises(RoundViolated, match="none of this client's members"):
        sharing(lambda all_, *_: [row(a) for a in all_.values()], members=(str(key(0).peer_id),))


def test_keys_of_another_round_server_or_plan_are_not_believed() -> None:
    """Replayed advertisements: each signature names all three."""
    p = play(4)
    others = {
        "server": {"server": PeerId.from_seed("another")},
        "round": {"round_id": b"another round..x"},
        "plan": {"plan": play(4, levels=9).plan},
    }
    for said in others.values():
        party = Party(3, **{"plan": p.plan, **said})
        answer = party.round.advertise(party.draw, party.sign)
        honest = [
            (q.peer, Party(n, p.plan).round.advertise(q.draw, q.sign))
            for n, q in p.parties.items()
            if n != 3
        ]
        server = play(4).server
        _, refused = server.take_keys([*honest, (party.peer, answer)])
        assert refused == {party.peer: "its keys are not signed by it, for this round"}


def test_letters_held_back_stop_the_client() -> None:
    p = play(6)
    p.letters(p.keys())
    mail = read_by_peer("", p.server.mail(p.parties[0].peer), LETTER_BYTES, 6)
    few = dict(list(mail.items())[:3])
    with pytest.raises(TooFewClients, match=r"exchange of shares: 4 client\(s\) left, 5 needed"):
        p.parties[0].round.mask(pack_by_peer(few), p.vectors[0], 1, drawing(0))


def test_mail_of_strangers_stops_the_client() -> None:
    p = play(6)
    p.letters(p.keys())
    mail = read_by_peer("", p.server.mail(p.parties[0].peer), LETTER_BYTES, 6)
    mail[PeerId.from_seed(1)] = mail.pop(min(mail))
    with pytest.raises(RoundViolated, match="no neighbour"):
        p.parties[0].round.mask(pack_by_peer(mail), p.vectors[0], 1, drawing(0))


# -- clients that lie --------------------------------------------------------------------------


def all_but(p: Play, number: int, answer: Any, step: str) -> Any:
    """Run to a step with a client that answers something else there, and take what it says."""
    peer = p.parties[number].peer
    steps = {
        "keys": (p.server.take_keys, lambda q: q.round.advertise(q.draw, q.sign)),
    }
    take, act = steps[step]
    answers = {q.peer: act(q) for q in p.parties.values()}
    given = answer(answers[peer]) if callable(answer) else answer
    return take({**answers, peer: given}.items()), peer


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (b"", "can't be read"),
        (b"\xc1", "can't be read"),
        (b"\x90" * 1000, "can't be read|no list"),
        (b"x" * 2_000_000, "can't be read"),
        (None, "is a NoneType, not bytes"),
        (3, "is a int, not bytes"),
        (msgpack.packb([]), "is empty"),
        (msgpack.packb({"a": 1}), "no list|can't be read"),
        (msgpack.packb([[b"k" * 32] * 3]), "not of 4 fields"),
        (msgpack.packb([[b"k" * 31, b"k" * 32, b"k" * 32, b"k" * 64]]), "not of 32 bytes"),
        (msgpack.packb([["k" * 32, b"k" * 32, b"k" * 32, b"k" * 64]]), "not of 32 bytes"),
        (msgpack.packb([[b"a" * 32, b"b" * 32, b"c" * 32, b"k" * 64]]), "not signed by it"),
    ],
)
def test_garbage_for_keys_is_refused_by_name(lie: Any, why: str) -> None:
    p = play(4)
    (_, refused), peer = all_but(p, 2, lie, "keys")
    assert list(refused) == [peer]
    assert re.search(why, refused[peer])


def test_weak_and_copied_keys_are_refused_by_name() -> None:
    p = play(5)
    answers = {q.peer: q.round.advertise(q.draw, q.sign) for q in p.parties.values()}
    liar = p.parties[4]
    head = p.plan.head(SERVER, ROUND)

    def says(letters: bytes, pairs: bytes) -> bytes:
        body = b"keys" + head + letters + pairs + b"h" * 32
        return msgpack.packb([[letters, pairs, b"h" * 32, liar.sign(body)]])

    _, refused = play(5).server.take_keys(
        {**answers, liar.peer: says(b"l" * 32, bytes(32))}.items()
    )
    assert "agrees on nothing" in refused[liar.peer]
    others = sorted(peer for peer in answers if peer != liar.peer)
    copied = msgpack.unpackb(answers[others[0]])[0][1]
    _, refused = play(5).server.take_keys({**answers, liar.peer: says(b"l" * 32, copied)}.items())
    assert list(refused.values()) == ["another client has the same keys"]


def test_letters_to_the_wrong_clients_are_refused() -> None:
    p = play(5)
    listing = p.keys()
    answers = {q.peer: q.round.share(listing, q.draw) for q in p.parties.values()}
    liar = p.parties[0].peer
    good = read_by_peer("", answers[liar], LETTER_BYTES, 5)
    for lie in (
        dict(list(good.items())[1:]),
        {**good, liar: b"x" * LETTER_BYTES},
        {peer: letter + b"!" for peer, letter in good.items()},
    ):
        packed = pack_by_peer(dict(sorted(lie.items())))
        server = play(5).server
        server.take_keys(
            [
                (q.peer, Party(n, p.plan).round.advertise(Party(n, p.plan).draw, q.sign))
                for n, q in p.parties.items()
            ]
        )
        refused = server.take_letters({**answers, liar: packed}.items())
        assert list(refused) == [liar]
    with pytest.raises(RoundViolated, match="no client of this round"):
        server.mail(liar)


def test_unreadable_letters_cost_their_sender_only_shares() -> None:
    """One letter of garbage: its receiver has no share of the sender, and the others suffice."""
    p = play(6)
    listing = p.keys()
    answers = {q.peer: q.round.share(listing, q.draw) for q in p.parties.values()}
    liar, one = p.parties[0].peer, p.parties[1].peer
    letters = read_by_peer("", answers[liar], LETTER_BYTES, 6)
    letters[one] = b"g" * LETTER_BYTES
    assert not p.server.take_letters({**answers, liar: pack_by_peer(letters)}.items())
    mean, _ = p.unmask(p.signatures(p.vectors_in()))
    np.testing.assert_array_equal(mean, quantised_mean(p, range(6))[0])


def test_unreadable_letters_to_all_end_the_round_by_name() -> None:
    p = play(6)
    listing = p.keys()
    answers = {q.peer: q.round.share(listing, q.draw) for q in p.parties.values()}
    liar = p.parties[0].peer
    letters = dict.fromkeys(read_by_peer("", answers[liar], LETTER_BYTES, 6), b"g" * LETTER_BYTES)
    p.server.take_letters({**answers, liar: pack_by_peer(letters)}.items())
    signatures = p.signatures(p.vectors_in())
    with pytest.raises(UnmaskingFailed, match=f"1 of 5 shares of {liar}"):
        p.unmask(signatures)


def test_letters_and_shares_of_another_round_are_worth_nothing() -> None:
    """Replayed by a client: its own letters, which nobody can open, then its own old shares."""
    old = play(6)
    old.letters(old.keys())
    listing = old.vectors_in()
    signatures = old.signatures(listing)
    liar = old.parties[0].peer
    old_shares = old.parties[0].round.reveal(signatures)

    def fresh() -> Play:
        made = play(6)
        for n, party in made.parties.items():
            party.draw = drawing(("fresh", n))
        return made

    p = fresh()
    answers = {q.peer: q.round.share(listing_, q.draw) for listing_ in [p.keys()]
               for q in p.parties.values()}  # fmt: skip
    replayed = pack_by_peer(old.server._letters[liar])
    assert not p.server.take_letters({**answers, liar: replayed}.items())
    signed = p.signatures(p.vectors_in())
    with pytest.raises(UnmaskingFailed, match=f"1 of 5 shares of {liar}"):
        p.unmask(signed)

    p = fresh()
    p.letters(p.keys())
    signed = p.signatures(p.vectors_in())
    shares = {q.peer: q.round.reveal(signed) for q in p.parties.values()}
    mean, _, _ = p.server.unmask({**shares, liar: old_shares}.items())
    np.testing.assert_array_equal(mean, quantised_mean(p, range(6))[0])


@pytest.mark.parametrize(
    "lie",
    [
        np.zeros(3, np.uint8),
        np.zeros(204, np.int8),
        np.zeros((51, 4), np.uint8),
        np.zeros(205, np.uint8),
        b"x" * 204,
        None,
        np.full(51, np.nan, np.float32),
    ],
)
def test_masked_vectors_of_a_wrong_form_are_left_out(lie: Any) -> None:
    p = play(4)
    p.letters(p.keys())
    answers = {
        q.peer: q.round.mask(p.server.mail(q.peer), p.vectors[n], p.weights[n], drawing(0)).view(
            np.uint8
        )
        for n, q in p.parties.items()
    }
    liar = p.parties[1].peer
    listing, refused = p.server.take_vectors({**answers, liar: lie}.items())
    assert list(refused) == [liar]
    p.alive -= {1}
    mean, _ = p.unmask(p.signatures(listing))
    np.testing.assert_array_equal(mean, quantised_mean(p, [0, 2, 3])[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_client_masks_no_nan(bad: float) -> None:
    p = play(4)
    p.letters(p.keys())
    vector = p.vectors[0].copy()
    vector[7] = bad
    with pytest.raises(NotMaskable, match="NaN or infinity"):
        p.parties[0].round.mask(p.server.mail(p.parties[0].peer), vector, 1, drawing(0))


def test_a_client_masks_no_vector_of_another_size() -> None:
    p = play(4)
    p.letters(p.keys())
    with pytest.raises(NotMaskable, match=r"shape \[49\], not \[50\]"):
        p.parties[0].round.mask(p.server.mail(p.parties[0].peer), p.vectors[0][1:], 1, drawing(0))


def test_random_words_for_a_vector_show_in_the_sum() -> None:
    p = play(4)
    p.letters(p.keys())
    answers = {
        q.peer: q.round.mask(p.server.mail(q.peer), p.vectors[n], p.weights[n], drawing(0)).view(
            np.uint8
        )
        for n, q in p.parties.items()
    }
    junk = np.random.default_rng(0).integers(0, 256, 204).astype(np.uint8)
    listing, _ = p.server.take_vectors({**answers, p.parties[1].peer: junk}.items())
    with pytest.raises(UnmaskingFailed, match="one of them lied"):
        p.unmask(p.signatures(listing))


def test_wrong_shares_of_one_client_cost_nothing_and_are_named() -> None:
    p = play(7, gone={"vectors": [6]})
    _, signatures = to_signatures(p)
    answers = {q.peer: q.round.reveal(signatures) for n, q in p.parties.items() if n != 6}
    for liar in (p.parties[0].peer, max(answers)):
        rows = msgpack.unpackb(answers[liar])
        for row in rows:
            row[2] = bytes(32) + b"\x07"
        changed = {**answers, liar: msgpack.packb(rows)}
        p2 = play(7, gone={"vectors": [6]})
        to_signatures(p2)
        mean, _, refused = p2.server.unmask(changed.items())
        assert list(refused) == [liar]
        np.testing.assert_array_equal(mean, quantised_mean(p, range(6))[0])


def test_shares_that_were_not_asked_for_are_refused() -> None:
    def lying(change: Any) -> str:
        p = play(7, gone={"vectors": [6]})
        _, signatures = to_signatures(p)
        answers = {q.peer: q.round.reveal(signatures) for n, q in p.parties.items() if n != 6}
        liar = p.parties[0].peer
        answers[liar] = msgpack.packb(change(msgpack.unpackb(answers[liar])))
        mean, _, refused = p.server.unmask(answers.items())
        np.testing.assert_array_equal(mean, quantised_mean(p, range(6))[0])
        return refused.get(liar, "")

    flip = {SEED: KEY, KEY: SEED}
    assert "not asked for" in lying(lambda rows: [[of, flip[kind], s] for of, kind, s in rows])
    assert "not asked for" in lying(
        lambda rows: [[PeerId.from_seed(1).to_bytes(), *rows[0][1:]], *rows[1:]]
    )
    beyond = PRIME.to_bytes(SHARE_BYTES, "big")
    assert "no share" in lying(lambda rows: [[of, kind, beyond] for of, kind, _ in rows])
    assert "more than 29 values" in lying(lambda rows: rows * 3)
    assert "not of 33 bytes" in lying(lambda rows: [[of, kind, s[1:]] for of, kind, s in rows])


def test_whoever_is_not_asked_is_not_heard() -> None:
    p = play(5, gone={"letters": [4]})
    listing = p.keys()
    late = p.parties[4].round.share(listing, p.parties[4].draw)
    p.letters(listing)
    refused = p.server.take_letters([(PeerId.from_seed(0), late)])
    assert list(refused.values()) == ["it is no client of this step"]


def test_two_rounds_of_one_vector_share_no_word() -> None:
    """Masks are of one round: the difference of two masked vectors is no difference of values."""
    found = []
    for seed in (1, 2):
        p = play(4, size=2000)
        for n, party in p.parties.items():
            party.draw = drawing((seed, n))
        p.run()
        found.append(p.masked[p.parties[0].peer].view(p.plan.ring.dtype))
    assert (found[0] != found[1]).mean() > 0.99
