"""`bbnode init`: an identity and a configuration, in a directory or where services have them.

Rule: it never touches an existing key, and overwrites a configuration only with `--force`; the file
that it writes passes the same checks as one that is read.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import JsonOption, SetOption, given_settings
from bbnode.ir import installation

if TYPE_CHECKING:
    from bbnode.daemon.config import NodeConfig

CONFIG_NAME = "node.toml"
STATE_NAME = "state"
COMMENT = (
    "Only what differs from the defaults stands here.\n"
    "`bbnode init --reference` prints every key with its default and unit."
)


def command(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of the node; default: that of the file $BBNODE_CONFIG, else this one.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="Compiled artifact that the node runs.", metavar="FILE")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(help="Or the class to compile at start.", metavar="PACKAGE.MODULE:CLASS"),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Target to install (repeatable).", metavar="CLASS[#HASH]"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the node; default: the directory's.")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            # The container image sets it: its port is published, and loopback could not be reached.
            envvar="BBNODE_INIT_LISTEN",
            help="Address to listen on (repeatable).",
            metavar="MULTIADDR",
        ),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to tell peers instead, behind a NAT or in a container (repeatable).",
            metavar="MULTIADDR",
        ),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(help="Peer to stay connected with (repeatable).", metavar="MULTIADDR"),
    ] = None,
    settings: SetOption = None,
    user: Annotated[
        bool,
        typer.Option("--user", help="Write ~/.config/bbnode/NAME.toml, for bbnode-user@NAME."),
    ] = False,
    system: Annotated[
        bool, typer.Option("--system", help="Write /etc/bbnode/NAME.toml, for bbnode@NAME.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the configuration.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print every key of node.toml and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make an identity and a node.toml in a directory."""
    from bbnode.daemon import paths, units
    from bbnode.daemon.config import sources

    if reference:
        from bbnode.daemon.config.reference import as_toml

        output.data(as_toml().rstrip("\n"))
        return
    if (artifact is None) == (module is None):
        raise typer.BadParameter(
            "say what the node runs: give exactly one of the two", param_hint="--artifact, --module"
        )
    if not target:
        raise typer.BadParameter(
            "say which part it plays, like --target client", param_hint="--target"
        )
    if user or system:
        file = _service_file(name, user=user, system=system, directory=directory)
    else:
        file = _node_file(directory)
    if file.exists() and not force:
        raise sources.ConfigError(f"{file} exists already; --force overwrites it")
    flags: dict[str, Any] = {
        "node.name": name if name is not None else file.parent.name,
        # The state directory of a service follows from the place of its configuration.
        "node.state_dir": None if user or system else STATE_NAME,
        "artifact.path": None if artifact is None else str(artifact.expanduser()),
        "artifact.module": module,
        "artifact.targets": target,
        "network.listen": listen or None,
        "network.announce": announce or None,
        "network.bootstrap": bootstrap or None,
        **given_settings(settings),
    }
    # The environment applies to runs; it must not leak into the file.
    config: NodeConfig = sources.resolve(None, environ={}, flags=flags).config
    config = _checked(config, file, movable=not (user or system))
    unit = units.install(system=system) if user or system else None
    if unit is not None:
        output.note(f"wrote {unit}, the unit of such services")
    if system:
        if not paths.has_system_user():
            output.note(f"before it can run: {units.user_command()}")
        # The user of the service owns the key, and creates it at the first start.
        sources.write(file, config, comment=COMMENT)
        if as_json:
            output.json_object({"config_file": str(file)})
            return
        output.note(f"wrote {file}; start the node with: systemctl enable --now bbnode@{name}")
        return
    state_dir = paths.default_state_dir(str(name)) if user else file.parent / STATE_NAME
    peer_id = _identity(state_dir)
    paths.make_state_dir(file.parent)
    sources.write(file, config, comment=COMMENT)
    if as_json:
        key = paths.identity_file(state_dir)
        output.json_object(
            {"peer_id": peer_id, "config_file": str(file), "identity_file": str(key)}
        )
        return
    output.data(peer_id)
    start = f"systemctl --user enable --now bbnode-user@{name}" if user else None
    if start is None:
        start = f"{installation.bbnode()} run --config {shlex.quote(str(file))}"
    output.note(f"wrote {file}; start the node with: {start}")


def _node_file(directory: Path | None) -> Path:
    """Return the configuration file in a directory, by default the one that all commands use."""
    if directory is not None:
        return directory.expanduser().absolute() / CONFIG_NAME
    return Path(os.environ.get("BBNODE_CONFIG") or CONFIG_NAME).expanduser().absolute()


def _service_file(name: str | None, *, user: bool, system: bool, directory: Path | None) -> Path:
    """Return the configuration file of a service, which is named after the service."""
    from bbnode.daemon import paths

    if name is None or user is system or directory is not None:
        raise typer.BadParameter(
            "give one of the two, with --name and without a directory",
            param_hint="--user, --system",
        )
    users, systems = paths.config_dirs()
    return (users if user else systems) / f"{name}.toml"


def _path(path: Path | None, directory: Path | None) -> str | None:
    """Return a path for the file: relative to its directory, or absolute."""
    if path is None:
        return None
    absolute = path.expanduser().absolute()
    return str(absolute) if directory is None else os.path.relpath(absolute, directory)


def _module(module: str | None, directory: Path | None) -> str | None:
    """Return the class for the file; its paths are relative to the file's directory."""
    place, colon, name = (module or "").partition(":")
    return f"{_path(Path(place), directory)}{colon}{name}" if place.endswith(".py") else module


def _checked(config: NodeConfig, file: Path, *, movable: bool) -> NodeConfig:
    """Return a configuration for the file, after checking that its artifact has its targets.

    Paths were typed in the current directory; if the file is `movable` together with the files
    around it, they become relative to it, else absolute. Slots that still need settings are named.
    Raises UnknownTarget, UnknownSlot, SlotsNotConfigured, and the errors of reading or compiling
    the artifact.
    """
    from bbnode.daemon.config import ArtifactSection
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.join.invitation import SlotsNotConfigured
    from bbnode.daemon.join.plan import make_plan, with_absolute_paths
    from bbnode.daemon.lifecycle import assembly

    resolved = ResolvedConfig(config=config, file=None, origins={})
    assembly.import_components(resolved)
    plan = make_plan(assembly.find_artifact(resolved), config)
    for slot in plan.slots:
        if slot.fault and slot.slot in config.slots:
            raise SlotsNotConfigured(slot.fault)
        if slot.fault:
            output.note(f"before it can run: {slot.fault}")
    config = with_absolute_paths(config, plan, Path.cwd())
    directory = file.parent if movable else None
    slots = {name: dict(settings) for name, settings in config.slots.items()}
    for slot in plan.slots:
        for name in set(slot.paths) & slots.get(slot.slot, {}).keys():
            slots[slot.slot][name] = _path(Path(slots[slot.slot][name]), directory)
    section = config.artifact
    moved = {"path": _path(section.path, directory), "module": _module(section.module, directory)}
    artifact = ArtifactSection.model_validate({**section.model_dump(), **moved})
    return config.model_copy(update={"slots": slots, "artifact": artifact})


def _identity(state_dir: Path) -> str:
    from bbnode.daemon import paths
    from bbnode.transport.identity import load_or_create_identity

    paths.make_state_dir(state_dir)
    return str(load_or_create_identity(paths.identity_file(state_dir)).peer_id)
