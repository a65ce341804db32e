"""Replay of a record: the same node with the same input, poll by poll.

Rule: all input comes from the record; what the replayed node or its components put into the ingress
is dropped. Offloaded methods run again when their results are due, for their effect on their
component; their results are the recorded ones. A component that is not deterministic shows as a
poll whose steps differ.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import onnx

from bbnode.engine import ingress as ev
from bbnode.engine import steps
from bbnode.engine.errors import RecordRefused
from bbnode.engine.ingress import Executions
from bbnode.engine.install import install
from bbnode.engine.limits import Limits
from bbnode.engine.node import Node
from bbnode.engine.record.recording import FRAME_HEAD, RECORD_VERSION, steps_digest
from bbnode.engine.snapshot.events import load_completed, load_event
from bbnode.engine.snapshot.whole import unpack
from bbnode.ir.address import address_from_bytes
from bbnode.ir.onnx_file import parse_model
from bbnode.ir.peer import PeerId

# Malformed data makes the code below raise these.
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One poll, run again. `same`: its steps are those of the record."""

    number: int
    now_ns: int
    steps: tuple[steps.Step, ...]
    recorded: int
    same: bool


class RecordReader:
    """The frames of a record; `torn` says, at the end, why it ended early.

    `read(n)` gives the next n bytes, fewer only at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.torn = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the whole frames, in order; raises RecordRefused if the file is not a record."""
        number = 0
        while True:
            head = self._read(FRAME_HEAD.size)
            if not head and number:
                return
            body = b""
            if len(head) == FRAME_HEAD.size:
                size, checksum = FRAME_HEAD.unpack(head)
                body = self._read(size)
                if len(body) == size and zlib.crc32(body) == checksum:
                    yield _parse(body, number)
                    number += 1
                    continue
            if not number:
                raise RecordRefused("this is not a record of a node, or its head is torn")
            self.torn = f"frame {number} is cut short or damaged ({len(head) + len(body)} bytes)"
            return


def _parse(body: bytes, number: int) -> dict[str, Any]:
    try:
        fields = unpack(body)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise RecordRefused(f"frame {number} can't be read: {error}") from error
    if not isinstance(fields, dict) or (fields.get("kind") == "head") is not (number == 0):
        raise RecordRefused(f"frame {number} is not of a record")
    if number == 0 and fields.get("version") != RECORD_VERSION:
        raise RecordRefused(
            f"the record has format {fields.get('version')!r}, this bbnode reads {RECORD_VERSION}"
        )
    return fields


class Replay:
    """A node that is fed from a record."""

    def __init__(self, head: Mapping[str, Any], model: onnx.ModelProto | None = None) -> None:
        """Install what the head names; `model` if the record does not hold it.

        Raises RecordRefused, and what `install` raises.
        """
        try:
            found = _model_of(head) if model is None else model
            self.node: Node = install(
                found,
                head["targets"],
                peer_id=PeerId.from_bytes(head["peer"]),
                addresses=[address_from_bytes(raw) for raw in head["addresses"]],
                config=head["config"],
                limits=Limits.from_caps(head["limits"]),
                seed=head["seed"],
                incarnation=head["incarnation"],
                trace=head["trace"],
                snapshots=head["snapshots"],
                # It ran with these settings, and nothing leaves a replay.
                own_artifact=True,
            )
        except _MALFORMED as error:
            raise RecordRefused(f"the record's head is malformed: {error}") from error
        if self.node.runtime.program.digest != head.get("program"):
            raise RecordRefused("the record was made with another artifact; name that one")
        self.node.runtime.ingress.deaf = True
        self._tasks: dict[int, steps.RunTask] = {}
        self._polls = 0

    def feed(self, entry: Mapping[str, Any]) -> Replayed | None:
        """Apply one frame; return the outcome if it is a poll. Raises RecordRefused."""
        try:
            if entry["kind"] == "poll":
                return self._poll(entry)
            if entry["kind"] == "call":
                _CALLS[entry["method"]](self.node, *entry["arguments"])
            elif entry["kind"] == "restore":
                self.node.restore(entry["data"], entry["now_ns"], same_life=entry["same_life"])
        except _MALFORMED as error:
            raise RecordRefused(
                f"a frame after poll {self._polls} is malformed: {type(error).__name__}: {error}"
            ) from error
        return None

    def _poll(self, entry: Mapping[str, Any]) -> Replayed:
        node = self.node
        for completed in self._fill_ingress(entry):
            task = self._tasks.pop(completed.token, None)
            if task is not None:
                # The record has what it raised then.
                with contextlib.suppress(Exception):
                    task.fn()
        made = node.poll(entry["now_ns"])
        self._tasks.update((s.token, s) for s in made if isinstance(s, steps.RunTask))
        self._polls += 1
        return Replayed(
            number=self._polls,
            now_ns=entry["now_ns"],
            steps=tuple(made),
            recorded=entry["steps"],
            same=steps_digest(made) == entry["digest"],
        )

    def _fill_ingress(self, entry: Mapping[str, Any]) -> list[ev.Completed]:
        """Fill the ingress with what the recorded poll took; returns the completions."""
        rt = self.node.runtime
        for event in rt.ingress.waiting()[0]:
            if isinstance(event, ev.InboundBytes):
                event.charge.release()  # its sends to itself are in the record as well
        reader = rt.reader(entry["lists"])
        events = [load_event(row, reader) for row in entry["events"]]
        completions = [load_completed(row, reader) for row in entry.get("completions", ())]
        for event in events:
            if isinstance(event, ev.BootstrapAsked):
                rt.bootstraps.accepted(event)
        rt.ingress.refill(events, completions)
        if entry["closed"]:
            rt.ingress.close()
        rt.executor.numbers = _TakenNumbers(entry["numbers"], rt.executor.executions)
        return completions


class _TakenNumbers:
    """The numbers that a recorded poll gave to executions, as ranges.

    If the node starts more executions than in the record, it numbers them itself.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], others: Executions) -> None:
        self._numbers = (first + n for first, count in ranges for n in range(count))
        self._others = others

    def next(self) -> int:
        """Return the next number."""
        return next(self._numbers, 0) or self._others.next()


def _model_of(head: Mapping[str, Any]) -> onnx.ModelProto:
    if head["model"] is None:
        raise RecordRefused("the record does not hold its artifact; name it with --artifact")
    return parse_model(head["model"])


_CALLS: Mapping[str, Callable[..., None]] = {
    "set_addresses": lambda node, raws: node.set_addresses([address_from_bytes(r) for r in raws]),
    "add_addresses": lambda node, raw, raws: node.add_addresses(
        PeerId.from_bytes(raw), [address_from_bytes(r) for r in raws]
    ),
    "drop_address": lambda node, raw, address: node.drop_address(
        PeerId.from_bytes(raw), address_from_bytes(address)
    ),
    "forget_peer": lambda node, raw: node.forget_peer(PeerId.from_bytes(raw)),
    "leave": lambda node: node.leave(),
    "adopt": lambda node, data, slots: node.adopt(data, slots),
    "block_peer": lambda node, raw: node.block_peer(PeerId.from_bytes(raw)),
    "unblock_peer": lambda node, raw: node.unblock_peer(PeerId.from_bytes(raw)),
    "allow_only": lambda node, raws: node.allow_only(
        None if raws is None else [PeerId.from_bytes(raw) for raw in raws]
    ),
    "set_tracing": lambda node, on: node.set_tracing(on),
}
