"""The order of the passes as one literal table, and the lookup of a pass by name.

Rule: the shipped passes are the classes in `bbnode.compiler.passes`; packages add theirs under
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

# Before the canonical ones: one needs the bindings, one the calls that inlining removes.
PRE_PASS_NAMES = ("refine_polymorphic_value_info", "validate_bootstrap_composition")

# Our own passes, each after the canonical pass that it needs.
INSERTED_AFTER = {
    "type_solver": "infer_shapes",
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

# From this pass on the program is well-formed, and every pass has to keep it so.
FIRST_SEAM = "validate"

# Every compile checks the program after these passes only, which keeps the good path fast. A
# compile that fails on a malformed program is run again with a check after every pass, so that
# the error names the pass that broke it.
CHECKPOINTS = frozenset({"validate", "validate_runtime_complete", "merge_partitions_into_one"})


def body_pass_names() -> tuple[str, ...]:
    """Return the names of the canonical passes with ours at their places."""
    names = []
    for name in CANONICAL_PASS_NAMES:
        names.append(name)
        if name in INSERTED_AFTER:
            names.append(INSERTED_AFTER[name])
    return tuple(names)


def all_pass_names() -> tuple[str, ...]:
    """Return the names of all shipped passes, in execution order."""
    return (*PRE_PASS_NAMES, *body_pass_names(), *POST_PASS_NAMES)


def looks_behind(before: Sequence[str]) -> list[str]:
    """Return the checking passes that follow a pass of the caller, given the passes before it.

    They change nothing. `validate` runs only until the receivers are synthesised: it does not know
    what a partition must contain.
    """
    looks = ["resolve_slots", "validate_runtime_complete"]
    if "synthesize_wire_recvs" not in before:
        looks.append("validate")
    return [name for name in looks if name in before]


def _is_pass(candidate: object) -> TypeGuard[type[Pass]]:
    return inspect.isclass(candidate) and issubclass(candidate, Pass) and candidate is not Pass


@cache
def shipped_passes() -> dict[str, type[Pass]]:
    """Return the classes of the shipped passes, by name."""
    classes: dict[str, type[Pass]] = {}
    for info in pkgutil.iter_modules(passes.__path__, f"{passes.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if _is_pass(value) and not value.__name__.startswith("_"):
                classes[value.name] = value
    return classes


def pass_class(name: str) -> type[Pass]:
    """Return the class of a pass, shipped or from an installed package.

    Raises:
        UnknownStage: there is none, or the package's object is no pass.
        BrokenPlugin: the package cannot be imported.
    """
    candidate: object = shipped_passes().get(name)
    if candidate is None:
        try:
            candidate = plugins.load(PLUGIN_GROUP, name)
        except plugins.UnknownPlugin as error:
            raise UnknownStage(stage=name, detail=str(error)) from error
    if not _is_pass(candidate):
        raise UnknownStage(stage=name, detail=f"{candidate!r:.80} is no class derived from Pass")
    return candidate


def load_pass(name: str) -> Pass:
    """Return a new pass of that name, built without arguments. Raises as `pass_class`."""
    return pass_class(name)()
