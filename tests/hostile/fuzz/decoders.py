"""Every decoder of what a peer sent: how to call it, what it takes, and what it may raise.

Rule: who adds a decoder adds it here; `tests/test_untrusted.py` looks for those that are missing.
Inputs that once did harm are files in `corpus/<decoder>/`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import create_signed_peer_record

from bbnode.access import exchange, release, revocation, sealed, statement, ticket
from bbnode.access.errors import AccessRefused, Refusal
from bbnode.access.keys import SigningKey
from bbnode.components.peer_registry import messages as registry
from bbnode.components.selectors import hyparview, random_walk
from bbnode.components.selectors.cyclon import AgedRecord, Exchange
from bbnode.components.selectors.records import PeerRecord
from bbnode.components.wire_records import UnusableMessage
from bbnode.daemon.network import autonat, dial_back, introductions
from bbnode.ir import codec, types, values
from bbnode.ir.address import (
    address_from_bytes,
    parse_address,
    parse_component_suffix,
    parse_site_suffix,
    site_suffix,
)
from bbnode.ir.crossing import Crossing, decode_crossings, encode_crossings
from bbnode.ir.envelope import (
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    decode_envelope,
    encode_envelope,
    varint,
)
from bbnode.ir.errors import DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal, decode_refusal, encode_refusal
from bbnode.ir.types import TypeNode
from bbnode.transport import mdns
from bbnode.transport.base import Hello
from bbnode.transport.errors import (
    FrameError,
    HandshakeError,
    HelloError,
    NegotiationError,
    StreamBrokenError,
)
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p import handshake, keys, negotiation
from bbnode.transport.libp2p.py_libp2p.dht.checks import Checks
from bbnode.transport.libp2p.py_libp2p.dht.stores import KnownPeers, Providers
from bbnode.transport.libp2p.relay import messages as relay
from bbnode.transport.libp2p.relay import punching
from bbnode.transport.links.framing import FrameDecoder, FrameType, Lane, encode_header
from bbnode.transport.links.hello import decode_hello, encode_hello
from bbnode.transport.routing import RoutingRefused, RoutingSetup, dht_protocol
from tests.transport.peer_keys import key_pairs

CORPUS = Path(__file__).with_name("corpus")

_KEY = SigningKey.from_seed(b"\x01" * 32)
_PEER = PeerId.from_seed(1)
_ADDRESS = parse_address(f"/ip4/10.0.0.1/tcp/4001/p2p/{_PEER}")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, encodings that it takes, and all that it may raise."""

    call: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    raises: tuple[type[Exception], ...] = (DecodeError,)


def _text(call: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: call(data.decode("utf-8", "replace"))


def _value(node: TypeNode) -> Callable[[bytes], object]:
    return lambda data: codec.decode_value(node, data)


class _Stream:
    """A stream on which these bytes come."""

    def __init__(self, data: bytes) -> None:
        self.peer = _PEER
        self._data = data

    async def read(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        part, self._data = self._data[:most], self._data[most:]
        return part


def _read(function: Callable[[Any], Any]) -> Callable[[bytes], object]:
    return lambda data: trio.run(function, _Stream(data))


def _frames(data: bytes) -> object:
    lane = Lane.BULK if data[:1] == b"\x07" else Lane.CONTROL
    return list(FrameDecoder(lane).feed(data))


def _handshake_payload(data: bytes) -> object:
    return handshake.decode_payload(data, _NOISE.public)


def _first_message(data: bytes) -> None:
    handshake.NoiseHandshake(_NOISE, initiator=False).read(data)


def _choice(data: bytes) -> object:
    choice = negotiation.Choice(("/a/1", "/b/1"))
    return choice.take(data), choice.rest()


def _proposal(data: bytes) -> object:
    proposal = negotiation.Proposal("/a/1")
    proposal.take(data)
    return proposal.rest()


def _component(data: bytes) -> object:
    return parse_component_suffix(data), parse_site_suffix(data)


_VALUES: tuple[values.Value, ...] = (
    values.TRIGGER,
    _PEER,
    _ADDRESS,
    b"bytes",
    values.U64(7),
    values.RequestId(1 << 40),
    values.WireRequestId((1 << 64) - 1),
    values.CommandId(3),
    values.Timestamp(4),
    values.EventKind(5),
    values.CorrelationToken(6),
    values.Metadata(num_samples=1, loss=0.5, name="x", raw=b"y", flag=True),
    values.PeerIdVec((_PEER, PeerId.from_seed(2))),
    values.AddressVec((_ADDRESS, parse_address("/ip4/10.0.0.1/tcp/1"))),
    values.SearchResults([1, 2], [0.5, 1.5], [values.Metadata(a=1), values.Metadata()]),
    values.Composite((np.ones(3, np.float32), values.Metadata(n=1), values.Composite((b"a",)))),
    values.ResponseBatch(
        responses=((_PEER, np.ones(2, np.float32)),), missing=(PeerId.from_seed(3),)
    ),
    np.zeros((2, 3), np.float32),
    np.array([True, False]),
    np.arange(4, dtype=np.int64),
)
_CROSSINGS = encode_crossings(
    [
        Crossing(
            site=7, sends=True, takes=True, kind="request", port="ask", receiver="client",
            type="Tensor.FLOAT",
        )
    ]
)  # fmt: skip
_ENVELOPE = b"".join(
    encode_envelope(
        WireEnvelope(
            fills=(SlotFill(dest_suffix=site_suffix(5), payload=b"abc", type_hash=7),) * 2,
            correlation=WireCorrelation(wire_req_id=1 << 60),
            src_peer_bytes=_PEER.to_bytes(),
            src_peer_addresses=(_ADDRESS.to_bytes(),),
        )
    )
)
_TICKET = ticket.make_ticket(
    _KEY,
    addresses=[parse_address("/ip4/10.0.0.1/tcp/4001")],
    artifact_sha256=b"\x02" * 32,
    target="client",
    expires_s=2_000_000_000,
    nonce=b"\x03" * 16,
)
_MEMBER = statement.grant(
    _KEY, member=_PEER, not_before_s=0, expires_s=2_000_000_000, serial=1, classes=["client"]
)
_REVOKED = revocation.revoke(_KEY, None, serials=[1, 2], peers=[_PEER])
_RELEASE = release.sign_release(_KEY, "ab" * 32, number=7)
_LEDGER = ticket.Ledger(
    tickets={b"\x03" * 16: ticket.Redeemed(expires_s=2_000_000_000, peers=(_PEER,))}
)
_ROW = registry.Row(peer=_PEER, as_class="client", addresses=(_ADDRESS,), gone=False)
_COOKIE = registry.Cookie(life=1, version=2, since=3)
_NOISE = handshake.NoiseKeys(Identity.from_seed(b"\x01" * 32))
_PROPOSED = negotiation.Proposal("/a/1").opening
_AUTONAT = keys.encode_field(
    2,
    keys.encode_field(
        1, keys.encode_field(1, _PEER.to_bytes()) + keys.encode_field(2, _ADDRESS.to_bytes())
    ),
)
_DHT_PEER = ID(_PEER.to_bytes())
_DHT_RECORD = create_signed_peer_record(
    ID(Identity.from_seed(b"\x02" * 32).peer_id.to_bytes()),
    [parse_address("/ip4/10.0.0.2/tcp/4001")],
    create_new_key_pair(b"\x02" * 32).private_key,
).marshal_envelope()
_DHT_ENTRY = Message.Peer(
    id=Identity.from_seed(b"\x02" * 32).peer_id.to_bytes(),
    addrs=[parse_address("/ip4/10.0.0.2/tcp/4001").to_bytes()],
    signedRecord=_DHT_RECORD,
)
_DHT_QUESTION = Message(
    type=Message.MessageType.GET_PROVIDERS, key=b"\x12\x20" + b"k" * 32
).SerializeToString()
_DHT_ANSWER = Message(
    type=Message.MessageType.GET_PROVIDERS,
    key=b"\x12\x20" + b"k" * 32,
    closerPeers=[_DHT_ENTRY],
    providerPeers=[_DHT_ENTRY],
).SerializeToString()


def _dht() -> Checks:
    """The checks of a node that knows nobody."""
    swarm: Any = SimpleNamespace(connections={}, peerstore=None)
    own = ID(PeerId.from_seed(9).to_bytes())
    store = KnownPeers(own, swarm, lambda _peer: (), dht_protocol(None))
    setup = RoutingSetup(
        network=None,
        serves=True,
        admits=lambda _peer: True,
        may_dial=lambda _peer: True,
        on_fault=lambda _peer, _fault: None,
    )
    checks = Checks(setup, store, Counter())
    host: Any = SimpleNamespace(get_id=lambda: own, get_addrs=list)
    checks.providers = Providers(host, None, lambda: 0.0)
    return checks


_ACCESS = (AccessRefused,)
_RELAY_PEER = keys.encode_field(1, _PEER.to_bytes())


def _sized(*fields: tuple[int, int | bytes]) -> bytes:
    """A message to a relay, or of one, with its length."""
    body = b"".join(keys.encode_field(*each) for each in fields)
    return varint(len(body)) + body


_RELAY = (relay.RelayMessageError, StreamBrokenError)

DECODERS: dict[str, Decoder] = {
    **{
        f"value_{node.name}": Decoder(
            _value(node),
            tuple(codec.encode_value(v) for v in _VALUES if values.type_of(v) is node),
        )
        for node in types.registered_types()
        if node.is_leaf and node.name[0] != "_"
    },
    "envelope": Decoder(decode_envelope, (_ENVELOPE,)),
    "address": Decoder(address_from_bytes, (_ADDRESS.to_bytes(),)),
    "address_text": Decoder(_text(parse_address), (str(_ADDRESS).encode(),)),
    "suffix": Decoder(_component, (site_suffix(5),), ()),
    "peer": Decoder(PeerId.from_bytes, (_PEER.to_bytes(),)),
    "peer_text": Decoder(_text(PeerId.parse), (str(_PEER).encode(),)),
    "crossings": Decoder(decode_crossings, (_CROSSINGS,)),
    "refusal": Decoder(
        decode_refusal,
        (encode_refusal(WireRefusal("DataUnavailable", "no data", "Train_0 (a.py:1)")),),
    ),
    "protobuf": Decoder(keys.decode_fields, (_NOISE.payload, keys.encode_field(1, 300))),
    "public_key": Decoder(
        keys.decode_public_key,
        tuple(encoded for encoded, _ in key_pairs().values()),
    ),
    "handshake_payload": Decoder(_handshake_payload, (_NOISE.payload,), (HandshakeError,)),
    "handshake_message": Decoder(
        _first_message, (_NOISE.public, _NOISE.public + bytes(200)), (HandshakeError,)
    ),
    "negotiation_choice": Decoder(
        _choice,
        (_PROPOSED + b"rest", _PROPOSED[:20] + negotiation.encode_message("ls")),
        (NegotiationError,),
    ),
    "negotiation_proposal": Decoder(_proposal, (_PROPOSED, _PROPOSED + b"x"), (NegotiationError,)),
    "hello": Decoder(
        decode_hello,
        (
            encode_hello(Hello(crossings=_CROSSINGS)),
            encode_hello(Hello(session_id="f" * 16)),
            encode_hello(
                Hello(
                    session_id="0" * 16, classes=("client",), listen_addresses=(_ADDRESS,),
                    credentials=b"abc",
                )
            ),
        ),
        (HelloError,),
    ),
    "frames": Decoder(
        _frames, (encode_header(FrameType.START, 0, 1), encode_header(FrameType.HELLO, 3) + b"abc"),
        (FrameError,),
    ),
    "relay_request": Decoder(
        _read(relay.read_request), (_sized((1, 0)), _sized((1, 1), (2, _RELAY_PEER))), _RELAY
    ),
    "relay_answer": Decoder(
        _read(relay.read_answer),
        (
            _sized((1, 2), (5, 204)),
            _sized(
                (1, 2),
                (3, keys.encode_field(1, 2**31) + keys.encode_field(2, _ADDRESS.to_bytes())),
                (4, keys.encode_field(1, 120) + keys.encode_field(2, 2**17)),
                (5, 100),
            ),
        ),
        _RELAY,
    ),
    "relay_offer": Decoder(
        _read(relay.read_offer), (_sized((1, 0), (2, _RELAY_PEER)),), _RELAY
    ),
    "relay_acceptance": Decoder(
        _read(relay.read_acceptance), (_sized((1, 1), (4, 100)),), _RELAY
    ),
    "punch_step": Decoder(
        _read(lambda stream: punching.read_step(stream, punching.PunchStep.CONNECT)),
        (_sized((1, 100)), _sized((1, 100), (2, _ADDRESS.to_bytes()))),
        _RELAY,
    ),
    "ticket": Decoder(_text(ticket.parse_ticket), (_TICKET.text.encode(),), _ACCESS),
    "ticket_bytes": Decoder(ticket.ticket_from_bytes, (_TICKET.raw,), _ACCESS),
    "membership": Decoder(
        lambda data: statement.open_membership(data, _KEY.peer_id, _PEER), (_MEMBER.raw,), _ACCESS
    ),
    "membership_peek": Decoder(statement.peek, (_MEMBER.raw,), _ACCESS),
    "revocations": Decoder(
        lambda data: revocation.open_revocations(data, _KEY.peer_id), (_REVOKED.raw,), _ACCESS
    ),
    "release": Decoder(
        lambda data: release.open_release(data, _KEY.peer_id, "ab" * 32), (_RELEASE.raw,), _ACCESS
    ),
    "release_text": Decoder(
        lambda data: release.release_from_text(data.decode("utf-8", "replace")),
        (_RELEASE.text.encode("ascii"),),
        _ACCESS,
    ),
    "ledger": Decoder(ticket.Ledger.from_bytes, (_LEDGER.to_bytes(),), _ACCESS),
    "sealed": Decoder(
        lambda data: sealed.unpack_list(ticket.TICKET, data), (_TICKET.raw,), _ACCESS
    ),
    "access_message": Decoder(
        exchange.decode_message,
        (
            exchange.encode_message(exchange.Redeem(ticket=_TICKET.raw)),
            exchange.encode_message(
                exchange.Member(membership=_MEMBER.raw, revocations=_REVOKED.raw)
            ),
            exchange.encode_message(exchange.Revocations(revocations=_REVOKED.raw)),
            exchange.encode_message(exchange.Refused(reason=Refusal.EXPIRED, detail="too late")),
        ),
        _ACCESS,
    ),
    "registry_announcement": Decoder(
        registry.Announcement.decode,
        (registry.Announcement(as_class="client", addresses=(_ADDRESS,)).encode(),),
        (UnusableMessage,),
    ),
    "registry_handshake": Decoder(
        registry.Handshake.decode,
        (registry.Handshake(ttl_ns=1, heartbeat_ns=2, addresses=(_ADDRESS,)).encode(),),
        (UnusableMessage,),
    ),
    "registry_read": Decoder(
        registry.ReadRequest.decode,
        (registry.ReadRequest(cookie=_COOKIE, n=3).encode(),),
        (UnusableMessage,),
    ),
    "registry_page": Decoder(
        registry.Page.decode,
        (registry.Page(
            cookie=_COOKIE, ttl_ns=5, reset=True, more=False, rows=(_ROW, _ROW)
        ).encode(),),
        (UnusableMessage,),
    ),
    "cyclon_exchange": Decoder(
        Exchange.decode,
        (Exchange(
            addresses=(_ADDRESS,),
            neighbours=(AgedRecord(peer=_PEER, age=3, addresses=(_ADDRESS,)),),
        ).encode(),),
        (UnusableMessage,),
    ),
    "hyparview_request": Decoder(
        hyparview.NeighbourRequest.decode,
        (hyparview.NeighbourRequest(addresses=(_ADDRESS,), urgent=True).encode(),),
        (UnusableMessage,),
    ),
    "hyparview_shuffle": Decoder(
        hyparview.PassiveShuffle.decode,
        (hyparview.PassiveShuffle(
            peer=_PEER, addresses=(_ADDRESS,), hops=3, number=7, offered=(PeerRecord(peer=_PEER),)
        ).encode(),),
        (UnusableMessage,),
    ),
    "walk_step": Decoder(
        random_walk.WalkStep.decode,
        (random_walk.WalkStep(
            peer=_PEER, addresses=(_ADDRESS,), number=7, hops=3, degree=2
        ).encode(),),
        (UnusableMessage,),
    ),
    "dial_back_request": Decoder(
        dial_back.decode_request,
        (msgpack.packb([_ADDRESS.to_bytes()]),),
        (dial_back.DialBackRefused,),
    ),
    "dial_back_answer": Decoder(
        lambda data: dial_back.decode_answer(_PEER, data),
        (msgpack.packb(["", str(_ADDRESS), [[_ADDRESS.to_bytes(), "reached", ""]]]),),
        (dial_back.DialBackRefused,),
    ),
    "autonat": Decoder(
        autonat.decode_request,
        (_AUTONAT,),
        (autonat.NotAutonat,),
    ),
    "dht_question": Decoder(
        lambda data: _dht().question(data, _DHT_PEER, _ADDRESS),
        (_DHT_QUESTION,),
        (RoutingRefused,),
    ),
    "dht_answer": Decoder(
        lambda data: _dht().answer(data, _DHT_QUESTION, _DHT_PEER, _ADDRESS),
        (_DHT_ANSWER,),
        (RoutingRefused,),
    ),
    "introductions": Decoder(
        introductions.decode_introductions,
        (msgpack.packb(["", [[_PEER.to_bytes(), [_ADDRESS.to_bytes()]]]]),),
        (introductions.NotIntroduced,),
    ),
    "mdns": Decoder(mdns.decode_txt, (f"\x48dnsaddr={_ADDRESS}".encode(),), ()),
}  # fmt: skip


def corpus(name: str) -> list[bytes]:
    """The inputs of past faults of a decoder."""
    folder = CORPUS / name
    return [file.read_bytes() for file in sorted(folder.iterdir())] if folder.is_dir() else []


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One small change: bytes flipped, cut, inserted or repeated, spliced, or wrapped in lists."""
    at = draw.randint(0, len(data))
    kind = draw.randrange(7)
    if kind == 0 and data:
        at = draw.randrange(len(data))
        return data[:at] + bytes((data[at] ^ (1 << draw.randrange(8)),)) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + draw.randbytes(draw.randint(1, 4)) + data[at:]
    if kind == 3:
        return data[:at] + other[draw.randint(0, len(other)) :]
    if kind == 4:
        return data[:at] + b"\x91" * draw.choice((1, 20, 1000)) + data[at:]
    if kind == 5:
        return data[:at] + data[at : at + 8] * draw.choice((2, 100)) + data[at + 8 :]
    # A length or a number at its end.
    return data[:at] + draw.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * 4 + data[at + 4 :]


def check(decoder: Decoder, data: bytes) -> None:
    """Decode, and let pass what the decoder may raise; anything else is a fault of it."""
    try:
        decoder.call(data)
    except decoder.raises as error:
        said = str(error)
    else:
        return
    assert len(said) < 2000, "an error shows too much of what a peer sent"
