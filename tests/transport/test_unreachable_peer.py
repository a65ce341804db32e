"""A round with a peer whose address does not answer: real hosts on loopback."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import trio
from multiaddr import Multiaddr

from bbnode.compiler import Compiler
from bbnode.dsl import Graph, Module, types
from bbnode.engine import Node, install, steps
from bbnode.ir.peer import PeerId
from bbnode.ir.values import PeerIdVec
from bbnode.transport.base import Hello
from bbnode.transport.driver import Driver
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import make

ABSENT = PeerId.from_seed("absent")
# Far beyond what the test waits: nothing here ends by its deadline.
DEADLINE_S = 100 * PATIENCE_S


class Ask(Module):
    """Asks the peers that it is given, of whom two have to answer."""

    home = "server"

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        peers = g.input("client", types.PEER_ID_VEC)
        r = g.request("ask", peers, x, quorum=2, deadline=DEADLINE_S)
        r.respond(r.received)
        g.output("answers", r.responses)


class Party:
    """A node on a real backend; whom it sends to, it dials."""

    def __init__(self, name: str, role: str) -> None:
        compiled = Compiler().compile(Ask().build())
        self.backend: Libp2pTransport = make(name, hello=Hello(classes=(role,)))
        self.node: Node = install(compiled, [role], peer_id=self.backend.peer_id, seed=1)
        self.driver = Driver(self.node, self.backend, observe=self._observe, reach=self._reach)
        self.seen: list[steps.Step] = []
        self._news = trio.Event()

    async def until(self, kind: type[steps.Step], **fields):
        with trio.fail_after(PATIENCE_S):
            while True:
                for step in self.seen:
                    if isinstance(step, kind) and all(
                        getattr(step, name) == value for name, value in fields.items()
                    ):
                        return step
                self._news = trio.Event()
                await self._news.wait()

    def _observe(self, step: steps.Step) -> None:
        self.seen.append(step)
        self._news.set()

    def _reach(self, step: steps.SendEnvelope) -> bool:
        self.backend.keep_connected(step.peer, step.addresses)
        return True


@pytest.mark.parametrize("there", [2, 1])
async def test_a_round_ends_when_all_that_are_there_have_answered(nursery, there: int) -> None:
    server = Party("s", "server")
    clients = [Party(name, "client") for name in "ab"[:there]]
    for party in (server, *clients):
        await nursery.start(party.backend.run)
        await nursery.start(party.driver.run)
    for client in clients:
        client.backend.keep_connected(server.node.peer_id, server.backend.listen_addresses())
        await server.until(steps.PeerUp, peer=client.node.peer_id)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = Multiaddr(f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}")
    # It was here once, and so its address is known.
    server.node.peer_connected(ABSENT, ["client"], [nobody])
    server.node.peer_disconnected(ABSENT, "gone")
    here = [client.node.peer_id for client in clients]
    execution = server.node.invoke(
        "server", {"x": np.ones(1, np.float32), "client": PeerIdVec([ABSENT, *here])}
    )
    end = await server.until(steps.ExecutionFinished, execution=execution)
    assert end.ok is (there == 2)
    if end.ok:
        answers = (await server.until(steps.AppEvent, execution=execution)).value
        assert sorted(answers.peers) == sorted(here)
        assert answers.missing == (ABSENT,)
    else:
        failed = await server.until(steps.OpFailed, execution=execution)
        assert failed.kind == "QuorumNotReached"
        assert f"{ABSENT} (NotSent: " in failed.detail
