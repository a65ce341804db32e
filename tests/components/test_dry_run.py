"""The dry run of a model: what it finds before a round would, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.components import OnnxModel, OnnxModelConfig, mlp_forward
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.errors import ParameterMismatch
from bbnode.components.models import dry_run as trial
from bbnode.components.models.dry_run import DryRun, DryRunFailed, FewExamples, dry_run, tried
from bbnode.components.models.lora import Lora
from tests.components.fakes import CTX, ort

METHODS = frozenset({"compute_loss", "train"})


def forward(
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    outputs: dict[str, list[int | str]],
    **tensors: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def weights(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def run(model: onnx.ModelProto, methods: frozenset[str] = METHODS, **settings: Any) -> DryRun:
    config = OnnxModelConfig(model=model.SerializeToString(), **settings)

    def once(batch: trial.Batch) -> DryRun:
        few = FewExamples(batch)
        own = OnnxModel(config)
        own.bind({"backend": ort(), "data_source": few})
        return dry_run(own, CTX, few, methods=methods, made_up=True, config=config)

    asked = OnnxModel(config)
    asked.bind({"backend": ort()})
    made = tried(asked, once)
    assert made is not None
    return made


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, **attributes)


BAKED = {
    "reshape": [node("Reshape", ["x", "s"], ["r"]), node("MatMul", ["r", "w"], ["y"])],
    "named": [
        node("Reshape", ["x", "s"], ["r"], name="flatten"), node("MatMul", ["r", "w"], ["y"])
    ],
    "behind others": [
        node("Relu", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Reshape", ["b", "s"], ["r"]),
        node("MatMul", ["r", "w"], ["y"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("nodes", BAKED.values(), ids=BAKED)
def test_a_batch_that_a_reshape_holds_is_told_with_the_node(nodes: list[onnx.NodeProto]) -> None:
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, s=np.array([1, 4]), w=weights(4, 2))
    name = "flatten" if nodes[0].name else "r"
    with pytest.raises(
        DryRunFailed, match=rf"a batch of 1 and not of 2: node '{name}' \(Reshape\)"
    ):
        run(model)


def test_a_batch_of_two_is_told_as_such() -> None:
    model = forward(
        BAKED["reshape"], ["N", 4], {"y": ["N", 2]}, s=np.array([2, 4]), w=weights(4, 2)
    )
    with pytest.raises(DryRunFailed, match="a batch of 2 and not of 3"):
        run(model)


def test_a_first_state_of_one_example_is_told() -> None:
    """As exporters write a GRU that was traced with one example."""
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("GRU", ["t", "w", "r", "", "", "h"], ["all", "last"], hidden_size=3),
        node("Squeeze", ["last", "zero"], ["s"]),
        node("MatMul", ["s", "o"], ["y"]),
    ]
    model = forward(
        nodes, ["N", 5, 4], {"y": ["N", 2]}, w=weights(1, 9, 4), r=weights(1, 9, 3),
        h=np.zeros((1, 1, 3), np.float32), zero=np.array([0]), o=weights(3, 2),
    )  # fmt: skip
    with pytest.raises(DryRunFailed, match=r"a batch of 1 and not of 2: node 'all' \(GRU\)"):
        run(model, trainable=("w", "r", "o"))


def test_an_output_without_an_axis_of_examples_is_told() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("ReduceMean", ["h", "a"], ["y"])]
    model = forward(nodes, ["N", 4], {"y": [1, 2]}, w=weights(4, 2), a=np.array([0]))
    with pytest.raises(DryRunFailed, match=r"output 'y' is float32\[1, 2\] for two examples"):
        run(model)


def test_examples_that_see_each_other_are_a_warning() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("ReduceMean", ["h", "a"], ["m"]),
        node("Sub", ["h", "m"], ["y"]),
    ]  # fmt: skip
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, w=weights(4, 2), a=np.array([0]))
    (line,) = run(model).warnings
    assert "output 'y' of an example depends on the other examples of its batch" in line


def test_a_parameter_that_the_loss_does_not_depend_on_is_named() -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("MatMul", ["x", "lost"], ["z"])]
    model = forward(nodes, ["N", 4], {"y": ["N", 2], "z": ["N", 2]}, w=weights(4, 2),
                    lost=weights(4, 2))  # fmt: skip
    (line,) = run(model).warnings
    assert line.startswith("'lost' got no gradient")


def test_an_adapter_behind_zeros_is_no_lost_parameter() -> None:
    lora = Lora(targets=("*weight",), rank=2)
    assert run(mlp_forward((4, 8, 3)), lora=lora).warnings == []


def test_a_step_that_changes_nothing_is_told() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["a"]),
             node("MatMul", ["a", "v"], ["y"])]  # fmt: skip
    zeros = {"w": np.zeros((4, 3), np.float32), "v": np.zeros((3, 2), np.float32)}
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, **zeros)
    with pytest.raises(DryRunFailed, match="change no parameter: every gradient is 0"):
        run(model, trainable=("w", "v"))
    with pytest.raises(DryRunFailed, match="change no parameter; raise learning_rate"):
        run(forward(nodes[:1], ["N", 4], {"h": ["N", 2]}, w=weights(4, 2)), learning_rate=1e-30)


def test_a_loss_that_is_no_number_is_told_with_where_it_comes_from() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Sub", ["h", "h"], ["d"]),
             node("Log", ["d"], ["l"]), node("Mul", ["l", "d"], ["y"])]  # fmt: skip
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, w=weights(4, 2))
    with pytest.raises(DryRunFailed, match="is nan at the first step, as output 'y' holds NaN"):
        run(model)


def test_a_logarithm_that_only_some_examples_have_is_no_fault() -> None:
    """Made-up examples are below 0, too; a model of others is not to blame."""
    nodes = [node("Log", ["x"], ["l"]), node("MatMul", ["l", "w"], ["y"])]
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, w=weights(4, 2))
    assert [each.step for each in run(model).ran][-1] == "import"


def test_a_constant_that_holds_nan_is_named() -> None:
    bias = np.array([0.0, np.nan], np.float32)
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "bias"], ["y"])]
    model = forward(nodes, ["N", 4], {"y": ["N", 2]}, w=weights(4, 2), bias=bias)
    with pytest.raises(DryRunFailed, match="the file holds NaN in 'bias'"):
        run(model, trainable=("w",))


def test_a_check_of_what_was_seen_warns_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(seen: trial.Seen) -> Any:
        assert seen.made_up
        assert np.shape(seen.outputs[0]) == (3, 3)
        yield f"loss {seen.loss:.3f}"

    monkeypatch.setattr(trial, "CHECKS", (check,))
    (line,) = run(mlp_forward((4, 3))).warnings
    assert line.startswith("loss ")


@pytest.mark.parametrize("settings", [
    {}, {"optimizer": "adam"}, {"accumulate": 2}, {"precision": "mixed"},
    {"schedule": "warmup_linear", "warmup_steps": 5, "decay_steps": 10},
    {"class_weights": (0.0, 1.0, 1.0)}, {"ignore_index": 1},
])  # fmt: skip
def test_models_that_train_pass(settings: dict[str, Any]) -> None:
    report = run(mlp_forward((4, 8, 3)), **settings)
    steps = [each.step for each in report.ran]
    assert {"forward", "loss", "gradient", "train", "export", "import"} <= {*steps}
    assert report.warnings == report.skipped == report.postponed == []


def test_time_that_is_over_is_said() -> None:
    config = OnnxModelConfig(model=mlp_forward((4, 3)).SerializeToString())
    model = OnnxModel(config)
    model.bind({"backend": ort()})
    batch = model.example_batch(3)
    assert batch is not None
    few = FewExamples(batch)
    report = dry_run(model, CTX, few, methods=METHODS, made_up=True, budget_s=0.0)
    assert [each.step for each in report.ran] == ["forward", "forward"]
    assert "no dry run of the loss" in report.postponed[0]


def source(tmp_path: Any, x: Any, y: Any) -> ArrayDataSource:
    np.savez(tmp_path / "d.npz", x=x, y=y)
    return ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "d.npz")))


def test_a_node_tries_its_own_first_examples_and_stays_as_it_was(tmp_path: Any) -> None:
    data = source(tmp_path, weights(6, 4), np.arange(6) % 3)
    model = OnnxModel(OnnxModelConfig(model=mlp_forward((4, 8, 3)).SerializeToString()))
    model.bind({"backend": ort(), "data_source": data})
    before = model.serialize(), data.serialize()
    model.bootstrap(CTX)
    assert (model.serialize(), data.serialize()) == before


def test_a_node_refuses_a_batch_that_is_baked_in(tmp_path: Any) -> None:
    data = source(tmp_path, weights(6, 4), np.arange(6) % 2)
    model = forward(
        BAKED["reshape"], ["N", 4], {"y": ["N", 2]}, s=np.array([1, 4]), w=weights(4, 2)
    )
    for checks in (True, False):
        config = OnnxModelConfig(model=model.SerializeToString(), check=checks)
        own = OnnxModel(config)
        own.bind({"backend": ort(), "data_source": data})
        if not checks:
            own.bootstrap(CTX)
            continue
        with pytest.raises(DryRunFailed, match=r"tried on the data: .* node 'r' \(Reshape\)"):
            own.bootstrap(CTX)


def test_first_examples_whose_labels_do_not_count_are_passed_over(tmp_path: Any) -> None:
    data = source(tmp_path, weights(8, 4), np.array([9, 9, 9, 9, 9, 9, 0, 1]))
    model = OnnxModel(
        OnnxModelConfig(model=mlp_forward((4, 3)).SerializeToString(), ignore_index=9, check=True)
    )
    model.bind({"backend": ort(), "data_source": data})
    model._rehearse(CTX)


def test_a_large_model_is_left_out_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bbnode.components.models.onnx_model.MOST_PARAMETERS", 10)
    model = OnnxModel(OnnxModelConfig(model=mlp_forward((4, 8, 3)).SerializeToString()))
    model.bind({"backend": ort()})
    with caplog.at_level("INFO"):
        model.bootstrap(CTX)
    assert "no dry run at start" in caplog.text


def test_losses_of_several_outputs_add_with_their_weights() -> None:
    w, v = weights(4, 2), weights(4, 1)
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("MatMul", ["x", "v"], ["z"])]
    model = forward(nodes, ["N", 4], {"y": ["N", 2], "z": ["N", 1]}, w=w, v=v)
    losses = (("y", "softmax_cross_entropy", 0.5), ("z", "mse", 0.3))
    own = OnnxModel(OnnxModelConfig(
        model=model.SerializeToString(), losses=losses, labels_apart=True, outputs=("y",)
    ))  # fmt: skip
    own.bind({"backend": ort()})
    x, classes, values = weights(5, 4), np.array([0, 1, 1, 0, 1]), weights(5)
    powers = np.exp(x @ w)
    shares = powers / powers.sum(1, keepdims=True)
    off = (x @ v)[:, 0] - values
    want = 0.5 * -np.log(shares[range(5), classes]).mean() + 0.3 * np.square(off).mean()
    labels = np.stack([classes, values], axis=1).astype(np.float32)
    grads, loss = own.gradient(CTX, x, labels)
    assert float(loss) == pytest.approx(want, rel=1e-5)
    by_w = 0.5 * x.T @ (shares - np.eye(2)[classes]) / 5
    by_v = 0.3 * 2 * x.T @ off / 5
    np.testing.assert_allclose(grads, np.concatenate([by_w.ravel(), by_v]), atol=1e-6)
    assert own.output_names() == ("y",)
    assert np.shape(own.forward(CTX, x)) == (5, 2)
    assert own.output_kind() == "logits"
    assert [each.name for each in own.export().graph.output] == ["y", "z"]


def test_the_output_that_counts_may_be_any() -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Neg", ["y"], ["z"])]
    model = forward(nodes, ["N", 4], {"y": ["N", 2], "z": ["N", 2]}, w=weights(4, 2))
    x, y = weights(5, 4), np.array([0, 1, 1, 0, 1])

    def loss(**settings: Any) -> float:
        own = OnnxModel(OnnxModelConfig(model=model.SerializeToString(), **settings))
        own.bind({"backend": ort()})
        return float(np.asarray(own.compute_loss(CTX, x, y)))

    assert loss() == loss(outputs=("y",)) == loss(outputs=("y", "z"))
    assert loss(outputs=("z",)) == loss(outputs=("z", "y")) != loss()


def test_a_twin_that_is_trained_exports_its_own_numbers() -> None:
    report = run(mlp_forward((4, 3)))
    assert [r.result for r in report.ran if r.step == "export"] == ["float32[3, 3], as the model"]
    with pytest.raises(ParameterMismatch):
        OnnxModel.initialized(
            OnnxModelConfig(model=mlp_forward((4, 3)).SerializeToString()), {"no": weights(1)}
        )


def test_a_class_that_a_mask_leaves_out_is_no_fault() -> None:
    """Its logit is minus infinity, and no example has it."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "mask"], ["y"])]
    mask = np.array([0.0, -np.inf, 0.0], np.float32)
    model = forward(nodes, ["N", 4], {"y": ["N", 3]}, w=weights(4, 3), mask=mask)
    assert [each.step for each in run(model, trainable=("w",)).ran][-1] == "import"


def test_the_reshape_is_named_where_another_op_fails() -> None:
    nodes = [node("Reshape", ["x", "s"], ["r"]), node("Relu", ["r"], ["a"]),
             node("MatMul", ["a", "w"], ["y"])]  # fmt: skip
    model = forward(nodes, ["N", 2, 2], {"y": ["N", 2]}, s=np.array([1, -1]), w=weights(4, 2))
    with pytest.raises(DryRunFailed, match=r"node 'r' \(Reshape\) holds the size of a batch of 1"):
        run(model)
