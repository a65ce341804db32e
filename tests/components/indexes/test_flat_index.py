"""`FlatIndex` as a component: its ports, settings, and what a snapshot holds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from bbnode.components import ComponentError, FlatIndex, IndexMismatch, VectorIndexConfig
from bbnode.components.contracts import is_offloaded, only_reads
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.indexes.collection import Collection
from bbnode.components.indexes.errors import IndexInUse
from bbnode.components.settings import local_settings
from bbnode.ir.values import Metadata, MetadataVec
from bbnode.programs import ShardedSearch
from tests.components.fakes import CTX
from tests.programs.retrieval.networks import Shards


def index(**settings) -> FlatIndex:
    return FlatIndex(VectorIndexConfig(**settings))


def test_remove_takes_what_add_returned() -> None:
    made = index()
    one = made.add(CTX, np.float32([1, 2]))
    assert one.shape == ()
    assert one.dtype == np.int64
    several = made.add(CTX, np.float32([[1, 2], [3, 4]]), MetadataVec([Metadata(a=1)] * 2))
    assert several.shape == (2,)
    assert made.facts() == {
        "items": 3, "dimensions": 2, "metric": "l2", "kind": "flat",
        "searches": 0, "queries": 0, "refused": 0,
    }  # fmt: skip
    made.remove(CTX, one)
    made.remove(CTX, several)
    assert made.search(CTX, np.float32([1, 2]), k=1).ids.tolist() == []


def test_a_search_only_reads_and_all_ops_run_in_threads() -> None:
    made = index()
    assert only_reads(made.search)
    for method in (made.add, made.remove, made.train, made.search):
        assert is_offloaded(method)


def test_one_query_among_few_items_in_memory_needs_no_thread(tmp_path: Path) -> None:
    one, batch = np.zeros(2, np.float32), np.zeros((2, 2), np.float32)
    made = index()
    made.add(CTX, np.zeros((4096, 2), np.float32))
    assert not is_offloaded(made.search, (one, None))
    assert not is_offloaded(made.search, (one, Metadata()))
    assert is_offloaded(made.search, (batch, None))
    assert is_offloaded(made.search, (one, Metadata(year=2000)))
    made.add(CTX, one)
    assert is_offloaded(made.search, (one, None))
    wide = index()
    wide.add(CTX, np.zeros((65, 1 << 15), np.float32))
    assert is_offloaded(wide.search, (np.zeros(1 << 15, np.float32), None))
    for settings in (
        {"visible": {"year": 2000}},
        {"visible_to": {"*": {}}},
        {"path": str(tmp_path / "items")},
    ):
        other = index(**settings)
        other.add(CTX, one)
        assert is_offloaded(other.search, (one, None))
        other.on_stop()


def test_a_snapshot_holds_the_items_and_no_other_bytes_are_taken() -> None:
    made = index(metric="cosine")
    made.add(CTX, np.float32([[1, 2], [3, 4]]), None, np.int64([7, 8]))
    again = index(metric="cosine")
    again.restore(made.serialize())
    assert again.search(CTX, np.float32([1, 2]), k=2).ids.tolist() == [7, 8]
    for other in (index(), index(metric="cosine", dimensions=3)):
        with pytest.raises(ComponentError, match="the saved state is not ours"):
            other.restore(made.serialize())
    with pytest.raises(ComponentError, match="the saved state is not ours"):
        again.restore(b"something else")


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidComponentConfig, match="dimensions is -1"):
        index(dimensions=-1)


def test_with_a_directory_a_snapshot_only_names_it(tmp_path) -> None:
    made = index(path=str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()  # a component that is only looked at opens nothing
    assert made.facts()["items"] == 0
    made.bootstrap(CTX)
    made.add(CTX, np.ones((1000, 64), np.float32))
    saved = made.serialize()
    assert len(saved) < 100
    made.collection.close()
    again = index(path=str(tmp_path / "a"))
    again.restore(saved)
    assert again.search(CTX, np.ones(64, np.float32), k=2).ids.tolist() == [0, 1]
    assert again.facts()["items"] == 1000
    other = index(path=str(tmp_path / "b"))
    other.restore(saved)
    with pytest.raises(IndexMismatch, match="another index than the one of this node's saved"):
        other.bootstrap(CTX)
    other = index(path=str(tmp_path / "b"))
    other.bootstrap(CTX)  # it is unlocked


def test_a_snapshot_is_not_taken_where_the_items_are_elsewhere(tmp_path) -> None:
    memory, disk = index(), index(path=str(tmp_path))
    with pytest.raises(ComponentError, match="in a directory, and `path` is not set"):
        memory.restore(disk.serialize())
    with pytest.raises(ComponentError, match="in it, and `path` is set"):
        disk.restore(memory.serialize())


def test_an_artifact_cannot_name_the_directory_or_say_who_may_search() -> None:
    names = {field.name for field in fields(VectorIndexConfig)}
    assert names - set(local_settings(VectorIndexConfig)) == {"metric", "dimensions"}


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_node_that_is_killed_goes_on_with_its_items(tmp_path, on_disk) -> None:
    config = {"path": str(tmp_path / "held")} if on_disk else {}
    shards = Shards(ShardedSearch(k=3), 1, config=config)
    shards.fill(shards.nodes[0], np.eye(8, dtype=np.float32))
    shards.run(shards.nodes[0], "shard", remove=np.array([0]))
    before = shards.search(np.ones(8, np.float32))["results"]
    shards.nodes[0].checkpoint()
    held = shards.nodes[0].component("index").collection
    shards.net.crash("shard-0")
    held.close()  # the process is gone, and its lock with it
    shards.net.restart("shard-0")
    shards.net.run_until_idle()
    assert shards.search(np.ones(8, np.float32))["results"] == before
    assert before.ids.tolist() == [1, 2, 3]


def test_the_directory_is_free_when_the_node_has_stopped(tmp_path: Path) -> None:
    made = index(path=str(tmp_path / "i"))
    made.add(CTX, np.float32([[1, 2], [3, 4]]))
    with pytest.raises(IndexInUse):
        Collection.open(tmp_path / "i")
    made.on_stop()
    made.on_stop()
    with Collection.open(tmp_path / "i") as held:
        assert len(held) == 2


@pytest.mark.parametrize("wipe", [False, True])
def test_an_index_may_wipe_what_is_removed_at_once(tmp_path, wipe) -> None:
    held = index(path=str(tmp_path / "i"), wipe_removed=wipe)
    vectors = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    held.add(CTX, vectors, None, np.array([1, 2, 3]))
    held.remove(CTX, np.array([2]))
    held.add(CTX, vectors[:1] + 10, None, np.array([1]))  # replaces
    files = b"".join(f.read_bytes() for f in (tmp_path / "i").iterdir() if f.is_file())
    for gone in (vectors[1], vectors[0]):
        assert (gone.tobytes() in files) is not wipe
    assert vectors[2].tobytes() in files
    memory = index(wipe_removed=wipe)
    memory.add(CTX, vectors)
    memory.search(CTX, vectors[0], k=1)
    memory.remove(CTX, np.array([1]))
    assert not wipe or vectors[1].tobytes() not in memory.serialize()
