"""A million vectors with eight owners, searched while items come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

SHARDS: Final = 8
DIMENSIONS: Final = 384
QUERIES: Final = 100
K: Final = 10
Floats = npt.NDArray[np.float32]


def unit(vectors: npt.NDArray[np.floating[Any]]) -> Floats:
    """Return vectors of length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Search all shards, take items away and add others, and search again."""
    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("search.py"))
    each = 2_000 if quick else 125_000
    rng = np.random.default_rng(0)
    centres = unit(rng.normal(size=(500, DIMENSIONS)))
    shards = []
    for shard in range(SHARDS):
        noise = rng.normal(scale=0.05, size=(each, DIMENSIONS)).astype(np.float32)
        vectors = unit(centres[rng.integers(500, size=each)] + noise)
        shards.append(vectors)
        ids = np.arange(each) + shard * each
        np.savez(folder / f"items-{shard}.npz", vectors=vectors, id=ids)
        terminal.bbnode(f"index add shards/{shard} items-{shard}.npz --metric cosine")
    items, ids = np.concatenate(shards), np.arange(SHARDS * each)
    queries = unit(centres[:QUERIES] + rng.normal(scale=0.05, size=(QUERIES, DIMENSIONS)))
    np.save(folder / "queries.npy", queries)
    node = "up-out/nodes/{}/node.toml"
    with terminal.running(
        f"up search.py --nodes asker=1,shard={SHARDS} --until-ctrl-c "
        '--set "shard.slots.index.path=shards/{i}"',
        nodes=1 + SHARDS,
    ):
        terminal.wait_for_peers(node.format("asker"), SHARDS)
        search = f"index search -c {node.format('asker')} --query queries.npy --json"
        before = found(terminal.bbnode(search))
        first = recall(before, nearest(items, ids, queries))
        # The nearest item of every query goes, and one that is nearer comes.
        gone = np.unique([hits[0] for hits in before])
        for shard in range(SHARDS):
            mine = " ".join(str(each_id) for each_id in gone if each_id // each == shard)
            if mine:
                terminal.bbnode(f"index remove {mine} -c {node.format(f'shard-{shard}')}")
        come = np.arange(QUERIES) + len(ids)
        np.savez(folder / "new.npz", vectors=queries, id=come)
        terminal.bbnode(f"index add new.npz -c {node.format('shard-0')}")
        after = found(terminal.bbnode(search))
    kept = ~np.isin(ids, gone)
    items, ids = np.concatenate([items[kept], queries]), np.concatenate([ids[kept], come])
    second = recall(after, nearest(items, ids, queries))
    seen = {hit for hits in after for hit in hits}
    return Outcome(
        result=f"recall of {K} nearest {first:.4f}, after changes {second:.4f}",
        reference="numpy, every distance: 1",
        claims=[
            within("the ten nearest of all shards are found", first, 0.999, 1),
            within("and after items came and went", second, 0.999, 1),
            Claim(
                "nothing that was removed is found",
                not seen & set(gone.tolist()),
                f"{len(gone)} removed",
            ),
            Claim(
                "everything that was added is found first",
                [hits[0] for hits in after] == come.tolist(),
                f"{len(come)} added",
            ),
        ],
    )


def found(printed: str) -> list[list[int]]:
    """Return the ids of the hits of each query, of what `bbnode index search` printed."""
    return [[hit["id"] for hit in query] for query in json.loads(printed)["queries"]]


def nearest(items: Floats, ids: npt.NDArray[np.int64], queries: Floats) -> list[set[int]]:
    """Return the ids of the nearest items, by every distance."""
    best = []
    for query in queries:
        scores = items @ query
        best.append(set(ids[np.argpartition(-scores, K)[:K]].tolist()))
    return best


def recall(hits: list[list[int]], truth: list[set[int]]) -> float:
    """Return the share of the nearest that was found."""
    return float(np.mean([len(set(a) & b) / K for a, b in zip(hits, truth, strict=True)]))


JOB = Job(
    says=(
        "a million vectors of 384 numbers with eight owners, 100 searches while items come and go; "
        "numpy on all of them in one place"
    ),
    run=run,
)
