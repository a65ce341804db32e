"""The framework tables, each alone."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from bbnode.engine import cohorts, errors
from bbnode.engine.cohorts import Cohort, CohortEvent, CohortState, CohortTable, ResponseStatus
from bbnode.engine.counts import Counts
from bbnode.engine.empty import EMPTY
from bbnode.engine.peers import backoff_table
from bbnode.engine.peers import governor as peer_governor
from bbnode.engine.peers.address_book import AddressBook
from bbnode.engine.peers.backoff_table import BackoffTable, delay_for
from bbnode.engine.peers.governor import BlockReason, Change, Health, PeerGovernor
from bbnode.engine.rng import SplitMix64, mix64, program_rng, wire_ids
from bbnode.engine.scheduler import Scheduler, TimerKind
from bbnode.engine.snapshot.codec import SnapshotReader, SnapshotWriter
from bbnode.engine.wire.inbound import InboundDedup
from bbnode.ir.caps import MAX_ADDRESSES_PER_PEER
from bbnode.ir.refusal import WireRefusal
from tests.engine.support import MS, S, address, peer


def test_backoff_doubles_from_10_ms_to_60_s() -> None:
    assert [delay_for(n) for n in (1, 2, 3, 13)] == [10 * MS, 20 * MS, 40 * MS, 40_960 * MS]
    assert delay_for(14) == delay_for(1_000_000) == 60 * S
    table = BackoffTable()
    assert table.should_retry(peer(1), 0)
    table.record_failure(peer(1), 100)
    table.record_failure(peer(1), 100)
    assert table.get(peer(1)) == backoff_table.Backoff(attempts=2, next_retry_ns=100 + 20 * MS)
    assert not table.should_retry(peer(1), 100 + 20 * MS - 1)
    assert table.should_retry(peer(1), 100 + 20 * MS)
    table.record_success(peer(1))
    assert table.get(peer(1)) is None
    assert table.should_retry(peer(1), 0)


def test_five_failures_in_a_row_are_down_and_one_success_is_up() -> None:
    governor = PeerGovernor()
    changes = [governor.record_failure(peer(1)) for _ in range(7)]
    assert changes == [None, None, None, None, Change.WENT_DOWN, None, None]
    assert governor.health(peer(1)) is Health.DOWN
    assert governor.any_down()
    assert governor.record_success(peer(1)) is Change.CAME_UP
    assert governor.record_success(peer(1)) is None
    assert not governor.any_down()
    for _ in range(4):
        governor.record_failure(peer(1))
    governor.record_success(peer(1))
    assert [governor.record_failure(peer(1)) for _ in range(4)] == [None] * 4


def test_every_state_has_a_move_for_every_outcome() -> None:
    moves = peer_governor.TRANSITIONS
    assert set(moves) == {(h, o) for h in Health for o in peer_governor.Outcome}
    assert set(cohorts.TRANSITIONS) == {(CohortState.OPEN, h) for h in CohortEvent}


def test_lists_decide_before_cooldown() -> None:
    governor, backoff = PeerGovernor(), BackoffTable()
    backoff.record_failure(peer(1), 0)
    assert governor.check_outbound(peer(1), backoff, 1) is BlockReason.COOLDOWN
    assert governor.check_inbound(peer(1)) is None
    governor.allow_only([peer(2)])
    assert governor.check_outbound(peer(1), backoff, 1) is BlockReason.NOT_ALLOWLISTED
    governor.block(peer(2))
    assert governor.check_inbound(peer(2)) is BlockReason.BLOCKLISTED
    governor.unblock(peer(2))
    governor.allow_only(None)
    assert governor.check_inbound(peer(2)) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_the_number_of_peers_that_are_down_is_kept_right(events) -> None:
    governor = PeerGovernor(threshold=2)
    for who, ok in events:
        (governor.record_success if ok else governor.record_failure)(peer(who))
        down = [i for i in range(4) if governor.health(peer(i)) is Health.DOWN]
        assert governor.any_down() is bool(down)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("block"), st.integers(0, 2)),
            st.tuples(st.just("unblock"), st.integers(0, 2)),
            st.tuples(st.just("allow_only"), st.none() | st.sets(st.integers(0, 2))),
            st.just(("load", None)),
        )
    )
)
def test_a_governor_that_denies_nobody_says_so(steps) -> None:
    governor = PeerGovernor()
    for what, of in steps:
        if what == "load":
            writer = SnapshotWriter()
            saved = governor.state(writer)
            governor = PeerGovernor()
            governor.load(saved, SnapshotReader(writer.lists()))
        elif what == "allow_only":
            governor.allow_only(None if of is None else [peer(number) for number in of])
        else:
            getattr(governor, what)(peer(of))
        denied = [peer(number) for number in range(4) if governor.check_inbound(peer(number))]
        assert governor.denies or not denied
        # An allow list denies those that nobody here has heard of.
        assert bool(denied) == governor.denies


def test_a_count_that_was_asked_for_is_not_there_for_that() -> None:
    counts = Counts()
    assert counts["a"] == 0
    counts["b"] += 2
    assert counts == {"b": 2}
    assert {**counts} == {"b": 2}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1))))
def test_dedup_remembers_the_last_names(messages) -> None:
    window = InboundDedup(window=5)
    seen: list = []
    for who, number, site in messages:
        name = (peer(who), number, site)
        assert window.record(*name) is (name in seen)
        if name not in seen:
            seen = [*seen, name][-5:]
        assert len(window) == len(seen)


def test_an_address_book_counts_references() -> None:
    book = AddressBook()
    with pytest.raises(errors.InvalidOperand):
        book.add_peer(peer(1), [])
    book.add_peer(peer(1), [address(1)])
    book.add_peer(peer(1), [address(2), address(1)])
    assert book.lookup(peer(1)) == (address(1), address(2))
    book.drop_peer(peer(1))
    assert peer(1) in book
    book.forget_address(peer(1), address(1))
    book.register_address(peer(1), address(3))
    assert book.lookup(peer(1)) == (address(2), address(3))
    book.drop_peer(peer(1))
    assert peer(1) not in book
    assert book.lookup(peer(1)) == ()
    book.drop_peer(peer(1))


def test_a_full_book_forgets_hearsay_and_keeps_what_was_added() -> None:
    book = AddressBook(max_peers=2)
    book.observe(peer(1), address(1))
    book.add_peer(peer(2), [address(2)])
    assert book.observe(peer(3), address(3))
    assert peer(1) not in book
    book.add_peer(peer(3), [address(3)])
    assert not book.observe(peer(4), address(4))
    with pytest.raises(errors.AddressBookFull):
        book.add_peer(peer(4), [address(4)])
    for i in range(MAX_ADDRESSES_PER_PEER - 1):
        book.register_address(peer(2), address(100 + i))
    with pytest.raises(errors.AddressBookFull):
        book.register_address(peer(2), address(99))


def test_a_book_goes_out_and_comes_back() -> None:
    book = AddressBook()
    book.add_peer(peer(1), [address(1), address(2)])
    book.observe(peer(2), address(3))
    saving = SnapshotWriter()
    saved = book.state(saving)
    again = AddressBook()
    again.load(saved, SnapshotReader(saving.lists()))
    assert again.lookup(peer(1)) == (address(1), address(2))
    assert again.lookup(peer(2)) == (address(3),)
    assert again.state(SnapshotWriter()) == saved


def test_timers_mature_in_order_and_can_be_cancelled() -> None:
    timers = Scheduler()
    made = [timers.set(when, TimerKind.INTERVAL, i) for i, when in enumerate((5, 3, 5, 9))]
    timers.cancel(made[1])
    timers.cancel(made[1])
    assert len(timers) == 3
    assert timers.next_deadline() == 5
    assert [t.key for t in timers.matured(5)] == [0, 2]
    assert timers.matured(5) == []
    assert timers.next_deadline() == 9
    timers.cancel(made[3])
    assert timers.next_deadline() is None


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Scheduler()
    for i in range(10_000):
        timers.cancel(timers.set(1000 + i, TimerKind.INTERVAL, i))
    assert len(timers.heap) < 200


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200))
def test_timers_behave_like_a_sorted_list(plan) -> None:
    timers = Scheduler()
    expected = []
    for order, (when, dropped) in enumerate(plan):
        timer = timers.set(when, TimerKind.INTERVAL, order)
        if dropped:
            timers.cancel(timer)
        else:
            expected.append((when, order))
    expected.sort()
    got = []
    for now in range(21):
        got += [(t.when_ns, t.key) for t in timers.matured(now)]
        assert len(timers) == len(expected) - len(got)
    assert got == expected


def cohort(asked, needed) -> Cohort:
    return Cohort(
        wire_req_id=7, request_id=1, execution=1, name="r", needed=needed, site=1,
        asked=tuple(sorted(peer(i) for i in asked)), opened_ns=0, deadline_ns=10,
    )  # fmt: skip


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.lists(
        st.one_of(
            st.integers(0, 6),
            st.tuples(st.just("unsent"), st.integers(0, 6)),
            st.just("deadline"),
            st.just("end"),
        ),
        max_size=20,
    ),
)
def test_a_cohort_closes_once_whatever_happens(size, quorum, happenings) -> None:
    """Against a model: who answered, who could not be sent to, and whether it is closed."""
    table = CohortTable()
    made = table.open(cohort(range(size), cohorts.needed_answers(quorum, size)))
    assert all(table.sent(7, peer(i), 100 + i) for i in range(size))
    answered: dict = {}
    unsent: set = set()
    state = CohortState.OPEN

    def look(now):
        left = size - len(unsent)
        if len(answered) == size:
            return CohortState.ALL_ANSWERED
        if unsent and left < (quorum or size):
            return CohortState.BELOW_QUORUM
        return CohortState.QUORUM if len(answered) == left else now

    for what in happenings:
        closed = state is not CohortState.OPEN
        if what == "deadline":
            assert (table.deadline(7) is None) is closed
            if not closed:
                enough = len(answered) >= (quorum or size)
                state = CohortState.QUORUM if enough else CohortState.BELOW_QUORUM
        elif what == "end":
            assert (table.abandon(7) is None) is closed
            state = CohortState.ABANDONED if not closed else state
        elif isinstance(what, tuple):
            number = what[1]
            matters = not closed and number < size and number not in unsent | answered.keys()
            open_one = table.of_envelope(100 + number, peer(number))
            assert open_one is (made if matters else None)
            assert table.fail(made, peer(number), WireRefusal("NotSent", "why")) is matters
            if matters:
                unsent.add(number)
                state = look(state)
        else:
            verdict = table.answer(7, peer(what), what, 0)
            if closed:
                assert verdict is ResponseStatus.LATE
            elif what >= size:
                assert verdict is ResponseStatus.STRANGER
            elif what in answered:
                assert verdict is ResponseStatus.DUPLICATE
            else:
                answered[what] = what
                unsent.discard(what)
                state = look(state)
                over = state is not CohortState.OPEN
                assert verdict is (ResponseStatus.COMPLETE if over else ResponseStatus.ACCEPTED)
        assert made.state is state
        assert set(made.failed) == {peer(i) for i in unsent}
        if state is not CohortState.OPEN:
            assert not table.sent(7, peer(0), 1)
            assert not table._of_tag
        assert len(table) == (state is CohortState.OPEN)
    batch = made.batch()
    assert [who for who, _ in batch.responses] == sorted(peer(i) for i in answered)
    assert sorted([*batch.peers, *batch.missing]) == list(made.asked)
    assert table.answer(8, peer(0), 0, 0) is ResponseStatus.UNKNOWN


def test_a_cohort_that_asks_nobody_closes_at_once() -> None:
    table = CohortTable()
    assert table.open(cohort([], 0)).state is CohortState.ALL_ANSWERED
    assert len(table) == 0


def test_splitmix_gives_the_numbers_of_its_paper() -> None:
    # First outputs for seed 0 and 1234567, as the reference C code prints them.
    stream = SplitMix64(0, position=-1)
    assert [stream.next_u64() for _ in range(3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
    assert mix64(1234567) == 6457827717110365317


def test_ids_differ_between_peers_and_lives() -> None:
    streams = [
        wire_ids(peer(1).to_bytes(), 1), wire_ids(peer(1).to_bytes(), 2),
        wire_ids(peer(2).to_bytes(), 1), program_rng(0, 1, peer(1).to_bytes()),
        program_rng(0, 2, peer(1).to_bytes()), program_rng(1, 1, peer(1).to_bytes()),
    ]  # fmt: skip
    drawn = [stream.next_u64() for stream in streams for _ in range(500)]
    assert len(set(drawn)) == len(drawn)


def test_what_the_book_keeps_of_an_entry_follows_its_changes() -> None:
    book = AddressBook()
    encoded: list[tuple[Multiaddr, ...]] = []

    def encode(addresses) -> bytes:
        encoded.append(tuple(addresses))
        return b"%d" % len(addresses)

    assert book.routed(peer(1), encode) == ((), b"0")
    book.add_peer(peer(1), [address(1)])
    assert book.routed(peer(1), encode) == ((address(1),), b"1")
    assert book.routed(peer(1), encode) is book.routed(peer(1), encode)
    assert len(encoded) == 2
    seen = address(2)
    for _ in range(2):
        assert book.observe(peer(1), seen)
    assert book.routed(peer(1), encode) == ((address(1), seen), b"2")
    book.forget_address(peer(1), seen)
    assert book.routed(peer(1), encode) == ((address(1),), b"1")
    assert book.observe(peer(1), seen)
    assert book.lookup(peer(1)) == (address(1), seen)
    book.drop_peer(peer(1))
    assert book.routed(peer(1), encode) == ((), b"0")


# -- the empty table -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adds",
    [
        lambda: EMPTY.__setitem__(1, 2),
        lambda: EMPTY.setdefault(1, 2),
        lambda: EMPTY.update({1: 2}),
        lambda: EMPTY.update(a=1),
        lambda: operator.ior(EMPTY, {1: 2}),
    ],
)
def test_nothing_is_added_to_the_table_that_all_nodes_share(adds) -> None:
    with pytest.raises(TypeError, match="is shared"):
        adds()
    assert not EMPTY
    assert (EMPTY.get(1), EMPTY.pop(1, None), list(EMPTY)) == (None, None, [])


def test_what_one_table_keeps_is_not_in_another_that_was_empty() -> None:
    one, other = BackoffTable(), BackoffTable()
    one.record_failure(peer(1), 0)
    assert (len(one), len(other)) == (1, 0)
