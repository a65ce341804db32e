"""Federated training of any model: FedAvg, and what other methods are parts of.

Rule: each part of a round is a step of `FederatedTraining`, so that a method is what it replaces
and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

from bbnode.components import (
    Aggregator,
    Codec,
    ConnectedView,
    Metadata,
    MetricsMean,
    PeerSelector,
    concrete,
)
from bbnode.components.settings import stored_settings
from bbnode.dsl import (
    AggregatorSlot,
    BackendSlot,
    CodecSlot,
    ConcreteSpec,
    Fence,
    Function,
    Graph,
    ModelSlot,
    Output,
    PeerSelectorSlot,
    Request,
    types,
)
from bbnode.programs.arguments import bound_slots, cohort_slot, enough
from bbnode.programs.composing import RoundPart, checks_of, label_of, parts_of, step
from bbnode.programs.parts.plain import Aggregated, AllAtOnce, Coded, Combine, Course
from bbnode.programs.training import TEST_SLOT, TRAIN_SLOT, TrainingProgram, component_of

PLACES = ("server", "clients", "both", "none")

AGGREGATOR_SLOT = "aggregator"
MIN_CODED_VALUES = 1 << 16  # that one code may always stand for: 256 KiB of float32


class AskingProgram(TrainingProgram):
    """Base of programs in which a server asks a cohort of clients for their part."""

    home = "server"
    PARTS: ClassVar[tuple[str, ...]] = ("train", "course")

    course: Course = AllAtOnce()

    @step
    def cohort(self, g: Graph, tick: Output) -> Output:
        """Choose the clients of a round, once it is begun."""
        return self.cohort_slot.sample(g, n=self.clients, after=tick)

    @property
    def cohort_slot(self) -> PeerSelectorSlot:
        """The slot of who chooses clients."""
        given = self.course.selector if isinstance(self.course.selector, ConcreteSpec) else None
        return PeerSelectorSlot("cohort", peer_class="client", concrete=given)

    @step
    def heard(self, g: Graph, asked: Request) -> None:
        """Tell the selector of the answers to a request, where it learns from them."""
        if self.selector_class.observes:
            self.cohort_slot.observed(g, asked.responses)

    @property
    def answers_tell(self) -> bool:
        """Return True if an answer has the Metadata of the client's training."""
        return False

    @property
    def selector_class(self) -> type[PeerSelector]:
        """The class of what chooses clients. Raises BadArgument for none."""
        if "selector" not in self.course.settings():
            return ConnectedView
        found: type[PeerSelector] = component_of(
            self, "selector", PeerSelector, "bbnode.ConnectedView"
        )
        return found

    @step
    def ask(self, g: Graph, name: str, peers: Output, value: Output) -> Request:
        """Send a value to clients and wait for their answers, as quorum and deadline say."""
        return self.requested(g, name, peers, value, self.quorum or enough(self.clients))

    def requested(self, g: Graph, name: str, peers: Output, value: Output, quorum: int) -> Request:
        """Send a value to peers, so many of whose answers are enough at the deadline."""
        return g.request(
            name, peers, value, quorum=quorum, deadline=float(self.deadline_s),
            codec=self.codec_of_questions(),
        )  # fmt: skip

    def codec_of_questions(self) -> CodecSlot | None:
        """Return the slot that encodes what `ask` sends; None: it travels as it is."""
        return None

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.course.check(self, checks_of(self, self.course))

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots."""
        bound = super().bindings()
        if isinstance(self.course.selector, ConcreteSpec):
            return bound  # the program says it, with its settings
        return {**bound, "cohort": self.selector_class}


class FederatedTraining(AskingProgram):
    """One round of FedAvg (McMahan et al., 2017, arXiv:1602.05629); invoke it once per round.

    Input "tick" (Trigger) starts a round on the server: it asks a cohort of clients to train its
    weights, each on its own examples, and takes the mean, weighted by their numbers of examples.

    Outputs, all on the server: "loss" and the `metrics` (without any: "accuracy" of a loss of
    classes, "mae" of one of values, "binary_accuracy" of one of probabilities), float32 [];
    "stats" (Metadata of the aggregate: num_samples, contributors, …); "model" (the new weights,
    [P] float32).

    `evaluate` says where the new weights are evaluated:

    - "server": on the examples of its slot "test".
    - "clients": on each client that took part, on examples that it does not train on: its slots
      "data" and "held_out" are the parts "train" and "test" of one data set. The outputs are
      the means, weighted by numbers of examples.
    - "both": then what the clients measured is "clients_loss" and so on.
    - "none".

    A method is a part of a program, or several: `FederatedTraining(client=Proximal(0.5),
    server=Adam(tau=1e-2))` (`bbnode.programs.parts`). The settings of its parts are arguments too,
    by their names: `clients`, `quorum`, `deadline_s`, `selector`, `aggregator`, `deltas`,
    `weighted`, `codec`, `codec_down`. Programs such as `FedProx` are these parts by their papers'
    names.

    A strategy of one's own is a subclass that overrides steps of a round, in this order: `cohort`,
    `sent`, `client_update`, `combined`, `server_update`; and `server_model` or `client_model`,
    where these have other settings. What keeps answers secret has the two steps around the wire,
    `protected` and `gathered`.
    """

    # From the outermost to what is asked last, of the parts that add to a step.
    PARTS = (
        "course", "privacy", "personal", "client", "combine", "server", "compress", "train",
    )  # fmt: skip

    evaluate: str | None = None  # None: "server", or what a part wishes
    client: RoundPart | None = (
        None  # how a client trains: Proximal, ControlVariates, …; None: plainly
    )
    server: RoundPart | None = (
        None  # the step of the server: SGD, Momentum, Adam, …; None: to the mean
    )
    combine: Combine = Aggregated()  # of answers: Krum, Median, …, or an Aggregator
    privacy: RoundPart | Sequence[RoundPart] | None = None  # Masks, ClientPrivacy, ExamplePrivacy
    compress: Coded = Coded()  # of what travels, or a Codec of answers
    personal: RoundPart | None = None  # what stays on a client: Layers, OwnModel

    @step
    def body(self, g: Graph) -> None:
        """Record a round."""
        self.check()
        peers = self.cohort(g, g.input("tick", types.TRIGGER))
        asked = self.ask(g, "round", peers, self.sent(g, peers))

        # On each client. Ops of one slot fire in the order in which they stand here.
        self.respond(g, asked)

        # Back on the server.
        self.heard(g, asked)
        mean, stats = self.combined(g, asked)
        weights = self.server_update(g, mean, stats)
        loaded = self.server_model.load_parameters(g, weights)
        self.results(g, asked.responses.peers, weights, stats, loaded)

    @step
    def respond(self, g: Graph, asked: Request) -> None:
        """Answer a request, on who was asked, with its `client_update`."""
        tensor, told = self.client_update(g, asked)
        if not self.weighted:
            told = g.constant(Metadata(num_samples=1), after=tensor)
        tensor, told = self.protected(g, asked, tensor, told)
        asked.respond(g.bundle([tensor, told]), codec=self.codec_of_answers())

    @step
    def protected(
        self, g: Graph, asked: Request, tensor: Output, told: Output  # noqa: ARG002
    ) -> tuple[Output, Output]:  # fmt: skip
        """Return an answer as it leaves the client: the last step there, after all strategies."""
        return tensor, told

    def results(
        self, g: Graph, peers: Output, weights: Output, stats: Output, loaded: Output
    ) -> None:
        """Evaluate the new weights, once the server's model has `loaded` them; make the outputs."""
        if self.evaluate in ("server", "both"):
            _, loss, *means = self.evaluation(g, self.server_model, self.test_data(), loaded)
            self._hand_out(g, "", loss, means)
        if self.holds_out:
            prefix = "clients_" if self.evaluate == "both" else ""
            outgoing = self.outgoing(g, weights)
            loss, *means = self._asked(g, peers, outgoing)
            self._hand_out(g, prefix, loss, means)
        g.output("stats", stats)
        g.output("model", weights)

    @property
    @step
    def answers_tell(self) -> bool:
        """Return True if an answer has the Metadata of the client's training: if it is weighted."""
        return bool(self.weighted)

    @property
    @step
    def server_model(self) -> ModelSlot:
        """The slot of the server's model."""
        return self.held_model("global")

    @property
    @step
    def client_model(self) -> ModelSlot:
        """The slot of the model that a client trains."""
        return self.trained_model("local")

    @property
    @step
    def evaluated_model(self) -> ModelSlot:
        """The slot of the model that a client evaluates."""
        return self.client_model

    @step
    def sent(self, g: Graph, peers: Output) -> Output:
        """Return what travels to `peers`: the server's weights, [P] float32."""
        return self.outgoing(g, self.server_model.params(g, after=peers))

    @step
    def outgoing(self, g: Graph, weights: Output) -> Output:  # noqa: ARG002
        """Return what travels to clients of the server's weights [P]: all of them."""
        return weights

    @step
    def client_loads(self, g: Graph, received: Output) -> Output:
        """Load on a client the `outgoing` that it received; a CommandId."""
        return self.client_model.load_parameters(g, received)

    @step
    def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Train on a client from `asked.received`; return its tensor [P] and its Metadata.

        The tensor is the new weights, or with `deltas` what they differ by from the received ones;
        the Metadata has `num_samples`, the weight of the answer.
        """
        self.client_loads(g, asked.received)
        return self.local_training(g, asked.received)

    @step
    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        """Train the client's model, which has loaded `weights`; return as `client_update` does."""
        model, ready = self.client_model, self.ready(g, weights)
        trained = model.train(g, epochs=self.epochs, batch=self.batch, after=ready)
        return self.answer(g, model.params(g), weights), trained

    @step
    def ready(self, g: Graph, after: Output) -> Output | None:
        """Keep what a client evaluates on out of its training, which begins after the result."""
        return self.train_part(g, after) if self.holds_out else None

    @step
    def trained_model(self, slot: str, **other: Any) -> ModelSlot:
        """Return a slot for the model where it is trained, with `other` settings of it."""
        return super().trained_model(slot, **other)

    def keep_fence(self, keeper: RoundPart, fence: Fence, function: Function) -> None:
        """Raise BadArgument where values of examples leave, in what was recorded, unprotected."""
        mine, kept = type(self).__name__, label_of(type(self), keeper)
        fence = replace(fence, open_slots=(TEST_SLOT, *self.public_slots))
        missing = fence.missing(function)
        if missing:
            raise self.bad(
                f"{kept} does not act in {mine}, which never comes to its {', '.join(missing)}; "
                "call its steps by super(), or leave it out"
            )
        leaks = fence.leaks(function)
        if leaks:
            raise self.bad(
                f"{mine} sends or hands out {leaks[0]}, which tells of examples and is not "
                f"protected by {kept}; send nothing but what client_update returns, or name the "
                "slot in public_slots where its examples are nobody's secret"
            )

    def _keep_guarded(self) -> None:
        """Raise BadArgument where an author's class has its own of a step that a part keeps."""
        for part in parts_of(self):
            unmade = [name for name in part.claims if not part.has(name)]
            for name in (*part.guards, *unmade):
                owner = next((base for base in type(self).__mro__ if name in vars(base)), None)
                if owner is not None and owner not in FederatedTraining.__mro__:
                    raise self.bad(
                        f"{owner.__name__} has a {name} of its own, by which what "
                        f"{label_of(type(self), part)} promises would not hold; change another "
                        "step of a round, such as server_update"
                    )

    @step
    def check_recorded(self, function: Function) -> None:
        """Check what was recorded, as parts say. Raises BadArgument."""
        super().check_recorded(function)
        self._keep_guarded()

    # Slots whose examples are nobody's secret, as of a server's own: see `dsl.Fence.open_slots`.
    public_slots: ClassVar[tuple[str, ...]] = ()

    @property
    @step
    def moved_size(self) -> int:
        """The length of what an answer says of weights."""
        return self.size

    @property
    @step
    def extra_numbers(self) -> int:
        """The numbers of another kind that an answer has behind what it says of weights.

        What clips, encodes or scales answers would bend them.
        """
        return 0

    @property
    @step
    def answer_size(self) -> int:
        """The length of the tensor that a client answers."""
        return self.moved_size + self.extra_numbers

    @step
    def answer(self, g: Graph, trained: Output, weights: Output) -> Output:
        """Return the tensor that stands for trained weights, [P], as `deltas` says."""
        return BackendSlot("compute").sub(g, trained, weights) if self.deltas else trained

    @step
    def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Combine the answers on the server; return a tensor [P] and its Metadata."""
        return self.gathered(g, asked)

    @step
    def gathered(self, g: Graph, asked: Request) -> tuple[Output, Output]:
        """Return the mean of the answers, as `protected` sent them: the first step on the server.

        A tensor [`answer_size`], and its Metadata.
        """
        return self.aggregated(g, asked, AGGREGATOR_SLOT)

    def aggregated(self, g: Graph, asked: Request, name: str) -> tuple[Output, Output]:
        """Combine the answers on who asked, by the aggregator in a slot."""
        slot = self.aggregator_slot(name)
        slot.contribute_all(g, asked.responses)
        return slot.aggregate(g)

    @step
    def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:  # noqa: ARG002
        """Return the new weights [P], which the server's model loads, from what was combined."""
        if not self.deltas:
            return mean
        weights = self.server_model.params(g, after=mean)
        return BackendSlot("compute").add(g, weights, mean)

    def aggregator_slot(self, name: str = AGGREGATOR_SLOT) -> AggregatorSlot:
        """Return a slot that combines answers; its tensors have the model's size."""
        given, found = self.combine.rule, self.aggregator_class
        settings = stored_settings(given.config) if isinstance(given, ConcreteSpec) else {}
        if "shape" in {field.name for field in fields(found.Config)} and not settings.get("shape"):
            # All peers have the model, so a tensor of another size is a lie, whoever has sent more.
            settings["shape"] = (self.answer_size,)
        # A default is for cohorts of usual sizes; a number that an author gives is meant.
        room = {field.name: field.default for field in fields(found.Config)}.get("max_contributors")
        is_default = settings.get("max_contributors", room) == room
        if isinstance(room, int) and room < self.clients and is_default:
            settings["max_contributors"] = self.clients
        return AggregatorSlot(name, concrete=concrete(found, **settings))

    def codec_of_answers(self) -> CodecSlot | None:
        """Return the slot that encodes what clients answer; None: it travels as it is."""
        return self._coder("codec")

    def codec_of_questions(self) -> CodecSlot | None:
        """Return the slot that encodes what clients get; None: it travels as it is."""
        return self._coder("codec_down")

    def _coder(self, argument: str) -> CodecSlot | None:
        given = getattr(self, argument)
        if given is None:
            return None
        found = self.codec_class(argument)
        # A code may stand for some more than the model, as a strategy may send more, but not for a
        # million times as much.
        most = max(MIN_CODED_VALUES, 8 * self.size, self.answer_size)
        # Deltas are summed up, so that what a code lost may come later; weights are not.
        told: dict[str, Any] = {"max_values": most, "error_feedback": argument == "codec"}
        # Of a codec of matrices: a parameter is [first axis, the others], as its paper has it.
        shapes = [shape for shape in self.layout.values() if math.prod(shape)]
        rows = [shape[0] if len(shape) > 1 else 1 for shape in shapes]
        pairs = ((n, math.prod(shape) // n) for n, shape in zip(rows, shapes, strict=True))
        told["matrices"] = (*pairs,) * (self.answer_size // max(1, self.size))
        known = {field.name for field in fields(found.Config)}
        settings = {name: value for name, value in told.items() if name in known}
        if isinstance(given, ConcreteSpec):
            settings |= stored_settings(given.config)
        return CodecSlot(argument, concrete=concrete(found, **settings))

    @step
    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" and "metrics" only where they are used."""
        bound = {**super().bindings()}
        if self.evaluate in ("server", "both") and self.test_data().concrete is None:
            bound[TEST_SLOT] = self.source
        if self.holds_out:
            slot = cohort_slot("metrics", MetricsMean, self.course.clients)
            bound |= bound_slots((slot, MetricsMean))
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        self.require_one_of("evaluate", PLACES)
        self._keep_guarded()
        for part in parts_of(self):
            for name, (value, why) in part.needs.items():
                now = getattr(self, name)
                self.require(name, now == value, f"{str(value).lower()}: {why}")
            if part is not self.course:
                part.check(self, checks_of(self, part))

    @property
    def deltas(self) -> bool:
        """True if clients answer how far they moved the weights, and not the weights."""
        return bool(self._wished("deltas", self.combine.deltas, default=False))

    @property
    def weighted(self) -> bool:
        """True if an answer weighs as many examples as it is made of, and not one."""
        return bool(self._wished("weighted", self.combine.weighted, default=True))

    def _wished(self, name: str, said: Any, *, default: Any) -> Any:
        """Return what the author says, or what a part wishes, or a default."""
        wished = (each.wishes[name] for each in parts_of(self) if name in each.wishes)
        return next(wished, default) if said is None else said

    def _settle(self) -> None:
        self.evaluate = self._wished("evaluate", self.evaluate, default="server")

    @property
    def home(self) -> str:  # type: ignore[override]
        """The class of peer that begins a round."""
        return self.course.home

    def codec_class(self, argument: str) -> type[Codec]:
        """Return the class of a codec. Raises BadArgument for none."""
        found: type[Codec] = component_of(self, argument, Codec, "bbnode.Int8Codec")
        return found

    @property
    def aggregator_class(self) -> type[Aggregator]:
        """The class of what combines answers. Raises BadArgument for none."""
        return self.combine.taken(self)

    @property
    def holds_out(self) -> bool:
        """Return True where clients evaluate."""
        return self.evaluate in ("clients", "both")

    def _asked(self, g: Graph, peers: Output, outgoing: Output) -> list[Output]:
        """Have those that took part evaluate the weights; return the weighted means."""
        asked = g.request("evaluation", peers, outgoing, quorum=1, deadline=float(self.deadline_s))
        loaded = self.client_loads(g, asked.received)
        compute = BackendSlot("compute")
        flat = g.constant([-1])
        found = [
            compute.reshape(g, each, flat)
            for each in self.evaluation(g, self.evaluated_model, self.held_out(), loaded)
        ]
        asked.respond(compute.concat(g, *found, axis=0))

        metrics = cohort_slot("metrics", MetricsMean, self.clients)
        metrics.contribute_all(g, asked.responses)
        mean, _ = metrics.aggregate(g)
        loss = compute.gather(g, mean, g.constant(0), axis=0)
        begins = list(itertools.accumulate((each.size for each in self.measures), initial=1))
        return [
            loss,
            *(
                compute.slice(g, mean, g.constant([first]), g.constant([last]))
                for first, last in itertools.pairwise(begins)
            ),
        ]

    def _hand_out(self, g: Graph, prefix: str, loss: Output, means: list[Output]) -> None:
        for name, value in self.found(g, loss, means).items():
            g.output(prefix + name, value)


class FederatedSGD(AskingProgram):
    """One step of federated SGD (McMahan et al., 2017, section 3); invoke it once per step.

    Input "tick" (Trigger) starts a step on the server: it asks a cohort of clients for the gradient
    at its weights, each of its next `batch` examples, takes the mean, weighted by their numbers,
    and makes one step of `optimizer`, whose state, `schedule` and clipping are the server's.

    Outputs, all on the server: "loss", the mean of what the clients found at the weights before the
    step; "model" (the weights after it, [P] float32); "stats" (Metadata of the mean:
    num_samples, contributors, …); "test_loss" and "test_" with the name of each of `metrics`,
    float32 [], where `evaluate` says so: of the new weights, on its slot "test".
    """

    evaluate: bool = True

    def body(self, g: Graph) -> None:
        """Record a step."""
        self.check()
        compute = BackendSlot("compute")
        server_model, client_model = self.held_model("global"), self.held_model("local")

        peers = self.cohort(g, g.input("tick", types.TRIGGER))
        asked = self.ask(g, "step", peers, server_model.params(g, after=peers))

        # On each client.
        loaded = client_model.load_parameters(g, asked.received)
        number, examples, labels = self.examples(g, self.batches(), loaded)
        grads, loss = client_model.gradient(g, examples, labels)
        one = g.constant([1])
        found = [compute.reshape(g, each, one) for each in (number, loss)]
        asked.respond(compute.concat(g, *found, grads, axis=0))

        # Back on the server: the mean of [loss, gradient].
        self.heard(g, asked)
        mean_slot = cohort_slot("gradients", MetricsMean, self.clients)
        mean_slot.contribute_all(g, asked.responses)
        mean, stats = mean_slot.aggregate(g)
        grads = compute.slice(g, mean, g.constant([1]), g.constant([1 + self.size]))
        stepped = server_model.step(g, grads)
        g.output("loss", compute.gather(g, mean, g.constant(0), axis=0))
        g.output("model", server_model.params(g, after=stepped))
        g.output("stats", stats)
        if self.evaluate:
            _, loss, *means = self.evaluation(g, server_model, self.test_data(), stepped)
            for name, value in self.found(g, loss, means).items():
                g.output(f"test_{name}", value)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots; "test" only where it is used."""
        slot = cohort_slot("gradients", MetricsMean, self.clients)
        bound = {**super().bindings(), **bound_slots((slot, MetricsMean))}
        if self.batches().concrete is not None:
            del bound[TRAIN_SLOT]
        if self.evaluate and self.test_data().concrete is None:
            bound[TEST_SLOT] = self.source
        return bound

    def check(self) -> None:
        """Check the arguments. Raises BadArgument."""
        super().check()
        if type(self.course) is not AllAtOnce:
            raise self.bad(f"course={self.course} has to be AllAtOnce(…)")
        self.require("evaluate", isinstance(self.evaluate, bool), "true or false")
        self.require("epochs", self.epochs == 1, "1: a step has one batch of each client")
        one = self._config.accumulate == 1
        self.require("accumulate", one, "1: the gradients of clients are what is accumulated")
