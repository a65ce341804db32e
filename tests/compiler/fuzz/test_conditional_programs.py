"""Random programs with conditions: what is skipped is what the program says, and is told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.engine import steps
from tests.compiler.fuzz import world
from tests.compiler.fuzz.conditional_programs import ConditionalRecording
from tests.compiler.fuzz.oracle import Oracle
from tests.compiler.fuzz.random_programs import RandomProgram

NUMBERS = st.lists(st.integers(0, (1 << 16) - 1), min_size=20, max_size=160)


def check_conditions(numbers: list[int]) -> Oracle:
    """Compare nodes and oracle: values, outputs that are skipped, and requests that fail."""
    program = RandomProgram(numbers, recording=ConditionalRecording)
    recorded = program.build()
    wanted, oracle = world.meant(program, recorded)
    run = world.invoked(program, world.compiler_for(recorded).compile(recorded))
    run.network.run_until_idle()
    assert world.multisets(world.handed_out(run)) == world.multisets(wanted)
    skipped = Counter(
        (node.name, each.name)
        for node in run.network.nodes
        for each in node.seen(steps.OutputSkipped)
    )
    assert skipped == oracle.skipped
    failed = [each for node in run.network.nodes for each in node.failures()]
    assert len(failed) == oracle.failed, failed
    for each in failed:
        assert each.kind == "QuorumNotReached"
        assert "Skipped" in each.detail or "NotAnswered" in each.detail, each
    return oracle


@settings(max_examples=60)
@given(NUMBERS)
def test_what_is_skipped_is_what_the_program_says(numbers: list[int]) -> None:
    check_conditions(numbers)


@pytest.mark.slow
@settings(max_examples=2500)
@given(NUMBERS)
def test_conditions_long(numbers: list[int]) -> None:
    check_conditions(numbers)


def test_skipped_outputs_and_refused_answers_are_drawn() -> None:
    tapes = [[(n * 7919 + i * 104_729) ** 2 % 65_521 for i in range(100)] for n in range(40)]
    assert any(check_conditions(tape).skipped for tape in tapes)
    assert any(check_conditions(tape).failed for tape in tapes)
