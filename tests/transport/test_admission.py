"""Who gets a place for a connection: plain values in, decisions out, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bbnode.access.decision import Standing
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Counters
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.admission import (
    GRACE_S,
    Admission,
    Place,
    Stage,
    prefixes_of,
    reserved,
)

LIMITS = TransportLimits(
    max_connections=8,
    reserved_connections=2,
    max_waiting=6,
    waiting_per_address=2,
    waiting_per_network=4,
    strangers_per_address=2,
    strangers_per_network=3,
    max_guests=2,
    idle_stranger_s=10.0,
)
PEERS = [PeerId.from_seed(f"peer {n}") for n in range(40)]
KNOWN = frozenset(PEERS[:10])
LOCAL, GLOBAL = "192.168.7.7", "8.8.8.8"


class Door:
    """An Admission, and who was dropped by it."""

    def __init__(self, limits: TransportLimits = LIMITS, known=KNOWN) -> None:
        self.known = set(known)
        self.counters = Counters()
        self.admission = Admission(limits, self.counters, self.known.__contains__)
        self.dropped: list[int] = []
        self.made = 0

    def accept(self, address: str = LOCAL, now: float = 0.0) -> Place | None:
        self.made += 1
        number = self.made
        return self.admission.accept(address, now, lambda _why: self.dropped.append(number))

    def settle(
        self, peer: PeerId, address: str = LOCAL, now: float = 0.0, standing=Standing.STRANGER
    ) -> tuple[Place, str]:
        place = self.accept(address, now)
        assert place is not None
        self.admission.secured(place, peer)
        return place, self.admission.hello(place, peer, standing, now)

    def count(self, name: str) -> int:
        return self.counters.snapshot()[name]


@pytest.mark.parametrize(
    ("address", "prefixes", "bounded"),
    [
        ("8.8.4.4", ("8.8.4.4/32", "8.8.4.0/24"), True),
        ("::ffff:8.8.4.4", ("8.8.4.4/32", "8.8.4.0/24"), True),
        ("127.0.0.1", ("127.0.0.1/32", "127.0.0.0/24"), False),
        ("172.17.3.4", ("172.17.3.4/32", "172.17.3.0/24"), False),
        ("2600:1:2:3:4::5", ("2600:1:2:3::/64", "2600:1:2::/48"), True),
        ("fe80::1%eth0", ("fe80::/64", "fe80::/48"), False),
        ("", ("relayed",), False),
    ],
)
def test_prefixes(address, prefixes, bounded):
    assert prefixes_of(address) == (prefixes, bounded)


def test_silent_sockets_shut_no_newcomer_out():
    door = Door()
    silent = [door.accept(now=n / 10) for n in range(6)]
    assert None not in silent
    # All of them are within their grace: the newcomer tries again.
    assert door.accept(now=0.45) is None
    assert (door.count("sockets.refused"), door.dropped) == (1, [])
    # The oldest goes for the newcomer, however many come.
    for n in range(20):
        assert door.accept(now=1.0 + n) is not None
    assert door.dropped[:6] == [1, 2, 3, 4, 5, 6]
    assert door.admission.waiting == 6
    assert door.count("sockets.dropped") == 20


def test_who_speaks_is_dropped_after_who_is_silent():
    door = Door()
    places = [door.accept(now=n / 10) for n in range(6)]
    for place in places[:5]:
        door.admission.heard(place)
    newest = door.accept(now=1.2)
    assert newest is not None
    assert door.dropped == [6]
    door.admission.heard(newest)
    # Those that speak have more time.
    assert door.accept(now=1.4) is None
    assert door.accept(now=GRACE_S[Stage.SPEAKING]) is not None
    assert door.dropped == [6, 1]


def test_who_was_not_read_yet_is_not_silent():
    door = Door()
    places = [door.accept(now=n / 10) for n in range(6)]
    assert places[0] is not None
    places[0].has_spoken = lambda: True
    assert door.accept(now=1.0) is not None
    assert door.dropped == [2]
    assert places[0].stage is Stage.SPEAKING


def test_a_crowded_prefix_pays_for_its_crowd():
    door = Door(replace(LIMITS, waiting_per_address=6, waiting_per_network=6))
    door.accept("9.9.9.9", now=0.0)
    for n in range(5):
        door.accept(f"8.8.8.{n}", now=1.0 + n / 10)
    assert door.accept("7.7.7.7", now=9.0) is not None
    # Not the one that waits for longest: it is alone.
    assert door.dropped == [2]


def test_bounds_of_a_prefix():
    door = Door()
    assert all(door.accept(GLOBAL) for _ in range(2))
    assert door.accept(GLOBAL, now=0.1) is None
    assert all(door.accept("8.8.8.9", now=0.1) for _ in range(2))
    assert door.accept("8.8.8.10", now=0.1) is None
    # Others come in, and after a while a newcomer takes the place of a neighbour.
    assert door.accept("1.1.1.1", now=0.1) is not None
    assert door.accept(GLOBAL, now=5.0) is not None
    assert door.dropped == [1]
    # Where addresses are not global one of them stands for many peers.
    lan = Door()
    assert all(lan.accept(LOCAL) is not None for _ in range(6))


def test_a_known_peer_is_not_dropped_for_a_newcomer():
    door = Door(replace(LIMITS, max_waiting=1))
    place = door.accept(now=0.0)
    door.admission.secured(place, PEERS[0])
    assert door.accept(now=100.0) is None
    assert door.dropped == []


def test_strangers_leave_the_reserve_to_those_we_know():
    door = Door(replace(LIMITS, strangers_per_address=99, strangers_per_network=99))
    for peer in PEERS[10:16]:
        assert door.settle(peer)[1] == ""
    assert "strangers are taken" in door.settle(PEERS[16])[1]
    # The reserve, and then the strangers' places: the oldest goes first.
    for peer in PEERS[:4]:
        assert door.settle(peer)[1] == ""
    assert door.admission.settled == 8
    assert len(door.dropped) == 2
    assert door.settle(PEERS[20], standing=Standing.MEMBER)[1] == ""
    # Members shut out only strangers, never each other.
    for peer in PEERS[4:7]:
        assert door.settle(peer)[1] == ""
    assert (door.admission.settled, door.admission.strangers) == (8, 0)
    assert "taken by members" in door.settle(PEERS[7])[1]
    assert door.count("links.evicted") == 6


def test_an_idle_stranger_goes_for_another_and_a_useful_one_stays():
    door = Door(replace(LIMITS, strangers_per_address=99, strangers_per_network=99))
    for n, peer in enumerate(PEERS[10:16]):
        assert door.settle(peer, now=n / 10)[1] == ""
    # We have dealt with the oldest meanwhile.
    door.known.add(PEERS[10])
    assert door.settle(PEERS[16], now=5.0)[1] == ""
    assert door.dropped == []
    assert door.settle(PEERS[17], now=11.0)[1] == ""
    assert door.dropped == [2]


def test_strangers_of_one_prefix_do_not_shut_out_the_others():
    door = Door()
    assert door.settle(PEERS[10], GLOBAL)[1] == door.settle(PEERS[11], GLOBAL)[1] == ""
    assert "8.8.8.8/32" in door.settle(PEERS[12], GLOBAL)[1]
    assert door.settle(PEERS[12], "8.8.8.9")[1] == ""
    assert "8.8.8.0/24" in door.settle(PEERS[13], "8.8.8.10")[1]
    assert door.settle(PEERS[13], "1.1.1.1")[1] == ""
    # Whom we know comes from there as well.
    assert door.settle(PEERS[0], GLOBAL)[1] == ""


def test_a_peer_replaces_its_own_connection_when_all_is_full():
    door = Door()
    for n, peer in enumerate(PEERS[:8]):
        assert door.settle(peer, f"8.8.{n}.8")[1] == ""
    assert door.settle(PEERS[8])[1]
    place, reason = door.settle(PEERS[0], GLOBAL)
    assert reason == ""
    door.admission.left(place)
    door.admission.left(place)
    assert door.admission.settled == 8


def test_few_guests_at_a_time():
    door = Door()
    first, _ = door.settle(PEERS[10], standing=Standing.GUEST)
    assert door.settle(PEERS[11], standing=Standing.GUEST)[1] == ""
    assert "guests" in door.settle(PEERS[12], standing=Standing.GUEST)[1]
    door.admission.left(first)
    assert door.settle(PEERS[12], standing=Standing.GUEST)[1] == ""


def test_whom_we_dial_does_not_wait():
    door = Door(replace(LIMITS, max_waiting=1))
    door.accept()
    place = door.admission.dial(PEERS[30], 0.0, lambda _why: None)
    assert door.admission.hello(place, PEERS[30], Standing.STRANGER, 0.0) == ""
    assert (door.admission.settled, door.admission.strangers) == (1, 0)


def test_the_reserve_is_at_most_a_quarter():
    assert reserved(TransportLimits()) == 256
    assert reserved(TransportLimits(max_connections=8)) == 2


def test_a_flooding_strangers_prefix_gets_no_connection_for_a_while():
    door = Door()
    place = door.accept(GLOBAL)
    assert place is not None
    door.admission.flooded(place, 0.0)
    door.admission.left(place)
    assert door.accept(GLOBAL, 9.9) is None
    assert door.count("sockets.cooling") == 1
    # Its neighbours are others.
    assert door.accept("8.8.8.9", 9.9) is not None
    again = door.accept(GLOBAL, 10.0)
    assert again is not None
    door.admission.flooded(again, 10.0)
    assert door.accept(GLOBAL, 29.9) is None
    assert door.accept(GLOBAL, 30.0) is not None


def test_cooling_is_twice_as_long_each_time_up_to_a_bound_and_is_forgotten():
    door, now = Door(), 0.0
    for seconds in (10, 20, 40, 80, 160, 320, 600, 600):
        place = door.accept(GLOBAL, now)
        assert place is not None
        door.admission.flooded(place, now)
        # One of the same time says nothing new.
        door.admission.flooded(place, now)
        door.admission.left(place)
        assert door.accept(GLOBAL, now + seconds - 0.1) is None
        now += seconds
    now += 600
    place = door.accept(GLOBAL, now)
    assert place is not None
    door.admission.flooded(place, now)
    assert door.accept(GLOBAL, now + 10) is not None


def test_a_prefix_where_a_member_is_stays_open_and_a_member_never_closes_it():
    door = Door()
    member, _ = door.settle(PEERS[20], GLOBAL, standing=Standing.MEMBER)
    stranger = door.accept(GLOBAL)
    assert stranger is not None
    door.admission.flooded(stranger, 0.0)
    assert door.accept(GLOBAL, 1.0) is not None
    door.admission.left(member)
    assert door.accept(GLOBAL, 2.0) is None
    other, _ = door.settle(PEERS[21], "9.9.9.9", standing=Standing.MEMBER)
    door.admission.flooded(other, 3.0)
    assert door.accept("9.9.9.9", 4.0) is not None


def test_addresses_that_many_share_do_not_cool():
    door = Door()
    for address in (LOCAL, "127.0.0.1", ""):
        place = door.accept(address)
        assert place is not None
        door.admission.flooded(place, 0.0)
        door.admission.left(place)
        assert door.accept(address) is not None


def test_who_is_admitted_has_a_share_of_its_own():
    door = Door()
    member, _ = door.settle(PEERS[20], standing=Standing.MEMBER)
    known, _ = door.settle(PEERS[1])
    stranger, _ = door.settle(PEERS[21])
    guest, _ = door.settle(PEERS[22], standing=Standing.GUEST)
    dialled = door.admission.dial(PEERS[23], 0.0, lambda _why: None)
    places = (member, known, stranger, guest, dialled)
    assert [each.share.is_admitted for each in places] == [True, True, False, False, True]


def crowd(number: int) -> str:
    """The address of an attacker: one of a botnet of 4,096 global addresses, in 16 networks."""
    return f"203.{number % 16}.{number // 16 % 256}.{number % 7 + 1}"


@pytest.mark.parametrize("address", [lambda _n: LOCAL, crowd], ids=["one address", "a botnet"])
def test_two_thousand_strangers_keep_no_member_out(address):
    """The bounds of a real node: strangers have all places that they get, and go on coming."""
    limits = TransportLimits()
    members = [PeerId.from_seed(f"member {n}") for n in range(400)]
    door, now = Door(limits, known=members[:100]), 0.0
    most = limits.max_connections - reserved(limits)
    number = 0
    while door.admission.strangers < most:
        number += 1
        now += 0.01
        door.settle(PeerId.from_seed(f"stranger {number}"), address(number), now)
        assert number < 3 * most
    for each, peer in enumerate(members):
        # Two strangers for each of them; a hundred are known, the others show a membership.
        for _ in range(2):
            number += 1
            now += 0.01
            door.settle(PeerId.from_seed(f"stranger {number}"), address(number), now)
        standing = Standing.STRANGER if each < 100 else Standing.MEMBER
        _, reason = door.settle(peer, "8.8.8.8" if each < 60 else LOCAL, now, standing)
        assert reason == ""
        assert door.admission.settled <= limits.max_connections
    # Beyond those that are kept for them, members have taken the places of strangers.
    assert door.admission.settled == limits.max_connections
    assert door.admission.strangers == limits.max_connections - len(members)


def test_a_member_finds_a_place_to_wait_among_sockets_that_come_all_the_time():
    """Five hundred silent sockets a second; it tries again as a dialler does."""
    limits = TransportLimits()
    door, now = Door(limits), 0.0
    for _ in range(1000):
        now += 0.002
        door.accept(LOCAL, now)
    assert door.admission.waiting == limits.max_waiting
    tried = []
    for delay_s in (0.2, 0.4, 0.8, 1.6, 3.2):
        until = now + delay_s
        while now < until:
            now += 0.002
            door.accept(LOCAL, now)
        place = door.accept(LOCAL, now)
        tried.append(place is not None)
        if place is None:
            continue
        door.admission.heard(place)
        # It keeps the place for long enough to say hello, whoever comes.
        for _ in range(300):
            now += 0.002
            door.accept(LOCAL, now)
        door.admission.secured(place, PEERS[0])
        assert door.admission.hello(place, PEERS[0], Standing.MEMBER, now) == ""
    assert any(tried)


class Doors(RuleBasedStateMachine):
    """Any order of arrivals, hellos and ends: no bound is ever exceeded, no entry left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: list[Place] = []
        self.admission = Admission(LIMITS, Counters(), KNOWN.__contains__)

    def _drop(self, place: Place) -> None:
        self.alive.remove(place)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        address=st.sampled_from(
            [LOCAL, "", GLOBAL, "8.8.8.9", "1.1.1.1", "2600::1", "2600:0:0:1::"]
        )
    )
    def accept(self, address: str) -> None:
        place = self.admission.accept(address, self.now, lambda _why: self._drop(place))
        if place is not None:
            self.alive.append(place)

    @rule(at=st.integers(0, 30), peer=st.sampled_from(PEERS), standing=st.sampled_from(Standing))
    def come_on(self, at: int, peer: PeerId, standing: Standing) -> None:
        if not self.alive:
            return
        place = self.alive[at % len(self.alive)]
        if place.stage is Stage.SILENT:
            self.admission.heard(place)
        elif place.stage is Stage.SPEAKING:
            self.admission.secured(place, peer)
        elif place.stage is Stage.SECURED:
            assert place.peer is not None
            if place.peer in KNOWN and self._known_fill() < LIMITS.max_connections:
                # Whatever strangers do, there is room for whom we know.
                assert not self.admission.hello(place, place.peer, Standing.STRANGER, self.now)
            elif self.admission.hello(place, place.peer, standing, self.now):
                self.alive.remove(place)

    def _known_fill(self) -> int:
        return sum(
            each.stage is Stage.SETTLED and each.standing is not Standing.STRANGER
            for each in self.alive
        )

    @rule(at=st.integers(0, 30))
    def leave(self, at: int) -> None:
        if self.alive:
            place = self.alive.pop(at % len(self.alive))
            self.admission.left(place)

    @invariant()
    def within_the_bounds(self) -> None:
        waiting = [p for p in self.alive if p.stage is not Stage.SETTLED]
        settled = [p for p in self.alive if p.stage is Stage.SETTLED]
        assert self.admission.waiting == len(waiting) <= LIMITS.max_waiting
        assert self.admission.settled == len(settled)
        extra = len(settled) - len({p.peer for p in settled})
        assert len(settled) - extra <= LIMITS.max_connections
        strangers = [p for p in settled if p.standing is Standing.STRANGER]
        extra = len(strangers) - len({p.peer for p in strangers})
        assert len(strangers) - extra <= LIMITS.max_connections - reserved(LIMITS)
        for prefix in {p.prefixes[0] for p in waiting if p.bounded}:
            assert sum(prefix in p.prefixes for p in waiting) <= LIMITS.waiting_per_address


TestDoors = Doors.TestCase
TestDoors.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
