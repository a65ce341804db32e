"""Ops that merge and open what searches found.

Rule: results are peers' values. One that does not fit the query is left out and reported under its
peer's name, so that a shard that lies spoils no other's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from bbnode.engine.errors import InvalidOperand
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.ir import keys, types
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import Metadata, MetadataVec, ResponseBatch, SearchResults, Value, dtype_of

Array = np.ndarray[Any, Any]


@binds(keys.RESPONSES_DOMAIN, "Merge")
def _merge(build: OpBuild) -> Fire:
    k = build.attr_int("k", minimum=1)
    distinct = build.attr_int("distinct", minimum=0)
    share = build.attr_int("share", minimum=0)

    def merge(frame: Frame, batch: ResponseBatch, leading: tuple[int, ...]) -> SearchResults:
        fitting, refused = _parted(batch, lambda answer: _misfit(answer, leading))
        _report(build.flat.name, frame, refused)
        return merged(fitting, leading, k=k, distinct=distinct, share=share)

    return _of_answers(build, merge)


@binds(keys.RESPONSES_DOMAIN, "Usable")
def _usable(build: OpBuild) -> Fire:
    k = build.attr_int("k", minimum=1)

    def keep(frame: Frame, batch: ResponseBatch, leading: tuple[int, ...]) -> ResponseBatch:
        kept, refused = _parted(batch, lambda a: _misfit(a, leading) or _untrue(a, k))
        if not refused:
            return batch
        _report(build.flat.name, frame, refused)
        reasons = {
            **dict(batch.reasons),
            **{peer: WireRefusal("UnusableResults", why).bounded() for peer, why in refused},
        }
        left = {peer for peer, _ in kept}
        return ResponseBatch(
            responses=tuple(kept),
            missing=tuple(sorted({*batch.missing, *(peer for peer, _ in refused)})),
            reasons=tuple(sorted(reasons.items())),
            took_ns=tuple(each for each in batch.took_ns if each[0] in left),
        )

    return _of_answers(build, keep)


def _of_answers(
    build: OpBuild, make: Callable[[Frame, ResponseBatch, tuple[int, ...]], Value]
) -> Fire:
    """Return the op over answers, and the leading axes of the query, if it has one."""
    if len(build.inputs) not in (1, 2) or len(build.outputs) != 1:
        raise build.wrong("takes answers, and at most a query, and has one output")
    source = build.inputs[0]
    query_at = build.inputs[1] if len(build.inputs) == 2 else None
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        batch = frame.values[source]
        if not isinstance(batch, ResponseBatch):
            raise InvalidOperand(f"{name}: {type(batch).__name__} is no batch of answers")
        query = None if query_at is None else np.asarray(frame.values[query_at])
        return make(frame, batch, _usual_leading(batch) if query is None else query.shape[:-1])

    return fire


def _parted(
    batch: ResponseBatch, why_not: Callable[[Any], str]
) -> tuple[list[tuple[PeerId, SearchResults]], list[tuple[PeerId, str]]]:
    """Return the answers that are good, and of the other peers why theirs are not."""
    good: list[tuple[PeerId, SearchResults]] = []
    refused: list[tuple[PeerId, str]] = []
    for peer, answer in batch.responses:
        why = why_not(answer)
        if why:
            refused.append((peer, why))
        else:
            assert isinstance(answer, SearchResults)
            good.append((peer, answer))
    return good, refused


def _report(name: str, frame: Frame, refused: Sequence[tuple[PeerId, str]]) -> None:
    for peer, why in refused:
        frame.rt.reports.refused_by_component(name, frame.execution, peer, why)


def _untrue(found: SearchResults, k: int) -> str:
    """Return why results can't be those of a search for the k nearest, or ""."""
    ids, distances = np.atleast_2d(found.ids), np.atleast_2d(found.distances)
    if ids.shape[1] > k:
        return f"up to {ids.shape[1]} hits for a query; asked were {k}"
    # True of most: then no distance is NaN either, which is not above or below anything.
    if not ((distances[:, 1:] >= distances[:, :-1]).all() and (distances[:, :1] > -np.inf).all()):
        if not (np.where(ids >= 0, distances, 0) > -np.inf).all():
            return "a distance is NaN, or minus infinity"
        return "the hits are not nearest first"
    in_order = np.sort(ids, axis=1)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
        return "an id stands twice among the hits of a query"
    return ""


def _usual_leading(batch: ResponseBatch) -> tuple[int, ...]:
    """Return the number of queries that most answers are for: () for one that is no batch."""
    found = Counter(a.ids.shape[:-1] for _, a in batch.responses if isinstance(a, SearchResults))
    return min(found, key=lambda shape: (-found[shape], shape), default=())


def _misfit(answer: Value, leading: tuple[int, ...]) -> str:
    """Return why an answer is none to that many queries, or ""."""
    if not isinstance(answer, SearchResults):
        return f"the answer is {type(answer).__name__}, not SearchResults"
    if answer.ids.shape[:-1] != leading:
        asked = f"{leading[0]} queries" if leading else "one query"
        return f"search results {list(answer.ids.shape)} to {asked}"
    return ""


def merged(
    answers: Sequence[tuple[PeerId, SearchResults]], leading: tuple[int, ...], *,
    k: int, distinct: int = 0, share: int = 0,
) -> SearchResults:  # fmt: skip
    """Return the k nearest hits of each query; of equal distances the lesser id, then PeerId.

    Args:
        answers: of peers in PeerId order, all of ids [*leading, …].
        leading: (), or (Q,) for a batch of Q queries.
        k: for each query.
        distinct: n of 1 or more: of hits with one id only the n-th nearest, where there are so
            many; 0: all hits.
        share: hits of one peer for a query, at most; 0: any number.
    """
    rows = leading[0] if leading else 1
    widths = [answer.ids.shape[-1] for _, answer in answers]
    ids, distances = np.zeros((rows, 0), np.int64), np.zeros((rows, 0), np.float32)
    if answers:
        ids = np.concatenate([np.atleast_2d(a.ids) for _, a in answers], axis=1)
        distances = np.concatenate([np.atleast_2d(a.distances) for _, a in answers], axis=1)
    by = np.repeat(np.arange(len(answers)), widths)
    # Columns are in the order of PeerIds, and what has no distance (NaN) comes last by itself.
    missing = ids < 0
    order = np.lexsort((ids, distances, missing) if missing.any() else (ids, distances))
    if distinct:
        order = _nth_of_each(ids, order, distinct)
    if share:
        order = _shared(ids, order, by, share)
    order, row = order[:, :k], np.arange(rows)[:, None]
    ids, distances = ids[row, order], distances[row, order]
    is_hit = ids >= 0
    most = int(np.count_nonzero(is_hit, axis=1).max(initial=0))
    peers = by[order[is_hit]].tolist()
    told: list[Metadata] = []
    if any(answers[peer][1].metadata for peer in set(peers)):
        firsts = np.cumsum(widths) - widths
        columns = order[is_hit] - firsts[peers]
        told = _metadata_of(answers, peers, np.nonzero(is_hit)[0].tolist(), columns.tolist())
    return SearchResults(
        ids[:, :most] if leading else ids[0, :most],
        distances[:, :most] if leading else distances[0, :most],
        told,
        [answers[peer][0] for peer in peers],
    )


def _metadata_of(
    answers: Sequence[tuple[PeerId, SearchResults]],
    peers: Sequence[int],
    rows: Sequence[int],
    columns: Sequence[int],
) -> list[Metadata]:
    """Return the metadata of hits: of each the place of its answer, its row there and column."""
    before = [[0]] * len(answers)  # how many hits there are in the rows above
    if max(rows, default=0):
        hits = [np.count_nonzero(answer.ids >= 0, axis=1) for _, answer in answers]
        before = [(np.cumsum(each) - each).tolist() for each in hits]
    lists = [answer.metadata for _, answer in answers]
    return [
        lists[peer][before[peer][row] + column] if lists[peer] else Metadata()
        for peer, row, column in zip(peers, rows, columns, strict=True)
    ]


def _nth_of_each(ids: Array, order: Array, n: int) -> Array:
    """Return the order with all hits but the n-th of each id behind, in each row."""
    for row, places in enumerate(order):
        by_id = np.argsort(ids[row, places], kind="stable")
        _, first, count = np.unique(ids[row, places[by_id]], return_index=True, return_counts=True)
        kept = np.zeros(len(places), np.bool_)
        kept[by_id[first[count >= n] + n - 1]] = True
        order[row] = _behind(ids[row], places, kept)
    return order


def _shared(ids: Array, order: Array, by: Array, share: int) -> Array:
    """Return the order with the hits of a peer beyond `share` behind, in each row."""
    for row, places in enumerate(order):
        by_peer = np.argsort(by[places], kind="stable")
        peers = by[places[by_peer]]
        rank = np.arange(len(peers)) - np.searchsorted(peers, peers)
        kept = np.zeros(len(places), np.bool_)
        kept[by_peer[rank < share]] = True
        order[row] = _behind(ids[row], places, kept)
    return order


def _behind(ids: Array, places: Array, kept: Array) -> Array:
    """Return the places with those of hits that are not kept at the end, where they are none."""
    ids[places[~kept]] = -1
    found = ids[places] >= 0
    return np.concatenate([places[found], places[~found]])


@binds(keys.SEARCH_DOMAIN, "Ids")
def _ids(build: OpBuild) -> Fire:
    return _of_results(build, lambda found: found.ids)


@binds(keys.SEARCH_DOMAIN, "Distances")
def _distances(build: OpBuild) -> Fire:
    return _of_results(build, lambda found: found.distances)


@binds(keys.SEARCH_DOMAIN, "Metadata")
def _metadata(build: OpBuild) -> Fire:
    return _of_results(build, lambda found: found.metadata)


@binds(keys.SEARCH_DOMAIN, "Senders")
def _senders(build: OpBuild) -> Fire:
    return _of_results(build, lambda found: found.senders)


@binds(keys.SEARCH_DOMAIN, "Entry")
def _entry_of_hits(build: OpBuild) -> Fire:
    entry = build.attr_text("name")
    node = build.attr_tensor_type("to")
    dtype, is_text = dtype_of(node), node is types.TENSOR_STRING
    nothing: Any = "" if is_text else np.array(np.nan if dtype.kind == "f" else 0).astype(dtype)

    def read(found: SearchResults) -> Array:
        made = np.full(len(found), nothing, object if is_text else dtype)
        for place, metadata in enumerate(found.metadata):
            value = metadata.get(entry)
            if is_text == isinstance(value, str) and isinstance(value, str | bool | int | float):
                with np.errstate(over="ignore"), suppress(OverflowError, ValueError):
                    made[place] = value
        made.flags.writeable = False
        return made

    return _of_results(build, read)


@binds(keys.SEARCH_DOMAIN, "WithEntry")
def _with_entry(build: OpBuild) -> Fire:
    build.arity(2, 1)
    source, values = build.inputs
    entry, name = build.attr_text("name"), build.flat.name

    def fire(frame: Frame) -> Any:
        given, column = frame.values[source], np.asarray(frame.values[values])
        if not isinstance(given, MetadataVec):
            raise InvalidOperand(f"{name}: {type(given).__name__} is no MetadataVec")
        if column.ndim > 1 or column.dtype.kind not in "Obiuf":
            raise InvalidOperand(
                f"{name}: {column.dtype} of the shape {list(column.shape)}; entries are texts or "
                "numbers, [n]"
            )
        told = column.reshape(-1).tolist()
        if given and len(given) != len(told):
            raise InvalidOperand(f"{name}: {len(told)} value(s) for the metadata of {len(given)}")
        rows = given or [Metadata()] * len(told)
        return MetadataVec(
            Metadata({**row, entry: value}) for row, value in zip(rows, told, strict=True)
        )

    return fire


def _of_results(build: OpBuild, read: Callable[[SearchResults], Value]) -> Fire:
    build.arity(1, 1)
    (source,) = build.inputs
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        results = frame.values[source]
        if not isinstance(results, SearchResults):
            raise InvalidOperand(f"{name}: {type(results).__name__} is no SearchResults")
        return read(results)

    return fire
