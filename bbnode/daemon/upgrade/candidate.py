"""The program that an upgrade would bring, shown before anybody agrees to it.

Rule: as in a join, nothing of the artifact runs here, and no component is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.components.contracts import ComponentError, Model
from bbnode.components.errors import NotExportable
from bbnode.components.registry import UnknownComponentType, build_config, component_class
from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import Artifact, load_artifact
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.join.plan import Plan, make_plan
from bbnode.daemon.lifecycle import assembly
from bbnode.daemon.state import checkpoint
from bbnode.daemon.upgrade.switch import present
from bbnode.engine import plan_program, saved_components
from bbnode.engine.errors import SnapshotRefused
from bbnode.engine.planning.program import SlotPlan
from bbnode.ir.caps import MAX_ARTIFACT_BYTES
from bbnode.ir.crossing import shapes_fit
from bbnode.ir.errors import BbnodeError

# An upgrade may be so many times as large as what it replaces, unless somebody agrees to more.
LARGER = 4
LEAST_BYTES = 64 << 20


def most_bytes(present: int) -> int:
    """Return how large an artifact is taken without a word, in the place of one of that size."""
    return min(MAX_ARTIFACT_BYTES, max(LEAST_BYTES, LARGER * present))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An artifact that a node could run, and what becomes of the node's state there."""

    artifact: Artifact
    file: Path
    plan: Plan
    targets: tuple[str, ...]
    # By slot: what is taken over of the last checkpoint.
    taken_over: Mapping[str, str] = field(default_factory=dict)
    # By slot or port: what has another size than in the present program.
    resized: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return everything that a user has to know before it runs."""
        return {
            "artifact_sha256": self.artifact.sha256,
            "artifact_bytes": self.artifact.size,
            **self.plan.as_json(),
            "taken_over": dict(self.taken_over),
            "resized": dict(self.resized),
        }


def make_candidate(resolved: ResolvedConfig, artifact: Artifact, file: Path) -> Candidate:
    """Return an artifact with what a node's targets need of it. Takes long for a large model.

    Raises as `join.plan.make_plan`; what is missing or not set here is `Plan.check`.
    """
    given = resolved.config.artifact
    # A name with a hash is of one version; the class goes on.
    targets = tuple(
        name if name in artifact.targets else name.partition("#")[0] for name in given.targets
    )
    section = given.model_copy(update={"sha256": artifact.sha256, "targets": list(targets)})
    assembly.import_components(resolved)
    config = resolved.config.model_copy(update={"artifact": section})
    plan = make_plan(artifact, config)
    return Candidate(
        artifact=artifact,
        file=file,
        plan=plan,
        targets=targets,
        taken_over=_taken_over(resolved, artifact, targets),
        resized=_resized(resolved, artifact, targets),
    )


def _resized(
    resolved: ResolvedConfig, artifact: Artifact, targets: tuple[str, ...]
) -> dict[str, str]:
    """Return the models and ports of both programs that have another size in the new one.

    A peer that runs the other program does no work with this node there.
    """
    given = resolved.config.artifact
    try:
        old = load_artifact(present(resolved), expected_sha256=given.sha256)
        before = plan_program(old.model, list(given.targets))
    except BbnodeError as error:
        return {"(all)": f"unknown: {error}"}
    now = plan_program(artifact.model, list(targets))
    own = {slot.name for slot in now.slots}
    found = {}
    for slot, size in before.model_sizes.items():
        other = now.model_sizes.get(slot, size).parameters
        if slot in own and other != size.parameters:
            found[f"slot {slot}"] = f"{size.parameters:,} parameters before, {other:,} now"
    shapes = {each.counterpart: each.shape for each in before.crossings}
    for each in now.crossings:
        shape = shapes.get(each.counterpart, "")
        if not shapes_fit(shape, each.shape):
            kind = "" if each.kind == "send" else f"{each.kind} "
            name = f"{kind}port {each.port} of class {each.receiver}"
            found[name] = f"{shape} before, {each.shape} now"
    return found


def _taken_over(
    resolved: ResolvedConfig, artifact: Artifact, targets: tuple[str, ...]
) -> dict[str, str]:
    try:
        saved = checkpoint.read(checkpoint.checkpoint_file(resolved.state_dir))
        before = saved_components(saved.node)
    except FileNotFoundError:
        return {"(all)": "nothing: the node has no checkpoint yet"}
    except (checkpoint.CheckpointRefused, SnapshotRefused, paths.StorageError) as error:
        return {"(all)": f"nothing: {error}"}
    found = {}
    slots = {slot.name: slot for slot in plan_program(artifact.model, list(targets)).slots}
    for name, (type_name, state) in before.items():
        slot = slots.get(name)
        if slot is None:
            found[name] = "nothing: the new program has no such slot"
        elif slot.binding.type_name != type_name:
            found[name] = f"nothing: it is of a {type_name}, the slot holds another component"
        elif state:
            found[name] = _of_model(slot, state, resolved.config.slots.get(name, {}))
    return found


def _of_model(slot: SlotPlan, state: bytes, given: Mapping[str, Any]) -> str:
    """Return what a slot takes over of a state of its type: of a model, by its parameters."""
    usual = "its state, if the component takes it"
    try:
        cls = component_class(slot.binding.type_name)
        if not issubclass(cls, Model):
            return usual
        weights = cls.saved_weights(state)
        _, carried = cls.initialized(build_config(cls, slot.name, slot.config, given), weights)
    except (NotExportable, UnknownComponentType):
        return usual
    except (ComponentError, BbnodeError) as error:
        return f"unknown: {error}"
    left = [f"{name} ({why})" for name, why in carried.left.items()]
    text = f"{len(carried.taken)} of {len(carried.taken) + len(left)} parameters"
    return f"{text}; not {', '.join(left[:4])}{', …' if len(left) > 4 else ''}" if left else text
