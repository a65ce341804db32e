"""Trained models taken out of a node: of a running one, or of its checkpoint.

Rule: a model is exported by a component of its own, made from the settings and given a state that
was captured at one moment; so it is consistent while the node trains, and no op waits for it. What
a component exports is checked before anybody gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bbnode.components.contracts import Component, ComponentError, Model
from bbnode.components.errors import NotExportable
from bbnode.components.models.state_vector import StateVector
from bbnode.components.registry import build_config, component_class
from bbnode.daemon import paths
from bbnode.daemon.state.checkpoint import Checkpoint, CheckpointRefused
from bbnode.engine import Node, plan_program, saved_components
from bbnode.engine.errors import SnapshotRefused, describe, did_you_mean
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds, check_bounds
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.errors import BbnodeError, DeploymentError
from bbnode.ir.interrupts import let_stop
from bbnode.ir.slots import Binding

if TYPE_CHECKING:
    from bbnode.daemon.artifacts.artifact import Artifact


class NoSuchModel(DeploymentError):
    """A node has no model in the slot that was named, or none or several where none was named."""


class OtherVersionsWeights(DeploymentError):
    """A checkpoint is of another version of the program, whose model has other weights."""


class WouldOverwrite(DeploymentError):
    """A file that is no exported model stands where one is to be written."""


def models_of(node: Node) -> list[Binding]:
    """Return the bindings of a node's slots with a model."""
    found = map(node.binding, node.slots)
    return [binding for binding in found if _has_model(binding)]


def _has_model(binding: Binding) -> bool:
    """Return True for a slot with a model; a vector in the place of one has nothing to export."""
    return binding.role == Model.ROLE and binding.type_name != StateVector.TYPE_NAME


def chosen(models: Sequence[str], slot: str | None, *, where: str) -> str:
    """Return the slot with a model that was named, or the only one. Raises NoSuchModel."""
    if slot is not None and slot in models:
        return slot
    listed = ", ".join(models)
    if not models:
        raise NoSuchModel(f"{where} has no model; `bbnode inspect` shows the slots of each class")
    if slot is not None:
        near = did_you_mean(slot, models)
        raise NoSuchModel(f"{where} has no model in slot {slot!r:.80}{near}; there is: {listed}")
    if len(models) > 1:
        raise NoSuchModel(f"{where} has several models; choose one with --slot: {listed}")
    return models[0]


def exported(slot: str, make: Callable[[], Component]) -> bytes:
    """Return the model of a component that `make` makes, as the bytes of an ONNX file.

    Takes long for a large one: run it in a worker thread.

    Raises:
        NotExportable: it is no model, does not export, or what it exports is no ONNX model.
        ComponentError: whatever else its author's code raises.
    """
    import onnx
    from google.protobuf.message import EncodeError

    try:
        component = make()
        if not isinstance(component, Model):
            raise NotExportable(f"{component.TYPE_NAME} is no model")
        model = component.export()
    except BbnodeError as error:
        raise NotExportable(f"slot {slot!r} can't be exported: {error}") from error
    except BaseException as error:  # the boundary to a component's author
        let_stop(error)
        why = ": ".join(describe(error))
        raise ComponentError(f"slot {slot!r} can't be exported: {why}") from error
    who = f"slot {slot!r}: {component.TYPE_NAME}.export()"
    if not isinstance(model, onnx.ModelProto):
        raise NotExportable(f"{who} gave a {type(model).__name__}; return a ModelProto")
    try:
        check_bounds(model)
        data = model.SerializeToString(deterministic=True)
        onnx.checker.check_model(data)
    except (OutOfBounds, onnx.checker.ValidationError) as error:
        raise NotExportable(
            f"{who} gave a model that ONNX refuses: {_first_line(error)}"
        ) from error
    except (EncodeError, ValueError) as error:
        raise NotExportable(f"{who}: larger than the 2 GiB that an ONNX file can have") from error
    return bytes(data)


def from_checkpoint(
    saved: Checkpoint,
    artifact: Artifact,
    slot: str | None,
    *,
    targets: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    own_artifact: bool = False,
) -> tuple[str, bytes]:
    """Return the slot and the bytes of a model with the weights of a checkpoint.

    Args:
        artifact: what made the checkpoint; or another version whose model has the same weights.
        slot: of the model; None where there is only one.
        targets: those that the node plays; all by default.
        settings: those of the node's own configuration, by slot.
        own_artifact: as `bbnode.engine.install` has it.

    Raises NoSuchModel, OtherVersionsWeights, CheckpointRefused, and as `exported`.
    """
    try:
        states = saved_components(saved.node)
    except SnapshotRefused as error:
        raise CheckpointRefused(f"the checkpoint can't be used: {error}") from error
    plan = plan_program(artifact.model, targets or artifact.targets)
    slots = {each.name: each for each in plan.slots}
    models = [n for n, each in slots.items() if n in states and _has_model(each.binding)]
    name = chosen(models, slot, where="the checkpoint")
    binding, (type_name, state) = slots[name].binding, states[name]
    if binding.type_name != type_name:
        raise OtherVersionsWeights(
            f"slot {name!r} of the checkpoint is a {type_name}, and the artifact has a "
            f"{binding.type_name} there; give the artifact that made the checkpoint (--artifact)"
        )

    def make() -> Component:
        cls = component_class(type_name)
        own = (settings or {}).get(name, {})
        config = build_config(cls, name, slots[name].config, own, own_artifact=own_artifact)
        component = cls(config)
        if saved.artifact_sha256 == artifact.sha256:
            component.restore(state)
            return component
        told = component.carry_over(state)
        if told.left:
            first, why = next(iter(told.left.items()))
            raise OtherVersionsWeights(
                f"the checkpoint is of another version ({saved.artifact_sha256[:8]}), whose model "
                f"differs in {len(told.left)} weights ({first!r}: {why}); give the artifact that "
                "made it (--artifact)"
            )
        return component

    return name, exported(name, make)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse to write a model over anything else, unless `force`d; never over a directory.

    Raises WouldOverwrite, StorageError.
    """
    try:
        if out.is_dir():
            raise WouldOverwrite(f"{out} is a directory; name a file")
        if not out.parent.is_dir():
            raise paths.StorageError(f"{out}: the directory {out.parent} is not there; make it")
        if force or not out.exists():
            return
        kind = _other_kind(out)
    except OSError as error:
        raise paths.StorageError(f"{out}: {error.strerror}") from error
    if kind:
        raise WouldOverwrite(f"{out} is {kind}; choose another file, or add --force")


def _other_kind(path: Path) -> str:
    """Return what a file is that is no plain ONNX model; empty for one."""
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file() or path.stat().st_size > MAX_ARTIFACT_BYTES:
        return "no ONNX model"
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except (DecodeError, RecursionError, ValueError):
        return "no ONNX model"
    if not model.ir_version or not (model.graph.node or model.functions):
        return "no ONNX model"
    if any(entry.key == keys.COMPILED_KEY for entry in model.metadata_props):
        return "a compiled program"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
