"""Copies of ops into a Graph, from an ONNX model or from a recorded program.

Rule: only names change, to the recorder's own, also inside the graphs of If, Loop and Scan;
texts and metadata that do not affect the computation are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import count

from onnx import TensorProto

from bbnode.dsl.backend.catalogue import port_names
from bbnode.dsl.core.graph import After, Graph, Output
from bbnode.dsl.core.names import MAX_NAME_LENGTH
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BrokenArtifact
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import (
    Attribute,
    AttributeKind,
    OpNode,
    Subgraph,
    Tensor,
    ValueType,
    is_onnx_domain,
)
from bbnode.ir.onnx_file import annotated, annotations_of, onnx_schema
from bbnode.ir.types import TypeNode

_FOREIGN_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_MAX_SCOPES = 8  # exporters nest module paths; the outermost ones are enough for a reader


def clean_name(text: str) -> str:
    """Return the text as a valid name, "" if no character of it is valid."""
    cleaned = _FOREIGN_CHARACTER.sub("_", text[:MAX_NAME_LENGTH]).lstrip("-")
    if not cleaned.strip("_-"):
        return ""
    return f"_{cleaned}"[:MAX_NAME_LENGTH] if cleaned[0].isdigit() else cleaned


class NodeCopier:
    """Records nodes of another body into a Graph.

    Attributes:
        g: the Graph.
        kinds: types of the other body's values.
        declared: types with shapes and denotations, for values whose shapes are recorded too.
        known: recorded value, by its name in the other body.
    """

    def __init__(
        self, g: Graph, kinds: Mapping[str, TypeNode],
        declared: Mapping[str, ValueType] | None = None,
    ) -> None:  # fmt: skip
        self.g = g
        self.kinds = kinds
        self.declared = declared or {}
        self.known: dict[str, Output] = {}
        self._numbers = count()

    def value(self, name: str, reader: str) -> Output:
        """Return a recorded value. Raises BrokenArtifact if no value has that name."""
        recorded = self.known.get(name)
        if recorded is None:
            raise BrokenArtifact(
                f"{reader or 'an op'!r:.80} reads {name!r:.80}, which nothing before it makes; "
                "record or compile the program again"
            )
        return recorded

    def input(self, name: str, port: str) -> None:
        """Make a value an input of the Graph."""
        recorded = self.known[name] = self.g.input(port, self.kinds.get(name, types.ANY))
        self._declare(name, recorded)

    def _declare(self, name: str, made: Output) -> None:
        declared = self.declared.get(name)
        if declared is not None:
            self.g.declare_as(made, declared)

    @contextmanager
    def scopes_of(self, node: OpNode) -> Iterator[None]:
        """Record in the scopes of the node's name: layers_0 and attn for `/layers.0/attn/Add`."""
        parts = [clean_name(part) for part in node.name.split("/")[:-1]]
        with ExitStack() as scopes:
            for part in [part for part in parts if part][:_MAX_SCOPES]:
                scopes.enter_context(self.g.with_module(part))
            yield

    def copy(
        self, node: OpNode, version: int, *, slot: SlotUse | None, after: After,
        metadata: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Record one node; `version` is its domain's opset version."""
        outer = {name: self.value(name, node.name).name for name in node.computes_with}
        inputs = [self.value(name, node.name) if name else None for name in node.inputs]
        outputs = list(node.outputs)
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        labels, least = _ports(node, version, len(outputs))
        while len(inputs) > least and inputs[-1] is None:
            inputs.pop()
        kinds = [self.kinds.get(name, types.ANY) for name in outputs]
        outputs_ = self.g.emit(
            "" if is_onnx_domain(node.domain) else node.domain,
            node.op_type,
            inputs=inputs,
            outputs=list(zip(labels, kinds, strict=True)),
            attributes=_renamed_attributes(node, outer, self._fresh),
            metadata=metadata,
            slot=slot,
            after=after,
            opset_version=version,
        )
        self.g.last_node.extras = node.extras
        for name, value in zip(outputs, outputs_, strict=True):
            if name:
                self.known[name] = value
                self._declare(name, value)

    def _fresh(self) -> str:
        """Return a name for a value inside a nested graph, which no recorded value has."""
        return f"inner.{next(self._numbers)}"


def _ports(node: OpNode, version: int, number: int) -> tuple[Sequence[str], int]:
    """Return the names of the op's first output ports, and its minimum number of inputs."""
    labels: list[str] = []
    least = len(node.inputs)
    spec = opset.lookup_op(node.domain, node.op_type)
    if spec is not None:
        for port in spec.outputs:
            rest = number - len(labels)
            labels += [f"{port.name}_{i}" for i in range(rest)] if port.variadic else [port.name]
    elif is_onnx_domain(node.domain) or node.domain == keys.ONNX_ML_DOMAIN:
        domain = "" if is_onnx_domain(node.domain) else node.domain
        schema = onnx_schema(node.op_type, version, domain)
        if schema is None:
            raise BrokenArtifact(f"ONNX has no op {node.op_type!r} at opset {version}")
        labels = port_names(schema.outputs, number)
        least = schema.min_input
    labels += [f"value_{i}" for i in range(len(labels), number)]
    return labels[:number], least


def _renamed_attributes(
    node: OpNode, outer: Mapping[str, str], fresh: Callable[[], str]
) -> dict[str, Attribute]:
    """Return a node's attributes, with renamed values in their graphs.

    Captured values are renamed by `outer`, the graphs' own ones get names from `fresh`. Texts and
    metadata that do not affect the computation are left out.
    """
    renamed: dict[str, Attribute] = {}
    for name, attribute in node.attributes.items():
        graphs = tuple(_renamed(graph, outer, fresh) for graph in attribute.graphs)
        value = attribute.value
        if graphs:
            value = graphs if attribute.kind is AttributeKind.GRAPHS else graphs[0]
        renamed[name] = Attribute(attribute.kind, value)
    return renamed


def _renamed(graph: Subgraph, outer: Mapping[str, str], fresh: Callable[[], str]) -> Subgraph:
    own = (*graph.inputs, *graph.initializers, *(n for node in graph.nodes for n in node.outputs))
    names = {**outer, **{name: fresh() for name in dict.fromkeys(own) if name}}
    copied = Subgraph(
        name=graph.name,
        inputs=[names[name] for name in graph.inputs],
        outputs=[names.get(name, name) for name in graph.outputs],
        initializers={
            names[name]: bare_tensor(tensor, names[name])
            for name, tensor in graph.initializers.items()
        },
    )
    # Inference determines the other types again, under the new names.
    for name in (*graph.inputs, *graph.outputs):
        if name in graph.types:
            copied.types[names.get(name, name)] = graph.types[name]
    for node in graph.nodes:
        copy = OpNode(
            node.op_type,
            node.domain,
            inputs=[names.get(name, name) for name in node.inputs],
            outputs=[names.get(name, name) for name in node.outputs],
            attributes=_renamed_attributes(node, names, fresh),
            overload=node.overload,
        )
        copy.extras = node.extras
        copied.append(copy)
    if graph.extras:
        annotated(
            copied,
            {
                names.get(value, value): {key: names.get(name, name) for key, name in held.items()}
                for value, held in annotations_of(graph).items()
            },
        )
    return copied


def bare_tensor(tensor: Tensor, name: str = "") -> Tensor:
    """Return a copy of a tensor under another name, without texts."""
    copy = deepcopy(tensor.proto)
    dense = copy if isinstance(copy, TensorProto) else copy.values
    dense.ClearField("doc_string")
    dense.ClearField("name")
    if name:
        dense.name = name
    return Tensor(copy)
