"""Errors of differential privacy."""

from __future__ import annotations

from typing import ClassVar

from bbnode.components.errors import ComponentError, UnsupportedByModel
from bbnode.ir.errors import DeploymentError, EnvironmentFault


class BudgetSpent(ComponentError, DeploymentError):
    """A round, or training, would spend more than the budget; it did not begin."""

    is_final: ClassVar[bool] = True


class NotPrivate(UnsupportedByModel):
    """A program asks a private model for what would have no noise."""

    def __init__(self, message: str) -> None:
        ComponentError.__init__(self, message)


class NoSuchRelease(ComponentError):
    """A release of a round that was not charged, or was released already."""


class LedgerUnavailable(ComponentError, EnvironmentFault):
    """The file of a ledger can't be read or written, so that no round begins."""


class AccountantUnavailable(ComponentError, EnvironmentFault):
    """The library that tells epsilon is not installed."""
