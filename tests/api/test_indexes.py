"""Indexes from Python: a directory, memory, and the index behind a node's program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bbnode
from bbnode.components import FlatIndex
from bbnode.components.indexes.errors import IndexInUse, IndexMismatch
from bbnode.ir.errors import MissingFile
from bbnode.programs import ShardedSearch, VectorStore


def test_an_index_in_a_directory_is_there_again(tmp_path: Path) -> None:
    with bbnode.open_index(tmp_path / "i", metric="cosine") as index:
        assert index.add(np.eye(2), [{"n": 1}, {"n": 2}]).tolist() == [0, 1]
        with pytest.raises(IndexInUse):
            bbnode.open_index(tmp_path / "i")
    with bbnode.open_index(tmp_path / "i", create=False) as index:
        (hit,) = index.search([1, 0], k=1).hits()
        assert (hit.id, hit.distance, dict(hit.metadata)) == (0, 0.0, {"n": 1})
        assert index.metric == "cosine"


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="bbnode index add"):
        bbnode.open_index(tmp_path / "i", create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingFile, match="is no directory"):
        bbnode.open_index(tmp_path / "file", create=False)
    with pytest.raises(IndexMismatch, match="metric 'cos'"):
        bbnode.open_index(metric="cos")
    with pytest.raises(IndexMismatch, match="kind 'tree'"):
        bbnode.open_index(kind="tree")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[bbnode.BlockingNode]:
    program = VectorStore(k=2, filtered=True, numbered=True)
    path = str(tmp_path / "i")
    with bbnode.open(program, transport="memory", slots={"index": {"path": path}}) as node:
        yield node


def test_the_index_of_a_node(store: bbnode.BlockingNode, tmp_path: Path) -> None:
    index = bbnode.index_of(store)
    assert index.takes_ids
    assert index.add(np.eye(3), [{"n": n} for n in range(3)], ids=[5, 6, 7]).tolist() == [5, 6, 7]
    results, missing = index.search([1, 0, 0])
    assert (results.ids.tolist(), missing) == ([5, 6], ())
    results, _ = index.search(np.eye(3)[:2], {"n >=": 1})
    assert results.ids.tolist() == [[6, 7], [6, 7]]
    index.remove([5])
    (told,) = index.stats()
    assert (told["slot"], told["items"], told["dimensions"], told["searches"]) == ("index", 2, 3, 2)
    with pytest.raises(bbnode.NoSuchIndex, match="ids alone"):
        index.add([[1, 2, 3]])
    with pytest.raises(bbnode.NoSuchIndex, match="no target of this node has an input 'query'"):
        bbnode.index_of(store, target="nobody").search([1, 0, 0])
    # Once the node has stopped, its directory is anybody's.
    store.stop()
    with bbnode.open_index(tmp_path / "i") as held:
        assert held.ids.tolist() == [6, 7]


def test_what_a_program_does_not_take_is_refused() -> None:
    with bbnode.open(VectorStore(k=2), transport="memory") as node:
        index = bbnode.index_of(node)
        assert not index.takes_ids
        with pytest.raises(bbnode.NoSuchIndex, match="numbered=True"):
            index.add([[1, 2]], ids=[3])
        with pytest.raises(bbnode.NoSuchIndex, match="filtered=True"):
            index.search([1, 2], {"n": 1})
        with pytest.raises(bbnode.NoSuchIndex, match=r"encode them first[^(]*$"):
            index.add(["a text"])
        with pytest.raises(bbnode.NoSuchIndex, match=r"encode the text first$"):
            index.search("a text")
        assert index.add([1, 2]).tolist() == [0]
    with bbnode.open(ShardedSearch(), targets="asker", transport="memory") as node:
        with pytest.raises(bbnode.NoSuchIndex, match=r"can't be added from here.*query"):
            bbnode.index_of(node).add([[1, 2]])
        with pytest.raises(bbnode.NoSuchIndex, match="has no index"):
            bbnode.index_of(node).stats()


def test_a_component_that_fails_at_the_stop_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: FlatIndex) -> None:
        raise RuntimeError("stuck")

    monkeypatch.setattr(FlatIndex, "on_stop", fails)
    with caplog.at_level(logging.WARNING), bbnode.open(VectorStore(), transport="memory"):
        pass
    (told,) = [record for record in caplog.records if "at the stop" in record.message]
    assert told.slot == "index"  # type: ignore[attr-defined]
    assert "RuntimeError: stuck" in told.why  # type: ignore[attr-defined]
