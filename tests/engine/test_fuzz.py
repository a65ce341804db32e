"""Whatever comes from outside: typed steps and counters, no exception, and nothing left behind."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bbnode.engine import Limits, Node, steps
from bbnode.engine.errors import EntryError, UnexpectedException
from bbnode.ir import types
from bbnode.ir.caps import MAX_FILLS, MAX_RECORDS
from bbnode.ir.errors import BbnodeError
from bbnode.ir.refusal import WireRefusal, encode_refusal
from bbnode.ir.values import TRIGGER, Composite, Metadata
from tests.engine import fuzzing
from tests.engine.fuzzing import PEERS, SUFFIXES, VALUES, encoded, node_under_test, poll, settle
from tests.engine.support import S, bring_up, component, of, peer
from tests.engine.test_suspension import trainer

slow = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
hashes = st.sampled_from(
    sorted({encoded(value)[1].wire_hash for value in VALUES} | {0, types.ANY.wire_hash, 1 << 63})
)
payloads = st.one_of(
    st.sampled_from([encoded(v)[0] for v in VALUES]),
    st.just(encode_refusal(WireRefusal("OpError", "no data", "train"))),
    st.binary(max_size=64),
)
numbers = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 4))


@st.composite
def well_formed(draw):
    source = draw(st.sampled_from(PEERS))
    value = draw(st.sampled_from(VALUES))
    fits = draw(st.booleans())
    return source, fuzzing.envelope(
        suffixes=draw(st.lists(st.one_of(st.sampled_from(SUFFIXES), st.binary(max_size=20)),
                               max_size=3)),
        payload=encoded(value)[0] if fits else draw(payloads),
        type_hash=encoded(value)[1].wire_hash if fits else draw(hashes),
        source=draw(st.one_of(st.just(source.to_bytes()), st.binary(max_size=40))),
        kind=draw(st.integers(0, 2)),
        wire_req_id=draw(numbers),
        trigger_only=draw(st.booleans()),
        remaining_ns=draw(numbers),
        claimed=tuple(draw(st.lists(st.binary(max_size=30), max_size=3))),
        report=draw(numbers),
    )  # fmt: skip


@slow
@given(st.lists(st.tuples(st.sampled_from(PEERS), st.binary(max_size=200)), max_size=20))
def test_random_bytes_as_envelopes(messages) -> None:
    node = node_under_test()
    for source, data in messages:
        node.deliver_inbound(source, data)
    poll(node, S)
    settle(node, S)


@slow
@given(st.lists(st.one_of(well_formed(), st.integers(0, 10 * S)), max_size=40))
def test_well_formed_envelopes_of_wild_content(happenings) -> None:
    node = node_under_test()
    fuzzing.ask(node)
    now_ns = 0
    for happening in happenings:
        if isinstance(happening, int):
            now_ns += happening
            poll(node, now_ns)
        else:
            node.deliver_inbound(*happening)
    poll(node, now_ns)
    settle(node, now_ns)


@slow
@given(st.data())
def test_changed_bytes_of_good_envelopes(data) -> None:
    node = node_under_test()
    asked = fuzzing.ask(node)
    for _ in range(10):
        value = data.draw(st.sampled_from(VALUES))
        raw = bytearray(
            fuzzing.envelope(
                suffixes=[data.draw(st.sampled_from(SUFFIXES))],
                payload=encoded(value)[0],
                type_hash=encoded(value)[1].wire_hash,
                source=PEERS[0].to_bytes(),
                kind=data.draw(st.integers(0, 2)),
                wire_req_id=asked,
            )
        )
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
        node.deliver_inbound(PEERS[0], bytes(raw[: data.draw(st.integers(0, len(raw)))]))
        poll(node, S)
    settle(node, S)


def test_a_flood_leaves_nothing_behind_and_is_refused_beyond_the_caps() -> None:
    node = node_under_test()
    now_ns = 0
    sizes = []
    for round_number in range(4):
        for number in range(600):
            value = VALUES[number % len(VALUES)]
            node.deliver_inbound(
                PEERS[number % 4],
                fuzzing.envelope(
                    suffixes=[SUFFIXES[number % len(SUFFIXES)]] * (1 + number % MAX_FILLS),
                    payload=encoded(value)[0],
                    type_hash=encoded(value)[1].wire_hash,
                    source=PEERS[number % 4].to_bytes(),
                    kind=number % 3,
                    wire_req_id=10_000 * round_number + number,
                ),
            )
        now_ns += S
        poll(node, now_ns)
        now_ns = settle(node, now_ns)
        rt = node._rt
        sizes.append((len(rt.scheduler), len(rt.scheduler.heap) < 4096, len(rt.reports.bus)))
        assert len(rt.records) <= MAX_RECORDS
    assert node.counters()["ingress.dropped"] > 0
    assert sizes[1:] == [sizes[1]] * 3


@slow
@given(st.lists(st.integers(-5, 2**70), max_size=20))
def test_completions_of_nobody(tokens) -> None:
    node = node_under_test()
    for token in tokens:
        node.complete(token, TRIGGER)
        node.fail(token, ValueError("x"))
    made = poll(node, S)
    assert not of(steps.OpFailed, made)
    assert node.counters().get("completion.unknown", 0) == 2 * len(tokens)


class Rude(BaseException):
    """Not even an Exception."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise Rude("no text")


class Endless(Exception):
    def __str__(self) -> str:
        return "é" * 100_000


def reach_the_component(node: Node) -> None:
    """An envelope for the Recv behind which an op of component "m" stands."""
    value, node_type = encoded(VALUES[1])
    node.deliver_inbound(
        PEERS[0],
        fuzzing.envelope(
            suffixes=[SUFFIXES[0]], payload=value, type_hash=node_type.wire_hash,
            source=PEERS[0].to_bytes(),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"), Rude("x"), Speechless(), Endless(), MemoryError(), RecursionError(),
        GeneratorExit(), StopIteration(), SystemExit(3), KeyboardInterrupt(),
        BbnodeError("x"), AssertionError(), KeyError("\udc80"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_a_component_raises_is_a_failed_op(error) -> None:
    node = node_under_test()
    component(node, "m").raises = error
    reach_the_component(node)
    (failed,) = of(steps.OpFailed, poll(node, 0))
    assert failed.kind == (
        "BbnodeError" if isinstance(error, BbnodeError) else "UnexpectedException"
    )
    assert len(failed.detail.encode("utf-8", "replace")) <= 4096
    settle(node, 0)


@pytest.mark.parametrize("error", [Rude("x"), Speechless()])
def test_whatever_a_task_raised_is_a_failed_op(error) -> None:
    node = trainer()
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(0))
    node.fail(task.token, error)
    (failed,) = of(steps.OpFailed, node.poll(1))
    assert failed.kind == "UnexpectedException"


def test_a_task_raises_nothing_that_would_end_its_thread() -> None:
    node = trainer()
    component(node, "m").raises = Rude("x")
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(0))
    with pytest.raises(UnexpectedException, match="Rude: x") as raised:
        task.fn()
    node.fail(task.token, raised.value)
    (failed,) = of(steps.OpFailed, node.poll(1))
    assert failed.kind == "UnexpectedException"
    assert failed.detail.startswith("Rude: x (raised at support.py:")
    assert failed.detail.count("raised at") == 1


def test_who_stops_the_process_is_not_held_up(monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise SystemExit(3)

    for handler, number, stopped in (
        (signal.default_int_handler, signal.SIGINT, KeyboardInterrupt),
        (stop, signal.SIGTERM, SystemExit),
        (stop, signal.SIGINT, SystemExit),
    ):
        node = node_under_test()
        before = signal.signal(number, handler)
        try:
            reach_the_component(node)
            part = component(node, "m")
            monkeypatch.setattr(part, "_note", lambda _, n=number: signal.raise_signal(n))
            with pytest.raises(stopped):
                node.poll(0)
        finally:
            signal.signal(number, before)


def nested(depth: int) -> Composite:
    value = Composite([TRIGGER])
    for _ in range(depth):
        value = Composite([value])
    return value


@pytest.mark.parametrize(
    "returned",
    [object(), "text", 3, [1], {"a": 1}, np.array([object()]), np.array([1j]), (1, 2),
     Metadata(a=1), TRIGGER, Composite([object()])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_a_component_returns_is_checked(returned) -> None:
    node = node_under_test()
    component(node, "m").returns = returned
    reach_the_component(node)
    made = poll(node, 0)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["WrongResultType"]
    settle(node, 0)


@pytest.mark.parametrize("value", [nested(5_000), Composite([object()]), Composite([[1]])])
def test_a_host_that_hands_in_what_is_no_value_is_told(value) -> None:
    from tests.engine.builder import Partition, model

    p = Partition("server", inputs=["x"])
    p.output("out", "x")
    node = bring_up(model(p), "server")
    with pytest.raises(EntryError):
        node.invoke("server", {"x": value})
    assert node.counters()["ingress.bytes"] == 0


def test_a_component_that_never_returns_holds_up_nobody_else() -> None:
    node = trainer()
    for _ in range(5):
        node.invoke("server", {"x": TRIGGER})
    node.poll(0)
    for day in range(10):
        node.poll(day * (Limits().wait_ns + S))
    assert node.executions() == []
    assert len(node.waiting()) == 1  # the thread itself, which nobody can take back
    assert node.next_deadline() is None


def test_peers_that_come_and_go_leave_nothing() -> None:
    node = node_under_test()
    for number in range(10, 3000):
        node.peer_connected(peer(number), ["client"])
        node.send_failed(peer(number), "x")
        node.peer_disconnected(peer(number), "gone")
        if number % 50 == 0:
            poll(node, number)
    poll(node, S)
    assert node.counters()["peers.connected"] == len(PEERS)
    assert node.counters()["peers.known"] <= 5
