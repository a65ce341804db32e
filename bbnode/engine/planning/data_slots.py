"""The data slots of a program by class: which of them mean the same, and who keeps what they mean.

Rule: slots of one class that feed one model are one group, and so are those of the class that keeps
its reference, and of others whose reference this one keeps, where they feed the same model, or
where statistics go from the one to the other; every other slot is a group of its own. The reference
of a class is kept by a class that exchanges something with it: one that requests it before one that
sends to it, by name where that leaves two. Of two classes that could keep each other's it is the
one that does not train on its data, else the one that requests. Peers of a class that has no such
class and sends to its like compare among themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnx import ModelProto

from bbnode.components.contracts import DataSource, Model
from bbnode.components.data.shared_schema import SharedSchema, joined
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.components.settings import UnreadableSettings, stored_settings
from bbnode.engine.planning.feeds import depended_slots, examples_of
from bbnode.engine.planning.program import (
    ProgramPlan,
    class_of,
    is_main,
    plan_program,
)
from bbnode.ir import keys
from bbnode.ir.graph import Program
from bbnode.ir.onnx_file import program_of

# Methods of a data source whose values are one number for each place of an example.
_BY_PLACE = frozenset({"statistics", "standardize"})
# Methods of a data source that give no example out.
_MEASURES = _BY_PLACE | {"on_data_loaded", "reset"}
_REQUESTS, _SENDS, _ANSWERS = 0, 1, 2
_KINDS: Mapping[str, int] = {
    keys.OP_SEND_REQ_BATCHED: _REQUESTS,
    keys.OP_SEND: _SENDS,
    keys.OP_SEND_RESP: _ANSWERS,
}


# A model as classes compare it: the digest of its graph; without one, its kind of component.
_Which: TypeAlias = str | type
_Fed: TypeAlias = tuple[_Which, Sequence[str]]  # a model with the slots that feed it


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSlots:
    """The data slots of all classes of a program.

    Attributes:
        groups: by class, each data slot that it uses with the name of its group.
        keepers: each class whose reference another one keeps, with that class; or with itself
            where its peers compare among themselves.
        measured: groups that are measured alone, as they are before any scaling.
    """

    groups: Mapping[str, Mapping[str, str]]
    keepers: Mapping[str, str]
    measured: frozenset[str] = frozenset()

    def kept_by(self, classes: Sequence[str]) -> frozenset[str]:
        """Return the classes whose reference a node keeps that plays these."""
        return frozenset(name for name, keeper in self.keepers.items() if keeper in classes)

    def of(self, classes: Sequence[str]) -> dict[str, str]:
        """Return the data slots of a node that plays these classes, each with its group."""
        return {
            slot: group for name in classes for slot, group in self.groups.get(name, {}).items()
        }


NO_DATA = DataSlots(groups={}, keepers={})


def data_slots_of(model: ModelProto) -> DataSlots:
    """Return the data slots of a compiled model. Raises as `plan_program`."""
    marks = (f"{DataSource.ROLE}|", keys.BINDING_PREFIX)
    if not any(
        entry.key.startswith(marks[1]) and entry.value.startswith(marks[0])
        for entry in model.metadata_props
    ):
        return NO_DATA
    program = program_of(model)
    mains = [each for each in program.functions if is_main(each)]
    classes = sorted({class_of(each) for each in mains})
    plans = {name: plan_program(program, [name]) for name in classes}
    fed = {name: list(_fed(program, plan)) for name, plan in plans.items()}
    used = {name: _used(plans[name], fed[name]) for name in classes}
    trains = {name for name in classes if _trains(plans[name])}
    keepers = _keepers(program, classes, {name for name in classes if used[name]}, trains)
    groups = {
        name: {slot: f"{name}/{slot}" for slot in sorted(slots)} for name, slots in used.items()
    }
    for name in classes:
        for _, sources in fed[name]:
            _unite(groups, [(name, slot) for slot in sources])
    for name, other in itertools.combinations(classes, 2):
        pair = name, other
        if not _share_a_reference(keepers, pair):
            continue
        feeds = _alone(fed[name]), _alone(fed[other])
        for which in feeds[0].keys() & feeds[1].keys():
            _unite(groups, [(p, s) for p, of in zip(pair, feeds, strict=True) for s in of[which]])
        _unite(groups, _measured_together(plans, groups, pair))
    given = {
        groups[name][use.slot]
        for name in classes
        for use in plans[name].methods
        if use.slot in groups[name] and use.method not in _MEASURES
    }
    given |= {groups[name][slot] for name in classes for _, slots in fed[name] for slot in slots}
    every = {group for slots in groups.values() for group in slots.values()}
    return DataSlots(
        groups={name: slots for name, slots in groups.items() if slots},
        keepers=keepers,
        measured=frozenset(every - given),
    )


def declared_schemas(said: Mapping[str, SharedSchema], slots: DataSlots) -> dict[str, SharedSchema]:
    """Return by group what a program says of its data by slot."""
    found: dict[str, SharedSchema] = {}
    groups = [pair for each in slots.groups.values() for pair in each.items()]
    for slot, schema in said.items():
        for name, group in groups:
            if name == slot:
                found[group] = joined(found.get(group, schema), schema)
    return found


def _share_a_reference(keepers: Mapping[str, str], pair: tuple[str, str]) -> bool:
    name, other = pair
    kept = {each: keepers.get(each, each) for each in pair}
    same = kept[name] == kept[other]  # of a third class, or one keeps the other's
    return same or kept[name] == other or kept[other] == name


def _measured_together(
    plans: Mapping[str, ProgramPlan], groups: Mapping[str, Mapping[str, str]], pair: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return the slots of two classes that give statistics or take them.

    Which of several they would be for is not to be seen: then none is returned.
    """
    slots = {
        (name, use.slot)
        for name in pair
        for use in plans[name].methods
        if use.slot in groups[name] and use.method in _BY_PLACE
    }
    found = {name: {groups[name][slot] for each, slot in slots if each == name} for name in pair}
    return sorted(slots) if all(len(each) == 1 for each in found.values()) else []


def _unite(groups: dict[str, dict[str, str]], slots: Sequence[tuple[str, str]]) -> None:
    names = {groups[peer_class][slot] for peer_class, slot in slots}
    if len(names) < 2:
        return
    first = min(names)
    for each in groups.values():
        each.update({slot: first for slot, group in each.items() if group in names})


def _used(plan: ProgramPlan, fed: Sequence[_Fed]) -> set[str]:
    """Return the data slots that ops of a class use, or models that they call."""
    sources = {each.name for each in plan.slots if each.binding.role == DataSource.ROLE}
    called = {use.slot for use in plan.methods}
    return (called | {slot for _, slots in fed for slot in slots}) & sources


def _fed(program: Program, plan: ProgramPlan) -> Iterator[_Fed]:
    """Yield for each model of a class which it is and the slots that feed it."""
    for slot in plan.slots:
        if slot.binding.role != Model.ROLE:
            continue
        with contextlib.suppress(UnknownComponentType):  # `install` reports it, where it is used
            content: object = None
            with contextlib.suppress(UnreadableSettings):
                content = stored_settings(slot.config).get("model")
            which: _Which
            if isinstance(content, bytes):
                which = hashlib.sha256(content).hexdigest()
            else:
                # A server holds a model by a subclass of the component that trains it. A class that
                # is no model is refused by `install`.
                cls = component_class(slot.binding.type_name)
                which = next((each for each in cls.__mro__ if Model in each.__bases__), cls)
            yield which, sorted(examples_of(program, plan, slot.name))


def _alone(fed: Sequence[_Fed]) -> dict[_Which, list[str]]:
    """Return by model the slots that feed it.

    Models of one graph mean the same; of several of one type that is not to be seen, and these are
    left out.
    """
    found: dict[_Which, list[str]] = {}
    counts = Counter(which for which, _ in fed)
    for which, sources in fed:
        if isinstance(which, str) or counts[which] == 1:
            found[which] = [*found.get(which, []), *sources]
    return found


def _trains(plan: ProgramPlan) -> bool:
    """Return True for a class whose models take examples by themselves."""
    sources = {each.name for each in plan.slots if each.binding.role == DataSource.ROLE}
    for slot in plan.slots:
        if slot.binding.role == Model.ROLE:
            called = {use.method for use in plan.methods if use.slot == slot.name}
            with contextlib.suppress(UnknownComponentType):
                if not depended_slots(plan, slot.name, called).isdisjoint(sources):
                    return True
    return False


def _keepers(
    program: Program, classes: Sequence[str], with_data: set[str], trains: set[str]
) -> dict[str, str]:
    ways: dict[tuple[str, str], int] = {}  # sender and receiver: how the one sends to the other
    for function in program.functions:
        if not is_main(function):
            continue
        sender = class_of(function)
        for node in function.nodes:
            kind = _KINDS.get(node.op_type)
            receiver = node.metadata.get(keys.PEER_CLASS_KEY, "")
            if kind is not None and receiver in classes:
                pair = sender, receiver
                ways[pair] = min(kind, ways.get(pair, _ANSWERS))
    found: dict[str, str] = {}
    for name in sorted(with_data):
        candidates = [
            (ways.get((other, name), _ANSWERS + 1), other)
            for other in classes
            if other != name and ((other, name) in ways or (name, other) in ways)
        ]
        candidates = [
            (way, other)
            for way, other in candidates
            if other not in with_data
            or (other in trains, way, other)
            < (name in trains, ways.get((name, other), _ANSWERS + 1), name)
        ]
        if candidates:
            found[name] = min(candidates)[1]
        elif (name, name) in ways:
            found[name] = name
    return found
