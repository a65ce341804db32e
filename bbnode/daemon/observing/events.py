"""Engine steps as JSON events, for `bbnode status --follow` and the demo.

Rule: values are summarized. A scalar is its number, a short tensor its list, a longer one its
dtype, shape and digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from bbnode.engine import steps
from bbnode.ir.keys import snake_case
from bbnode.ir.peer import PeerId
from bbnode.ir.values import (
    Metadata,
    OptionalValue,
    PeerIdVec,
    ResponseBatch,
    TensorSequence,
    Trigger,
    Value,
    is_text,
    type_of,
)

MAX_SHOWN_ELEMENTS = 16
# Hashing 4 MiB takes about 10 ms; more would delay the loop for a display.
MAX_HASHED_BYTES = 4 << 20
MAX_SHOWN_CHARS = 200
# Entries of a Metadata, which may come from a peer.
MAX_SHOWN_ENTRIES = 64

# The types of most fields of a step, which JSON has as well.
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})


def summarize(value: Value) -> Any:
    """Return a summary of a run-time value that JSON can represent."""
    match value:
        case Trigger():
            return "trigger"
        case PeerId():
            return str(value)
        case PeerIdVec():
            return [str(peer) for peer in value]
        case Metadata():
            shown = islice(value.items(), MAX_SHOWN_ENTRIES)
            shortened = {name[:MAX_SHOWN_CHARS]: _plain(item) for name, item in shown}
            more = len(value) - MAX_SHOWN_ENTRIES
            return shortened if more <= 0 else {**shortened, "…": f"{more} more entries"}
        case ResponseBatch():
            return {
                "responded": [str(peer) for peer, _ in value.responses],
                "missing": [str(peer) for peer in value.missing],
                "reasons": {str(peer): str(why) for peer, why in value.reasons},
            }
        case TensorSequence():
            return [summarize(tensor) for tensor in value[:MAX_SHOWN_ELEMENTS]]
        case OptionalValue():
            return None if value.value is None else summarize(value.value)
        case np.ndarray() | np.generic():
            return _tensor(np.asarray(value))
        case bool() | int() | float() | str() | bytes():
            return _plain(value)
        case tuple():
            return [summarize(child) for child in value[:MAX_SHOWN_ELEMENTS]]
    return {"type": type_of(value).name}


def _plain(item: Any) -> Any:
    if isinstance(item, bytes):
        return item[:MAX_SHOWN_CHARS].hex()
    if isinstance(item, str):
        return item[:MAX_SHOWN_CHARS]
    return item


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    if is_text(array):
        shown = [text[:MAX_SHOWN_CHARS] for text in array.reshape(-1)[:MAX_SHOWN_ELEMENTS].tolist()]
        if array.size <= MAX_SHOWN_ELEMENTS:
            return np.array(shown, object).reshape(array.shape).tolist()
        return {"dtype": "string", "shape": list(array.shape), "first": shown}
    if array.size <= MAX_SHOWN_ELEMENTS:
        return array.astype(float).tolist() if array.dtype.kind == "V" else array.tolist()
    summary: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.nbytes <= MAX_HASHED_BYTES:
        summary["sha256"] = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    return summary


def step_to_event(step: steps.Step) -> dict[str, Any] | None:
    """Return the event of a step; None for steps that only the driver acts on."""
    match step:
        case steps.SendEnvelope() | steps.RunTask() | steps.PublishMessage() | steps.FollowTopic():
            return None
        case steps.AppEvent():
            return {
                "type": "app_event",
                "target": step.target,
                "topic": step.topic,
                "execution": step.execution,
                "value": summarize(step.value),
            }
        case steps.Telemetry():
            return {"type": step.name, **{k: _json(v) for k, v in step.attributes.items()}}
    fields = {
        f.name: _json(getattr(step, f.name)) for f in dataclasses.fields(step) if f.name != "chain"
    }
    return {"type": snake_case(type(step).__name__), **fields}


def _json(value: Any) -> Any:
    """Return a step's field as JSON: peers as text, containers element by element."""
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is PeerId:
        return str(value)
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(v) for v in value]
    return _plain(value) if isinstance(value, bytes) else str(value)
