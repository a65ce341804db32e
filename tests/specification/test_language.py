"""IR and language: bbnode's side of each difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnx
import onnx.printer
import pytest
from onnx import TensorProto, helper

from bbnode.compiler import Compiler
from bbnode.compiler.errors import (
    BindingMismatch,
    NeverFires,
    NothingStored,
    OpsetNotImported,
    StoredTypesDiffer,
)
from bbnode.components import ArrayDataSource, FlatIndex, concrete
from bbnode.dsl import (
    AggregatorSlot,
    BadArgument,
    DataSourceSlot,
    Graph,
    IndexSlot,
    ModelSlot,
    OnnxModule,
    Output,
    peer_lists,
    syscalls,
    types,
)
from bbnode.engine import Limits, install, steps
from bbnode.engine.errors import UnreachableOps
from bbnode.ir import codec, keys, opset
from bbnode.ir.envelope import decode_envelope
from bbnode.ir.values import TRIGGER, Metadata, PeerIdVec, ResponseBatch, SearchResults
from tests import protos
from tests.compiler.programs import Body, model_of
from tests.compiler.test_onnx_fidelity import annotate
from tests.dsl.programs import FromFunction
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import Pump, ScriptConfig, ScriptModel, bring_up, of, peer
from tests.specification import programs
from tests.specification.programs import COMPUTE, WORKERS, S, compiled, floats, meta, nodes, number
from tests.specification.rows import Rows

ROWS = Rows("IR and language")
NET = ModelSlot("net")


def versions(made: onnx.ModelProto | onnx.FunctionProto) -> set[int]:
    return {int(entry.version) for entry in made.opset_import if not entry.domain}


@ROWS.probe("`ir_version` 12, `ai.onnx` 17")
def test_versions_of_the_form_and_of_the_opset() -> None:
    made = programs.recorded(programs.asks)
    assert (made.ir_version, versions(made)) == (13, {25})
    assert (programs.compiler().compile(made).ir_version, keys.ONNX_OPSET_VERSION) == (13, 25)
    made.ir_version = 10
    assert programs.compiler().compile(made).ir_version == 10
    nine = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    old = helper.make_model(nine, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    assert versions(OnnxModule(old).build()) == {25}


def splits(g: Graph) -> None:
    g.output("y", COMPUTE.split(g, number(g), num_outputs=1)[0])


def absolute(g: Graph) -> None:
    g.output("y", COMPUTE.abs(g, number(g)))


@ROWS.probe("functions that import several versions")
def test_the_highest_opset_counts_where_the_ops_mean_the_same() -> None:
    for inner, means_the_same in ((absolute, True), (splits, False)):
        child = FromFunction(inner, name="Child", home="asker")

        def body(g: Graph, child: FromFunction = child) -> None:
            x = COMPUTE.neg(g, number(g))
            g.output("y", child.call().input("x", x).build(g).output("y"))

        made = programs.recorded(body)
        for owner, version in ((made.functions[0], 21), (made.functions[1], 17), (made, 21)):
            next(e for e in owner.opset_import if not e.domain).version = version
        if means_the_same:
            assert versions(programs.compiler().compile(made)) == {21}
        else:
            with pytest.raises(OpsetNotImported):
                programs.compiler().compile(made)


@ROWS.probe("`producer_name` `bytesandbrains`")
def test_functions_are_in_one_domain() -> None:
    made = programs.recorded(programs.echo)
    assert made.producer_name == "bbnode"
    assert {f.domain for f in made.functions} == {"ai.bytesandbrains.module"}


@ROWS.probe("the model's graph calls the root")
def test_the_graph_is_empty_and_has_the_roots_name() -> None:
    made = programs.recorded(programs.echo)
    assert made.graph.name == made.functions[0].name
    assert not [*made.graph.node, *made.graph.input, *made.graph.output]
    onnx.checker.check_model(made, full_check=True)


@ROWS.probe("the ops of a data source are")
def test_peers_standardise_alike(tmp_path: Path) -> None:
    path = tmp_path / "points.npz"
    np.savez(path, x=np.array([[1.0], [3.0]], np.float32), y=np.array([0, 1]))
    data = DataSourceSlot("data")

    def body(g: Graph) -> None:
        shares, _ = data.statistics(g)
        taken = data.standardize(g, shares)
        batch, _ = data.next_batch(g, after=taken)
        g.output("batch", batch)

    using = Compiler().bind_data_source("data", ArrayDataSource)
    node = bring_up(
        compiled(body, using=using),
        "asker",
        config={"data": {"path": str(path), "standardize": "federated"}},
    )
    node.invoke("asker", {})
    pump = Pump(node)
    pump.settle()
    assert pump.of(node, steps.AppEvent)[0].value.tolist() == [[-1.0], [1.0]]


@ROWS.probe("a slot's type is in the attribute's")
def test_the_type_of_a_default_is_in_the_functions_metadata() -> None:
    made = programs.recorded(given)
    (function,) = made.functions
    assert meta(function, "ai.bytesandbrains.concrete_type.net") == ScriptModel.TYPE_NAME
    assert meta(function, "ai.bytesandbrains.slot_role.net") == "Model|0"
    assert "metadata_props" not in onnx.AttributeProto.DESCRIPTOR.fields_by_name


def given(g: Graph) -> None:
    """A program whose author chose a model."""
    default = concrete(ScriptModel, ScriptConfig(start=2.0))
    g.output("y", ModelSlot("net", concrete=default).forward(g, number(g)))


def of_floats() -> Compiler:
    return Compiler().with_permissive_types()


@ROWS.probe("a slot's default may be overridden")
def test_the_authors_component_stays_and_its_settings_do_not() -> None:
    with pytest.raises(BindingMismatch):
        compiled(given, using=of_floats().bind_model("net", ScriptModel))
    made = compiled(given, using=of_floats())
    for config, expected in (({}, 3.0), ({"net": {"start": 5.0}}, 6.0)):
        node = bring_up(made, "asker", config=config)
        node.invoke("asker", {"x": floats(1)})
        assert [s.value.tolist() for s in of(steps.AppEvent, node.poll(0))] == [[expected]]


@ROWS.probe("a concrete's configuration is a string,")
def test_a_configuration_is_msgpack_of_the_config() -> None:
    (attribute,) = programs.recorded(given).functions[0].attribute_proto
    assert attribute.name == "net"
    assert msgpack.unpackb(protos.octets(attribute))["start"] == 2.0


def kept(g: Graph) -> None:
    g.output("y", NET.forward(g, number(g)))


@ROWS.probe("a shared body is `Hoist_<scope")
def test_a_body_that_two_scopes_share_has_one_name() -> None:
    child = FromFunction(kept, name="Child", home="asker")

    def body(g: Graph) -> None:
        x = number(g)
        for scope in ("left", "right"):
            with g.with_module(scope):
                x = child.call().input("x", x).build(g).output("y")
        g.output("y", x)

    names = [f.name for f in compiled(body).functions if f.name.startswith("Hoist_")]
    assert len(names) == 1
    assert names[0].startswith("Hoist_Child_")


@ROWS.probe("`Dot`, `Zeros`")
def test_ops_that_onnx_lacks_are_recorded_as_those_it_has() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        COMPUTE.dot(g, x, x)
        COMPUTE.zeros(g, [2])
        COMPUTE.ones(g, [2])
        COMPUTE.scatter(g, x, g.constant([0]), x)

    made = [n.op_type for n in nodes(programs.recorded(body)) if n.op_type != "Constant"]
    assert made == ["Mul", "ReduceSum", "ConstantOfShape", "ConstantOfShape", "ScatterElements"]


@ROWS.probe("slots are told apart")
def test_a_slot_is_its_name() -> None:
    def body(g: Graph) -> None:
        g.output("a", ModelSlot("net").params(g))
        g.output("b", ModelSlot("net").params(g))
        g.output("c", ModelSlot("other").params(g))

    made = nodes(programs.recorded(body), "Params")
    assert [meta(node, keys.SLOT_ID_KEY) for node in made] == ["0", "0", "1"]


@ROWS.probe("ops of one slot are ordered")
def test_ops_of_a_slot_fire_in_the_order_of_the_program() -> None:
    def body(g: Graph) -> None:
        late = syscalls.sleep(g, g.input("go", types.TRIGGER), duration_ns=S)
        NET.load_parameters(g, number(g), after=late)
        NET.train(g, epochs=2, batch=3)  # reads nothing, and so could begin
        g.output("y", NET.params(g))

    node = bring_up(compiled(body, using=programs.compiler().with_permissive_types()), "asker")
    pump = Pump(node)
    node.invoke("asker", {"x": floats(1), "go": TRIGGER})
    pump.settle()
    assert node.component("net").calls == []
    pump.advance(pump.now_ns + S)
    assert node.component("net").calls == ["load 1.0", "train 2 3", "params"]


@ROWS.probe("a `bundle` of nothing")
def test_a_bundle_of_nothing_is_a_typed_error_with_its_line() -> None:
    with pytest.raises(BadArgument, match=r"test_language\.py:"):
        programs.recorded(lambda g: g.bundle([]))


@ROWS.probe("parts of a bundle are")
def test_names_of_parts() -> None:
    def body(g: Graph) -> None:
        parts = g.bundle([number(g), g.input("m", types.METADATA)])
        for part in g.unbundle(parts, [types.TENSOR_FLOAT, types.METADATA]):
            syscalls.app_emit(g, part, name="part")

    bundle, unbundle = nodes(programs.recorded(body), "Bundle", "Unbundle")
    assert programs.attributes(bundle) == {"child_count", "child_types"}
    assert list(unbundle.output) == ["Unbundle_0.parts_0", "Unbundle_0.parts_1"]


def sent(body: programs.Body, inputs: dict[str, Any]) -> list[Any]:
    """Return the envelopes of one node's program, to a peer of class `worker`."""
    node = bring_up(compiled(body), "asker")
    node.peer_connected(peer(1), ["worker"])
    node.invoke("asker", inputs)
    return [decode_envelope(b"".join(s.parts)) for s in of(steps.SendEnvelope, node.poll(0))]


@ROWS.probe("a Send takes n values")
def test_sends_of_one_poll_share_an_envelope_and_a_bundle_is_one_fill() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        workers = WORKERS.current_view(g, after=x)
        g.output("one", g.net_out("one", workers, x))
        g.output("two", g.net_out("two", workers, g.bundle([x, x, x])))

    assert {len(n.input) for n in nodes(programs.recorded(body), keys.OP_SEND)} == {2}
    (one,) = sent(body, {"x": floats(1)})
    assert len(one.fills) == 2


@ROWS.probe("a recorded module has a `module_tree`")
def test_functions_calls_and_stamps_are_the_tree() -> None:
    child = FromFunction(programs.echo, name="Child", home="asker")

    def body(g: Graph) -> None:
        child.call().input("x", number(g)).build(g)

    made = programs.recorded(body)
    assert [f.name for f in made.functions] == ["Program", "Child"]
    assert [n.op_type for n in made.functions[0].node] == ["Child"]
    assert {meta(n, keys.MODULE_INSTANCE_KEY) for n in made.functions[1].node} == {"Child"}
    assert {meta(n, keys.PORT_KEY) for n in nodes(made, keys.OP_SEND)} == {"there", "back"}
    assert "module_tree" not in str(made)


def plain_model() -> onnx.ModelProto:
    """A model `y = x * w`."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "scale",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0])],
    )  # fmt: skip
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=keys.FRAMEWORK_IR_VERSION
    )


def wrapping(imported: onnx.ModelProto) -> onnx.ModelProto:
    return programs.compiler().compile(OnnxModule(imported).build())


@ROWS.probe("training steps may be exported")
def test_training_info_is_kept_and_none_is_made() -> None:
    imported = plain_model()
    assert not wrapping(imported).training_info
    imported.training_info.add().update_binding.add(key="w", value="w_new")
    assert wrapping(imported).training_info == imported.training_info
    trains = programs.recorded(lambda g: g.output("m", NET.train(g)))
    assert not trains.training_info


@ROWS.probe("tensors are `TensorProto`")
def test_a_tensor_travels_as_its_raw_bytes() -> None:
    payload = codec.encode_value(floats(1.0, -2.5))
    assert bytes(payload).endswith(np.array([1.0, -2.5], "<f4").tobytes())
    back = codec.decode_value(types.TENSOR_FLOAT, payload)
    np.testing.assert_array_equal(back, floats(1.0, -2.5))
    assert not back.flags.owndata  # where it came, without a copy


def indexed(g: Graph) -> None:
    index, x = IndexSlot("index"), number(g)
    ids = index.add(g, x)
    found = index.search(g, x, k=1, after=ids)
    gone = index.remove(g, ids, after=found)
    g.output("ids", ids)
    g.output("found", found)
    g.output("after", index.search(g, x, k=1, after=gone))


def searched() -> Any:
    using = Compiler().bind_index("index", FlatIndex)
    return programs.alone(indexed, {"x": floats(1, 2)}, using=using)


@ROWS.probe("`Search` gives")
def test_a_search_gives_results() -> None:
    (found,) = searched().values("found")
    assert isinstance(found, SearchResults)
    assert (found.ids.tolist(), found.distances.tolist()) == ([0], [0.0])


@ROWS.probe("`Index.Add`")
def test_what_was_added_can_be_removed() -> None:
    node = searched()
    assert [(v.tolist(), v.dtype) for v in node.values("ids")] == [(0, np.int64)]
    assert [v.ids.size for v in node.values("after")] == [0]


def ports(role: str, op_type: str) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and outputs of a role's op."""
    spec = opset.lookup_op(keys.role_domain(role), op_type)
    assert spec is not None
    return [port.name for port in spec.inputs], [port.name for port in spec.outputs]


@ROWS.probe("inputs and outputs `vec`")
def test_one_thing_has_one_word_over_all_roles() -> None:
    assert ports("Index", "Add")[0][0] == "vector"
    assert ports("Codec", "Encode") == (["tensor"], ["code"])
    assert ports("Codec", "Decode") == (["code"], ["tensor"])
    assert ports("PeerSelector", "CurrentView")[1] == ["peers"]
    assert ports("Aggregator", "Contribute")[0][0] == "tensor"
    assert ports("Aggregator", "Aggregate")[1][0] == "tensor"


@ROWS.probe("`Aggregate`, `CurrentTensor` and `Reset`")
def test_what_only_orders_is_no_input() -> None:
    ordered = (
        ("Aggregator", "Aggregate"),
        ("Aggregator", "CurrentTensor"),
        ("DataSource", "Reset"),
    )
    assert [ports(*each)[0] for each in ordered] == [[], [], []]

    def body(g: Graph) -> None:
        late = syscalls.sleep(g, g.input("go", types.TRIGGER), duration_ns=S)
        g.output("done", DataSourceSlot("data").reset(g, after=late))

    using = Compiler().bind_data_source("data", programs.Points)
    node = bring_up(compiled(body, using=using), "asker")
    node.invoke("asker", {"go": TRIGGER})
    assert of(steps.AppEvent, node.poll(0)) == []
    assert len(of(steps.AppEvent, node.poll(S))) == 1


@ROWS.probe("`Contribute(contribution)`")
def test_an_aggregate_has_a_weight() -> None:
    mean = AggregatorSlot("mean")

    def body(g: Graph) -> None:
        x = number(g)
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        taken = mean.contribute(g, there, g.constant(Metadata(num_samples=3)))
        tensor, metadata = mean.aggregate(g, after=taken)
        g.output("tensor", tensor)
        g.output("metadata", metadata)

    network, asker = programs.network(compiled(body))
    asker.invoke("asker", {"x": floats(4)})
    network.run_until_idle()
    worker = network["worker 0"]
    assert [v.tolist() for v in worker.values("tensor")] == [[4.0]]
    assert [m["num_samples"] for m in worker.values("metadata")] == [3]
    assert ports("Aggregator", "ContributeAll")[0] == ["responses"]


@ROWS.probe("`NextBatch` may")
def test_a_batch_has_labels() -> None:
    def body(g: Graph) -> None:
        batch, labels = DataSourceSlot("data").next_batch(g)
        g.output("batch", batch)
        g.output("labels", g.expect(labels, types.TENSOR_INT64))

    using = Compiler().bind_data_source("data", programs.Points)
    node = programs.alone(body, {}, using=using)
    assert [v.shape for topic in ("batch", "labels") for v in node.values(topic)] == [(8, 2), (8,)]


@ROWS.probe("a type's denotation is its identity")
def test_a_tensor_may_have_the_word_of_onnx() -> None:
    def body(g: Graph) -> None:
        g.output("y", g.input("x", types.TENSOR_FLOAT, shape=[1, 2], denotation="IMAGE"))

    made = compiled(body)
    main = programs.main_of(made, "asker")
    (info,) = (v for v in main.value_info if v.name == "x")
    assert info.type.denotation == "IMAGE"
    node = bring_up(made, "asker")
    assert node.inputs(node.targets[0])["x"] is types.TENSOR_FLOAT


@ROWS.probe("attributes of bytes are STRING")
def test_bytes_that_are_no_text_are_a_tensor() -> None:
    body = Body("Bytes", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.syscall("Record", [x], [], text=b"plain", octets=b"\xff\x00")
    made = model_of(body)
    (node,) = nodes(made, "Record")
    kinds = {a.name: a.type for a in node.attribute}
    assert kinds == {"text": onnx.AttributeProto.STRING, "octets": onnx.AttributeProto.TENSOR}
    assert {a.name: protos.octets(a) for a in node.attribute}["octets"] == b"\xff\x00"
    assert "octets" in onnx.printer.to_text(made)


@ROWS.probe("quantization annotations")
def test_quantization_is_metadata_of_a_node() -> None:
    imported = plain_model()
    imported.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]))
    annotate(imported.graph, "y", SCALE_TENSOR="s")
    made = wrapping(imported)
    assert any("SCALE_TENSOR" in meta(n, keys.QUANTIZATION_KEY) for n in nodes(made))


@ROWS.probe("`Flush` and `Dequeue`")
def test_a_buffer_has_one_type() -> None:
    def two(g: Graph) -> None:
        syscalls.hold_stash(g, number(g), slot="kept")
        syscalls.hold_stash(g, g.input("i", types.TENSOR_INT64), slot="kept")
        g.output("y", syscalls.hold_flush(g, g.input("t", types.TRIGGER), slot="kept"))

    def nothing(g: Graph) -> None:
        g.output("y", syscalls.serialize_dequeue(g, g.input("t", types.TRIGGER), queue="q"))

    with pytest.raises(StoredTypesDiffer):
        compiled(two)
    with pytest.raises(NothingStored):
        compiled(nothing)


def batch_of(g: Graph) -> tuple[Output, Output]:
    return g.input("b", types.TENSOR_FLOAT), g.input("t", types.TENSOR_INT64)


BATCH = {"b": np.eye(2, dtype=np.float32), "t": np.array([0, 1])}


def learned(body: programs.Body, inputs: dict[str, Any] = BATCH) -> dict[str, Any]:
    """Return what a program over a real model hands out, by output."""
    node = programs.learning(body, inputs)
    return {step.topic: step.value for step in node.seen(steps.AppEvent)}


@ROWS.probe("`Model.Gradient`, `Model.SetLearningRate`")
def test_gradients_are_values_and_the_rate_can_be_set() -> None:
    def body(g: Graph) -> None:
        batch, target = batch_of(g)
        g.output("before", NET.params(g))
        gradient, loss = NET.gradient(g, batch, target)
        set_rate = NET.set_learning_rate(g, g.constant(0.5), after=[gradient, loss])
        stepped = NET.step(g, gradient, after=set_rate)
        g.output("gradient", gradient)
        g.output("after", NET.params(g, after=stepped))

    made = learned(body)
    expected = made["before"] - np.float32(0.5) * made["gradient"]
    np.testing.assert_allclose(made["after"], expected, rtol=1e-5)
    assert np.abs(made["gradient"]).max() > 0


@ROWS.probe("`Model.Train`, `Model.ComputeLoss`")
def test_a_training_is_an_op() -> None:
    def body(g: Graph) -> None:
        batch, target = batch_of(g)
        stats = NET.train(g, epochs=2, batch=4)
        g.output("stats", stats)
        g.output("loss", NET.compute_loss(g, batch, target, after=stats))
        g.output("same", NET.evaluate(g, batch, target, after=stats))

    made = learned(body)
    assert (made["stats"]["num_samples"], made["stats"]["steps"]) == (8, 4)
    assert made["loss"] == made["same"] > 0


@ROWS.probe("`Model.GradientWithInput`")
def test_a_gradient_goes_on_to_the_part_before() -> None:
    def body(g: Graph) -> None:
        batch, target = batch_of(g)
        own, by_input, _ = NET.gradient_with_input(g, batch, target)
        g.output("by_input", by_input)
        g.output("own", own)
        pulled, before = NET.pull_back(g, batch, batch, to_input=True)
        g.output("pulled", pulled)
        g.output("before", before)

    made = learned(body)
    assert made["by_input"].shape == made["before"].shape == (2, 2)
    assert made["own"].shape == made["pulled"].shape == (6,)
    assert np.abs(made["by_input"]).max() > 0


@ROWS.probe("`Model.TrainAdjusted`")
def test_a_training_takes_a_proximal_term() -> None:
    def body(g: Graph) -> None:
        anchor = NET.params(g)
        stats, made = NET.train_adjusted(g, anchor, None, epochs=3, batch=4, proximal=1e6)
        g.output("steps", made)
        g.output("moved", COMPUTE.sub(g, NET.params(g, after=stats), anchor))

    def without(g: Graph) -> None:
        start = NET.params(g)
        stats, _ = NET.train_adjusted(g, None, None, epochs=3, batch=4)
        g.output("moved", COMPUTE.sub(g, NET.params(g, after=stats), start))

    adjusted, plain = learned(body, {}), learned(without, {})
    assert adjusted["steps"][0] == 6
    assert not np.allclose(adjusted["moved"], plain["moved"])


def arrivals(limits: Limits | None = None, **attributes: Any) -> Any:
    """A node on which a Threshold counts what a Recv brings."""
    p = Partition("server")
    p.recv("done", node=types.TRIGGER, meta={keys.WIRE_TRANSPORT_KEY: "trigger_only"})
    p.sys("Threshold", ["done"], "every", **attributes)
    p.output("all", "every")
    node = bring_up(model(p), "server", limits=limits)
    for number_ in (1, 2):
        node.peer_connected(peer(number_), ["client"])
    return node, p.site("done")


def arrive(node: Any, site: int, *who: int) -> list[steps.Step]:
    made = []
    for index, one in enumerate(who):
        data = envelope(peer(one), site, TRIGGER, wire_req_id=100 + index, trigger_only=True)
        node.deliver_inbound(peer(one), data)
        made += node.poll(0)
    return made


@ROWS.probe("`Threshold` fires")
def test_a_threshold_joins_branches_or_executions() -> None:
    def branches(g: Graph) -> None:
        inputs = [g.input(name, types.TRIGGER) for name in ("a", "b")]
        g.output("y", syscalls.threshold(g, *inputs, n=2))

    node = programs.alone(branches, {"a": TRIGGER, "b": TRIGGER})
    assert node.values("y") == [TRIGGER]
    counting, site = arrivals(n=3, until_ns=5 * S)
    assert of(steps.AppEvent, arrive(counting, site, 1, 2)) == []
    assert len(of(steps.AppEvent, arrive(counting, site, 1))) == 1
    for late, site in (arrivals(n=3, until_ns=5 * S), arrivals(Limits(wait_s=5), n=3)):
        arrive(late, site, 1)
        assert of(steps.OpFailed, late.poll(5 * S - 1)) == []
        assert [f.kind for f in of(steps.OpFailed, late.poll(5 * S))] == ["JoinIncomplete"]


@ROWS.probe("`Collect`")
def test_deliveries_are_collected() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        back = g.net_out("back", there.sender, there)
        g.output("all", g.collect(back, n=2, until=5.0))

    network, asker = programs.network(compiled(body), workers=2)
    asker.invoke("asker", {"x": floats(1)})
    network.run_until_idle()
    (batch,) = asker.values("all")
    assert isinstance(batch, ResponseBatch)
    assert [p for p, _ in batch.responses] == sorted(
        network[f"worker {i}"].peer_id for i in range(2)
    )
    once, site = arrivals(n=2, per_peer=1, until_ns=5 * S)
    assert of(steps.AppEvent, arrive(once, site, 1, 1)) == []


@ROWS.probe("`When`")
def test_sends_and_outputs_depend_on_values_and_peers_are_chosen() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        large = COMPUTE.greater(g, x, g.constant(1.0))
        g.output("large", x, after=g.when(large))
        g.output("small", x, after=g.unless(large))
        g.output("chosen", syscalls.choose(g, large, x, COMPUTE.neg(g, x)))
        everybody = g.peer_ids([peer(1), peer(2)])
        others = peer_lists.without(g, everybody, g.peer_id(peer(1)))
        g.output("others", others)
        g.output("count", peer_lists.length(g, everybody))
        g.output("has", peer_lists.contains(g, others, g.peer_id(peer(1))))
        g.output("kept", peer_lists.filter_list(g, everybody, g.constant([True, False])))

    node = programs.alone(body, {"x": np.float32(0.5)})
    made = {step.topic: step.value for step in node.seen(steps.AppEvent)}
    assert "large" not in made
    assert (made["small"], made["chosen"]) == (0.5, -0.5)
    assert made["others"] == PeerIdVec([peer(2)])
    assert made["kept"] == PeerIdVec([peer(1)])
    assert (int(made["count"]), bool(made["has"])) == (2, False)


@ROWS.probe("`Any`, `DeadlineMatch`")
@pytest.mark.parametrize(("op", "more"), [("DeadlineMatch", {}), ("Any", {"group": "first"})])
def test_the_first_arrival_counts_once_over_executions_too(op: str, more: dict[str, str]) -> None:
    p = Partition("server", inputs=["ask"])
    p.recv("reply", node=types.TRIGGER)
    p.sys("After", ["ask"], "timeout", delay_ns=5 * S, stamp_ns=60 * S)
    p.sys("OnTrigger", ["reply"], "there")
    p.sys(op, ["there", "timeout"], "winner", **more)
    p.output("out", "winner")
    node = bring_up(model(p), "server")
    node.peer_connected(peer(1), ["client"])
    node.invoke("server", {"ask": TRIGGER})
    node.poll(0)
    replied = arrive(node, p.site("reply"), 1)
    timed_out = node.poll(5 * S)
    assert [len(of(steps.AppEvent, made)) for made in (replied, timed_out)] == [1, 0]


@ROWS.probe("an op whose inputs never meet")
def test_an_op_that_never_fires_is_refused() -> None:
    def body(g: Graph) -> None:
        x = number(g)
        there = g.net_out("there", WORKERS.current_view(g, after=x), x)
        g.output("y", COMPUTE.add(g, x, g.net_out("back", there.sender, there)))

    with pytest.raises(NeverFires):
        compiled(body)
    p = Partition("server", inputs=["x"])
    p.recv("came", node=types.TENSOR_FLOAT)
    p.sys("Gate", ["x", "came"], "y")
    p.output("out", "y")
    with pytest.raises(UnreachableOps):
        install(model(p), ["server"], peer_id=peer(0))


def test_each_row_has_one_probe() -> None:
    ROWS.check()
