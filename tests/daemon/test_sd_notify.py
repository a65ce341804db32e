"""The supervisor hears what it should, and its absence harms nobody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bbnode.daemon import sd_notify


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
