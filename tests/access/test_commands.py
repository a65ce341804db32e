"""`bbnode network` and `bbnode invite`: what they print, keep and refuse."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import typer

from bbnode.access.revocation import open_revocations, revocations_from_text
from bbnode.access.statement import membership_from_text, open_membership
from bbnode.access.ticket import parse_ticket
from bbnode.cli import exits
from bbnode.cli.commands import invite
from bbnode.cli.main import main
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.ir.peer import PeerId
from bbnode.transport.identity import create_identity

SHA = "ab" * 32
ADDRESS = "/ip4/192.0.2.1/tcp/4001"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    def call(*args: object, code: int = 0) -> str:
        got = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert got == code, err
        if code:
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            return err
        return out

    return call


@pytest.fixture
def ask(run):
    return lambda *args: json.loads(run(*args, "--json"))


@pytest.fixture
def node(tmp_path):
    def make(name: str) -> tuple[Path, PeerId]:
        directory = tmp_path / name
        paths.make_state_dir(directory)
        return directory, create_identity(paths.identity_file(directory)).peer_id

    return make


def test_from_a_new_network_to_a_revoked_member(run, ask, node, tmp_path):
    network = PeerId.parse(run("network", "new").strip())
    key = tmp_path / "data" / "bbnode" / "networks" / "default" / "owner.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "exists already" in run("network", "new", code=exits.FAILURE)

    state, peer = node("a")
    granted = ask("network", "grant", peer, "--class", "client", "--days", 7)
    assert granted["schema"].startswith("bbnode/")
    text = granted["statement"]
    own = open_membership(membership_from_text(text), network, peer).own
    assert own.classes == ("client",)
    assert own.expires_s - own.not_before_s == 7 * 86_400
    assert granted["serial"] == own.serial_text

    assert run("network", "import", text, "--state-dir", state).startswith(f"member of {network}")
    kept = access_files.load_node(state, peer)
    assert (kept.network, kept.credentials) == (network, membership_from_text(text))
    assert stat.S_IMODE((state / "membership").stat().st_mode) == 0o600

    listed = run("network", "revoke", granted["serial"]).strip()
    assert open_revocations(revocations_from_text(listed), network).serials == {own.serial}
    (tmp_path / "list").write_text(listed + "\n")
    told = ask("network", "import", tmp_path / "list", "--state-dir", state)
    assert (told["kind"], told["taken"], told["sequence"]) == ("revocations", True, 1)
    assert ask("network", "import", listed, "--state-dir", state)["taken"] is False
    assert access_files.load_node(state, peer).revocations.sequence == 1

    shown = ask("network", "show", "--state-dir", state)
    (owned,) = shown["networks"]
    assert owned["network"] == str(network)
    assert [(m["member"], m["state"]) for m in owned["members"]] == [(str(peer), "revoked")]
    assert shown["node"]["revocations"] == 1
    assert str(peer) in run("network", "show")


def test_a_revoked_peer_is_granted_only_on_purpose(run, ask):
    run("network", "new", "--name", "lab")
    peer = PeerId.from_seed(1)
    run("network", "revoke", peer, "--name", "lab")
    refused = run("network", "grant", peer, "--name", "lab", code=exits.USAGE)
    assert "--reinstate" in refused
    told = ask("network", "grant", peer, "--name", "lab", "--reinstate", "--out", "statement")
    assert Path("statement").read_text().strip() == told["statement"]
    (owned,) = ask("network", "show", "--name", "lab")["networks"]
    assert owned["revocations"] == {"sequence": 2, "serials": [], "peers": []}


def test_an_older_list_is_not_taken_back(run, node):
    run("network", "new")
    state, peer = node("a")
    run("network", "import", run("network", "grant", peer).strip(), "--state-dir", state)
    old = run("network", "revoke", PeerId.from_seed(1)).strip()
    new = run("network", "revoke", PeerId.from_seed(2)).strip()
    run("network", "import", new, "--state-dir", state)
    assert "not newer" in run("network", "import", old, "--state-dir", state, code=exits.FAILURE)


@pytest.mark.parametrize(
    ("args", "code", "help_"),
    [
        (["grant", "nobody"], exits.USAGE, "bbnode id"),
        (["grant", PeerId.from_seed(1), "--class", "two words"], exits.USAGE, "class of peers"),
        (["grant", PeerId.from_seed(1), "--name", "other"], exits.USAGE, "network new"),
        (["grant", PeerId.from_seed(1), "--days", "0"], exits.USAGE, "--days"),
        (["revoke", "12345"], exits.USAGE, "PEER_ID|SERIAL"),
        (["new", "--name", "../x"], exits.USAGE, "letters"),
        (["new", "--dir", "x", "--system"], exits.USAGE, "one of the two"),
    ],
)
def test_bad_input(run, args, code, help_):
    run("network", "new")
    assert help_ in run("network", *args, code=code)


def test_import_refuses_what_is_not_this_nodes(run, node):
    run("network", "new")
    state, peer = node("a")
    other = run("network", "grant", PeerId.from_seed(1)).strip()
    into = ("--state-dir", state)
    assert "granted to" in run("network", "import", other, *into, code=exits.FAILURE)
    assert "begin with" in run("network", "import", "x:y", *into, code=exits.FAILURE)
    assert "no such file" in run("network", "import", "nowhere", *into, code=exits.USAGE)
    listed = run("network", "revoke", peer).strip()
    assert "statement first" in run("network", "import", listed, *into, code=exits.USAGE)
    assert not (state / "membership").exists()


def invitation(*more: object, state: Path) -> tuple[object, ...]:
    given = ("--target", "client", "--address", ADDRESS, "--sha256", SHA, "--state-dir", state)
    return ("invite", *given, *more)


def test_a_ticket_to_an_open_network(run, ask, node):
    state, peer = node("a")
    made = parse_ticket(run(*invitation("--expires", "30m", state=state)))
    assert (made.inviter, made.target, made.network) == (peer, "client", None)
    assert made.artifact_sha256.hex() == SHA
    assert [str(each) for each in made.dial_addresses] == [f"{ADDRESS}/p2p/{peer}"]
    told = ask(*invitation(state=state))
    assert (told["uses"], told["network"]) == (None, None)
    assert parse_ticket(told["ticket"]).nonce != made.nonce


def test_tickets_to_a_private_network(run, ask, node):
    network = PeerId.parse(run("network", "new").strip())
    state, peer = node("a")
    statement = run("network", "grant", peer).strip()
    run("network", "import", statement, "--state-dir", state)
    assert "--may-invite" in run(*invitation(state=state), code=exits.USAGE)

    run(
        *("network", "import", run("network", "grant", peer, "--may-invite").strip()),
        *("--state-dir", state),
    )
    told = ask(*invitation("--uses", 3, "--days", 2, state=state))
    offer = parse_ticket(told["ticket"]).invitation
    assert (offer.uses, offer.classes, offer.member_s) == (3, ("client",), 2 * 86_400)
    assert (told["uses"], told["network"]) == (3, str(network))

    guest = PeerId.from_seed(1)
    made = parse_ticket(run(*invitation("--peer", guest, state=state)))
    assert made.invitation is None
    own = open_membership(made.membership, network, guest).own
    assert (own.issuer, own.classes) == (peer, ("client",))

    listed = run("network", "revoke", peer).strip()
    run("network", "import", listed, "--state-dir", state)
    assert "revoked" in run(*invitation(state=state), code=exits.FAILURE)


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        ((), ["client"]),
        (("--target", "client#aa23c01ed0f2a6cc"), ["client"]),
        (("--target", "server"), ["server"]),
        (("--class", "client"), ["client"]),
        (("--class", "relay", "--class", "aide"), ["aide", "client", "relay"]),
        (("--all-classes",), "all"),
    ],
)
def test_a_ticket_is_for_the_class_of_its_target(run, ask, node, options, classes):
    network = PeerId.parse(run("network", "new").strip())
    state, peer = node("a")
    mine = run("network", "grant", peer, "--may-invite").strip()
    run("network", "import", mine, "--state-dir", state)
    granted = None if classes == "all" else tuple(classes)
    told = ask(*invitation(*options, state=state))
    assert told["classes"] == classes
    assert parse_ticket(told["ticket"]).invitation.classes == granted
    guest = PeerId.from_seed(1)
    made = parse_ticket(run(*invitation("--peer", guest, *options, state=state)))
    assert open_membership(made.membership, network, guest).own.classes == granted


def test_nobody_invites_to_more_than_it_may_play(run, ask, node):
    run("network", "new")
    state, peer = node("a")
    mine = run("network", "grant", peer, "--may-invite", "--class", "server").strip()
    run("network", "import", mine, "--state-dir", state)
    refused = run(*invitation(state=state), code=exits.USAGE)
    assert "more than the granter's own ('server',)" in refused
    assert ask(*invitation("--target", "server", state=state))["classes"] == ["server"]
    # All of them are all of its own.
    assert ask(*invitation("--all-classes", state=state))["classes"] == ["server"]
    both = ("--class", "x", "--all-classes")
    assert "--all-classes" in run(*invitation(*both, state=state), code=exits.USAGE)


def test_bad_invitations(run, node):
    state, _ = node("a")
    assert "30m" in run(*invitation("--expires", "soon", state=state), code=exits.USAGE)
    assert "64 hex" in run(*invitation("--sha256", "x", state=state), code=exits.USAGE)
    assert "bbnode id" in run(*invitation("--peer", "nobody", state=state), code=exits.USAGE)
    assert "multiaddr" in run(*invitation("--address", "here", state=state), code=exits.USAGE)
    # Without addresses it asks the daemon, which does not run.
    run("invite", "--target", "t", "--state-dir", state, code=exits.UNREACHABLE)


def test_a_target_that_the_artifact_lacks_is_no_offer() -> None:
    known = ["client#aa23c01ed0f2a6cc", "server#50bc9184794dbb49"]
    for target in ("client", "client#aa23c01ed0f2a6cc"):
        invite._check_target(target, known)
    for target in ("clint", "client#0000000000000000", ""):
        with pytest.raises(typer.BadParameter, match="client#aa23"):
            invite._check_target(target, known)


def test_files_are_bounded_and_checked(run, node):
    state, peer = node("a")
    assert access_files.load_node(state, peer).network is None
    assert access_files.load_ledger(state).tickets == {}
    access_files.save_ledger(state, access_files.load_ledger(state))
    (state / "membership").write_text("bbmember1:AAAA\n")
    run("network", "show", "--state-dir", state, code=exits.FAILURE)
    (state / "membership").write_text("x" * 100_000)
    assert "larger" in run("network", "show", "--state-dir", state, code=exits.FAILURE)
