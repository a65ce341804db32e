"""The dry run of a program: its models and metrics, before anybody waits for a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components import (
    ArrayDataSource,
    OnnxModel,
    OnnxModelConfig,
    OrtBackend,
    concrete,
    register_component,
    values,
)
from bbnode.daemon.artifacts.build import compile_program
from bbnode.daemon.artifacts.dry_run import (
    DryRunFailed,
    GivenData,
    ProgramDryRun,
    check_compiled,
    check_program,
)
from bbnode.daemon.predicting.meaning import Meaning
from bbnode.dsl import BackendSlot, BadArgument, DataSourceSlot, Graph, ModelSlot, Module, types
from bbnode.programs import (
    DPSGDTraining,
    FederatedSGD,
    FederatedTraining,
    FederatedTrees,
    FedProx,
    GossipTraining,
    SecureTraining,
)
from bbnode.sim import Network


def check(program: Module, **options: Any) -> ProgramDryRun:
    return check_program(compile_program(program), own=True, **options)


def two_outputs(width: int = 2) -> ModelProto:
    rng = np.random.default_rng(0)
    w, k = rng.normal(size=(4, 2)).astype(np.float32), np.ones((2, width), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]),
         helper.make_node("MatMul", ["y", "k"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
         for name, size in (("y", 2), ("z", width))],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(k, "k")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        (FederatedTraining(model=[4, 8, 3], evaluate="both", metrics=("accuracy", "f1_macro")),
         {"train", "gradient", "export", "import", "accuracy", "f1_macro"}),
        (FedProx(model=[4, 3], evaluate="clients"), {"train_adjusted", "metrics"}),
        (SecureTraining(model=[4, 3]), {"train", "accuracy"}),
        (FederatedSGD(model=[4, 3]), {"gradient", "test_accuracy"}),
        (GossipTraining(model=[4, 3]), {"train", "accuracy"}),
        (FederatedTraining(model=[4, 1], loss="mse", metrics=("r2",)), {"train", "r2"}),
        (FederatedTrees(features=4, classes=2), {"train", "export", "accuracy"}),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Module) else "",
)  # fmt: skip
def test_programs_run_what_a_round_computes(program: Module, steps: set[str]) -> None:
    report = check(program)
    assert steps | {"forward", "loss"} <= {row.step for row in report.rows}
    assert report.warnings == report.postponed == []


@pytest.mark.slow
def test_a_private_model_is_tried_without_its_ledger() -> None:
    pytest.importorskip("dp_accounting")
    assert {"train", "accuracy"} <= {row.step for row in check(DPSGDTraining(model=[4, 3])).rows}


class Evaluated(Module):
    """A program of an author: a metric of a model's output as it comes."""

    home = "server"

    def __init__(self, model: ModelProto, cls: type[OnnxModel] = OnnxModel) -> None:
        self._model, self._cls = model, cls

    def body(self, g: Graph) -> None:
        config = OnnxModelConfig(model=self._model.SerializeToString())
        model = ModelSlot("global", concrete=concrete(self._cls, config))
        examples, labels = DataSourceSlot("data").next_batch(
            g, after=g.input("tick", types.TRIGGER)
        )
        examples = g.expect(examples, types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        best = compute.arg_max(g, model.forward(g, examples), axis=-1, keepdims=False)
        g.output("hits", compute.equal(g, best, g.expect(labels, types.TENSOR_INT64)))

    def bindings(self) -> Any:
        return {"data": ArrayDataSource, "compute": OrtBackend}


def test_a_metric_that_gets_several_outputs_is_told_with_its_name() -> None:
    words = r"server/global: ArgMax \(\S*ArgMax_0.*fails: it takes one tensor and gets 2 tensors"
    with pytest.raises(DryRunFailed, match=words):
        check(Evaluated(two_outputs()))


def test_examples_that_are_given_are_taken(tmp_path: Path) -> None:
    x, y = np.ones((5, 4), np.float32), np.array([0, 1, 2, 0, 1])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    given = GivenData(settings={"": {"path": str(tmp_path / "d.npz")}})
    report = check(FederatedTraining(model=[4, 3]), given=given)
    assert report.examples == "given"
    np.savez(tmp_path / "d.npz", x=x, y=y + 5)
    with pytest.raises(
        DryRunFailed, match=r"client/local: .* tried on the data: the loss .* fails"
    ):
        check(FederatedTraining(model=[4, 3]), given=given)
    np.savez(tmp_path / "d.npz", x=x[:2], y=y[:2])
    with pytest.raises(DryRunFailed, match="have 2 example"):
        check(FederatedTraining(model=[4, 3]), given=given)


def test_large_models_are_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bbnode.daemon.artifacts.dry_run.MOST_PARAMETERS", 10)
    report = check_compiled(compile_program(FederatedTraining(model=[4, 3])), own=True)
    assert report.rows == []
    assert "no dry run, as 15 parameters are many" in report.postponed[0]


def a_round(model: ModelProto, path: Path, **arguments: Any) -> tuple[float, float]:
    program = FederatedTraining(model=model, clients=1, quorum=1, evaluate="clients", **arguments)
    network = Network(seed=0)
    compiled = compile_program(program)
    server = network.add("server", compiled, ["server"])
    slots = {name: {"path": str(path)} for name in ("data", "held_out")}
    network.add("c", compiled, ["client"], config=slots)
    execution = server.invoke("server", {"tick": values.TRIGGER})
    network.run_until_idle()
    assert not server.failures()
    made = server.outputs(execution)
    return float(made["loss"]), float(made["accuracy"])


@pytest.mark.parametrize("width", [2, 3])
def test_a_second_output_changes_neither_loss_nor_metrics(
    width: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=(x[:, 0] > 0).astype(int))
    alone = two_outputs()
    del alone.graph.output[1:]
    wanted = a_round(alone, tmp_path / "d.npz")
    assert not caplog.records
    assert a_round(two_outputs(width), tmp_path / "d.npz") == wanted
    assert "the model has the outputs 'y', 'z'; loss and metrics take the first" in caplog.text
    caplog.clear()
    assert a_round(two_outputs(width), tmp_path / "d.npz", outputs=("y",)) == wanted
    assert not caplog.records


def test_losses_of_two_outputs_train_with_labels_of_their_own(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    y = np.stack([x[:, 0] > 0, x[:, 1]], axis=1).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    both = {"y": "softmax_cross_entropy", "z": ("mse", 0.3)}
    loss, accuracy = a_round(two_outputs(1), tmp_path / "d.npz", loss=both, labels_apart=True,
                             epochs=60)  # fmt: skip
    assert np.isfinite(loss)
    assert accuracy > 0.7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"outputs": ("q",)}, "the model has no output 'q'; it has 'y', 'z'"),
        ({"outputs": ("y", "z")}, "loss and metrics are of one output"),
        ({"loss": {"y": "nope"}}, r"loss\['y'\]='nope' has to be one of softmax_cross_entropy"),
        ({"loss": {"y": ("mse", 0)}}, "and a weight above 0"),
        ({"loss": {}}, "the loss of one output or more"),
        ({"loss": {"y": "softmax_cross_entropy", "z": "mse"}}, "set labels_apart=True"),
        ({"outputs": ("z",), "loss": {"y": "softmax_cross_entropy"}}, "metrics are of that one"),
        ({"labels_apart": True, "outputs": ("y",)}, "labels_apart is of several losses"),
    ],
)
def test_outputs_and_losses_that_do_not_go_together_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadArgument, match=words):
        FederatedTraining(model=two_outputs(), **arguments).build()


def test_an_export_says_which_output_the_loss_is_of() -> None:
    config = OnnxModelConfig(
        model=two_outputs(1).SerializeToString(),
        outputs=("z",),
        loss="mse",
        losses=(("z", "mse", 1.0), ("y", "mse", 0.5)),
        labels_apart=True,
    )
    model = OnnxModel(config)
    exported = model.export()
    Meaning(uses_loss=True).stamp(exported, model.output_kind(), model.output_names()[0])
    found = Meaning.of_model(exported)
    assert found is not None
    assert (found.output, found.kind) == ("z", "value")
    assert [each.name for each in exported.graph.output] == ["y", "z"]


class Unmade(OnnxModel):
    """A model of an author whose code fails where it is made."""

    TYPE_NAME = "tests.Unmade"

    def __init__(self, config: OnnxModelConfig) -> None:
        raise OSError("no such device")


class Wild(OnnxModel):
    """A model of an author whose code fails when it computes."""

    TYPE_NAME = "tests.Wild"

    def forward(self, ctx: Any, batch: Any) -> Any:
        raise KeyError("lost")


def test_what_an_authors_model_raises_is_told_or_left_to_the_nodes() -> None:
    register_component(Unmade)
    register_component(Wild)
    report = check(Evaluated(two_outputs(), Unmade))
    (line,) = report.skipped
    assert "tests.Unmade can't be made here" in line
    with pytest.raises(DryRunFailed, match=r"server/global: tests\.Wild fails on made up examples"):
        check(Evaluated(two_outputs(), Wild))
