"""A snapshot as an ONNX model: the artifact, with the state of a node beside it.

Rule: the model is the artifact with one initializer of bytes for the state of each component and
one for what is under way; nothing is lost on the way there and back, and ONNX tools open it. A node
itself writes and reads the bytes alone: they hold what changed, and a model would repeat the
program, weights and all, in every checkpoint.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from bbnode.engine.errors import SnapshotRefused
from bbnode.engine.snapshot.whole import parse, seal
from bbnode.ir import keys
from bbnode.ir.seal import is_intact
from bbnode.ir.seal import seal as seal_model


def snapshot_model(artifact: ModelProto, snapshot: bytes) -> ModelProto:
    """Return a model that holds an artifact and a snapshot of a node that runs it.

    Args:
        artifact: the compiled model; not changed.
        snapshot: what `Node.snapshot` returned.

    Raises SnapshotRefused when the bytes are no snapshot.
    """
    fields = parse(snapshot)
    model = ModelProto()
    model.CopyFrom(artifact)
    for row in fields["components"]:
        slot, _, state = row
        _add(model, keys.STATE_PREFIX + slot, state)
        row[2] = b""
    _add(model, keys.TRANSIENT_STATE, seal(fields))
    seal_model(model)
    return model


def opened_snapshot(model: ModelProto) -> tuple[ModelProto, bytes]:
    """Return the artifact and the snapshot that `snapshot_model` put together.

    Raises SnapshotRefused when the model holds no snapshot, or was changed since.
    """
    artifact = ModelProto()
    artifact.CopyFrom(model)
    found = {tensor.name: tensor.raw_data for tensor in model.graph.initializer}
    transient = found.pop(keys.TRANSIENT_STATE, None)
    if transient is None or not is_intact(model):
        raise SnapshotRefused("the model holds no snapshot of a node, or was changed since")
    fields = parse(transient)
    for row in fields["components"]:
        state = found.pop(keys.STATE_PREFIX + row[0], None)
        if state is None:
            raise SnapshotRefused(f"the state of slot {row[0]!r:.80} is missing in the model")
        row[2] = state
    kept = [tensor for tensor in artifact.graph.initializer if tensor.name in found]
    del artifact.graph.initializer[:]
    artifact.graph.initializer.extend(kept)
    seal_model(artifact)
    return artifact, seal(fields)


def _add(model: ModelProto, name: str, data: bytes) -> None:
    model.graph.initializer.append(
        TensorProto(name=name, data_type=TensorProto.UINT8, dims=[len(data)], raw_data=data)
    )
