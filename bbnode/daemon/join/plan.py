"""The plan of a joining node: targets, components, settings, limits; shown before it runs.

Rule: nothing of the artifact runs here, and no component is created. A peer can name component
types, never send them: types and libraries that are not installed on this machine are listed, and
stop the join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bbnode.components.libraries import OptionalLibrary
from bbnode.components.registry import (
    ConfigTypeMismatch,
    UnknownComponentType,
    build_config,
    component_class,
)
from bbnode.components.settings import (
    LocalSettingRefused,
    UnreadableSettings,
    local_settings,
    names_files,
    path_settings,
    stored_settings,
)
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config import NodeConfig
from bbnode.daemon.join.invitation import ComponentsMissing, SlotsNotConfigured, TargetNeeded
from bbnode.engine.errors import UnknownSlot, UnsupportedOps, did_you_mean
from bbnode.engine.planning.program import SlotPlan, plan_program

# The caps on the memory that peers can take on this machine.
_SHOWN_LIMITS = ("envelope_bytes", "ingress_bytes", "ingress_events", "frames", "pending_async")

_SHOWN_OF_A_SLOT = ("slot", "role", "component", "installed")
# The longest shown value of a setting in the artifact.
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSlot:
    """A component that the targets need, with its settings and the missing ones."""

    slot: str
    role: str
    component: str
    installed: bool
    # Libraries that it needs and this machine lacks.
    lacks: tuple[str, ...]
    # Settings in the artifact, shortened.
    given: Mapping[str, str]
    # Settings among `given` that name files of this machine, or look like it.
    files: tuple[str, ...]
    # Names of the other settings, which this node may set.
    settings: tuple[str, ...]
    # Names of all settings that are paths.
    paths: tuple[str, ...]
    # The fault of the current settings; "" if there is none.
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The targets that would run, and everything that they need."""

    targets: tuple[str, ...]
    classes: tuple[str, ...]
    slots: tuple[PlannedSlot, ...]
    unsupported: tuple[str, ...]
    limits: Mapping[str, Any]

    def check(self) -> None:
        """Raise ComponentsMissing, SlotsNotConfigured or UnsupportedOps unless it can run."""
        missing = sorted({slot.component for slot in self.slots if not slot.installed})
        if missing:
            raise ComponentsMissing(
                f"not installed here: {', '.join(missing)}; install the packages that provide "
                "them, or name their modules with --set node.components=MODULE"
            )
        lacking = dict.fromkeys(slot.fault for slot in self.slots if slot.lacks)
        if lacking:
            raise ComponentsMissing("; ".join(lacking))
        faulty = [slot for slot in self.slots if slot.fault]
        if faulty:
            raise SlotsNotConfigured("; ".join(slot.fault for slot in faulty))
        if self.unsupported:
            raise UnsupportedOps(self.unsupported)

    def can_run(self) -> bool:
        """Return True if `check` raises nothing."""
        try:
            self.check()
        except (ComponentsMissing, SlotsNotConfigured, UnsupportedOps):
            return False
        return True

    def as_json(self) -> dict[str, Any]:
        """Return the plan for output."""
        return {
            "targets": list(self.targets),
            "classes": list(self.classes),
            "slots": [
                {
                    **{name: getattr(slot, name) for name in _SHOWN_OF_A_SLOT},
                    "given": dict(slot.given),
                    "files": {name: slot.given[name] for name in slot.files},
                    "settings": list(slot.settings),
                    "fault": slot.fault or None,
                }
                for slot in self.slots
            ],
            "limits": dict(self.limits),
        }


def choose_target(artifact: Artifact, wanted: str | None) -> str:
    """Return the target to play: the named one, or the only one.

    Raises TargetNeeded; `make_plan` checks that the artifact has the named one.
    """
    if wanted is not None:
        return wanted
    names = artifact.targets
    if len(names) != 1:
        raise TargetNeeded(
            f"the artifact has the targets {', '.join(names) or '(none)'}; say which one this node "
            "is to play: --target CLASS"
        )
    return names[0]


def make_plan(artifact: Artifact, config: NodeConfig) -> Plan:
    """Return the needs of the targets of a configuration.

    Raises UnknownSlot for settings of a slot that does not exist, and the errors of planning a
    program: UnknownTarget, InvalidArtifact, SlotBindingConflict.
    """
    program = plan_program(artifact.model, config.artifact.targets)
    names = [slot.name for slot in program.slots]
    for name in config.slots:
        if name not in names:
            near = did_you_mean(name, names, f"slots: {', '.join(names) or 'none'}")
            raise UnknownSlot(
                f"there are settings for slot {name!r}, which the target does not use{near}"
            )
    caps = config.limits.effective()
    return Plan(
        targets=tuple(target.name for target in program.targets),
        classes=tuple(dict.fromkeys(target.peer_class for target in program.targets)),
        slots=tuple(_slot(slot, config.slots.get(slot.name, {})) for slot in program.slots),
        unsupported=program.unsupported,
        limits={name: caps[name] for name in _SHOWN_LIMITS if caps[name] is not None},
    )


def _slot(plan: SlotPlan, own: Mapping[str, Any]) -> PlannedSlot:
    settings: tuple[str, ...] = ()
    stored = _stored(plan.config)
    config: type | None = None
    fault = ""
    installed = True
    lacking: tuple[OptionalLibrary, ...] = ()
    try:
        cls = component_class(plan.binding.type_name)
        config = cls.Config
        names = [field.name for field in dataclasses.fields(config)]
        local = local_settings(config)
        settings = tuple(name for name in names if name not in stored or name in local)
        made = build_config(cls, plan.name, plan.config, own)
        lacking = tuple(each for each in cls.needed_libraries(made) if each.is_missing)
        advice = "; ".join(each.advice for each in lacking)
        fault = f"slot {plan.name!r}: {cls.TYPE_NAME} needs a library: {advice}" if lacking else ""
    except UnknownComponentType as error:
        installed, fault = False, str(error)
    except (ConfigTypeMismatch, LocalSettingRefused) as error:
        fault = str(error)
    return PlannedSlot(
        slot=plan.name,
        role=plan.binding.role,
        component=plan.binding.type_name,
        installed=installed,
        lacks=tuple(each.module for each in lacking),
        given={name: _short(value) for name, value in stored.items()},
        files=names_files(config, stored),
        settings=settings,
        paths=() if config is None else path_settings(config),
        fault=fault,
    )


def _stored(raw: bytes) -> dict[str, Any]:
    """Return the settings in an artifact; `build_config` reports those that can't be read."""
    try:
        return stored_settings(raw)
    except UnreadableSettings:
        return {}


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def with_absolute_paths(config: NodeConfig, plan: Plan, base: Path) -> NodeConfig:
    """Return the configuration with paths in its components' settings made absolute from `base`.

    The node's configuration is written to another folder than the one in which they were typed, and
    a joined node runs in a directory of its own.
    """
    slots = {name: dict(own) for name, own in config.slots.items()}
    for slot in plan.slots:
        own = slots.get(slot.slot, {})
        for name in slot.paths:
            if isinstance(own.get(name), str) and own[name]:
                own[name] = str(base / Path(own[name]).expanduser())
    return config.model_copy(update={"slots": slots})
