"""Splits of examples, and partitions of them among peers.

Rule: everything here is a pure function of its arguments, by random bits that numpy promises never
to change and by arithmetic that is exact or correctly rounded. So peers that share a seed agree on
each peer's examples without communication, on every machine; no two peers have the same example,
and every example goes to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[Any]
Split = Literal["all", "train", "test", "validation"]
Partition = Literal["iid", "shards", "dirichlet", "quantity"]

SHARDS_PER_CLIENT = 2  # McMahan et al., 2017 (arXiv:1602.05629), section 3
# Integer labels are split class by class if the classes have so many examples on average; below,
# rounding would leave most classes out of the smaller part.
MIN_PER_CLASS = 10
MAX_DRAWS = 1_000_000  # of a Dirichlet partition: peers times classes; some 50 seconds

# Streams of random bits that must not coincide for equal seeds.
_SPLIT, _DEAL, SHUFFLE, _SKEW = 1, 2, 3, 4
_SEED_BITS = (1 << 64) - 1  # of a label; seeds are not negative


def permutation(n: int, *seeds: int) -> Rows:
    """Return a permutation of 0 .. n-1 that depends on `seeds` alone.

    Sorts raw PCG64 outputs: numpy keeps the streams of its bit generators for ever, but not
    those of `Generator.permutation` (NEP 19).
    """
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


def split_rows(
    n: int, labels: Labels | None, test_fraction: float, validation_fraction: float, seed: int
) -> dict[Split, Rows]:
    """Return the rows of each part of `n` examples, ascending: "train", "test", "validation".

    Where `labels` [n] are integers, each class is split alike, if the classes are not too small.
    """
    test: list[Rows] = []
    validation: list[Rows] = []
    for rows, *stream in _strata(n, labels):
        shuffled = rows[permutation(len(rows), seed, _SPLIT, *stream)]
        first = round(len(rows) * test_fraction)
        test.append(shuffled[:first])
        validation.append(shuffled[first : first + round(len(rows) * validation_fraction)])
    held_out = np.sort(np.concatenate(test)), np.sort(np.concatenate(validation))
    train = np.setdiff1d(np.arange(n), np.concatenate(held_out))
    return {"train": train, "test": held_out[0], "validation": held_out[1]}


def _strata(n: int, labels: Labels | None) -> list[tuple[Any, ...]]:
    """Return the groups that are split alike: rows and, of a class, its stream of random bits."""
    if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iub":
        classes, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if n >= MIN_PER_CLASS * len(classes):
            by_class = np.split(np.argsort(of, kind="stable"), np.cumsum(counts)[:-1])
            streams = (int(each) & _SEED_BITS for each in classes)
            return list(zip(by_class, streams, strict=True))
    return [(np.arange(n),)]


def iid(labels: Labels, shards: int, seed: int) -> list[Rows]:
    """Deal shuffled examples: shares of equal size, and alike."""
    return [np.sort(part) for part in np.array_split(_shuffled(labels, seed), shards)]


def by_label(labels: Labels, shards: int, seed: int) -> list[Rows]:
    """Sort examples by label, cut two pieces per peer and deal those, so that each has few classes.

    McMahan et al., 2017 (arXiv:1602.05629), section 3.
    """
    pieces = np.array_split(np.argsort(labels, kind="stable"), SHARDS_PER_CLIENT * shards)
    dealt = permutation(len(pieces), seed, _DEAL).reshape(shards, SHARDS_PER_CLIENT)
    return [np.sort(np.concatenate([pieces[index] for index in mine])) for mine in dealt]


def dirichlet(labels: Labels, shards: int, seed: int, alpha: float) -> list[Rows]:
    """Deal shares of equal size, each with a mix of classes drawn from Dirichlet(alpha * prior).

    Hsu, Qi and Brown, 2019 (arXiv:1909.06335): small `alpha` gives each peer few classes, large
    ones nearly the mix of the whole. Where a class is used up, the others take its place. Integer
    `labels` [n].
    """
    _, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = _shuffled(labels, seed)
    # Rows of each class, in shuffled order.
    by_class = np.split(shuffled[np.argsort(of[shuffled], kind="stable")], np.cumsum(counts)[:-1])
    left = [int(count) for count in counts]
    draws = _Draws(seed)
    shares: list[Rows] = [np.empty(0, np.int64)] * shards
    turns = permutation(shards, seed, _SKEW)  # the last ones take what is left
    for peer, size in zip(turns, _even(len(labels), shards), strict=True):
        weights = draws.weights([alpha * int(count) / len(labels) for count in counts])
        taken = _apportion(size, weights, left)
        parts = [
            rows[len(rows) - rest : len(rows) - rest + count]
            for rows, rest, count in zip(by_class, left, taken, strict=True)
        ]
        left = [rest - count for rest, count in zip(left, taken, strict=True)]
        shares[peer] = np.sort(np.concatenate(parts))
    return shares


def quantity(labels: Labels, shards: int, seed: int, alpha: float) -> list[Rows]:
    """Deal shares of examples that are alike, of sizes drawn from Dirichlet(alpha); each 1 or more.

    Li et al., 2021 (arXiv:2102.02079), section 4.3.
    """
    weights = _Draws(seed).weights([alpha] * shards)
    more = _apportion(len(labels) - shards, weights, [len(labels)] * shards)
    ends = np.cumsum([1 + count for count in more])
    return [np.sort(part) for part in np.split(_shuffled(labels, seed), ends[:-1])]


def deal(labels: Labels, partition: Partition, shards: int, seed: int, alpha: float) -> list[Rows]:
    """Return the disjoint shares of all peers, each ascending, which together are all examples.

    `labels` [n]; only their number matters to "iid" and "quantity". Raises ValueError for fewer
    examples than peers, and for labels that the partition can't use; a share of "shards" may be
    empty if there are fewer than two examples for each peer.
    """
    if len(labels) < shards:
        raise ValueError(
            f"{len(labels)} example(s) for {shards} peers, one is empty; use fewer shards"
        )
    if partition == "iid":
        return iid(labels, shards, seed)
    if partition == "quantity":
        _refuse_draws(shards)
        return quantity(labels, shards, seed, alpha)
    if labels.ndim != 1:
        raise ValueError(
            f"labels of shape {list(labels.shape[1:])} each have no order and are no classes; "
            'use partition "iid" or "quantity"'
        )
    if partition == "shards":
        return by_label(labels, shards, seed)
    if labels.dtype.kind not in "iub":
        raise ValueError(
            f'{labels.dtype} labels are no classes; use partition "shards", "iid" or "quantity"'
        )
    _refuse_draws(shards * len(np.unique(labels)))
    return dirichlet(labels, shards, seed, alpha)


def _refuse_draws(count: int) -> None:
    if count > MAX_DRAWS:
        raise ValueError(
            f"{count} draws (peers times classes) are more than {MAX_DRAWS}; use fewer shards, or "
            'partition "iid" or "shards"'
        )


def _shuffled(labels: Labels, seed: int) -> Rows:
    return permutation(len(labels), seed, _DEAL)


def _even(total: int, parts: int) -> list[int]:
    each, over = divmod(total, parts)
    return [each + 1] * over + [each] * (parts - over)


def _apportion(total: int, weights: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return integers that add up to `total`, proportional to `weights`, none above its `room`.

    By largest remainders; what has no room goes to the others. `room` has to be enough.
    """
    given = [0] * len(room)
    while total:
        free = [k for k in range(len(room)) if given[k] < room[k]]
        wanted = [weights[k] for k in free]
        if not any(wanted):
            wanted = [room[k] - given[k] for k in free]
        whole = sum(wanted)
        parts = [divmod(total * weight, whole) for weight in wanted]
        missing = total - sum(quotient for quotient, _ in parts)
        ranked = sorted(range(len(free)), key=lambda at: (-parts[at][1], at))
        one_more = set(ranked[:missing])
        for at, k in enumerate(free):
            taken = min(parts[at][0] + (at in one_more), room[k] - given[k])
            given[k] += taken
            total -= taken
    return given


class _Draws:
    """Dirichlet variates from raw random bits.

    In decimal arithmetic, whose logarithms are correctly rounded everywhere, and whose exponents
    have room for the tiny variates of small concentrations; those of a C library differ in their
    last bits.
    """

    _CHUNK = 1024
    _WEIGHT_BITS = 53

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence((seed, _DEAL, _SKEW)))
        self._ready: list[int] = []
        self._context = Context(prec=28, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])

    def weights(self, concentrations: Sequence[float]) -> list[int]:
        """Return one Dirichlet variate, as integers in its proportions."""
        with localcontext(self._context):
            drawn = [self._gamma(Decimal(each)) for each in concentrations]
            most = max(drawn)
            if most == 0:
                return [0] * len(drawn)
            return [int(each / most * (1 << self._WEIGHT_BITS)) for each in drawn]

    def _uniform(self) -> Decimal:
        """A number between 0 and 1, without these."""
        if not self._ready:
            self._ready = self._bits.random_raw(self._CHUNK).tolist()
        return (Decimal(self._ready.pop() >> 11) + Decimal("0.5")) / (1 << 53)

    def _normal(self) -> Decimal:
        """Marsaglia's polar method; of its two variates the first."""
        while True:
            x, y = 2 * self._uniform() - 1, 2 * self._uniform() - 1
            s = x * x + y * y
            if 0 < s < 1:
                return x * (-2 * s.ln() / s).sqrt()

    def _gamma(self, shape: Decimal) -> Decimal:
        """Marsaglia and Tsang, 2000: A simple method for generating gamma variables."""
        if shape < 1:
            return self._gamma(shape + 1) * (self._uniform().ln() / shape).exp()
        d = shape - Decimal(1) / 3
        c = 1 / (9 * d).sqrt()
        while True:
            x = self._normal()
            v = (1 + c * x) ** 3
            if v > 0 and self._uniform().ln() < x * x / 2 + d - d * v + d * v.ln():
                return d * v
