"""`bbnode logs`: the log of a running daemon, wherever else it goes.

Rule: lines come over the control socket and only from now back as far as the daemon keeps them;
a file or the journal has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode


def command(
    node: RunningNode = RunningNode(),
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print what comes until it stops.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Lines to begin with.", min=0, max=2048)
    ] = 100,
    level: Annotated[
        str, typer.Option(help="Least severe level shown: debug, info, warning or error.")
    ] = "debug",
    set_level: Annotated[
        str | None,
        typer.Option(
            "--set-level", help="Change what the daemon logs from now on.", metavar="LEVEL"
        ),
    ] = None,
) -> None:
    """Print the last lines of a running node's log, and follow it."""
    with node.ask() as client:
        if set_level is not None:
            answer = client.put("/v1/log-level", {"level": set_level})
            node.show(answer, f"the level is {answer['level']}; it was {answer['before']}")
            return
        query: dict[str, str | int | list[str]] = {
            "last": lines,
            "level": level,
            "follow": int(follow),
        }
        for line in client.stream("/v1/logs", query):
            if node.as_json:
                output.json_object(line, indent=None)
                continue
            if line["dropped"]:
                output.note(f"({line['dropped']} lines were lost: this reader was too slow)")
            output.data(_text(line["log"]))


def _text(log: Mapping[str, Any]) -> str:
    own = ("ts", "level", "logger", "msg", "exception")
    head = f"{log.get('ts')} {str(log.get('level', '')).upper():<7} {log.get('logger')}: "
    data = "".join(f" {name}={value}" for name, value in log.items() if name not in own)
    text = output.cell(f"{head}{log.get('msg')}{data}")
    if "exception" in log:
        text += "".join(f"\n  {output.cell(line)}" for line in log["exception"].splitlines())
    return text
