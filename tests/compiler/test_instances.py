"""Modules that are called with values of several types in one program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import ExpansionFailed, TypeConstraintFailed
from bbnode.compiler.rewriting import instances
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, syscalls, types
from bbnode.ir import keys
from bbnode.sim import Network
from tests.compiler.test_full_chains import Written

COMPUTE = BackendSlot("compute")
KINDS = {
    "f": (types.TENSOR_FLOAT, np.float32),
    "d": (types.TENSOR_DOUBLE, np.float64),
    "i": (types.TENSOR_INT64, np.int64),
}


class Dense(Module):
    """Only ONNX: inlined."""

    def body(self, g: Graph) -> None:
        x, w = g.input("x", types.TENSOR), g.input("w", types.TENSOR)
        g.output("y", COMPUTE.neg(g, COMPUTE.matmul(g, x, w)))


class Logged(Module):
    """Not only ONNX: stays a call."""

    def body(self, g: Graph) -> None:
        x, w = g.input("x", types.TENSOR), g.input("w", types.TENSOR)
        syscalls.incr_metric(g, syscalls.threshold(g, x, n=1), name="seen")
        g.output("y", COMPUTE.neg(g, COMPUTE.matmul(g, x, w)))


class Nested(Module):
    """Calls what is open twice, and is open itself."""

    def body(self, g: Graph) -> None:
        x, w = g.input("x", types.TENSOR), g.input("w", types.TENSOR)
        syscalls.incr_metric(g, syscalls.threshold(g, x, n=1), name="outer")
        once = Logged().call().input("x", x).input("w", w).build(g).output("y")
        g.output("y", Logged().call().input("x", once).input("w", w).build(g).output("y"))


class Untyped(Module):
    """Says nothing at all of its input."""

    def body(self, g: Graph) -> None:
        x = g.input("x")
        g.input("w")
        y = syscalls.pass_through(g, x)
        syscalls.incr_metric(g, syscalls.threshold(g, y, n=1), name="seen")
        g.output("y", y)


def compiled(called: type[Module], uses: str) -> ModelProto:
    def body(g: Graph) -> None:
        for index, letter in enumerate(uses):
            kind, _ = KINDS[letter]
            x = g.input(f"x{index}", kind)
            call = called().call().input("x", x).input("w", x)
            g.output(f"y{index}", call.build(g).output("y"))

    return Compiler().bind_backend("compute", OrtBackend).compile(Written(body).build())


def bodies(model: ModelProto) -> list[str]:
    return [f.name for f in model.functions if f.name.startswith(keys.HOIST_PREFIX)]


def run(model: ModelProto, uses: str) -> list[Any]:
    network = Network(seed=0)
    node = network.add("node", model, ["a"])
    given = {f"x{i}": np.array([[1, 2], [3, 4]], KINDS[letter][1]) for i, letter in enumerate(uses)}
    node.invoke("a", given)
    network.run_until_idle()
    assert not node.failures()
    return [node.values(f"y{i}")[0] for i in range(len(uses))]


@pytest.mark.parametrize("uses", ["fd", "fdi", "fdfd", "ff"])
@pytest.mark.parametrize(
    ("called", "wanted"),
    [
        (Dense, [[-7, -10], [-15, -22]]),
        (Logged, [[-7, -10], [-15, -22]]),
        (Nested, [[37, 54], [81, 118]]),
        (Untyped, [[1, 2], [3, 4]]),
    ],
)
def test_a_module_is_called_with_values_of_several_types(
    called: type[Module], wanted: list[list[int]], uses: str
) -> None:
    for letter, y in zip(uses, run(compiled(called, uses), uses), strict=True):
        assert y.dtype == KINDS[letter][1]
        assert y.tolist() == wanted


@pytest.mark.parametrize(
    ("called", "uses", "count"),
    [
        (Logged, "ff", 1),
        (Logged, "fdfd", 2),
        (Logged, "fdi", 0),
        (Logged, "fdifdi", 3),
        (Nested, "fdfd", 4),
    ],
)
def test_there_is_one_body_for_each_type_that_is_called_twice(
    called: type[Module], uses: str, count: int
) -> None:
    model = compiled(called, uses)
    assert len(bodies(model)) == count
    assert compiled(called, uses).SerializeToString() == model.SerializeToString()


def test_a_compiled_program_with_several_bodies_compiles_again() -> None:
    model = compiled(Nested, "fdf")
    again = Compiler().bind_backend("compute", OrtBackend).compile(model)
    assert len(run(again, "fdf")) == 3
    assert [f.name for f in again.functions] == [f.name for f in model.functions]


def test_what_a_call_cannot_take_is_refused_as_before() -> None:
    class Floats(Module):
        def body(self, g: Graph) -> None:
            x = g.input("x", types.TENSOR)
            g.input("w", types.TENSOR)
            syscalls.incr_metric(g, syscalls.threshold(g, x, n=1), name="seen")
            g.output("y", COMPUTE.add(g, x, g.constant(1.0)))

    with pytest.raises(TypeConstraintFailed, match=r"Tensor\.DOUBLE.*Tensor\.FLOAT|FLOAT.*DOUBLE"):
        compiled(Floats, "fd")


def test_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "MAX_COPIED_NODES", 20)
    with pytest.raises(ExpansionFailed, match="declare the types of the inputs"):
        compiled(Nested, "fdi")
    assert compiled(Nested, "fff")  # copies nothing
