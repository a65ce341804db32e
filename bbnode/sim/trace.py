"""The trace of a run, in a form that allows runs to be compared.

Rule: a line holds names, numbers and checksums, never an object's address or a text that may
differ between machines. The digest covers all lines; only the newest are kept.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable

from bbnode.engine import steps
from bbnode.ir import codec
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value

DEFAULT_KEPT_LINES = 10_000  # some 500 KB of text
# Lines that are hashed at once, since each update of a hash costs as much as a line.
_LINES_AT_ONCE = 256


class Trace:
    """The trace of one network."""

    def __init__(self, kept: int = DEFAULT_KEPT_LINES) -> None:
        self._hash = hashlib.sha256()
        self._kept = kept
        # Hashed lines in the batches that were hashed: freeing single old lines would touch memory
        # that has long left the processor's caches.
        self._texts: deque[tuple[int, str | list[str]]] = deque()
        self._in_texts = 0
        self._fresh: list[str] = []  # not yet hashed
        self._hashed = 0

    def __len__(self) -> int:
        return self._hashed + len(self._fresh)

    def note(self, at_ns: int, who: str, what: str) -> None:
        """Add one line."""
        fresh = self._fresh
        fresh.append(f"{at_ns} {who} {what}")
        if len(fresh) >= _LINES_AT_ONCE:
            self._take_up()

    def add(self, lines: Iterable[str]) -> None:
        """Add lines that were recorded elsewhere."""
        self._fresh += lines
        if len(self._fresh) >= _LINES_AT_ONCE:
            self._take_up()

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, in hex: equal digests mean equal runs."""
        self._take_up()
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        """Return the newest lines, oldest first."""
        self._take_up()
        newest: list[str] = []
        for _, text in self._texts:
            newest += text.split("\n") if isinstance(text, str) else text
        return newest[max(len(newest) - self._kept, 0) :]

    def _take_up(self) -> None:
        fresh = self._fresh
        if not fresh:
            return
        count, text = len(fresh), "\n".join(fresh)
        self._hash.update(f"{text}\n".encode())
        texts = self._texts
        # Keep the list if a name contains a line break.
        texts.append((count, text if text.count("\n") == count - 1 else fresh))
        self._in_texts += count
        while self._in_texts - texts[0][0] >= self._kept:
            self._in_texts -= texts.popleft()[0]
            if not texts:
                break
        self._hashed += count
        self._fresh = []


def describe(step: steps.Step, name_of: Callable[[PeerId], str]) -> str:
    """Return a step as a line of the trace; a checksum represents an envelope's content."""
    match step:
        case steps.SendEnvelope():
            return f"send {name_of(step.peer)} {step.size} {checksum(*step.parts)}"
        case steps.PublishMessage():
            return f"publish {step.topic} {len(step.payload)} {checksum(step.payload)}"
        case steps.FollowTopic():
            return f"follow {step.topic} {step.on}"
        case steps.AppEvent():
            return f"event {step.topic} {step.execution} {value_checksum(step.value)}"
        case steps.OutputSkipped():
            return f"skipped {step.name} {step.execution}"
        case steps.OpFailed():
            return f"op-failed {step.op} {step.kind} {step.execution}"
        case steps.OpNotRun():
            return f"not-run {step.op} {step.execution}"
        case steps.ExecutionFinished():
            return f"finished {step.execution} {step.failures}"
        case steps.WireReceiveFailed():
            return f"receive-failed {name_of(step.peer)} {step.fill} {step.kind}"
        case steps.PeerResolveFailed():
            return f"unresolved {name_of(step.peer)} {step.op} {step.execution}"
        case steps.PeerUp() | steps.PeerDown():
            return f"{type(step).__name__} {name_of(step.peer)}"
        case steps.RunTask():
            return f"task {step.token} {step.op}"
        case steps.BootstrapComplete():
            return f"bootstrapped {step.executions} {step.ok}"
        case steps.CycleBudgetExceeded():
            return f"budget-exceeded {step.remaining}"
        case steps.Telemetry(name="codec.encoded" | "codec.decoded", attributes=said):
            moved = f"{said['raw_bytes']} {said['code_bytes']}"
            return f"{step.name} {said['slot']} {moved} {said['execution']}"
        case steps.Telemetry():
            return f"telemetry {step.name}"
        case steps.ExecutionStarted() | steps.ExecutionEnded():
            return f"{type(step).__name__} {step.entry} {step.execution}"
        case steps.OpCompleted() | steps.FillSent():
            return f"{type(step).__name__} {step.op} {step.execution}"


def checksum(*parts: bytes | memoryview) -> str:
    """Return the CRC-32 over buffers, as eight hex digits."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return "%08x" % crc  # noqa: UP031 - a quarter of the time of the other, for each envelope


def value_checksum(value: Value) -> str:
    """Return the CRC-32 of a value's payload; the name of its class if it has none."""
    try:
        return checksum(*codec.encode_parts(value))
    except BbnodeError:
        return type(value).__name__
