"""Limits of values, envelopes, models and programs: each with what reaches it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper

from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.own_weights import with_own_weights
from bbnode.components.data.description import DataDescription, DescriptionRefused
from bbnode.components.data.schema import TensorSchema
from bbnode.components.errors import InvalidComponentConfig
from bbnode.components.indexes.collection import InvalidSearch
from bbnode.components.models.weights import SavedState, pack_state, unpack_state
from bbnode.components.registry import component_class
from bbnode.components.settings import UnreadableSettings, stored_settings
from bbnode.dsl import BackendSlot, BadArgument, Graph, Module, OnnxModule, types
from bbnode.dsl.errors import ModelTooLarge
from bbnode.engine.cohorts import Cohort, CohortTable
from bbnode.ir import flatten
from bbnode.ir.calls import InliningRefused, check_calls
from bbnode.ir.caps import MAX_TEXTS
from bbnode.ir.codec import decode_value, encode_value
from bbnode.ir.envelope import SlotFill, WireEnvelope, decode_envelope, encode_envelope
from bbnode.ir.errors import DecodeError
from bbnode.ir.graph import Function, OpNode
from bbnode.ir.intake import ModelOverLimit, opened_model, read_model
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal, decode_refusal
from bbnode.ir.values import Composite
from bbnode.programs import PeerToPeerSearch
from tests.components.fakes import CTX
from tests.daemon.limits_reach import Place, Reach, refused, refused_for, refusing

# --- values, envelopes and refusals -------------------------------------------------------------

PEER = PeerId.from_seed("limits")


def _peers(count: int) -> list[PeerId]:
    return sorted(PeerId.from_seed(str(n)) for n in range(count))


def _of_unknown_fields(count: int) -> bytes:
    """Return that many bytes of a field that protobuf skips: its tag, its length, and zeros."""
    head = b"\xfa\x0f" + bytes(((count - 4) & 0x7F | 0x80, (count - 4) >> 7))
    return head + bytes(count - len(head))


def _head(size: int) -> None:
    plain = WireEnvelope(
        dest_peer_addresses=(), fills=(SlotFill(dest_suffix=b"x", payload=b"", type_hash=1),)
    )
    whole = b"".join(map(bytes, encode_envelope(plain)))
    fill_bytes = 2 + whole[1]
    decode_envelope(whole + _of_unknown_fields(size - (len(whole) - fill_bytes)))


def _fill_head(size: int) -> None:
    fill = b"\x0a\x01x" + _of_unknown_fields(size)
    head = b"\x12" + bytes((len(fill) & 0x7F | 0x80, len(fill) >> 7))
    decode_envelope(head + fill + b"\x38\x01")


def _refusal(**texts: str) -> None:
    decode_refusal(msgpack.packb({"kind": "Late", "detail": "", "where": "", **texts}))


def _cut(name: str) -> Reach:
    """Return what sends a text of a refusal, which is cut, and reads one, which is refused."""

    def reach(most: int) -> None:
        written = WireRefusal("Late", **{name: "x" * (most + 1)}).bounded()
        assert len(getattr(written, name)) == most
        refusing(DecodeError, lambda n: _refusal(**{name: "x" * n}))(most)

    return reach


def _reasons(most: int) -> None:
    peers = tuple(_peers(most + 1))
    late = WireRefusal("Late")
    cohort = Cohort(
        wire_req_id=1, request_id=1, execution=1, name="r", asked=peers, needed=0, site=1,
        opened_ns=0, deadline_ns=1, failed=dict.fromkeys(peers, late),
    )  # fmt: skip
    batch = cohort.batch()
    assert len(batch.reasons) == most
    decode_value(types.RESPONSE_BATCH, encode_value(batch))
    more = dataclasses.replace(batch, reasons=tuple((peer, late) for peer in peers))
    with pytest.raises(DecodeError, match="values"):
        decode_value(types.RESPONSE_BATCH, encode_value(more))


def _closed(most: int) -> None:
    """Requests that have ended: of one more, answers to the first are of nobody's request."""
    table = CohortTable()
    for number in range(most + 1):
        table.open(
            Cohort(
                wire_req_id=number, request_id=1, execution=1, name="r", asked=(), needed=0,
                site=1, opened_ns=0, deadline_ns=1,
            )
        )  # fmt: skip
    statuses = [table.classify(number, PEER).value for number in (0, 1, most)]
    assert statuses == ["unknown", "late", "late"]


def _address(size: int) -> bytes:
    name = ("a" * 40 + ".b" * 40)[: size - 2]
    return bytes((54, size - 2)) + name.encode()


def _addresses(size: int) -> None:
    """As many addresses of 100 bytes, and one for the rest."""
    listed = [_address(100)] * (size // 100 - 1)
    rest = size - 100 * len(listed)
    listed += [_address(rest // 2), _address(rest - rest // 2)]
    decode_value(types.ADDRESS_VEC, msgpack.packb(listed))


def _values(most: int) -> None:
    """Texts of several tensors in one composite: they count together, and so do the tensors."""
    full = np.full(MAX_TEXTS, "", object)
    rest = most - 3 * len(full)

    def decode(last: int) -> None:
        whole = Composite([full, full, full, np.full(last, "", object)])
        decode_value(types.COMPOSITE, encode_value(whole))

    decode(rest - 4)  # of the tensors themselves
    with pytest.raises(DecodeError, match=f"more than {most} values"):
        decode(rest - 3)


def _list_items(most: int) -> None:
    index = component_class("bbnode.FlatIndex")
    made = index(index.Config(dimensions=1))
    made.add(CTX, np.zeros(1, np.float32))
    refused(
        InvalidSearch,
        lambda n: made.search(CTX, np.zeros((n, 1), np.float32), k=1),
        "in several batches",
    )(most)
    refusing(
        DecodeError,
        lambda n: decode_value(types.SEARCH_RESULTS, msgpack.packb([[0, n], b"", b"", [], []])),
        "queries or hits",
    )(most)
    refused_for(
        DecodeError,
        lambda n: decode_value(types.PEER_ID_VEC, msgpack.packb([0] * n)),
        f"more than {most + 1} values",
    )(most)


def _depth(levels: int) -> None:
    deep: Any = {}
    for _ in range(levels - 1):
        deep = {"a": deep}
    stored_settings(msgpack.packb(deep))


# --- models -------------------------------------------------------------------------------------


def _function(name: str, nodes: list[NodeProto]) -> FunctionProto:
    return helper.make_function(
        "own",
        name,
        ["x"],
        ["y"],
        nodes,
        [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )


def _calling(called: str, times: int) -> list[NodeProto]:
    return [helper.make_node(called, ["x"], ["y"], domain="own") for _ in range(times)]


def _model(nodes: list[NodeProto], functions: list[FunctionProto]) -> ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])]
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    )
    made.functions.extend(functions)
    return made


def _chain(levels: int) -> None:
    """Functions that call one another, as many levels."""
    body = [helper.make_node("Identity", ["x"], ["y"])]
    functions = [_function("f1", body)]
    functions += [_function(f"f{n}", _calling(f"f{n - 1}", 1)) for n in range(2, levels + 1)]
    check_calls(_model(_calling(f"f{levels}", 1), functions))


def _weighing(most: int) -> None:
    """A function of a 64th of the bytes, called as often, and one byte larger."""
    for extra in (0, 1):
        node = NodeProto(op_type="Identity", input=["x"], output=["y"])
        large = node.attribute.add(name="a", type=AttributeProto.STRING)
        large.s = bytes(most // 64 - 30)
        large.s += bytes(most // 64 - node.ByteSize() + extra)
        assert node.ByteSize() == most // 64 + extra
        model = _model(_calling("f", 64), [_function("f", [node])])
        if not extra:
            check_calls(model)
            continue
        with pytest.raises(InliningRefused, match=f"{most} bytes"):
            check_calls(model)


def _growing(most: int) -> None:
    """A function of 9,000 ops, called as often as a model may grow, and once more."""
    body = [helper.make_node("Identity", ["x"], ["y"])] * 9_000
    check_calls(_model(_calling("f", most), [_function("f", body)]))
    with pytest.raises(InliningRefused, match="ops, and the model itself has"):
        check_calls(_model(_calling("f", most + 1), [_function("f", body)]))


def _ops(most: int) -> None:
    """A function of a thousand ops, called once more than there are thousands."""
    body = [NodeProto(op_type="Identity", input=["x"], output=[str(n)]) for n in range(999)]
    body.append(NodeProto(op_type="Identity", input=["x"], output=["y"]))
    calls = [helper.make_node("f", ["x"], [f"y{n}"], domain="own") for n in range(most // 1000)]
    with pytest.raises(ModelTooLarge, match=f"{most} ops: quantize it"):
        OnnxModule(_model([*calls, *_calling("f", 1)], [_function("f", body)]))


def _flat_ops(most: int) -> None:
    """A function of 511 ops, of which a call makes one more, called 512 times."""
    inner = Function(name="f", domain="d", inputs=["a"], outputs=["b"])
    for number in range(511):
        inner.append(OpNode("Relu", "", f"o{number}", ("a",), (f"b{number}" if number else "b",)))
    main = Function(name="main", domain="d", inputs=["x"], outputs=["y"])
    for number in range(most // 512):
        main.append(OpNode("f", "d", f"c{number}", ("x",), (f"y{number}" if number else "y",)))
    library = {each.key: each for each in (inner, main)}
    flatten._check_size(main, library)
    main.append(OpNode("Relu", "", "last", ("x",), ("z",)))
    with pytest.raises(flatten.MalformedFlow, match=f"over {most} ops; call its Modules fewer"):
        flatten._check_size(main, library)


def _model_bytes(most: int, place: Place) -> None:
    path = place.sparse(most + 1, "model.onnx")
    for read in (read_model, lambda source: opened_model(source).__enter__()):
        with pytest.raises(ModelOverLimit, match="quantize it, or export it in parts"):
            read(path)
    # Weights that stand beside the model count.
    place.sparse(most + 1, "weights")
    model = _model([helper.make_node("Add", ["x", "w"], ["y"])], [])
    outside = model.graph.initializer.add(
        name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
    )
    outside.external_data.add(key="location", value="weights")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelOverLimit, match="bytes of weights"):
        read_model(path)


def _outputs(count: int) -> None:
    class Splits(Module):
        home = "peer"

        def body(self, g: Graph) -> None:
            compute = BackendSlot("compute")
            compute.op(g, "Split", g.input("x", types.TENSOR_FLOAT), outputs=count)

    Splits().build()


def _sparse(most: int) -> None:
    """A weight that is all zeros but for one number."""
    values_ = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    where = helper.make_tensor("w_at", TensorProto.INT64, [1], [0])
    model = _model([helper.make_node("Add", ["x", "w"], ["y"])], [])
    model.graph.sparse_initializer.add().CopyFrom(
        helper.make_sparse_tensor(values_, where, [most + 1])
    )
    with pytest.raises(InvalidForwardModel, match="make it smaller"):
        with_own_weights(model)


def _torch_example(count: int) -> None:
    pytest.importorskip("torch")
    cls = component_class("bbnode.TorchModel")
    cls(cls.Config(module="a:B", example=(f"float32[{count}]",)))


def _description(count: int) -> None:
    plain = DataDescription(kind="table", features=TensorSchema(dtype="float32", shape=(1,)))
    rest = len(dataclasses.replace(plain, label="x").to_json()) - 1
    text = dataclasses.replace(plain, label="x" * (count - rest)).to_json()
    assert len(text) == count
    assert DataDescription.from_json(text).label


def _layout(most: int) -> None:
    """A model with a thousand names of the same length, all of one number."""
    for extra, fits in ((0, True), (32, False)):
        names = [f"{n:04}".ljust(most // 1050 + extra - 12, "x") for n in range(1050)]
        saved = SavedState(params=np.zeros(1050, np.float32), layout=dict.fromkeys(names, (1,)))
        packed = pack_state(saved)
        if fits:
            assert list(unpack_state(packed).layout or ()) == names
            continue
        with pytest.raises(DecodeError, match=f"at most {most} are taken"):
            unpack_state(packed)


REACHED: dict[str, Reach] = {
    "max_envelope_head_bytes": refusing(DecodeError, _head, "beside its payloads"),
    "max_fill_head_bytes": refusing(DecodeError, _fill_head, "beside its payloads"),
    "max_refusal_detail_bytes": _cut("detail"),
    "max_refusal_place_bytes": _cut("where"),
    "max_batch_reasons": _reasons,
    "max_closed_remembered": _closed,
    "max_integer_bytes": refused_for(
        DecodeError,
        lambda n: decode_value(types.U64, msgpack.packb("x" * (n - 1))),
        "at most 9 are taken",
    ),
    "max_payload_address_bytes": refusing(DecodeError, _addresses, "bytes of addresses"),
    "max_list_items": _list_items,
    "max_values": _values,
    "max_peer_list_bytes": refused_for(
        DecodeError,
        lambda n: decode_value(types.PEER_ID_VEC, msgpack.packb([bytes(n - 6)])),
        "are taken",
    ),
    "max_search_bytes": refusing(
        DecodeError,
        lambda n: decode_value(types.METADATA_VEC, msgpack.packb([{"k": "v" * (n - 9)}])),
        "are taken",
    ),
    "max_message_depth": refusing(UnreadableSettings, _depth, "deep"),
    "max_call_depth": refusing(InliningRefused, _chain, "inline some"),
    "max_inlined_bytes": _weighing,
    "max_inlined_growth": _growing,
    "dsl.onnx.load.MAX_OPS": _ops,
    "max_flat_ops": _flat_ops,
    "ir.intake.MAX_MODEL_BYTES": _model_bytes,
    "dsl.core.graph.MAX_VARIADIC_OUTPUTS": refused(BadArgument, _outputs, "outputs"),
    "components.autodiff.own_weights._MOST_ELEMENTS": _sparse,
    "components.models.torch_model._MAX_EXAMPLE": refusing(
        InvalidComponentConfig, _torch_example, "numbers"
    ),
    "programs.retrieval.peers._MAX_BITS": refusing(
        BadArgument, lambda n: PeerToPeerSearch(dimensions=32, bits=n).check(), "at most"
    ),
    "max_description_bytes": refusing(
        DescriptionRefused, _description, "fewer columns, categories or statistics"
    ),
    "components.models.weights._MAX_LAYOUT_BYTES": _layout,
}
