"""Statistics of the features of all peers together: moments, histograms and quantiles.

Rule: no example leaves its peer; what does is counted or summed there first, and checked on the
server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bbnode.components import (
    ConnectedView,
    DataSource,
    OrtBackend,
    PooledCounts,
    PooledCountsConfig,
    PooledRanges,
    PooledStatistics,
)
from bbnode.dsl import (
    BackendSlot,
    DataSourceSlot,
    Graph,
    Output,
    PeerSelectorSlot,
    Request,
    types,
)
from bbnode.programs.arguments import ReadyProgram, bound_slots, cohort_slot, enough
from bbnode.programs.training import TEST_SLOT, TRAIN_SLOT, Source, component_of

MAX_BINS = 1 << 16
MAX_COUNTING_ROUNDS = 64  # that quantiles may take

Numbers = float | Sequence[float] | None


class MeasuringProgram(ReadyProgram):
    """Base of programs in which a server asks a cohort of clients what is in their slots "data"."""

    home = "server"

    clients: int = 4  # peers that are asked
    quorum: int = 0  # answers that are enough at the deadline; 0: as `enough` says: of 3 clients 2
    deadline_s: float = 60.0  # that the server waits for answers to each question, seconds
    data: Source = "bbnode.ArrayDataSource"  # a DataSource, or its TYPE_NAME

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Send a value to clients and wait for their answers."""
        quorum = self.quorum or enough(self.clients)
        return g.request(name, peers, value, quorum=quorum, deadline=float(self.deadline_s))

    def cohort(self, g: Graph, tick: Output) -> Output:
        """Choose the clients that are asked."""
        return PeerSelectorSlot("cohort", peer_class="client").sample(g, n=self.clients, after=tick)

    @property
    def source(self) -> type[DataSource]:
        """The class of the data sources. Raises BadArgument for none."""
        return component_of(self, "data", DataSource, "bbnode.ArrayDataSource")

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots that every measuring program has."""
        return {"cohort": ConnectedView, TRAIN_SLOT: self.source, "compute": OrtBackend}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        self.require_counts(clients=1, quorum=0)
        most = f"an integer between 0 (the default) and clients={self.clients}"
        self.require("quorum", self.quorum <= self.clients, most)
        self.require_numbers("deadline_s")
        _ = self.source


class FederatedStatistics(MeasuringProgram):
    """Count, mean and standard deviation of each feature over the examples of all clients.

    Input "tick" (Trigger): the server asks a cohort of clients for the statistics of the examples
    in their slots "data", merges them, and sends the result back to these. No example leaves
    its peer; what does are statistics of each one's examples, minimum and maximum among them.

    Each client keeps the result: in the file of its setting `statistics`, for other programs, and
    in the source itself, where `standardize` is "federated".

    Outputs, all on the server: "mean", "std", "minimum" and "maximum" (float64 [F]), "stats"
    (Metadata: num_samples, label_counts, contributors, refused, …), and "told" (int64 []): how
    many clients have taken the result.
    """

    test: bool = False  # the server's own slot "test" takes the result too

    def body(self, g: Graph) -> None:
        """Record the two requests."""
        self.check()
        data = DataSourceSlot(TRAIN_SLOT)
        pool = cohort_slot("statistics", PooledStatistics, self.clients)
        compute = BackendSlot("compute")

        tick = g.input("tick", types.TRIGGER)
        asked = self.ask(g, "statistics", self.cohort(g, tick), tick)
        asked.respond(g.bundle(data.statistics(g, after=asked.received)))

        pool.contribute_all(g, asked.responses)
        merged, stats = pool.aggregate(g)
        told = self.ask(g, "standardize", asked.responses.peers, merged)
        taken = data.standardize(g, told.received)
        told.respond(data.on_data_loaded(g, after=taken))

        if self.test:
            DataSourceSlot(TEST_SLOT).standardize(g, merged)
        count, mean, squares, low, high = (
            compute.gather(g, merged, g.constant(row), axis=0) for row in range(5)
        )
        g.output("mean", mean)
        g.output("std", compute.sqrt(g, compute.div(g, squares, count)))
        g.output("minimum", low)
        g.output("maximum", high)
        g.output("stats", stats)
        g.output("told", told.responses.count)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" only where it is used."""
        slot = cohort_slot("statistics", PooledStatistics, self.clients)
        bound = {**super().bindings(), **bound_slots((slot, PooledStatistics))}
        return {**bound, TEST_SLOT: self.source} if self.test else bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("test", isinstance(self.test, bool), "True or False")


class CountingProgram(MeasuringProgram):
    """Base of programs that count how many values of each column lie between which edges.

    An example [...] has as many columns as numbers. NaN and infinities are missing values. The slot
    "data" hands out all its examples at once (`batch_size` is 0).
    """

    low: Numbers = None  # of the columns, a number for all or for each; None: the least value
    high: Numbers = None  # likewise; None: the greatest value

    def rows(self, g: Graph, after: Output) -> tuple[Output, Output]:
        """Return on a client its examples, float64 [N, F], and which values are missing, bool."""
        compute = BackendSlot("compute")
        examples, _ = DataSourceSlot(TRAIN_SLOT).next_batch(g, after=after)
        exact = compute.cast(g, compute.flatten(g, examples, axis=1), to=types.TENSOR_DOUBLE)
        missing = compute.or_(g, compute.is_na_n(g, exact), compute.is_inf(g, exact))
        return exact, missing

    def ends(self, g: Graph, tick: Output) -> tuple[Output, Output, Output]:
        """Return the peers to ask, and the low and the high end of each column, float64 [1, F].

        With given ends these are [1, 1] where all columns have the same.
        """
        peers = self.cohort(g, tick)
        if self.low is not None:
            low, high = (
                g.tensor(np.reshape(np.array(end, np.float64), (1, -1)), types.TENSOR_DOUBLE)
                for end in (self.low, self.high)
            )
            return peers, low, high
        compute, pool = BackendSlot("compute"), cohort_slot("ranges", PooledRanges, self.clients)
        asked = self.ask(g, "ranges", peers, tick)
        exact, missing = self.rows(g, asked.received)
        there = compute.cast(g, compute.not_(g, missing), to=types.TENSOR_DOUBLE)
        counts = compute.reduce_sum(g, there, [0])
        zero, endless = (g.tensor(value, types.TENSOR_DOUBLE) for value in (0.0, math.inf))
        ends = (
            compute.reduce_min(g, compute.where(g, missing, endless, exact), [0]),
            compute.reduce_max(g, compute.where(g, missing, compute.neg(g, endless), exact), [0]),
        )
        empty = compute.equal(g, counts, zero)
        low, high = (compute.where(g, empty, zero, end) for end in ends)
        asked.respond(compute.concat(g, counts, low, high, axis=0))
        pool.contribute_all(g, asked.responses)
        merged, _ = pool.aggregate(g)
        return asked.responses.peers, self.row(g, merged, 1), self.row(g, merged, 2)

    def row(self, g: Graph, table: Output, at: int, until: int = 0) -> Output:
        """Return rows of a table [R, C], from `at` to before `until`; one without."""
        return BackendSlot("compute").slice(g, table, [at], [until or at + 1], [0])

    def edges(self, g: Graph, low: Output, high: Output, bins: int) -> Output:
        """Return the edges between equal bins, float64 [bins + 1, F]; they never descend."""
        compute = BackendSlot("compute")
        numbers = g.tensor(np.arange(bins).reshape(-1, 1), types.TENSOR_DOUBLE)
        width = compute.div(g, compute.sub(g, high, low), g.tensor(bins, types.TENSOR_DOUBLE))
        steps = compute.mul(g, numbers, width)
        inner = compute.min(g, compute.add(g, low, steps), high)
        return compute.concat(g, inner, high, axis=0)

    def counted(
        self, g: Graph, name: str, peers: Output, edges: Output, *, bins: int, times: int = 1,
        right: bool = False,
    ) -> tuple[Output, Output, Output]:  # fmt: skip
        """Have clients count each value by edges [bins + 1, C]; the peers, counts, and Metadata.

        The counts are int64 [bins + 3, C], C being `times` F: values up to the first edge, in the
        bins, beyond the last edge, and missing. A value on an edge is in the bin that ends there;
        with `right` in the one that begins there, and one on the last edge in the last bin.
        """
        compute = BackendSlot("compute")
        settings = PooledCountsConfig(rows=bins + 3)
        pool = cohort_slot("counts", PooledCounts, self.clients, settings)
        asked = self.ask(g, name, peers, edges)
        exact, missing = self.rows(g, asked.received)
        if times > 1:
            exact = compute.concat(g, *[exact] * times, axis=1)
            missing = compute.concat(g, *[missing] * times, axis=1)
        shape = compute.shape(g, exact)
        # A binary search in 2^steps - 1 edges, of which those beyond the last are endless.
        steps = (bins + 1).bit_length()
        zeros = compute.expand(g, g.tensor([[0]], types.TENSOR_INT64), shape)
        columns = compute.slice(g, shape, [1], [2])
        more = compute.concat(g, g.constant([(1 << steps) - bins - 2]), columns, axis=0)
        endless = compute.expand(g, g.tensor([[math.inf]], types.TENSOR_DOUBLE), more)
        one = compute.concat(g, g.constant([bins + 1]), columns, axis=0)
        padded = compute.concat(g, compute.expand(g, asked.received, one), endless, axis=0)
        cell = zeros
        below = compute.less_or_equal if right else compute.less
        for step in reversed(range(steps)):
            at = compute.add(g, cell, g.constant((1 << step) - 1))
            passed = below(g, compute.gather_elements(g, padded, at, axis=0), exact)
            jump = compute.mul(
                g, compute.cast(g, passed, to=types.TENSOR_INT64), g.constant(1 << step)
            )
            cell = compute.add(g, cell, jump)
        if right:
            on_last = compute.equal(g, exact, self.row(g, padded, bins))
            cell = compute.where(g, on_last, g.constant(bins), cell)
        cell = compute.where(g, missing, g.constant(bins + 2), cell)
        empty = compute.expand(
            g, g.tensor([[0]], types.TENSOR_INT64),
            compute.concat(g, g.constant([bins + 3]), columns, axis=0),
        )  # fmt: skip
        ones = compute.expand(g, g.tensor([[1]], types.TENSOR_INT64), shape)
        asked.respond(compute.scatter_elements(g, empty, cell, ones, axis=0, reduction="add"))
        pool.contribute_all(g, asked.responses)
        return asked.responses.peers, *pool.aggregate(g)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "ranges" only where ends are found."""
        bound = dict(super().bindings())
        if self.low is not None:
            return bound
        slot = cohort_slot("ranges", PooledRanges, self.clients)
        return {**bound, **bound_slots((slot, PooledRanges))}

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        both = (self.low is None) == (self.high is None)
        self.require("high", both, "given where `low` is, and left out where it is not")
        if self.low is not None:
            low, high = self._numbers("low"), self._numbers("high")
            fits = len({low.size, high.size} - {1}) < 2
            self.require("high", fits, "one number, or as many as `low`")
            self.require("high", bool((low < high).all()), f"above low={self.low!r}, everywhere")

    def _numbers(self, name: str) -> Any:
        wanted = "a finite number, or one for each column"
        try:
            found = np.array(getattr(self, name), np.float64)
        except (TypeError, ValueError) as error:
            raise self.bad(f"{name} has to be {wanted}: {error}") from error
        good = found.ndim < 2 and found.size > 0 and bool(np.isfinite(found).all())
        self.require(name, good, wanted)
        return found


class FederatedHistograms(CountingProgram):
    """A histogram of each column over the examples of all clients, exact, as numpy counts it.

    Input "tick" (Trigger): the server asks a cohort of clients for the ends of their columns,
    unless `low` and `high` give them, and then for their counts between edges of equal distance.

    Outputs, all on the server: "counts" (int64 [bins, F]), "edges" (float64 [bins + 1, F]; [bins +
    1, 1] where all columns have the same given ends), "below", "above" and "missing" (int64 [F]:
    values beyond given ends, NaN and infinities), and "stats" (Metadata: num_samples,
    contributors, refused, …).

    A value on an edge is in the bin that begins there; on the last edge, in the last bin. A column
    of one value has ends half a unit below and above it.
    """

    bins: int = 32

    def body(self, g: Graph) -> None:
        """Record the requests."""
        self.check()
        compute = BackendSlot("compute")
        peers, low, high = self.ends(g, g.input("tick", types.TRIGGER))
        half = g.tensor(0.5, types.TENSOR_DOUBLE)
        same = compute.equal(g, low, high)
        edges = self.edges(
            g, compute.where(g, same, compute.sub(g, low, half), low),
            compute.where(g, same, compute.add(g, high, half), high), self.bins,
        )  # fmt: skip
        _, counts, stats = self.counted(g, "counts", peers, edges, bins=self.bins, right=True)
        rows = {"below": 0, "above": self.bins + 1, "missing": self.bins + 2}
        for name, at in rows.items():
            g.output(name, compute.squeeze(g, self.row(g, counts, at), [0]))
        g.output("counts", self.row(g, counts, 1, self.bins + 1))
        g.output("edges", edges)
        g.output("stats", stats)

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_counts(bins=1)
        self.require("bins", self.bins <= MAX_BINS, f"an integer of at most {MAX_BINS}")


class FederatedQuantiles(CountingProgram):
    """Quantiles of each column over the examples of all clients, to a tolerance.

    Input "tick" (Trigger): the server asks a cohort of clients for the ends of their columns,
    unless `low` and `high` give them; then, round by round, how many values lie between the
    edges of `bins` parts of the interval that a quantile is in, until that is short enough. The
    interval narrows from pass to pass (Munro and Paterson, 1980, doi:10.1016/0304-3975(80)90061-4),
    by edges instead of samples: nothing but ends and counts leaves a client.

    The quantile q of n values is the least value with at least q n values up to it (numpy's method
    "inverted_cdf"). What is returned is at most "error" above it.

    Outputs, all on the server: "quantiles" and "error" (float64 [Q, F]), "missing" (int64 [F]: NaN
    and infinities, which are left out), and "stats" (Metadata: num_samples, contributors, …, of
    the last round). The error is at most `tolerance` times the distance of the ends; it is infinite
    where a quantile is beyond given ends, or where clients went away between two rounds and
    took it with them. A column without values has NaN.
    """

    quantiles: Sequence[float] = (0.25, 0.5, 0.75)
    tolerance: float = 1e-6  # of the distance of a column's ends
    bins: int = 64  # that a round cuts an interval into

    def body(self, g: Graph) -> None:
        """Record the rounds."""
        self.check()
        compute, real = BackendSlot("compute"), types.TENSOR_DOUBLE
        found, bins = self.low is None, self.bins
        peers, low, high = self.ends(g, g.input("tick", types.TRIGGER))
        asked_for = len(self.quantiles)
        zero, endless, nan = (g.tensor(value, real) for value in (0.0, math.inf, math.nan))
        lost, stats, missing, total = zero, zero, zero, zero
        shares, wide = zero, None
        for at in range(self.rounds):
            first = at == 0
            # In the first round all quantiles are in the same interval.
            edges = self.edges(g, low, high, bins)
            peers, counts, stats = self.counted(
                g, f"counts{at}", peers, edges, bins=bins, times=1 if first else asked_for
            )
            if first:
                counts = compute.concat(g, *[counts] * asked_for, axis=1)
                width = compute.slice(g, compute.shape(g, counts), [1], [2])
                wide = compute.concat(g, g.constant([bins + 1]), width, axis=0)
                spread = compute.concat(g, *[edges] * asked_for, axis=1)
                # [[q0, q0, …, q1, q1, …]]: the columns of each quantile side by side.
                each = np.reshape(np.array(self.quantiles, np.float64), (-1, 1))
                columns = compute.div(g, width, g.constant([asked_for]))
                laid = compute.concat(g, g.constant([asked_for]), columns, axis=0)
                shares = compute.reshape(
                    g, compute.expand(g, g.tensor(each, real), laid), g.constant([1, -1])
                )
                if not found:  # of the same ends for all columns
                    spread = self._spread(g, edges, laid)
                edges = spread
            edges = compute.expand(g, edges, wide)
            values = self.row(g, counts, 0, bins + 2)
            missing = self.row(g, counts, bins + 2)
            sums = compute.cum_sum(g, values, g.constant(0))
            total = compute.cast(g, self.row(g, sums, bins + 1), to=real)
            rank = compute.max(
                g, compute.ceil(g, compute.mul(g, shares, total)), g.tensor(1.0, real)
            )
            open_ = compute.less(g, low, high)
            passed = compute.less(g, compute.cast(g, sums, to=real), rank)
            cell = compute.reduce_sum(g, compute.cast(g, passed, to=types.TENSOR_INT64), [0])
            cell = compute.min(g, cell, g.constant(bins + 1))
            last = self.row(g, edges, bins)
            lows = compute.concat(g, self.row(g, edges, 0), edges, axis=0)
            highs = compute.concat(g, edges, last, axis=0)
            low, high = (compute.gather_elements(g, ends, cell, axis=0) for ends in (lows, highs))
            beyond = compute.greater(g, cell, g.constant(bins))
            if not (first and found):  # else the least value of all is the first edge
                # Where the ends have met already, that is the value itself.
                at_low = compute.and_(g, compute.equal(g, cell, g.constant(0)), open_)
                beyond = compute.or_(g, beyond, at_low)
            lost = compute.where(g, beyond, endless, lost)
        empty = compute.equal(g, total, zero)
        flat = g.constant([asked_for, -1])
        for name, value in (
            ("quantiles", compute.where(g, empty, nan, high)),
            ("error", compute.where(g, empty, zero, compute.add(
                g, compute.sub(g, high, low), lost
            ))),
        ):  # fmt: skip
            g.output(name, compute.reshape(g, value, flat))
        of_each = compute.reshape(g, missing, flat)
        g.output("missing", compute.squeeze(g, self.row(g, of_each, 0), [0]))
        g.output("stats", stats)

    def _spread(self, g: Graph, edges: Output, laid: Output) -> Output:
        """Return edges [B, F] or [B, 1] for each column of each quantile, [B, Q F]."""
        compute = BackendSlot("compute")
        columns = compute.slice(g, laid, [1], [2])
        one = compute.expand(
            g, edges, compute.concat(g, g.constant([self.bins + 1]), columns, axis=0)
        )
        return compute.concat(g, *[one] * len(self.quantiles), axis=1)

    @property
    def rounds(self) -> int:
        """The rounds of counting that the tolerance takes."""
        return max(1, math.ceil(round(math.log(1 / self.tolerance) / math.log(self.bins), 9)))

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        wanted = "one or more numbers between 0 and 1"
        listed: Any = self.quantiles
        good = isinstance(listed, list | tuple) and all(
            isinstance(q, int | float) and not isinstance(q, bool) and 0 <= q <= 1 for q in listed
        )
        self.require("quantiles", good and len(listed) > 0, wanted)
        self.require_counts(bins=2)
        self.require("bins", self.bins <= MAX_BINS, f"an integer of at most {MAX_BINS}")
        self.require_numbers("tolerance")
        self.require("tolerance", self.tolerance <= 1, "at most 1")
        most = f"larger: it takes more than {MAX_COUNTING_ROUNDS} rounds with bins={self.bins}"
        self.require("tolerance", self.rounds <= MAX_COUNTING_ROUNDS, most)
