"""Restored, a node behaves as if it had never stopped: from a snapshot of any moment on.

Programs use everything that waits: Sleep, After, Interval, semaphores, queues, held values,
requests, worker threads, open completions, bootstraps and events; what happens is drawn.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.engine import All, Limits, Node, steps
from bbnode.ir import keys, types
from bbnode.ir.envelope import CorrelationKind, decode_envelope
from bbnode.ir.errors import BbnodeError
from bbnode.ir.values import TRIGGER, PeerIdVec
from bbnode.sim import Network
from bbnode.sim.node import SimNode
from tests import protos
from tests.compiler.fuzz import world
from tests.compiler.fuzz.random_programs import RandomProgram
from tests.engine.builder import Partition, model
from tests.engine.envelopes import envelope
from tests.engine.support import MS, Boom, S, bring_up, component, peer
from tests.engine.twins import Tape, check

MODEL = keys.role_domain("Model")
AGGREGATOR = keys.role_domain("Aggregator")
ADDRESS = Multiaddr("/ip4/10.0.0.1/tcp/1")
HOST_EVENT = 1030
CLIENT_SITE = 77


def everything():
    """A target with an entry for each way in which an op can wait."""
    p = Partition(
        "server",
        inputs=["sleep", "enter", "leave", "put", "get", "stash", "flush", "train", "lose", "ask"],
    )
    p.bind("m", "Model", "test.ScriptModel")
    p.bind("d", "DataSource", "test.DependentData")
    p.bind("model", "Model", "test.ScriptModel")
    p.bind("sum", "Aggregator", "test.SumAggregator")
    p.sys("Sleep", ["sleep"], "slept", duration_ns=3 * S)
    p.sys("After", ["slept"], "later", delay_ns=1 * S)
    p.sys("Clock", ["later"], "time")
    p.output("now", "time")
    p.sys("RngU64", ["slept"], "drawn")
    p.output("draw", "drawn")
    p.sys("Limit.Acquire", ["enter"], "unit", name="door", n=1, stamp_ns=6 * S)
    p.sys("AppNotify", ["unit"], name="in")
    p.sys("Limit.Release", ["leave"], "", name="door")
    p.sys("Serialize.Enqueue", ["put"], "put_in", queue="q")
    p.sys("Serialize.Dequeue", ["get"], "got", queue="q", stamp_ns=5 * S)
    p.output("value", "got")
    p.sys("Hold.Stash", ["stash"], "", named={"slot": "s"})
    p.sys("Record", ["stash"], "", name="r")
    p.sys("Hold.Flush", ["flush"], "held", named={"slot": "s"})
    p.output("flushed", "held")
    p.op(MODEL, "Train", (), ["stats"], slot="m", after=["train"], epochs=1, batch=2,
         stamp_ns=4 * S)  # fmt: skip
    p.op(MODEL, "Params", (), ["w"], slot="m", after=["stats"], stamp_ns=8 * S)
    p.output("weights", "w")
    p.op(MODEL, "ComputeLoss", ["lose", "lose"], ["loss"], slot="model", stamp_ns=5 * S)
    p.output("lost", "loss")
    p.constant("peers", PeerIdVec([peer(1), peer(2)]))
    p.request("ask", "peers", CLIENT_SITE, "answers", quorum=1, deadline_ns=4 * S)
    p.op(AGGREGATOR, "ContributeAll", ["answers"], ["c"], slot="sum")
    p.output("answered", "answers")
    head = p.recv("news", node=types.TENSOR_FLOAT, gates=True)
    p.sys("Sleep", [head], "digested", duration_ns=1 * S)
    p.sys("AppNotify", ["digested"], name="digested")
    p.sys("Collect", [head], "batch", n=3, until_ns=3 * S, quorum=2)
    p.output("gathered", "batch")
    p.sys("Threshold", ["put"], "many", n=3, until_ns=4 * S)
    p.output("barrier", "many")
    p.sys("DeadlineMatch", ["digested", "later"], "first")
    p.output("race", "first")
    p.constant("no", np.array(False))
    p.sys("When", ["no"], "never", after=["slept"])
    p.sys("Any", ["never", "later"], "joined", group="")
    p.output("in_any_case", "joined")
    p.output("not_at_all", "slept", after=["never"])
    p.sys("Interval", (), "tick", period_ns=7 * S)
    p.sys("IncrMetric", ["tick"], name="ticks")
    p.sys("Pulse", (), "begin")
    p.sys("Sleep", ["begin"], "begun", duration_ns=2 * S)
    p.sys("EventSource", (), "event", kind=HOST_EVENT)
    p.sys("AppNotify", ["event"], name="heard")
    p.sys("LifecyclePhase", (), "phase", phase=2)
    p.sys("CorrelateTag", ["phase"], "tag")
    p.output("tagged", "tag")
    b = Partition(f"Warm{keys.BOOTSTRAP_SUFFIX}", main=False)
    protos.set_meta(b.function, keys.MODULE_PHASE_KEY, keys.BOOTSTRAP_PHASE)
    protos.set_meta(b.function, keys.HOME_KEY, "server")
    b.bind("m", "Model", "test.ScriptModel")
    b.op(MODEL, "Train", (), ["s"], slot="m", epochs=1, batch=1, stamp_ns=5 * S)
    return model(p, functions=[b.function])


MADE = everything()
LIMITS = Limits(cycle_ops=40)


def make() -> Node:
    return bring_up(MADE, "server", addresses=[ADDRESS], limits=LIMITS)


def vector(number: int) -> Any:
    return np.full(2, number, np.float32)


def news(number: int) -> tuple[Any, bytes]:
    site, who = Partition("server").site("news"), peer(1 + number % 2)
    return who, envelope(who, site, vector(number), wire_req_id=number)


class Host:
    """Carries out what was drawn."""

    def __init__(self) -> None:
        self.node = make()
        self.tape = Tape(self.node)
        self.now_ns = 5
        self.tasks: list[steps.RunTask] = []
        self.asked: list[tuple[Any, int]] = []
        self.sent: list[tuple[Any, int]] = []
        self.node.peer_connected(peer(1), ["client"], [ADDRESS])
        self.node.peer_connected(peer(2), ["client"])

    def poll(self, wait_ns: int) -> None:
        self.now_ns += wait_ns
        self.take(self.node.poll(self.now_ns))

    def take(self, made) -> None:
        for step in made:
            if isinstance(step, steps.RunTask):
                self.tasks.append(step)
            elif isinstance(step, steps.SendEnvelope):
                self.sent.append((step.peer, step.tag))
                sent = decode_envelope(b"".join(step.parts))
                if sent.correlation.kind is CorrelationKind.REQUEST:
                    self.asked.append((step.peer, sent.correlation.wire_req_id))

    def do(self, action: str, number: int) -> None:
        node = self.node
        if action in ("sleep", "enter", "leave", "get", "flush", "train"):
            node.deliver_event("server", action, TRIGGER)
        elif action in ("put", "stash", "lose", "ask"):
            node.deliver_event("server", action, vector(number))
        elif action == "news":
            node.deliver_inbound(*news(number), ADDRESS)
        elif action == "junk":
            node.deliver_inbound(peer(2), bytes([number]) * 9)
        elif action == "answer" and self.asked:
            who, request = self.asked.pop(number % len(self.asked))
            site = Partition("server").site("answers")
            kind = CorrelationKind.RESPONSE
            node.deliver_inbound(who, envelope(who, site, vector(number), kind, request))
        elif action == "work" and self.tasks:
            task = self.tasks.pop(number % len(self.tasks))
            node.complete(task.token, task.fn())
        elif action == "break" and self.tasks:
            task = self.tasks.pop(number % len(self.tasks))
            task.fn()
            node.fail(task.token, Boom(f"number {number}"))
        elif action == "complete" and component(node, "model").completion is not None:
            node.complete(component(node, "model").completion.token, vector(number))
        elif action == "bootstrap":
            with contextlib.suppress(BbnodeError):
                node.run_bootstrap(All())
        elif action == "event":
            node.publish_event(HOST_EVENT)
        elif action == "phase":
            node.fire_lifecycle(2)
        elif action == "leaves":
            node.peer_disconnected(peer(1 + number % 2), "gone")
        elif action == "comes":
            node.peer_connected(peer(1 + number % 2), ["client"], [ADDRESS])
        elif action == "unsent" and self.sent:
            # Perhaps twice, or after its answer.
            who, tag = self.sent[number % len(self.sent)]
            node.send_failed(who, "no route", tag=tag, blames_peer=number % 2 == 0)
        elif action == "unsent":
            node.send_failed(peer(2), "no route")
        elif action == "block":
            node.block_peer(peer(1))
        elif action == "unblock":
            node.unblock_peer(peer(1))
        elif action == "move":
            node.set_addresses([Multiaddr(f"/ip4/10.0.0.{number + 1}/tcp/2")])


NAMES = (
    *("sleep", "enter", "leave", "put", "get", "stash", "flush", "train", "lose", "ask", "news"),
    *("junk", "answer", "work", "break", "complete", "bootstrap", "event", "phase", "leaves"),
    *("comes", "unsent", "block", "unblock", "move"),
)
ACTIONS = st.tuples(st.sampled_from(NAMES), st.integers(0, 20))
TURNS = st.lists(
    st.tuples(st.lists(ACTIONS, max_size=5), st.sampled_from([0, 1, 300 * MS, 1 * S, 2 * S])),
    min_size=1,
    max_size=14,
)


def life(turns) -> Host:
    host = Host()
    for actions, wait_ns in turns:
        for action, number in actions:
            host.do(action, number)
        host.poll(wait_ns)
    return host


@settings(max_examples=40, deadline=None)
@given(TURNS, st.integers(-(10**18), 10**18))
def test_a_restored_node_goes_on_as_if_it_had_never_stopped(turns, shift_ns) -> None:
    assert check(life(turns).tape, make, shift_ns=shift_ns)


def wind_up(node: Node, now_ns: int, tasks: list[steps.RunTask]) -> None:
    """Let everything end: tasks return, deadlines pass."""
    for _ in range(60):
        for task in tasks:
            node.complete(task.token, task.fn())
        now_ns += 2 * S
        tasks = [s for s in node.poll(now_ns) if isinstance(s, steps.RunTask)]


@settings(max_examples=30, deadline=None)
@given(TURNS)
def test_a_new_life_ends_all_that_it_took_over(turns) -> None:
    host = life(turns)
    data = host.node.snapshot()
    again = make()
    again.restore(data)
    first = again.poll(0)  # another clock; tasks are out again
    wind_up(again, 0, [s for s in first if isinstance(s, steps.RunTask)])
    own = [w for w in again.waiting() if w.why != "completion by the component"]
    # An Interval starts an execution now and then; nothing of before is left.
    assert [w for w in own if w.since_ns <= 60 * S] == []
    assert [e for e in again.executions() if e.started_ns <= 60 * S] == []
    assert again.counters()["requests.open"] == 0
    assert again.counters()["joins.open"] == 0
    kept = again._rt.stores
    values = [k for q in kept.queues for k in q.values] + [k for k in kept.holds if k]
    charged = {id(k.charge): k.charge.size for k in values}
    charged |= {id(row.kept.charge): row.kept.charge.size for row in again._rt.records._rows}
    assert again.counters()["ingress.bytes"] == sum(charged.values())


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, (1 << 16) - 1), min_size=20, max_size=100), st.integers(0, 5))
def test_random_programs_go_on_on_every_peer(numbers, phase) -> None:
    program = RandomProgram(numbers)
    recorded = program.build()
    tapes: list[tuple[Tape, SimNode]] = []
    add = Network.add

    def taping(network, *arguments, **more):
        made = add(network, *arguments, **more)
        tapes.append((Tape(made.node), made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "add", taping)
        world.run(program, world.compiler_for(recorded).compile(recorded))
    assert tapes
    for tape, sim in tapes:
        # Each fifth snapshot; which ones is drawn.
        check(tape, lambda sim=sim: sim._network.install(sim, 1), every=5, first=phase)
