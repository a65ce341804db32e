"""The order of the passes: one literal table.

Rule: a pass is a class in a file of `bbnode/compiler/passes` with a `name`, and is found by that
name; nothing lists the classes.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from bbnode.compiler import passes
from bbnode.compiler.errors import Internal
from bbnode.compiler.unit import Pass

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
    "insert_backoff_gate_tx": "collapse_backend_subgraphs",
}

# After the canonical passes and the user's stages.
POST_PASS_NAMES = (
    "resolve_component_dependencies",
    "validate_all_slots_bound",
    "stamp_compilation_metadata",
    "merge_partitions_into_one",
)

# Passes that change nothing: they look behind every user stage as well, at what it left.
STAGE_LOOKS = ("resolve_slots", "validate_runtime_complete")

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
    """Every pass, in the order in which a compile runs them."""
    return (*PRE_PASS_NAMES, *body_pass_names(), *POST_PASS_NAMES)


def load_pass(name: str) -> Pass:
    """Return the pass of that name. Raises Internal when there is none."""
    found = _passes().get(name)
    if found is None:
        raise Internal(detail=f"there is no pass {name!r}")
    made: Pass = found()
    return made


@cache
def _passes() -> dict[str, type[Any]]:
    """Return the classes of the passes by their names."""
    modules = (
        importlib.import_module(f"{passes.__name__}.{info.name}")
        for info in pkgutil.iter_modules(passes.__path__)
    )
    return {
        str(vars(found)["name"]): found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and isinstance(vars(found).get("name"), str)
    }
