"""The record of a node's life: all that came in, poll by poll, so that it can be run again.

Rule: a record is framed bytes handed to a sink, one frame at a time, in the order in which the
node worked: a head (what was installed), then restores, calls and polls. A poll's frame holds its
time, the events and completions that it took (whatever thread brought them), the numbers that
it gave to executions, and a digest of its steps. Each frame stands by itself. A sink that
raises ends the record, and nothing else.

Frame: u32 length, u32 CRC-32 of the body (both little-endian), body (msgpack).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.record.step_digest import steps_digest
from bbnode.engine.snapshot.codec import SavedNames
from bbnode.engine.snapshot.events import save_completed, save_event
from bbnode.engine.snapshot.sections import plans_of
from bbnode.engine.snapshot.whole import NodeParts, pack

if TYPE_CHECKING:
    from bbnode.ir.peer import PeerId

RECORD_VERSION = 2
FRAME_HEAD = struct.Struct("<II")

Sink: TypeAlias = Callable[[bytes], object]


def frame(body: bytes) -> bytes:
    """A body with its length and checksum before it."""
    return FRAME_HEAD.pack(len(body), zlib.crc32(body)) + body


def head_of(
    *,
    program: bytes,
    model: onnx.ModelProto | None,
    targets: Sequence[str],
    peer: PeerId,
    addresses: Sequence[bytes],
    config: Mapping[str, Mapping[str, Any]],
    limits: Mapping[str, int | None],
    seed: int,
    incarnation: int,
    trace: bool,
    snapshots: bool,
) -> dict[str, Any]:
    """What a replay needs to install the node again; the model itself where there is one."""
    return {
        "kind": "head",
        "version": RECORD_VERSION,
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "program": program,
        "model": None if model is None else model.SerializeToString(deterministic=True),
        "targets": list(targets),
        "peer": peer.to_bytes(),
        "addresses": list(addresses),
        "config": {slot: dict(settings) for slot, settings in config.items()},
        "limits": dict(limits),
        "seed": seed,
        "incarnation": incarnation,
        "trace": trace,
        "snapshots": snapshots,
    }


class Recorder:
    """Writes one node's record; between `begin` and `end` a poll is under way."""

    def __init__(self, sink: Sink, parts: NodeParts, head: Mapping[str, Any]) -> None:
        self._sink: Sink | None = sink
        self._parts = parts
        self._plans = plans_of(parts.program, parts.rt, parts.bootstraps)
        self._poll: dict[str, Any] = {}
        self._names: SavedNames | None = None
        self._numbers: list[list[int]] = []
        parts.rt.next_execution = self._next_execution
        self._write(head)

    # -- between polls -----------------------------------------------------------------------

    def called(self, method: str, *arguments: Any) -> None:
        """A call on the polling thread that works at once; `arguments` are plain data."""
        self._write({"kind": "call", "method": method, "arguments": list(arguments)})

    def restored(self, data: bytes, now_ns: int | None, *, same_life: bool) -> None:
        """The node takes up a snapshot."""
        self._write({"kind": "restore", "data": data, "now_ns": now_ns, "same_life": same_life})

    # -- a poll ------------------------------------------------------------------------------

    def begin(self, now_ns: int) -> None:
        """A poll at the host's `now_ns` begins."""
        if self._sink is None:
            return
        rt = self._parts.rt
        self._names = SavedNames(rt, self._plans)
        self._numbers = []
        self._poll = {"kind": "poll", "now_ns": now_ns, "closed": rt.ingress.closed}

    def took(self, events: Iterable[ev.Event]) -> None:
        """The poll has taken these events."""
        names = self._names
        if names is not None:
            self._guard(lambda: self._poll.update(events=[save_event(e, names) for e in events]))

    def completed(self, completions: Iterable[ev.Completed]) -> None:
        """The poll has taken these completions."""
        names = self._names
        if names is not None:
            rows = [save_completed(completed, names) for completed in completions]
            self._poll["completions"] = rows

    def end(self, made: Sequence[steps.Step]) -> None:
        """The poll is over."""
        names = self._names
        if names is None:
            return
        self._names = None
        self._poll.update(
            numbers=self._numbers,
            steps=len(made),
            digest=steps_digest(made),
            lists=names.lists(),
        )
        self._write(self._poll)

    def _next_execution(self) -> int:
        """What the node itself numbers; other threads number what they ask for meanwhile."""
        number = self._parts.rt.executions()
        if self._numbers and sum(self._numbers[-1]) == number:
            self._numbers[-1][1] += 1
        else:
            self._numbers.append([number, 1])
        return number

    # -- writing -----------------------------------------------------------------------------

    def _write(self, plain: Mapping[str, Any]) -> None:
        sink = self._sink
        if sink is not None:
            self._guard(lambda: sink(frame(pack(plain))))

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - the boundary to the host's sink, and to odd values
            self._sink = self._names = None
            self._parts.rt.counts["record.broken"] += 1
