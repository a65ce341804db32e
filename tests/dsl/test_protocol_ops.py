"""Ops of a protocol of one's own: registered once, recorded by the slot, typed as declared."""

from __future__ import annotations

import pytest

from bbnode.dsl import BadName, Graph, Module, ProtocolSlot, protocol_op, types
from bbnode.ir import opset
from bbnode.ir.errors import AuthorError

_PING = protocol_op(
    "test_pings", "PassOn", {"ping": types.TENSOR_FLOAT}, {"pong": types.TENSOR_DOUBLE}, times=3
)


class Ping(Module):
    def body(self, g: Graph) -> None:
        ping = g.input("ping", types.TENSOR_FLOAT)
        pong = ProtocolSlot("pings", "test_pings").pass_on(g, ping, times=5)
        assert pong.type is types.TENSOR_DOUBLE
        g.output("pong", pong)


def test_the_slot_records_what_was_registered() -> None:
    (node, _) = Ping().build().functions[0].node
    assert (node.domain, node.op_type) == (_PING.domain, "PassOn")
    assert node.domain == "ai.bytesandbrains.protocol.test_pings"
    assert [(a.name, a.i) for a in node.attribute] == [("times", 5)]
    assert opset.ops_of(_PING.domain) == (_PING,)
    assert _PING.method == "pass_on"


def test_an_op_is_registered_once() -> None:
    with pytest.raises(AuthorError, match="registered already"):
        protocol_op("test_pings", "PassOn", {}, {})


def test_a_protocol_has_a_name_like_any_other() -> None:
    with pytest.raises(BadName):
        protocol_op("no name", "PassOn", {}, {})
