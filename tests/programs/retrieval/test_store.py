"""One node that keeps vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.components import values
from bbnode.dsl import BadArgument
from bbnode.engine import BootstrapRequest, ModuleRequests
from bbnode.programs import VectorStore
from bbnode.sim import Network, SimNode
from tests.programs.files import compiled
from tests.programs.retrieval.networks import NO_METADATA, FlatIndex, nearest, vectors


def store(**arguments: Any) -> tuple[Network, SimNode]:
    net = Network(0)
    return net, net.add("store", compiled(VectorStore(**arguments)), ["store"])


def run(net: Network, node: SimNode, **inputs: Any) -> dict[str, Any]:
    number = node.invoke("store", inputs)
    net.run_until_idle()
    return node.outputs(number)


def test_it_searches_what_it_holds() -> None:
    net, node = store(k=3)
    items = vectors(40, 0)
    added = run(net, node, vectors=items, metadata=NO_METADATA)["added"]
    query = vectors(2, 1)
    found = run(net, node, query=query)["results"]
    np.testing.assert_array_equal(found.ids, added[nearest(items, query, 3)])
    assert found.senders == ()
    run(net, node, remove=found.ids[0, :1])
    again = run(net, node, query=query[0])["results"]
    np.testing.assert_array_equal(again.ids[:2], found.ids[0, 1:])
    assert node.failures() == []


def test_ids_of_ones_own_and_a_filter() -> None:
    net, node = store(numbered=True, filtered=True)
    told = values.MetadataVec([values.Metadata(tag="a"), values.Metadata(tag="b")])
    run(net, node, vectors=vectors(2, 0), metadata=told, ids=np.array([7, 1 << 40]))
    found = run(net, node, query=vectors(1, 1)[0], where=values.Metadata(tag="b"))["results"]
    assert found.ids.tolist() == [1 << 40]


def test_the_bootstrap_trains_on_the_seed_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(_self: FlatIndex, _ctx: object, training: np.ndarray) -> None:
        seen.append(training.shape)

    monkeypatch.setattr(FlatIndex, "train", train)
    net, node = store()
    request = BootstrapRequest(target="VectorStore", inputs={"seed_corpus": vectors(9, 0)})
    node.node.run_bootstrap(ModuleRequests((request,)))
    net.run_until_idle()
    run(net, node, training=vectors(5, 0))
    assert seen == [(9, 8), (5, 8)]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BadArgument, match="numbered=3 has to be True or False"):
        compiled(VectorStore(numbered=3))
