"""`bbnode status`: what a running daemon says about itself, over its control socket.

Rule: it shows what the daemon sends and knows no key by name, so that a newer daemon shows
all it has.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bbnode.cli import output
from bbnode.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    JsonOption,
    StateDirOption,
    find_state_dir,
)


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    state_dir: StateDirOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print events until it stops.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.01)
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show a running node: its peers, targets, and what it waits for."""
    from bbnode.daemon import paths
    from bbnode.daemon.control_client import ControlClient

    socket = paths.control_socket(find_state_dir(config, state_dir))
    with ControlClient(socket, timeout_s=timeout_s) as client:
        status = client.call("status")
        if as_json:
            output.json_object(status, indent=None if follow else 2)
        else:
            output.describe(status, out=output.console())
        if follow:
            for line in client.events():
                _show_event(line["event"], line["dropped"], as_json=as_json)


def _show_event(event: dict[str, object], dropped: int, *, as_json: bool) -> None:
    if as_json:
        output.json_object({"event": event, "dropped": dropped}, indent=None)
    else:
        if dropped:
            output.note(f"({dropped} events were lost: this reader was too slow)")
        output.data(output.cell(event))
