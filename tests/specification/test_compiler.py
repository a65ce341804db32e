"""Compiler: bbnode's side of each difference."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import CompilationUnit, CompileOptions, Compiler, Counters, Pass
from bbnode.compiler.errors import (
    AmbiguousRole,
    CompileError,
    PassInvariantBroken,
    RuntimeIncomplete,
    SourceInBootstrap,
    WireOpInBootstrap,
)
from bbnode.components import concrete
from bbnode.dsl import CompiledModule, Graph, ModelSlot, Module, syscalls, types
from bbnode.engine import Limits, steps
from bbnode.engine.errors import BrokenSeal, InputShapeMismatch
from bbnode.ir import keys
from bbnode.ir.address import site_suffix
from bbnode.ir.graph import Function
from bbnode.ir.values import TRIGGER, CorrelationToken, PeerIdVec
from tests import protos
from tests.dsl.programs import FromFunction
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import Pump, ScriptConfig, ScriptModel, bring_up, of, peer
from tests.specification import programs
from tests.specification.programs import COMPUTE, WORKERS, S, compiled, floats, meta, nodes, number
from tests.specification.rows import Rows

ROWS = Rows("Compiler")
RX_GATES = (keys.OP_DEDUP_GATE_RX, keys.OP_PEER_HEALTH_GATE_RX, keys.OP_BACKOFF_GATE_RX)
TX_GATES = (keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX)


@ROWS.probe("a Send's `chain_depth`")
def test_hops_are_counted() -> None:
    budget = programs.compiler().with_per_hop_budget_ns(S)
    sends = nodes(compiled(programs.echo, using=budget), keys.OP_SEND)
    stamps = {meta(n, keys.PORT_KEY): n for n in sends}
    assert meta(stamps["there"], keys.CHAIN_DEPTH_KEY) == "2"
    assert meta(stamps["there"], keys.DEADLINE_NS_KEY) == str(2 * S)
    assert meta(stamps["back"], keys.DEADLINE_NS_KEY) == str(S)

    def slowly(g: Graph) -> None:
        x = number(g)
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        late = syscalls.sleep(g, g.constant(TRIGGER, after=there), duration_ns=3 * S)
        g.output("back", g.net_out("back", there.sender, there, after=late))

    first, _ = nodes(compiled(slowly, using=budget), keys.OP_SEND)
    assert meta(first, keys.DEADLINE_NS_KEY) == str(5 * S)


def trains(g: Graph) -> None:
    """Ask workers to train, which may take a minute."""
    x = number(g)
    asked = g.request("ask", WORKERS.current_view(g, after=x), x, deadline=60.0)
    asked.respond(ModelSlot("net").train(g, after=asked.received))
    g.output("answers", asked.responses.count)


def trained_after(seconds: int) -> Pump:
    """Return the network of an asker and a worker whose training took so long."""
    made = compiled(trains)
    asker, worker = bring_up(made, "asker"), bring_up(made, "worker", me=1)
    pump = Pump(asker, worker)
    pump.hold_tasks = True
    asker.invoke("asker", {"x": floats(1)})
    pump.advance(pump.now_ns + seconds * S)
    if pump.tasks:
        pump.run_task()
    pump.settle()
    return pump


@ROWS.probe("an op that may suspend has the deadline")
def test_an_op_has_what_the_chain_has_left_and_else_the_limit() -> None:
    (train,) = nodes(compiled(trains), "Train")
    assert meta(train, keys.DEADLINE_NS_KEY) == str(60 * S)
    for seconds, kinds in ((45, []), (61, ["DeadlineExceeded", "QuorumNotReached"])):
        pump = trained_after(seconds)
        failed = [s.kind for made in pump.steps.values() for s in of(steps.OpFailed, made)]
        assert sorted(failed) == kinds
    alone = bring_up(
        compiled(lambda g: g.output("y", ModelSlot("net").train(g))),
        "asker",
        limits=Limits(wait_s=1000),
    )
    alone.invoke("asker", {})
    alone.poll(0)
    assert of(steps.OpFailed, alone.poll(999 * S)) == []
    assert [s.kind for s in of(steps.OpFailed, alone.poll(1000 * S))] == ["DeadlineExceeded"]


def to_one(g: Graph) -> None:
    """Send to one peer that is written down."""
    g.output("y", g.net_out("there", g.peer_ids([peer(1)], peer_class="worker"), number(g)))


@ROWS.probe("a Send and a Recv with a `peer`")
def test_every_recv_has_gates_and_sends_to_a_constant_peer() -> None:
    constant, listed = compiled(to_one), compiled(programs.echo)
    assert [n.op_type for n in nodes(constant, *TX_GATES)] == list(TX_GATES)
    assert nodes(listed, *TX_GATES) == []
    for made in (constant, listed):
        recvs = nodes(made, keys.OP_RECV)
        assert not any("peer" in programs.attributes(node) for node in recvs)
        assert len(nodes(made, *RX_GATES)) == 3 * len(recvs)
    blocked = bring_up(compiled(to_those_named), "asker")
    blocked.peer_connected(peer(1), ["worker"])
    blocked.block_peer(peer(1))
    blocked.invoke("asker", {"x": floats(1), "worker": PeerIdVec([peer(1)])})
    made_steps = blocked.poll(0)
    assert of(steps.SendEnvelope, made_steps) == []
    assert [s.peer for s in of(steps.PeerResolveFailed, made_steps)] == [peer(1)]


def to_those_named(g: Graph) -> None:
    """Send to the peers that who invokes it names."""
    g.output("y", g.net_out("there", g.input("worker", types.PEER_ID_VEC), number(g)))


@ROWS.probe("a transmit gate gives")
def test_a_transmit_gate_passes_the_data() -> None:
    made = compiled(to_one)
    known = protos.value_types(programs.main_of(made, "asker"))
    for gate in nodes(made, *TX_GATES):
        assert known[gate.input[0]] is known[gate.output[0]] is types.TENSOR_FLOAT


@ROWS.probe("duplicates are found by")
def test_equal_payloads_are_two_messages() -> None:
    made = compiled(programs.echo)
    (recv,) = (n for n in programs.main_of(made, "worker").node if n.op_type == keys.OP_RECV)
    site = int(meta(recv, keys.SITE_ID_KEY))
    worker = bring_up(made, "worker")
    for sender in (1, 2):
        worker.peer_connected(peer(sender), ["asker"])

    def sends(sender: int, wire_req_id: int) -> int:
        data = envelope(peer(sender), site, floats(1), wire_req_id=wire_req_id)
        worker.deliver_inbound(peer(sender), data)
        return len(of(steps.SendEnvelope, worker.poll(0)))

    assert [sends(1, 1), sends(1, 2), sends(1, 1), sends(2, 1)] == [1, 1, 0, 1]


@ROWS.probe("a role is ambiguous")
def test_a_slot_is_ambiguous_and_a_role_is_not() -> None:
    mine = concrete(ScriptModel, ScriptConfig())

    def names(*slots: ModelSlot) -> ModelProto:
        def body(g: Graph) -> None:
            for index, slot in enumerate(slots):
                g.output(f"y{index}", slot.params(g))

        return compiled(body, using=programs.compiler().with_permissive_types())

    made = names(ModelSlot("mine", concrete=mine), ModelSlot("net"))
    assert len(nodes(made, "Params")) == 2
    with pytest.raises(AmbiguousRole) as caught:
        names(ModelSlot("net", concrete=mine), ModelSlot("net"))
    assert (caught.value.slot, caught.value.role) == ("net", "Model")


@ROWS.probe("`peer_class` is on every value")
def test_peer_classes_stand_where_peers_are_selected_or_sent_to() -> None:
    made = nodes(compiled(programs.asks))
    stamped = {n.op_type for n in made if meta(n, keys.PEER_CLASS_KEY)}
    wire = {n.op_type for n in made if n.domain == keys.WIRE_DOMAIN}
    assert stamped == {"CurrentView", *wire}
    mains = [f for f in compiled(programs.asks).functions if meta(f, keys.TARGET_KEY)]
    assert all(meta(n, keys.HOME_CLASS_KEY) for f in mains for n in f.node)


@ROWS.probe("the compiler inserts `GateDispatch`")
def test_gates_and_tokens_are_the_programs_own() -> None:
    dispatches = ("GateDispatch", "GateManyDispatch", "MintDispatch")
    assert nodes(compiled(programs.asks), *dispatches) == []
    assert nodes(compiled(to_one), *dispatches) == []

    def body(g: Graph) -> None:
        go = g.input("go", types.TRIGGER)
        passed = syscalls.gate_dispatch(g, number(g))
        g.output("y", syscalls.gate_many_dispatch(g, passed, go))
        g.output("token", syscalls.mint_dispatch(g, go))

    node = programs.alone(body, {"x": floats(3), "go": TRIGGER})
    assert [v.tolist() for v in node.values("y")] == [[3.0]]
    (token,) = node.values("token")
    assert isinstance(token, CorrelationToken)


class Starting(Module):
    """A Module with a bootstrap that a test writes."""

    home = "asker"

    def __init__(self, begin: programs.Body) -> None:
        self.begin = begin

    def bootstrap(self, g: Graph) -> None:
        self.begin(g)

    def body(self, g: Graph) -> None:
        g.output("y", number(g))


@ROWS.probe("a bootstrap records any op")
def test_a_bootstrap_neither_sends_nor_starts_executions() -> None:
    refused: tuple[tuple[programs.Body, type[CompileError]], ...] = (
        (to_one, WireOpInBootstrap),
        (lambda g: g.output("t", syscalls.interval(g, period_ns=S)), SourceInBootstrap),
    )
    for begin, error in refused:
        with pytest.raises(error):
            programs.compiler().compile(Starting(begin).build())
    pulses = Starting(lambda g: g.output("t", syscalls.pulse(g)))
    assert programs.compiler().compile(pulses.build())


@ROWS.probe("`stamp_for_test` gives")
def test_a_binding_is_one_entry_of_the_metadata() -> None:
    p = Partition("asker", inputs=["x"])
    p.bind("net", "Model", ScriptModel.TYPE_NAME)
    p.op(keys.role_domain("Model"), "Params", [], ["made"], slot="net", after=["x"])
    p.output("y", "made")
    made = model(p)
    key = keys.binding_key(p.name, "net")
    assert meta(made, key) == keys.encode_binding_value("Model", ScriptModel.TYPE_NAME, 0)
    node = bring_up(made, "asker")
    node.invoke("asker", {"x": floats(1)})
    assert len(of(steps.AppEvent, node.poll(0))) == 1


@ROWS.probe("the receiver's address is a name")
def test_the_compiler_stamps_name_and_address() -> None:
    made = compiled(programs.echo)
    recvs = {meta(n, keys.PORT_KEY): n for n in nodes(made, keys.OP_RECV)}
    for send in nodes(made, keys.OP_SEND):
        recv = recvs[meta(send, keys.PORT_KEY)]
        assert meta(send, keys.DEST_SITE_NAME_PREFIX + send.input[0]) == recv.output[0]
        (suffix,) = (a for a in send.attribute if a.name.startswith(keys.DEST_SUFFIX_PREFIX))
        expected = site_suffix(int(meta(recv, keys.SITE_ID_KEY)))
        assert protos.octets(suffix) == expected


@ROWS.probe("a node site id is a counter")
def test_a_site_id_outlives_an_edit() -> None:
    def edited(g: Graph) -> None:
        x = COMPUTE.neg(g, number(g))
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        g.output("back", g.net_out("back", there.sender, there))

    one, other = (compiled(body) for body in (programs.echo, edited))
    assert set(programs.target_names(one)) != set(programs.target_names(other))
    ids = [[meta(n, keys.SITE_ID_KEY) for n in nodes(m, keys.OP_RECV)] for m in (one, other)]
    assert sorted(ids[0]) == sorted(ids[1])
    assert min(map(int, ids[0])) > 1 << 32


@ROWS.probe("names of axes (`dim_param`)")
def test_axes_are_followed_and_checked_where_values_enter() -> None:
    def body(g: Graph) -> None:
        a, b = (g.input(n, types.TENSOR_FLOAT, shape=["rows", 2]) for n in ("a", "b"))
        g.output("y", COMPUTE.add(g, a, b))

    made = compiled(body)
    (shape,) = (
        [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in programs.main_of(made, "asker").value_info
        if v.name == "y"
    )
    assert shape == ["rows", 2]
    node = bring_up(made, "asker")
    rows = {name: np.zeros((count, 2), np.float32) for name, count in (("a", 3), ("b", 4))}
    with pytest.raises(InputShapeMismatch):
        node.invoke("asker", rows)


@ROWS.probe("`original_op` is on")
def test_what_passes_made_says_what_it_stands_for() -> None:
    made = nodes(compiled(programs.asks), *RX_GATES, keys.OP_RECV_REQ, keys.OP_DEADLINE_CHECK)
    assert len(made) > 4
    assert all("::" in meta(node, keys.ORIGINAL_OP_KEY) for node in made)


@ROWS.probe("a partition's hash covers")
def test_the_name_of_a_target_changes_with_what_changes_its_behaviour() -> None:
    def variant(start: float, kind: types.TypeNode, port: str) -> str:
        def body(g: Graph) -> None:
            net = ModelSlot("net", concrete=concrete(ScriptModel, ScriptConfig(start=start)))
            g.output(port, net.forward(g, g.input("x", kind)))

        using = Compiler().with_permissive_types()
        (name,) = programs.target_names(compiled(body, using=using))
        return name

    base = (1.0, types.TENSOR_FLOAT, "y")
    others = ((2.0, *base[1:]), (1.0, types.TENSOR_INT64, "y"), (*base[:2], "z"))
    assert len({variant(*base), *(variant(*other) for other in others)}) == 4
    assert variant(*base) == variant(*base)


@ROWS.probe("one peer's request becomes")
def test_a_request_to_one_peer_is_an_attribute_of_the_same_op() -> None:
    def one(g: Graph) -> None:
        x = number(g)
        asked = g.request("ask", WORKERS.sample(g, n=1, after=x), x)
        asked.respond(asked.received)
        g.output("answers", asked.responses)

    variants = {}
    for name, body in (("one", one), ("all", programs.asks)):
        (request,) = nodes(compiled(body), keys.OP_SEND_REQ_BATCHED)
        variants[name] = protos.get_attr(request, "variant")
    assert variants == {"one": b"one_shot", "all": b"cohort"}


@ROWS.probe("`Call…` ops")
def test_a_call_has_the_functions_name() -> None:
    child = FromFunction(
        lambda g: g.output("y", ModelSlot("net").forward(g, number(g))), name="Child", home="asker"
    )

    def body(g: Graph) -> None:
        x = number(g)
        for _ in range(2):
            x = child.call().input("x", x).build(g).output("y")
        g.output("y", x)

    made = compiled(body)
    functions = {(f.domain, f.name) for f in made.functions}
    calls = [n for n in nodes(made) if (n.domain, n.op_type) in functions]
    assert len(calls) == 2
    assert not any(n.op_type.startswith("Call") for n in nodes(made))


@ROWS.probe("relaxed types")
def test_relaxed_types_have_one_name() -> None:
    assert Compiler().with_permissive_types().options.permissive_types
    assert not hasattr(Compiler(), "with_strict_types")


class DropsGates(Pass):
    """Takes the gates out again."""

    name = "drops_gates"

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        for partition in unit.partitions.values():
            kept = []
            for node in partition.nodes:
                if node.op_type == keys.OP_DEDUP_GATE_RX:
                    continue
                kept.append(node)
            partition.nodes = kept
        return {}


@ROWS.probe("`RuntimeIncomplete` or `Internal`")
def test_a_missing_gate_has_one_error_and_a_pass_its_blame() -> None:
    with pytest.raises(RuntimeIncomplete):
        compiled(to_one, using=programs.compiler().without_stage("insert_dedup_gate_rx"))
    using = programs.compiler().with_pass(DropsGates(), after="insert_backoff_gate_tx")
    with pytest.raises(PassInvariantBroken) as caught:
        compiled(to_one, using=using)
    assert caught.value.pass_name == "drops_gates"


class Looks(Pass):
    """Notes what it is given."""

    name = "looks"

    def __init__(self) -> None:
        self.seen: list[object] = []

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        self.seen = [unit.program, *unit.partitions.values()]
        return {}


@ROWS.probe("a stage changes a `ModelProto`")
def test_a_pass_works_on_the_graph_at_a_place_by_name() -> None:
    looks = Looks()
    compiled(programs.echo, using=programs.compiler().with_pass(looks, before="resolve_slots"))
    assert [type(each) for each in looks.seen[1:]] == [Function, Function]
    assert not any(isinstance(each, ModelProto) for each in looks.seen)


def octets(made: ModelProto) -> bytes:
    return made.SerializeToString(deterministic=True)


@ROWS.probe("a compiled model is a Module")
def test_a_compiled_model_compiles_to_itself() -> None:
    made = compiled(programs.asks)
    assert octets(programs.compiler().compile(made)) == octets(made)
    again = programs.compiler().compile(CompiledModule(made).build())
    assert set(programs.target_names(again)) == set(programs.target_names(made))


@ROWS.probe("the compiled model has no seal")
def test_a_changed_artifact_is_refused() -> None:
    made = compiled(programs.echo)
    assert len(meta(made, keys.SEAL_KEY)) == 64
    protos.set_meta(made, "changed", "yes")
    with pytest.raises(BrokenSeal):
        bring_up(made, "asker")


def test_each_row_has_one_probe() -> None:
    ROWS.check()
