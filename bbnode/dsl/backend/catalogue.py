"""Recording ops of `ai.onnx`: the whole catalogue, from ONNX's own schemas.

Rule: no op is declared by hand. Names, arities, attributes and defaults are those of the schemas at
the opset that we record (`keys.ONNX_OPSET_VERSION`); an omitted attribute is not written to the
node, as ONNX intends. The named methods of `BackendSlot` record through here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx.defs
from onnx import AttributeProto, GraphProto
from onnx.defs import OpSchema

from bbnode.dsl.core.attributes import schema_attribute
from bbnode.dsl.core.graph import (
    LEFT_OUT,
    MAX_VARIADIC_OUTPUTS,
    After,
    Graph,
    Output,
    checked_attributes,
    type_variables,
)
from bbnode.dsl.core.names import hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.core.slot import Recorded, Slot, shaped
from bbnode.dsl.errors import BadArgument, NoSuchOp
from bbnode.ir import keys, opset, peer_list_ops, types
from bbnode.ir.graph import AttributeKind, Subgraph
from bbnode.ir.opset import Port
from bbnode.ir.types import TypeKind, TypeNode

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_OWNER = f"ai.onnx {keys.ONNX_OPSET_VERSION}"
_FORMAL = OpSchema.FormalParameterOption

# Ops whose number of outputs depends on an attribute -> that attribute.
_OUTPUT_COUNTS: Mapping[str, str] = {
    "Split": "num_outputs", "If": "then_branch", "Loop": "body", "Scan": "body",
}  # fmt: skip


@cache
def catalogue() -> Mapping[str, OpSchema]:
    """Return all `ai.onnx` ops that can be recorded, by op type, sorted."""
    schemas = {}
    for op_type in sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}):
        if onnx.defs.has(op_type, keys.ONNX_OPSET_VERSION, ""):
            schema = onnx.defs.get_schema(op_type, keys.ONNX_OPSET_VERSION, "")
            if not schema.deprecated:
                schemas[op_type] = schema
    return schemas


def method_name(op_type: str) -> str:
    """Return the method of an op type: `MatMul` is `mat_mul`, `LSTM` `lstm`, `If` `if_`."""
    name = _WORD_START.sub("_", op_type).lower()
    return f"{name}_" if name in ("and", "if", "not", "or") else name


@cache
def _methods() -> Mapping[str, tuple[str, str]]:
    return {method_name(name): (name, schema.doc or "") for name, schema in catalogue().items()}


@cache
def _by_folded_name() -> Mapping[str, str]:
    return {_folded(method): method for method in _methods()}


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


# A list of integers that an op takes as a tensor: shapes, axes, starts. A Python list becomes
# a constant of the same slot, which has no home: it goes wherever it is read.
Ints = Output | Sequence[int]


class BackendCore(Slot):
    """Records any op of the catalogue; `BackendSlot` adds named methods."""

    ROLE: ClassVar[str] = "Backend"

    def op(
        self, g: Graph, op_type: str, /, *inputs: Output | None, after: After = None,
        outputs: int | None = None, **attributes: Any,
    ) -> Recorded:  # fmt: skip
        """Record an `ai.onnx` op by its op type, e.g. `"MatMul"`.

        Args:
            g: the Graph.
            op_type: as ONNX spells it.
            inputs: values, in the schema's order; None for an optional one left out.
            after: values that must be there before the op fires.
            outputs: how many outputs to record, where the schema leaves it open.
            attributes: by name, of the kind that the schema asks for.

        Returns:
            One Output, or a tuple of them: as many as are recorded.

        Raises:
            NoSuchOp: ONNX has no such op at the opset that we record.
            BadArgument: inputs, outputs or attributes do not fit the schema.
        """
        return shaped(self._record(self._graph(g), op_type, inputs, attributes, after, outputs))

    def _record(
        self, g: Graph, op_type: str, inputs: Sequence[Output | None],
        attributes: Mapping[str, Any], after: After, outputs: int | None = None,
        kinds: Sequence[TypeNode] | None = None,
    ) -> tuple[Output, ...]:  # fmt: skip
        """Record an op of this slot; `kinds` are its output types, if known beyond the schema."""
        return record_onnx(
            g, op_type, inputs, attributes, after, outputs=outputs, kinds=kinds, slot=self._use
        )

    def _one(
        self, g: Graph, op_type: str, *inputs: Output | None, after: After, **attributes: Any
    ) -> Output:
        """Record an op and return its first output; attributes with ONNX's defaults are omitted."""
        graph = self._graph(g)
        explicit = _told(op_type, attributes)
        return self._record(graph, op_type, inputs, explicit, after, outputs=1)[0]

    def _ints(self, g: Graph, name: str, value: Ints) -> Output:
        """Return a list of integers as a value: int64, [N]."""
        graph = self._graph(g)
        if isinstance(value, Output):
            return value
        if not isinstance(value, list | tuple) or not all(is_int64(each) for each in value):
            raise BadArgument(
                f"{name}={value!r:.60} is neither a recorded value nor a list of whole numbers"
            )
        array = np.array(value, np.int64)
        return self._record(graph, "Constant", (), {"value": array}, None)[0]

    def __getattr__(self, name: str) -> Callable[..., Recorded]:
        """Return the method of an op of the catalogue, by its name in any spelling."""
        method = name if name.startswith("_") else _by_folded_name().get(_folded(name), name)
        return super().__getattr__(method)

    @property
    def _owner(self) -> str:
        return _OWNER

    def _methods(self) -> Mapping[str, tuple[str, str]]:
        return _methods()


def record_onnx(
    g: Graph, op_type: str, inputs: Sequence[Output | None], attributes: Mapping[str, Any],
    after: After, *, outputs: int | None = None, kinds: Sequence[TypeNode] | None = None,
    slot: SlotUse | None = None,
) -> tuple[Output, ...]:  # fmt: skip
    """Record an `ai.onnx` op, on a backend's slot or, for lists of peers, on none.

    Raises NoSuchOp, BadArgument.
    """
    schema = catalogue().get(str(op_type))
    if schema is None:
        raise NoSuchOp(f"{_OWNER} has no op {str(op_type)!r}{hint(str(op_type), catalogue())}")
    known = {
        name: opset.REQUIRED if formal.required else LEFT_OUT
        for name, formal in sorted(schema.attributes.items())
    }
    checked = checked_attributes(
        op_type,
        known,
        attributes,
        lambda name, value: schema_attribute(value, _kind(schema.attributes[name])),
    )
    bound = g.bound_inputs(op_type, _ports(op_type), inputs, schema.min_input)
    types_in = [None if value is None else value.type for value in inputs]
    if peer_list_ops.is_peer_list_op(op_type, types_in):
        slot = None  # the engine runs it: a backend knows tensors only
        kinds = [_peer_list_type(op_type, types_in)]
    count = _output_count(schema, outputs, attributes)
    names = port_names(schema.outputs, count)
    values = list(inputs)
    while len(values) > schema.min_input and values[-1] is None:
        values.pop()
    return g.emit(
        "",  # the spelling of `ai.onnx` that upstream's checker and runtimes require
        op_type,
        inputs=values,
        outputs=list(zip(names, kinds or _output_types(schema, bound, count), strict=True)),
        attributes=checked,
        slot=slot,
        after=after,
        opset_version=keys.ONNX_OPSET_VERSION,
    )


def _kind(formal: OpSchema.Attribute) -> AttributeKind:
    return AttributeKind(int(formal.type))  # type: ignore[call-overload]  # an enum of C++


@cache
def _ports(op_type: str) -> tuple[Port, ...]:
    return tuple(
        Port(
            name=formal.name,
            # Values of a heterogeneous variadic port constrain no type of each other.
            type=formal.type_str if formal.is_homogeneous else types.ANY,
            variadic=formal.option == _FORMAL.Variadic,
            optional=formal.option == _FORMAL.Optional,
        )
        for formal in catalogue()[op_type].inputs
    )


def _peer_list_type(op_type: str, inputs: Sequence[TypeNode | None]) -> TypeNode:
    known = [None if kind is types.ANY else kind for kind in inputs]
    kind = peer_list_ops.result_type(op_type, known)
    if kind is None:
        read = peer_list_ops.data_inputs(op_type, len(known))
        got = ", ".join(each.name for i in read if (each := known[i]) is not None)
        raise BadArgument(f"{op_type} takes {peer_list_ops.accepted(op_type)}, got {got}")
    return kind


def _told(op_type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that differ from the schema's defaults."""
    defaults = _defaults(op_type)
    return {
        name: value
        for name, value in given.items()
        if value is not None and (name not in defaults or defaults[name] != value)
    }


@cache
def _defaults(op_type: str) -> Mapping[str, Any]:
    """Return the defaults of an op's attributes as Python values: 0.01 for its nearest float32."""
    defaults: dict[str, Any] = {}
    for name, formal in catalogue()[op_type].attributes.items():
        default = formal.default_value
        if default.type == AttributeProto.FLOAT:
            defaults[name] = float(f"{default.f:.7g}")
        elif default.type == AttributeProto.STRING:
            defaults[name] = default.s.decode()
        elif default.type != AttributeProto.UNDEFINED:
            defaults[name] = onnx.helper.get_attribute_value(default)
    return defaults


def is_int64(value: object) -> bool:
    """Return True if a value is an integer that an int64 tensor can hold."""
    return isinstance(value, int | np.integer) and abs(int(value)) < 1 << 63


def port_names(formals: Sequence[OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the names of the first `count` ports; those of a variadic one are numbered."""
    names: list[str] = []
    for formal in formals:
        if formal.option == _FORMAL.Variadic:
            names += [f"{formal.name}_{i}" for i in range(count - len(names))]
        else:
            names.append(formal.name)
    return names[:count]


def _output_count(schema: OpSchema, asked: int | None, attributes: Mapping[str, Any]) -> int:
    """Return the number of outputs: `asked`, or the one that the op's arguments imply."""
    always = sum(formal.option == _FORMAL.Single for formal in schema.outputs)
    count = asked
    if count is None:
        source = attributes.get(_OUTPUT_COUNTS.get(schema.name, ""))
        if isinstance(source, GraphProto | Subgraph):
            ports = source.output if isinstance(source, GraphProto) else source.outputs
            count = len(ports) - (schema.name == "Loop")  # its condition is no output
        elif isinstance(source, int):
            count = source
        elif any(formal.option == _FORMAL.Variadic for formal in schema.outputs):
            raise BadArgument(f"{schema.name} has any number of outputs; say how many: outputs=…")
        else:
            count = max(1, always)
    least = max(always, schema.min_output)
    most = min(schema.max_output, MAX_VARIADIC_OUTPUTS)
    if type(count) is not int or not least <= count <= most:
        raise BadArgument(f"{schema.name} has {least} to {most} outputs, not {count!r:.20}")
    return count


def _output_types(
    schema: OpSchema, bound: Sequence[tuple[Port, Output | None]], count: int
) -> list[TypeNode]:
    """Return the output types by the schema alone: fixed, those of inputs, or any tensor."""
    known = type_variables(bound)
    kinds: list[TypeNode] = []
    for formal in schema.outputs:
        kind = known.get(formal.type_str, types.ANY) if formal.is_homogeneous else types.ANY
        if kind.kind is not TypeKind.TENSOR:
            kind = _only_type(formal.types)
        many = formal.option == _FORMAL.Variadic
        kinds += [kind] * (count - len(kinds) if many else 1)
    return kinds[:count]


def _only_type(allowed: Iterable[str]) -> TypeNode:
    """Return the type that a set of ONNX type texts allows: one leaf, `Tensor`, or `Any`."""
    texts = set(allowed)
    if not texts or not all(text.startswith("tensor(") for text in texts):
        return types.ANY
    if len(texts) == 1:
        elem = texts.pop()[len("tensor(") : -1].upper()
        return types.type_by_id(f"{types.TENSOR.id}.{elem}") or types.TENSOR
    return types.TENSOR
