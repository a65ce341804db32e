"""`bbnode inspect`: what a compiled artifact holds.

Rule: it reads the artifact alone. No component of it has to be installed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption

if TYPE_CHECKING:
    from rich.console import Console

NANOSECONDS_PER_MS = 1_000_000


def command(
    artifact: Annotated[Path, typer.Argument(help="The compiled artifact.", metavar="FILE")],
    as_json: JsonOption = False,
) -> None:
    """Show targets, slots with their bindings, and wire edges with their gates."""
    from bbnode.daemon.artifact import load_artifact
    from bbnode.daemon.inspect import describe

    description = describe(load_artifact(artifact).model)
    if as_json:
        output.json_object(description)
    else:
        _render(description, output.console())


def _render(description: Mapping[str, Any], out: Console) -> None:
    out.print(f"passport  {output.cell(description['passport'])}")
    out.print(f"sha256    {output.cell(description['sha256'])}\n")
    targets = description["targets"]
    output.table(
        "targets",
        ("target", "class", "ops", "inputs", "outputs"),
        [[t[key] for key in ("name", "class", "ops", "inputs", "outputs")] for t in targets],
        out=out,
    )
    output.table(
        "slots",
        ("target", "slot", "role", "bound to", "slot id"),
        [
            [target["name"], slot["slot"], slot["role"], slot["type_name"], slot["slot_id"]]
            for target in targets
            for slot in target["slots"]
        ],
        out=out,
    )
    output.table(
        "wire edges",
        ("value", "op", "from", "to", "site", "transport", "deadline", "gates"),
        [_edge(edge) for edge in description["wire_edges"]],
        out=out,
    )


def _edge(edge: Mapping[str, Any]) -> list[object]:
    deadline = edge["deadline_ns"]
    return [
        edge["value"],
        edge["op"],
        edge["from"],
        edge["to"],
        edge["site_id"],
        edge["transport"],
        "-" if not deadline else f"{deadline / NANOSECONDS_PER_MS:g} ms",
        edge["gates"],
    ]
