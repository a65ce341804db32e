"""Calls of sub-Modules: shared by content, checked by name."""

from __future__ import annotations

import onnx
import pytest

from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    DuplicateName,
    ForeignOutput,
    Graph,
    GraphClosed,
    Module,
    Output,
    RecursiveModule,
    UnknownName,
    types,
)
from tests import protos
from tests.dsl.programs import FromFunction, build, meta


class Dense(Module):
    name = "Dense"

    def __init__(self, activation: str = "Relu") -> None:
        self.activation = activation

    def body(self, g: Graph) -> None:
        x, w = g.input("x", types.TENSOR_FLOAT), g.input("w")
        compute = BackendSlot("compute")
        g.output("y", compute.op(g, self.activation, compute.mat_mul(g, x, w)))
        g.output("same", w)


def twice(first: Module, second: Module):
    def body(g: Graph) -> None:
        x, w = g.input("x", types.TENSOR_FLOAT), g.input("w", types.TENSOR_FLOAT)
        h = first.call().input("w", w).input("x", x).build(g).output("y")
        g.output("y", second.call().input("x", h).input("w", w).build(g, after=x).output("y"))

    return build(body)


def test_equal_bodies_are_one_function_and_two_calls() -> None:
    model = twice(Dense(), Dense())
    assert [f.name for f in model.functions] == ["Program", "Dense"]
    first, second, _ = model.functions[0].node
    assert (
        protos.call_key(first) == protos.call_key(second) == protos.function_key(model.functions[1])
    )
    assert [first.name, second.name] == ["Dense_0", "Dense_1"]
    assert list(first.input) == ["x", "w"]
    assert list(first.output) == ["Dense_0.y", "Dense_0.same"]
    assert meta(second, "after") == "x"
    assert list(model.functions[1].attribute) == ["compute"]
    assert list(model.functions[0].attribute) == []
    onnx.checker.check_model(model, full_check=True)


def test_different_bodies_of_one_name_are_two_functions() -> None:
    model = twice(Dense("Relu"), Dense("Tanh"))
    assert [f.name for f in model.functions] == ["Program", "Dense", "Dense_2"]
    assert [n.op_type for n in model.functions[0].node[:2]] == ["Dense", "Dense_2"]


def test_a_sub_module_called_like_the_root_steps_aside() -> None:
    class Inner(Module):
        name = "Program"

        def body(self, g: Graph) -> None:
            g.output("y", g.input("x"))

    model = build(lambda g: Inner().call().input("x", g.input("x")).build(g))
    assert [f.name for f in model.functions] == ["Program", "Program_2"]


def test_equal_bodies_with_different_bootstraps_are_two_functions() -> None:
    class Boot(Module):
        def __init__(self, corpus: str) -> None:
            self.corpus = corpus

        def body(self, g: Graph) -> None:
            g.output("y", g.input("x"))

        def bootstrap(self, g: Graph) -> None:
            g.input(self.corpus)

    def body(g: Graph) -> None:
        x = g.input("x")
        for corpus in ("a", "b", "a"):
            Boot(corpus).call().input("x", x).build(g)

    names = [f.name for f in build(body).functions]
    assert names == ["Program", "Boot", "Boot_2", "Boot__bootstrap", "Boot_2__bootstrap"]


def test_slot_ids_count_over_the_whole_model() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        BackendSlot("first").relu(g, x)
        Dense().call().input("x", x).input("w", x).build(g)
        BackendSlot("compute").relu(g, x)

    model = build(body)
    assert meta(model.functions[0], "slot_role.compute") == "Backend|1"
    assert meta(model.functions[1], "slot_role.compute") == "Backend|1"


def test_outputs_carry_the_types_of_the_body() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        made = Dense().call().input("x", x).input("w", x).build(g)
        assert made.names == ("y", "same")
        assert made.output("y").type is types.TENSOR_FLOAT
        assert made.output("same").type is types.ANY

    build(body)


def _call(**inputs: str):
    def body(g: Graph) -> None:
        x = g.input("x")
        call = Dense().call()
        for name in inputs:
            call.input(name, x)
        call.build(g)

    return body


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (_call(x="", v=""), UnknownName, "no input 'v'; there is: x, w"),
        (_call(x=""), BadArgument, "needs the input 'w'"),
        (lambda _: Dense().call().input("x", 3), BadArgument, "not a recorded value"),
        (lambda _: Dense().call().build(None), BadArgument, "the caller's Graph"),
        (lambda g: Dense().call().input("x", x := g.input("x")).input("x", x), DuplicateName,
         "has a value already"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(body, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        build(body)
    assert "test_modules.py:" in caught.value.source


def test_an_unknown_output_is_refused_with_what_there_is() -> None:
    def body(g: Graph) -> None:
        x = g.input("x")
        Dense().call().input("x", x).input("w", x).build(g).output("yy")

    with pytest.raises(UnknownName, match="no output 'yy'; did you mean 'y'"):
        build(body)


def test_errors_of_a_sub_module_name_the_chain() -> None:
    inner = FromFunction(lambda g: BackendSlot("c").op(g, "Relu"), name="Inner")
    with pytest.raises(BadArgument) as caught:
        build(lambda g: inner.call().build(g))
    assert caught.value.module == "Program/Inner"


def test_values_of_another_graph_are_refused() -> None:
    kept: list[Output] = []

    class Leaky(Module):
        def body(self, g: Graph) -> None:
            kept.append(g.input("x"))

    def body(g: Graph) -> None:
        Leaky().call().input("x", g.input("x")).build(g)
        BackendSlot("c").relu(g, kept[0])

    with pytest.raises(ForeignOutput, match="recorded by Module 'Leaky'"):
        build(body)


def test_values_of_another_graph_are_refused_as_after() -> None:
    kept: list[Output] = []
    build(lambda g: kept.append(g.input("x")))
    with pytest.raises(ForeignOutput):
        build(lambda g: BackendSlot("c").relu(g, g.input("x"), after=kept[0]))


def test_a_finished_recording_takes_nothing_more() -> None:
    kept: list[tuple[Graph, Output]] = []
    build(lambda g: kept.append((g, g.input("x"))))
    graph, x = kept[0]
    with pytest.raises(GraphClosed, match="has finished recording"):
        BackendSlot("c").relu(graph, x)
    with pytest.raises(GraphClosed):
        graph.input("late")


def test_a_module_that_calls_itself_is_refused() -> None:
    class Ouroboros(Module):
        def body(self, g: Graph) -> None:
            self.call().build(g)

    with pytest.raises(RecursiveModule, match="calls itself"):
        Ouroboros().build()


def test_modules_without_end_are_refused() -> None:
    class Deeper(Module):
        def body(self, g: Graph) -> None:
            Deeper().call().build(g)

    with pytest.raises(RecursiveModule, match="nests deeper than 64"):
        Deeper().build()
