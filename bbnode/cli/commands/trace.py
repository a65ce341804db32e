"""`bbnode trace`: the ops of one execution, here and on the peers that it spoke with.

Rule: a node reports only its own ops. Other nodes that can be reached from here (`--also`) are
asked for the executions that this one's messages started, by peer and wire request id.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import RunningNode

COLUMNS = ("time", "node", "execution", "what", "op", "took ms", "detail")
# Fields of a step that are not details: they have a column, or mean nothing to a reader.
SHOWN_ELSEWHERE = frozenset(
    {"type", "time_s", "execution", "op", "target", "started_ns", "ended_ns", "at_ns", "entry"}
)


def command(
    execution: Annotated[
        int | None,
        typer.Argument(
            help="Number of the execution; none: list those known.", min=0, metavar="EXECUTION"
        ),
    ] = None,
    node: RunningNode = RunningNode(),
    also: Annotated[
        list[Path] | None,
        typer.Option(help="State directory of another node here (repeatable).", metavar="DIR"),
    ] = None,
    on: Annotated[
        bool | None, typer.Option("--on/--off", help="Switch tracing on or off, and stop.")
    ] = None,
) -> None:
    """Follow one execution: its ops, and what it started elsewhere."""
    with node.ask() as client:
        if on is not None or execution is None:
            answer = client.get("/v1/trace") if on is None else client.put("/v1/trace", {"on": on})
            _show_state(answer, as_json=node.as_json)
            if on is None and not answer["tracing"]:
                output.note("to begin: bbnode trace --on")
            return
        traces = [client.get(f"/v1/trace/{execution}")]
    requests = sorted({s["wire_req_id"] for s in traces[0]["steps"] if s.get("wire_req_id")})
    for directory in also or ():
        with replace(node, state_dir=directory).ask() as other:
            for request in requests:
                answer = other.get(f"/v1/trace/{request}", {"peer": traces[0]["peer_id"]})
                if answer["executions"]:
                    traces.append(answer)
    if node.as_json:
        output.json_object({"execution": execution, "traces": traces})
        return
    _show(traces)


def _show_state(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_object(answer)
        return
    output.data(f"tracing is {'on' if answer['tracing'] else 'off'}")
    kept = answer.get("executions", [])
    if kept:
        output.data("executions: " + ", ".join(str(number) for number in kept))


def _show(traces: list[dict[str, Any]]) -> None:
    steps = [(s["time_s"], t["peer_id"], s) for t in traces for s in t["steps"]]
    steps.sort(key=lambda row: row[0])
    begin = steps[0][0] if steps else 0.0
    out = output.console()
    rows = [_row(time_s - begin, peer, step) for time_s, peer, step in steps]
    output.table("", COLUMNS, rows, out=out)
    waits = [w for t in traces for w in t["waiting"]]
    if waits:
        output.describe({"waiting": waits}, out=out)
    if not rows:
        output.note("nothing was traced of it; `bbnode trace --on` begins with the next")


def _row(seconds: float, peer: str, step: dict[str, Any]) -> list[object]:
    took = None
    if "ended_ns" in step:
        took = round((step["ended_ns"] - step["started_ns"]) / 1e6, 3)
    detail = {name: v for name, v in step.items() if name not in SHOWN_ELSEWHERE and v}
    where = step.get("op") or step.get("entry") or step.get("target")
    return [f"{seconds:+.6f}", peer[-6:], step["execution"], step["type"], where, took, detail]
