"""`bbnode predict`: the predictions of a trained model for a file.

Rule: the command only shows; reading and computing are `bbnode.daemon.predicting`.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption

if TYPE_CHECKING:
    from bbnode.daemon.predicting.predict import Predictions


def command(
    model: Annotated[Path, typer.Argument(help="What `bbnode export` wrote.", metavar="MODEL")],
    given: Annotated[
        str,
        typer.Argument(
            help="A table, an image or a folder of images, text (- is standard input), or arrays.",
            metavar="INPUT",
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The tokenizer.json that the model was trained with.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a CSV file instead.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a trained model predicts for your data.

    Columns, scaling, classes and tokenizer are those of the training, which the model carries in
    its metadata. No node is needed.
    """
    from bbnode.daemon.paths import write_atomically
    from bbnode.daemon.predicting.inputs import Given
    from bbnode.daemon.predicting.predict import is_finite, predict

    if out is not None and as_json:
        raise typer.BadParameter("--out and --json are two outputs; choose one")
    predictions = predict(
        model.expanduser(),
        Given(path=given, tokenizer=tokenizer, read_stdin=lambda most: sys.stdin.buffer.read(most)),
    )
    for note in predictions.notes:
        output.note(f"note: {note}")
    bad = sum(not is_finite(each) for each in predictions.rows)
    if bad:
        output.note(f"warning: the model gives no finite number for {bad} example(s)")
    if as_json:
        rows = [
            {
                predictions.noun: each.example,
                "values": _json_numbers(each.values),
                **(
                    {"probabilities": _json_numbers(each.probabilities)}
                    if each.probabilities
                    else {}
                ),
            }
            for each in predictions.rows
        ]
        output.json_object({"model": str(model), "predictions": rows})
    elif out is not None:
        write_atomically(out.expanduser().resolve(), _csv(predictions).encode(), mode=0o644)
        output.data(f"{out}  {output.counted(len(predictions.rows), 'prediction')}")
    else:
        _show(predictions)


def _json_numbers(values: Mapping[str, str | float]) -> dict[str, str | float | None]:
    """Return values for JSON, which has neither NaN nor infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _csv(predictions: Predictions) -> str:
    text = io.StringIO()
    output.csv_to(
        csv.writer(text, lineterminator="\n"),
        [predictions.noun, *predictions.columns],
        ([each.example, *each.values.values()] for each in predictions.rows),
    )
    return text.getvalue()


def _show(predictions: Predictions) -> None:
    """Print a line for each example, in columns."""
    lines = [[predictions.noun, *predictions.columns]]
    for each in predictions.rows:
        shown = [f"{v:.4g}" if isinstance(v, float) else v for v in each.values.values()]
        lines.append([str(each.example), *shown])
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        output.data("  ".join(padded).rstrip())
