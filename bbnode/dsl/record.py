"""Recording of an op by its row in the op table.

Rule: ports, attributes and types come from `ir/opset.py`; no helper and no slot repeats them.
Every attribute is written down, defaults too, so that an artifact does not change its meaning
when a default does. Types are not compared here: that is the type solver's work, which knows
more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import AttributeProto
from onnx.defs import OpSchema

from bbnode.dsl.attributes import WrongKind, schema_attribute, table_attribute
from bbnode.dsl.errors import BadArgument
from bbnode.dsl.graph_core import GraphCore
from bbnode.dsl.names import hint
from bbnode.dsl.output import After, Output
from bbnode.dsl.slot_table import SlotUse
from bbnode.ir import opset, types
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.types import TypeNode

# Of one node: what codec.MAX_CHILDREN allows a composite to hold.
MAX_VARIADIC_OUTPUTS = 65_536


def spec_of(domain: str, op_type: str) -> OpSpec:
    """The row of an op that this package names itself."""
    spec = opset.lookup_op(domain, op_type)
    if spec is None:  # a helper without its row is a defect of ours, found by the first test
        raise LookupError(f"{domain}::{op_type} is not in the op table")
    return spec


def record(
    g: GraphCore,
    spec: OpSpec,
    inputs: Sequence[Output | None] = (),
    attributes: Mapping[str, Any] | None = None,
    *,
    slot: SlotUse | None = None,
    after: After = None,
    variadic: int | Sequence[TypeNode] = 0,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Output, ...]:
    """Record one op of the op table; gives its outputs in port order.

    Args:
        g: the Graph.
        spec: the op's row.
        inputs: one value per port, None for an optional one; a variadic port takes the rest.
        attributes: by name; those left out take their defaults.
        slot, after, metadata: as for `GraphCore.emit`.
        variadic: how many outputs a variadic port gives, or their types.

    Raises:
        BadArgument: too few or too many inputs, an unknown, missing or unfit attribute.
    """
    bound = _bind_inputs(g, spec, inputs)
    made = _attributes(g, spec, attributes or {})
    known = _variables(bound)
    count = variadic if isinstance(variadic, int) else len(variadic)
    if count > MAX_VARIADIC_OUTPUTS:
        raise g.error(
            BadArgument, f"{spec.op_type} with {count} outputs; at most {MAX_VARIADIC_OUTPUTS}"
        )
    ports: list[tuple[str, TypeNode]] = []
    for port in spec.outputs:
        kind = known.get(port.type, types.ANY) if isinstance(port.type, str) else port.type
        if not port.variadic:
            ports.append((port.name, kind))
            continue
        kinds = [kind] * variadic if isinstance(variadic, int) else variadic
        ports.extend((f"{port.name}_{i}", each) for i, each in enumerate(kinds))
    return g.emit(
        spec.domain,
        spec.op_type,
        inputs=_trimmed([value for _, value in bound]),
        outputs=ports,
        attributes=made,
        metadata=metadata,
        slot=slot,
        after=after,
        opset_version=spec.version,
    )


def _bind_inputs(
    g: GraphCore, spec: OpSpec, inputs: Sequence[Output | None]
) -> list[tuple[Port, Output | None]]:
    """Each input with its port; BadArgument when they do not fit the ports."""
    for value in inputs:
        if value is not None:
            g.value_name(value)
    fixed = [port for port in spec.inputs if not port.variadic]
    rest = next((port for port in spec.inputs if port.variadic), None)
    required = sum(not port.optional for port in fixed) + (rest is not None)
    if len(inputs) < required or (rest is None and len(inputs) > len(fixed)):
        raise g.error(
            BadArgument,
            f"{spec.op_type} takes {_ports_text(spec)}, got {len(inputs)} "
            f"value{'' if len(inputs) == 1 else 's'}",
        )
    bound = list(zip(fixed, inputs, strict=False))
    if rest is not None:
        bound.extend((rest, value) for value in inputs[len(fixed) :])
    for port, value in bound:
        if value is None and not port.optional:
            raise g.error(BadArgument, f"input {port.name!r} of {spec.op_type} can't be left out")
    return bound


def _ports_text(spec: OpSpec) -> str:
    if not spec.inputs:
        return "no values"
    marks = {True: "…", False: ""}
    listed = ", ".join(
        port.name + marks[port.variadic] + (" (optional)" if port.optional else "")
        for port in spec.inputs
    )
    return f"the values ({listed})"


def _trimmed(values: list[Output | None]) -> list[Output | None]:
    """Without the optional inputs left out at the end, as ONNX writes it."""
    while values and values[-1] is None:
        values.pop()
    return values


def _variables(bound: Sequence[tuple[Port, Output | None]]) -> dict[str, TypeNode]:
    """What the op's type variables stand for; Any where its inputs have different types."""
    known: dict[str, TypeNode] = {}
    for port, value in bound:
        if value is not None and isinstance(port.type, str):
            same = known.setdefault(port.type, value.type)
            if same is not value.type:
                known[port.type] = types.meet(same, value.type) or types.ANY
    return known


def _attributes(g: GraphCore, spec: OpSpec, given: Mapping[str, Any]) -> list[AttributeProto]:
    for name in given:
        if name not in spec.attributes:
            raise g.error(
                BadArgument,
                f"{spec.op_type} has no attribute {name!r}{hint(name, spec.attributes)}",
            )
    made = []
    for name, default in spec.attributes.items():
        value = given.get(name, default)
        if value is opset.REQUIRED:
            raise g.error(BadArgument, f"{spec.op_type} needs the attribute {name}=…")
        try:
            kind = spec.kinds.get(name)
            if kind is not None:
                made.append(schema_attribute(name, value, OpSchema.AttrType(kind)))  # type: ignore[call-arg]
                continue
            made.append(
                table_attribute(name, value, None if default is opset.REQUIRED else default)
            )
        except WrongKind as error:
            raise g.error(
                BadArgument, f"{name}={value!r:.60} of {spec.op_type} has to be {error}"
            ) from error
    return made
