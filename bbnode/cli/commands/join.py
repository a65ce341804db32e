"""`bbnode join`: run a node for a program, by a ticket or an address.

Rule: it first prepares and shows (`bbnode.daemon.join.prepare`), asks for confirmation, and then
runs an ordinary node. Information and questions go to stderr; stdout has the node's progress, or
the JSON.
"""

from __future__ import annotations

import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import access_options, output
from bbnode.cli.common import JsonOption, SetOption, confirm, pairs
from bbnode.ir import installation

if TYPE_CHECKING:
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.join.prepare import JoinOptions, Prepared
    from bbnode.daemon.join.service import Service


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A ticket, the address of a peer, the digest of a program, or a file with one.",
            metavar="TICKET|MULTIADDR|DIGEST|@FILE",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="What to play; default: what the ticket says.", metavar="CLASS[#HASH]"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the node; default: of its network.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Folder of the node; default: $XDG_STATE_HOME/bbnode/NAME.",
            metavar="DIR",
        ),
    ] = None,
    via: Annotated[
        list[str] | None,
        typer.Option(
            help="A peer to ask who else has the program, where the inviting one does not answer.",
            metavar="MULTIADDR",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="The private network, where no ticket says it.", metavar="ID"),
    ] = None,
    membership: Annotated[
        str | None,
        typer.Option(help="A statement for this node, or a file with one.", metavar="TEXT|@FILE"),
    ] = None,
    user: Annotated[
        bool,
        typer.Option("--user", help="Make it a service of this user, bbnode-user@NAME; not run."),
    ] = False,
    system: Annotated[
        bool,
        typer.Option("--system", help="Make it a service of the system, bbnode@NAME; not run."),
    ] = False,
    settings: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run the node, or only make it.")
    ] = True,
    as_json: JsonOption = False,
) -> int:
    """Take part by a ticket, an address or a digest.

    It dials, fetches the program, shows it, asks, and runs it until Ctrl-C.
    """
    from bbnode.daemon.join.invitation import read_source

    if user and system:
        raise typer.BadParameter("give one of the two", param_hint="--user, --system")
    invited = read_source(source, unix_s=time.time(), via=via or (), network=network)
    # Imported late, so that a faulty ticket is reported at once.
    from bbnode.daemon.join.folder import folder
    from bbnode.daemon.join.prepare import JoinOptions

    place = folder(invited, name=name, directory=directory)
    service = _service(place.name, system=system) if user or system else None
    options = JoinOptions(
        source=invited,
        # A second join compares with the service as it is now.
        folder=service.folder if service is not None and service.exists else place,
        target=target,
        settings=pairs(settings, "--set"),
        statement=_text(membership),
    )
    try:
        prepared = _prepare(options, level=pairs(settings, "--set").get("node.log_level"))
    finally:
        if service is not None:
            service.give()
    written = prepared.options.folder if service is None else service.folder
    _show(prepared, written.config_file, as_json=as_json)
    prepared.plan.check()
    if not yes:
        confirm("Run this here?", otherwise="nothing was started")
    if service is not None:
        service.establish(prepared)
        output.note(f"wrote {service.folder.config_file}; start the node with: {service.start}")
        return 0
    resolved = prepared.write()
    file = shlex.quote(str(prepared.options.folder.config_file))
    again = f"{installation.bbnode()} run -c {file}"
    if not run:
        output.note(f"start it with: {again}")
        return 0
    output.note(f"Ctrl-C leaves; go on later with: {again}")
    return _run(resolved, str(prepared.options.source.inviter), as_json=as_json)


def _text(argument: str | None) -> str:
    """Return an argument, or the only line of the file that it names."""
    if argument is None or not argument.startswith("@"):
        return argument or ""
    from bbnode.daemon.access import files as access_files

    return access_files.read_line(Path(argument[1:]).expanduser())


def _service(name: str, *, system: bool) -> Service:
    from bbnode.daemon.join.service import service

    chosen = service(name, system=system)
    chosen.check()
    return chosen


def _prepare(options: JoinOptions, *, level: str | None) -> Prepared:
    from bbnode.daemon.observing import logs

    logs.configure(level if level in ("debug", "info", "warning", "error") else "warning", "auto")
    import trio

    from bbnode.daemon.join.prepare import prepare

    if not sys.stderr.isatty():
        return trio.run(prepare, options)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(f"dialling {options.source.inviter.short}", total=None)

        def progress(have: int, size: int) -> None:
            bar.update(task, description="fetching the artifact", completed=have, total=size)

        return trio.run(partial(prepare, options, progress=progress))


def _show(prepared: Prepared, config_file: Path, *, as_json: bool) -> None:
    shown: dict[str, Any] = prepared.as_json() | {"config_file": str(config_file)}
    until = shown.pop("member_until_unix_s")
    shown["member_until"] = None if until is None else access_options.date(until)
    if as_json:
        output.json_object(shown)
        return
    from rich.console import Console

    width = None if sys.stderr.isatty() else 200
    out = Console(stderr=True, width=width, highlight=False, emoji=False, markup=False)
    output.describe(shown, out=out)


def _run(resolved: ResolvedConfig, inviter: str, *, as_json: bool) -> int:
    from bbnode.daemon import paths
    from bbnode.daemon.lifecycle.app import run_daemon
    from bbnode.daemon.observing import logs

    # All paths are absolute by now. The program of another author runs in an empty directory.
    paths.enter_empty_dir(resolved.state_dir)
    node = resolved.config.node
    # The ticket names the program of its time; a restart runs the node's own configuration instead.
    again = ["run", "--config", str(resolved.file)]
    if as_json:
        logs.configure(node.log_level, node.log_format)
        return run_daemon(resolved, again=again)
    from bbnode.daemon.join.view import JoinView

    with JoinView(output.console(), inviter=inviter) as view:
        # The view shows warnings anyway; lesser lines are logged only if the user set a level.
        asked = resolved.origins.get("node.log_level") is not None
        logs.configure(node.log_level if asked else "warning", node.log_format)
        return run_daemon(resolved, companion=view.run, again=again)
