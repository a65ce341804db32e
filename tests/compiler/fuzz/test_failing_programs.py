"""Random programs in which one op fails, or one peer: it is told at once to whoever waits.

Rule: which op fails is drawn from the program's tape, of all calls of components that the whole
program makes on all peers. Nothing here knows what depends on it; that every execution comes to
an end, and tells of each output what became of it, does not depend on that.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.dsl import syscalls
from bbnode.engine import Limits, steps
from bbnode.ir.values import ResponseBatch
from bbnode.sim.invariants import check_at_rest
from tests.compiler.fuzz import world
from tests.compiler.fuzz.components import FUSE
from tests.compiler.fuzz.oracle import Oracle
from tests.compiler.fuzz.random_programs import Action, RandomProgram, Scope
from tests.compiler.fuzz.tape import Tape
from tests.compiler.fuzz.wide_programs import DEADLINE_S, WideRecording

NS_PER_S = 1_000_000_000
AT_ONCE_NS = 1 * NS_PER_S  # a thousand times over a link, and far below any deadline
GRACE_NS = (Limits().lost_peer_grace_ms or 0) * 1_000_000
SOURCE_LINE = re.compile(r"\.py:\d+")
NUMBERS = st.lists(st.integers(0, (1 << 16) - 1), min_size=20, max_size=160)


class FailingRecording(WideRecording):
    """Every request has a deadline, and some do with fewer answers."""

    def actions(self) -> tuple[Action, ...]:
        return (*super().actions(), *[self.request] * 4)

    def terms(self, count: int) -> dict[str, Any]:
        quorum = self.tape.pick(count + 1)
        self.program.is_partial |= 0 < quorum < count
        return {"quorum": quorum, "deadline": DEADLINE_S}

    def syscall(self, scope: Scope) -> None:
        """No records: a node keeps them on purpose, and so would not be at rest."""
        value, size = scope.tensor(self.tape)
        scope.tensors.append((syscalls.pass_through(self.g, value), size))


class FailingProgram(RandomProgram):
    """`is_partial`: it goes on with fewer answers than there are peers, so with other values."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers, recording=FailingRecording)
        self.is_partial = False


def check_end(run: world.Run, oracle: Oracle, limit_ns: int) -> None:
    """The invoked execution has ended, in time, and says what became of each of its outputs."""
    check_at_rest(run.network)
    for node in run.network.nodes:
        assert not node.is_up or not list(node.node.waiting()), node
        check_failures(node.failures())
    if not run.home.is_up:
        return
    ((at_ns, end),) = [
        (at, step)
        for at, step in run.home.history()
        if isinstance(step, steps.ExecutionFinished) and step.execution == run.execution
    ]
    assert at_ns - run.invoked_ns <= limit_ns
    own = [each for each in run.home.failures() if each.execution == run.execution]
    assert end.failures == len(own)
    assert end.ok == (not own), (end, own)
    assert own or {*run.home.outputs(run.execution)} >= oracle.first


def check_failures(found: list[steps.OpFailed]) -> None:
    for failed in found:
        assert failed.kind, failed
        assert failed.detail, failed
        assert SOURCE_LINE.search(failed.line), failed


def check_reasons(run: world.Run) -> None:
    """Who asked was told which peer has failed, and of what."""
    failed = [(node, each) for node in run.network.nodes for each in node.failures()]
    kinds = {each.kind for _, each in failed}
    peers = {str(node.peer_id) for node, _ in failed}
    for _, each in failed:
        if each.kind == "QuorumNotReached":
            assert any(kind in each.detail for kind in kinds), each
            assert any(peer in each.detail for peer in peers), each
    for node in run.network.nodes:
        for event in node.seen(steps.AppEvent):
            if isinstance(event.value, ResponseBatch):
                reasons = dict(event.value.reasons)
                assert {reason.kind for reason in reasons.values()} <= kinds
                assert set(reasons) == set(event.value.missing)


def check_fuse(numbers: list[int]) -> set[str]:
    """Fail some calls of components, one in each run; gives the kinds of failures that follow."""
    program = FailingProgram(numbers)
    recorded = program.build()
    wanted, oracle = world.meant(program, recorded)
    compiled = world.compiler_for(recorded).compile(recorded)
    FUSE.light(None)
    world.invoked(program, compiled).network.run_until_idle()
    calls = FUSE.calls
    kinds: set[str] = set()
    for number in {sum(numbers) % calls, calls // 2, calls - 1} if calls else ():
        FUSE.light(number)
        try:
            run = world.invoked(program, compiled)
            run.network.run_until_idle()
        finally:
            FUSE.light(None)
        check_end(run, oracle, AT_ONCE_NS)
        check_reasons(run)
        failed = Counter(each.kind for node in run.network.nodes for each in node.failures())
        assert failed["ComponentError"] == 1, failed
        assert failed.keys() <= {"ComponentError", "QuorumNotReached", "JoinIncomplete"}, failed
        if not program.is_partial:
            meant = world.multisets(wanted)
            for at, values in world.multisets(world.handed_out(run)).items():
                assert Counter(values) <= Counter(meant.get(at, ())), at
        kinds |= set(failed)
    return kinds


def check_crash(numbers: list[int]) -> set[str]:
    """Crash a peer at some time; gives the kinds of failures that follow."""
    program = FailingProgram(numbers)
    recorded = program.build()
    _, oracle = world.meant(program, recorded)
    compiled = world.compiler_for(recorded).compile(recorded)
    unharmed = world.invoked(program, compiled)
    unharmed.network.run_until_idle()
    if len(unharmed.network.nodes) < 2:
        return set()
    run = world.invoked(program, compiled)
    tape = Tape(numbers[::-1])
    victim = tape.choose(run.network.nodes[1:])
    took_ns = last_ns(unharmed) - unharmed.invoked_ns
    at_ns = run.invoked_ns + tape.pick(took_ns + 1)
    run.network.at(at_ns, lambda: run.network.crash(victim))
    run.network.run_until_idle()
    check_end(run, oracle, took_ns + GRACE_NS + AT_ONCE_NS)
    return {each.kind for node in run.network.nodes for each in node.failures()}


def last_ns(run: world.Run) -> int:
    return max(at for node in run.network.nodes for at, _ in node.history())


@settings(max_examples=40)
@given(NUMBERS)
def test_an_op_that_fails_is_told_to_whoever_waits(numbers: list[int]) -> None:
    check_fuse(numbers)


@settings(max_examples=40)
@given(NUMBERS)
def test_a_peer_that_crashes_is_told_to_whoever_waits(numbers: list[int]) -> None:
    check_crash(numbers)


@pytest.mark.slow
@settings(max_examples=3000)
@given(NUMBERS)
def test_failing_ops_long(numbers: list[int]) -> None:
    check_fuse(numbers)


@pytest.mark.slow
@settings(max_examples=1500)
@given(NUMBERS)
def test_crashing_peers_long(numbers: list[int]) -> None:
    check_crash(numbers)


def test_failures_reach_those_who_asked() -> None:
    """The tapes are such that requests fail too; otherwise nothing above says anything."""
    tapes = [[(n * 7919 + i * 104_729) ** 2 % 65_521 for i in range(100)] for n in range(30)]
    assert any("QuorumNotReached" in check_fuse(tape) for tape in tapes)
    assert any("QuorumNotReached" in check_crash(tape) for tape in tapes)
