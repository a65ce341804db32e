"""Recording errors: typed, with the Module and the line, and a way to mend it."""

# ruff: noqa: ARG005  # every case of a table takes the same arguments

from __future__ import annotations

import numpy as np
import pytest

from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    BadName,
    ConcreteSpec,
    DuplicateName,
    Graph,
    ModelSlot,
    Module,
    NoSuchOp,
    NotReceived,
    PeerSelectorSlot,
    ProtocolSlot,
    RecordingError,
    UnknownName,
    syscalls,
    types,
    values,
)
from bbnode.ir.errors import AuthorError
from tests.dsl.programs import FromFunction, build


def test_an_error_names_module_line_and_fault() -> None:
    def body(g: Graph) -> None:
        x = g.input("x")
        g.output("y", x.sender)

    line = body.__code__.co_firstlineno + 2
    with pytest.raises(NotReceived) as caught:
        build(body)
    error = caught.value
    assert isinstance(error, AuthorError)
    assert (error.module, error.source) == ("Program", f"test_errors.py:{line}")
    assert str(error).startswith(f"Program (test_errors.py:{line}): 'x' was not received")


def test_an_error_outside_of_a_recording_still_has_its_line() -> None:
    with pytest.raises(BadName, match=r"^test_errors\.py:\d+: 'a/b' is not a valid slot name"):
        ModelSlot("a/b")


def test_an_error_without_a_graph_at_hand_names_the_module_all_the_same() -> None:
    inner = FromFunction(lambda g: BackendSlot("c").sofmax, name="Inner")
    with pytest.raises(NoSuchOp) as caught:
        build(lambda g: inner.call().build(g))
    assert caught.value.module == "Program/Inner"
    with pytest.raises(
        BadName, match=r"^Program \(test_errors\.py:\d+\): 'a/b' is not a valid slot name"
    ):
        build(lambda g: ModelSlot("a/b"))
    with pytest.raises(BadName) as outside:
        ModelSlot("a/b")
    assert outside.value.module == ""


MODEL = ConcreteSpec(role="Model", type_name="my.Net")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ModelSlot(""), BadName, "is not a valid slot name"),
        (lambda: ModelSlot("x" * 129), BadName, "at most 128"),
        (lambda: ModelSlot(None), BadName, "None is not a valid slot name"),
        (lambda: ModelSlot("a\n"), BadName, "is not a valid slot name"),
        (lambda: ModelSlot("m", concrete="my.Net"), BadArgument, "is not a ConcreteSpec"),
        (lambda: BackendSlot("m", concrete=MODEL), BadArgument, "my.Net is a Model"),
        (lambda: PeerSelectorSlot("s", peer_class="@other"), BadName, "is not a valid peer class"),
        (lambda: ProtocolSlot("s", "a.b"), BadName, "is not a valid protocol name"),
        (
            lambda: FromFunction(lambda g: None, name="a b").build(),
            BadName,
            "is not a valid Module name",
        ),
        (lambda: FromFunction(lambda g: None, name="X__bootstrap").build(), BadName, "ends in"),
        (lambda: FromFunction(lambda g: None, home="two words").build(), BadName, "peer class"),
        (lambda: Module().build(), RecordingError, "has no body"),
    ],
)
def test_faults_outside_of_a_body(make, error, text) -> None:
    with pytest.raises(error, match=text):
        make()


M = ModelSlot("m")


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        (lambda g, x: g.input("x"), DuplicateName, "'x' names an input or output already"),
        (lambda g, x: g.output("x", x), DuplicateName, "'x' names"),
        (lambda g, x: [g.output("y", x), g.output("y", x)], DuplicateName, "'y' names"),
        (lambda g, x: g.input("a.b"), BadName, "is not a valid input name"),
        (lambda g, x: g.output("a,b", x), BadName, "is not a valid output name"),
        (lambda g, x: g.input("y", "float"), BadArgument, "is not a type"),
        (lambda g, x: g.output("y", 3), BadArgument, "g.constant"),
        (lambda g, x: g.output("y", x, after="x"), BadArgument, "neither a recorded value"),
        (lambda g, x: g.output("y", x, after=["x"]), BadArgument, "not a recorded value"),
        (lambda g, x: g.net_out("a/b", x, x), BadName, "is not a valid port name"),
        (lambda g, x: [g.net_out("p", x, x), g.request("p", x, x)], DuplicateName, "sent to"),
        (lambda g, x: g.net_out("p", None, x), BadArgument, "'peers' of Send can't be left out"),
        (lambda g, x: g.lookup_output("p"), UnknownName, "nothing was sent as 'p'; there is none"),
        (lambda g, x: [g.net_out("pong", x, x), g.lookup_output("pon")], UnknownName,
         "did you mean 'pong'"),
        (lambda g, x: g.request("p", x, x, quorum=-1), BadArgument, "integer of at least 0"),
        (lambda g, x: g.request("p", x, x, quorum=True), BadArgument, "an integer"),
        (lambda g, x: g.request("p", x, x, deadline=-1), BadArgument, "number of seconds"),
        (lambda g, x: g.request("p", x, x, deadline=float("nan")), BadArgument, "number of sec"),
        (lambda g, x: g.request("p", x, x, deadline="2s"), BadArgument, "number of seconds"),
        (lambda g, x: [r := g.request("p", x, x), r.respond(x), r.respond(x)], BadArgument,
         r"answered already at test_errors\.py:\d+"),
        (lambda g, x: g.respond(x, x), BadArgument, "is not a request"),
        (lambda g, x: g.bundle([]), BadArgument, "one or more values"),
        (lambda g, x: g.bundle([x, 3]), BadArgument, "3 .int. is not a recorded value"),
        (lambda g, x: g.unbundle(x, []), BadArgument, "one or more types"),
        (lambda g, x: g.unbundle(x, ["float"]), BadArgument, "is not a type"),
        (lambda g, x: g.constant("text"), BadArgument, "can't be a constant"),
        (lambda g, x: g.constant({"a": 1}), BadArgument, "can't be a constant"),
        (lambda g, x: g.constant(np.array([b"a"])), BadArgument, "dtype .S1"),
        (lambda g, x: g.constant(1 << 70), BadArgument, "can't be a constant"),
        (lambda g, x: g.constant(values.U64(-1)), BadArgument, "can't be a constant"),
        (lambda g, x: g.peer_id("nobody0"), BadArgument, "not a PeerId"),
        (lambda g, x: g.peer_ids([3]), BadArgument, "neither a PeerId nor its text"),
        (lambda g, x: g.address("localhost"), BadArgument, "not a multiaddr"),
        (lambda g, x: g.address(3), BadArgument, "neither a multiaddr nor its text"),
        (lambda g, x: M.op(g, "Forward"), BadArgument, r"takes the values \(input\), got 0"),
        (lambda g, x: M.op(g, "Params", x), BadArgument, "takes no values, got 1 value"),
        (lambda g, x: M.op(g, "Train", epoch=1), BadArgument, "did you mean 'epochs'"),
        (lambda g, x: M.train(g, epochs=0), BadArgument, "integer of at least 1"),
        (lambda g, x: M.train(g, epochs="5"), BadArgument, "epochs='5' of Train has to be an int"),
        (lambda g, x: M.op(g, "Fit"), NoSuchOp, "ModelSlot has no op 'Fit'"),
        (lambda g, x: M.params(x), BadArgument, "first argument is the Graph"),
        (lambda g, x: PeerSelectorSlot("s").op(g, "Sample"), BadArgument, "needs the attribute n="),
        (lambda g, x: PeerSelectorSlot("s").sample(g, n=0), BadArgument, "at least 1"),
        (lambda g, x: syscalls.interval(g, period_ns=0), BadArgument, "at least 1"),
        (lambda g, x: syscalls.interval(g, period_ns=0.5), BadArgument, "an integer"),
        (lambda g, x: syscalls.sleep(g, x, duration_ns=1 << 64), BadArgument, "integer"),
        (lambda g, x: syscalls.tee(g, x, fanout="2"), BadArgument, "an integer"),
        (lambda g, x: syscalls.tee(g, x, fanout=10**9), BadArgument, "at most 65536"),
        (lambda g, x: syscalls.app_emit(g, x, name=""), BadArgument, "text that is not empty"),
        (lambda g, x: syscalls.app_emit(g, x, name=3), BadArgument, "name=3 of AppEmit"),
        (lambda g, x: syscalls.app_emit(g, x, name="bb.done"), BadArgument, "like the node's own"),
        (lambda g, x: syscalls.app_notify(g, x, name="ai.bytesandbrains.x"), BadArgument, "own"),
        (lambda g, x: syscalls.pulse(x), BadArgument, "first argument is the Graph, got"),
        (lambda g, x: syscalls.constant(x, 3), BadArgument, "write syscalls.constant"),
        (lambda g, x: syscalls.app_emit(None, x, name="bb.x"), BadArgument, "Graph, got None"),
        (lambda g, x: g.tensor([1], types.PEER_ID), BadArgument, "is not a tensor type"),
        (lambda g, x: g.tensor([1], "float"), BadArgument, "type='float' is not a tensor type"),
        (lambda g, x: g.tensor("text"), BadArgument, "not of dtype <U4"),
        (lambda g, x: g.tensor([[1], [1, 2]]), BadArgument, "it has to be an array"),
        (lambda g, x: g.tensor([300], types.TENSOR_BY_ELEM[3]), BadArgument,
         "be a Tensor.INT8: it has to be numbers that the type holds; choose a wider one"),
        (lambda g, x: g.tensor(1.5, types.TENSOR_INT64), BadArgument, "that the type holds"),
        (lambda g, x: g.tensor(float("nan"), types.TENSOR_INT64), BadArgument, "type holds"),
        (lambda g, x: g.tensor(1e300), BadArgument, "that the type holds"),
        (lambda g, x: syscalls.threshold(g, n=1), BadArgument, "inputs…"),
        (lambda g, x: bool(x), BadArgument, "no truth value"),
        (lambda g, x: x + x, BadArgument, r"compute\.add\(g, a, b\)"),
        (lambda g, x: 2.0 * x, BadArgument, "operators of Python"),
        (lambda g, x: x > 1, BadArgument, r"compute\.less\(g, a, b\)"),
        (lambda g, x: x.sender, NotReceived, "has no sender"),
    ],
)  # fmt: skip
def test_faults_in_a_body(record, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        build(lambda g: record(g, g.input("x", types.TENSOR_FLOAT)))
    assert caught.value.module == "Program"
    assert caught.value.source.startswith("test_errors.py:")
