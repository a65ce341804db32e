"""Which component type fills which slot.

Rule: bindings stand in the model's metadata, construction config in the functions that use a
slot. Targets that are installed together share a slot of the same name; where they disagree,
install refuses and names every contributor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import FunctionProto, ModelProto

from bbnode.engine.errors import InvalidArtifact, SlotBindingConflict
from bbnode.engine.planning.flatten import FunctionKey
from bbnode.ir import keys, protos
from bbnode.ir.slots import Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One slot of the node: its binding, its stored config, and who uses it."""

    name: str
    binding: Binding
    config: bytes
    targets: tuple[str, ...]


def find_bindings(
    model: ModelProto, mains: Sequence[FunctionProto], library: Mapping[FunctionKey, FunctionProto]
) -> list[SlotPlan]:
    """The slots of all targets, in name order.

    Raises InvalidArtifact for a malformed entry and SlotBindingConflict.
    """
    found: dict[str, list[tuple[str, Binding, bytes]]] = {}
    metadata = protos.all_meta(model)
    for main in mains:
        prefix = keys.binding_key(main.name, "")
        configs = _stored_configs(main, library)
        for key in sorted(metadata):
            if not key.startswith(prefix):
                continue
            slot = key.removeprefix(prefix)
            fields = metadata[key].split("|")
            if len(fields) != 3 or not slot or not all(fields):
                raise InvalidArtifact(main.name, f"malformed binding {key!r}: {metadata[key]!r}")
            binding = Binding.decode(main.name, slot, metadata[key])
            found.setdefault(slot, []).append((main.name, binding, configs.get(slot, b"")))
    return [_agree(slot, found[slot]) for slot in sorted(found)]


def _agree(slot: str, given: list[tuple[str, Binding, bytes]]) -> SlotPlan:
    _, first, config = given[0]
    same = all(
        (binding.role, binding.type_name, stored) == (first.role, first.type_name, config)
        for _, binding, stored in given
    )
    if not same:
        raise SlotBindingConflict(
            slot,
            [
                (target, f"{b.role} {b.type_name}, config of {len(stored)} bytes")
                for target, b, stored in given
            ],
        )
    return SlotPlan(
        name=slot, binding=first, config=config, targets=tuple(target for target, _, _ in given)
    )


def _stored_configs(
    main: FunctionProto, library: Mapping[FunctionKey, FunctionProto]
) -> dict[str, bytes]:
    """Configs of concrete slots, of the main and of all that it calls."""
    configs: dict[str, bytes] = {}
    seen: set[FunctionKey] = set()
    # A slot that only a bootstrap uses stands there; one name is one slot in all of the model.
    stack = [f for f in library.values() if protos.get_meta(f, keys.MODULE_PHASE_KEY)] + [main]
    while stack:
        function = stack.pop()
        for attribute in function.attribute_proto:
            configs.setdefault(attribute.name, attribute.s)
        for node in function.node:
            key = protos.call_key(node)
            if key in library and key not in seen:
                seen.add(key)
                stack.append(library[key])
    return configs
