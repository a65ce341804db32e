"""`bbnode rounds`: the rounds that a running node made by itself, and who was missing in each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode

COLUMNS = ("round", "target", "ok", "seconds", "answered", "missing", "why")
DEFAULT_LAST = 20


def command(
    node: RunningNode = RunningNode(),
    last: Annotated[
        int, typer.Option(help="How many of each target, from the end.", min=1)
    ] = DEFAULT_LAST,
) -> None:
    """Show the rounds of [[invoke]]: who answered, who did not and why, and what failed."""
    with node.ask() as client:
        told = client.get("/v1/rounds", {"last": last})
    if node.as_json:
        output.json_object(told)
        return
    out = output.console()
    output.table("", COLUMNS, [row for made in told["rounds"] for row in _rows(made)], out=out)
    for entry in told["invoke"]:
        output.note(_progress(entry))


def _rows(made: dict[str, Any]) -> list[list[object]]:
    """Return one row for the round, and one for each further peer that was missing or refused."""
    notes = list(made["missing_why"].items())
    notes += [(peer, f"not counted: {text}") for peer, text in made["refused"].items()]
    notes += [("", text) for text in made["failures"]]
    (peer, text), *others = notes or [("", "")]
    first = [made["round"], made["target"], made["ok"], made["seconds"], len(made["responded"])]
    return [
        [*first, peer or None, text or None],
        *(["", "", "", "", "", peer or None, text] for peer, text in others),
    ]


def _progress(entry: dict[str, Any]) -> str:
    done = f"{entry['target']}: {entry['done']} of {entry['of'] or 'any number of'} rounds"
    if entry["waiting_for"]:
        return f"{done}, waiting for {entry['waiting_for']}"
    return f"{done}, complete" if entry["complete"] else f"{done}, running: {entry['running']}"
