"""The checks of what a peer says to a DHT: questions, answers, and each entry of an answer.

Rule: one bad entry costs its sender a fault, and itself; the rest of the answer counts. What is
handed on has no record left that KadDHT would have to verify again.
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
    """Reads messages of peers, keeps what is sound of them, and blames who sent the rest."""

    def __init__(self, setup: RoutingSetup, store: KnownPeers, counts: Counter[str]) -> None:
        """`store` gets the addresses that peers have signed."""
        self._setup = setup
        self._store = store
        self._counts = counts
        self._signed = SignedAddresses(store)
        self.providers: Providers
        # Who gave an address that the peer there has not signed; the newest last.
        self.told: OrderedDict[ID, dict[Multiaddr, PeerId]] = OrderedDict()

    def blame(self, peer: PeerId, fault: RoutingFault) -> None:
        """Count a fault, and report it."""
        self._counts[f"fault.{fault.value}"] += 1
        self._setup.on_fault(peer, fault)

    def question(self, raw: bytes, sender: ID, way: Multiaddr) -> bytes:
        """Return a peer's message for KadDHT; raises RoutingRefused."""
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
        """Return what is sound of a peer's answer; raises RoutingRefused.

        One bad entry costs its sender a fault, and itself; the others count.
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
            # Of a quarter of a million entries none is made that is not looked at.
            first = entries[:most]
            message.ClearField(name)
            sound = [each for each in first if self._is_sound(each, responder, way)]
            getattr(message, name).extend(sound)
        return message.SerializeToString()

    def _is_sound(self, entry: Message.Peer, responder: ID, way: Multiaddr) -> bool:
        """Clean one entry of an answer; return False if nothing is left of it."""
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
        """Take a record that `peer` has signed off a message; return True if there is one."""
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
        """Leave the addresses in an entry that may be dialled; raises RoutingRefused."""
        if signed or self._store.get_peer_record(peer) is not None:
            # What the peer has signed itself stands above what others say.
            found: Sequence[Multiaddr] = self._store.addrs_or_none(peer) or ()
        else:
            named = _addresses(entry.addrs[:MAX_KNOWN_ADDRESSES], ours(peer))
            found = [without_peer(each) for each in dialable(named, seen=way, good=True)]
            if told_by is not None and found:
                self._note(peer, found, told_by)
        entry.ClearField("addrs")
        entry.addrs.extend(each.to_bytes() for each in found)

    def _note(self, peer: ID, found: Iterable[Multiaddr], told_by: PeerId) -> None:
        told = self.told.setdefault(peer, {})
        self.told.move_to_end(peer)
        for each in found:
            told.setdefault(each, told_by)
        known = self._store.addrs_or_none(peer) or ()
        for each in list(told):
            if len(told) > MAX_KEY_PROVIDERS and each not in known:
                del told[each]
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
    found = []
    for each in raw:
        try:
            address = address_from_bytes(each)
        except DecodeError:
            # Of a kind that only others know.
            continue
        if named_peer(address) not in (None, peer):
            raise RoutingRefused(RoutingFault.CONTRADICTION, f"{address} is not one of {peer}")
        found.append(address)
    return found
