"""Introductions: a bootstrap peer names its peers with which the program has this node talk.

Rule: `/bbnode/introduce/1`, an empty request and one msgpack answer on a stream. Both programs
declare in their hello whom they talk with: a site to which one sends and which the other takes. A
node introduces a peer only at addresses that it would dial itself on that peer's own claim, and
asks only its own bootstrap peers; so a liar makes nodes dial no more than it could by connecting to
each of them. An introduction is a hint: the handshake and the policy decide, as always.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgpack
import trio
from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes, is_relayed, named_peer, split_circuit
from bbnode.ir.caps import (
    INTRODUCTIONS_EVERY_S,
    MAX_HINTS,
    MAX_INTRODUCED,
    MAX_INTRODUCTION_ASKERS,
    MAX_INTRODUCTION_BYTES,
)
from bbnode.ir.crossing import Sites, sites_of
from bbnode.ir.decoding import Boundary, clip, unpack
from bbnode.ir.errors import BbnodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    ProtocolStream,
    Transport,
    TransportEvent,
)
from bbnode.transport.errors import StreamBrokenError
from bbnode.transport.hints import dialable

logger = logging.getLogger(__name__)

INTRODUCE_PROTOCOL: Final = "/bbnode/introduce/1"
MAX_REFUSAL_CHARS: Final = 200
_MAX_VALUES: Final = 4 + MAX_INTRODUCED * (4 + MAX_HINTS)
ANSWER_S: Final = 15.0
REQUEST_S: Final = 5.0
# The first pause after a failure, which doubles too: the other side may not have our hello yet.
RETRY_S: Final = 1.0
# A newcomer asks at once and dials the peers that were there before, so a repeated request is for
# peers that only one side can dial. Each answer without news doubles the time.
ASK_AGAIN_S: Final = 60.0
MAX_ASK_AGAIN_S: Final = 900.0


class NotIntroduced(PeerError):
    """A bootstrap peer did not answer with its peers."""


class Finder(Protocol):
    """The part of discovery that introductions use."""

    def is_bootstrap(self, peer: PeerId) -> bool:
        """Return True for a peer of the bootstrap list."""

    def knows_well(self, peer: PeerId) -> bool:
        """Return True for a member of our private network, or a peer the program dealt with."""

    def introduced(self, peer: PeerId, addresses: Sequence[Multiaddr]) -> bool:
        """Dial an introduced peer; False if it is connected, dialled already, or not admitted."""


class Introductions:
    """Introduces the peers of one node to each other, and asks for introductions."""

    def __init__(self, backend: Transport, finder: Finder, *, crossings: bytes) -> None:
        """Serve on a transport that does not run yet; `crossings` are those of this node's hello.

        Nothing is asked before `run`.
        """
        self._backend = backend
        self._finder = finder
        self._own = crossings
        # The connected peers by the crossings of their programs: few of these differ, except for
        # inventions of strangers. Read once per connection, so that a request costs a comparison.
        self._peers: dict[Sites, dict[PeerId, ConnectionOpened]] = {}
        self._sites: dict[PeerId, Sites] = {}
        # The time of each peer's last request, oldest first; and the time of the next request to
        # each bootstrap peer, with the pause; all in trio's time.
        self._asked: OrderedDict[PeerId, float] = OrderedDict()
        self._next: dict[PeerId, tuple[float, float]] = {}
        self._wake = trio.Event()
        self._stopped = False
        self._counts: Counter[str] = Counter()
        backend.register_protocol(INTRODUCE_PROTOCOL, self.serve)

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport."""
        match event:
            case ConnectionOpened(peer=peer):
                self._drop(peer)
                sites = sites_of(event.hello.crossings)
                if sites.sends or sites.takes:
                    self._sites[peer] = sites
                    self._peers.setdefault(sites, {})[peer] = event
                if self._own and self._finder.is_bootstrap(peer):
                    self._next[peer] = (trio.current_time(), RETRY_S)
                    self._wake.set()
            case ConnectionClosed(peer=peer):
                self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self._next.pop(peer, None)
        sites = self._sites.pop(peer, None)
        if sites is not None:
            del self._peers[sites][peer]
            if not self._peers[sites]:
                del self._peers[sites]

    # -- introducing others ------------------------------------------------------------------

    async def serve(self, stream: ProtocolStream) -> None:
        """Answer one request. A malformed one resets the stream."""
        # A stream may arrive before its connection is up here, or outlive it: the peer asks again.
        with trio.fail_after(REQUEST_S), contextlib.suppress(StreamBrokenError):
            if await stream.read(1):
                raise NotIntroduced("a request for introductions is empty")
            refusal = self._refusal(stream.peer)
            rows = [] if refusal else self._rows(stream.peer)
            await stream.write(msgpack.packb([refusal, rows]))
            await stream.end()

    def _refusal(self, peer: PeerId) -> str:
        now_s = trio.current_time()
        while self._asked and next(iter(self._asked.values())) + INTRODUCTIONS_EVERY_S <= now_s:
            self._asked.popitem(last=False)
        if peer in self._asked:
            return f"asked again too soon: once in {INTRODUCTIONS_EVERY_S:g} s"
        if len(self._asked) >= MAX_INTRODUCTION_ASKERS:
            return "too many ask at once; try again later"
        self._asked[peer] = now_s
        return ""

    def _rows(self, asker: PeerId) -> list[Any]:
        """Return the peers with which the asker's program talks, and their addresses.

        With many peers, each asker gets others: together they connect all peers in a few steps.
        """
        own = self._sites.get(asker)
        if own is None:  # its connection may not have been reported yet
            info = self._backend.peer_info(asker)
            own = sites_of(b"" if info is None else info.hello.crossings)
        introduced = [
            event
            for sites, peers in self._peers.items()
            if own.talk_with(sites)
            for peer, event in peers.items()
            if peer != asker
        ]
        introduced.sort(key=lambda event: _distance(asker, event.peer))
        rows = []
        for event in introduced:
            addresses = self._addresses(event)
            if addresses:
                rows.append([event.peer.to_bytes(), [each.to_bytes() for each in addresses]])
            if len(rows) == MAX_INTRODUCED:
                break
        self._counts["introduced"] += len(rows)
        return rows

    def _addresses(self, event: ConnectionOpened) -> Sequence[Multiaddr]:
        """Return where we would dial a peer on its own claim; our own addresses, if we relay."""
        claimed = [a for a in event.hello.listen_addresses if named_peer(a) == event.peer]
        ours = [each for each in claimed if is_relayed(each) and self._is_relay_of(each)]
        good = self._finder.knows_well(event.peer)
        direct = dialable(claimed, seen=event.address, good=good)
        return tuple(dict.fromkeys((*direct, *ours)))[:MAX_HINTS]

    def _is_relay_of(self, address: Multiaddr) -> bool:
        try:
            return split_circuit(address)[1] == self._backend.peer_id
        except BbnodeError:
            return False

    # -- being introduced --------------------------------------------------------------------

    async def run(self) -> None:
        """Ask each bootstrap peer when it connects, and again at intervals, until `stop`."""
        while not self._stopped:
            self._wake = trio.Event()
            next_s = min((at for at, _ in self._next.values()), default=float("inf"))
            with trio.move_on_at(next_s):
                await self._wake.wait()
            now_s = trio.current_time()
            for peer in [p for p, (at, _) in self._next.items() if at <= now_s]:
                if peer in self._next:
                    await self._ask_now(peer)

    def stop(self) -> None:
        """Stop asking; `run` returns."""
        self._stopped = True
        self._wake.set()

    async def _ask_now(self, peer: PeerId) -> None:
        _, wait_s = self._next[peer]
        try:
            news = False
            for introduced, addresses in await ask(self._backend, peer):
                if introduced != self._backend.peer_id:
                    news |= self._finder.introduced(introduced, addresses)
            wait_s = ASK_AGAIN_S if news else max(wait_s, ASK_AGAIN_S)
        except BbnodeError as error:
            # A peer of an earlier release does not speak this protocol; others may be asked.
            self._counts["introductions_failed"] += 1
            logger.debug("no introductions", extra={"peer": str(peer), "reason": str(error)})
        if peer in self._next:
            after_s = min(2 * wait_s, MAX_ASK_AGAIN_S)
            self._next[peer] = (trio.current_time() + wait_s, after_s)

    def counters(self) -> dict[str, int]:
        """Return the counters by dotted name; all names are always there."""
        names = ("introduced", "introductions_failed")
        return {f"discovery.{name}": self._counts[name] for name in names}


def _distance(asker: PeerId, peer: PeerId) -> bytes:
    """Return a sort key of peers that differs for each asker."""
    return hashlib.sha256(asker.to_bytes() + peer.to_bytes()).digest()


async def ask(backend: Transport, peer: PeerId) -> list[tuple[PeerId, list[Multiaddr]]]:
    """Return the peers that a connected one introduces; NotIntroduced, and as `open_stream`."""
    raw = b""
    with trio.move_on_after(ANSWER_S):
        async with backend.open_stream(peer, INTRODUCE_PROTOCOL) as stream:
            await stream.end()
            while part := await stream.read(MAX_INTRODUCTION_BYTES + 1 - len(raw)):
                raw += part
                if len(raw) > MAX_INTRODUCTION_BYTES:
                    raise NotIntroduced(f"{peer} sent over {MAX_INTRODUCTION_BYTES} bytes")
        return decode_introductions(raw)
    raise NotIntroduced(f"no answer within {ANSWER_S:g} s")


@Boundary("the answer is malformed", NotIntroduced)
def decode_introductions(raw: bytes) -> list[tuple[PeerId, list[Multiaddr]]]:
    """Return introduced peers with their addresses; raises NotIntroduced."""
    match unpack(raw, max_bytes=MAX_INTRODUCTION_BYTES, max_values=_MAX_VALUES, max_depth=4):
        case [str() as refusal, list() as rows] if len(rows) <= MAX_INTRODUCED:
            if refusal:
                raise NotIntroduced(clip(refusal, MAX_REFUSAL_CHARS))
            return [_introduced(row) for row in rows]
    raise NotIntroduced("the answer is malformed")


def _introduced(row: Any) -> tuple[PeerId, list[Multiaddr]]:
    match row:
        case [bytes() as raw, list() as addresses] if 1 <= len(addresses) <= MAX_HINTS:
            peer = PeerId.from_bytes(raw)
            decoded = [address_from_bytes(each) for each in addresses]
            if any(named_peer(each) != peer for each in decoded):
                raise NotIntroduced(f"an address of {peer} leads to another peer")
            return peer, decoded
    raise NotIntroduced("the answer is malformed")
