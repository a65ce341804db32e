"""The progress of a joined node, as lines and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import trio
import trio.testing
from rich.console import Console

from bbnode.daemon.join.view import JoinView
from tests.daemon.live import CLIENT, SERVER, Live, running


async def shown(live: Live, view: JoinView) -> None:
    """Run the view beside a node that has a round, is asked to stop, and loses its peer."""
    with view:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(view.run, live.plane.host)
            await trio.testing.wait_all_tasks_blocked()
            live.plane.publish({"type": "peer_up", "peer": str(CLIENT), "classes": ["client"]})
            live.plane.publish({"type": "telemetry"})
            live.plane.publish({"type": "peer_down", "peer": str(SERVER), "reason": "\x1b[2J"})
            live.plane.publish({"type": "stopping"})
            await live.plane.finish()


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    made = Console(file=out, force_terminal=terminal, width=120, highlight=False, markup=False)
    return made, out


async def test_lines_say_what_happened_once(tmp_path: Path) -> None:
    made, out = console(terminal=False)
    async with running(tmp_path) as live:
        await shown(live, JoinView(made, inviter=str(SERVER)))
    lines = out.getvalue().splitlines()
    assert f"connected with …{CLIENT.short}, which plays client" in lines
    assert f"lost …{SERVER.short} (inviter): �[2J" in lines
    assert "leaving" in lines
    told = [line for line in lines if "executions, waiting for a round to begin" in line]
    assert len(told) == 1


async def test_a_terminal_has_peers_and_what_is_waited_for(tmp_path: Path) -> None:
    made, out = console(terminal=True)
    async with running(tmp_path) as live:
        await shown(live, JoinView(made, inviter=str(CLIENT)))
    text = out.getvalue()
    assert f"…{CLIENT.short} (inviter)" in text
    assert "direct" in text
    assert "Ctrl-C leaves" in text
    assert "\x1b[2J" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


async def test_a_node_that_nobody_answers_says_so(tmp_path: Path) -> None:
    made, out = console(terminal=True)
    async with running(tmp_path, client=False) as live:
        live.backend.keep_connected(CLIENT, live.backend.listen_addresses())
        await shown(live, JoinView(made, inviter=str(CLIENT)))
    assert f"not connected: …{CLIENT.short}" in out.getvalue()
    assert str(CLIENT) not in out.getvalue()


@pytest.mark.parametrize("field", ["detail", "source_peer"])
@pytest.mark.parametrize("terminal", [False, True])
async def test_no_line_has_a_whole_peer_id(tmp_path: Path, terminal: bool, field: str) -> None:
    made, out = console(terminal=terminal)
    failed = {"op": "Train_0", "kind": "Odd", "detail": "", "line": "", "module": "", "inner": ""}
    async with running(tmp_path) as live:
        view = JoinView(made, inviter=str(SERVER))
        with view:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(view.run, live.plane.host)
                await trio.testing.wait_all_tasks_blocked()
                why = f"refused by {CLIENT}"
                for event in (
                    {"type": "ready", "peer_id": str(CLIENT)},
                    {"type": "op_failed", **failed, field: why},
                    {"type": "peer_down", "peer": str(SERVER), "reason": why},
                    {"type": "peer.not_ready", "peer": str(SERVER), "reason": why},
                    {"type": "data_differ", "peer": str(SERVER), "reason": why},
                ):
                    live.plane.publish(event)
                    await trio.testing.wait_all_tasks_blocked()
                    view._show(live.plane.host)
                await live.plane.finish()
    text = out.getvalue()
    assert f"…{CLIENT.short}" in text
    assert str(CLIENT) not in text


async def test_a_failure_that_goes_on_is_shown_once_a_minute(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    made, out = console(terminal=False)
    async with running(tmp_path) as live:
        view = JoinView(made, inviter=str(SERVER))
        failed = {"op": "Sample_0", "kind": "NotEnoughPeers", "line": "", "module": "", "inner": ""}
        with view:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(view.run, live.plane.host)
                for number in range(1, 70):
                    await trio.sleep(1)
                    detail = {"type": "op_failed", "detail": "nobody is there", **failed}
                    live.plane.publish(detail | {"execution": number})
                    ended = {"round": number, "ok": False, "failures": ["nobody is there"]}
                    live.plane.publish({"type": "round_finished", **ended})
                await live.plane.finish()
    lines = [line for line in out.getvalue().splitlines() if "failed" in line]
    assert lines == [
        "failed: Sample_0: NotEnoughPeers: nobody is there",
        "round 1 failed",
        "failed: Sample_0: NotEnoughPeers: nobody is there (59 more since the last line)",
        "round 61 failed (59 more since the last line)",
    ]
