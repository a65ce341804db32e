"""What every pass of the front half has in common: no state, no second effect, no chance."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from bbnode.compiler.driver import pipeline, seams
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.driver.pipeline import load_pass
from tests.compiler import back_units
from tests.compiler.programs import BOUND

FRONT = (*pipeline.PRE_PASS_NAMES, *pipeline.CANONICAL_PASS_NAMES[:7])


@pytest.mark.parametrize("name", FRONT)
def test_a_pass_is_named_like_its_file_and_states_its_rules(name: str) -> None:
    one = load_pass(name)
    assert type(one).name == name
    assert type(one).__module__.rpartition(".")[2] == name
    assert "1." in (type(one).__doc__ or "")


@pytest.mark.parametrize("name", FRONT)
def test_running_a_pass_twice_changes_nothing_more(name: str, program: ModelProto) -> None:
    unit = admit(program, BOUND)
    for before in FRONT[: FRONT.index(name) + 1]:
        load_pass(before).run(unit, BOUND)
    once = back_units.content(unit)
    load_pass(name).run(unit, BOUND)
    assert back_units.content(unit) == once


@pytest.mark.parametrize("name", FRONT[:-1])
def test_a_pass_can_run_again_when_all_others_have(name: str, program: ModelProto) -> None:
    unit = admit(program, BOUND)
    for one in FRONT:
        load_pass(one).run(unit, BOUND)
    done = back_units.content(unit)
    load_pass(name).run(unit, BOUND)
    assert back_units.content(unit) == done


def test_passes_leave_the_callers_model_alone_and_are_deterministic(program: ModelProto) -> None:
    before = program.SerializeToString()
    results = []
    for _ in range(2):
        unit = admit(program, BOUND)
        for name in FRONT:
            load_pass(name).run(unit, BOUND)
            seams.check(unit, name)
        results.append(back_units.content(unit))
    assert results[0] == results[1]
    assert program.SerializeToString() == before
