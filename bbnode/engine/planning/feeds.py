"""The data sources whose examples a model of a node gets, by the program.

Rule: only what the program says counts: a dependency that its ops need, or a batch that goes from
a source straight into a model. What is computed of a batch is no longer the source's.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto

from bbnode.components.contracts import DataSource
from bbnode.components.registry import component_class
from bbnode.engine.planning.program import ProgramPlan, is_main, plan_program, resolve_targets
from bbnode.ir import keys
from bbnode.ir.flatten import flatten
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import program_of

_NEXT_BATCH = "NextBatch"
# Ops of models whose first input is a batch.
_TAKE_BATCH = frozenset({"Forward", "ComputeLoss", "Evaluate", "Gradient", "GradientWithInput"})
# Methods that use the loss of a model's settings.
_USE_LOSS = frozenset(
    {"train", "train_adjusted", "compute_loss", "evaluate", "gradient", "gradient_with_input"}
)
# They hand on their first input as it is.
_HAND_ON = frozenset({keys.OP_DEADLINE_CHECK, *keys.GATE_OPS})


def feeds_of(model: ModelProto, targets: Sequence[str], slot: str) -> tuple[tuple[str, ...], bool]:
    """Return the slots whose examples the model in `slot` gets, and whether ops use its loss.

    Those that it trains on; where it trains on none, those that are handed to it. Raises as
    `plan_program` does.
    """
    plan = plan_program(model, targets)
    called = {use.method for use in plan.methods if use.slot == slot}
    uses_loss = not called.isdisjoint(_USE_LOSS)
    sources = {each.name for each in plan.slots if each.binding.role == DataSource.ROLE}
    depended = depended_slots(plan, slot, called) & sources
    return tuple(sorted(depended or _handed(program_of(model), targets, slot, sources))), uses_loss


def examples_of(program: Program, plan: ProgramPlan, slot: str) -> set[str]:
    """Return all slots whose examples the model in `slot` gets, those it trains on among them.

    Raises UnknownComponentType where the model's class is not installed.
    """
    called = {use.method for use in plan.methods if use.slot == slot}
    sources = {each.name for each in plan.slots if each.binding.role == DataSource.ROLE}
    mains = [target.name for target in plan.targets]
    return (depended_slots(plan, slot, called) & sources) | _handed(program, mains, slot, sources)


def depended_slots(plan: ProgramPlan, slot: str, called: set[str]) -> set[str]:
    """Return the slots that a model's component uses by itself in the methods that are called."""
    (found,) = (each for each in plan.slots if each.name == slot)
    cls = component_class(found.binding.type_name)
    needed = {role: cls.needed_for.get(role) for role in cls.depends}
    return {
        cls.depends[role]
        for role, methods in needed.items()
        if methods is None or not called.isdisjoint(methods)
    }


def _handed(program: Program, targets: Sequence[str], slot: str, sources: set[str]) -> set[str]:
    mains = {each.name: each for each in program.functions if is_main(each)}
    library = {each.key: each for each in program.functions if each.name not in mains}
    found: set[str] = set()
    for main in resolve_targets(mains, targets):
        batches: dict[str, str] = {}  # value to the slot of its source
        ops = flatten(main, library).ops
        for op in ops:
            owner = op.node.metadata.get(keys.SLOT_KEY, "")
            if op.op_type == _NEXT_BATCH and owner in sources:
                batches[op.outputs[0]] = owner
        waiting = [op for op in ops if op.op_type in _HAND_ON and op.inputs and op.outputs]
        while moved := [op for op in waiting if op.inputs[0] in batches]:
            for op in moved:
                batches[op.outputs[0]] = batches[op.inputs[0]]
            waiting = [op for op in waiting if op.inputs[0] not in batches]
        for op in ops:
            owner = op.node.metadata.get(keys.SLOT_KEY, "")
            if owner == slot and op.op_type in _TAKE_BATCH and op.inputs:
                source = batches.get(op.inputs[0])
                found.update(() if source is None else (source,))
    return found
