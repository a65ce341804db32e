"""The simulator: many real nodes in one process, on virtual time, from one seed.

Rule: nothing here reads a clock, sleeps or draws outside of the seed; the same program, calls
and seed give the same trace. The nodes are those of `bbnode.engine`: only what lies between
them is simulated.
"""

from __future__ import annotations

from bbnode.engine import steps
from bbnode.sim.clock import Clock
from bbnode.sim.errors import (
    InvalidClock,
    InvalidLink,
    NameTaken,
    NodeIsDown,
    NotReached,
    SimError,
    TimeStandsStill,
    UnknownSimNode,
)
from bbnode.sim.link import MS, Link, S
from bbnode.sim.network import Network
from bbnode.sim.node import SimNode
from bbnode.sim.trace import Trace

__all__ = [
    "MS",
    "S",
    "Clock",
    "Link",
    "Network",
    "SimNode",
    "Trace",
    "steps",
    "SimError",
    "InvalidClock",
    "InvalidLink",
    "NameTaken",
    "NodeIsDown",
    "NotReached",
    "TimeStandsStill",
    "UnknownSimNode",
]
