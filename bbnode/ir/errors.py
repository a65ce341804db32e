"""The base classes of all errors that bbnode raises.

Rule: the class tells whose fault it is; the message has the fault, the place and the remedy.
The command line maps the four families to exit codes in one place.
"""

from __future__ import annotations

from typing import ClassVar


class BbnodeError(Exception):
    """Base of all errors raised on purpose by bbnode.

    Attributes:
        is_final: True if every retry would fail in the same way.
    """

    is_final: ClassVar[bool] = False


class AuthorError(BbnodeError):
    """The program is wrong: its author has to change it (DSL, compiler, components)."""


class ProgramTooLarge(AuthorError):
    """A program with its weights is larger than one protobuf can be."""


class DeploymentError(BbnodeError):
    """The program is fine; the way it is configured or installed here is not."""


class PeerError(BbnodeError):
    """A remote peer sent something that we refuse."""


class MissingFile(DeploymentError):
    """A named file does not exist: the name is wrong, or the file has to be created."""


class EnvironmentFault(BbnodeError):
    """This machine denied something: a port in use, an unreadable file, a full disk."""


class DecodeError(PeerError):
    """Bytes from outside do not decode to the value they claim to be."""


class AllocationFailed(DecodeError):
    """There is not enough memory for the value that bytes from outside claim to be."""
