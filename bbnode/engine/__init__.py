"""The engine: installs compiled partitions and runs them, sans I/O.

Rule: a `Node` is driven from outside. Time, ids and seeds are arguments; bytes, events and
results come in through its entry points; what has to be done goes out as steps.
"""

from __future__ import annotations

from bbnode.engine import errors, steps
from bbnode.engine.bootstrap.targets import (
    All,
    BootstrapInfo,
    BootstrapRequest,
    BootstrapStatus,
    BootstrapTarget,
    ModuleNames,
    ModuleRequests,
    Slots,
)
from bbnode.engine.bus import FIRST_PROGRAM_KIND, BusKind
from bbnode.engine.install import install
from bbnode.engine.limits import Limits
from bbnode.engine.node import Node
from bbnode.engine.planning.program import ProgramPlan, plan_program
from bbnode.engine.snapshot.whole import Adopted, saved_components

__all__ = [
    "FIRST_PROGRAM_KIND",
    "Adopted",
    "All",
    "BootstrapInfo",
    "BootstrapRequest",
    "BootstrapStatus",
    "BootstrapTarget",
    "BusKind",
    "Limits",
    "ModuleNames",
    "ModuleRequests",
    "Node",
    "ProgramPlan",
    "Slots",
    "errors",
    "install",
    "plan_program",
    "saved_components",
    "steps",
]
