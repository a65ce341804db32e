"""Members that lie, in the simulator: peers are introduced with their classes there as well."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bbnode.daemon.artifacts.build import compile_module
from bbnode.engine import steps
from bbnode.ir import keys
from bbnode.ir.envelope import CorrelationKind
from bbnode.ir.values import TRIGGER, Metadata
from bbnode.sim import Network
from tests import protos
from tests.engine.envelopes import envelope
from tests.sim import programs

CLIENTS = 3


def test_a_worker_takes_no_work_from_another_worker() -> None:
    net = Network(0)
    net.add("asker", programs.ask(), ["asker"])
    one, other = (net.add(f"worker-{i}", programs.ask(), ["worker"]) for i in range(2))
    net.run_until_idle()
    (site,) = {
        int(protos.get_meta(node, keys.SITE_ID_KEY) or "0")
        for function in programs.ask().functions
        for node in function.node
        if protos.is_wire(node, keys.OP_RECV_REQ)
    }
    value = np.ones(1, np.float32)
    for sender in (other, net["asker"]):
        data = envelope(sender.peer_id, site, value, CorrelationKind.REQUEST)
        one.node.deliver_inbound(sender.peer_id, data)
    net.run_until_idle()
    (refused,) = one.seen(steps.WireReceiveFailed)
    assert (refused.kind, refused.peer) == ("SenderNotOfClass", other.peer_id)
    assert one.node.counters()["receive.failed.SenderNotOfClass"] == 1


@pytest.mark.parametrize(
    "lie",
    [{"num_samples": 10**9}, {"num_samples": 1, "loss": 1e308}, {"num_samples": 0},
     {"num_samples": 1, "loss": math.nan}, {}],
)  # fmt: skip
def test_one_that_lies_is_left_out_and_named(lie: dict[str, float]) -> None:
    made = compile_module(
        "tests.chaos.program:CountingRound", {"clients": CLIENTS, "quorum": CLIENTS}
    )
    net = Network(0)
    server = net.add("server", made, ["server"])
    clients = [net.add(f"client-{i}", made, ["client"]) for i in range(CLIENTS)]
    liar = clients[0]
    liar.node.component("local").train = lambda *_, **__: Metadata(lie)
    for round_made in (1, 2):
        execution = server.invoke("server", {"tick": TRIGGER})
        net.run_until_idle()
        outputs = server.outputs(execution)
        assert float(outputs["first"]) == round_made
        stats = outputs["stats"]
        assert (stats["contributors"], stats["refused"]) == (CLIENTS - 1, 1)
        assert stats["refused_why"].startswith(f"{liar.peer_id}: ")
    told = [s for s in server.seen(steps.Telemetry) if s.name == "contribution.refused"]
    assert [step.attributes["peer"] for step in told] == [liar.peer_id] * 2
    assert {step.attributes["slot"] for step in told} == {"mean"}
    assert server.node.counters()["contributions.refused"] == 2
    assert not server.failures()
    assert len(clients) == CLIENTS


def test_when_all_lie_the_model_stays() -> None:
    made = compile_module("tests.chaos.program:CountingRound", {"clients": 2, "quorum": 2})
    net = Network(0)
    server = net.add("server", made, ["server"])
    liars = [net.add(f"client-{i}", made, ["client"]) for i in range(2)]
    server.invoke("server", {"tick": TRIGGER})
    net.run_until_idle()
    for liar in liars:
        liar.node.component("local").train = lambda *_, **__: Metadata(num_samples=10**9)
    execution = server.invoke("server", {"tick": TRIGGER})
    net.run_until_idle()
    assert server.outputs(execution) == {}
    assert [step.kind for step in server.failures()] == ["ContributionRefused"]
    assert server.node.component("global").params(None).tolist() == [1.0] * 4
