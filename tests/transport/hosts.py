"""Hosts of ours without links: connections and streams by themselves, on loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from bbnode.transport.base import Counters
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.connection import Connection
from bbnode.transport.libp2p.host import Libp2pHost
from bbnode.transport.libp2p.muxer import MuxedStream
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import Admission
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from bbnode.transport.libp2p.py_libp2p.host import NodeHost

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
ECHO = "/test/echo/1"
BOOM = "/test/boom/1"
TAKE = "/test/take/1"

# Nobody is cut off because this machine stood still.
PATIENT = {"authenticate_s": 10 * PATIENCE_S, "hello_timeout_s": 10 * PATIENCE_S}


class OurHost(Libp2pHost):
    """A host that takes every connection, gives back what comes on ECHO, and fails on BOOM."""

    def __init__(
        self,
        seed: int,
        *,
        max_streams: int = 64,
        wanted: Callable[[Connection], bool] = lambda _: True,
        py_libp2p: bool = False,
        **limits: float,
    ) -> None:
        made = TransportLimits(
            **{"opening_unread_bytes": 32 * 2**20, **PATIENT, **limits}  # type: ignore[arg-type]
        )
        self.counters = Counters()
        # What peers did against the rules.
        self.refused: list[str] = []
        self.admission = Admission(made, self.counters, lambda _peer: False)
        super().__init__(
            Identity.from_seed(bytes([seed]) * 32),
            admission=self.admission,
            limits=made,
            counters=self.counters,
            max_streams=max_streams,
            on_foreign=lambda _connection: False,
            on_connection=wanted,
            on_refused=lambda _connection, reason: self.refused.append(reason),
        )
        if py_libp2p:
            from bbnode.transport.libp2p.py_libp2p.host import PyLibp2p

            self.other = PyLibp2p(
                Identity.from_seed(bytes([seed]) * 32), self, admit, self.counters
            )
        self.handlers[ECHO] = echo
        self.handlers[BOOM] = boom

    @property
    def py(self) -> NodeHost:
        """Its host of py-libp2p."""
        return self.other.host  # type: ignore[union-attr]

    @property
    def address(self) -> Multiaddr:
        """Where it listens."""
        return self.listening[0]

    @property
    def connection(self) -> Connection:
        """Its only connection."""
        (found,) = self.connections
        return found


async def admit(_connection: Connection) -> bool:
    """Let py-libp2p have every connection."""
    return True


async def echo(_connection: Connection, stream: MuxedStream) -> None:
    """Give back what comes, to the end."""
    while data := await stream.read(65_536):
        await stream.write(data)


async def boom(_connection: Connection, _stream: MuxedStream) -> None:
    """Fail at once."""
    raise ValueError("on purpose")


async def dial(client: Libp2pHost, server: OurHost) -> Connection:
    """Connect two hosts of ours."""
    return await client.dial(server.address, server.peer_id)


async def echoes(connection: Connection) -> bool:
    """Whether the other side gives back what is sent to it."""
    stream = await connection.open_protocol(ECHO)
    await stream.write(b"ping")
    answered = await stream.read(16) == b"ping"
    await stream.reset()
    return answered
