"""How a run of a testbed ends, and of whom it complains; nothing is started."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from bbnode.daemon.testbed import nodes as folders
from bbnode.daemon.testbed import run as testbed
from bbnode.daemon.testbed.plan import find_invocation, make_plan
from bbnode.daemon.testbed.program import find_program
from bbnode.daemon.testbed.run import LocalTestbed, RunOptions, UnknownNode
from bbnode.daemon.testbed.view import console

PROGRAM = find_program("bbnode.examples.federated_digits:FederatedRound", {})


def prepared(folder: Path, *, times: int = 2, **options: Any) -> LocalTestbed:
    plan = make_plan(
        PROGRAM,
        settings=["slots.data.dataset=digits"],
        invocation=find_invocation(PROGRAM, target=None, inputs={}, times=times, options={}),
        base=folder,
    )
    made = LocalTestbed(plan, RunOptions(out=folder, **options), console())
    with folders.held_folder(folder) as nodes:
        made._nodes = folders.write_nodes(plan, nodes, port=0, wait_s=1.0)
    return made


def rows(*ok: bool) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        ("server", number): {
            "ok": each,
            "failures": [] if each else ["too few"],
            "outputs": {"accuracy": 0.5} if each else {},
        }
        for number, each in enumerate(ok, 1)
    }


@pytest.mark.parametrize(
    ("made", "complete", "interrupted", "verdict"),
    [
        ([True, True], True, False, ""),
        ([True], True, False, ""),  # stopped early, or the others were made before
        ([True, False], True, False, "1 of 2 rounds failed; see report.json: too few"),
        ([True], False, True, "interrupted after 1 of 2 rounds"),
        ([], False, False, "stopped after 0 of 2 rounds"),
    ],
)
def test_verdicts(
    tmp_path: Path, made: list[bool], complete: bool, interrupted: bool, verdict: str
) -> None:
    run = prepared(tmp_path)
    run._rows, run._interrupted = rows(*made), interrupted
    run._complete = {"server"} if complete else set()
    assert run._verdict() == verdict


def test_rounds_for_ever_end_well_when_they_are_interrupted(tmp_path: Path) -> None:
    run = prepared(tmp_path, times=0)
    run._rows, run._interrupted = rows(True), True
    assert run._verdict() == ""


def test_who_is_missing_is_who_is_down_or_lacks_most(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run._up = {"server", "client-0"}
    assert run._missing({"server": {"client-1"}, "client-1": {"server"}}) == ["client-1"]
    run._up = {"server", "client-0", "client-1"}
    lacking = {"server": {"client-0", "client-1"}, "client-0": {"server"}, "client-1": {"server"}}
    assert run._missing(lacking) == ["server"]


def test_outputs_that_come_later_are_waited_for_once_a_round(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run._rows = rows(True, True)
    assert run._outstanding() == {"loss", "stats", "model"}
    run._counts["server"] = Counter(loss=2, stats=2, model=1)
    assert run._outstanding() == {"model"}
    run._rows = rows(True, False)
    assert run._outstanding() == set()


def test_the_log_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNode, match="no node 'client'; did you mean 'client-1'"):
        prepared(tmp_path, logs=("client",))


def test_last_words_are_of_this_start_and_an_error_counts_most(tmp_path: Path) -> None:
    server = prepared(tmp_path)._nodes[0]
    assert server.last_words() == "its log can't be read"
    server.log.write_bytes(b"error: long ago\n")
    server.log_start = server.log.stat().st_size
    assert server.last_words() == "its log is empty"
    with server.log.open("ab") as log:
        log.write(b"INFO start\nerror: no such file\nINFO stopping \xff\n")
    assert server.last_words() == "no such file"


async def test_one_of_several_that_make_rounds_may_be_away_while_another_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    run: Any = prepared(tmp_path)
    stays, leaves = run._nodes[:2]
    there = {stays.name: trio.Event(), leaves.name: trio.Event()}  # set: it is gone
    notes: list[str] = []
    failures: list[tuple[float, str]] = []

    class Client:
        def __init__(self, socket: Path) -> None:
            (self.name,) = there.keys() & {*socket.parts}

        async def __aenter__(self) -> Client:
            await trio.lowlevel.checkpoint()
            if there[self.name].is_set():
                raise testbed.NotRunning(self.name)
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    async def streamed(node: Any, _client: Client) -> None:
        await there[node.name].wait()

    async def caught_up(*_: Any) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(testbed, "AsyncControlClient", Client)
    monkeypatch.setattr(testbed.ChildNode, "last_words", lambda _: "nothing")
    run._view = SimpleNamespace(note=notes.append)
    run._fail = lambda why: failures.append((trio.current_time(), why))
    run._catch_up, run._stream = caught_up, streamed
    async with trio.open_nursery() as nursery:
        for node in (stays, leaves):
            nursery.start_soon(run._follow, node)
        await trio.sleep(1)
        there[leaves.name].set()
        await trio.sleep(600)
        assert (notes, failures) == (
            [f"{leaves.name} did not answer for 60 s; the others go on"],
            [],
        )
        there[leaves.name] = trio.Event()
        await trio.sleep(10)
        began = trio.current_time()
        for event in there.values():
            event.set()
        await trio.sleep(testbed.GONE_TIMEOUT_S + 1)
        nursery.cancel_scope.cancel()
    when, why = failures[0]
    assert when - began == pytest.approx(testbed.GONE_TIMEOUT_S, abs=1)
    assert "did not answer for 60 s: nothing" in why
