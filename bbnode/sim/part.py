"""One process of a SplitNetwork, which runs the events of its own nodes up to a requested time.

Rule: it has all nodes and links of the network, and runs the engines of its own nodes only. The
author's operations on nodes and links are done in every process, in the same order; envelopes to
other processes' nodes are handed over with the time and key of their arrival.
"""

from __future__ import annotations

import importlib
import socket
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from onnx import ModelProto

from bbnode.engine import ProgramPlan
from bbnode.ir.errors import BbnodeError
from bbnode.sim.agenda import LAST_KEY, NO_KEY, Agenda, Entry, Flight
from bbnode.sim.models import Clock
from bbnode.sim.network import Network
from bbnode.sim.node import SimNode
from bbnode.sim.plain import pack, unpack
from bbnode.sim.trace import Trace

# Headers. Of a message: its size. Of an envelope that is handed over: time and key of its arrival,
# source, number on its wire, target, session, checksum, size.
_SIZE: Final = struct.Struct("<Q")
_FLIGHT: Final = struct.Struct("<qqIQIQ8sI")

# The author's operations on nodes and links, by method name.
OPS: Final = frozenset(
    {
        *("connect", "disconnect", "set_link", "set_links", "cut", "heal", "crash", "restart"),
        *("import_modules", "add_model", "add_node"),
    }
)
# The author's queries of one node.
ASKED: Final = frozenset(
    {
        *("invoke", "deliver_event", "checkpoint"),
        *("history", "waiting", "executions", "counters"),
    }
)


def send(end: socket.socket, message: Any) -> None:
    """Send one message."""
    data = pack(message)
    end.sendall(_SIZE.pack(len(data)) + data)


def receive(end: socket.socket) -> Any:
    """Return the next message. Raises EOFError if the other end has closed."""
    (size,) = _SIZE.unpack(_exactly(end, _SIZE.size))
    return unpack(_exactly(end, size))


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = end.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return bytes(data)


class PartTrace(Trace):
    """The trace lines of one process, each with the event that it belongs to."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__(kept=1)
        self._agenda = agenda
        self._events: list[str] = []  # the lines of each event that has any
        self._marks = array("q")  # time and key of each of them
        self._last = (0, NO_KEY)

    def note(self, at_ns: int, who: str, what: str) -> None:
        """Add one line, unless the author caused it: the author's own process records those."""
        key = self._agenda.key
        if key == NO_KEY:
            return
        line = f"{at_ns} {who} {what}"
        if self._last == (at_ns, key):
            self._events[-1] = f"{self._events[-1]}\n{line}"
        else:
            self._last = at_ns, key
            self._events.append(line)
            self._marks.extend(self._last)

    def handed_over(self) -> tuple[bytes, bytes]:
        """Return time, key and length of each event since the last call, and all their lines."""
        marks, texts = self._marks, self._events
        self._marks, self._events, self._last = array("q"), [], (0, NO_KEY)
        return (marks + array("q", map(len, texts))).tobytes(), "".join(texts).encode()


class NetworkPart(Network):
    """The network in one of the processes."""

    def __init__(self, number: int, parts: int, **settings: Any) -> None:
        """Create part `number` of `parts`; `settings` are those of Network."""
        super().__init__(mesh=False, **settings)
        self._number = number
        self._owners: list[int] = []  # part by node number
        self._models: list[ModelProto] = []
        self._out: list[list[bytes]] = [[] for _ in range(parts)]
        self._soonest: list[tuple[int, int] | None] = [None] * parts
        self.trace: PartTrace = PartTrace(self._agenda)
        self._fly = self._hand_over

    # -- operations of the author ------------------------------------------------------------

    def import_modules(self, modules: Sequence[str]) -> None:
        """Import the modules that register component types and ops."""
        for module in modules:
            importlib.import_module(module)

    def add_model(self, data: bytes) -> None:
        """Add a model for nodes."""
        self._models.append(ModelProto.FromString(data))

    def add_node(
        self,
        name: str,
        owner: int,
        model: int,
        targets: Sequence[str],
        config: Any,
        limits: Any,
        clock: Clock,
        task_ns: int,
    ) -> None:
        """Add a node that part `owner` runs."""
        self._owners.append(owner)
        chosen = self._models[model]
        if owner != self._number:
            program: ProgramPlan = self._plan(chosen, tuple(targets))
            self._add(name, program, clock, task_ns, is_here=False)
            return
        try:
            self.add(
                *(name, chosen, targets),
                config=config,
                limits=limits,
                clock=clock,
                task_ns=task_ns,
            )
        except BaseException:
            self._owners.pop()
            raise

    def wake(self, node: SimNode) -> None:
        """Poll a node now, if it runs here."""
        if self._owners[node.index] == self._number:
            super().wake(node)

    # -- events ------------------------------------------------------------------------------

    def _hand_over(self, when_ns: int, flight: Flight) -> None:
        entry = self._agenda.arrival(when_ns, flight)
        wire, session, data, crc = flight
        owner = self._owners[wire.target.index]
        if owner == self._number:
            self._agenda.enter(entry)
            return
        when_ns, key, source, count, _ = entry
        head = _FLIGHT.pack(
            *(when_ns, key, source, count, wire.target.index, session, crc.encode(), len(data))
        )
        self._out[owner] += (head, data)
        soonest = self._soonest[owner]
        if soonest is None or (when_ns, key) < soonest:
            self._soonest[owner] = when_ns, key

    def run_part(self, until_ns: int, last_key: int | None, mail: Sequence[bytes]) -> Any:
        """Run all events up to a time and a key, and return the results.

        These are the next event, the time, marks and lines of the trace, and for each other part
        the first arrival and all envelopes.
        """
        agenda = self._agenda
        nodes = self.nodes
        for data in mail:
            for entry in _flights(data, nodes):
                agenda.enter(entry)
        most = LAST_KEY if last_key is None else last_key
        while (taken := agenda.take(until_ns, most)) is not None:
            self._happen(taken)
        agenda.rest()
        out = [
            (part, soonest, b"".join(self._out[part]))
            for part, soonest in enumerate(self._soonest)
            if soonest is not None
        ]
        for part, _, _ in out:
            self._out[part], self._soonest[part] = [], None
        return agenda.next(), self.now_ns, *self.trace.handed_over(), out

    # -- queries -----------------------------------------------------------------------------

    def answer(self, now_ns: int, ops: Sequence[Sequence[Any]], asked: Sequence[Any]) -> Any:
        """Apply the author's operations, and return the answer to a query."""
        for at_ns, name, *arguments in ops:
            self.now_ns = max(self.now_ns, at_ns)
            if name not in OPS:
                raise ValueError(f"no op {name!r}")
            getattr(self, name)(*arguments)
        self.now_ns = max(self.now_ns, now_ns)
        what, *arguments = asked
        if what == "run":
            return self.run_part(*arguments)
        if what == "next":
            return self._agenda.next()
        if what == "counts":
            return super().counters()
        if what == "node" and arguments[1] in ASKED:
            name, method, *rest = arguments
            return getattr(self[name], method)(*rest)
        return None


def _flights(data: bytes, nodes: Sequence[SimNode]) -> Iterator[Entry]:
    at = 0
    while at < len(data):
        when_ns, key, source, count, target, session, crc, size = _FLIGHT.unpack_from(data, at)
        at += _FLIGHT.size
        wire = nodes[source].wires[nodes[target].peer_id]
        yield when_ns, key, source, count, (wire, session, data[at : at + size], crc.decode())
        at += size


def main() -> None:
    """Serve the socket that is named on the command line, until the other end closes it."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        number, parts, settings = receive(end)
        part = NetworkPart(number, parts, **settings)
        _serve(end, part.answer)


def _serve(end: socket.socket, answer: Callable[..., Any]) -> None:
    while True:
        try:
            message = receive(end)
        except (EOFError, ConnectionError):
            return
        try:
            reply = (True, answer(*message))
        except BbnodeError as error:
            reply = (False, (type(error).__module__, type(error).__qualname__, str(error)))
        except Exception:  # noqa: BLE001 - told, and the network ends with it
            reply = (False, ("", "", traceback.format_exc()))
        send(end, reply)
