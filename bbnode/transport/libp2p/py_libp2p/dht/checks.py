"""The checks of DHT messages: queries, answers, and each entry of an answer.

Rule: an invalid entry is dropped and is one fault of its sender; the rest of the answer counts.
Records are verified and removed here, so that KadDHT need not verify them again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bbnode.ir.address import address_from_bytes, named_peer
from bbnode.ir.caps import (
    MAX_CLOSER_PEERS,
    MAX_KEY_PROVIDERS,
    MAX_KNOWN_ADDRESSES,
    MAX_KNOWN_PEERS,
    MAX_ROUTING_KEY_BYTES,
)
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.hints import dialable
from bbnode.transport.libp2p.py_libp2p.dht.peers import ours
from bbnode.transport.libp2p.py_libp2p.dht.stores import KnownPeers, Providers
from bbnode.transport.libp2p.py_libp2p.records import RecordForged, RecordStale, SignedAddresses
from bbnode.transport.libp2p.py_libp2p.swarm import without_peer
from bbnode.transport.routing import (
    RoutingFault,
    RoutingRefused,
    RoutingSetup,
)

_TYPES: Final = Message.MessageType
_KEYLESS: Final = frozenset({_TYPES.PING})


class Checks:
    """Filters messages of peers: keeps the valid parts and reports the senders of the others."""

    def __init__(self, setup: RoutingSetup, store: KnownPeers, counts: Counter[str]) -> None:
        """Create the checks; `store` receives the addresses that peers have signed."""
        self._setup = setup
        self._store = store
        self._counts = counts
        self._signed = SignedAddresses(store)
        self.providers: Providers
        # Unsigned addresses -> the peer that gave them, by the peer they belong to; newest last.
        self.told: OrderedDict[ID, dict[Multiaddr, PeerId]] = OrderedDict()

    def blame(self, peer: PeerId, fault: RoutingFault) -> None:
        """Count and report a fault."""
        self._counts[f"fault.{fault.value}"] += 1
        self._setup.on_fault(peer, fault)

    def question(self, raw: bytes, sender: ID, way: Multiaddr) -> bytes:
        """Return a peer's query, checked, for KadDHT; raises RoutingRefused."""
        message = _parsed(raw)
        if len(message.key) > MAX_ROUTING_KEY_BYTES or (
            not message.key and message.type not in _KEYLESS
        ):
            raise RoutingRefused(RoutingFault.MALFORMED, f"a key of {len(message.key)} bytes")
        if message.type == _TYPES.PUT_VALUE:
            self._counts["values"] += 1
        self._take_record(message, "senderRecord", sender, way)
        message.ClearField("closerPeers")
        if message.type == _TYPES.ADD_PROVIDER:
            self._check_providers(message, sender, way)
        else:
            message.ClearField("providerPeers")
        return message.SerializeToString()

    def _check_providers(self, message: Message, sender: ID, way: Multiaddr) -> None:
        if len(message.providerPeers) > MAX_KEY_PROVIDERS:
            raise RoutingRefused(RoutingFault.FLOOD, f"{len(message.providerPeers)} providers")
        for entry in message.providerPeers:
            if entry.id != sender.to_bytes():
                raise RoutingRefused(RoutingFault.CONTRADICTION, "a provider is not the sender")
            self._take_record(entry, "signedRecord", sender, way)
            self._keep_addresses(entry, sender, way)
        if not self.providers.has_room(message.key, sender):
            raise RoutingRefused(RoutingFault.FLOOD, "more provider records than it may have here")

    def answer(self, raw: bytes, asked: bytes, responder: ID, way: Multiaddr) -> bytes:
        """Return the valid part of a peer's answer; raises RoutingRefused.

        An invalid entry is dropped and is one fault of its sender; the others count.
        """
        message, question = _parsed(raw), _parsed(asked)
        if message.type != question.type:
            raise RoutingRefused(RoutingFault.MALFORMED, "an answer to another question")
        if message.key and message.key != question.key:
            raise RoutingRefused(RoutingFault.CONTRADICTION, "an answer about another key")
        self._take_record(message, "senderRecord", responder, way)
        for name, most in (
            ("closerPeers", MAX_CLOSER_PEERS + 1),
            ("providerPeers", MAX_KEY_PROVIDERS),
        ):
            entries = getattr(message, name)
            if len(entries) > most:
                self.blame(ours(responder), RoutingFault.FLOOD)
            # Cut first: an answer may have a quarter of a million entries.
            first = entries[:most]
            message.ClearField(name)
            sound = [each for each in first if self._is_sound(each, responder, way)]
            getattr(message, name).extend(sound)
        return message.SerializeToString()

    def _is_sound(self, entry: Message.Peer, responder: ID, way: Multiaddr) -> bool:
        """Remove invalid parts of an entry; return False if nothing is left of it."""
        try:
            peer = PeerId.from_bytes(entry.id)
        except DecodeError:
            self.blame(ours(responder), RoutingFault.MALFORMED)
            return False
        try:
            named = ID(entry.id)
            if named == self._store.own or not self._setup.admits(peer):
                self._counts["dropped"] += 1
                return False
            signed = self._take_record(entry, "signedRecord", named, way)
            self._keep_addresses(entry, named, way, signed=signed, told_by=ours(responder))
        except RoutingRefused as error:
            self.blame(ours(responder), error.fault)
            return False
        return True

    def _take_record(self, message: Any, name: str, peer: ID, way: Multiaddr) -> bool:
        """Remove and store the record of `peer` in a message; return True if there was one."""
        if not message.HasField(name):
            return False
        raw = getattr(message, name)
        message.ClearField(name)
        try:
            self._signed.take(raw, peer, way)
        except RecordForged as error:
            raise RoutingRefused(RoutingFault.FORGED, str(error)) from error
        except RecordStale:
            self._counts["stale_records"] += 1
        return True

    def _keep_addresses(
        self,
        entry: Message.Peer,
        peer: ID,
        way: Multiaddr,
        *,
        signed: bool = False,
        told_by: PeerId | None = None,
    ) -> None:
        """Keep only the dialable addresses of an entry; raises RoutingRefused."""
        if signed or self._store.get_peer_record(peer) is not None:
            # Addresses that the peer has signed itself take precedence.
            dialable_: Sequence[Multiaddr] = self._store.addrs_or_none(peer) or ()
        else:
            named = _addresses(entry.addrs[:MAX_KNOWN_ADDRESSES], ours(peer))
            dialable_ = [without_peer(each) for each in dialable(named, seen=way, good=True)]
            if told_by is not None and dialable_:
                self._note(peer, dialable_, told_by)
        entry.ClearField("addrs")
        entry.addrs.extend(each.to_bytes() for each in dialable_)

    def _note(self, peer: ID, addresses: Iterable[Multiaddr], told_by: PeerId) -> None:
        sources = self.told.setdefault(peer, {})
        self.told.move_to_end(peer)
        for each in addresses:
            sources.setdefault(each, told_by)
        known = self._store.addrs_or_none(peer) or ()
        for each in list(sources):
            if len(sources) > MAX_KEY_PROVIDERS and each not in known:
                del sources[each]
        if len(self.told) > MAX_KNOWN_PEERS:
            self.told.popitem(last=False)


def _parsed(raw: bytes) -> Message:
    message = Message()
    try:
        message.ParseFromString(raw)
    except Exception as error:
        raise RoutingRefused(RoutingFault.MALFORMED, "no message of a DHT") from error
    return message


def _addresses(raw: Iterable[bytes], peer: PeerId) -> list[Multiaddr]:
    """Return the addresses among these bytes; raises RoutingRefused if one names another peer."""
    addresses = []
    for each in raw:
        try:
            address = address_from_bytes(each)
        except DecodeError:
            # An address of a kind that we do not know.
            continue
        if named_peer(address) not in (None, peer):
            raise RoutingRefused(RoutingFault.CONTRADICTION, f"{address} is not one of {peer}")
        addresses.append(address)
    return addresses
