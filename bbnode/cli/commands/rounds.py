"""`bbnode rounds`: the rounds that a node ran by itself, and the peers missing in each.

Rule: a running node is asked; otherwise the file of rounds in the state directory is read, and
never changed.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode

CSV_COLUMNS = (
    *("target", "run", "round", "ok", "best", "started_at", "seconds", "bytes_in", "bytes_out"),
    *("answered", "missing", "failures"),
)
DEFAULT_LAST = 20
MAX_LAST = 100_000
# Digits of a program's digest that identify it in a title.
_DIGEST_CHARS = 8


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
    """Show a node's rounds: metrics, who answered, what failed.

    A round is an execution that the node starts by itself, as [[invoke]] in its configuration says.
    """
    if as_csv and (node.as_json or follow):
        raise typer.BadParameter("stands alone: leave out --json and --follow", param_hint="--csv")
    answer = _ask(node, last, must_run=follow)
    rounds = answer["rounds"]
    if as_csv:
        _print_csv(rounds)
    elif node.as_json and not follow:
        output.json_object(answer)
    elif node.as_json:
        for row in rounds:
            output.json_object(row, indent=None)
    elif rounds:
        _print_table(rounds)
    else:
        output.note("no round has ended yet")
    if not (as_csv or node.as_json):
        from bbnode.daemon.observing.round_table import progress_text

        for entry in answer["invoke"]:
            output.note(progress_text(entry))
    if answer.get("trouble"):
        output.error(answer["trouble"])
    if follow:
        _follow(node)


def _ask(node: RunningNode, last: int, *, must_run: bool) -> dict[str, Any]:
    """Return the daemon's answer; if none runs, the content of the node's file."""
    from bbnode.daemon.control.errors import NotRunning

    try:
        with node.ask() as client:
            return client.get("/v1/rounds", {"last": last})
    except NotRunning:
        from bbnode.daemon import paths
        from bbnode.daemon.history.store import read_rounds, rounds_file

        # A node that ended before it could open the file has run before, as its lock file shows.
        file, lock = rounds_file(node.directory), paths.lock_file(node.directory)
        if must_run or not (file.exists() or lock.exists()):
            raise
        return {"rounds": read_rounds(file, last=last) if file.exists() else [], "invoke": []}


def _follow(node: RunningNode) -> None:
    from bbnode.daemon.observing import round_table

    with node.ask() as client:
        for line in client.stream("/v1/events", {"type": "round_finished"}):
            if node.as_json:
                output.json_object(line, indent=None)
                continue
            row = line["event"]
            numbers = "".join(
                f"{name} {round_table.number(name, value)}  "
                for name, value in round_table.scalar_outputs(row).items()
            )
            notes = round_table.notes_text(row, {})
            output.data(
                f"{row['target']} round {row['round']}  {numbers}"
                f"{round_table.duration(row['seconds'])} s  "
                f"answered {round_table.answered_text(row)}" + (f"  {notes}" if notes else "")
            )


def _print_table(rounds: Sequence[dict[str, Any]]) -> None:
    """Print the rounds, with a table for each target, program and run."""
    from bbnode.daemon.observing import round_table

    out = output.console()
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rounds:
        runs.setdefault((row["target"], row.get("run", 1)), []).append(row)
    missing: list[str] = []
    for (target, _), rows in runs.items():
        # A title separates runs that would otherwise look like one.
        artifact = rows[-1].get("artifact", "")[:_DIGEST_CHARS]
        title = f"{target}, program {artifact}" if len(runs) > 1 else None
        out.print(round_table.rounds_table(rows, {}, width=out.width, title=title))
        missing += [n for n in round_table.left_out(rows, out.width) if n not in missing]
    if missing:
        output.note(f"not shown: {', '.join(missing)}; --csv has all metrics")
    if any(row.get("best") for row in rounds):
        output.note("* the best round")


def _print_csv(rounds: Sequence[dict[str, Any]]) -> None:
    metrics = sorted({name for each in rounds for name in each.get("metrics", {})})
    rows = []
    for each in rounds:
        started = datetime.datetime.fromtimestamp(each.get("started_at") or 0, datetime.UTC)
        shown = {
            **each,
            "started_at": started.isoformat(),
            # Rounds of earlier releases list some peers in both.
            "answered": len(set(each["responded"]) - set(each["missing"])),
            "missing": len(each["missing"]),
            "failures": "; ".join(each["failures"]),
        }
        known = each.get("metrics", {})
        row = [shown.get(name) for name in CSV_COLUMNS]
        rows.append([*row, *(known.get(name) for name in metrics)])
    output.csv_table([*CSV_COLUMNS, *metrics], rows)
