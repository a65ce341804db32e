"""The looks at links: when they come, and that many share a wake-up."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from bbnode.transport.links.life import COARSE_S, FINE_S, Looks


class Seen:
    """A link that notes when it is looked at, and asks again if it is to."""

    def __init__(self, looks: Looks, every_s: float = math.inf) -> None:
        self.at: list[float] = []
        self.due: list[float] = []
        self._looks = looks
        self._every_s = every_s

    def look(self, due_s: float) -> None:
        now = trio.current_time()
        self.at.append(now)
        self.due.append(due_s)
        self._looks.ask(self, now + self._every_s)


@pytest.fixture
async def looks(nursery) -> Looks:
    made = Looks()
    nursery.start_soon(made.run)
    return made


@pytest.mark.parametrize("ask_s", [0.02, 0.0204, 0.9999, 1.0, 4.97, 5.0, 15.01])
async def test_a_look_comes_when_it_was_asked_for_or_soon_after(looks, autojump_clock, ask_s):
    seen, asked_s = Seen(looks), trio.current_time() + ask_s
    looks.ask(seen, asked_s)
    await trio.sleep(20.0)
    (at,) = seen.at
    assert asked_s <= at <= asked_s + (FINE_S if ask_s < 1.0 else COARSE_S) + 1e-9


async def test_what_is_asked_for_sooner_comes_sooner_and_the_rest_still_comes(
    looks, autojump_clock
):
    late, early = Seen(looks), Seen(looks)
    looks.ask(late, trio.current_time() + 5.0)
    await trio.testing.wait_all_tasks_blocked()
    looks.ask(early, trio.current_time() + 0.5)
    looks.ask(late, trio.current_time() + 0.7)
    await trio.sleep(10.0)
    assert len(early.at) == 1
    assert len(late.at) == 2
    assert early.at[0] < late.at[0] < late.at[1]


async def test_asking_again_for_the_same_time_and_for_never_is_one_look(looks, autojump_clock):
    seen = Seen(looks)
    for _ in range(1000):
        looks.ask(seen, 5.0)
        looks.ask(seen, math.inf)
    await trio.sleep(100.0)
    assert len(seen.at) == 1
    assert not looks._times
    assert not looks._asked


async def test_a_thousand_links_share_few_wake_ups(looks, autojump_clock):
    started, links = trio.current_time(), [Seen(looks, every_s=5.0) for _ in range(1000)]
    for number, link in enumerate(links):
        looks.ask(link, started + 5.0 + number / 200)
    await trio.sleep(20.0)
    assert all(len(link.at) >= 2 for link in links)
    wake_ups = {at for link in links for at in link.at}
    assert len(wake_ups) <= 20.0 / COARSE_S


@given(now=st.floats(0, 1e7), after=st.floats(0, 100))
async def test_no_rounding_makes_a_look_early(now: float, after: float) -> None:
    looks = Looks()
    asked_s = trio.current_time() + after + now
    looks.ask(Seen(looks), asked_s)
    assert looks._times[0] * FINE_S >= asked_s
