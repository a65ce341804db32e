"""Records and replays: the same steps again, or the first poll that differs."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from bbnode.engine import Node, errors, steps
from bbnode.engine.record.recording import FRAME_HEAD, frame, plain_step
from bbnode.engine.record.replay import RecordReader, Replay
from bbnode.engine.snapshot.whole import pack, unpack
from bbnode.ir import keys
from tests.engine.builder import Partition, model
from tests.engine.support import S, bring_up, component, of
from tests.engine.test_snapshot_everywhere import LIMITS, MADE, TURNS, Host, vector

MODEL = keys.role_domain("Model")


class Log:
    """A sink in memory."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        self.frames.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self.frames)


def recorded_host(log: Log) -> Host:
    host = Host()
    host.node = bring_up(MADE, "server", limits=LIMITS, record=log, seed=3)
    host.tape = None
    return host


def live(host: Host, turns) -> list[list[Any]]:
    said = []
    for actions, wait_ns in turns:
        for action, number in actions:
            host.do(action, number)
        host.now_ns += wait_ns
        made = host.node.poll(host.now_ns)
        host.take(made)
        said.append([plain_step(step) for step in made])
    return said


def replay(data: bytes, made=None):
    reader = RecordReader(io.BytesIO(data).read)
    entries = iter(reader)
    again = Replay(next(entries), made)
    done = [again.feed(entry) for entry in entries]
    return again, [poll for poll in done if poll is not None], reader.torn


@settings(max_examples=40, deadline=None)
@given(TURNS)
def test_a_replay_says_what_was_said(turns) -> None:
    log = Log()
    host = recorded_host(log)
    said = live(host, turns)
    again, polls, torn = replay(log.data)
    assert all(poll.same for poll in polls)
    assert not torn
    assert [[plain_step(step) for step in poll.steps] for poll in polls] == said
    assert component(again.node, "m").value.tolist() == component(host.node, "m").value.tolist()


def test_a_replay_goes_on_from_a_snapshot() -> None:
    before = Host()
    live(before, [([("sleep", 1), ("ask", 2), ("train", 1)], 1)])
    log = Log()
    host = recorded_host(log)
    host.node.restore(before.node.snapshot())
    said = live(host, [([("answer", 0)], 5 * S), ([("work", 0)], 1), ([("sleep", 1)], 9 * S)])
    _, polls, _ = replay(log.data)
    assert [poll.same for poll in polls] == [True] * 3
    assert [[plain_step(step) for step in poll.steps] for poll in polls] == said


def simple(log: Log | None = None, **more: Any) -> Node:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m")
    p.output("out", "y")
    return bring_up(model(p), "server", record=log, **more)


def two_polls(log: Log) -> Node:
    node = simple(log)
    for now_ns in (1, 2):
        node.invoke("server", {"x": vector(now_ns)})
        node.poll(now_ns)
    return node


def test_a_component_that_does_something_else_shows_as_the_poll_that_differs() -> None:
    log = Log()
    node = two_polls(log)
    component(node, "m").returns = vector(99)  # as one that draws its own random numbers
    node.invoke("server", {"x": vector(3)})
    node.poll(3)
    _, polls, _ = replay(log.data)
    assert [(poll.number, poll.same) for poll in polls] == [(1, True), (2, True), (3, False)]


def test_a_torn_tail_is_left_out_and_told() -> None:
    log = Log()
    two_polls(log)
    for cut in range(1, len(log.frames[-1])):
        _, polls, torn = replay(log.data[:-cut])
        assert [poll.same for poll in polls] == [True]
        assert "frame 2" in torn


def test_a_changed_frame_is_where_the_replay_ends() -> None:
    log = Log()
    two_polls(log)
    data = bytearray(log.data)
    data[len(log.frames[0]) + FRAME_HEAD.size + 3] ^= 1
    _, polls, torn = replay(bytes(data))
    assert polls == []
    assert "frame 1" in torn


def changed_head(**changes: Any) -> bytes:
    log = Log()
    two_polls(log)
    head = unpack(log.frames[0][FRAME_HEAD.size :])
    fields = {k: v for k, v in {**head, **changes}.items() if v != "left out"}
    return frame(pack(fields)) + b"".join(log.frames[1:])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a record"),
        (b"something else that is long enough", "not a record"),
        (frame(b"\xc1"), "can't be read"),
        (frame(pack([1])), "not of a record"),
        (frame(pack({"kind": "poll"})), "not of a record"),
        (changed_head(version=9), "format 9"),
        (changed_head(model=None), "--artifact"),
        (changed_head(peer="left out"), "malformed"),
        (changed_head(program=b"other"), "another artifact"),
        (changed_head() + frame(pack({"kind": "poll", "now_ns": 1})), "malformed"),
        (changed_head() + frame(pack({"kind": "call", "method": "x", "arguments": []})), "malform"),
        (changed_head() + frame(pack({"kind": "head"})), "not of a record"),
    ],
)
def test_what_is_no_record_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(errors.RecordRefused, match=says):
        replay(data)


def test_an_artifact_can_be_given() -> None:
    log = Log()
    two_polls(log)
    head = unpack(log.frames[0][FRAME_HEAD.size :])
    again = Replay({**head, "model": None}, model_of(head))
    assert again.node.targets == tuple(head["targets"])


def model_of(head):
    import onnx

    return onnx.ModelProto.FromString(head["model"])


def test_a_sink_that_fails_ends_the_record_and_not_the_node() -> None:
    frames: list[bytes] = []

    def sink(data: bytes) -> None:
        if len(frames) == 2:
            raise OSError("disk full")
        frames.append(data)

    node = two_polls(sink)
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    assert node.poll(3)
    assert node.counters()["record.broken"] == 1
    assert len(frames) == 2


def test_numbers_that_a_host_took_during_a_poll_are_not_mixed_up() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Forward", ["x"], ["y"], slot="m")
    p.output("out", "y")
    p.sys("EventSource", (), "event", kind=1030)
    p.sys("AppNotify", ["event"], name="heard")
    log = Log()
    node = bring_up(model(p), "server", record=log)
    asked: list[int] = []

    def forward(_ctx, batch):
        if not asked:  # as another thread might, just then
            asked.append(node.invoke("server", {"x": vector(2)}))
        return batch

    component(node, "m").forward = forward
    node.invoke("server", {"x": vector(1)})
    node.publish_event(1030)
    made = node.poll(1)
    assert [e.execution for e in of(steps.AppEvent, made)] == [1, 3]
    assert asked == [2]
    node.poll(2)
    _, polls, _ = replay(log.data)
    assert [poll.same for poll in polls] == [True, True]
