"""An order edge is no data: what fails or is skipped stops what needs it, or a step says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend, ReferenceBackend
from bbnode.dsl import BackendSlot, Graph, ModelSlot, Module, Output, PeerSelectorSlot, syscalls
from bbnode.engine import steps
from bbnode.ir import types
from bbnode.sim import Network, SimNode
from tests.compiler.fusing import SIZE, OneVector

FLOAT = types.TENSOR_FLOAT
GOOD, BAD = np.zeros(SIZE, np.float32), np.zeros((1, 4), np.float32)
WIDE = np.ones((9, 9), np.float32)


def wrong_product(g: Graph, value: Output) -> Output:
    """An op that fails at run time."""
    return BackendSlot("compute").matmul(g, value, g.constant(WIDE))


class TwoSends(Module):
    """Two independent sends through one selector; the value of the first never comes."""

    home = "home"

    def __init__(self, why: str) -> None:
        self.why = why

    def body(self, g: Graph) -> None:
        a, b = g.input("a", FLOAT), g.input("b", FLOAT)
        compute, peers = BackendSlot("compute"), PeerSelectorSlot("peers", peer_class="away")
        if self.why == "fails":
            first = wrong_product(g, a)
        else:
            is_large = compute.greater(g, compute.reduce_max(g, a, keepdims=False), g.constant(9.0))
            first = compute.neg(g, a, after=g.when(is_large))
        for name, value in (("one", first), ("two", b)):
            view = peers.current_view(g, after=value)
            syscalls.app_emit(g, g.net_out(name, view, value), name=name)


@pytest.mark.parametrize("why", ["fails", "is skipped"])
def test_a_second_send_through_a_selector_does_not_wait_for_a_first_that_never_comes(
    why: str,
) -> None:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    made = compiler.bind_peer_selector("peers", ConnectedView).compile(TwoSends(why).build())
    network = Network(0)
    home, away = network.add("home", made, ["home"]), network.add("away", made, ["away"])
    network.run_until_idle()
    home.invoke("home", {"a": BAD, "b": GOOD})
    network.run_until_idle()
    assert away.values("one") == []
    assert len(away.values("two")) == 1
    assert len(home.failures()) == (why == "fails")


class LoadsThenLooks(Module):
    """Parameters that are loaded, perhaps, and a look at them that needs nothing of that."""

    def __init__(self, *, is_conditional: bool, looks_first: bool = False) -> None:
        self.is_conditional = is_conditional
        self.looks_first = looks_first

    def body(self, g: Graph) -> None:
        params, x = g.input("params", FLOAT), g.input("x", FLOAT)
        holds = g.when(g.input("holds", types.TENSOR_BOOL)) if self.is_conditional else None
        model = ModelSlot("model")
        if self.looks_first:
            g.output("before", model.params(g, after=wrong_product(g, x)))
        model.load_parameters(g, params, after=holds)
        g.output("after", model.params(g, after=x))
        g.output("other", BackendSlot("compute").neg(g, x))


def run(module: Module, **inputs: Any) -> tuple[SimNode, int]:
    compiler = Compiler().bind_backend("compute", OrtBackend).bind_model("model", OneVector)
    network = Network(0)
    node = network.add("node", compiler.compile(module.build()), ["@self"])
    execution = node.invoke("@self", inputs)
    network.run_until_idle()
    return node, execution


def test_behind_a_change_that_failed_an_op_does_not_run_and_a_step_says_so() -> None:
    node, execution = run(LoadsThenLooks(is_conditional=False), params=BAD, x=GOOD)
    assert list(node.outputs(execution)) == ["other"]
    (failed,) = node.failures()
    assert failed.op == "LoadParameters_0"
    (step,) = node.seen(steps.OpNotRun)
    assert step.op == "Params_0"
    assert "LoadParameters_0" in step.reason
    assert step.line
    (end,) = node.seen(steps.ExecutionFinished)
    assert end.failures == 1


def test_behind_a_change_that_was_skipped_an_op_runs() -> None:
    module = LoadsThenLooks(is_conditional=True)
    node, execution = run(module, params=GOOD, x=GOOD, holds=np.array(False))
    assert node.outputs(execution).keys() == {"after", "other"}
    assert node.seen(steps.OpNotRun) == []


def test_a_change_runs_behind_a_look_that_never_came() -> None:
    module = LoadsThenLooks(is_conditional=False, looks_first=True)
    node, execution = run(module, params=GOOD + 1, x=GOOD)
    assert [failed.op for failed in node.failures()] == ["MatMul_0"]
    assert node.outputs(execution)["after"].tolist() == [1.0] * SIZE
    assert "before" not in node.outputs(execution)
    assert node.seen(steps.OpNotRun) == []


class TwoOfOneGraph(Module):
    """Ops that are fused: one fails, one that nobody reads too, and others need neither."""

    def body(self, g: Graph) -> None:
        x, y = g.input("x", FLOAT), g.input("y", FLOAT)
        compute = BackendSlot("compute")
        product = compute.mul(g, x, y)
        g.output("bad", compute.neg(g, wrong_product(g, product)))
        compute.matmul(g, product, g.constant(WIDE))
        g.output("good", compute.add(g, product, g.constant([1.0])))


@pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])
@pytest.mark.parametrize("is_fused", [True, False])
def test_an_op_that_fails_takes_nothing_along_that_does_not_need_it(
    backend: type, is_fused: bool
) -> None:
    compiler = Compiler().bind_backend("compute", backend)
    if not is_fused:
        compiler = compiler.without_stage("collapse_backend_subgraphs")
    network = Network(0)
    node = network.add("node", compiler.compile(TwoOfOneGraph().build()), ["@self"])
    execution = node.invoke("@self", {"x": GOOD, "y": GOOD})
    network.run_until_idle()
    assert node.outputs(execution).keys() == {"good"}
    assert sorted(failed.op for failed in node.failures()) == ["MatMul_0", "MatMul_1"]
    assert {failed.kind for failed in node.failures()} == {"BackendError"}
