"""A view that redraws itself on a terminal, and is plain lines anywhere else.

Rule: who shows progress derives from `LiveView`, and asks `_live` which of the two it is.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live


class LiveView:
    """A context manager around rich's Live, where the console is a terminal."""

    def __init__(self, console: Console, **options: Any) -> None:
        """`options` are those of `rich.live.Live`."""
        self._console = console
        self._live = Live(console=console, **options) if console.is_terminal else None

    def __enter__(self) -> Self:
        """From here on what is printed stands above the live view."""
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
