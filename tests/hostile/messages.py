"""A client that answers what it is asked with payloads that are made to hurt, and then rightly."""

from __future__ import annotations

import os
import struct

import onnx
import trio
from multiaddr import Multiaddr

from bbnode.daemon.artifacts.artifact import parse_artifact
from bbnode.ir import codec, keys, types
from bbnode.ir.address import parse_site_suffix, peer_of_address
from bbnode.ir.envelope import CorrelationKind, WireEnvelope, decode_envelope
from bbnode.ir.values import Composite, Metadata
from bbnode.transport.base import EnvelopeReceived, Hello, TransportEvent
from tests import protos
from tests.hostile.payloads import Payload, killers, large
from tests.hostile.stranger import envelope, identity_of, liar

# The artifact of the network, which any stranger to an open one can fetch.
ARTIFACT_VARIABLE = "BBNODE_TEST_HOSTILE_ARTIFACT"
_SEED = 41
# Of one liar: a few more would be a cut, and nothing behind it would be looked at.
_AT_ONCE = 8
# That each liar answers rightly.
_REQUESTS = 3


def liar_ids() -> set[str]:
    """The PeerIds of the clients that lie."""
    return {str(identity_of(_SEED + n).peer_id) for n in range(len(_lies()))}


def _lies() -> list[list[Payload]]:
    """All payloads that are no answer, by who sends them."""
    # What is a value of the type that the program answers with would be taken as the answer.
    bad = [p for p in [*killers(), *large()] if p.refused]
    bad = [*map(_in_a_composite, bad), *bad]
    return [bad[at : at + _AT_ONCE] for at in range(0, len(bad), _AT_ONCE)]


async def bad_answers(address: Multiaddr) -> None:
    """One client after the other: some of the payloads as answers, and the right one behind."""
    data = await trio.Path(os.environ[ARTIFACT_VARIABLE]).read_bytes()
    for number, bad in enumerate(_lies()):
        await _answer_badly(address, _SEED + number, data, bad)


async def _answer_badly(address: Multiaddr, seed: int, data: bytes, bad: list[Payload]) -> None:
    site = _answers_at(data)
    sends, takes = trio.open_memory_channel[WireEnvelope](64)

    def heard(event: TransportEvent) -> None:
        if isinstance(event, EnvelopeReceived):
            came = decode_envelope(event.data)
            if came.correlation.kind is CorrelationKind.REQUEST:
                sends.send_nowait(came)

    sha256 = parse_artifact(data, "artifact").sha256
    hello = Hello(artifact_sha256=sha256, classes=("client",))
    peer = peer_of_address(address)
    async with liar(address, seed, heard=heard, hello=hello) as (backend, identity):
        # More than one: on a busy machine the first may end before the right answer has come.
        for turn in range(_REQUESTS):
            request = await takes.receive()

            def answer(payload: bytes, type_hash: int, to: WireEnvelope = request) -> None:
                made = envelope(
                    identity, site, payload, type_hash,
                    kind=CorrelationKind.RESPONSE, wire_req_id=to.correlation.wire_req_id,
                )  # fmt: skip
                backend.send(peer, [made], tag=0)

            for each in bad if turn == 0 else ():
                answer(each.data, each.node.wire_hash)
                await trio.lowlevel.checkpoint()
            weights = codec.decode_value(types.TENSOR_FLOAT, request.fills[0].payload)
            right = Composite((weights + 1, Metadata(num_samples=1, loss=0.0, steps=1)))
            answer(codec.encode_value(right), types.COMPOSITE.wire_hash)
        await takes.receive()  # the node has all of it


def _in_a_composite(bad: Payload) -> Payload:
    """As part of what the program answers with."""
    head = struct.pack("<IQQ", 1, bad.node.wire_hash, len(bad.data))
    return Payload(bad.name, types.COMPOSITE, head + bad.data)


def _answers_at(data: bytes) -> int:
    """The site where a client's answers come in."""
    model = onnx.load_model_from_string(data)
    for function in model.functions:
        for node in function.node:
            if protos.is_wire(node, keys.OP_SEND_RESP):
                for attribute in node.attribute:
                    if attribute.name.startswith(keys.DEST_SUFFIX_PREFIX):
                        site = parse_site_suffix(protos.octets(attribute))
                        assert site is not None
                        return site
    raise AssertionError("the program answers nothing")
