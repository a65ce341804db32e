"""Chains: the messages that come of one execution, and failures that go back along them."""

from __future__ import annotations

import numpy as np

from bbnode.engine import steps
from bbnode.engine.wire import outbound
from bbnode.ir.caps import MAX_CAUSES_REMEMBERED
from bbnode.sim import Network, SimNode
from tests.daemon.test_outcome import NUMBERS, around, asker_of


def refusals(node: SimNode) -> list[steps.Telemetry]:
    return [step for step in node.seen(steps.Telemetry) if step.name == "send.refused"]


def test_what_comes_back_is_of_the_chain_of_who_asked() -> None:
    network = Network(seed=3)
    asker = asker_of(network)
    execution = asker.invoke("asker", {"numbers": NUMBERS})
    network.run_until_idle()
    (end,) = asker.seen(steps.ExecutionFinished)
    assert end.execution == execution
    assert end.chain
    events = {event.topic: event for event in asker.seen(steps.AppEvent)}
    assert events["same"].chain == 0
    assert {events["near"].chain, events["deep"].chain} == {end.chain}
    assert events["near"].source_peer == network["helper-0"].peer_id


def test_an_execution_that_sends_nothing_has_no_chain() -> None:
    network = Network(seed=3)
    asker = asker_of(network, helpers=0)
    asker.invoke("asker", {"numbers": NUMBERS})
    network.run_until_idle()
    assert [end.chain for end in asker.seen(steps.ExecutionFinished)] == [0]


def test_a_failure_is_told_once_along_the_chain() -> None:
    network = Network(seed=3)
    asker = asker_of(network)
    asker.invoke("asker", {"numbers": NUMBERS[:2]})
    network.run_until_idle()
    (failed,) = network["deputy-0"].failures()
    (at_helper,) = refusals(network["helper-0"])
    (at_asker,) = refusals(asker)
    assert at_helper.attributes["chain"] == 0
    assert at_asker.attributes["chain"] == asker.seen(steps.ExecutionFinished)[0].chain
    assert at_asker.attributes["kind"] == failed.kind
    assert at_asker.attributes["where"].endswith(f"on {network['deputy-0'].peer_id}")
    assert "/" not in at_asker.attributes["where"]  # no folder of that machine


def test_the_way_back_survives_a_restart_of_who_is_between() -> None:
    network = Network(seed=3)
    asker = asker_of(network)
    deputy = network["deputy-0"]
    asker.invoke("asker", {"numbers": NUMBERS[:2]})
    between = network["helper-0"].node.runtime.outbound
    network.run_until(lambda: bool(between.state(None)[-1]))
    assert not deputy.failures()
    network["helper-0"].checkpoint()
    network.restart("helper-0")
    network.run_until_idle()
    assert len(deputy.failures()) == 1
    assert refusals(asker)


def test_only_the_newest_causes_are_remembered(monkeypatch) -> None:
    assert MAX_CAUSES_REMEMBERED >= 1024
    monkeypatch.setattr(outbound, "MAX_CAUSES_REMEMBERED", 2)
    network = Network(seed=3)
    asker = asker_of(network)
    for _ in range(5):
        asker.invoke("asker", {"numbers": NUMBERS})
        network.run_until_idle()
    box = network["helper-0"].node.runtime.outbound
    assert len(box.state(None)[-1]) <= 2
    assert box.cause_of(12345) == (None, 12345)


def test_snapshots_of_before_chains_are_read() -> None:
    network = Network(seed=3)
    asker = asker_of(network)
    asker.invoke("asker", {"numbers": np.float32([1])})
    network.run_until_idle()
    box = asker.node.runtime.outbound
    tag, answers, _ = box.state(None)
    box.load([tag, answers], None)
    assert box.state(None) == [tag, answers, []]
    assert around() is around()
