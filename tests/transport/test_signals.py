"""A signal: one waiter, no set is lost, and a wait may be cancelled."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from bbnode.transport.signals import Signal


async def test_sets_before_the_wait_count_once() -> None:
    signal = Signal()
    signal.set()
    signal.set()
    await signal.wait()
    with trio.move_on_after(0.01) as scope:
        await signal.wait()
    assert scope.cancelled_caught


async def test_sets_before_the_waiter_runs_count_once(nursery: trio.Nursery) -> None:
    signal, woken = Signal(), []

    async def wait() -> None:
        while True:
            await signal.wait()
            woken.append(True)

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    signal.set()
    signal.set()
    await trio.testing.wait_all_tasks_blocked()
    assert woken == [True]
    signal.set()
    await trio.testing.wait_all_tasks_blocked()
    assert woken == [True, True]


async def test_a_cancelled_wait_leaves_the_signal_free() -> None:
    signal = Signal()
    with trio.move_on_after(0.01):
        await signal.wait()
    signal.set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await signal.wait()
    # Cancelled before it returned: it is set still.
    with trio.fail_after(1):
        await signal.wait()


async def test_what_was_cleared_wakes_nobody() -> None:
    signal = Signal()
    signal.set()
    signal.clear()
    with trio.move_on_after(0.01) as scope:
        await signal.wait()
    assert scope.cancelled_caught


async def test_a_second_waiter_is_refused(nursery: trio.Nursery) -> None:
    signal = Signal()
    nursery.start_soon(signal.wait)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(trio.BusyResourceError):
        await signal.wait()
    signal.set()
