"""The demo's view: live on a terminal, one line per event elsewhere.

Rule: it only draws what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bbnode.daemon.observing.live_view import LiveView, size
from bbnode.ir.texts import printable

_SHOWN_ROUNDS = 12
_SHOWN_NOTES = 6


class DemoView(LiveView):
    """Progress of one demo; a context manager."""

    def __init__(self, console: Console, *, rounds: int, names: Mapping[str, str]) -> None:
        """`names` maps a PeerId to the daemon's name."""
        self._total = rounds
        self._names = names
        self._rows: list[Mapping[str, Any]] = []
        self._running: int | None = None
        self._answered: list[str] = []
        super().__init__(
            console, notes=_SHOWN_NOTES, get_renderable=self._draw, refresh_per_second=8
        )

    def round_started(self, number: int) -> None:
        """Show that a round is under way."""
        self._running = number
        self._answered = []

    def answered(self, peer: str) -> None:
        """Show that a client answered in the running round."""
        self._answered.append(self._names.get(peer, peer[-6:]))

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Show a round that ended."""
        self._running = None
        self._rows.append(row)
        if self._live is None:
            self._console.print(Text(self._line(row)), soft_wrap=True)

    def _line(self, row: Mapping[str, Any]) -> str:
        head = f"round {row['round']:>3}/{self._total}"
        if not row["ok"]:
            return f"{head}  FAILED  {printable('; '.join(row['failures']))}"
        missing = printable(_missing(row, self._names))
        return (
            f"{head}  accuracy {row['accuracy']:7.2%}  loss {row['loss']:.4f}  "
            f"{row['seconds']:6.2f} s  {size(row['bytes']):>9}  "
            f"answered {len(row['responded'])}" + (f"  missing {missing}" if missing else "")
        )

    def _draw(self) -> Group:
        table = summary_table(self._rows[-_SHOWN_ROUNDS:], self._names)
        if self._running is not None:
            answered = ", ".join(sorted(self._answered)) or "nobody yet"
            state = f"round {self._running}/{self._total}: answered: {answered}"
        else:
            state = f"{len(self._rows)}/{self._total} rounds"
        return Group(*self._note_lines(), table, Text(state))


def summary_table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Table:
    """Return the rounds as a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("round", "accuracy", "loss", "seconds", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("answered", justify="right")
    table.add_column("missing")
    for row in rows:
        if row["ok"]:
            table.add_row(
                str(row["round"]),
                f"{row['accuracy']:.2%}",
                f"{row['loss']:.4f}",
                f"{row['seconds']:.2f}",
                size(row["bytes"]),
                str(len(row["responded"])),
                printable(_missing(row, names)),
            )
        else:
            why = printable("; ".join(row["failures"])) or "failed"
            table.add_row(str(row["round"]), "failed", "", f"{row['seconds']:.2f}", "", "", why)
    return table


def _missing(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the missing peers by name, each with its reason where one is known."""
    why = {names.get(peer, peer[-6:]): text for peer, text in row["missing_why"].items()}
    found = sorted(names.get(peer, peer[-6:]) for peer in row["missing"])
    return ", ".join(f"{name} ({why[name]})" if name in why else name for name in found)
