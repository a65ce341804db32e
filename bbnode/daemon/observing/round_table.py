"""Rounds as a table, and the course of their metrics, for people.

Rule: it fits a given width. Each scalar output of a round is a column; columns that do not fit are
left out, and `left_out` names them. Peers are shown by a name if one is known, else by the end of
their PeerId.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from bbnode.daemon.history.scalars import metric_order
from bbnode.daemon.observing.live_view import size
from bbnode.ir.texts import printable

# Metric columns of a table without a terminal, and of the lines below it.
SHOWN_COLUMNS = 6
# Characters of the columns beside the metrics with the gaps between all, and of the column of
# missing peers.
_FIXED_CHARS = 40
_MISSING_CHARS = 24
_GAP_CHARS = 2
_NUMBER_CHARS = 8
_TREND_ROUNDS = 40
_MAX_PLAIN_INTEGER = 1e15
_BARS = "▁▂▃▄▅▆▇█"
# The PeerId of an Ed25519 key in base58.
_PEER_ID = re.compile(r"\b12D3Koo\w{45}\b")
_SHORT_CHARS = 6
_MINUTE_S, _HOUR_S = 60, 3600


def scalar_outputs(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar outputs of a round; entries of Metadata only if there is nothing else.

    `row` is a round of the control plane, or a row of a testbed's report.
    """
    outputs = row["metrics"] if "metrics" in row else row["outputs"]
    numbers = {
        name: float(outputs[name])
        for name in sorted(outputs, key=metric_order)
        if isinstance(outputs[name], int | float) and not isinstance(outputs[name], bool)
    }
    return {name: number for name, number in numbers.items() if "." not in name} or numbers


def metric_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all scalar outputs, losses first."""
    return list(dict.fromkeys(name for row in rows for name in scalar_outputs(row)))


def left_out(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Return the metrics for which a table of this width has no column."""
    return metric_names(rows)[_metric_columns(rows, width) :]


def _metric_columns(rows: Sequence[Mapping[str, Any]], width: int) -> int:
    room = width - _FIXED_CHARS - (_MISSING_CHARS if any(map(_notes, rows)) else 0)
    count = 0
    for name in metric_names(rows)[:SHOWN_COLUMNS]:
        room -= max(len(name), _NUMBER_CHARS) + _GAP_CHARS
        if room < 0:
            break
        count += 1
    return count


def _notes(row: Mapping[str, Any]) -> bool:
    return bool(row["missing"] or row["refused"] or not row["ok"])


def rounds_table(
    rows: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    *,
    width: int,
    by: str = "",
    title: str | None = None,
) -> Table:
    """Return the rounds as a table of at most `width` characters.

    `names` maps PeerIds to names; `by` is the key of a row that the first column shows, as "node".
    Only the last round that was the best so far is marked.
    """
    metrics = metric_names(rows)[: _metric_columns(rows, width)]
    best = max((n for n, row in enumerate(rows) if row.get("best")), default=None)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    if by:
        table.add_column(by)
    for column in ("round", *metrics, "seconds", "bytes", "answered"):
        table.add_column(as_text(column), justify="right")
    with_notes = any(map(_notes, rows))
    if with_notes:
        table.add_column("missing", overflow="fold")
    for n, row in enumerate(rows):
        values = scalar_outputs(row) if row["ok"] else {}
        cells = [str(row[by])] if by else []
        cells.append(f"{row['round']}{'*' if n == best else ''}")
        cells += [number(name, values[name]) if name in values else "" for name in metrics]
        cells += [duration(row["seconds"]), size(row["bytes"]), answered_text(row)]
        if with_notes:
            cells.append(notes_text(row, names))
        table.add_row(*map(as_text, cells))
    return table


def as_text(shown: str) -> Text:
    """Return a name of a program or a peer unchanged: it may look like Rich's markup."""
    return Text(printable(shown))


def answered_text(row: Mapping[str, Any]) -> str:
    """Return the peers that answered everything and all asked peers, as "3/4"."""
    # Rounds of earlier releases list a peer that answered one of two requests in both.
    missing = set(row["missing"])
    answered = set(row["responded"]) - missing
    return f"{len(answered)}/{len(answered) + len(missing)}"


def lost_text(row: Mapping[str, Any]) -> str:
    """Return the number of peers that answered only some requests, as "2 lost on the way"."""
    lost = set(row.get("lost", ())) or set(row["responded"]) & set(row["missing"])
    return f"{len(lost)} lost on the way" if lost else ""


def notes_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the notes on a round: why it failed, and the missing or refused peers."""
    failed = "" if row["ok"] else f"FAILED: {failures_text(row, names)}"
    refused = refused_text(row, names)
    parts = [
        failed,
        lost_text(row),
        missing_text(row, names),
        f"not counted: {refused}" if refused else "",
    ]
    return "; ".join(filter(None, parts))


def progress_text(entry: Mapping[str, Any]) -> str:
    """Return the progress of one target's rounds, from their entry in the control plane's list."""
    of = entry["of"] or "any number of"
    text = f"{entry['target'].partition('#')[0]}: {entry['done']} of {of} rounds"
    best = entry.get("best") or {}
    if best.get("round"):
        text += f", best {best['metric']} {best['value']:.6g} in round {best['round']}"
    if entry["waiting_for"]:
        return f"{text}, waiting for {entry['waiting_for']}"
    if entry.get("stopped"):
        return f"{text}, stopped: {entry['stopped']}"
    if entry["complete"]:
        return f"{text}, complete"
    running = entry["running"]
    return f"{text}, {'not running' if running is None else f'round {running} runs'}"


def duration(seconds: float) -> str:
    """Return a time for people: "0.07", or "12 min", "3 h 05 min" for a long one."""
    if seconds < 10 * _MINUTE_S:
        return f"{seconds:.2f}"
    minutes = round(seconds / _MINUTE_S)
    if seconds < _HOUR_S:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


def trends(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each scalar output, with its course over the last rounds as bars."""
    series: dict[str, list[float]] = {}
    for row in rows[-_TREND_ROUNDS:]:
        if row["ok"]:
            for name, value in scalar_outputs(row).items():
                series.setdefault(name, []).append(value)
    shown = [(name, values) for name, values in series.items() if len(values) > 1]
    shown = shown[:SHOWN_COLUMNS]
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
    """Return a number for people; an accuracy in percent."""
    if name.endswith("accuracy") and 0 <= value <= 1:
        return f"{value:.2%}"
    if value.is_integer() and 1 <= abs(value) < _MAX_PLAIN_INTEGER:
        return f"{value:.0f}"
    is_usual = value == 0 or 1e-3 <= abs(value) < 1e4
    return f"{value:.4f}" if is_usual else f"{value:.3e}"


def failures_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return why a round failed, with the names of nodes."""
    text = "; ".join(row["failures"]) or "no reason was given"
    for peer, name in names.items():
        text = text.replace(peer, name)
    return _PEER_ID.sub(lambda match: match[0][-_SHORT_CHARS:], text)


def missing_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the missing peers by name, each with its reason if it is known."""
    why = {names.get(peer, peer[-_SHORT_CHARS:]): text for peer, text in row["missing_why"].items()}
    # A round may have several requests; each reason names all.
    missing = sorted({names.get(peer, peer[-_SHORT_CHARS:]) for peer in row["missing"]})
    return ", ".join(f"{name} ({why[name]})" if name in why else name for name in missing)


def refused_text(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the peers whose answers were not counted by name, each with the reason."""
    why = {names.get(peer, peer[-_SHORT_CHARS:]): text for peer, text in row["refused"].items()}
    return ", ".join(f"{name} ({why[name]})" for name in sorted(why))
