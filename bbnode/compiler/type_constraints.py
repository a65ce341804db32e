"""The type constraints of one function.

Rule: this is where ops turn into constraints; how constraints are kept is the network's
matter, and in which order they are solved is the pass's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TypeProto

from bbnode.compiler import flow, onnx_types
from bbnode.compiler.errors import IncompatibleStorageOnEdge, TypeConstraintFailed, Where
from bbnode.compiler.function_table import FunctionKey
from bbnode.compiler.onnx_types import InferenceFailed, OpRule
from bbnode.compiler.signatures import imported_domain, opset_versions
from bbnode.compiler.type_network import Conflict, TypeNetwork
from bbnode.ir import keys, opset, protos, types
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.types import TypeNode

_PEER_TYPES = frozenset({types.PEER_ID, types.PEER_ID_VEC})


class FunctionTypes:
    """One function's values in the network, and the constraints of its ops."""

    def __init__(self, function: FunctionProto, model: ModelProto, network: TypeNetwork) -> None:
        self.function = function
        self._network = network
        self._ir_version = model.ir_version
        self._versions = opset_versions(function.opset_import, model.opset_import)
        self._declared: dict[str, TypeNode | None] = {}
        self._ids: dict[str, int] = {}
        self._to_infer: list[NodeProto] = []
        self._graph_ops: list[tuple[NodeProto, OpRule]] = []
        for info in function.value_info:
            kind = types.type_from_proto(info.type)
            self._declared[info.name] = kind
            self._ids[info.name] = network.add(kind or types.ANY, foreign=_is_foreign(info.type))

    def id_of(self, value: str) -> int:
        """The value's number in the network."""
        number = self._ids.get(value)
        if number is None:
            number = self._ids[value] = self._network.add(types.ANY)
        return number

    # --- collecting -----------------------------------------------------------------------

    def constrain(self, functions: Mapping[FunctionKey, FunctionTypes]) -> None:
        """Add the constraints of every op."""
        for name in self.function.input:
            self.id_of(name)
        for node in self.function.node:
            for name in node.output:
                if name:
                    self.id_of(name)
            try:
                self._constrain(node, functions.get(protos.call_key(node)))
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict

    def _constrain(self, node: NodeProto, callee: FunctionTypes | None) -> None:
        spec = opset.lookup_op(node.domain, node.op_type)
        if callee is not None:
            self._constrain_call(node, callee)
        elif spec is not None:
            self._constrain_by_table(node, spec)
        elif flow.is_graph_op(node):
            self._constrain_by_schema(node)

    def _constrain_call(self, node: NodeProto, callee: FunctionTypes) -> None:
        formals = (callee.function.input, callee.function.output)
        for actual_names, formal_names in zip((node.input, node.output), formals, strict=True):
            for actual, formal in zip(actual_names, formal_names, strict=False):
                if actual:
                    self._network.unite(self.id_of(actual), callee.id_of(formal))

    def _constrain_by_table(self, node: NodeProto, spec: OpSpec) -> None:
        variables: dict[str, int] = {}
        for names, ports in ((node.input, spec.inputs), (node.output, spec.outputs)):
            for name, port in _at_ports(names, ports):
                if name.startswith(keys.SEND_SENTINEL_PREFIX):
                    continue  # what a synthesised Send makes in the place of its recorded outputs
                number = self.id_of(name)
                if isinstance(port.type, TypeNode):
                    self._network.narrow(number, port.type)
                else:
                    self._network.unite(variables.setdefault(port.type, number), number)
        for name, kind in _from_attributes(node):
            self._network.narrow(self.id_of(name), kind)
        joined = protos.get_meta(node, keys.FAN_IN_KEY) if protos.is_wire(node) else None
        if joined is not None:  # all sends of one port carry one type
            self._network.unite(self.id_of(joined), self.id_of(node.input[0]))

    def _constrain_by_schema(self, node: NodeProto) -> None:
        domain = imported_domain(node)
        rule = onnx_types.rule_of(domain, node.op_type, self._versions.get(domain, 0))
        if rule is None:
            return
        self._graph_ops.append((node, rule))
        variables: dict[str, int] = {}
        for name, port in _graph_values(node, rule):
            if port.variable is not None:
                number = self.id_of(name)
                self._network.unite(variables.setdefault(port.variable, number), number)
            if port.allowed is not None and len(port.allowed) == 1:
                self._network.narrow(self.id_of(name), next(iter(port.allowed)))
        if rule.open_outputs:
            self._to_infer.append(node)

    # --- solving --------------------------------------------------------------------------

    def infer(self) -> None:
        """Let ONNX infer what the schemas' variables left open; keeps what is still open."""
        still_open = []
        for node in self._to_infer:
            if self._peers_pass(node):
                continue
            known = {
                name: self._network.type_of(self.id_of(name)) for name in flow.data_reads(node)
            }
            try:
                found = onnx_types.infer(node, known, self._versions, self._ir_version)
                for name, proto in found.items():
                    self._take_inferred(name, proto)
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict
            except InferenceFailed as error:
                if all(kind.is_leaf for kind in known.values()):
                    raise TypeConstraintFailed(
                        op=node.name, detail=str(error), where=Where.of(node)
                    ) from error
            if any(self._is_open(name) for name in node.output if name):
                still_open.append(node)
        self._to_infer = still_open

    def _take_inferred(self, name: str, proto: TypeProto) -> None:
        kind = types.type_from_proto(proto)
        if _is_foreign(proto):
            self._network.make_foreign(self.id_of(name))
        elif kind is not None:
            self._network.narrow(self.id_of(name), kind)

    def _is_open(self, name: str) -> bool:
        number = self.id_of(name)
        return not self._network.is_foreign(number) and not self._network.type_of(number).is_leaf

    def _peers_pass(self, node: NodeProto) -> bool:
        """Whether an op that moves elements about (Slice, Concat, …) is applied to peers."""
        return bool(node.input) and self._network.type_of(self.id_of(node.input[0])) in _PEER_TYPES

    def default_peers(self) -> None:
        """Peers of a send that are still open are a PeerIdVec."""
        for node in self.function.node:
            if protos.is_wire(node, keys.OP_SEND, keys.OP_SEND_REQ_BATCHED) and len(node.input) > 1:
                number = self.id_of(node.input[1])
                if not self._network.type_of(number).is_leaf:
                    try:
                        self._network.narrow(number, types.PEER_ID_VEC)
                    except Conflict as conflict:
                        raise self._failed(node, conflict) from conflict

    def default_triggers(self) -> None:
        """Function inputs that nothing computes with are Triggers, if they may be anything."""
        used = set(self.function.output)
        for node in self.function.node:
            used.update(flow.data_reads(node))
        for name in self.function.input:
            number = self.id_of(name)
            if name not in used and self._network.type_of(number) is types.ANY:
                self._network.narrow(number, types.TRIGGER)

    # --- results --------------------------------------------------------------------------

    def check_allowed(self) -> None:
        """Raise TypeConstraintFailed where a schema does not take a value's type."""
        for node, rule in self._graph_ops:
            if self._peers_pass(node):
                continue
            for name, port in _graph_values(node, rule):
                number = self.id_of(name)
                kind = self._network.type_of(number)
                if port.allowed is None or not kind.is_leaf or self._network.is_foreign(number):
                    continue
                if kind not in port.allowed:
                    takes = ", ".join(sorted(leaf.name for leaf in port.allowed))
                    raise TypeConstraintFailed(
                        op=node.name,
                        detail=f"{name!r} is {kind.name}, {node.op_type} takes {takes}",
                        where=Where.of(node),
                    )

    def abstract_values(self) -> list[tuple[str, TypeNode]]:
        """Values whose type is no leaf, inputs first, then in recorded order."""
        names = [*self.function.input]
        for node in self.function.node:
            names.extend(name for name in node.output if name)
        return [
            (name, self._network.type_of(self.id_of(name))) for name in names if self._is_open(name)
        ]

    def write(self) -> int:
        """Write what was found into value_info; gives the number of leaf types."""
        changed: dict[str, TypeNode] = {}
        resolved = 0
        for name, number in self._ids.items():
            if self._network.is_foreign(number):
                continue
            kind = self._network.type_of(number)
            resolved += kind.is_leaf
            if self._declared.get(name) is not kind:
                changed[name] = kind
        if changed:
            protos.write_types(self.function, changed)
        for node in self.function.node:
            if node.op_type == keys.OP_BUNDLE and node.domain == keys.COMPOSITE_DOMAIN:
                self._write_child_types(node)
        return resolved

    def _write_child_types(self, node: NodeProto) -> None:
        if protos.get_attr(node, "child_types", b""):
            return
        kinds = [self._network.type_of(self.id_of(name)) for name in node.input]
        if kinds and all(kind.is_leaf for kind in kinds):
            protos.set_attr(node, "child_types", ",".join(kind.id for kind in kinds))

    def _failed(
        self, node: NodeProto, conflict: Conflict
    ) -> TypeConstraintFailed | IncompatibleStorageOnEdge:
        where = Where.of(node)
        if protos.is_wire(node) and node.op_type in keys.SEND_OPS and len(node.output) > 0:
            received = set(node.output)
            readers = (n.name for n in self.function.node if received.intersection(n.input))
            return IncompatibleStorageOnEdge(
                send_node=node.name,
                recv_node=next(readers, f"{node.name} (receiving side)"),
                sent=conflict.known.name,
                received=conflict.wanted.name,
                where=where,
            )
        return TypeConstraintFailed(
            op=node.name,
            detail=f"{conflict.known.name} meets {conflict.wanted.name} at {node.op_type}",
            where=where,
        )


def _is_foreign(proto: TypeProto) -> bool:
    """Whether a type is one of ONNX's that our lattice does not hold."""
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        element = proto.tensor_type.elem_type
        return element not in types.TENSOR_BY_ELEM and element != onnx.TensorProto.UNDEFINED
    return which is not None and types.type_from_proto(proto) is None


def _at_ports(names: Sequence[str], ports: Sequence[Port]) -> Iterator[tuple[str, Port]]:
    for index, name in enumerate(names):
        port = ports[min(index, len(ports) - 1)] if ports else None
        if name and port is not None and (index < len(ports) or port.variadic):
            yield name, port


def _graph_values(node: NodeProto, rule: OpRule) -> Iterator[tuple[str, onnx_types.PortRule]]:
    for names, ports in ((node.input, rule.inputs), (node.output, rule.outputs)):
        for index, name in enumerate(names):
            port = onnx_types.port_at(ports, index)
            if name and port is not None:
                yield name, port


def _from_attributes(node: NodeProto) -> Iterator[tuple[str, TypeNode]]:
    """Types that attributes give: constants, casts, parts of composites, received payloads."""
    if node.domain == keys.SYSCALL_DOMAIN and node.op_type == "Constant":
        kind = constant_type(node)
        if kind is not None and node.output:
            yield node.output[0], kind
    elif node.domain == keys.TYPES_DOMAIN and node.op_type == "Cast":
        yield from _listed(node.output, protos.get_attr(node, "to", b""))
    elif node.domain == keys.COMPOSITE_DOMAIN:
        values = node.input if node.op_type == keys.OP_BUNDLE else node.output
        yield from _listed(values, protos.get_attr(node, "child_types", b""))
    elif protos.is_wire(node) and node.op_type in keys.INBOUND_OPS and node.output:
        attribute = protos.get_attr_proto(node, keys.ATTR_PAYLOAD_TYPE)
        kind = types.type_from_proto(attribute.tp) if attribute is not None else None
        if kind is not None:
            yield node.output[0], kind


def _listed(values: Sequence[str], ids: str | bytes) -> Iterator[tuple[str, TypeNode]]:
    text = ids.decode(errors="replace") if isinstance(ids, bytes) else str(ids)
    for name, type_id in zip(values, flow.split_names(text), strict=False):
        kind = types.type_by_id(type_id)
        if name and kind is not None:
            yield name, kind


def constant_type(node: NodeProto) -> TypeNode | None:
    """The type of a `syscall.Constant`: its tensor's, or the one named before the NUL."""
    attribute = protos.get_attr_proto(node, "value")
    if attribute is None:
        return None
    if attribute.type == onnx.AttributeProto.TENSOR:
        return types.TENSOR_BY_ELEM.get(attribute.t.data_type)
    type_id, _, _ = attribute.s.partition(b"\0")
    return types.type_by_id(type_id.decode(errors="replace"))
