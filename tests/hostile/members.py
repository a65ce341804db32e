"""Members that lie: a client that gives the server false weights, and one that plays the server."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import trio
from multiaddr import Multiaddr

from bbnode.ir import codec, keys, types
from bbnode.ir.address import peer_of_address
from bbnode.ir.envelope import CorrelationKind, WireEnvelope, decode_envelope
from bbnode.ir.values import Composite, Metadata, Value, type_of
from bbnode.transport.base import ConnectionOpened, EnvelopeReceived, Hello
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests import protos
from tests.hostile.stranger import envelope, identity_of

# Names the artifact of the network that is attacked.
ARTIFACT_VARIABLE = "BBNODE_TEST_ARTIFACT"
# Seeds of the identities: tests know who was refused.
LYING_CLIENT, FALSE_SERVER = 701, 702
TIMES = 5


def site_of(op_type: str) -> int:
    """The one site of a kind of receiver in the program."""
    model = onnx.load(Path(os.environ[ARTIFACT_VARIABLE]))
    (site,) = {
        int(protos.get_meta(node, keys.SITE_ID_KEY) or "0")
        for function in model.functions
        for node in function.node
        if protos.is_wire(node, op_type)
    }
    return site


def weights(value: float, size: int = 4) -> np.ndarray:
    return np.full(size, value, np.float32)


def said(tensor: Value, **metadata: object) -> Composite:
    return Composite((tensor, Metadata({"num_samples": 1, "loss": 0.0, **metadata})))


# What a lying client answers, one a round, and what is said of it then.
LIES: Mapping[str, tuple[Callable[[], Value], str]] = {
    "samples": (lambda: said(weights(7), num_samples=10**9), "num_samples is 1000000000"),
    "huge": (lambda: said(weights(3e38)), "max_abs"),
    "nan": (lambda: said(weights(math.nan)), "NaN or infinity"),
    "loss": (lambda: said(weights(7), loss=1e308), "loss is 1e+308"),
    "nothing": (lambda: Composite(()), "not a composite"),
    "shape": (lambda: said(weights(7, 3)), "the shape [3]"),
}


@asynccontextmanager
async def member(address: Multiaddr, seed: int, **hello: Any) -> AsyncIterator[Libp2pTransport]:
    """A peer that keeps our protocol, connected; its events are the attack's to read."""
    backend = Libp2pTransport(identity_of(seed), listen=[], hello=Hello(**hello))
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        backend.keep_connected(peer_of_address(address), [address])
        while not isinstance(await backend.events.receive(), ConnectionOpened):
            pass
        yield backend
        # What was sent has been taken.
        await backend._table.session(peer_of_address(address)).queue.wait_idle()
        nursery.cancel_scope.cancel()


async def lying_client(address: Multiaddr) -> None:
    """Be asked with the others, and answer with one lie after another."""
    answers_at = site_of(keys.OP_RECV_RESP_BATCHED)
    identity = identity_of(LYING_CLIENT)
    lies = [make for make, _ in LIES.values()]
    async with member(address, LYING_CLIENT, classes=("client",)) as backend:
        while lies:
            event = await backend.events.receive()
            if not isinstance(event, EnvelopeReceived):
                continue
            asked: WireEnvelope = decode_envelope(event.data, max_bytes=len(event.data))
            if asked.correlation.kind is not CorrelationKind.REQUEST:
                continue
            lie = lies.pop(0)()
            made = envelope(
                identity,
                answers_at,
                codec.encode_value(lie),
                type_of(lie).wire_hash,
                kind=CorrelationKind.RESPONSE,
                wire_req_id=asked.correlation.wire_req_id,
            )
            backend.send(event.peer, made, tag=0)


async def false_server(address: Multiaddr) -> None:
    """Send weights to a client's site as the server does, though this is no server."""
    site = site_of(keys.OP_RECV_REQ)
    identity = identity_of(FALSE_SERVER)
    value = weights(99)
    async with member(address, FALSE_SERVER, classes=("client",)) as backend:
        for number in range(TIMES):
            made = envelope(
                identity,
                site,
                codec.encode_value(value),
                types.TENSOR_FLOAT.wire_hash,
                kind=CorrelationKind.REQUEST,
                wire_req_id=1 + number,
            )
            backend.send(peer_of_address(address), made, tag=0)
