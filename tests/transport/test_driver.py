"""Two nodes over the in-memory transport, each driven by its own loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import trio
import trio.testing

from bbnode.compiler import Compiler
from bbnode.components.contracts import DataSource, OpContext, offload
from bbnode.components.registry import register_component
from bbnode.components.selectors.views import ConnectedView
from bbnode.dsl import DataSourceSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.engine import Node, install, steps
from bbnode.engine.peers.governor import Health
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER, Value
from bbnode.transport.base import Hello
from bbnode.transport.driver import Driver
from bbnode.transport.errors import DeniedPeerError, NotAllowedError, NotConnectedError
from bbnode.transport.limits import TransportLimits
from bbnode.transport.memory import MemoryNetwork, MemoryTransport
from tests.patience import PATIENCE_S

SERVER, CLIENT = PeerId.from_seed("server"), PeerId.from_seed("client")


@dataclass(frozen=True)
class SlowConfig:
    pass


class Held:
    """Lets a test hold the worker threads of `SlowSource`."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.fault: Exception | None = None


HELD = Held()


@register_component
class SlowSource(DataSource):
    TYPE_NAME: ClassVar[str] = "test.SlowSource"
    Config = SlowConfig
    storage: ClassVar = {
        "NextBatch.batch": types.TENSOR_FLOAT,
        "NextBatch.labels": types.TENSOR_INT64,
    }

    @offload
    def next_batch(self, _ctx: OpContext) -> tuple[Value, Value]:
        HELD.inside.set()
        assert HELD.go.wait(PATIENCE_S)
        if HELD.fault is not None:
            raise HELD.fault
        return np.float32([1, 2]), np.int64([3])

    def reset(self, ctx: OpContext) -> None: ...

    def on_data_loaded(self, ctx: OpContext) -> None: ...

    def epoch_batches(self, _batch_size: int) -> list[tuple[Value, Value]]:
        return []

    @property
    def num_samples(self) -> int:
        return 2


class Ask(Module):
    """The server asks every client for a batch."""

    home = "server"

    def body(self, g: Graph) -> None:
        tick = g.input("tick", types.TRIGGER)
        peers = PeerSelectorSlot("who", peer_class="client").sample(g, n=1, after=tick)
        r = g.request("ask", peers, g.constant(np.float32([0]), after=tick), deadline=60.0)
        batch, labels = DataSourceSlot("slow").next_batch(g, after=r.received)
        r.respond(g.bundle([batch, labels]))
        g.output("answers", r.responses)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return (
        Compiler()
        .bind_peer_selector("who", ConnectedView)
        .bind_data_source("slow", SlowSource)
        .compile(Ask().build())
    )


@pytest.fixture(autouse=True)
def held() -> Any:
    HELD.__init__()  # type: ignore[misc]
    yield HELD
    HELD.go.set()


@dataclass
class Party:
    node: Node
    backend: MemoryTransport
    driver: Driver
    seen: list[steps.Step]
    news: trio.Event

    async def until(self, wanted: type[steps.Step], **fields: Any) -> Any:
        """The first step of a kind with these fields, seen or to come."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for step in self.seen:
                    if isinstance(step, wanted) and all(
                        getattr(step, name) == value for name, value in fields.items()
                    ):
                        return step
                self.news = trio.Event()
                await self.news.wait()


def make(
    network: MemoryNetwork,
    compiled: Any,
    peer: PeerId,
    role: str,
    limits: TransportLimits | None = None,
) -> Party:
    node = install(compiled, [role], peer_id=peer, seed=1)
    backend = network.transport(
        peer, hello=Hello(classes=node.classes, targets=node.targets), limits=limits
    )
    party: Party

    def observe(step: steps.Step) -> None:
        party.seen.append(step)
        party.news.set()

    party = Party(node, backend, Driver(node, backend, observe=observe), [], trio.Event())
    return party


@asynccontextmanager
async def parties(compiled: Any) -> AsyncIterator[tuple[Party, Party]]:
    network = MemoryNetwork()
    server = make(network, compiled, SERVER, "server")
    client = make(network, compiled, CLIENT, "client")
    async with trio.open_nursery() as nursery:
        for party in (server, client):
            await nursery.start(party.backend.run)
            await nursery.start(party.driver.run)
        client.backend.keep_connected(SERVER, server.backend.listen_addresses())
        await server.until(steps.PeerUp, peer=CLIENT)
        yield server, client
        nursery.cancel_scope.cancel()


async def test_a_request_goes_there_and_back(compiled: Any) -> None:
    async with parties(compiled) as (server, _):
        execution = server.node.invoke("server", {"tick": TRIGGER})
        done = await server.until(steps.ExecutionFinished, execution=execution)
        assert done.ok
        answers = (await server.until(steps.AppEvent, topic="answers")).value
        assert list(answers.peers) == [CLIENT]
        batch, labels = answers.responses[0][1]
        assert batch.tolist() == [1, 2]
        assert labels.tolist() == [3]


async def test_a_node_reads_on_while_a_component_works_in_its_thread(
    compiled: Any, held: Held
) -> None:
    held.go.clear()
    async with parties(compiled) as (server, client):
        first = server.node.invoke("server", {"tick": TRIGGER})
        await client.until(steps.RunTask)
        second = server.node.invoke("server", {"tick": TRIGGER})
        # Both requests are inside the client, although its component is at work.
        with trio.fail_after(PATIENCE_S):
            while len(client.node.executions()) < 2:
                await trio.lowlevel.checkpoint()
        assert client.driver.tasks_running == 1
        held.go.set()
        for execution in (first, second):
            assert (await server.until(steps.ExecutionFinished, execution=execution)).ok


async def test_what_is_given_to_the_node_on_its_own_thread_costs_one_poll(compiled: Any) -> None:
    async with parties(compiled) as (server, _):
        polls = []
        for _ in range(20):
            execution = server.node.invoke("server", {"tick": TRIGGER})
            await server.until(steps.ExecutionFinished, execution=execution)
            await trio.testing.wait_all_tasks_blocked()
            polls.append(server.driver.counters()["driver.polls"])
        # For the invocation and for the answer; none for the deadline that has gone.
        assert [after - before for before, after in pairwise(polls)] == [2] * 19


async def test_what_a_component_raises_fails_its_op_alone(compiled: Any, held: Held) -> None:
    held.fault = ZeroDivisionError("by nothing")
    async with parties(compiled) as (server, client):
        server.node.invoke("server", {"tick": TRIGGER})
        failed = await client.until(steps.OpFailed)
        assert "by nothing" in failed.detail
        held.fault = None
        again = server.node.invoke("server", {"tick": TRIGGER})
        assert (await server.until(steps.ExecutionFinished, execution=again)).ok


async def test_a_lost_peer_is_told_to_the_node(compiled: Any) -> None:
    async with parties(compiled) as (server, client):
        await client.backend.stop(1)
        await server.until(steps.PeerDown, peer=CLIENT)
        assert not server.node.connected_peers("client")
        execution = server.node.invoke("server", {"tick": TRIGGER})
        failed = await server.until(steps.OpFailed, execution=execution)
        assert "Sample" in failed.op


async def test_a_full_queue_is_told_to_the_node(compiled: Any) -> None:
    network = MemoryNetwork()
    server = make(network, compiled, SERVER, "server", TransportLimits(queue_envelopes=0))
    client = make(network, compiled, CLIENT, "client")
    async with trio.open_nursery() as nursery:
        for party in (server, client):
            await nursery.start(party.backend.run)
            await nursery.start(party.driver.run)
        client.backend.keep_connected(SERVER, server.backend.listen_addresses())
        await server.until(steps.PeerUp, peer=CLIENT)
        execution = server.node.invoke("server", {"tick": TRIGGER})
        # Its request does not wait for an answer that can't come.
        failed = await server.until(steps.OpFailed, execution=execution)
        assert f"missing: {CLIENT} (NotSent: " in failed.detail
        assert server.node.counters()["send.failed"] == 1
        assert server.driver.counters()["driver.QueueFullError"] == 1
        nursery.cancel_scope.cancel()


async def test_nobody_is_blamed_for_what_we_do_not_allow(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while our clock is wrong: more refusals than failures that a peer may have."""

    def refuse(peer: PeerId, *_: Any, **__: Any) -> None:
        raise refusals.pop()

    async with parties(compiled) as (server, _):
        refusals = [DeniedPeerError("not now"), *(NotAllowedError("not now") for _ in range(6))]
        with monkeypatch.context() as patch:
            patch.setattr(server.backend, "send", refuse)
            while refusals:
                execution = server.node.invoke("server", {"tick": TRIGGER})
                done = await server.until(steps.ExecutionFinished, execution=execution)
                assert not done.ok
        standing = server.node.peer_standing(CLIENT)
        assert (standing.health, standing.failures) == (Health.HEALTHY, 0)
        assert list(server.node.connected_peers("client")) == [CLIENT]
        again = server.node.invoke("server", {"tick": TRIGGER})
        assert (await server.until(steps.ExecutionFinished, execution=again)).ok


async def test_what_is_kept_for_a_peer_that_is_away_goes_out_later(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(peer: PeerId, *_: Any, **__: Any) -> None:
        raise NotConnectedError(f"{peer} is not connected")

    async with parties(compiled) as (server, _):
        kept: list[steps.SendEnvelope] = []
        server.driver._keep = lambda step: not kept.append(step)
        with monkeypatch.context() as patch:
            patch.setattr(server.backend, "send", away)
            execution = server.node.invoke("server", {"tick": TRIGGER})
            sent = await server.until(steps.SendEnvelope)
        assert kept == [sent]
        server.driver.send(sent)
        assert (await server.until(steps.ExecutionFinished, execution=execution)).ok
        assert "send.failed" not in server.node.counters()


async def test_a_transport_that_raises_what_it_should_not_is_logged_once(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a fault of its author")

    async with parties(compiled) as (server, _):
        with monkeypatch.context() as patch:
            patch.setattr(server.backend, "send", broken)
            for _ in range(2):
                execution = server.node.invoke("server", {"tick": TRIGGER})
                failed = await server.until(steps.OpFailed, execution=execution)
                assert "the transport failed: KeyError" in failed.detail
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert record.exc_info is not None
    assert server.driver.counters()["driver.send_broken"] == 2


async def test_a_send_that_fails_later_ends_its_request_alone(compiled: Any) -> None:
    network = MemoryNetwork()
    server = make(network, compiled, SERVER, "server")
    client = make(network, compiled, CLIENT, "client", TransportLimits(inbox_envelopes_per_peer=1))
    async with trio.open_nursery() as nursery:
        await nursery.start(client.backend.run)
        for run in (server.backend.run, server.driver.run):
            await nursery.start(run)
        client.backend.keep_connected(SERVER, server.backend.listen_addresses())
        await server.until(steps.PeerUp, peer=CLIENT)
        # Nobody takes what lies in the client's inbox: the second stays in the server's queue.
        first, second = (server.node.invoke("server", {"tick": TRIGGER}) for _ in range(2))
        for tag in (1, 2):
            await server.until(steps.SendEnvelope, tag=tag)
        network.cut(SERVER, CLIENT)
        failed = await server.until(steps.OpFailed)
        assert failed.execution == second
        assert f"missing: {CLIENT} (NotSent: " in failed.detail
        assert [info.execution for info in server.node.executions()] == [first]
        nursery.cancel_scope.cancel()


async def test_stop_leaves_work_in_threads_behind(compiled: Any, held: Held) -> None:
    held.go.clear()
    async with parties(compiled) as (server, client):
        server.node.invoke("server", {"tick": TRIGGER})
        assert await trio.to_thread.run_sync(held.inside.wait, PATIENCE_S)
        client.driver.stop()
        # The loop ends; the thread can't be ended, and is known to be there.
        await trio.testing.wait_all_tasks_blocked()
        assert client.driver.tasks_running == 1
