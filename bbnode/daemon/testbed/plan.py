"""The plan of a testbed: its nodes, their dials, and the configuration of each.

Rule: a plan is complete before anything is written or started, and refuses what the nodes would
refuse. Every two nodes whose classes exchange messages are connected, by one dial.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbnode.components.registry import UnknownComponentType, build_config, component_class
from bbnode.components.settings import path_settings
from bbnode.daemon.config import NodeConfig, sources
from bbnode.daemon.config.setting import Setting, parse_setting
from bbnode.daemon.config.sources import ConfigError
from bbnode.daemon.testbed.program import PlayedClass, RunnableProgram
from bbnode.engine.errors import did_you_mean
from bbnode.ir.errors import BbnodeError, DeploymentError
from bbnode.ir.types import TRIGGER

# A node is a process of about 100 MB; larger networks are the simulator's work.
MAX_NODES = 256
# Nodes of one class that exchange messages among themselves are all connected up to this many.
# Beyond it each dials the nodes 1, 2, 4, 8, … places after it, so that a message reaches all in
# log2(n) steps and connections grow with n log n; the program's messages bring knowledge of the
# others.
MAX_FULL_MESH = 16
DEFAULT_OTHERS = 2
DEFAULT_TIMES = 20

# Keys that the testbed sets.
_OWN_KEYS = (
    *("node.name", "node.state_dir", "artifact", "network.listen", "network.announce"),
    *("network.bootstrap", "invoke"),
)
_MAX_NAME_CHARS = 48


class NodesRefused(DeploymentError):
    """`--nodes` has no valid number of nodes for each class."""


class NothingToInvoke(DeploymentError):
    """The target to invoke is unknown, or can't be started in this way."""


class SettingsRefused(DeploymentError):
    """A setting of a node can't be used; the message names the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes: the classes that each of them plays, and their number."""

    classes: tuple[str, ...]
    count: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node: its place in its group, and the nodes that it dials and is connected with."""

    name: str
    group: NodeGroup
    index: int
    dials: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    # Another node dials it, so that it has to listen.
    is_dialled: bool = False
    invokes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRounds:
    """The target that is invoked round after round, and how."""

    target: str
    inputs: Mapping[str, Any]
    times: int
    # Further keys of [[invoke]].
    options: Mapping[str, Any] = field(default_factory=dict)
    # Peers of each class that are enough once the time to start is over; one for classes not
    # listed.
    enough: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """All nodes of a testbed, by name."""

    program: RunnableProgram
    groups: tuple[NodeGroup, ...]
    nodes: Mapping[str, PlannedNode]
    settings: tuple[Setting, ...]
    invocation: AskedRounds | None
    # Connect these nodes with each other before those that invoke start.
    is_staged: bool
    # The directory to which relative paths of settings are relative.
    base: Path

    @property
    def invokers(self) -> list[PlannedNode]:
        """The nodes that invoke the target."""
        return [node for node in self.nodes.values() if node.invokes]


# --- nodes ----------------------------------------------------------------------------------------


def parse_nodes(text: str, program: RunnableProgram) -> tuple[NodeGroup, ...]:
    """Return the groups of nodes that `server=1,client=3` asks for; `a+b=1` plays both classes.

    A class that is not named gets its default: one node of the home class, unless it exchanges
    messages among itself, and two of any other. Raises NodesRefused.
    """
    known = ", ".join(program.classes)
    asked: dict[tuple[str, ...], int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, number = part.rpartition("=")
        count = int(number) if number.isascii() and number.isdecimal() and len(number) < 9 else 0
        classes = tuple(each.strip() for each in name.split("+"))
        if not separator or count < 1:
            raise NodesRefused(
                f"--nodes: {part!r} is not CLASS=COUNT with a count of at least 1, as in "
                f"{program.home}=1"
            )
        for each in classes:
            if each not in program.classes:
                near = did_you_mean(each, program.classes, f"it has: {known}")
                raise NodesRefused(f"--nodes: the program has no class {each!r}{near}")
        if classes in asked or len(set(classes)) < len(classes):
            raise NodesRefused(f"--nodes: {name!r} is named twice")
        asked[classes] = count
    named = {each for classes in asked for each in classes}
    for each in program.classes:
        if each not in named:
            # A single node can't exchange messages within its class.
            is_one = each == program.home and frozenset((each,)) not in program.talks
            asked[(each,)] = 1 if is_one else DEFAULT_OTHERS
    order = {name: place for place, name in enumerate(program.classes)}
    total = sum(asked.values())
    if total > MAX_NODES:
        raise NodesRefused(
            f"--nodes: {total} nodes are more than the {MAX_NODES} that one machine is asked to "
            "run as processes; the simulator (bbnode.sim) runs thousands in one"
        )
    names: Counter[str] = Counter()
    groups = []
    for classes in sorted(asked, key=lambda each: min(order[name] for name in each)):
        name = _file_name("-".join(classes))
        names[name] += 1
        if names[name] > 1:
            name = f"{name}.{names[name]}"
        groups.append(NodeGroup(classes=classes, count=asked[classes], name=name))
    return tuple(groups)


def _file_name(text: str) -> str:
    """Return a class's name in the form of a node's name (node.name)."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_MAX_NAME_CHARS]
    return plain if plain[:1].isalnum() else "node"


# --- the plan -------------------------------------------------------------------------------------


def make_plan(
    program: RunnableProgram,
    *,
    nodes: str = "",
    settings: Sequence[str] = (),
    invocation: AskedRounds | None = None,
    base: Path,
) -> LocalPlan:
    """Return the plan of a testbed, whose settings are checked as its nodes will check them.

    Raises NodesRefused, ConfigError, SettingsRefused.
    """
    groups = parse_nodes(nodes, program)
    invoking = {
        group for group in groups if invocation is not None and invocation.target in group.classes
    }
    linked = [
        (a, b)
        for place, a in enumerate(groups)
        for b in groups[place:]
        if (a is not b or a.count > 1) and _exchange(a, b, program)
    ]
    is_staged = bool(invoking) and any(not {a, b} & invoking for a, b in linked)
    names_by_group = {
        group: [
            f"{group.name}-{index}" if group.count > 1 else group.name
            for index in range(group.count)
        ]
        for group in groups
    }
    dials: dict[str, list[str]] = {name: [] for names in names_by_group.values() for name in names}
    for a, b in linked:
        if a is b:
            for i, j in _mesh(a.count):
                dials[names_by_group[a][i]].append(names_by_group[a][j])
            continue
        # The nodes that start last dial, so that no dial is in vain.
        late = {a, b} & invoking if is_staged else set()
        many = a if a.count > b.count else b
        callers = late.pop() if len(late) == 1 else many
        called_group = b if callers is a else a
        for caller in names_by_group[callers]:
            dials[caller] += names_by_group[called_group]
    called_by: dict[str, list[str]] = {name: [] for name in dials}
    for caller, names in dials.items():
        for called in names:
            called_by[called].append(caller)
    planned = {
        name: PlannedNode(
            name=name,
            group=group,
            index=index,
            dials=tuple(dials[name]),
            linked=(*dials[name], *called_by[name]),
            is_dialled=bool(called_by[name]),
            invokes=group in invoking,
        )
        for group in groups
        for index, name in enumerate(names_by_group[group])
    }
    plan = LocalPlan(
        program=program,
        groups=groups,
        nodes=planned,
        settings=tuple(_parsed(settings, groups, program)),
        invocation=invocation,
        is_staged=is_staged,
        base=base,
    )
    for node in planned.values():
        _check_slots(node, plan, node_config(node, plan))
    return plan


def _exchange(a: NodeGroup, b: NodeGroup, program: RunnableProgram) -> bool:
    return any(frozenset((one, other)) in program.talks for one in a.classes for other in b.classes)


def _mesh(count: int) -> Iterator[tuple[int, int]]:
    """Yield caller and called among the nodes of one group, by index."""
    if count <= MAX_FULL_MESH:
        yield from ((caller, called) for called in range(count) for caller in range(called))
        return
    paired = set()
    step = 1
    while step < count:
        for caller in range(count):
            pair = frozenset((caller, (caller + step) % count))
            # Two steps may add up to the whole ring: one dial is enough.
            if pair not in paired:
                paired.add(pair)
                yield caller, (caller + step) % count
        step *= 2


# --- what is invoked ------------------------------------------------------------------------------


def find_invocation(
    program: RunnableProgram,
    *,
    target: str | None,
    inputs: Mapping[str, Any],
    times: int | None,
    options: Mapping[str, Any],
    enough: Mapping[str, int] | None = None,
    runs_on: bool = False,
) -> AskedRounds | None:
    """Return the target to invoke; None if the program starts itself, or `runs_on` is set.

    Raises NothingToInvoke.
    """
    if target is None:
        able = [played.name for played in program.classes.values() if played.starts_with_triggers]
        if inputs:
            raise NothingToInvoke(
                f"inputs ({', '.join(inputs)}) go with the target that takes them: --invoke "
                f"{program.home}"
            )
        if len(able) != 1:
            if runs_on or not any(played.inputs for played in program.classes.values()):
                return None
            raise NothingToInvoke(
                "say what to start: --invoke CLASS with --input NAME=VALUE for each of its inputs "
                f"({_inputs_of(program)}); or let the nodes run with --until-ctrl-c"
            )
        (target,) = able
    name = target.partition("#")[0]
    played = program.classes.get(name)
    if played is None:
        near = did_you_mean(name, program.classes, f"it has: {', '.join(program.classes)}")
        raise NothingToInvoke(f"--invoke: the program has no class {name!r}{near}")
    for each in inputs:
        if each not in played.inputs:
            near = did_you_mean(each, played.inputs, f"it has: {_typed(played)}")
            raise NothingToInvoke(f"--input: {name!r} has no input {each!r}{near}")
    begun = [part for part in played.parts if any(each in inputs for each in part)]
    wanted = begun[0] if len(begun) == 1 else tuple(played.inputs)
    # Trigger inputs that were not given get a trigger.
    triggers = (each for each in wanted if played.inputs[each] == TRIGGER)
    fed = {**dict.fromkeys(triggers, "trigger"), **inputs}
    missing = [each for each in wanted if each not in fed]
    if missing:
        raise NothingToInvoke(
            f"--invoke {name}: give --input NAME=VALUE for {', '.join(missing)} too; it takes: "
            f"{_typed(played)}"
        )
    is_plain = played.starts_with_triggers
    return AskedRounds(
        target=name,
        inputs=fed,
        times=times if times is not None else DEFAULT_TIMES if is_plain else 1,
        options=options,
        enough=enough or {},
    )


def _inputs_of(program: RunnableProgram) -> str:
    return "; ".join(
        f"{played.name} takes {_typed(played)}"
        for played in program.classes.values()
        if played.inputs
    )


def _typed(played: PlayedClass) -> str:
    return (
        ", ".join(f"{name}: {kind.name if kind else 'any'}" for name, kind in played.inputs.items())
        or "nothing"
    )


# --- settings -------------------------------------------------------------------------------------


def _parsed(
    texts: Sequence[str], groups: Sequence[NodeGroup], program: RunnableProgram
) -> Iterator[Setting]:
    slots = {slot for played in program.classes.values() for slot in played.slots}
    for text in texts:
        setting = parse_setting(text, tuple(program.classes))
        if any(setting.key == own or setting.key.startswith(f"{own}.") for own in _OWN_KEYS):
            raise ConfigError(f"--set: {setting.key} follows from the testbed; leave it out")
        section, _, rest = setting.key.partition(".")
        slot = rest.partition(".")[0]
        if section == "slots" and slot not in slots:
            near = did_you_mean(slot, slots, f"slots: {', '.join(sorted(slots)) or 'none'}")
            raise ConfigError(f"--set: no class of the program has a slot {slot!r}{near}")
        if setting.index is not None and not any(
            setting.peer_class in group.classes and setting.index < group.count for group in groups
        ):
            raise ConfigError(
                f"--set: there is no node {setting.peer_class}.{setting.index}; nodes are counted "
                "from 0 within their class"
            )
        yield setting


def _applies(setting: Setting, node: PlannedNode, program: RunnableProgram) -> bool:
    if setting.peer_class is not None:
        is_its = setting.peer_class in node.group.classes
        return is_its and setting.index in (None, node.index)
    section, _, rest = setting.key.partition(".")
    # One slot of the program; a class without it would refuse its settings.
    return section != "slots" or rest.partition(".")[0] in _slots(node, program)


def _slots(node: PlannedNode, program: RunnableProgram) -> dict[str, Any]:
    return {
        name: slot
        for each in node.group.classes
        for name, slot in program.classes[each].slots.items()
    }


# The compiled program of a testbed, beside the folders of its nodes.
ARTIFACT = "artifact.onnx"


def node_config(
    node: PlannedNode,
    plan: LocalPlan,
    *,
    listen: Sequence[str] = (),
    bootstrap: Sequence[str] = (),
    wait_s: float = 0.0,
) -> NodeConfig:
    """Return the configuration of a node. Raises SettingsRefused."""
    program = plan.program
    flags: dict[str, Any] = {
        "node.name": node.name,
        # Relative to the file, so that a moved or copied folder has its own state.
        "node.state_dir": "state",
        "node.components": list(program.modules) or None,
        "artifact.path": f"../{ARTIFACT}",
        "artifact.sha256": program.artifact.sha256,
        "artifact.targets": list(node.group.classes),
        "network.listen": list(listen) or None,
        "network.bootstrap": list(bootstrap) or None,
    }
    for setting in plan.settings:
        if _applies(setting, node, program):
            flags[setting.key] = _filled(setting.text, node)
    if node.invokes and plan.invocation is not None:
        flags["invoke"] = [_invoke_entry(node, plan, plan.invocation, wait_s)]
    try:
        config = sources.resolve(None, environ={}, flags=flags).config
    except ConfigError as error:
        raise SettingsRefused(f"{node.name}: {error}") from error
    return _with_own_settings(config, node, plan)


def _filled(text: str, node: PlannedNode) -> str:
    # Not str.format, since a value may be a TOML table in braces.
    filled = text.replace("{i}", str(node.index)).replace("{n}", str(node.group.count))
    return filled.replace("{name}", node.name)


def _invoke_entry(
    node: PlannedNode, plan: LocalPlan, invocation: AskedRounds, wait_s: float
) -> dict[str, Any]:
    peers = Counter(each for name in node.linked for each in plan.nodes[name].group.classes)
    entry: dict[str, Any] = {
        "target": invocation.target,
        "inputs": dict(invocation.inputs),
        "times": invocation.times,
        **invocation.options,
    }
    if peers:
        (first, count), *others = peers.most_common()
        entry["wait_for"] = {
            "class": first,
            "peers": count,
            "min_peers": invocation.enough.get(first, 1),
            "timeout_s": wait_s,
            "on_timeout": "fail",
            "also": dict(others),
        }
    return entry


def _with_own_settings(config: NodeConfig, node: PlannedNode, plan: LocalPlan) -> NodeConfig:
    """Add the program's own settings for this machine, and make paths absolute."""
    slots: dict[str, dict[str, Any]] = {
        name: dict(settings) for name, settings in config.slots.items()
    }
    for name, slot in _slots(node, plan.program).items():
        own = plan.program.own_settings.get(name, {})
        if own:
            slots[name] = {**own, **slots.get(name, {})}
        try:
            cls = component_class(slot.binding.type_name)
        except UnknownComponentType:
            continue  # the node's own setting wins
        for key in path_settings(cls.Config):
            if key in slots.get(name, {}):
                slots[name][key] = _absolute(slots[name][key], plan.base)
    return config.model_copy(update={"slots": slots})


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(each, base) for each in value]
    if not isinstance(value, str) or not value or "://" in value:
        return value
    return os.path.normpath(base / Path(value).expanduser())


def _check_slots(node: PlannedNode, plan: LocalPlan, config: NodeConfig) -> None:
    """Refuse, before anything is started, what the node's components would refuse."""
    slots = _slots(node, plan.program)
    for name in config.slots:
        if name not in slots:
            near = did_you_mean(name, slots, f"its slots: {', '.join(slots) or 'none'}")
            raise SettingsRefused(f"{node.name}: it has no slot {name!r}{near}")
    for name, slot in slots.items():
        settings = config.slots.get(name, {})
        if node.index and not settings:
            continue  # as in the first node of its group; the artifact's settings may be large
        try:
            build_config(component_class(slot.binding.type_name), name, slot.config, settings)
        except UnknownComponentType:
            continue
        except BbnodeError as error:
            raise SettingsRefused(f"{node.name}: {error}") from error


def totals(groups: Sequence[NodeGroup]) -> str:
    """Return the numbers of nodes as text: "1 server, 3 clients"."""
    return ", ".join(
        f"{group.count} {'+'.join(group.classes)}{'s' * (group.count != 1)}" for group in groups
    )
