"""Asking a restarted peer for our requests: over real connections, and with who lies."""

from __future__ import annotations

import pytest
import trio

from bbnode.ir.caps import MAX_PENDING_ASKED
from bbnode.transport.base import ConnectionOpened
from bbnode.transport.errors import NotConnectedError, StreamBrokenError
from bbnode.transport.pending_exchange import PENDING_PROTOCOL, PendingUnknown, lost, serve
from tests.patience import PATIENCE_S
from tests.transport.test_libp2p_backend import make, next_event


async def connected(nursery, *, has=None, handler=None):
    """Two nodes, of which the second answers by `has`, or by a handler of the test's."""
    a, b = make("a"), make("b")
    if has is not None:
        serve(b, has)
    if handler is not None:
        b.register_protocol(PENDING_PROTOCOL, handler)
    await nursery.start(a.run)
    await nursery.start(b.run)
    a.keep_connected(b.peer_id, b.listen_addresses())
    await next_event(a, ConnectionOpened)
    return a, b


async def test_it_says_of_each_request_if_it_has_it(nursery):
    seen = []

    def has(peer, ids):
        seen.append((peer, ids))
        return {each for each in ids if each % 2}

    a, b = await connected(nursery, has=has)
    ids = (1, 2, 3, 2**64 - 1, 2**63)
    assert await lost(a, b.peer_id, ids) == {2, 2**63}
    assert seen == [(a.peer_id, ids)]
    assert await lost(a, b.peer_id, ()) == frozenset()


async def test_many_are_asked_for_in_parts(nursery):
    sizes = []

    def has(_peer, ids):
        sizes.append(len(ids))
        return ids[:1]

    a, b = await connected(nursery, has=has)
    ids = tuple(range(1, 2 * MAX_PENDING_ASKED + 2))
    assert len(await lost(a, b.peer_id, ids)) == len(ids) - 3
    assert sizes == [MAX_PENDING_ASKED, MAX_PENDING_ASKED, 1]


async def test_a_peer_of_an_earlier_release_says_nothing(nursery):
    a, b = await connected(nursery)
    with pytest.raises(StreamBrokenError), trio.fail_after(PATIENCE_S):
        await lost(a, b.peer_id, (1,))
    with pytest.raises(NotConnectedError):
        await lost(a, make("c").peer_id, (1,))


@pytest.mark.parametrize("answer", [b"\x02", b"\xff"])
async def test_an_answer_that_is_none_is_not_believed(nursery, answer):
    async def handler(stream):
        await stream.write(answer)

    a, b = await connected(nursery, handler=handler)
    with pytest.raises(PendingUnknown):
        await lost(a, b.peer_id, (1,))


async def test_who_asks_for_too_many_gets_no_answer(nursery):
    a, b = await connected(nursery, has=lambda _peer, ids: ids)
    with trio.fail_after(PATIENCE_S):
        async with a.open_stream(b.peer_id, PENDING_PROTOCOL) as stream:
            await stream.write(b"\xff\xff")
            with pytest.raises(StreamBrokenError):
                await stream.read(1)
