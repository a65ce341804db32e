"""`bbnode bugreport`: one file with what someone else needs to help.

Rule: it holds no secrets (`bbnode.daemon.observing.bugreport` says how), but names, addresses and
settings; users should read it before they send it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import DEFAULT_CONFIG, ConfigOption, JsonOption, load_config


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; default: one here.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report on a node for somebody else, without secrets.

    It has versions, configuration, state and log.
    """
    from bbnode.daemon.observing import bugreport
    from bbnode.daemon.paths import write_atomically

    resolved = load_config(config)
    report = bugreport.collect(resolved)
    if as_json:
        output.json_object(report)
        return
    name = resolved.config.node.name
    file = out or Path(f"bbnode-{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json")
    text = output.json_text(report, indent=2)
    write_atomically(file, text.encode("utf-8"), mode=0o600)
    output.data(str(file))
    output.note("keys, tokens and tickets are not in it; names and addresses are: read it first")
