"""A connection with the inviting peer, before the joining node exists.

Rule: it dials only that one peer, which the handshake has to prove; everything goes over that
connection. It plays no class, so that no program takes it for a node. A peer that admits us answers
a ping; one that does not closes the connection without giving a reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from bbnode.daemon.build import full_version
from bbnode.daemon.join.invitation import InviterRefused, InviterUnreachable, Source, WrongPeer
from bbnode.daemon.network import ping
from bbnode.ir.errors import BbnodeError
from bbnode.transport import (
    ConnectionClosed,
    ConnectionOpened,
    Hello,
    Identity,
    NotConnectedError,
    RelaySettings,
    StreamBrokenError,
    Transport,
    TransportSetup,
)
from bbnode.transport.errors import OTHER_KEY
from bbnode.transport.registry import make_transport

# A dial gives up after 5 s; each address gets its second chance within this time.
CONNECT_TIMEOUT_S: Final = 15.0
# From a connection to the first answer on it: milliseconds, except on a busy machine.
ACCEPT_TIMEOUT_S: Final = 10.0
# The period of checks whether all addresses have failed.
_LOOK_EVERY_S: Final = 0.05
# A stream may arrive before the other side has read our hello: it is opened again.
_PING_EVERY_S: Final = 0.1
_GOODBYE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A connection for protocols, with the hello of the peer."""

    backend: Transport
    hello: Hello
    address: str


@asynccontextmanager
async def dialled(identity: Identity, source: Source, credentials: bytes) -> AsyncIterator[Dialled]:
    """Dial the inviting peer and show it `credentials`.

    Raises InviterUnreachable, WrongPeer, InviterRefused, and the errors of the body.
    """
    # Without py-libp2p, whose import takes longer than a join.
    backend = make_transport(
        "lean",
        TransportSetup(
            identity=identity,
            relay=RelaySettings(use=True),
            hello=Hello(agent_version=f"bbnode-join/{full_version()}", credentials=credentials),
        ),
    )
    async with connecting(backend, drained=False) as nursery:
        backend.keep_connected(source.inviter, source.addresses)
        connection = await _connected(backend, source)
        nursery.start_soon(_drain, backend)
        yield connection


@asynccontextmanager
async def connecting(backend: Transport, *, drained: bool = True) -> AsyncIterator[trio.Nursery]:
    """Run a transport and tasks beside it while the block runs; `drained`: drop its events.

    Raises the errors of the body.
    """
    failure: BbnodeError | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        try:
            if drained:
                nursery.start_soon(_drain, backend)
            yield nursery
        except BbnodeError as error:
            # Raised outside of the nursery, which would wrap it in a group.
            failure = error
        with trio.CancelScope(shield=True):
            await backend.stop(_GOODBYE_S)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _connected(backend: Transport, source: Source) -> Dialled:
    up = await _first_hello(backend, source)
    send_ping = ping.to(backend)
    with trio.move_on_after(ACCEPT_TIMEOUT_S) as waited:
        while True:
            try:
                await send_ping(source.inviter)
            except (NotConnectedError, StreamBrokenError):
                if _was_cut(backend):
                    break
                await trio.sleep(_PING_EVERY_S)
            else:
                return Dialled(backend=backend, hello=up.hello, address=str(up.address))
    if waited.cancelled_caught:
        raise InviterUnreachable(
            f"{source.inviter} was reached, and did not answer within {ACCEPT_TIMEOUT_S:g} s; see "
            "that it runs well (`bbnode doctor` there), and try again"
        )
    raise _refused(source)


async def _first_hello(backend: Transport, source: Source) -> ConnectionOpened:
    tries = 2 * len(source.addresses)
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        while True:
            with trio.move_on_after(_LOOK_EVERY_S):
                while True:
                    event = await backend.events.receive()
                    if isinstance(event, ConnectionOpened):
                        return event
            (wanted,) = backend.wanted()
            if wanted.failed_dials >= tries:
                break
    (wanted,) = backend.wanted()
    why = wanted.last_error or f"no answer within {CONNECT_TIMEOUT_S:g} s"
    if OTHER_KEY in why:
        raise WrongPeer(
            f"somebody else than {source.inviter} answers at its address: {why}; ask for a new "
            "ticket or its present address"
        )
    if backend.counters()["dial.failed"] < wanted.failed_dials:
        raise _refused(source)  # it was reached, and closed the connection
    raise InviterUnreachable(
        f"{source.inviter} can't be reached: {why}; see that it runs, and that this machine "
        "reaches its address"
    )


def _was_cut(backend: Transport) -> bool:
    """Return True if a connection was established and has ended since."""
    cut = False
    while True:
        try:
            cut |= isinstance(backend.events.receive_nowait(), ConnectionClosed)
        except trio.WouldBlock:
            return cut


def _refused(source: Source) -> InviterRefused:
    if source.ticket is None:
        how = "it may take only members of its network: ask it for a ticket (`bbnode invite`)"
    else:
        how = "the ticket may be used up or taken back, or this peer is blocked: ask its owner"
    return InviterRefused(f"{source.inviter} closed the connection as soon as it knew us; {how}")


async def _drain(backend: Transport) -> None:
    try:
        while True:
            await backend.events.receive()
    except trio.EndOfChannel:
        return
