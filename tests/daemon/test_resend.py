"""What was not acknowledged at a stop goes out when its peer is back, or fails in time."""

from __future__ import annotations

import trio
import trio.testing
from multiaddr import Multiaddr

from bbnode.daemon.state.checkpoint import UnsentEnvelope
from bbnode.daemon.state.resend import WAIT_S, Resend
from bbnode.engine import steps
from bbnode.ir.caps import MAX_KEPT_UNSENT_BYTES
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, Direction, Hello

A, B, C = (PeerId.from_seed(name) for name in "abc")


def connected(peer: PeerId) -> ConnectionOpened:
    return ConnectionOpened(
        peer=peer, address=Multiaddr("/memory/1"), direction=Direction.INBOUND, hello=Hello()
    )


async def test_peers_that_come_back_and_those_that_do_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sent: list[steps.SendEnvelope] = []
    failed: list[tuple[PeerId, int, float]] = []
    began_s = trio.current_time()
    made = Resend(
        (
            UnsentEnvelope(peer=A, tag=1, data=b"one"),
            UnsentEnvelope(peer=B, tag=2, data=b"two"),
            UnsentEnvelope(peer=A, tag=3, data=b"three"),
            UnsentEnvelope(peer=A, tag=4, data=None),
        ),
        send=sent.append,
        failed=lambda peer, tag, _: failed.append((peer, tag, trio.current_time() - began_s)),
    )
    assert made.peers == (A, B)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(WAIT_S - 1)
        made.heard(connected(A))
        assert [(s.peer, s.tag, b"".join(s.parts)) for s in sent] == [
            (A, 1, b"one"),
            (A, 3, b"three"),
        ]
        made.heard(connected(A))
        assert len(sent) == 2
    assert failed == [(A, 4, 0), (B, 2, WAIT_S)]
    made.heard(connected(B))
    assert len(sent) == 2


async def test_what_a_node_that_goes_on_sends_waits_for_its_peers_of_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sent: list[steps.SendEnvelope] = []
    failed: list[tuple[PeerId, int]] = []
    made = Resend(
        (),
        expected=(A, B),
        send=sent.append,
        failed=lambda peer, tag, _: failed.append((peer, tag)),
    )

    def sends(peer: PeerId, tag: int, data: bytes = b"answer") -> bool:
        return made.keep(steps.make_send(peer, (), (data,), tag))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.testing.wait_all_tasks_blocked()
        assert sends(A, 1)
        assert sends(B, 2)
        assert not sends(C, 3)  # this node was not connected with it
        assert not sends(A, 4, bytes(MAX_KEPT_UNSENT_BYTES))
        assert made.tags(A) == {1}
        # A stop that comes before its peers do keeps it again.
        assert [(each.peer, each.tag) for each in made.unsent()] == [(A, 1), (B, 2)]
        made.heard(connected(A))
        assert [(s.peer, s.tag, b"".join(s.parts)) for s in sent] == [(A, 1, b"answer")]
        assert not sends(A, 5)  # it was back: what fails now, fails
    assert failed == [(B, 2)]
    assert not sends(B, 6)
