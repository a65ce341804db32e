"""Programs that train any model: they learn, and say what is wrong with what they are given."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sklearn import metrics as known

from bbnode.components import (
    ArrayDataSource,
    ArrayDataSourceConfig,
    FedAvg,
    HeldModel,
    Lora,
    MemoryDataSource,
    OnnxModelConfig,
    SklearnDataSource,
    concrete,
    register_component,
    values,
)
from bbnode.components.errors import DataDoesNotFit
from bbnode.dsl import BackendSlot, BadArgument, Graph, ModelSlot, Output
from bbnode.programs import FederatedSGD, FederatedTraining, GossipTraining, TrainingProgram
from bbnode.sim import Network, SimNode
from tests.components.fakes import CTX, onnx_model
from tests.programs.files import CLASSES, FEATURES, compiled, examples, linear, stating_nothing


@dataclass(frozen=True, kw_only=True)
class UnsplitConfig:
    seed: int = 0
    batch_size: int = 0


@register_component
class Unsplit(MemoryDataSource):
    TYPE_NAME = "tests.Unsplit"
    Config = UnsplitConfig

    def load(self) -> Any:
        return np.ones((3, FEATURES), np.float32), np.zeros(3, np.int64)


class Training(FederatedTraining):
    model = (FEATURES, 8, CLASSES)
    clients = 3
    epochs = 3


def network(
    program: FederatedTraining, folder: Path, *, numbers: bool = False, seed: int = 1
) -> tuple[Network, SimNode]:
    """The program on a server and three clients, with the slots that it has."""
    artifact = compiled(program)
    made = Network(seed)
    test = {"test": {"path": examples(folder, "test", 40, seed=9, numbers=numbers)}}
    on_server = program.evaluate in ("server", "both")
    server = made.add("server", artifact, ["server"], config=test if on_server else {})
    for i in range(3):
        data = {"path": examples(folder, f"c{i}", 60 + 20 * i, seed=i, numbers=numbers)}
        slots = ("data", "held_out") if program.evaluate in ("clients", "both") else ("data",)
        made.add(f"client-{i}", artifact, ["client"], config=dict.fromkeys(slots, data))
    return made, server


def rounds(net: Network, server: SimNode, count: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(count):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
        found.append(server.outputs(execution))
    assert server.failures() == []
    return found


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("server", {"loss", "accuracy"}),
        ("clients", {"loss", "accuracy"}),
        ("both", {"loss", "accuracy", "clients_loss", "clients_accuracy"}),
        ("none", set()),
    ],
)
def test_it_trains_and_evaluates_where_it_is_told(
    tmp_path: Path, place: str, names: set[str]
) -> None:
    found = rounds(*network(Training(evaluate=place), tmp_path), 4)
    assert set(found[0]) == {"stats", "model", *names}
    assert found[-1]["stats"]["contributors"] == 3
    for name in names:
        better = np.less if "loss" in name else np.greater
        assert better(found[-1][name], found[0][name])


def test_what_clients_measure_is_weighted_by_their_examples(tmp_path: Path) -> None:
    """The mean over all held-out examples is what a server that had them all would measure."""
    net, server = network(Training(evaluate="clients"), tmp_path)
    (found,) = rounds(net, server, 1)
    held_out = []
    for i in range(3):
        config = ArrayDataSourceConfig(path=str(tmp_path / f"c{i}.npz"), split="test")
        held_out += ArrayDataSource(config).epoch_batches(1000)
    assert [len(y) for _, y in held_out] == [12, 16, 20]
    features, labels = (np.concatenate([part[n] for part in held_out]) for n in (0, 1))
    model = server.component("global")  # holds the weights that were evaluated
    right = model.forward(None, features).argmax(axis=1) == labels
    assert float(found["accuracy"]) == pytest.approx(right.mean(), rel=1e-5)
    loss = float(model.compute_loss(None, features, labels))
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)


def test_a_regression_has_labels_without_a_last_axis(tmp_path: Path) -> None:
    """Labels [N] and an output [N, 1]: compared one by one, never each with all."""
    program = Training(model=(FEATURES, 8, 1), loss="mse", learning_rate=0.05, evaluate="both")
    found = rounds(*network(program, tmp_path, numbers=True), 6)
    assert set(found[0]) == {"stats", "model", "loss", "mae", "clients_loss", "clients_mae"}
    assert found[-1]["loss"] < found[0]["loss"] / 2
    assert found[-1]["clients_mae"] < found[0]["clients_mae"]


def test_targets_of_a_regression_may_be_whole_numbers(tmp_path: Path) -> None:
    """Elsewhere whole numbers are classes."""
    program = Training(model=(FEATURES, 1), loss="mse", learning_rate=0.05, evaluate="both")
    net, server = network(program, tmp_path, numbers=True)
    for file in tmp_path.glob("*.npz"):
        held = dict(np.load(file))
        np.savez(file, x=held["x"], y=(3 * held["y"]).round().astype(np.int64))
    found = rounds(net, server, 3)
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["clients_loss"] < found[0]["clients_loss"]


def test_the_same_seed_ends_in_the_same_model(tmp_path: Path) -> None:
    one, other = (rounds(*network(Training(evaluate="none"), tmp_path), 2)[-1] for _ in range(2))
    assert one["model"].tobytes() == other["model"].tobytes()


def test_a_client_that_dies_costs_its_part_only(tmp_path: Path) -> None:
    net, server = network(Training(quorum=2, deadline_s=5.0, evaluate="clients"), tmp_path)
    rounds(net, server, 1)
    net.crash("client-1")
    (found,) = rounds(net, server, 1)
    assert found["stats"]["contributors"] == 2
    assert np.isfinite(found["loss"])


def test_peers_learn_from_each_other_without_a_server(tmp_path: Path) -> None:
    """Each peer has one class alone; what it knows of the others came from its neighbours."""

    class Gossip(GossipTraining):
        model = (FEATURES, CLASSES)
        neighbours = 2
        learning_rate = 0.1

    artifact, net, peers = compiled(Gossip()), Network(1), []
    everything = examples(tmp_path, "all", 300, seed=7)
    whole = np.load(everything)
    for label in range(CLASSES):
        rows = whole["y"] == label
        np.savez(tmp_path / f"{label}.npz", x=whole["x"][rows], y=whole["y"][rows])
        data = {"path": str(tmp_path / f"{label}.npz")}
        config = {"data": data, "held_out": {**data, "path": everything, "split": "all"}}
        peers.append(net.add(f"peer-{label}", artifact, ["peer"], config=config))
    for _ in range(40):
        executions = [peer.invoke("peer", {"tick": values.TRIGGER}) for peer in peers]
        net.run_until_idle()
    for peer, execution in zip(peers, executions, strict=True):
        assert peer.failures() == []
        assert peer.outputs(execution)["accuracy"] > 0.6  # alone it would be a third


def test_a_neighbour_with_weights_of_another_size_is_refused(tmp_path: Path) -> None:
    """A single number would be broadcast over all weights."""

    class Gossip(GossipTraining):
        model = (FEATURES, CLASSES)
        evaluate = False

    class Liar(Gossip):
        name = "Gossip"
        model = (1, 2)

    net = Network(1, compares=False)
    data = {"data": {"path": examples(tmp_path, "d", 50, seed=1)}}
    honest = net.add("honest", compiled(Gossip()), ["peer"], config=data)
    np.savez(tmp_path / "small.npz", x=np.ones((9, 1), np.float32), y=np.zeros(9, np.int64))
    small = {"data": {"path": str(tmp_path / "small.npz")}}
    liar = net.add("liar", compiled(Liar()), ["peer"], config=small)
    net.run_until_idle()
    stating_nothing(honest, liar)
    liar.invoke("peer", {"tick": values.TRIGGER})
    net.run_until_idle()
    assert [failure.kind for failure in honest.failures()] == ["ContributionRefused"]
    execution = honest.invoke("peer", {"tick": values.TRIGGER})
    net.run_until_idle()
    assert honest.outputs(execution)["stats"]["contributors"] == 1


def test_gradients_of_clients_are_steps_on_all_their_examples(tmp_path: Path) -> None:
    """Each client's batch is all that it has, so that a step is one on the examples pooled."""

    class Steps(FederatedSGD):
        model = (FEATURES, 8, CLASSES)
        clients = 3
        batch = 100
        optimizer = "adam"
        learning_rate = 0.05
        schedule = "cosine"
        decay_steps = 10
        clip_norm = 0.5
        metrics = ("accuracy", "f1_macro")

    program = Steps()
    artifact = compiled(program)
    net = Network(1)
    test = {"test": {"path": examples(tmp_path, "test", 40, seed=9)}}
    server = net.add("server", artifact, ["server"], config=test)
    for i in range(3):
        data = {"data": {"path": examples(tmp_path, f"c{i}", 20 + 10 * i, seed=i)}}
        net.add(f"client-{i}", artifact, ["client"], config=data)
    found = rounds(net, server, 5)
    assert set(found[0]) == {
        "loss", "model", "stats", "test_loss", "test_accuracy", "test_f1_macro",
    }  # fmt: skip
    files = [np.load(tmp_path / f"c{i}.npz") for i in range(3)]
    x, y = (np.concatenate([file[name] for file in files]) for name in "xy")
    alone = onnx_model(program._config)
    for each in found:
        grads, loss = alone.gradient(CTX, x, y)
        assert float(each["loss"]) == pytest.approx(float(loss), rel=1e-4)
        alone.step(CTX, grads)
        np.testing.assert_allclose(each["model"], alone.params(CTX), rtol=1e-3, atol=1e-4)
    assert found[-1]["test_loss"] < found[0]["test_loss"]


@register_component
class LyingModel(HeldModel):
    """A model whose gradients are what a liar says."""

    TYPE_NAME = "test.LyingModel"
    lie: ClassVar[np.ndarray] = np.zeros(0, np.float32)

    def gradient(self, ctx: Any, batch: Any, target: Any) -> Any:
        return self.lie, np.float32(0.5)


@pytest.mark.parametrize("lie", ["nan", "infinite", "short"])
def test_a_lying_gradient_is_refused_by_name_and_the_others_make_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    class Steps(FederatedSGD):
        model = (FEATURES, CLASSES)
        clients = 3
        quorum = 3
        evaluate = False

    class Liar(Steps):
        name = "Steps"

        def held_model(self, slot: str) -> Any:
            return ModelSlot(slot, concrete=concrete(LyingModel, self._config))

    size = FEATURES * CLASSES + CLASSES
    lies = {"nan": np.full(size, np.nan), "infinite": np.full(size, np.inf), "short": np.ones(1)}
    monkeypatch.setattr(LyingModel, "lie", lies[lie].astype(np.float32))
    net = Network(1)
    server = net.add("server", compiled(Steps()), ["server"])
    for i, program in enumerate((Steps, Steps, Liar)):
        data = {"data": {"path": examples(tmp_path, f"c{i}", 20, seed=i)}}
        net.add(f"client-{i}", compiled(program()), ["client"], config=data)
    net.run_until_idle()
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    found = server.outputs(execution)
    assert (found["stats"]["contributors"], found["stats"]["refused"]) == (2, 1)
    assert np.isfinite(found["model"]).all()


def test_metrics_of_clients_are_those_of_their_examples_pooled(tmp_path: Path) -> None:
    program = Training(evaluate="clients", metrics=("top2", "f1_macro", "accuracy", "perplexity"))
    net, server = network(program, tmp_path)
    (found,) = rounds(net, server, 1)
    held_out = []
    for i in range(3):
        config = ArrayDataSourceConfig(path=str(tmp_path / f"c{i}.npz"), split="test")
        held_out += ArrayDataSource(config).epoch_batches(1000)
    features, labels = (np.concatenate([part[n] for part in held_out]) for n in (0, 1))
    logits = server.component("global").forward(None, features)
    best = logits.argmax(axis=1)
    assert float(found["accuracy"]) == pytest.approx((best == labels).mean(), rel=1e-5)
    wanted = known.f1_score(labels, best, average="macro")
    assert float(found["f1_macro"]) == pytest.approx(wanted, rel=1e-5)
    wanted = known.top_k_accuracy_score(labels, logits, k=2, labels=range(CLASSES))
    assert float(found["top2"]) == pytest.approx(wanted, rel=1e-5)
    assert float(found["perplexity"]) == pytest.approx(np.exp(found["loss"]), rel=1e-5)


# --- arguments ------------------------------------------------------------------------------


def test_every_setting_of_the_model_is_an_argument() -> None:
    lora = Lora(targets=("layer*",), rank=2)
    given = {"optimizer": "adamw", "momentum": 0.5, "betas": [0.8, 0.9], "lora": lora, "seed": 3}
    config = Training(**given)._config
    assert (config.optimizer, config.momentum, config.betas) == ("adamw", 0.5, (0.8, 0.9))
    assert (config.lora, config.seed) == (lora, 3)
    names = {field.name for field in fields(OnnxModelConfig)}
    own = {"losses", "check"}  # said by `loss`, and by each node
    assert names - own <= {*FederatedTraining.arguments()}
    assert len(fields(FederatedTraining)) == 12


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "model is missing"),
        ({"model": "no-such.onnx"}, "cannot read 'no-such.onnx': No such file"),
        ({"model": "."}, "'' is not a file"),
        ({"model": b"not a model"}, "is not an ONNX model"),
        ({"model": (4,)}, "do not make an MLP"),
        ({"model": (4, 0)}, "do not make an MLP"),
        ({"model": (4, "3")}, "layer sizes"),
        ({"model": 7}, "layer sizes"),
        ({"model": linear(inputs=2)}, r"has 2 inputs \(x, extra0\)"),
        ({"model": linear(batch=1)}, "first axis of its input 'x' is fixed to 1"),
        ({"model": linear(elem_type=TensorProto.DOUBLE)}, "input 'x' is DOUBLE"),
        ({"model": linear(opset=10_000)}, "can't be trained: .*opset"),
        ({"clients": 0}, "clients=0 has to be an integer of at least 1"),
        ({"clients": True}, "clients=True"),
        ({"clients": "3"}, "clients='3'"),
        ({"quorum": 4}, "quorum=4 has to be an integer between 0"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"deadline_s": float("inf")}, "deadline_s=inf"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizer": "adma"}, "can't be trained: .*adma"),
        ({"optimizer": 3}, "optimizer=3: Input should be a valid string"),
        ({"momentum": "much"}, "momentum='much': Input should be a valid number"),
        ({"trainable": ("layer7*",)}, "can't be trained: .*no initializer fits.*layer7"),
        ({"lora": {"targets": ["x"], "rnk": 3}}, "can't be trained|rnk"),
        ({"metrics": ("accurracy",)}, "no metric 'accurracy'"),
        ({"metrics": "accuracy"}, "metrics='accuracy' has to be names"),
        ({"metrics": ("mae",)}, "metrics: 'mae' says nothing of a model with loss='softmax_"),
        ({"loss": "hinge"}, "softmax_cross_entropy, nll"),
        ({"evaluate": "client"}, "server, clients, both, none"),
        ({"data": "bbnode.ArrayDataSourc"}, "did you mean 'bbnode.ArrayDataSource'"),
        ({"data": FedAvg}, "has to be a DataSource"),
        ({"data": "bbnode.FedAvg"}, "has to be a DataSource"),
        ({"data": 3}, "has to be a DataSource"),
    ],
)
def test_an_argument_that_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said) as caught:
        Training(**given).build()
    assert caught.value.module == "Training"
    assert "\n" not in str(caught.value)


def test_a_newer_opset_is_taken_where_its_ops_mean_the_same() -> None:
    newest = onnx.defs.onnx_opset_version()
    assert Training(model=linear(opset=newest)).size == FEATURES * CLASSES


def test_a_misspelt_argument_is_not_ignored() -> None:
    for name, meant in (("client", "clients"), ("epoch", "epochs"), ("metric", "metrics")):
        with pytest.raises(BadArgument, match=f"{name}.*did you mean '{meant}'"):
            type("Misspelt", (FederatedTraining,), {name: 3})
        with pytest.raises(BadArgument, match=f"{name}.*did you mean '{meant}'"):
            Training(**{name: 3})
    with pytest.raises(BadArgument, match="no argument 'nonsense'; it has model, data"):
        Training(nonsense=3)


def test_a_subclass_sets_defaults_and_may_have_fields_of_its_own() -> None:
    class Own(Training):
        hidden: int = 16
        batch = 8

        @property
        def width(self) -> int:
            return self.hidden

    assert (Own().batch, Own(batch=4).batch, Own(hidden=2).width, Own().clients) == (8, 4, 2, 3)
    assert Training().batch == 32
    assert Own().name == "Own"


def test_a_model_comes_as_a_path_its_bytes_itself_or_sizes(tmp_path: Path) -> None:
    model = linear()
    onnx.save(model, tmp_path / "model.onnx")
    given = [
        tmp_path / "model.onnx",
        str(tmp_path / "model.onnx"),
        model.SerializeToString(),
        model,
    ]
    assert len({Training(model=each).build().SerializeToString() for each in given}) == 1
    assert isinstance(Training(model=[4, 3]), TrainingProgram)


def test_weights_in_a_file_beside_the_model_are_read_in(tmp_path: Path) -> None:
    model = linear()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    assert Training(model=tmp_path / "m.onnx").size == FEATURES * CLASSES
    (tmp_path / "m.onnx").rename(tmp_path / "alone.onnx")
    for each in tmp_path.iterdir():
        if each.name != "alone.onnx":
            each.unlink()
    with pytest.raises(BadArgument, match="model: "):
        Training(model=tmp_path / "alone.onnx").build()


def test_names_in_a_model_do_not_collide_with_those_of_the_program(tmp_path: Path) -> None:
    """A value of the model may be called as a slot, a port or what training adds."""
    model = linear()
    for old, new in (("y", "loss"), ("real", "labels"), ("w", "learning_rate"), ("x", "tick")):
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        for info in (*model.graph.input, *model.graph.output, *model.graph.initializer):
            info.name = new if info.name == old else info.name
    found = rounds(*network(Training(model=model), tmp_path), 3)
    assert found[-1]["loss"] < found[0]["loss"]


def test_another_data_source_is_one_argument() -> None:
    assert Training(data="bbnode.SklearnDataSource").bindings()["data"] is SklearnDataSource
    assert Training().bindings()["test"] is ArrayDataSource
    assert "test" not in Training(evaluate="none").bindings()
    with pytest.raises(BadArgument, match="no setting `split`"):
        Training(data="tests.Unsplit", evaluate="clients").build()


def test_a_model_of_tokens_has_an_int64_input() -> None:
    embedding = onnx.numpy_helper.from_array(np.ones((9, CLASSES), np.float32), "embedding")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["embedding", "tokens"], ["vectors"]),
            helper.make_node("ReduceMean", ["vectors", "axes"], ["y"], keepdims=0),
        ],
        "text",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [embedding, onnx.numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    compiled(Training(model=model, data="bbnode.ArrayDataSource"))


# --- the steps of a round -------------------------------------------------------------------


def test_deltas_make_the_same_model_as_weights(tmp_path: Path) -> None:
    made = [
        rounds(*network(Training(evaluate="none", deltas=deltas), tmp_path), 3)[-1]["model"]
        for deltas in (False, True)
    ]
    np.testing.assert_allclose(made[1], made[0], rtol=0, atol=1e-6)


def test_a_strategy_overrides_the_steps_that_it_changes(tmp_path: Path) -> None:
    """Half of the way to the mean, from weights that are twice the server's."""

    class Halfway(Training):
        evaluate = "none"

        def sent(self, g: Graph, peers: Output) -> Output:
            weights = super().sent(g, peers)
            return BackendSlot("compute").add(g, weights, weights)

        def server_update(self, g: Graph, mean: Output, stats: Output) -> Output:
            return BackendSlot("compute").mul(g, mean, g.constant(np.float32(0.5)))

    alike = Training(evaluate="none")
    half, whole = (rounds(*network(program, tmp_path), 1)[0] for program in (Halfway(), alike))
    assert half["model"].shape == whole["model"].shape
    assert not np.allclose(half["model"], whole["model"])


@pytest.mark.parametrize(
    "aggregator", ["bbnode.FedAvg", FedAvg, concrete(FedAvg, max_share=0.75)], ids=str
)
def test_an_aggregator_is_a_name_a_class_or_one_with_settings(
    tmp_path: Path, aggregator: Any
) -> None:
    program = Training(evaluate="none", aggregator=aggregator)
    net, server = network(program, tmp_path)
    (found,) = rounds(net, server, 1)
    assert found["stats"]["contributors"] == 3
    settings = server.component("aggregator").config
    assert settings.shape == (program.size,)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aggregator": "bbnode.FedAvgg"}, "aggregator='bbnode.FedAvgg'.*did you mean"),
        ({"aggregator": "bbnode.OnnxModel"}, "aggregator=.*has to be an Aggregator"),
        ({"aggregator": 3}, "aggregator=3 has to be an Aggregator"),
        ({"aggregator": concrete(HeldModel, OnnxModelConfig(model=b""))}, "aggregator=.*Aggreg"),
        ({"deltas": 1}, "deltas=1 has to be true or false"),
    ],
)
def test_wrong_parts_of_a_round_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        Training(**given).build()


@pytest.mark.parametrize(
    ("loss", "metrics", "said"),
    [
        ("mse", ("binary_accuracy",), "choose among: mae, mse, r2"),
        ("mse", ("auc",), "choose among: mae, mse, r2"),
        ("mse", ("perplexity",), "choose among: mae, mse, r2"),
        ("huber", ("accuracy",), "choose among: mae, mse, r2"),
        ("bce_with_logits", ("mse",), "choose among: binary_accuracy, auc"),
        ("bce_with_logits", ("r2",), "choose among: binary_accuracy, auc"),
    ],
)
def test_a_metric_of_other_outputs_than_the_losss_is_refused(
    loss: str, metrics: tuple[str, ...], said: str
) -> None:
    """The difference of a logit and a label, or the sign of a quantity, is a number like any."""
    program = FederatedTraining(model=(4, 1), loss=loss, metrics=metrics)
    with pytest.raises(BadArgument, match=re.escape(said)):
        program.build()


def test_a_loss_of_distributions_has_no_metric_beside_it() -> None:
    assert FederatedTraining(model=(4, 2), loss="kl").measured == ("loss",)


@pytest.mark.parametrize(("metric", "layers"), [("auc", 2), ("r2", 1)])
def test_a_server_whose_examples_have_no_such_metric_is_not_ready(
    tmp_path: Path, metric: str, layers: int
) -> None:
    loss = "mse" if metric == "r2" else "softmax_cross_entropy"
    program = FederatedTraining(
        model=(FEATURES, layers), loss=loss, metrics=(metric,), clients=1, quorum=1
    )
    np.savez(tmp_path / "t.npz", x=np.ones((9, FEATURES), np.float32), y=np.ones(9, np.int64))
    net = Network(1)
    settings = {"test": {"path": str(tmp_path / "t.npz")}}
    node = net.add("server", compiled(program), ["server"], config=settings)
    with pytest.raises(DataDoesNotFit, match=f"the metric {metric!r} needs"):
        node.component("test").bootstrap(CTX)  # as a daemon does before it is ready


def test_classes_that_are_not_the_last_axis_are_measured_as_such(tmp_path: Path) -> None:
    """Of [N, 3, 2, 2] logits: were the last axis the classes', labels would be compared wrongly."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 2, 1, 1)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "pixels",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, 3, 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = rng.normal(size=(8, 2, 3, 3)).astype(np.float32)
    y = rng.integers(0, 3, size=(8, 3, 3))
    y[0] = -100
    np.savez(tmp_path / "d.npz", x=x, y=y)
    path = str(tmp_path / "d.npz")
    program = FederatedTraining(
        model=model, clients=1, quorum=1, class_axis=1, ignore_index=-100, batch=8,
        metrics=("accuracy", "f1_macro"), learning_rate=1e-6,
    )  # fmt: skip
    net = Network(1)
    server = net.add("server", compiled(program), ["server"], config={"test": {"path": path}})
    net.add("client", compiled(program), ["client"], config={"data": {"path": path}})
    execution = server.invoke("server", {"tick": values.TRIGGER})
    net.run_until_idle()
    logits = np.einsum("oc,nchw->nohw", weight[:, :, 0, 0], x)
    wanted = (logits.argmax(1) == y)[y != -100].mean()
    assert float(server.outputs(execution)["accuracy"]) == pytest.approx(float(wanted), abs=1e-6)
