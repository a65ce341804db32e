"""Initial weights for a program's models, from an exported ONNX file or a node's checkpoint.

Rule: the recorded program is changed before it is compiled, so that the artifact is the same as if
its author had set these weights. Anything that names a file of this machine is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError as ProtobufDecodeError
from onnx import ModelProto, TensorProto, numpy_helper

from bbnode.components.contracts import CarriedOver, Model, Weights
from bbnode.components.errors import NotExportable, ParameterMismatch, WeightsNotFinite
from bbnode.components.registry import (
    UnknownComponentType,
    build_config,
    component_class,
    encode_config,
)
from bbnode.daemon import paths
from bbnode.daemon.state import checkpoint
from bbnode.engine import saved_components
from bbnode.engine.errors import SnapshotRefused, did_you_mean
from bbnode.ir import keys
from bbnode.ir.bounds import FileReference, OutOfBounds, check_bounds
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.errors import DeploymentError
from bbnode.ir.graph import Attribute, Function, Program
from bbnode.ir.onnx_file import model_of, program_of

_FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)


class InitialWeightsRefused(DeploymentError):
    """A file has no weights that a program's models can begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWeights:
    """The weights in a file, read on demand.

    `models` has those of each slot of a checkpoint; an ONNX file has one model, without a name.
    """

    path: Path
    models: Mapping[str, Callable[[], Mapping[str, Weights]]]

    def of(self, slot: str, source: str | None) -> Mapping[str, Weights]:
        """Return the weights for a program's slot: of the slot `source`, else the one that fits.

        Raises InitialWeightsRefused, ComponentError.
        """
        listed = ", ".join(self.models)
        if "" in self.models:
            if source is not None:
                raise InitialWeightsRefused(
                    f"{self.path} is an ONNX file, which has no slots; give --slot {slot}"
                )
            return self.models[""]()
        if source is not None and source not in self.models:
            raise InitialWeightsRefused(
                f"{self.path} has no model in slot {source!r:.80}"
                f"{did_you_mean(source, self.models, f'there is: {listed}')}"
            )
        name = slot if source is None and slot in self.models else source
        if name is None and len(self.models) > 1:
            raise InitialWeightsRefused(
                f"{self.path} has several models, and none in slot {slot!r}; choose one with "
                f"--slot {slot}=SLOT: {listed}"
            )
        return self.models[next(iter(self.models)) if name is None else name]()


def read_weights(path: Path) -> GivenWeights:
    """Return the weights in an ONNX file or a checkpoint.

    Raises InitialWeightsRefused, CheckpointRefused, StorageError.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            magic = stream.read(len(checkpoint.MAGIC))
            if magic == checkpoint.MAGIC:
                return _of_checkpoint(path)
            if size > MAX_ARTIFACT_BYTES:
                raise InitialWeightsRefused(f"{path}: larger than the 2 GiB of an ONNX file")
            data = magic + stream.read(MAX_ARTIFACT_BYTES)
    except OSError as error:
        raise paths.StorageError(f"{path}: cannot be read: {error.strerror}") from error
    model = ModelProto()
    try:
        model.ParseFromString(data)
        check_bounds(model)
    except (ProtobufDecodeError, RecursionError) as error:
        raise InitialWeightsRefused(
            f"{path}: neither an ONNX model nor a checkpoint of bbnode"
        ) from error
    except FileReference as error:
        raise InitialWeightsRefused(
            f"{path}: {error}. Put its weights into one file: onnx.save(onnx.load({str(path)!r}), "
            "'whole.onnx')"
        ) from error
    except OutOfBounds as error:
        raise InitialWeightsRefused(f"{path}: {error}") from error
    if any(entry.key == keys.COMPILED_KEY for entry in model.metadata_props):
        raise InitialWeightsRefused(
            f"{path} is a compiled program; give what `bbnode export` wrote, or a checkpoint"
        )
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type in _FLOATS]
    if not floats:
        raise InitialWeightsRefused(f"{path}: an ONNX model without float initializers")
    return GivenWeights(path=path, models={"": lambda: _arrays(path, floats)})


def _arrays(path: Path, tensors: Sequence[TensorProto]) -> dict[str, Weights]:
    weights: dict[str, Weights] = {}
    for tensor in tensors:
        try:
            if min(tensor.dims, default=0) < 0:
                raise ValueError(f"its shape is {list(tensor.dims)}")
            weights[tensor.name] = np.asarray(numpy_helper.to_array(tensor))
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise InitialWeightsRefused(
                f"{path}: the initializer {tensor.name!r:.80} is malformed: {error}"
            ) from error
    return weights


def _of_checkpoint(path: Path) -> GivenWeights:
    _, saved = checkpoint.found(path)
    try:
        states = saved_components(saved.node)
    except SnapshotRefused as error:
        raise checkpoint.CheckpointRefused(f"{path}: {error}") from error
    models: dict[str, Callable[[], Mapping[str, Weights]]] = {}
    for slot, (type_name, state) in states.items():
        try:
            cls = component_class(type_name)
        except UnknownComponentType:
            continue  # its package is not installed here, so that its state can't be read
        if issubclass(cls, Model):
            models[slot] = lambda cls=cls, state=state: cls.saved_weights(state)  # type: ignore[misc]
    if not models:
        raise InitialWeightsRefused(f"{path}: a checkpoint of a node without a model")
    return GivenWeights(path=path, models=models)


def initialize(
    recorded: ModelProto, given: GivenWeights, slots: Mapping[str, str | None]
) -> tuple[ModelProto, dict[str, CarriedOver]]:
    """Return a recorded program with these weights in its models, and each slot's taken and left.

    Args:
        recorded: the model that `Module.build` returned; not changed.
        slots: the program's slots to initialize, each with the slot of a checkpoint from which it
            takes the weights (None: the one of its name, or the only one). Empty: all slots that
            the weights fit.

    Raises InitialWeightsRefused if nothing fits, or one of `slots` does not; WeightsNotFinite.
    """
    program = program_of(recorded)
    held = _model_slots(program)
    for slot in slots:
        if slot not in held:
            near = did_you_mean(slot, held, f"models are in: {', '.join(held) or 'none'}")
            raise InitialWeightsRefused(f"the program sets no model in slot {slot!r:.80}{near}")
    if not held:
        raise InitialWeightsRefused(
            "the program sets no model: a slot that is bound without settings "
            "(`ModelSlot(name)` without `concrete`) has its weights from each node's configuration"
        )
    carried: dict[str, CarriedOver] = {}
    refused: dict[str, str] = {}
    for slot, functions in held.items():
        if slots and slot not in slots:
            continue
        try:
            carried[slot] = _initialize(slot, functions, given.of(slot, slots.get(slot)))
        except WeightsNotFinite:
            raise
        except (ParameterMismatch, NotExportable) as error:
            refused[slot] = str(error)
    if refused and (slots or not carried):
        why = "; ".join(f"slot {slot!r}: {text}" for slot, text in refused.items())
        raise InitialWeightsRefused(f"nothing of {given.path} fits: {why}")
    carried |= {slot: CarriedOver(left={"": why}) for slot, why in refused.items()}
    return model_of(program), carried


def _initialize(
    slot: str, functions: Sequence[Function], weights: Mapping[str, Weights]
) -> CarriedOver:
    carried = CarriedOver()
    for function in functions:
        cls = component_class(function.metadata[keys.CONCRETE_TYPE_SLOT_PREFIX + slot])
        assert issubclass(cls, Model)  # the recorder has checked the role
        # It is the author's own program, whose settings may name files.
        config = build_config(cls, slot, function.defaults[slot].value, {}, own_artifact=True)
        config, carried = cls.initialized(config, weights)
        function.defaults[slot] = Attribute.of(encode_config(config))
    return carried


def _model_slots(program: Program) -> dict[str, list[Function]]:
    """Return the functions that set each concrete slot of role Model."""
    held: dict[str, list[Function]] = {}
    for function in program.functions:
        for slot in function.defaults:
            role = function.metadata.get(keys.SLOT_ROLE_PREFIX + slot, "")
            if role.split("|")[0] == Model.ROLE:
                held.setdefault(slot, []).append(function)
    return dict(sorted(held.items()))
