"""A bug report: complete without a daemon, and without anything secret."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from bbnode.access.ticket import NONCE_BYTES, make_ticket
from bbnode.cli.main import main
from bbnode.daemon import paths
from bbnode.daemon.config.sources import resolve
from bbnode.daemon.observing import bugreport
from bbnode.daemon.observing.bugreport import REDACTED, redact
from bbnode.ir.address import parse_address
from bbnode.transport.identity import create_identity


@pytest.fixture
def node(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(
        '[node]\nname = "peer"\nstate_dir = "state"\n[artifact]\ntargets = ["server"]\n'
        'module = "bbnode.examples.federated_digits:FederatedRound"\n'
        '[slots.data]\napi_key = "hunter2"\nseed = 3\n'
    )
    paths.make_state_dir(tmp_path / "state")
    create_identity(paths.identity_file(tmp_path / "state"))
    return file


def test_it_is_made_without_a_daemon(node: Path) -> None:
    report = bugreport.collect(resolve(node, environ={}))
    assert report["versions"]["bbnode"]
    assert "NotRunning" in report["daemon"]["error"]
    assert [entry["name"] for entry in report["files"]] == ["identity.key"]
    keys = {row["key"]: row["value"] for row in report["config"]["keys"]}
    assert (keys["slots.data.api_key"], keys["slots.data.seed"]) == (REDACTED, 3)
    assert {finding["check"] for finding in report["doctor"]} >= {"disk", "artifact"}


def test_nothing_of_the_key_is_in_it(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert main(["bugreport", "-c", str(node), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.stat().st_mode & 0o777 == 0o600
    text = out.read_text()
    assert json.loads(text)["files"]
    raw = paths.identity_file(tmp_path / "state").read_bytes()
    for secret in ("hunter2", raw.hex(), repr(raw)[2:-1]):
        assert secret not in text


def test_tickets_and_secrets_are_taken_out_wherever_they_stand(tmp_path: Path) -> None:
    key = create_identity(tmp_path / "key")
    ticket = make_ticket(
        key,
        addresses=[parse_address("/ip4/127.0.0.1/tcp/1")],
        artifact_sha256=bytes(32),
        target="client",
        expires_s=2_000_000_000,
        nonce=secrets.token_bytes(NONCE_BYTES),
    ).text
    told = redact({"log": [f"joined with {ticket} today"], "a": {"Token": "x", "tokens": 3}})
    assert told == {
        "log": [f"joined with {REDACTED} today"],
        "a": {"Token": REDACTED, "tokens": REDACTED},
    }
    assert redact({"password_set": True}) == {"password_set": True}
