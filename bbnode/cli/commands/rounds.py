"""`bbnode rounds`: the rounds that a node made by itself, and who was missing in each.

Rule: a node that runs is asked; of one that does not, the file of rounds in its state directory is
read, and never changed.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode

COLUMNS = ("round", "target", "ok", "seconds", "bytes", "answered", "metrics", "missing", "why")
CSV_COLUMNS = (
    *("target", "run", "round", "ok", "best", "started_at", "seconds", "bytes_in", "bytes_out"),
    *("answered", "missing", "failures"),
)
DEFAULT_LAST = 20
MAX_LAST = 100_000
# Of the table; --csv and --json have all metrics.
_SHOWN_METRICS = 6


def command(
    node: RunningNode = RunningNode(),
    last: Annotated[
        int, typer.Option(help="How many of each target, from the end.", min=1, max=MAX_LAST)
    ] = DEFAULT_LAST,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, with a column for each metric.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show each round when it ends.")
    ] = False,
) -> None:
    """Show the rounds of [[invoke]]: metrics, who answered, who did not and why, what failed."""
    if as_csv and (node.as_json or follow):
        raise typer.BadParameter("stands alone: leave out --json and --follow", param_hint="--csv")
    told = _ask(node, last, must_run=follow)
    rounds = told["rounds"]
    if as_csv:
        _print_csv(rounds)
    elif node.as_json and not follow:
        output.json_object(told)
    elif node.as_json:
        for made in rounds:
            output.json_object(made, indent=None)
    elif rounds:
        _print_table(rounds)
    else:
        output.note("no round has ended yet")
    if not (as_csv or node.as_json):
        for entry in told["invoke"]:
            output.note(_progress(entry))
    if told.get("trouble"):
        output.error(told["trouble"])
    if follow:
        _follow(node)


def _ask(node: RunningNode, last: int, *, must_run: bool) -> dict[str, Any]:
    """Return what the daemon says; where none runs, what is in the node's file."""
    from bbnode.daemon.control.errors import NotRunning

    try:
        with node.ask() as client:
            return client.get("/v1/rounds", {"last": last})
    except NotRunning:
        from bbnode.daemon.history.store import read_rounds, rounds_file

        file = rounds_file(node.directory)
        if must_run or not file.exists():
            raise
        return {"rounds": read_rounds(file, last=last), "invoke": []}


def _follow(node: RunningNode) -> None:
    with node.ask() as client:
        for made in client.stream("/v1/events", {"type": "round_finished"}):
            if node.as_json:
                output.json_object(made, indent=None)
            else:
                for row in _rows(made):
                    output.data("  ".join(output.cell(item) for item in row))


def _print_table(rounds: Sequence[dict[str, Any]]) -> None:
    rows = [row for made in rounds for row in _rows(made)]
    output.table("", COLUMNS, rows, out=output.console())


def _print_csv(rounds: Sequence[dict[str, Any]]) -> None:
    metrics = sorted({name for made in rounds for name in made.get("metrics", {})})
    rows = []
    for made in rounds:
        started = datetime.datetime.fromtimestamp(made.get("started_at") or 0, datetime.UTC)
        shown = {
            **made,
            "started_at": started.isoformat(),
            "answered": len(made["responded"]),
            "missing": len(made["missing"]),
            "failures": "; ".join(made["failures"]),
        }
        known = made.get("metrics", {})
        row = [shown.get(name) for name in CSV_COLUMNS]
        rows.append([*row, *(known.get(name) for name in metrics)])
    output.csv_table([*CSV_COLUMNS, *metrics], rows)


def _rows(made: dict[str, Any]) -> list[list[object]]:
    """Return one row for the round, and one for each further peer that was missing or refused."""
    notes = list(made["missing_why"].items())
    notes += [(peer, f"not counted: {text}") for peer, text in made["refused"].items()]
    notes += [("", text) for text in made["failures"]]
    (peer, text), *others = notes or [("", "")]
    first = [made[name] for name in ("round", "target", "ok", "seconds", "bytes")]
    first.append(len(made["responded"]))
    # Outputs before entries of Metadata, which are many.
    metrics = sorted(made.get("metrics", {}).items(), key=lambda each: "." in each[0])
    shown = " ".join(f"{name}={output.cell(value)}" for name, value in metrics[:_SHOWN_METRICS])
    if len(metrics) > _SHOWN_METRICS:
        shown += " …"
    if made.get("best"):
        shown += " (best)"
    return [
        [*first, shown or None, peer or None, text or None],
        *([*[""] * 7, peer or None, text] for peer, text in others),
    ]


def _progress(entry: dict[str, Any]) -> str:
    done = f"{entry['target']}: {entry['done']} of {entry['of'] or 'any number of'} rounds"
    best = entry.get("best") or {}
    if best.get("round"):
        done += f", best {best['metric']} {best['value']:.6g} in round {best['round']}"
    if entry["waiting_for"]:
        return f"{done}, waiting for {entry['waiting_for']}"
    if entry.get("stopped"):
        return f"{done}, stopped: {entry['stopped']}"
    return f"{done}, complete" if entry["complete"] else f"{done}, running: {entry['running']}"
