"""Where the texts contradict each other: bbnode does what the page says."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from bbnode.compiler import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.compiler.errors import CompileError, OpsetNotImported, UnpairedWireRequest
from bbnode.components import Backend, OnnxModel
from bbnode.dsl import Graph, ModelSlot, RecordingError, types
from bbnode.engine import steps
from bbnode.engine.errors import UnsupportedOps
from bbnode.ir import ids, keys, opset
from tests.compiler.programs import Body, run, unit_of
from tests.dsl.programs import FromFunction
from tests.engine import support
from tests.engine.envelopes import envelope
from tests.engine.support import EvalBackend, bring_up, of, peer
from tests.specification import programs
from tests.specification.programs import COMPUTE, WORKERS, compiled, floats, meta, nodes, number
from tests.specification.rows import Rows

X = {"x": floats(2)}
ROWS = Rows("Where the texts contradict each other")


@ROWS.probe("the passport and binding keys")
def test_keys_have_one_prefix() -> None:
    made = compiled(programs.echo)
    names = [entry.key for entry in made.metadata_props]
    assert all(name.startswith("ai.bytesandbrains.") for name in names)
    assert meta(made, "ai.bytesandbrains.compiled") == "v1"
    assert any(name.startswith("ai.bytesandbrains.binding.asker#") for name in names)


@ROWS.probe("the domain of gates")
def test_gates_are_syscalls() -> None:
    gates = nodes(compiled(programs.echo), *keys.GATE_OPS)
    assert {node.domain for node in gates} == {"ai.bytesandbrains.syscall"}


@ROWS.probe("the class of a program without peers")
def test_the_class_of_those_who_name_none_is_nobodys_name() -> None:
    def body(g: Graph) -> None:
        g.output("y", COMPUTE.neg(g, number(g)))

    unnamed = FromFunction(body, home=keys.SELF_CLASS)
    (target,) = programs.target_names(programs.compiler().compile(unnamed.build()))
    assert target.startswith("@self#")
    with pytest.raises(RecordingError):
        FromFunction(body, home="@other").build()


@ROWS.probe("who writes `wire.Recv`")
def test_the_compiler_writes_recvs() -> None:
    assert nodes(programs.recorded(programs.echo), keys.OP_RECV) == []
    assert len(nodes(compiled(programs.echo), keys.OP_RECV)) == 2
    body = Body("Authored", root=True)
    body.op(keys.WIRE_DOMAIN, keys.OP_RECV, [], ["payload", "sender"])
    with pytest.raises(CompileError):
        run(unit_of(body), "validate")


@ROWS.probe("what a Recv gives")
def test_a_recv_gives_payload_and_sender() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        g.output("who", there.sender)
        g.output("what", there)

    network, asker = programs.network(compiled(body))
    asker.invoke("asker", {"x": floats(1)})
    network.run_until_idle()
    worker = network["worker 0"]
    assert worker.values("who") == [asker.peer_id]
    np.testing.assert_array_equal(worker.values("what"), [floats(1)])


@ROWS.probe("the destination of a send")
def test_a_send_goes_to_peer_ids() -> None:
    network, asker = programs.network(compiled(programs.echo), workers=2)
    asker.invoke("asker", {"x": floats(1)})  # there to a list, back to one
    network.run_until_idle()
    assert len(asker.values("back")) == 2

    def to_an_address(g: Graph) -> None:
        g.net_out("there", g.address("/ip4/127.0.0.1/tcp/1"), number(g))

    with pytest.raises((RecordingError, CompileError)):
        compiled(to_an_address)


@ROWS.probe("the name of a partition")
def test_partitions_are_classes() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        for scope in ("left", "right"):
            with g.with_module(scope):
                there = g.net_out(scope, WORKERS.current_view(g, after=x), x)
                g.output(f"{scope}_is", there)

    made = compiled(body)
    assert len({meta(node, keys.MODULE_INSTANCE_KEY) for node in nodes(made)}) > 1
    assert {name.split("#")[0] for name in programs.target_names(made)} == {"asker", "worker"}


class Twice(FromFunction):
    """Calls a Module two times."""

    def __init__(self, child: FromFunction) -> None:
        super().__init__(self.calls, home="asker")
        self.child = child

    def calls(self, g: Graph) -> None:
        once = self.child.call().input("x", number(g)).build(g).output("y")
        g.output("y", self.child.call().input("x", once).build(g).output("y"))


def relay(g: Graph) -> None:
    x = number(g)
    there = g.net_out("there", WORKERS.current_view(g, after=x), x)
    g.output("y", g.net_out("back", there.sender, there))


def keeps(g: Graph) -> None:
    g.output("y", ModelSlot("net").forward(g, number(g)))


@ROWS.probe("where the child of a Module goes")
def test_a_child_is_a_function_and_in_place_where_it_sends() -> None:
    for body, calls in ((keeps, 2), (relay, 0)):
        program = Twice(FromFunction(body, name="Child", home="asker"))
        made = program.build()
        assert [node.op_type for node in made.functions[0].node].count("Child") == 2
        functions = {(f.domain, f.name) for f in programs.compiler().compile(made).functions}
        called = nodes(programs.compiler().compile(made))
        assert sum((node.domain, node.op_type) in functions for node in called) == calls


@ROWS.probe("`role.compressor`, `role.data_loader`")
def test_codecs_and_data_sources_have_their_names() -> None:
    codec = "ai.bytesandbrains.role.codec"
    assert all(opset.lookup_op(codec, name) for name in ("Encode", "Decode", "Train"))
    assert opset.lookup_op(codec, "Compress") is None
    assert opset.lookup_op("ai.bytesandbrains.role.data_source", "NextBatch")
    assert opset.lookup_op("ai.bytesandbrains.role.data_loader", "NextBatch") is None
    assert opset.lookup_op("ai.bytesandbrains.role.compressor", "Compress") is None


@ROWS.probe("checks 4 and 8 of `validate`")
def test_pairs_of_wire_ops_and_opsets_are_checked() -> None:
    unpaired = Body("Unpaired", home="asker", root=True)
    unpaired.request(unpaired.input("x"), unpaired.sample("worker", "ps"), "r")
    with pytest.raises(UnpairedWireRequest):
        run(unit_of(unpaired), "validate")
    imported = Body("Imported", root=True)
    imported.onnx("Neg", [imported.input("x", types.TENSOR_FLOAT)], ["y"])
    unit = unit_of(imported)
    for owner in (unit.root, unit.program):
        owner.opset_imports = [entry for entry in owner.opset_imports if entry.domain]
    with pytest.raises(OpsetNotImported):
        run(unit, "validate")


@ROWS.probe("the type check at receive")
def test_a_payload_of_another_type_is_refused_before_it_is_decoded() -> None:
    made = compiled(programs.echo)
    (recv,) = (n for n in programs.main_of(made, "worker").node if n.op_type == keys.OP_RECV)
    assert meta(recv, keys.TYPE_HASH_KEY) == str(types.TENSOR_FLOAT.wire_hash)
    worker = bring_up(made, "worker")
    worker.peer_connected(peer(1), ["asker"])
    site = int(meta(recv, keys.SITE_ID_KEY))
    undecodable = envelope(peer(1), site, floats(1), payload=b"\xc1", type_hash=7)
    worker.deliver_inbound(peer(1), undecodable)
    assert [step.kind for step in of(steps.WireReceiveFailed, worker.poll(0))] == ["TypeMismatch"]


class Sees(Pass):
    """Notes how many partitions there are when it runs."""

    name = "sees"

    def __init__(self) -> None:
        self.partitions: list[int] = []

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        self.partitions.append(len(unit.partitions))
        return {}


@ROWS.probe("when a stage of the user's runs")
def test_a_stage_runs_behind_the_pipeline_or_where_a_name_says() -> None:
    behind, before = Sees(), Sees()
    compiled(programs.echo, using=programs.compiler().push_back_stage(behind))
    early = programs.compiler().with_pass(before, before="partition_by_wire_ops")
    compiled(programs.echo, using=early)
    assert (behind.partitions, before.partitions) == ([2], [0])


@ROWS.probe("the domain of a role's op")
def test_a_role_has_one_domain_for_all_components() -> None:
    domains = []
    for component in (support.ScriptModel, OnnxModel):
        using = programs.learner() if component is OnnxModel else programs.compiler()
        made = compiled(keeps, using=using.with_permissive_types())
        domains += [(n.domain, n.op_type) for n in nodes(made) if n.op_type == "Forward"]
    assert domains == [("ai.bytesandbrains.role.model", "Forward")] * 2


@ROWS.probe("the wire hash of `address_vec`")
def test_the_hash_of_a_type_is_that_of_its_name() -> None:
    expected = ids.fnv1a_64(b"address_vec@1")
    assert types.ADDRESS_VEC.wire_hash == expected != 0x0303


@support._once
class Negates(Backend):
    """A backend of one primitive."""

    TYPE_NAME: ClassVar[str] = "test.Negates"

    def neg(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.negative(x)


@ROWS.probe("the number of ONNX ops that a backend has")
@pytest.mark.parametrize(
    ("backend", "runs_all"), [(programs.OrtBackend, True), (EvalBackend, False), (Negates, False)]
)
def test_what_a_backend_cannot_run_is_refused_at_install(
    backend: type[Backend], runs_all: bool
) -> None:
    using = programs.Compiler().bind_backend("compute", backend)

    def einsum(g: Graph) -> None:
        x = number(g)
        g.output("y", COMPUTE.op(g, "Einsum", x, x, equation="i,i->i"))

    node = programs.alone(lambda g: g.output("y", COMPUTE.neg(g, number(g))), X, using=using)
    assert [v.tolist() for v in node.values("y")] == [[-2.0]]
    if runs_all:
        assert programs.alone(einsum, X, using=using).values("y") == [4.0]
    else:
        with pytest.raises(UnsupportedOps, match="Einsum"):
            bring_up(compiled(einsum, using=using), "asker")


def test_each_row_has_one_probe() -> None:
    ROWS.check()
