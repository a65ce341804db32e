"""Types of `ai.onnx` ops, by ONNX's own schemas and its own inference.

Rule: nothing about a specific op is written here. Ports with one type variable in the schema have
one type, a variable with one allowed type is that type, and `onnx.shape_inference` infers the
rest, node by node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import onnx
from onnx import NodeProto, TensorProto, TypeProto

from bbnode.compiler.analysis.signatures import schema_of
from bbnode.ir import keys, types
from bbnode.ir.graph import Attribute, OpNode, Tensor, ValueType
from bbnode.ir.onnx_file import node_proto, type_of
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeNode

_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
_TENSOR = "tensor("
# A tensor that ONNX reads to infer a type (an axis, a shape) has few elements; others may be of
# any size, and are passed without their data.
MAX_INFERRED_ELEMENTS = 1_024


class InferenceFailed(Exception):
    """ONNX refuses the node with these input types."""


@dataclass(frozen=True, kw_only=True)
class PortRule:
    """One formal parameter. `variable` is None if each value has a type of its own."""

    variable: str | None
    allowed: frozenset[TypeNode] | None  # None: other kinds than tensors too, so not checked here
    variadic: bool

    @cached_property
    def only(self) -> TypeNode | None:
        """The type of a value, if only one is allowed."""
        return next(iter(self.allowed)) if self.allowed and len(self.allowed) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The rules of a schema on the types of one op."""

    inputs: tuple[PortRule, ...]
    outputs: tuple[PortRule, ...]
    open_outputs: bool  # an output's type does not follow from the variables of the inputs


@cache
def rule_of(domain: str, op_type: str, version: int) -> OpRule | None:
    """Return the rule of an op at an opset version ("" is `ai.onnx`), or None."""
    schema = schema_of(domain, op_type, version)
    if schema is None:
        return None
    allowed = {
        constraint.type_param_str: _leaves(constraint.allowed_type_strs)
        for constraint in schema.type_constraints
    }
    inputs = tuple(_port(port, allowed) for port in schema.inputs)
    outputs = tuple(_port(port, allowed) for port in schema.outputs)
    # Values of a heterogeneous port (a Loop's) have no variable in common.
    bound = {port.variable for port in inputs} - {None}
    return OpRule(
        inputs=inputs,
        outputs=outputs,
        open_outputs=any(
            port.variable not in bound and (port.allowed is None or len(port.allowed) != 1)
            for port in outputs
        ),
    )


def _port(
    port: onnx.defs.OpSchema.FormalParameter,
    allowed: Mapping[str, frozenset[TypeNode] | None],
) -> PortRule:
    variadic = port.option == _VARIADIC
    name = port.type_str
    own = name in allowed
    return PortRule(
        variable=None if variadic and not port.is_homogeneous else (name if own else None),
        allowed=allowed[name] if own else _leaves([name]),
        variadic=variadic,
    )


def _leaves(names: Sequence[str]) -> frozenset[TypeNode] | None:
    """Return the lattice leaves of `tensor(...)` names; None if other kinds are among them."""
    if not all(name.startswith(_TENSOR) for name in names):
        return None
    leaves = set()
    for name in names:
        element = name.removeprefix(_TENSOR).rstrip(")").upper()
        number = getattr(onnx.TensorProto, element, None)
        leaf = types.TENSOR_BY_ELEM.get(number) if isinstance(number, int) else None
        if leaf is not None:
            leaves.add(leaf)
    return frozenset(leaves)


def infer(
    node: OpNode,
    known: Mapping[str, TypeNode],
    versions: Mapping[str, int],
    ir_version: int,
) -> dict[str, TypeProto]:
    """Return the types of a node's outputs that ONNX infers from those of its inputs.

    Raises InferenceFailed when ONNX refuses the node.
    """
    input_types = {name: _known_proto(kind) for name, kind in known.items()}
    return _inferred(node, input_types, {}, versions, ir_version)


def _inferred(
    node: OpNode,
    input_types: Mapping[str, TypeProto],
    constants: Mapping[str, Tensor],
    versions: Mapping[str, int],
    ir_version: int,
) -> dict[str, TypeProto]:
    try:
        if node.graphs:
            return _infer_with_graphs(node, input_types, versions, ir_version)
        domain = "" if node.domain == "ai.onnx" else node.domain
        schema = schema_of(domain, node.op_type, versions.get(domain, 0))
        if schema is None:
            return {}
        imports = [onnx.helper.make_opsetid(d, v) for d, v in versions.items()]
        inferred: dict[str, TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, _light_proto(node), {k: v for k, v in input_types.items() if k in node.inputs},
            input_data={
                k: proto
                for k in node.inputs
                if k in constants and isinstance(proto := constants[k].proto, TensorProto)
            },
            opset_imports=imports, ir_version=ir_version,
        )  # fmt: skip
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        ValueError,
        RuntimeError,
    ) as error:
        raise InferenceFailed(str(error).strip().splitlines()[0] if str(error) else "") from error
    return inferred


def infer_shapes(
    node: OpNode,
    known: Mapping[str, ValueType],
    constants: Mapping[str, Tensor],
    versions: Mapping[str, int],
    ir_version: int,
) -> dict[str, tuple[Dim, ...]]:
    """Return the shapes of a node's outputs that ONNX infers from its inputs.

    Args:
        node: the op.
        known: types of all its inputs, with shapes as far as they are known.
        constants: known small values, such as the shape that a Reshape reads.
        versions, ir_version: the model's.

    Raises InferenceFailed when ONNX refuses the node.
    """
    inferred = _inferred(
        node, {name: kind.proto() for name, kind in known.items()}, constants, versions, ir_version
    )
    shapes = {}
    for name, proto in inferred.items():
        shape = type_of(proto).shape
        if name in node.outputs and shape is not None:
            # Names that ONNX invents for unknown lengths carry no information.
            shapes[name] = tuple(
                None if isinstance(axis, str) and axis.startswith("unk__") else axis
                for axis in shape
            )
    return shapes


def _known_proto(kind: TypeNode) -> TypeProto:
    """Return a type in ONNX's form; an unknown one is an empty proto."""
    return types.type_to_proto(kind) if kind.is_leaf else TypeProto()


def _light_proto(node: OpNode) -> NodeProto:
    """Return the node in ONNX's form; weights keep only dtype and shape."""
    light = node.copy()
    for name, attribute in node.attributes.items():
        tensor = attribute.value
        if isinstance(tensor, Tensor) and math.prod(tensor.shape) > MAX_INFERRED_ELEMENTS:
            hollow = TensorProto(dims=tensor.shape, data_type=tensor.elem_type)
            light.attributes = {**light.attributes, name: Attribute.of(hollow)}
    return node_proto(light)


def _infer_with_graphs(
    node: OpNode,
    input_types: Mapping[str, TypeProto],
    versions: Mapping[str, int],
    ir_version: int,
) -> dict[str, TypeProto]:
    """Infer an If, Loop or Scan in a model of one node, since its graphs see outer values."""
    model = onnx.ModelProto(ir_version=ir_version)
    model.opset_import.extend(
        onnx.helper.make_opsetid(domain, version)
        for domain, version in versions.items()
        if domain in ("", keys.ONNX_ML_DOMAIN)
    )
    model.graph.name = "one_node"
    for name in node.computes_with:
        port = model.graph.input.add(name=name)
        if input_types[name].WhichOneof("value"):
            port.type.CopyFrom(input_types[name])
    model.graph.node.append(_light_proto(node))
    for name in node.outputs:
        if name:
            model.graph.output.add(name=name)
    solved = onnx.shape_inference.infer_shapes(model)
    infos = [*solved.graph.output, *solved.graph.value_info]
    return {info.name: info.type for info in infos if info.type.WhichOneof("value")}
