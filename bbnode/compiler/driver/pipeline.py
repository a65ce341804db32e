"""The order of the passes: one literal table. Where a pass is found.

Rule: the passes that ship are the classes in `bbnode.compiler.passes`; packages add theirs under
the entry points `bbnode.passes`, by the name of the pass.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import TypeGuard

from bbnode.compiler import passes
from bbnode.compiler.errors import UnknownStage
from bbnode.compiler.unit import Pass
from bbnode.ir import plugins

PLUGIN_GROUP = "bbnode.passes"

# The seventeen passes of the specification, in its order.
CANONICAL_PASS_NAMES = (
    "inline_for_partition",
    "derive_wire_deadlines",
    "validate",
    "expand_ops",
    "type_solver",
    "infer_peer_classes",
    "synthesize_wire_recvs",
    "partition_by_wire_ops",
    "resolve_slots",
    "analyze_wire_edges",
    "insert_dedup_gate_rx",
    "insert_peer_health_gate_rx",
    "insert_backoff_gate_rx",
    "insert_peer_health_gate_tx",
    "insert_backoff_gate_tx",
    "insert_async_deadlines",
    "validate_runtime_complete",
)

# Before them: the first needs the bindings, the second the calls that inlining removes.
PRE_PASS_NAMES = ("refine_polymorphic_value_info", "validate_bootstrap_composition")

# Our own, each after the canonical pass that it needs.
INSERTED_AFTER = {
    "resolve_slots": "sequence_slot_effects",
    "analyze_wire_edges": "validate_deliveries",
    "insert_backoff_gate_tx": "collapse_backend_subgraphs",
}

# After the canonical passes and the user's stages.
POST_PASS_NAMES = (
    "resolve_component_dependencies",
    "validate_all_slots_bound",
    "stamp_compilation_metadata",
    "merge_partitions_into_one",
)

# From here on the program is well-formed, and every pass has to leave it so.
FIRST_SEAM = "validate"

# Where every compile looks whether they did. One that fails on a broken program is run again
# with a look behind every pass, so that the one that broke it is named; the good path stays fast.
CHECKPOINTS = frozenset({"validate", "validate_runtime_complete", "merge_partitions_into_one"})


def body_pass_names() -> tuple[str, ...]:
    """Return the canonical passes with ours at their places."""
    names = []
    for name in CANONICAL_PASS_NAMES:
        names.append(name)
        if name in INSERTED_AFTER:
            names.append(INSERTED_AFTER[name])
    return tuple(names)


def all_pass_names() -> tuple[str, ...]:
    """Return the name of every pass that ships, in the order in which a compile runs them."""
    return (*PRE_PASS_NAMES, *body_pass_names(), *POST_PASS_NAMES)


def looks_behind(before: Sequence[str]) -> list[str]:
    """Return the passes that look at what a pass of the caller's left, by those before it.

    They change nothing. What a partition has to hold, `validate` does not know.
    """
    looks = ["resolve_slots", "validate_runtime_complete"]
    if "synthesize_wire_recvs" not in before:
        looks.append("validate")
    return [name for name in looks if name in before]


def _is_pass(found: object) -> TypeGuard[type[Pass]]:
    return inspect.isclass(found) and issubclass(found, Pass) and found is not Pass


@cache
def shipped_passes() -> dict[str, type[Pass]]:
    """Return the classes of the passes that ship, by name."""
    found: dict[str, type[Pass]] = {}
    for info in pkgutil.iter_modules(passes.__path__, f"{passes.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if _is_pass(value) and not value.__name__.startswith("_"):
                found[value.name] = value
    return found


def pass_class(name: str) -> type[Pass]:
    """Return the class of a pass: one that ships, or one that an installed package brings.

    Raises:
        UnknownStage: neither; or what the package brings is no pass.
        BrokenPlugin: the package cannot be imported.
    """
    found: object = shipped_passes().get(name)
    if found is None:
        try:
            found = plugins.load(PLUGIN_GROUP, name)
        except plugins.UnknownPlugin as error:
            raise UnknownStage(stage=name, detail=str(error)) from error
    if not _is_pass(found):
        raise UnknownStage(stage=name, detail=f"{found!r:.80} is no class derived from Pass")
    return found


def load_pass(name: str) -> Pass:
    """Return a pass of that name, made without arguments. Raises as `pass_class`."""
    return pass_class(name)()
