"""`bbnode data`: the meaning of a node's data, its own and that agreed on by its peers.

Rule: it reads the same configuration as `bbnode run`, and never prints an example.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import exits, output
from bbnode.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    SetOption,
    group,
    load_config,
)

if TYPE_CHECKING:
    from bbnode.daemon.artifacts.schemas import OwnData

app = group("Show what data mean, here and in the federation.")


@app.command("schema")
def schema(
    config: ConfigOption = DEFAULT_CONFIG, settings: SetOption = None, as_json: JsonOption = False
) -> int:
    """Show what a node's data mean.

    Columns, categories, classes, scaling and how images and texts are read, as the node tells them
    to its peers, with a digest that is the same for all whose data mean the same. The node need not
    run; its data are loaded. The exit code is 1 where the program says otherwise.
    """
    from bbnode.daemon.artifacts.schemas import own_schemas

    own = own_schemas(load_config(config, settings))
    refused = any(each.refused for each in own.values())
    if as_json:
        output.json_object({"slots": {slot: _own(each) for slot, each in own.items()}})
        return exits.FAILURE if refused else exits.OK
    if not own:
        output.note("the node's program uses no data here")
    for slot, each in own.items():
        if each.schema is None:
            output.data(f"{slot}: its data source does not say what the examples mean")
            continue
        output.data(f"{slot}  {each.schema.digest}")
        for line in each.schema.lines():
            output.data(f"  {line}")
        if each.refused:
            output.data(f"  refused by the program: {each.refused}")
    return exits.FAILURE if refused else exits.OK


def _own(each: OwnData) -> dict[str, Any] | None:
    from bbnode.daemon.artifacts.schemas import plain

    if each.schema is None:
        return None
    own = each.schema
    return {
        "digest": own.digest,
        "named": own.is_named,
        "refused": each.refused,
        "meaning": plain(own),
    }


@app.command("agreed")
def agreed(
    config: ConfigOption = DEFAULT_CONFIG,
    settings: SetOption = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write it into this pyproject.toml, for the program.", metavar="FILE"),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(help="Scale by this file, which a data source wrote.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a node's peers agreed on, or write it to a project.

    The node that sends the others their requests keeps it. In the tables
    [tool.bbnode.schema.SLOT] of a pyproject.toml it becomes a part of the program.
    """
    from bbnode.daemon.artifacts.schemas import (
        agreed_schemas,
        plain,
        with_statistics,
        write_project,
    )

    agreed_on = agreed_schemas(load_config(config, settings))
    if statistics is not None:
        agreed_on = {slot: with_statistics(each, statistics) for slot, each in agreed_on.items()}
    if write is not None:
        write_project(write, agreed_on)
        output.note(f"{write}: [tool.bbnode.schema.SLOT] of {', '.join(sorted(agreed_on))}")
    if as_json:
        slots = {s: {"digest": e.digest, "meaning": plain(e)} for s, e in agreed_on.items()}
        output.json_object({"slots": slots})
        return
    for slot, each in agreed_on.items():
        output.data(f"{slot}  {each.digest}")
        for line in each.lines():
            output.data(f"  {line}")


@app.command("forget")
def forget(config: ConfigOption = DEFAULT_CONFIG, settings: SetOption = None) -> None:
    """Forget what a stopped node's peers agreed on.

    The first peer that connects defines it anew. A model that was trained before then gets numbers
    that may mean something else: begin with new weights too.
    """
    from bbnode.daemon.artifacts.schemas import forget

    was_there = forget(load_config(config, settings))
    output.note("forgotten" if was_there else "there was nothing to forget")
