"""Recording a part of an ONNX model into a Graph.

Rule: every op becomes one op of the backend slot, in the model's order; weights become
`Constant`s just before the first op that reads them, so that a backend takes them into its
graph once and no call copies them. Only names change: they are the recorder's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import onnx
from onnx import AttributeProto, NodeProto, TensorProto

from bbnode.dsl import onnx_walk
from bbnode.dsl.backend.slot import BackendSlot
from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.core.names import MAX_NAME_LENGTH
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.onnx.graph import Part
from bbnode.ir import keys, protos, types

_FOREIGN_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_MAX_SCOPES = 8  # exporters nest module paths; the outermost ones tell a reader enough


@dataclass(frozen=True, slots=True, kw_only=True)
class PortNames:
    """What the inputs and outputs of a part are called as ports of a Module, by ONNX name."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def port_names(inputs: Iterable[str], outputs: Iterable[str]) -> PortNames:
    """A name that a port may have for each value, all of them different.

    Other characters become `_`, a digit in front gets one before it, and what is taken gets a
    number behind.
    """
    taken: set[str] = set()
    return PortNames(
        inputs={name: _free_name(name, taken) for name in inputs},
        outputs={name: _free_name(name, taken) for name in outputs},
    )


def _free_name(name: str, taken: set[str]) -> str:
    base = clean_name(name) or "value"
    free = base
    for number in count(2):
        if free not in taken:
            break
        tail = f"_{number}"
        free = base[: MAX_NAME_LENGTH - len(tail)] + tail
    taken.add(free)
    return free


def clean_name(text: str) -> str:
    """The text as a name; empty when nothing of it is left."""
    cleaned = _FOREIGN_CHARACTER.sub("_", text[:MAX_NAME_LENGTH]).lstrip("-")
    if not cleaned.strip("_-"):
        return ""
    return f"_{cleaned}"[:MAX_NAME_LENGTH] if cleaned[0].isdigit() else cleaned


def record_part(g: Graph, part: Part, slot: BackendSlot, ports: PortNames) -> None:
    """Record a part as the body of a Module."""
    _Recording(g, part, slot).run(ports)


class _Recording:
    def __init__(self, g: Graph, part: Part, slot: BackendSlot) -> None:
        self._g = g
        self._part = part
        self._graph = part.graph
        self._use = SlotUse(name=slot.name, role=slot.ROLE, concrete=slot.concrete)
        self._known: dict[str, Output] = {}
        self._numbers = count()
        self._first_input: Output | None = None

    def run(self, ports: PortNames) -> None:
        part = self._part
        for name in part.inputs:
            self._known[name] = self._g.input(
                ports.inputs[name], self._graph.kinds.get(name, types.ANY)
            )
        if part.inputs:
            self._first_input = self._known[part.inputs[0]]
        fixed = self._graph.fixed_for(part.nodes, part.outputs)
        for index in sorted({*part.nodes, *fixed}):
            self._record(index)
        for name in part.outputs:
            # What is made of weights alone comes out when the rest does, and where it does.
            waits = self._first_input if self._graph.is_fixed_value(name) else None
            self._g.output(ports.outputs[name], self._value(name), after=waits)

    def _record(self, index: int) -> None:
        node = self._graph.nodes[index]
        reads = self._graph.reads[index]
        outer = {name: self._value(name).name for name in reads}
        domain = "" if protos.is_onnx_domain(node.domain) else node.domain
        version = self._graph.opsets.get(domain, keys.ONNX_OPSET_VERSION)
        # An op that reads nothing and is no constant draws: it does so once per input.
        waits = None if reads or self._graph.fixed[index] else self._first_input
        names = list(node.output)
        while len(names) > 1 and not names[-1]:
            names.pop()
        labels = _output_ports(node, version, len(names))
        with ExitStack() as scopes:
            for scope in scopes_of(node.name):
                scopes.enter_context(self._g.with_module(scope))
            made = self._g.emit(
                domain,
                node.op_type,
                inputs=_trimmed([self._known[name] if name else None for name in node.input]),
                outputs=[
                    (label, self._graph.kinds.get(name, types.ANY))
                    for label, name in zip(labels, names, strict=True)
                ],
                attributes=[copied_attribute(a, outer, self._fresh) for a in node.attribute],
                slot=self._use,
                after=waits,
                opset_version=version,
            )
        self._known.update((name, value) for name, value in zip(names, made, strict=True) if name)

    def _value(self, name: str) -> Output:
        """A value that is there, or a weight, which is recorded now."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._record_weight(name)
        return found

    def _record_weight(self, name: str) -> Output:
        tensor = self._graph.weights[name]
        if isinstance(tensor, TensorProto):
            bare = TensorProto()
            bare.CopyFrom(tensor)
            bare.ClearField("name")
            bare.ClearField("doc_string")
            attribute = onnx.helper.make_attribute("value", bare)
            kind = types.TENSOR_BY_ELEM.get(tensor.data_type, types.ANY)
        else:
            attribute = onnx.helper.make_attribute("sparse_value", tensor)
            kind = types.TENSOR_BY_ELEM.get(tensor.values.data_type, types.ANY)
        (made,) = self._g.emit(
            "",
            "Constant",
            outputs=(("output", kind),),
            attributes=(attribute,),
            slot=self._use,
            opset_version=keys.ONNX_OPSET_VERSION,
        )
        return made

    def _fresh(self) -> str:
        """A name inside of a nested graph; no recorded value has one without an op before it."""
        return f"inner.{next(self._numbers)}"


def copied_attribute(
    attribute: AttributeProto, outer: Mapping[str, str], fresh: Callable[[], str]
) -> AttributeProto:
    """A copy whose graphs, if any, read captured values as `outer` calls them."""
    copy = AttributeProto()
    copy.CopyFrom(attribute)
    copy.ClearField("doc_string")
    if copy.HasField("g"):
        copy.g.CopyFrom(onnx_walk.rename_graph(attribute.g, outer, fresh))
    for index, graph in enumerate(attribute.graphs):
        copy.graphs[index].CopyFrom(onnx_walk.rename_graph(graph, outer, fresh))
    return copy


def _trimmed(values: list[Output | None]) -> list[Output | None]:
    while values and values[-1] is None:
        values.pop()
    return values


def _output_ports(node: NodeProto, version: int, number: int) -> list[str]:
    """Names of the first outputs by the op's schema; those of a variadic one are numbered."""
    domain = "" if protos.is_onnx_domain(node.domain) else node.domain
    labels: list[str] = []
    for formal in onnx.defs.get_schema(node.op_type, version, domain).outputs:
        if formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
            labels += [f"{formal.name}_{i}" for i in range(number - len(labels))]
        else:
            labels.append(formal.name)
    return labels[:number]


def scopes_of(name: str) -> list[str]:
    """Where an exporter says that an op comes from: `/layers.0/attn/MatMul` is in layers_0/attn."""
    parts = [clean_name(part) for part in name.split("/")[:-1]]
    return [part for part in parts if part][:_MAX_SCOPES]
