"""Declared shapes: recorded, kept in the artifact, and checked by the compiler and by the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import ShapeContradiction
from bbnode.components import ArrayDataSource, ConnectedView, OrtBackend
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    BadName,
    CompiledModule,
    DataSourceSlot,
    Graph,
    Module,
    PeerSelectorSlot,
    types,
)
from bbnode.engine import steps
from bbnode.engine.errors import InputShapeMismatch
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.graph import ValueType
from bbnode.ir.onnx_file import model_of, program_of
from bbnode.ir.reopen import reopen
from bbnode.ir.seal import seal
from bbnode.sim import Network

FLOAT = types.TENSOR_FLOAT
COMPUTE = BackendSlot("compute")
FAR = PeerSelectorSlot("peers", peer_class="far")


class Recorded(Module):
    """A Module made of a function."""

    home = "near"

    def __init__(self, body: Callable[[Graph], object]) -> None:
        self._body = body

    def body(self, g: Graph) -> None:
        self._body(g)


def compiler() -> Compiler:
    return (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_peer_selector("peers", ConnectedView)
        .bind_data_source("data", ArrayDataSource)
    )


def compile_body(body: Callable[[Graph], object]) -> onnx.ModelProto:
    return compiler().compile(Recorded(body).build())


class Scale(Module):
    """A body of its own, which is inlined."""

    def body(self, g: Graph) -> None:
        rows = g.input("rows", FLOAT, shape=[None, 4])
        g.output("scaled", COMPUTE.mul(g, rows, g.constant(2.0)))


def classified(g: Graph) -> None:
    x = g.input("x", FLOAT, shape=["batch", 4], denotation="IMAGE", axes=["DATA_BATCH", None])
    w = g.input("w", FLOAT, shape=[4, 3])
    scaled = Scale().call().input("rows", x).build(g).output("scaled")
    scores = COMPUTE.matmul(g, scaled, w)
    received = g.net_out("scores", FAR.sample(g, n=1, after=x), scores)
    g.output("near_scores", scores)
    g.output("far_scores", COMPUTE.relu(g, received), shape=["batch", 3])


def declared(model: onnx.ModelProto, target: str) -> dict[str, ValueType]:
    (main,) = [
        f
        for f in program_of(model).functions
        if keys.TARGET_KEY in f.metadata and f.metadata[keys.HOME_KEY] == target
    ]
    return main.types


def test_shapes_and_denotations_are_in_the_artifact() -> None:
    model = compile_body(classified)
    near, far = declared(model, "near"), declared(model, "far")
    assert near["x"].shape == ("batch", 4)
    assert (near["x"].denotation, near["x"].axes) == ("IMAGE", ("DATA_BATCH", ""))
    assert near["x"].kind is FLOAT
    assert near["near_scores"].shape == ("batch", 3)  # found by ONNX's inference
    assert far["Send_0.received"].shape == far["far_scores"].shape == ("batch", 3)
    # An ONNX tool finds them where it looks: in value_info.
    info = {i.name: i for f in model.functions for i in f.value_info}["x"]
    axes = info.type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ["batch", 4]
    assert axes[0].denotation == "DATA_BATCH"


def test_a_compiled_program_is_opened_and_compiled_to_the_same_bytes() -> None:
    model = compile_body(classified)
    assert compiler().compile(model) == model
    assert reopen(program_of(model)).functions[0].types["x"].denotation == "IMAGE"


def test_a_replayed_program_declares_the_same() -> None:
    again = compiler().compile(CompiledModule(compile_body(classified), name="Again").build())
    for target in ("near", "far"):
        wanted = declared(compile_body(classified), target)
        found = declared(again, target)
        for name in wanted.keys() & {"x", "w", "near_scores", "far_scores", "Send_0.received"}:
            assert found[name] == wanted[name]


def test_without_declared_shapes_nothing_is_written() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", FLOAT)
        g.output("y", COMPUTE.matmul(g, x, g.constant(np.ones((4, 3), np.float32))))

    found = declared(compile_body(body), "near")
    assert all(kind.shape is None for kind in found.values())


# --- contradictions -------------------------------------------------------------------------


def wrong_matmul(g: Graph) -> None:
    a = g.input("a", FLOAT, shape=[4, 3])
    b = g.input("b", FLOAT, shape=[5, 2])
    g.output("y", COMPUTE.matmul(g, a, b))


def wrong_output(g: Graph) -> None:
    a = g.input("a", FLOAT, shape=[4, 3])
    g.output("y", COMPUTE.matmul(g, a, g.constant(np.ones((3, 2), np.float32))), shape=[4, 3])


def wrong_expectation(g: Graph) -> None:
    relu = COMPUTE.relu(g, g.input("a", FLOAT, shape=[4, 3]))
    g.output("y", g.expect(relu, shape=[4, 3, 1]))


def wrong_delivery(g: Graph) -> None:
    a = g.input("a", FLOAT, shape=["n", 3])
    g.net_out("far", FAR.sample(g, n=1, after=a), a, shape=["n", 4])


def wrong_second_send(g: Graph) -> None:
    a = g.input("a", FLOAT, shape=[3])
    b = g.input("b", FLOAT, shape=[4])
    peers = FAR.sample(g, n=1, after=a)
    g.net_out("far", peers, a, shape=[3])
    g.net_out("far", peers, b)


def wrong_call(g: Graph) -> None:
    a = g.input("a", FLOAT, shape=[2, 5])
    g.output("y", Scale().call().input("rows", a).build(g).output("scaled"))


def wrong_batch(g: Graph) -> None:
    batch, _ = DataSourceSlot("data").next_batch(g, after=g.input("go", types.TRIGGER))
    batch = g.expect(batch, shape=["n", 64])
    g.output("y", COMPUTE.matmul(g, batch, g.constant(np.ones((63, 2), np.float32))))


@pytest.mark.parametrize(
    ("body", "says", "lines"),
    [
        (wrong_matmul, ("[4, 3]", "[5, 2]", "Incompatible dimensions"), 3),
        (wrong_output, ("declared [4, 3]", "[4, 2]"), 1),
        (wrong_expectation, ("[4, 3, 1]", "makes [4, 3]"), 2),
        (wrong_delivery, ("[n, 4]", "[n, 3]"), 2),
        (wrong_second_send, ("[3]", "[4]"), 2),
        (wrong_call, ("[2, 5]", "[?, 4]"), 2),
        (wrong_batch, ("[n, 64]", "Incompatible dimensions"), 2),
    ],
)
def test_a_contradiction_is_refused_with_both_lines(
    body: Callable[[Graph], object], says: tuple[str, ...], lines: int
) -> None:
    with pytest.raises(ShapeContradiction) as refused:
        compile_body(body)
    text = str(refused.value)
    assert all(part in text for part in says), text
    first = body.__code__.co_firstlineno
    ours = {f"test_shapes.py:{first + i}" for i in range(1, 8)}
    assert sum(line in text for line in ours) >= lines, text


def test_names_and_unknown_axes_contradict_nothing() -> None:
    def body(g: Graph) -> None:
        a = g.input("a", FLOAT, shape=["n", None])
        b = g.input("b", FLOAT, shape=["k", "m"])
        g.output("y", COMPUTE.matmul(g, a, b), shape=["rows", "m"])
        for i in range(2):  # several sends of different shapes share a port
            value = g.input(f"v{i}", FLOAT, shape=[i + 1])
            received = g.net_out("far", FAR.sample(g, n=1, after=value), value)
        g.output("far", received)

    found = declared(compile_body(body), "far")
    assert all(kind.shape is None for kind in found.values())


# --- recording ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"shape": [3, -1]}, BadArgument, "axis -1"),
        ({"shape": [True]}, BadArgument, "axis True"),
        ({"shape": [1.5]}, BadArgument, "axis 1.5"),
        ({"shape": ["a b"]}, BadName, "name of an axis"),
        ({"shape": "batch"}, BadArgument, "no list"),
        ({"shape": 3}, BadArgument, "no list"),
        ({"shape": [1] * 65}, BadArgument, "at most 64 axes"),
        ({"denotation": "PICTURE"}, BadArgument, "there is: TENSOR, IMAGE"),
        ({"shape": [3], "axes": ["DATA_BATHC"]}, BadArgument, "did you mean 'DATA_BATCH'"),
        ({"shape": [3], "axes": ["DATA_BATCH", None]}, BadArgument, "for each axis"),
        ({"axes": ["DATA_BATCH"]}, BadArgument, "for each axis"),
        ({"type": types.TRIGGER, "shape": [3]}, BadArgument, "only a tensor"),
    ],
)
def test_what_is_no_shape_is_refused_where_it_is_written(
    given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Recorded(lambda g: g.input("x", **{"type": FLOAT, **given})).build()


def test_expect_refuses_another_type_and_values_of_others() -> None:
    def other_type(g: Graph) -> None:
        g.expect(g.input("x", FLOAT), types.TENSOR_INT64)

    with pytest.raises(BadArgument, match=r"is Tensor\.FLOAT, not Tensor\.INT64"):
        Recorded(other_type).build()
    with pytest.raises(BadArgument, match="not a recorded value"):
        Recorded(lambda g: g.expect(3, shape=[1])).build()  # type: ignore[arg-type]


def test_expect_narrows_what_a_component_gives() -> None:
    def body(g: Graph) -> None:
        _, labels = DataSourceSlot("data").next_batch(g, after=g.input("go", types.TRIGGER))
        g.output("labels", g.expect(labels, FLOAT, shape=["n"]))

    found = declared(compile_body(body), "near")["labels"]
    assert (found.kind, found.shape) == (FLOAT, ("n",))


def test_a_hostile_shape_is_out_of_bounds() -> None:
    model = compile_body(classified)
    info = next(i for f in model.functions for i in f.value_info if i.name == "x")
    long = onnx.ModelProto.FromString(model.SerializeToString())
    info.type.tensor_type.shape.dim[0].dim_param = "b" * (1 << 20)
    with pytest.raises(OutOfBounds):
        check_bounds(model)
    info = next(i for f in long.functions for i in f.value_info if i.name == "x")
    for _ in range(100):
        info.type.tensor_type.shape.dim.add()
    with pytest.raises(OutOfBounds, match="102 axes"):
        check_bounds(long)


# --- at run time ----------------------------------------------------------------------------


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def test_invoke_checks_shapes_and_names() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", FLOAT, shape=["batch", 4])
        labels = g.input("labels", FLOAT, shape=["batch"])
        g.output("y", COMPUTE.mul(g, x, COMPUTE.reshape(g, labels, [-1, 1])))

    network = Network(seed=0)
    node = network.add("near", compile_body(body), ["near"])
    node.invoke("near", {"x": ones(2, 4), "labels": ones(2)})
    network.run_until_idle()
    (made,) = node.values("y")
    assert made.shape == (2, 4)
    for inputs, says in (
        (
            {"x": ones(2, 5), "labels": ones(2)},
            r"x takes \[batch, 4\] and was given \[2, 5\]",
        ),
        ({"x": ones(8), "labels": ones(8)}, r"x takes \[batch, 4\] and was given \[8\]"),
        (
            {"x": ones(2, 4), "labels": ones(3)},
            r"labels takes \[batch=2\] and was given \[3\]",
        ),
    ):
        with pytest.raises(InputShapeMismatch, match=says):
            node.invoke("near", inputs)
    network.run_until_idle()
    assert len(node.values("y")) == 1


def test_what_is_handed_out_in_another_shape_fails_at_the_output() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", FLOAT)
        g.output("y", COMPUTE.relu(g, x), shape=["n", 2])
        g.output("z", x)

    network = Network(seed=0)
    node = network.add("near", compile_body(body), ["near"])
    node.invoke("near", {"x": ones(3, 2)})
    network.run_until_idle()
    assert [v.shape for v in node.values("y")] == [(3, 2)]
    node.invoke("near", {"x": ones(2, 3)})
    network.run_until_idle()
    assert len(node.values("y")) == 1
    (failed,) = node.failures()
    assert "'y' is declared [n, 2], got [2, 3]" in failed.detail


def test_a_received_value_of_another_shape_is_refused_at_the_site() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", FLOAT, shape=["n", "n"])
        received = g.net_out("far", FAR.sample(g, n=1, after=x), x)
        g.output("y", received)

    model = compile_body(body)
    liar = program_of(model)  # its own copy declares nothing, so that it sends what it likes
    for function in liar.functions:
        for name, kind in function.types.items():
            if kind.shape is not None:
                function.types[name] = ValueType.of(kind.kind or types.ANY)
    network = Network(seed=0)
    lying = model_of(liar)
    seal(lying)
    near = network.add("near", lying, ["near"])
    far = network.add("far", model, ["far"])
    near.invoke("near", {"x": ones(2, 2)})
    network.run_until_idle()
    assert [v.shape for v in far.values("y")] == [(2, 2)]
    near.invoke("near", {"x": ones(2, 3)})
    network.run_until_idle()
    assert len(far.values("y")) == 1
    (refused,) = far.seen(steps.WireReceiveFailed)
    assert refused.kind == "ShapeMismatch"
    assert "takes [n, n], the fill is [2, 3]" in refused.detail
