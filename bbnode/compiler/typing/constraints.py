"""The type constraints of one function.

Rule: ops are turned into constraints here; the network stores constraints, and the pass decides
the order in which they are solved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from onnx import TypeProto

from bbnode.compiler.analysis.order import split_names
from bbnode.compiler.analysis.signatures import canonical, versions_of
from bbnode.compiler.analysis.slots import ALL_PORTS, component_of, stored_at
from bbnode.compiler.errors import IncompatibleStorageOnEdge, TypeConstraintFailed, Where
from bbnode.compiler.typing import onnx_types
from bbnode.compiler.typing.onnx_types import InferenceFailed, OpRule
from bbnode.compiler.typing.peer_lists import Works, may_move_peers, narrowings, refusal, works
from bbnode.compiler.unit import SlotBinding
from bbnode.components.contracts import Aggregator
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
    is_role,
    is_wire,
)
from bbnode.ir.onnx_file import type_of
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.types import TypeNode

# Ops on values that a node stores under a name -> the attribute that holds the name.
STORE_NAMES = {
    "Hold.Stash": "slot",
    "Hold.Flush": "slot",
    "Serialize.Enqueue": "queue",
    "Serialize.Dequeue": "queue",
}

_HOLD_ANSWERS = (types.RESPONSE_BATCH, types.WIRE_REQUEST_ID)
# Ops whose attribute `to` names the type of their output.
_TO_OPS = frozenset({
    (keys.TYPES_DOMAIN, "Cast"), (keys.RESPONSES_DOMAIN, "Entry"), (keys.SEARCH_DOMAIN, "Entry"),
})  # fmt: skip
# Remedies for answers that are no tensors, by the name of their type.
_REMEDIES = {
    types.COMPOSITE.name: "open answers that are bundles with `.unbundled([…])` first",
    types.METADATA.name: "take numbers of answers that are Metadata with `.entry(name)`",
    types.SEARCH_RESULTS.name: "take answers that are SearchResults together with `.merged()`",
}
_AGGREGATOR = keys.role_domain("Aggregator")
_CODEC = keys.role_domain("Codec")


class FunctionTypes:
    """One function's values in the network, and the constraints of its ops."""

    def __init__(
        self,
        function: Function,
        program: Program,
        network: TypeNetwork,
        bound: Mapping[str, SlotBinding],
    ) -> None:
        self.function = function
        self._bound = bound
        self._network = network
        self._ir_version = program.ir_version
        self._versions = versions_of(function, program)
        self._declared: dict[str, TypeNode | None] = {}
        self._ids: dict[str, int] = {}
        self._to_infer: list[OpNode] = []
        self._graph_ops: list[tuple[OpNode, list[tuple[str, onnx_types.PortRule]]]] = []
        self._movers: list[OpNode] = []  # ops on peers or tensors, still undetermined
        # An op that ties a sequence to its elements, and the numbers of both.
        self._sequences: list[tuple[OpNode, int, int]] = []
        self._leaves: dict[
            str, TypeNode | None
        ] = {}  # once solved: leaf types, None for other types
        self.stores: list[
            OpNode
        ] = []  # ops on values that the node stores under a name (`stored.py`)
        for name, declared in function.types.items():
            kind = declared.kind
            self._declared[name] = kind
            self._ids[name] = network.add(kind or types.ANY, foreign=declared.is_foreign)

    def id_of(self, value: str) -> int:
        """Return the value's number in the network; each omitted value gets a fresh one."""
        if not value:
            return self._network.add(types.ANY)
        number = self._ids.get(value)
        if number is None:
            number = self._ids[value] = self._network.add(types.ANY)
        return number

    def id_at(self, values: Sequence[str], index: int = 0) -> int:
        """Return the number of one of an op's inputs or outputs, which may be omitted."""
        return self.id_of(values[index] if index < len(values) else "")

    # --- collecting -----------------------------------------------------------------------

    def constrain(self, functions: Mapping[FunctionKey, FunctionTypes]) -> None:
        """Add the constraints of every op."""
        ids, called = self._ids, {name for _, name, _ in functions}
        for name in self.function.inputs:
            self.id_of(name)
        for node in self.function.nodes:
            for name in node.outputs:
                if name and name not in ids:
                    self.id_of(name)
            self._network.at = node
            callee = functions.get(call_key(node)) if node.op_type in called else None
            try:
                self._constrain(node, callee)
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict

    def _constrain(self, node: OpNode, callee: FunctionTypes | None) -> None:
        spec = opset.lookup_op(node.domain, node.op_type)
        if callee is not None:
            self._constrain_call(node, callee)
        elif spec is not None:
            self._constrain_by_table(node, spec)
        elif is_onnx_op(node):
            if not may_move_peers(node):
                self._constrain_by_schema(node)
            elif self._constrain_mover(node) is not Works.ON_TENSORS:
                self._movers.append(node)

    def _constrain_call(self, node: OpNode, callee: FunctionTypes) -> None:
        formals = (callee.function.inputs, callee.function.outputs)
        for actual_names, formal_names in zip((node.inputs, node.outputs), formals, strict=True):
            for actual, formal in zip(actual_names, formal_names, strict=False):
                if actual:
                    self._network.unite(self.id_of(actual), callee.id_of(formal))

    def _constrain_by_table(self, node: OpNode, spec: OpSpec) -> None:
        if spec.op_type in STORE_NAMES and spec.domain == keys.SYSCALL_DOMAIN:
            self.stores.append(node)
        variables: dict[str, int] = {}
        for names, ports in ((node.inputs, spec.inputs), (node.outputs, spec.outputs)):
            for name, port in _at_ports(names, ports):
                if name.startswith(keys.SEND_SENTINEL_PREFIX):
                    continue  # a synthesised Send has it in place of its recorded outputs
                self._fit(node, self.id_of(name), port, variables, ())
        for name, kind in _from_attributes(node) if node.attributes else ():
            self._network.narrow(self.id_of(name), kind)
        domain = node.domain
        if domain == _AGGREGATOR and node.op_type == "ContributeAll":
            self._fit(node, self.id_at(node.inputs), self._contributed(node), variables, ())
        elif domain == keys.RESPONSES_DOMAIN and node.op_type == keys.OP_UNBUNDLE:
            self._unbundle_answers(node)
        elif domain == _CODEC and node.op_type == "DecodeAll":
            self._decode_answers(node)
        elif domain == keys.COMPOSITE_DOMAIN:
            whole, parts = node.outputs, node.inputs
            if node.op_type == keys.OP_UNBUNDLE:
                whole, parts = node.inputs, node.outputs
            self._network.compose(self.id_at(whole), [self.id_of(part) for part in parts])
        elif domain == keys.WIRE_DOMAIN and keys.FAN_IN_KEY in node.metadata:
            joined = node.metadata[keys.FAN_IN_KEY]  # all sends of one port carry one type
            self._network.unite(self.id_of(joined), self.id_at(node.inputs))

    def _fit(
        self,
        node: OpNode,
        number: int,
        port: Port,
        variables: dict[str, int],
        within: tuple[str, ...],
    ) -> None:
        """Constrain a value to its port's type, and its parts to the port's parts."""
        network = self._network
        if isinstance(port.type, TypeNode):
            network.narrow(number, port.type, within)
        else:
            network.unite(variables.setdefault(port.type, number), number, within)
            network.narrow(number, port.bound, within)
        if port.type is types.TENSOR and node.domain == _AGGREGATOR:
            self._fit_aggregated(node, number, port, within)
        if port.parts:
            parts = [network.add(types.ANY) for _ in port.parts]
            if port.type is types.SEQUENCE:
                self._sequences.append((node, number, parts[0]))
            else:
                network.compose(number, parts, within)
            for index, (part, inner) in enumerate(zip(parts, port.parts, strict=True)):
                at = (*within, _part_name(port.type, index))
                self._fit(node, part, inner, variables, at)

    def _unbundle_answers(self, node: OpNode) -> None:
        """Constrain each output to a batch of one part of the answers."""
        network = self._network
        answer = network.add(types.COMPOSITE)
        parts = [network.add(types.ANY) for _ in node.outputs]
        network.compose(answer, parts)
        network.compose(self.id_at(node.inputs), [answer])
        declared = dict(_listed(node.outputs, node.attr("child_types", b"")))
        for index, (name, part) in enumerate(zip(node.outputs, parts, strict=True)):
            network.narrow(
                part, declared.get(name, types.ANY), (_part_name(types.COMPOSITE, index),)
            )
            network.compose(self.id_of(name), [part])

    def _decode_answers(self, node: OpNode) -> None:
        """Unite the answers on both sides, except decoded parts, which have the codec's types."""
        network = self._network
        component = component_of(node, self._bound)
        sides = (self.id_at(node.inputs), self.id_at(node.outputs))
        given = node.attr("parts", b"")
        marks = given.decode(errors="replace") if isinstance(given, bytes) else ""
        told = node.metadata.get(keys.DECODED_TYPES_KEY, "").split(",")

        def coded(index: int) -> tuple[int, int]:
            within = (_part_name(types.COMPOSITE, index),) if marks else ()
            said = types.type_by_id(told[index]) if index < len(told) else None
            numbers = network.add(types.TENSOR), network.add(types.TENSOR)
            for number, port in zip(numbers, ("code", "tensor"), strict=True):
                storage = {} if component is None else component.storage
                kind = storage.get(f"Decode.{port}", storage.get(ALL_PORTS))
                if isinstance(kind, TypeNode):
                    network.narrow(number, kind, (*within, "the answers"))
            network.narrow(numbers[1], said or types.TENSOR, (*within, "the answers"))
            return numbers

        if not marks:
            answers = coded(0)
        else:
            same = [network.add(types.ANY) for _ in marks]
            parts = [
                coded(i) if mark == "1" else (same[i], same[i]) for i, mark in enumerate(marks)
            ]
            answers = network.add(types.COMPOSITE), network.add(types.COMPOSITE)
            for answer, each in zip(answers, zip(*parts, strict=True), strict=True):
                network.compose(answer, each)
        for side, answer in zip(sides, answers, strict=True):
            network.compose(side, [answer])

    def _contributed(self, node: OpNode) -> Port:
        """Return the answers that the aggregator's class accepts, as a port."""
        whole = Port(name="responses", type=types.RESPONSE_BATCH)
        component = component_of(node, self._bound)
        if component is None or not issubclass(component, Aggregator):
            return whole
        kinds = component.answers
        if isinstance(kinds, TypeNode):
            answer = Port(name="responses", type=kinds)
        else:
            parts = tuple(Port(name="responses", type=kind) for kind in kinds)
            answer = Port(name="responses", type=types.COMPOSITE, parts=parts)
        return dataclasses.replace(whole, parts=(answer,))

    def _fit_aggregated(
        self, node: OpNode, number: int, port: Port, within: tuple[str, ...]
    ) -> None:
        """Constrain an aggregator's port.

        Tensors have the type that the component stores; if it declares none, an aggregate has the
        type of the contributions.
        """
        component = component_of(node, self._bound)
        leaf = None if component is None else stored_at(node, port, component.storage)
        if isinstance(leaf, TypeNode) and leaf.is_leaf:
            self._network.narrow(number, leaf, within)
        else:
            slot = self._network.of_slot(node.metadata.get(keys.SLOT_KEY, ""))
            self._network.unite(slot, number, within)

    def _constrain_by_schema(self, node: OpNode) -> None:
        domain = canonical(node.domain)
        rule = onnx_types.rule_of(domain, node.op_type, self._versions.get(domain, 0))
        if rule is None:
            return
        values = _graph_values(node, rule)
        self._graph_ops.append((node, values))
        variables: dict[str, int] = {}
        for name, port in values:
            number = self.id_of(name)
            if port.variable is not None:
                first = variables.setdefault(port.variable, number)
                if first != number:
                    self._network.unite(first, number)
            if port.only is not None:
                self._network.narrow(number, port.only)
        if rule.open_outputs:
            self._to_infer.append(node)

    # --- solving --------------------------------------------------------------------------

    def _kind_of(self, value: str) -> TypeNode | None:
        """Return the known type of a value; None outside our lattice."""
        number = self.id_of(value)
        return None if self._network.is_foreign(number) else self._network.type_of(number)

    def _constrain_mover(self, node: OpNode) -> Works:
        """Constrain an op that moves peers or tensors, as soon as types determine which."""
        moved = works(node, self._kind_of)
        if any(self._network.is_foreign(self.id_of(name)) for name in node.inputs if name):
            moved = Works.ON_TENSORS
        if moved is Works.ON_TENSORS:
            self._constrain_by_schema(node)
        elif moved is Works.ON_PEERS:
            refused = refusal(node, self._kind_of)
            if refused is not None:
                raise TypeConstraintFailed(op=node.name, detail=refused, where=Where.of(node))
            for name, kind in narrowings(node, self._kind_of):
                self._network.narrow(self.id_of(name), kind)
        return moved

    def settle_movers(self, *, finally_tensors: bool = False) -> None:
        """Retry the ops whose moved type is still unknown.

        Args:
            finally_tensors: apply ONNX's schemas to ops that are still undetermined.
        """
        waiting, self._movers = self._movers, []
        for node in waiting:
            self._network.at = node
            try:
                moved = self._constrain_mover(node)
                if moved is Works.OPEN and finally_tensors:
                    self._constrain_by_schema(node)
                elif moved is not Works.ON_TENSORS:
                    self._movers.append(node)  # more may become known on its other side
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict

    def infer(self) -> None:
        """Let ONNX infer the types that the schemas left open; ops without a result stay queued."""
        self.settle_movers()
        self._settle_sequences()
        still_open = []
        for node in self._to_infer:
            self._network.at = node
            known = {name: self._network.type_of(self.id_of(name)) for name in node.computes_with}
            try:
                inferred = onnx_types.infer(node, known, self._versions, self._ir_version)
                for name, proto in inferred.items():
                    self._take_inferred(name, proto)
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict
            except InferenceFailed as error:
                if all(kind.is_leaf for kind in known.values()):
                    raise TypeConstraintFailed(
                        op=node.name, detail=str(error), where=Where.of(node)
                    ) from error
            if any(self._is_open(name) for name in node.outputs if name):
                still_open.append(node)
        self._to_infer = still_open

    def _settle_sequences(self) -> None:
        """Propagate types between sequences and their elements, in both directions."""
        for node, sequence, element in self._sequences:
            self._network.at = node
            try:
                inside = self._network.type_of(sequence).element
                if inside is not None:
                    self._network.narrow(element, inside)
                outside = types.SEQUENCE_OF.get(self._network.type_of(element))
                if outside is not None:
                    self._network.narrow(sequence, outside)
            except Conflict as conflict:
                raise self._failed(node, conflict) from conflict

    def _take_inferred(self, name: str, proto: TypeProto) -> None:
        inferred = type_of(proto)
        if inferred.is_foreign:
            self._network.make_foreign(self.id_of(name))
        elif inferred.kind is not None:
            self._network.narrow(self.id_of(name), inferred.kind)

    def _is_open(self, name: str) -> bool:
        number = self.id_of(name)
        return not self._network.is_foreign(number) and not self._network.type_of(number).is_leaf

    def default_peers(self) -> None:
        """Make peers of a send that are still open a PeerIdVec."""
        for node in self.function.nodes:
            if node.domain != keys.WIRE_DOMAIN:
                continue
            if is_wire(node, keys.OP_SEND, keys.OP_SEND_REQ_BATCHED) and len(node.inputs) > 1:
                number = self.id_of(node.inputs[1])
                if not self._network.type_of(number).is_leaf:
                    try:
                        self._network.narrow(number, types.PEER_ID_VEC)
                    except Conflict as conflict:
                        raise self._failed(node, conflict) from conflict

    def default_triggers(self) -> None:
        """Make function inputs of any type that nothing computes with Triggers."""
        numbers = {name: self.id_of(name) for name in self.function.inputs}
        open_ones = [n for n, at in numbers.items() if self._network.type_of(at) is types.ANY]
        used = self._used() if open_ones else ()
        for name in open_ones:
            if name not in used:
                self._network.narrow(numbers[name], types.TRIGGER)

    def _used(self) -> set[str]:
        """Return the values that an op computes with, or that are function outputs."""
        used = set(self.function.outputs)
        for node in self.function.nodes:
            used.update(node.computes_with)
        return used

    def unread(self) -> set[str]:
        """Return inputs and component outputs that no op computes with and that are no outputs."""
        used = self._used()
        outputs = (name for node in self.function.nodes if is_role(node) for name in node.outputs)
        return {name for name in (*self.function.inputs, *outputs) if name not in used}

    # --- results --------------------------------------------------------------------------

    def check_allowed(self) -> None:
        """Raise TypeConstraintFailed if a schema does not accept a value's type."""
        leaf_of = self._network.leaf_of
        self._leaves = leaves = {name: leaf_of(number) for name, number in self._ids.items()}
        for node, values in self._graph_ops:
            for name, port in values:
                kind = leaves[name]
                if kind is not None and port.allowed is not None and kind not in port.allowed:
                    takes = ", ".join(sorted(leaf.name for leaf in port.allowed))
                    raise TypeConstraintFailed(
                        op=node.name,
                        detail=f"{name!r} is {kind.name}, {node.op_type} takes {takes}",
                        where=Where.of(node),
                    )

    def abstract_values(self) -> list[tuple[str, TypeNode]]:
        """Return the values whose type is no leaf, inputs first, then in recorded order.

        An input or a component's output that nothing computes with is left out: no op and no peer
        ever gets it.
        """
        names = [*self.function.inputs]
        for node in self.function.nodes:
            names += node.outputs
        leaves = self._leaves
        values = [name for name in names if name and leaves[name] is None and self._is_open(name)]
        if values:
            unread = self.unread()
            values = [name for name in values if name not in unread]
        return [(name, self._network.type_of(self.id_of(name))) for name in values]

    def write(self) -> int:
        """Write the solved types into value_info; return the number of leaf types."""
        changed: dict[str, TypeNode] = {}
        resolved = 0
        for name, leaf in self._leaves.items():
            kind = leaf or self._kind_of(name)
            resolved += leaf is not None
            if kind is not None and self._declared.get(name) is not kind:
                changed[name] = kind
        if changed:
            self.function.declare(changed)
        for node in self.function.nodes:
            if node.op_type == keys.OP_BUNDLE and node.domain == keys.COMPOSITE_DOMAIN:
                self._write_child_types(node)
        return resolved

    def _write_child_types(self, node: OpNode) -> None:
        if node.attr("child_types", b""):
            return
        kinds = [self._network.type_of(self.id_of(name)) for name in node.inputs]
        if kinds and all(kind.is_leaf for kind in kinds):
            node.set_attr("child_types", ",".join(kind.id for kind in kinds))

    def _failed(
        self, node: OpNode, conflict: Conflict
    ) -> TypeConstraintFailed | IncompatibleStorageOnEdge:
        where = Where.of(node)
        twice = self._two_types(node)
        if twice is not None:
            return twice
        if is_wire(node) and node.op_type in keys.SEND_OPS and len(node.outputs) > 0:
            received = set(node.outputs)
            readers = (n.name for n in self.function.nodes if received.intersection(n.inputs))
            return IncompatibleStorageOnEdge(
                send_node=node.name,
                recv_node=next(readers, f"{node.name} (receiving side)"),
                sent=conflict.known,
                received=conflict.wanted,
                where=where,
            )
        within = " of ".join(reversed(conflict.within))
        return TypeConstraintFailed(
            op=node.name,
            detail=f"{within and f'{within}: '}{conflict.known} meets {conflict.wanted} "
            f"at {node.op_type}{self._elsewhere(node, conflict)}",
            wanted="" if within else str(conflict.wanted),
            where=where,
        )

    def _two_types(self, node: OpNode) -> IncompatibleStorageOnEdge | None:
        """Return the error for two sends to one port with two types, if `node` is one of them."""
        first = node.metadata.get(keys.FAN_IN_KEY)
        sends = [
            each
            for each in self.function.nodes
            if is_wire(each, keys.OP_SEND)
            and each.outputs
            and (first or next(iter(node.outputs), ""))
            in (each.outputs[0], each.metadata.get(keys.FAN_IN_KEY))
        ]
        if node not in sends or len(sends) < 2:
            return None
        kinds = [self._network.type_of(self.id_of(each.inputs[0])) for each in sends]
        for each, kind in zip(sends, kinds, strict=True):
            if types.meet(kinds[0], kind) is None:
                return IncompatibleStorageOnEdge(
                    send_node=each.name,
                    recv_node=sends[0].name,
                    sent=kind.name,
                    received=kinds[0].name,
                    port=node.metadata.get(keys.PORT_KEY, ""),
                    where=Where.of(each),
                )
        return None

    def _elsewhere(self, node: OpNode, conflict: Conflict) -> str:
        """Describe the other ops, or function inputs, that determined the value's type."""
        names = {number: name for name, number in self._ids.items()}
        others: dict[str, None] = {}
        for source in (*self._same_answers(node), *conflict.said):
            name = names.get(source, "") if isinstance(source, int) else ""
            other = self.function.producers.get(name) if isinstance(source, int) else source
            if other is not None and other is not node:
                line = f" at {other.source_line}" if other.source_line else ""
                others[f"{other.op_type} {other.name!r}{line}"] = None
            elif name in self.function.inputs:
                others[f"the input {name!r}"] = None
        text = f"; see {' and '.join(others)}" if others else ""
        if node.domain == _AGGREGATOR and node.op_type == "ContributeAll":
            component = component_of(node, self._bound)
            if component is not None and issubclass(component, Aggregator):
                text += f"; {component.TYPE_NAME} takes answers of {_answers_text(component)}"
        if node.domain == keys.RESPONSES_DOMAIN and types.TENSOR.name in (
            conflict.known,
            conflict.wanted,
        ):
            remedy = _REMEDIES.get(conflict.known) or _REMEDIES.get(conflict.wanted)
            text += f"; {remedy}" if remedy else ""
        return text

    def _same_answers(self, node: OpNode) -> list[OpNode]:
        """Return the ops that give the answers that a node takes, or take the answer it gives."""
        at = self._answers_at(node)
        gives = is_wire(node, keys.OP_SEND_RESP)
        return [
            other
            for other in (self.function.nodes if at else ())
            if is_wire(other, keys.OP_SEND_RESP) is not gives and at & self._answers_at(other)
        ]

    def _answers_at(self, node: OpNode) -> set[int]:
        """Return the answers in batches that an op reads, and the answer that it gives."""
        answers: set[int] = set()
        for name in node.inputs:
            number = self._ids.get(name)
            if number is not None and self._network.type_of(number) in _HOLD_ANSWERS:
                answers.update(map(self._network.find, self._network.parts_of(number) or ()))
        return answers


def _answers_text(component: type[Aggregator]) -> str:
    kinds = component.answers
    if isinstance(kinds, TypeNode):
        return kinds.name
    return f"a bundle of [{', '.join(kind.name for kind in kinds)}]"


_SomePort = TypeVar("_SomePort", Port, onnx_types.PortRule)


def _at_ports(names: Sequence[str], ports: Sequence[_SomePort]) -> Iterable[tuple[str, _SomePort]]:
    """Return names with their ports; the last port may take all names that follow."""
    pairs = zip(names, ports, strict=False)
    if len(names) <= len(ports) and "" not in names:
        return pairs
    matched = [pair for pair in pairs if pair[0]]
    if len(names) > len(ports) > 0 and ports[-1].variadic:
        matched += [(name, ports[-1]) for name in names[len(ports) :] if name]
    return matched


def _graph_values(node: OpNode, rule: OpRule) -> list[tuple[str, onnx_types.PortRule]]:
    return [*_at_ports(node.inputs, rule.inputs), *_at_ports(node.outputs, rule.outputs)]


def _from_attributes(node: OpNode) -> Iterator[tuple[str, TypeNode]]:
    """Yield types from attributes: constants, casts, parts of composites, received payloads."""
    if node.domain == keys.SYSCALL_DOMAIN and node.op_type == "Constant":
        kind = constant_type(node)
        if kind is not None and node.outputs:
            yield node.outputs[0], kind
    elif (node.domain, node.op_type) in _TO_OPS:
        yield from _listed(node.outputs, node.attr("to", b""))
    elif node.domain == keys.COMPOSITE_DOMAIN:
        values = node.inputs if node.op_type == keys.OP_BUNDLE else node.outputs
        yield from _listed(values, node.attr("child_types", b""))
    elif is_wire(node) and node.op_type in keys.INBOUND_OPS and node.outputs:
        declared = node.attr(keys.ATTR_PAYLOAD_TYPE)
        if isinstance(declared, ValueType) and declared.kind is not None:
            yield node.outputs[0], declared.kind


def _listed(values: Sequence[str], ids: str | bytes) -> Iterator[tuple[str, TypeNode]]:
    text = ids.decode(errors="replace") if isinstance(ids, bytes) else str(ids)
    for name, type_id in zip(values, split_names(text), strict=False):
        kind = types.type_by_id(type_id)
        if name and kind is not None:
            yield name, kind


def constant_type(node: OpNode) -> TypeNode | None:
    """Return the type of a `syscall.Constant`: its tensor's, or the one named before the NUL."""
    attribute = node.attributes.get("value")
    value = None if attribute is None else attribute.value
    if isinstance(value, Tensor):
        return types.TENSOR_BY_ELEM.get(value.elem_type)
    if not isinstance(value, bytes):
        return None
    return types.type_by_id(value.partition(b"\0")[0].decode(errors="replace"))


# --- equivalence classes of values, and their types ---------------------------------------
# Rule: a union-find over values; each class of values holds the narrowest type that all its
# constraints allow. A type outside our lattice (an ONNX sequence, a tensor of strings) marks its
# class as foreign: such values exist inside ONNX graphs and are left alone.
#


class Conflict(Exception):
    """Two constraints on one value exclude each other.

    Attributes:
        known, wanted: the two types.
        within: path to the part of the value that has these types, outermost first.
        said: the source of each type: an op, or the number of a value declared so.
    """

    def __init__(
        self, known: str, wanted: str, within: tuple[str, ...], said: tuple[_Said, ...]
    ) -> None:
        super().__init__(f"{known} is not {wanted}")
        self.known = known
        self.wanted = wanted
        self.within = within
        self.said = said


_Said: TypeAlias = "OpNode | int | None"


def _part_name(whole: TypeNode | str, index: int) -> str:
    return f"part {index}" if whole is types.COMPOSITE else "the answers"


class TypeNetwork:
    """Types of values that stand for each other; values are numbered from 0.

    The children of a composite, and the answer in a batch of answers, are values too, called its
    parts: united composites have united parts.

    Attributes:
        at: the op whose constraints are being added.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._type: list[TypeNode] = []
        self._foreign: list[bool] = []
        self._said: list[_Said] = []  # source of each type, for errors
        self._parts: dict[int, tuple[int, ...]] = {}
        self._slots: dict[str, int] = {}
        self.at: OpNode | None = None
        self.changes = 0  # grows whenever a type narrows

    def add(self, kind: TypeNode, *, foreign: bool = False) -> int:
        """Return a new value of a declared type."""
        number = len(self._parent)
        self._parent.append(number)
        self._type.append(kind)
        self._foreign.append(foreign)
        self._said.append(number)
        return number

    def of_slot(self, slot: str) -> int:
        """Return the value that stands for the tensors of a slot whose ops share one type."""
        number = self._slots.get(slot)
        if number is None:
            number = self._slots[slot] = self.add(types.TENSOR)
        return number

    def find(self, value: int) -> int:
        """Return the class of a value."""
        parent = self._parent
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    def type_of(self, value: int) -> TypeNode:
        """Return the known type of a value."""
        return self._type[self.find(value)]

    def parts_of(self, value: int) -> tuple[int, ...] | None:
        """Return the parts of a composite or of answers; None if they are unknown."""
        return self._parts.get(self.find(value))

    def leaf_of(self, value: int) -> TypeNode | None:
        """Return a value's type if it is a leaf of our lattice, else None."""
        root = self.find(value)
        kind = self._type[root]
        return None if self._foreign[root] or not kind.is_leaf else kind

    def is_foreign(self, value: int) -> bool:
        """Return True if the value is of a type outside our lattice."""
        return self._foreign[self.find(value)]

    def make_foreign(self, value: int) -> None:
        """Mark the value as of a type outside our lattice."""
        self._foreign[self.find(value)] = True

    def narrow(self, value: int, kind: TypeNode, within: tuple[str, ...] = ()) -> None:
        """Narrow the value, the part `within` another one, to `kind`. Raises Conflict."""
        root = self.find(value)
        known = self._type[root]
        if known is kind or self._foreign[root] or kind is types.ANY:
            return
        met = types.meet(known, kind)
        if met is None:
            raise Conflict(known.name, kind.name, within, (self._said[root],))
        if met is not known:
            self._type[root] = met
            self._said[root] = self.at
            self.changes += 1

    def compose(self, value: int, parts: Sequence[int], within: tuple[str, ...] = ()) -> None:
        """Set the parts of the value, the part `within` another one. Raises Conflict."""
        root = self.find(value)
        known = self._parts.get(root)
        if known is None:
            self._parts[root] = tuple(parts)
            return
        for a, b, inner in self._pairs(root, known, tuple(parts), within, (self._said[root],)):
            self.unite(a, b, inner)

    def unite(self, a: int, b: int, within: tuple[str, ...] = ()) -> None:
        """Make two values have one type. Raises Conflict."""
        if self.find(a) == self.find(b):
            return
        todo = [(a, b, within)]
        while todo:
            a, b, within = todo.pop()
            a, b = self.find(a), self.find(b)
            if a == b:
                continue
            foreign = self._foreign[a] or self._foreign[b]
            met = types.meet(self._type[a], self._type[b])
            sources = (self._said[a], self._said[b])
            if met is None and not foreign:
                raise Conflict(self._type[a].name, self._type[b].name, within, sources)
            keep, drop = min(a, b), max(a, b)
            self._parent[drop] = keep
            self._foreign[keep] = foreign
            if met is self._type[drop] and met is not self._type[keep]:
                self._said[keep] = self._said[drop]
            self._type[keep] = met or self._type[keep]
            self.changes += 1
            kept, dropped = self._parts.get(keep), self._parts.pop(drop, None)
            if kept is None and dropped is not None:
                self._parts[keep] = dropped
            elif kept is not None and dropped is not None:
                todo += self._pairs(keep, kept, dropped, within, sources)

    def _pairs(
        self,
        whole: int,
        some: tuple[int, ...],
        others: tuple[int, ...],
        within: tuple[str, ...],
        said: tuple[_Said, ...],
    ) -> list[tuple[int, int, tuple[str, ...]]]:
        kind = self._type[whole]
        if len(some) != len(others):
            known, wanted = (f"{kind.name} of {len(parts)}" for parts in (some, others))
            raise Conflict(known, wanted, within, said)
        return [
            (a, b, (*within, _part_name(kind, index)))
            for index, (a, b) in enumerate(zip(some, others, strict=True))
        ]
