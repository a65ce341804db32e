"""Gradients of LSTM, GRU and RNN against central differences of ONNX's equations, in float64.

ONNX's reference evaluator knows neither sequence lengths nor activations, and ONNX Runtime no
float64: the equations are written out here, step by step, and ONNX Runtime has to agree with them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node as node
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from bbnode.components.autodiff import GradientRuleError, training_graphs
from bbnode.components.backends.reference import MENDED_OPS
from tests.components.graphs import check, model_of, run_ort

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
NUMBERS = {  # how many of alpha and beta a function takes
    "Affine": 2, "ScaledTanh": 2, "HardSigmoid": 2, "LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1,
}  # fmt: skip


def activation(name: str, k: list[float], x: np.ndarray) -> np.ndarray:
    made: np.ndarray = {
        "Sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "Tanh": lambda: np.tanh(x),
        "Relu": lambda: np.maximum(x, 0),
        "Affine": lambda: k[0] * x + k[1],
        "LeakyRelu": lambda: np.where(x >= 0, x, k[0] * x),
        "ThresholdedRelu": lambda: np.where(x >= k[0], x, 0.0),
        "ScaledTanh": lambda: k[0] * np.tanh(k[1] * x),
        "HardSigmoid": lambda: np.clip(k[0] * x + k[1], 0, 1),
        "Elu": lambda: np.where(x >= 0, x, k[0] * (np.exp(x) - 1)),
        "Softsign": lambda: x / (1 + np.abs(x)),
        "Softplus": lambda: np.log1p(np.exp(x)),
    }[name]()
    return made


def one_sequence(kind, x, w, r, b, h, c, p, functions, settings):
    """Return the states after each step of one sequence [T, I]."""
    size = len(h)
    wb, rb = b[: len(b) // 2], b[len(b) // 2 :]
    states = []
    for step in x:
        a, s = w @ step + wb, r @ h + rb
        if kind == "RNN":
            h = functions[0](a + s)
        elif kind == "GRU":
            az, ar, an = a.reshape(3, size)
            sz, sr, sn = s.reshape(3, size)
            z, reset = functions[0](az + sz), functions[0](ar + sr)
            if settings.get("linear_before_reset"):
                n = functions[1](an + reset * sn)
            else:
                n = functions[1](an + r[2 * size :] @ (reset * h) + rb[2 * size :])
            h = (1 - z) * n + z * h
        else:
            i, o, f, g = (a + s).reshape(4, size)
            pi, po, pf = p.reshape(3, size)
            i = functions[0](i + pi * c)
            f = 1 - i if settings.get("input_forget") else functions[0](f + pf * c)
            c = f * c + i * functions[1](g)
            o = functions[0](o + po * c)
            h = o * functions[2](c)
        states.append(h)
    return states, h, c


class Equations(OpRun):
    """The three ops, one sequence at a time."""

    op_domain = ""

    def _run(self, x, w, r, b=None, lens=None, h0=None, c0=None, p=None, **attributes: Any):
        kind = type(self).__name__
        settings = {k: v for k, v in attributes.items() if v is not None}
        if settings.get("layout"):
            x = x.transpose(1, 0, 2)
            h0, c0 = (None if v is None else v.transpose(1, 0, 2) for v in (h0, c0))
        steps, batch, _ = x.shape
        count, size = r.shape[0], r.shape[-1]
        ways = {"forward": [1], "reverse": [-1], "bidirectional": [1, -1]}[
            settings.get("direction") or "forward"
        ]
        names = list(settings.get("activations") or DEFAULTS[kind] * count)
        given = [list(settings.get(f"activation_{each}") or []) for each in ("alpha", "beta")]
        functions = []
        for name in names:
            k = [float(given[at].pop(0)) for at in range(NUMBERS.get(name, 0))]
            functions.append(lambda v, name=name, k=k: activation(name, k, v))
        each = len(functions) // count
        y = np.zeros((steps, count, batch, size), x.dtype)
        ends = np.zeros((2, count, batch, size), x.dtype)
        for d, n in itertools.product(range(count), range(batch)):
            length = steps if lens is None else int(lens[n])
            states, *last = one_sequence(
                kind,
                x[:length, n][:: ways[d]],
                w[d],
                r[d],
                np.zeros(2 * GATES[kind] * size) if b is None else b[d],
                np.zeros(size) if h0 is None else h0[d, n],
                np.zeros(size) if c0 is None else c0[d, n],
                np.zeros(3 * size) if p is None else p[d],
                functions[d * each : (d + 1) * each],
                settings,
            )
            y[:length, d, n] = states[:: ways[d]]
            ends[:, d, n] = last
        if settings.get("layout"):
            y, ends = y.transpose(2, 0, 1, 3), ends.transpose(0, 2, 1, 3)
        outputs = (y, *ends) if kind == "LSTM" else (y, ends[0])
        return outputs[: len(self.onnx_node.output)]


class LSTM(Equations):
    op_domain = ""


class GRU(Equations):
    op_domain = ""


class RNN(Equations):
    op_domain = ""


OPS = [*MENDED_OPS, LSTM, GRU, RNN]
T, B, I, H = 4, 3, 2, 3  # noqa: E741
_H = 1e-5


def exact(model, feeds):
    wanted = {port.name for port in model.graph.input}
    fed = {name: value for name, value in feeds.items() if name in wanted}
    evaluator = ReferenceEvaluator(model, new_ops=OPS)
    return dict(zip([o.name for o in model.graph.output], evaluator.run(None, fed), strict=True))


def check_cell(
    kind: str,
    *,
    optional: str = "bhcp",
    lens: list[int] | None = None,
    reads: tuple[int, ...] = (0, 1, 2),
    seed: int = 0,
    fast: bool = True,
    **attributes: Any,
) -> None:
    """Check all gradients of one node; `reads`: which outputs the model's output is made from."""
    rng = np.random.default_rng(seed)
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    wide = GATES[kind] * H
    state = (B, count, H) if attributes.get("layout") else (count, B, H)
    shapes: dict[str, tuple[int, ...]] = {
        "x": (B, T, I) if attributes.get("layout") else (T, B, I),
        "w": (count, wide, I), "r": (count, wide, H), "b": (count, 2 * wide), "h": state,
    }  # fmt: skip
    if kind == "LSTM":
        shapes |= {"c": state, "p": (count, 3 * H)}
    shapes = {name: s for name, s in shapes.items() if name in "xwr" or name in optional}
    params = {name: rng.uniform(-0.9, 0.9, shape) for name, shape in shapes.items()}
    names = ["x", "w", "r", "b", "l", "h", "c", "p"][: 8 if kind == "LSTM" else 6]
    inputs = [n if n in params or (n == "l" and lens) else "" for n in names]
    outputs = [f"o{at}" if at in reads else "" for at in range(3 if kind == "LSTM" else 2)]
    made = node(kind, inputs, outputs, hidden_size=H, **attributes)
    # Each output takes part with weights of its own, so that a mix-up shows.
    nodes = [made]
    constants: dict[str, np.ndarray] = {} if lens is None else {"l": np.array(lens, np.int32)}
    for name in filter(None, outputs):
        rank = 4 if name == "o0" else 3
        constants[f"{name}/all"] = np.arange(rank)
        constants[f"{name}/scale"] = rng.uniform(
            0.5, 1.5, {4: (B, T, count, H) if attributes.get("layout") else (T, count, B, H)}
            .get(rank, state),
        )  # fmt: skip
        nodes += [
            node("Mul", [name, f"{name}/scale"], [f"{name}/s"]),
            node("ReduceSum", [f"{name}/s", f"{name}/all"], [f"{name}/t"], keepdims=0),
        ]
    nodes.append(node("Sum", [f"{name}/t" for name in filter(None, outputs)], ["y"]))

    def build(dtype: type) -> Any:
        model = model_of(nodes, params, constants=constants, dtype=dtype)
        return training_graphs(model, "mse", wrt=list(params))

    graphs = build(np.float64)
    for each in (graphs.pullback, graphs.train_step):
        check(each)
    feeds = {**params, graphs.output_gradient_name: np.array(1.0)}
    found = exact(graphs.pullback, feeds)
    run = ReferenceEvaluator(graphs.forward, new_ops=OPS).run
    narrow = {name: value.astype(np.float32) for name, value in feeds.items()}
    if fast:
        small = build(np.float32)
        y = run(["y"], params)[0]
        np.testing.assert_allclose(run_ort(small.forward, narrow)["y"], y, rtol=1e-4)
        quick = run_ort(small.pullback, narrow)
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        assert found[gradient].shape == params[name].shape
        for _ in range(2):  # along a line that no two elements share alike
            way = rng.normal(size=params[name].shape)
            ahead, behind = (
                float(run(["y"], params | {name: params[name] + h * way})[0]) for h in (_H, -_H)
            )
            slope = np.sum(found[gradient] * way)
            np.testing.assert_allclose(
                slope, (ahead - behind) / (2 * _H), rtol=1e-5, atol=1e-6, err_msg=name
            )
        if fast:
            np.testing.assert_allclose(
                quick[gradient], found[gradient], rtol=2e-3, atol=2e-5, err_msg=name
            )


DIRECTIONS = ("forward", "reverse", "bidirectional")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction_with_sequences_of_every_length(kind: str, direction: str) -> None:
    check_cell(kind, direction=direction)
    check_cell(kind, direction=direction, lens=[2, 4, 1], seed=1)


def test_peepholes_and_coupled_gates() -> None:
    check_cell("LSTM", input_forget=1, optional="bhc", lens=[4, 3, 2])
    check_cell("LSTM", input_forget=1, fast=False)


def test_a_gru_that_resets_after_the_product() -> None:
    for direction in DIRECTIONS:
        check_cell("GRU", linear_before_reset=1, direction=direction, lens=[1, 4, 3])
    check_cell("GRU", linear_before_reset=1, optional="h")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_what_is_optional_may_be_left_out(kind: str) -> None:
    check_cell(kind, optional="", reads=(0,))
    check_cell(kind, optional="b", reads=(1,))  # Y itself is read by nothing else
    check_cell(kind, optional="bh", layout=1, fast=False, lens=[3, 4, 2])  # not in ONNX Runtime
    if kind == "LSTM":
        check_cell(kind, optional="bc", reads=(2,))


@pytest.mark.parametrize(
    ("names", "alpha", "beta"),
    [
        (["Softsign", "Affine", "ScaledTanh"], [0.7, 1.2], [0.1, 0.8]),
        (["HardSigmoid", "Softplus", "Elu"], [0.3, 0.6], [0.4]),
        (["Sigmoid", "LeakyRelu", "Relu"], [0.2], []),
        (["ThresholdedRelu", "Tanh", "Softsign"], [0.1], []),
    ],
)
def test_every_activation(names: list[str], alpha: list[float], beta: list[float]) -> None:
    numbers = {"activation_alpha": alpha} | ({"activation_beta": beta} if beta else {})
    check_cell("LSTM", activations=names, optional="bhc", fast=False, **numbers)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"w": (1, 4 * H, I), "r": (1, 4 * H, H), "b": (1, 8 * H)}
    return {name: rng.uniform(-0.9, 0.9, shape) for name, shape in shapes.items()}


def lstm_graph(output: str, state: str = "") -> onnx.GraphProto:
    """An LSTM over `x`, as the graph of a branch or of a loop over states."""
    nodes = [node("LSTM", ["x", "w", "r", "b", "", state], ["", output], hidden_size=H)]
    ports = [helper.make_tensor_value_info(output, TensorProto.DOUBLE, [1, B, H])]
    if not state:
        return helper.make_graph(nodes, "branch", [], ports)
    given = [
        helper.make_tensor_value_info(state, TensorProto.DOUBLE, [1, B, H]),
        helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["t", B, I]),
    ]
    return helper.make_graph(nodes, "body", given, ports)


@pytest.mark.parametrize("where", ["If", "Scan"])
def test_an_lstm_in_a_nested_graph(where: str) -> None:
    rng = np.random.default_rng(0)
    params = weights()
    if where == "If":
        inputs = {"x": rng.normal(size=(T, B, I))}
        made = node("If", ["c"], ["h"], then_branch=lstm_graph("a"), else_branch=lstm_graph("o"))
    else:
        inputs = {"xs": rng.normal(size=(2, T, B, I)), "h0": np.zeros((1, B, H))}
        body = lstm_graph("a", "s")
        made = node("Scan", ["h0", "xs"], ["h"], body=body, num_scan_inputs=1)
    forward = model_of(
        [made, node("Squeeze", ["h", "z"], ["y"])], params, inputs=inputs, dims=[B, H],
        constants={"c": np.array(True), "z": np.array([0])},
    )  # fmt: skip
    graphs = training_graphs(forward, "mse", wrt=list(params))
    check(graphs.train_step)
    cotangent = rng.normal(size=(B, H))
    found = exact(graphs.pullback, {**params, **inputs, graphs.output_gradient_name: cotangent})
    run = ReferenceEvaluator(graphs.forward, new_ops=OPS).run
    for name, gradient in zip(graphs.parameter_names, graphs.gradient_names, strict=True):
        way = rng.normal(size=params[name].shape)
        ahead, behind = (
            np.sum(run(["y"], params | inputs | {name: params[name] + h * way})[0] * cotangent)
            for h in (_H, -_H)
        )
        slope = np.sum(found[gradient] * way)
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * _H), rtol=1e-5, atol=1e-6)


def test_any_number_of_steps_and_sequences() -> None:
    params = weights()
    nodes = [node("LSTM", ["x", "w", "r", "b"], ["", "h"], hidden_size=H),
             node("Squeeze", ["h", "z"], ["y"])]  # fmt: skip
    forward = model_of(
        nodes, params, inputs={"x": np.ones((T, B, I))}, dtype=np.float32, symbolic=True,
        dims=["n", H], constants={"z": np.array([0])},
    )  # fmt: skip
    graphs = training_graphs(forward, "mse", wrt=list(params))
    feeds = {name: value.astype(np.float32) for name, value in params.items()}
    for steps, batch in ((1, 1), (7, 2)):
        x = np.ones((steps, batch, I), np.float32)
        labels = np.zeros((batch, H), np.float32)
        made = run_ort(graphs.gradients, {**feeds, "x": x, graphs.labels_name: labels})
        assert all(np.isfinite(made[name]).all() for name in graphs.gradient_names)
        plain = run_ort(graphs.loss, {**feeds, "x": x, graphs.labels_name: labels})
        np.testing.assert_allclose(made[graphs.loss_name], plain[graphs.loss_name], rtol=1e-5)


def test_the_forward_graph_keeps_the_op() -> None:
    nodes = [node("LSTM", ["x", "w", "r", "b"], ["", "h"], hidden_size=H),
             node("Squeeze", ["h", "z"], ["y"])]  # fmt: skip
    forward = model_of(nodes, weights(), inputs={"x": np.ones((T, B, I))},
                       constants={"z": np.array([0])})  # fmt: skip
    graphs = training_graphs(forward, "mse", wrt=["w", "r", "b"])
    for model, ops in ((graphs.forward, {"LSTM", "Squeeze"}), (graphs.pullback, {"Scan"})):
        assert ops <= {made.op_type for made in model.graph.node}
    assert "LSTM" not in {made.op_type for made in graphs.pullback.graph.node}
    again = training_graphs(forward, "mse", wrt=["w", "r", "b"])
    assert again.train_step.SerializeToString() == graphs.train_step.SerializeToString()


def test_what_is_refused_says_why() -> None:
    for attributes, says in (
        ({"clip": 1.0}, "clips"),
        ({"activations": ["Sigmoid", "Tanh"]}, "names 2 activations"),
        ({"activations": ["Sigmoid", "Tanh", "Sine"]}, "'Sine'"),
    ):
        with pytest.raises(GradientRuleError, match=says):
            check_cell("LSTM", fast=False, **attributes)
