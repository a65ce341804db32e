"""`bbnode invoke`: start one execution of a target of a running node, and show its outputs.

Rule: exit code 0 when all outputs have arrived, including those that come back by messages; 1 when
an op failed, here or on another peer; 4 when an output is missing at the timeout.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bbnode.cli import exits, output, saving, values
from bbnode.cli.common import LocalNode
from bbnode.ir.caps import MAX_DEADLINE_S, MAX_WAIT_S


def command(
    target: Annotated[str, typer.Argument(help="Target to invoke.", metavar="CLASS[#HASH]")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", help=values.HELP, metavar="NAME=VALUE"),
    ] = None,
    node: LocalNode = LocalNode(),
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for its outputs and show them.")
    ] = True,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", help="Seconds to wait for its outputs.", min=0.01, max=MAX_WAIT_S
        ),
    ] = 60.0,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            help="Seconds that the execution itself may take.",
            min=0.001,
            max=MAX_DEADLINE_S,
        ),
    ] = None,
    save: Annotated[
        list[str] | None, typer.Option("--save", help=saving.HELP, metavar="NAME=FILE")
    ] = None,
) -> int:
    """Start one execution of a target."""
    from bbnode.daemon.control.errors import ControlError

    parsed = values.parse_inputs(inputs or [])
    if save and not wait:
        raise typer.BadParameter("needs the outputs: leave out --no-wait", param_hint="--save")
    files = saving.parse(save or [])
    wait_s = timeout_s if wait else 0.0
    with node.client(wait_s + values.ANSWER_SLACK_S) as client:
        body: dict[str, Any] = {"target": target, "inputs": parsed, "wait_s": wait_s, "exact": wait}
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        try:
            answer = client.post("/v1/invoke", body)
        except ControlError as error:
            if error.kind != "MissingInput":
                raise
            text = f"{error} (here: -i NAME=VALUE for each, or one with `bbnode emit`)"
            raise ControlError(error.kind, text, error.status) from error
    code = values.report(answer, waited_s=wait_s, as_json=node.as_json)
    if save and code == exits.OK:
        for path in files.write(answer):
            output.note(f"saved {path}")
    return code
