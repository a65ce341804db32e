"""`bbnode config`: the configuration of a node, and the origin of each value.

Rule: it reads the same sources as `bbnode run`, with the same function, and changes nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    SetOption,
    group,
    load_config,
)

app = group("Show the configuration of a node.")


@app.command("show")
def show(
    config: ConfigOption = DEFAULT_CONFIG,
    settings: SetOption = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value comes from.")
    ] = False,
    all_keys: Annotated[
        bool, typer.Option("--all", help="Also the keys that have their default.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration: flags over environment over file over defaults."""
    from bbnode.daemon.config import sources

    resolved = load_config(config, settings)
    rows = [
        (key, value, source)
        for key, value, source in sources.shown(resolved)
        if all_keys or source != "default"
    ]
    if as_json:
        shown = [{"key": key, "value": value, "origin": source} for key, value, source in rows]
        output.json_object({"file": str(resolved.file), "keys": shown})
        return
    for key, value, source in rows:
        text = "(unset)" if value is None else sources.toml_value(value)
        output.data(f"{key} = {text}" + (f"  # {_place(source, resolved.file)}" if origin else ""))


@app.command("reference")
def reference(
    limits: Annotated[
        bool,
        typer.Option("--limits", help="Every bound, cap and deadline, instead."),
    ] = False,
    components: Annotated[
        bool,
        typer.Option("--components", help="The settings of shipped components, instead."),
    ] = False,
    api: Annotated[
        bool, typer.Option("--api", help="The names of `import bbnode`, instead.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As docs/config.md has it, with types.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every key with its default, its unit and what it does."""
    from bbnode.daemon.config import limits as bounds
    from bbnode.daemon.config import reference as pages

    if limits + components + api > 1:
        raise typer.BadParameter("give one of --limits, --components and --api")
    if as_json and markdown:
        raise typer.BadParameter("give one of --json and --markdown")
    if as_json and not limits:
        raise typer.BadParameter("there is --json for --limits alone")
    if as_json:
        limits_as_json = [
            {**asdict(cap), "job": bounds.job_of(cap)} for cap in bounds.every_limit()
        ]
        output.json_object({"limits": limits_as_json})
        return
    if limits:
        page = bounds.limits_markdown() if markdown else bounds.limits_text()
    elif components:
        page = pages.components_markdown()
    elif api:
        from bbnode.api.reference import api_markdown

        page = api_markdown()
    else:
        page = pages.config_markdown() if markdown else pages.as_toml()
    output.data(page.rstrip("\n"))


def _place(source: str, file: object) -> str:
    return f"file {file}" if source == "file" else source
