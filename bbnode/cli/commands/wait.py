"""`bbnode wait`: wait until a node is ready, or has enough peers.

Rule: it also waits for a daemon that has not started yet, so that a script can start one and then
wait; a timeout is exit code 4.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import LocalNode

if TYPE_CHECKING:
    from bbnode.daemon.control.client import ControlClient

# Seconds between two requests: short enough for a script, at most a hundredth of a core.
LOOK_EVERY_S = 0.1


def command(
    node: LocalNode = LocalNode(),
    ready: Annotated[bool, typer.Option("--ready", help="Until the node does its work.")] = False,
    peers: Annotated[
        int | None, typer.Option(help="Until so many peers are connected.", min=1)
    ] = None,
    peer_class: Annotated[
        str | None, typer.Option("--class", help="Of --peers: only those that play this class.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait at most.", min=0)
    ] = 60.0,
) -> None:
    """Wait until a node is ready, or has enough peers."""
    if not ready and peers is None:
        raise typer.BadParameter(
            "say what to wait for: one of them, or both", param_hint="--ready, --peers"
        )
    if peer_class is not None and peers is None:
        raise typer.BadParameter("it goes with --peers", param_hint="--class")
    from bbnode.daemon.control.errors import ControlTimeout, NotRunning

    began = time.monotonic()
    while True:
        left_s = timeout_s - (time.monotonic() - began)
        try:
            with node.client(max(left_s, LOOK_EVERY_S)) as client:
                state, missing = _look(client, ready=ready, peers=peers, peer_class=peer_class)
        except (NotRunning, ControlTimeout) as error:
            state, missing = {}, str(error)
        if not missing:
            break
        if left_s <= 0:
            raise ControlTimeout(f"not within {timeout_s:g} s: {missing}")
        time.sleep(min(LOOK_EVERY_S, max(left_s, 0.0)))
    waited_s = round(time.monotonic() - began, 3)
    if node.as_json:
        output.json_object({**state, "waited_s": waited_s})
    else:
        wanted = "ready" if ready else output.counted(len(state["peers"]), "peer") + " connected"
        output.note(f"{wanted} after {waited_s:.1f} s")


def _look(
    client: ControlClient, *, ready: bool, peers: int | None, peer_class: str | None
) -> tuple[dict[str, Any], str]:
    """Return the current state, and what is missing ("" for nothing)."""
    state: dict[str, Any] = {}
    if ready:
        from bbnode.daemon.control.json_lines import parse_object

        status, text = client.fetch("GET", "/readyz")
        state["ready"] = status == 200
        if status != 200:
            reasons = parse_object(text).get("reasons") or [{"detail": f"status {status}"}]
            return state, "; ".join(str(reason["detail"]) for reason in reasons)
    if peers is not None:
        there = [
            peer["peer"]
            for peer in client.get("/v1/peers")["peers"]
            if (peer_class is None or peer_class in peer["classes"]) and not peer.get("pending")
        ]
        state["peers"] = there
        if len(there) < peers:
            kind = "" if peer_class is None else f" of class {peer_class!r}"
            return state, f"{len(there)} of {peers} peers{kind} connected"
    return state, ""
