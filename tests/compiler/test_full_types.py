"""Types as an author meets them: protocols' polymorphic ports, inputs that nothing reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import (
    CompileError,
    DuplicateOutput,
    ExpansionFailed,
    RoleMethodFailed,
    UnboundSlot,
    UnknownOp,
    UnresolvedType,
)
from bbnode.components import ConnectedView, OrtBackend, register_component
from bbnode.components.contracts import ProtocolComponent
from bbnode.dsl import (
    BackendSlot,
    Graph,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    ProtocolSlot,
    protocol_op,
    types,
)
from bbnode.ir import keys
from bbnode.ir.onnx_file import program_of
from bbnode.ir.types import TypeNode
from bbnode.ir.values import TRIGGER
from bbnode.sim import Network
from tests.compiler.test_full_chains import Written

PROTOCOL = "full_types"
protocol_op(PROTOCOL, "Blur", {"image": types.TENSOR}, {"blurred": types.TENSOR})
protocol_op(PROTOCOL, "Ticket", {"what": types.ANY}, {"ticket": types.ANY})


class _Blurs(ProtocolComponent):
    def blur(self, ctx: Any, image: Any) -> Any:
        return image / 2

    def ticket(self, ctx: Any, what: Any) -> Any:
        return np.array([len(what)])


@register_component
class DoubleBlur(_Blurs):
    TYPE_NAME: ClassVar[str] = "test.DoubleBlur"
    storage: ClassVar[dict[str, TypeNode]] = {
        "*": types.TENSOR_DOUBLE,
        "Ticket.ticket": types.TENSOR_INT64,
    }


@register_component
class VagueBlur(_Blurs):
    TYPE_NAME: ClassVar[str] = "test.VagueBlur"


@register_component
class NoBlur(ProtocolComponent):
    TYPE_NAME: ClassVar[str] = "test.NoBlur"


class Blurred(Module):
    """An abstract tensor goes through a protocol's ops and to a peer."""

    home = "a"

    def body(self, g: Graph) -> None:
        blurs = ProtocolSlot("blurs", PROTOCOL)
        x = g.input("x", types.TENSOR)
        blurred = blurs.blur(g, x)
        to = PeerSelectorSlot("to", peer_class="b").current_view(g, after=blurred)
        there = g.net_out("there", to, blurred)
        g.output("y", BackendSlot("compute").neg(g, there))
        g.output("ticket", blurs.ticket(g, blurred))


def compiler(component: type[ProtocolComponent]) -> Compiler:
    made = Compiler().bind_protocol("blurs", component).bind_backend("compute", OrtBackend)
    return made.bind_peer_selector("to", ConnectedView)


def test_a_component_of_a_protocol_says_what_its_polymorphic_ports_hold() -> None:
    made = compiler(DoubleBlur).compile(Blurred().build())
    network = Network(seed=0)
    a, b = network.add("a", made, ["a"]), network.add("b", made, ["b"])
    network.run_until_idle()
    a.invoke("a", {"x": np.array([2.0, 4.0])})
    network.run_until_idle()
    (y,), (ticket,) = b.values("y"), a.values("ticket")
    assert (y.dtype, y.tolist()) == (np.float64, [-1.0, -2.0])
    assert ticket.tolist() == [2]


@pytest.mark.parametrize(
    ("component", "error", "text"),
    [(VagueBlur, UnresolvedType, "storage"), (NoBlur, RoleMethodFailed, "'blur'")],
)
def test_a_component_that_does_not_say_it_or_lacks_the_op_is_refused(
    component: type[ProtocolComponent], error: type[CompileError], text: str
) -> None:
    with pytest.raises(error, match=text):
        compiler(component).compile(Blurred().build())


def test_an_op_of_a_protocol_may_suspend_and_so_has_a_deadline() -> None:
    made = compiler(DoubleBlur).compile(Blurred().build())
    (node,) = (n for f in program_of(made).functions for n in f.nodes if n.op_type == "Blur")
    assert int(node.metadata.get(keys.DEADLINE_NS_KEY) or 0) > 0


class Unread(Module):
    """`spare` and `more` are part of the interface, and nothing here needs them."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    def body(self, g: Graph) -> None:
        spare, _ = g.input("spare", types.TENSOR), g.input("more")
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", BackendSlot("compute").neg(g, x, after=spare))
        if self.reads:
            g.output("z", spare)


def compile_unread(reads: bool) -> ModelProto:
    return Compiler().bind_backend("compute", OrtBackend).compile(Unread(reads).build())


def test_a_tensor_that_nothing_computes_with_needs_no_further_type() -> None:
    made = compile_unread(reads=False)
    main = next(f for f in program_of(made).functions if f.metadata.get(keys.TARGET_KEY))
    known = main.kinds()
    assert (known["spare"], known["more"]) == (types.TENSOR, types.TRIGGER)
    network = Network(seed=0)
    node = network.add("node", made, ["@self"])
    inputs = {"x": np.ones(1, np.float32), "spare": np.ones(2), "more": TRIGGER}
    node.invoke("@self", inputs)
    network.run_until_idle()
    (y,) = node.values("y")
    assert y.tolist() == [-1.0]


def test_one_that_is_handed_out_does() -> None:
    with pytest.raises(UnresolvedType, match="'spare'"):
        compile_unread(reads=True)


def test_a_type_that_a_forgotten_bind_call_leaves_open_names_that_call() -> None:
    def body(g: Graph) -> None:
        g.output("params", ModelSlot("net").params(g))

    with pytest.raises(UnboundSlot) as caught:
        Compiler().compile(Written(body).build())
    assert (caught.value.slot, caught.value.role) == ("net", "Model")
    assert ".bind_model('net', <component class>)" in str(caught.value)


def branching(change: Callable[[ModelProto], object]) -> ModelProto:
    """An If with an op in a branch, damaged and compiled."""

    def body(g: Graph) -> None:
        compute = BackendSlot("compute")
        x, flag = g.input("x", types.TENSOR_FLOAT), g.input("flag", types.TENSOR_BOOL)
        picked = compute.if_(g, flag, lambda b: compute.add(b, x, x), lambda b: compute.neg(b, x))
        g.output("y", picked)

    model = Written(body).build()
    change(model)
    return Compiler().bind_backend("compute", OrtBackend).compile(model)


def then_op(model: ModelProto) -> NodeProto:
    node = model.functions[0].node[0]
    return next(a for a in node.attribute if a.name == "then_branch").g.node[0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda m: setattr(then_op(m), "op_type", "Bdd"), UnknownOp, r"If_0.*Add_0.*::Bdd"),
        (lambda m: then_op(m).input.append("x"), ExpansionFailed, "If_0.*its graph is not valid"),
        (lambda m: m.functions[0].output.append("y"), DuplicateOutput, "'y'.*function output"),
    ],
)
def test_damage_that_only_the_backend_would_have_met(
    change: Callable[[ModelProto], object], error: type[CompileError], text: str
) -> None:
    with pytest.raises(error, match=text):
        branching(change)


def test_a_tensor_without_a_dtype_is_no_attribute() -> None:
    def body(g: Graph) -> None:
        g.output("y", g.constant([1.0]))

    model = Written(body).build()
    model.functions[0].node[0].attribute[0].t.ClearField("data_type")
    with pytest.raises(ExpansionFailed, match=r"Constant_0.*'value' has no dtype"):
        Compiler().compile(model)
