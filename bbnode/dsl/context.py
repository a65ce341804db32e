"""Which Module is being recorded, for errors that are raised where no Graph is at hand.

Rule: the recorder sets it and nothing but error messages reads it; what is recorded never
depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A context variable, so that two threads that build programs do not see each other's.
_PATH: ContextVar[str] = ContextVar("bbnode_module_path", default="")


def recorded_module() -> str:
    """Names of the Modules being recorded, outermost first, joined by "/"; "" outside of one."""
    return _PATH.get()


@contextmanager
def recording(path: str) -> Iterator[None]:
    """Inside, `path` is what is being recorded."""
    token = _PATH.set(path)
    try:
        yield
    finally:
        _PATH.reset(token)
