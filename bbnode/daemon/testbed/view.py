"""The view of a testbed: live on a terminal, one line per event elsewhere.

Rule: it only draws; rounds as in `bbnode.daemon.observing.round_table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bbnode.daemon.invoke.rounds import CODED_METRICS
from bbnode.daemon.observing import round_table
from bbnode.daemon.observing.live_view import LiveView, size
from bbnode.daemon.observing.round_table import as_text
from bbnode.ir.texts import printable

SHOWN_ROUNDS = 12
_SHOWN_NOTES = 6
_SHOWN_STATES = 8
_SHOWN_VALUES = 8
_MAX_VALUE_CHARS = 100
_WIDTH_OF_A_FILE = 200
READY = "ready"


def console(*, stderr: bool = False) -> Console:
    """Return the console of a testbed; without a terminal lines are long rather than cut."""
    created = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not created.is_terminal:
        created.width = _WIDTH_OF_A_FILE
    return created


class RoundsView(LiveView):
    """Progress of one testbed; a context manager."""

    def __init__(
        self,
        console: Console,
        *,
        rounds: int,
        names: Mapping[str, str],
        invokers: Sequence[str] = (),
    ) -> None:
        """Create a view; `names` maps a PeerId to the node's name; `rounds` 0: any number."""
        self._total = rounds
        self._names = names
        # With several invokers, a round is shown with the name of its node.
        self._named = len(invokers) > 1
        self._rows: list[Mapping[str, Any]] = []
        self._running: dict[str, int] = {}
        self._answered: list[str] = []
        self._states: dict[str, str] = {}
        # Lines about states that were printed, for a view that is not live.
        self._said: set[tuple[str, str]] = set()
        # Outputs outside rounds: the last value of each, and their number.
        self._values: dict[tuple[str, str], tuple[Any, int]] = {}
        super().__init__(
            console, notes=_SHOWN_NOTES, get_renderable=self._draw, refresh_per_second=8
        )

    @property
    def is_live(self) -> bool:
        """True on a terminal."""
        return self._live is not None

    def state(self, node: str, text: str) -> None:
        """Show the state of a node, in a word or with a reason."""
        if self._states.get(node) == text:
            return
        was = self._states.get(node)
        self._states[node] = text
        if self._live is None and was is not None and (node, text) not in self._said:
            self._said.add((node, text))
            self.note(f"{node} is {text}")

    def print(self, text: str) -> None:
        """Print a line that stays: above a live view, or as any other."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def round_started(self, number: int, node: str = "") -> None:
        """Show that a round is running."""
        self._running[node] = number
        self._answered = []

    def answered(self, peer: str) -> None:
        """Show that a peer answered in the running round."""
        self._answered.append(self._names.get(peer, peer[-6:]))

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Show a round that ended."""
        node = row.get("node", "")
        # The next one may have begun.
        if self._running.get(node) == row["round"]:
            del self._running[node]
        self._rows.append(row)
        if self._live is None:
            self._console.print(Text(self._line(row)), soft_wrap=True)

    def value(self, node: str, output: str, value: Any) -> int:
        """Show an output outside rounds; return how many there were of it."""
        count = self._values.get((node, output), (None, 0))[1] + 1
        self._values[node, output] = value, count
        return count

    def _line(self, row: Mapping[str, Any]) -> str:
        who = f"{row['node']} " if self._named else ""
        of = f"/{self._total}" if self._total else ""
        head = f"{who}round {row['round']:>3}{of}"
        if not row["ok"]:
            return f"{head}  FAILED  {printable(round_table.failures_text(row, self._names))}"
        missing = printable(round_table.missing_text(row, self._names))
        lost = round_table.lost_text(row)
        refused = printable(round_table.refused_text(row, self._names))
        numbers = list(round_table.scalar_outputs(row).items())[: round_table.SHOWN_COLUMNS]
        shown = "".join(
            f"{printable(name)} {round_table.number(name, value)}  " for name, value in numbers
        )
        return (
            f"{head}  {shown}{row['seconds']:6.2f} s  {size(row['bytes']):>9}  {_coded(row)}"
            f"answered {round_table.answered_text(row)}"
            + (f", {lost}" if lost else "")
            + (f"  missing {missing}" if missing else "")
            + (f"  not counted {refused}" if refused else "")
        )

    def _draw(self) -> Group:
        parts: list[Any] = [*self._note_lines()]
        if self._states:
            parts.append(Text(states_text(self._states)))
        if self._values:
            parts.append(self._value_table())
        if self._rows or self._running:
            parts.append(self.table(self._rows[-SHOWN_ROUNDS:]))
            parts += [Text(line) for line in round_table.trends(self._rows)]
            parts.append(Text(self._progress()))
        return Group(*parts)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return rounds as a table that fits the console."""
        return round_table.rounds_table(
            rows, self._names, width=self._console.width, by="node" if self._named else ""
        )

    def _progress(self) -> str:
        of = f"/{self._total}" if self._total else ""
        if len(self._running) == 1:
            (running,) = self._running.values()
            answered = ", ".join(sorted(set(self._answered))) or "nobody yet"
            return f"round {running}{of}, answered by {printable(answered)}"
        return f"{len(self._rows)}{'' if self._named else of} rounds"

    def _value_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("node", "output", "times", "value"):
            table.add_column(column, justify="right" if column == "times" else "left")
        shown = list(self._values.items())
        for (node, output), (value, count) in shown[:_SHOWN_VALUES]:
            table.add_row(*map(as_text, (node, output, str(count), value_text(value, self._names))))
        if len(shown) > _SHOWN_VALUES:
            table.add_row("…", f"{len(shown) - _SHOWN_VALUES} more", "", "")
        return table


def print_summary(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    *,
    named: bool = False,
) -> None:
    """Print the part of a run's rounds that is not on the screen yet.

    On a terminal that is the table if there are many rounds; few are in the last picture of the
    live view. Elsewhere each round has had its line, and the courses of the metrics are left.
    """
    if console.is_terminal and len(rows) <= SHOWN_ROUNDS:
        return
    if console.is_terminal:
        by = "node" if named else ""
        console.print(round_table.rounds_table(rows, names, width=console.width, by=by))
    for line in round_table.trends(rows):
        console.print(line, soft_wrap=True)


def states_text(states: Mapping[str, str]) -> str:
    """Return the states of nodes on one line, with a count of those that are ready."""
    counts = Counter(states.values())
    others = [f"{name}: {state}" for name, state in states.items() if state != READY]
    text = f"{counts[READY]} of {len(states)} nodes ready"
    if len(others) > _SHOWN_STATES:
        others = [*others[:_SHOWN_STATES], f"and {len(others) - _SHOWN_STATES} more"]
    return printable("; ".join([text, *others]))


def value_text(value: Any, names: Mapping[str, str]) -> str:
    """Return any output on one line, cut if it is long, with the names of nodes."""
    text = f"{value:.6g}" if isinstance(value, float) else _named(value, names)
    text = printable(text)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def _named(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_named(each, names) for each in value)}]"
    if isinstance(value, dict):
        inner = (f"{_named(k, names)}: {_named(each, names)}" for k, each in value.items())
        return f"{{{', '.join(inner)}}}"
    return names.get(value, value) if isinstance(value, str) else str(value)


def _coded(row: Mapping[str, Any]) -> str:
    """Return the saving by the codecs of a round, "" without any."""
    raw, code = (row.get(name) for name in CODED_METRICS)
    return f"codecs {size(raw)} as {size(code)}  " if raw and code else ""
