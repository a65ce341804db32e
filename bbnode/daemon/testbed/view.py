"""The view of a testbed: live on a terminal, one line per event elsewhere.

Rule: it only draws what it is given. The scalar outputs of a round are columns, in the order in
which they first came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bbnode.daemon.invoke.rounds import CODED_METRICS
from bbnode.daemon.observing.live_view import LiveView, size
from bbnode.daemon.testbed.report import numbers_of
from bbnode.ir.texts import printable

SHOWN_ROUNDS = 12
_SHOWN_NOTES = 6
_SHOWN_COLUMNS = 6
_SHOWN_STATES = 8
_SHOWN_VALUES = 8
_TREND_ROUNDS = 40
_MAX_VALUE_CHARS = 100
_MAX_PLAIN_INTEGER = 1e15
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH_OF_A_FILE = 200
READY = "ready"


def console(*, stderr: bool = False) -> Console:
    """Return the console of a testbed; without a terminal lines are long rather than cut."""
    made = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not made.is_terminal:
        made.width = _WIDTH_OF_A_FILE
    return made


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
        """`names` maps a PeerId to the node's name; `rounds` 0 is any number of them."""
        self._total = rounds
        self._names = names
        # With several of them a round needs the name of the node that made it.
        self._named = len(invokers) > 1
        self._rows: list[Mapping[str, Any]] = []
        self._running: dict[str, int] = {}
        self._answered: list[str] = []
        self._states: dict[str, str] = {}
        # Outputs outside rounds: the last value of each, and how many there were.
        self._values: dict[tuple[str, str], tuple[Any, int]] = {}
        super().__init__(
            console, notes=_SHOWN_NOTES, get_renderable=self._draw, refresh_per_second=8
        )

    @property
    def is_live(self) -> bool:
        """True on a terminal."""
        return self._live is not None

    def state(self, node: str, text: str) -> None:
        """Show what a node is doing, in a word or with a reason."""
        if self._states.get(node) == text:
            return
        was = self._states.get(node)
        self._states[node] = text
        if self._live is None and was is not None:
            self.note(f"{node} is {text}")

    def print(self, text: str) -> None:
        """Print a line that stays: above a live view, or as any other."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def round_started(self, number: int, node: str = "") -> None:
        """Show that a round is under way."""
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
        """Show an output that belongs to no round; return how many there were of it."""
        count = self._values.get((node, output), (None, 0))[1] + 1
        self._values[node, output] = value, count
        return count

    def _line(self, row: Mapping[str, Any]) -> str:
        who = f"{row['node']} " if self._named else ""
        of = f"/{self._total}" if self._total else ""
        head = f"{who}round {row['round']:>3}{of}"
        if not row["ok"]:
            return f"{head}  FAILED  {printable(failures_text(row, self._names))}"
        missing = printable(missing_text(row, self._names))
        refused = printable(refused_text(row, self._names))
        numbers = list(numbers_of(row["outputs"]).items())[:_SHOWN_COLUMNS]
        shown = "".join(f"{printable(name)} {number(name, value)}  " for name, value in numbers)
        return (
            f"{head}  {shown}{row['seconds']:6.2f} s  {size(row['bytes']):>9}  {_coded(row)}"
            f"answered {len(set(row['responded']))}"
            + (f"  missing {missing}" if missing else "")
            + (f"  refused {refused}" if refused else "")
        )

    def _draw(self) -> Group:
        parts: list[Any] = [*self._note_lines()]
        if self._states:
            parts.append(Text(states_text(self._states)))
        if self._values:
            parts.append(self._value_table())
        if self._rows or self._running:
            parts.append(summary_table(self._rows[-SHOWN_ROUNDS:], self._names, self._named))
            parts += [Text(line) for line in trends(self._rows)]
            parts.append(Text(self._progress()))
        return Group(*parts)

    def _progress(self) -> str:
        of = f"/{self._total}" if self._total else ""
        if len(self._running) == 1:
            (running,) = self._running.values()
            answered = ", ".join(sorted(set(self._answered))) or "nobody yet"
            return f"round {running}{of}: answered: {printable(answered)}"
        return f"{len(self._rows)}{'' if self._named else of} rounds"

    def _value_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("node", "output", "times", "value"):
            table.add_column(column, justify="right" if column == "times" else "left")
        shown = list(self._values.items())
        for (node, output), (value, count) in shown[:_SHOWN_VALUES]:
            table.add_row(*map(_text, (node, output, str(count), value_text(value, self._names))))
        if len(shown) > _SHOWN_VALUES:
            table.add_row("…", f"{len(shown) - _SHOWN_VALUES} more", "", "")
        return table


def states_text(states: Mapping[str, str]) -> str:
    """Return the states of nodes on one line: those that are ready are counted."""
    counts = Counter(states.values())
    others = [f"{name}: {state}" for name, state in states.items() if state != READY]
    text = f"{counts[READY]} of {len(states)} nodes ready"
    if len(others) > _SHOWN_STATES:
        others = [*others[:_SHOWN_STATES], f"and {len(others) - _SHOWN_STATES} more"]
    return printable("; ".join([text, *others]))


def summary_table(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], named: bool = False
) -> Table:
    """Return the rounds as a table; `named` adds the node that made each."""
    outputs = list(dict.fromkeys(name for row in rows for name in numbers_of(row["outputs"])))
    outputs = outputs[:_SHOWN_COLUMNS]
    table = Table(box=None, pad_edge=False)
    for column in ("node",) if named else ():
        table.add_column(column)
    for column in ("round", *outputs, "seconds", "bytes", "answered"):
        table.add_column(_text(column), justify="right")
    table.add_column("missing")
    if any(row["refused"] for row in rows):
        table.add_column("refused")
    for row in rows:
        who = [row["node"]] if named else []
        values = numbers_of(row["outputs"]) if row["ok"] else {}
        shown = [number(name, values[name]) if name in values else "" for name in outputs]
        cells = [*who, str(row["round"]), *shown, f"{row['seconds']:.2f}"]
        if row["ok"]:
            cells += [size(row["bytes"]), str(len(set(row["responded"]))), missing_text(row, names)]
        else:
            cells += ["", "", f"FAILED: {failures_text(row, names)}"]
        table.add_row(*map(_text, [*cells, refused_text(row, names)][: len(table.columns)]))
    return table


def _text(shown: str) -> Text:
    """Return what a program or a peer named as it stands: it may look like Rich's markup."""
    return Text(printable(shown))


def trends(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each scalar output, with its course over the last rounds as bars."""
    series: dict[str, list[float]] = {}
    for row in rows[-_TREND_ROUNDS:]:
        if row["ok"]:
            for name, value in numbers_of(row["outputs"]).items():
                series.setdefault(name, []).append(value)
    shown = [(name, values) for name, values in series.items() if len(values) > 1]
    shown = shown[:_SHOWN_COLUMNS]
    width = max((len(name) for name, _ in shown), default=0)
    return [
        f"{printable(name):<{width}} {bars(values)} {number(name, values[-1])}"
        for name, values in shown
    ]


def bars(values: Sequence[float]) -> str:
    """Return numbers as a row of bars; one that is not finite is a blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    if not 0 < span < float("inf"):
        return "".join(_BARS[3] if abs(value) < float("inf") else " " for value in values)
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if abs(value) < float("inf") else " "
        for value in values
    )


def number(name: str, value: float) -> str:
    """Return a number as people read it; an accuracy in percent."""
    if name.endswith("accuracy") and 0 <= value <= 1:
        return f"{value:.2%}"
    if value.is_integer() and 1 <= abs(value) < _MAX_PLAIN_INTEGER:
        return f"{value:.0f}"
    is_usual = value == 0 or 1e-3 <= abs(value) < 1e4
    return f"{value:.4f}" if is_usual else f"{value:.3e}"


def value_text(value: Any, names: Mapping[str, str]) -> str:
    """Return any output on one line, cut where it is long, nodes by their names."""
    text = f"{value:.6g}" if isinstance(value, float) else _named(value, names)
    text = printable(text)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def failures_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return why a round failed, nodes by their names."""
    text = "; ".join(row["failures"]) or "no reason was told"
    for peer, name in names.items():
        text = text.replace(peer, name)
    return text


def _named(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_named(each, names) for each in value)}]"
    if isinstance(value, dict):
        inner = (f"{_named(k, names)}: {_named(each, names)}" for k, each in value.items())
        return f"{{{', '.join(inner)}}}"
    return names.get(value, value) if isinstance(value, str) else str(value)


def missing_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the missing peers by name, each with its reason where one is known."""
    why = {names.get(peer, peer[-6:]): text for peer, text in row["missing_why"].items()}
    # A round may hold several requests; each tells of all.
    found = sorted({names.get(peer, peer[-6:]) for peer in row["missing"]})
    return ", ".join(f"{name} ({why[name]})" if name in why else name for name in found)


def refused_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the peers whose answers were not counted by name, each with the reason."""
    why = {names.get(peer, peer[-6:]): text for peer, text in row["refused"].items()}
    return ", ".join(f"{name} ({why[name]})" for name in sorted(why))


def _coded(row: Mapping[str, Any]) -> str:
    """Return what the codecs of a round saved, "" without any."""
    raw, code = (row.get(name) for name in CODED_METRICS)
    return f"codecs {size(raw)} as {size(code)}  " if raw and code else ""
