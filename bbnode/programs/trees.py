"""Boosted trees that clients grow together: each round adds the trees of all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from bbnode.components import (
    BoostedTrees,
    BoostedTreesConfig,
    HeldTrees,
    MetricsMean,
    PooledTrees,
    PooledTreesConfig,
    concrete,
)
from bbnode.dsl import (
    BackendSlot,
    DataSourceSlot,
    Graph,
    ModelSlot,
    Output,
    types,
)
from bbnode.ir.errors import BbnodeError
from bbnode.programs.arguments import bound_slots, cohort_slot
from bbnode.programs.federated import PLACES
from bbnode.programs.metrics import Metric, metric
from bbnode.programs.statistics import MeasuringProgram
from bbnode.programs.training import HELD_OUT_SLOT, NOT_OF_ALL, TEST_SLOT, TRAIN_SLOT

_END = (1 << 63) - 1  # of a slice that goes to the end


class FederatedTrees(MeasuringProgram):
    """A round of boosting, in which each client grows trees: bagging over clients.

    Input "tick" (Trigger) starts a round on the server: it sends its trees to a cohort of clients;
    each grows `trees` more for each output on its own examples, on the gradient of the loss at what
    it was sent, and answers these. The server adds them, each client's scaled by its share of the
    examples, so that the model moves by the clients' mean (federated bagging as of XGBoost in
    NVFlare and Flower). The first round is a constant.

    Outputs, all on the server: "stats" (Metadata of the new trees: num_samples, contributors,
    trees, loss before the round, refused, …); "model" (all trees, [P] float32, as of
    `BoostedTrees`); and where `evaluate` says so, as in `FederatedTraining`, "loss" (squared
    error, or cross-entropy) and the `metrics` (without any "accuracy", or "mae"), float32
    [], of the new trees.

    `bbnode export` writes the server's slot "global" as ONNX, that needs no other library.
    """

    features: int = 0  # numbers of an example; has to be given
    classes: int = 0  # of labels 0, 1, …; 0: labels are values
    trees: int = 1  # that a client grows for each output in a round
    leaves: int = 31  # this and the next six: see `BoostedTreesConfig`
    max_depth: int = 0
    min_leaf: int = 20
    learning_rate: float = 0.1
    l2: float = 0.0
    max_leaf: float = 1e6
    max_trees: int = 10_000
    seed: int = 0
    evaluate: str = "server"  # or "clients", "both", "none"
    metrics: tuple[str, ...] = ()  # see `bbnode.programs.metric`; empty: "accuracy" or "mae"

    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        compute = BackendSlot("compute")
        config = self._config
        held = ModelSlot("global", concrete=concrete(HeldTrees, config))
        grower = ModelSlot("local", concrete=concrete(BoostedTrees, config))
        peers = self.cohort(g, g.input("tick", types.TRIGGER))
        asked = self.ask(g, "round", peers, held.params(g, after=peers))

        # On each client.
        received = asked.received
        grower.load_parameters(g, received)
        ready = self._part("train").on_data_loaded(g, after=received) if self._asks else received
        stats = grower.train(g, epochs=self.trees, batch=1, after=ready)
        grown = compute.slice(g, grower.params(g, after=stats), compute.shape(g, received), [_END])
        asked.respond(g.bundle([grown, stats]))

        # Back on the server.
        made = BoostedTrees(config)
        settings = PooledTreesConfig(
            features=self.features, leaves=self.leaves, outputs=made.outputs, trees=self.trees,
            max_leaf=self.max_leaf,
        )  # fmt: skip
        pool = cohort_slot("trees", PooledTrees, self.clients, settings)
        pool.contribute_all(g, asked.responses)
        added, told = pool.aggregate(g)
        loaded = held.apply_delta(g, added)
        model = held.params(g, after=loaded)
        if self.evaluate in ("server", "both"):
            _, *found = self._evaluated(g, held, self._tested(), model)
            self._hand_out(g, "", found)
        if self._asks:
            again = self.ask(g, "evaluation", asked.responses.peers, model)
            there = grower.load_parameters(g, again.received)
            flat = g.constant([-1])
            measured = self._evaluated(g, grower, self._part("test", HELD_OUT_SLOT), there)
            again.respond(
                compute.concat(g, *[compute.reshape(g, each, flat) for each in measured], axis=0)
            )
            mean = cohort_slot("metrics", MetricsMean, self.clients)
            mean.contribute_all(g, again.responses)
            means, _ = mean.aggregate(g)
            sizes = itertools.accumulate((1, *(each.size for each in self.measures)), initial=0)
            found = [
                compute.slice(g, means, g.constant([first]), g.constant([last]))
                for first, last in itertools.pairwise(sizes)
            ]
            self._hand_out(g, "clients_" if self.evaluate == "both" else "", found)
        g.output("stats", told)
        g.output("model", model)

    def _evaluated(
        self, g: Graph, model: ModelSlot, data: DataSourceSlot, after: Output
    ) -> list[Output]:
        """Return the number of examples, the loss, and the means of the metrics, on a source."""
        compute = BackendSlot("compute")
        batch, labels = data.next_batch(g, after=after)
        batch = g.expect(batch, types.TENSOR_FLOAT)
        labels = g.expect(labels, types.TENSOR_INT64 if self.classes else types.TENSOR_FLOAT)
        number = compute.gather(g, compute.shape(g, labels), g.constant(0), axis=0)
        made = model.forward(g, batch)
        if not self.classes:
            labels = compute.reshape(g, labels, [-1, 1])
        means = [each.means(g, compute, made, labels) for each in self.measures]
        loss = model.compute_loss(g, batch, labels)
        return [compute.cast(g, number, to=types.TENSOR_FLOAT), loss, *means]

    def _hand_out(self, g: Graph, prefix: str, found: list[Output]) -> None:
        compute = BackendSlot("compute")
        loss, *means = found
        # As clients' means it is [1].
        g.output(f"{prefix}loss", compute.reduce_sum(g, loss, keepdims=False))
        for each, value in zip(self.measures, means, strict=True):
            g.output(prefix + each.name, each.value(g, compute, value))

    def _told(self, **settings: Any) -> dict[str, Any]:
        """Return the data source with what the program knows; a node may say otherwise."""
        known = {field.name for field in dataclasses.fields(self.source.Config)}
        if not self.classes and "label_dtype" in known:
            settings["label_dtype"] = "float32"
        if "split" in settings and "split" not in known:
            raise self.bad(
                f"data={self.source.TYPE_NAME!r} has no setting `split`, so that a client can't "
                "hold examples out; evaluate on the server, or take another data source"
            )
        return {"concrete": concrete(self.source, **settings)} if settings else {}

    def _tested(self) -> DataSourceSlot:
        """Return the slot "test", with the metrics that some examples do not have."""
        needy = tuple(each.name for each in self.measures if each.name in NOT_OF_ALL)
        known = {field.name for field in dataclasses.fields(self.source.Config)}
        settings = {"metrics": needy} if needy and "metrics" in known else {}
        return DataSourceSlot(TEST_SLOT, **self._told(**settings))

    def _part(self, split: str, slot: str = TRAIN_SLOT) -> DataSourceSlot:
        return DataSourceSlot(slot, **self._told(split=split))

    @property
    def _asks(self) -> bool:
        """Return True where clients evaluate."""
        return self.evaluate in ("clients", "both")

    @cached_property
    def measures(self) -> tuple[Metric, ...]:
        """The metrics. Raises BadArgument for one that does not fit."""
        kind = "classes" if self.classes else "values"
        names = self.metrics or (("accuracy",) if self.classes else ("mae",))
        made = tuple(metric(name, classes=self.classes) for name in names)
        for each in made:
            if each.labels != kind:
                raise self.bad(f"metrics: {each.name!r} is of {each.labels}, and these of {kind}")
        return made

    @property
    def _config(self) -> BoostedTreesConfig:
        given = {each.name: getattr(self, each.name) for each in _SETTINGS}
        return BoostedTreesConfig(**given)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" and "metrics" only where they are used."""
        bound = dict(super().bindings())
        if self._asks:
            del bound[TRAIN_SLOT]
            slot = cohort_slot("metrics", MetricsMean, self.clients)
            bound |= bound_slots((slot, MetricsMean))
        if self.evaluate in ("server", "both") and self._tested().concrete is None:
            bound[TEST_SLOT] = self.source
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_one_of("evaluate", PLACES)
        self.require_counts(features=1, classes=0, trees=1, leaves=2, max_depth=0, min_leaf=1,
                            max_trees=1, seed=0)  # fmt: skip
        self.require("classes", self.classes != 1, "0 (labels are values), or 2 or more")
        self.require_numbers("learning_rate", "max_leaf")
        self.require_not_negative("l2")
        listed: Any = self.metrics
        names = isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)
        once = names and len({*listed}) == len(listed)
        self.require("metrics", once, 'names of metrics, each once, such as ("accuracy", "auc")')
        try:
            BoostedTrees(self._config)
        except BbnodeError as error:
            raise self.bad(str(error)) from error
        _ = self.measures


_SETTINGS = dataclasses.fields(BoostedTreesConfig)
