"""Models as exporters write them, and a way to run Modules made of them.

Rule: weights come from a seed; what a Module gives is compared with ONNX Runtime on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import Module
from bbnode.dsl.onnx.module import OnnxPipeline
from bbnode.engine import install, steps
from bbnode.ir import keys
from bbnode.ir.peer import PeerId
from tests import protos
from tests.engine.support import Pump

FLOAT = TensorProto.FLOAT


class Weights:
    """Initializers from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: list[TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def random(self, name: str, *shape: int, scale: float = 0.3) -> str:
        return self.given(name, self._rng.normal(scale=scale, size=shape).astype(np.float32))

    def given(self, name: str, value: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def port(name: str, shape: Sequence[Any] | None, elem: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[TensorProto] = (),
    *,
    opset: int = keys.ONNX_OPSET_VERSION,
    ir_version: int = 10,
    name: str = "model",
    **domains: int,
) -> ModelProto:
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(d.replace("_", "."), v) for d, v in domains.items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    made.producer_name = "pytorch"
    return made


def mlp(sizes: Sequence[int] = (8, 16, 16, 4), *, opset: int = 21) -> ModelProto:
    """As PyTorch's exporter writes it: Gemm with transB, names with slashes and dots."""
    w = Weights()
    nodes = []
    value = "input.1"
    for i, (a, b) in enumerate(pairwise(sizes)):
        names = [value, w.random(f"fc{i}.weight", b, a), w.random(f"fc{i}.bias", b)]
        value = f"/fc{i}/Gemm_output_0"
        nodes.append(helper.make_node("Gemm", names, [value], name=f"/fc{i}/Gemm", transB=1))
        if i < len(sizes) - 2:
            nodes.append(helper.make_node("Relu", [value], [f"/act{i}/Relu_output_0"]))
            value = f"/act{i}/Relu_output_0"
    nodes.append(helper.make_node("Softmax", [value], ["probs"], axis=1))
    return model_of(
        nodes, [port("input.1", ["batch", sizes[0]])], [port("probs", ["batch", sizes[-1]])],
        w.tensors, opset=opset, name="torch-jit-export",
    )  # fmt: skip


def cnn(*, opset: int = 21) -> ModelProto:
    """Convolution, batch norm, pooling, a skip connection, a linear head."""
    w = Weights(1)
    n = helper.make_node
    nodes = [
        n("Conv", ["x", w.random("c1.w", 4, 1, 3, 3), w.random("c1.b", 4)], ["c1"], pads=[1] * 4),
        n("BatchNormalization", ["c1", w.given("bn.s", np.full(4, 1.5, np.float32)),
          w.random("bn.b", 4), w.random("bn.m", 4),
          w.given("bn.v", np.full(4, 0.7, np.float32))], ["bn"], epsilon=1e-5),
        n("Relu", ["bn"], ["r1"]),
        n("Conv", ["r1", w.random("c2.w", 4, 4, 3, 3)], ["c2"], pads=[1] * 4),
        n("Add", ["r1", "c2"], ["skip"]),
        n("MaxPool", ["skip"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        n("GlobalAveragePool", ["pool"], ["gap"]),
        n("Flatten", ["gap"], ["flat"]),
        n("Gemm", ["flat", w.random("fc.w", 4, 10), w.random("fc.b", 10)], ["logits"]),
    ]  # fmt: skip
    return model_of(
        nodes, [port("x", ["n", 1, 8, 8])], [port("logits", ["n", 10])], w.tensors,
        opset=opset, name="cnn",
    )  # fmt: skip


def transformer(*, d: int = 8, heads: int = 2) -> ModelProto:
    """One encoder block: attention, residuals, layer norm, GELU; shapes computed at run time."""
    w = Weights(2)
    n = helper.make_node
    w.given("split", np.array([d, d, d], np.int64))
    w.given("zero", np.array([0], np.int64))
    w.given("one", np.array([1], np.int64))
    w.given("hd", np.array([heads, d // heads], np.int64))
    w.given("d", np.array([d], np.int64))
    nodes = [
        n("LayerNormalization", ["x", w.random("ln1.s", d), w.random("ln1.b", d)], ["ln1"]),
        n("MatMul", ["ln1", w.random("qkv.w", d, 3 * d)], ["qkv"], name="/block/attn/MatMul"),
        n("Split", ["qkv", "split"], ["q", "k", "v"], axis=-1),
        n("Shape", ["x"], ["shape"]),
        n("Slice", ["shape", "zero", w.given("two", np.array([2], np.int64))], ["bt"]),
        n("Concat", ["bt", "hd"], ["split_shape"], axis=0),
        n("Concat", ["bt", "d"], ["join_shape"], axis=0),
    ]
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes.append(n("Reshape", [part, "split_shape"], [f"{part}4"]))
        nodes.append(n("Transpose", [f"{part}4"], [f"{part}t"], perm=perm))
    scale = w.given("scale", np.array((d // heads) ** -0.5, np.float32))
    nodes += [
        n("MatMul", ["qt", "kt"], ["scores"]),
        n("Mul", ["scores", scale], ["scaled"]),
        n("Softmax", ["scaled"], ["weights"], axis=-1),
        n("MatMul", ["weights", "vt"], ["context"]),
        n("Transpose", ["context"], ["ct"], perm=[0, 2, 1, 3]),
        n("Reshape", ["ct", "join_shape"], ["merged"]),
        n("MatMul", ["merged", w.random("out.w", d, d)], ["attn"]),
        n("Add", ["x", "attn"], ["res1"]),
        n("LayerNormalization", ["res1", w.random("ln2.s", d), w.random("ln2.b", d)], ["ln2"]),
        n("MatMul", ["ln2", w.random("up.w", d, 4 * d)], ["up"]),
        n("Gelu", ["up"], ["gelu"], approximate="tanh"),
        n("MatMul", ["gelu", w.random("down.w", 4 * d, d)], ["down"]),
        n("Add", ["res1", "down"], ["y"]),
    ]
    return model_of(
        nodes, [port("x", ["b", "t", d])], [port("y", ["b", "t", d])], w.tensors, name="block"
    )


def ort(model: ModelProto, **feeds: np.ndarray) -> dict[str, Any]:
    """What ONNX Runtime makes of the whole model; feeds by sanitised name, `.` and ` ` as `_`."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    named = {}
    for needed in session.get_inputs():
        given = feeds.get(needed.name.replace(".", "_").replace(" ", "_"))
        # What nothing reads has to be fed all the same, and may be anything.
        named[needed.name] = np.zeros(needed.shape, np.float32) if given is None else given
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, named), strict=True))


def compiled(module: Module, *classes: str) -> ModelProto:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    for name in classes:
        compiler = compiler.bind_peer_selector(name, ConnectedView)
    return compiler.compile(module.build())


def run(module: Module, **feeds: np.ndarray) -> dict[str, Any]:
    """Compile, install each class on a node of its own, invoke the home class; outputs by port."""
    classes = dict.fromkeys(module.classes) if isinstance(module, OnnxPipeline) else {}
    return run_compiled(compiled(module, *classes), module.home, **feeds)


def run_compiled(
    made: ModelProto, home: str, config: dict[str, Any] | None = None, **feeds: np.ndarray
) -> dict[str, Any]:
    targets = [f for f in made.functions if protos.get_meta(f, keys.TARGET_KEY)]
    nodes = {
        protos.get_meta(f, keys.HOME_KEY): install(
            made, [f.name], peer_id=PeerId.from_seed(seed), config=config
        )
        for seed, f in enumerate(targets)
    }
    pump = Pump(*nodes.values())
    pump.settle()
    nodes[home].invoke(home, feeds)
    pump.settle()
    for taken in pump.steps.values():
        failed = [step for step in taken if isinstance(step, steps.OpFailed)]
        assert not failed, failed
    return {e.topic: e.value for e in pump.of(nodes[home], steps.AppEvent)}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)


def x_of(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
