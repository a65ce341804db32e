from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.components import errors
from bbnode.components.contracts import ComponentError
from bbnode.components.selectors.views import (
    ConnectedView,
    ConstantView,
    ConstantViewConfig,
    DrawingConfig,
    draw,
)
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec
from tests.components.fakes import PEERS, Context, Peers

CLIENTS = Context(
    peer_class="client",
    peers=Peers({"client": [PEERS[3], PEERS[1], PEERS[2]], "server": [PEERS[0]]}),
)


def connected(**config: int) -> ConnectedView:
    return ConnectedView(DrawingConfig(**config))


def test_the_view_is_the_connected_peers_of_the_class_in_order() -> None:
    view = connected().current_view(CLIENTS)
    assert view == PeerIdVec((PEERS[1], PEERS[2], PEERS[3]))
    assert type(view) is PeerIdVec
    assert connected().current_view(Context(peer_class="client")) == PeerIdVec()


@pytest.mark.parametrize("n", [3, 4, 100])
def test_a_sample_as_large_as_the_view_is_the_view(n: int) -> None:
    assert connected().sample(CLIENTS, n=n) == PeerIdVec(PEERS[1:4])


def test_a_sample_is_distinct_ordered_and_repeatable() -> None:
    context = Context(peer_class="c", peers=Peers({"c": list(PEERS)}))
    one, two = connected(seed=5), connected(seed=5)
    draws = [one.sample(context, n=3) for _ in range(20)]
    assert draws == [two.sample(context, n=3) for _ in range(20)]
    assert all(list(d) == sorted(set(d)) and len(d) == 3 for d in draws)
    assert len(set(draws)) > 10
    assert draws != [connected(seed=6).sample(context, n=3) for _ in range(20)]


def test_the_counter_of_draws_survives_a_restart() -> None:
    context = Context(peer_class="c", peers=Peers({"c": list(PEERS)}))
    whole, first = connected(seed=1), connected(seed=1)
    expected = [whole.sample(context, n=2) for _ in range(6)]
    got = [first.sample(context, n=2) for _ in range(3)]
    second = connected(seed=1)
    second.restore(first.serialize())
    assert got + [second.sample(context, n=2) for _ in range(3)] == expected


def test_peers_of_one_class_draw_apart_and_those_of_another_class_as_the_seed_says() -> None:
    peers = Peers({"client": PEERS})

    def drawn(plays: bool) -> set[PeerId]:
        contexts = [
            Context(self_peer=peer, peer_class="client", plays_peer_class=plays, peers=peers)
            for peer in PEERS
        ]
        return {connected().sample(ctx, n=1)[0] for ctx in contexts}

    assert len(drawn(plays=True)) > 1
    assert len(drawn(plays=False)) == 1


def test_too_few_peers_is_an_error_with_numbers() -> None:
    with pytest.raises(errors.NotEnoughPeers, match=r"3 client peer.*min_peers is 4") as caught:
        connected(min_peers=4).sample(CLIENTS, n=4)
    assert (caught.value.available, caught.value.needed) == (3, 4)
    with pytest.raises(errors.NotEnoughPeers):
        connected().select(Context(peer_class="client"), None, mode="all", n=0)


def test_select_knows_random_and_all_and_guesses_nothing() -> None:
    assert connected().select(CLIENTS, None, mode="all", n=0) == PeerIdVec(PEERS[1:4])
    same = connected().sample(CLIENTS, n=2)
    assert connected().select(CLIENTS, None, mode="random", n=2) == same
    for mode in ("near_key", "", "ALL"):
        with pytest.raises(errors.UnsupportedSelection, match="'random' or 'all'"):
            connected().select(CLIENTS, b"key", mode=mode, n=2)
    with pytest.raises(errors.UnsupportedSelection, match="0 peers"):
        connected().sample(CLIENTS, n=0)


def test_a_constant_view_is_what_the_config_says() -> None:
    texts = tuple(str(p) for p in (PEERS[2], PEERS[0], PEERS[2]))
    selector = ConstantView(ConstantViewConfig(peers=texts))
    assert selector.current_view(CLIENTS) == PeerIdVec((PEERS[0], PEERS[2]))
    assert selector.sample(CLIENTS, n=9) == PeerIdVec((PEERS[0], PEERS[2]))
    with pytest.raises(errors.InvalidComponentConfig, match="not a PeerId"):
        ConstantView(ConstantViewConfig(peers=("not a peer",)))
    with pytest.raises(errors.NotEnoughPeers):
        ConstantView(ConstantViewConfig()).sample(CLIENTS, n=1)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 12), st.permutations(PEERS))
def test_a_draw_does_not_depend_on_the_order_of_candidates(seed, counter, n, shuffled) -> None:
    assert draw(shuffled, n, seed, counter) == draw(PEERS, n, seed, counter)


def test_draws_are_uniform() -> None:
    peers = [PeerId.from_seed(i) for i in range(10)]
    counts = Counter(p for i in range(2000) for p in draw(peers, 3, 7, i))
    # Mean 600, standard deviation about 20 (binomial with p = 0.3).
    assert all(500 < counts[p] < 700 for p in peers)


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x01", b"\x81\xa5draws\xff", b"\x80", b"\x81\xa5draws\xa1x"]
)
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(ComponentError):
        connected().restore(data)


def test_settings_out_of_range_are_refused() -> None:
    for config in ({"seed": -1}, {"min_peers": -1}):
        with pytest.raises(errors.InvalidComponentConfig):
            connected(**config)
