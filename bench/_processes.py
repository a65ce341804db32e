"""Another process of a bench, which prints its addresses as one line of JSON when it is ready.

Rule: it lives as long as its standard input is open.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from multiaddr import Multiaddr


@asynccontextmanager
async def process(file: str, *words: str) -> AsyncIterator[list[Multiaddr]]:
    """Run a Python file with arguments; gives the addresses that it prints."""
    child = await trio.lowlevel.open_process(
        [sys.executable, file, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if child.stdin is None or child.stdout is None:
        raise SystemExit("the other process has no pipes")
    try:
        line = b""
        while not line.endswith(b"\n"):
            line += await child.stdout.receive_some() or b"\n"
        yield [Multiaddr(text) for text in json.loads(line)]
    finally:
        await child.stdin.aclose()
        await child.wait()
