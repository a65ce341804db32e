"""Snapshots: what comes back, and what is refused."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.components.contracts import DataSource, offload
from bbnode.engine import Limits, errors, steps
from bbnode.engine.frame import Frame
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.runtime import Runtime
from bbnode.engine.snapshot.events import IngressTable
from bbnode.engine.snapshot.whole import seal, unpack
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER, Metadata, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import Boom, S, ScriptModel, _once, bring_up, component, of, peer

MODEL = keys.role_domain("Model")
ADDRESS = Multiaddr("/ip4/10.0.0.1/tcp/1")


def program(extra: bool = False):
    p = Partition("server", inputs=["x", "to"])
    p.bind("m", "Model", "test.ScriptModel")
    if extra:
        p.bind("n", "Model", "test.ScriptModel")
    p.op(MODEL, "LoadParameters", ["x"], ["c"], slot="m")
    p.sys("IncrMetric", ["c"], name="loads")
    p.send("x", "to", 1)
    return model(p)


def wire_id(made) -> int:
    from bbnode.ir.envelope import decode_envelope

    (send,) = of(steps.SendEnvelope, made)
    return decode_envelope(b"".join(send.parts)).correlation.wire_req_id


def one_round(node) -> int:
    node.invoke("server", {"x": np.array([7], np.float32), "to": PeerIdVec([peer(1)])})
    return wire_id(node.poll(1))


def test_the_time_of_a_call_that_waits_for_its_poll_is_kept() -> None:
    node = bring_up(program(), "server")
    inputs = {"x": np.array([7], np.float32), "to": PeerIdVec([])}
    execution = node.invoke("server", inputs, deadline_ns=5 * S)
    again = bring_up(program(), "server")
    again.restore(node.snapshot())
    (running,) = again._rt.ingress.take_events()
    assert (running.execution, running.budget_ns) == (execution, 5 * S)
    with pytest.raises(errors.InvalidDeadline, match="above 0"):
        node.invoke("server", inputs, deadline_ns=0)


def test_a_restored_node_has_its_state_and_makes_no_id_twice() -> None:
    node = bring_up(program(), "server")
    node.peer_connected(peer(1), [], [ADDRESS])
    ids = [one_round(node) for _ in range(3)]
    data = node.snapshot()
    again = bring_up(program(), "server", addresses=[Multiaddr("/ip4/10.9.9.9/tcp/1")])
    again.restore(data)
    assert component(again, "m").value.tolist() == [7]
    assert again.counters()["metric.loads"] == 3
    assert again.incarnation == 2
    (send,) = [again.invoke("server", {"x": np.zeros(1, np.float32), "to": peer(1)})]
    made = again.poll(1)
    assert send == 4  # numbers of executions go on
    assert of(steps.SendEnvelope, made)[0].addresses == (ADDRESS,)
    assert wire_id(made) not in ids
    assert [str(a) for a in again._rt.neighbours.own_addresses] == ["/ip4/10.9.9.9/tcp/1"]


def test_the_same_state_gives_the_same_bytes() -> None:
    made = []
    for _ in range(2):
        node = bring_up(program(), "server")
        node.peer_connected(peer(1), [])
        one_round(node)
        made.append(node.snapshot())
    assert made[0] == made[1]


def resealed(data: bytes, **changes) -> bytes:
    fields = {**unpack(data[40:]), **changes}
    return seal({k: v for k, v in fields.items() if v is not None})


def retabled(data: bytes, name: str, plain) -> bytes:
    return resealed(data, tables={**unpack(data[40:])["tables"], name: plain})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "cut short"),
        (lambda d: b"OTHER" + d, "not a snapshot"),
        (lambda d: d[:-1], "checksum"),
        (lambda d: resealed(d, version=9), "format 9"),
        (lambda d: resealed(d, peer=peer(5).to_bytes()), "another peer"),
        (lambda d: resealed(d, components=[["m", "test.Other", b""]]), "another artifact"),
        (lambda d: resealed(d, components=[["m", 3, b""]]), "malformed"),
        (lambda d: resealed(d, components=None), "components"),
        (lambda d: resealed(d, program=b"x"), "another artifact"),
        (lambda d: resealed(d, tables={}), "another version"),
        (lambda d: resealed(d, lists={}), "malformed"),
        (lambda d: retabled(d, "addresses", [[99, 1, [], [], None]]), "malformed"),
        (lambda d: retabled(d, "addresses", [3]), "malformed"),
        (lambda d: retabled(d, "executions", [[[1, 2]], [], 1, 0]), "malformed"),
        (lambda d: retabled(d, "runtime", {"a": 1}), "malformed"),
        (lambda d: retabled(d, "parked", [[[1] * 13], 1]), "malformed"),
        (lambda d: retabled(d, "timers", [[[1, 1, 99, 1]], 1]), "malformed"),
    ],
)
def test_what_is_not_a_snapshot_of_this_node_is_refused(change, says) -> None:
    node = bring_up(program(), "server")
    data = node.snapshot()
    with pytest.raises(errors.SnapshotRefused, match=says):
        bring_up(program(), "server").restore(change(data))
    with pytest.raises(errors.SnapshotRefused, match="another artifact"):
        bring_up(program(extra=True), "server").restore(data)


@given(st.data())
def test_a_changed_snapshot_is_refused(data) -> None:
    raw = bytearray(bring_up(program(), "server").snapshot())
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(errors.SnapshotRefused):
        bring_up(program(), "server").restore(bytes(raw))


def test_a_component_that_refuses_its_state_is_named() -> None:
    node = bring_up(program(), "server")
    data = node.snapshot()
    fresh = bring_up(program(), "server")

    def refuse(_state):
        raise errors.InvalidOperand("not mine")

    component(fresh, "m").restore = refuse
    with pytest.raises(errors.SnapshotRefused, match="slot 'm': not mine"):
        fresh.restore(data)


# -- work elsewhere ------------------------------------------------------------------------


@_once
class CountingData(DataSource):
    """Counts its epochs, as what a model in a thread draws from does."""

    TYPE_NAME: ClassVar[str] = "test.CountingData"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.epochs = 0

    def next_batch(self, ctx):
        return np.full(1, self.epochs, np.float32), np.zeros(1, np.int64)

    def reset(self, ctx):
        self.epochs = 0

    def on_data_loaded(self, ctx):
        return None

    def epoch_batches(self, batch_size):
        self.epochs += 1
        return []

    @property
    def num_samples(self) -> int:
        return self.epochs

    def serialize(self) -> bytes:
        return bytes([self.epochs])

    def restore(self, data: bytes) -> None:
        self.epochs = data[0]


@_once
class DrawingModel(ScriptModel):
    """Trains on the data that it depends on."""

    TYPE_NAME: ClassVar[str] = "test.DrawingModel"
    depends: ClassVar[dict[str, str]] = {"data": "data"}

    @offload
    def train(self, ctx, *, epochs, batch):
        self.dependency("data").epoch_batches(batch)
        self.value = self.value + epochs
        return Metadata(now=ctx.now_ns, who=ctx.execution)

    @offload(reads_only=True)
    def params(self, ctx):
        return self.value.copy()


def training():
    p = Partition("server", inputs=["x", "r", "w"])
    p.bind("m", "Model", "test.DrawingModel")
    p.bind("data", "DataSource", "test.CountingData")
    p.op(MODEL, "Train", (), ["stats"], slot="m", after=["x"], called="train", epochs=3, batch=5,
         stamp_ns=20 * S)  # fmt: skip
    p.output("out", "stats")
    p.op(keys.role_domain("DataSource"), "NextBatch", (), ["b", "l"], slot="data", after=["r"],
         called="next", stamp_ns=9 * S)  # fmt: skip
    p.output("batch", "b")
    p.op(MODEL, "Params", (), ["ps"], slot="m", after=["w"], called="read", stamp_ns=9 * S)
    p.output("weights", "ps")
    return model(p)


TRAINING = training()


def busy(name: str = "x", **more):
    node = bring_up(TRAINING, "server", **more)
    node.deliver_event("server", name, TRIGGER)
    (task,) = of(steps.RunTask, node.poll(S))
    return node, task


def test_an_op_that_was_handed_out_is_handed_out_again_from_the_state_of_before() -> None:
    node, task = busy()
    result = task.fn()  # half done, all done: a snapshot knows nothing of it
    data = node.snapshot()
    again = bring_up(TRAINING, "server")
    again.restore(data)
    assert component(again, "m").value.tolist() == [0]
    assert component(again, "data").epochs == 0
    assert again.snapshot()
    made = again.poll(77)
    (second,) = of(steps.RunTask, made)
    assert second.token == task.token
    assert second.fn() == result  # the same time, execution and arguments
    assert component(again, "data").epochs == 1
    again.complete(second.token, result)
    assert [e.value for e in of(steps.AppEvent, again.poll(78))] == [result]
    assert component(again, "m").value.tolist() == [3]


def test_a_task_whose_result_waits_is_done_and_its_component_is_as_it_left_it() -> None:
    node, task = busy()
    node.complete(task.token, task.fn())
    again = bring_up(TRAINING, "server")
    again.restore(node.snapshot())
    made = again.poll(0)
    assert of(steps.RunTask, made) == []
    assert len(of(steps.AppEvent, made)) == 1
    assert component(again, "m").value.tolist() == [3]
    assert component(again, "data").epochs == 1


def test_an_error_that_waits_is_shown_as_what_it_was() -> None:
    node, task = busy()
    node.fail(task.token, Boom("no luck"))
    again = bring_up(TRAINING, "server")
    again.restore(node.snapshot())
    (failed,) = of(steps.OpFailed, again.poll(0))
    assert (failed.kind, failed.detail) == ("UnexpectedException", "Boom: no luck")


def test_a_thread_has_what_its_component_depends_on_for_itself() -> None:
    node, task = busy()
    node.deliver_event("server", "r", TRIGGER)
    assert of(steps.AppEvent, node.poll(2 * S)) == []
    (waiting,) = [w for w in node.waiting() if w.what == "next"]
    assert "train" in waiting.whom
    node.complete(task.token, task.fn())
    batch = [e.value for e in of(steps.AppEvent, node.poll(3 * S)) if e.topic == "batch"]
    assert batch[0].tolist() == [1]


def test_what_was_given_up_is_not_repeated_and_its_component_is_free() -> None:
    node, _ = busy()
    node.poll(22 * S)
    node.deliver_event("server", "r", TRIGGER)
    node.poll(23 * S)
    again = bring_up(TRAINING, "server")
    again.restore(node.snapshot())
    made = again.poll(5)
    assert of(steps.RunTask, made) == []
    assert [e.topic for e in of(steps.AppEvent, made)] == ["batch"]
    same = bring_up(TRAINING, "server")
    same.restore(node.snapshot(), 23 * S, same_life=True)
    assert len(of(steps.RunTask, same.poll(24 * S))) == 1


def test_without_kept_states_only_what_reads_can_be_saved_meanwhile() -> None:
    node, _ = busy(snapshots=False)
    with pytest.raises(errors.NodeBusy, match=r"train.*snapshots=True"):
        node.snapshot()
    reading, _ = busy("w", snapshots=False)
    assert reading.snapshot()


def test_a_component_that_can_t_be_saved_is_named() -> None:
    node, _ = busy()

    def refuse():
        raise Boom("not now")

    component(node, "m").serialize = refuse
    assert node.snapshot()  # from before the task
    idle = bring_up(TRAINING, "server")
    component(idle, "m").serialize = refuse
    with pytest.raises(errors.SnapshotFailed, match=r"slot 'm'.*Boom: not now"):
        idle.snapshot()
    component(idle, "m").serialize = lambda: "text"
    with pytest.raises(errors.SnapshotFailed, match="gave str"):
        idle.snapshot()


# -- lives and time ------------------------------------------------------------------------


def sleeper():
    p = Partition("server", inputs=["x"])
    p.sys("Sleep", ["x"], "y", duration_ns=10 * S)
    p.sys("Clock", ["y"], "t")
    p.output("time", "t")
    return model(p)


SLEEPER = sleeper()


@pytest.mark.parametrize("given_ns", [None, 7])
def test_the_node_s_time_goes_on_where_the_snapshot_was_taken(given_ns) -> None:
    node = bring_up(SLEEPER, "server")
    node.invoke("server", {"x": TRIGGER})
    node.poll(1000 * S)
    data = node.snapshot()
    again = bring_up(SLEEPER, "server")
    again.restore(data, given_ns)
    assert again.next_deadline() == (0 if given_ns is None else 7)
    again.poll(7)  # another machine, another clock
    assert again.next_deadline() == 7 + 10 * S
    assert [w.until_ns for w in again.waiting()] == [7 + 10 * S]
    assert again.executions()[0].started_ns == 7
    assert of(steps.AppEvent, again.poll(6 + 10 * S)) == []
    (event,) = of(steps.AppEvent, again.poll(7 + 10 * S))
    assert event.value == 1010 * S


def test_time_that_went_by_idle_before_a_snapshot_counts() -> None:
    node = bring_up(SLEEPER, "server")
    node.invoke("server", {"x": TRIGGER})
    node.poll(1000 * S)
    data = node.snapshot(1006 * S)  # nothing was due since, so that nobody polled
    assert node.snapshot(999 * S) == node.snapshot() != data  # a clock that goes back stands still
    again = bring_up(SLEEPER, "server")
    again.restore(data)
    again.poll(7)
    assert again.next_deadline() == 7 + 4 * S
    (event,) = of(steps.AppEvent, again.poll(7 + 4 * S))
    assert event.value == 1010 * S
    # In between, it is saved by the clock of its second life.
    last = bring_up(SLEEPER, "server")
    again.invoke("server", {"x": TRIGGER})
    again.poll(7 + 5 * S)
    last.restore(again.snapshot(7 + 8 * S))
    last.poll(0)
    assert last.next_deadline() == 7 * S
    # The node that was saved has not noticed: its own times are those of its polls.
    assert node.executions()[0].started_ns == 1000 * S
    assert node.next_deadline() == 1010 * S
    node.invoke("server", {"x": TRIGGER})
    node.poll(1001 * S)
    assert [e.started_ns for e in node.executions()] == [1000 * S, 1001 * S]


def test_a_snapshot_before_the_first_poll_knows_no_time() -> None:
    node = bring_up(SLEEPER, "server")
    node.invoke("server", {"x": TRIGGER})
    assert node.snapshot(5 * S) == node.snapshot()
    again = bring_up(SLEEPER, "server")
    again.restore(node.snapshot())
    assert again.snapshot(50 * S) == again.snapshot()
    again.poll(7)
    assert again.next_deadline() == 7 + 10 * S


def test_a_new_life_has_lost_its_connections_and_the_same_life_has_not() -> None:
    node = bring_up(SLEEPER, "server")
    node.peer_connected(peer(1), ["client"], [ADDRESS])
    node.poll(1)
    data = node.snapshot()
    fresh = bring_up(SLEEPER, "server")
    fresh.restore(data)
    fresh.peer_connected(peer(2), [])
    made = fresh.poll(1)
    assert [s.peer for s in of(steps.PeerDown, made)] == [peer(1)]
    assert list(fresh.connected_peers()) == [peer(2)]
    same = bring_up(SLEEPER, "server")
    same.restore(data, 1, same_life=True)
    assert same.poll(1) == []
    assert list(same.connected_peers()) == [peer(1)]
    assert same.incarnation == node.incarnation


def test_a_deadline_beyond_64_bits_can_be_saved() -> None:
    p = Partition("server")
    head = p.recv("news")
    p.sys("Sleep", [head], "z", duration_ns=S)
    made = model(p)
    node = bring_up(made, "server")
    far = (1 << 64) - 1
    node.peer_connected(peer(1), ["client"])
    node.deliver_inbound(peer(1), envelope(peer(1), p.site("news"), TRIGGER, remaining_ns=far))
    node.poll(10 * S)
    again = bring_up(made, "server")
    again.restore(node.snapshot())
    again.poll(10 * S)
    assert [info.deadline_ns for info in again.executions()] == [far + 10 * S]


def test_a_node_that_has_polled_takes_up_nothing() -> None:
    node = bring_up(SLEEPER, "server")
    node.poll(1)
    with pytest.raises(errors.SnapshotRefused, match="has polled"):
        node.restore(node.snapshot())


def test_bytes_in_use_are_charged_again() -> None:
    node = bring_up(SLEEPER, "server", limits=Limits(ingress_bytes=1000))
    node.invoke("server", {"x": np.zeros(200, np.float32)})
    node.poll(1)
    node.invoke("server", {"x": np.zeros(10, np.float32)})
    again = bring_up(SLEEPER, "server", limits=Limits(ingress_bytes=1000))
    again.restore(node.snapshot())
    assert again.counters()["ingress.bytes"] == node.counters()["ingress.bytes"] == 840
    again.poll(1)
    again.poll(1 + 10 * S)
    assert again.counters()["ingress.bytes"] == 0


# What a snapshot has to hold, by name: whoever adds state has to say here that it is saved.
RUNTIME_STATE = {
    *("incarnation", "wire_ids", "rng"),  # saved by the runtime itself
    # Of the program, the install, or ties between services.
    *("program", "cells", "graphs", "limits", "_plans"),
    # Tables: each is in `Runtime.tables`, as the test checks.
    *("clock", "reports", "executor", "scheduler", "suspensions", "cohorts", "bootstraps"),
    *(
        "sources",
        "stores",
        "joins",
        "latches",
        "records",
        "dedup",
        "round_trips",
        "outbound",
        "calls",
        "timers",
    ),
    *("lost", "refusals", "readiness"),
    *("ingress", "neighbours"),  # saved by IngressTable, and table by table
    "inbound",  # saved as refusals_heard
    *("messenger", "tracer"),  # they keep nothing of their own
    "decoder",  # keeps nothing between two polls: what it decodes are frames, in turn
    "secrets",  # the host's, given again at each start; never in a snapshot
}
SERVICE_STATE = {
    "executor": {
        *("frames", "ready", "executions", "turns", "_commands"),
        *("frames_of", "under_way"),  # counted again from the frames
        *(
            "clock",
            "reports",
            "_max_frames",
            "tracer",
            "numbers",
            "run",
            "rt",
        ),
    },
    "clock": {"now_ns", "started", "resumed", "_offset_ns", "_set_by_poll"},
    "reports": {"steps", "counts", "bus", "_detail_bytes"},
}
FRAME_STATE = {
    *("bootstrap", "charges", "cohorts", "deadline_ns", "debt", "ended", "execution", "failures"),
    *("from_bus", "live", "parked", "pending", "plan", "report", "rt", "site", "source_peer"),
    *("started_ns", "units", "values", "wire_out_id", "wire_req_id", "chain"),
    # apart: some are skipped, lost or broken, or it has ended; in_order: with the ready ops
    *("skipped", "lost", "broken", "apart", "in_order"),
}


def test_no_state_is_forgotten() -> None:
    rt: Runtime = bring_up(SLEEPER, "server")._rt
    of_runtime = {name: getattr(rt, name) for name in Runtime.__slots__}
    assert set(of_runtime) == RUNTIME_STATE, "say in bbnode/engine/snapshot how it is saved"
    for name, fields in SERVICE_STATE.items():
        assert set(type(getattr(rt, name)).__slots__) == fields, f"say how {name} saves it"
    assert set(Frame.__slots__) == FRAME_STATE, "say in `Executor.state` how it is saved"
    saved = {id(table) for table in rt.tables(IngressTable(rt.ingress)).values()}
    of_neighbours = {name: getattr(rt.neighbours, name) for name in Neighbours.__slots__}
    services = {**of_runtime, **of_neighbours, "turns": rt.executor.turns}
    unsaved = {
        name
        for name, service in services.items()
        if hasattr(service, "state") and id(service) not in saved
    }
    assert unsaved == {"wire_ids", "rng"}


def test_services_have_slots() -> None:
    rt: Runtime = bring_up(SLEEPER, "server")._rt
    services = [getattr(rt, name) for name in Runtime.__slots__]
    ours = [each for each in services if type(each).__module__.startswith("bbnode.engine")]
    assert len(ours) > 20
    # Thousands of nodes at rest in a simulation would have thousands of dicts.
    assert [type(each).__name__ for each in ours if hasattr(each, "__dict__")] == []
