"""`bbnode demo`: federated training of five daemons on this machine.

Rule: the options are checked here; the demo itself is `bbnode.daemon.testbed.demo`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bbnode.cli.common import JsonOption


def command(
    clients: Annotated[int, typer.Option(help="Client daemons.", min=1, max=64)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of training.", min=1)] = 20,
    split: Annotated[
        Literal["iid", "shards"],
        typer.Option(help="Data: evenly mixed, or label-sorted shards."),
    ] = "iid",
    seed: Annotated[int, typer.Option(help="Seed of data, weights and draws.", min=0)] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of report.json and accuracy.png.", metavar="DIR")
    ] = Path("demo-out"),
    port: Annotated[
        int, typer.Option(help="TCP port of the server; 0: a free one.", min=0, max=65535)
    ] = 0,
    as_json: JsonOption = False,
) -> int:
    """Train a digit classifier across a server and four clients.

    Each is a process of its own on this machine.
    """
    from bbnode.daemon.testbed.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            clients=clients,
            rounds=rounds,
            split=split,
            seed=seed,
            out=out,
            port=port,
            as_json=as_json,
        )
    )
