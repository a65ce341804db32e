"""The child: prepares and runs graphs that its parent sends, and nothing else.

Rule: started as a program of its own, with its end of a socket as standard input. The main thread
takes lines (`shared.ChildLine`) from that socket and ends the process when its parent is gone; a
thread per line answers what comes on it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import suppress
from typing import Any, Final

import msgpack

from bbnode.components.backends.graphs import PreparedGraph
from bbnode.components.backends.isolation import sandbox, shared
from bbnode.components.errors import BackendError, BackendUnavailable
from bbnode.ir.errors import BbnodeError

# How often it looks whether its parent is still there, should the socket's other end have leaked.
_LOOK_EVERY_S: Final = 1.0
# Ends of the process, as `child` reads them.
NO_MEMORY_CODE: Final = 77
_OUT_OF_MEMORY: Final = ("Failed to allocate memory", "bad allocation", "bad_alloc")


class _Graphs:
    """The graphs of this process, by the numbers that the parent gave them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._graphs: dict[int, PreparedGraph] = {}

    def prepare(self, number: int, model: bytes, dropped: list[int]) -> None:
        """Prepare a graph; raises BackendError."""
        from onnx import ModelProto

        for each in dropped:
            self._graphs.pop(each, None)
        self._graphs[number] = self._backend.prepare(ModelProto.FromString(model))

    def run(self, number: int, inputs: list[Any]) -> list[Any]:
        """Return what a graph makes; raises BackendError."""
        return self._graphs[number].run(inputs)


def _serve(line: shared.ChildLine, graphs: _Graphs) -> None:
    """Answer one line until its other end closes."""
    while True:
        try:
            kind, number, head, region = line.receive()
        except (EOFError, OSError):
            return
        line.trim()  # the parent has read the last answer, or it would not ask again
        writer, made = shared.Writer(), list[Any]()
        answer, said = shared.MADE, dict[str, Any]()
        try:
            values = [shared.read_value(region, each, copy=False) for each in head["values"]]
            if kind == shared.PREPARE:
                graphs.prepare(number, values[0].tobytes(), head["dropped"])
            else:
                made = graphs.run(number, values)
            del values
            said = {"values": [writer.add(value) for value in made]}
        except MemoryError:
            answer, said, writer = shared.NO_MEMORY, {"text": ""}, shared.Writer()
        except BbnodeError as error:
            text = str(error)
            lacking = any(each in text for each in _OUT_OF_MEMORY)
            answer = shared.NO_MEMORY if lacking else shared.REFUSED
            node = error.node if isinstance(error, BackendError) else ""
            missing = isinstance(error, BackendUnavailable)
            said = {"text": text, "node": node, "unavailable": missing}
            writer = shared.Writer()
        except Exception as error:  # noqa: BLE001 - told to the parent, which waits
            answer, said = shared.REFUSED, {"text": f"{type(error).__name__}: {error}"}
            writer = shared.Writer()
        try:
            line.send(answer, number, said, writer)
        except MemoryError:
            line.send(shared.NO_MEMORY, number, {"text": ""}, shared.Writer())
        del made, writer
        line.forget()


def _thread(line: shared.ChildLine, graphs: _Graphs) -> None:
    try:
        with suppress(OSError):  # the parent has closed the line
            _serve(line, graphs)
    except MemoryError:
        os._exit(NO_MEMORY_CODE)


def main() -> None:
    """Serve the parent until it is gone."""
    parent = os.getppid()
    control = socket.socket(fileno=os.dup(0))
    settings = shared.read_settings(control.recv(1 << 16))
    from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig, load_runtime

    load_runtime()
    config = OrtBackendConfig(
        intra_op_threads=settings["intra_op_threads"],
        inter_op_threads=settings["inter_op_threads"],
        providers=("CPUExecutionProvider",),
        max_prepared=settings["max_prepared"],
    )
    graphs = _Graphs(OrtBackend(config))
    try:
        sandbox.limit(settings["max_memory_bytes"])
        confined = sandbox.confine()
    except (OSError, ValueError) as error:
        control.send(msgpack.packb({"failed": str(error)}))
        return
    control.send(msgpack.packb({"confined": confined}))
    while True:
        ready, _, _ = select.select([control], [], [], _LOOK_EVERY_S)
        if os.getppid() != parent:
            os._exit(0)
        if not ready:
            continue
        raw, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not raw or not fds:
            os._exit(0)  # whatever still runs, nobody waits for it
        line = shared.ChildLine(socket.socket(fileno=fds[0]), settings["max_memory_bytes"])
        try:
            threading.Thread(target=_thread, args=(line, graphs), daemon=True).start()
        except RuntimeError:  # no room for its stack: a run that failed for memory left some behind
            sandbox.give_back()
            threading.Thread(target=_thread, args=(line, graphs), daemon=True).start()


if __name__ == "__main__":
    main()
