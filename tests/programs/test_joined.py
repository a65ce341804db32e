"""Methods of privacy beside every other program, in both orders: they act, or are refused by name.

Rule: no pair compiles to a program in which a client's update leaves without its masks, or the
server makes of answers what has no noise; whoever wrote the step that would do so.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bbnode.programs as programs
from bbnode.components import OnnxModel, concrete, offload
from bbnode.dsl import BackendSlot, BadArgument, Graph, ModelSlot, Module, Output, Request, types
from bbnode.dsl.errors import RecordingError
from bbnode.engine import steps
from bbnode.programs import (
    DPFedAvg,
    DPSGDTraining,
    FedAdam,
    FedAvgM,
    FederatedTraining,
    FedPer,
    FedProx,
    ReadyProgram,
    Scaffold,
    SecureTraining,
)
from bbnode.programs.parts import AllAtOnce
from bbnode.sim import SimNode
from tests.programs.files import compiled
from tests.programs.strategies.federation import SOFTMAX, Federation, normalised

METHODS: tuple[type[FederatedTraining], ...] = (SecureTraining, DPFedAvg, DPSGDTraining)
OTHERS = [
    found
    for name in programs.__all__
    if inspect.isclass(found := getattr(programs, name))
    and issubclass(found, ReadyProgram)
    and found is not ReadyProgram
]
STRATEGIES = [each for each in OTHERS if issubclass(each, FederatedTraining)]
QUIET: dict[str, Any] = {
    "example_noise": 1e-3, "example_epsilon": 1e30, "noise": 1e-3, "epsilon": 1e30,
}  # fmt: skip
# What a strategy needs beside the arguments that all have, so that a refusal is for the pair.
NEEDED: dict[str, dict[str, Any]] = {
    "FedPer": {"local": ("W1",)},
    "FedRep": {"local": ("W1",)},
    "FedBN": {"model": normalised()},
    "DiLoCo": {"inner_steps": 3, "epochs": 1, "learning_rate": 0.01},
    "Scaffold": {"clip": 8.0},
}


PAIRS = [
    (one, other)
    for one, other in itertools.permutations(OTHERS, 2)
    if {one, other} & {*METHODS} and not (issubclass(one, other) or issubclass(other, one))
]
MARKS = {SecureTraining: b"Unmask", DPFedAvg: b"Release", DPSGDTraining: b"bbnode.PrivateModel"}


def joined(*bases: type, **given: Any) -> Any:
    """Return a program of these bases, with what each of them needs."""
    cls = type("Joined", bases, {})
    wanted = {**SOFTMAX, **QUIET, "codec": None}
    if {"FedPer", "FedRep"} & {base.__name__ for base in bases}:
        layout = FederatedTraining(model=SOFTMAX["model"]).layout
        wanted["local"] = tuple(layout)[-1:]
    for base in bases:
        wanted |= {k: v for k, v in NEEDED.get(base.__name__, {}).items() if k != "local"}
    wanted |= given
    return cls(**{k: v for k, v in wanted.items() if k in cls.arguments()})


def ids(pair: Any) -> str:
    return "-".join(each.__name__ for each in pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_a_pair_is_refused_by_the_names_of_both_or_compiles(pair: tuple[type, type]) -> None:
    try:
        found = compiled(joined(*pair)).SerializeToString()
    except BadArgument as error:
        said = str(error)
        assert [each for each in pair if each.__name__ not in said] == []
    else:
        acts = [method for method, mark in MARKS.items() if mark in found]
        assert {*pair} & {*METHODS} <= {*acts}


def compiles(*bases: type) -> bool:
    try:
        compiled(joined(*bases))
    except BadArgument:
        return False
    return True


class Watched(Federation):
    """A federation of which all that clients send is kept, and what they mask or train."""

    def __init__(self, folder: Path, program: FederatedTraining) -> None:
        super().__init__(folder, program, keys=True)
        self.sent: list[bytes] = []
        self.clear: list[np.ndarray] = []
        self.norms: list[float] = []
        self.net._observe = self._observe
        for node in self.nodes:
            if isinstance(program, SecureTraining):
                self._listen(node)
        if isinstance(program, DPFedAvg):
            self._measure()

    def _observe(self, _now: int, node: SimNode, step: Any) -> None:
        if isinstance(step, steps.SendEnvelope) and node is not self.server:
            self.sent.append(b"".join(map(bytes, step.parts)))

    def _listen(self, node: SimNode) -> None:
        masking = node.component("masking")
        mask = masking.mask

        @offload
        def heard(ctx: Any, mail: Any, tensor: Any, metadata: Any) -> Any:
            self.clear.append(np.array(tensor))
            return mask(ctx, mail, tensor, metadata)

        masking.mask = heard

    def _measure(self) -> None:
        privacy = self.server.component("privacy")
        release = privacy.release

        @offload
        def measured(ctx: Any, responses: Any) -> Any:
            self.norms += [float(np.linalg.norm(part[0])) for _, part in responses.responses]
            return release(ctx, responses)

        privacy.release = measured

    def in_clear(self) -> list[np.ndarray]:
        """Return the vectors of which four numbers in a row were sent as they are."""
        trained = [np.asarray(node.component("local").params(None)) for node in self.nodes]
        everything = b"".join(self.sent)
        return [
            vector
            for vector in (*self.clear, *trained)
            for at in range(0, vector.size - 3, 2)
            if np.count_nonzero(part := vector[at : at + 4]) > 2 and part.tobytes() in everything
        ]


def check(folder: Path, *bases: type) -> None:
    """Make two rounds of a pair that compiles, and look at what crosses."""
    federation = Watched(folder, joined(*bases))
    before = federation.start
    *_, found = federation.rounds(2)
    model = np.asarray(found["model"])
    assert np.isfinite(model).all()
    assert np.abs(model - before).max() > 1e-5
    assert len(federation.sent) >= 6
    if SecureTraining in bases:
        assert len(federation.clear) == 6
        assert federation.in_clear() == []
    if DPFedAvg in bases:
        assert found["stats"]["epsilon"] > 0
        assert found["stats"]["noise_deviation"] > 0
        assert 0 < max(federation.norms) <= 1.0 + 1e-5
    if DPSGDTraining in bases:
        assert all(node.component("local").charges for node in federation.nodes)


def of_a_star(pair: tuple[type, type]) -> bool:
    """True for strategies with the rounds of `FederatedTraining`, which `Federation` makes."""
    return all(
        each in STRATEGIES and type(each.course) is AllAtOnce and each.__name__ != "FLTrustTraining"
        for each in pair
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*filter(of_a_star, PAIRS)], ids=ids)
def test_a_pair_that_compiles_trains_and_sends_nothing_in_clear(
    tmp_path: Path, pair: tuple[type, type]
) -> None:
    if compiles(*pair):
        check(tmp_path, *pair)


TRIPLES = [
    (FedProx, FedAdam, SecureTraining),
    (Scaffold, FedAdam, SecureTraining),
    (FedPer, FedAvgM, SecureTraining),
    (DPSGDTraining, FedAdam, SecureTraining),
    (FedProx, FedAdam, DPFedAvg),
    (DPSGDTraining, FedProx, FedAvgM),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bases", [p for each in TRIPLES for p in itertools.permutations(each)], ids=ids
)
def test_triples_train_and_send_nothing_in_clear(tmp_path: Path, bases: tuple[type, ...]) -> None:
    check(tmp_path, *bases)


@pytest.mark.parametrize(
    "bases",
    [
        (Scaffold, SecureTraining),  # which sent every update unmasked
        (SecureTraining, Scaffold),  # in which the model never moved
        (SecureTraining, FedPer),
        (DPSGDTraining, FedAdam, SecureTraining),
        (FedAdam, DPFedAvg, FedProx),
    ],
    ids=ids,
)
def test_methods_of_privacy_act_in_any_order(tmp_path: Path, bases: tuple[type, ...]) -> None:
    check(tmp_path, *bases)


def test_what_is_seen_in_clear_is_seen(tmp_path: Path) -> None:
    """The test of the tests: plain FedAvg sends weights."""
    federation = Watched(tmp_path, joined(FederatedTraining))
    _ = federation.start
    _ = [*federation.rounds(1)]
    assert federation.in_clear()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name",
    ["CyclicTraining", "HierarchicalTraining", "FederatedSGD", "GossipTraining", "Pipeline",
     "FedBuff", "QFedAvg", "FedNova", "FederatedHistograms", "VectorStore", "FLTrustTraining"],
)  # fmt: skip
def test_programs_of_another_shape_are_refused_by_name(
    method: type[FederatedTraining], name: str
) -> None:
    other = getattr(programs, name)
    acts = {"CyclicTraining", "HierarchicalTraining", "FedBuff", "FedNova", "FLTrustTraining"}
    for pair in ((method, other), (other, method)):
        if method is DPSGDTraining and name in acts:
            compiled(joined(*pair))
            continue
        with pytest.raises(BadArgument) as caught:
            compiled(joined(*pair))
        assert method.__name__ in str(caught.value)
        assert name in str(caught.value)


# -- subclasses that override steps ----------------------------------------------------------------


def plain_respond(self: Any, g: Graph, asked: Request) -> None:
    tensor, told = self.client_update(g, asked)
    asked.respond(g.bundle([tensor, told]))


def plain_protected(self: Any, g: Graph, asked: Request, tensor: Output, told: Output) -> Any:
    return tensor, told


def mean_of_answers(self: Any, g: Graph, asked: Request) -> Any:
    return self.aggregated(g, asked, "aggregator")


def plain_body(self: Any, g: Graph) -> None:
    FederatedTraining.check(self)
    peers = FederatedTraining.cohort(self, g, g.input("tick", types.TRIGGER))
    asked = FederatedTraining.ask(self, g, "round", peers, FederatedTraining.sent(self, g, peers))
    tensor, told = FederatedTraining.client_update(self, g, asked)
    asked.respond(g.bundle([tensor, told]))
    mean, stats = self.aggregated(g, asked, "aggregator")
    weights = FederatedTraining.server_update(self, g, mean, stats)
    loaded = self.server_model.load_parameters(g, weights)
    self.results(g, asked.responses.peers, weights, stats, loaded)


def check_nothing(self: Any) -> None:
    """Skip the checks of the bases."""


def sends_it_elsewhere(self: Any, g: Graph, asked: Request) -> Any:
    tensor, told = FederatedTraining.client_update(self, g, asked)
    g.output("seen", g.net_out("seen", asked.received.sender, tensor))
    return tensor, told


def sends_it_by_a_detour(self: Any, g: Graph, asked: Request) -> Any:
    """By a scaled copy, which a second model keeps until the next round."""
    tensor, told = FederatedTraining.client_update(self, g, asked)
    spare = self.held_model("spare")
    kept = spare.params(g, after=asked.received)
    doubled = BackendSlot("compute").add(g, tensor, tensor)
    spare.load_parameters(g, doubled)
    g.output("seen", g.net_out("seen", asked.received.sender, kept))
    return tensor, told


def sends_the_loss(self: Any, g: Graph, weights: Output) -> Any:
    model = self.client_model
    _, examples, labels = self.examples(g, self.train_data(), weights)
    loss = model.compute_loss(g, examples, labels)
    told = model.train(g, epochs=1, batch=4, after=loss)
    asks = g.request("losses", self.cohort_slot.current_view(g, after=weights), loss)
    asks.respond(asks.received)
    return self.answer(g, model.params(g), weights), told


def trains_another(self: Any, g: Graph, weights: Output) -> Any:
    model = ModelSlot("another", concrete=concrete(OnnxModel, self._config))
    model.load_parameters(g, weights)
    told = model.train(g, epochs=1, batch=4, after=weights)
    return self.answer(g, model.params(g), weights), told


def cohort_without_keys(self: Any, g: Graph, tick: Output) -> Output:
    return self.cohort_slot.sample(g, n=self.clients, after=tick)


def keeps_the_mean(self: Any, g: Graph, asked: Request) -> Any:
    """Takes the noisy mean, and hands the exact one out beside it."""
    exact, _ = self.aggregated(g, asked, "aggregator")
    mean, stats = self.gathered(g, asked)
    g.output("exact", exact)
    return mean, stats


OVERRIDES: list[tuple[type, dict[str, Callable[..., Any]]]] = [
    *((method, {"respond": plain_respond}) for method in METHODS),
    *((method, {"protected": plain_protected}) for method in (SecureTraining, DPFedAvg)),
    *((method, {"gathered": mean_of_answers}) for method in (SecureTraining, DPFedAvg)),
    *((method, {"combined": mean_of_answers}) for method in (SecureTraining, DPFedAvg)),
    *((method, {"body": plain_body}) for method in METHODS[:2]),
    *((method, {"client_update": sends_it_elsewhere}) for method in METHODS[:2]),
    *((method, {"client_update": sends_it_by_a_detour}) for method in METHODS[:2]),
    *((method, {"local_training": sends_the_loss}) for method in METHODS),
    (DPSGDTraining, {"local_training": trains_another}),
    (DPSGDTraining, {"trained_model": FederatedTraining.trained_model}),
    (SecureTraining, {"cohort": cohort_without_keys}),
    (DPFedAvg, {"combined": keeps_the_mean}),
]


@pytest.mark.parametrize("unchecked", [False, True], ids=["", "unchecked"])
@pytest.mark.parametrize(("method", "own"), OVERRIDES, ids=lambda each: getattr(
    each, "__name__", "-".join(each) if isinstance(each, dict) else None))  # fmt: skip
def test_a_subclass_that_undoes_the_method_is_refused(
    method: Any, own: dict[str, Any], unchecked: bool
) -> None:
    """Also where it skips the checks of arguments: what was recorded is looked at as well."""
    checks = {"check": check_nothing} if unchecked else {}
    cls = type("Mine", (method,), {**own, **checks})
    fields = {**SOFTMAX, **QUIET}
    program = cls(**{k: v for k, v in fields.items() if k in cls.arguments()})
    with pytest.raises(RecordingError) as caught:
        program.build()
    assert method.__name__ in str(caught.value)
    assert "Mine" in str(caught.value)


def test_a_step_that_changes_nothing_of_it_is_taken(tmp_path: Path) -> None:
    class Scaled(SecureTraining):
        def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
            tensor, told = super().client_update(g, asked)
            return BackendSlot("compute").mul(g, tensor, g.constant(0.5)), told

        def combined(self, g: Graph, asked: Request) -> tuple[Output, Output]:
            mean, stats = super().combined(g, asked)
            return BackendSlot("compute").mul(g, mean, g.constant(2.0)), stats

        def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:
            return super().server_update(g, mean, stats)

    check(tmp_path, Scaled)


def test_a_server_may_train_on_what_is_nobody_s_secret() -> None:
    class Tuned(SecureTraining):
        public_slots = ("tuned", "proxy")

        def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:
            model = self.trained_model("tuned")
            model.load_parameters(g, super().server_update(g, mean, stats))
            model.train(g, epochs=1, batch=8)
            return model.params(g)

    Tuned(**SOFTMAX).build()
    Tuned.public_slots = ()
    with pytest.raises(BadArgument, match="name the slot in public_slots"):
        Tuned(**SOFTMAX).build()


def test_a_program_that_is_called_is_looked_at_as_well() -> None:
    class Mine(SecureTraining):
        check = check_nothing
        client_update = sends_it_elsewhere

    class Outer(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            inner = Mine(**SOFTMAX).call().input("tick", tick).build(g)
            g.output("model", inner.output("model"))

    with pytest.raises(BadArgument, match="SecureTraining"):
        Outer().build()


def test_a_module_inside_of_which_nothing_is_seen_may_send_nothing() -> None:
    class Inner(Module):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x", types.TENSOR_FLOAT))

    class Mine(SecureTraining):
        def client_update(self, g: Graph, asked: Request) -> tuple[Output, Output]:
            tensor, told = super().client_update(g, asked)
            copied = Inner().call().input("x", tensor).build(g).output("y")
            g.output("seen", g.net_out("seen", asked.received.sender, copied))
            return tensor, told

    with pytest.raises(BadArgument, match="sends or hands out 'seen'"):
        Mine(**SOFTMAX).build()
