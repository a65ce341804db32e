"""`bbnode status`: what a running daemon says about itself, over its control socket.

Rule: it shows whatever the daemon sends, so that a newer daemon can show more. Only the columns of
peers, as in `bbnode peers`, and the counters, without those at zero, are known by name.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import PEER_COLUMNS, RunningNode


def command(
    node: RunningNode = RunningNode(),
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print events until it stops.")
    ] = False,
) -> None:
    """Show a running node: its health, peers, targets, and what it waits for."""
    with node.ask() as client:
        status = client.get("/v1/status")
        if node.as_json:
            output.json_object(status, indent=None if follow else 2)
        else:
            shown = {name: value for name, value in status.items() if name != "schema"}
            shown["peers"] = [{n: p.get(n) for n in PEER_COLUMNS} for p in status["peers"]]
            # Most have never counted anything; --json has all of them.
            shown["counters"] = {n: count for n, count in status["counters"].items() if count}
            output.describe(shown, out=output.console())
        if follow:
            for line in client.stream("/v1/events"):
                _show_event(line, as_json=node.as_json)


def _show_event(line: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_object(line, indent=None)
        return
    if line["dropped"]:
        output.note(f"({line['dropped']} events were lost: this reader was too slow)")
    output.data(output.cell(line["event"]))
