"""Errors of indexes, one class per reason.

Rule: as in `bbnode.components.errors`. Each is a `ComponentError`, so that only the op fails; the
second base says whose fault it is.
"""

from __future__ import annotations

from bbnode.components.errors import ComponentError
from bbnode.ir.errors import AuthorError, DeploymentError, EnvironmentFault


class WrongDimensions(ComponentError, AuthorError):
    """A vector, a query or a batch of them has another shape than the index takes."""


class VectorRefused(ComponentError, AuthorError):
    """A vector or a query holds NaN or infinity, is too long, or has no direction to compare."""


class ItemRefused(ComponentError, AuthorError):
    """Ids or metadata do not belong to the vectors that they are given with, or can't be kept."""


class InvalidSearch(ComponentError, AuthorError):
    """A search asks for no neighbours, or for more than an answer may hold."""


class FilterRefused(ComponentError, AuthorError):
    """A `where` has an operator that there is not, or a value that its operator does not take."""


class NotTrained(ComponentError, AuthorError):
    """An index has to be trained before it can be used like this."""


class TrainingRefused(ComponentError, AuthorError):
    """An index can't be fitted to these examples: there are too few of them."""


class SearchRefused(ComponentError):
    """The owner of an index does not allow this search, or not now."""


class IndexUnavailable(ComponentError, EnvironmentFault):
    """The files of an index can't be read or written."""


class IndexInUse(ComponentError, EnvironmentFault):
    """Another process has the directory of an index open."""


class IndexDamaged(ComponentError, EnvironmentFault):
    """The files of an index do not hold what was written to them."""


class IndexMismatch(ComponentError, DeploymentError):
    """A directory holds an index of another format, metric or dimension than is asked for."""
