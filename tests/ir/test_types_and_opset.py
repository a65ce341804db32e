"""The type lattice and the op table hold together."""

from __future__ import annotations

import onnx
import pytest

from bbnode.ir import ids, keys, opset, types
from bbnode.ir.errors import AuthorError


@pytest.mark.parametrize("node", types.registered_types(), ids=lambda n: n.name)
def test_a_type_survives_its_onnx_form(node: types.TypeNode) -> None:
    proto = onnx.TypeProto.FromString(types.type_to_proto(node).SerializeToString())
    assert types.type_from_proto(proto) is node


@pytest.mark.parametrize("node", types.registered_types(), ids=lambda n: n.name)
def test_hashes_are_fnv_of_name_and_version(node: types.TypeNode) -> None:
    assert node.wire_hash == ids.fnv1a_64(f"{node.name}@1".encode())
    assert types.type_by_hash(node.wire_hash) is node


def test_a_plain_onnx_tensor_type_is_found_without_denotation() -> None:
    proto = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [None, 3])
    assert types.type_from_proto(proto) is types.TENSOR_FLOAT


def test_meet_is_the_narrower_of_related_types() -> None:
    assert types.meet(types.ANY, types.TENSOR_FLOAT) is types.TENSOR_FLOAT
    assert types.meet(types.TENSOR_FLOAT, types.TENSOR) is types.TENSOR_FLOAT
    assert types.meet(types.TENSOR_FLOAT, types.TENSOR_DOUBLE) is None


def test_a_taken_type_name_is_refused() -> None:
    with pytest.raises(AuthorError, match="already"):
        types.register_type("Trigger", parent=types.ANY, kind=types.TypeKind.OPAQUE)


def test_the_abstract_types_are_any_and_those_of_onnx() -> None:
    found = [t.name for t in types.registered_types() if not t.is_leaf]
    assert found == ["Any", "Tensor", "Sequence", "Optional"]


def test_every_role_but_backend_and_protocol_has_ops_in_its_domain() -> None:
    for role in opset.ROLES:
        ops = opset.ops_of_role(role)
        assert bool(ops) is (role not in ("Backend", "Protocol"))
        assert all(spec.role == role and spec.suspends for spec in ops)


def test_the_six_wire_ops_and_five_gates_are_in_the_table() -> None:
    wire = {spec.op_type for spec in opset.ops_of(keys.WIRE_DOMAIN)}
    assert wire == keys.SEND_OPS | keys.RECV_OPS
    assert all(opset.lookup_op(keys.SYSCALL_DOMAIN, gate) for gate in keys.GATE_OPS)


def test_role_domains_are_snake_case() -> None:
    assert keys.role_domain("DataSource") == "ai.bytesandbrains.role.data_source"


def test_port_types_are_nodes_or_type_variables() -> None:
    for domain in (keys.SYSCALL_DOMAIN, keys.WIRE_DOMAIN, keys.COMPOSITE_DOMAIN):
        for spec in opset.ops_of(domain):
            for port in spec.inputs + spec.outputs:
                assert isinstance(port.type, types.TypeNode) or port.type.isupper()
