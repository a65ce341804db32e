"""`bbnode status`: the state of a running daemon, over its control socket.

Rule: a person gets a summary of a few lines: the program, its progress, the peers, and warnings.
`--verbose` shows everything that the daemon sends, so that a newer daemon can show more; it knows
by name only the columns of peers, and the counters, of which it leaves out those at zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from bbnode.cli import output
from bbnode.cli.common import PEER_COLUMNS, RunningNode

# Characters of a digest that are enough to tell programs apart.
DIGEST_CHARS = 8
# Peers and waits that the summary names.
SHOWN = 3


def command(
    node: RunningNode = RunningNode(),
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show all that the node says, counters included."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print events until it stops.")
    ] = False,
) -> None:
    """Show a running node: its program, rounds, peers and warnings."""
    with node.ask() as client:
        status = client.get("/v1/status")
        if node.as_json:
            output.json_object(status, indent=None if follow else 2)
        elif verbose:
            shown = {name: value for name, value in status.items() if name != "schema"}
            shown["peers"] = [{n: p.get(n) for n in PEER_COLUMNS} for p in status["peers"]]
            # Most counters are at zero; --json has all of them.
            shown["counters"] = {n: count for n, count in status["counters"].items() if count}
            output.describe(shown, out=output.console(), short=True)
        else:
            for name, text in _summary(status):
                output.data(f"{name:<9} {text}")
        if follow:
            for line in client.stream("/v1/events"):
                _show_event(line, as_json=node.as_json)


def _summary(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary: a name and a text."""
    from bbnode.daemon.observing.round_table import duration, progress_text

    yield "name", f"{status['name']} ({output.short_peer(status['peer_id'])})"
    up = duration(status["uptime_s"])
    state = f"{status['phase']}, up {up}{'' if up[-1].isalpha() else ' s'}"
    yield "state", state
    targets = ", ".join(target.partition("#")[0] for target in status["targets"])
    yield "program", f"{status['artifact_sha256'][:DIGEST_CHARS]}, plays {targets or 'nothing'}"
    addresses = status["listen"]
    # The end of an address is the PeerId, which the first line has.
    first = f": {addresses[0].partition('/p2p/')[0]}" if addresses else ""
    listening = output.counted(len(addresses), "address", "addresses") + first
    yield "listening", listening if addresses else "no address, it only dials"
    reach = status.get("reachability") or {}
    if reach.get("can_be_dialled"):
        yield "reached", f"by peers, at {_listed(reach['addresses'])}"
    routing = status.get("routing")
    if routing:
        peers = output.counted(routing["peers"], "peer", "peers")
        yield "routing", f"{routing['mode']} of {peers} ({routing['protocol'].split('/')[1]})"
    for entry in status["invoke"]:
        yield "rounds", progress_text(entry)
    for text in _data(status.get("data") or {}):
        yield "data", text
    guests = status.get("guests")
    more = f"; {output.counted(guests, 'guest')} of libp2p" if guests else ""
    yield "peers", _peers(status["peers"]) + more
    if status["waiting"]:
        yield "waiting", _listed([_wait(each) for each in status["waiting"]])
    warnings = list(_warnings(status))
    for warning in warnings or ["none"]:
        yield "warnings", warning


def _peers(peers: Sequence[Mapping[str, Any]]) -> str:
    ready = Counter(name for peer in peers if not peer["not_ready"] for name in peer["classes"])
    unready = [
        f"{output.short_peer(peer['peer'])} is not: {peer['not_ready']}"
        for peer in peers
        if peer["not_ready"]
    ]
    if not peers:
        return "none connected"
    counts = ", ".join(output.counted(n, name) for name, n in sorted(ready.items()))
    text = f"{len(peers)} connected ({counts or 'none'} ready)"
    return f"{text}; {_listed(unready)}" if unready else text


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts about own data: what is mapped, and what has no names."""
    for slot, each in data.get("own", {}).items():
        if each["mapped"]:
            yield f"{slot}: {'; '.join(each['mapped'])}"
        elif each["digest"] and not each["named"]:
            yield f"{slot}: unnamed, compared by shape and type alone"
    yield from data.get("moved", ())


def _wait(waiting: Mapping[str, Any]) -> str:
    names = waiting["whom"].split(", ") if waiting["whom"] else []
    more = len(names) - SHOWN
    shown = [output.short_peer(name) for name in names[:SHOWN]]
    whom = ", ".join([*shown, *([f"{more} more"] if more > 0 else [])])
    of_whom = f" of {whom}" if whom else ""
    return f"{waiting['what']}: {waiting['why']}{of_whom}, {waiting['remaining_s']:.0f} s left"


def _warnings(status: Mapping[str, Any]) -> Iterator[str]:
    for check in status["health"]:
        # The state and the peers have their own lines.
        if not check["ok"] and check["check"] not in ("phase", "peers"):
            yield f"{check['check']}: {check['detail']}"
    reach = status.get("reachability") or {}
    if reach.get("can_be_dialled") is False:
        yield "no peer can dial this node; see `bbnode doctor`"
    for offer in status.get("offers", ()):
        peer = output.short_peer(offer["peer"])
        yield (f"an upgrade is offered: program {offer['version']} by {peer}; see `bbnode upgrade`")
    upgrade = status.get("upgrade")
    if upgrade and upgrade["left"]:
        yield f"not taken over from version {upgrade['version']}: {', '.join(upgrade['left'])}"
    for entry in status["invoke"]:
        last = entry.get("last") or {}
        if last.get("ok") is False:
            yield f"round {last['round']} failed: {'; '.join(last['failures'])}"


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - SHOWN
    return "; ".join([*texts[:SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _show_event(line: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_object(line, indent=None)
        return
    if line["dropped"]:
        output.note(f"({line['dropped']} events were lost: this reader was too slow)")
    output.data(output.cell(line["event"]))
