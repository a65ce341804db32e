"""The view of a joined node while it runs: live on a terminal, one line per event elsewhere.

Rule: it reads the node on the trio thread and only draws. Each line reports an event, and none
repeats the one before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import trio
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bbnode.daemon.control import views
from bbnode.daemon.control.host import Host
from bbnode.daemon.observing.live_view import LiveView, size
from bbnode.daemon.observing.logs import LogWindows
from bbnode.engine.readiness import reasons_text
from bbnode.ir.caps import LOG_REPEAT_S
from bbnode.ir.texts import failure_text, printable, short_peer

if TYPE_CHECKING:
    from bbnode.daemon.control.feed import Subscription

_REFRESH_S: Final = 0.25
_SHOWN_PEERS: Final = 8
_SHOWN_WAITING: Final = 6
_SHOWN_NOTES: Final = 4


class JoinView(LiveView):
    """The progress of one node; a context manager, whose `run` is a daemon's companion."""

    def __init__(self, console: Console, *, inviter: str) -> None:
        """Create a view; `inviter` is the PeerId whose rounds are awaited."""
        super().__init__(console, notes=_SHOWN_NOTES, auto_refresh=False, transient=True)
        self._inviter = inviter
        self._last = ""
        self._failures = LogWindows(LOG_REPEAT_S, 1)

    async def run(self, host: Host) -> None:
        """Show the node until it has stopped."""
        subscription = host.events.subscribe()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._refresh, host)
                await self._follow(subscription)
                nursery.cancel_scope.cancel()
        finally:
            subscription.close()
            self._show(host)
            if self._live is not None:
                # Here as well: a daemon whose component still computes ends the process at once,
                # which would leave the terminal without its cursor.
                self._live.stop()

    async def _follow(self, subscription: Subscription) -> None:
        while (line := await subscription.next()) is not None:
            event = json.loads(line)["event"]
            text = event_text(event, self._name)
            repeated = self._repeated(event, text)
            if text and repeated is not None:
                self.note(f"{text} ({repeated} more since the last line)" if repeated else text)

    def _repeated(self, event: Mapping[str, Any], text: str) -> int | None:
        """Return how often a failure was left out since its last line; None: leave it out."""
        match event:
            case {"type": "op_failed"}:
                return self._failures.take(text, trio.current_time())
            case {"type": "round_finished", "ok": False, "failures": failures}:
                return self._failures.take(tuple(failures), trio.current_time())
        return 0

    async def _refresh(self, host: Host) -> None:
        while True:
            self._show(host)
            await trio.sleep(_REFRESH_S)

    def _show(self, host: Host) -> None:
        shown = progress(host)
        if self._live is not None:
            self._live.update(self._draw(shown), refresh=True)
            return
        # Byte counts change all the time, so they alone cause no line.
        key = (shown["rounds"], shown["running"], [w["text"] for w in shown["waiting"]])
        text = self._line(shown)
        if repr(key) != self._last and shown["phase"] == "ready":
            self._last = repr(key)
            self.note(text)

    def _name(self, peer: str) -> str:
        return f"{short_peer(peer)} (inviter)" if peer == self._inviter else short_peer(peer)

    def _line(self, shown: Mapping[str, Any]) -> str:
        doing = f"{shown['running']} under way" if shown["running"] else self._idle(shown)
        moved = f"{size(shown['bytes_in'])} in, {size(shown['bytes_out'])} out"
        return f"{shown['rounds']} executions, {doing}, {moved}"

    def _idle(self, shown: Mapping[str, Any]) -> str:
        if shown["not_ready"]:
            return "not ready"
        if not shown["peers"]:
            return "not connected"
        return "waiting for a round to begin"

    def _draw(self, shown: Mapping[str, Any]) -> Group:
        peers = Table(box=None, pad_edge=False)
        for column in ("peer", "plays", "way", "in", "out", "round trip"):
            peers.add_column(column)
        for p in shown["peers"][:_SHOWN_PEERS]:
            trip = "-" if p["rtt_ms"] is None else f"{p['rtt_ms']:.1f} ms"
            cells = (self._name(p["peer"]), ", ".join(p["classes"]) or "-", p["via"])
            moved = (size(p["bytes_in"]), size(p["bytes_out"]))
            peers.add_row(*(Text(printable(c)) for c in (*cells, *moved, trip)))
        waiting = [Text(f"  {w['text']}{w['until']}") for w in shown["waiting"][:_SHOWN_WAITING]]
        lost = [Text(f"not connected: {printable(w)}", style="red") for w in shown["lost"]]
        if shown["not_ready"]:
            lost.insert(0, Text(f"not ready: {printable(shown['not_ready'])}", style="red"))
        targets = printable(", ".join(shown["targets"]))
        head = Text(f"{targets}: {self._line(shown)}", style="bold")
        return Group(
            *self._note_lines(), head, peers, *lost, *waiting, Text("Ctrl-C leaves", style="dim")
        )


def progress(host: Host) -> dict[str, Any]:
    """Return the progress of a node as plain values."""
    counters = host.backend.counters()
    return {
        "phase": host.phase,
        "targets": list(host.node.targets),
        "not_ready": reasons_text(host.node.not_ready()),
        "peers": views.peers(host),
        "lost": [
            short_peer(f"{w.peer}: {w.last_error or 'dialling'}")
            for w in host.backend.wanted()
            if not w.connected
        ],
        "rounds": host.node.counters().get("executions", 0),
        "running": len(host.node.executions()),
        "waiting": [_waiting(w) for w in views.waiting(host)],
        "bytes_in": counters["inbound.bytes"],
        "bytes_out": counters["outbound.bytes"],
    }


def _waiting(waiting: Mapping[str, Any]) -> dict[str, str]:
    whom = f" of {waiting['whom']}" if waiting["whom"] else ""
    return {
        "text": short_peer(printable(f"{waiting['what']} waits for {waiting['why']}{whom}")),
        "until": f", {waiting['remaining_s']:.1f} s left",
    }


def event_text(event: Mapping[str, Any], name: Callable[[str], str]) -> str:
    """Return one line for an event; "" for those that are not shown."""
    match event["type"]:
        case "ready":
            return f"ready as {short_peer(event['peer_id'])}"
        case "not_ready":
            return printable(f"not ready, tried again from time to time: {event['reason']}")
        case "peer.not_ready":
            return short_peer(printable(f"{name(event['peer'])} is not ready: {event['reason']}"))
        case "data_differ":
            return short_peer(printable(f"data of {name(event['peer'])} differ: {event['reason']}"))
        case "peer_up":
            plays = ", ".join(event["classes"]) or "nothing"
            return printable(f"connected with {name(event['peer'])}, which plays {plays}")
        case "peer_down":
            return short_peer(printable(f"lost {name(event['peer'])}: {event['reason']}"))
        case "op_failed":
            return short_peer(printable(f"failed: {failure_text(event)}"))
        case "round_finished":
            return f"round {event['round']} {'done' if event['ok'] else 'failed'}"
        case "upgrade_offered":
            text = f"{name(event['peer'])} offers program {event['version']}: see `bbnode upgrade`"
            return printable(text)
        case "upgraded":
            return f"upgraded to program {event['version']}, starting anew"
        case "stopping":
            return "leaving"
    return ""
