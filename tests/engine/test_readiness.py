"""Slots that could not be prepared: what is refused for them, and what peers hear of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest

from bbnode.components.contracts import ComponentError, DataSource, offload
from bbnode.components.errors import DataUnavailable
from bbnode.engine import All, steps
from bbnode.engine.readiness import NOT_READY, READY, NotReadyPeer
from bbnode.ir import keys, types
from bbnode.ir.caps import MAX_REFUSALS_PER_S
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import TRIGGER, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import Pump, S, ScriptModel, _once, bring_up, component, of, peer
from tests.engine.test_network import telemetry
from tests.engine.test_refusals import NONE, REQUEST, RESPONSE, asked, refusal, told

MODEL, SELECTOR, DATA = (keys.role_domain(role) for role in ("Model", "PeerSelector", "DataSource"))
MISSING = "no file /home/me/digits.npz; set `path`\nmore"
REASON = "slot data: no file /home/me/digits.npz; set `path`"
PUBLIC = "slot data: no file …/digits.npz; set `path`"


@_once
class Files(DataSource):
    """A data source whose file may be missing."""

    TYPE_NAME: ClassVar[str] = "test.Files"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.missing = ""
        self.loads = 0

    def bootstrap(self, ctx):
        self.loads += 1
        if self.missing:
            raise DataUnavailable(self.missing)

    def next_batch(self, ctx):
        return np.ones((1, 1), np.float32), np.zeros(1, np.int64)

    def reset(self, ctx): ...

    def on_data_loaded(self, ctx): ...

    def epoch_batches(self, batch_size):
        return []

    @property
    def num_samples(self) -> int:
        return 1


@_once
class Trained(ScriptModel):
    """Uses its data only to train."""

    TYPE_NAME: ClassVar[str] = "test.Trained"
    depends: ClassVar[Mapping[str, str]] = {"data_source": "data"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {"data_source": ("train",)}

    @offload
    def train(self, ctx, *, epochs, batch):
        self.dependency("data_source")
        return super().train(ctx, epochs=epochs, batch=batch)


def program(client_op: str = "Train", quorum: int = 0):
    """The server asks all clients for their weights, or to train before; it never trains."""
    client = Partition("client")
    server = Partition("server", inputs=["tick"])
    for partition, slot in ((client, "local"), (server, "global")):
        partition.bind(slot, "Model", "test.Trained")
        partition.bind("data", "DataSource", "test.Files")
    client.recv("weights", request="req", node=types.TENSOR_FLOAT, gates=True, sender="from")
    client.op(MODEL, "LoadParameters", ["weights"], ["c"], slot="local", called="load")
    if client_op == "Train":
        client.op(MODEL, "Train", (), ["stats"], slot="local", called="train", control=["load"],
                  epochs=2, batch=8, stamp_ns=20 * S)  # fmt: skip
    client.op(MODEL, "Params", (), ["w"], slot="local", control=["load"])
    client.respond("w", "from", "req", server.site("answers"))
    server.bind("cohort", "PeerSelector", "test.ScriptSelector")
    server.op(SELECTOR, "Sample", (), ["peers"], slot="cohort", after=["tick"], n=10,
              meta={keys.PEER_CLASS_KEY: "client"})  # fmt: skip
    server.op(MODEL, "Params", (), ["w"], slot="global", after=["tick"])
    server.request("w", "peers", client.site("weights"), "answers", quorum=quorum)
    server.output("out", "answers")
    return model(server, client)


def prepare(node, missing: str = "", now: int = 0):
    """Run the components' bootstraps."""
    ask(node, missing)
    return node.poll(now)


def ask(node, missing: str = "") -> None:
    component(node, "data").missing = missing
    node.run_bootstrap(All(modules=False))


def notices(made):
    return [row for row in told(made) if row[1:3] == (NONE, 0)]


def test_a_slot_is_not_ready_until_its_bootstrap_succeeds() -> None:
    node = bring_up(program(), "client", me=1)
    made = prepare(node, MISSING)
    assert [step.ok for step in of(steps.BootstrapComplete, made) if step.target] == [False]
    assert node.not_ready() == {"data": MISSING.partition("\n")[0]}
    assert node.counters()["slots.not_ready"] == 1
    prepare(node, "another\nreason", now=1)
    assert node.not_ready() == {"data": "another"}
    prepare(node, now=2)
    assert node.not_ready() == {}
    assert node.counters()["slots.not_ready"] == 0


def test_what_needs_the_slot_is_refused_at_once_and_works_when_it_is_there() -> None:
    node = bring_up(program(), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    prepare(node, MISSING)
    node.deliver_inbound(peer(0), asked())
    made = node.poll(1)
    ((to, _, request, why),) = (row for row in told(made) if row[1] is RESPONSE)
    assert (to, request, why.kind, why.detail) == (peer(0), 7, NOT_READY, PUBLIC)
    (failed,) = of(steps.WireReceiveFailed, made)
    assert (failed.kind, failed.detail) == (NOT_READY, REASON)
    assert node.executions() == []
    prepare(node, now=2)
    node.deliver_inbound(peer(0), asked())
    made = node.poll(3)
    assert told(made) == []
    assert len(of(steps.RunTask, made)) == 1


def test_data_that_no_op_needs_are_neither_prepared_nor_missed() -> None:
    for node in (
        bring_up(program(), "server", me=1),
        bring_up(program(client_op="Params"), "client", me=1),
    ):
        node.peer_connected(peer(0), ["server"])
        prepare(node, MISSING)
        assert component(node, "data").loads == 0
        assert node.not_ready() == {}
    node.deliver_inbound(peer(0), asked())
    made = node.poll(1)
    assert [row[1] for row in told(made)] == []
    assert of(steps.SendEnvelope, made)
    # Whoever calls it all the same is told what is missing.
    with pytest.raises(ComponentError, match=r"has no data_source here.*calls one of train"):
        component(node, "local").dependency("data_source")


def test_peers_hear_of_it_when_they_connect_and_when_it_changes() -> None:
    node = bring_up(program(), "client", me=1)
    node.peer_connected(peer(2), ["server"])
    assert notices(node.poll(0)) == []
    notice = WireRefusal(NOT_READY, PUBLIC, "client")
    assert notices(prepare(node, MISSING)) == [(peer(2), NONE, 0, notice)]
    assert notices(prepare(node, MISSING, now=1)) == []  # nothing has changed
    node.peer_connected(peer(3), ["server"])
    assert notices(node.poll(2)) == [(peer(3), NONE, 0, notice)]
    good = WireRefusal(READY)
    assert notices(prepare(node, now=3)) == [(peer(2), NONE, 0, good), (peer(3), NONE, 0, good)]
    node.peer_connected(peer(4), ["server"])
    assert notices(node.poll(4)) == []


def test_who_is_not_ready_is_not_chosen_until_it_is() -> None:
    made = program()
    server = bring_up(made, "server", me=0)
    clients = [bring_up(made, "client", me=i) for i in (1, 2)]
    pump = Pump(server, *clients)
    ask(clients[0], MISSING)
    pump.settle()
    (seen,) = telemetry(pump, server, "peer.not_ready")
    assert seen == {"peer": peer(1), "classes": ("client",), "reason": PUBLIC}
    assert server.peers_not_ready() == {peer(1): NotReadyPeer(classes=("client",), reason=PUBLIC)}
    assert list(server.connected_peers("client")) == [peer(2)]
    assert set(server.connected_peers()) == {peer(1), peer(2)}
    server.invoke("server", {"tick": TRIGGER})
    pump.settle()
    (end,) = pump.of(server, steps.ExecutionFinished)
    assert end.ok
    ask(clients[0])
    pump.settle()
    assert telemetry(pump, server, "peer.ready") == [{"peer": peer(1)}]
    assert list(server.connected_peers("client")) == sorted([peer(1), peer(2)])
    assert server.counters()["peers.not_ready"] == 0


@pytest.mark.parametrize(
    ("where", "left"), [("client", ["other"]), ("", []), ("nonsense,\0", ["client", "other"])]
)
def test_a_peer_names_the_classes_that_it_means_of_its_own(where: str, left: list[str]) -> None:
    node = bring_up(program(), "server", me=1)
    node.peer_connected(peer(2), ["client", "other"])
    node.poll(0)
    node.deliver_inbound(
        peer(2), refusal(peer(2), 0, WireRefusal(NOT_READY, "x" * 9000, where), kind=NONE)
    )
    node.poll(1)
    assert [c for c in ("client", "other") if node.connected_peers(c)] == left
    (said,) = node.peers_not_ready().values()
    assert len(said.reason) <= 256
    node.peer_disconnected(peer(2), "gone")
    node.poll(2)
    assert node.peers_not_ready() == {}


def test_a_peer_that_changes_its_mind_all_the_time_is_heard_so_often() -> None:
    node = bring_up(program(), "server", me=1)
    node.peer_connected(peer(2), ["client"])
    seen = []
    for number in range(MAX_REFUSALS_PER_S + 50):
        said = WireRefusal(READY if number % 2 else NOT_READY)
        node.deliver_inbound(peer(2), refusal(peer(2), 0, said, kind=NONE))
        seen += of(steps.Telemetry, node.poll(number))
    assert len(seen) == MAX_REFUSALS_PER_S
    assert node.counters()["notices.ignored"] == 50
    # A stranger's word counts nothing.
    node.deliver_inbound(peer(9), refusal(peer(9), 0, WireRefusal(NOT_READY), kind=NONE))
    node.poll(S)
    assert peer(9) not in node.peers_not_ready()


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE])
def test_only_a_message_of_no_request_is_about_the_peer_itself(kind) -> None:
    node = bring_up(program(), "server", me=1)
    node.peer_connected(peer(2), ["client"])
    node.deliver_inbound(peer(2), refusal(peer(2), 0, WireRefusal(NOT_READY), kind=kind))
    node.poll(0)
    assert node.peers_not_ready() == {}


def test_it_is_in_a_snapshot() -> None:
    node = bring_up(program(), "client", me=1)
    node.peer_connected(peer(0), ["server"])
    node.peer_connected(peer(2), ["client"])
    prepare(node, MISSING)
    node.deliver_inbound(peer(2), refusal(peer(2), 0, WireRefusal(NOT_READY, "why"), kind=NONE))
    node.poll(1)
    again = bring_up(program(), "client", me=1)
    again.restore(node.snapshot(), same_life=True)
    again.poll(2)
    assert again.not_ready() == node.not_ready()
    assert again.peers_not_ready() == node.peers_not_ready()
    again.deliver_inbound(peer(0), asked())
    assert [row[3].kind for row in told(again.poll(3))] == [NOT_READY]


def test_a_node_does_not_choose_itself_for_what_it_can_not_do() -> None:
    p = Partition("client", inputs=["tick"])
    p.bind("data", "DataSource", "test.Files")
    p.bind("cohort", "PeerSelector", "test.ScriptSelector")
    p.op(DATA, "NextBatch", (), ["x", "y"], slot="data", after=["tick"])
    p.op(SELECTOR, "Sample", (), ["peers"], slot="cohort", after=["tick"], n=10,
         meta={keys.PEER_CLASS_KEY: "client", keys.INCLUDE_SELF_KEY: "true"})  # fmt: skip
    p.output("to", "peers")
    node = bring_up(model(p), "client", me=1)
    for missing, now, wanted in (("gone", 0, []), ("", 1, [peer(1)])):
        prepare(node, missing, now)
        node.invoke("client", {"tick": TRIGGER})
        (event,) = of(steps.AppEvent, node.poll(now))
        assert event.value == PeerIdVec(wanted)
