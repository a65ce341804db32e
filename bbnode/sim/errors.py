"""Errors of a simulation, all of which are its author's to fix."""

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
    """The node has crashed; restart it first."""


class NodeIsElsewhere(SimError):
    """An object of a SplitNetwork's node can't leave the process that runs the node."""


class NotSplit(SimError):
    """Something can't be simulated in several processes."""


class ProcessFailed(SimError):
    """A process of a SplitNetwork has died or failed; the network can't continue."""


class NotReached(SimError):
    """A run ended before its condition became true: at its limit, or without further events."""


class TimeStandsStill(SimError):
    """Events continue forever without virtual time advancing."""


class InvariantBroken(SimError):
    """An invariant, which has to hold in every run, is broken."""


class ScenarioFailed(SimError):
    """A scenario failed with one seed; the message says how to reproduce it."""
