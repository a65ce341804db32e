"""`bbnode invite`: a ticket, one line that `bbnode join` takes.

Rule: it signs with the node's own key, and asks the running daemon for the addresses and the
artifact that a stranger needs, unless the options name them. Membership in a private network is for
the class of the target alone, unless the options say more, since the classes of a member decide
which sites of other peers accept its messages. It writes nothing: the daemon counts the uses of a
ticket when it is redeemed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bbnode.cli import access_options, output
from bbnode.cli.common import RunningNode
from bbnode.ir.caps import MAX_MEMBER_DAYS, MAX_USES

_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
DEFAULT_DAYS = 30


def _check_target(target: str, known: Sequence[str]) -> None:
    """Refuse a target that the artifact does not have: the guest could not play it."""
    if target in {*known, *(name.partition("#")[0] for name in known)}:
        return
    raise typer.BadParameter(
        f"the artifact has no target {target!r}; it has: {', '.join(known)}", param_hint="--target"
    )


def _classes(target: str, more: Sequence[str], *, every: bool) -> tuple[str, ...] | None:
    """Return the classes that a guest may play: the target's and `more`, or None for all."""
    if every:
        if more:
            raise typer.BadParameter("say --class or --all-classes", param_hint="--all-classes")
        return None
    return tuple(sorted({target.partition("#")[0], *more}))


def command(
    target: Annotated[
        str, typer.Option(help="Target that the guest is to play.", metavar="CLASS[#HASH]")
    ],
    expires: Annotated[
        str, typer.Option(help="How long the ticket is good: 30m, 24h, 7d.", metavar="TIME")
    ] = "24h",
    uses: Annotated[int, typer.Option(help="How many peers may use it.", min=1, max=MAX_USES)] = 1,
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="For this peer alone, whose id is known.", metavar="PEER_ID"),
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            help="Class that it may play beside that of its target (repeatable).",
            metavar="CLASS",
        ),
    ] = None,
    all_classes: Annotated[
        bool, typer.Option("--all-classes", help="It may play every class, the server's as well.")
    ] = False,
    days: Annotated[
        int,
        typer.Option(help="Days of membership in a private network.", min=1, max=MAX_MEMBER_DAYS),
    ] = DEFAULT_DAYS,
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="How this node is reached (repeatable); default: the daemon's addresses.",
            metavar="MULTIADDR",
        ),
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(help="Digest of the artifact; default: the daemon's.", metavar="HEX"),
    ] = None,
    node: RunningNode = RunningNode(),
) -> None:
    """Print a ticket for `bbnode join`."""
    from bbnode.access.statement import grant
    from bbnode.access.ticket import NONCE_BYTES, Invitation, make_ticket
    from bbnode.daemon import paths
    from bbnode.daemon.access import files as access_files
    from bbnode.transport.identity import load_identity

    lifetime_s = access_options.duration_s(expires, "--expires")
    granted = _classes(target, classes or (), every=all_classes)
    guest = None if peer is None else access_options.peer_id(peer, "--peer")
    if sha256 is not None and not _SHA256.match(sha256):
        raise typer.BadParameter(f"{sha256!r} is not 64 hex digits", param_hint="--sha256")
    directory = node.directory
    key = load_identity(paths.identity_file(directory))
    access = access_files.load_node(directory, key.peer_id)
    now_s = int(time.time())
    if access.membership is not None:
        access.membership.check(now_s, access.revocations)
    if not address or sha256 is None:
        with node.ask() as client:
            status = client.get("/v1/status")
        address = address or status["listen"]
        if sha256 is None:
            sha256 = status["artifact_sha256"]
            _check_target(target, status["artifact_targets"])
    # Signed now, or as a trial: an invitation that the daemon could not redeem is refused here.
    membership = None
    if access.membership is not None:
        membership = grant(
            key,
            member=guest or key.peer_id,
            not_before_s=now_s,
            expires_s=now_s + days * access_options.DAY_S,
            serial=access_options.new_serial(),
            classes=granted,
            granter=access.membership,
        )
    open_to_all = membership is not None and guest is None
    ticket = make_ticket(
        key,
        addresses=[access_options.multiaddr(text, "--address") for text in address or ()],
        artifact_sha256=bytes.fromhex(sha256 or ""),
        target=target,
        expires_s=now_s + lifetime_s,
        nonce=secrets.token_bytes(NONCE_BYTES),
        network=access.network,
        invitation=Invitation(
            uses=uses,
            classes=membership.own.classes,
            member_s=days * access_options.DAY_S,
        )
        if open_to_all and membership is not None
        else None,
        membership=membership.raw if membership is not None and guest is not None else b"",
    )
    played = "all" if membership is None else membership.own.classes or "all"
    shown: dict[str, Any] = {
        "ticket": ticket.text,
        "inviter": str(ticket.inviter),
        "addresses": [str(each) for each in ticket.dial_addresses],
        "artifact_sha256": ticket.artifact_sha256.hex(),
        "target": ticket.target,
        "expires": access_options.date(ticket.expires_s),
        "network": None if ticket.network is None else str(ticket.network),
        "classes": None if membership is None else played,
        "uses": uses if open_to_all else None,
        "peer": None if guest is None else str(guest),
    }
    if node.as_json:
        output.json_object(shown)
        return
    output.data(ticket.text)
    output.note(
        f"The ticket expires {shown['expires']}, by clocks that agree to five minutes. On the "
        "other machine run: bbnode join TICKET"
    )
    if membership is not None:
        named = played if isinstance(played, str) else ", ".join(played)
        output.note(f"classes that its users may play: {named}")
    if all("/127." in each or "/ip6/::1/" in each for each in shown["addresses"]):
        output.note("only this machine reaches these addresses; say others with --address")
