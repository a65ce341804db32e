"""Exact search: scores of all rows by BLAS, and exact distances of the few that can be nearest.

Rule: a score in float32 is off by a known bound, so that every row that may be among the k nearest
is looked at again in float64. Results are those of a plain loop in float64, rounded to float32.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.indexes.searchers import Floats, Ids, Mask, Rows, Searcher, exact_distances

# Scores that are held at a time, of a block of queries with a block of rows.
_SCORES_AT_ONCE: Final = 1 << 24  # 64 MiB
_ROWS_AT_ONCE: Final = 1 << 20
_NUMBERS_AT_ONCE: Final = 1 << 22  # of vectors that are copied: 32 MiB as float64
# Rows whose least score is looked at first; and how many such groups there are for each of k.
_GROUP: Final = 64
_GROUPS_PER_HIT: Final = 4
# A part of all rows below which those that a filter allows are copied out and searched alone.
_FEW: Final = 0.2
_UNIT: Final = 2.0**-24  # float32 rounds by at most this part of a number
_TINY: Final = 1e-36  # and by less than this where numbers are tiny


class FlatSearcher(Searcher):
    """Compares a query with every row."""

    KIND: ClassVar[str] = "flat"

    def __init__(self) -> None:
        self._metric = ""
        # Of rows, as far as a search needed them: what is added to their scores, so that they are
        # lower bounds, and by how much these are below the upper ones.
        self._bias = self._spread = np.zeros(0, np.float32)

    def begin(self, metric: str, dimensions: int) -> None:
        """Forget all rows."""
        self._metric = metric
        self._bias = self._spread = np.zeros(0, np.float32)

    def add(self, first: int, vectors: Floats) -> None:
        """Do nothing: rows are read where the collection keeps them."""

    def remove(self, rows: Ids) -> None:
        """Do nothing: the rows of a search say which are alive."""

    def search(
        self, queries: Floats, k: int, rows: Rows, allowed: Mask | None
    ) -> tuple[Ids, Floats]:
        """Return all rows of each query that are as near as its k-th, or nearer."""
        mask = rows.alive if allowed is None and rows.dead else allowed
        few: Ids | None = None
        if mask is not None and np.count_nonzero(mask) <= _FEW * len(rows):
            few = np.flatnonzero(mask)
        total = len(rows) if few is None else len(few)
        found: list[list[Ids]] = [[] for _ in queries]
        high = min(_ROWS_AT_ONCE, total)
        if few is not None:
            high = min(high, max(1, _NUMBERS_AT_ONCE // rows.dimensions))
        wide = max(1, _SCORES_AT_ONCE // max(high, 1))
        scaled, slack = self._scaled(queries)
        scores = np.empty((min(wide, len(queries)), high), np.float32)
        for start in range(0, total, high or 1):
            part: Any = slice(start, min(start + high, total))
            chosen = part if few is None else few[part]
            vectors = rows.vectors[chosen]
            bias = spread = None
            if self._metric != "cosine":
                self._measure(rows)
                bias, spread = self._bias[chosen], self._spread[chosen]
            dead = None if mask is None or few is not None else ~mask[chosen]
            for first in range(0, len(queries), wide):
                block = scaled[first : first + wide]
                held = scores[: len(block), : len(vectors)]
                if held.shape[1] < scores.shape[1]:
                    held = np.empty(held.shape, np.float32)
                np.matmul(block, vectors.T, out=held)
                if bias is not None:
                    held += bias
                if dead is not None:
                    held[:, dead] = np.inf
                for at, line in enumerate(held, first):
                    near = _nearest(line, k, spread, slack[at])
                    found[at].append(near + start if few is None else few[near + start])
        return self._exact(queries, k, rows, found)

    def _scaled(self, queries: Floats) -> tuple[Floats, npt.NDArray[np.float64]]:
        """Return what is multiplied with rows, and by how much each query's scores may be off."""
        lengths = np.sqrt(np.einsum("ij,ij->i", queries, queries, dtype=np.float64))
        error = _error(queries.shape[1])
        if self._metric == "l2":
            return queries * np.float32(-2), 2 * (error * lengths**2 + _TINY)
        if self._metric == "ip":
            # Of length 1, so that the error depends on the row alone.
            units = queries / np.where(lengths > 0, lengths, 1)[:, None]
            return (-units).astype(np.float32), np.full(len(queries), 2 * _TINY)
        return -queries, np.full(len(queries), 4 * error)

    def _measure(self, rows: Rows) -> None:
        """Bring bias and spread up to all rows."""
        known = len(self._bias)
        if known >= len(rows):
            return
        bias, spread = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
        bias[:known], spread[:known] = self._bias, self._spread
        step = max(1, _NUMBERS_AT_ONCE // rows.dimensions)
        for start in range(known, len(rows), step):
            part = rows.vectors[start : min(start + step, len(rows))]
            lengths = np.einsum("ij,ij->i", part, part, dtype=np.float64)
            # Of l2: |x - q|^2 - |q|^2 = |x|^2 - 2 x.q, and |x||q| is at most (|x|^2 + |q|^2) / 2.
            is_l2 = rows.metric == "l2"
            error = _error(rows.dimensions) * (lengths if is_l2 else np.sqrt(lengths))
            place = slice(start, start + len(part))
            bias[place] = (lengths if is_l2 else 0) - error
            spread[place] = np.nextafter((2 * error).astype(np.float32), np.float32(np.inf))
        self._bias, self._spread = bias, spread

    @staticmethod
    def _exact(queries: Floats, k: int, rows: Rows, found: list[list[Ids]]) -> tuple[Ids, Floats]:
        lines = []
        step = max(1, _NUMBERS_AT_ONCE // rows.dimensions)
        for query, parts in zip(queries, found, strict=True):
            near = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            told = [
                exact_distances(rows.metric, rows.vectors[near[at : at + step]], query)
                for at in range(0, len(near), step)
            ]
            with np.errstate(over="ignore"):
                far = np.concatenate(told or [np.zeros(0)]).astype(np.float32)
            if len(near) > k:
                kept = far <= np.partition(far, k - 1)[k - 1]
                near, far = near[kept], far[kept]
            lines.append((near, far))
        most = max((len(near) for near, _ in lines), default=0)
        numbers = np.full((len(lines), most), -1, np.int64)
        distances = np.full((len(lines), most), np.inf, np.float32)
        for at, (near, far) in enumerate(lines):
            numbers[at, : len(near)], distances[at, : len(far)] = near, far
        return numbers, distances


def _error(dimensions: int) -> float:
    """Return a bound of the relative error of an inner product in float32, in any order of sums.

    Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1: n u / (1 - n u), with
    some terms more for what is added to it, and for distances that are told in float32.
    """
    terms = (dimensions + 16) * _UNIT
    return terms / (1 - terms)


def _nearest(scores: Floats, k: int, spread: Any, slack: float) -> Ids:
    """Return all columns that may be among the k nearest.

    Args:
        scores: [N], lower bounds; +inf for rows that don't count.
        k: 1 or more.
        spread: float64 [N], by how much each is below its upper bound; None: nothing.
        slack: the same, of all of them.
    """
    groups = len(scores) // _GROUP
    if groups < _GROUPS_PER_HIT * k:
        return _below(scores, np.arange(len(scores)), k, spread, slack)
    # A group is every `groups`-th column, so that the least of each is found by long vectors. The k
    # groups with the least minima have k columns at most as far as any column outside of them.
    table = scores[: groups * _GROUP].reshape(_GROUP, groups)
    least = table.min(axis=0)
    rest = np.arange(groups * _GROUP, len(scores))
    first = np.partition(least, k - 1)[k - 1]
    chosen = np.flatnonzero(least <= first)
    columns = _columns(table, chosen, first)
    bounds = scores[columns] + slack
    if spread is not None:
        bounds += spread[columns]
    limit = np.partition(bounds, k - 1)[k - 1]
    chosen = np.flatnonzero(least <= limit)
    columns = np.concatenate([_columns(table, chosen, limit), rest])
    return _below(scores, columns, k, spread, slack)


def _columns(table: Floats, groups: Ids, limit: float) -> Ids:
    inside, which = np.nonzero(table[:, groups] <= limit)
    found: Ids = inside * table.shape[1] + groups[which]
    return found


def _below(scores: Floats, columns: Ids, k: int, spread: Any, slack: float) -> Ids:
    """Return those of `columns` whose lower bound is not above the k-th upper bound."""
    lower = scores[columns].astype(np.float64)
    finite = np.isfinite(lower)
    if not finite.all():
        columns, lower = columns[finite], lower[finite]
    if len(columns) <= k:
        return columns
    upper = lower + slack if spread is None else lower + slack + spread[columns]
    found: Ids = columns[lower <= np.partition(upper, k - 1)[k - 1]]
    return found
