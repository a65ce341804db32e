"""`bbnode join`, up to the node that it makes: what it shows, asks, writes, and refuses."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bbnode.cli import exits
from bbnode.cli.main import main
from bbnode.daemon.join.view import event_text, size
from tests.daemon.inviting import Inviter, inviting
from tests.daemon.live import in_thread


class Shell:
    """Runs `bbnode join` in a thread, with what somebody types into its terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    async def __call__(self, *words: object, types: str | None = None) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.stdin", Typed(types or "", terminal=types is not None))
        code = await in_thread(main, ["join", *map(str, words)])
        return code, *self._capsys.readouterr()


class Typed(io.StringIO):
    """A terminal, or none, with this in it."""

    def __init__(self, text: str, *, terminal: bool) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def bb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shell:
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return Shell(capsys, monkeypatch)


def words(host: Inviter, *more: object) -> tuple[object, ...]:
    return (host.ticket(), "--no-run", *more)


async def test_it_shows_asks_and_makes_a_node(tmp_path: Path, bb: Shell) -> None:
    async with inviting(tmp_path / "server") as host:
        code, out, err = await bb(*words(host), types="y\n")
        assert (code, out) == (0, "")
        for shown in (str(host.identity.peer_id), host.sha256, "client#", "envelope_bytes"):
            assert shown in err
        (made,) = (tmp_path / "state" / "bbnode").iterdir()
        assert made.name == f"join-{str(host.access.network)[-8:]}"
        assert f"bbnode run -c {made / 'node.toml'}" in err

        code, out, _ = await bb(*words(host, "--yes", "--json", "--dir", tmp_path / "mine"))
        told: dict[str, Any] = json.loads(out)
        assert (code, told["schema"]) == (0, "bbnode/join/1")
        assert told["config_file"] == str(tmp_path / "mine" / "node.toml")
        assert told["member_until"].endswith("Z")
        assert (
            tomllib.loads((tmp_path / "mine" / "node.toml").read_text())["network"]["listen"] == []
        )


async def test_nothing_is_made_unless_somebody_agrees(tmp_path: Path, bb: Shell) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        for types, expected in ((None, "run again with --yes"), ("n\n", "nothing was started")):
            code, _, err = await bb(*words(host, "--dir", tmp_path / "mine"), types=types)
            assert code == exits.USAGE
            assert expected in err.splitlines()[-1]
            assert not (tmp_path / "mine" / "node.toml").exists()


async def test_settings_of_slots_that_are_not_there_are_refused_before_anything_is_made(
    tmp_path: Path, bb: Shell
) -> None:
    async with inviting(tmp_path / "server", private=False) as host:
        more = ("--dir", tmp_path / "mine", "--yes", "--set")
        code, _, err = await bb(*words(host, *more, "node.nme=x"))
        assert (code, "did you mean 'name'" in err) == (exits.USAGE, True)
        code, _, err = await bb(*words(host, *more, "slots.dta.x=1"))
        assert (code, "slot 'dta'" in err) == (exits.USAGE, True)
        assert not (tmp_path / "mine" / "node.toml").exists()


@pytest.mark.parametrize(("text", "code"), [("hello", exits.USAGE), ("bbnode1:abc", exits.FAILURE)])
async def test_what_invites_to_nothing_is_one_line(bb: Shell, text: str, code: int) -> None:
    got, out, err = await bb(text)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"type": "ready", "peer_id": "P"}, "ready as P"),
        (
            {"type": "peer_up", "peer": "P", "classes": ["a", "\x1b"]},
            "connected with <P>, which plays a, �",
        ),
        ({"type": "peer_down", "peer": "P", "reason": "gone"}, "lost <P>: gone"),
        ({"type": "op_failed", "op": "o", "kind": "K", "detail": "d"}, "failed: o: K: d"),
        ({"type": "round_finished", "round": 3, "ok": False}, "round 3 failed"),
        ({"type": "stopping"}, "leaving"),
        ({"type": "telemetry"}, ""),
    ],
)
def test_events_as_lines(event: dict[str, Any], text: str) -> None:
    assert event_text(event, lambda peer: f"<{peer}>") == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1e3, "1.0 KB"), (2.5e6, "2.5 MB"), (9e9, "9.0 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
