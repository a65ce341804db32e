"""The half of a join that runs in the executions which bring its values."""

from __future__ import annotations

from typing import Any

from bbnode.engine.errors import InvalidArtifact
from bbnode.engine.frame import EntryPlan, Frame
from bbnode.engine.joins import JoinPlan
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.engine.places import OpPlace
from bbnode.ir import keys
from bbnode.ir.flatten import ENGINE_DOMAIN, OP_DEPOSIT, join_fault
from bbnode.ir.values import TRIGGER


@binds(ENGINE_DOMAIN, OP_DEPOSIT)
def _deposit(build: OpBuild) -> Fire:
    build.arity(1, 0)
    (source,) = build.inputs
    number = build.linker.join(build.target, build.flat.name.rpartition("[")[0])

    def fire(frame: Frame) -> Any:
        frame.rt.joins.deposit(number, frame, frame.values[source])
        return TRIGGER

    return fire


def join_plan(build: OpBuild, plan: EntryPlan) -> JoinPlan:
    """Return the plan of a join, of the entry that it starts. Raises InvalidArtifact."""
    keeps = build.node.op_type == keys.OP_COLLECT
    fault = join_fault(build.node)
    if fault is not None:
        raise InvalidArtifact(build.where, f"{build.node.op_type}: {fault}")
    count = build.attr_int("n", 0)
    return JoinPlan(
        place=OpPlace(build.node).of(),
        plan=plan,
        keeps=keeps,
        count=count,
        needed=build.attr_int("quorum", 0) or count or 1,
        within_ns=build.attr_int("until_ns", 0),
        per_peer=bool(build.attr_int("per_peer", int(keeps))),
    )
