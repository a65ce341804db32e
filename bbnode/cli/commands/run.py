"""`bbnode run`: the daemon.

Rule: the configuration is checked here, before the daemon starts; the daemon itself is
`bbnode.daemon.lifecycle.app`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbnode.cli import exits
from bbnode.cli.common import DEFAULT_CONFIG, ConfigOption, SetOption, load_config

if TYPE_CHECKING:
    from bbnode.daemon.config.sources import ResolvedConfig


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    settings: SetOption = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", metavar="LEVEL")
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="auto, text, color, json or journal.", metavar="FORMAT"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write all that comes in to a new file, for `bbnode replay`.", metavar="FILE"
        ),
    ] = None,
    stop_at_eof: Annotated[
        bool,
        typer.Option(
            "--stop-at-eof",
            help="Also stop when standard input ends, as it does when whoever started the node and "
            "holds the other end of a pipe is gone.",
        ),
    ] = False,
) -> int:
    """Run a node until SIGTERM or Ctrl-C; a second one forces it."""
    # Garbage collection among the imports of a start takes a tenth of it: `OwnProcess.started`
    # turns it on again.
    gc.disable()
    try:
        with _telling_supervisor():
            return _run(
                load_config(
                    config, settings, {"node.log_level": log_level, "node.log_format": log_format}
                ),
                record,
                stop_at_eof=stop_at_eof,
            )
    finally:
        gc.enable()


@contextmanager
def _telling_supervisor() -> Iterator[None]:
    """Put the reason of a failure into the service's status, which shows it without the log."""
    try:
        yield
    except Exception as error:
        from bbnode.daemon.lifecycle import sd_notify

        first = next(exits.leaves(error))
        sd_notify.notify(f"STATUS=failed: {' '.join(str(first).split()) or type(first).__name__}")
        raise


def _run(resolved: ResolvedConfig, record: Path | None, *, stop_at_eof: bool) -> int:
    # Before the imports of the daemon's modules, which may warn.
    from bbnode.daemon.observing import logs

    logs.configure(resolved.config.node.log_level, resolved.config.node.log_format)
    from bbnode.daemon.lifecycle.app import run_daemon

    return run_daemon(resolved, record=record, stop_at_eof=stop_at_eof)
