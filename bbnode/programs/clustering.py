"""Clusters in the examples of all clients: k-means, said as sums."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bbnode.components import (
    HeldModel,
    OnnxModelConfig,
    PooledClusters,
    PooledClustersConfig,
    concrete,
)
from bbnode.components.models.centroids import assigning_model
from bbnode.dsl import (
    BackendSlot,
    DataSourceSlot,
    Graph,
    LoopStep,
    ModelSlot,
    Output,
    types,
)
from bbnode.programs.arguments import cohort_slot
from bbnode.programs.statistics import MeasuringProgram
from bbnode.programs.training import TRAIN_SLOT

_OWN_STEPS = 5  # of Lloyd that a client makes for a start


class FederatedKMeans(MeasuringProgram):
    """One step of k-means (Lloyd, 1982, doi:10.1109/TIT.1982.1056489) over all clients' examples.

    Input "tick" (Trigger) starts a step on the server: it sends its centroids to a cohort of
    clients, each assigns its examples to the nearest one, and answers how many each has, the
    sums of their features and of their squared distances; the new centroids are the means. A step
    is that of the pooled examples. A centroid without examples stays where it is.

    Without `start` the first step finds one: each client makes k-means++ and a few steps over its
    own examples, and the server makes k-means over these centroids (see `PooledClusters`). The
    draws follow from `seed`.

    Outputs, all on the server: "inertia" (float32 []: the sum of squared distances from the
    centroids that the step began with; of the first one, from those that it found, by way of
    the clients' own), "shift" (float32 []: the largest distance that a centroid moved; infinite
    when it was found), "counts" (int64 [K]), "stats" (Metadata: num_samples, contributors, …) and
    "centroids" (float32 [K, F]).

    The server's slot "centroids" has a model whose outputs are the squared "distances" [N, K] of
    examples "x" [N, F], and the "cluster" of each, int64 [N]; `bbnode export` writes it.
    """

    clusters: int = 8
    features: int = 0  # numbers of an example; may be left out with `start`
    start: Any = None  # centroids to begin with, [K, F]; None: the first step finds them
    seed: int = 0

    def body(self, g: Graph) -> None:
        """Record a step."""
        self.check()
        compute, real = BackendSlot("compute"), types.TENSOR_DOUBLE
        k, model = self.clusters, ModelSlot("centroids", concrete=concrete(HeldModel, self._config))
        settings = PooledClustersConfig(clusters=k, features=self.width, seed=self.seed)
        pool = cohort_slot("sums", PooledClusters, self.clients, settings)

        peers = self.cohort(g, g.input("tick", types.TRIGGER))
        old = compute.reshape(g, model.params(g, after=peers), [k, self.width])
        asked = self.ask(g, "step", peers, old)

        # On each client.
        examples, _ = DataSourceSlot(TRAIN_SLOT).next_batch(g, after=asked.received)
        rows = compute.cast(g, compute.flatten(g, examples, axis=1), to=real)
        known = self._known(g, asked.received)
        given = compute.cast(g, asked.received, to=real)
        centroids = compute.if_(
            g, known, lambda b: compute.identity(b, given), lambda b: self._started(b, rows)
        )
        flag = compute.cast(g, compute.not_(g, known), to=real)
        column = compute.expand(g, compute.reshape(g, flag, [1, 1]), g.constant([k, 1]))
        asked.respond(compute.concat(g, column, self._sums(g, rows, centroids), axis=1))

        # Back on the server.
        pool.contribute_all(g, asked.responses)
        merged, stats = pool.aggregate(g)
        flags, counts, inertia, sums = compute.split(
            g, merged, [1, 1, 1, self.width], axis=1, outputs=4
        )
        one = g.tensor(1.0, real)
        means = compute.div(g, sums, compute.max(g, counts, one))
        there = compute.greater(g, compute.max(g, counts, flags), g.tensor(0.0, real))
        wide = compute.cast(g, old, to=real)
        new = compute.cast(g, compute.where(g, there, means, wide), to=types.TENSOR_FLOAT)
        loaded = model.load_parameters(g, compute.reshape(g, new, [-1]))
        moved = compute.sub(g, compute.cast(g, new, to=real), wide)
        squares = compute.reduce_sum(g, compute.mul(g, moved, moved), [1])
        shift = compute.reduce_max(g, compute.sqrt(g, squares), keepdims=False)
        began = compute.reduce_max(g, flags, keepdims=False)
        endless = g.tensor(math.inf, real)
        shift = compute.where(g, compute.greater(g, began, g.tensor(0.0, real)), endless, shift)
        told = {"inertia": compute.reduce_sum(g, inertia, keepdims=False), "shift": shift}
        for name, value in told.items():
            g.output(name, compute.cast(g, value, to=types.TENSOR_FLOAT))
        of_each = compute.cast(g, counts, to=types.TENSOR_INT64)
        g.output("counts", compute.reshape(g, of_each, [-1]))
        g.output("stats", stats)
        g.output("centroids", new, after=loaded)

    def _known(self, g: Graph, centroids: Output) -> Output:
        """Return if there are centroids, bool []: before the first step all are 0."""
        compute = BackendSlot("compute")
        largest = compute.reduce_max(g, compute.abs(g, centroids), keepdims=False)
        return compute.greater(g, largest, g.tensor(0.0, types.TENSOR_FLOAT))

    def _nearest(self, g: Graph, rows: Output, centroids: Output) -> Output:
        """Return the nearest centroid of each row, int64 [N]; of equals the first."""
        compute = BackendSlot("compute")
        # Distances do not depend on the origin; among the centroids little cancels out.
        middle = compute.reduce_mean(g, centroids, [0])
        near, far = (compute.sub(g, each, middle) for each in (centroids, rows))
        squares = compute.reduce_sum(g, compute.mul(g, near, near), [1], keepdims=False)
        products = compute.mat_mul(g, far, compute.transpose(g, near, perm=[1, 0]))
        two = g.tensor(2.0, types.TENSOR_DOUBLE)
        nearest: Output = compute.arg_min(
            g, compute.sub(g, squares, compute.mul(g, two, products)), axis=1, keepdims=0
        )
        return nearest

    def _sums(self, g: Graph, rows: Output, centroids: Output) -> Output:
        """Return counts, squared distances and sums of each cluster, float64 [K, 2 + F]."""
        compute, real = BackendSlot("compute"), types.TENSOR_DOUBLE
        nearest = self._nearest(g, rows, centroids)
        numbers = g.tensor(np.arange(self.clusters), types.TENSOR_INT64)
        member = compute.equal(g, compute.unsqueeze(g, nearest, [1]), numbers)
        away = compute.sub(g, rows, compute.gather(g, centroids, nearest, axis=0))
        squares = compute.reduce_sum(g, compute.mul(g, away, away), [1])
        ones = compute.add(g, compute.mul(g, squares, g.tensor(0.0, real)), g.tensor(1.0, real))
        each = compute.concat(g, ones, squares, rows, axis=1)
        chosen = compute.transpose(g, compute.cast(g, member, to=real), perm=[1, 0])
        return compute.mat_mul(g, chosen, each)

    def _started(self, g: Graph, rows: Output) -> Output:
        """Return centroids of a client's own rows, [K, F]: k-means++, and steps of Lloyd."""
        compute, real, k = BackendSlot("compute"), types.TENSOR_DOUBLE, self.clusters
        draws = g.tensor(np.random.default_rng(self.seed).random(k), real)
        count = compute.gather(g, compute.shape(g, rows), g.constant(0), axis=0)
        last = compute.sub(g, count, g.constant(1))
        one, zero = g.tensor(1.0, real), g.tensor(0.0, real)
        first = compute.expand(g, one, compute.reshape(g, count, [1]))

        def choose(b: Graph, at: Output, chances: Output, squares: Output) -> Any:
            sums = compute.cum_sum(b, chances, b.constant(0))
            draw = compute.mul(
                b, compute.gather(b, draws, at, axis=0), compute.gather(b, sums, last, axis=0)
            )
            passed = compute.cast(b, compute.less_or_equal(b, sums, draw), to=types.TENSOR_INT64)
            found = compute.min(b, compute.reduce_sum(b, passed, keepdims=False), last)
            chosen = compute.gather(b, rows, found, axis=0)
            away = compute.sub(b, rows, chosen)
            nearer = compute.min(
                b, squares, compute.reduce_sum(b, compute.mul(b, away, away), [1], keepdims=False)
            )
            return LoopStep(carried=[nearer, nearer], scans=[chosen])

        far = compute.mul(g, first, g.tensor(np.finfo(np.float64).max, real))
        begun = compute.loop(g, choose, first, far, trip_count=k).scans[0]

        def step(b: Graph, _at: Output, centroids: Output) -> Output:
            counts, _, sums = compute.split(
                b, self._sums(b, rows, centroids), [1, 1, self.width], axis=1, outputs=3
            )
            means = compute.div(b, sums, compute.max(b, counts, one))
            return compute.where(b, compute.greater(b, counts, zero), means, centroids)

        return compute.loop(g, step, begun, trip_count=_OWN_STEPS).carried[0]

    @property
    def width(self) -> int:
        """The numbers of an example, F."""
        return self.features if self.start is None else int(self._first.shape[1])

    @cached_property
    def _first(self) -> npt.NDArray[np.float32]:
        """The centroids to begin with; zeros: there are none yet."""
        if self.start is None:
            return np.zeros((self.clusters, self.features), np.float32)
        wanted = f"finite numbers [{self.clusters}, F], not all of them 0"
        try:
            found = np.array(self.start, np.float32)
        except (TypeError, ValueError) as error:
            raise self.bad(f"start has to be {wanted}: {error}") from error
        good = (
            found.ndim == 2
            and len(found) == self.clusters
            and found.shape[1] > 0
            and bool(np.isfinite(found).all() and found.any())
        )
        self.require("start", good, wanted)
        return found

    @property
    def _config(self) -> OnnxModelConfig:
        content = assigning_model(self._first).SerializeToString(deterministic=True)
        return OnnxModelConfig(model=content, loss="mse", trainable=("centroids",))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(clusters=1, seed=0, features=0)
        if self.start is None:
            self.require("features", self.features >= 1, "the number of numbers of an example")
        else:
            same = self.features in (0, self._first.shape[1])
            self.require("features", same, f"left out, or {self._first.shape[1]} as of `start`")
