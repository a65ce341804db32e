"""Firing rules of framework ops that no other test in this folder has a program for.

Rule: each op is fired in a program of its own, and what it does is told from the steps alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from multiaddr import Multiaddr

from bbnode.engine import errors, steps
from bbnode.ir import keys
from bbnode.ir.opset import ops_of
from bbnode.ir.values import TRIGGER, AddressVec, CorrelationToken
from tests.engine.builder import Partition, model
from tests.engine.support import MS, S, bring_up, of, peer


def shown(made):
    return [(step.topic, step.value) for step in of(steps.AppEvent, made)]


def kinds(made):
    return [step.kind for step in of(steps.OpFailed, made)]


@pytest.mark.parametrize(
    "domain",
    [
        *(keys.SYSCALL_DOMAIN, keys.COMPOSITE_DOMAIN, keys.WIRE_DOMAIN, keys.ADDRESS_BOOK_DOMAIN),
        *(keys.RESPONSES_DOMAIN, keys.SEARCH_DOMAIN, keys.TYPES_DOMAIN),
    ],
)
def test_the_engine_knows_every_op_of_the_framework(domain) -> None:
    """Ops without their attributes are refused as wrong, and not as unknown."""
    assert ops_of(domain)
    for spec in ops_of(domain):
        p = Partition("server", inputs=["x"])
        p.op(domain, spec.op_type, ["x"], ["y"])
        try:
            bring_up(model(p), "server")
        except errors.UnsupportedOps as refused:
            pytest.fail(f"{spec.op_type}: {refused}")
        except errors.InvalidArtifact:
            pass


def race(then_ns: int, timeout_ns: int):
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "then", duration_ns=then_ns)
    p.sys("Sleep", ["x"], "timeout", duration_ns=timeout_ns)
    p.sys("DeadlineMatch", ["then", "timeout"], "winner")
    p.sys("AppNotify", ["winner"], name="won")
    return bring_up(model(p), "server")


@pytest.mark.parametrize(("then_ns", "timeout_ns"), [(MS, S), (S, MS), (MS, MS)])
def test_a_deadline_match_fires_once_with_the_first_of_the_two(then_ns, timeout_ns) -> None:
    node = race(then_ns, timeout_ns)
    node.invoke("server", {"x": TRIGGER})
    assert shown(node.poll(0)) == []
    assert shown(node.poll(MS)) == [("won", TRIGGER)]
    made = node.poll(2 * S)
    assert shown(made) == []  # the loser is over and nobody hears of it
    assert node.executions() == []
    assert node.next_deadline() is None


def test_what_the_compiler_puts_on_edges_passes_the_value() -> None:
    p = Partition("server", inputs=["x", "t", "u"])
    p.sys("GateDispatch", ["x"], "one")
    p.sys("AppEmit", ["one"], name="one")
    p.sys("Sleep", ["u"], "later", duration_ns=MS)
    p.sys("GateManyDispatch", ["x", "t", "later"], "many")
    p.sys("AppEmit", ["many"], name="many")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": np.float32(3), "t": TRIGGER, "u": TRIGGER})
    assert [(topic, float(value)) for topic, value in shown(node.poll(0))] == [("one", 3.0)]
    assert [(topic, float(value)) for topic, value in shown(node.poll(MS))] == [("many", 3.0)]


@pytest.mark.parametrize("op_type", ["MintDispatch", "CorrelateTag"])
def test_every_token_is_another_one(op_type) -> None:
    p = Partition("server", inputs=["t"])
    p.sys(op_type, ["t"], "a")
    p.sys(op_type, ["t"], "b")
    for name in "ab":
        p.sys("AppEmit", [name], name=name)
    node = bring_up(model(p), "server")
    for _ in range(3):
        node.invoke("server", {"t": TRIGGER})
    tokens = [value for _, value in shown(node.poll(0))]
    assert all(type(token) is CorrelationToken for token in tokens)
    assert len(set(tokens)) == len(tokens) == 6


def test_many_addresses_of_a_peer_go_into_the_book_in_their_order() -> None:
    p = Partition("server", inputs=["peer", "addresses"])
    p.op(keys.ADDRESS_BOOK_DOMAIN, "InsertMany", ["peer", "addresses"], (), called="insert")
    p.op(keys.ADDRESS_BOOK_DOMAIN, "Lookup", ["peer"], ["found"], control=["insert"])
    p.output("out", "found")
    node = bring_up(model(p), "server")
    first, second, third = (Multiaddr(f"/ip4/10.0.0.{i}/tcp/4001") for i in (1, 2, 3))

    def insert(*addresses):
        node.invoke("server", {"peer": peer(5), "addresses": AddressVec(addresses)})
        return node.poll(0)

    assert shown(insert(first, second)) == [("out", AddressVec((first, second)))]
    assert shown(insert(third, first)) == [("out", AddressVec((first, second, third)))]
    made = insert()  # an error of the book; what only comes after it goes on
    assert len(kinds(made)) == 1
    assert shown(made) == [("out", AddressVec((first, second, third)))]


def sends_to(other, gate):
    p = Partition("server", inputs=["x"])
    p.sys(gate, ["x"], "go", named={keys.ATTR_PEER: other.to_bytes()})
    p.sys("AppNotify", ["go"], name="passed")
    p.sys("AppNotify", ["x"], name="other")
    return bring_up(model(p), "server")


def asked(node, now_ns):
    """Whether the gate passed, and the reasons that it gave; all else goes on in any case."""
    execution = node.invoke("server", {"x": TRIGGER})
    made = node.poll(now_ns)
    assert ("other", TRIGGER) in shown(made)
    assert of(steps.OpFailed, made) == []
    (end,) = of(steps.ExecutionFinished, made)
    assert end.ok
    denied = of(steps.PeerResolveFailed, made)
    assert {(step.peer, step.execution) for step in denied} <= {(peer(3), execution)}
    return [e for e in shown(made) if e[0] != "other"], [step.reason for step in denied]


def test_the_send_gate_of_health_asks_who_may_be_reached() -> None:
    node = sends_to(peer(3), keys.OP_PEER_HEALTH_GATE_TX)
    passed = ([("passed", TRIGGER)], [])
    assert asked(node, 0) == passed
    node.block_peer(peer(3))
    assert asked(node, 1) == ([], ["blocklisted"])
    node.unblock_peer(peer(3))
    node.allow_only([peer(4)])
    assert asked(node, 2) == ([], ["not_allowlisted"])
    node.allow_only(None)
    assert asked(node, 3) == passed
    counted = node.counters()
    assert counted["gate.denied.blocklisted"] == counted["gate.denied.not_allowlisted"] == 1


@pytest.mark.parametrize("gate", [keys.OP_BACKOFF_GATE_TX, keys.OP_PEER_HEALTH_GATE_TX])
def test_the_send_gates_wait_for_a_peer_that_failed(gate) -> None:
    node = sends_to(peer(3), gate)
    for _ in range(5):
        node.send_failed(peer(3), "refused")
    assert asked(node, 0) == ([], ["cooldown"])
    assert asked(node, 61 * S) == ([("passed", TRIGGER)], [])  # at most a minute
