"""`bbnode network`: private networks, for their owner and for their members.

Rule: `new`, `grant`, `revoke` and `show` work on the owner's files and need no node; `import`
is the member's side and writes to its state directory. The owner's key never leaves its file.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbnode.cli import access_options, output
from bbnode.cli.access_options import ClassesOption
from bbnode.cli.common import JsonOption, LocalNode, RunningNode, group

if TYPE_CHECKING:
    from bbnode.access.revocation import RevocationList
    from bbnode.daemon.access.files import OwnedNetwork

_SERIAL = re.compile(r"[0-9a-f]{16}\Z")
# Statements expire, so that a lost laptop does not stay a member for ever.
DEFAULT_DAYS = 90
MAX_DAYS = 3660

NameOption = Annotated[
    str, typer.Option("--name", help="Name of the network on this machine.", metavar="NAME")
]
DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Where networks are kept; default: $XDG_DATA_HOME/bbnode/networks.",
        metavar="DIR",
    ),
]
SystemOption = Annotated[
    bool, typer.Option("--system", help="Keep them in /etc/bbnode/networks instead.")
]

app = group("Make a private network, and say who is a member.")


@app.command()
def new(
    name: NameOption = "default",
    directory: DirectoryOption = None,
    system: SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the key of a new network, and print the network's id."""
    network = _network(name, directory, system=system)
    network_id = str(network.create().peer_id)
    if as_json:
        output.json_object({"network": network_id, "key_file": str(network.key_file)})
        return
    output.data(network_id)
    output.note(
        f"wrote {network.key_file}; keep a copy: without it nobody can be granted or revoked"
    )


@app.command()
def grant(
    peer: Annotated[str, typer.Argument(help="Who becomes a member.", metavar="PEER_ID")],
    classes: ClassesOption = None,
    days: Annotated[
        int, typer.Option(help="Days until the statement ends.", min=1, max=MAX_DAYS)
    ] = DEFAULT_DAYS,
    may_invite: Annotated[
        bool, typer.Option("--may-invite", help="It may grant too (`bbnode invite`).")
    ] = False,
    reinstate: Annotated[
        bool, typer.Option("--reinstate", help="Also when it was revoked before.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--out", help="Write the statement there.", metavar="FILE")
    ] = None,
    name: NameOption = "default",
    directory: DirectoryOption = None,
    system: SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sign a membership statement, and print it."""
    from bbnode.access.errors import GrantError
    from bbnode.access.revocation import revoke as sign_revocations
    from bbnode.access.statement import grant as sign_grant
    from bbnode.daemon.paths import write_atomically

    member = access_options.peer_id(peer, "PEER_ID")
    network = _network(name, directory, system=system)
    now_s = int(time.time())
    listed = None
    with network.locked():
        key, revoked = network.key(), network.revocations()
        if revoked is not None and member in revoked.peers:
            if not reinstate:
                raise GrantError(f"{member} was revoked; to make it a member again: --reinstate")
            listed = sign_revocations(key, revoked, reinstate=[member])
        membership = sign_grant(
            key,
            member=member,
            not_before_s=now_s,
            expires_s=now_s + days * access_options.DAY_S,
            serial=access_options.new_serial(),
            classes=classes or None,
            may_grant=may_invite,
        )
        network.add_granted(membership)
        if listed is not None:
            network.save_revocations(listed)
    if save is not None:
        write_atomically(save, f"{membership.text}\n".encode("ascii"), mode=0o600)
    shown = {**access_options.shown_statement(membership.own), "statement": membership.text}
    if listed is not None:
        shown["revocations"] = listed.text
    if as_json:
        output.json_object(shown)
        return
    output.data(membership.text)
    output.note(f"until {shown['expires']}; on that peer: bbnode network import STATEMENT")
    if listed is not None:
        output.note(f"members have to learn that it is reinstated: import {listed.text}")


@app.command()
def revoke(
    who: Annotated[
        str, typer.Argument(help="A member, or one statement.", metavar="PEER_ID|SERIAL")
    ],
    name: NameOption = "default",
    directory: DirectoryOption = None,
    system: SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take back a statement, or all of a peer; print the list that members import."""
    from bbnode.access.revocation import revoke as sign_revocations

    serials = [int(who, 16)] if _SERIAL.match(who) else []
    peers = [] if serials else [access_options.peer_id(who, "PEER_ID|SERIAL")]
    network = _network(name, directory, system=system)
    with network.locked():
        known = network.granted()
        listed = sign_revocations(
            network.key(), network.revocations(), serials=serials, peers=peers
        )
        network.save_revocations(listed)
    if not any(m.own.serial in serials or m.own.member in peers for m in known):
        output.note(f"{who} has no statement from here; it is revoked all the same")
    if as_json:
        output.json_object({**_shown_revocations(listed), "list": listed.text})
        return
    output.data(listed.text)
    output.note("on each member that others dial: bbnode network import LIST")


@app.command()
def sign(
    artifact: Annotated[Path, typer.Argument(help="A compiled program.", metavar="ARTIFACT")],
    name: NameOption = "default",
    directory: DirectoryOption = None,
    system: SystemOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sign a compiled program, for nodes that upgrade by themselves; written to ARTIFACT.signed."""
    from bbnode.access.release import sign_release
    from bbnode.daemon.artifacts.artifact import load_artifact
    from bbnode.daemon.paths import write_atomically
    from bbnode.daemon.upgrade.releases import release_file

    network = _network(name, directory, system=system)
    sha256 = load_artifact(artifact).sha256
    with network.locked():
        release = sign_release(network.key(), sha256, number=network.next_release(time.time()))
    file = release_file(artifact)
    write_atomically(file, f"{release.text}\n".encode("ascii"), mode=0o644)
    if as_json:
        output.json_object(
            {
                "network": str(release.network),
                "artifact_sha256": sha256,
                "number": release.number,
                "file": str(file),
                "release": release.text,
            }
        )
        return
    output.data(release.text)
    output.note(
        f"wrote {file}; keep it beside the program where a node runs it, and nodes with "
        "upgrade.auto take it from there"
    )


@app.command()
def show(
    name: Annotated[
        str | None, typer.Option("--name", help="Only this network.", metavar="NAME")
    ] = None,
    directory: DirectoryOption = None,
    system: SystemOption = False,
    node: LocalNode = LocalNode(),
) -> None:
    """Show the networks that are owned here with their members, and this node's membership."""
    from bbnode.daemon.access import files as access_files

    base = _base(directory, system=system)
    owned = access_files.owned_networks(base)
    if name is not None:
        owned = [_network(name, directory, system=system)]
    shown: dict[str, Any] = {"networks": [_shown_network(network) for network in owned]}
    if node.state_dir is not None or node.config.exists():
        shown["node"] = _shown_node(node.directory)
    if node.as_json:
        output.json_object(shown)
        return
    out = output.console()
    columns = ("member", "state", "serial", "classes", "may_invite", "expires")
    for network in shown["networks"]:
        output.data(f"{network['name']}  {network['network']}")
        rows = [[member[name] for name in columns] for member in network["members"]]
        output.table("", [name.replace("_", " ") for name in columns], rows, out=out)
    if shown.get("node"):
        output.describe({"this node": shown["node"]}, out=out)
    if not owned and not shown.get("node"):
        output.note("no network here; `bbnode network new` makes one")


@app.command("import")
def import_(
    what: Annotated[
        str,
        typer.Argument(
            help="A statement, a revocation list, or a file with one of them.", metavar="TEXT|FILE"
        ),
    ],
    node: RunningNode = RunningNode(),
) -> None:
    """Keep a statement or a revocation list for this node."""
    from bbnode.access import revocation, statement
    from bbnode.access.errors import GrantError
    from bbnode.daemon import paths
    from bbnode.daemon.access import files as access_files
    from bbnode.transport.identity import load_identity

    directory = node.directory
    peer = load_identity(paths.identity_file(directory)).peer_id
    line = what if ":" in what else access_files.read_line(Path(what))
    shown: dict[str, Any]
    if line.startswith(revocation.REVOCATIONS.prefix.rstrip("0123456789")):
        network = access_files.load_node(directory, peer).network
        if network is None:
            raise GrantError(
                "this node is a member of no network yet; import its statement first, then the list"
            )
        listed = revocation.open_revocations(revocation.revocations_from_text(line), network)
        taken = access_files.save_revocations(directory, listed)
        shown = {"kind": "revocations", "taken": taken, **_shown_revocations(listed)}
        text = f"revocation list {listed.sequence} of {network}"
    else:
        raw = statement.membership_from_text(line)
        # The first statement names the network; the member must be this node.
        membership = statement.open_membership(raw, statement.peek(raw).network, peer)
        membership.check(time.time())
        access_files.save_membership(directory, membership)
        shown = {
            "kind": "membership",
            "taken": True,
            **access_options.shown_statement(membership.own),
        }
        text = f"member of {shown['network']} until {shown['expires']}"
    shown["running"] = _reload_running(node)
    if node.as_json:
        output.json_object(shown)
        return
    output.data(text)
    match shown["running"]:
        case None:
            output.note("no node runs there; it is used from the next start on")
        case True:
            output.note("the running node uses it from now on")
        case False:
            output.note("the running node shows its old membership: restart it")


def _reload_running(node: RunningNode) -> bool | None:
    """Return True if a running node now uses the file; None when none runs."""
    from bbnode.daemon.control.errors import NotRunning

    try:
        with node.ask() as client:
            return bool(client.post("/v1/access/reload")["taken"])
    except NotRunning:
        return None


def _base(directory: Path | None, *, system: bool) -> Path:
    from bbnode.daemon.access import files as access_files

    if directory is not None and system:
        raise typer.BadParameter("give one of the two", param_hint="--dir, --system")
    if directory is not None:
        return directory.expanduser().absolute()
    return access_files.networks_dir(system=system)


def _network(name: str, directory: Path | None, *, system: bool) -> OwnedNetwork:
    from bbnode.daemon.access.files import OwnedNetwork

    return OwnedNetwork(_base(directory, system=system), name)


def _shown_network(network: OwnedNetwork) -> dict[str, Any]:
    revoked = network.revocations()
    now_s = time.time()
    members = []
    for membership in network.granted():
        own = membership.own
        state = "valid" if now_s < own.expires_s else "expired"
        if revoked is not None and revoked.revokes(own.serial, own.member):
            state = "revoked"
        members.append({"state": state, **access_options.shown_statement(own)})
    return {
        "name": network.name,
        "network": str(network.key().peer_id),
        "key_file": str(network.key_file),
        "revocations": None if revoked is None else _shown_revocations(revoked),
        "members": members,
    }


def _shown_node(state_dir: Path) -> dict[str, Any] | None:
    from bbnode.daemon import paths
    from bbnode.daemon.access import files as access_files
    from bbnode.transport.identity import load_identity

    key = paths.identity_file(state_dir)
    if not key.exists():
        return None
    access = access_files.load_node(state_dir, load_identity(key).peer_id)
    if access.membership is None:
        return None
    revoked = access.revocations
    return {
        **access_options.shown_statement(access.membership.own),
        "revocations": None if revoked is None else revoked.sequence,
    }


def _shown_revocations(listed: RevocationList) -> dict[str, Any]:
    return {
        "sequence": listed.sequence,
        "serials": [f"{serial:016x}" for serial in sorted(listed.serials)],
        "peers": [str(peer) for peer in sorted(listed.peers)],
    }
