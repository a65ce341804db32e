"""Steps as plain data, and a digest of what a poll said.

Rule: equal steps give equal data on every machine. What only means something inside of one
process (the function of a RunTask) is left out; a value that no codec knows counts by its type.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
from multiaddr import Multiaddr

from bbnode.engine import steps
from bbnode.ir import codec
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import type_of

DIGEST_BYTES = 16  # of an honest log: only to tell difference from sameness


def steps_digest(made: Sequence[steps.Step]) -> bytes:
    """BLAKE2b over the plain data of all steps of a poll, in order."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for step in made:
        state.update(msgpack.packb(plain_step(step), default=str))
    return state.digest()


def plain_step(step: steps.Step) -> list[Any]:
    """[class, [field, value]…]."""
    if isinstance(step, steps.SendEnvelope):
        addresses = [bytes(address.to_bytes()) for address in step.addresses]
        return ["SendEnvelope", step.peer.to_bytes(), addresses, b"".join(step.parts), step.tag]
    fields = [
        [field.name, _plain(getattr(step, field.name))]
        for field in dataclasses.fields(step)
        if not (isinstance(step, steps.RunTask) and field.name == "fn")
    ]
    return [type(step).__name__, *fields]


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, PeerId):
        return value.to_bytes()
    if isinstance(value, Multiaddr):
        return bytes(value.to_bytes())
    if isinstance(value, Mapping):
        return [[str(key), _plain(item)] for key, item in value.items()]
    if type(value) in (tuple, list):
        return [_plain(item) for item in value]
    try:
        return [type_of(value).id, codec.encode_value(value)]
    except (BbnodeError, ValueError, TypeError, OverflowError):
        return f"a {type(value).__qualname__}"
