"""Steps and values as JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from bbnode.daemon.observing.events import step_to_event, summarize
from bbnode.engine import steps
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal
from bbnode.ir.values import TRIGGER, Composite, Metadata, PeerIdVec, ResponseBatch

A, B = PeerId.from_seed(1), PeerId.from_seed(2)
LONG = np.arange(1000, dtype=np.float32)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (TRIGGER, "trigger"),
        (np.float32(0.5), 0.5),
        (np.int64([1, 2]), [1, 2]),
        (np.asarray(True), True),
        (A, str(A)),
        (PeerIdVec((A, B)), [str(A), str(B)]),
        (Metadata(n=3, who="x", raw=b"\x01"), {"n": 3, "who": "x", "raw": "01"}),
        (b"\x01\x02", "0102"),
        (Composite((np.float32(1), TRIGGER)), [1.0, "trigger"]),
        (
            ResponseBatch(
                responses=((A, TRIGGER),),
                missing=(B,),
                reasons=((B, WireRefusal("DataMissing", "no shard")),),
            ),
            {
                "responded": [str(A)],
                "missing": [str(B)],
                "reasons": {str(B): "DataMissing: no shard"},
            },
        ),
        (
            LONG,
            {
                "dtype": "float32",
                "shape": [1000],
                "sha256": hashlib.sha256(LONG.tobytes()).hexdigest(),
            },
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_are_shown_not_shipped(value: Any, shown: Any) -> None:
    assert summarize(value) == shown
    json.dumps(summarize(value))


def test_a_huge_tensor_is_not_hashed_on_the_loop() -> None:
    assert "sha256" not in summarize(np.zeros(2_000_000, np.float32))


@pytest.mark.parametrize(
    ("step", "event"),
    [
        (
            steps.AppEvent(target="t", topic="x", value=np.float32(2), execution=7),
            {"type": "app_event", "target": "t", "topic": "x", "execution": 7, "value": 2.0},
        ),
        (
            steps.Telemetry(name="request.response", attributes={"peer": A, "request": 3}),
            {"type": "request.response", "peer": str(A), "request": 3},
        ),
        (
            steps.PeerUp(peer=A, classes=("client",)),
            {"type": "peer_up", "peer": str(A), "classes": ["client"]},
        ),
        (
            steps.OpFailed(execution=1, target="t", op="o", kind="K", detail="d", line="a.py:3",
                           module="M", source_peer=A),
            {"type": "op_failed", "execution": 1, "target": "t", "op": "o", "kind": "K",
             "detail": "d", "line": "a.py:3", "module": "M", "inner": "", "source_peer": str(A),
             "is_final": False},
        ),
        (steps.RunTask(token=1, fn=lambda: None, op="o"), None),
        (steps.SendEnvelope(peer=A, addresses=(), parts=(b"x",), tag=1), None),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_steps_become_events(step: steps.Step, event: dict[str, Any] | None) -> None:
    assert step_to_event(step) == event
