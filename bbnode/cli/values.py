"""Input values on the command line, and the report of an execution.

Rule: `@file.npy` is an array, `@file` the bytes of a file, `trigger` a trigger; other text is read
as JSON if it is that, and else taken as it is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from bbnode.cli import exits, output
from bbnode.cli.common import pairs
from bbnode.ir.errors import BbnodeError
from bbnode.ir.texts import failure_text

HELP = (
    "An input: a number, true, false, lists of them ([[1, 2], [3, 4]]), trigger, @FILE.npy for an "
    "array, @FILE for bytes, other text as it is."
)

# Beyond an execution's own time, for the answer to come.
ANSWER_SLACK_S = 5.0
# The largest body that a daemon takes is 16 MiB; base64 makes 4 bytes of 3.
MAX_FILE_BYTES = 11 * 1024 * 1024


def parse_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE texts as the control plane takes inputs; a usage error for any other."""
    return {name: parse_value(text) for name, text in pairs(texts, "--input").items()}


def parse_value(text: str) -> Any:
    """Return one value as JSON."""
    if text.startswith("@"):
        return _file(Path(text[1:]).expanduser())
    if text == "trigger":
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text}
    return {"text": value} if isinstance(value, str) else value


def _file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--input") from error
    if len(data) > MAX_FILE_BYTES:
        raise typer.BadParameter(
            f"{path} is over {MAX_FILE_BYTES} bytes; what is larger has to come from a component "
            "of the node (a DataSource)",
            param_hint="--input",
        )
    kind = "npy" if path.suffix == ".npy" else "bytes"
    return {kind: base64.b64encode(data).decode("ascii")}


def report(told: Mapping[str, Any], *, waited_s: float, as_json: bool) -> int:
    """Show what an execution gave, and return the exit code."""
    if not as_json:
        if told["ok"] is None and not waited_s:
            output.data(f"execution {told['execution']}")
        for name, value in told["outputs"].items():
            output.data(f"{name} = {output.json_text(value)}")
        for name, reason in told["skipped"].items():
            output.note(output.cell(f"{name} has no value: {reason}"))
        if told["ok"] and not told["outputs"] and not told["skipped"]:
            output.note(
                f"execution {told['execution']} ended and gave no output; what comes back as a "
                "message of its own shows in `bbnode status --follow`"
            )
    for failure in told["failures"]:
        output.note(output.cell(failure_text(failure)))
    if told["ok"] is None and waited_s:
        output.error(
            f"execution {told['execution']} still runs after {waited_s:g} s; `bbnode status` "
            "shows what it waits for"
        )
        return exits.TIMEOUT
    return exits.FAILURE if told["ok"] is False else exits.OK


def peer_text(text: str) -> str:
    """Return the PeerId that an address ends with; another text as it is, for the node to find.

    Raises typer.BadParameter for an address that names no peer.
    """
    if not text.startswith("/"):
        return text
    from bbnode.ir.address import parse_address, peer_of_address

    try:
        return str(peer_of_address(parse_address(text)))
    except BbnodeError as error:
        raise typer.BadParameter(str(error), param_hint="PEER") from error
