"""Items that peers keep for each other, found without anybody who knows where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import (
    ComponentError,
    GuestItems,
    GuestItemsConfig,
    Kademlia,
    concrete,
    values,
)
from bbnode.components.errors import ExchangeRefused, InvalidComponentConfig
from bbnode.dsl import BadArgument
from bbnode.engine import All
from bbnode.engine.errors import InputShapeMismatch
from bbnode.ir.peer import PeerId
from bbnode.programs import PeerToPeerSearch
from bbnode.sim import MS, Network, S, SimNode
from tests.components.fakes import Context
from tests.programs.files import compiled
from tests.programs.retrieval.networks import NO_METADATA, D, nearest, vectors

ITEMS = vectors(60, 0, clusters=12)
QUERIES = vectors(8, 1, clusters=12)
DHT = concrete(Kademlia, k=8, deadline_s=0.5, lookup_s=3.0)
ONE, OTHER = PeerId.from_seed(1), PeerId.from_seed(2)


class Swarm:
    """Peers that came one by one, each of which knew one that was there."""

    def __init__(self, count: int, seed: int = 1, **arguments: Any) -> None:
        given = {"dimensions": D, "k": 5, "deadline_s": 2.0, "selector": DHT, **arguments}
        self.artifact = compiled(PeerToPeerSearch(**given))
        self.net = Network(seed, mesh=False, dials=True)
        self.nodes: list[SimNode] = []
        for _ in range(count):
            self.join()
        self.net.run(until=self.net.now_ns + 3 * S)

    def join(self, **config: Any) -> SimNode:
        node = self.net.add(f"p{len(self.nodes)}", self.artifact, ["peer"], config=config)
        up = [each for each in self.nodes if each.is_up]
        if up:
            self.net.connect(node, up[(len(self.nodes) * 7) % len(up)])
        self.nodes.append(node)
        node.node.run_bootstrap(All())
        self.net.run(until=self.net.now_ns + 200 * MS)
        return node

    def run(self, at: SimNode, **inputs: Any) -> dict[str, Any]:
        number = at.invoke("peer", inputs)
        self.net.run_until(lambda: at.has_finished(number))
        return at.outputs(number)

    def bring(self, count: int, at: int | None = None) -> list[int]:
        """Bring items from peers here and there; return how many peers keep each."""
        kept = []
        for number in range(count):
            node = self.nodes[at if at is not None else number % 5]
            said = values.MetadataVec([values.Metadata(n=number)])
            made = self.run(
                node, vectors=ITEMS[number], metadata=said, ids=np.array(number, np.int64)
            )
            assert made["added"] == number
            kept.append(len(made["kept_by"]))
        return kept

    def recall(self, count: int, ask: SimNode) -> float:
        found = 0
        best = nearest(ITEMS[:count], QUERIES, 1)
        for query, (place,) in zip(QUERIES, best, strict=True):
            hits = self.run(ask, query=query)["results"].hits()
            assert len({hit.id for hit in hits}) == len(hits)
            assert all(hit.metadata["n"] == hit.id for hit in hits)
            found += place in [hit.id for hit in hits]
        return found / len(QUERIES)


def test_thirty_peers_find_what_others_brought_and_outlive_a_third_of_them() -> None:
    swarm = Swarm(32)
    assert min(swarm.bring(24)) == 3
    held = [len(node.component("index").collection) for node in swarm.nodes]
    assert sum(held) == 72
    assert max(held) < 24  # nobody has all
    asker = swarm.nodes[20]
    before = swarm.recall(24, asker)
    assert before == 1.0
    for node in swarm.nodes[21:31]:
        swarm.net.crash(node)
    assert swarm.recall(24, asker) >= 0.85
    for _ in range(8):
        swarm.join()
    swarm.net.run(until=swarm.net.now_ns + 5 * S)
    swarm.bring(24)  # again, by the same peers
    assert swarm.recall(24, swarm.nodes[-1]) >= 0.85


@pytest.mark.slow
def test_more_probes_find_more() -> None:
    found = []
    for probes in (1, 8):
        swarm = Swarm(12, bits=8, probes=probes, replicas=1)
        swarm.bring(30)
        found.append(swarm.recall(30, swarm.nodes[7]))
    assert found[0] < found[1]


def test_an_item_is_its_bringers() -> None:
    swarm = Swarm(6, replicas=2)
    swarm.bring(1, at=0)
    number, vector = np.array(0, np.int64), ITEMS[0]
    assert swarm.run(swarm.nodes[3], vectors=vector, metadata=NO_METADATA, ids=number) == {}
    assert swarm.run(swarm.nodes[3], remove=number, removed_vector=vector) == {}
    failures = [each for each in swarm.nodes[3].failures() if each.kind == "QuorumNotReached"]
    assert len(failures) == 2
    assert all("another peer's" in each.detail for each in failures)
    hit = swarm.run(swarm.nodes[4], query=vector)["results"].hits()[0]
    assert (hit.id, hit.metadata["n"]) == (0, 0)
    gone = swarm.run(swarm.nodes[0], remove=number, removed_vector=vector)
    assert len(gone["removed_by"]) == 2
    assert len(swarm.run(swarm.nodes[4], query=vector)["results"]) == 0


def test_a_filter_and_a_peer_alone() -> None:
    swarm = Swarm(1, filtered=True)
    swarm.bring(10, at=0)
    found = swarm.run(swarm.nodes[0], query=ITEMS[3], where=values.Metadata({"n": 3}))
    assert [hit.id for hit in found["results"].hits()] == [3]
    assert found["missing"] == ()
    with pytest.raises(InputShapeMismatch, match="query"):
        swarm.nodes[0].invoke("peer", {"query": QUERIES, "where": values.Metadata()})


def test_guests_have_their_own_and_no_more_than_they_may() -> None:
    guests = GuestItems(GuestItemsConfig(max_items=5, max_items_of_one=3))
    guests.admit(Context(), ONE, np.array([1, 2]))
    guests.admit(Context(), ONE, np.array(2))  # again
    guests.admit(Context(), OTHER, np.array([7]))
    for owner, ids, problem in (
        (OTHER, [8, 2], "the item 2 is another peer's"),
        (ONE, [3, 4], "3 items for one peer"),
        (OTHER, [10, 11, 12], "3 items for one peer"),
        (PeerId.from_seed(3), [20, 21, 22], "5 items"),
    ):
        with pytest.raises(ExchangeRefused, match=problem):
            guests.admit(Context(), owner, np.array(ids))
    with pytest.raises(ExchangeRefused, match="another peer's"):
        guests.release(Context(), OTHER, np.array([1]))
    fresh = GuestItems(guests.config)
    fresh.restore(guests.serialize())
    assert fresh._owner == guests._owner
    assert fresh._counts == guests._counts
    fresh.release(Context(), ONE, np.array([1, 99]))
    fresh.admit(Context(), ONE, np.array([3, 4]))
    for wrong in (b"no", b"\x91\x92\xa1a\xa1b"):
        with pytest.raises(ComponentError):
            fresh.restore(wrong)
    with pytest.raises(InvalidComponentConfig, match="max_items_of_one"):
        GuestItems(GuestItemsConfig(max_items_of_one=0))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "dimensions=0 has to be an integer of at least 1"),
        ({"dimensions": 8, "bits": 25}, "bits=25 has to be at most 24"),
        ({"dimensions": 8, "bits": 2, "probes": 5}, "probes=5 has to be at most 4 with bits=2"),
        ({"dimensions": 8, "selector": "bbnode.FedAvg"}, "selector=.* has to be a PeerSelector"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArgument, match=problem):
        compiled(PeerToPeerSearch(**arguments))
