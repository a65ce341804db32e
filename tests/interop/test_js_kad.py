"""js-libp2p's kad-dht between two hosts of ours: each end finds what only the other one has."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.interop.installed import JS_FOLDER, needs
from tests.patience import PATIENCE_S
from tests.transport.test_routing import Router, until

FOLDER = JS_FOLDER
pytestmark = [pytest.mark.slow, needs("js-libp2p", FOLDER)]
OURS, THEIRS = (hashlib.sha256(name).digest() for name in (b"ours", b"theirs"))


class Js:
    """A js-libp2p host that is told what to do."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._left = b""

    async def line(self) -> Any:
        while b"\n" not in self._left:
            part = await self._process.stdout.receive_some()
            assert part, "it has ended"
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    async def __call__(self, *words: str) -> Any:
        await self._process.stdin.send_all(" ".join(words).encode() + b"\n")
        answer = await self.line()
        assert "error" not in answer, answer
        return answer["ok"]


@asynccontextmanager
async def js(*addresses: str) -> AsyncIterator[Js]:
    script = Path(FOLDER) / "kad.mjs"
    shutil.copy(Path(__file__).parent / "kad.mjs", script)
    command = ["node", str(script), *addresses]
    run = partial(trio.run_process, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    async with trio.open_nursery() as nursery:
        made = Js(await nursery.start(partial(run, command)))
        await made.line()
        yield made
        await made._process.stdin.aclose()


async def test_js_asks_us_and_answers():
    first, last = Router(1), Router(2)
    with trio.fail_after(2 * PATIENCE_S):
        async with first.running(), last.running():
            where = [f"{each.host.address}/p2p/{each.peer}" for each in (first, last)]
            async with js(*where) as between:
                await until(lambda: first["peers"] and last["peers"])
                last.dht.provide([OURS])
                await until(lambda: last.dht.as_json()["providing"][OURS.hex()])
                assert (await first.dht.find_peer(last.peer)).addresses
                (found,) = await first.dht.find_providers(OURS)
                assert found.peer == last.peer
                assert str(last.peer) in await between("providers", OURS.hex())
                assert await between("find", str(last.peer))
                assert await between("ping", str(first.peer)) >= 0
                await between("provide", THEIRS.hex())
                assert len(await first.dht.find_providers(THEIRS)) == 1
                assert not first.faults
                assert not last.faults
