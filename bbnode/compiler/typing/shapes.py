"""Shapes of values: declared and inferred ones.

Rule: as for types, ONNX's own inference determines the outputs of an `ai.onnx` op. Two
declarations of one value must agree; a length is more specific than a name, and a name more than
nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bbnode.compiler.analysis.signatures import versions_of
from bbnode.compiler.errors import ShapeContradiction, Where
from bbnode.compiler.typing import onnx_types
from bbnode.compiler.typing.onnx_types import MAX_INFERRED_ELEMENTS, InferenceFailed
from bbnode.components.contracts import ModelShapes
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import (
    Function,
    FunctionKey,
    OpNode,
    Program,
    Tensor,
    ValueType,
    call_key,
    is_onnx_op,
    is_wire,
)
from bbnode.ir.shapes import Dim, ShapesDiffer, merge_shapes, shape_text
from bbnode.ir.types import TypeKind

Shape = tuple[Dim, ...]


def take_shape(function: Function, at: OpNode, name: str, declared: ValueType) -> None:
    """Merge shape and denotation of a second declaration into a value's declaration.

    Raises ShapeContradiction, at the op with the second one.
    """
    before = function.types.get(name)
    if before is None or before.kind is None or declared.kind is None:
        return
    shape = merged(function, at, name, before.shape, declared.shape)
    source = before if before.shape is not None or before.denotation else declared
    function.types[name] = source.narrowed(before.kind, shape)


def merged(
    function: Function, at: OpNode, name: str, known: Shape | None, other: Shape | None
) -> Shape | None:
    """Return the shape that two declarations of a value imply. Raises ShapeContradiction."""
    try:
        return merge_shapes(known, other)
    except ShapesDiffer:
        raise ShapeContradiction(
            op=at.name,
            detail=f"{name!r} is {shape_text(known or ())}{line_of(function, name, at)}, and "
            f"{shape_text(other or ())} at {at.op_type}",
            where=Where.of(at),
        ) from None


def line_of(function: Function, name: str, beside: OpNode | None = None) -> str:
    """Return ` (at <file>:<line>)` of a value's declaration or maker, "" if unknown."""
    note = function.notes.get(name)
    line = "" if note is None else note.metadata.get(keys.SOURCE_LINE_KEY, "")
    maker = function.producer(name)
    if not line and maker is not None and maker is not beside:
        line = maker.source_line
    return f" (at {line})" if line else ""


def sends_by_port(nodes: Iterable[OpNode]) -> dict[str, list[OpNode]]:
    """Map the name of each Send to all Sends of its port, whichever class they go to."""
    ports: dict[str, list[OpNode]] = {}
    for node in nodes:
        if is_wire(node, keys.OP_SEND) and node.outputs:
            ports.setdefault(node.metadata.get(keys.FAN_IN_KEY) or node.outputs[0], []).append(node)
    return {node.name: members for members in ports.values() for node in members}


@dataclass(frozen=True, slots=True)
class _Held:
    """A part of a value: its shape, and if it is there in encoded form."""

    shape: Shape | None
    is_code: bool


class FunctionShapes:
    """The shapes of one function's values; `solve` finds them.

    Attributes:
        found: known shapes, by value.
    """

    def __init__(
        self, function: Function, program: Program, models: Mapping[str, ModelShapes] | None = None
    ) -> None:
        """Start with the declared shapes.

        `models` are the shapes of models, by slot: with them shapes are also propagated through
        codecs and bundles, so that `crossing` can describe what is sent.
        """
        self.function = function
        self.found: dict[str, Shape] = {
            name: declared.shape
            for name, declared in function.types.items()
            if declared.shape is not None
        }
        self._constants: dict[str, Tensor] = {}
        self._models = models or {}
        # Values that are no plain tensors -> the tensor that a code encodes, or a bundle's parts.
        self._held: dict[str, tuple[_Held, ...]] = {}
        self._versions = versions_of(function, program)
        self._ir_version = program.ir_version

    def solve(
        self, order: Sequence[OpNode], callees: Mapping[FunctionKey, FunctionShapes],
        shared: Mapping[str, Sequence[OpNode]],
    ) -> None:  # fmt: skip
        """Infer the shapes of each op's outputs.

        Args:
            order: the function's nodes, in topological order.
            callees: solved shapes of the functions that it calls.
            shared: all sends of a shared port, by the name of each of them.

        Raises ShapeContradiction.
        """
        for node in order:
            callee = callees.get(call_key(node))
            if callee is not None:
                self._call(node, callee)
            elif is_onnx_op(node):
                self._onnx(node)
            elif len(shared.get(node.name, ())) > 1:
                self._one_of_several(node, shared[node.name][0])
            else:
                self._by_table(node)

    def _take(self, node: OpNode, name: str, shape: Shape | None) -> None:
        if not name or shape is None:
            return
        known = merged(self.function, node, name, self.found.get(name), shape)
        if known is not None:
            self.found[name] = known

    def _call(self, node: OpNode, callee: FunctionShapes) -> None:
        for actual, formal in zip(node.inputs, callee.function.inputs, strict=False):
            if actual:  # the callee's input determines the argument's shape
                self._take(node, actual, callee.found.get(formal))
        for actual, formal in zip(node.outputs, callee.function.outputs, strict=False):
            self._take(node, actual, callee.found.get(formal))

    def _one_of_several(self, node: OpNode, first: OpNode) -> None:
        """Check one send of a shared port against the shape that the author declared there."""
        declared = self.function.types.get(first.outputs[0])
        if declared is not None and node.inputs:
            sent = self.found.get(node.inputs[0])
            merged(self.function, node, first.outputs[0], declared.shape, sent)

    def _by_table(self, node: OpNode) -> None:
        """Infer ops that pass a value on, and constants."""
        spec = opset.lookup_op(node.domain, node.op_type)
        if spec is None:
            return
        value = node.attributes.get("value")
        if node.op_type == "Constant" and value is not None and isinstance(value.value, Tensor):
            self._constant(node, value.value)
            return
        if self._models:
            self._of_models(node)
            self._holds(node)
        read: dict[str, list[str]] = {}
        for port, name in zip(spec.inputs, node.inputs, strict=False):
            if isinstance(port.type, str) and name:
                read.setdefault(port.type, []).append("" if port.variadic else name)
        for index, name in enumerate(node.outputs):
            port = spec.outputs[min(index, len(spec.outputs) - 1)]
            sources = read.get(port.type, ()) if isinstance(port.type, str) else ()
            if len(sources) == 1 and name:
                self._pass_on(node, sources[0], name)

    def _of_models(self, node: OpNode) -> None:
        """Infer ops of a model with known shapes: vectors, outputs, gradients by inputs."""
        shapes = self._models.get(node.metadata.get(keys.SLOT_KEY, ""))
        if shapes is None or node.domain != keys.role_domain("Model"):
            return
        vectors = opset.model_vectors(node.domain, node.op_type, node.inputs, node.outputs)
        for name in itertools.chain(*vectors):
            self._take(node, name, (shapes.parameters,))
        if node.op_type == "Forward":
            self._take(node, node.outputs[0], shapes.output)
        elif node.op_type == "GradientWithInput" or node.attr("to_input"):
            self._take(node, node.outputs[1], self.found.get(node.inputs[0]))

    def _holds(self, node: OpNode) -> None:
        """Infer ops of codecs and of bundles."""
        source, *_ = (*node.inputs, "")
        if node.domain == keys.role_domain("Codec") and node.outputs:
            if node.op_type == "Encode":
                self._held[node.outputs[0]] = (_Held(self.found.get(source), is_code=True),)
            elif node.op_type == "Decode" and len(self._held.get(source, ())) == 1:
                self._take(node, node.outputs[0], self._held[source][0].shape)
        elif node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_BUNDLE:
            parts = tuple(map(self._part, node.inputs))
            self._held.update((name, parts) for name in node.outputs)
        elif node.domain == keys.COMPOSITE_DOMAIN and node.op_type == keys.OP_UNBUNDLE:
            for name, part in zip(node.outputs, self._held.get(source, ()), strict=False):
                if part.is_code:
                    self._held[name] = (part,)
                else:
                    self._take(node, name, part.shape)

    def _part(self, name: str) -> _Held:
        held = self._held.get(name, ())
        return held[0] if len(held) == 1 else _Held(self.found.get(name), is_code=False)

    def crossing(self, value: str) -> str:
        """Return the shape of a sent value, or of each part of a bundle, as text; "" if unknown."""
        parts = self._held.get(value) or (self._part(value),)
        if all(part.shape is None for part in parts):
            return ""
        # Names of axes are arbitrary; only lengths are compared.
        return ", ".join(
            "?"
            if part.shape is None
            else shape_text([axis if isinstance(axis, int) else None for axis in part.shape])
            for part in parts
        )

    def _pass_on(self, node: OpNode, source: str, name: str) -> None:
        if source in self._held:
            self._held[name] = self._held[source]
        shape = self.found.get(source)
        if shape is None:
            return
        declared = self.found.get(name)
        try:
            merge_shapes(declared, shape)
        except ShapesDiffer:
            does = "delivers" if is_wire(node) else "hands on"
            passed = f"{shape_text(shape)}{line_of(self.function, source, node)}"
            raise ShapeContradiction(
                op=node.name,
                detail=f"{name!r} is declared {shape_text(declared or ())}, and {node.op_type} "
                f"{does} {source!r}, which is {passed}",
                where=Where.of(node),
            ) from None
        self._take(node, name, shape)

    def _constant(self, node: OpNode, tensor: Tensor) -> None:
        if math.prod(tensor.shape) <= MAX_INFERRED_ELEMENTS and not tensor.is_sparse:
            self._constants.update((name, tensor) for name in node.outputs)
        for name in node.outputs:
            self._take(node, name, tensor.shape)

    def _onnx(self, node: OpNode) -> None:
        value = node.attributes.get("value")
        if node.op_type == "Constant" and value is not None and isinstance(value.value, Tensor):
            self._constant(node, value.value)
            return
        names = node.computes_with
        known = {name: self._type_of(name) for name in names}
        if any(kind is None for kind in known.values()):
            return  # it moves peers, or has types outside our lattice
        if names and not any(name in self.found for name in names):
            return
        typed = {name: kind for name, kind in known.items() if kind is not None}
        try:
            inferred = onnx_types.infer_shapes(
                node, typed, self._constants, self._versions, self._ir_version
            )
        except InferenceFailed as error:
            if self._fails_without_shapes(node, typed):
                return  # not for its shapes
            read = " and ".join(
                f"{name!r}, which is {shape_text(self.found[name])}{line_of(self.function, name)}"
                for name in dict.fromkeys(names)
                if name in self.found
            )
            raise ShapeContradiction(
                op=node.name,
                detail=f"{node.op_type} can't take {read}: {error}",
                where=Where.of(node),
            ) from error
        for name, shape in inferred.items():
            declared = self.found.get(name)
            try:
                merge_shapes(declared, shape)
            except ShapesDiffer:
                raise ShapeContradiction(
                    op=node.name,
                    detail=f"{name!r} is declared {shape_text(declared or ())}"
                    f"{line_of(self.function, name, node)}, and {node.op_type} makes "
                    f"{shape_text(shape)}",
                    where=Where.of(node),
                ) from None
            self._take(node, name, shape)

    def _fails_without_shapes(self, node: OpNode, typed: Mapping[str, ValueType]) -> bool:
        bare = {name: ValueType.of(kind.kind or types.ANY) for name, kind in typed.items()}
        try:
            onnx_types.infer_shapes(node, bare, {}, self._versions, self._ir_version)
        except InferenceFailed:
            return True
        return False

    def _type_of(self, name: str) -> ValueType | None:
        """Return the type of a tensor with its known shape; None for other values."""
        declared = self.function.types.get(name)
        if declared is None or declared.kind is None or declared.is_foreign:
            return None
        if declared.kind.kind is not TypeKind.TENSOR:
            return None
        shape = self.found.get(name)
        return ValueType.of(declared.kind) if shape is None else ValueType.of(declared.kind, shape)
