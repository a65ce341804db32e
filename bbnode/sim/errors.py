"""Errors of a simulation. All of them are the fault of its author."""

from __future__ import annotations

from bbnode.ir.errors import BbnodeError


class SimError(BbnodeError):
    """Base of the simulator's errors."""


class InvalidLink(SimError):
    """A link has a latency or a probability out of its range."""


class InvalidClock(SimError):
    """A clock has an impossible drift or offset."""


class NameTaken(SimError):
    """Two nodes of one network have the same name."""


class UnknownSimNode(SimError):
    """The network has no node of that name."""


class NodeIsDown(SimError):
    """A crashed node was asked for something; restart it first."""


class NodeIsElsewhere(SimError):
    """A node of a SplitNetwork was asked for what can't leave the process that runs it."""


class NotSplit(SimError):
    """Something can't be simulated in several processes."""


class ProcessFailed(SimError):
    """A process of a SplitNetwork has died, or failed; the network can't go on."""


class NotReached(SimError):
    """A run ended before its condition came true: time is over, or nothing is left to happen."""


class TimeStandsStill(SimError):
    """Events go on for ever without virtual time advancing."""


class InvariantBroken(SimError):
    """An invariant, which has to hold in every run, is broken."""


class ScenarioFailed(SimError):
    """A scenario failed with one seed; the message says how to reproduce it."""
