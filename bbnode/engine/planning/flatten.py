"""From a partition main to one flat list of ops.

Rule: calls of sub-Modules are inlined here, each call site with values of its own, so that a
call costs nothing while running and two calls never see each other. A call is strict: its
body starts when all arguments are there (op `Enter`). Ops that fire on the first of several
inputs (Any, Threshold, DeadlineMatch) become one `Relay` per input; relays of one op share
its outputs and are told apart from rivals by `group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, NodeProto

from bbnode.engine.errors import InvalidArtifact
from bbnode.ir import keys, protos
from bbnode.ir.caps import MAX_CALL_DEPTH, MAX_FLAT_OPS
from bbnode.ir.types import TypeNode

ENGINE_DOMAIN = keys.PREFIX + "engine"  # ops that only this file makes
OP_ENTER = "Enter"
OP_RELAY = "Relay"
OP_START = "Start"


_FIRST_OF = {
    (keys.SYSCALL_DOMAIN, "Any"),
    (keys.SYSCALL_DOMAIN, "Threshold"),
    (keys.SYSCALL_DOMAIN, "DeadlineMatch"),
}

FunctionKey = tuple[str, str, str]


@dataclass(slots=True, kw_only=True)
class FlatOp:
    """One op with names of values that are unique in the target; "" is an absent input."""

    position: int
    name: str
    domain: str
    op_type: str
    node: NodeProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()
    group: int  # position of the first of its relays; else its own
    control: list[int] = field(default_factory=list)  # positions

    def needs(self) -> dict[str, None]:
        """Names of all values that have to be there before it fires, each once."""
        return dict.fromkeys([*(name for name in self.inputs if name), *self.after])


@dataclass(slots=True, kw_only=True)
class FlatFunction:
    """A whole partition, flat."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: list[FlatOp]
    types: dict[str, TypeNode]


def split_names(text: str | None) -> tuple[str, ...]:
    """The names of a comma-joined metadata entry."""
    return tuple(name for name in (text or "").split(",") if name)


def flatten(main: FunctionProto, library: Mapping[FunctionKey, FunctionProto]) -> FlatFunction:
    """Inline every call of `library` into `main`.

    Raises InvalidArtifact for a call in a ring, or one that does not fit its function.
    """
    flattener = _Flattener(main.name, library)
    names = {name: name for name in main.input}
    flattener.body(main, "", names, (), depth=0)
    return FlatFunction(
        name=main.name,
        inputs=tuple(main.input),
        outputs=tuple(name for name in main.output if name),
        ops=flattener.ops,
        types=flattener.types,
    )


class _Flattener:
    def __init__(self, target: str, library: Mapping[FunctionKey, FunctionProto]) -> None:
        self._target = target
        self._library = library
        self.ops: list[FlatOp] = []
        self.types: dict[str, TypeNode] = {}

    def body(
        self,
        function: FunctionProto,
        scope: str,
        names: dict[str, str],
        start_after: tuple[str, ...],
        *,
        depth: int,
    ) -> list[int]:
        """Add a body; `names` maps its values to flat ones. Returns the positions it added."""
        if depth > MAX_CALL_DEPTH:
            raise InvalidArtifact(
                self._where(scope), f"calls nest deeper than {MAX_CALL_DEPTH}, or in a ring"
            )
        declared = protos.value_types(function)
        first = len(self.ops)
        by_node: dict[str, list[int]] = {}
        waiting: list[tuple[list[int], tuple[str, ...], str]] = []
        for node in function.node:
            for output in node.output:
                if output and output not in names:
                    names[output] = scope + output
            made = self._node(node, scope, names, start_after, depth)
            by_node.setdefault(node.name, []).extend(made)
            control = split_names(protos.get_meta(node, keys.CONTROL_AFTER_KEY))
            if control:
                # The first op of a call is its Enter: holding that back holds the body back.
                waiting.append((made, control, node.name))
        for name, node_type in declared.items():
            if name in names:
                self.types.setdefault(names[name], node_type)
        for made, control, node_name in waiting:
            held = [p for p in made if self.ops[p].group == self.ops[made[0]].group]
            for before in control:
                if before not in by_node:
                    raise InvalidArtifact(
                        self._where(scope + node_name), f"control_after names no node {before!r}"
                    )
                for position in held:
                    self.ops[position].control.extend(by_node[before])
        return list(range(first, len(self.ops)))

    def _node(
        self,
        node: NodeProto,
        scope: str,
        names: dict[str, str],
        start_after: tuple[str, ...],
        depth: int,
    ) -> list[int]:
        where = self._where(scope + node.name)
        inputs = tuple(self._resolve(name, names, where) for name in node.input)
        outputs = tuple(names[name] if name else "" for name in node.output)
        after = tuple(
            self._resolve(name, names, where)
            for name in split_names(protos.get_meta(node, keys.AFTER_KEY))
        )
        if not after and not any(inputs):
            after = start_after
        callee = self._library.get(protos.call_key(node))
        if callee is not None:
            return self._call(node, callee, scope, inputs, outputs, after, depth)
        if (node.domain, node.op_type) in _FIRST_OF:
            first = len(self.ops)
            present = [name for name in inputs if name]
            for index, name in enumerate(present):
                self._add(
                    f"{scope}{node.name}[{index}]",
                    ENGINE_DOMAIN,
                    OP_RELAY,
                    node,
                    (name,),
                    outputs,
                    after,
                    group=first,
                )
            return list(range(first, len(self.ops)))
        return [
            self._add(scope + node.name, node.domain, node.op_type, node, inputs, outputs, after)
        ]

    def _call(
        self,
        node: NodeProto,
        callee: FunctionProto,
        scope: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        after: tuple[str, ...],
        depth: int,
    ) -> list[int]:
        where = self._where(scope + node.name)
        if len(inputs) > len(callee.input) or len(outputs) > len(callee.output):
            raise InvalidArtifact(
                where,
                f"calls {callee.name} with {len(inputs)} inputs and {len(outputs)} outputs; it has "
                f"{len(callee.input)} and {len(callee.output)}",
            )
        inner = f"{scope}{node.name}/"
        names: dict[str, str] = {}
        for formal, given in zip(callee.input, inputs, strict=False):
            if given:
                names[formal] = inner + formal
        entered = inner + "\0entered"
        enter = self._add(
            f"{inner}{OP_ENTER}",
            ENGINE_DOMAIN,
            OP_ENTER,
            node,
            tuple(given for given in inputs if given),
            (*names.values(), entered),
            after,
        )
        # A result that is made inside goes by the caller's name; one that is handed through
        # (an argument, or listed twice) needs an op of its own to be copied by.
        copies: list[tuple[str, str]] = []
        for formal, outer in zip(callee.output, outputs, strict=False):
            if not outer:
                continue
            if formal in names:
                copies.append((formal, outer))
            else:
                names[formal] = outer
        made = self.body(callee, inner, names, (entered,), depth=depth + 1)
        for formal, outer in copies:
            made.append(
                self._add(
                    f"{inner}{outer}", ENGINE_DOMAIN, OP_ENTER, node, (names[formal],), (outer,), ()
                )
            )
        return [enter, *made]

    def _add(
        self,
        name: str,
        domain: str,
        op_type: str,
        node: NodeProto,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        after: tuple[str, ...],
        group: int | None = None,
    ) -> int:
        position = len(self.ops)
        if position >= MAX_FLAT_OPS:
            raise InvalidArtifact(self._where(name), f"the target has over {MAX_FLAT_OPS} ops")
        self.ops.append(
            FlatOp(
                position=position,
                name=name,
                domain=domain,
                op_type=op_type,
                node=node,
                inputs=inputs,
                outputs=outputs,
                after=after,
                group=position if group is None else group,
            )
        )
        return position

    def _resolve(self, name: str, names: Mapping[str, str], where: str) -> str:
        if not name:
            return ""
        if name not in names:
            raise InvalidArtifact(where, f"reads {name!r}, which nothing before it makes")
        return names[name]

    def _where(self, place: str) -> str:
        return f"{self._target}: {place}" if place else self._target


def check_values(flat: FlatFunction) -> dict[str, list[int]]:
    """Positions that make each value; InvalidArtifact when two rivals make the same one."""
    makers: dict[str, list[int]] = {name: [] for name in flat.inputs}
    for op in flat.ops:
        for name in op.outputs:
            if not name:
                continue
            known = makers.setdefault(name, [])
            if name in flat.inputs or any(flat.ops[p].group != op.group for p in known):
                raise InvalidArtifact(f"{flat.name}: {op.name}", f"makes {name!r} a second time")
            known.append(op.position)
    for op in flat.ops:
        for name in op.needs():
            if name not in makers:
                raise InvalidArtifact(
                    f"{flat.name}: {op.name}", f"reads {name!r}, which nothing makes"
                )
    for name in flat.outputs:
        if name not in makers:
            raise InvalidArtifact(flat.name, f"declares the output {name!r}, which nothing makes")
    return makers


def check_acyclic(flat: FlatFunction, makers: Mapping[str, Sequence[int]]) -> None:
    """Raise InvalidArtifact when ops wait for each other in a ring."""
    waits: list[int] = [0] * len(flat.ops)
    followers: list[list[int]] = [[] for _ in flat.ops]
    for op in flat.ops:
        before = {p for name in op.needs() for p in makers[name]} | set(op.control)
        waits[op.position] = len(before)
        for position in before:
            followers[position].append(op.position)
    ready = [position for position, count in enumerate(waits) if count == 0]
    done = 0
    while ready:
        position = ready.pop()
        done += 1
        for follower in followers[position]:
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
    if done < len(flat.ops):
        stuck = [flat.ops[p].name for p, count in enumerate(waits) if count][:8]
        raise InvalidArtifact(flat.name, f"ops wait for each other in a ring: {', '.join(stuck)}")
