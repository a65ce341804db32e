"""`if_` and `loop`: what is recorded, what runs after compilation, and what is refused."""

# ruff: noqa: ARG005  # every case of a table takes the same arguments

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CrossClassDataflow
from bbnode.components import ConnectedView, OrtBackend, ReferenceBackend
from bbnode.dsl import (
    BackendSlot,
    BadArgument,
    Branch,
    BranchMismatch,
    BranchMisuse,
    ForeignOutput,
    Graph,
    GraphClosed,
    LoopStep,
    ModelSlot,
    Module,
    PeerSelectorSlot,
    SlotConflict,
    syscalls,
    types,
)
from bbnode.dsl.backend.control import MAX_BRANCH_DEPTH
from bbnode.ir import keys
from bbnode.ir.slots import ConcreteSpec
from bbnode.sim import Network
from tests import protos
from tests.dsl.programs import FromFunction, build, only, root

C = BackendSlot("compute")
F, B, I = types.TENSOR_FLOAT, types.TENSOR_BOOL, types.TENSOR_INT64  # noqa: E741
X = np.array([1, 2], np.float32)


def compiled(model: ModelProto) -> ModelProto:
    onnx.checker.check_model(model)
    return Compiler().bind_backend("compute", OrtBackend).compile(model)


def run(body, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Compile what the body records, run it on one node, and give its outputs."""
    return run_model(build(body), **inputs)


def run_model(model: ModelProto, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    network = Network(seed=0)
    node = network.add("node", compiled(model), ["a"])
    node.invoke("a", dict(inputs))
    network.run_until_idle()
    found = {}
    for name in model.functions[0].output:
        (found[name],) = node.values(name)
    return found


# --- if_ -------------------------------------------------------------------------------------


def choose(g: Graph) -> None:
    x, flag = g.input("x", F), g.input("flag", B)
    doubled = C.mul(g, x, g.constant(2.0))
    big, same = C.if_(
        g,
        flag,
        lambda b: (C.add(b, x, doubled), x),
        lambda b: [C.sub(b, x, b.constant(1.0)), doubled],
    )
    g.output("big", big)
    g.output("same", same)


def test_if_is_recorded_as_two_graphs_that_capture() -> None:
    function, node = only(choose, "If")
    assert list(node.input) == ["flag"]
    assert list(node.output) == ["If_0.outputs_0", "If_0.outputs_1"]
    assert protos.get_meta(node, keys.SLOT_KEY) == "compute"
    then, otherwise = (protos.get_attr(node, name) for name in ("then_branch", "else_branch"))
    assert [n.op_type for n in then.node] == ["Add", "Identity"]  # an output is made inside
    assert [n.op_type for n in otherwise.node] == ["Constant", "Sub", "Identity"]
    assert list(then.node[0].input) == ["x", "Mul_0.C"]
    assert [o.name for o in then.output] == ["body.1/Add_0.C", "body.1/Identity_0.output"]
    assert not then.input
    assert not any(n.metadata_props for graph in (then, otherwise) for n in graph.node)
    known = protos.value_types(function)
    assert known["If_0.outputs_0"] is F
    assert [n.op_type for n in function.node] == ["Constant", "Mul", "If", *["PassThrough"] * 2]


@pytest.mark.parametrize(("flag", "big", "same"), [(True, [3, 6], [1, 2]), (False, [0, 1], [2, 4])])
def test_if_runs_one_branch(flag, big, same) -> None:
    made = run(choose, x=X, flag=np.array(flag))
    assert (made["big"].tolist(), made["same"].tolist()) == (big, same)


def test_if_and_the_ops_around_it_are_one_graph_of_the_backend() -> None:
    model = compiled(build(choose))
    (main,) = (f for f in model.functions if protos.get_meta(f, keys.TARGET_KEY))
    calls = [n for n in main.node if n.domain == keys.BACKEND_SUBGRAPH_DOMAIN]
    assert len(calls) == 1
    (subgraph,) = (f for f in model.functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN)
    assert "If" in [n.op_type for n in subgraph.node]


@pytest.mark.parametrize("flags", [(a, b) for a in (True, False) for b in (True, False)])
def test_branches_nest(flags) -> None:
    def body(g: Graph) -> None:
        x, outer, inner = g.input("x", F), g.input("outer", B), g.input("inner", B)

        def then(b: Graph):
            negative = C.neg(b, x)
            return C.if_(b, inner, lambda d: C.mul(d, negative, x), lambda d: C.add(d, negative, x))

        g.output("y", C.if_(g, outer, then, lambda b: x))

    made = run(body, x=X, outer=np.array(flags[0]), inner=np.array(flags[1]))
    wanted = X if not flags[0] else (-X * X if flags[1] else X * 0)
    assert made["y"].tolist() == wanted.tolist()


def test_one_value_returned_twice_is_two_outputs() -> None:
    def body(g: Graph) -> None:
        x, flag = g.input("x", F), g.input("flag", B)

        def twice(b: Graph):
            y = C.neg(b, x)
            return y, y

        p, q = C.if_(g, flag, twice, lambda b: (x, x))
        g.output("p", p)
        g.output("q", q)

    made = run(body, x=X, flag=np.array(True))
    assert made["p"].tolist() == made["q"].tolist() == [-1, -2]


def test_values_captured_in_a_module_that_is_called_twice() -> None:
    class Clamp(Module):
        def body(self, g: Graph) -> None:
            x, top = g.input("x", F), g.input("top", F)
            limit = C.mul(g, top, C.constant(g, 2.0))
            total = C.reduce_sum(g, x, keepdims=False)
            is_over = C.greater(g, total, limit)
            g.output("y", C.if_(g, is_over, lambda b: C.div(b, x, limit), lambda b: x))

    def body(g: Graph) -> None:
        x, top = g.input("x", F), g.input("top", F)
        once = Clamp().call().input("x", x).input("top", top).build(g).output("y")
        half = C.mul(g, top, C.constant(g, 0.05))
        g.output("y", Clamp().call().input("x", once).input("top", half).build(g).output("y"))

    made = run(body, x=X, top=np.array(1, np.float32))
    np.testing.assert_allclose(made["y"], X / 2 / 0.1, rtol=1e-6)


# --- loop ------------------------------------------------------------------------------------


def grow(g: Graph) -> None:
    x, start, limit = g.input("x", F), g.input("start", F), g.input("limit", F)

    def step(b: Graph, i, total, count):
        bigger = C.add(b, total, x)
        return LoopStep(
            carried=[bigger, C.add(b, count, b.constant(1))],
            scans=[bigger, i],
            keep_going=C.less(b, C.reduce_sum(b, bigger, keepdims=False), limit),
        )

    made = C.loop(g, step, start, C.constant(g, 0), trip_count=7)
    for name, value in zip(("total", "count"), made.carried, strict=True):
        g.output(name, value)
    for name, value in zip(("history", "steps"), made.scans, strict=True):
        g.output(name, value)


def test_loop_is_recorded_with_all_its_ports() -> None:
    function, node = only(grow, "Loop")
    assert [name.rpartition(".")[2] for name in node.output] == [
        f"v_final_and_scan_outputs_{i}" for i in range(4)
    ]
    assert list(node.input)[1:3] == ["", "start"]
    body = protos.get_attr(node, "body")
    assert [p.name for p in body.input] == [
        f"body.1/{name}" for name in ("iteration", "keep_going", "carried_0", "carried_1")
    ]
    assert len(body.output) == 5  # whether to go on, two carried values, two scans
    known = protos.value_types(function)
    assert [known[name] for name in node.output] == [F, I, F, I]


@pytest.mark.parametrize(("limit", "steps"), [(1e9, 7), (10, 4), (0, 1)])
def test_loop_ends_by_count_or_by_condition(limit, steps) -> None:
    made = run(grow, x=X, start=np.zeros(2, np.float32), limit=np.array(limit, np.float32))
    assert made["count"] == steps
    assert made["total"].tolist() == (X * steps).tolist()
    assert made["history"].tolist() == [(X * (n + 1)).tolist() for n in range(steps)]
    assert made["steps"].tolist() == list(range(steps))


@given(
    start=st.integers(-50, 50), trips=st.integers(0, 6), begin=st.booleans(),
    limit=st.integers(-200, 200),
)  # fmt: skip
def test_a_loop_means_what_the_same_loop_in_python_means(start, trips, begin, limit) -> None:
    def body(g: Graph) -> None:
        n, count, go = g.input("n", I), g.input("count", I), g.input("go", B)

        def step(b: Graph, i, value):
            is_low = C.less(b, value, b.constant(0))
            moved = C.if_(b, is_low, lambda d: C.mul(d, value, value), lambda d: C.sub(d, value, i))
            return LoopStep(
                carried=[C.sub(b, moved, b.constant(3))],
                keep_going=C.less(b, moved, b.constant(limit)),
            )

        g.output("y", C.loop(g, step, n, trip_count=count, condition=go).carried[0])

    value, going = start, begin
    for i in range(trips):
        if not going:
            break
        moved = value * value if value < 0 else value - i
        value, going = moved - 3, moved < limit
    made = run(body, n=np.array(start), count=np.array(trips), go=np.array(begin))
    assert made["y"] == value


def test_a_loop_without_carried_values_collects() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)

        def step(b: Graph, i):
            return LoopStep(scans=[C.mul(b, x, C.cast(b, i, to=F))])

        g.output("y", C.loop(g, step, trip_count=3).scans[0])

    assert run(body, x=X)["y"].tolist() == [[0, 0], [1, 2], [2, 4]]


def test_a_loop_in_a_loop() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)

        def outer(b: Graph, i, total):
            return C.loop(
                b, lambda d, j, inner: C.add(d, inner, x), total, trip_count=C.identity(b, i)
            ).carried

        g.output("y", C.loop(g, outer, x, trip_count=4).carried[0])

    assert run(body, x=X)["y"].tolist() == (X * (1 + 0 + 1 + 2 + 3)).tolist()


# --- both ------------------------------------------------------------------------------------


def test_the_same_program_is_the_same_bytes() -> None:
    assert build(grow).SerializeToString() == build(grow).SerializeToString()


def test_equal_branches_at_two_places_are_one_graph_of_the_backend() -> None:
    def body(g: Graph) -> None:
        for k in range(2):
            x, flag = g.input(f"x{k}", F), g.input(f"flag{k}", B)
            g.output(f"y{k}", C.if_(g, flag, lambda b, x=x: C.neg(b, x), lambda b, x=x: x))

    subgraphs = [
        f for f in compiled(build(body)).functions if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN
    ]
    assert len(subgraphs) == 1


def test_what_a_branch_captures_says_where_the_op_runs() -> None:
    def body(g: Graph, captured: str) -> None:
        x, flag = g.input("x", F), g.input("flag", B)
        peers = PeerSelectorSlot("peers", peer_class="b").current_view(g)
        both = g.net_out("both", peers, g.bundle([x, flag]))
        there, flag_there = g.unbundle(both, [F, B])
        value = {"here": x, "there": there}[captured]
        y = C.if_(g, flag_there, lambda b: C.neg(b, value), lambda b: C.abs(b, there))
        g.net_out("y", both.sender, y)

    compiler = (
        Compiler().bind_backend("compute", OrtBackend).bind_peer_selector("peers", ConnectedView)
    )
    compiler.compile(build(lambda g: body(g, "there")))
    with pytest.raises(CrossClassDataflow, match="If_0"):
        compiler.compile(build(lambda g: body(g, "here")))


def test_scopes_in_a_branch_are_for_readers() -> None:
    def body(g: Graph) -> None:
        x, flag = g.input("x", F), g.input("flag", B)

        def then(b: Graph):
            with b.with_module("inner"):
                return C.neg(b, x)

        g.output("y", C.if_(g, flag, then, lambda b: x))

    then = protos.get_attr(only(body, "If")[1], "then_branch")
    assert then.node[0].name == "body.1/inner/Neg_0"
    assert run(body, x=X, flag=np.array(True))["y"].tolist() == [-1, -2]


def test_after_holds_the_whole_op() -> None:
    def body(g: Graph) -> None:
        x, flag, tick = g.input("x", F), g.input("flag", B), g.input("tick")
        C.if_(g, flag, lambda b: x, lambda b: x, after=tick)
        C.loop(g, lambda b, i, v: v, x, trip_count=1, after=tick)

    nodes = [n for n in root(body).node if n.op_type in ("If", "Loop")]
    assert [protos.get_meta(n, keys.AFTER_KEY) for n in nodes] == ["tick", "tick"]


class Pass(Module):
    def body(self, g: Graph) -> None:
        g.output("y", g.input("x"))


def in_branch(record):
    """A case that records in a branch, with the Graphs and values that there are."""
    return lambda g, x, flag: C.if_(g, flag, lambda b: [record(g, b, x), x][1:], lambda b: [x])


def nest(g: Graph, x, flag, depth: int):
    if not depth:
        return x
    return C.if_(g, flag, lambda b: nest(b, x, flag, depth - 1), lambda b: x)


def leaked(g: Graph, x, flag):
    kept = []
    C.if_(g, flag, lambda b: kept.append(C.neg(b, x)) or x, lambda b: x)
    return C.neg(g, kept[0])


def sibling(g: Graph, x, flag):
    kept = []
    return C.if_(g, flag, lambda b: kept.append(C.neg(b, x)) or x, lambda b: C.neg(b, kept[0]))


def kept_open(g: Graph, x, flag):
    kept = []
    C.if_(g, flag, lambda b: kept.append(b) or x, lambda b: x)
    C.neg(kept[0], x)


CONCRETE = BackendSlot("compute", concrete=ConcreteSpec(role="Backend", type_name="t", config=b"1"))
OTHER = BackendSlot("compute", concrete=ConcreteSpec(role="Backend", type_name="t", config=b"2"))


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        (lambda g, x, f: C.if_(g, f, lambda b: (x, x), lambda b: (x,)), BranchMismatch,
         "then branch of If returns a list of 2 and the else branch a list of 1"),
        (lambda g, x, f: C.if_(g, f, lambda b: x, lambda b: (x,)), BranchMismatch,
         "returns one value and the else branch a list of 1; both have to return the same"),
        (lambda g, x, f: C.if_(g, f, lambda b: x, lambda b: f), BranchMismatch,
         "value 0 of the then branch of If is a Tensor.FLOAT and the else branch's a Tensor.BOOL"),
        (lambda g, x, f: C.if_(g, f, lambda b: None, lambda b: x), BadArgument,
         "the then branch of If returns None; return a recorded value"),
        (lambda g, x, f: C.if_(g, f, lambda b: [1], lambda b: x), BadArgument,
         "1 .int. is not a recorded value"),
        (lambda g, x, f: C.if_(g, f, lambda b: [], lambda b: []), BadArgument, "1 to 65536"),
        (lambda g, x, f: C.if_(g, f, x, lambda b: x), BadArgument, "which can't be called"),
        (lambda g, x, f: C.if_(g, True, lambda b: x, lambda b: x), BadArgument,
         "True .bool. is not a recorded value"),
        (in_branch(lambda g, b, x: ModelSlot("m").params(b)), BranchMisuse,
         "Params of slot 'm' can't stand in the then branch of If, which runs whole in the"),
        (in_branch(lambda g, b, x: BackendSlot("other").neg(b, x)), BranchMisuse, "slot 'other'"),
        (in_branch(lambda g, b, x: b.net_out("p", x, x)), BranchMisuse, "Send can't stand"),
        (in_branch(lambda g, b, x: b.request("p", x, x)), BranchMisuse, "SendReqBatched"),
        (in_branch(lambda g, b, x: b.bundle([x])), BranchMisuse, "Bundle"),
        (in_branch(lambda g, b, x: syscalls.tee(b, x, fanout=2)), BranchMisuse, "Tee"),
        (in_branch(lambda g, b, x: Pass().call().input("x", x).build(b)), BranchMisuse, "Pass"),
        (in_branch(lambda g, b, x: b.input("y")), BranchMisuse, "no inputs of its own"),
        (in_branch(lambda g, b, x: b.output("y", x)), BranchMisuse, "return the one for 'y'"),
        (in_branch(lambda g, b, x: C.neg(b, x, after=x)), BranchMisuse, "has after="),
        (in_branch(lambda g, b, x: b.peer_ids([])), BadArgument, "computes with tensors only"),
        (in_branch(lambda g, b, x: b.constant("x")), BadArgument, "can't be a constant"),
        (in_branch(lambda g, b, x: C.neg(g, x)), BranchMisuse,
         "the then branch of If is being recorded; give its ops the Graph that it gets"),
        (in_branch(lambda g, b, x: g.input("late")), BranchMisuse, "is being recorded"),
        (lambda g, x, f: [r := g.request("p", x, x),
                          C.if_(g, f, lambda b: r.respond(x) or x, lambda b: x)],
         BranchMisuse, "is being recorded"),
        (in_branch(lambda g, b, x: [CONCRETE.neg(b, x), OTHER.neg(b, x)]), None, ""),
        (lambda g, x, f: [CONCRETE.neg(g, x), OTHER.if_(g, f, lambda b: x, lambda b: x)],
         SlotConflict, "another config"),
        (leaked, ForeignOutput, "then branch of If and is not a value of this Graph; return"),
        (sibling, ForeignOutput, "return it from the branch"),
        (kept_open, GraphClosed, "the then branch of If has finished recording"),
        (lambda g, x, f: nest(g, x, f, MAX_BRANCH_DEPTH + 1), BranchMisuse, "nest deeper than 16"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: v, x), BadArgument, "the Loop never ends"),
        (lambda g, x, f: C.loop(g, lambda b, i: [], trip_count=1), BadArgument, "has no results"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: v, x, trip_count=-1), BadArgument, "from 0 on"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: v, x, trip_count=1.5), BadArgument, "from 0 on"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: v, 3.0, trip_count=1), BadArgument,
         "3.0 .float. is not a recorded value"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: v, x, condition=True), BadArgument, "True"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: (v, v), x, trip_count=1), BranchMismatch,
         "gets a list of 1 from the previous iteration and returns a list of 2 for the next"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: f, x, trip_count=1), BranchMismatch,
         "carried value 0 of Loop is a Tensor.FLOAT and what the body makes of it a Tensor.BOOL"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: 1, x, trip_count=1), BadArgument, "returns 1"),
        (lambda g, x, f: C.loop(g, lambda b, i, v: LoopStep(carried=[v], scans=x), x, trip_count=1),
         None, ""),
        (lambda g, x, f: C.loop(g, lambda b, i, v: LoopStep(carried=[v], keep_going=True), x),
         BadArgument, "True .bool. is not a recorded value"),
        (lambda g, x, f: C.loop(g, None, x, trip_count=1), BadArgument, "can't be called"),
    ],
)  # fmt: skip
def test_what_is_refused(record, error, text) -> None:
    def body(g: Graph) -> None:
        record(g, g.input("x", F), g.input("flag", B))

    if error is None:
        build(body)
        return
    with pytest.raises(error, match=text) as caught:
        build(body)
    assert caught.value.module == "Program"
    assert caught.value.source.startswith("test_control_flow.py:")


def test_branches_as_deep_as_allowed_compile() -> None:
    def body(g: Graph) -> None:
        x, flag = g.input("x", F), g.input("flag", B)
        g.output("y", nest(g, C.neg(g, x), flag, MAX_BRANCH_DEPTH))

    assert run(body, x=X, flag=np.array(True))["y"].tolist() == [-1, -2]


@pytest.mark.parametrize("backend", [OrtBackend, ReferenceBackend])
def test_a_loop_without_a_condition_runs_its_count_on_every_backend(backend) -> None:
    def body(g: Graph) -> None:
        x = g.input("x", F)
        g.output("y", C.loop(g, lambda b, i, v: C.add(b, v, x), x, trip_count=3).carried[0])

    made = Compiler().bind_backend("compute", backend).compile(build(body))
    network = Network(seed=0)
    node = network.add("node", made, ["a"])
    node.invoke("a", {"x": X})
    network.run_until_idle()
    (y,) = node.values("y")
    assert y.tolist() == [4, 8]


def test_after_a_failed_branch_the_graph_can_be_used() -> None:
    def body(g: Graph) -> None:
        x, flag = g.input("x", F), g.input("flag", B)
        with pytest.raises(BadArgument):
            C.if_(g, flag, lambda b: None, lambda b: x)
        g.output("y", C.neg(g, x))

    assert [n.op_type for n in root(body).node] == ["Neg", "PassThrough"]


def test_a_branch_is_a_graph() -> None:
    seen: list[Graph] = []

    def body(g: Graph) -> None:
        x, flag = g.input("x", F), g.input("flag", B)
        C.if_(g, flag, lambda b: seen.append(b) or x, lambda b: x)

    FromFunction(body).build()
    assert isinstance(seen[0], Branch)
