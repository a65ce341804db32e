"""The agreement of peers on what their data mean: the program that comes before the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bbnode.components import (
    DeploymentError,
    PooledStatistics,
    RoundPlan,
    SecAggClient,
    SecAggConfig,
    SecAggServer,
    concrete,
)
from bbnode.dsl import (
    BackendSlot,
    DataSourceSlot,
    Graph,
    Output,
    ProtocolSlot,
    Request,
    peer_lists,
    types,
)
from bbnode.programs.statistics import FederatedStatistics, Numbers
from bbnode.programs.training import TRAIN_SLOT

_PROTOCOL = "secagg"
_SUMS = 3  # of each column: of ones, values and squares


class AgreeOnSchema(FederatedStatistics):
    """Columns, classes, categories, ranges and statistics of the data of all clients.

    While the clients connect, the server unites what their slots "data" say: columns by name, and
    all classes and categories. Input "tick" (Trigger) then makes a round of `FederatedStatistics`,
    with its outputs. `bbnode data agreed -c SERVER.toml --write pyproject.toml` writes the result
    into the project of the program that trains, and with `--statistics FILE` the scaling too.

    With `secure`, the server learns the sums over all clients alone (Bonawitz et al., 2017,
    doi:10.1145/3133956.3133982): of counts, values and squares. Names can't be united in secret,
    nor can ranges: `columns`, `low` and `high` have to say them, and `classes` where labels have
    names; values beyond the range count as its ends do in the mean of a client.
    """

    secure: bool = False
    columns: Sequence[str] = ()  # names, in their order; of `secure`
    classes: Sequence[str] = ()  # names of the labels, likewise
    low: Numbers = None  # of `secure`: a number for all columns or for each
    high: Numbers = None  # likewise
    most_examples: int = 100_000  # of `secure`: a client with more counts as one with so many
    corrupt: float = 1 / 3  # of `secure`: part of the clients that may collude with the server
    threshold: int = 0  # of `secure`: clients that have to stay; 0: the fewest that are safe

    def __post_init__(self) -> None:
        """Have the program say what is listed."""
        super().__post_init__()
        said: dict[str, Any] = {}
        if self.columns:
            said["columns"] = list(self.columns)
        if self.classes:
            said["classes"] = list(self.classes)
        self.schema = {**self.schema, **({TRAIN_SLOT: said} if said else {})}

    def body(self, g: Graph) -> None:
        """Record the round."""
        if not self.secure:
            super().body(g)
            return
        self.check()
        data, compute = DataSourceSlot(TRAIN_SLOT), BackendSlot("compute")
        server, client = self._sides()
        tick = g.input("tick", types.TRIGGER)
        peers = self.cohort(g, tick)

        asked = self.ask(g, "secagg_keys", peers, server.begin(g, peers))
        asked.respond(client.advertise_keys(g, asked.received))
        kept, listing = server.collect_keys(g, asked.responses)
        asked = self.ask(g, "secagg_shares", _of(g, asked, kept), listing)
        asked.respond(client.share_keys(g, asked.received))
        kept = server.collect_letters(g, asked.responses)

        asked = self.ask(g, "statistics", _of(g, asked, kept), tick)
        table, told = data.statistics(g, after=asked.received)
        current = client.current_round(g, after=asked.received)
        mail = g.request("secagg_mail", asked.received.sender, current)
        mail.respond(server.mail(g, mail.received))
        letters = mail.responses.of(asked.received.sender)
        masked, nothing = client.mask(g, letters, self._shares(g, table), told)
        asked.respond(g.bundle([masked, nothing]))
        kept, listing = server.collect_vectors(g, asked.responses)

        asked = self.ask(g, "secagg_survivors", _of(g, asked, kept), listing)
        asked.respond(client.confirm(g, asked.received))
        kept, signatures = server.collect_signatures(g, asked.responses)
        asked = self.ask(g, "secagg_unmask", _of(g, asked, kept), signatures)
        asked.respond(client.reveal(g, asked.received))
        shares, stats = server.unmask(g, asked.responses)

        merged = self._merged(g, shares, asked.responses.count)
        _, mean, squares, low, high = (self._row(g, merged, row) for row in range(5))
        count = self._row(g, merged, 0)
        told_all = self.ask(g, "standardize", asked.responses.peers, merged)
        taken = data.standardize(g, told_all.received)
        told_all.respond(data.on_data_loaded(g, after=taken))
        g.output("mean", mean)
        g.output("std", compute.sqrt(g, compute.div(g, squares, count)))
        g.output("minimum", low)
        g.output("maximum", high)
        g.output("stats", stats)
        g.output("told", told_all.responses.count)

    def _shares(self, g: Graph, table: Output) -> Output:
        """Return a client's sums as parts of the most that they may be, float32 [3 F] from 0 to 1.

        `table` is float64 [5, F]. Per value v in the range, (v - low) / (high - low) is summed.
        """
        compute = BackendSlot("compute")
        count, mean, squares = (self._row(g, table, row) for row in range(_SUMS))
        most, low, span = self._constants(g)
        zero, one = (g.tensor(value, types.TENSOR_DOUBLE) for value in (0.0, 1.0))
        part = compute.min(g, compute.div(g, count, most), one)
        at = compute.div(g, compute.sub(g, mean, low), span)
        at = compute.max(g, compute.min(g, at, one), zero)
        spread = compute.div(g, compute.div(g, squares, count), compute.mul(g, span, span))
        second = compute.min(g, compute.add(g, spread, compute.mul(g, at, at)), one)
        sums = compute.concat(
            g, part, compute.mul(g, part, at), compute.mul(g, part, second), axis=0
        )
        return compute.cast(g, sums, to=types.TENSOR_FLOAT)

    def _merged(self, g: Graph, shares: Output, clients: Output) -> Output:
        """Return the statistics of all clients as one client's are, float64 [5, F]."""
        compute = BackendSlot("compute")
        exact = compute.cast(g, shares, to=types.TENSOR_DOUBLE)
        size = len(self.columns)
        part, first, second = (
            compute.slice(g, exact, [at * size], [(at + 1) * size], [0]) for at in range(_SUMS)
        )
        most, low, span = self._constants(g)
        zero, one = (g.tensor(value, types.TENSOR_DOUBLE) for value in (0.0, 1.0))
        at = compute.div(g, first, part)
        variance = compute.sub(g, compute.div(g, second, part), compute.mul(g, at, at))
        variance = compute.max(g, variance, zero)
        number = compute.cast(g, clients, to=types.TENSOR_DOUBLE)
        counted = compute.round(g, compute.mul(g, compute.mul(g, part, most), number))
        # One number for all columns: they were rounded apart under the masks.
        count = compute.max(g, compute.reduce_max(g, counted), one)
        counts = compute.add(g, compute.mul(g, part, zero), count)
        squares = compute.mul(g, compute.mul(g, variance, count), compute.mul(g, span, span))
        mean = compute.add(g, low, compute.mul(g, at, span))
        rows = (counts, mean, squares, low, compute.add(g, low, span))
        shape = g.constant([1, size])
        return compute.concat(g, *(compute.reshape(g, row, shape) for row in rows), axis=0)

    def _constants(self, g: Graph) -> tuple[Output, Output, Output]:
        low, high = self._range()
        return (
            g.tensor(float(self.most_examples), types.TENSOR_DOUBLE),
            g.tensor(low, types.TENSOR_DOUBLE),
            g.tensor(high - low, types.TENSOR_DOUBLE),
        )

    def _range(self) -> tuple[Any, Any]:
        size = len(self.columns)
        try:
            low, high = (
                np.broadcast_to(np.asarray(end, np.float64), (size,)).copy()
                for end in (self.low, self.high)
            )
        except (TypeError, ValueError) as error:
            raise self.bad(f"low and high have to be numbers, one or {size}: {error}") from error
        good = np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()
        self.require("high", bool(good), "above `low`, everywhere, and both finite")
        return low, high

    def _row(self, g: Graph, table: Output, at: int) -> Output:
        return BackendSlot("compute").gather(g, table, g.constant(at), axis=0)

    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Send a value to clients and wait for their answers."""
        if not self.secure:
            return super().ask(g, name, peers, value)
        quorum = RoundPlan.of(self._settings).quorum
        return g.request(name, peers, value, quorum=quorum, deadline=float(self.deadline_s))

    @property
    def _settings(self) -> SecAggConfig:
        return SecAggConfig(
            size=_SUMS * len(self.columns),
            clients=self.clients,
            corrupt=float(self.corrupt),
            threshold=self.threshold,
            clip=1.0,
            equal_weights=True,
        )

    def _sides(self) -> tuple[ProtocolSlot, ProtocolSlot]:
        agreed = asdict(self._settings)
        del agreed["members"], agreed["pardoned"]  # each node's own
        return (
            ProtocolSlot("secagg", _PROTOCOL, concrete=concrete(SecAggServer, **agreed)),
            ProtocolSlot("masking", _PROTOCOL, concrete=concrete(SecAggClient, **agreed)),
        )

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; no aggregator where sums are secret."""
        bound = dict(super().bindings())
        if self.secure:
            del bound["statistics"]
        else:
            assert bound["statistics"] is PooledStatistics
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require("secure", isinstance(self.secure, bool), "True or False")
        for name in ("columns", "classes"):
            listed: Any = getattr(self, name)
            good = isinstance(listed, list | tuple) and all(isinstance(e, str) for e in listed)
            self.require(name, good and len({*listed}) == len(listed), "names, each once")
        if not self.secure:
            self.require("low", self.low is None and self.high is None, "left out: they are found")
            return
        self.require(
            "columns",
            bool(self.columns),
            "listed with secure=True: names can't be united in secret",
        )
        given = self.low is not None and self.high is not None
        self.require("low", given, "given with `high`: ranges can't be found in secret")
        self.require("test", not self.test, "left out with secure=True")
        self.require("quorum", not self.quorum, "0: `threshold` says how many have to stay")
        self.require_counts(clients=2, threshold=0, most_examples=1)
        part = 0 <= float(self.corrupt) < 1
        self.require("corrupt", part, "a number from 0 to below 1")
        _ = self._range()
        try:
            _ = RoundPlan.of(self._settings)
        except DeploymentError as error:
            raise self.bad(str(error)) from error


def _of(g: Graph, asked: Request, kept: Output) -> Output:
    """Return the peers that answered and whose answers count."""
    return peer_lists.filter_list(g, asked.responses.peers, kept)
