"""What can never fire is refused at compile, and what can is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CollectNotReceived, ExpansionFailed, NeverFires
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, syscalls, types
from bbnode.engine import errors, install
from bbnode.ir.peer import PeerId

F = types.TENSOR_FLOAT
COMPUTE = BackendSlot("compute")
COMPILER = (
    Compiler().bind_backend("compute", OrtBackend).bind_peer_selector("clients", ConnectedView)
)


class Program(Module):
    home = "server"

    def __init__(self, record: Callable[[Graph], None]) -> None:
        self._record = record

    def body(self, g: Graph) -> None:
        self._record(g)


def compiled(record: Callable[[Graph], None]):
    return COMPILER.compile(Program(record).build())


def asked(g: Graph):
    """`v` of an invoke, and what comes back for it."""
    v = g.input("v", F)
    clients = PeerSelectorSlot("clients", peer_class="client").sample(g, n=1, after=v)
    there = g.net_out("ask", clients, v)
    return v, there, g.net_out("update", there.sender, there)


def of_an_invoke(g: Graph) -> None:
    v, _, back = asked(g)
    g.output("y", COMPUTE.add(g, back, v))


def waits_for_a_delivery(g: Graph) -> None:
    v, _, back = asked(g)
    g.output("y", v, after=back)


def of_two_ports(g: Graph) -> None:
    _, there, back = asked(g)
    other = g.net_out("other", there.sender, there)
    g.output("y", COMPUTE.add(g, back, other))


def answers_with_a_third_class(g: Graph) -> None:
    v = g.input("v", F)
    clients = PeerSelectorSlot("clients", peer_class="client").sample(g, n=1, after=v)
    request = g.request("ask", clients, v)
    thirds = g.peer_ids([PeerId.from_seed(1)], peer_class="third")
    third = g.net_out("third", thirds, request.received)
    request.respond(g.net_out("back", third.sender, third))


def of_a_tick(g: Graph) -> None:
    _, _, back = asked(g)
    tick = syscalls.threshold(g, syscalls.interval(g, period_ns=1_000), n=1)
    g.output("y", syscalls.gate(g, back, tick))


def counts_two_deliveries(g: Graph) -> None:
    _, there, back = asked(g)
    other = g.net_out("other", there.sender, there)
    syscalls.app_notify(g, syscalls.threshold(g, back, other, n=2), name="both")


def of_a_batch_and_its_delivery(g: Graph) -> None:
    _, _, back = asked(g)
    g.output("y", back, after=g.collect(back, n=2))


def captured_by_a_branch(g: Graph) -> None:
    v, _, back = asked(g)
    positive = COMPUTE.greater(g, COMPUTE.reduce_max(g, v, keepdims=0), g.constant(0.0))
    g.output("y", COMPUTE.if_(g, positive, lambda b: COMPUTE.neg(b, back), lambda _: v))


class Later(Module):
    """A body with an execution of its own inside."""

    def body(self, g: Graph) -> None:
        x = g.input("x", F)
        tick = syscalls.threshold(g, syscalls.interval(g, period_ns=1_000), n=1)
        g.output("y", syscalls.gate(g, x, tick))


def inside_of_modules(g: Graph) -> None:
    v, _, _ = asked(g)
    for number in range(2):  # twice, so that it stays a call
        g.output(f"y{number}", Later().call().input("x", v).build(g).output("y"))


@pytest.mark.parametrize(
    ("record", "op", "first", "second"),
    [
        (of_an_invoke, "Add_0", "the invoke of 'server' (input 'v')", "port 'update' on 'server'"),
        (waits_for_a_delivery, "PassThrough_0", "the invoke of 'server'", "port 'update'"),
        (of_two_ports, "Add_0", "port 'update' on 'server'", "port 'other' on 'server'"),
        (answers_with_a_third_class, "SendResp_0", "port 'back'", "the request 'ask' on 'client'"),
        (of_a_tick, "Gate_0", "port 'update'", "each tick of 'Interval_0' on 'server'"),
        (counts_two_deliveries, "Threshold_0", "port 'update'", "port 'other'"),
        (of_a_batch_and_its_delivery, "PassThrough_0", "port 'update'", "what 'Collect_0' gath"),
        (captured_by_a_branch, "If_0", "the invoke", "port 'update'"),
        (inside_of_modules, "Gate_0", "the invoke", "each tick of"),
    ],
)
def test_values_of_two_executions_never_meet(record, op: str, first: str, second: str) -> None:
    with pytest.raises(NeverFires) as caught:
        compiled(record)
    error = caught.value
    assert error.node_name.endswith(op)
    said = sorted([error.execution_a, error.execution_b])
    assert any(first in text for text in said), said
    assert any(second in text for text in said), said
    assert "test_deliveries.py:" in error.source_line
    assert error.module
    assert ("to one port" if op == "Threshold_0" else "g.request") in str(error)


def test_what_meets_in_one_execution_is_compiled() -> None:
    def record(g: Graph) -> None:
        v, there, back = asked(g)
        one = g.constant([1.0])
        g.output("constants", COMPUTE.add(g, back, one))  # exist everywhere
        g.output("first", syscalls.any_of(g, back, v))  # fires in both executions
        again = g.net_out("update", there.sender, COMPUTE.neg(g, there))  # the same port
        g.output("fan_in", COMPUTE.add(g, again, back))
        tick = syscalls.interval(g, period_ns=1_000)
        g.output("tick", syscalls.threshold(g, tick, n=1))
        request = g.request("more", back.sender, back)
        request.respond(request.received)
        g.output("waits", COMPUTE.add(g, back, one), after=request.responses)
        whole = g.net_out("whole", there.sender, g.bundle([there, there]))
        left, right = g.unbundle(whole, [F, F])
        g.output("bundled", COMPUTE.add(g, left, right))

    model = compiled(record)
    install(model, ["server"], peer_id=PeerId.from_seed(0))
    install(model, ["client"], peer_id=PeerId.from_seed(0))


def test_an_artifact_with_ops_that_never_fire_is_not_installed() -> None:
    lenient = COMPILER.without_stage("validate_deliveries")
    model = lenient.compile(Program(of_two_ports).build())
    with pytest.raises(errors.UnreachableOps, match="compile the program again"):
        install(model, ["server"], peer_id=PeerId.from_seed(0))


def test_a_threshold_that_can_not_be_complete_is_not_installed() -> None:
    lenient = COMPILER.without_stage("validate_deliveries")
    model = lenient.compile(Program(counts_two_deliveries).build())
    with pytest.raises(errors.UnreachableOps, match="Threshold_0"):
        install(model, ["server"], peer_id=PeerId.from_seed(0))


@pytest.mark.parametrize("which", ["tick", "batch", "constant"])
def test_only_what_came_over_the_wire_is_gathered(which: str) -> None:
    def record(g: Graph) -> None:
        _, _, back = asked(g)
        value = {
            "tick": lambda: syscalls.interval(g, period_ns=1_000),
            "batch": lambda: g.collect(back, n=2),
            "constant": lambda: g.constant([1.0]),
        }[which]()
        g.output("y", g.collect(value, n=2))

    with pytest.raises(CollectNotReceived, match=r"Collect what `g\.net_out`"):
        compiled(record)


def test_a_hand_made_join_with_numbers_that_do_not_fit_is_refused() -> None:
    def record(g: Graph) -> None:
        g.output("y", g.collect(asked(g)[2], n=2))

    model = Program(record).build()
    (node,) = (n for f in model.functions for n in f.node if n.op_type == "Collect")
    for attribute in node.attribute:
        if attribute.name == "quorum":
            attribute.i = 3
    with pytest.raises(ExpansionFailed, match="quorum is 3, more than n, 2"):
        COMPILER.compile(model)
