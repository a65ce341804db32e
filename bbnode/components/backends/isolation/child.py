"""One child process, as its parent sees it: a line for each run that is under way at once.

Rule: the child lives as long as its end of the control socket. It is a new program with an
environment of its own, so that no secret of the node is in it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy.typing as npt

import bbnode
from bbnode.components.backends.isolation import shared
from bbnode.components.backends.isolation.shared import read_settings
from bbnode.components.backends.isolation.worker import NO_MEMORY_CODE
from bbnode.ir.decoding import shown
from bbnode.ir.errors import DecodeError
from bbnode.ir.values import Value

_START_S: Final = 60.0  # imports, on a busy machine
_STOP_S: Final = 5.0
# Of the parent's environment: where libraries are, and how many threads they take.
_KEPT_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ")
_KEPT_PREFIXES: Final = ("OMP_", "ORT_", "PYTHON")

Places = Mapping[int, npt.NDArray[Any]]


class ChildDied(Exception):
    """The child ended, or was ended, while a run was under way.

    `reason` is "crash", "memory" or "time". `to_blame`: True for the run that did it, False for one
    that did not, None where it may have been this run or another.
    """

    def __init__(self, reason: str, what: str, *, to_blame: bool | None) -> None:
        self.reason = reason
        self.what = what
        self.to_blame = to_blame
        super().__init__(what)


class ChildRefused(Exception):
    """The child carried a call out and it failed; the child goes on."""

    def __init__(self, text: str, node: str, *, memory: bool, unavailable: bool) -> None:
        self.node = node
        self.memory = memory
        self.unavailable = unavailable
        super().__init__(text)


class Child:
    """One child process. `run` may be called from several threads at once."""

    def __init__(self, settings: Mapping[str, Any], max_run_s: float) -> None:
        """Start it, and wait until it is ready. Raises OSError."""
        self._max_bytes: int = settings["max_memory_bytes"]
        self._max_run_s = max_run_s
        self._lock = threading.Lock()
        self._idle: list[shared.ChildLine] = []
        self._under_way = 0
        self._end: tuple[str, str] | None = None  # reason and what, once it has ended
        self.prepared: set[int] = set()
        self.dropped: list[int] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bbnode.components.backends.isolation.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        try:
            self._control.settimeout(_START_S)
            self._control.send(msgpack.packb(dict(settings)))
            answer = self._control.recv(1 << 16)
            said = read_settings(answer) if answer else {"failed": "it ended"}
            if "confined" not in said:
                raise OSError(f"the child process did not start: {shown(said.get('failed'))}")
            self.confined = str(said["confined"])[:200]
        except DecodeError as error:
            self.close()
            raise OSError(f"the child process did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """False once a run has found it dead."""
        return self._end is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def call(
        self,
        kind: int,
        graph: int,
        values: Sequence[Value],
        *,
        dropped: Sequence[int] = (),
        places: Places | None = None,
    ) -> list[Value]:
        """Carry out one call and return what it made; tensors with a place are written there.

        Raises:
            ChildDied: it ended, or took longer than its time.
            ChildRefused: the call failed.
            MemoryError: the values are larger than the bound.
        """
        line = self._take_line()
        try:
            writer = shared.Writer()
            head = {"values": [writer.add(value) for value in values], "dropped": list(dropped)}
            try:
                line.send(kind, graph, head, writer)
            except OSError as error:  # it was dead before
                raise self._died("crash", "", to_blame=False) from error
            try:
                answer, _, said, region = line.receive()
            except TimeoutError:
                what = f"it took longer than max_run_s, {self._max_run_s:g} s"
                raise self._died("time", what, to_blame=True) from None
            except (EOFError, ConnectionError):
                raise self._died("crash", "") from None
            except (OSError, DecodeError) as error:
                raise self._died("crash", f"it answered nonsense: {error}") from error
            try:
                made = self._read(answer, said, region, places or {})
            except (DecodeError, KeyError, TypeError, ValueError) as error:
                # Whatever it is now, it is not what was started.
                raise self._died("crash", f"it answered nonsense: {error}") from error
            line.trim()
            line.forget()
        except (ChildDied, MemoryError):
            line.close()
            with self._lock:
                self._under_way -= 1
            raise
        except BaseException:
            self._give_line(line)
            raise
        self._give_line(line)
        return made

    def _read(self, answer: int, said: Any, region: shared.Bytes, places: Places) -> list[Value]:
        if answer == shared.MADE:
            return [
                shared.read_value(region, each, copy=True, place=places.get(at))
                for at, each in enumerate(said["values"])
            ]
        if answer not in (shared.REFUSED, shared.NO_MEMORY):
            raise DecodeError(f"an answer of kind {answer}")
        raise ChildRefused(
            str(said["text"]),
            str(said.get("node", "")),
            memory=answer == shared.NO_MEMORY,
            unavailable=bool(said.get("unavailable")),
        )

    def close(self) -> None:
        """End the child and wait for its end. Idempotent."""
        with self._lock:
            self._end = self._end or ("crash", "it was ended")
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()
        self._control.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)

    def _take_line(self) -> shared.ChildLine:
        with self._lock:
            if self._end is not None:
                raise ChildDied(*self._end, to_blame=False)
            self._under_way += 1
            if self._idle:
                return self._idle.pop()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(self._max_run_s)
        line = shared.ChildLine(mine, self._max_bytes)
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            line.close()
            died = self._died("crash", "", to_blame=False)
            with self._lock:
                self._under_way -= 1
            raise died from error
        return line

    def _give_line(self, line: shared.ChildLine) -> None:
        with self._lock:
            self._under_way -= 1
            if self._end is None:
                self._idle.append(line)
                return
        line.close()

    def _died(self, reason: str, what: str, *, to_blame: bool | None = None) -> ChildDied:
        """Return why a run failed; the first run that finds the child dead decides for all."""
        with self._lock:
            if self._end is not None:
                # Of one that ran out of time it is known whose time that was.
                innocent = to_blame is False or self._end[0] == "time"
                return ChildDied(*self._end, to_blame=False if innocent else None)
            if to_blame is None and self._under_way == 1:
                to_blame = True
            if reason == "crash" and not what:
                reason, what = self._ended()
            self._end = (reason, what)
        self.close()
        return ChildDied(reason, what, to_blame=to_blame)

    def _ended(self) -> tuple[str, str]:
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return "crash", "it closed its line"
        if code == NO_MEMORY_CODE:
            return "memory", f"it needed more than max_memory_bytes, {self._max_bytes}"
        if code == -signal.SIGKILL:
            return "memory", "it was killed, most likely by the system for want of memory"
        if code < 0:
            return "crash", f"it died of {signal.Signals(-code).name}"
        return "crash", f"it ended with status {code}"


def _environment() -> dict[str, str]:
    """Return the child's environment: nothing that could be a secret."""
    made = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_ENVIRONMENT or name.startswith(_KEPT_PREFIXES)
    }
    root = str(Path(bbnode.__file__).parent.parent)
    made["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
    return made
