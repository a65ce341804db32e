"""The seal: a digest inside a compiled model that shows whether it was changed since.

Rule: the digest is the sha256 of the model's deterministic protobuf bytes without the seal
itself. It guards against damage and hand edits; who must know where a file comes from
compares the digest of the whole file with one that he trusts.
"""

from __future__ import annotations

import hashlib

from onnx import ModelProto

from bbnode.ir import keys, protos


def seal(model: ModelProto) -> None:
    """Write the seal of the model as it is now; sealing again replaces it."""
    protos.del_meta(model, keys.SEAL_KEY)
    protos.set_meta(model, keys.SEAL_KEY, _digest(model))


def is_intact(model: ModelProto) -> bool:
    """Whether the model carries a seal, and is what was sealed."""
    found = protos.get_meta(model, keys.SEAL_KEY)
    if found is None:
        return False
    bare = ModelProto()
    bare.CopyFrom(model)
    protos.del_meta(bare, keys.SEAL_KEY)
    return found == _digest(bare)


def _digest(model: ModelProto) -> str:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
