"""Compiled-form programs by hand: what `docs/ir.md` section 2 says, and no compiler.

Rule: one `Partition` per class; `model()` puts partitions together as the compiler would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper, numpy_helper

from bbnode.ir import codec, ids, keys, types
from bbnode.ir.address import site_suffix
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Value, type_of
from tests import protos

SYS = keys.SYSCALL_DOMAIN
WIRE = keys.WIRE_DOMAIN
DEADLINE_NS = 30_000_000_000
# Classes that send to what is built here, where a test does not say others.
SENDERS = ("client", "left", "right", "node", "server", "far", "a", "b", "x")


class Partition:
    """One function under construction: a partition main, or a body that one calls."""

    def __init__(self, name: str, *, inputs: Sequence[str] = (), main: bool = True) -> None:
        self.name = f"{name}#{ids.fnv1a_64(name.encode()):016x}" if main else name
        self.function = FunctionProto(name=self.name, domain=keys.MODULE_DOMAIN)
        self.function.input.extend(inputs)
        if main:
            protos.set_meta(self.function, keys.TARGET_KEY, "true")
            protos.set_meta(self.function, keys.HOME_KEY, name)
        self.bindings: dict[str, tuple[str, str]] = {}
        self._count = 0

    def op(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        *,
        called: str = "",
        after: Sequence[str] = (),
        control: Sequence[str] = (),
        slot: str = "",
        meta: dict[str, str] | None = None,
        stamp_ns: int = 0,
        named: dict[str, Any] | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node; returns its name. `named`: attributes whose names are taken here."""
        self._count += 1
        name = called or f"{op_type}_{self._count}"
        node = NodeProto(name=name, domain=domain, op_type=op_type)
        node.input.extend(inputs)
        node.output.extend(outputs)
        for key, value in {**attributes, **(named or {})}.items():
            node.attribute.append(helper.make_attribute(key, value))
        for key, names in ((keys.AFTER_KEY, after), (keys.CONTROL_AFTER_KEY, control)):
            if names:
                protos.set_meta(node, key, ",".join(names))
        if slot:
            protos.set_meta(node, keys.SLOT_KEY, slot)
            protos.set_meta(node, keys.SLOT_ID_KEY, str(sorted(self.bindings).index(slot)))
        if stamp_ns:
            protos.set_meta(node, keys.DEADLINE_NS_KEY, str(stamp_ns))
        for key, value in (meta or {}).items():
            protos.set_meta(node, key, value)
        self.function.node.append(node)
        return name

    def sys(self, op_type: str, inputs: Sequence[str] = (), output: str = "", **more: Any) -> str:
        """Add a syscall with at most one output."""
        return self.op(SYS, op_type, inputs, [output] if output else [], **more)

    def constant(self, output: str, value: Value, **more: Any) -> str:
        """Add a Constant."""
        if isinstance(value, np.ndarray):
            attribute: Any = numpy_helper.from_array(value)
        else:
            attribute = type_of(value).id.encode() + b"\0" + codec.encode_value(value)
        return self.sys("Constant", (), output, value=attribute, **more)

    def output(self, name: str, value: str, **more: Any) -> None:
        """Declare an output, as `g.output` records it."""
        self.sys("PassThrough", [value], name, **more)
        self.function.output.append(name)

    def bind(self, slot: str, role: str, type_name: str) -> None:
        """Bind a slot, before ops use it."""
        self.bindings[slot] = (role, type_name)

    def type(self, name: str, node: TypeNode) -> None:
        """Declare the type of a value."""
        protos.write_types(self.function, {name: node})

    def recv(
        self,
        payload: str,
        *,
        node: TypeNode | None = None,
        request: str = "",
        gates: bool = False,
        sender: str = "",
        senders: Sequence[str] = SENDERS,
        **more: Any,
    ) -> str:
        """Add a Recv (RecvReq with `request`), perhaps with its gates; returns its payload."""
        op = keys.OP_RECV_REQ if request else keys.OP_RECV
        meta = {
            keys.SITE_ID_KEY: str(self.site(payload)),
            keys.SENDER_CLASS_KEY: ",".join(senders),
            **more.pop("meta", {}),
        }
        if node is not None and node.is_leaf:
            meta[keys.TYPE_HASH_KEY] = str(node.wire_hash)
            self.type(payload, node)
        outputs = [payload, sender or f"{payload}.sender", *([request] if request else [])]
        self.op(WIRE, op, (), outputs, meta=meta, **more)
        head = payload
        if gates:
            for gate in (
                keys.OP_DEDUP_GATE_RX,
                keys.OP_PEER_HEALTH_GATE_RX,
                keys.OP_BACKOFF_GATE_RX,
            ):
                self.sys(gate, [head], f"{payload}#{gate}")
                head = f"{payload}#{gate}"
        return head

    def answers_at(self, responses: str) -> dict[str, str]:
        """What a RecvRespBatched says of itself."""
        return {
            keys.SITE_ID_KEY: str(self.site(responses)),
            keys.SENDER_CLASS_KEY: ",".join(SENDERS),
        }

    def site(self, value: str) -> int:
        """The site id of a Recv in this partition."""
        return ids.fnv1a_64(f"{self.name}/{value}".encode())

    def _dest(self, data: str, site: int) -> dict[str, bytes]:
        return {f"{keys.DEST_SUFFIX_PREFIX}{data}": site_suffix(site)}

    def send(self, data: str, peers: str, site: int, **more: Any) -> str:
        """Add a Send to a site."""
        self._count += 1
        return self.op(
            WIRE, keys.OP_SEND, [data, peers], [f"{keys.SEND_SENTINEL_PREFIX}{self._count}"],
            stamp_ns=more.pop("stamp_ns", DEADLINE_NS), **self._dest(data, site), **more,
        )  # fmt: skip

    def request(
        self, data: str, peers: str, site: int, responses: str, *, quorum: int = 0,
        deadline_ns: int = 10_000_000_000, **more: Any,
    ) -> None:  # fmt: skip
        """Add a SendReqBatched with its RecvRespBatched."""
        self.op(
            WIRE, keys.OP_SEND_REQ_BATCHED, [data, peers], [f"{responses}.req"],
            quorum=quorum, deadline_ns=deadline_ns, meta={keys.PORT_KEY: "round"},
            **self._dest(data, site), **more,
        )  # fmt: skip
        self.op(
            WIRE, keys.OP_RECV_RESP_BATCHED, [f"{responses}.req"], [responses],
            meta=self.answers_at(responses), stamp_ns=deadline_ns,
        )  # fmt: skip

    def respond(self, data: str, dest: str, request: str, site: int, **more: Any) -> None:
        """Add a SendResp."""
        self.op(
            WIRE, keys.OP_SEND_RESP, [data, dest, request], [],
            stamp_ns=DEADLINE_NS, **self._dest(data, site), **more,
        )  # fmt: skip


def model(*partitions: Partition, functions: Sequence[FunctionProto] = ()) -> ModelProto:
    """A compiled model."""
    made = ModelProto(ir_version=keys.FRAMEWORK_IR_VERSION, producer_name=keys.PRODUCER_NAME)
    made.graph.name = "test"
    made.opset_import.append(helper.make_opsetid("", keys.ONNX_OPSET_VERSION))
    protos.set_meta(made, keys.COMPILED_KEY, keys.COMPILED_CURRENT_VERSION)
    for partition in partitions:
        made.functions.append(partition.function)
        for index, (slot, (role, type_name)) in enumerate(sorted(partition.bindings.items())):
            protos.set_meta(
                made,
                keys.binding_key(partition.name, slot),
                keys.encode_binding_value(role, type_name, index),
            )
    made.functions.extend(functions)
    return made


def subgraph(
    name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto],
    known: dict[str, TypeNode] | None = None,
) -> FunctionProto:  # fmt: skip
    """A backend subgraph function."""
    function = FunctionProto(name=name, domain=keys.BACKEND_SUBGRAPH_DOMAIN)
    function.input.extend(inputs)
    function.output.extend(outputs)
    function.node.extend(nodes)
    function.opset_import.append(helper.make_opsetid("", keys.ONNX_OPSET_VERSION))
    protos.write_types(function, known or {})
    return function


__all__ = ["DEADLINE_NS", "SYS", "WIRE", "Partition", "model", "onnx", "subgraph", "types"]
