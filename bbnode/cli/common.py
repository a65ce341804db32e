"""Options that several commands share, and how they become a configuration.

Rule: an option means the same in every command that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.control.client import ControlClient

DEFAULT_CONFIG = Path("node.toml")

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        envvar="BBNODE_CONFIG",
        help="Configuration of the node.",
        metavar="FILE",
    ),
]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="State directory of the node; then no configuration is read.",
        metavar="DIR",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set a key of the configuration, as in network.listen=/ip4/0.0.0.0/tcp/4001.",
        metavar="KEY=VALUE",
    ),
]
# What of a peer is a column, in this order; --json has everything.
PEER_COLUMNS = ("peer", "classes", "via", "direction", "rtt_ms", "bytes_in", "bytes_out", "queued")
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.01)
]
DEFAULT_TIMEOUT_S = 5.0
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def group(help_text: str) -> typer.Typer:
    """A command that has commands of its own: `app = group("…")`, then `@app.command("name")`."""
    return typer.Typer(help=help_text, add_completion=False, rich_markup_mode=None)


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """KEY=VALUE texts as a dictionary; a usage error for any other text."""
    found = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        found[key.strip()] = value
    return found


def load_config(
    config: Path, settings: Sequence[str] | None = None, flags: dict[str, Any] | None = None
) -> ResolvedConfig:
    """The configuration with `--set` and the command's own flags on top."""
    from bbnode.daemon import paths
    from bbnode.daemon.config import sources

    own = {key: value for key, value in (flags or {}).items() if value is not None}
    return sources.resolve(paths.find_config(config), flags={**pairs(settings, "--set"), **own})


def daemon(
    config: Path, state_dir: Path | None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ControlClient:
    """A client for the running daemon of a node; use it in a `with`."""
    from bbnode.daemon import paths
    from bbnode.daemon.control.client import ControlClient

    return ControlClient(
        paths.control_socket(find_state_dir(config, state_dir)), timeout_s=timeout_s
    )


def find_state_dir(config: Path, state_dir: Path | None) -> Path:
    """The state directory that was named, else the one of the configuration."""
    if state_dir is not None:
        return state_dir.expanduser().absolute()
    return load_config(config).state_dir
