"""`bbnode check`: a dry run of a program's models before the first round.

Rule: the command only shows; the checks are in `bbnode.daemon.artifacts.dry_run`. A row is a step
and its result; a fault is an error like any other, in one line.
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
    compilable = find_program(program, arguments)
    own_data = GivenData(settings=_settings(data)) if data else None
    dry_run = check_program(
        compilable.artifact.model, own=not compilable.is_artifact, given=own_data
    )
    if as_json:
        output.json_object({"program": program, **dry_run.to_json()})
        return
    rows: list[list[object]] = []
    for where, steps in itertools.groupby(dry_run.rows, key=lambda row: row.where):
        for at, row in enumerate(steps):
            rows.append([where if not at else "", row.step, row.rows, row.result])
    output.table(
        f"dry run of {program}, examples {dry_run.examples}",
        ("model", "step", "examples", "result"),
        rows,
        out=output.console(),
    )
    show_dry_run_notes(dry_run)
    for line in dry_run.skipped:
        output.note(f"note: {line}")
    if not dry_run.rows and not dry_run.skipped:
        output.note(f"{program} has no model to try")
    else:
        output.note(
            f"no fault in {output.counted(len(dry_run.rows), 'step')}, {dry_run.seconds:.1f} s"
        )


def _settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Return settings of data sources by slot, "" for all slots. Raises BadParameter."""
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        slot, dot, name = key.partition(".")
        if equals and dot and slot and name.isidentifier():
            settings.setdefault(slot, {})[name] = toml_or_text(value)
        else:
            settings.setdefault("", {})["path"] = str(Path(text).expanduser())
    return settings
