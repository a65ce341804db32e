"""Which bootstraps a node has, what they touch, and their plans.

Rule: a bootstrap belongs to a node when all slots that it uses, through all of its calls, are
bound there; one that uses none, when its home class is installed there, or is no class that
can be installed. It is one execution, which a host starts: a Pulse in it fires with its start,
and anything else that would start executions is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import FunctionProto

from bbnode.engine.bootstrap.targets import BootstrapPlan
from bbnode.engine.planning.flatten import (
    ENGINE_DOMAIN,
    OP_START,
    FlatFunction,
    FunctionKey,
    check_acyclic,
    check_values,
    flatten,
)
from bbnode.engine.planning.planner import Planner
from bbnode.engine.planning.slices import INVOKE, cut_slices, is_entry
from bbnode.ir import keys, protos


def is_bootstrap(function: FunctionProto) -> bool:
    """Whether a function is the bootstrap of a Module."""
    return protos.get_meta(function, keys.MODULE_PHASE_KEY) == keys.BOOTSTRAP_PHASE


def plan_bootstraps(
    library: Mapping[FunctionKey, FunctionProto],
    mains: Sequence[FunctionProto],
    classes: Sequence[str],
    planner: Planner,
) -> list[BootstrapPlan]:
    """The bootstraps of a node that plays `mains`, by the order of these.

    Args:
        library: functions of the model that are no mains.
        mains: those that are installed, in the order in which the host named them.
        classes: of all targets of the model, installed or not.
        planner: of the program.

    Raises:
        InvalidArtifact: a body that can't be planned.
    """
    homes = [protos.get_meta(main, keys.HOME_KEY) or main.name.split("#")[0] for main in mains]
    found: list[tuple[int, BootstrapPlan]] = []
    for function in library.values():
        if not is_bootstrap(function):
            continue
        flat = flatten(function, library)
        slots = [s for op in flat.ops if (s := protos.get_meta(op.node, keys.SLOT_KEY)) is not None]
        home = protos.get_meta(function, keys.HOME_KEY) or keys.SELF_CLASS
        elsewhere = not slots and home in classes and home not in homes
        if elsewhere or not all(planner.has_slot(slot) for slot in slots):
            continue
        rank = homes.index(home) if home in homes else len(homes)
        found.append((rank, _plan(function, flat, frozenset(slots), library, planner)))
    return [plan for _, plan in sorted(found, key=lambda entry: entry[0])]


def _plan(
    function: FunctionProto,
    flat: FlatFunction,
    slots: frozenset[str],
    library: Mapping[FunctionKey, FunctionProto],
    planner: Planner,
) -> BootstrapPlan:
    for op in flat.ops:
        if (op.domain, op.op_type) == (keys.SYSCALL_DOMAIN, "Pulse"):
            op.domain, op.op_type = ENGINE_DOMAIN, OP_START
        elif is_entry(op):
            planner.unsupported.append(
                f"{flat.name}: {op.name}: {op.op_type} in a bootstrap, where it never fires"
            )
    makers = check_values(flat)
    check_acyclic(flat, makers)
    slices, unreachable = cut_slices(flat, makers)
    planner.unreachable += [f"{flat.name}: {flat.ops[p].name}" for p in unreachable]
    planner.report_unsupported(flat)
    body = next(piece for piece in slices if piece.name == INVOKE)
    return BootstrapPlan(
        name=function.name.removesuffix(keys.BOOTSTRAP_SUFFIX),
        inputs={name: flat.types.get(name) for name in flat.inputs},
        plan=planner.build(flat, body),
        touches=frozenset(planner.slot_index(slot, flat.name) for slot in slots),
        includes=_called(function, library),
    )


def _called(
    function: FunctionProto, library: Mapping[FunctionKey, FunctionProto]
) -> frozenset[str]:
    """Modules whose bootstraps a bootstrap calls, directly or not."""
    found: set[str] = set()
    seen: set[FunctionKey] = set()
    stack = [function]
    while stack:
        for node in stack.pop().node:
            key = protos.call_key(node)
            if key in library and key not in seen:
                seen.add(key)
                stack.append(library[key])
                if is_bootstrap(library[key]):
                    found.add(library[key].name.removesuffix(keys.BOOTSTRAP_SUFFIX))
    return frozenset(found)
