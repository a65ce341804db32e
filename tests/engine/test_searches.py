"""Results of many peers are merged as sorting all hits by hand would."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.compiler import Compiler
from bbnode.dsl import Graph, Module, types
from bbnode.engine.ops.searches import merged
from bbnode.ir.errors import AuthorError
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Metadata, MetadataVec, SearchResults
from bbnode.sim import Network

PEERS = sorted(PeerId.from_seed(number) for number in range(4))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[tuple[PeerId, SearchResults]], tuple[int, ...]]:
    """Answers of up to four peers to one query, or to a batch of the same size."""
    leading = draw(st.sampled_from([(), (1,), (3,)]))
    made = []
    for peer in PEERS[: draw(st.integers(0, 4))]:
        width = draw(st.integers(0, 4))
        found = np.asarray(draw(hnp.arrays("i1", leading, elements=st.integers(0, width))))
        is_hit = np.arange(width) < found[..., None]
        ids = draw(hnp.arrays("i8", is_hit.shape, elements=st.integers(0, 5)))
        far = draw(
            hnp.arrays("f4", is_hit.shape, elements=st.sampled_from([0, 1, math.inf, math.nan]))
        )
        texts = [Metadata(n=place) for place in range(int(is_hit.sum()))]
        told = draw(st.booleans())
        made.append((peer, SearchResults(np.where(is_hit, ids, -1), far, texts if told else ())))
    return made, leading


def by_hand(
    found: list[tuple[PeerId, SearchResults]], query: int, k: int, distinct: int, share: int
) -> list:
    rows = []
    for peer, results in found:
        for hit in results.hits(query):
            far = (1, 0.0) if math.isnan(hit.distance) else (0, hit.distance)
            rows.append((far, hit.id, peer, dict(hit.metadata)))
    rows.sort(key=lambda row: row[:3])
    of_id: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        of_id.setdefault(row[1], []).append(place)
    chosen = {p[distinct - 1] for p in of_id.values() if len(p) >= distinct}
    once = [row for place, row in enumerate(rows) if not distinct or place in chosen]
    had: Counter[PeerId] = Counter()
    kept = []
    for row in once:
        had[row[2]] += 1
        if not share or had[row[2]] <= share:
            kept.append(row)
    return [(number, far, peer, said) for far, number, peer, said in kept[:k]]


@given(answers(), st.integers(1, 6), st.integers(0, 2), st.integers(0, 3))
def test_as_sorting_by_hand(
    made: tuple[list[tuple[PeerId, SearchResults]], tuple[int, ...]], k: int, distinct: int,
    share: int,
) -> None:  # fmt: skip
    found, leading = made
    got = merged(found, leading, k=k, distinct=distinct, share=share)
    assert got.ids.shape[:-1] == leading
    for query in range(got.queries):
        told = [
            (
                hit.id,
                (1, 0.0) if math.isnan(hit.distance) else (0, hit.distance),
                hit.sender,
                dict(hit.metadata),
            )
            for hit in got.hits(query)
        ]
        assert told == by_hand(found, query, k, distinct, share)


def test_results_that_do_not_belong_together() -> None:
    for wrong in (
        lambda: SearchResults([1, 2], [0.5]),
        lambda: SearchResults([-1, 2], [0.5, 0.5]),
        lambda: SearchResults([-2], [0.5]),
        lambda: SearchResults(np.uint64([2**63]), [0.5]),
        lambda: SearchResults([0.5], [0.5]),
        lambda: SearchResults([[[1]]], [[[1.0]]]),
        lambda: SearchResults(1, 1.0),
        lambda: SearchResults([1], [1.0], [Metadata(), Metadata()]),
        lambda: SearchResults([1], [1.0], senders=PEERS[:2]),
    ):
        with pytest.raises(AuthorError):
            wrong()


class Told(Module):
    """Metadata with the entry "n" of each row of "values", which are of some type."""

    home = "node"

    def __init__(self, kind: TypeNode) -> None:
        self._kind = kind

    def body(self, g: Graph) -> None:
        metadata = g.input("metadata", types.METADATA_VEC)
        g.output("made", g.with_entry(metadata, "n", g.input("values", self._kind)))


def with_entry(kind: TypeNode, told: list[Metadata], column: np.ndarray) -> Any:
    net = Network(0)
    node = net.add("node", Compiler().compile(Told(kind).build()), ["node"])
    number = node.invoke("node", {"metadata": MetadataVec(told), "values": column})
    net.run_until_idle()
    failures = [failure.detail for failure in node.failures()]
    return failures[0] if failures else node.outputs(number)["made"]


def test_an_entry_is_added_to_the_metadata_of_each_item() -> None:
    told = [Metadata(a=1), Metadata(n="old")]
    texts = np.array(["x", "y"], object)
    made = with_entry(types.TENSOR_STRING, told, texts)
    assert made == (Metadata(a=1, n="x"), Metadata(n="y"))
    assert isinstance(made, MetadataVec)
    assert with_entry(types.TENSOR_STRING, [], texts) == (Metadata(n="x"), Metadata(n="y"))
    assert with_entry(types.TENSOR_STRING, [], texts[:0]) == ()
    assert with_entry(types.TENSOR_STRING, told[:1], np.array("x", object)) == (
        Metadata(a=1, n="x"),
    )
    for kind, column in (
        (types.TENSOR_INT64, np.array([1, -2])),
        (types.TENSOR_FLOAT, np.float32([0.5, np.inf])),
        (types.TENSOR_BOOL, np.array([True, False])),
    ):
        made = with_entry(kind, told, column)
        assert [row["n"] for row in made] == column.tolist()
        assert [type(row["n"]) for row in made] == [type(n) for n in column.tolist()]


def test_an_entry_of_other_items_is_refused() -> None:
    told = [Metadata(), Metadata()]
    assert "3 value(s) for the metadata of 2" in with_entry(types.TENSOR_INT64, told, np.arange(3))
    wide = np.zeros((2, 1), np.float32)
    assert "float32 of the shape [2, 1]" in with_entry(types.TENSOR_FLOAT, told, wide)
