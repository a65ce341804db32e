"""Values on the command line: inputs of an execution, and the report of one.

Rule: `@file.npy` is an array, `@file` the bytes of a file, `trigger` a trigger; any other text is
read as JSON if it is JSON, and is otherwise a text, unchanged. Outputs are shown by value: scalars
plainly, arrays as numpy does, with dtype and shape.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bbnode.cli import exits, output
from bbnode.cli.common import pairs
from bbnode.ir.errors import BbnodeError
from bbnode.ir.texts import failure_text

if TYPE_CHECKING:
    from bbnode.ir.values import Value

HELP = (
    "An input: a number, true, false, lists of them ([[1, 2], [3, 4]]), trigger, @FILE.npy for an "
    "array, @FILE for bytes, other text as it is."
)

# Beyond the time of the execution, for the answer to arrive.
ANSWER_SLACK_S = 5.0
# A daemon takes bodies of 16 MiB at most; base64 turns 3 bytes into 4.
MAX_FILE_BYTES = 11 * 1024 * 1024
# numpy shows the ends of arrays with more elements.
_SHOWN_ELEMENTS = 64
_SHOWN_BYTES = 32


def parse_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE texts as inputs for the control plane; a usage error for a wrong one."""
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


def report(answer: Mapping[str, Any], *, waited_s: float, as_json: bool) -> int:
    """Show the outputs of an execution, and return the exit code.

    The answer of an earlier release's daemon has fewer fields.
    """
    if as_json:
        output.json_object(_with_numbers(answer))
    elif answer["ok"] is None and not waited_s:
        output.data(f"execution {answer['execution']}")
    if not as_json:
        _show_outputs(answer)
    for peer, reason in answer.get("refused", {}).items():
        output.note(output.cell(f"without {peer}: {reason}"))
    for failure in answer["failures"]:
        output.note(output.cell(failure_text(failure)))
    coded = answer.get("coded") or {}
    if coded.get("raw_bytes"):
        output.note(
            f"codecs: {coded['raw_bytes']} bytes of tensors as {coded['code_bytes']} "
            f"({coded['code_bytes'] / coded['raw_bytes']:.1%})"
        )
    if answer.get("left_out"):
        output.note(f"{answer['left_out']} more values or failures were not kept")
    if answer["ok"] is None and waited_s:
        missing = ", ".join(answer.get("missing", ()))
        what = f"{missing} did not come" if missing else "it did not end"
        output.error(
            f"execution {answer['execution']}: {what} within {waited_s:g} s; `bbnode status` shows "
            "what waits on this node; --timeout is how long to wait"
        )
        return exits.TIMEOUT
    return exits.FAILURE if answer["ok"] is False else exits.OK


def _show_outputs(answer: Mapping[str, Any]) -> None:
    exact = answer.get("values") or {}
    for name, summary in answer["outputs"].items():
        lines = _lines(exact[name]) if name in exact else [output.json_text(summary)]
        first, *rest = lines
        output.data("\n".join([f"{output.cell(name)} = {first}", *rest]))
        for further in answer.get("more", {}).get(name, ()):
            source = f"  (of {further['peer']})" if further["peer"] else ""
            output.data(f"{output.cell(name)} = {output.json_text(further['value'])}{source}")
    for name, reason in answer["skipped"].items():
        output.note(output.cell(f"{name} has no value: {reason}"))
    if answer["ok"] and not answer["outputs"] and not answer["skipped"]:
        output.note(f"execution {answer['execution']} ended; the target has no output")


def _lines(encoded: Mapping[str, Any]) -> list[str]:
    """Return an output by value, as lines."""
    from bbnode.daemon.invoke.exact import ValueOmitted, decoded

    try:
        return value_lines(decoded(encoded))
    except ValueOmitted:
        shape = f"{encoded['dtype']}{encoded['shape']}" if "shape" in encoded else encoded["type"]
        return [f"{shape}, not shown: {encoded['omitted']}"]


def value_lines(value: Value) -> list[str]:
    """Return any value as lines for people."""
    import numpy as np

    from bbnode.ir import values

    match value:
        case np.ndarray():
            return _array_lines(value)
        case values.Metadata():
            return [output.cell(dict(value))]
        case values.SearchResults():
            return _result_lines(value)
        case values.PeerIdVec() | values.AddressVec():
            return [output.cell(list(value))]
        case values.MetadataVec():
            return [f"{len(value)} items", *(f"  {output.cell(dict(each))}" for each in value)]
        case values.ResponseBatch():
            lines = [f"answers: {len(value.responses)}, missing: {len(value.missing)}"]
            for peer, answer in value.responses:
                first, *rest = value_lines(answer)
                lines += [f"  {peer}: {first}", *(f"  {line}" for line in rest)]
            reasons = dict(value.reasons)
            for peer in value.missing:
                lines.append(f"  {peer}: missing: {reasons.get(peer, 'no answer by the deadline')}")
            return [output.cell(line) for line in lines]
        case values.Composite() | values.TensorSequence():
            lines = [f"{len(value)} values"]
            for child in value:
                first, *rest = value_lines(child)
                lines += [f"  {first}", *(f"  {line}" for line in rest)]
            return lines
        case values.OptionalValue():
            return ["nothing"] if value.value is None else value_lines(value.value)
        case bytes():
            return [f"{len(value)} bytes {value[:_SHOWN_BYTES].hex()}"]
        case values.Trigger():
            return ["trigger"]
    return [output.cell(str(value))]


def _result_lines(results: Any) -> list[str]:
    """Return the hits of each query of a search, one per line."""
    lines = [f"{len(results)} found"]
    for query in range(results.queries):
        if results.ids.ndim == 2:
            lines.append(f"  query {query}:")
        for hit in results.hits(query):
            metadata = f" {output.cell(dict(hit.metadata))}" if hit.metadata else ""
            by = f" (of {hit.sender})" if hit.sender else ""
            lines.append(f"  {hit.id}  distance {hit.distance:.6g}{metadata}{by}")
    return lines


def _array_lines(array: Any) -> list[str]:
    import numpy as np

    kind = "string" if array.dtype.kind in "OU" else str(array.dtype)
    if not array.shape:
        return [f"{output.cell(array.item())}  ({kind})"]
    if array.dtype.kind == "V":
        array = array.astype(np.float32)
    shape = ", ".join(map(str, array.shape))
    text = np.array2string(array, threshold=_SHOWN_ELEMENTS, edgeitems=3, max_line_width=96)
    lines = [output.cell(line) for line in text.splitlines()]
    lines[-1] += f"  ({kind}[{shape}])"
    return lines if len(lines) == 1 else ["", *lines]


def _with_numbers(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in the form that --json prints."""
    values = answer.get("values")
    return {**answer, "values": None if values is None else readable(values)}


def readable(exact: Any) -> Any:
    """Return exact values (`bbnode.daemon.invoke.exact`) with tensors as nested lists."""
    from bbnode.daemon.invoke.exact import decoded

    if isinstance(exact, list):
        return [readable(item) for item in exact]
    if not isinstance(exact, dict):
        return exact
    if isinstance(exact.get("data"), str) and "dtype" in exact:
        return {**exact, "data": _numbers(decoded(exact))}
    return {name: readable(item) for name, item in exact.items()}


def _numbers(array: Any) -> Any:
    """Return nested lists; a float without a JSON form becomes text."""
    import numpy as np

    if array.dtype.kind == "V":
        array = array.astype(np.float32)
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], -1).tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    texts = array.astype(object)
    texts[~np.isfinite(array)] = [str(float(each)) for each in array[~np.isfinite(array)]]
    return texts.tolist()


def peer_text(text: str) -> str:
    """Return the PeerId at the end of an address; other text unchanged, for the node to resolve.

    Raises typer.BadParameter for an address that names no peer.
    """
    if not text.startswith("/"):
        return text
    from bbnode.ir.address import parse_address, peer_of_address

    try:
        return str(peer_of_address(parse_address(text)))
    except BbnodeError as error:
        raise typer.BadParameter(str(error), param_hint="PEER") from error
