"""What an invocation gives, over all peers that it goes through, on the simulator."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, OrtBackend
from bbnode.daemon.invoke.outcome import NOBODY_REACHED, InvokeOutcome, Outcomes
from bbnode.daemon.invoke.reach import Reach
from bbnode.dsl import BackendSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import steps
from bbnode.examples.multi_target import build_network, compile_program
from bbnode.ir.caps import MAX_KEPT_OUTPUTS
from bbnode.ir.onnx_file import program_of
from bbnode.ir.peer import PeerId
from bbnode.sim import Network, SimNode

HELPER = PeerId.from_seed("helper")
NUMBERS = np.array([1, 2, 3], np.float32)


class Around(Module):
    """An asker, who hears from every helper; a helper asks a deputy, who may fail."""

    home = "asker"

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        numbers = g.input("numbers", types.TENSOR_FLOAT)
        helpers = PeerSelectorSlot("helpers", peer_class="helper").current_view(g, after=numbers)
        got = g.net_out("question", helpers, numbers)
        deputies = PeerSelectorSlot("deputies", peer_class="deputy").sample(g, n=1, after=got)
        handed = g.net_out("handed", deputies, got)
        # Fails for anything but three numbers.
        reshaped = compute.reshape(g, handed, g.constant(np.array([3, 1], np.int64)))
        askers = PeerSelectorSlot("askers", peer_class="asker").current_view(g, after=reshaped)
        g.output("deep", g.net_out("deep", askers, reshaped))
        g.output("near", g.net_out("near", got.sender, compute.neg(g, got)))
        g.output("same", numbers)


@cache
def around() -> ModelProto:
    compiler = Compiler().bind_backend("compute", OrtBackend)
    for slot in ("helpers", "deputies", "askers"):
        compiler = compiler.bind_peer_selector(slot, ConnectedView)
    return compiler.compile(Around().build())


def asker_of(network: Network, helpers: int = 1, deputies: int = 1) -> SimNode:
    asker = network.add("asker", around(), ["asker"])
    for i in range(helpers):
        network.add(f"helper-{i}", around(), ["helper"])
    for i in range(deputies):
        network.add(f"deputy-{i}", around(), ["deputy"])
    return asker


class Waiting:
    """Outcomes of a node of the simulator."""

    def __init__(self, network: Network, node: SimNode, compiled: ModelProto) -> None:
        self.network, self.node = network, node
        self.reach = Reach(program_of(compiled))
        self.outcomes = Outcomes()
        self.seen = len(node.history())

    def look(self) -> None:
        history = self.node.history()
        for _, step in history[self.seen :]:
            self.outcomes.observe(step)
        self.seen = len(history)

    def invoke(self, **inputs: Any) -> InvokeOutcome:
        target = self.node.node.targets[0]
        execution = self.node.invoke(target, inputs)
        return self.collect(execution, self.reach.later(target))

    def collect(self, execution: int, later: frozenset[str]) -> InvokeOutcome:
        with self.outcomes.collect(execution, later) as outcome:
            self.network.run_until_idle()
            self.look()
        return outcome


def test_what_comes_back_over_two_peers_is_waited_for() -> None:
    network = Network(seed=1)
    waiting = Waiting(network, asker_of(network), around())
    outcome = waiting.invoke(numbers=NUMBERS)
    assert outcome.ok is True
    assert outcome.later == {"near", "deep"}
    assert {name: value.tolist() for name, value in outcome.outputs.items()} == {
        "same": [1, 2, 3],
        "near": [-1, -2, -3],
        "deep": [[1], [2], [3]],
    }
    assert outcome.missing == []


def test_a_failure_two_peers_away_ends_the_wait_and_says_where() -> None:
    network = Network(seed=1)
    waiting = Waiting(network, asker_of(network), around())
    outcome = waiting.invoke(numbers=NUMBERS[:2])
    assert outcome.ok is False
    assert outcome.outputs["near"].tolist() == [-1, -2]
    (failure,) = outcome.failures
    assert "test_outcome.py:" in failure["op"]
    assert failure["op"].endswith(f"on {network['deputy-0'].peer_id}")
    assert failure["peer"] == str(network["helper-0"].peer_id)
    assert outcome.missing == ["deep"]


def test_answers_of_two_invocations_are_never_exchanged() -> None:
    network = Network(seed=1)
    asker = asker_of(network)
    waiting = Waiting(network, asker, around())
    target = asker.node.targets[0]
    later = waiting.reach.later(target)
    first = asker.invoke(target, {"numbers": NUMBERS[:2]})  # fails on the deputy
    second = asker.invoke(target, {"numbers": NUMBERS})
    with waiting.outcomes.collect(first, later) as one:
        two = waiting.collect(second, later)
    assert (one.ok, two.ok) == (False, True)
    assert one.outputs["near"].tolist() == [-1, -2]
    assert two.outputs["near"].tolist() == [-1, -2, -3]
    assert two.outputs["deep"].tolist() == [[1], [2], [3]]


def test_every_helper_s_answer_is_kept_with_its_peer() -> None:
    network = Network(seed=1)
    waiting = Waiting(network, asker_of(network, helpers=3), around())
    outcome = waiting.invoke(numbers=NUMBERS)
    assert outcome.ok is True
    peers = {peer for peer, _ in outcome.more["near"]}
    assert len(outcome.more["near"]) == 2
    assert peers < {str(network[f"helper-{i}"].peer_id) for i in range(3)}


def test_nobody_to_send_to_is_no_wait() -> None:
    network = Network(seed=1)
    waiting = Waiting(network, asker_of(network, helpers=0), around())
    outcome = waiting.invoke(numbers=NUMBERS)
    assert outcome.over.is_set()
    assert outcome.outputs.keys() == {"same"}
    assert "no peer to send to" in outcome.skipped["near"]


def test_peers_that_all_are_denied_are_a_failure() -> None:
    outcomes = Outcomes()
    with outcomes.collect(1, frozenset({"y"})) as outcome:
        outcomes.observe(
            steps.PeerResolveFailed(peer=HELPER, op="send", execution=1, reason="blocked")
        )
        outcomes.observe(finished(1))
    assert outcome.ok is False
    (failure,) = outcome.failures
    assert failure["kind"] == NOBODY_REACHED
    assert f"{HELPER} (blocked)" in failure["detail"]


def test_an_output_of_a_ring_comes_by_its_event() -> None:
    network, door = build_network(compile_program())
    waiting = Waiting(network, door, compile_program())
    target = door.node.targets[0]
    later = waiting.reach.later(target, "document")
    assert later == {"stored", "keeper"}
    execution = door.deliver_event(target, "document", np.array([9, 1, 0], np.float32))
    outcome = waiting.collect(execution, later)
    assert outcome.ok is True
    assert int(outcome.outputs["stored"]) == 0


def finished(execution: int, chain: int = 0, *, ok: bool = True) -> steps.ExecutionFinished:
    return steps.ExecutionFinished(
        execution=execution, target="t", ok=ok, failures=0 if ok else 1, chain=chain
    )


def came(chain: int, value: Any = 1.0) -> steps.AppEvent:
    return steps.AppEvent(target="t", topic="y", value=value, execution=99, chain=chain)


def test_an_answer_may_overtake_the_end_of_the_execution_that_asked() -> None:
    outcomes = Outcomes()
    with outcomes.collect(1, frozenset({"y"})) as outcome:
        outcomes.observe(came(7, 0.5))
        outcomes.observe(came(8))
        assert outcome.outputs == {}
        outcomes.observe(finished(1, 7))
        assert (outcome.ok, outcome.outputs) == (True, {"y": 0.5})


def test_what_is_kept_is_bounded() -> None:
    outcomes = Outcomes()
    with outcomes.collect(1, frozenset({"z"})) as outcome:
        outcomes.observe(finished(1, 7))
        for _ in range(MAX_KEPT_OUTPUTS + 5):
            outcomes.observe(came(7))
        assert outcome.left_out == 5
        assert outcome.missing == ["z"]
        assert outcome.ok is None


async def test_a_wait_ends_at_its_time(autojump_clock: Any) -> None:
    outcomes = Outcomes()
    with outcomes.collect(1, frozenset({"y"})) as outcome:
        outcomes.observe(finished(1, 7))
        assert await outcome.wait(5.0) is False
        outcomes.observe(came(7))
        assert await outcome.wait(5.0) is True


@pytest.mark.parametrize("forget", [True, False])
def test_nothing_is_collected_for_nobody(forget: bool) -> None:
    outcomes = Outcomes()
    if forget:
        with outcomes.collect(1, frozenset({"y"})) as outcome:
            outcomes.observe(finished(1, 7))
    outcomes.observe(came(7))
    with outcomes.collect(2) as other:
        outcomes.observe(came(7))
        outcomes.observe(finished(2))
    assert other.outputs == {}
    if forget:
        assert outcome.outputs == {}
