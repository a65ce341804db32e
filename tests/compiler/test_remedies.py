"""Errors of programs name the cause and what really mends it, where an author would go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CrossClassDataflow, IncompatibleStorageOnEdge
from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    BranchMisuse,
    Graph,
    ModelSlot,
    Module,
    Output,
    PeerSelectorSlot,
    peer_lists,
    syscalls,
    types,
)
from bbnode.dsl.errors import RecordingError
from bbnode.ir.values import PeerIdVec

F = types.TENSOR_FLOAT
K = BackendSlot("compute")
M = ModelSlot("m")


def peers(name: str, g: Graph, after: Output) -> Output:
    return PeerSelectorSlot(f"to_{name}", peer_class=name).current_view(g, after=after)


def compiled(body: Callable[[Graph, Output], object]) -> object:
    class Written(Module):
        home = "a"

        def body(self, g: Graph) -> None:
            body(g, g.input("x", F))

    compiler = Compiler().bind_backend("compute", OrtBackend)
    for name in "bc":
        compiler = compiler.bind_peer_selector(f"to_{name}", ConnectedView)
    return compiler.compile(Written().build())


# --- values of two classes ------------------------------------------------------------------


def ask(g: Graph, x: Output, answer: Callable[[Any], Output]) -> None:
    asked = g.request("ask", peers("b", g, x), x, deadline=5.0)
    asked.respond(answer(asked))
    g.output("n", asked.responses.count)


def test_an_answer_is_made_where_it_is_asked_for() -> None:
    for answer in (lambda _g, x: lambda _: x, lambda g, x: lambda _: K.add(g, x, x)):
        with pytest.raises(CrossClassDataflow) as caught:
            compiled(lambda g, x, answer=answer: ask(g, x, answer(g, x)))
        text = str(caught.value)
        assert "`respond` answers from class 'b', with a value that is made there" in text
        assert "of what 'ask' received" in text
        assert "`g.request('ask', …, g.bundle([…, " in text
        assert "<peers of class" not in text  # a message of its own never meets the request
    ask_and_send = compiled(
        lambda g, x: ask(g, x, lambda asked: K.add(g, asked.received, asked.received))
    )
    assert ask_and_send


def test_an_answer_can_not_be_made_of_the_answers() -> None:
    with pytest.raises(CrossClassDataflow, match="is made of the answers to 'ask'") as caught:
        compiled(lambda g, x: ask(g, x, lambda asked: asked.responses.count))
    assert "another request" in str(caught.value)
    assert "bundle" not in str(caught.value)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_value_goes_along_with_the_message_that_it_is_needed_with(swapped: bool) -> None:
    def body(g: Graph, x: Output) -> None:
        there = g.net_out("there", peers("b", g, x), x)
        g.output("y", K.add(g, *((x, there) if swapped else (there, x))))

    with pytest.raises(CrossClassDataflow) as caught:
        compiled(body)
    assert "Send 'x' along, `g.net_out('there', …, g.bundle([…, x]))`" in str(caught.value)


def test_what_it_says_works() -> None:
    def body(g: Graph, x: Output) -> None:
        there = g.net_out("there", peers("b", g, x), g.bundle([x, x]))
        first, second = g.unbundle(there, [F, F])
        g.output("y", g.net_out("back", there.sender, K.add(g, first, second)))

    assert compiled(body)


# --- two types on one port ------------------------------------------------------------------


@pytest.mark.parametrize("classes", ["bb", "bc"])
@pytest.mark.parametrize("first", ["floats", "integers", "trigger"])
def test_two_types_on_one_port_are_named_the_right_way_round(classes: str, first: str) -> None:
    def body(g: Graph, x: Output) -> None:
        kinds = {"floats": x, "integers": g.input("i", types.TENSOR_INT64)}
        kinds["trigger"] = g.input("t", types.TRIGGER)
        given = [kinds[first], *(value for name, value in kinds.items() if name != first)]
        for name, value in zip(classes, given, strict=False):
            g.net_out("port", peers(name, g, x), value)
        g.output("y", g.lookup_output("port"))

    names = {"floats": "Tensor.FLOAT", "integers": "Tensor.INT64", "trigger": "Trigger"}
    second = "integers" if first == "floats" else "floats"
    with pytest.raises(IncompatibleStorageOnEdge) as caught:
        compiled(body)
    error = caught.value
    assert (error.port, error.recv_node, error.send_node) == ("port", "Send_0", "Send_1")
    assert (error.received, error.sent) == (names[first], names[second])
    assert "All sends to one port carry one type: give 'Send_1' a port of its own" in str(error)


# --- what a branch can't do -----------------------------------------------------------------


@pytest.mark.parametrize(
    "effect",
    [
        lambda b, x: b.net_out("yes", x, x),
        lambda b, x: b.request("ask", x, x).received,
        lambda b, x: syscalls.app_emit(b, x, name="said"),
        lambda b, x: M.forward(b, x),
    ],
)
def test_what_happens_only_sometimes_is_recorded_outside_of_a_branch(effect: Any) -> None:
    for which, when in (("then", r"g\.when"), ("else", r"g\.unless")):

        def body(g: Graph, x: Output, which: str = which) -> None:
            branches = [lambda b: effect(b, x), lambda _: x]
            K.if_(g, g.input("c", types.TENSOR_BOOL), *branches[:: 1 if which == "then" else -1])

        with pytest.raises(RecordingError, match=rf"outside, with after={when}\(condition\)"):
            compiled(body)


def test_a_loop_says_where_instead() -> None:
    def body(g: Graph, x: Output) -> None:
        K.loop(g, lambda b, _i, total: M.forward(b, total), x, trip_count=3)

    with pytest.raises(BranchMisuse, match="record it before the loop, or behind it"):
        compiled(body)


def test_a_branch_is_a_function_of_its_graph() -> None:
    with pytest.raises(BadArgument, match="the then branch of If is a function of its Graph"):
        compiled(lambda g, x: K.if_(g, g.input("c", types.TENSOR_BOOL), lambda: x, lambda: x))


# --- the Graph is left out ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "way"),
    [
        (lambda x: K.add(x, x), r"compute\.add\(g, a, b\)"),
        (lambda x: K.relu(x), r"compute\.relu\(g, x\)"),
        (lambda x: K.gather(x, x, axis=0), r"compute\.gather\(g, x, indices\)"),
        (lambda x: K.sinh(x), r"compute\.sinh\(g, "),
        (lambda x: K.if_(x, lambda _: x, lambda _: x), r"compute\.if_\(g, condition, "),
        (lambda x: M.forward(x), r"m\.forward\(g, batch\)"),
        (lambda _: M.train(), r"m\.train\(g\)"),
        (lambda x: M.load_parameters(params=x), r"m\.load_parameters\(g, params\)"),
        (lambda x: syscalls.app_emit(x, name="n"), r"syscalls\.app_emit\(g, value, name=…\)"),
        (lambda x: syscalls.any_of(x, x), r"syscalls\.any_of\(g, …\)"),
        (lambda x: peer_lists.concat_lists(x, x), r"peer_lists\.concat_lists\(g, …\)"),
        (lambda x: PeerSelectorSlot("s", peer_class="b").current_view(after=x), r"s\.current_view"),
        (lambda x: K.add(Module, x, x), r"class .*write compute\.add\(g, a, b\)"),
    ],
)
def test_who_leaves_out_the_graph_is_told_so(call: Callable[[Output], object], way: str) -> None:
    with pytest.raises(
        BadArgument, match=f"the first argument is the Graph, got .*{way}"
    ) as caught:
        compiled(lambda _g, x: call(x))
    assert caught.value.source.startswith("test_remedies.py:")


def test_what_else_is_missing_is_named_too() -> None:
    with pytest.raises(BadArgument, match=r"missing a required argument: 'b'; write compute\.add"):
        compiled(lambda g, x: K.add(g, x))
    with pytest.raises(BadArgument, match=r"unexpected keyword argument 'rate'; write m\.train"):
        compiled(lambda g, _x: M.train(g, rate=3))  # type: ignore[call-arg]


def test_a_type_error_of_a_value_is_not_one_of_the_call() -> None:
    def body(g: Graph, x: Output) -> None:
        K.if_(g, g.input("c", types.TENSOR_BOOL), lambda _: PeerIdVec(3), lambda _: x)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="not iterable"):
        compiled(body)
