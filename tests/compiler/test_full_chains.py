"""Depth of chains, deadlines, and the variants of wire ops, from an author's source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import helper

from bbnode.compiler import Compiler
from bbnode.compiler.analysis.chain_depth import MAX_CHAIN_DEPTH, MAX_DEADLINE_NS
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.errors import CyclicGraph, ExpansionFailed
from bbnode.compiler.unit import CompileOptions
from bbnode.components.registry import register_component
from bbnode.dsl import (
    AggregatorSlot,
    BadArgument,
    BadName,
    Graph,
    ModelSlot,
    Module,
    Output,
    PeerSelectorSlot,
    syscalls,
    types,
)
from bbnode.ir import graph, keys
from bbnode.ir.graph import Attribute, AttributeKind, Function, OpNode, Program
from bbnode.ir.onnx_file import program_of
from bbnode.ir.peer import PeerId
from tests.compiler import back_units, programs
from tests.compiler.programs import FakeAggregator, FakeModel, FakeSelector, run

PASS = "derive_wire_deadlines"
BUDGET = 1_000
PEER = PeerId.from_seed("fixed")


class Written(Module):
    """A Module made of a function."""

    home = "a"

    def __init__(self, body: Callable[[Graph], object], name: str = "Written") -> None:
        self.name = name
        self._body = body

    def body(self, g: Graph) -> None:
        self._body(g)


def peers(g: Graph, name: str, after: Output | None = None, n: int = 1) -> Output:
    return PeerSelectorSlot(f"pick_{name}", peer_class=name).sample(g, n=n, after=after)


def derived(body: Callable[[Graph], object], *more: str) -> dict[str, tuple[int, int]]:
    """(chain depth, deadline) of each send, by port."""
    unit = admit(Written(body).build(), CompileOptions())
    run(unit, "inline_for_partition", options=CompileOptions(per_hop_budget_ns=BUDGET))
    for _ in range(2):  # the second time changes nothing
        before = back_units.content(unit)
        run(unit, PASS, *more, options=CompileOptions(per_hop_budget_ns=BUDGET))
    assert back_units.content(unit) == before
    return {
        f"{n.metadata.get(keys.PORT_KEY)}.{n.op_type}": (
            int(n.metadata.get(keys.CHAIN_DEPTH_KEY) or 0),
            int(n.metadata.get(keys.DEADLINE_NS_KEY) or 0),
        )
        for n in unit.root.nodes
        if graph.is_wire(n)
    }


# --- depth ----------------------------------------------------------------------------------


def test_the_first_hop_of_a_chain_has_the_largest_budget() -> None:
    def ring(g: Graph) -> None:
        at_b = g.net_out("one", peers(g, "b"), g.input("x", types.TENSOR_FLOAT))
        at_c = g.net_out("two", peers(g, "c", after=at_b), at_b)
        g.output("y", g.net_out("three", peers(g, "a", after=at_c), at_c))

    assert derived(ring) == {"one.Send": (3, 3000), "two.Send": (2, 2000), "three.Send": (1, 1000)}


def test_side_by_side_the_longest_counts() -> None:
    def fork(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        at_b = g.net_out("first", peers(g, "b"), x)
        g.net_out("short", at_b.sender, at_b)
        at_c = g.net_out("long", peers(g, "c", after=at_b), at_b)
        g.net_out("end", at_c.sender, at_c)

    found = derived(fork)
    assert found["first.Send"] == (3, 3000)
    assert found["short.Send"] == found["end.Send"] == (1, 1000)


def test_a_sender_and_an_after_continue_a_chain_as_well() -> None:
    def body(g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        received = g.net_out("go", peers(g, "b"), tick)
        mine = ModelSlot("m").params(g, after=received)
        g.net_out("reply", received.sender, mine)

    assert derived(body)["go.Send"] == (2, 2000)


def test_the_ops_of_a_slot_continue_each_other() -> None:
    def body(g: Graph) -> None:
        collector = peers(g, "c")
        received = g.net_out("weights", peers(g, "b"), g.input("w", types.TENSOR_FLOAT))
        model = ModelSlot("m")
        model.load_parameters(g, received)
        model.train(g)
        update = model.params(g)  # reads nothing of what was received
        g.net_out("update", collector, update)

    assert derived(body)["weights.Send"] == (2, 2000)


def test_a_request_counts_the_way_back_and_not_what_the_answers_start() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        first = g.net_out("start", peers(g, "b"), x)
        r = g.request("ask", peers(g, "c", after=first), first)
        r.respond(r.received)
        average = AggregatorSlot("mean")
        average.contribute_all(g, r.responses)
        mean, _ = average.aggregate(g)
        g.net_out("done", first.sender, mean)

    assert derived(body) == {
        "start.Send": (4, 4000),  # start, ask, its answer, done
        "ask.SendReqBatched": (2, 2000),
        "ask.SendResp": (1, 1000),
        "done.Send": (1, 1000),
    }


def test_deadlines_and_delays_behind_a_send_count_as_they_are() -> None:
    def body(g: Graph) -> None:
        first = g.net_out("start", peers(g, "b"), g.input("x", types.TRIGGER))
        slept = syscalls.sleep(g, first, duration_ns=70)
        r = g.request("ask", peers(g, "c", after=slept), slept, deadline=1.0)
        r.respond(r.received)

    assert derived(body) == {
        "start.Send": (3, 1_000_000_000 + 70 + BUDGET),
        "ask.SendReqBatched": (2, 1_000_000_000),
        "ask.SendResp": (1, BUDGET),
    }


def test_what_the_author_counts_stands() -> None:
    def body(g: Graph) -> None:
        received = g.net_out("in", peers(g, "b"), g.input("x", types.TENSOR_FLOAT))
        g.net_out("out", received.sender, received, hops=5)

    assert derived(body) == {"in.Send": (6, 6000), "out.Send": (5, 5000)}


@pytest.mark.parametrize("hops", [0, -1, 100_001, 1.0, "2", True])
def test_hops_are_a_number_of_sends(hops: object) -> None:
    def body(g: Graph) -> None:
        g.net_out("out", peers(g, "b"), g.input("x"), hops=hops)  # type: ignore[arg-type]

    with pytest.raises(BadArgument, match="hops"):
        Written(body).build()


def test_calls_of_sub_modules_continue_the_slots_they_use() -> None:
    def learn(g: Graph) -> None:
        ModelSlot("m").load_parameters(g, g.input("weights", types.TENSOR_FLOAT))

    def body(g: Graph) -> None:
        collector = peers(g, "c")
        weights = g.input("w", types.TENSOR_FLOAT)
        received = g.net_out("weights", peers(g, "b"), weights)
        for _ in range(2):  # called twice, it stays a call
            Written(learn, "Learn").call().input("weights", received).build(g)
        g.net_out("update", collector, ModelSlot("m").params(g))

    assert derived(body)["weights.Send"] == (2, 2000)


def test_paths_that_meet_again_do_not_multiply_without_end() -> None:
    body = programs.Body("Long", home="a", root=True)
    value = body.input("x", types.TENSOR_FLOAT)
    for index in range(200):
        body.sample("a", f"peers_{index}", slot="pick", after=[value])
        request = body.request(value, f"peers_{index}", f"r{index}")
        body.respond(request[2], request)
        body.role("Model", "ApplyDelta", "m", [request[2]], [f"far_{index}"])
        body.role("Aggregator", "ContributeAll", "m", [request[1]], [f"near_{index}"])
        value = f"near_{index}"
    unit = programs.unit_of(body)
    counters = run(unit, PASS, options=CompileOptions(per_hop_budget_ns=1 << 50))
    assert counters["deadlines_stamped"] == 400
    assert counters["deepest_chain"] == MAX_CHAIN_DEPTH
    stamps = [n.metadata.get(keys.DEADLINE_NS_KEY) for n in unit.root.nodes if graph.is_wire(n)]
    assert max(int(stamp or 0) for stamp in stamps) == MAX_DEADLINE_NS


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (keys.CHAIN_DEPTH_KEY, "0"),
        (keys.CHAIN_DEPTH_KEY, "many"),
        (keys.CHAIN_DEPTH_KEY, "9" * 40),
        (keys.DEADLINE_NS_KEY, "-1"),
        (keys.DEADLINE_NS_KEY, "9" * 20),
    ],
)
def test_a_stamp_that_is_none_is_named(key: str, text: str) -> None:
    unit = programs.unit_of(programs.ring_program())
    send = next(n for n in unit.root.nodes if graph.is_wire(n))
    send.metadata[key] = text
    with pytest.raises(ExpansionFailed) as caught:
        run(unit, PASS)
    assert caught.value.node_name == send.name
    assert caught.value.source_line


def test_ops_that_wait_for_each_other_have_no_depth() -> None:
    body = programs.ring_program()
    body.function.nodes[0].after = ("result",)
    with pytest.raises(CyclicGraph):
        run(programs.unit_of(body), PASS)


# --- variants -------------------------------------------------------------------------------


def compiled(body: Callable[[Graph], object]) -> Program:
    made = Compiler().bind_model("m", FakeModel).bind_aggregator("mean", Anything)
    for slot in ("pick_a", "pick_b", "pick_c"):
        made = made.bind_peer_selector(slot, FakeSelector)
    return program_of(made.compile(Written(body).build()))


def nodes_of(model: Program, op_type: str) -> list[OpNode]:
    return [n for f in model.functions for n in f.nodes if n.op_type == op_type]


@register_component
class Anything(FakeAggregator):
    TYPE_NAME = "test.Anything"
    answers = types.ANY


def ask(g: Graph, whom: Output, **more: int) -> None:
    r = g.request("ask", whom, g.input("x", types.TENSOR_FLOAT), **more)  # type: ignore[arg-type]
    r.respond(r.received)
    AggregatorSlot("mean").contribute_all(g, r.responses)


ONE, MANY = keys.VARIANT_ONE_SHOT.encode(), keys.VARIANT_COHORT.encode()


@pytest.mark.parametrize(
    ("whom", "size", "variant"),
    [
        (lambda g: peers(g, "b", n=1), 1, ONE),
        (lambda g: peers(g, "b", n=4), 4, MANY),
        (lambda g: g.peer_id(PEER, peer_class="b"), 1, ONE),
        (lambda g: g.peer_ids([PEER, PEER], peer_class="b"), 1, ONE),
        (lambda g: g.peer_ids([PEER, PeerId.from_seed("other")], peer_class="b"), 2, MANY),
        (lambda g: g.net_out("hello", peers(g, "b"), g.input("h", types.TRIGGER)).sender, 1, ONE),
        (lambda g: syscalls.tee(g, peers(g, "b", n=3), fanout=2)[1], 3, MANY),
        (lambda g: PeerSelectorSlot("pick_b", peer_class="b").current_view(g), 0, MANY),
        (lambda g: g.input("b", types.PEER_ID), 1, ONE),
        (lambda g: g.input("b", types.PEER_ID_VEC), 0, MANY),
    ],
)
def test_a_request_says_how_many_it_asks_at_most(
    whom: Callable[[Graph], Output], size: int, variant: bytes
) -> None:
    def body(g: Graph) -> None:
        asked = whom(g)
        if asked.name.endswith(".sender"):  # lives on b, and so does what is asked from there
            r = g.request("ask", asked, ModelSlot("m").params(g, after=asked))
        else:
            r = g.request("ask", asked, g.input("x", types.TENSOR_FLOAT))
        r.respond(r.received)
        AggregatorSlot("mean").contribute_all(g, r.responses)

    model = compiled(body)
    (request,) = nodes_of(model, keys.OP_SEND_REQ_BATCHED)
    (collect,) = nodes_of(model, keys.OP_RECV_RESP_BATCHED)
    assert request.attr(keys.ATTR_COHORT_SIZE) == size
    assert request.attr(keys.ATTR_VARIANT) == variant
    assert collect.attr(keys.ATTR_COHORT_SIZE) == size


def test_a_quorum_fits_a_constant_cohort_too() -> None:
    with pytest.raises(ExpansionFailed, match="only 1 peers"):
        compiled(lambda g: ask(g, g.peer_ids([PEER], peer_class="b"), quorum=2))


def test_a_send_to_one_constant_peer_is_peer_routed_and_gated() -> None:
    def body(g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.net_out("fixed", g.peer_id(PEER, peer_class="b"), x)
        g.net_out("drawn", peers(g, "b"), x)
        g.net_out("two", g.peer_ids([PEER, PeerId.from_seed(2)], peer_class="b"), x)

    model = compiled(body)
    routed = {
        n.metadata.get(keys.PORT_KEY): n.attr(keys.ATTR_PEER) for n in nodes_of(model, keys.OP_SEND)
    }
    assert routed == {"fixed": PEER.to_bytes(), "drawn": None, "two": None}
    for gate in (keys.OP_PEER_HEALTH_GATE_TX, keys.OP_BACKOFF_GATE_TX):
        (made,) = nodes_of(model, gate)
        assert made.attr(keys.ATTR_PEER) == PEER.to_bytes()


def test_a_class_of_constant_peers_is_a_class_name() -> None:
    with pytest.raises(BadName, match="peer class"):
        Written(lambda g: g.peer_id(PEER, peer_class="two words")).build()


# --- references to attributes of the function -----------------------------------------------


def constant_module() -> programs.Body:
    """A sub-Module whose Constant stands for its own attribute `level`."""
    child = programs.Body("Child")
    t = child.input("t", types.TRIGGER)
    child.syscall("Constant", [], ["held"], kinds=[types.TENSOR_FLOAT], after=[t])
    child.function.nodes[-1].set_attr("value", Attribute(AttributeKind.TENSOR, None, "level"))
    child.syscall("Record", ["held"], [], name="seen")
    child.function.nodes[-1].set_attr("name", "level")
    return child


def levels(model: Program | Function) -> list[float]:
    functions = [model] if isinstance(model, Function) else model.functions
    return [
        float(n.attr("value").numpy()[0])
        for f in functions
        for n in f.nodes
        if n.op_type == "Constant"
    ]


def level(value: float) -> object:
    return helper.make_tensor("", 1, [1], [value])


def test_a_constant_of_a_called_module_takes_the_modules_default() -> None:
    child = constant_module()
    child.function.defaults["level"] = Attribute.of(level(2.0))
    root = programs.Body("Root", root=True)
    tick = root.input("t", types.TRIGGER)
    for _ in range(2):
        root.call(child.function, [tick], [])
    unit = programs.unit_of(root, child)
    run(unit, "inline_for_partition", PASS, "validate", "expand_ops")
    assert [f.name for f in unit.program.functions] == ["Root", "Child"]
    assert levels(unit.program) == [2.0]


def test_a_call_that_gives_the_attribute_is_inlined_with_it() -> None:
    child = constant_module()
    root = programs.Body("Root", root=True)
    tick = root.input("t", types.TRIGGER)
    for value in (3.0, 4.0):
        root.call(child.function, [tick], [], level=level(value))
    model = program_of(Compiler().compile(programs.model_of(root, child)))
    assert sorted(levels(model)) == [3.0, 4.0]


def test_an_attribute_that_nothing_gives_is_named() -> None:
    child = constant_module()
    root = programs.Body("Root", root=True)
    root.call(child.function, [root.input("t", types.TRIGGER)], [])
    with pytest.raises(ExpansionFailed, match="stands for 'level'") as caught:
        Compiler().compile(programs.model_of(root, child))
    assert caught.value.op_type == "Constant"
