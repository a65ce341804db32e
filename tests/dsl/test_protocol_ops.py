"""Ops of a protocol of one's own: registered once, recorded by the slot, typed as declared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.compiler import Compiler
from bbnode.dsl import BadName, Graph, Module, NoSuchOp, ProtocolSlot, protocol_op, types
from bbnode.ir import keys, opset
from bbnode.ir.errors import AuthorError
from bbnode.ir.plugins import BrokenPlugin
from tests.dsl.programs import build
from tests.plugin_packages import Install, package_folder

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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    with package_folder(tmp_path, monkeypatch, opset.PROTOCOL_OPS) as add:
        yield add


ECHO = """
from bbnode.components.contracts import ProtocolComponent
from bbnode.components.registry import register_component
from bbnode.dsl import protocol_op, types

protocol_op("{0}", "Say", {{"word": types.TENSOR_FLOAT}}, {{"echo": types.TENSOR_FLOAT}})


@register_component
class Echo(ProtocolComponent):
    TYPE_NAME = "{0}.Echo"

    def say(self, ctx, word):
        return word
"""


def test_ops_of_an_installed_package_are_found_when_a_program_meets_them(install: Install) -> None:
    install("echoes", ECHO.format("echoes"), echoes="echoes_plugin")

    def body(g: Graph) -> None:
        word = g.input("word", types.TENSOR_FLOAT)
        g.output("echo", ProtocolSlot("wall", "echoes").say(g, word))

    model = build(body)
    assert model.functions[0].node[0].domain == keys.PROTOCOL_DOMAIN_PREFIX + "echoes"
    from echoes_plugin import Echo  # type: ignore[import-not-found]  # installed just now

    compiled = Compiler().bind_protocol("wall", Echo).compile(model)
    assert [n.op_type for n in compiled.functions[0].node if n.op_type == "Say"] == ["Say"]


def test_ops_of_an_installed_package_are_found_by_a_compiler_or_node(install: Install) -> None:
    install("murmurs", ECHO.format("murmurs"), murmurs="murmurs_plugin")
    spec = opset.lookup_op(keys.PROTOCOL_DOMAIN_PREFIX + "murmurs", "Say")
    assert spec is not None
    assert opset.lookup_op(keys.PROTOCOL_DOMAIN_PREFIX + "murmurs", "Shout") is None


def test_a_broken_package_is_told_where_its_op_is_recorded(install: Install) -> None:
    install("hums", "import nothing_like_it\n", hums="hums_plugin")
    with pytest.raises(BrokenPlugin, match=r"package hums .*nothing_like_it"):
        build(lambda g: ProtocolSlot("wall", "hums").say(g))
    with pytest.raises(NoSuchOp, match=r"has no op 'say'; there is none"):
        build(lambda g: ProtocolSlot("wall", "silence").say(g))
