"""`sequence_slot_effects`: the ops of a slot fire in the right execution, and in program order.

Only where one of two ops changes the component they have an order at all.
"""

from __future__ import annotations

from bbnode.compiler.analysis.entries import INVOKE, EntryMap
from bbnode.ir import keys, types
from bbnode.ir.graph import Function
from tests.compiler.back_units import control, sole, unit_until
from tests.compiler.programs import (
    Body,
    federated_program,
    gossip_program,
    nested_program,
    node_making,
    node_named,
)

PASS = "sequence_slot_effects"


def main_of(body: Body, home: str = keys.SELF_CLASS) -> Function:
    return unit_until(PASS, body).partitions[home]


def received(body: Body) -> str:
    """A value of class `b`, sent from class `a`."""
    x = body.input("x", types.TENSOR_FLOAT)
    return body.send(x, body.sample("b", "bs", slot="pick_b", after=[x]), "got")[0]


def test_consecutive_ops_of_a_slot_are_chained() -> None:
    client = main_of(federated_program(), "client")
    load, train, params = (sole(client, t) for t in ("LoadParameters", "Train", "Params"))
    assert control(load) == []
    assert control(train) == [load.name]
    assert control(params) == [train.name]


def test_two_slots_of_one_role_are_told_apart_and_backends_are_not_sequenced() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.role("Model", "ApplyDelta", "global", [x], ["a"], name="a")
    body.role("Model", "ApplyDelta", "local", [x], ["b"], name="b")
    body.role("Model", "ApplyDelta", "global", [x], ["c"], name="c")
    body.onnx("Relu", [x], ["r1"], name="r1")
    body.onnx("Relu", [x], ["r2"], name="r2")
    main = main_of(body)
    assert {n.name: control(n) for n in main.nodes} == {
        "a": [], "b": [], "c": ["a"], "r1": [], "r2": [],
    }  # fmt: skip


def test_an_op_that_nothing_else_places_continues_the_op_before_it() -> None:
    body = Body("P", home="a", root=True)
    got = received(body)
    body.role("Model", "LoadParameters", "local", [got], ["loaded"], name="load")
    body.role("Model", "Train", "local", [], ["stats"], name="train")
    main = main_of(body, "b")
    train = node_named(main, "train")
    assert control(train) == ["load"]
    assert train.after == ("loaded",)  # so it fires where the received value is


def test_what_another_entry_wants_is_not_pulled_away_from_it() -> None:
    """A fresh copy of the parameters at each tick, though the line stands behind a receive."""
    body = Body("P", home="peer", root=True)
    tick = body.input("tick", types.TRIGGER)
    body.sample("peer", "first", slot="pick_client", after=[tick], name="sample1")
    body.role("Model", "Params", "global", [], ["w"], after=["first"], name="params1")
    got, _ = body.send("w", "first", "got")
    body.role("Model", "ApplyDelta", "global", [got], ["applied"], name="apply")
    body.role("Model", "Params", "global", [], ["w2"], name="params2")
    body.sample("peer", "second", slot="pick_client", after=[tick], name="sample2")
    body.send("w2", "second", "got2")
    main = main_of(body, "peer")
    params2 = node_named(main, "params2")
    assert params2.after == ()
    assert control(params2) == []  # two that change nothing; and never `apply`
    assert control(node_named(main, "apply")) == []
    assert control(node_named(main, "sample2")) == []


def test_a_pin_decides_where_other_ops_belong() -> None:
    body = Body("P", home="peer", root=True)
    tick = body.input("tick", types.TRIGGER)
    body.sample("peer", "first", slot="pick_client", after=[tick], name="sample1")
    body.role("Model", "Params", "global", [], ["w"], after=["first"], name="params1")
    got, _ = body.send("w", "first", "got")
    body.role("Model", "ApplyDelta", "global", [got], ["applied"], name="apply")
    body.role("Model", "Params", "global", [], ["w2"], name="params2")
    body.sample("peer", "second", slot="pick_client", name="sample2")
    body.send("w2", "second", "got2")
    main = main_of(body, "peer")
    assert node_named(main, "params2").after == ("applied",)
    # The second send happens on receipt; so does the choice of its peers.
    assert node_named(main, "sample2").after == ()
    assert control(node_named(main, "sample2")) == []


def test_ops_of_different_entries_do_not_wait_for_each_other() -> None:
    main = main_of(gossip_program(), "peer")
    assert control(sole(main, "ApplyDelta")) == []


def test_first_ops_belong_to_invoke_and_are_ordered_with_what_it_brings() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.role("Model", "Params", "global", [], ["before"], name="params")
    body.output("was", "before")
    body.role("Model", "LoadParameters", "global", [x], ["loaded"], name="load")
    main = main_of(body)
    assert control(node_named(main, "load")) == ["params"]
    assert node_named(main, "params").after == ()


def test_a_call_counts_as_an_op_of_the_slots_it_uses() -> None:
    root, pure, stateful, sender = nested_program()
    root.role("Model", "Step", "global", [], ["stepped"], name="step", after=["d2"])
    server = unit_until(PASS, root, pure, stateful, sender).partitions["server"]
    first, second = (n for n in server.nodes if n.op_type.startswith("Hoist_Stateful_"))
    assert control(first) == []
    assert control(second) == [first.name]
    assert control(node_named(server, "step")) == [second.name]


def test_called_functions_are_sequenced_inside() -> None:
    root, pure, stateful, sender = nested_program()
    stateful.role("Model", "Step", "global", [], ["stepped"], name="step")
    unit = unit_until(PASS, root, pure, stateful, sender)
    inside = next(f for f in unit.program.functions if f.name.startswith("Hoist_Stateful_"))
    apply = sole(inside, "ApplyDelta")
    assert control(node_named(inside, "step")) == [apply.name]
    assert node_named(inside, "step").after == ("applied",)


def test_entries_of_a_body() -> None:
    body = Body("P", home="a", root=True)
    got = received(body)
    body.role("Model", "ApplyDelta", "local", [got], ["applied"])
    body.role("Model", "Params", "local", [], ["p"], after=["applied"], name="params")
    body.role("DataSource", "Reset", "data", [], ["again"], after=[got])
    body.role("DataSource", "NextBatch", "data", [], ["batch", "labels"], name="batch")
    body.role("Model", "ComputeLoss", "local", ["batch", got], ["loss"])
    unit = unit_until("resolve_slots", body)
    b = unit.partitions["b"]
    entries = EntryMap.of(b, [n.reads for n in b.nodes])
    by_name = {n.name: i for i, n in enumerate(b.nodes)}
    recv = entries.origin[by_name[sole(b, "Recv").name]]
    assert recv not in (0, INVOKE)
    assert entries.origin[by_name["params"]] == recv
    assert entries.origin[by_name["batch"]] == 0
    assert entries.wanted[by_name["batch"]] == recv
    a = unit.partitions["a"]
    assert EntryMap.of(a, [n.reads for n in a.nodes]).origin == [INVOKE] * len(a.nodes)
    assert node_making(b, "loss").op_type == "ComputeLoss"
