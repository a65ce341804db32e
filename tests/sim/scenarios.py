"""Scenarios that the tests run: programs under faults, and what has to hold of them.

Rule: each is a function of a seed, as `bbnode.sim.scenario` describes it, so that
`python -m bbnode.sim.replay tests.sim.scenarios:NAME --seed N` runs it again. Faults end before
the run does; what is checked at the end is that everything is well again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, FedAvg, OrtBackend
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.registry import component_class, register_component
from bbnode.engine import steps
from bbnode.examples.federated_digits import FederatedRound
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import TRIGGER, PeerIdVec
from bbnode.sim import MS, LinkModel, Network, S, SimNode, Trace, draw_faults
from bbnode.sim.invariants import check_at_rest, check_failures, check_waits, require
from tests.sim import gossip as averaging
from tests.sim import programs

CLIENTS = 4
QUORUM = 2
ROUND_NS = S
LOOKS_NS = 250 * MS
STOP_NS = 100 * MS

# What faults explain: answers or peers that are missing, and what came twice.
ROUND_FAILURES = {"QuorumNotReached", "NotEnoughPeers", "NothingToAggregate", "GateDenied"}
# ... and what a federated round that got too late meets behind its request.
LATE = {"DeadlineExceeded"}


@dataclass(frozen=True, kw_only=True)
class FewExamplesConfig:
    samples: int = 1
    seed: int = 0
    batch_size: int = 0


class _FewExamples(MemoryDataSource):
    """As many examples as the config says, of ten classes that can be told apart."""

    TYPE_NAME: ClassVar[str] = "test.FewExamples"
    Config: ClassVar[type] = FewExamplesConfig

    def load(self):
        labels = np.arange(self.config.samples) % 10
        return np.eye(64, dtype=np.float32)[labels], labels.astype(np.int64)


try:
    FewExamples = component_class(_FewExamples.TYPE_NAME)
except BbnodeError:
    FewExamples = register_component(_FewExamples)


@cache
def federated_program() -> ModelProto:
    """The program of the demo, with a data source that gives few examples."""
    program = FederatedRound(clients=CLIENTS, quorum=QUORUM, deadline_s=ROUND_NS / S, epochs=1)
    return (
        Compiler()
        .bind_peer_selector("cohort", ConnectedView)
        .bind_aggregator("fedavg", FedAvg)
        .bind_data_source("data", FewExamples)
        .bind_backend("compute", OrtBackend)
        .compile(program.build())
    )


class Ledger:
    """Who answered which round of the server, and what the round counted.

    Client i has 2^i examples, so that the sum of a round says whose contributions it holds.
    """

    def __init__(self, network: Network, server: SimNode) -> None:
        self.network = network
        self.server = server
        self.asked_ns: dict[int, int] = {}  # execution -> when it was invoked
        self.ended: dict[int, bool] = {}  # execution -> whether it went well
        self.answered: dict[int, set[str]] = {}
        self.counted: dict[int, int] = {}
        self.failed: dict[int, list[str]] = {}
        self.last_end_ns = 0
        self.stopped_ns = 0  # its time stands still while it is down

    def begin(self) -> None:
        if self.server.is_up:
            execution = self.server.invoke("server", {"tick": TRIGGER})
            self.asked_ns[execution] = self.network.now_ns

    def see(self, _at_ns: int, node: SimNode, step: steps.Step) -> None:
        """The observer of the network."""
        if node is not self.server:
            return
        match step:
            case steps.Telemetry(name="request.closed", attributes=attributes):
                names = {n.peer_id: n.name for n in self.network.nodes}
                answered = {names[peer] for peer in attributes["responded"]}
                self.answered[int(attributes["execution"])] = answered
            case steps.AppEvent(topic="stats", value=stats, execution=execution):
                require(execution not in self.counted, f"round {execution} ended twice")
                self.counted[execution] = int(stats["num_samples"])
            case steps.OpFailed(execution=execution, kind=kind):
                self.failed.setdefault(execution, []).append(kind)
            case steps.ExecutionFinished(execution=execution, ok=ok):
                require(execution not in self.ended, f"round {execution} finished twice")
                self.ended[execution] = ok
                self.judge(execution)

    def judge(self, execution: int) -> None:
        """A round ended: by its quorum, or by a failure that has a type."""
        ok = self.ended[execution]
        # Rounds use one model and take turns: its turn came when the one before had ended.
        began_ns = max(self.asked_ns[execution], self.last_end_ns)
        took_ns = self.network.now_ns - began_ns
        self.last_end_ns = self.network.now_ns
        require(
            took_ns <= 1.01 * ROUND_NS + self.stopped_ns,
            f"round {execution} took {took_ns} ns; its deadline was {ROUND_NS} ns, and the server "
            f"stood still for {self.stopped_ns} ns at most",
        )
        if not ok:
            kinds = self.failed.get(execution)
            require(kinds, f"round {execution} failed and nothing says why")
            return
        answered = self.answered.get(execution, set())
        require(len(answered) >= QUORUM, f"round {execution} ended with {sorted(answered)}")
        expected = sum(examples(name) for name in answered)
        counted = self.counted.get(execution)
        require(
            counted == expected,
            f"round {execution} counted {counted} examples; {sorted(answered)} answered, who "
            f"have {expected}",
        )

    def forget(self) -> None:
        """Drop what is judged: a long run must not grow by its own book-keeping."""
        for execution in list(self.ended):
            for table in (self.asked_ns, self.ended, self.answered, self.counted, self.failed):
                table.pop(execution, None)


def examples(name: str) -> int:
    """How many examples a client has."""
    return 1 << int(name.rpartition("-")[2])


def build_federated(
    seed: int, trace: Trace, link: LinkModel, clocks: dict, *, kept_steps: int = 10_000
) -> tuple[Network, SimNode, Ledger]:
    """A server that nothing kills, and its clients."""
    ledger: list[Ledger] = []
    network = Network(
        seed,
        link=link,
        trace=trace,
        kept_steps=kept_steps,
        observe=lambda at, node, step: ledger[0].see(at, node, step),
    )
    compiled = federated_program()
    # Whose examples are more than half of all is to count with all of them.
    exact = {"fedavg": {"max_share": 1.0}}
    server = network.add("server", compiled, ["server"], clock=clocks.get("server"), config=exact)
    ledger.append(Ledger(network, server))
    for i in range(CLIENTS):
        name = f"client-{i}"
        network.add(
            name,
            compiled,
            ["client"],
            config={"data": {"samples": examples(name)}},
            clock=clocks.get(name),
            task_ns=5 * MS,
        )
    return network, server, ledger[0]


def federated(
    seed: int, trace: Trace, rounds: int = 12, outages: int = 6, server_stops: int = 0
) -> Network:
    """Rounds of the demo's program while clients crash and the network is cut.

    `server_stops`: how often the server saves, dies at once, and comes back in the middle of
    the rounds that were under way.
    """
    names = ["server", *(f"client-{i}" for i in range(CLIENTS))]
    every_ns = 300 * MS  # several rounds are under way at once
    faults = draw_faults(
        seed, names, until_ns=rounds * every_ns, outages=outages, immortal=["server"]
    )
    network, server, ledger = build_federated(seed, trace, faults.link, dict(faults.clocks))
    faults.schedule(network)
    for i in range(server_stops):
        stop_ns = (i + 1) * rounds * every_ns // (server_stops + 1) + 60 * MS
        network.at(stop_ns, lambda: (server.checkpoint(), network.crash(server)))
        network.at(stop_ns + STOP_NS, lambda: network.restart(server))
    ledger.stopped_ns = server_stops * STOP_NS
    for i in range(rounds):
        network.at(i * every_ns, ledger.begin)
    run_and_look(network, rounds * every_ns + 2 * ROUND_NS + ledger.stopped_ns)
    # Faults are over: a round of its own goes well, with everybody.
    network.set_links(LinkModel())
    network.run_until_idle()
    check_waits(network)
    check_at_rest(network)
    check_failures(network, ROUND_FAILURES | LATE)
    open_rounds = set(ledger.asked_ns) - set(ledger.ended)
    require(not open_rounds, f"rounds {sorted(open_rounds)} never ended")
    ledger.begin()
    network.run_until_idle()
    last = max(ledger.ended)
    require(ledger.ended[last], f"the round after all faults failed: {ledger.failed.get(last)}")
    require(len(ledger.answered[last]) == CLIENTS, f"only {ledger.answered[last]} answered it")
    return network


def gossip(seed: int, trace: Trace, peers: int = 6, outages: int = 6) -> Network:
    """Gossip averaging while peers crash, also to old snapshots, and the network is cut."""
    names = [f"peer-{i}" for i in range(peers)]
    faults = draw_faults(seed, names, until_ns=4 * S, outages=outages)
    network = Network(seed, link=faults.link, trace=trace)
    vectors = [(float(i), float(-i * i)) for i in range(peers)]
    for i, vector in enumerate(vectors):
        averaging.add_peer(network, i, vector, clock=faults.clocks[names[i]])
    faults.schedule(network)
    run_and_look(network, 4 * S, check_books)
    # While messages get lost, what they carry is late; without losses all agree.
    network.set_links(LinkModel())
    mean = np.mean(vectors, axis=0)
    for _ in range(60):
        run_and_look(network, network.now_ns + S, check_books)
        far = averaging.disagreement(network, mean)
        if far < 1e-6:
            break
    require(far < 1e-6, f"the worst estimate is off by {far:.2e} a minute after all faults")
    # Alone when everybody else was cut off, or denied what came twice: nothing else fails.
    check_failures(network, {"NotEnoughPeers", "GateDenied"})
    return network


def check_books(network: Network) -> None:
    """Nothing is lost or doubled: on each peer the books are even."""
    for node in network.nodes:
        if node.is_up:
            off = averaging.push_sum(node).imbalance()
            require(off < 1e-9, f"the books of {node.name} are off by {off:.2e}")


class Calls:
    """Who could be sent to when a round of `named` was asked, and how it ended.

    Links lose nothing here: a round in which nobody comes or goes is over when those that were
    there have answered.
    """

    ROUND_TRIP_NS = 2 * MS

    def __init__(self, network: Network, asker: SimNode, changes_ns: Sequence[int]) -> None:
        self.network = network
        self.asker = asker
        self.changes_ns = changes_ns
        self.asked: dict[int, tuple[int, set[str]]] = {}  # execution -> when, who was there
        self.closed: dict[int, set[str]] = {}  # execution -> who is missing
        self.ended: dict[int, bool] = {}
        self.early = 0  # ended before the deadline although somebody was not there

    def begin(self) -> None:
        workers = [node for node in self.network.nodes if node is not self.asker]
        there = {w.name for w in workers if self.asker.wires[w.peer_id].up}
        execution = self.asker.invoke(
            "asker",
            {"x": np.ones(1, np.float32), "worker": PeerIdVec(w.peer_id for w in workers)},
        )
        self.asked[execution] = (self.network.now_ns, there)

    def see(self, _at_ns: int, node: SimNode, step: steps.Step) -> None:
        """The observer of the network."""
        if node is not self.asker:
            return
        match step:
            case steps.Telemetry(name="request.closed", attributes=attributes):
                names = {n.peer_id: n.name for n in self.network.nodes}
                missing = {names[peer] for peer in attributes["missing"]}
                self.closed[int(attributes["execution"])] = missing
            case steps.ExecutionFinished(execution=execution, ok=ok):
                require(execution not in self.ended, f"round {execution} finished twice")
                self.ended[execution] = ok
                self.judge(execution, ok)

    def judge(self, execution: int, ok: bool) -> None:
        asked_ns, there = self.asked[execution]
        took_ns = self.network.now_ns - asked_ns
        missing = self.closed[execution]
        answered = CLIENTS - len(missing)
        require(took_ns <= 2 * S, f"round {execution} took {took_ns} ns")
        require(
            ok == (answered >= QUORUM), f"round {execution}: {answered} answered, and ok is {ok}"
        )
        end_ns = asked_ns + self.ROUND_TRIP_NS
        if any(asked_ns <= change_ns <= end_ns for change_ns in self.changes_ns):
            return
        require(
            took_ns <= self.ROUND_TRIP_NS,
            f"round {execution} took {took_ns} ns although all of {sorted(there)} had answered",
        )
        if len(there) >= QUORUM:
            gone = {f"worker-{i}" for i in range(CLIENTS)} - there
            require(missing == gone, f"round {execution}: {missing} missing, {gone} not there")
        self.early += len(there) < CLIENTS


def unreachable(seed: int, trace: Trace, rounds: int = 40, outages: int = 8) -> Network:
    """Rounds that ask everybody by name while peers are dead or cut off.

    Raises InvariantBroken also when no round met anybody that was not there.
    """
    names = ["asker", *(f"worker-{i}" for i in range(CLIENTS))]
    every_ns = 100 * MS
    until_ns = rounds * every_ns
    faults = draw_faults(seed, names, until_ns=until_ns, outages=outages, immortal=["asker"])
    changes_ns = [
        at_ns
        for event in faults.events
        for at_ns in (event.at_ns, getattr(event, "back_ns", getattr(event, "heal_ns", 0)))
    ]
    calls: list[Calls] = []
    network = Network(seed, trace=trace, observe=lambda *seen: calls[0].see(*seen))
    compiled = programs.named(QUORUM)
    asker = network.add("asker", compiled, ["asker"])
    calls.append(Calls(network, asker, changes_ns))
    for name in names[1:]:
        network.add(name, compiled, ["worker"])
    faults.schedule(network)
    for i in range(rounds):
        network.at(i * every_ns + MS, calls[0].begin)
    run_and_look(network, until_ns + 2 * S)
    network.run_until_idle()
    check_at_rest(network)
    check_failures(network, {"QuorumNotReached"})
    require(set(calls[0].ended) == set(calls[0].asked), "a round never ended")
    require(calls[0].early, "everybody was there in all rounds")
    return network


def run_and_look(network: Network, until_ns: int, *more: Callable[[Network], None]) -> None:
    """Run, and check between events what has to hold at any time."""
    while network.now_ns < until_ns:
        network.run(until=min(until_ns, network.now_ns + LOOKS_NS))
        check_waits(network)
        for look in more:
            look(network)


def broken(seed: int, trace: Trace, limit: int = 3) -> Network:
    """An invariant that does not hold from some seed on: for the tests of the reports."""
    network = Network(seed, trace=trace)
    network.trace.note(0, "nobody", f"draws {seed}")
    require(seed < limit, f"seed {seed} is not below {limit}")
    return network
