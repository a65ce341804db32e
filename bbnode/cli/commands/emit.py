"""`bbnode emit`: give a target of a running node one input, or put an event on its bus.

Rule: like `invoke`, but for targets that one input starts.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bbnode.cli import values
from bbnode.cli.common import LocalNode
from bbnode.ir.caps import MAX_DEADLINE_S, MAX_WAIT_S


def command(
    target: Annotated[
        str | None, typer.Argument(help="Target that gets it.", metavar="CLASS[#HASH]")
    ] = None,
    value: Annotated[str | None, typer.Argument(help=values.HELP, metavar="NAME=VALUE")] = None,
    kind: Annotated[
        int | None,
        typer.Option(help="Instead: an event of the program's own on the bus.", min=0),
    ] = None,
    node: LocalNode = LocalNode(),
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", help="Seconds to wait for outputs; 0: none.", min=0, max=MAX_WAIT_S
        ),
    ] = 0.0,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            help="Seconds that the execution itself may take.",
            min=0.001,
            max=MAX_DEADLINE_S,
        ),
    ] = None,
) -> int:
    """Send a target one input."""
    if (kind is None) == (target is None) or (target is None) != (value is None):
        raise typer.BadParameter(
            "give TARGET and NAME=VALUE, or --kind alone", param_hint="TARGET, --kind"
        )
    with node.client(timeout_s + values.ANSWER_SLACK_S) as client:
        if kind is not None:
            answer = client.post("/v1/emit", {"kind": kind})
        else:
            ((name, item),) = values.parse_inputs([value or ""]).items()
            body: dict[str, Any] = {
                "target": target,
                "input": name,
                "value": item,
                "wait_s": timeout_s,
            }
            if deadline_s is not None:
                body["deadline_s"] = deadline_s
            answer = client.post("/v1/emit", {**body, "exact": timeout_s > 0})
    if kind is not None:
        node.show(answer, f"event {kind} is on the bus")
        return 0
    return values.report(answer, waited_s=timeout_s, as_json=node.as_json)
