"""`bbnode inspect`: the contents of a compiled artifact.

Rule: it reads only the artifact, whose components need not be installed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption
from bbnode.ir import keys

if TYPE_CHECKING:
    import onnx
    from rich.console import Console

MAX_PARAMETERS_SHOWN = 40  # per model; --json has all


def command(
    artifact: Annotated[Path, typer.Argument(help="The compiled artifact.", metavar="FILE")],
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw the program as SVG.", metavar="OUT.svg")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Draw it as a page to zoom and click in.", metavar="OUT.html"),
    ] = None,
    extract: Annotated[
        str | None,
        typer.Option(
            help="Write a graph that a backend runs as an ONNX model of its own.",
            metavar="FUNCTION",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="With --extract: the file to write.", metavar="PART.onnx"),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show graphs of backends, and wire edges with their gates."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the classes, slots, models and messages of a program."""
    if (extract is None) != (out is None):
        raise typer.BadParameter("--extract FUNCTION and --out PART.onnx go together")
    from bbnode.daemon.artifacts.artifact import load_artifact
    from bbnode.daemon.artifacts.inspect import describe

    model = load_artifact(artifact).model
    if extract is not None and out is not None:
        _extract(model, extract, out, as_json=as_json)
        return
    pictures = _draw(model, {"svg": svg, "html": html})
    if as_json:
        described = describe(model)
        output.json_object({**described, "pictures": pictures} if pictures else described)
    elif pictures:
        for path in pictures.values():
            output.data(path)
    else:
        _render(describe(model), output.console(), verbose=verbose)


def _extract(model: onnx.ModelProto, name: str, out: Path, *, as_json: bool) -> None:
    from bbnode.daemon.paths import write_atomically
    from bbnode.ir.parts import extract_part

    part = extract_part(model, name)
    write_atomically(out.absolute(), part.SerializeToString(deterministic=True), mode=0o644)
    ports = {
        side: {info.name: info.doc_string for info in infos}
        for side, infos in (("inputs", part.graph.input), ("outputs", part.graph.output))
    }
    if as_json:
        output.json_object({"function": part.graph.name, "path": str(out), **ports})
    else:
        output.data(str(out))


def _draw(model: onnx.ModelProto, wanted: Mapping[str, Path | None]) -> dict[str, str]:
    """Write the wanted pictures; return their paths by kind."""
    paths = {kind: path for kind, path in wanted.items() if path is not None}
    if not paths:
        return {}
    from bbnode.daemon.artifacts.picture import to_html, to_svg
    from bbnode.daemon.paths import write_atomically

    drawn = {kind: {"svg": to_svg, "html": to_html}[kind](model) for kind in paths}
    for kind, path in paths.items():
        write_atomically(path.absolute(), drawn[kind].encode(), mode=0o644)
    return {kind: str(path) for kind, path in paths.items()}


def _render(description: Mapping[str, Any], out: Console, *, verbose: bool) -> None:
    out.print(f"passport  {output.cell(description['passport'])}")
    out.print(f"sha256    {output.cell(description['sha256'])}\n")
    targets = description["targets"]
    # With several targets of one class, the name of the class alone would not distinguish them.
    names = {t["name"]: t["class"] or t["name"] for t in targets}
    if verbose or len(set(names.values())) < len(names):
        names = {t["name"]: t["name"] for t in targets}
    output.table(
        "targets",
        ("class" if names.keys() != set(names.values()) else "target", "ops", "inputs", "outputs"),
        [[names[t["name"]], *(t[key] for key in ("ops", "inputs", "outputs"))] for t in targets],
        out=out,
    )
    output.table(
        "slots",
        ("class", "slot", "role", "bound to"),
        [
            [names[target["name"]], slot["slot"], slot["role"], slot["type_name"]]
            for target in targets
            for slot in target["slots"]
        ],
        out=out,
    )
    if description["models"]:
        rows = [list(row) for row in description["models"].items()]
        output.table("models", ("slot", "parameters"), rows, out=out)
        _render_parameters(description, out)
    if description["custom_ops"]:
        columns = ("domain", "op", "version", "package", "nodes")
        rows = [[row[key] for key in columns] for row in description["custom_ops"]]
        output.table("custom ops", columns, rows, out=out)
    edges = description["wire_edges"]
    if not verbose:
        rows = [
            [
                (edge["port"] or edge["value"])
                + ": answer" * edge["op"].startswith(keys.OP_SEND_RESP),
                edge["crosses"],
                names.get(edge["from"], edge["from"]),
                names.get(edge["to"], edge["to"]),
            ]
            for edge in edges
        ]
        output.table("messages", ("message", "carries", "from", "to"), rows, out=out)
        output.note("graphs of backends, sites, deadlines and gates: --verbose")
        return
    if description["parts"]:
        rows = [[name] for name in description["parts"]]
        output.table("graphs of backends (--extract)", ("function",), rows, out=out)
    output.table(
        "wire edges",
        ("value", "op", "from", "to", "site", "transport", "deadline", "gates"),
        [_edge(edge) for edge in edges],
        out=out,
    )


def _render_parameters(description: Mapping[str, Any], out: Console) -> None:
    """Print each float tensor of the models, and why it is trained or not.

    Slots with the same model share a table.
    """
    slots: dict[str, list[str]] = {}
    for slot, listed in description["parameters"].items():
        if listed:
            slots.setdefault(json.dumps(listed), []).append(slot)
    for content, names in slots.items():
        listed = json.loads(content)
        # Untrained parameters first: they are what an author looks for.
        listed.sort(key=lambda each: bool(each["trained"]))
        rows = [
            [
                each["name"],
                " x ".join(map(str, each["shape"])) or "1",
                "trained" if each["trained"] else "fixed",
                each["why"],
            ]
            for each in listed[:MAX_PARAMETERS_SHOWN]
        ]
        more = len(listed) - len(rows)
        title = f"parameters of {', '.join(names)}"
        if more > 0:
            title += f" ({more} more with --json)"
        output.table(title, ("tensor", "shape", "is", "why"), rows, out=out)
    lines = [line for warnings in description["model_warnings"].values() for line in warnings]
    for line in dict.fromkeys(lines):
        out.print(f"warning  {output.cell(line)}\n")


def _edge(edge: Mapping[str, Any]) -> list[object]:
    from bbnode.daemon.artifacts.picture.text import duration

    deadline = edge["deadline_ns"]
    # Without a deadline in the program, it is a limit of each node.
    is_open = edge["deadline_from"] == keys.DEADLINE_FROM_NOBODY
    return [
        edge["value"],
        edge["op"],
        edge["from"],
        edge["to"],
        edge["site_id"],
        edge["transport"],
        "-" if not deadline or is_open else duration(deadline),
        edge["gates"],
    ]
