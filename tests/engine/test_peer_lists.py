"""`ai.onnx` ops on lists of peers: what ONNX says they do on a 1-d array."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr
from onnx import TensorProto, helper

from bbnode.engine import steps
from bbnode.engine.errors import InvalidArtifact
from bbnode.ir import keys, types
from bbnode.ir.values import AddressVec, PeerIdVec
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, of, peer

PEERS = PeerIdVec(peer(n) for n in range(6))
ADDRESSES = AddressVec(Multiaddr(f"/ip4/10.0.0.{n}/tcp/1") for n in range(3))


def ints(*numbers) -> np.ndarray:
    return np.array(numbers, np.int64)


def program(op_type, count=1, *, node=types.PEER_ID_VEC, **attributes):
    names = [f"i{n}" for n in range(count)]
    p = Partition("server", inputs=names)
    if node is not None:
        p.type("i0", node)
    p.op("", op_type, names, ["y"], called="it", **attributes)
    p.output("out", "y")
    return bring_up(model(p), "server")


def outcome(node, *given):
    node.invoke("server", {f"i{n}": value for n, value in enumerate(given)})
    made = node.poll(0)
    failed = of(steps.OpFailed, made)
    if failed:
        return failed[0]
    (event,) = of(steps.AppEvent, made)
    return event.value


@pytest.mark.parametrize(
    ("op_type", "given", "expected"),
    [
        ("Identity", [PEERS], PEERS),
        ("Slice", [PEERS, ints(1), ints(3)], PEERS[1:3]),
        ("Slice", [PEERS, ints(-2), ints(2**62)], PEERS[-2:]),
        ("Slice", [PEERS, ints(5), ints(-(2**62)), ints(0), ints(-2)], PEERS[::-2]),
        ("Slice", [PEERS, ints(4), ints(1)], ()),
        ("Gather", [PEERS, ints(0, -1, 2, 2)], (peer(0), peer(5), peer(2), peer(2))),
        ("Gather", [PEERS, ints()], ()),
        ("Concat", [PEERS, PEERS], (*PEERS, *PEERS)),
        ("Squeeze", [PeerIdVec([peer(3)])], peer(3)),
        ("Squeeze", [PeerIdVec([peer(3)]), ints(-1)], peer(3)),
        ("Unsqueeze", [peer(3), ints(0)], (peer(3),)),
    ],
)
def test_what_an_op_gives(op_type, given, expected) -> None:
    known = types.PEER_ID if op_type == "Unsqueeze" else types.PEER_ID_VEC
    axis = {"axis": 0} if op_type == "Concat" else {}
    got = outcome(program(op_type, len(given), node=known, **axis), *given)
    assert got == expected
    if isinstance(expected, tuple):
        assert type(got) is PeerIdVec


def test_addresses_are_lists_as_well() -> None:
    got = outcome(program("Slice", 3, node=types.ADDRESS_VEC), ADDRESSES, ints(1), ints(9))
    assert type(got) is AddressVec
    assert got == ADDRESSES[1:]
    assert outcome(program("Unsqueeze", 2, node=types.MULTIADDRESS), ADDRESSES[0], ints(0)) == (
        ADDRESSES[0],
    )


def test_the_type_need_not_be_known_where_no_backend_is_asked() -> None:
    assert outcome(program("Gather", 2, node=None), PEERS, ints(1)) == (peer(1),)


def test_the_bounds_may_be_attributes_as_in_older_opsets() -> None:
    node = program("Slice", 1, starts=[1], ends=[-1], axes=[0])
    assert outcome(node, PEERS) == PEERS[1:-1]
    assert outcome(program("Squeeze", 1, axes=[0]), PeerIdVec([peer(1)])) == peer(1)
    assert outcome(program("Unsqueeze", 1, node=types.PEER_ID, axes=[0]), peer(1)) == (peer(1),)


@pytest.mark.parametrize(
    ("op_type", "given", "text"),
    [
        ("Gather", [PEERS, ints(6)], "index 6 into a list of 6"),
        ("Gather", [PEERS, ints(-7)], "index -7 into a list of 6"),
        ("Gather", [PEERS, np.array(1)], "0 dimensions"),
        ("Gather", [PEERS, np.array([1.0], np.float32)], "whole numbers"),
        ("Gather", [PEERS, PEERS], "whole numbers"),
        ("Slice", [PEERS, ints(1, 2), ints(3, 4)], "one start"),
        ("Slice", [PEERS, ints(1), ints(3), ints(1)], "axis 0 alone"),
        ("Slice", [PEERS, ints(1), ints(3), ints(0), ints(0)], "not 0"),
        ("Squeeze", [PEERS], "list of 6"),
        ("Squeeze", [PeerIdVec()], "list of 0"),
        ("Unsqueeze", [peer(1), ints(1)], "axis 0 alone"),
        ("Unsqueeze", [peer(1), ints(0, 1)], "one axis"),
        ("Concat", [PEERS, ADDRESSES], "can't be joined"),
        ("Identity", [np.ones(1, np.float32)], "no list"),
    ],
)
def test_what_cannot_be_done_is_a_failed_op(op_type, given, text) -> None:
    node = program(op_type, len(given), node=None, **({"axis": 0} if op_type == "Concat" else {}))
    failed = outcome(node, *given)
    assert (failed.kind, failed.op) == ("InvalidOperand", "it")
    assert text in failed.detail


@pytest.mark.parametrize(
    ("op_type", "count", "attributes", "text"),
    [
        ("Gather", 2, {"axis": 1}, "axis 1"),
        ("Gather", 1, {}, "1 inputs"),
        ("Slice", 2, {}, "2 inputs"),
        ("Concat", 2, {"axis": 3}, "axis 3"),
    ],
)
def test_what_can_never_work_is_refused_at_install(op_type, count, attributes, text) -> None:
    with pytest.raises(InvalidArtifact, match=text):
        program(op_type, count, **attributes)


def test_a_tensor_op_without_a_backend_is_still_refused() -> None:
    with pytest.raises(InvalidArtifact, match="slot"):
        program("Identity", 1, node=types.TENSOR_FLOAT)


big = st.one_of(st.integers(-9, 9), st.sampled_from([-(2**62), 2**62]))


def by_onnx(op_type: str, size: int, *more: np.ndarray, **attributes) -> list[int]:
    names = [f"i{n}" for n in range(len(more) + 1)]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.INT64, [None]) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [None])],
    )
    data = np.arange(size, dtype=np.int64)
    opset = helper.make_opsetid("", keys.ONNX_OPSET_VERSION)
    made = helper.make_model(graph, ir_version=keys.FRAMEWORK_IR_VERSION, opset_imports=[opset])
    # Not ONNX's reference evaluator: it slices as numpy does, which clamps a start that is
    # before the beginning otherwise than the operator's text says.
    session = onnxruntime.InferenceSession(made.SerializeToString())
    (got,) = session.run(None, dict(zip(names, (data, *more), strict=True)))
    return [int(n) for n in got]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 6), big, big, st.sampled_from([-3, -2, -1, 1, 2, 3]))
def test_slices_are_those_of_onnx(size, start, end, step) -> None:
    node = program("Slice", 5)
    got = outcome(node, PeerIdVec(PEERS[:size]), ints(start), ints(end), ints(0), ints(step))
    expected = by_onnx("Slice", size, ints(start), ints(end), ints(0), ints(step))
    assert [PEERS.index(each) for each in got] == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(-n, n - 1), max_size=8))
))  # fmt: skip
def test_gathers_are_those_of_onnx(given_) -> None:
    size, picked = given_
    got = outcome(program("Gather", 2), PeerIdVec(PEERS[:size]), ints(*picked))
    assert [PEERS.index(each) for each in got] == by_onnx("Gather", size, ints(*picked))


def told_by(op_type, *given, **attributes):
    names = [f"i{n}" for n in range(len(given))]
    p = Partition("server", inputs=names)
    p.sys(op_type, names, "y", **attributes)
    p.output("out", "y")
    return outcome(bring_up(model(p), "server"), *given)


def bools(*flags) -> np.ndarray:
    return np.array(flags, np.bool_)


@given(st.lists(st.booleans(), max_size=6))
def test_a_filter_keeps_the_peers_that_the_mask_says_in_their_order(flags) -> None:
    peers = PeerIdVec(PEERS[: len(flags)])
    got = told_by("Peers.Filter", peers, bools(*flags))
    assert got == PeerIdVec(each for each, keep in zip(peers, flags, strict=True) if keep)
    assert type(got) is PeerIdVec


@pytest.mark.parametrize(
    "mask",
    [bools(True), bools(*[True] * 7), ints(*[1] * 6), bools(*[True] * 6).reshape(2, 3), peer(1)],
)
def test_a_mask_that_does_not_fit_fails_the_op(mask) -> None:
    failed = told_by("Peers.Filter", PEERS, mask)
    assert failed.kind == "InvalidOperand"
    assert "6 bools" in failed.detail


def test_what_else_is_asked_of_a_list_of_peers() -> None:
    assert told_by("Peers.Without", PEERS, peer(2)) == (*PEERS[:2], *PEERS[3:])
    assert told_by("Peers.Without", PEERS, peer(77)) == PEERS
    count = told_by("Peers.Count", PEERS)
    assert (int(count), count.dtype, count.shape) == (6, np.int64, ())
    assert told_by("Peers.Contains", PEERS, peer(2)).tolist() is True
    assert told_by("Peers.Contains", PEERS, peer(77)).tolist() is False
    for op_type in ("Peers.Without", "Peers.Contains"):
        assert told_by(op_type, PEERS, PEERS).kind == "InvalidOperand"
        assert told_by(op_type, ADDRESSES, peer(1)).kind == "InvalidOperand"


def test_choose_takes_one_of_two_values() -> None:
    assert told_by("Choose", np.array(True), PEERS, PeerIdVec()) == PEERS
    assert told_by("Choose", np.array([False]), PEERS, PeerIdVec()) == PeerIdVec()
    assert told_by("Choose", ints(1), PEERS, PEERS).kind == "InvalidOperand"
