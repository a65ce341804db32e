"""Exit codes, and the one place that turns an error into one.

Rule: the nearest base class of an error that is in the table decides. Classes are listed by name,
so that looking up a code imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

OK = 0
FAILURE = 1
USAGE = 2
UNREACHABLE = 3
TIMEOUT = 4
REFUSED = 5
# 128 + SIGINT, as a shell reports it.
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    OK: "done",
    FAILURE: "failed: this machine or the daemon could not do it",
    USAGE: "wrong usage or configuration",
    UNREACHABLE: "no daemon is running there, or it cannot be reached",
    TIMEOUT: "not done in time",
    REFUSED: "the program or artifact is invalid and was refused",
}

_CODES: dict[str, int] = {
    # The four families of bbnode.ir.errors.
    "bbnode.ir.errors.AuthorError": REFUSED,
    "bbnode.ir.errors.DeploymentError": USAGE,
    "bbnode.ir.errors.EnvironmentFault": FAILURE,
    "bbnode.ir.errors.PeerError": FAILURE,
    # Exceptions to the code of their family. Nodes meet these in programs; on the command line they
    # come from what was typed.
    "bbnode.components.indexes.errors.FilterRefused": USAGE,
    "bbnode.components.indexes.errors.InvalidSearch": USAGE,
    "bbnode.components.indexes.errors.ItemRefused": USAGE,
    "bbnode.components.indexes.errors.NotTrained": USAGE,
    "bbnode.components.indexes.errors.VectorRefused": USAGE,
    "bbnode.components.indexes.errors.WrongDimensions": USAGE,
    "bbnode.daemon.control.errors.AlreadyRunning": FAILURE,
    "bbnode.daemon.control.errors.ControlProtocolError": FAILURE,
    "bbnode.daemon.control.errors.ControlTimeout": TIMEOUT,
    "bbnode.daemon.control.errors.NotRunning": UNREACHABLE,
    "bbnode.daemon.paths.StateDirInUse": FAILURE,
}


# HTTP status codes of a daemon (RFC 9110): our mistake, too late, or its own trouble.
_STATUSES: dict[int, int] = {400: USAGE, 404: USAGE, 422: REFUSED, 504: TIMEOUT}


def table() -> dict[str, int]:
    """Return the table by qualified class name, for the test that every name exists."""
    return dict(_CODES)


def code_for(error: BaseException) -> int:
    """Return the exit code of an error."""
    # A daemon's refusal has no class here, only its HTTP status.
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return _STATUSES.get(status, FAILURE)
    for cls in type(error).__mro__:
        code = _CODES.get(f"{cls.__module__}.{cls.__qualname__}")
        if code is not None:
            return code
    return FAILURE


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside a group, depth first; an error that is not a group, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def help_text() -> str:
    """Return the table as `bbnode --help` shows it."""
    return "Exit codes:\n" + "\n".join(f"  {code}  {text}" for code, text in MEANINGS.items())
