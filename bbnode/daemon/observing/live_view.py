"""A view that redraws itself on a terminal, and prints plain lines anywhere else.

Rule: views of progress derive from `LiveView`; `_live` is set on a terminal.
"""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bbnode.ir.texts import printable


class LiveView:
    """A context manager around rich's Live, if the console is a terminal."""

    def __init__(self, console: Console, *, notes: int, **options: Any) -> None:
        """Keep the last `notes` notes; `options` are those of `rich.live.Live`."""
        self._console = console
        self._most_notes = notes
        self._notes: list[str] = []
        self._live = Live(console=console, **options) if console.is_terminal else None

    def note(self, text: str) -> None:
        """Show an event: a line, or one of the notes above the live view."""
        text = printable(text)
        if self._live is None:
            self._console.print(Text(text), soft_wrap=True)
        elif self._notes[-1:] != [text]:
            self._notes = [*self._notes, text][-self._most_notes :]

    def _note_lines(self) -> list[Text]:
        return [Text(note, style="dim") for note in self._notes]

    def __enter__(self) -> Self:
        """Start the live view; what is printed from now on appears above it."""
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)


def size(count: float) -> str:
    """Return a number of bytes with a unit for people."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
