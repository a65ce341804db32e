"""Every command that asks a running node: plain, as JSON, and with what it refuses."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from rich.console import Console

from bbnode.cli import exits, output, values
from bbnode.cli.commands.status import _summary
from bbnode.cli.main import main
from bbnode.daemon.config.reload import Changes
from bbnode.daemon.config.sources import ConfigError
from bbnode.engine import steps
from bbnode.ir.peer import PeerId
from tests.daemon.live import CLIENT, SERVER, STRANGER, Live, in_thread, running
from tests.patience import PATIENCE_S, patiently

Result = tuple[int, str, str]


class Shell:
    """Runs `bbnode` against a live node, in a thread of its own."""

    def __init__(self, live: Live, capsys: pytest.CaptureFixture[str]) -> None:
        self.live = live
        self._capsys = capsys

    async def __call__(self, *args: object) -> Result:
        words = patiently(*args, "--state-dir", self.live.state_dir)
        with trio.fail_after(PATIENCE_S):
            code = await in_thread(main, words)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    async def json(self, *args: object) -> dict[str, Any]:
        code, out, err = await self(*args, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[[Live], Shell]:
    return lambda live: Shell(live, capsys)


def one_line(err: str) -> str:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


async def test_status(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        told = await bb.json("status")
        assert told["schema"] == "bbnode/status/1"
        code, out, _ = await bb("status")
        assert code == 0
        lines = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert lines["name"] == f"server (…{SERVER.short})"
        assert lines["state"].startswith("ready, up ")
        assert lines["program"] == "00000000, plays server"
        assert lines["peers"] == "1 connected (1 client ready)"
        assert len(lines) <= 8
        assert max(map(len, out.splitlines())) <= 80
        # What it waits for names three peers at most, by their ends, and fits a terminal.
        peers = [str(PeerId.from_seed(number)) for number in range(5)]
        wait = {"what": "Ask_0", "why": "responses", "whom": ", ".join(peers), "remaining_s": 60.0}
        shown = dict(_summary({**told, "waiting": [wait]}))["waiting"]
        ends = ", ".join(f"…{peer[-6:]}" for peer in peers[:3])
        assert shown == f"Ask_0: responses of {ends}, 2 more, 60 s left"
        assert len(shown) <= 70
        code, out, _ = await bb("status", "--verbose")
        assert str(CLIENT) not in out
        for shown in (
            str(SERVER),
            f"…{CLIENT.short}",
            "direct",
            "health",
            "rtt ms",
            "transport.links",
        ):
            assert shown in out
        assert told["counters"]["transport.links.refused"] == 0
        assert "transport.links.refused" not in out  # what never counted anything is left out


async def test_status_follows_events_until_the_end(tmp_path: Path, shell: Any) -> None:
    results: list[Result] = []
    async with trio.open_nursery() as nursery, running(tmp_path, client=False) as live:
        bb = shell(live)

        async def follow() -> None:
            results.append(await bb("status", "--follow", "--json"))

        nursery.start_soon(follow)
        while not live.plane.host.events.subscribers:
            await trio.lowlevel.checkpoint()
        live.plane.publish({"type": "mine", "text": "\x1b[31m"})
    code, out, _ = results[0]
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["schema"] == "bbnode/status/1"
    assert (second["schema"], second["event"]["type"]) == ("bbnode/event/1", "mine")


async def test_peers(tmp_path: Path, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        told = await bb.json("peers")
        assert (told["schema"], told["peers"][0]["peer"]) == ("bbnode/peers/1", str(CLIENT))
        assert str(CLIENT) in (await bb("peers"))[1]
        # A narrow terminal shows the end of each, which `--why` takes.
        console = Console(width=80, file=(narrow := io.StringIO()))
        monkeypatch.setattr(output, "console", lambda: console)
        await bb("peers")
        monkeypatch.undo()
        (line,) = (each for each in narrow.getvalue().splitlines() if "client" in each)
        assert f"…{str(CLIENT)[-6:]}" in line
        assert "direct" in line

        told = await bb.json("peers", "--why", CLIENT)
        assert told["schema"] == "bbnode/peer/1"
        out = (await bb("peers", "--why", str(CLIENT)[-8:]))[1]
        assert "access: block_list" in out
        assert "cooldown" in out
        code, _, err = await bb("peers", "--why", "nobody")
        assert code == exits.USAGE
        assert "bbnode peers" in one_line(err)


async def test_peers_add_drop_forget(tmp_path: Path, shell: Any) -> None:
    here = "/ip4/10.0.0.7/tcp/1"
    stranger = str(PeerId.from_seed(4711))
    async with running(tmp_path) as live:
        bb = shell(live)
        assert "1 address" in (await bb("peers", "add", stranger, here))[1]
        told = await bb.json("peers", "book")
        assert {"peer": stranger, "addresses": [here]} in told["peers"]
        assert here in (await bb("peers", "book"))[1]
        code, _, err = await bb("peers", "add", stranger, "nonsense")
        assert code == exits.USAGE
        assert "not a multiaddr" in one_line(err)
        assert "dropped" in (await bb("peers", "drop", stranger, here))[1]
        assert "was not in the book" in (await bb("peers", "drop", stranger, here))[1]
        assert "forgotten" in (await bb("peers", "forget", stranger))[1]


async def test_a_peer_may_be_named_by_its_address(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        stranger = str(PeerId.from_seed("stranger"))
        address = f"/ip4/10.0.0.7/tcp/4001/p2p/{stranger}"
        told = await bb.json("peers", "connect", address)
        assert (told["peer"], told["addresses"]) == (stranger, [address])
        assert (await bb.json("peers", "--why", address))["peer"] == stranger
        code, _, err = await bb("peers", "connect", "/ip4/10.0.0.7/tcp/4001")
        assert code == 2
        assert "names no peer" in err
        code, _, err = await bb("peers", "connect", "what/../is?this")
        assert code != 0
        assert "bbnode peers" in one_line(err)


async def test_peers_watch_goes_on_until_the_daemon_stops(tmp_path: Path, shell: Any) -> None:
    results: list[Result] = []
    async with trio.open_nursery() as nursery, running(tmp_path) as live:
        bb = shell(live)

        async def watch() -> None:
            results.append(await bb("peers", "--watch", "--every", "0.01", "--json"))

        nursery.start_soon(watch)
        while live.plane.server.counters().get("control.requests", 0) < 3:
            await trio.lowlevel.checkpoint()
    code, out, err = results[0]
    assert code == exits.UNREACHABLE, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) >= 2
    assert all(line["peers"][0]["peer"] == str(CLIENT) for line in lines)


async def test_peers_are_blocked_allowed_disconnected_connected(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        address = str(live.backend.peers()[0].address)
        for word, extra, key in (
            ("block", (), "blocked"),
            ("allow", (), "why"),
            ("disconnect", (), "was_connected"),
            ("connect", (address,), "addresses"),
        ):
            code, out, _ = await bb("peers", word, CLIENT, *extra)
            assert code == 0
            assert str(CLIENT) in out
            told = await bb.json("peers", word, CLIENT, *extra)
            assert told["schema"] == f"bbnode/peers-{word}/1"
            assert key in told
        code, _, err = await bb("peers", "block", SERVER)
        assert code == exits.FAILURE
        assert "itself" in one_line(err)
        assert (await bb("peers", "connect", CLIENT, "nowhere"))[0] == exits.USAGE
        assert (await bb("peers", "disconnect", "x"))[0] == exits.USAGE
        assert (await bb("peers", "allow", "x"))[0] == exits.USAGE


async def test_ping(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        told = await bb.json("ping", CLIENT, "-n", 2, "--every", 0)
        assert (told["schema"], told["rtt_ms"]) == ("bbnode/ping/1", [1.5, 1.5])
        code, out, err = await bb("ping", CLIENT, "-n", 1)
        assert (code, out) == (0, f"{CLIENT}: 1.500 ms\n")
        assert "mean 1.500" in err
        code, _, err = await bb("ping", STRANGER)
        assert code == exits.FAILURE
        assert "not connected" in one_line(err)
        live.ping = never
        code, _, err = await bb("ping", CLIENT, "--timeout", "0.01")
        assert code == exits.TIMEOUT


async def test_logs(tmp_path: Path, shell: Any) -> None:
    logger = logging.getLogger("bbnode.test")
    async with running(tmp_path, client=False) as live:
        bb = shell(live)
        told = await bb.json("logs", "--set-level", "info")
        assert (told["schema"], told["level"]) == ("bbnode/log-level/1", "info")
        assert "the level is info" in (await bb("logs", "--set-level", "info"))[1]
        logger.info("a line", extra={"count": 3, "peer": "\x1b[31m"})
        try:
            raise ValueError("inner")
        except ValueError:
            logger.exception("it broke")
        code, out, _ = await bb("logs", "-n", 2)
        assert code == 0
        assert "INFO    bbnode.test: a line count=3" in out
        assert "\n  ValueError: inner" in out
        assert "\x1b" not in out
        code, out, _ = await bb("logs", "-n", 1, "--json")
        line = json.loads(out)
        assert (line["schema"], line["log"]["msg"]) == ("bbnode/log/1", "it broke")
        assert (await bb("logs", "--level", "error", "-n", 5))[1].count("bbnode.test") == 1
        assert (await bb("logs", "--level", "loud"))[0] == exits.USAGE
        assert (await bb("logs", "--set-level", "loud"))[0] == exits.USAGE


async def test_logs_follow(tmp_path: Path, shell: Any) -> None:
    results: list[Result] = []
    async with trio.open_nursery() as nursery, running(tmp_path, client=False) as live:
        bb = shell(live)

        async def follow() -> None:
            results.append(await bb("logs", "-f", "-n", 0, "--level", "error"))

        nursery.start_soon(follow)
        while not live.plane.host.logs.subscribers:
            await trio.lowlevel.checkpoint()
        logging.getLogger("bbnode.test").error("heard")
    code, out, _ = results[0]
    assert code == 0
    assert "ERROR   bbnode.test: heard\n" in out


async def test_invoke(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        told = await bb.json("invoke", "server", "--input", "question=[1.5, 2.5]")
        assert told["schema"] == "bbnode/invoke/1"
        assert (told["ok"], told["outputs"]["asked"]) == (True, [1.5, 2.5])
        file = tmp_path / "q.npy"
        np.save(file, np.float32([4, 5]))
        code, _, err = await bb("invoke", "server")
        assert "no value for question" in err
        assert "-i NAME=VALUE" in one_line(err)
        code, out, _ = await bb("invoke", "server", "-i", f"question=@{file}")
        assert code == 0
        assert out.startswith("asked = [4. 5.]  (float32[2])\nanswers = answers: 1, missing: 0\n")
        assert told["values"]["asked"] == {
            "type": "Tensor.FLOAT", "dtype": "float32", "shape": [2], "data": [1.5, 2.5],
        }  # fmt: skip
        code, out, _ = await bb("invoke", "server", "-i", "question=1.5", "--no-wait")
        assert (code, out.startswith("execution ")) == (0, True)


async def test_invoke_says_what_failed_and_what_still_runs(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        live.backend.send = lambda *_, **__: None  # type: ignore[method-assign]
        code, _, err = await bb("invoke", "server", "-i", "question=1.5", "--timeout", "0.05")
        assert code == exits.TIMEOUT
        assert "answers did not come within 0.05 s" in one_line(err) or "did not end" in err
        live.node.block_peer(CLIENT)
        code, out, err = await bb("invoke", "server", "-i", "question=1.5", "--json")
        assert code == exits.FAILURE
        assert json.loads(out)["ok"] is False
        assert json.loads(out)["failures"][0]["op"] in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("nobody",), exits.USAGE),
        (("server",), exits.USAGE),
        (("server", "-i", "question"), exits.USAGE),
        (("server", "-i", "question=text"), exits.USAGE),
        (("server", "-i", "question=@/no/such/file.npy"), exits.USAGE),
        (("server", "-i", "question=1.5", "--timeout", "0"), exits.USAGE),
    ],
)
async def test_invoke_refuses_what_is_wrong(
    tmp_path: Path, shell: Any, words: tuple[str, ...], code: int
) -> None:
    async with running(tmp_path, client=False) as live:
        got, out, err = await shell(live)("invoke", *words)
        assert (got, out) == (code, "")
        one_line(err)


async def test_emit(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        told = await bb.json("emit", "server", "question=2.5", "--timeout", 30)
        assert (told["schema"], told["ok"]) == ("bbnode/emit/1", True)
        code, out, _ = await bb("emit", "server", "question=2.5")
        assert (code, out.startswith("execution ")) == (0, True)
        assert (await bb.json("emit", "--kind", 4096))["kind"] == 4096
        assert (await bb("emit", "--kind", 4096))[1] == "event 4096 is on the bus\n"
        for words in ((), ("server",), ("server", "question=1", "--kind", 4096), ("--kind", 1)):
            code, _, err = await bb("emit", *words)
            assert code == exits.USAGE
            one_line(err)


async def test_snapshot(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path, client=False) as live:
        bb = shell(live)
        assert (await bb.json("snapshot"))["bytes"] == 1234
        assert "1234 bytes" in (await bb("snapshot"))[1]
        assert live.saves == 2


async def test_reload_fails_where_the_daemon_refuses(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        assert await bb("reload") == (0, "changed: nothing\n", "")
        live.reloads = Changes(applied=("node.log_level",), needs_restart=("node.name",))
        told = await bb.json("reload")
        assert (told["schema"], told["changed"]) == ("bbnode/reload/1", ["node.log_level"])
        code, out, err = await bb("reload")
        assert (code, out) == (0, "changed: node.log_level\n")
        assert err == "needs a restart: node.name\n"
        live.reloads = ConfigError("node.toml: no key 'nod'; did you mean 'node'?")
        code, out, err = await bb("reload")
        assert (code, out) == (exits.USAGE, "")
        assert "did you mean 'node'?" in one_line(err)


async def test_trace(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        assert (await bb("trace"))[1] == "tracing is off\n"
        assert (await bb.json("trace", "--on"))["tracing"] is True
        execution = (await bb.json("invoke", "server", "-i", "question=1.5"))["execution"]
        told = await bb.json("trace", execution, "--also", live.state_dir)
        assert told["schema"] == "bbnode/trace/1"
        assert told["traces"][0]["executions"] == [execution]
        out = (await bb("trace", execution))[1]
        for shown in ("execution_started", "fill_sent", "op_completed", "execution_ended"):
            assert shown in out
        assert f"executions: {execution}" in (await bb("trace"))[1]
        assert (await bb("trace", "--off"))[1] == "tracing is off\n"
        code, _, err = await bb("trace", 999)
        assert code == exits.USAGE
        assert "--on" in one_line(err)


async def test_wait(tmp_path: Path, shell: Any) -> None:
    async with running(tmp_path) as live:
        bb = shell(live)
        await live.until(steps.PeerUp)
        told = await bb.json("wait", "--ready", "--peers", 1, "--class", "client")
        assert (told["schema"], told["ready"]) == ("bbnode/wait/1", True)
        assert told["peers"] == [str(CLIENT)]
        code, out, err = await bb("wait", "--ready")
        assert (code, out) == (0, "")
        assert err
        code, _, err = await bb("wait", "--peers", 2, "--timeout", 0)
        assert code == exits.TIMEOUT
        assert "1 of 2 peers" in one_line(err)
        live.plane.host.phase = "starting"
        code, _, err = await bb("wait", "--ready", "--timeout", 0)
        assert code == exits.TIMEOUT
        assert "the node is starting" in one_line(err)
        assert (await bb("wait"))[0] == exits.USAGE
        assert (await bb("wait", "--ready", "--class", "x"))[0] == exits.USAGE


def test_wait_for_a_daemon_that_never_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["wait", "--ready", "--state-dir", str(tmp_path), "--timeout", "0"])
    assert code == exits.TIMEOUT
    assert "no daemon is running" in one_line(capsys.readouterr().err)


async def never(_: object) -> float:
    await trio.sleep_forever()
    raise AssertionError


COMMANDS = [
    ("status",),
    ("peers",),
    ("peers", "connect", "x"),
    ("peers", "disconnect", "x"),
    ("peers", "block", "x"),
    ("peers", "allow", "x"),
    ("ping", "x"),
    ("logs",),
    ("trace",),
    ("invoke", "x"),
    ("emit", "x", "a=1"),
    ("snapshot",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_without_a_daemon_each_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([*words, "--state-dir", str(tmp_path), "--json"]) == exits.UNREACHABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bbnode run" in one_line(captured.err)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trigger", "trigger"),
        ("1", 1),
        ("-1.5e3", -1500.0),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("plain words", {"text": "plain words"}),
        ('"trigger"', {"text": "trigger"}),
        ('{"text": "x"}', {"text": "x"}),
        ("", {"text": ""}),
        ("[" * 5000, {"text": "[" * 5000}),
    ],
)
def test_a_value_is_what_its_text_says(text: str, value: Any) -> None:
    assert values.parse_value(text) == value


def test_a_file_is_bytes_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(b"\x01\x02")
    assert values.parse_value(f"@{file}") == {"bytes": "AQI="}
    monkeypatch.setattr(values, "MAX_FILE_BYTES", 1)
    assert main(["invoke", "t", "-i", f"a=@{file}", "--state-dir", str(tmp_path)]) == exits.USAGE


def test_a_schema_names_its_command() -> None:
    assert output.schema("peers") == "bbnode/peers/1"


def test_an_execution_says_what_its_codecs_saved(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"execution": 7, "ok": True, "outputs": {}, "skipped": {}, "failures": []}
    told |= {"coded": {"raw_bytes": 4000, "code_bytes": 1002}}
    assert values.report(told, waited_s=1.0, as_json=False) == exits.OK
    assert "codecs: 4000 bytes of tensors as 1002 (25.1%)" in capsys.readouterr().err


def test_an_execution_without_outputs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"execution": 7, "ok": True, "outputs": {}, "skipped": {}, "failures": []}
    assert values.report(told, waited_s=1.0, as_json=False) == exits.OK
    out, err = capsys.readouterr()
    assert out == ""
    assert "execution 7 ended; the target has no output" in err
    assert values.report(told, waited_s=1.0, as_json=True) == exits.OK
    out, err = capsys.readouterr()
    assert (json.loads(out)["execution"], err) == (7, "")


class Rounds:
    """What a node's rounds say of themselves: one where a peer had no data, and one that failed."""

    period_s = age_s = None

    def as_json(self) -> dict[str, Any]:
        progress = {"target": "server", "done": 2, "of": None, "complete": False, "running": 3}
        return progress | {"waiting_for": "", "waiting_s": None, "last": None}

    def finished(self) -> list[dict[str, Any]]:
        made = {"target": "server", "execution": 1, "seconds": 0.5, "bytes": 7, "outputs": {}}
        made |= {"started_at": 1e9, "metrics": {"=cmd|' /C calc'!A0": 0.5, "loss": float("nan")}}
        made |= {"bytes_in": 3, "bytes_out": 4, "best": False}
        why = {str(CLIENT): "DataUnavailable: no shard\x1b[31m [train, round.py:8]"}
        first = {"round": 1, "ok": True, "responded": [str(SERVER)], "missing": [str(CLIENT)]}
        second = {"round": 2, "ok": False, "responded": [], "missing": [], "missing_why": {}}
        return [
            {**made, **first, "missing_why": why, "refused": {"X": "too large"}, "failures": []},
            {**made, **second, "refused": {}, "failures": ["QuorumNotReached: nobody"]},
        ]


async def test_rounds_say_who_was_missing_and_why(
    tmp_path: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    async with running(tmp_path) as live:
        bb = shell(live)
        assert (await bb("rounds"))[:2] == (0, "")
        live.plane.host.rounds = [Rounds()]  # type: ignore[list-item]
        told = await bb.json("rounds", "--last", 1)
        assert (told["schema"], [r["round"] for r in told["rounds"]]) == ("bbnode/rounds/1", [2])
        code, out, err = await bb("rounds")
        assert code == 0
        for shown in (CLIENT.short, "DataUnavailable: no shard", "[train, round.py:8]"):
            assert shown in out
        assert "not counted: X (too large)" in out
        assert "1/2" in out
        assert "QuorumNotReached: nobody" in out
        assert "\x1b[31m" not in out  # a peer's word
        assert err == "server: 2 of any number of rounds, round 3 runs\n"
        code, out, _ = await bb("rounds", "--csv")
        header, first, second = csv.reader(io.StringIO(out))
        assert header[-2:] == ["'=cmd|' /C calc'!A0", "loss"]
        told = dict(zip(header, first, strict=True))
        assert (told["round"], told["ok"], told["started_at"]) == (
            "1", "yes", "2001-09-09T01:46:40+00:00",
        )  # fmt: skip
        assert (told["loss"], dict(zip(header, second, strict=True))["failures"]) == (
            "", "QuorumNotReached: nobody",
        )  # fmt: skip
        code, _, err = await bb("rounds", "--csv", "--json")
        assert code == exits.USAGE
        code, _, err = await bb("rounds", "--last", 0)
        assert code == exits.USAGE
