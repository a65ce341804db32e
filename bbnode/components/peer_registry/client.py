"""`GlobalRegistryClient` and `GlobalRegistryView`: the registry as other peers see it.

Rule: a program may call the ops as often as it likes; the component sends only what is needed, an
announcement per heartbeat and reads of new changes. No op waits: the view shows an answer once it
has arrived. What a registry says about others counts for its TTL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgpack
from multiaddr import Multiaddr

from bbnode.components.contracts import ComponentError, OpContext, ProtocolComponent
from bbnode.components.peer_registry import messages as messages
from bbnode.components.peer_registry.messages import Cookie, Row
from bbnode.components.registry import register_component
from bbnode.components.selectors.views import DrawingSelector
from bbnode.ir import keys, opset
from bbnode.ir.caps import MAX_BOOK_PEERS, MAX_REGISTRIES
from bbnode.ir.peer import PeerId

DOMAIN: Final = f"{keys.PROTOCOL_DOMAIN_PREFIX}global_registry"

opset.op(
    DOMAIN, "Announce", "server:peer", "cmd:cmd", role="Protocol", as_class="",
    doc="Enters this peer in a registry, under a class; silent within the heartbeat.",
)  # fmt: skip
opset.op(
    DOMAIN, "Discover", "server:peer", "cmd:cmd", role="Protocol", n=0,
    doc="Reads what changed in a registry; with n, has it draw n peers instead.",
)  # fmt: skip


class TooManyRegistries(ComponentError):
    """A program uses more registries than a client keeps track of."""


@dataclass(frozen=True, kw_only=True)
class GlobalRegistryClientConfig:
    """Settings of `GlobalRegistryClient`.

    Attributes:
        server_slot: the slot of the `GlobalRegistryServer` on the peers that are asked.
        deadline_s: seconds that an answer is waited for.
        max_view: peers kept of one registry; of more, which are counted in the status, none is
            chosen.
    """

    server_slot: str = "registry"
    deadline_s: float = 10.0
    max_view: int = 4096


@dataclass(slots=True)
class _Server:
    """The client's state of one registry."""

    next_announce_ns: int = 0
    announced: tuple[str, tuple[Multiaddr, ...]] | None = None  # what it was last told
    reading: bool = False
    cookie: Cookie | None = None
    known_until_ns: int = 0
    rows: dict[PeerId, Row] = field(default_factory=dict)
    # A whole view that is being read, page by page; it takes the place of `rows` at its end.
    fresh: dict[PeerId, Row] | None = None


@register_component
class GlobalRegistryClient(ProtocolComponent):
    """Announces this peer to registries and keeps what they say of others."""

    TYPE_NAME: ClassVar[str] = "bbnode.GlobalRegistryClient"
    Config: ClassVar[type] = GlobalRegistryClientConfig
    config: GlobalRegistryClientConfig

    def __init__(self, config: GlobalRegistryClientConfig) -> None:
        super().__init__(config)
        self.require(config.deadline_s > 0, "deadline_s has to be positive")
        within = 1 <= config.max_view <= MAX_BOOK_PEERS
        self.require(within, f"max_view has to be in 1 .. {MAX_BOOK_PEERS}")
        self._deadline_ns = int(config.deadline_s * 1_000_000_000)
        self._servers: dict[PeerId, _Server] = {}
        self._beyond_view = 0

    # -- ops ---------------------------------------------------------------------------------

    def announce(self, ctx: OpContext, server: PeerId, *, as_class: str) -> None:
        """Tell a registry where this peer is, unless it has been told a while ago.

        Raises TooManyRegistries.
        """
        known = self._server(server)
        message = messages.Announcement(as_class=as_class, addresses=tuple(ctx.addresses))
        said = (as_class, message.addresses)
        if ctx.now_ns < known.next_announce_ns and known.announced == said:
            return
        known.announced = said
        # Until there is an answer, or the request has failed.
        known.next_announce_ns = ctx.now_ns + self._deadline_ns
        self._ask(ctx, server, "Announce", message.encode(), "announce")

    def discover(self, ctx: OpContext, server: PeerId, *, n: int) -> None:
        """Read what changed in a registry; with `n`, let it draw n peers. Raises as `announce`."""
        known = self._server(server)
        if not known.reading:
            self._read(ctx, server, known, n)

    # -- answers -----------------------------------------------------------------------------

    def on_answer(self, ctx: OpContext, tag: str, payload: bytes) -> None:
        """Handle the answer of a registry."""
        server = ctx.source_peer or ctx.self_peer
        known = self._server(server)
        if tag == "announce":
            said = messages.Handshake.decode(payload)
            known.next_announce_ns = ctx.now_ns + said.heartbeat_ns
            if said.addresses and server != ctx.self_peer:
                ctx.learn_addresses(server, said.addresses)
            return
        if not known.reading:
            return  # asked before a restart: the pages before this one are gone
        known.reading = False
        page = messages.Page.decode(payload)
        if page.reset:
            known.fresh = {}
        rows = known.rows if known.fresh is None else known.fresh
        for row in page.rows:
            self._take(ctx, rows, row)
        known.known_until_ns = ctx.now_ns + page.ttl_ns
        # A drawn sample gives no cookie to continue from.
        known.cookie = page.cookie if tag == "read" else None
        if page.more:
            self._read(ctx, server, known, 0)
        elif known.fresh is not None:
            known.rows, known.fresh = known.fresh, None

    def on_no_answer(self, ctx: OpContext, tag: str, peer: PeerId) -> None:
        """Handle a registry that does not answer: the next call asks again."""
        known = self._server(peer)
        if tag == "announce":
            known.next_announce_ns = ctx.now_ns
        else:
            known.reading, known.fresh, known.cookie = False, None, None

    # -- the view ----------------------------------------------------------------------------

    def view(self, ctx: OpContext, peer_class: str | None) -> list[PeerId]:
        """Return the peers of a class that some registry is believed to hold, without this one."""
        found = {
            row.peer
            for known in self._servers.values()
            if ctx.now_ns < known.known_until_ns
            for row in known.rows.values()
            if peer_class is None or row.as_class in ("", peer_class)
        }
        return sorted(found - {ctx.self_peer})

    def facts(self) -> Mapping[str, int | float | str | bool]:
        """Return how many peers are known, and how often one was beyond `max_view`."""
        known = sum(len(each.rows) for each in self._servers.values())
        return {"peers": known, "beyond_max_view": self._beyond_view}

    def _take(self, ctx: OpContext, rows: dict[PeerId, Row], row: Row) -> None:
        if row.gone:
            rows.pop(row.peer, None)
        elif row.peer in rows or len(rows) < self.config.max_view:
            rows[row.peer] = row
            if row.addresses and row.peer != ctx.self_peer:
                ctx.learn_addresses(row.peer, row.addresses)
        else:
            self._beyond_view += 1

    def _read(self, ctx: OpContext, server: PeerId, known: _Server, n: int) -> None:
        op, tag = ("Sample", "sample") if n > 0 else ("CurrentView", "read")
        request = messages.ReadRequest(cookie=known.cookie, n=max(n, 0))
        self._ask(ctx, server, op, request.encode(), tag)
        known.reading = True

    def _ask(self, ctx: OpContext, server: PeerId, op: str, payload: bytes, tag: str) -> None:
        slot, deadline_ns = self.config.server_slot, self._deadline_ns
        ctx.request(server, slot, op, payload, tag=tag, deadline_ns=deadline_ns)

    def _server(self, peer: PeerId) -> _Server:
        known = self._servers.get(peer)
        if known is None:
            if len(self._servers) >= MAX_REGISTRIES:
                raise TooManyRegistries(
                    f"{self.TYPE_NAME}: {peer.short} would be registry {MAX_REGISTRIES + 1}; let a "
                    "program announce to the same few"
                )
            known = self._servers[peer] = _Server()
        return known

    # -- snapshot ----------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Return the view; a restored peer announces itself and reads anew at the next call."""
        saved = [
            [peer.to_bytes(), known.known_until_ns, [row.pack() for row in known.rows.values()]]
            for peer, known in self._servers.items()
        ]
        return bytes(msgpack.packb(saved))

    def restore(self, data: bytes) -> None:
        """Load a saved view; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            self._servers = {
                PeerId.from_bytes(peer): _Server(
                    known_until_ns=int(until_ns),
                    rows={row.peer: row for row in map(Row.read, rows)},
                )
                for peer, until_ns, rows in msgpack.unpackb(data)[:MAX_REGISTRIES]
            }


@register_component
class GlobalRegistryView(DrawingSelector):
    """Chooses among the peers of the slot's class that the client's registries hold."""

    TYPE_NAME: ClassVar[str] = "bbnode.GlobalRegistryView"
    # The client's slot.
    depends: ClassVar[Mapping[str, str]] = {"protocol": "directory"}

    def bind(self, dependencies: Mapping[str, Any]) -> None:
        """Accept a `GlobalRegistryClient` alone."""
        client = dependencies["protocol"]
        problem = (
            f"slot 'directory' has a {client.TYPE_NAME}, not a {GlobalRegistryClient.TYPE_NAME}"
        )
        self.require(isinstance(client, GlobalRegistryClient), problem)
        super().bind(dependencies)

    def candidates(self, ctx: OpContext) -> Sequence[PeerId]:
        client: GlobalRegistryClient = self.dependency("protocol")
        return client.view(ctx, ctx.peer_class)
