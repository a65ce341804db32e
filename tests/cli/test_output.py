"""What commands print of a peer's or an artifact's texts."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bbnode.cli import output
from bbnode.ir.peer import PeerId

ATTACK = "a\x1b[2Jb\x9b31mc\u202ed"


def test_peer_ids_are_short_in_any_text() -> None:
    peer = str(PeerId.from_seed(7))
    end = f"…{peer[-6:]}"
    assert output.short_peer(peer) == end
    assert output.short_peer(f"2 of 3 came: {peer}, {peer}") == f"2 of 3 came: {end}, {end}"
    for other in ("model", "execution 17", f"x{peer}l", "a" * 45):
        assert output.short_peer(other) == other


@pytest.mark.parametrize("say", [output.data, output.note, output.error])
def test_no_line_controls_the_terminal(say: object, capsys: pytest.CaptureFixture[str]) -> None:
    say(ATTACK)  # type: ignore[operator]
    shown = "".join(capsys.readouterr())
    assert shown.removesuffix("\n").isprintable()
    assert "a�[2Jb�31mc�d" in shown


def test_json_escapes_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    output.json_object({"name": ATTACK}, name="x")
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert json.loads(shown)["name"] == ATTACK


def test_tables_have_neither_controls_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    out = output.console()
    output.table("", ("name",), [[f"[bold red]{ATTACK}\nforged"]], out=out)
    output.describe({"name": ATTACK, "rows": [{"x": ATTACK}], "one": {"y": ATTACK}}, out=out)
    output.describe({ATTACK: {ATTACK: [{ATTACK: 1}], "x": {ATTACK: 2}}}, out=out)
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert "[bold red]a�[2Jb" in shown
    assert "d�forged" in shown


def test_a_line_is_in_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `bbnode logs -f > FILE` ends by a signal: what waits in a buffer is lost then.
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.data("one")
        output.json_object({"n": 2}, indent=None, name="x")
        lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["one", '{"schema": "bbnode/x/1", "n": 2}']


ID = str(PeerId.from_seed(1))


def described(value: Mapping[str, Any], width: int) -> list[str]:
    out = io.StringIO()
    output.describe(value, out=Console(file=out, width=width), short=True)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_tables_have_the_ends_of_peer_ids_and_lines_all_of_them() -> None:
    peers = [{"peer": ID, "address": f"/ip4/127.0.0.1/tcp/1/p2p/{ID}"}]
    whole = {"peer_id": ID, "peers": peers, "found": {"peers": peers, "one": ID}}
    lines = described(whole, 80)
    assert [line for line in lines if ID in line] == [f" peer id   {ID}"]
    assert sum(f"…{ID[-6:]}" in line for line in lines) == 3


def test_a_table_without_room_is_a_block_for_each_row() -> None:
    names = [f"column {n}" for n in range(12)]
    rows = [{"target": "peer", **dict.fromkeys(names, "waiting")}, {"target": "b", names[0]: 1}]
    lines = described({"invoke": rows}, 80)
    assert "invoke: peer" in lines
    assert "invoke: b" in lines
    assert sum(line.split() == ["column", "3", "waiting"] for line in lines) == 1
    assert max(map(len, lines)) <= 80
    assert "invoke" in described({"invoke": rows}, 200)
