"""Programs whose functions import several versions of ONNX's opset."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import OpsetNotImported
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, types
from bbnode.engine import install
from bbnode.ir.graph import OpNode
from bbnode.ir.peer import PeerId
from bbnode.ir.versions import means_the_same


class Inner(Module):
    """Called twice, and so a function of its own; `op` is its one op."""

    def __init__(self, op: str) -> None:
        self._op = op

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        g.output(
            "y", compute.split(g, x, num_outputs=1)[0] if self._op == "Split" else compute.abs(g, x)
        )


class Outer(Module):
    """An op before a call of `Inner`."""

    def __init__(self, op: str) -> None:
        self._inner = Inner(op)

    def body(self, g: Graph) -> None:
        x = BackendSlot("compute").neg(g, g.input("x", types.TENSOR_FLOAT))
        g.output("y", self._inner.call().input("x", x).build(g).output("y"))


def program(op: str, *, outer: int, inner: int) -> ModelProto:
    model = Outer(op).build()
    for function, version in zip(model.functions, (outer, inner), strict=True):
        for entry in function.opset_import:
            if not entry.domain:
                entry.version = version
    for entry in model.opset_import:
        if not entry.domain:
            entry.version = outer
    return model


def compiled(model: ModelProto) -> ModelProto:
    return Compiler().bind_backend("compute", OrtBackend).compile(model)


@pytest.mark.parametrize(("outer", "inner"), [(21, 17), (17, 21), (21, 23), (13, 22)])
def test_the_highest_import_counts(outer: int, inner: int) -> None:
    artifact = compiled(program("Abs", outer=outer, inner=inner))
    versions = {
        entry.version
        for owner in (artifact, *artifact.functions)
        for entry in owner.opset_import
        if not entry.domain
    }
    assert versions == {max(outer, inner)}
    onnx.checker.check_model(artifact)
    node = install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    node.invoke("@self", {"x": np.array([2], np.float32)})
    (value,) = [step.value for step in node.poll(0) if hasattr(step, "value")]
    assert value.tolist() == [2]
    assert compiled(artifact).SerializeToString(deterministic=True) == artifact.SerializeToString(
        deterministic=True
    )


def test_an_op_that_means_something_else_in_the_highest_is_refused() -> None:
    with pytest.raises(OpsetNotImported, match="version 17") as caught:
        compiled(program("Split", outer=21, inner=17))
    assert "one version" in str(caught.value) or "opset_import" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "version", "target", "same"),
    [
        ("Abs", 13, 21, True),
        ("Relu", 6, 13, True),
        ("Split", 13, 18, False),
        ("GroupNormalization", 18, 21, False),
        ("Squeeze", 11, 13, False),
        ("Upsample", 9, 10, False),
        ("NoSuchOp", 13, 21, False),
    ],
)
def test_schemas_tell_what_means_the_same(op: str, version: int, target: int, same: bool) -> None:
    assert means_the_same(OpNode(op, inputs=["x"], outputs=["y"]), version, target) is same
