"""Programs that are wrong are refused, and only these: what compiles does what it says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import CompileError, Internal
from tests.compiler.fuzz import world
from tests.compiler.fuzz.oracle import Meaningless
from tests.compiler.fuzz.random_programs import RandomProgram
from tests.compiler.fuzz.wild_programs import WildRecording

NUMBERS = st.lists(st.integers(0, (1 << 16) - 1), min_size=20, max_size=120)


def check_refused(compiler: Compiler, recorded: ModelProto) -> None:
    """The refusal is typed, and says where in the author's source."""
    with pytest.raises(CompileError, match=r"\.py:\d+") as refused:
        compiler.compile(recorded)
    assert not isinstance(refused.value, Internal)


def check_wild(numbers: list[int]) -> bool:
    """Compare what compiler and oracle say of a program; return True if it is right."""
    program = RandomProgram(numbers, recording=WildRecording)
    recorded = program.build()
    compiler = world.compiler_for(recorded)
    try:
        wanted, _ = world.meant(program, recorded)
    except Meaningless:
        check_refused(compiler, recorded)
        return False
    found, _ = world.run(program, compiler.compile(recorded))
    assert world.multisets(found) == world.multisets(wanted)
    return True


@settings(max_examples=150)
@given(NUMBERS)
def test_programs_that_mean_nothing_are_refused_and_no_others(numbers: list[int]) -> None:
    check_wild(numbers)


@pytest.mark.slow
@settings(max_examples=2500)
@given(NUMBERS)
def test_wild_programs_long(numbers: list[int]) -> None:
    check_wild(numbers)


def test_both_kinds_are_drawn() -> None:
    tapes = [[(n * 7919 + i * 104_729) ** 2 % 65_521 for i in range(60)] for n in range(60)]
    right = [check_wild(tape) for tape in tapes]
    assert any(right)
    assert not all(right)
