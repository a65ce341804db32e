"""The simulator: many real nodes in one process, on virtual time, from one seed.

`Network` is the simulator; `draw_faults`, `invariants` and `check` help to find faults in the
programs that run in it.

Rule: nothing here reads a clock, sleeps or draws randomness except from the seed; the same program,
calls and seed give the same trace. The nodes are those of `bbnode.engine`: only the network between
them is simulated.
"""

from __future__ import annotations

from bbnode.engine import steps
from bbnode.sim.errors import (
    InvalidClock,
    InvalidLink,
    InvariantBroken,
    NameTaken,
    NodeIsDown,
    NodeIsElsewhere,
    NotReached,
    NotSplit,
    ProcessFailed,
    ScenarioFailed,
    SimError,
    TimeStandsStill,
    UnknownSimNode,
)
from bbnode.sim.faults import Crash, Cut, Faults, Save, draw_faults
from bbnode.sim.models import MS, Clock, LinkModel, S
from bbnode.sim.network import Network
from bbnode.sim.node import SimNode
from bbnode.sim.scenario import check
from bbnode.sim.split import SplitNetwork
from bbnode.sim.trace import Trace

__all__ = [
    "MS",
    "S",
    "Clock",
    "LinkModel",
    "Network",
    "SimNode",
    "SplitNetwork",
    "Trace",
    "steps",
    "Faults",
    "Save",
    "Crash",
    "Cut",
    "draw_faults",
    "check",
    "SimError",
    "InvalidClock",
    "InvalidLink",
    "InvariantBroken",
    "NameTaken",
    "NodeIsDown",
    "NodeIsElsewhere",
    "NotReached",
    "NotSplit",
    "ProcessFailed",
    "ScenarioFailed",
    "TimeStandsStill",
    "UnknownSimNode",
]
