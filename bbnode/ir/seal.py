"""The seal: a digest inside a compiled model that shows whether it was changed since.

Rule: the digest is the sha256 of the model's deterministic protobuf bytes without the seal itself.
It protects against damage and hand edits, not against forgery: to verify where a file comes from,
compare the digest of the whole file with a trusted one.
"""

from __future__ import annotations

import hashlib

from onnx import ModelProto

from bbnode.ir import keys


def seal(model: ModelProto) -> None:
    """Write the seal of the model as it is now; sealing again replaces it."""
    _take_seal(model)
    model.metadata_props.add(key=keys.SEAL_KEY, value=_digest(model))


def is_intact(model: ModelProto) -> bool:
    """Return True if the model has a seal and was not changed since."""
    bare = ModelProto()
    bare.CopyFrom(model)
    found = _take_seal(bare)
    return found is not None and found == _digest(bare)


def _take_seal(model: ModelProto) -> str | None:
    found = None
    for index in reversed(range(len(model.metadata_props))):
        if model.metadata_props[index].key == keys.SEAL_KEY:
            found = model.metadata_props.pop(index).value
    return found


def _digest(model: ModelProto) -> str:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
