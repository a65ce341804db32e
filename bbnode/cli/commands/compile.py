"""`bbnode compile`: a Module class to a compiled artifact on disk.

Rule: the file is written whole or not at all, and the same source gives the same bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption, pairs


def command(
    module: Annotated[str, typer.Argument(help="The class.", metavar="PACKAGE.MODULE:CLASS")],
    out: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write it.", metavar="FILE")
    ] = Path("artifact.onnx"),
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Keyword argument of the class, as a TOML value (repeatable).", metavar="KEY=VALUE"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a Module class to an artifact that every peer loads."""
    arguments = {key: _value(text) for key, text in pairs(arg, "--arg").items()}
    from bbnode.daemon import artifact, paths
    from bbnode.daemon.build import compile_module
    from bbnode.daemon.inspect import describe

    model = compile_module(module, arguments)
    data = artifact.serialize(model)
    paths.write_atomically(out.absolute(), data, mode=0o644)
    targets = [target["name"] for target in describe(model)["targets"]]
    sha256 = hashlib.sha256(data).hexdigest()
    if as_json:
        output.json_object(
            {"path": str(out), "bytes": len(data), "sha256": sha256, "targets": targets}
        )
        return
    output.data(f"{out}  {len(data)} bytes  sha256 {sha256}")
    for name in targets:
        output.data(f"  {name}")


def _value(text: str) -> Any:
    """A TOML value; text that is none is taken as it stands."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
