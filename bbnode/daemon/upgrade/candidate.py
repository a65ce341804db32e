"""The program that an upgrade would bring, shown before the user agrees to it.

Rule: as in a join, nothing of the artifact runs here, and no component is created.
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

# The largest ratio of an upgrade to the current program, unless the user agrees to more.
LARGER = 4
LEAST_BYTES = 64 << 20


def most_bytes(present: int) -> int:
    """Return the largest artifact that replaces one of size `present` without a question."""
    return min(MAX_ARTIFACT_BYTES, max(LEAST_BYTES, LARGER * present))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An artifact that a node could run, and its effect on the node's state."""

    artifact: Artifact
    file: Path
    plan: Plan
    targets: tuple[str, ...]
    # The state that each slot takes over from the last checkpoint.
    taken_over: Mapping[str, str] = field(default_factory=dict)
    # The sizes of slots and ports that differ from the current program's.
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
    """Return an artifact with the needs of a node's targets. Takes long for a large model.

    Raises as `join.plan.make_plan`; `Plan.check` raises for missing components and settings.
    """
    present_section = resolved.config.artifact
    # A name with a hash belongs to one version; the class stays.
    targets = tuple(
        name if name in artifact.targets else name.partition("#")[0]
        for name in present_section.targets
    )
    section = present_section.model_copy(
        update={"sha256": artifact.sha256, "targets": list(targets)}
    )
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
    section = resolved.config.artifact
    try:
        old = load_artifact(present(resolved), expected_sha256=section.sha256)
        before = plan_program(old.model, list(section.targets))
    except BbnodeError as error:
        return {"(all)": f"unknown: {error}"}
    now = plan_program(artifact.model, list(targets))
    own = {slot.name for slot in now.slots}
    resized = {}
    for slot, size in before.model_sizes.items():
        other = now.model_sizes.get(slot, size).parameters
        if slot in own and other != size.parameters:
            resized[f"slot {slot}"] = f"{size.parameters:,} parameters before, {other:,} now"
    shapes = {each.counterpart: each.shape for each in before.crossings}
    for each in now.crossings:
        shape = shapes.get(each.counterpart, "")
        if not shapes_fit(shape, each.shape):
            kind = "" if each.kind == "send" else f"{each.kind} "
            name = f"{kind}port {each.port} of class {each.receiver}"
            resized[name] = f"{shape} before, {each.shape} now"
    return resized


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
    taken_over = {}
    slots = {slot.name: slot for slot in plan_program(artifact.model, list(targets)).slots}
    for name, (type_name, state) in before.items():
        slot = slots.get(name)
        if slot is None:
            taken_over[name] = "nothing: the new program has no such slot"
        elif slot.binding.type_name != type_name:
            taken_over[name] = f"nothing: it is of a {type_name}, the slot holds another component"
        elif state:
            taken_over[name] = _of_model(slot, state, resolved.config.slots.get(name, {}))
    return taken_over


def _of_model(slot: SlotPlan, state: bytes, settings: Mapping[str, Any]) -> str:
    """Return what a slot takes over from a state of its type; for a model, by its parameters."""
    usual = "its state, if the component takes it"
    try:
        cls = component_class(slot.binding.type_name)
        if not issubclass(cls, Model):
            return usual
        weights = cls.saved_weights(state)
        _, carried = cls.initialized(build_config(cls, slot.name, slot.config, settings), weights)
    except (NotExportable, UnknownComponentType):
        return usual
    except (ComponentError, BbnodeError) as error:
        return f"unknown: {error}"
    left = [f"{name} ({why})" for name, why in carried.left.items()]
    text = f"{len(carried.taken)} of {len(carried.taken) + len(left)} parameters"
    return f"{text}; not {', '.join(left[:4])}{', …' if len(left) > 4 else ''}" if left else text
