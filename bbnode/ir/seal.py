"""The seal: a digest inside a compiled model that reveals later changes.

Rule: the digest is the sha256 of the model's deterministic protobuf bytes without the seal itself.
It protects against damage and hand edits, not against forgery: to verify where a file comes from,
compare the digest of the whole file with a trusted one.

The bytes are produced node by node, since protobuf encodes a large message into a buffer that it
doubles and copies, which takes five times its size of fresh memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from onnx import FunctionProto, ModelProto

from bbnode.ir import keys
from bbnode.ir.encoding import encoded, head_of_field
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import add_functions, has_unknown_fields
from bbnode.ir.weightless import copy_field

# Message types that are encoded member by member -> the field of the members.
_MEMBERS: dict[type, str] = {ModelProto: "functions", FunctionProto: "node"}


def sealed(program: Program) -> ModelProto:
    """Return a program as a model with its seal. Raises ProgramTooLarge."""
    model, encoders = encoded(program, program.functions)
    _take_seal(model)
    number, front, back = _around(model, "functions")
    digest = hashlib.sha256(front)

    def hashed() -> Iterator[list[bytes]]:
        for encoder in encoders:
            pieces = list(encoder)
            digest.update(head_of_field(number, sum(map(len, pieces))))
            for piece in pieces:
                digest.update(piece)
            yield pieces

    add_functions(model, hashed())
    digest.update(back)
    model.metadata_props.add(key=keys.SEAL_KEY, value=digest.hexdigest())
    return model


def seal(model: ModelProto) -> None:
    """Write the seal of the model in its present state; an existing seal is replaced."""
    _take_seal(model)
    model.metadata_props.add(key=keys.SEAL_KEY, value=_digest(model))


def is_intact(model: ModelProto) -> bool:
    """Return True if the model has a seal and was not changed since."""
    seals = [entry.value for entry in model.metadata_props if entry.key == keys.SEAL_KEY]
    return bool(seals) and seals[0] == _digest(model)


def _take_seal(model: ModelProto) -> None:
    for index in reversed(range(len(model.metadata_props))):
        if model.metadata_props[index].key == keys.SEAL_KEY:
            del model.metadata_props[index]


def _digest(model: ModelProto) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(model):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(message: Message) -> Iterator[bytes]:
    """Yield the deterministic bytes of a message, without a seal."""
    name = _MEMBERS.get(type(message))
    if name is None or has_unknown_fields(message):  # those stand at its end
        if isinstance(message, ModelProto):
            bare = ModelProto()
            bare.CopyFrom(message)
            _take_seal(bare)
            message = bare
        yield message.SerializeToString(deterministic=True)
        return
    number, front, back = _around(message, name)
    yield front
    for member in getattr(message, name):
        pieces = list(_pieces(member))
        yield head_of_field(number, sum(map(len, pieces)))
        yield from pieces
    yield back


def _around(message: Message, name: str) -> tuple[int, bytes, bytes]:
    """Return the number of a field, and the bytes of the fields before and after it."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    around: tuple[Any, Any] = type(message)(), type(message)()
    for field, value in message.ListFields():
        if field.number != number:
            copy_field(field.name, value, around[field.number > number])
    if isinstance(around[0], ModelProto):
        _take_seal(around[0])
    front, back = (each.SerializeToString(deterministic=True) for each in around)
    return number, front, back
