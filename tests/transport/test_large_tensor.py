"""A tensor of a gigabyte between two processes: at most 64 MB beyond the tensor on each side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).parent / "large_peer.py"
GIB = 2**30
ALLOWED_BYTES = 64_000_000


@pytest.mark.slow
def test_a_gigabyte_takes_its_own_memory_and_little_more() -> None:
    with subprocess.Popen(
        [sys.executable, PEER, "receive", str(GIB)], stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            assert receiver.stdout is not None
            address = receiver.stdout.readline().strip()
            sent = subprocess.run(
                [sys.executable, PEER, "send", str(GIB), address],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
            )
            received = json.loads(receiver.stdout.readline())
        finally:
            receiver.kill()
    assert received["right"]
    # Of the receiver the tensor itself is part of what it took.
    assert received["took"] < GIB + ALLOWED_BYTES
    assert json.loads(sent.stdout)["took"] < ALLOWED_BYTES
