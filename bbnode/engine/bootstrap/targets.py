"""Targets of a bootstrap, as a host names them, and its status.

Rule: plain data. A bootstrap is named by its Module, or, where a component has one of its own,
by the component's slot.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from bbnode.engine.frame import EntryPlan
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapPlan:
    """The bootstrap of one Module, installed.

    Attributes:
        name: of the Module.
        inputs, shapes: what the host has to give: declared types, and shapes of those with one.
        touches: numbers of the slots that it uses, through all calls.
        includes: Modules whose bootstraps it calls, directly or not.
    """

    name: str
    inputs: Mapping[str, TypeNode | None]
    shapes: Mapping[str, tuple[Dim, ...]]
    plan: EntryPlan
    touches: frozenset[int]
    includes: frozenset[str]


@dataclass(frozen=True, slots=True)
class All:
    """Every bootstrap: those of components, then those of Modules, in the order of install.

    One that another one calls runs with that one; one that needs inputs waits for them. Components
    that no op of the installed targets needs are left out. A host may run components first, before
    it has peers, and Modules once it has a network.
    """

    components: bool = True
    modules: bool = True


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Modules whose bootstraps need no inputs."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BootstrapRequest:
    """One Module's bootstrap, with its inputs by name."""

    target: str
    inputs: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleRequests:
    """Several Modules with their inputs: all of them are taken, or none."""

    requests: tuple[BootstrapRequest, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots whose components have a method `bootstrap(ctx)`."""

    slots: tuple[str, ...]


BootstrapTarget: TypeAlias = All | ModuleNames | ModuleRequests | Slots


class BootstrapStatus(enum.Enum):
    """The status of a bootstrap, or of the node as a whole."""

    IDLE = "idle"
    RUNNING = "running"  # or it waits for its turn
    WAITING_FOR_INPUT = "waiting for input"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapInfo:
    """One bootstrap of a node, as the node lists it. `name` of a component's: `slot:<slot>`."""

    name: str
    status: BootstrapStatus
    inputs: tuple[str, ...]
    touches: tuple[str, ...]
    runs: int
    last_ok: bool | None
