"""`bbnode check`: a dry run of a program's models, before anybody waits for a round.

Rule: the command shows; what runs is `bbnode.daemon.artifacts.dry_run`. A row is a step and what
came of it; a fault is an error like any other, in one line.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption, pairs, show_dry_run_notes, toml_or_text


def command(
    program: Annotated[
        str,
        typer.Argument(
            help="The class: package.module:Class, or folder/file.py:Class; or a compiled "
            "artifact (.onnx).",
            metavar="PROGRAM",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Examples instead of made-up ones: a file or folder for all data slots, or a "
            "setting of one, as data.path=x.npz (repeatable).",
            metavar="PATH|SLOT.KEY=VALUE",
        ),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Keyword argument of the class, as a TOML value (repeatable).", metavar="KEY=VALUE"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Try a program's models on two and on three examples.

    Each model computes outputs, its loss, a gradient, steps of training and every metric, as a
    round does, and is exported and read back. Faults end the command; the rest is a table.
    """
    from bbnode.daemon.artifacts.dry_run import GivenData, check_program
    from bbnode.daemon.testbed.program import find_program

    arguments = {key: toml_or_text(text) for key, text in pairs(arg, "--arg").items()}
    found = find_program(program, arguments)
    given = GivenData(settings=_settings(data)) if data else None
    made = check_program(found.artifact.model, own=not found.is_artifact, given=given)
    if as_json:
        output.json_object({"program": program, **made.to_json()})
        return
    rows: list[list[object]] = []
    for where, steps in itertools.groupby(made.rows, key=lambda row: row.where):
        for at, row in enumerate(steps):
            rows.append([where if not at else "", row.step, row.rows, row.result])
    output.table(
        f"dry run of {program}, examples {made.examples}",
        ("model", "step", "examples", "result"),
        rows,
        out=output.console(),
    )
    show_dry_run_notes(made)
    for line in made.skipped:
        output.note(f"note: {line}")
    if not made.rows and not made.skipped:
        output.note(f"{program} has no model to try")
    else:
        output.note(f"no fault in {output.counted(len(made.rows), 'step')}, {made.seconds:.1f} s")


def _settings(given: list[str]) -> dict[str, dict[str, Any]]:
    """Return settings of data sources by slot: "" is of all. Raises BadParameter."""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        slot, dot, name = key.partition(".")
        if equals and dot and slot and name.isidentifier():
            found.setdefault(slot, {})[name] = toml_or_text(value)
        else:
            found.setdefault("", {})["path"] = str(Path(text).expanduser())
    return found
