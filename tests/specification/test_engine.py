"""Engine: bbnode's side of each difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.dsl import Graph, ModelSlot, Module, syscalls, types
from bbnode.engine import Limits, Node, steps
from bbnode.engine.errors import (
    InvalidArtifact,
    MissingComponents,
    MissingInput,
    SnapshotRefused,
    UnsupportedOps,
)
from bbnode.engine.ops import build
from bbnode.engine.planning.program import plan_program
from bbnode.engine.snapshot.as_model import opened_snapshot, snapshot_model
from bbnode.ir import caps, codec, keys, opset
from bbnode.ir.address import REFUSED_SUFFIX
from bbnode.ir.envelope import decode_envelope
from bbnode.ir.values import TRIGGER
from bbnode.sim import LinkModel
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import Boom, EvalBackend, Pump, ScriptModel, bring_up, of, peer
from tests.specification import programs
from tests.specification.programs import COMPUTE, WORKERS, S, compiled, floats, meta, nodes, number
from tests.specification.rows import Rows

ROWS = Rows("Engine")


def negates(g: Graph) -> None:
    g.output("y", COMPUTE.neg(g, number(g)))


def outputs(made: list[steps.Step], name: str = "y") -> list[Any]:
    return [s.value.tolist() for s in of(steps.AppEvent, made) if s.topic == name]


def asking(node: Node, **inputs: Any) -> list[steps.Step]:
    node.invoke("asker", inputs)
    return node.poll(0)


@ROWS.probe("an op is found by `(domain")
def test_nothing_is_looked_up_while_a_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    node = bring_up(compiled(negates), "asker")
    monkeypatch.setattr(build, "_BINDERS", {})
    monkeypatch.setattr(opset, "lookup_op", None)
    assert outputs(asking(node, x=floats(1))) == [[-1.0]]


def calling(*slots: str, bound: str = "") -> ModelProto:
    """Return an artifact in which ops call slots, which hold components of this type, or none."""
    p = Partition("asker", inputs=["x"])
    for slot in slots if bound else ():
        p.bind(slot, "Model", f"{bound}.{slot}")
    for slot in slots:
        stamps = {} if bound else {keys.SLOT_KEY: slot}
        p.op(keys.role_domain("Model"), "Params", [], [f"{slot}_made"], meta=stamps,
             slot=slot if bound else "", after=["x"])  # fmt: skip
        p.output(f"{slot}_out", f"{slot}_made")
    return model(p)


@ROWS.probe("what can't be installed is")
def test_what_cannot_be_installed_is_named_as_a_whole() -> None:
    with pytest.raises(InvalidArtifact, match="'one'"):
        bring_up(calling("one"), "asker")
    with pytest.raises(MissingComponents, match=r"gone\.one.*gone\.two"):
        bring_up(calling("one", "two", bound="gone"), "asker")

    def two_ops(g: Graph) -> None:
        x = number(g)
        g.output("y", COMPUTE.exp(g, COMPUTE.op(g, "Einsum", x, x, equation="i,i->i")))
        g.output("z", COMPUTE.op(g, "Einsum", x, x, equation="i,i->i"))

    using = programs.Compiler().bind_backend("compute", EvalBackend)
    with pytest.raises(UnsupportedOps) as caught:
        bring_up(compiled(two_ops, using=using), "asker")
    assert str(caught.value).count("Einsum") >= 2


def sleeps(g: Graph) -> None:
    x = number(g)
    g.output("y", x, after=syscalls.sleep(g, g.input("go", types.TRIGGER), duration_ns=S))


@ROWS.probe("values of a function live")
def test_executions_do_not_see_each_other() -> None:
    node = bring_up(compiled(sleeps), "asker")
    for value in (1.0, 2.0):
        asking(node, x=floats(value), go=TRIGGER)
    assert len(node.executions()) == 2
    assert outputs(node.poll(S)) == [[1.0], [2.0]]


@ROWS.probe("`Gate` is controlled by the host")
def test_a_gate_opens_within_its_execution_and_a_hold_for_the_host() -> None:
    def gated(g: Graph) -> None:
        g.output("y", syscalls.gate(g, number(g), g.input("go", types.TRIGGER)))

    def held(g: Graph) -> None:
        syscalls.hold_stash(g, number(g), slot="held")
        g.output("y", syscalls.hold_flush(g, g.input("go", types.TRIGGER), slot="held"))

    node = bring_up(compiled(gated), "asker")
    assert outputs(asking(node, x=floats(1), go=TRIGGER)) == [[1.0]]
    assert event(node, "x", floats(2)) == event(node, "go", TRIGGER) == []
    node = bring_up(compiled(held), "asker")
    assert event(node, "x", floats(2)) == []
    assert event(node, "go", TRIGGER) == [[2.0]]


def event(node: Node, name: str, value: Any) -> list[Any]:
    """Return what an event of the host makes a node put out, perhaps nothing."""
    try:
        node.deliver_event("asker", name, value)
    except MissingInput:
        return []
    return outputs(node.poll(0))


@ROWS.probe("an output is an event")
def test_an_output_that_is_read_is_an_event_too() -> None:
    p = Partition("asker", inputs=["x"])
    p.output("first", "x")
    p.output("second", "first")
    node = bring_up(model(p), "asker")
    made = asking(node, x=floats(1))
    assert outputs(made, "first") == outputs(made, "second") == [[1.0]]


@ROWS.probe("`Constant` fires at boot")
def test_a_constant_is_there_from_the_start_and_never_fires() -> None:
    p = Partition("asker", inputs=["x"])
    p.constant("seven", floats(7), called="seven")
    p.sys("Gate", ["seven", "x"], "y", called="gate")
    p.output("out", "y")
    node = bring_up(model(p), "asker", trace=True)
    for _ in range(2):
        made = asking(node, x=TRIGGER)
        assert outputs(made, "out") == [[7.0]]
        fired = {s.op for s in of(steps.OpCompleted, made)}
        assert "gate" in fired
        assert "seven" not in fired


@ROWS.probe("bytes from the host are copied")
def test_what_can_change_is_copied_and_what_cannot_is_taken() -> None:
    p = Partition("asker", inputs=["x"])
    p.output("y", "x")
    node = bring_up(model(p), "asker")
    for is_seen_read_only in (False, True):
        mine = floats(1)
        handed_in = mine.view()
        handed_in.flags.writeable = not is_seen_read_only
        node.invoke("asker", {"x": handed_in})
        mine[0] = 5
        assert outputs(node.poll(0)) == [[1.0]]
    fixed = np.frombuffer(floats(1, 2).tobytes(), np.float32)
    (out,) = of(steps.AppEvent, asking(node, x=fixed))
    assert np.shares_memory(out.value, fixed)


def parks(g: Graph) -> None:
    x = number(g)
    g.output("y", ModelSlot("net").compute_loss(g, x, x))


def parked(**limits: int) -> Node:
    """Return a node whose op waits for a completion, at 0 s."""
    using = programs.compiler().with_permissive_types()
    node = bring_up(compiled(parks, using=using), "asker", limits=Limits(**limits))
    assert of(steps.AppEvent, asking(node, x=floats(1))) == []
    return node


@ROWS.probe("a result over `completion_bytes`")
def test_a_result_that_is_too_large_fails_at_once() -> None:
    node = parked(completion_bytes=10)
    node.component("net").completion.complete(np.ones(100, np.float32))
    assert [s.kind for s in of(steps.OpFailed, node.poll(1))] == ["OversizePayload"]


@ROWS.probe("an envelope has at most 16 MiB")
async def test_an_envelope_may_be_large_and_its_chunks_take_no_memory_before_they_come() -> None:
    assert Limits().envelope_bytes == caps.MAX_ENVELOPE_BYTES == 256 << 20
    inbox = Inbox(TransportLimits())
    assert inbox.begin(peer(1), caps.MAX_ENVELOPE_BYTES, lambda: None) is not None
    assert (inbox.envelope_bytes, inbox.partial_bytes) == (0, 0)
    node = bring_up(compiled(programs.echo), "worker", limits=Limits(envelope_bytes=100))
    node.peer_connected(peer(1), ["asker"])
    node.deliver_inbound(peer(1), bytes(101))
    assert [s.kind for s in of(steps.WireReceiveFailed, node.poll(0))] == ["EnvelopeTooLarge"]


def signals(g: Graph) -> None:
    """Send a tensor of which the receiver only takes that it came."""
    x = number(g)
    there = g.net_out("there", WORKERS.current_view(g, after=x), x)
    g.output("y", g.constant(1.0), after=there)


def sent_by(node: Node, made: list[steps.Step]) -> list[Any]:
    return [decode_envelope(b"".join(s.parts)) for s in of(steps.SendEnvelope, made)]


@ROWS.probe("a Trigger-only edge")
def test_what_nobody_reads_arrives_as_a_trigger() -> None:
    made = compiled(signals)
    (recv,) = nodes(made, keys.OP_RECV)
    assert meta(recv, keys.TYPE_HASH_KEY) == str(types.TRIGGER.wire_hash)
    node = bring_up(made, "asker")
    node.peer_connected(peer(1), ["worker"])
    (envelope_,) = sent_by(node, asking(node, x=floats(1)))
    (fill,) = envelope_.fills
    assert (fill.trigger_only, bytes(fill.payload)) == (True, b"")


@ROWS.probe("a forwarded message keeps")
def test_a_forwarded_message_has_an_id_of_its_own() -> None:
    made = compiled(programs.echo)
    (recv,) = (n for n in programs.main_of(made, "worker").node if n.op_type == keys.OP_RECV)
    worker = bring_up(made, "worker")
    worker.peer_connected(peer(1), ["asker"])
    site = int(meta(recv, keys.SITE_ID_KEY))
    worker.deliver_inbound(peer(1), envelope(peer(1), site, floats(1), wire_req_id=77))
    (forwarded,) = sent_by(worker, worker.poll(0))
    assert forwarded.correlation.wire_req_id not in (0, 77)


def quorum(g: Graph) -> None:
    """Ask workers, of whom two are enough after a second."""
    x = number(g)
    asked = g.request("ask", WORKERS.current_view(g, after=x), x, quorum=2, deadline=1.0)
    asked.respond(COMPUTE.neg(g, asked.received))
    g.output("answers", asked.responses)


@ROWS.probe("a request's responses are those")
def test_a_quorum_goes_on_at_the_deadline_without_who_is_missing() -> None:
    network, asker = programs.network(compiled(quorum), workers=3)
    network.set_link("worker 1", "asker", LinkModel(loss=1.0))
    begun = network.now_ns
    execution = asker.invoke("asker", {"x": floats(1)})
    network.run_until(lambda: asker.has_finished(execution))
    (answers,) = asker.values("answers")
    there = sorted(network[f"worker {n}"].peer_id for n in (0, 2))
    assert [who for who, _ in answers.responses] == there
    assert list(answers.missing) == [network["worker 1"].peer_id]
    assert network.now_ns - begun == pytest.approx(S, rel=0.1)


def scripted(g: Graph) -> None:
    """Ask workers for their model's parameters."""
    x = number(g)
    asked = g.request("ask", WORKERS.current_view(g, after=x), x, deadline=60.0)
    net = ModelSlot("net")
    net.load_parameters(g, asked.received)
    asked.respond(net.params(g))
    g.output("answers", asked.responses)


@ROWS.probe("what can't be answered or taken")
def test_who_cannot_answer_says_so_at_once() -> None:
    made = compiled(scripted, using=typed())
    asker, worker = bring_up(made, "asker"), bring_up(made, "worker", me=1)
    worker.component("net").raises = Boom("no data")
    pump = Pump(asker, worker)
    begun = pump.now_ns
    asker.invoke("asker", {"x": floats(1)})
    pump.settle()
    assert pump.now_ns == begun
    (failed,) = pump.of(asker, steps.OpFailed)
    assert failed.kind == "QuorumNotReached"
    assert "Boom" in failed.detail
    (said,) = sent_by(worker, pump.of(worker, steps.SendEnvelope))
    assert [fill.dest_suffix for fill in said.fills] == [REFUSED_SUFFIX]


def test_who_stays_away_is_counted_out_before_the_deadline() -> None:
    made = compiled(scripted, using=typed())
    asker = bring_up(made, "asker", limits=Limits(lost_peer_grace_ms=500))
    asker.peer_connected(peer(1), ["worker"])
    asking(asker, x=floats(1))
    asker.peer_disconnected(peer(1), "gone")
    assert of(steps.OpFailed, asker.poll(S // 4)) == []
    (failed,) = of(steps.OpFailed, asker.poll(S))
    assert (failed.kind, "ConnectionLost" in failed.detail) == ("QuorumNotReached", True)


def typed() -> programs.Compiler:
    """Return a compiler whose model in `net` is known to hold floats."""
    return (
        programs.Compiler()
        .bind_peer_selector("workers", programs.ConnectedView)
        .bind_model("net", FloatModel)
    )


@programs.support._once
class FloatModel(ScriptModel):
    """A ScriptModel that says what its tensors are."""

    TYPE_NAME: ClassVar[str] = "test.FloatModel"
    storage: ClassVar[Mapping[str, types.TypeNode]] = {"*": types.TENSOR_FLOAT}


@ROWS.probe("`AllocationFailed` says which allocator")
def test_a_payload_without_memory_is_refused_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = Partition("worker")
    p.output("y", p.recv("x", node=types.TENSOR_FLOAT))
    node = bring_up(model(p), "worker", limits=Limits(ingress_bytes=2000))
    node.peer_connected(peer(1), ["client"])

    def refused(size: int, wire_req_id: int) -> list[tuple[str, str]]:
        data = envelope(peer(1), p.site("x"), np.zeros(size, np.float32), wire_req_id=wire_req_id)
        node.deliver_inbound(peer(1), data)
        return [(s.kind, s.detail) for s in of(steps.WireReceiveFailed, node.poll(0))]

    ((kind, _),) = refused(5000, 1)
    assert kind == "BudgetExceeded"  # a cap has a kind of its own

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(codec, "decode_value", no_memory)
    ((kind, detail),) = refused(10, 2)
    assert kind == "AllocationFailed"
    assert "bytes" in detail


@ROWS.probe("a component names its commands")
def test_a_component_finishes_what_it_opened() -> None:
    node = parked()
    node.component("net").completion.complete(np.float32(3.0))
    assert outputs(node.poll(1)) == [3.0]


class Starting(Module):
    """A Module whose bootstrap uses its model."""

    home = "asker"

    def bootstrap(self, g: Graph) -> None:
        ModelSlot("net").load_parameters(g, g.constant(floats(1)))

    def body(self, g: Graph) -> None:
        g.output("y", COMPUTE.neg(g, number(g)))


@ROWS.probe("touch sets are computed")
def test_nodes_of_a_program_share_its_touch_sets() -> None:
    plan = plan_program(programs.compiler().compile(Starting().build()), ["asker"])
    (bootstrap,) = plan.bootstraps
    assert [plan.slots[n].name for n in bootstrap.touches] == ["net"]
    one, other = (bring_up(plan, me=n) for n in (0, 1))
    assert one.runtime.program is other.runtime.program is plan


def heavy(g: Graph) -> None:
    x = number(g)
    g.output("y", COMPUTE.add(g, x, g.constant(np.ones(1 << 18, np.float32))))


@ROWS.probe("snapshots keep the compiled form")
def test_a_snapshot_is_without_the_program() -> None:
    made = compiled(heavy)
    assert made.ByteSize() > 1 << 20
    taken = bring_up(made, "asker").snapshot(0)
    assert len(taken) < 1 << 14
    other = bring_up(compiled(negates), "asker")
    with pytest.raises(SnapshotRefused):
        other.restore(taken, 0)


@ROWS.probe("a snapshot is a `ModelProto`")
def test_a_snapshot_is_exported_as_a_model() -> None:
    made = compiled(negates)
    taken = bring_up(made, "asker").snapshot(0)
    again, data = opened_snapshot(snapshot_model(made, taken))
    assert data == taken
    assert list(programs.target_names(again)) == list(programs.target_names(made))


def test_each_row_has_one_probe() -> None:
    ROWS.check()
