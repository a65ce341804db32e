"""The policy of a running node: from its configuration and files, and changed while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bbnode.access.errors import PolicyError
from bbnode.access.revocation import revoke
from bbnode.access.statement import grant
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.control import AccessControl, BlockedByConfig, NotAMember
from bbnode.daemon.config import AccessSection
from bbnode.daemon.paths import StorageError
from bbnode.ir.caps import MAX_LISTED_PEERS
from bbnode.ir.peer import PeerId
from tests.access.strategies import MEMBER, NETWORK, NOW_S, OTHER, OWNER, member_of

PEER = PeerId.from_seed("peer")
STRANGER = PeerId.from_seed("stranger")


def control(state_dir: Path, *, now_s: float = NOW_S, **section: Any) -> AccessControl:
    return AccessControl(
        state_dir,
        MEMBER.peer_id,
        AccessSection.model_validate(section),
        unix_s=lambda: now_s,
        monotonic_ns=lambda: 0,
    )


def denied(made: AccessControl, peer: PeerId = PEER) -> list[str]:
    return [d.reason.value for d in made.explain(peer) if not d.allowed]


def test_without_files_and_settings_everybody_may_talk(tmp_path: Path) -> None:
    made = control(tmp_path)
    assert (made.network, made.credentials) == (None, b"")
    assert denied(made) == []


def test_the_configuration_has_lists_and_rates(tmp_path: Path) -> None:
    made = control(
        tmp_path, block=[str(STRANGER)], messages_per_s=5.0, bytes_per_s=100.0, byte_burst=7.0
    )
    assert denied(made, STRANGER) == ["blocklisted"]
    details = {d.rule: d.detail for d in made.explain(PEER)}
    # A burst that is left out is what comes in one second.
    assert "5 a second and 5 at once" in details["message_rate"]
    assert "100 a second and 7 at once" in details["byte_budget"]
    assert denied(control(tmp_path, allow=[str(PEER)]), STRANGER) == ["not_allowlisted"]


def test_a_node_of_a_network_does_not_start_without_its_membership(tmp_path: Path) -> None:
    network = str(NETWORK)
    with pytest.raises(NotAMember, match="has no membership; get one"):
        control(tmp_path, network=network)
    access_files.save_membership(tmp_path, member_of())
    made = control(tmp_path, network=network)
    assert (made.network, made.credentials) == (NETWORK, member_of().raw)
    assert denied(made) == ["not_a_member"]
    with pytest.raises(NotAMember, match="ended"):
        control(tmp_path, network=network, now_s=member_of().valid_until_s)
    with pytest.raises(NotAMember, match=r"check this machine's clock\Z"):
        control(tmp_path, network=network, now_s=member_of().valid_from_s - 1)
    with pytest.raises(NotAMember, match="membership is of"):
        control(tmp_path, network=str(OTHER.peer_id))
    access_files.save_revocations(tmp_path, revoke(OWNER, None, peers=[MEMBER.peer_id]))
    with pytest.raises(NotAMember, match="revoked"):
        control(tmp_path, network=network)
    # A membership closes a node, whatever its configuration says, and also when it has ended.
    assert denied(control(tmp_path, now_s=member_of().valid_until_s)) == ["not_a_member"]


def test_what_is_blocked_by_hand_stays_blocked(tmp_path: Path) -> None:
    made = control(tmp_path, block=[str(STRANGER)])
    changes: list[int] = []
    made.on_change = lambda: changes.append(1)
    made.block(PEER)
    assert denied(made) == ["blocklisted"]
    assert denied(control(tmp_path)) == ["blocklisted"]
    made.reload(AccessSection())  # it is in no configuration, and a reload leaves it
    assert denied(made) == ["blocklisted"]
    assert denied(made, STRANGER) == []
    made.allow(PEER)
    assert denied(made) == denied(control(tmp_path)) == []
    assert len(changes) == 3
    made.reload(AccessSection(block=[str(STRANGER)]))
    with pytest.raises(BlockedByConfig, match=r"access\.block"):
        made.allow(STRANGER)


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    made = control(tmp_path, block=[str(STRANGER)])
    made.block(PEER)
    (tmp_path / "blocked").unlink()
    (tmp_path / "blocked").mkdir()
    for change in (lambda: made.allow(PEER), lambda: made.block(OTHER.peer_id)):
        with pytest.raises(StorageError):
            change()
        assert denied(made) == denied(made, STRANGER) == ["blocklisted"]
        assert denied(made, OTHER.peer_id) == []
    many = [str(PeerId.from_seed(str(i))) for i in range(MAX_LISTED_PEERS + 1)]
    with pytest.raises(PolicyError):
        made.reload(AccessSection.model_construct(block=[], allow=many))
    assert denied(made) == denied(made, STRANGER) == ["blocklisted"]


@pytest.mark.parametrize("text", ["nobody\n", "\x00"])
def test_a_damaged_block_list_is_no_open_door(tmp_path: Path, text: str) -> None:
    (tmp_path / "blocked").write_text(text)
    with pytest.raises(StorageError, match="not a PeerId"):
        control(tmp_path)


def test_a_newer_list_takes_effect_and_is_told_on_once(tmp_path: Path) -> None:
    access_files.save_membership(tmp_path, member_of())
    made = control(tmp_path)
    told: list[str] = []
    made.on_change = lambda: told.append("change")
    made.on_list = lambda _listed: told.append("list")
    other = grant(
        OWNER,
        member=OTHER.peer_id,
        not_before_s=NOW_S,
        expires_s=NOW_S + 60,
        serial=4,
    )
    shown = {"credentials": other.raw, "classes": (), "now_ns": 0, "unix_s": NOW_S}
    assert made.policy.decide_connection(OTHER.peer_id, **shown).allowed
    first = revoke(OWNER, None, serials=[4])
    access_files.save_revocations(tmp_path, first)
    assert made.reload_files()
    assert denied(made, OTHER.peer_id) == ["not_a_member"]
    assert told == ["change", "list"]
    assert made.reload_files()
    assert told == ["change", "list", "change"]
    made.took(revoke(OWNER, first, serials=[5]))
    assert told[3:] == ["change", "list"]


def test_a_renewed_membership_is_shown_at_once(tmp_path: Path) -> None:
    access_files.save_membership(tmp_path, member_of())
    made = control(tmp_path)
    shown: list[bytes] = []
    made.on_credentials = shown.append
    assert made.reload_files()
    assert shown == []  # it is the same
    access_files.save_membership(tmp_path, member_of(serial=8))
    made.reload(AccessSection())
    assert shown == [member_of(serial=8).raw]
    assert made.credentials == shown[-1]
    assert made.reload_files()
    # One that the owner took back is not shown in place of a good one.
    access_files.save_membership(tmp_path, member_of(serial=9))
    access_files.save_revocations(tmp_path, revoke(OWNER, None, serials=[9]))
    assert not made.reload_files()
    assert made.credentials == member_of(serial=8).raw
    assert len(shown) == 1


def test_another_membership_waits_for_a_restart(tmp_path: Path) -> None:
    access_files.save_membership(tmp_path, member_of())
    made = control(tmp_path)
    access_files.save_membership(tmp_path, member_of(OTHER))
    assert not made.reload_files()
    assert made.network == NETWORK


def test_whose_statement_has_ended_is_looked_for_in_private_networks_alone(tmp_path: Path) -> None:
    looks: list[str] = []
    for name in ("open", "private"):
        (tmp_path / name).mkdir()
    access_files.save_membership(tmp_path / "private", member_of())
    for name in ("open", "private"):
        made = control(tmp_path / name)
        made.on_change = lambda name=name: looks.append(name)  # type: ignore[misc]
        made.dates_passed()
    assert looks == ["private"]
