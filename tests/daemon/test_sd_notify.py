"""The supervisor hears what it should, and its absence harms nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from bbnode.daemon.lifecycle import sd_notify


@pytest.mark.parametrize("abstract", [False, True])
def test_a_supervisor_hears_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"bbnode-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name if abstract else name)
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert sd_notify.notify(sd_notify.READY, "STATUS=well")
        assert listener.recv(100) == b"READY=1\nSTATUS=well"


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_one_nothing_happens(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not sd_notify.notify(sd_notify.READY)


@pytest.mark.parametrize(
    ("usec", "pid", "period_s"),
    [
        ("3000000", None, 1.5),
        ("3000000", "own", 1.5),
        ("3000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_how_often_a_watchdog_wants_to_hear(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, period_s: float | None
) -> None:
    for name, value in (
        ("WATCHDOG_USEC", usec),
        ("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid),
    ):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert sd_notify.watchdog_period_s() == period_s


async def test_reports_come_in_time_and_a_status_only_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        statuses = iter(["a", "a", "b", "b"])  # asked at 0, 1, 2 and 3 s
        with trio.move_on_after(3.5) as scope:
            await sd_notify.report(lambda: next(statuses))
        assert scope.cancelled_caught
        heard = [listener.recv(100) for _ in range(4)]
    assert heard == [b"WATCHDOG=1\nSTATUS=a", b"WATCHDOG=1", b"WATCHDOG=1\nSTATUS=b", b"WATCHDOG=1"]


async def test_reports_end_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    await sd_notify.report(lambda: "well")


def test_a_reload_says_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert sd_notify.reloading()
        first, second = listener.recv(100).split(b"\n")
    assert first == b"RELOADING=1"
    assert int(second.removeprefix(b"MONOTONIC_USEC=")) > 0
