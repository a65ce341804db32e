"""A network whose nodes run in several processes, with the same trace as in one process.

Rule: conservative parallel simulation (Chandy and Misra 1979, doi:10.1109/TSE.1979.230182): an
envelope arrives no sooner than the minimal latency of all links between two processes after it was
sent, so all processes can run that far in parallel, and then hand over their envelopes. Without any
latency they run one round of one time after the other. The author's calls run here, between two
such windows.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NoReturn

from onnx import ModelProto

from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.engine import Limits, ProgramPlan, steps
from bbnode.engine.node import ExecutionInfo
from bbnode.engine.suspensions import Waiting
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import Value
from bbnode.sim.agenda import ROUND_BITS
from bbnode.sim.errors import NotReached, NotSplit, ProcessFailed
from bbnode.sim.models import Clock, LinkModel
from bbnode.sim.network import DEFAULT_LIMIT_NS, Network
from bbnode.sim.node import KEPT_STEPS, SimNode
from bbnode.sim.part import receive, send
from bbnode.sim.trace import Trace

_WHEN_AND_KEY: Final = itemgetter(0, 1)
# Not `-m`, which would run a second copy of the module, as `__main__`.
_START: Final = "from bbnode.sim.part import main; main()"
_STOP_S: Final = 5.0  # a process that is told to end has no work left


class Processes:
    """The processes, and the operations not sent to them yet."""

    def __init__(self, count: int, settings: Mapping[str, Any]) -> None:
        self._ends: list[socket.socket] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._ops: list[list[Any]] = [[] for _ in range(count)]
        self.stop = weakref.finalize(self, _stop, self._ends, self._started)
        path = os.pathsep.join(str(Path(each).resolve()) for each in sys.path)
        for number in range(count):
            ours, theirs = socket.socketpair()
            self._ends.append(ours)
            with theirs:
                self._started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _START, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, "PYTHONPATH": path},
                    )
                )
            send(ours, [number, count, settings])

    def __len__(self) -> int:
        return len(self._ends)

    def tell(self, op: Sequence[Any], parts: Iterable[int] | None = None) -> None:
        """Queue an operation for all or some processes, to run before anything else."""
        for part in range(len(self)) if parts is None else parts:
            self._ops[part].append(op)

    def ask(self, part: int, now_ns: int, *asked: Any) -> Any:
        """Return the answer of one process; reraises its error."""
        self.begin(part, now_ns, *asked)
        return self.end(part)

    def ask_all(self, now_ns: int, *asked: Any) -> list[Any]:
        """Return the answers of all processes, which work in parallel."""
        for part in range(len(self)):
            self.begin(part, now_ns, *asked)
        return self.end_all(range(len(self)))

    def begin(self, part: int, now_ns: int, *asked: Any) -> None:
        """Send a query to a process, without waiting for the answer."""
        ops, self._ops[part] = self._ops[part], []
        if not self.stop.alive:
            raise ProcessFailed("the processes of this network have ended")
        try:
            send(self._ends[part], [now_ns, ops, asked])
        except OSError as error:
            self._died(part, error)

    def end(self, part: int) -> Any:
        """Return the answer to the query sent by `begin`; reraises the process's error."""
        try:
            ok, answer = receive(self._ends[part])
        except (EOFError, OSError) as error:
            self._died(part, error)
        if ok:
            return answer
        module, name, text = answer
        error_type = getattr(importlib.import_module(module), name, None) if module else None
        if isinstance(error_type, type) and issubclass(error_type, BbnodeError):
            raise error_type.__new__(
                error_type, text
            )  # without its fields, which can't leave the process
        self.stop()
        raise ProcessFailed(f"process {part} of the simulation failed:\n{text}")

    def end_all(self, parts: Iterable[int]) -> list[Any]:
        """Return several answers; raises the first error once all have answered."""
        answers: list[Any] = []
        failed: Exception | None = None
        for part in parts:
            try:
                answers.append(self.end(part))
            except ProcessFailed:
                raise
            except BbnodeError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return answers

    def _died(self, part: int, error: BaseException) -> NoReturn:
        self.stop()
        code = self._started[part].returncode
        raise ProcessFailed(
            f"process {part} of the simulation has ended (exit code {code}); its nodes are lost"
        ) from error


def _stop(ends: list[socket.socket], started: list[subprocess.Popen[bytes]]) -> None:
    """Close all sockets, which makes the processes end."""
    for end in ends:
        end.close()
    for process in started:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class NodeElsewhere(SimNode):
    """A node that runs in another process; created by `SplitNetwork.add`."""

    __slots__ = ("_ask",)

    _ask: Callable[..., Any]

    def invoke(
        self, target: str, inputs: Mapping[str, Value], deadline_ns: int | None = None
    ) -> int:
        """Start an execution at the next poll and return its id; raises as `Node.invoke`."""
        return int(self._ask("invoke", target, dict(inputs), deadline_ns))

    def deliver_event(
        self,
        target: str,
        input: str,  # noqa: A002
        value: Value,
        deadline_ns: int | None = None,
    ) -> int:
        """Start an execution with one input and return its id. Raises as `Node.deliver_event`."""
        return int(self._ask("deliver_event", target, input, value, deadline_ns))

    def checkpoint(self) -> None:
        """Keep a snapshot for `Network.restart`. Raises NodeBusy while a component works."""
        self._ask("checkpoint")

    def history(self) -> list[tuple[int, steps.Step]]:
        """Return all kept steps with the network's time, oldest first."""
        return list(self._ask("history"))

    def waiting(self) -> list[Waiting]:
        """Return everything that waits on it, with its reason and its deadline."""
        return list(self._ask("waiting"))

    def executions(self) -> list[ExecutionInfo]:
        """Return its executions under way, oldest first."""
        return list(self._ask("executions"))

    def counters(self) -> dict[str, int]:
        """Return its counts, and a few gauges."""
        return dict(self._ask("counters"))


class SplitNetwork(Network):
    """A `Network` whose nodes run in several processes.

    It behaves like `Network`, with the same digest of the trace, except for features that need the
    nodes in this process: there is no `observe`, `dials` or `run_until`, and nodes have no
    `component` and `node`. Use it in a `with` block, or `close` it.
    """

    node_class = NodeElsewhere

    def __init__(
        self,
        seed: int = 0,
        *,
        processes: int,
        link: LinkModel | None = None,
        mesh: bool = True,
        threads: bool = False,
        trace: Trace | None = None,
        kept_steps: int = KEPT_STEPS,
        keys: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        """Start the processes.

        Args:
            processes: number of processes besides this one; more than the cores are no use.
            imports: modules that they must import; those of component types are found.
            seed, link, mesh, threads, trace, kept_steps, keys: as for `Network`.

        Raises NotSplit for fewer than one process.
        """
        if processes < 1:
            raise NotSplit(f"{processes} processes; give 1 or more")
        super().__init__(seed, link=link, mesh=mesh, trace=trace, kept_steps=kept_steps, keys=keys)
        settings = {
            "seed": seed,
            "link": self._link,
            "threads": threads,
            "kept_steps": kept_steps,
            "keys": keys,
        }
        self._processes = Processes(processes, settings)
        self._tell("import_modules", list(imports))
        self._models: dict[int, tuple[ModelProto, int]] = {}
        self._owners: list[int] = []
        # Envelopes for each process until it runs, and the time and key of the first arrival.
        self._mail: list[list[bytes]] = [[] for _ in range(processes)]
        self._mail_at: list[tuple[int, int] | None] = [None] * processes
        self._ahead_ns: int | None = None  # cached until a node or link changes

    def __enter__(self) -> SplitNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, and with them all access to their nodes."""
        self._processes.stop()

    # -- nodes and links: changed here, then in all processes --------------------------------

    def _tell(self, op: str, *arguments: Any) -> None:
        self._ahead_ns = None
        self._processes.tell([self.now_ns, op, *arguments])

    def _tell_first(self, owner: int, op: Sequence[Any]) -> None:
        """Run an operation in one process, which may refuse it, and then in the others."""
        self._ahead_ns = None
        self._processes.tell(op, [owner])
        self._processes.ask(owner, self.now_ns, "sync")
        self._processes.tell(op, [part for part in range(len(self._processes)) if part != owner])

    def add(
        self,
        name: str,
        model: ModelProto | ProgramPlan,
        targets: Sequence[str] = (),
        *,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
        task_ns: int = 0,
        process: int | None = None,
    ) -> SimNode:
        """Install a node, in one of the processes; otherwise as `Network.add`.

        Nodes communicate faster within one process. By default nodes are assigned to processes in
        turn. Raises NotSplit for a `ProgramPlan`, and for settings that can't leave this process.
        """
        if isinstance(model, ProgramPlan):
            raise NotSplit(f"{name}: a plan can't be sent to another process; give the model")
        owner = len(self._owners) % len(self._processes) if process is None else process
        if not 0 <= owner < len(self._processes):
            raise NotSplit(f"{name}: there is no process {owner}; they count from 0")
        self._check_name(name)
        program = self._plan(model, tuple(targets))
        number = self._number_of(model, program)
        clock = clock or Clock()
        settings = None if config is None else {key: dict(each) for key, each in config.items()}
        op = [
            *(self.now_ns, "add_node", name, owner, number, list(targets)),
            *(settings, limits, clock, task_ns),
        ]
        self._tell_first(owner, op)
        self._owners.append(owner)
        return self._add(name, program, clock, task_ns, is_here=False)

    def _added(self, node: SimNode) -> None:
        owner = self._owners[node.index]

        def ask(method: str, *arguments: Any) -> Any:
            return self._processes.ask(owner, self.now_ns, "node", node.name, method, *arguments)

        if isinstance(node, NodeElsewhere):
            node._ask = ask

    def _number_of(self, model: ModelProto, program: ProgramPlan) -> int:
        known = self._models.get(id(model))
        if known is None:
            self._tell("add_model", model.SerializeToString())
            known = self._models[id(model)] = (model, len(self._models))
        self._tell("import_modules", _modules_of(program))
        return known[1]

    def wake(self, node: SimNode) -> None:
        """Do nothing: the node's own process wakes it."""

    def crash(self, node: SimNode | str) -> None:
        """As `Network.crash`."""
        super().crash(node)
        self._tell("crash", self.find(node).name)

    def restart(self, node: SimNode | str) -> None:
        """As `Network.restart`."""
        target = self.find(node)
        self._tell_first(self._owners[target.index], [self.now_ns, "restart", target.name])
        super().restart(target)

    def connect(
        self, one: SimNode | str, other: SimNode | str, link: LinkModel | None = None
    ) -> None:
        """As `Network.connect`."""
        super().connect(one, other, link)
        self._tell("connect", self.find(one).name, self.find(other).name, link)

    def disconnect(self, one: SimNode | str, other: SimNode | str) -> None:
        """As `Network.disconnect`."""
        super().disconnect(one, other)
        self._tell("disconnect", self.find(one).name, self.find(other).name)

    def set_link(self, source: SimNode | str, target: SimNode | str, link: LinkModel) -> None:
        """As `Network.set_link`."""
        super().set_link(source, target, link)
        self._tell("set_link", self.find(source).name, self.find(target).name, link)

    def set_links(self, link: LinkModel) -> None:
        """As `Network.set_links`."""
        super().set_links(link)
        self._tell("set_links", link)

    def cut(self, one: SimNode | str, other: SimNode | str) -> None:
        """As `Network.cut`."""
        super().cut(one, other)
        self._tell("cut", self.find(one).name, self.find(other).name)

    def heal(self, one: SimNode | str, other: SimNode | str) -> None:
        """As `Network.heal`."""
        super().heal(one, other)
        self._tell("heal", self.find(one).name, self.find(other).name)

    # -- time --------------------------------------------------------------------------------

    def run(self, until: int) -> None:
        """Run all events up to and at the time `until`, in nanoseconds."""
        self._advance(until)
        self.now_ns = max(self.now_ns, until)

    def run_until(
        self,
        condition: Callable[[], object],  # noqa: ARG002 - of Network
        *,
        limit_ns: int = DEFAULT_LIMIT_NS,  # noqa: ARG002
    ) -> None:
        """Raise NotSplit, since the condition would have to be evaluated after every event."""
        raise NotSplit("run_until asks after every event, of which there are several at once; run")

    def run_until_idle(self, *, limit_ns: int = DEFAULT_LIMIT_NS) -> None:
        """As `Network.run_until_idle`."""
        if not self._advance(self.now_ns + limit_ns):
            raise NotReached(
                f"after {limit_ns} ns the network is not idle; use run(until=…) for a program "
                f"that never rests. {self._state()}"
            )

    def counters(self) -> dict[str, int]:
        """Return the counts of polls, of tasks, and of envelopes by their outcome."""
        total = Counter(self._counts)
        for counts in self._processes.ask_all(self.now_ns, "counts"):
            total.update(counts)
        return dict(total)

    def _advance(self, until_ns: int) -> bool:
        """Run all calls and events up to a time; return True if none is left."""
        agenda = self._agenda
        while True:
            call_ns = agenda.next_call_ns()
            if call_ns is None or call_ns > until_ns:
                idle = self._run_parts(until_ns)
                return idle and call_ns is None
            self._run_parts(call_ns - 1)
            while agenda.next_call_ns() == call_ns:
                self._at(call_ns)
                agenda.take_call()()

    def _run_parts(self, until_ns: int) -> bool:
        """Run all events of nodes up to a time; return True if none is left."""
        processes, mail, mail_at = self._processes, self._mail, self._mail_at
        upcoming: list[Any] = processes.ask_all(self.now_ns, "next")
        untold: list[Any] = []  # answers whose lines are not in the trace yet
        while True:
            firsts = [
                min((each for each in pair if each is not None), default=None)
                for pair in zip(upcoming, mail_at, strict=True)
            ]
            first = min((each for each in firsts if each is not None), default=None)
            if first is None or first[0] > until_ns:
                self._tell_trace(untold)
                return first is None
            ahead_ns = self._ahead()
            last_key = None
            if ahead_ns:
                last_ns = min(until_ns, first[0] + ahead_ns - 1)
            else:  # this round of this time
                last_ns = first[0]
                last_key = ((first[1] >> ROUND_BITS) + 1 << ROUND_BITS) - 1
            parts = [
                part
                for part, each in enumerate(firsts)
                if each is not None
                and (each[0] < last_ns or each[0] == last_ns)
                and (last_key is None or each <= (last_ns, last_key))
            ]
            for part in parts:
                processes.begin(part, self.now_ns, "run", last_ns, last_key, mail[part])
                mail[part], mail_at[part] = [], None
            self._tell_trace(untold)  # while they work
            untold = processes.end_all(parts)
            for part, (following, now_ns, _, _, sent) in zip(parts, untold, strict=True):
                upcoming[part] = following
                self.now_ns = max(self.now_ns, now_ns)
                for target, soonest, data in sent:
                    mail[target].append(data)
                    known = mail_at[target]
                    mail_at[target] = soonest if known is None else min(known, soonest)

    def _ahead(self) -> int:
        """Return the time that processes may run in parallel: the least latency between two."""
        if self._ahead_ns is None:
            owners = self._owners
            self._ahead_ns = min(
                (
                    wire.link.latency_ns
                    for node in self._nodes.values()
                    for wire in node.wires.values()
                    if owners[node.index] != owners[wire.target.index]
                ),
                default=DEFAULT_LIMIT_NS,
            )
        return self._ahead_ns

    def _tell_trace(self, answers: Iterable[Any]) -> None:
        """Merge the trace lines of several processes in the order of a single one."""
        # Avoids work per line, which would take longer than the processes themselves.
        events: list[tuple[int, int, str]] = []
        for _, _, raw, text, _ in answers:
            marks = array("q")
            marks.frombytes(raw)
            known, lines = len(marks) // 3 * 2, text.decode()
            ends = list(accumulate(marks[known:], initial=0))
            texts = (lines[at:end] for at, end in pairwise(ends))
            events += zip(marks[:known:2], marks[1:known:2], texts, strict=True)
        if events:
            events.sort(key=_WHEN_AND_KEY)
            self.trace.add("\n".join(text for _, _, text in events).split("\n"))


def _modules_of(program: ProgramPlan) -> list[str]:
    """Return the modules that define the component types of a program."""
    modules = dict.fromkeys(
        component_class(slot.binding.type_name).__module__
        for slot in program.slots
        if _is_registered(slot.binding.type_name)
    )
    if "__main__" in modules:
        raise NotSplit(
            "a component type of the program is defined in the script that runs, which no other "
            "process can import; move it to a module"
        )
    return list(modules)


def _is_registered(type_name: str) -> bool:
    try:
        component_class(type_name)
    except UnknownComponentType:
        return False
    return True
