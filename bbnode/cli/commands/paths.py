"""`bbnode paths`: where a node keeps its files.

Rule: every path comes from `bbnode.daemon.paths`; a configuration that can't be used is an
error, because its name and state directory decide the others.
"""

from __future__ import annotations

from bbnode.cli import output
from bbnode.cli.common import DEFAULT_CONFIG, ConfigOption, JsonOption, load_config


def command(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Print the paths of a node: configuration, state, key, socket."""
    from bbnode.daemon import paths
    from bbnode.daemon.state import checkpoint

    resolved = load_config(config)
    state_dir = resolved.state_dir.absolute()
    named = {
        "config": resolved.file,
        "state_dir": state_dir,
        "identity": paths.identity_file(state_dir),
        "lock": paths.lock_file(state_dir),
        "checkpoint": checkpoint.checkpoint_file(state_dir),
        "control_socket": paths.control_socket(state_dir),
        "cache_dir": paths.cache_dir(state_dir),
    }
    if as_json:
        output.json_object({name: str(path) for name, path in named.items()})
        return
    for name, path in named.items():
        output.data(f"{name:<15} {path}")
