"""A search over shards that are daemons: one is killed, one is stopped, and one comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bbnode
from bbnode.daemon.testbed.nodes import ChildNode, by_name, held_folder, write_nodes
from bbnode.daemon.testbed.plan import make_plan
from bbnode.daemon.testbed.program import find_program
from bbnode.programs import PeerToPeerSearch
from tests.e2e.cluster import start, stop
from tests.patience import PATIENCE_S

D, SHARDS, EACH = 16, 3, 50
ITEMS = np.random.default_rng(0).normal(size=(SHARDS * EACH, D)).astype(np.float32)
QUERY = ITEMS[7] + np.float32(0.01)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, ChildNode]]:
    found = find_program("bbnode.programs:ShardedSearch", {"k": 3, "deadline_s": 2.0})
    plan = make_plan(
        found, nodes=f"asker=1,shard={SHARDS}", settings=("shard.slots.index.path=items/{i}",),
        base=tmp_path,
    )  # fmt: skip
    with held_folder(tmp_path / "net") as folder:
        made = write_nodes(plan, folder, port=0, wait_s=PATIENCE_S)
    yield by_name(made)
    for node in made:
        stop(node)


def until(ask: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """What `ask` gives once it is wanted."""
    begun = time.monotonic()
    while not wanted(found := ask()):
        assert time.monotonic() - begun < PATIENCE_S, found
    return found


def kill(node: ChildNode, number: signal.Signals) -> None:
    assert node.process is not None
    node.process.send_signal(number)
    if number is signal.SIGKILL:
        node.process.wait(PATIENCE_S)


def test_a_killed_shard_comes_back_with_its_items(nodes: dict[str, ChildNode]) -> None:
    start(*nodes.values())
    shards = [name for name in nodes if name.startswith("shard")]
    with ExitStack() as stack:

        def link(name: str) -> Any:
            return stack.enter_context(bbnode.connect(nodes[name].state_dir, timeout_s=PATIENCE_S))

        for place, name in enumerate(shards):
            items = ITEMS[place::SHARDS]
            added = link(name).invoke("shard", {"vectors": items, "metadata": []})["added"]
            assert added.tolist() == list(range(EACH))
        asker = link(next(name for name in nodes if name.startswith("asker")))
        asker.wait_for_peers(SHARDS, "shard", timeout_s=PATIENCE_S)

        def search() -> Any:
            return asker.invoke("asker", {"query": QUERY}, timeout_s=PATIENCE_S)

        def senders(found: Any) -> set[str]:
            return {str(hit.sender) for hit in found["results"].hits()}

        owner = nodes[shards[7 % SHARDS]]
        best = until(search, lambda found: owner.peer in senders(found))["results"].hits()[0]
        assert (best.id, str(best.sender)) == (7 // SHARDS, owner.peer)

        # Who is stopped, and stays connected, is named; the search costs no more than its deadline.
        kill(owner, signal.SIGSTOP)
        found = search()
        assert [str(peer) for peer in found["missing"]] == [owner.peer]
        assert len(found["results"]) == 3
        assert owner.peer not in senders(found)

        # Killed, its items are where they were.
        kill(owner, signal.SIGKILL)
        assert len(search()["results"]) == 3
        start(owner)
        again = until(search, lambda found: owner.peer in senders(found))["results"].hits()[0]
        assert (again.id, again.distance, again.sender) == (best.id, best.distance, best.sender)


@pytest.mark.slow
def test_peers_without_a_server_find_what_one_brought() -> None:
    settings = {"discovery": {"introductions": False}}
    program = PeerToPeerSearch(dimensions=D, k=2, replicas=2, bits=3, probes=4)
    with ExitStack() as stack:
        peers: list[bbnode.Node] = []
        for _ in range(4):
            opened = bbnode.open(program, targets="peer", peers=peers[-1:], settings=settings)
            peers.append(stack.enter_context(opened))
        item = {"vectors": ITEMS[7], "metadata": [{"n": 7}], "ids": 7}

        def bring() -> Any:
            return peers[0].invoke("peer", item, timeout_s=PATIENCE_S)["kept_by"]

        until(bring, lambda kept: len(kept) == 2)  # until some have met

        def find() -> Any:
            return peers[3].invoke("peer", {"query": QUERY}, timeout_s=PATIENCE_S)["results"].hits()

        hit = until(find, lambda hits: len(hits) == 1)[0]
        assert (hit.id, hit.metadata["n"]) == (7, 7)
