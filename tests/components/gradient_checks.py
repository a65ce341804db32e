"""Gradients of single nodes, ONNX's own node tests among them, against differences.

The gradient of a random cotangent is compared, along random directions and single elements, with
central differences in float64 (in ONNX Runtime, or in ONNX's reference evaluator where that has no
kernel); ONNX Runtime has to agree in float32, and in float16 to within its precision, wherever it
runs the op itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.reference.op_run import RuntimeTypeError

from bbnode.components.autodiff import supported_ops
from bbnode.components.autodiff.builder import FLOATS, GraphBuilder, inferred_types, prune
from bbnode.components.autodiff.reverse import pull_back
from bbnode.components.autodiff.table import lookup
from bbnode.ir.keys import ONNX_OPSET_VERSION
from bbnode.ir.onnx_file import subgraph_of
from bbnode.ir.versions import means_the_same
from tests.components.graphs import evaluator_of, ort_runner, run_ort

OPSET = 21
COARSE = ("Gelu", "Shrink")  # ONNX Runtime or its evaluator work in float32 inside
MAX_ELEMENTS = 4000  # the reference evaluator is slow
TOLERANCE = {np.float64: 1e-5, np.float32: 2e-3, np.float16: 4e-2}


@dataclass
class NodeCase:
    name: str
    node: NodeProto
    opset: int
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def node_cases() -> list[NodeCase]:
    """Return ONNX's node tests of one node that has a rule."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collected = collect_testcases(None)
    found = []
    ops = set(supported_ops())
    for case in collected:
        graph = case.model.graph
        if len(graph.node) != 1 or graph.node[0].op_type not in ops or graph.node[0].domain:
            continue
        made = graph.node[0]
        version = case.model.opset_import[0].version
        view = next(iter(subgraph_of(graph).all_nodes()))
        opset = OPSET if means_the_same(view, version, OPSET) else version
        if not OPSET <= opset <= ONNX_OPSET_VERSION:
            continue
        for number, (inputs, outputs) in enumerate(case.data_sets):
            names = [[info.name for info in infos] for infos in (graph.input, graph.output)]
            found.append(
                NodeCase(
                    f"{case.name}-{number}",
                    made,
                    opset,
                    arrays_by_name(names[0], inputs),
                    arrays_by_name(names[1], outputs),
                )
            )
    return found


def arrays_by_name(names: Sequence[str], values: Sequence[object]) -> dict[str, np.ndarray]:
    """Return the values by name; numpy's scalars become arrays."""
    made = (np.asarray(v) if isinstance(v, np.generic) else v for v in values)
    return dict(zip(names, made, strict=True))


def is_float(array: object) -> bool:
    return isinstance(array, np.ndarray | np.generic) and array.dtype.kind == "f"


def model_in(case: NodeCase, dtype: type, symbolic: bool) -> ModelProto:
    """Return the case as a model whose floats are of `dtype`."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = NodeProto()
    node.CopyFrom(case.node)
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.i in FLOATS:
            attribute.i = elem
    infos = []
    for name, array in case.inputs.items():
        kind = elem if is_float(array) else helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = [f"{name}_{i}" for i in range(array.ndim)] if symbolic else list(array.shape)
        infos.append(helper.make_tensor_value_info(name, kind, dims))
    outputs = []
    for at, (name, array) in enumerate(case.outputs.items()):
        kind = elem if is_float(array) else helper.np_dtype_to_tensor_dtype(array.dtype)
        if at and node.op_type == "LayerNormalization":
            kind = TensorProto.FLOAT  # its statistics are always of this type
        outputs.append(helper.make_tensor_value_info(name, kind, None))
    return helper.make_model(
        helper.make_graph([node], "g", infos, outputs),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", case.opset)],
    )


def gradient_of(
    model: ModelProto, seeds: Mapping[str, str], wrt: Sequence[str], case: NodeCase
) -> tuple[ModelProto, list[str]]:
    """Return the model that gives gradients of `wrt` for cotangents of outputs."""
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    b = GraphBuilder({*taken, *seeds.values()})
    types = inferred_types(model)
    grads = pull_back(b, graph.node, types, seeds, wrt)
    infos = [
        helper.make_tensor_value_info(
            seed, types[out].elem_type, [None] * np.ndim(case.outputs[out])
        )
        for out, seed in seeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(
            grads[name], types[name].elem_type, [None] * case.inputs[name].ndim
        )
        for name in wrt
    ]
    unique = {info.name: info for info in outputs}
    nodes, tensors = prune([*graph.node, *b.nodes], b.initializers, unique, b.instead)
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "gradients",
            [*graph.input, *infos],
            list(unique.values()),
            tensors,
        ),
        ir_version=10,
        opset_imports=list(model.opset_import),
    )
    onnx.checker.check_model(made)
    return made, [grads[name] for name in wrt]


class Reference:
    """ONNX's reference evaluator on one model, without its warnings."""

    def __init__(self, model: ModelProto) -> None:
        self._run = evaluator_of(model).run
        self._names = [info.name for info in model.graph.output]

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return dict(zip(self._names, self._run(None, dict(feeds)), strict=True))


class Runtime:
    """ONNX Runtime on one model."""

    def __init__(self, model: ModelProto) -> None:
        self._run = ort_runner(model)
        self._names = [info.name for info in model.graph.output]
        self._wanted = {info.name for info in model.graph.input}

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        fed = {name: np.asarray(value) for name, value in feeds.items() if name in self._wanted}
        return dict(zip(self._names, self._run(self._names, fed), strict=True))


def slope(
    run, feeds: Mapping[str, np.ndarray], name: str, along: np.ndarray,
    cotangents: Mapping[str, np.ndarray], h: float,
) -> float:  # fmt: skip
    """Return the derivative along a direction; NaN where steps of two widths disagree: a kink."""

    def value(step: float) -> float:
        out = run({**feeds, name: feeds[name] + step * along})
        return float(sum(np.sum(out[k].astype(np.float64) * c) for k, c in cotangents.items()))

    wide, narrow = ((value(d) - value(-d)) / (2 * d) for d in (h, h / 4))
    one_sided = (value(h) - value(0)) / h
    bound = 1e-3 * (1 + abs(wide))
    agree = abs(wide - narrow) < bound and abs(wide - one_sided) < 1e-2 * (1 + abs(wide))
    return narrow if agree else float("nan")


def check_node_case(case: NodeCase, symbolic: bool = False) -> set[str]:
    """Check one case; returns the engines and types that it was compared in."""
    entry = lookup("", case.node.op_type)
    assert entry is not None
    rng = np.random.default_rng(0)
    settings = entry.constant_inputs
    positions = {name: i for i, name in enumerate(case.node.input) if name}
    wrt = [
        name
        for name, array in case.inputs.items()
        if is_float(array) and positions[name] not in settings
    ]
    outputs = [
        name
        for i, (name, array) in enumerate(case.outputs.items())
        if is_float(array) and (i == 0 or case.node.op_type == "Split")
    ]
    if not wrt or not outputs or sum(array.size for array in case.inputs.values()) > MAX_ELEMENTS:
        return set()
    wide = model_in(case, np.float64, symbolic)
    # Off the round numbers, where kinks and equal elements are.
    feeds = {
        name: (
            array.astype(np.float64) + (rng.uniform(0.01, 0.04, array.shape) if name in wrt else 0)
            if is_float(array)
            else array
        )
        for name, array in case.inputs.items()
    }
    engine: type[Runtime | Reference] = Runtime
    try:
        whole = Runtime(wide)(feeds)
    except Exception:  # noqa: BLE001  # no such kernel in float64
        engine = Reference
        try:
            whole = Reference(wide)(feeds)
        except RuntimeTypeError:  # the evaluator expands some ops with constants in float32
            return set()
    run = engine(wide)
    step = 1e-3 if case.node.op_type in COARSE else 1e-5
    cotangents = {name: rng.normal(size=np.shape(whole[name])) for name in outputs}
    seeds = {name: f"seed_{name}" for name in outputs}
    model, names = gradient_of(wide, seeds, wrt, case)
    all_feeds = {**feeds, **{seeds[k]: c for k, c in cotangents.items()}}
    exact = dict(zip(wrt, map(engine(model)(all_feeds).__getitem__, names), strict=True))
    for name in wrt:
        assert exact[name].shape == feeds[name].shape
        assert exact[name].dtype == np.float64
        if not feeds[name].size:
            continue
        directions = [rng.normal(size=feeds[name].shape) for _ in range(2)]
        for _ in range(3):
            one = np.zeros(feeds[name].shape)
            one[tuple(rng.integers(n) for n in one.shape)] = 1.0
            directions.append(one)
        for along in directions:
            expected = slope(run, feeds, name, along, cotangents, step)
            if np.isfinite(expected):
                found = float(np.sum(exact[name] * along))
                bound = step if step > 1e-4 else 1e-4
                assert abs(found - expected) < bound * (1 + abs(expected)), (name, found, expected)
    done = {"float64"}
    for dtype in (np.float32, np.float16):
        small = model_in(case, dtype, symbolic)
        with np.errstate(over="ignore"):
            narrow = {k: v.astype(dtype) if is_float(v) else v for k, v in all_feeds.items()}
        try:
            forward = run_ort(small, narrow)
        except Exception:  # noqa: BLE001  # no such kernel: nothing to compare
            continue
        largest = max(np.max(np.abs(a), initial=0) for a in feeds.values() if is_float(a))
        if not all(np.isfinite(forward[k]).all() for k in outputs) or largest > 1e3:
            continue  # beyond what a half holds
        model, names = gradient_of(small, seeds, wrt, case)
        got = run_ort(model, narrow)
        scale = TOLERANCE[dtype]
        for name, made in zip(wrt, names, strict=True):
            assert got[made].dtype == dtype
            size = float(np.nanmax(np.abs(exact[name]), initial=1.0))
            np.testing.assert_allclose(
                got[made].astype(np.float64), exact[name], rtol=scale, atol=scale * size
            )
        done.add(np.dtype(dtype).name)
    return done
