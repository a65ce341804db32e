"""Loops over the network: each time around has a budget of its own, and a condition ends it."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, BadArgument, Graph, Module, PeerSelectorSlot, syscalls, types
from bbnode.engine import steps
from bbnode.sim import Network
from tests.dsl.programs import build

S = 1_000_000_000
HOP_BUDGET_S = 5.0
PAUSE_NS = 2 * S  # of each time around


class CountUp(Module):
    """Hands a number back and forth, one more each time, until it has reached `LIMIT`."""

    home = "node"
    LIMIT = 100.0

    def __init__(self, budget: float | None) -> None:
        self.budget = budget

    def body(self, g: Graph) -> None:
        start = g.input("start", types.TENSOR_FLOAT)
        compute = BackendSlot("compute")
        others = PeerSelectorSlot("others", peer_class="node").current_view(g)
        number = g.net_out("number", others, start, budget=self.budget)
        pause = syscalls.sleep(g, syscalls.threshold(g, number, n=1), duration_ns=PAUSE_NS)
        more = compute.add(g, number, g.constant(1.0), after=pause)
        goes_on = compute.less(g, more, g.constant(self.LIMIT))
        g.net_out("number", number.sender, more, after=g.when(goes_on), budget=self.budget)
        syscalls.app_emit(g, more, name="done", after=g.unless(goes_on))


def ring(budget: float | None, per_hop_s: float = 0.0) -> Network:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    if per_hop_s:
        compiler = compiler.with_per_hop_budget_ns(round(per_hop_s * S))
    model = compiler.bind_peer_selector("others", ConnectedView).compile(CountUp(budget).build())
    network = Network(seed=5)
    for name in ("a", "b"):
        network.add(name, model, ["node"])
    network.connect("a", "b")
    network.run(S)
    return network


def test_a_hundred_rounds_outlive_the_budget_of_each_and_the_condition_ends_them() -> None:
    network = ring(HOP_BUDGET_S)
    network["a"].invoke("node", {"start": np.array(0, np.float32)})
    network.run_until_idle()
    assert [float(v) for n in network.nodes for v in n.values("done")] == [CountUp.LIMIT]
    for node in network.nodes:
        assert node.failures() == []
        assert node.node.executions() == []
    ends = [at for n in network.nodes for at, s in n.history() if isinstance(s, steps.AppEvent)]
    assert max(ends) > 100 * PAUSE_NS > HOP_BUDGET_S * S


def test_a_loop_that_renews_nothing_ends_by_the_deadline_of_its_first_message() -> None:
    network = ring(None, per_hop_s=HOP_BUDGET_S)
    network["a"].invoke("node", {"start": np.array(0, np.float32)})
    network.run_until_idle()
    assert [v for n in network.nodes for v in n.values("done")] == []
    (failed,) = [f for n in network.nodes for f in n.failures()]
    assert failed.kind == "DeadlineExceeded"


@pytest.mark.parametrize("budget", [0, -1, "1", True, float("nan"), 1e12])
def test_a_budget_is_a_number_of_seconds(budget: object) -> None:
    with pytest.raises(BadArgument, match="seconds above 0"):
        build(lambda g: g.net_out("x", g.input("b"), g.input("v"), budget=budget))  # type: ignore[arg-type]


def test_hops_and_a_budget_are_one_too_many() -> None:
    with pytest.raises(BadArgument, match="one of them"):
        build(lambda g: g.net_out("x", g.input("b"), g.input("v"), budget=1.0, hops=2))
