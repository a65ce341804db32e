"""Gates: where a daemon's component stops, so that a test finds it in a known phase.

Rule: a daemon that comes to a gate says its name and the phase on the socket that GATE_VARIABLE
names, and goes on when it is answered, or the other end is gone. Gates that no test has closed
answer at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S

GATE_VARIABLE = "CHAOS_GATE"
NAME_VARIABLE = "CHAOS_NAME"


def pass_gate(phase: str) -> None:
    """In a daemon: wait until the test lets this phase go on."""
    path = os.environ.get(GATE_VARIABLE)
    if path is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(PATIENCE_S)
        try:
            asking.connect(path)
            asking.sendall(f"{os.environ[NAME_VARIABLE]} {phase}\n".encode())
            asking.recv(1)
        except OSError:
            return


@dataclass(frozen=True, slots=True)
class Held:
    """A daemon that stands at a gate."""

    name: str
    phase: str
    connection: socket.socket

    def release(self) -> None:
        """Let it go on, if it still lives."""
        with contextlib.suppress(OSError):
            self.connection.sendall(b".")
        self.connection.close()


class Gates:
    """The test's side: closes gates, and hands out who stands there."""

    def __init__(self, path: Path) -> None:
        self._closed: set[tuple[str, str]] = set()
        self._held: queue.Queue[Held] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close_for(self, phase: str, *names: str) -> None:
        """From now on these daemons stop there."""
        self._closed |= {(name, phase) for name in names}

    def open_for(self, phase: str, *names: str) -> None:
        """From now on these daemons do not stop there; who stands there is not let go."""
        self._closed -= {(name, phase) for name in names}

    def wait(self) -> Held:
        """The next daemon that came to a closed gate."""
        return self._held.get(timeout=PATIENCE_S)

    @contextmanager
    def hold(self, phase: str, *names: str) -> Iterator[Held]:
        """Close a gate until one of the daemons stands there; it goes on at the end."""
        self.close_for(phase, *names)
        held = self.wait()
        self.open_for(phase, *names)
        try:
            yield held
        finally:
            held.release()

    def end(self) -> None:
        """Open all gates for ever; nothing to do the second time."""
        self._closed.clear()
        if not self._thread.is_alive():
            return
        # A listening socket wakes its accept when it is shut down, not when it is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        while not self._held.empty():
            self._held.get_nowait().release()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(PATIENCE_S)
            try:
                name, phase = connection.recv(256).decode().split()
            except (OSError, ValueError):
                connection.close()
                continue
            held = Held(name, phase, connection)
            if (name, phase) in self._closed:
                self._held.put(held)
            else:
                held.release()
