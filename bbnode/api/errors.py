"""The errors of the Python API; all others are those of the layers below, as they are."""

from __future__ import annotations

from bbnode.ir.errors import DeploymentError, EnvironmentFault


class NodeStopped(EnvironmentFault):
    """The node no longer runs: it was stopped, or died of the error that is the cause."""


class WaitTimeout(EnvironmentFault):
    """A wait ended at its timeout."""


class InputRefused(DeploymentError):
    """A value can't be an input: it is no array, number, text or other type of a program."""


class ForkedProcess(DeploymentError):
    """This process is a fork of one that ran nodes, whose threads it does not have."""


class LoopBlocked(DeploymentError):
    """A blocking call on the thread that runs the nodes, which would wait for itself."""


class NodeNotReady(DeploymentError):
    """The node can't do its work: the data of a slot are missing or do not fit, for instance."""
