"""What `describe` and `explain` say is what stands in the artifact."""

from __future__ import annotations

import onnx
import pytest

from bbnode.daemon.artifacts.artifact import ArtifactRejected
from bbnode.daemon.artifacts.explain import NoSuchValue, explain
from bbnode.daemon.artifacts.inspect import describe, wire_edges
from bbnode.daemon.artifacts.listing import listing
from bbnode.ir import keys
from bbnode.ir.graph import is_wire
from bbnode.ir.onnx_file import model_of, program_of
from tests.daemon.views import federated, relay


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def test_describe_tells_of_targets_slots_and_wire_edges() -> None:
    found = describe(federated()[0])
    client, server = found["targets"]
    assert (client["class"], server["class"]) == ("client", "server")
    assert server["inputs"] == ["tick"]
    assert {s["slot"]: s["type_name"] for s in server["slots"]}["fedavg"] == "bbnode.FedAvg"
    assert all("float tensors trained" in told for told in found["models"].values())
    assert set(found["models"]) == {"global", "local"}
    there, back = found["wire_edges"]
    assert (there["from"], there["to"]) == (server["name"], client["name"])
    assert there["gates"] == ["DedupGateRx", "PeerHealthGateRx", "BackoffGateRx"]
    assert there["deadline_ns"] == 10_000_000_000
    assert (back["op"], back["port"]) == ("SendResp → RecvRespBatched", "round")


def test_a_receiver_that_nobody_sends_to_is_told_of() -> None:
    main = next(f for f in program_of(relay()).functions if f.name.startswith("relay#"))
    pairs = list(wire_edges([main]))
    assert len(pairs) == 2
    assert all(pair.source is None and pair.send is None for pair in pairs)


@pytest.mark.parametrize("text", ["x", "-1", "99999999999999999999", "1" * 30])
def test_a_site_id_that_is_none_is_refused(text: str) -> None:
    program = program_of(federated()[0])
    for node in program.functions[0].nodes:
        if is_wire(node, keys.OP_RECV_REQ):
            node.metadata[keys.SITE_ID_KEY] = text
    with pytest.raises(ArtifactRejected, match="site id"):
        describe(model_of(program))


def test_explain_says_type_class_maker_and_passes() -> None:
    found = explain("Params_0.params", *federated())
    (place,) = found["places"]
    assert (place["type"], place["class"]) == ("Tensor.FLOAT", "server")
    assert place["made_by"]["op"] == "Params"
    assert place["made_by"]["slot"] == "global"
    assert place["made_by"]["made_in"] == "recorded"
    assert "infer_peer_classes" in place["made_by"]["changed_in"]
    assert "SendReqBatched_0#deadline" in place["read_by"]
    assert found["events"] == [
        {"pass": "recorded", "what": "made by Params_0"},
        {"pass": "recorded", "what": "type Tensor"},
        {"pass": "refine_polymorphic_value_info", "what": "type Tensor.FLOAT"},
        {"pass": "infer_peer_classes", "what": "lives on server"},
    ]


def test_explain_names_the_pass_that_made_a_value_of_its_own() -> None:
    found = explain("Params_0#deadline_out", *federated())
    assert found["places"][0]["made_by"]["made_in"] == "insert_async_deadlines"
    assert found["events"][0]["pass"] == "insert_async_deadlines"


def test_explain_tells_of_a_value_that_went_into_a_graph() -> None:
    found = explain("ArgMax_0.reduced", *federated())
    assert found["places"] == []
    assert found["events"][-1]["pass"] == "collapse_backend_subgraphs"
    assert found["events"][-1]["what"].startswith("gone")


def test_explain_tells_of_an_input_and_of_an_output() -> None:
    (tick,) = explain("tick", *federated())["places"]
    assert (tick["made_by"], tick["class"], tick["type"]) == (None, "server", "Trigger")
    (loss,) = explain("loss", *federated())["places"]
    assert loss["output"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("Params_0", "Params_0.params"), ("LoadParameters_0.cmf", "LoadParameters_0.cmd")],
)
def test_a_value_that_never_was_gets_a_hint(asked: str, hint: str) -> None:
    with pytest.raises(NoSuchValue, match=rf"{asked}.*did you mean.*{hint}"):
        explain(asked, *federated())


def test_a_listing_has_a_line_for_every_op_and_is_stable() -> None:
    model = federated()[0]
    text = listing(model)
    assert text == listing(copy_of(model))
    for function in model.functions:
        assert f"function {function.domain}::{function.name}(" in text
        for node in function.node:
            assert f"# {node.name}" in text
    assert "Train_0.stats: Metadata = Train[local](epochs=5, batch=32) @ client" in text


def test_describe_lists_what_is_trained_and_why() -> None:
    found = describe(federated()[0])
    assert set(found["parameters"]) == {"global", "local"}
    first = found["parameters"]["local"][0]
    assert first.keys() == {"name", "shape", "trained", "why"}
    assert (first["trained"], first["why"]) == (True, "a weight of Gemm")
    assert found["model_warnings"] == {}
