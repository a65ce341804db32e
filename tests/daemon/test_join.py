"""Joining over real connections on loopback: what is dialled, granted, fetched, refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from bbnode.access.errors import Refusal, StatementRefused, TicketRefused
from bbnode.access.keys import SigningKey
from bbnode.access.revocation import revoke
from bbnode.access.statement import grant
from bbnode.access.ticket import make_ticket
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.config import sources
from bbnode.daemon.join import prepare as prepare_file
from bbnode.daemon.join.artifact import cache_file
from bbnode.daemon.join.folder import folder
from bbnode.daemon.join.invitation import (
    InviterRefused,
    InviterUnreachable,
    NotAnInvitation,
    NothingOffered,
    TargetNeeded,
    WrongPeer,
    read_source,
)
from bbnode.daemon.join.plan import Plan, make_plan
from bbnode.daemon.join.prepare import JoinOptions, Prepared, prepare
from bbnode.engine.errors import UnknownSlot, UnknownTarget, UnsupportedOps
from bbnode.ir.address import parse_address
from bbnode.ir.errors import MissingFile
from bbnode.ir.peer import PeerId
from bbnode.transport.artifact_exchange import ArtifactFetchError
from bbnode.transport.identity import load_identity
from tests.daemon.inviting import HOUR_S, OWNER, inviting


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def options(text: str, tmp_path: Path, name: str = "laptop", **changes) -> JoinOptions:
    source = read_source(text, unix_s=time.time())
    made = JoinOptions(
        source=source,
        folder=folder(source, name=name, directory=tmp_path / name),
        settings={},
    )
    return replace(made, **changes)


async def join(text: str, tmp_path: Path, name: str = "laptop", **changes) -> Prepared:
    return await prepare(options(text, tmp_path, name, **changes))


async def test_a_stranger_becomes_a_member_fetches_and_gets_an_ordinary_node(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, int]] = []
    async with inviting(tmp_path / "server") as host:
        made = await prepare(
            options(host.ticket(), tmp_path), progress=lambda *row: seen.append(row)
        )
        await host.until_left(2)
    # Once as a guest, once as a member; never as somebody whom a program could choose.
    assert host.came == [(made.identity.peer_id, ())] * 2
    assert made.membership is not None
    assert made.membership.own.network == OWNER.peer_id
    assert made.membership.own.classes == ("client",)
    assert made.membership.own.issuer == host.identity.peer_id
    told = made.as_json()
    assert told["artifact_sha256"] == host.sha256
    assert seen[-1] == (told["artifact_bytes"], told["artifact_bytes"])
    assert (told["fetched"], told["classes"]) == (True, ["client"])
    assert not (tmp_path / "laptop" / "node.toml").exists()

    made.write()
    node = sources.resolve(tmp_path / "laptop" / "node.toml", environ={})
    assert node.config == made.resolved.config
    assert node.config.network.listen == []
    assert node.config.network.bootstrap == [host.address]
    assert node.config.access.network == str(OWNER.peer_id)
    assert node.state_dir == tmp_path / "laptop" / "state"
    assert load_identity(paths.identity_file(node.state_dir)).peer_id == made.identity.peer_id
    assert (tmp_path / "laptop" / "artifact.onnx").read_bytes() == (
        tmp_path / "server" / "a.onnx"
    ).read_bytes()


async def test_a_second_join_fetches_nothing_and_keeps_what_the_user_set(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket()
        first = await join(ticket, tmp_path, settings={"node.log_level": "debug"})
        first.write()
        again = await join(ticket, tmp_path)
        # Another node of this user has the cache, and its own membership.
        other = await join(host.ticket(), tmp_path, "other")
    assert (first.obtained.fetched, again.obtained.fetched) == (True, False)
    assert again.identity.peer_id == first.identity.peer_id
    assert again.membership == first.membership
    assert again.resolved.config.node.log_level == "debug"
    assert other.identity.peer_id != first.identity.peer_id
    assert not other.obtained.fetched


async def test_what_was_changed_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        made = await join(host.ticket(), tmp_path)
        file = cache_file(tmp_path / "laptop" / "state", host.sha256)
        assert made.obtained.file == file
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
        made = await join(host.ticket(), tmp_path)
        assert made.obtained.fetched
    assert [path.name for path in file.parent.iterdir()] == [file.name]


async def test_an_open_network_is_joined_by_its_address_alone(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        with pytest.raises(TargetNeeded, match=r"client#.*--target CLASS"):
            await join(host.address, tmp_path)
        with pytest.raises(UnknownTarget, match="did you mean 'client'"):
            await join(host.address, tmp_path, target="clint")
        made = await join(f"  {host.address}\n", tmp_path, target="client")
    assert made.membership is None
    assert made.resolved.config.access.network is None
    assert made.resolved.config.artifact.targets == ["client"]


async def test_a_join_that_stops_on_its_plan_leaves_the_ticket_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*args: Any) -> Plan:
        return replace(make_plan(*args), unsupported=("ai.strange.Op",))

    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket(invitation=host.invitation(1))
        with pytest.raises(UnknownTarget):
            await join(ticket, tmp_path, "one", target="clint")
        with pytest.raises(UnknownSlot):
            await join(ticket, tmp_path, "two", settings={"slots.data.path": "x.npz"})
        with monkeypatch.context() as patched:
            patched.setattr(prepare_file, "make_plan", lacking)
            stopped = await join(ticket, tmp_path, "three")
        assert stopped.membership is None
        with pytest.raises(UnsupportedOps):
            stopped.write()
        assert (await join(ticket, tmp_path, "three")).membership is not None
        with pytest.raises(InviterRefused, match="the ticket may be used up"):
            await join(ticket, tmp_path, "four")


async def test_a_ticket_that_is_used_up_gets_nobody_in(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket(invitation=host.invitation(2))
        for name in ("one", "two"):
            await join(ticket, tmp_path, name)
        with pytest.raises(InviterRefused, match="the ticket may be used up"):
            await join(ticket, tmp_path, "three")
        # A use that was given stays good, whatever happened to its answer.
        (tmp_path / "one" / "state" / "membership").unlink()
        assert (await join(ticket, tmp_path, "one")).membership is not None


async def test_a_ticket_for_one_peer_is_good_for_that_peer(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        known = (await join(host.ticket(), tmp_path)).identity.peer_id
        now_s = int(time.time())
        kept = access_files.load_node(host.resolved.state_dir, host.identity.peer_id)
        carried = grant(
            host.identity,
            member=known,
            not_before_s=now_s,
            expires_s=now_s + 60,
            serial=9,
            granter=kept.membership,
        )
        ticket = host.ticket(invitation=None, membership=carried.raw)
        (tmp_path / "laptop" / "state" / "membership").unlink()
        made = await join(ticket, tmp_path)
        assert made.membership is not None
        assert made.membership.own.serial == 9
        with pytest.raises(StatementRefused, match="each peer has its own"):
            await join(ticket, tmp_path, "another")


async def test_who_is_no_member_is_hung_up_on(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        with pytest.raises(InviterRefused, match="only members of its network"):
            await join(host.address, tmp_path, target="client")
        stranger = load_identity(tmp_path / "laptop" / "state" / "identity.key").peer_id
        (said,) = [d for d in host.access.explain(stranger) if not d.allowed]
        assert (said.rule, said.detail.split(":")[0]) == ("membership", "no_statement")


async def test_a_member_that_was_revoked_needs_more_than_a_new_ticket(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        ticket = host.ticket(invitation=host.invitation(9))
        made = await join(ticket, tmp_path)
        state_dir = host.resolved.state_dir
        listed = revoke(OWNER, None, peers=[made.identity.peer_id])
        access_files.save_revocations(state_dir, listed)
        assert host.access.reload_files()
        with pytest.raises(TicketRefused, match="the owner revoked") as caught:
            await join(ticket, tmp_path)
        assert caught.value.reason is Refusal.REVOKED
        # One statement taken back, and not the peer: the ticket brings another.
        other = await join(ticket, tmp_path, "other")
        assert other.membership is not None
        serial = other.membership.own.serial
        access_files.save_revocations(state_dir, revoke(OWNER, listed, serials=[serial]))
        assert host.access.reload_files()
        again = await join(ticket, tmp_path, "other")
    assert again.membership is not None
    assert again.membership.own.serial != serial
    # The newest list came with it.
    kept = access_files.load_node(tmp_path / "other" / "state", again.identity.peer_id)
    assert kept.revocations is not None
    assert kept.revocations.sequence == 2


async def test_a_blocked_peer_is_hung_up_on_with_a_good_ticket(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server") as host:
        made = await join(host.ticket(), tmp_path)
        host.access.block(made.identity.peer_id)
        with pytest.raises(InviterRefused, match="this peer is blocked"):
            await join(host.ticket(), tmp_path)


async def test_an_artifact_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        ticket = host.ticket(artifact_sha256=b"\x01" * 32)
        with pytest.raises(ArtifactFetchError, match="ask for a new ticket"):
            await join(ticket, tmp_path)


async def test_an_artifact_that_was_changed_on_the_inviters_disk_is_not_believed(
    tmp_path: Path,
) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        file = tmp_path / "server" / "a.onnx"
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
        with pytest.raises(ArtifactFetchError, match="something else than the artifact"):
            await join(host.ticket(), tmp_path)
    assert not list((tmp_path / "cache" / "bbnode" / "artifacts").iterdir())


async def test_somebody_else_at_the_address_is_noticed(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        other = SigningKey.from_seed(b"z" * 32)
        address = host.address.rpartition("/p2p/")[0]
        ticket = make_ticket(
            other,
            addresses=[parse_address(address)],
            artifact_sha256=bytes.fromhex(host.sha256),
            target="client",
            expires_s=int(time.time()) + HOUR_S,
            nonce=b"n" * 16,
        ).text
        with pytest.raises(WrongPeer, match="somebody else"):
            await join(ticket, tmp_path)


async def test_nobody_at_the_address(tmp_path: Path, nobody: str) -> None:
    with pytest.raises(InviterUnreachable, match="Connection refused"):
        await join(nobody, tmp_path, target="client")


@pytest.fixture
async def nobody(tmp_path: Path) -> str:
    """The address of a node that has stopped."""
    async with inviting(tmp_path / "gone", private=False) as host:
        return host.address


async def test_a_peer_that_runs_nothing_offers_nothing(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        host.backend._hello = replace(host.backend._hello, artifact_sha256="")
        with pytest.raises(NothingOffered, match="runs a program"):
            await join(host.address, tmp_path)


async def test_a_state_directory_that_a_daemon_has_is_left_alone(tmp_path: Path) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        with (
            paths.lock_state_dir(tmp_path / "laptop" / "state"),
            pytest.raises(paths.StateDirInUse, match="stop that daemon"),
        ):
            await join(host.ticket(), tmp_path)


async def test_a_relay_of_lists_reaches_members_that_were_connected(tmp_path: Path) -> None:
    """One member learns of a revocation by hand, the other from it over the connection."""
    async with inviting(tmp_path / "one") as one, inviting(tmp_path / "two") as two:
        two.backend.keep_connected(one.identity.peer_id, one.backend.listen_addresses())
        await one.until_came()
        await two.until_came()
        stranger = PeerId.from_seed("stranger")
        listed = revoke(OWNER, None, peers=[stranger])
        access_files.save_revocations(one.resolved.state_dir, listed)
        told = trio.Event()
        two.access.on_change = told.set
        assert one.access.reload_files()
        await told.wait()
        kept = access_files.load_node(two.resolved.state_dir, two.identity.peer_id)
        assert kept.revocations is not None
        assert kept.revocations.peers == {stranger}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", "neither a ticket"),
        ("", "neither a ticket"),
        ("/ip4/127.0.0.1/tcp/1", "names no peer"),
        ("/ip4/nowhere", "not a multiaddr"),
    ],
)
def test_other_texts_invite_to_nothing(text: str, expected: str) -> None:
    with pytest.raises(NotAnInvitation, match=expected):
        read_source(text, unix_s=0)


def test_a_ticket_may_stand_in_a_file_and_expires(tmp_path: Path) -> None:
    ticket = make_ticket(
        OWNER,
        addresses=[parse_address("/ip4/192.0.2.1/tcp/4001")],
        artifact_sha256=b"d" * 32,
        target="client",
        expires_s=1000,
        nonce=b"n" * 16,
    )
    (tmp_path / "t").write_text(ticket.text + "\n")
    found = read_source(f"@{tmp_path / 't'}", unix_s=0)
    assert found.ticket == ticket
    assert found.addresses == ticket.dial_addresses
    assert found.name == f"join-{str(OWNER.peer_id)[-8:]}"
    assert folder(found, name=None, directory=None).directory.name == found.name
    with pytest.raises(TicketRefused, match="bbnode invite"):
        read_source(ticket.text, unix_s=5000)
    with pytest.raises(TicketRefused):
        read_source(ticket.text[:-1], unix_s=0)
    with pytest.raises(MissingFile, match="no such file"):
        read_source(f"@{tmp_path / 'none'}", unix_s=0)
