"""The record of a node's life: all its input, poll by poll, for a replay.

Rule: a record is framed bytes for a sink, one frame at a time, in the order in which the node
worked: a head (what was installed), then restores, calls and polls. A poll's frame holds its time,
the events and completions that it took (from any thread), the numbers that it gave to executions,
and a digest of its steps. Each frame can be read by itself. If the sink raises, only the record
ends.

Frame: u32 length, u32 CRC-32 of the body (both little-endian), body (msgpack).
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgpack
import numpy as np
import onnx
from multiaddr import Multiaddr

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.runtime import Runtime
from bbnode.engine.snapshot.codec import SnapshotWriter
from bbnode.engine.snapshot.events import save_completed, save_event
from bbnode.engine.snapshot.whole import pack
from bbnode.ir import codec
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import type_of

RECORD_VERSION = 3
DIGEST_BYTES = 16  # no defence against forgery: it only shows differences
FRAME_HEAD = struct.Struct("<II")

Sink: TypeAlias = Callable[[bytes], object]


def frame(body: bytes) -> bytes:
    """Return a body with its length and checksum before it."""
    return FRAME_HEAD.pack(len(body), zlib.crc32(body)) + body


def head_of(*, model: onnx.ModelProto | None, peer: PeerId, **install: Any) -> dict[str, Any]:
    """Return what a replay needs to install the node again; with the model, if there is one.

    `install`: program (its digest), targets, addresses (bytes), config, limits, seed, incarnation,
    trace and snapshots, as plain data.
    """
    return {
        "kind": "head",
        "version": RECORD_VERSION,
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "model": None if model is None else model.SerializeToString(deterministic=True),
        "peer": peer.to_bytes(),
        **install,
    }


class Recorder:
    """Writes one node's record; between `begin` and `end` a poll is under way."""

    def __init__(self, sink: Sink, rt: Runtime, head: Mapping[str, Any]) -> None:
        self._sink: Sink | None = sink
        self._rt = rt
        self._poll: dict[str, Any] = {}
        self._writer: SnapshotWriter | None = None
        self._numbers: list[list[int]] = []
        rt.executor.numbers = self
        self._write(head)

    # -- between polls -----------------------------------------------------------------------

    def called(self, method: str, *arguments: Any) -> None:
        """Record a call that takes effect at once, on the polling thread, with plain arguments."""
        self._write({"kind": "call", "method": method, "arguments": list(arguments)})

    def restored(self, data: bytes, now_ns: int | None, *, same_life: bool) -> None:
        """Record that the node loads a snapshot."""
        self._write({"kind": "restore", "data": data, "now_ns": now_ns, "same_life": same_life})

    # -- a poll ------------------------------------------------------------------------------

    def begin(self, now_ns: int) -> None:
        """Begin a poll at the host's `now_ns`."""
        if self._sink is None:
            return
        self._writer = self._rt.writer()
        self._numbers = []
        self._poll = {"kind": "poll", "now_ns": now_ns, "closed": self._rt.ingress.closed}

    def took(self, events: Iterable[ev.Event]) -> None:
        """Record the events that the poll has taken."""
        writer = self._writer
        if writer is not None:
            self._guard(lambda: self._poll.update(events=[save_event(e, writer) for e in events]))

    def completed(self, completions: Iterable[ev.Completed]) -> None:
        """Record the completions that the poll has taken."""
        writer = self._writer
        if writer is not None:
            rows = [save_completed(completed, writer) for completed in completions]
            self._poll["completions"] = rows

    def end(self, made: Sequence[steps.Step]) -> None:
        """End a poll."""
        writer = self._writer
        if writer is None:
            return
        self._writer = None
        self._poll.update(
            numbers=self._numbers,
            steps=len(made),
            digest=steps_digest(made),
            lists=writer.lists(),
        )
        self._write(self._poll)

    def next(self) -> int:
        """Return the next number for the node itself; other threads may take numbers meanwhile."""
        number = self._rt.executor.executions.next()
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
            self._sink = self._writer = None
            self._rt.reports.counts["record.broken"] += 1


# -- steps -----------------------------------------------------------------------------------


def steps_digest(made: Sequence[steps.Step]) -> bytes:
    """Return BLAKE2b over the plain data of all steps of a poll, in order."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for step in made:
        state.update(msgpack.packb(plain_step(step), default=str))
    return state.digest()


def plain_step(step: steps.Step) -> list[Any]:
    """Return a step as [class, [field, value]…]; equal steps give equal data on every machine.

    The function of a RunTask is left out, as it has a meaning in one process only. A value without
    a codec is represented by its type.
    """
    if isinstance(step, steps.SendEnvelope):
        addresses = [bytes(address.to_bytes()) for address in step.addresses]
        return ["SendEnvelope", step.peer.to_bytes(), addresses, b"".join(step.parts), step.tag]
    fields = [
        [field.name, _plain(getattr(step, field.name))]
        for field in dataclasses.fields(step)
        if not (isinstance(step, steps.RunTask) and field.name == "fn")
    ]
    return [type(step).__name__, *fields]


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, PeerId):
        return value.to_bytes()
    if isinstance(value, Multiaddr):
        return bytes(value.to_bytes())
    if isinstance(value, Mapping):
        return [[str(key), _plain(item)] for key, item in value.items()]
    if type(value) in (tuple, list):
        return [_plain(item) for item in value]
    try:
        return [type_of(value).id, codec.encode_value(value)]
    except (BbnodeError, ValueError, TypeError, OverflowError):
        return f"a {type(value).__qualname__}"
