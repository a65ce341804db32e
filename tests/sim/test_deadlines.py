"""Deadlines follow the author's words, in virtual time: nothing of ours ends work early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import (
    ArrayDataSource,
    ConnectedView,
    OnnxModel,
    OrtBackend,
    ProtocolComponent,
    mlp_forward,
    offload,
)
from bbnode.components.registry import register_component
from bbnode.dsl import (
    BadArgument,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    ProtocolSlot,
    protocol_op,
    syscalls,
    types,
)
from bbnode.engine import All, Limits, steps
from bbnode.engine.bootstrap.targets import ModuleNames
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER
from bbnode.sim import Network, S, SimNode

F = types.TENSOR_FLOAT
HOUR = 3600
DAY = 24 * HOUR
ONE = np.float32([1])

protocol_op("slow", "Work", {"x": types.TENSOR}, {"y": types.TENSOR})


@register_component
class SlowWork(ProtocolComponent):
    """Work in a thread, which takes the `task_ns` of its node; and so does its preparation."""

    TYPE_NAME = "test.deadlines.SlowWork"
    storage: ClassVar[dict[str, Any]] = {"*": F}

    @offload
    def bootstrap(self, _ctx: Any) -> None:
        return None

    @offload
    def work(self, _ctx: Any, x: Any) -> Any:
        return x


def work(g: Graph, x: Any, name: str = "w", **more: Any) -> Any:
    return ProtocolSlot(name, "slow").work(g, x, **more)


def at(g: Graph, name: str, after: Any) -> Any:
    return PeerSelectorSlot(f"to_{name}", peer_class=name).current_view(g, after=after)


class Written(Module):
    """A Module made of a function."""

    home = "a"

    def __init__(self, body: Callable[[Graph], object]) -> None:
        self._body = body

    def body(self, g: Graph) -> None:
        self._body(g)


def compiled(body: Callable[[Graph], object], budget_ns: int = 0) -> ModelProto:
    made = Compiler().bind_protocol("w", SlowWork)
    for name in "abc":
        made = made.bind_peer_selector(f"to_{name}", ConnectedView)
    if budget_ns:
        made = made.with_per_hop_budget_ns(budget_ns)
    return made.compile(Written(body).build())


class Run:
    """A network of one node of each class, whose offloaded work takes so many seconds."""

    def __init__(
        self, program: ModelProto, takes: dict[str, int], limits: Limits | None = None
    ) -> None:
        self.net = Network(0)
        self.nodes: dict[str, SimNode] = {
            name: self.net.add(name, program, [name], task_ns=seconds * S, limits=limits)
            for name, seconds in takes.items()
        }
        self.net.run(until=S)

    def invoke(self, deadline_s: int | None = None, until: int = 20 * DAY) -> dict[str, Any]:
        deadline_ns = None if deadline_s is None else deadline_s * S
        node = self.nodes["a"]
        execution = node.invoke("a", {"x": ONE}, deadline_ns=deadline_ns)
        self.net.run(until=until * S)
        return node.outputs(execution)

    def steps(self, kind: Any, name: str = "a") -> list[Any]:
        return [step for _, step in self.nodes[name].history() if isinstance(step, kind)]

    def failures(self, name: str = "a") -> list[str]:
        return [failure.detail for failure in self.nodes[name].failures()]


# --- what an author gave --------------------------------------------------------------------


def asks(deadline: float = 0.0) -> Callable[[Graph], object]:
    def body(g: Graph) -> None:
        x = g.input("x", F)
        asked = g.request("ask", at(g, "b", x), x, deadline=deadline)
        asked.respond(work(g, asked.received))
        g.output("n", asked.responses.count)

    return body


@pytest.mark.parametrize("took", [29, 31, HOUR, HOUR + 590])
def test_behind_a_request_work_has_what_the_request_has_left(took: int) -> None:
    run = Run(compiled(asks(deadline=HOUR + 600.0)), {"a": 0, "b": took})
    assert run.invoke()["n"] == 1
    assert run.failures() == run.failures("b") == []


def test_at_its_deadline_both_ends_name_the_request() -> None:
    run = Run(compiled(asks(deadline=600.0)), {"a": 0, "b": 700})
    assert run.invoke() == {}
    (asked,), (worked,) = run.failures(), run.failures("b")
    assert "0 of 1 peers answered in 600 s (the request's deadline, g.request(deadline=…))" in asked
    asker = run.nodes["a"].peer_id.short
    assert "Work_0 waited " in worked
    assert f"the deadline of {asker}'s request, g.request(deadline=…)" in worked


def test_a_nested_request_has_the_time_of_the_outer_one() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)
        outer = g.request("outer", at(g, "b", x), x, deadline=float(HOUR))
        inner = g.request("inner", at(g, "c", outer.received), outer.received)
        inner.respond(work(g, inner.received))
        outer.respond(inner.responses.stacked)
        g.output("n", outer.responses.count)

    run = Run(compiled(body), {"a": 0, "b": 0, "c": HOUR - 10})
    assert run.invoke()["n"] == 1
    run = Run(compiled(body), {"a": 0, "b": 0, "c": HOUR + 10})
    assert run.invoke() == {}
    assert run.nodes["b"].failures()


def test_an_op_has_a_deadline_of_its_own_everywhere() -> None:
    def body(g: Graph) -> None:
        g.output("y", work(g, g.input("x", F), deadline=100.0))

    run = Run(compiled(body), {"a": 99})
    assert run.invoke().keys() == {"y"}
    run = Run(compiled(body), {"a": 101})
    assert run.invoke() == {}
    (failed,) = run.failures()
    assert "Work_0 waited 100 s for w (worker thread): the op's own deadline, deadline=…" in failed


@pytest.mark.parametrize("deadline", [-1, float("nan"), 1e9, "5", True, 1e-12])
def test_a_deadline_is_a_number_of_seconds(deadline: Any) -> None:
    with pytest.raises(BadArgument, match=r"deadline=.* of Work has to be a number of seconds"):
        compiled(lambda g: work(g, g.input("x", F), deadline=deadline))


# --- of the call ----------------------------------------------------------------------------


def alone(g: Graph) -> None:
    g.output("y", work(g, g.input("x", F)))


@pytest.mark.parametrize("took", [31, 2 * HOUR, DAY - 1])
def test_an_invoke_that_nobody_bounds_has_a_day(took: int) -> None:
    run = Run(compiled(alone), {"a": took})
    assert run.invoke().keys() == {"y"}


def test_what_nobody_bounds_ends_by_the_limit_which_the_failure_names() -> None:
    run = Run(compiled(alone), {"a": DAY + 1})
    assert run.invoke() == {}
    assert "limits.wait_s = 86400" in run.failures()[0]
    run = Run(compiled(alone), {"a": 3 * DAY}, Limits(wait_s=4 * DAY))
    assert run.invoke().keys() == {"y"}
    run = Run(compiled(alone), {"a": 60}, Limits(wait_s=50))
    assert run.invoke() == {}
    assert "limits.wait_s = 50" in run.failures()[0]


@pytest.mark.parametrize("hops", [0, 1, 2])
def test_the_time_of_a_call_holds_on_every_hop(hops: int) -> None:
    def body(g: Graph) -> None:
        value = g.input("x", F)
        for name in "bc"[:hops]:
            value = g.net_out(f"to_port_{name}", at(g, name, value), value)
        made = work(g, value)
        if hops:
            made = g.net_out("back", value.sender if hops == 1 else at(g, "a", made), made)
        g.output("y", made)

    program, last = compiled(body), "abc"[hops]
    takes = dict.fromkeys("abc"[: hops + 1], 0)
    two_days = {**takes, last: 2 * DAY}
    run = Run(program, two_days)
    run.invoke(deadline_s=3 * DAY)
    assert [run.failures(name) for name in takes] == [[]] * len(takes)
    run = Run(program, {**takes, last: 40})
    run.invoke(deadline_s=30)
    (failed,) = run.failures(last)
    if hops:
        assert "the time that came with the message of" in failed
    else:
        assert "the deadline of its call, invoke(deadline_s=…)" in failed


def test_a_split_program_waits_on_its_second_hop_as_long_as_it_takes() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)
        first = g.net_out("first", at(g, "b", x), x)
        second = g.net_out("second", at(g, "c", first), first)
        done = g.net_out("done", at(g, "a", second), work(g, second))
        g.output("y", done)

    run = Run(compiled(body), {"a": 0, "b": 0, "c": 2 * HOUR})
    run.invoke()
    (event,) = run.steps(steps.AppEvent)
    assert event.topic == "y"
    assert all(run.failures(name) == [] for name in "abc")


def test_a_budget_per_hop_bounds_what_it_bounded_before() -> None:
    """Seed 001, 13.1: deadlines come of the chain upstream."""

    def body(g: Graph) -> None:
        x = g.input("x", F)
        there = g.net_out("there", at(g, "b", x), x)
        g.output("y", g.net_out("back", there.sender, work(g, there)))

    program = compiled(body, budget_ns=5 * S)
    stamps = {
        node.op_type: {p.key.removeprefix(keys.PREFIX): p.value for p in node.metadata_props}
        for function in program.functions
        for node in function.node
    }
    assert stamps["Work"]["deadline_ns"] == str(10 * S)  # there and back
    assert stamps["Work"]["deadline_from"] == "chain"
    assert "deadline_from" not in stamps["CurrentView"]
    assert stamps["CurrentView"]["deadline_ns"] == str(5 * S)
    run = Run(program, {"a": 0, "b": 9})
    run.invoke()
    assert run.failures("b") == []
    run = Run(program, {"a": 0, "b": 11})
    run.invoke()
    assert len(run.failures("b")) == 1
    # A call that says how long it may take says more than a budget of a hop.
    run = Run(program, {"a": 0, "b": 11})
    run.invoke(deadline_s=60)
    assert run.failures("b") == []


# --- bootstraps, joins, lines -----------------------------------------------------------------


def test_a_component_may_prepare_itself_for_an_hour() -> None:
    run = Run(compiled(alone), {"a": HOUR})
    run.nodes["a"].node.run_bootstrap(All(modules=False))
    run.net.run(until=2 * HOUR * S)
    done = run.steps(steps.BootstrapComplete)
    assert [step.ok for step in done] == [True] * 2  # at its start, and as it was asked for


def test_a_bootstrap_of_a_module_may_too() -> None:
    class Prepared(Module):
        home = "a"

        def bootstrap(self, g: Graph) -> None:
            work(g, g.constant(ONE, after=syscalls.pulse(g)))

        def body(self, g: Graph) -> None:
            alone(g)

    program = Compiler().bind_protocol("w", SlowWork).compile(Prepared().build())
    run = Run(program, {"a": HOUR})
    run.nodes["a"].node.run_bootstrap(ModuleNames(("Prepared",)))
    run.net.run(until=2 * HOUR * S)
    done = run.steps(steps.BootstrapComplete)
    assert [step.ok for step in done] == [True] * 2  # of the component, and of the Module


def test_a_join_waits_for_slow_peers_and_names_the_limit() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)
        there = g.net_out("there", at(g, "b", x), x)
        back = g.net_out("back", there.sender, work(g, there))
        g.output("n", g.collect(back, n=2).count)

    run = Run(compiled(body), {"a": 0, "b": HOUR})
    run.net.add("b2", compiled(body), ["b"], task_ns=3 * HOUR * S)
    run.net.run(until=2 * S)
    run.invoke()
    assert run.failures() == []
    assert [event.value for event in run.steps(steps.AppEvent)] == [2]
    run = Run(compiled(body), {"a": 0, "b": 5}, Limits(wait_s=100))
    run.invoke()
    (failed,) = run.failures()
    assert "1 came in 100 s (nobody bounds it but this node, limits.wait_s = 100" in failed


def test_a_line_at_a_component_is_no_deadline_either() -> None:
    run = Run(compiled(alone), {"a": 50})
    node = run.nodes["a"]
    for _ in range(5):
        node.invoke("a", {"x": ONE})
    run.net.run(until=HOUR * S)
    assert run.failures() == []


def test_gossip_that_a_timer_starts_has_the_limit_of_the_node_that_began() -> None:
    def body(g: Graph) -> None:
        tick = syscalls.interval(g, period_ns=6 * HOUR * S)
        x = g.constant(ONE, after=tick)
        there = g.net_out("there", at(g, "b", x), x)
        syscalls.app_emit(g, work(g, there), name="mixed")

    run = Run(compiled(body), {"a": 0, "b": 2 * HOUR})
    run.net.run(until=9 * HOUR * S)
    assert run.failures("b") == []
    assert [event.topic for event in run.steps(steps.AppEvent, "b")] == ["mixed"]
    run = Run(compiled(body), {"a": 0, "b": 2 * HOUR}, Limits(wait_s=HOUR))
    run.net.run(until=9 * HOUR * S)
    assert "the time that came with the message of" in run.failures("b")[0]


# --- the programs that ship -------------------------------------------------------------------


def test_a_round_of_federated_training_takes_an_hour(tmp_path: Path) -> None:
    class Round(Module):
        home = "server"

        def body(self, g: Graph) -> None:
            tick = g.input("tick", types.TRIGGER)
            clients = PeerSelectorSlot("cohort", peer_class="client").current_view(g, after=tick)
            weights = ModelSlot("global").params(g, after=tick)
            asked = g.request("round", clients, weights, deadline=2.0 * HOUR)
            local = ModelSlot("local")
            local.load_parameters(g, asked.received)
            stats = local.train(g, epochs=1)
            asked.respond(g.bundle([local.params(g), stats]))
            g.output("n", asked.responses.count)

    program = (
        Compiler()
        .bind_model("global", OnnxModel)
        .bind_model("local", OnnxModel)
        .bind_backend("compute", OrtBackend)
        .bind_data_source("data", ArrayDataSource)
        .bind_peer_selector("cohort", ConnectedView)
        .compile(Round().build())
    )
    model = mlp_forward((2, 1), seed=1).SerializeToString()
    x = np.zeros((8, 2), np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, :1])
    data = {"path": str(tmp_path / "data.npz")}
    local = {"local": {"model": model, "loss": "mse"}, "data": data}
    net = Network(0)
    central = {"global": {"model": model}, "data": data}
    server = net.add("server", program, ["server"], config=central)
    net.add("client", program, ["client"], task_ns=HOUR * S, config=local)
    net.run(until=S)
    execution = server.invoke("server", {"tick": TRIGGER})
    net.run_until_idle()
    assert server.outputs(execution)["n"] == 1
    assert server.failures() == []
