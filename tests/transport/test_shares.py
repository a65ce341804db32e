"""The price of frames and the share of a core: plain numbers, in virtual time."""

from __future__ import annotations

import pytest
import trio

from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.shares import TURN_US, Bucket, CoreShare, CoreShares

# A thousandth of a core for a stranger, a hundredth for all of them, and hardly any credit.
LIMITS = TransportLimits(
    strangers_core=0.01,
    strangers_burst_s=0.001,
    stranger_core=0.001,
    member_core=0.5,
    core_burst_s=0.001,
    indebted_s=5.0,
    idle_frames=8,
    idle_frames_per_s=2.0,
)
PEER = PeerId.from_seed("a peer")


def shares_of(known=lambda _peer: False) -> CoreShares:
    return CoreShares(LIMITS, Counters(), known)


async def work(share: CoreShare, us: int) -> str:
    """One turn that costs this much; why the connection ends instead."""
    if reason := await share.begin():
        return reason
    share.due_us += us - TURN_US
    await share.end()
    return ""


def test_a_bucket_may_be_overdrawn_and_says_until_when():
    bucket = Bucket(2.0, 4.0)
    assert bucket.take(3.0, 100.0) == 1.0
    assert bucket.take(5.0, 100.0) == -4.0
    assert bucket.wait_s(100.0) == 2.0
    assert bucket.wait_s(101.0) == 1.0
    # It never has more than its bound, and time never goes back.
    assert bucket.take(0.0, 1e6) == bucket.take(0.0, 0.0) == 4.0


async def test_a_stranger_gets_its_share_and_no_more(autojump_clock):
    share = CoreShare(shares_of())
    for _ in range(20):
        assert await work(share, 1000) == ""
        # It rests for a moment, and is not one that never pays.
        await trio.sleep(1.5)
    start = trio.current_time()
    await work(share, 3000)
    assert await work(share, 1000) == ""
    assert trio.current_time() - start == pytest.approx(2.0, abs=0.1)


async def test_who_is_always_in_debt_is_cut_off_unless_it_has_standing(autojump_clock):
    shares = shares_of()
    stranger, member = CoreShare(shares), CoreShare(shares)
    member.admit()
    start = trio.current_time()
    while not (reason := await work(stranger, 1000)):
        assert trio.current_time() - start < 3 * LIMITS.indebted_s
    assert "all of its share for 5 s" in reason
    assert trio.current_time() - start >= LIMITS.indebted_s
    start = trio.current_time()
    for _ in range(20):
        assert await work(member, 1_000_000) == ""
    assert trio.current_time() - start == pytest.approx(38.0, abs=0.5)


async def test_all_strangers_together_have_a_share(autojump_clock):
    shares = shares_of()
    done = 0

    async def one() -> None:
        nonlocal done
        share = CoreShare(shares)
        while not await work(share, 100):
            done += 100

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(one)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert done == pytest.approx(LIMITS.strangers_core * 10 * 1e6, rel=0.05)
    assert shares.counters.snapshot()["inbound.throttled"] > 64


async def test_members_do_not_stand_behind_strangers(autojump_clock):
    shares = shares_of()
    stranger, member = CoreShare(shares), CoreShare(shares)
    member.admit()
    await work(stranger, 50_000)
    start = trio.current_time()
    assert await work(member, 100) == ""
    assert trio.current_time() == start


async def test_strangers_take_turns_one_a_round_of_the_loop(autojump_clock):
    shares = CoreShares(TransportLimits(), Counters(), lambda _peer: False)
    order: list[str] = []

    async def busy(name: str) -> None:
        share = CoreShare(shares)
        for _ in range(3):
            await share.begin()
            order.append(name)
            await share.end()

    async def honest() -> None:
        for _ in range(40):
            order.append("-")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(honest)
        for name in "abc":
            nursery.start_soon(busy, name)
    turns = "".join(order)
    assert sorted(turns.replace("-", "")) == list("aaabbbccc")
    # Between two turns of strangers everybody else has had one.
    assert max(map(len, turns.rstrip("-").split("-"))) <= 2


async def test_who_becomes_known_is_admitted_at_the_next_turn(autojump_clock):
    known: set[PeerId] = set()
    share = CoreShare(shares_of(known.__contains__))
    await work(share, 50_000)
    share.settle(PEER)
    known.add(PEER)
    start = trio.current_time()
    await work(share, 100)
    assert share.is_admitted
    await work(share, 100)
    assert trio.current_time() - start < 1.0


async def test_waiting_puts_the_deadline_off_and_is_not_the_peers_delay(autojump_clock):
    share = CoreShare(shares_of())
    await work(share, 4000)
    with trio.move_on_after(1.0) as scope:
        assert await share.begin(scope) == ""
        await share.end()
    assert not scope.cancelled_caught
    waited = share.waited_s(trio.current_time())
    assert waited == pytest.approx(3.0, abs=0.1)
    assert scope.deadline == pytest.approx(1.0 + waited)


async def test_who_is_cancelled_in_the_line_leaves_it(autojump_clock):
    shares = shares_of()
    first, second = CoreShare(shares), CoreShare(shares)
    await work(first, 100_000)
    with trio.move_on_after(0.5):
        await second.begin()
    assert not shares.strangers.line.locked()
    assert await work(second, 100) == ""


async def test_senseless_frames_have_a_bound_of_their_own(autojump_clock):
    share = CoreShare(shares_of())
    assert [share.idle(1) for _ in range(8)] == [""] * 8
    assert "frames that mean nothing: over 8 at once, and 2 a second" in share.idle(1)
    await trio.sleep(4)
    assert share.idle(4) == ""
