"""CompiledModule: what was recorded or compiled is a Module again, and means the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.components.registry import roles_of
from bbnode.dsl import (
    BackendSlot,
    CompiledModule,
    Graph,
    Module,
    OnnxModule,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.dsl.errors import BrokenArtifact, NestingTooDeep, NoSuchTarget, RecordingError
from bbnode.examples.federated_digits import FederatedRound
from bbnode.ir import keys
from tests import protos
from tests.dsl.onnx_models import assert_same, cnn, compiled, mlp, ort, run, run_compiled, x_of
from tests.dsl.programs import FromFunction
from tests.dsl.test_onnx_module import control_flow


def federated() -> Compiler:
    compiler = Compiler()
    for slot, component in FederatedRound().bindings().items():
        compiler = compiler.bind(roles_of(component)[0], slot, component)
    return compiler


def without_lines(model: ModelProto) -> bytes:
    bare = ModelProto()
    bare.CopyFrom(model)
    for function in bare.functions:
        for node in function.node:
            protos.del_meta(node, keys.SOURCE_LINE_KEY)
    return bare.SerializeToString(deterministic=True)


def program(g: Graph) -> None:
    """Sends both ways, a request, calls, scopes, triggers, composites, every kind of constant."""
    x = g.input("x", types.TENSOR_FLOAT)
    workers = g.input("worker")
    with g.with_module("prepare"):
        k = g.constant(np.arange(4, dtype=np.float32))
        sum_ = BackendSlot("compute").add(g, x, k)
    syscalls.incr_metric(g, syscalls.on_trigger(g, x), name="runs", after=sum_)
    request = g.request("ask", workers, g.bundle([sum_, g.constant(3)]), quorum=1, deadline=2.5)
    first, _ = g.unbundle(request.received, [types.TENSOR_FLOAT, types.TENSOR_INT64])
    inner = FromFunction(_double, name="Double")
    doubled = inner.call().input("v", first).build(g).output("twice")
    request.respond(doubled)
    note = g.net_out("note", workers, sum_)
    syscalls.app_emit(g, note, name="note")
    g.net_out("back", note.sender, note)
    syscalls.app_emit(g, g.lookup_output("back"), name="back", after=g.lookup_output("back"))
    g.output("responses", request.responses)


def _double(g: Graph) -> None:
    v = g.input("v", types.TENSOR_FLOAT)
    g.output("twice", BackendSlot("compute").add(g, v, v))


@pytest.mark.parametrize(
    "module",
    [
        FederatedRound(),
        FromFunction(program, name="Program", home="boss"),
        OnnxModule(cnn(), name="cnn"),
        OnnxModule(control_flow(), name="flow"),
        OnnxModule(mlp(), name="mlp").split(stages=2),
    ],
    ids=lambda module: module.name,
)
def test_a_recorded_program_replays_to_the_very_same_one(module) -> None:
    recorded = module.build()
    replayed = CompiledModule(recorded)
    assert (replayed.name, replayed.home) == (module.name, module.home)
    if module.name == "flow":  # names inside of nested graphs are the recorder's own
        assert len(replayed.build().functions[0].node) == len(recorded.functions[0].node)
    else:
        assert without_lines(replayed.build()) == without_lines(recorded)


def _ops(model: ModelProto) -> dict[str, list[str]]:
    """Op types per target by class, with subgraphs taken apart."""
    found = {}
    for main in model.functions:
        if protos.get_meta(main, keys.TARGET_KEY):
            found[protos.get_meta(main, keys.HOME_KEY) or ""] = sorted(n.op_type for n in main.node)
    return found


def test_a_compiled_program_is_put_together_and_cut_again() -> None:
    compiler = federated()
    first = compiler.compile(FederatedRound().build())
    replayed = CompiledModule(first)
    assert replayed.home == "server"
    assert replayed.bound["compute"] == "bbnode.OrtBackend"
    again = compiler.compile(replayed.build())
    assert _ops(again) == _ops(first)
    for main in again.functions:  # slot ops keep their order: load, then train, then hand out
        if protos.get_meta(main, keys.HOME_KEY) == "client":
            order = [n.op_type for n in main.node if protos.get_meta(n, keys.SLOT_KEY)]
            assert order == ["LoadParameters", "Train", "Params"]


def test_a_compiled_program_stands_inside_of_another_one() -> None:
    compiler = federated()
    replayed = CompiledModule(compiler.compile(FederatedRound().build()))

    class Nightly(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            made = replayed.call().input("tick", tick).build(g)
            g.output("accuracy", made.output("accuracy"))

    made = compiler.compile(Nightly().build())
    assert set(_ops(made)) == {"client", "server"}


def test_a_compiled_model_runs_as_it_did() -> None:
    model = cnn()
    x = x_of(2, 1, 8, 8)
    made = compiled(OnnxModule(model, name="cnn"))
    replayed = CompiledModule(made, "@self", name="Again")
    assert_same(run(replayed, x=x), ort(model, x=x))
    feeds = {"x0": np.array([1, -2, 3], np.float32), "n": np.array(3, np.int64)}
    flow = CompiledModule(compiled(OnnxModule(control_flow())))
    assert_same(run(flow, **feeds), ort(control_flow(), **feeds))


def test_a_compiled_pipeline_runs_inside_of_a_program_of_another_home() -> None:
    model = mlp()
    inner = CompiledModule(
        compiled(OnnxModule(model).split(stages=2), "stage0", "stage1"), name="Inner"
    )

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("probs", inner.call().input("input_1", x).build(g).output("probs"))

    compiler = Compiler().bind_backend("compute", OrtBackend)
    for name in inner.bound:
        if name.startswith("stage"):
            compiler = compiler.bind_peer_selector(name, ConnectedView)
    made = compiler.compile(FromFunction(body, home="edge").build())
    x = x_of(3, 8)
    assert_same(run_compiled(made, "edge", x=x), ort(model, input_1=x))


def test_bootstraps_are_replayed() -> None:
    class Starts(Module):
        def body(self, g: Graph) -> None:
            g.output("y", g.input("x", types.TENSOR_FLOAT))

        def bootstrap(self, g: Graph) -> None:
            syscalls.app_notify(g, g.input("go", types.TRIGGER), name="started")

    recorded = Starts().build()
    assert without_lines(CompiledModule(recorded).build()) == without_lines(recorded)
    again = CompiledModule(Compiler().compile(recorded)).build()
    (bootstrap,) = [f for f in again.functions if f.name.endswith("__bootstrap")]
    assert [n.op_type for n in bootstrap.node] == ["AppNotify"]


def test_targets_that_cannot_be_replayed_alone() -> None:
    first = federated().compile(FederatedRound().build())
    with pytest.raises(BrokenArtifact, match="replay the whole program"):
        CompiledModule(first, "client")
    with pytest.raises(BrokenArtifact, match="replay the whole program"):
        CompiledModule(first, "server")
    with pytest.raises(NoSuchTarget, match="no target 'serve'"):
        CompiledModule(first, "serve")
    with pytest.raises(NoSuchTarget, match="not compiled"):
        CompiledModule(FederatedRound().build(), "server")


def test_what_is_no_program_is_told() -> None:
    for nothing in (None, "file.onnx", ModelProto(), mlp()):
        with pytest.raises(BrokenArtifact, match="holds no program"):
            CompiledModule(nothing)
    changed = compiled(OnnxModule(mlp()))
    changed.functions[0].node[0].name = "other"
    with pytest.raises(BrokenArtifact, match="changed after it was compiled"):
        CompiledModule(changed)


def test_damaged_recordings_are_typed_errors() -> None:
    recorded = FromFunction(program, name="Program", home="boss").build()
    dangling = ModelProto()
    dangling.CopyFrom(recorded)
    lost = next(i for i, n in enumerate(dangling.functions[0].node) if n.op_type == "Add")
    del dangling.functions[0].node[lost]
    with pytest.raises(BrokenArtifact, match="which nothing before it makes"):
        CompiledModule(dangling).build()
    ring = ModelProto()
    ring.CopyFrom(recorded)
    call = ring.functions[1].node.add(name="again", domain=keys.MODULE_DOMAIN, op_type="Double")
    call.input.append("v")
    with pytest.raises(NestingTooDeep, match="calls itself"):
        CompiledModule(ring)
    unknown = ModelProto()
    unknown.CopyFrom(OnnxModule(mlp()).build())
    next(n for n in unknown.functions[0].node if n.op_type == "Gemm").op_type = "Gemmm"
    with pytest.raises(BrokenArtifact, match="ONNX has no op 'Gemmm'"):
        CompiledModule(unknown).build()


def test_any_byte_of_a_recording_may_be_wrong() -> None:
    whole = FromFunction(program, name="Program", home="boss").build().SerializeToString()
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(300):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] = int(rng.integers(256))
        try:
            model = onnx.load_model_from_string(bytes(data))
        except Exception:  # noqa: BLE001 - the protobuf runtime's own, before ours
            continue
        try:
            CompiledModule(model).build()
        except RecordingError as error:
            kinds.add(type(error))
    assert kinds


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_author_said_of_time_stands_and_the_rest_is_counted_anew(times: int) -> None:
    """`hops=` and `deadline=` are replayed; what a compile derived is not, as if it had been
    the author's: the parent's budget per hop and its chain count."""

    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        to = PeerSelectorSlot("to", peer_class="b").sample(g, n=1, after=x)
        for port, more in (("said", {"deadline": 3.0}), ("counted", {})):
            asked = g.request(port, to, x, **more)
            asked.respond(asked.received)
        received = g.net_out("in", to, x)
        g.net_out("out", received.sender, received, hops=7)

    compiler = Compiler().bind_peer_selector("to", ConnectedView)
    model = FromFunction(body, name="Timed", home="a").build()
    for _ in range(times):
        model = CompiledModule(compiler.with_per_hop_budget_ns(1000).compile(model)).build()
    again = compiler.with_per_hop_budget_ns(10).compile(model)
    found = {
        protos.get_meta(node, keys.PORT_KEY): (
            protos.get_meta(node, keys.CHAIN_DEPTH_KEY),
            protos.get_meta(node, keys.DEADLINE_NS_KEY),
            protos.get_attr(node, keys.ATTR_DEADLINE_NS),
        )
        for function in again.functions
        for node in function.node
        if node.op_type in ("Send", "SendReqBatched")
    }
    assert found == {
        "said": ("2", "3000000000", 3_000_000_000),
        "counted": ("2", "20", 20),
        "in": ("8", "80", None),
        "out": ("7", "70", None),
    }
