"""Events that bring a part of what an op needs: what does not run is told, and what it lacks."""

from __future__ import annotations

import pytest

from bbnode.engine import steps
from bbnode.engine.errors import MissingInput
from bbnode.ir.values import TRIGGER
from tests.engine.builder import Partition, model
from tests.engine.support import bring_up, of


def left_out(p: Partition, name: str) -> dict[str, str]:
    """What an event of one input leaves undone, and why."""
    node = bring_up(model(p), "server")
    execution = node.deliver_event("server", name, TRIGGER)
    made = node.poll(0)
    (end,) = of(steps.ExecutionFinished, made)
    assert end.ok
    for step in of(steps.OpNotRun, made):
        assert step.execution == execution
        assert step.op in str(step)
        assert step.reason in str(step)
    return {step.op: step.reason for step in of(steps.OpNotRun, made)}


@pytest.mark.parametrize("read", [False, True])
def test_an_op_that_needs_two_inputs_is_told_with_the_one_that_lacks(read: bool) -> None:
    p = Partition("server", inputs=["a", "b", "c"])
    p.sys("OnTrigger", ["b"], "second", called="second")
    p.sys("Gate", ["a", "second"], "both", called="gate")
    p.sys("OnTrigger", ["both"], "further", called="further")
    p.output("y", "further")
    p.output("z", "c")
    if read:
        p.output("w", "second")
    with pytest.raises(MissingInput, match="'a' starts nothing without b"):
        left_out(p, "a")
    if read:  # "b" has an effect of its own, and not all that stands behind the gate is told
        assert left_out(p, "b") == {"gate": "it needs a as well; invoke gives all inputs at once"}
    else:
        with pytest.raises(MissingInput, match="'b' starts nothing without a"):
            left_out(p, "b")
    assert left_out(p, "c") == {}


@pytest.mark.parametrize(
    ("op_type", "attributes", "is_told"),
    [
        ("Threshold", {"n": 2}, True),
        ("Threshold", {"n": 1}, False),
        ("Threshold", {"n": 3}, False),  # over executions
        ("Any", {"group": ""}, False),
        ("DeadlineMatch", {}, False),
    ],
)
def test_what_takes_the_first_of_its_inputs_lacks_none(
    op_type: str, attributes: dict[str, object], is_told: bool
) -> None:
    p = Partition("server", inputs=["a", "b"])
    p.sys(op_type, ["a", "b"], "met", called="met", **attributes)
    p.output("y", "met")
    for name in ("a", "b"):
        if is_told:  # and nothing else would run
            with pytest.raises(MissingInput, match="starts nothing"):
                left_out(p, name)
        else:
            assert left_out(p, name) == {}
