"""What install refuses, how it says so, and what it shares."""

# ruff: noqa: ARG005 - mutations have one signature

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from bbnode.components.registry import ConfigTypeMismatch
from bbnode.engine import Limits, errors, install, plan_program, steps
from bbnode.engine.limits import InvalidLimit
from bbnode.ir import keys, types
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import TRIGGER
from tests import protos
from tests.engine.builder import SYS, Partition, model, subgraph
from tests.engine.support import bring_up, component, of, peer

MODEL = keys.role_domain("Model")


def partition(name="server", slot="m", type_name="test.ScriptModel", role="Model"):
    p = Partition(name, inputs=["x"])
    p.bind(slot, role, type_name)
    p.op(keys.role_domain(role), "Params", (), ["w"], slot=slot, after=["x"])
    p.output("out", "w")
    return p


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(errors.NotCompiled, match="bbnode compile"):
        bring_up(onnx.ModelProto(), "server")
    made = model(partition())
    protos.set_meta(made, keys.COMPILED_KEY, "v9")
    with pytest.raises(errors.NotCompiled, match="v9"):
        bring_up(made, "server")


def test_an_unknown_target_lists_what_there_is() -> None:
    made = model(partition(), partition("client"))
    with pytest.raises(errors.UnknownTarget, match=r"client#.*") as caught:
        bring_up(made, "clint")
    assert len(caught.value.known) == 2
    with pytest.raises(errors.UnknownTarget):
        bring_up(made)


def test_targets_share_slots_and_components() -> None:
    made = model(partition(), partition("client"))
    node = bring_up(made, "server", "client", "server")
    assert node.classes == ("server", "client")
    for target in node.targets:
        node.invoke(target, {"x": TRIGGER})
    node.poll(0)
    assert component(node, "m").calls == ["params", "params"]


def test_a_conflict_names_every_contributor() -> None:
    made = model(partition(), partition("client", type_name="test.Other"))
    with pytest.raises(errors.SlotBindingConflict, match=r"server#.*ScriptModel.*client#.*Other"):
        bring_up(made, "server", "client")
    bring_up(made, "server")


def test_all_missing_component_types_are_listed() -> None:
    p = partition(type_name="test.ScriptMode")
    p.bind("n", "Model", "nobody.HasThis")
    with pytest.raises(errors.MissingComponents, match=r"did you mean 'test\.ScriptModel'") as e:
        bring_up(model(p), "server")
    assert [slot for slot, _, _ in e.value.missing] == ["m", "n"]


def test_a_component_of_another_role_is_refused() -> None:
    with pytest.raises(errors.RoleMismatch, match="needs a Model"):
        bring_up(model(partition(type_name="test.ScriptSelector")), "server")
    with pytest.raises(errors.InvalidArtifact, match="unknown role 'Muddle'"):
        bring_up(model(partition(role="Muddle")), "server")


def test_config_goes_over_what_the_artifact_stores() -> None:
    import msgpack

    p = partition()
    stored = helper.make_attribute("m", msgpack.packb({"start": 3.0}))
    p.function.attribute_proto.append(stored)
    assert component(bring_up(model(p), "server"), "m").value.tolist() == [3.0]
    node = bring_up(model(p), "server", config={"m": {"start": 4.0}})
    assert component(node, "m").value.tolist() == [4.0]
    with pytest.raises(ConfigTypeMismatch, match="did you mean 'start'"):
        bring_up(model(p), "server", config={"m": {"strat": 1}})
    with pytest.raises(errors.UnknownSlot, match="mm"):
        bring_up(model(p), "server", config={"mm": {}})


def test_dependencies_are_made_first_and_bound() -> None:
    p = partition(slot="model")
    p.bind("a_data", "DataSource", "test.DependentData")
    node = bring_up(model(p), "server")
    data = component(node, "a_data")
    assert data.dependency("model") is component(node, "model")
    alone = Partition("server", inputs=["x"])
    alone.bind("a_data", "DataSource", "test.DependentData")
    with pytest.raises(errors.MissingDependency, match="depends on slot 'model'"):
        bring_up(model(alone), "server")


def test_all_unsupported_ops_are_listed_before_anything_runs() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.bind("data", "DataSource", "test.DependentData")
    p.bind("model", "Model", "test.ScriptModel")
    p.bind("compute", "Backend", "test.EvalBackend")
    p.sys("Teleport", ["x"])
    p.op("com.example", "Frobnicate", ["x"], ["f"])
    p.op(MODEL, "Params", (), ["w"], slot="data", after=["x"])
    p.op("", "Einsum", ["x"], ["e"], slot="compute", equation="i->i")
    p.op("", "Neg", ["x"], ["ng"], slot="m")
    with pytest.raises(errors.UnsupportedOps) as caught:
        bring_up(model(p), "server")
    said = str(caught.value)
    for word in ("Teleport", "Frobnicate", "has no params()", "Einsum", "holds no backend"):
        assert word in said
    assert len(caught.value.ops) == 5


def test_a_graph_that_the_backend_refuses_is_told_at_install() -> None:
    from bbnode.components.registry import component_class

    component_class("bbnode.OrtBackend")
    fused = subgraph(
        "g", ["a"], ["b"], [helper.make_node("Not", ["a"], ["b"])],
        {"a": types.TENSOR_FLOAT, "b": types.TENSOR_BOOL},
    )  # fmt: skip
    p = Partition("server", inputs=["x"])
    p.bind("compute", "Backend", "bbnode.OrtBackend")
    p.op(keys.BACKEND_SUBGRAPH_DOMAIN, "g", ["x"], ["y"], slot="compute")
    with pytest.raises(errors.UnsupportedOps, match="Not"):
        bring_up(model(p, functions=[fused]), "server")


def test_onnx_runtime_runs_graphs_whose_types_are_open() -> None:
    fused = subgraph("g", ["a", "b"], ["c"], [helper.make_node("Add", ["a", "b"], ["c"])])
    p = Partition("server", inputs=["x"])
    p.bind("compute", "Backend", "bbnode.OrtBackend")
    p.op(keys.BACKEND_SUBGRAPH_DOMAIN, "g", ["x", "x"], ["y"], slot="compute")
    p.output("out", "y")
    node = bring_up(model(p, functions=[fused]), "server")
    for dtype in (np.float32, np.int64):
        node.invoke("server", {"x": np.arange(3, dtype=dtype)})
        (event,) = of(steps.AppEvent, node.poll(0))
        assert event.value.tolist() == [0, 2, 4]
        assert event.value.dtype == dtype


def test_nodes_may_share_one_program() -> None:
    program = plan_program(model(partition()), ["server"])
    nodes = [install(program, peer_id=peer(i)) for i in range(2)]
    nodes[0].invoke("server", {"x": TRIGGER})
    for node in nodes:
        node.poll(0)
    assert component(nodes[0], "m").calls == ["params"]
    assert component(nodes[1], "m").calls == []


def test_limits_come_by_name() -> None:
    assert Limits.from_caps({"frames": 3}).frames == 3
    assert Limits.edge().envelope_bytes == 256 * 1024
    with pytest.raises(InvalidLimit, match="did you mean 'frames'"):
        Limits.from_caps({"frame": 3})
    with pytest.raises(InvalidLimit):
        Limits(frames=0)


def broken(change):
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Params", (), ["w"], slot="m", after=["x"])
    p.recv("r", node=types.TENSOR_FLOAT)
    p.constant("k", TRIGGER)
    p.send("r", "r.sender", 5)
    p.op(SYS, "Any", ["x", "k"], ["any"])
    p.op(keys.MODULE_DOMAIN, "Inner", ["x"], ["called"])
    p.output("out", "w")
    body = Partition("Inner", inputs=["v"], main=False)
    body.sys("PassThrough", ["v"], "y")
    body.function.output.append("y")
    made = model(p, functions=[body.function])
    change(made, made.functions[0], made.functions[1])
    return made


def _meta(key, value, index):
    return lambda made, main, body: protos.set_meta(main.node[index], key, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda made, main, body: main.node[1].output.pop(),
        lambda made, main, body: protos.del_meta(main.node[0], keys.SLOT_KEY),
        lambda made, main, body: protos.del_meta(main.node[1], keys.SITE_ID_KEY),
        lambda made, main, body: main.node[2].attribute.pop(),
        lambda made, main, body: main.node[3].attribute.pop(),
        lambda made, main, body: main.output.append("nobody"),
        lambda made, main, body: main.node[4].input.append("nobody"),
        lambda made, main, body: main.node[4].output.append("w"),
        lambda made, main, body: body.node.append(
            helper.make_node("Inner", ["y"], ["z"], domain=keys.MODULE_DOMAIN, name="ring")
        ),
        lambda made, main, body: main.node[5].input.append("x"),
        lambda made, main, body: protos.set_meta(
            made, keys.binding_key(main.name, "m"), "Model|test.ScriptModel"
        ),
        lambda made, main, body: protos.set_meta(main.node[0], keys.SLOT_KEY, "other"),
        _meta(keys.SITE_ID_KEY, "many", 1),
        _meta(keys.TYPE_HASH_KEY, "17", 1),
        _meta(keys.DEADLINE_NS_KEY, "-1", 0),
        _meta(keys.CONTROL_AFTER_KEY, "nobody", 0),
        _meta(keys.AFTER_KEY, "nobody", 0),
        _meta(keys.CONTROL_AFTER_KEY, "Params_1", 0),
    ],
)  # fmt: skip
def test_a_changed_artifact_is_refused_by_name(change) -> None:
    bring_up(broken(lambda *_: None), "server")
    with pytest.raises(errors.InvalidArtifact, match="compile the program again"):
        bring_up(broken(change), "server")


@given(st.data())
def test_no_mutation_raises_anything_untyped(data) -> None:
    raw = bytearray(broken(lambda *_: None).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    made = onnx.ModelProto()
    try:
        made.ParseFromString(bytes(raw))
    except Exception:  # noqa: BLE001 - protobuf's own errors; the daemon translates them
        return
    with contextlib.suppress(BbnodeError):
        bring_up(made, "server").poll(0)


def test_a_model_that_nests_without_end_is_refused_and_not_followed() -> None:
    p = Partition("server", inputs=["x"])
    p.output("out", "x")
    made = model(p)
    inner = made.functions[0].node[0]
    for _ in range(3000):
        graph = helper.make_graph([], "deeper", [], [])
        inner.attribute.append(onnx.AttributeProto(name="body", type=onnx.AttributeProto.GRAPH))
        inner.attribute[-1].g.CopyFrom(graph)
        inner = inner.attribute[-1].g.node.add(op_type="If", name="n")
    with pytest.raises(errors.InvalidArtifact, match="nest deeper"):
        bring_up(made, "server")


def test_a_host_may_look_at_a_component() -> None:
    node = bring_up(model(partition()), "server")
    node.invoke("server", {"x": TRIGGER})
    node.poll(0)
    assert node.component("m").calls == ["params"]
    with pytest.raises(errors.UnknownSlot, match=r"no slot 'n'.* it has: m"):
        node.component("n")
