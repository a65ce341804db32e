"""Fences: a taint analysis of the ops that values of examples must pass before they leave a peer.

Rule: the promise of a privacy method must hold whichever class wrote a step. Once a body is
recorded, everything computed from examples is traced, through ops and through the state of
components; a send of such a value that has not passed the fence is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode
from bbnode.ir.opset import lookup_op

_TRAINS = frozenset({"Train", "TrainAdjusted"})  # on examples that the component reads itself
_MODEL, _DATA, _SELECTOR = map(keys.role_domain, ("Model", "DataSource", "PeerSelector"))
# Attributes in which an op of the framework names the place that stores a value.
_PLACES = ("slot", "queue")

OpName = tuple[str, str]  # domain and op type


@dataclass(frozen=True, kw_only=True)
class Fence:
    """The ops through which values of examples may leave a client, or the server.

    Examples come from data sources and from the training of models. A program that is called
    inside the body is opaque, so everything that it returns counts as a value of examples.

    Attributes:
        gates: ops of protocols, such as "secagg.Mask", whose outputs reveal nothing about
            examples, whatever their inputs are. The program must have each of them.
        steps: other ops that it must have.
        trains: TYPE_NAME of models whose training is a gate; "" for none.
        answers: clients' answers may hold values of examples; values that the server hands out
            or sends may not, unless they have passed a gate.
        open_slots: data sources whose examples are not secret, and models that train on them.
    """

    gates: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    trains: str = ""
    answers: bool = False
    open_slots: tuple[str, ...] = ()

    def missing(self, function: Function) -> list[str]:
        """Return the gates and steps that are missing in a recorded body."""
        there = {(node.domain, node.op_type) for node in function.nodes}
        missing_names = [name for name in (*self.gates, *self.steps) if _op_name(name) not in there]
        if self.trains and not any(map(self._trains_privately, function.nodes)):
            missing_names.append(f"training by {self.trains}")
        return missing_names

    def leaks(self, function: Function) -> list[str]:
        """Return where values of examples leave without having passed a gate.

        Each leak is the name of a port or output, and the author's line.
        """
        flow = _Flow(self, function)
        while flow.spread():
            pass
        return [
            f"{node.metadata.get(keys.PORT_KEY) or ', '.join(node.outputs)!r} ({node.source_line})"
            for node in function.nodes
            if flow.is_leak(node)
        ]

    def _trains_privately(self, node: OpNode) -> bool:
        concrete = node.metadata.get(keys.CONCRETE_TYPE_KEY)
        return node.domain == _MODEL and node.op_type in _TRAINS and concrete == self.trains


class _Flow:
    """The values and places that are known to hold values of examples."""

    def __init__(self, fence: Fence, function: Function) -> None:
        self._fence = fence
        self._gates = {*map(_op_name, fence.gates)}
        self._nodes = list(function.nodes)
        self._outputs = set(function.outputs)
        self._values: set[str] = set()
        self._places: set[str] = set()
        # Request id as named by the answers -> the batch of these answers.
        self._responses = {
            node.outputs[4]: node.outputs[1] for node in self._nodes if _is(node, "SendReqBatched")
        }

    def spread(self) -> bool:
        """Propagate through each op once; return True if new values were reached."""
        before = len(self._values), len(self._places)
        for node in self._nodes:
            self._follow(node)
        return (len(self._values), len(self._places)) != before

    def is_leak(self, node: OpNode) -> bool:
        """Return True for an op that sends or hands out a value that has not passed a gate."""
        if node.domain == keys.WIRE_DOMAIN:
            is_answer = _is(node, "SendResp") and self._fence.answers
            return not is_answer and self._carries(node)
        return self._fence.answers and bool(self._outputs & self._values & set(node.outputs))

    def _carries(self, node: OpNode) -> bool:
        """Return True for a send whose data comes from examples; its peers do not count."""
        return bool(node.inputs) and node.inputs[0] in self._values

    def _follow(self, node: OpNode) -> None:
        if (node.domain, node.op_type) in self._gates or node.domain == _SELECTOR:
            return  # the chosen peers are no secret from the requester
        if node.domain == keys.WIRE_DOMAIN:
            if self._fence.answers and self._carries(node) and _is(node, "SendResp"):
                self._values.add(self._responses.get(node.inputs[2], ""))
            return  # any other send of such a value is a leak, so its receivers need no trace
        if (node.domain, node.op_type) == (keys.RESPONSES_DOMAIN, "Peers"):
            return
        place = _place(node)
        is_told = any(name in self._values for name in node.computes_with)
        if is_told and place is not None and _keeps(node):
            self._places.add(place)
        slot, concrete = (node.metadata.get(k) for k in (keys.SLOT_KEY, keys.CONCRETE_TYPE_KEY))
        if node.domain == _DATA:
            is_told = is_told or slot not in self._fence.open_slots
        elif node.domain == _MODEL and node.op_type in _TRAINS:
            is_gate = bool(self._fence.trains) and concrete == self._fence.trains
            if place is not None and not is_gate and slot not in self._fence.open_slots:
                self._places.add(place)
        elif node.domain == keys.MODULE_DOMAIN:
            is_told = True
        if is_told or place in self._places:
            self._values.update(node.outputs)


def _op_name(name: str) -> OpName:
    protocol, _, op_type = name.rpartition(".")
    return keys.PROTOCOL_DOMAIN_PREFIX + protocol, op_type


def _is(node: OpNode, op_type: str) -> bool:
    return node.domain == keys.WIRE_DOMAIN and node.op_type == op_type


def _place(node: OpNode) -> str | None:
    """Return the place where an op stores values between calls; None if it has none.

    Backends store nothing.
    """
    if node.domain.startswith((keys.ROLE_DOMAIN_PREFIX, keys.PROTOCOL_DOMAIN_PREFIX)):
        return f"component {node.metadata.get(keys.SLOT_KEY)}"
    if node.domain == keys.SYSCALL_DOMAIN:
        for name in _PLACES:
            if name in node.attributes:
                return f"{name} {node.attributes[name].value!r}"
    return None


def _keeps(node: OpNode) -> bool:
    """Return True for an op that stores its inputs; a model's `forward` does not, for example."""
    spec = lookup_op(node.domain, node.op_type)
    return node.domain != _MODEL or spec is None or spec.changes
