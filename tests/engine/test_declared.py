"""A value that is not what its op declares fails at that op, and not where it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView
from bbnode.dsl import Graph, ModelSlot, Module, PeerSelectorSlot, types
from bbnode.engine import errors, steps
from bbnode.engine.ops.declared import Declared
from bbnode.ir import keys
from bbnode.ir.graph import ValueType
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.ir.values import TRIGGER, Composite, Metadata
from tests.engine.builder import Partition, model, subgraph
from tests.engine.support import EvalBackend, Pump, ScriptModel, bring_up, component, of

MODEL = keys.role_domain("Model")
DATA = keys.role_domain("DataSource")


def declared(p: Partition, functions=(), **shapes: tuple[Any, ...]):
    """The artifact of a partition that declares shapes of float32 values."""
    program = program_of(model(p, functions=functions))
    for name, shape in shapes.items():
        program.functions[0].types[name] = ValueType.of(types.TENSOR_FLOAT, shape)
    return model_of(program)


def forward(**shapes: tuple[Any, ...]):
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m", called="here")
    p.type("y", types.TENSOR_FLOAT)
    p.output("out", "y")
    return bring_up(declared(p, **shapes), "server")


def run(node, **inputs):
    node.invoke("server", inputs or {"x": np.zeros(1, np.float32)})
    made = node.poll(0)
    return [e.value for e in of(steps.AppEvent, made)], of(steps.OpFailed, made)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (np.zeros((2, 3)), "Tensor.DOUBLE [2, 3]"),
        (np.zeros(2, np.int64), "Tensor.INT64 [2]"),
        (np.float64(1), "Tensor.DOUBLE []"),
        (Metadata(a=1), "Metadata"),
        (TRIGGER, "Trigger"),
        (3.5, "float"),
        ([1.0], "list"),
        (np.array(["a"]), "Tensor.STRING [1]"),
        (np.array([1j]), "ndarray"),
    ],
)
def test_what_a_component_returns_is_checked_at_its_op(returned: object, got: str) -> None:
    node = forward()
    component(node, "m").returns = returned
    shown, (failed,) = run(node)
    assert shown == []
    assert (failed.op, failed.kind) == ("here", "WrongResultType")
    assert "slot 'm' (test.ScriptModel), op here (Forward): output" in failed.detail
    assert f"expected Tensor.FLOAT, got {got}" in failed.detail


def test_what_fits_passes_whatever_carries_it() -> None:
    node = forward()
    for fits in (np.zeros((2, 3), np.float32), np.float32(2), np.zeros(2, ">f4")):
        component(node, "m").returns = fits
        assert len(run(node)[0]) == 1


def test_a_declared_shape_is_checked_too() -> None:
    node = forward(y=(None, "n", 3))
    component(node, "m").returns = np.zeros((2, 5, 3), np.float32)
    assert len(run(node)[0]) == 1
    for shape in ((2, 5, 4), (5, 3), (), (1, 2, 5, 3)):
        component(node, "m").returns = np.zeros(shape, np.float32)
        _, (failed,) = run(node)
        assert f"expected Tensor.FLOAT [?, n, 3], got Tensor.FLOAT {list(shape)}" in failed.detail


def test_each_output_of_several_is_checked() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("model", "Model", "test.ScriptModel")
    p.bind("d", "DataSource", "test.DependentData")
    p.op(DATA, "NextBatch", (), ["batch", "labels"], slot="d", after=["x"])
    p.type("labels", types.TENSOR_FLOAT)
    p.output("out", "batch")
    node = bring_up(model(p), "server")
    _, (failed,) = run(node, x=TRIGGER)
    assert "output 'labels': expected Tensor.FLOAT, got Tensor.INT64 [2]" in failed.detail
    component(node, "d").next_batch = lambda _ctx: (np.ones(2, np.float32),)
    _, (failed,) = run(node, x=TRIGGER)
    assert "returned 1 values; expected a tuple of 2" in failed.detail


def test_a_component_with_several_types_may_return_any_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = (types.TENSOR_FLOAT, types.TENSOR_INT64)
    node = forward(y=(2,))
    monkeypatch.setattr(ScriptModel, "storage", {"Forward.output": several, "*": several})
    for dtype, fits in ((np.int64, True), (np.float32, True), (np.float64, False)):
        component(node, "m").returns = np.zeros(2, dtype)
        shown, failed = run(node)
        assert (len(shown), len(failed)) == (fits, not fits)
    component(node, "m").returns = np.zeros(3, np.int64)
    assert run(node)[1][0].kind == "WrongResultType"


def test_an_array_of_objects_is_looked_at() -> None:
    wanted = Declared(types.TENSOR_STRING)
    assert wanted.misfit(np.array(["a", "b"], object)) == ""
    assert "expected Tensor.STRING, got ndarray" in wanted.misfit(np.array(["a", 3], object))


def test_a_composite_with_something_that_is_no_value_is_told() -> None:
    wanted = Declared(types.COMPOSITE)
    assert wanted.misfit(Composite((np.zeros(1), TRIGGER))) == ""
    assert "expected Composite, got Composite: " in wanted.misfit(Composite((object(),)))


class Pushes(Module):
    home = "server"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        peers = PeerSelectorSlot("peers", peer_class="client").current_view(g, after=tick)
        received = g.net_out("weights", peers, ModelSlot("global").params(g, after=peers))
        ModelSlot("local").load_parameters(g, received)


def test_a_model_of_doubles_fails_on_the_server_with_the_line() -> None:
    made = (
        Compiler()
        .bind_model("global", ScriptModel)
        .bind_model("local", ScriptModel)
        .bind_peer_selector("peers", ConnectedView)
        .compile(Pushes().build())
    )
    server, client = bring_up(made, "server", me=1), bring_up(made, "client", me=2)
    pump = Pump(server, client)
    component(server, "global").value = np.zeros(4)
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (failed,) = pump.of(server, steps.OpFailed)
    assert failed.kind == "WrongResultType"
    assert failed.line.startswith("test_declared.py:")
    assert "expected Tensor.FLOAT, got Tensor.DOUBLE [4]" in failed.detail
    assert pump.of(client, steps.WireReceiveFailed) == []
    assert component(client, "local").calls == []


def test_a_send_carries_only_what_its_edge_declares() -> None:
    p = Partition("server", inputs=["x", "peers"])
    p.type("x", types.TENSOR)
    p.sys("PassThrough", ["x"], "y")
    p.type("y", types.TENSOR_FLOAT)
    p.send("y", "peers", 7, called="out")
    node = bring_up(model(p), "server")
    _, (failed,) = run(node, x=np.zeros(2), peers=node.peer_id)
    assert (failed.op, failed.kind) == ("out", "InvalidOperand")
    assert "expected Tensor.FLOAT, got Tensor.DOUBLE [2]" in failed.detail
    assert run(node, x=np.zeros(2, np.float32), peers=node.peer_id)[1] == []


class _Lies:
    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def run(self, inputs: object) -> list[Any]:
        del inputs
        return self.results


@pytest.mark.parametrize("inputs", [1, 2])
def test_what_a_backend_returns_is_checked(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = []
    monkeypatch.setattr(EvalBackend, "prepare", lambda _self, _model: _Lies(results))
    names = [f"a{n}" for n in range(inputs)]
    body = subgraph("subgraph_1", names, ["b"], [helper.make_node("Sum", names, ["b"])])
    p = Partition("server", inputs=names)
    for name in names:
        p.type(name, types.TENSOR_FLOAT)
    p.bind("c", "Backend", "test.EvalBackend")
    p.op(keys.BACKEND_SUBGRAPH_DOMAIN, "subgraph_1", names, ["y"], slot="c", called="graph")
    p.type("y", types.TENSOR_FLOAT)
    p.output("out", "y")
    node = bring_up(model(p, functions=[body]), "server")
    given = {name: np.zeros(2, np.float32) for name in names}
    results[:] = [np.zeros(2, np.float32)]
    assert len(run(node, **given)[0]) == 1
    results[:] = [np.zeros(2)]
    _, (failed,) = run(node, **given)
    assert (failed.op, failed.kind) == ("graph", "WrongResultType")
    assert "slot 'c' (test.EvalBackend), op graph" in failed.detail
    assert "expected Tensor.FLOAT, got Tensor.DOUBLE [2]" in failed.detail
    for count in (0, 2):
        results[:] = [np.zeros(2, np.float32)] * count
        _, (failed,) = run(node, **given)
        assert failed.kind == "WrongResultType"
        assert f"returned {count} outputs for 1" in failed.detail


def test_inputs_of_invoke_are_refused_by_shape() -> None:
    p = Partition("server", inputs=["x", "y"])
    p.sys("PassThrough", ["x"], "z")
    p.output("out", "z")
    node = bring_up(declared(p, x=("n", 3), y=("n",)), "server")
    fits = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    assert len(run(node, **fits)[0]) == 1
    with pytest.raises(errors.InputShapeMismatch, match=r"x takes \[n, 3\].*\[2\]"):
        node.invoke("server", {**fits, "x": np.zeros(2, np.float32)})
    with pytest.raises(errors.InputShapeMismatch, match=r"y takes \[n=2\].*\[3\]"):
        node.invoke("server", {**fits, "y": np.zeros(3, np.float32)})
    with pytest.raises(errors.InputTypeMismatch, match=r"x takes Tensor.FLOAT.*Tensor.DOUBLE"):
        node.invoke("server", {**fits, "x": np.zeros((2, 3))})
    with pytest.raises(errors.InputShapeMismatch, match="takes"):
        node.deliver_event("server", "x", np.zeros((2, 4), np.float32))
