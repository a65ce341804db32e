"""`bbnode new`: a project with a program, its data, its test and a README."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption


def _template(value: str) -> str:
    from bbnode.templates import TEMPLATES

    if value not in TEMPLATES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(TEMPLATES)}")
    return value


def command(
    folder: Annotated[
        Path,
        typer.Argument(help="The folder to write; its last part is the name.", metavar="NAME"),
    ],
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            help="federated (a server and clients), pipeline (a model in stages) or gossip "
            "(peers without a server).",
            metavar="TEMPLATE",
            callback=_template,
        ),
    ] = "federated",
    as_json: JsonOption = False,
) -> None:
    """Write a project to begin with: program, data, test, README."""
    from bbnode.ir import installation
    from bbnode.templates import package_name, write_project

    files = write_project(folder, template)
    place = folder.expanduser().absolute()
    if as_json:
        description: dict[str, Any] = {"folder": str(place), "template": template}
        output.json_object({**description, "files": [str(path) for path in files]})
        return
    for path in files:
        output.data(str(folder / path))
    package = package_name(place.name)
    python, bbnode = installation.python(), installation.bbnode()
    go = f"cd {shlex.quote(str(folder))}"
    output.note(f"next: {go} && {python} -m {package}.data && {bbnode} up")
