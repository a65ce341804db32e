"""Joins over executions: Collect, and a Threshold of more arrivals than it has inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bbnode.engine import Limits, Node, errors, steps
from bbnode.ir import keys, types
from bbnode.ir.values import TRIGGER, ResponseBatch
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import MS, S, bring_up, of, peer


def gathering(**attributes: Any):
    p = Partition("server")
    p.recv("update", node=types.TENSOR_FLOAT)
    p.sys("Collect", ["update"], "batch", called="gather", **attributes)
    p.output("all", "batch")
    return model(p)


def barrier(**attributes: Any):
    p = Partition("server")
    transport = {keys.WIRE_TRANSPORT_KEY: keys.TRANSPORT_TRIGGER_ONLY}
    p.recv("done", node=types.TRIGGER, meta=transport)
    p.sys("Threshold", ["done"], "every", called="barrier", **attributes)
    p.output("all", "every")
    return model(p)


class Server:
    """A node with peers that send it numbers."""

    def __init__(self, made, **more: Any) -> None:
        self.made, self.more = made, more
        self.node = self.bring_up()
        self.now_ns = 0
        self.sent = 0
        self.steps: list[steps.Step] = []

    def bring_up(self) -> Node:
        node = bring_up(self.made, "server", **self.more)
        for number in range(1, 9):
            node.peer_connected(peer(number), ["client"])
        return node

    def send(self, who: int, number: int | None = None) -> None:
        self.sent += 1
        value = TRIGGER if number is None else np.full(2, number, np.float32)
        site = Partition("server").site("done" if number is None else "update")
        data = envelope(peer(who), site, value, wire_req_id=self.sent, trigger_only=number is None)
        self.node.deliver_inbound(peer(who), data)

    def poll(self, wait_ns: int = 0) -> None:
        self.now_ns += wait_ns
        self.steps += self.node.poll(self.now_ns)

    def deliver(self, *pairs: tuple[int, int]) -> None:
        for who, number in pairs:
            self.send(who, number)
            self.poll()

    def batches(self) -> list[list[tuple[Any, float]]]:
        """The batches that came out, as (peer, number)."""
        found = []
        for event in of(steps.AppEvent, self.steps):
            assert isinstance(event.value, ResponseBatch)
            found.append([(who, float(each[0])) for who, each in event.value.responses])
        return found

    def failures(self) -> list[tuple[str, str]]:
        return [(step.op, step.kind) for step in of(steps.OpFailed, self.steps)]


def in_peer_order(*pairs: tuple[int, int]) -> list[tuple[Any, float]]:
    return sorted((peer(who), float(number)) for who, number in pairs)


def test_so_many_deliveries_are_one_batch_in_peer_order_and_the_next_begins() -> None:
    server = Server(gathering(n=3))
    server.deliver((3, 30), (1, 10))
    assert server.batches() == []
    server.deliver((2, 20), (4, 40), (1, 11), (3, 31))
    assert server.batches() == [
        in_peer_order((3, 30), (1, 10), (2, 20)),
        in_peer_order((4, 40), (1, 11), (3, 31)),
    ]
    assert server.node.counters()["joins.complete"] == 2
    assert server.node.counters()["ingress.bytes"] == 0
    assert server.node.waiting() == []


def test_until_a_time_takes_as_many_as_come() -> None:
    server = Server(gathering(until_ns=2 * S))
    server.deliver((2, 20))
    server.poll(1 * S)
    server.deliver((1, 10))
    server.poll(1 * S - 1)
    assert server.batches() == []
    server.poll(1)
    assert server.batches() == [in_peer_order((1, 10), (2, 20))]
    server.poll(10 * S)  # nobody comes: no batch
    assert len(server.batches()) == 1


def test_with_both_the_number_closes_first() -> None:
    server = Server(gathering(n=2, until_ns=2 * S))
    server.deliver((2, 20), (1, 10))
    assert len(server.batches()) == 1
    server.poll(2 * S)  # its timer went with it
    assert len(server.batches()) == 1
    assert server.failures() == []


def test_too_few_in_time_is_a_failure_that_names_who_came() -> None:
    server = Server(gathering(n=3, until_ns=2 * S))
    server.deliver((2, 20), (1, 10))
    server.poll(2 * S)
    assert server.failures() == [("gather", "JoinIncomplete")]
    (failure,) = of(steps.OpFailed, server.steps)
    assert "2 came in 2 s (until=… of the join) and 3 had to" in failure.detail
    assert str(peer(1)) in failure.detail
    assert str(peer(2)) in failure.detail
    assert server.batches() == []
    assert server.node.counters()["ingress.bytes"] == 0
    server.deliver((1, 1), (2, 2), (3, 3))  # the next batch is whole
    assert len(server.batches()) == 1


def test_a_quorum_is_enough_at_the_deadline() -> None:
    server = Server(gathering(n=3, until_ns=2 * S, quorum=2))
    server.deliver((2, 20))
    server.poll(2 * S)
    assert server.failures() == [("gather", "JoinIncomplete")]
    server.deliver((2, 20), (1, 10))
    server.poll(2 * S)
    assert server.batches() == [in_peer_order((1, 10), (2, 20))]


def test_nothing_waits_without_a_deadline_and_the_node_lists_it() -> None:
    server = Server(gathering(n=3))
    server.now_ns = 5
    server.deliver((2, 20))
    (waiting,) = server.node.waiting()
    assert (waiting.what, waiting.why) == ("gather", "deliveries")
    assert waiting.whom == f"1 of 3 came: {peer(2)}"
    assert waiting.until_ns - waiting.since_ns == Limits().wait_ns
    assert server.node.next_deadline() == 5 + Limits().wait_ns
    assert server.node.counters()["joins.open"] == 1
    server.poll(Limits().wait_ns)
    assert server.failures() == [("gather", "JoinIncomplete")]
    assert server.node.waiting() == []


def test_one_peer_cannot_fill_a_batch() -> None:
    server = Server(gathering(n=2))
    server.deliver((1, 10), *((1, number) for number in range(50)))
    assert server.batches() == []
    assert server.failures() == [("gather[0]", "AlreadyGathered")] * 50
    server.deliver((2, 20))
    assert server.batches() == [in_peer_order((1, 10), (2, 20))]  # the first counts


def test_all_values_of_a_peer_where_the_program_says_so() -> None:
    server = Server(gathering(n=3, per_peer=0))
    server.deliver((2, 5), (1, 7), (2, 4))
    of_two = [(peer(2), 5.0), (peer(2), 4.0)]  # in the order of their coming
    of_one = [(peer(1), 7.0)]
    first, second = (of_one, of_two) if peer(1) < peer(2) else (of_two, of_one)
    assert server.batches() == [[*first, *second]]


def test_what_is_gathered_is_charged_and_owns_its_memory() -> None:
    server = Server(gathering(n=3), limits=Limits(ingress_bytes=2_000))
    server.deliver((1, 10))
    kept = server.node.counters()["ingress.bytes"]
    assert kept == 8
    big = np.zeros(400, np.float32)
    for who in (2, 3):
        data = envelope(peer(who), Partition("server").site("update"), big, wire_req_id=90 + who)
        server.node.deliver_inbound(peer(who), data)
        server.poll()
    assert ("gather[0]", "BudgetExceeded") in server.failures()
    server.poll(Limits().wait_ns)
    assert server.node.counters()["ingress.bytes"] == 0


def test_a_batch_holds_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bbnode.engine.joins.MAX_GATHERED", 3)
    server = Server(gathering(until_ns=S, per_peer=0))
    server.deliver(*((1, number) for number in range(5)))
    assert server.failures() == [("gather[0]", "JoinFull")] * 2
    server.poll(S)
    assert [len(batch) for batch in server.batches()] == [3]


def test_a_contributor_that_fails_afterwards_takes_nothing_back() -> None:
    p = Partition("server")
    p.recv("update", node=types.TENSOR_FLOAT)
    p.sys("Collect", ["update"], "batch", n=2)
    p.output("all", "batch")
    p.sys("Hold.Flush", ["update"], "held", named={"slot": "s"})  # nothing is held: it fails
    server = Server(model(p))
    server.deliver((1, 10), (2, 20))
    assert [kind for _, kind in server.failures()] == ["NothingHeld"] * 2
    assert server.batches() == [in_peer_order((1, 10), (2, 20))]


def test_when_no_execution_can_start_a_step_says_so_and_nothing_leaks() -> None:
    server = Server(gathering(n=2), limits=Limits(frames=1))
    server.deliver((1, 10), (2, 20))  # the second delivery is the one execution
    assert server.failures() == [("gather", "FramesExceeded")]
    assert server.node.counters()["ingress.bytes"] == 0


def test_a_barrier_fires_after_so_many_deliveries() -> None:
    server = Server(barrier(n=5))
    for _ in range(2):
        for who in (1, 2, 3, 4):
            server.send(who)
            server.poll()
        assert of(steps.AppEvent, server.steps) == []
        server.send(5)
        server.poll()
        assert [e.value for e in of(steps.AppEvent, server.steps)] == [TRIGGER]
        server.steps.clear()
    assert server.node.counters()["joins.complete"] == 2


def test_a_barrier_counts_peers_once_where_the_program_says_so() -> None:
    for per_peer, fires in ((0, True), (1, False)):
        server = Server(barrier(n=3, per_peer=per_peer))
        for _ in range(3):
            server.send(1)
            server.poll()
        assert bool(of(steps.AppEvent, server.steps)) is fires
        assert server.failures() == ([] if fires else [("barrier[0]", "AlreadyGathered")] * 2)


def test_a_barrier_of_invokes_counts_those() -> None:
    p = Partition("server", inputs=["go"])
    p.sys("Threshold", ["go"], "third", called="barrier", n=3)
    p.output("all", "third")
    node = bring_up(model(p), "server")
    for number in range(7):
        node.invoke("server", {"go": TRIGGER})
        assert len(of(steps.AppEvent, node.poll(number))) == (number in (2, 5))
    (waiting,) = node.waiting()
    assert waiting.whom == "1 of 3 came: this node"


def test_a_barrier_that_is_not_full_in_time_fails() -> None:
    server = Server(barrier(n=3, until_ns=4 * S))
    server.send(1)
    server.poll()
    server.poll(4 * S)
    assert server.failures() == [("barrier", "JoinIncomplete")]


def test_fewer_than_its_inputs_is_counted_within_one_execution() -> None:
    p = Partition("server", inputs=["a", "b"])
    p.sys("Threshold", ["a", "b"], "both", n=2)
    p.output("all", "both")
    node = bring_up(model(p), "server")
    for one, other in ("ab", "ba"):
        with pytest.raises(errors.MissingInput, match=f"{one!r} starts nothing without {other}"):
            node.deliver_event("server", one, TRIGGER)
    node.invoke("server", {"a": TRIGGER, "b": TRIGGER})
    assert len(of(steps.AppEvent, node.poll(1))) == 1


def test_a_snapshot_has_what_came_so_far() -> None:
    server = Server(gathering(n=3, until_ns=10 * S))
    server.deliver((3, 30), (1, 10))
    server.poll(4 * S)
    saved = server.node.snapshot(server.now_ns)
    again = Server(gathering(n=3, until_ns=10 * S))
    again.node = bring_up(again.made, "server")
    again.node.restore(saved, now_ns=100)
    again.now_ns, again.sent = 100, server.sent
    for number in range(1, 9):
        again.node.peer_connected(peer(number), ["client"])
    again.poll()
    (waiting,) = again.node.waiting()
    assert waiting.until_ns == 100 + 6 * S
    again.deliver((1, 11))
    assert again.failures() == [("gather[0]", "AlreadyGathered")]
    again.deliver((2, 20))
    assert again.batches() == [in_peer_order((3, 30), (1, 10), (2, 20))]
    assert again.node.counters()["ingress.bytes"] == 0


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({}, "nothing says when"),
        ({"n": -1}, "n is -1"),
        ({"n": 70_000}, "n is 70000"),
        ({"n": 2, "quorum": 3}, "quorum is 3, more than n, 2"),
        ({"n": 2, "until_ns": -5}, "until_ns is -5"),
        ({"n": 2, "per_peer": "yes"}, "per_peer is"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_at_install(attributes, says: str) -> None:
    with pytest.raises(errors.InvalidArtifact, match=says):
        bring_up(gathering(**attributes), "server")


def test_a_join_without_an_input_is_refused_at_install() -> None:
    p = Partition("server")
    p.sys("Threshold", (), "never", n=2)
    with pytest.raises(errors.InvalidArtifact, match="nothing can arrive"):
        bring_up(model(p), "server")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 4)),
            st.tuples(st.just("wait"), st.sampled_from([1 * MS, 1 * S, 3 * S])),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_value_ends_in_one_batch_one_failure_or_one_refusal(moves, n, per_peer) -> None:
    server = Server(gathering(n=n, until_ns=2 * S, per_peer=int(per_peer)))
    sent = []
    for number, (what, of_it) in enumerate(moves):
        if what == "send":
            sent.append((of_it, number))
            server.deliver((of_it, number))
        else:
            server.poll(of_it)
    server.poll(5 * S)
    refused = sum(kind == "AlreadyGathered" for _, kind in server.failures())
    lost = sum(
        int(step.detail.split(": ")[-2].split(" came")[0].split()[-1])
        for step in of(steps.OpFailed, server.steps)
        if step.kind == "JoinIncomplete"
    )
    batches = server.batches()
    assert sum(map(len, batches)) + refused + lost == len(sent)
    for batch in batches:
        peers = [who for who, _ in batch]
        assert peers == sorted(peers)
        assert not per_peer or len(set(peers)) == len(peers)
        assert not n or len(batch) == n
    assert server.node.counters()["ingress.bytes"] == 0
    assert server.node.waiting() == []
