"""`bbnode peers`: the connected peers, the reasons for and against a peer, and changes to both.

Rule: without a subcommand it changes nothing.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from bbnode.cli import output
from bbnode.cli.common import PEER_COLUMNS, RunningNode, group
from bbnode.cli.values import peer_text

# Columns of a terminal that the table of peers needs for full PeerIds.
WIDTH_OF_PEERS = 128

PeerArgument = Annotated[
    str,
    typer.Argument(
        help="PeerId, the end of one of a known peer, or an address with /p2p/ID at its end.",
        metavar="PEER",
    ),
]

app = group("Show a running node's peers; connect, disconnect, block one.")


@app.callback(invoke_without_command=True)
def peers(
    ctx: typer.Context,
    node: RunningNode = RunningNode(),
    watch: Annotated[bool, typer.Option("--watch", help="Show them again and again.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two looks of --watch.", min=0.01)
    ] = 1.0,
    why: Annotated[
        str | None,
        typer.Option(help="Show each rule that decides about this peer.", metavar="PEER"),
    ] = None,
) -> None:
    """List peers; see also the commands below."""
    if ctx.invoked_subcommand is not None:
        return
    with node.ask() as client:
        if why is not None:
            _show_why(client.get(_path_of(why)), as_json=node.as_json)
            return
        _show(client.get("/v1/peers"), as_json=node.as_json, indent=None if watch else 2)
        while watch:
            time.sleep(every_s)
            _show(client.get("/v1/peers"), as_json=node.as_json, indent=None)


@app.command()
def connect(
    peer: PeerArgument,
    address: Annotated[
        list[str] | None,
        typer.Argument(help="Where it is; default: what the node knows.", metavar="MULTIADDR"),
    ] = None,
    node: RunningNode = RunningNode(),
) -> None:
    """Dial a peer, and again whenever it is gone; an address with /p2p/ID is enough."""
    addresses = [peer] if peer.startswith("/") else []
    addresses += address or []
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/connect", {"addresses": addresses})
    state = "is connected" if answer["connected"] else "is being dialled"
    node.show(answer, f"{answer['peer']} {state}; `bbnode peers` shows how it goes")


@app.command()
def find(
    peer: PeerArgument,
    dial: Annotated[bool, typer.Option("--connect", help="Then dial it where it answers.")] = False,
    node: RunningNode = RunningNode(timeout_s=60.0),
) -> None:
    """Find where a peer is by asking others (routing.dht), and try each address."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/find")
        good = [row["address"] for row in answer["addresses"] if row["outcome"] in _DIALLED]
        if dial and good and not answer["connected"]:
            client.post(_path_of(answer["peer"]) + "/connect", {"addresses": good})
    if node.as_json:
        output.json_object(answer)
        return
    rows = [
        [row["address"], row["outcome"], _source(answer, row["told_by"]), row["detail"]]
        for row in answer["addresses"]
    ]
    columns = ("address", "outcome", "given by", "detail")
    output.table(answer["peer"], columns, rows, out=output.console())
    if answer["connected"]:
        output.note("it is connected")
    elif not good:
        output.note("it answers at none of them: it may be gone")
    elif dial:
        output.note("it is being dialled; `bbnode peers` shows how it goes")


# Outcomes after which an address may be dialled.
_DIALLED = ("reached", "untried")


def _source(answer: dict[str, Any], told_by: str | None) -> str:
    if told_by is not None:
        return output.short_peer(told_by)
    return "itself, signed" if answer["signed"] else "its connection" if answer["connected"] else ""


@app.command()
def disconnect(
    peer: PeerArgument,
    node: RunningNode = RunningNode(),
) -> None:
    """Disconnect from a peer, and dial it no more; it may still dial this node."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/disconnect")
    text = "disconnected" if answer["was_connected"] else "was not connected"
    node.show(answer, f"{answer['peer']} {text}")


AddressArgument = Annotated[
    str,
    typer.Argument(help="An address of it, such as /ip4/10.0.0.7/tcp/4001.", metavar="MULTIADDR"),
]


@app.command()
def book(node: RunningNode = RunningNode()) -> None:
    """Show the address book: all peers that the node knows, with their addresses."""
    with node.ask() as client:
        answer = client.get("/v1/addresses")
    if node.as_json:
        output.json_object(answer)
        return
    rows = [[entry["peer"], entry["addresses"]] for entry in answer["peers"]]
    output.table("address book", ("peer", "addresses"), rows, out=output.console())


def _addresses(answer: dict[str, Any]) -> str:
    return output.counted(len(answer["addresses"]), "address", "addresses")


@app.command()
def add(
    peer: PeerArgument,
    address: Annotated[
        list[str],
        typer.Argument(help="Addresses, such as /ip4/10.0.0.7/tcp/4001.", metavar="MULTIADDR"),
    ],
    node: RunningNode = RunningNode(),
) -> None:
    """Add addresses of a peer to the address book, without dialling it."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/addresses/add", {"addresses": address})
    node.show(answer, f"{answer['peer']} has {_addresses(answer)}")


@app.command()
def drop(
    peer: PeerArgument,
    address: AddressArgument,
    node: RunningNode = RunningNode(),
) -> None:
    """Drop one address of a peer from the address book."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/addresses/drop", {"address": address})
    text = "dropped" if answer["was_known"] else "was not in the book"
    node.show(
        answer,
        f"{address} {text}; {answer['peer']} has {_addresses(answer)}",
    )


@app.command()
def forget(
    peer: PeerArgument,
    node: RunningNode = RunningNode(),
) -> None:
    """Drop all addresses of a peer and dial it no more; a connection stays."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/forget")
    text = "forgotten" if answer["was_known"] else "was not in the book"
    node.show(answer, f"{answer['peer']} {text}")


@app.command()
def block(
    peer: PeerArgument,
    node: RunningNode = RunningNode(),
) -> None:
    """Deny a peer in both directions."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/block")
    node.show(answer, f"{answer['peer']} is blocked")


@app.command()
def allow(
    peer: PeerArgument,
    node: RunningNode = RunningNode(),
) -> None:
    """Deny a blocked peer no more."""
    with node.ask() as client:
        answer = client.post(_path_of(peer) + "/allow")
    node.show(answer, f"{answer['peer']} is not blocked")


def _path_of(peer: str) -> str:
    """Return the path of a peer on the control plane; refuses a wrong address."""
    return f"/v1/peers/{quote(peer_text(peer), safe='')}"


def _show(answer: dict[str, Any], *, as_json: bool, indent: int | None) -> None:
    if as_json:
        output.json_object(answer, indent=indent)
        return
    out = output.console()
    columns: tuple[str, ...] = PEER_COLUMNS
    peers = answer["peers"]
    if out.width < WIDTH_OF_PEERS:
        # A full PeerId would wrap; its end is enough for the commands that take a peer.
        peers = [{**peer, "peer": output.short_peer(peer["peer"])} for peer in peers]
        if not any(peer.get("queued") for peer in peers):
            columns = tuple(name for name in columns if name != "queued")
    rows = [[peer.get(name) for name in columns] for peer in peers]
    output.table("peers", [name.replace("_", " ") for name in columns], rows, out=out)
    absent = [w for w in answer["wanted"] if not w["connected"]]
    if absent:
        output.describe({"not connected": absent}, out=out)
    if not rows and not absent:
        output.note("no peers; `bbnode peers connect` dials one")


def _show_why(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.json_object(answer)
        return
    out = output.console()
    columns = ("rule", "outcome", "detail")
    rows = [[rule[name] for name in columns] for rule in answer["why"]]
    output.table(answer["peer"], columns, rows, out=out)
    output.describe({"addresses": answer["addresses"], "health": answer["health"]}, out=out)
