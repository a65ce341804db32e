"""Dial-back: a connected peer dials our addresses and reports which of them it reached.

Rule: `/bbnode/dial-back/1`, one msgpack request and one answer on a stream; for other hosts
AutoNAT's messages (`autonat`), by the same rules. The asked peer dials only the IP address from
which the asker's connection comes (on a private network also other private addresses), a few
addresses at a limited rate, and stops after the handshake that proves the identity at the address.
So no peer can be made to dial, or probe, a third party.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgpack
import trio
from multiaddr import Multiaddr

from bbnode.daemon.network import autonat
from bbnode.daemon.network.autonat import AUTONAT_PROTOCOL, AutonatStatus
from bbnode.ir.address import address_from_bytes, is_relayed
from bbnode.ir.caps import (
    DIAL_BACK_EVERY_S,
    MAX_CLAIMED_ADDRESSES,
    MAX_DIAL_BACK_ANSWER_BYTES,
    MAX_DIAL_BACK_ASKERS,
    MAX_DIAL_BACK_REQUEST_BYTES,
    MAX_DIAL_BACKS,
)
from bbnode.ir.decoding import Boundary, clip, unpack
from bbnode.ir.errors import BbnodeError, PeerError
from bbnode.ir.peer import PeerId
from bbnode.transport.base import ProtocolStream, Transport
from bbnode.transport.errors import DialError

DIAL_BACK_PROTOCOL: Final = "/bbnode/dial-back/1"
# Values in an answer: its three fields, and three of each row.
_MAX_VALUES: Final = 4 + 4 * MAX_CLAIMED_ADDRESSES
MAX_DETAIL: Final = 200
# Longer than connecting (5 s) and the handshake (8 s) may take; all addresses are tried at once.
ANSWER_S: Final = 15.0
REQUEST_S: Final = 5.0
# Peers that are asked, one after the other, until one has tried an address.
MAX_ASKED: Final = 3


class DialResult(StrEnum):
    """The result of dialling one address."""

    REACHED = "reached"  # the asker answered there, and proved its identity
    FAILED = "failed"
    SKIPPED = "skipped"  # the asked peer does not dial it


class DialBackRefused(PeerError):
    """A peer does not dial back now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of one address, by the asked peer's report."""

    address: Multiaddr
    outcome: DialResult
    detail: str

    def as_json(self) -> dict[str, str]:
        """Return it for output."""
        return {
            "address": str(self.address),
            "outcome": self.outcome.value,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """The answer of `peer`; `seen_at` is the origin of our connection with it."""

    peer: PeerId
    seen_at: str
    tried: tuple[Tried, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it for output."""
        return {
            "peer": str(self.peer),
            "seen_at": self.seen_at,
            "addresses": [each.as_json() for each in self.tried],
        }


Ask = Callable[[PeerId | None], Awaitable[DialBack]]


def register(backend: Transport) -> Ask:
    """Serve dial-backs, and return the function that asks for one; call it before `run`."""
    server = DialBackServer(backend)
    backend.register_protocol(DIAL_BACK_PROTOCOL, server.serve)
    backend.register_for_any(AUTONAT_PROTOCOL, server.serve_autonat)

    async def ask(peer: PeerId | None) -> DialBack:
        """Ask `peer`, or the directly connected peers in turn.

        Raises DialBackRefused with the reasons of all peers that were asked.
        """
        direct = [info.peer for info in backend.peers() if not is_relayed(info.address)]
        asked = direct[:MAX_ASKED] if peer is None else [peer]
        if not asked:
            raise DialBackRefused("no peer is connected directly; connect one, then ask again")
        skipped: DialBack | None = None
        refusals = []
        for each in asked:
            try:
                answer = await _ask_one(backend, each)
            except BbnodeError as error:
                refusals.append(f"{each.short}: {error}")
                continue
            if any(tried.outcome is not DialResult.SKIPPED for tried in answer.tried):
                return answer
            skipped = skipped or answer
        if skipped is None:
            raise DialBackRefused("; ".join(refusals))
        return skipped

    return ask


class DialBackServer:
    """The dial-back service for the peers of one node."""

    def __init__(self, backend: Transport) -> None:
        """Serve on a transport; nothing is dialled before a peer asks."""
        self._backend = backend
        self._working = 0
        # The time of each peer's last request, oldest first, in trio's time.
        self._asked: OrderedDict[PeerId, float] = OrderedDict()

    async def serve(self, stream: ProtocolStream) -> None:
        """Answer one request. A malformed one resets the stream."""
        with trio.fail_after(REQUEST_S):
            addresses = decode_request(await _read_all(stream, MAX_DIAL_BACK_REQUEST_BYTES))
        seen = self._where(stream.peer)
        refusal, tried = await self._dial(stream.peer, addresses, seen)
        rows = [[t.address.to_bytes(), t.outcome.value, t.detail] for t in tried]
        await stream.write(msgpack.packb([refusal, "" if seen is None else str(seen), rows]))
        await stream.end()

    async def serve_autonat(self, stream: ProtocolStream) -> None:
        """Answer one request of AutoNAT. A malformed one resets the stream."""
        with trio.fail_after(REQUEST_S):
            request = await autonat.read_request(stream)
        if request.peer != stream.peer:
            await autonat.answer(
                stream, AutonatStatus.BAD_REQUEST, "the peer to dial is not the asker"
            )
            return
        # A guest is no peer of the program, so the transport has no entry for it.
        seen: Multiaddr | None = getattr(stream, "address", None) or self._where(stream.peer)
        if seen is not None and is_relayed(seen):
            seen = None
        refusal, tried = await self._dial(stream.peer, request.addresses, seen)
        reached = [each.address for each in tried if each.outcome is DialResult.REACHED]
        failed = [each.detail for each in tried if each.outcome is DialResult.FAILED]
        if reached:
            await autonat.answer(stream, AutonatStatus.OK, "", reached[0])
        elif failed:
            await autonat.answer(stream, AutonatStatus.DIAL_ERROR, failed[0])
        else:
            await autonat.answer(
                stream, AutonatStatus.DIAL_REFUSED, refusal or "no address is the asker's"
            )

    async def _dial(
        self, peer: PeerId, addresses: Sequence[Multiaddr], seen: Multiaddr | None
    ) -> tuple[str, list[Tried]]:
        """Return the reason why nothing is dialled ("" if something is), and the results."""
        refusal = self._refusal(peer)
        if refusal:
            return refusal, []
        self._working += 1
        try:
            return "", await self._try_all(peer, addresses, seen)
        finally:
            self._working -= 1

    def _where(self, peer: PeerId) -> Multiaddr | None:
        """Return the address that a peer connects from; None if it is relayed, or gone."""
        info = self._backend.peer_info(peer)
        return None if info is None or is_relayed(info.address) else info.address

    def _refusal(self, peer: PeerId) -> str:
        now = trio.current_time()
        while self._asked and next(iter(self._asked.values())) + DIAL_BACK_EVERY_S <= now:
            self._asked.popitem(last=False)
        if peer in self._asked:
            return f"asked again too soon: once in {DIAL_BACK_EVERY_S:g} s"
        if self._working >= MAX_DIAL_BACKS or len(self._asked) >= MAX_DIAL_BACK_ASKERS:
            return "too many ask at once; try again later"
        self._asked[peer] = now
        return ""

    async def _try_all(
        self, peer: PeerId, addresses: Sequence[Multiaddr], seen: Multiaddr | None
    ) -> list[Tried]:
        tried: dict[Multiaddr, Tried] = {}

        async def look(address: Multiaddr) -> None:
            outcome, detail = DialResult.REACHED, ""
            if seen is None:
                outcome, detail = DialResult.SKIPPED, "its connection is relayed"
            elif not may_dial(address, seen):
                outcome, detail = DialResult.SKIPPED, "another place than where it connects from"
            else:
                try:
                    await self._backend.probe(address, peer)
                except DialError as error:
                    outcome, detail = DialResult.FAILED, str(error)[:MAX_DETAIL]
            tried[address] = Tried(address=address, outcome=outcome, detail=detail)

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(look, address)
        return [tried[address] for address in addresses]


def may_dial(address: Multiaddr, seen: Multiaddr) -> bool:
    """Return True if a peer at `seen` may have `address` dialled.

    It has to be the peer's own IP address, over TCP. A peer at a private address may also name
    other private ones, since machines have several, but none of the asked machine itself.
    """
    ip, own = _ip(address), _ip(seen)
    if ip is None or own is None or is_relayed(address):
        return False
    if ip == own:
        return True
    private = own.is_private and not own.is_loopback
    return private and ip.is_private and not (ip.is_loopback or ip.is_link_local)


def _ip(address: Multiaddr) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    parts = str(address).split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
        return None
    ip = ipaddress.ip_address(parts[2])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or (None if ip.is_unspecified or ip.is_multicast else ip)


async def _ask_one(backend: Transport, peer: PeerId) -> DialBack:
    """Return one peer's answer; raises DialBackRefused, and the errors of `open_stream`."""
    own = [each for each in backend.listen_addresses() if not is_relayed(each)][
        :MAX_CLAIMED_ADDRESSES
    ]
    with trio.move_on_after(ANSWER_S + REQUEST_S):
        async with backend.open_stream(peer, DIAL_BACK_PROTOCOL) as stream:
            await stream.write(msgpack.packb([each.to_bytes() for each in own]))
            await stream.end()
            raw = await _read_all(stream, MAX_DIAL_BACK_ANSWER_BYTES)
        return decode_answer(peer, raw)
    raise DialBackRefused(f"no answer within {ANSWER_S + REQUEST_S:g} s")


async def _read_all(stream: ProtocolStream, max_bytes: int) -> bytes:
    raw = b""
    while part := await stream.read(max_bytes + 1 - len(raw)):
        raw += part
        if len(raw) > max_bytes:
            raise DialBackRefused(f"{stream.peer} sent over {max_bytes} bytes")
    return raw


def _unpacked(raw: bytes) -> Any:
    return unpack(raw, max_bytes=MAX_DIAL_BACK_ANSWER_BYTES, max_values=_MAX_VALUES, max_depth=3)


@Boundary("the request is malformed", DialBackRefused)
def decode_request(raw: bytes) -> list[Multiaddr]:
    """Return the addresses of a request, each once; raises DialBackRefused."""
    rows = _unpacked(raw)
    if (
        not isinstance(rows, list)
        or len(rows) > MAX_CLAIMED_ADDRESSES
        or not all(isinstance(row, bytes) for row in rows)
    ):
        raise DialBackRefused("the request is malformed: expected a list of addresses")
    return list(dict.fromkeys(address_from_bytes(row) for row in rows))


@Boundary("the answer is malformed", DialBackRefused)
def decode_answer(peer: PeerId, raw: bytes) -> DialBack:
    """Return a decoded answer; raises DialBackRefused."""
    match _unpacked(raw):
        case [str() as refusal, str() as seen_at, list() as rows] if (
            len(rows) <= MAX_CLAIMED_ADDRESSES
        ):
            if refusal:
                raise DialBackRefused(clip(refusal, MAX_DETAIL))
            return DialBack(
                peer=peer, seen_at=clip(seen_at, MAX_DETAIL), tried=tuple(map(_row, rows))
            )
    raise DialBackRefused("the answer is malformed")


def _row(row: Any) -> Tried:
    match row:
        case [bytes() as address, str() as outcome, str() as detail] if outcome in list(DialResult):
            return Tried(
                address=address_from_bytes(address),
                outcome=DialResult(outcome),
                detail=clip(detail, MAX_DETAIL),
            )
    raise DialBackRefused("the answer is malformed")
