"""Two strategies in one program: it trains as both say, or says which of them to leave out."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode import programs
from bbnode.components import values
from bbnode.dsl import BackendSlot, BadArgument, Graph, Output
from bbnode.programs import (
    AsynchronousTraining,
    Ditto,
    DPFedAvg,
    DPSGDTraining,
    FedAdam,
    FederatedTraining,
    FedNova,
    FedPer,
    FedProx,
    FLTrustTraining,
    HierarchicalTraining,
    QFedAvg,
    ReadyProgram,
    Scaffold,
    SplitLearning,
    steps,
)
from bbnode.programs.parts import (
    Adam,
    ClientPrivacy,
    ControlVariates,
    LocalTraining,
    Masks,
    Momentum,
    OwnModel,
    Proximal,
)
from bbnode.sim import Network
from bbnode.verify import TOLERANCE, reference
from bbnode.verify.reference import clients
from bbnode.verify.rounds import CLIENTS, EDGES, SERVERS, by_formula, server_slots
from bbnode.verify.runs import SOFTMAX as VERIFIED
from bbnode.verify.runs import Star
from tests.programs.files import compiled, examples
from tests.programs.strategies.federation import SIZES, SOFTMAX, normalised

BASES = {"FederatedTraining", "AsynchronousTraining", "FedOpt"}  # of others, and FedAvg itself
READY: dict[str, type[ReadyProgram]] = {
    name: each
    for name in programs.__all__
    if inspect.isclass(each := getattr(programs, name)) and issubclass(each, ReadyProgram)
}
STRATEGIES = [
    name
    for name, each in READY.items()
    if issubclass(each, FederatedTraining) and name not in BASES
]
# Of each strategy: arguments that it needs, or that make it differ from the others.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "FedProx": {"proximal": 0.5},
    "FedPer": {"local": ("*.bias",)},
    "FedRep": {"local": ("*.bias",)},
    "FedBN": {"model": normalised()},
    "FedAvgM": {"server_momentum": 0.8},
    "FedAdagrad": {"tau": 0.02},
    "FedAdam": {"tau": 0.02},
    "FedYogi": {"tau": 0.02},
    "QFedAvg": {"q": 2.0},
    "FedBuff": {"buffer": 2},
    "DiLoCo": {"inner_steps": 3, "epochs": 1, "learning_rate": 4e-4},
    "HierarchicalTraining": {"selector": "bbnode.ConstantView", "clients": 2, "quorum": 1},
    "DPFedAvg": {"epsilon": 1e6},
    "DPSGDTraining": {"example_epsilon": 1e6},
}
PAIRS = [
    (a, b)
    for a, b in itertools.permutations(STRATEGIES, 2)
    if not issubclass(READY[a], READY[b]) and not issubclass(READY[b], READY[a])
]


def made(*names: str, **more: Any) -> Any:
    """Return a program of these strategies."""
    given = dict(SOFTMAX)
    for name in names:
        given |= ARGUMENTS.get(name, {})
    if "FedBN" in names and "local" in given:
        given["local"] = ("head",)
    cls: Any = type("Both", tuple(READY[name] for name in names), {})
    if issubclass(cls, AsynchronousTraining):
        del given["clients"]
    return cls(**{**given, **more})


def accepted() -> list[tuple[str, str]]:
    """Return the pairs that are recorded; each other one is refused by a BadArgument."""
    found = []
    for pair in PAIRS:
        try:
            made(*pair).build()
        except BadArgument:
            continue
        found.append(pair)
    return found


def digest(*names: str) -> str:
    return hashlib.sha256(compiled(made(*names)).SerializeToString()).hexdigest()


@pytest.mark.slow
def test_no_strategy_of_a_pair_is_dropped_in_silence() -> None:
    alone = {name: digest(name) for name in STRATEGIES}
    good = accepted()
    assert len(good) > len(PAIRS) // 2
    both = {pair: digest(*pair) for pair in good}
    assert [pair for pair in good if both[pair] in (alone[pair[0]], alone[pair[1]])] == []
    assert [(a, b) for a, b in good if both[a, b] != both.get((b, a))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pairs")
    for i, count in enumerate(SIZES):
        examples(made, f"c{i}", count, seed=i)
    examples(made, "root", 10, seed=9)
    return made


def failures_of_two_rounds(folder: Path, program: Any) -> list[str]:
    """Run a program; return each op that failed, and a round that gave no finite model."""
    artifact, net = compiled(program), Network(1, keys=True)

    def data(name: str) -> dict[str, Any]:
        return {"data": {"path": str(folder / f"{name}.npz")}}

    ids = [net.add(f"c{i}", artifact, ["client"], config=data(f"c{i}")) for i in range(len(SIZES))]
    if isinstance(program, HierarchicalTraining):
        peers = [str(each.peer_id) for each in ids]
        for name, members in (("edge-0", peers[:2]), ("edge-1", peers[2:])):
            net.add(name, artifact, ["edge"], config={"cohort": {"peers": members}})
    own = data("root") if isinstance(program, FLTrustTraining) else {}
    server = net.add("server", artifact, ["server"], config=own)
    net.run_until_idle()
    for number in range(1, 3):
        begins = ids if program.home == "client" else [server]
        for node in begins:
            node.invoke(program.home, {"tick": values.TRIGGER})
            net.run_until_idle()
        failed = [str(each) for node in net.nodes for each in node.failures()]
        models = server.values("model")
        if failed or len(models) < number or not np.isfinite(models[-1]).all():
            return failed or ["no model"]
    return []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_pair_that_is_recorded_runs(folder: Path) -> None:
    failed = {}
    for pair in accepted():
        faults = failures_of_two_rounds(folder, made(*pair))
        if faults:
            failed[pair] = faults
    assert failed == {}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("Scaffold", "FedProx"), r"client=ControlVariates\(…\), client=Proximal\("),
        (("FedProx", "Scaffold"), "FedProx and Scaffold do not go together"),
        (("QFedAvg", "FedProx"), "QFedAvg and FedProx do not go together"),
        (("DiLoCo", "FedProx"), "DiLoCo and FedProx do not go together"),
        (("FedRep", "FedProx"), "FedRep and FedProx .* both define the training of a client"),
        (("Scaffold", "QFedAvg"), "Scaffold and QFedAvg do not go together"),
        (("Scaffold", "FedNova"), "Scaffold and FedNova do not go together"),
        (("FedAvgM", "FedAdam"), "FedAvgM and FedAdam do not go together"),
        (("DiLoCo", "FedAdam"), "DiLoCo and FedAdam do not go together"),
        (("FedYogi", "FedAvgM"), "FedYogi and FedAvgM do not go together"),
        (("Ditto", "FedPer"), "Ditto and FedPer do not go together"),
        (
            ("Scaffold", "FedPer"),
            "Scaffold .* FedPer .* define how an answer stands",
        ),
        (("FedPer", "FLTrustTraining"), "to which no other compares"),
        (("Scaffold", "FLTrustTraining"), "to which no other compares"),
        (("HierarchicalTraining", "FLTrustTraining"), "edges train nothing"),
        (("CyclicTraining", "HierarchicalTraining"), "CyclicTraining and HierarchicalTraining"),
        (("FedAsync", "CyclicTraining"), "FedAsync and CyclicTraining do not go together"),
        (("DPFedAvg", "SecureTraining"), "DPFedAvg and SecureTraining do not go together"),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, tuple) else "",
)
def test_a_pair_of_which_one_would_have_no_effect_is_refused(
    names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(BadArgument, match=said):
        made(*names).build()


@pytest.mark.parametrize("first", READY)
def test_programs_of_different_kinds_do_not_go_together(first: str) -> None:
    """A round of one is never that of the other, and says so."""
    bodies = {name: vars(each).get("body") for name, each in READY.items()}
    for second, each in READY.items():
        one = READY[first]
        if not (bodies[first] and bodies[second]) or issubclass(one, each) or issubclass(each, one):
            continue
        with pytest.raises(BadArgument, match=rf"{first} and {second} "):
            type("Both", (one, each), {})()


def test_one_of_two_is_taken_where_the_class_says_which() -> None:
    with pytest.raises(BadArgument, match="Scaffold and FedProx do not go together"):

        class Middle(Scaffold, FedProx):
            proximal = 0.5

    class Chosen(Scaffold, FedProx):
        client = Proximal(0.5)

    class Own(FedProx):
        proximal = 0.5

    class Both(Own, READY["FedAvgM"]):  # type: ignore[name-defined, misc]
        clients = 2

    chosen, both = Chosen(**SOFTMAX), Both()
    assert chosen.client == both.client == Proximal(0.5)
    assert (both.clients, both.server) == (2, Momentum())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"client": Adam()}, r"client=Adam.* one of .*Proximal; this one is server=Adam\(\)"),
        ({"client": 3}, "client=3 has to be one of .*; or did you mean 'clients'"),
        ({"server": (Adam(), Momentum())}, "server: Adam and Momentum are the same step"),
        ({"train": None}, "train=None has to be one of LocalTraining"),
        ({"course": "ring"}, "course='ring' has to be one of AllAtOnce, Buffered, InTurn"),
        ({"privacy": [Masks(), ClientPrivacy()]}, r"privacy=Masks\(\) and privacy=ClientPrivacy"),
        ({"proximal": 0.5}, r"no argument 'proximal'; it is of client=Proximal\(…\)"),
        ({"clints": 3}, "no argument 'clints'; did you mean 'clients'"),
    ],
)
def test_what_is_no_part_of_an_argument_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        FederatedTraining(model=SOFTMAX["model"], **given)


def test_a_setting_of_two_parts_is_said_in_one_of_them() -> None:
    class Both(Ditto, FedProx):
        pass

    with pytest.raises(BadArgument, match=r"proximal is a setting of .* say it in one of these"):
        Both(**SOFTMAX, proximal=0.5)
    both = Both(**SOFTMAX, client=Proximal(0.5), personal=OwnModel(0.2))
    assert (both.client.proximal, both.personal.proximal) == (0.5, 0.2)
    # One that means the same to both is one.
    privacy = type("Private", (DPFedAvg, DPSGDTraining), {"accountant": "pld"})
    assert [each.accountant for each in privacy().privacy] == ["pld", "pld"]


def test_an_author_may_replace_a_step_of_what_he_knows_only() -> None:
    class Own(FedProx):
        def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
            model, ready = self.client_model, self.ready(g, weights)
            trained = model.train(g, epochs=1, batch=1, after=ready)
            return self.answer(g, model.params(g), weights), trained

    class Halved(FederatedTraining):
        def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:
            return BackendSlot("compute").mul(g, mean, g.constant(0.5))

    class Wider(FederatedTraining):
        def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:
            return super().server_update(g, mean, stats)

    Own(**SOFTMAX).build()
    type("Both", (Wider, FedAdam), {})(**SOFTMAX).build()
    for bases, given in (((Halved, FedAdam), {}), ((Halved,), {"server": Adam()})):
        with pytest.raises(BadArgument, match=r"Halved has its own of server_update.*Adam"):
            type("Both", bases, {})(**SOFTMAX, **given).build()
    with pytest.raises(BadArgument, match=r"Own has a local_training of its own.*ControlVariates"):
        type("Both", (Own,), {"client": ControlVariates()})(**SOFTMAX).build()


# --- arguments --------------------------------------------------------------------------------


class Unread(FedProx):
    """A strategy with an argument that it forgot."""

    strength: float = 1.0


def test_an_argument_that_nothing_reads_is_refused_by_name() -> None:
    Unread(**SOFTMAX).build()
    with pytest.raises(BadArgument, match=r"strength=2\.0 would have no effect"):
        Unread(**SOFTMAX, strength=2.0).build()
    with pytest.raises(BadArgument, match=r"metrics=\('accuracy',\) would have no effect"):
        SplitLearning(model=(4, 3, 3), cut="layer0.out", metrics=("accuracy",)).build()


def _settings(**settings: Any) -> dict[str, Any]:
    return {"slot": "local", **settings}


_PAIR: dict[str, Any] = {"slot": "local"}


class Called(FedProx):
    """One whose step makes a call of nothing but what a mapping has: an empty tuple in its code."""

    strength: float = 1.0

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        assert _settings(**_PAIR) == _PAIR
        return super().local_training(g, weights)


class Constants(FedProx):
    """One whose step has tuples and the name of its own object among its constants."""

    strength: float = 1.0

    def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
        for name in ("self", "weights"):
            assert name in {"self": 1, "weights": 2}
        assert str("self") in ("self", ())  # noqa: UP018
        return super().local_training(g, weights)


@pytest.mark.parametrize("program", [Called, Constants])
def test_constants_in_an_authors_step_are_not_its_object(program: type[FedProx]) -> None:
    program(**SOFTMAX).build()
    with pytest.raises(BadArgument, match=r"strength=2\.0 would have no effect"):
        program(**SOFTMAX, strength=2.0).build()


def _strength(program: Any) -> float:
    return float(program.strength)


def test_an_argument_may_be_read_by_a_helper_or_by_name() -> None:
    class ByHelper(Unread):
        def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
            assert _strength(self) == 2
            return super().local_training(g, weights)

    class ByName(Unread):
        def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
            assert all(getattr(self, each) for each in sorted({"stren" + "gth"}))
            return super().local_training(g, weights)

    class Neither(Unread):
        def local_training(self, g: Graph, weights: Output) -> tuple[Output, Output]:
            return super().local_training(g, weights)

    for base in (ByHelper, ByName):
        base(**SOFTMAX, strength=2.0).build()
    with pytest.raises(BadArgument, match="strength"):
        Neither(**SOFTMAX, strength=2.0).build()


# The arguments that no step reads are checked to be left alone.
LEFT_ALONE = {"epochs", "metrics"}


@pytest.mark.parametrize("name", [name for name in READY if name != "TrainingProgram"])
def test_each_argument_of_a_ready_program_is_read_or_refused(name: str) -> None:
    cls = READY[name]
    of_train = LocalTraining.settings() if "train" in cls.PARTS else {}
    own = {*steps._fields(cls), *of_train} - {*cls.PARTS}
    assert {each for each in own if each not in steps._named(steps._order(cls))} <= LEFT_ALONE


@pytest.mark.parametrize("base", [FedNova, QFedAvg, Scaffold, Ditto, FedPer])
def test_rounds_of_one_strategy_stay_as_they_are(base: type[FederatedTraining]) -> None:
    made(base.__name__).build()


# --- numbers: a pair is the client's move, and the server's step with it ------------------------

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "CyclicTraining": {}, "HierarchicalTraining": EDGES,
}  # fmt: skip
# Methods whose clients answer in turn, or by way of edges, as well as all at once.
MEANS = ("FedProx", "FedNova", "q-FedAvg", "FedPer", "FedRep")
OF_NUMPY = [name for name in SERVERS if name != "FedOpt"]


def judge(tmp_path: Path, names: tuple[type[Any], ...], given: dict[str, Any], **by: Any) -> None:
    """Compare rounds of bases, in both orders, with a move and a step of numpy."""
    for at, bases in enumerate((names, names[::-1])):
        program = type("Both", bases, {})(**{**VERIFIED, **given})
        folder = tmp_path / str(at)
        folder.mkdir()
        star = Star(folder, program, clients(), server=server_slots(folder, program))
        move, step = by.get("move", lambda: reference.fedavg)(), by.get("step")
        for each in by_formula(star, move, step and step(), rounds=2):
            assert each.deviation <= TOLERANCE, (bases, each.what, each.deviation)


@pytest.mark.slow
@pytest.mark.parametrize("server", OF_NUMPY)
@pytest.mark.parametrize("client", CLIENTS)
def test_clients_and_servers_both_do_as_numpy_says(
    tmp_path: Path, client: str, server: str
) -> None:
    one, given, move, *_ = CLIENTS[client]
    other, more, step, _ = SERVERS[server]
    # The same server's rate, where both have one of their own.
    more = {"server_learning_rate": 0.1 if "tau" in more else 1.0, **more}
    judge(tmp_path, (one, other), {**given, **more}, move=lambda: move, step=lambda: step)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", [*OF_NUMPY, *MEANS])
def test_rounds_of_another_shape_do_as_numpy_says(tmp_path: Path, shape: str, other: str) -> None:
    given, move, step = dict(SHAPES[shape]), reference.fedavg, None
    if other in SERVERS:
        one, more, step, _ = SERVERS[other]
    else:
        one, more, move, *_ = CLIENTS[other]
    judge(
        tmp_path, (READY[shape], one), {**given, **more}, move=lambda: move,
        step=lambda: step or reference.added(),
    )  # fmt: skip
