"""Trained models exported from a running node, or from its checkpoint.

Rule: a model is exported by a component of its own, created from the settings and a state that was
captured at one moment; so it is consistent while the node trains, and no op waits for it. An
exported model is checked before it is returned, and has its origin in its metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bbnode.components.contracts import Component, ComponentError, Model, OutputKind
from bbnode.components.data.shared_schema import SchemaRefused, SharedSchema
from bbnode.components.errors import NotExportable
from bbnode.components.models.state_vector import StateVector
from bbnode.components.registry import build_config, component_class
from bbnode.daemon import paths
from bbnode.daemon.history.scalars import metric_order
from bbnode.daemon.predicting.meaning import Meaning, meaning_of
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
    import onnx

    from bbnode.daemon.artifacts.artifact import Artifact
    from bbnode.engine.planning.program import SlotPlan


class NoSuchModel(DeploymentError):
    """A node has no model in the named slot; or, without a name, none or several."""


class OtherVersionsWeights(DeploymentError):
    """A checkpoint is of another version of the program, whose model has other weights."""


class WouldOverwrite(DeploymentError):
    """The destination is a file that is no exported model."""


class Untrained(DeploymentError):
    """The requested weights are the program's initial ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOrigin:
    """The place in a training from which the weights of an exported model come.

    `program` is the sha256 of the artifact. `round` is the last one that went into the weights, 0
    if the node runs no rounds or none has ended, and `metrics` are those of that round.
    `is_trained` is False for the program's initial weights.
    """

    program: str
    target: str = ""
    round: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_trained: bool = True

    @classmethod
    def of_rounds(cls, program: str, rounds: Sequence[Mapping[str, Any]]) -> WeightsOrigin:
        """Return the origin after the newest of these rounds (`Round.as_json`)."""
        if not rounds:
            return cls(program=program)
        last = max(rounds, key=lambda each: float(each.get("started_at") or 0))
        return cls(
            program=program,
            target=last["target"],
            round=last["round"],
            metrics=last.get("metrics", {}),
        )

    @classmethod
    def of_model(cls, model: onnx.ModelProto) -> WeightsOrigin | None:
        """Return the origin in an exported model's metadata; None if there is none.

        Raises ValueError for metadata that bbnode did not write.
        """
        start = len(keys.EXPORT_PREFIX)
        metadata = {
            entry.key[start:]: entry.value
            for entry in model.metadata_props
            if entry.key.startswith(keys.EXPORT_PREFIX)
        }
        if "program" not in metadata:
            return None
        return cls(
            program=metadata["program"],
            target=metadata.get("target", ""),
            round=int(metadata.get("round", 0)),
            metrics=json.loads(metadata.get("metrics", "{}")),
            is_trained=metadata.get("trained") != "false",
        )

    def stamp(self, model: onnx.ModelProto) -> None:
        """Write the origin into a model's metadata."""
        values = {
            "program": self.program,
            "target": self.target,
            "round": str(self.round) if self.round else "",
            "metrics": json.dumps(dict(self.metrics), sort_keys=True) if self.metrics else "",
            "trained": str(self.is_trained).lower(),
        }
        for name, value in values.items():
            if value:
                model.metadata_props.add(key=keys.EXPORT_PREFIX + name, value=value)

    def __str__(self) -> str:
        if not self.is_trained:
            return "untrained: the weights that the program began with"
        if not self.round:
            return "trained"
        names = sorted(self.metrics, key=metric_order)[:SHOWN_METRICS]
        shown = "".join(f", {name} {self.metrics[name]:.4g}" for name in names)
        return f"after round {self.round}{shown}"


# Metrics of a round that one line shows.
SHOWN_METRICS = 4


def models_of(node: Node) -> list[Binding]:
    """Return the bindings of a node's slots with a model."""
    bindings = map(node.binding, node.slots)
    return [binding for binding in bindings if _has_model(binding)]


def _has_model(binding: Binding) -> bool:
    """Return True for a slot with a model; a vector in such a slot has nothing to export."""
    return binding.role == Model.ROLE and binding.type_name != StateVector.TYPE_NAME


def chosen(models: Sequence[str], slot: str | None, *, where: str) -> str:
    """Return the named slot with a model, or the only one. Raises NoSuchModel."""
    if slot is not None and slot in models:
        return slot
    listed = ", ".join(models)
    if not models:
        raise NoSuchModel(f"{where} has no model; `bbnode inspect` shows the slots of each class")
    if slot is not None:
        near = did_you_mean(slot, models, f"there is: {listed}")
        raise NoSuchModel(f"{where} has no model in slot {slot!r:.80}{near}")
    if len(models) > 1:
        raise NoSuchModel(f"{where} has several models; choose one with --slot: {listed}")
    return models[0]


def exported(
    slot: str,
    make: Callable[[], Component],
    initial: Callable[[], Component],
    origin: WeightsOrigin,
    meaning: Callable[[], Meaning] = Meaning,
) -> bytes:
    """Return the model of a component that `make` makes, as the bytes of an ONNX file.

    Takes long for a large one: run it in a worker thread.

    Args:
        slot: its name, for errors.
        make: makes the component with the state whose weights are wanted.
        initial: makes it as the program has it; a model that exports the same is untrained.
        origin: where the weights are from, for the model's metadata.
        meaning: returns what inputs and outputs mean, for the same; it may load data.

    Raises:
        NotExportable: it is no model, does not export, or what it exports is no ONNX model.
        ComponentError: whatever else its author's code raises.
    """
    try:
        before = _digest(_serialized(slot, _export(slot, initial)[1]))
    except (NotExportable, ComponentError):
        before = b""  # there is no model before the training, as with trees
    component, model = _export(slot, make)
    is_trained = _digest(_serialized(slot, model)) != before
    replace(origin, is_trained=is_trained).stamp(model)
    described = meaning()
    kind = _output_kind(slot, component) if described.uses_loss else ""
    described.stamp(model, kind, next(iter(component.output_names()), ""))
    return _serialized(slot, model)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _export(slot: str, make: Callable[[], Component]) -> tuple[Model, onnx.ModelProto]:
    import onnx

    try:
        component = make()
        if not isinstance(component, Model):
            raise NotExportable(f"{component.TYPE_NAME} is no model")
        model: Any = component.export()
    except BbnodeError as error:
        raise NotExportable(f"slot {slot!r} can't be exported: {error}") from error
    except BaseException as error:  # the boundary to a component's author
        let_stop(error)
        why = ": ".join(describe(error))
        raise ComponentError(f"slot {slot!r} can't be exported: {why}") from error
    if not isinstance(model, onnx.ModelProto):
        who = f"slot {slot!r}: {component.TYPE_NAME}.export()"
        raise NotExportable(f"{who} gave a {type(model).__name__}; return a ModelProto")
    return component, model


def _output_kind(slot: str, component: Model) -> OutputKind:
    try:
        return component.output_kind()
    except BaseException as error:  # the boundary to a component's author
        let_stop(error)
        why = ": ".join(describe(error))
        raise ComponentError(f"slot {slot!r} can't be exported: {why}") from error


def _serialized(slot: str, model: onnx.ModelProto) -> bytes:
    import onnx
    from google.protobuf.message import EncodeError

    who = f"slot {slot!r}: the exported model"
    try:
        check_bounds(model)
        data = model.SerializeToString(deterministic=True)
        onnx.checker.check_model(data)
    except (OutOfBounds, onnx.checker.ValidationError) as error:
        raise NotExportable(f"{who} is one that ONNX refuses: {_first_line(error)}") from error
    except (EncodeError, ValueError) as error:
        raise NotExportable(f"{who} is larger than the 2 GiB of an ONNX file") from error
    return bytes(data)


def initial_component(
    slot: SlotPlan, settings: Mapping[str, Mapping[str, Any]], *, own_artifact: bool
) -> Component:
    """Return the component of a slot as the program has it, with the node's own settings.

    `own_artifact` is as in `bbnode.engine.install`. Raises the errors of its class.
    """
    cls = component_class(slot.binding.type_name)
    own = settings.get(slot.name, {})
    component: Component = cls(
        build_config(cls, slot.name, slot.config, own, own_artifact=own_artifact)
    )
    return component


def from_checkpoint(
    saved: Checkpoint,
    artifact: Artifact,
    slot: str | None,
    *,
    rounds: Sequence[Mapping[str, Any]] = (),
    targets: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    own_artifact: bool = False,
) -> tuple[str, bytes]:
    """Return the slot and the bytes of a model with the weights of a checkpoint.

    Args:
        artifact: what made the checkpoint; or another version whose model has the same weights.
        slot: of the model; None where there is only one.
        rounds: those that the node kept (`read_rounds`).
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

    initial = partial(initial_component, slots[name], settings or {}, own_artifact=own_artifact)

    def other(slot: str) -> Component:
        """Return the component of another slot as the checkpoint has it, or as it begins."""
        component = initial_component(slots[slot], settings or {}, own_artifact=own_artifact)
        if slot in states and states[slot][0] == slots[slot].binding.type_name:
            component.restore(states[slot][1])
        return component

    def make() -> Component:
        component = initial()
        if saved.artifact_sha256 == artifact.sha256:
            component.restore(state)
            return component
        carried = component.carry_over(state)
        if carried.left:
            first, why = next(iter(carried.left.items()))
            raise OtherVersionsWeights(
                f"the checkpoint is of another version ({saved.artifact_sha256[:8]}), whose model "
                f"differs in {len(carried.left)} weights ({first!r}: {why}); give the artifact "
                "that made it (--artifact)"
            )
        return component

    played = targets or artifact.targets

    def reference(slot: str) -> SharedSchema | None:
        """Return the meaning of a slot's examples when the checkpoint was written."""
        try:
            return SharedSchema.from_json(saved.schemas[slot]) if slot in saved.schemas else None
        except SchemaRefused as error:
            raise CheckpointRefused(f"the checkpoint can't be used: {error}") from error

    meaning = partial(meaning_of, artifact.model, played, name, other, reference)
    return name, exported(name, make, initial, _origin(saved, rounds), meaning)


def _origin(saved: Checkpoint, rounds: Sequence[Mapping[str, Any]]) -> WeightsOrigin:
    if saved.best is not None:
        done = {saved.best.target: saved.best.round}
    else:
        done = {target: number for target, number in saved.rounds_done.items() if number}
    # The newest round of each number: after a restarted count, numbers repeat.
    kept = {(each["target"], each["round"]): each for each in rounds}
    last = [kept.get(each, {"target": each[0], "round": each[1]}) for each in done.items()]
    return WeightsOrigin.of_rounds(saved.artifact_sha256, last)


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
    """Describe a file that is no plain ONNX model; "" if it is one."""
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
