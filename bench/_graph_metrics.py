"""What the engine adds to a graph that a backend runs, and to a tensor that passes through.

Rule: an ONNX model runs twice in one process, in turn: compiled, installed and invoked
(up to the step that gives the output), and by a bare `InferenceSession.run` of the very session
that the node made: two sessions of one model differ by up to 7 %, for where their weights lie.
A turn is some calls; the engine gets them as executions that wait for one poll. One call goes
before each turn and is not timed: it would pay for what was measured before, which has the weights
out of the caches, and the engine's turn is the first of each pair. Inputs are
arrays over `bytes`, as they come from a file or a peer, which a node takes without a copy.
Ratios are medians over pairs of turns that follow each other: what slows the machine for a while
slows both, and the best turns of either need not have had the same luck.

Metrics:
    fused_mlp_vs_ort, fused_cnn_vs_ort: throughput through the engine over that of the bare
        session: an MLP (784, 512, 512, 10), and a CNN of two convolutions (16 and 32 channels)
        over 28 x 28 pictures, both with batches of 32. What the engine adds to a call does not
        depend on the graph: the times below tell it.
    us_fused_mlp, us_fused_cnn, us_ort_mlp, us_ort_cnn: microseconds of a call, either way.
    tensor_64mib_copies_in: how often the bytes of a 64 MiB tensor are copied between
        `deliver_inbound` and the input of an op that hands it to ONNX Runtime.
    tensor_64mib_copies_out: the same between an op's result and the buffers of SendEnvelope.
        Both by the peak of traced memory, which counts every buffer of numpy and Python.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter_ns

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from onnxruntime import InferenceSession

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend, mlp_forward
from bbnode.dsl import BackendSlot, Graph, Module, OnnxModule, PeerSelectorSlot, types
from bbnode.engine import Limits, install, steps
from bbnode.ir import codec
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import SlotFill, WireCorrelation, WireEnvelope, encode_envelope
from bbnode.ir.keys import ONNX_OPSET_VERSION, SITE_ID_KEY
from bbnode.ir.onnx_file import function_of
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value

MOST = {"tensor_64mib_copies_in": 1.0, "tensor_64mib_copies_out": 1.0}
LEAST = {"fused_mlp_vs_ort": 0.95, "fused_cnn_vs_ort": 0.95}
BATCH = 32
CALLS = 64  # of a turn: throughput, with the caches as a busy node has them
TENSOR_BYTES = 64 << 20
NS_PER_US = 1_000


def mlp() -> ModelProto:
    """784 -> 512 -> 512 -> 10, as for small pictures."""
    return mlp_forward((784, 512, 512, 10))


def cnn() -> ModelProto:
    """Two convolutions with pools and a dense layer, for pictures [N, 1, 28, 28]."""
    rng = np.random.default_rng(0)
    shapes = {
        "k0": (16, 1, 3, 3),
        "b0": (16,),
        "k1": (32, 16, 3, 3),
        "b1": (32,),
        "w": (32 * 7 * 7, 10),
    }
    node = helper.make_node
    graph = helper.make_graph(
        [
            node("Conv", ["x", "k0", "b0"], ["h0"], pads=[1, 1, 1, 1]),
            node("Relu", ["h0"], ["h1"]),
            node("MaxPool", ["h1"], ["h2"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Conv", ["h2", "k1", "b1"], ["h3"], pads=[1, 1, 1, 1]),
            node("Relu", ["h3"], ["h4"]),
            node("MaxPool", ["h4"], ["h5"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", ["h5"], ["h6"]),
            node("MatMul", ["h6", "w"], ["logits"]),
        ],
        "cnn",
        [helper.make_tensor_value_info("x", 1, ["batch", 1, 28, 28])],
        [helper.make_tensor_value_info("logits", 1, ["batch", 10])],
        [
            numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), name)
            for name, shape in shapes.items()
        ],
    )
    opset = helper.make_opsetid("", ONNX_OPSET_VERSION)
    return helper.make_model(graph, ir_version=10, opset_imports=[opset])


class Ship(Module):
    """A tensor that comes in is computed with, and goes on."""

    home = "left"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        sent = g.net_out("there", PeerSelectorSlot("peers", peer_class="right").sample(g, n=1), x)
        made = BackendSlot("compute").neg(g, sent)
        back = g.net_out("back", sent.sender, made)
        g.output("y", back)


def turns(model: ModelProto, batch: np.ndarray) -> tuple[Callable[[], float], Callable[[], float]]:
    """One turn of calls on a node, and one of its bare session: nanoseconds per call."""
    compiled = Compiler().bind_backend("compute", OrtBackend).compile(OnnxModule(model).build())
    node = install(compiled, ["@self"], peer_id=PeerId.from_seed(0))
    node.poll(0)
    session: InferenceSession = node._rt.graphs[0].run.__self__._session
    feed = session.get_inputs()[0].name
    outputs = [port.name for port in session.get_outputs()]

    def through_the_engine() -> float:
        given = 0
        node.invoke("@self", {"x": batch})
        node.poll(0)
        started = perf_counter_ns()
        for _ in range(CALLS):
            node.invoke("@self", {"x": batch})
        for step in node.poll(0):
            given += type(step) is steps.AppEvent
        spent = perf_counter_ns() - started
        if given != CALLS:
            raise SystemExit(f"{given} of {CALLS} calls gave their output")
        return spent / CALLS

    def bare() -> float:
        session.run(outputs, {feed: batch})
        started = perf_counter_ns()
        for _ in range(CALLS):
            session.run(outputs, {feed: batch})
        return (perf_counter_ns() - started) / CALLS

    return through_the_engine, bare


def graph_turns() -> dict[str, Callable[[], float]]:
    """What is measured in turn, by metric."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(BATCH, 1, 28, 28)).astype(np.float32).tobytes()
    pictures = np.frombuffer(pixels, np.float32).reshape(BATCH, 1, 28, 28)
    found = {}
    for name, model, batch in (
        ("mlp", mlp(), pictures.reshape(BATCH, -1)),
        ("cnn", cnn(), pictures),
    ):
        found[f"us_fused_{name}"], found[f"us_ort_{name}"] = turns(model, batch)
    return found


def graph_ratios(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The ratios of what `graph_turns` measured, each time of all times."""
    return {
        f"fused_{name}_vs_ort": median(
            bare / fused
            for bare, fused in zip(taken[f"us_ort_{name}"], taken[f"us_fused_{name}"], strict=True)
        )
        for name in ("mlp", "cnn")
    }


def copies() -> dict[str, float]:
    """Copies of a large tensor on its way in and out."""
    compiler = Compiler().bind_peer_selector("peers", ConnectedView)
    compiled = compiler.bind_backend("compute", OrtBackend).compile(Ship().build())
    main = next(f for f in compiled.functions if f.name.startswith("right#"))
    recv = next(node for node in function_of(main).nodes if node.op_type == "Recv")
    limits = Limits(envelope_bytes=2 * TENSOR_BYTES, ingress_bytes=8 * TENSOR_BYTES)
    node = install(compiled, [main.name], peer_id=PeerId.from_seed(0), limits=limits)
    sender = PeerId.from_seed(1)
    node.set_addresses([])
    node.peer_connected(sender, ("left",))
    node.poll(0)
    fill = SlotFill(
        dest_suffix=site_suffix(int(recv.metadata[SITE_ID_KEY])),
        payload=codec.encode_value(np.ones(TENSOR_BYTES // 4, np.float32)),
        type_hash=types.TENSOR_FLOAT.wire_hash,
    )
    envelope = WireEnvelope(
        fills=(fill,),
        correlation=WireCorrelation(wire_req_id=1),
        src_peer_bytes=sender.to_bytes(),
    )
    data = b"".join(encode_envelope(envelope))
    del fill, envelope
    runner = node._rt.graphs[0]
    on_backend = runner.run
    traced: list[tuple[int, int]] = []  # bytes held, and their peak so far

    def run(inputs: Sequence[Value]) -> Sequence[Value]:
        results = on_backend(inputs)  # ONNX Runtime's own memory is not traced
        traced.append(tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        return results

    runner.run = run
    tracemalloc.start()
    try:
        node.deliver_inbound(sender, data)
        made = node.poll(0)
        traced.append(tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    sent = [step for step in made if type(step) is steps.SendEnvelope]
    if len(sent) != 1 or sum(len(part) for part in sent[0].parts) <= TENSOR_BYTES:
        raise SystemExit(f"the tensor did not come back: {made}")
    return {
        "tensor_64mib_copies_in": traced[0][1] / TENSOR_BYTES,
        "tensor_64mib_copies_out": (traced[1][1] - traced[0][0]) / TENSOR_BYTES,
    }
