"""`bbnode invoke`: start one execution of a target of a running node, and see what it gives.

Rule: exit code 0 when no op failed, 1 when one did, 4 when it still runs at the end of the time.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bbnode.cli import output, values
from bbnode.cli.common import LocalNode


def command(
    target: Annotated[str, typer.Argument(help="Target to invoke.", metavar="CLASS[#HASH]")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", help=values.HELP, metavar="NAME=VALUE"),
    ] = None,
    node: LocalNode = LocalNode(),
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for its end and show its outputs.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for its end.", min=0.01, max=590)
    ] = 60.0,
) -> int:
    """Start one execution of a target."""
    given = values.parse_inputs(inputs or [])
    wait_s = timeout_s if wait else 0.0
    with node.client(wait_s + values.ANSWER_SLACK_S) as client:
        told = client.post("/v1/invoke", {"target": target, "inputs": given, "wait_s": wait_s})
    if node.as_json:
        output.json_object(told)
    return values.report(told, waited_s=wait_s, as_json=node.as_json)
