"""`bbnode upgrade`: replace a node's program by one that a peer offers, or go back.

Rule: like `bbnode join`, it first prepares and shows, asks for confirmation, and then changes the
node. Information and questions go to stderr.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bbnode.cli import output
from bbnode.cli.common import DEFAULT_CONFIG, ConfigOption, JsonOption, confirm, load_config

if TYPE_CHECKING:
    from bbnode.daemon.artifacts.artifact import Artifact
    from bbnode.daemon.config.sources import ResolvedConfig
    from bbnode.daemon.upgrade.candidate import Candidate

_POLL_S = 0.2
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Fetched:
    """An offered program, fetched; `release` is a line of text if the network's owner signed it."""

    peer: str
    candidate: Candidate
    release: str = ""


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    back: Annotated[
        bool, typer.Option("--back", help="Go back to the program before the last upgrade.")
    ] = False,
    auto: Annotated[
        Literal["on", "off"] | None,
        typer.Option(help="Take what the network's owner has signed without asking, or not."),
    ] = None,
    max_mib: Annotated[
        int | None,
        typer.Option(
            "--max-mib",
            help="The largest program to fetch, in MiB; default: 4 times the present one.",
            min=1,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart/--no-restart", help="Have a running node start anew, or not."),
    ] = True,
    as_json: JsonOption = False,
) -> int:
    """Take the program that a peer offers in the place of this node's.

    It fetches the program, shows it, asks, writes it beside the old one and starts the node anew.
    """
    from bbnode.daemon.upgrade import switch

    resolved = load_config(config)
    present_file = switch.present(resolved)
    if back and auto is not None:
        raise typer.BadParameter("give one of the two", param_hint="--back, --auto")
    if auto is not None:
        return _set_auto(resolved, on=auto == "on", as_json=as_json)
    from bbnode.daemon.artifacts.artifact import load_artifact

    if back:
        now = switch.back(resolved)
        shown: dict[str, Any] = {"artifact_sha256": now.sha256, "artifact": now.path, "back": True}
    else:
        present = load_artifact(present_file, expected_sha256=resolved.config.artifact.sha256)
        fetched = _found(resolved, present, None if max_mib is None else max_mib * _MIB)
        candidate = fetched.candidate
        shown = {
            "peer": fetched.peer,
            "signed_by_owner": bool(fetched.release),
            "present_sha256": present.sha256,
            "present_bytes": present.size,
            **candidate.as_json(),
        }
        if not as_json:
            _show(shown)
        candidate.plan.check()
        if not yes:
            confirm("Run this here from now on?", otherwise="nothing was changed")
        file = switch.switch(
            resolved, candidate.artifact, candidate.file, candidate.targets, fetched.release
        )
        shown["artifact"] = str(file)
    shown["restarting"] = _restart(resolved) if restart else False
    if as_json:
        output.json_object(shown)
        return 0
    output.data(f"program {shown['artifact_sha256'][:8]} ({shown['artifact']})")
    if shown["restarting"]:
        output.note("the running node starts anew with it once no round is under way")
    else:
        output.note(f"it runs from the next start on: bbnode run -c {resolved.file}")
    output.note(f"{'forth' if back else 'back'}: bbnode upgrade --back -c {resolved.file}")
    return 0


def _set_auto(resolved: ResolvedConfig, *, on: bool, as_json: bool) -> int:
    from bbnode.daemon.upgrade.switch import NotUpgradable, set_auto

    network = _network(resolved)
    if on and network is None:
        raise NotUpgradable(
            "--auto takes what the owner of a private network has signed, and this node is in an "
            "open one: take each upgrade with `bbnode upgrade`"
        )
    set_auto(resolved, auto=on)
    shown = {"auto": on, "network": network, "running": _reload(resolved)}
    if as_json:
        output.json_object(shown)
        return 0
    output.data(f"upgrades by themselves: {'on' if on else 'off'}")
    if on:
        output.note(f"taken is what the owner of {network} has signed (`bbnode network sign`)")
    return 0


def _network(resolved: ResolvedConfig) -> str | None:
    from bbnode.daemon import paths
    from bbnode.daemon.access import files as access_files
    from bbnode.transport.identity import load_identity

    key = paths.identity_file(resolved.state_dir)
    if not key.exists():
        return None
    network = access_files.load_node(resolved.state_dir, load_identity(key).peer_id).network
    return None if network is None else str(network)


def _found(resolved: ResolvedConfig, present: Artifact, max_bytes: int | None) -> _Fetched:
    from bbnode.daemon.control.errors import NotRunning

    try:
        return _from_running(resolved, max_bytes)
    except NotRunning:
        return _dialled(resolved, present, max_bytes)


def _from_running(resolved: ResolvedConfig, max_bytes: int | None) -> _Fetched:
    """Have the running node fetch the program. Raises NotRunning, NotOffered."""
    from bbnode.daemon import paths
    from bbnode.daemon.artifacts.artifact import load_artifact
    from bbnode.daemon.control.client import ControlClient
    from bbnode.daemon.control.host import NotOffered
    from bbnode.daemon.join.artifact import cache_file
    from bbnode.daemon.upgrade.candidate import make_candidate
    from bbnode.transport.artifact_exchange import ArtifactFetchError

    with ControlClient(paths.control_socket(resolved.state_dir)) as client:
        offers = client.get("/v1/status").get("offers", [])
        if not offers:
            raise NotOffered("no connected peer offers another program than this node has")
        offer = offers[0]
        sha256 = offer["artifact_sha256"]
        asked = {"artifact_sha256": sha256, "max_bytes": max_bytes}
        while not (answer := client.post("/v1/upgrade/fetch", asked))["done"]:
            time.sleep(_POLL_S)
    if answer["failure"]:
        raise ArtifactFetchError(answer["failure"])
    file = cache_file(resolved.state_dir, sha256)
    artifact = load_artifact(file, expected_sha256=sha256)
    return _Fetched(
        peer=offer["peer"],
        candidate=make_candidate(resolved, artifact, file),
        release=answer["release"],
    )


def _dialled(resolved: ResolvedConfig, present: Artifact, max_bytes: int | None) -> _Fetched:
    from bbnode.daemon.observing import logs

    logs.configure("warning", "auto")
    import trio

    from bbnode.daemon.upgrade.asking import asked
    from bbnode.daemon.upgrade.candidate import make_candidate

    peer, obtained, release = trio.run(partial(asked, resolved, present, max_bytes=max_bytes))
    return _Fetched(
        peer=str(peer),
        candidate=make_candidate(resolved, obtained.artifact, obtained.file),
        release="" if release is None else release.text,
    )


def _show(shown: dict[str, Any]) -> None:
    from rich.console import Console

    width = None if sys.stderr.isatty() else 200
    out = Console(stderr=True, width=width, highlight=False, emoji=False, markup=False)
    output.describe(shown, out=out)


def _restart(resolved: ResolvedConfig) -> bool:
    """Return True if a running node is restarting."""
    return _posted(resolved, "/v1/restart")


def _reload(resolved: ResolvedConfig) -> bool:
    return _posted(resolved, "/v1/reload")


def _posted(resolved: ResolvedConfig, path: str) -> bool:
    from bbnode.daemon import paths
    from bbnode.daemon.control.client import ControlClient
    from bbnode.daemon.control.errors import ControlError, NotRunning

    try:
        with ControlClient(paths.control_socket(resolved.state_dir)) as client:
            client.post(path)
    except NotRunning:
        return False
    except ControlError as error:
        output.note(f"the running node did not do it: {error}")
        return False
    return True
