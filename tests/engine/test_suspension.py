"""Work off the loop, one op at a time per component, and everything that comes too late."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bbnode.components.contracts import ComponentError
from bbnode.engine import Limits, steps
from bbnode.ir import keys
from bbnode.ir.values import TRIGGER, Metadata
from tests.engine.builder import Partition, model
from tests.engine.support import Boom, S, bring_up, component, of

MODEL = keys.role_domain("Model")
TRAIN_S = 20


def trainer(**more):
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Train", (), ["stats"], slot="m", after=["x"], called="train", epochs=3, batch=5,
         stamp_ns=TRAIN_S * S)  # fmt: skip
    p.output("out", "stats")
    return bring_up(model(p), "server", **more)


def test_an_offloaded_op_runs_as_a_task_and_its_result_comes_back() -> None:
    node = trainer()
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(0))
    assert task.op == "train"
    assert component(node, "m").calls == []  # it runs where the host runs it
    assert node.next_deadline() == TRAIN_S * S
    (waiting,) = node.waiting()
    assert (waiting.what, waiting.why, waiting.whom) == ("train", "worker thread", "m")
    woken = []
    node.set_wake(lambda: woken.append(threading.current_thread().name))
    worker = threading.Thread(target=lambda: node.complete(task.token, task.fn()), name="worker")
    worker.start()
    worker.join()
    assert woken == ["worker"]
    made = node.poll(1)
    assert [e.value for e in of(steps.AppEvent, made)] == [Metadata(num_samples=5)]
    assert node.waiting() == []
    assert node.next_deadline() is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ComponentError("no data"), "ComponentError"),
        (Boom("x"), "UnexpectedException"),
    ],
)
def test_a_task_that_raises_fails_its_op(error, kind) -> None:
    node = trainer()
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(0))
    node.fail(task.token, error)
    made = node.poll(1)
    assert [s.kind for s in of(steps.OpFailed, made)] == [kind]
    assert not of(steps.ExecutionFinished, made)[0].ok


def test_a_task_that_never_returns_fails_by_its_deadline_and_keeps_its_component() -> None:
    node = trainer()
    node.invoke("server", {"x": TRIGGER})
    (task,) = of(steps.RunTask, node.poll(0))
    made = node.poll(TRAIN_S * S)
    (failed,) = of(steps.OpFailed, made)
    assert failed.kind == "DeadlineExceeded"
    assert "worker thread" in failed.detail
    assert node.executions() == []
    assert [w.why for w in node.waiting()] == ["worker thread (given up)"]
    # The thread still uses the component: the next op waits for it.
    node.invoke("server", {"x": TRIGGER})
    assert of(steps.RunTask, node.poll(TRAIN_S * S)) == []
    assert [w.why for w in node.waiting()][1] == "another op of the same component"
    node.complete(task.token, task.fn())
    made = node.poll(TRAIN_S * S + 1)
    assert node.counters()["completion.late"] == 1
    assert len(of(steps.RunTask, made)) == 1
    assert of(steps.AppEvent, made) == []


def test_ops_of_one_component_wait_in_the_order_of_their_coming() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Train", (), ["s"], slot="m", after=["x"], epochs=1, batch=1)
    p.op(MODEL, "LoadParameters", ["x"], ["c"], slot="m")
    p.op(MODEL, "Train", (), ["s2"], slot="m", after=["x"], epochs=2, batch=2)
    p.op(MODEL, "ApplyDelta", ["x"], ["d"], slot="m")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (first,) = of(steps.RunTask, node.poll(0))
    node.complete(first.token, first.fn())
    (second,) = of(steps.RunTask, node.poll(1))
    assert component(node, "m").calls == ["train 1 1", "load 0.0"]
    node.complete(second.token, second.fn())
    node.poll(2)
    assert component(node, "m").calls == ["train 1 1", "load 0.0", "train 2 2", "apply_delta"]
    assert node.executions() == []


def test_an_op_that_waits_for_its_component_gives_up_by_its_deadline() -> None:
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "Train", (), ["s"], slot="m", after=["x"], epochs=1, batch=1, stamp_ns=9 * S)
    p.op(MODEL, "LoadParameters", ["x"], ["c"], slot="m", stamp_ns=2 * S, called="load")
    node = bring_up(model(p), "server")
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    (task,) = of(steps.RunTask, node.poll(0))
    (failed,) = of(steps.OpFailed, node.poll(2 * S))
    assert (failed.op, failed.kind) == ("load", "DeadlineExceeded")
    node.complete(task.token, task.fn())
    node.poll(3 * S)
    assert component(node, "m").calls == ["train 1 1"]


def losing(**more):
    p = Partition("server", inputs=["x"])
    p.bind("m", "Model", "test.ScriptModel")
    p.op(MODEL, "ComputeLoss", ["x", "x"], ["loss"], slot="m", stamp_ns=5 * S)
    p.output("out", "loss")
    return bring_up(model(p), "server", **more)


def test_an_open_completion_finishes_its_op_once() -> None:
    node = losing()
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    node.poll(0)
    completion = component(node, "m").completion
    completion.complete(np.ones(1, np.float32))
    completion.complete(np.zeros(1, np.float32))
    made = node.poll(1)
    assert [e.value.tolist() for e in of(steps.AppEvent, made)] == [[1.0]]
    completion.fail(Boom("late"))
    assert of(steps.OpFailed, node.poll(2)) == []
    counters = node.counters()
    assert counters["completion.dropped"] + counters["completion.unknown"] == 2


def test_an_open_completion_that_is_never_used_frees_its_component() -> None:
    node = losing()
    for _ in range(2):
        node.invoke("server", {"x": np.zeros(1, np.float32)})
    node.poll(0)
    assert [s.kind for s in of(steps.OpFailed, node.poll(5 * S))] == ["DeadlineExceeded"]
    # The second had waited for the component, and now waits for a completion of its own.
    assert [w.why for w in node.waiting()] == ["completion by the component"]
    assert [s.kind for s in of(steps.OpFailed, node.poll(10 * S))] == ["DeadlineExceeded"]
    assert node.waiting() == []
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    node.poll(11 * S)
    component(node, "m").completion.complete(np.ones(1, np.float32))
    assert len(of(steps.AppEvent, node.poll(11 * S))) == 1


def test_a_result_beyond_the_cap_fails_its_op() -> None:
    node = losing(limits=Limits(completion_bytes=10))
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    node.poll(0)
    component(node, "m").completion.complete(np.ones(100, np.float32))
    assert [s.kind for s in of(steps.OpFailed, node.poll(1))] == ["OversizePayload"]


def test_a_completion_of_the_wrong_type_fails_its_op() -> None:
    node = losing()
    node.invoke("server", {"x": np.zeros(1, np.float32)})
    node.poll(0)
    component(node, "m").completion.complete(TRIGGER)
    assert [s.kind for s in of(steps.OpFailed, node.poll(1))] == ["WrongResultType"]


def test_completions_of_nobody_are_counted_and_kept_nowhere() -> None:
    node = trainer()
    for token in range(100):
        node.complete(token, np.zeros(1000))
        node.fail(token, Boom())
    assert node.poll(0) == [steps.BootstrapComplete(executions=0, ok=True)]
    assert node.counters()["completion.unknown"] == 200


def test_parked_ops_beyond_the_cap_fail() -> None:
    node = trainer(limits=Limits(pending_async=1))
    for _ in range(2):
        node.invoke("server", {"x": TRIGGER})
    made = node.poll(0)
    assert [s.kind for s in of(steps.OpFailed, made)] == ["PendingAsyncExceeded"]
    assert len(of(steps.RunTask, made)) == 1
