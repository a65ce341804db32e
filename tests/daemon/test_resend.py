"""What was not acknowledged at a stop goes out when its peer is back, or fails in time."""

from __future__ import annotations

import trio
import trio.testing
from multiaddr import Multiaddr

from bbnode.daemon.state.checkpoint import UnsentEnvelope
from bbnode.daemon.state.resend import WAIT_S, Resend
from bbnode.engine import steps
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionOpened, Direction, Hello

A, B = PeerId.from_seed("a"), PeerId.from_seed("b")


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
