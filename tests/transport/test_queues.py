"""The inbox, and the waits between dials."""

from __future__ import annotations

import random

import pytest
import trio
from multiaddr import Multiaddr

from bbnode.ir.peer import PeerId
from bbnode.transport.base import ConnectionClosed, EnvelopeReceived
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.transport import DialBackoff

A, B, C = (PeerId.from_seed(name) for name in "abc")
_ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1")


def never() -> None:
    raise AssertionError("evicted")


def _envelope(peer: PeerId, size: int) -> EnvelopeReceived:
    return EnvelopeReceived(peer=peer, data=bytes(size), observed_address=_ADDRESS)


async def test_inbox_shares_and_total():
    inbox = Inbox(TransportLimits(inbox_bytes_per_peer=100, inbox_bytes=150))
    assert inbox.offer(_envelope(A, 80))
    assert not inbox.offer(_envelope(A, 30))
    assert inbox.offer(_envelope(B, 60))
    assert not inbox.offer(_envelope(B, 20))
    assert inbox.envelope_bytes == 140
    inbox.receive_nowait()
    assert inbox.offer(_envelope(A, 30))


async def test_large_messages_have_a_budget_of_their_own():
    inbox = Inbox(TransportLimits(inbox_bytes_per_peer=10, inbox_bytes=15, inbox_large_bytes=70))
    for peer in (A, B):
        assert inbox.offer(_envelope(peer, 7))
    # Small ones leave no room among themselves; they do not keep a large one out.
    assert not inbox.offer(_envelope(C, 7))
    first = inbox.begin(A, 100, never)
    assert first is not None
    assert inbox.begin(A, 20, never) is None, "one of each peer"
    assert inbox.begin(B, 20, never) is None, "beyond the budget, and not alone"
    assert inbox.grow(first, 100)
    inbox.deliver(first, _envelope(A, 100))
    assert (inbox.envelope_bytes, inbox.partial_bytes) == (114, 0)
    assert inbox.begin(B, 20, never) is None, "it still lies here"
    for _ in range(3):
        inbox.receive_nowait()
    claims = [inbox.begin(B, 20, never), inbox.begin(A, 50, never)]
    for transfer in claims:
        assert transfer is not None
        assert inbox.grow(transfer, 1)
    assert inbox.partial_bytes == 70
    for transfer in claims:
        inbox.drop(transfer)
    assert (inbox.envelope_bytes, inbox.partial_bytes, inbox.envelopes) == (0, 0, 0)


async def test_room_is_told_of():
    inbox = Inbox(TransportLimits(inbox_envelopes_per_peer=1))
    told = []
    inbox.on_room = told.append
    assert inbox.offer(_envelope(A, 1))
    assert not inbox.offer(_envelope(A, 1))
    inbox.receive_nowait()
    assert told == [A]
    assert inbox.offer(_envelope(A, 1))


async def test_notices_always_go_in_and_say_when_it_is_too_much():
    inbox = Inbox(TransportLimits(inbox_notices=2))
    notice = ConnectionClosed(peer=A, reason="")
    for _ in range(2):
        assert not inbox.crowded
        inbox.notify(notice)
    assert inbox.crowded
    inbox.notify(notice)
    for _ in range(3):
        assert inbox.receive_nowait() is notice
    assert not inbox.crowded
    with pytest.raises(trio.WouldBlock):
        inbox.receive_nowait()
    inbox.close()
    with pytest.raises(trio.EndOfChannel):
        await inbox.receive()


def test_redial_doubles_to_the_maximum_and_is_reset():
    redial = DialBackoff(TransportLimits(), random.Random(1))
    delays = [redial.next_delay_s() for _ in range(60)]
    assert 0.2 <= delays[0] <= 0.24
    for n, delay in enumerate(delays):
        assert 0.8 * min(0.2 * 2**n, 30) <= delay <= 30
    assert len(set(delays[10:20])) > 1
    redial.reset()
    assert redial.next_delay_s() <= 0.24
