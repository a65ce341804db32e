"""Bootstraps that call their children's, and what the compiler says of those that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import BootstrapCompositionCycle, BootstrapCompositionGap
from bbnode.dsl import (
    BadArgument,
    ForeignOutput,
    Graph,
    ModelSlot,
    Module,
    Output,
    RecursiveModule,
    UnknownName,
    types,
)
from bbnode.ir import keys
from bbnode.ir.graph import Function
from bbnode.ir.onnx_file import program_of
from tests.compiler.programs import FakeModel

Recording = Callable[[Graph], object]


class Booting(Module):
    """A Module made of two functions."""

    def __init__(self, name: str, bootstrap: Recording | None, body: Recording | None = None):
        self.name = name
        self._bootstrap = bootstrap
        self._body = body

    def body(self, g: Graph) -> None:
        if self._body is not None:
            self._body(g)
        else:
            g.output("y", g.input("x", types.TENSOR_FLOAT))

    def bootstrap(self, g: Graph) -> None:
        if self._bootstrap is not None:
            self._bootstrap(g)


def load(g: Graph) -> None:
    loaded = ModelSlot("m").load_parameters(g, g.input("weights", types.TENSOR_FLOAT))
    g.output("loaded", loaded)


def functions(module: Module) -> dict[str, Function]:
    model = Compiler().bind_model("m", FakeModel).compile(module.build())
    return {f.name: f for f in program_of(model).functions}


def test_a_parent_hands_values_in_and_takes_values_out() -> None:
    child = Booting("Child", load)

    def parent(g: Graph) -> None:
        seed = g.input("seed", types.TENSOR_FLOAT)
        made = child.call_bootstrap(g, {"weights": seed})
        assert made.names == ("loaded",)
        g.output("done", made.output("loaded"))

    found = functions(Booting("Parent", parent))
    assert {"Parent__bootstrap", "Child__bootstrap"} <= found.keys()
    call = found["Parent__bootstrap"].nodes[0]
    assert (call.domain, call.op_type) == (keys.MODULE_DOMAIN, "Child__bootstrap")
    assert list(call.inputs) == ["seed"]
    assert found["Parent__bootstrap"].kinds()["done"] is types.COMMAND_ID
    assert "Child" not in found  # only its bootstrap is called


def test_children_of_one_name_keep_their_own_bootstraps() -> None:
    first, second = Booting("Child", load), Booting("Child", lambda g: g.input("other"))

    def parent(g: Graph) -> None:
        seed = g.input("seed", types.TENSOR_FLOAT)
        first.call_bootstrap(g, {"weights": seed})
        second.call_bootstrap(g, {"other": seed})

    found = functions(Booting("Parent", parent))
    called = [n.op_type for n in found["Parent__bootstrap"].nodes]
    assert called == ["Child__bootstrap", "Child_2__bootstrap"]
    assert list(found["Child_2__bootstrap"].inputs) == ["other"]


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ({}, BadArgument, "needs the input 'weights'"),
        ({"weights": 1.0}, BadArgument, "is not a recorded value"),
        ({"wieghts": None}, BadArgument, "is not a recorded value"),
    ],
)
def test_values_have_to_fit_the_inputs(
    inputs: dict[str, Output], error: type[Exception], says: str
) -> None:
    child = Booting("Child", load)
    with pytest.raises(error, match=says):
        Booting("Parent", lambda g: child.call_bootstrap(g, inputs)).build()


def test_an_input_that_is_not_there_is_named() -> None:
    child = Booting("Child", load)

    def parent(g: Graph) -> None:
        child.call_bootstrap(g, {"wieghts": g.input("seed")})

    with pytest.raises(UnknownName, match="did you mean 'weights'"):
        Booting("Parent", parent).build()


def test_a_bootstrap_is_called_from_a_bootstrap_with_its_own_values() -> None:
    child = Booting("Child", load)
    with pytest.raises(BadArgument, match="from a bootstrap only"):
        Booting("Parent", None, lambda g: child.call_bootstrap(g)).build()
    with pytest.raises(BadArgument, match="takes the caller's Graph"):
        child.call_bootstrap("g")  # type: ignore[arg-type]
    kept: list[Output] = []

    def parent(g: Graph) -> None:
        child.call_bootstrap(g, {"weights": kept[0]})

    with pytest.raises(ForeignOutput):
        Booting("Parent", parent, lambda g: kept.append(g.input("x"))).build()


def test_a_child_without_a_bootstrap_is_a_gap() -> None:
    with pytest.raises(BootstrapCompositionGap) as caught:
        functions(Booting("Parent", lambda g: Booting("Child", None).call_bootstrap(g)))
    assert (caught.value.parent, caught.value.child) == ("Parent__bootstrap", "Child__bootstrap")


def test_rings_of_any_length_are_named() -> None:
    alone = Booting("Alone", lambda g: alone.call_bootstrap(g))
    with pytest.raises(BootstrapCompositionCycle) as caught:
        functions(alone)
    assert caught.value.path == ("Alone__bootstrap",)

    first = Booting("First", lambda g: second.call_bootstrap(g))
    second = Booting("Second", lambda g: third.call_bootstrap(g))
    third = Booting("Third", lambda g: second.call_bootstrap(g))
    with pytest.raises(BootstrapCompositionCycle) as caught:
        functions(first)
    assert set(caught.value.path) == {"Second__bootstrap", "Third__bootstrap"}


def test_a_ring_is_found_under_the_name_that_its_module_got() -> None:
    other = Booting("Child", load)

    def ring(g: Graph) -> None:
        g.input("unused")
        looping.call_bootstrap(g)

    looping = Booting("Child", ring)

    def parent(g: Graph) -> None:
        seed = g.input("seed", types.TENSOR_FLOAT)
        other.call_bootstrap(g, {"weights": seed})
        looping.call_bootstrap(g, {"unused": seed})

    with pytest.raises(BootstrapCompositionCycle) as caught:
        functions(Booting("Parent", parent))
    assert caught.value.path == ("Child_2__bootstrap",)


def test_modules_made_anew_without_end_are_refused() -> None:
    def endless(g: Graph) -> None:
        Booting("Endless", endless).call_bootstrap(g)

    with pytest.raises(RecursiveModule, match="nests deeper"):
        Booting("Endless", endless).build()
