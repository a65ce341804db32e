"""`insert_async_deadlines`: who carries a deadline, and what looks at it."""

from __future__ import annotations

from bbnode.compiler.unit import CompileOptions
from bbnode.ir import graph, keys, types
from tests.compiler.back_units import control, meta, of_type, sole, unit_until
from tests.compiler.programs import (
    BINDINGS,
    Body,
    federated_program,
    nested_program,
    node_making,
    node_named,
    run,
    unit_of,
)

PASS = "insert_async_deadlines"
SECOND = 1_000_000_000
OPTIONS = CompileOptions(bindings=BINDINGS, per_hop_budget_ns=5 * SECOND)


def test_everything_that_suspends_carries_a_deadline() -> None:
    unit = unit_until(PASS, federated_program(), options=OPTIONS)
    for main in unit.partitions.values():
        for node in main.nodes:
            waits = graph.is_role(node) or graph.is_wire(node)
            # The request and its two receiving halves, there and back again; and what the request
            # starts on the client, whose chain upstream it is.
            halves = ("SendReqBatched", "RecvReq", "RecvRespBatched")
            asked = graph.is_role(node) and node.metadata[keys.HOME_CLASS_KEY] == "client"
            hops = 2 if node.op_type in halves or asked else 1
            expected = str(hops * 5 * SECOND) if waits else None
            assert meta(node, keys.DEADLINE_NS_KEY) == expected


def test_an_ops_own_deadline_and_delay_come_first() -> None:
    body = Body("P", root=True)
    t = body.input("t", types.TRIGGER)
    body.syscall("Sleep", [t], ["slept"], duration_ns=60 * SECOND)
    body.syscall("After", [t], ["later"], delay_ns=SECOND, meta={keys.DEADLINE_NS_KEY: "7"})
    (main,) = unit_until(PASS, body, options=OPTIONS).partitions.values()
    assert meta(node_making(main, "slept"), keys.DEADLINE_NS_KEY) == str(65 * SECOND)
    assert meta(node_making(main, "later"), keys.DEADLINE_NS_KEY) == "7"


def test_a_request_and_the_wait_for_its_answers_share_one_deadline() -> None:
    for given, expected in ((0, 10 * SECOND), (9 * SECOND, 9 * SECOND)):
        body = federated_program()
        request = node_making(body.function, "round.req_id")
        request.set_attr(keys.ATTR_DEADLINE_NS, given)
        server = unit_until(PASS, body, options=OPTIONS).partitions["server"]
        request = sole(server, "SendReqBatched")
        assert request.attr(keys.ATTR_DEADLINE_NS) == expected
        assert meta(request, keys.DEADLINE_NS_KEY) == str(expected)
        assert meta(sole(server, "RecvRespBatched"), keys.DEADLINE_NS_KEY) == str(expected)


def test_a_check_passes_the_first_input_through() -> None:
    main = unit_until(PASS, federated_program(), options=OPTIONS).partitions["client"]
    load = sole(main, "LoadParameters")
    check = node_making(main, load.inputs[0])
    assert check.op_type == "DeadlineCheck"
    assert check.domain == keys.SYSCALL_DOMAIN
    assert list(check.inputs) == [f"{sole(main, 'RecvReq').name}#backoff_rx_out"]
    assert check.attr("deadline_ns") == 10 * SECOND  # that of the request
    assert meta(check, keys.DEADLINE_CHECK_SOURCE_KEY) == load.name
    assert meta(check, keys.DEADLINE_NS_KEY) is None
    assert main.kinds()[load.inputs[0]] is types.TENSOR_FLOAT
    assert list(main.nodes).index(load) == list(main.nodes).index(check) + 1


def test_an_op_without_inputs_waits_for_its_check_which_waits_for_the_same() -> None:
    main = unit_until(PASS, federated_program(), options=OPTIONS).partitions["client"]
    train = sole(main, "Train")
    check = node_named(main, f"{train.name}#deadline")
    assert not check.inputs
    assert train.after == (*check.after, check.outputs[0])
    assert control(check) == control(train) == [sole(main, "LoadParameters").name]
    assert main.kinds()[check.outputs[0]] is types.TRIGGER


def test_an_optional_input_that_is_left_out_is_not_the_one_that_is_checked() -> None:
    body = Body("P", root=True)
    x = body.input("x", types.TENSOR_FLOAT)
    body.op(keys.WIRE_DOMAIN, "SendResp", ["", x], [], name="odd",
            meta={keys.DEADLINE_NS_KEY: "5", keys.HOME_CLASS_KEY: "@self"})  # fmt: skip
    unit = unit_of(body)
    unit.partitions = {"@self": unit.program.functions.pop(0)}
    run(unit, PASS, options=OPTIONS)
    assert list(node_named(unit.partitions["@self"], "odd").inputs) == ["", "odd#deadline_out"]


def test_receivers_gates_and_checks_are_not_checked() -> None:
    unit = unit_until(PASS, federated_program(), options=OPTIONS)
    for main in unit.partitions.values():
        checked = {meta(n, keys.DEADLINE_CHECK_SOURCE_KEY) for n in of_type(main, "DeadlineCheck")}
        for node in main.nodes:
            exempt = node.op_type in (*keys.RECV_OPS, *keys.GATE_OPS, "DeadlineCheck")
            timed = meta(node, keys.DEADLINE_NS_KEY) is not None
            assert (node.name in checked) == (timed and not exempt)


def test_called_functions_are_treated_too_and_sends_keep_their_destination() -> None:
    unit = unit_until(PASS, *nested_program(), options=OPTIONS)
    stateful = next(f for f in unit.program.functions if f.name.startswith("Hoist_Stateful_"))
    assert of_type(stateful, "DeadlineCheck")
    send = sole(unit.partitions["server"], "Send")
    assert send.inputs[0].endswith("#deadline_out")
    assert meta(send, keys.DEST_SITE_NAME_PREFIX + send.inputs[0]) is not None
    assert send.attr(keys.DEST_SUFFIX_PREFIX + send.inputs[0]) is not None
