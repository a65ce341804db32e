"""The flattening of a partition main into one list of ops.

Rule: calls of sub-Modules are inlined here, each call site with its own values, so that a call
costs nothing at run time and two calls never see each other. A call is strict: its body starts
once all arguments exist (op `Enter`). Ops that fire on the first of several inputs (Any,
Threshold, DeadlineMatch) become one `Relay` per input; relays of one op share its outputs and its
`group`, which distinguishes them from rival makers. A join over executions becomes one `Deposit`
per input, in the executions that bring the values, and a `Joined`, which starts the execution that
continues.

The compiler checks programs in this form and the engine plans them from it, so that both agree on
which ops can fire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bbnode.ir import keys
from bbnode.ir.calls import Counted, InliningRefused, inlined_size
from bbnode.ir.caps import MAX_DEADLINE_S, MAX_FLAT_CHARS, MAX_FLAT_OPS, MAX_GATHERED
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key
from bbnode.ir.shapes import Dim
from bbnode.ir.types import TypeNode

ENGINE_DOMAIN = keys.PREFIX + "engine"  # ops that only this file makes
OP_ENTER = "Enter"
OP_RELAY = "Relay"
OP_START = "Start"
OP_DEPOSIT = "Deposit"
OP_JOINED = "Joined"


# Of the syscalls.
_FIRST_OF = frozenset({"Any", keys.OP_THRESHOLD, "DeadlineMatch"})


class MalformedFlow(AuthorError):
    """The ops of a function don't fit together; `where` names the op."""

    def __init__(self, where: str, what: str) -> None:
        self.where = where
        self.what = what
        super().__init__(f"{where}: {what}")


def is_join(node: OpNode) -> bool:
    """Return True if an op gathers values of several executions and continues in a new one.

    These are Collect, and a Threshold that waits for more arrivals than it has inputs.
    """
    if node.domain != keys.SYSCALL_DOMAIN:
        return False
    if node.op_type == keys.OP_THRESHOLD:
        count = node.attr("n")
        return type(count) is int and count > sum(1 for name in node.inputs if name)
    return node.op_type == keys.OP_COLLECT


def join_fault(node: OpNode) -> str | None:
    """Describe a fault in the numbers of a Collect or a Threshold; None if there is none."""
    gathers = node.op_type == keys.OP_COLLECT
    numbers = {name: node.attr(name, 0) for name in ("n", "until_ns", "quorum", "per_peer")}
    for name, number in numbers.items():
        most = MAX_GATHERED if name in ("n", "quorum") else MAX_DEADLINE_S * 1_000_000_000
        least = 1 if name == "n" and not gathers else 0
        if type(number) is not int or not least <= number <= most:
            return f"{name} is {number!r:.40}, it has to be {least} to {most}"
    if gathers and not numbers["n"] and not numbers["until_ns"]:
        return "n and until_ns are 0, so that nothing says when a batch is complete"
    if numbers["n"] and numbers["quorum"] > numbers["n"]:
        return f"quorum is {numbers['quorum']}, more than n, {numbers['n']}"
    if not is_join(node) and (numbers["until_ns"] or numbers["per_peer"]):
        inputs = sum(1 for name in node.inputs if name)
        return (
            f"until_ns and per_peer are for a threshold over executions, and n is {numbers['n']} "
            f"of {inputs} inputs, which is counted within one"
        )
    return None


@dataclass(slots=True, kw_only=True)
class FlatOp:
    """One op, with value names that are unique in the target; "" is an absent input."""

    position: int
    name: str
    domain: str
    op_type: str
    node: OpNode
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()
    needs: tuple[str, ...]  # all values that have to be there before it fires, each once
    group: int  # position of the first of its relays; else its own
    control: list[int] = field(default_factory=list)  # positions

    def is_a(self, domain: str, op_type: str) -> bool:
        """Return True if it is an op of that type."""
        return self.op_type == op_type and self.domain == domain


@dataclass(slots=True, kw_only=True)
class FlatFunction:
    """A flattened partition."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: list[FlatOp]
    types: dict[str, TypeNode]
    shapes: dict[str, tuple[Dim, ...]] = field(default_factory=dict)


def flatten(main: Function, library: Mapping[FunctionKey, Function]) -> FlatFunction:
    """Return `main` with every call of `library` inlined.

    Raises MalformedFlow for a cycle of calls, or a call that does not fit its function.
    """
    _check_size(main, library)
    flat = FlatFunction(
        name=main.name,
        inputs=tuple(main.inputs),
        outputs=tuple(name for name in main.outputs if name),
        ops=[],
        types={},
    )
    _Flattener(flat, library).body(main, _Scope(names={name: name for name in main.inputs}))
    return flat


def _check_size(main: Function, library: Mapping[FunctionKey, Function]) -> None:
    """Raise MalformedFlow if inlining all calls would exceed a bound."""
    bodies: dict[FunctionKey, Counted] = {}
    for key, function in ((main.key, main), *library.items()):
        bodies[key] = counted = Counted()
        for node in function.nodes:
            called = call_key(node)
            chars = len(node.name) + 1
            if called in library:
                counted.calls.append((called, chars))
            counted.ops += 1  # of a call, its Enter
            counted.weight += chars + sum(map(len, node.outputs))
    try:
        ops, chars = inlined_size(main.key, bodies)
    except InliningRefused as error:
        raise MalformedFlow(main.name, str(error)) from error
    if ops > MAX_FLAT_OPS:
        what = f"the target has over {MAX_FLAT_OPS} ops; call its Modules fewer times, or split it"
        raise MalformedFlow(main.name, what)
    if chars > MAX_FLAT_CHARS:
        what = f"the names of its ops have over {MAX_FLAT_CHARS} characters; shorten them"
        raise MalformedFlow(main.name, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """One call: prefix of its names, flat names of its values, and its first op's output."""

    names: dict[str, str]
    prefix: str = ""
    start_after: tuple[str, ...] = ()


class _Flattener:
    def __init__(self, flat: FlatFunction, library: Mapping[FunctionKey, Function]) -> None:
        self._flat = flat
        self._library = library

    def body(self, function: Function, scope: _Scope) -> list[int]:
        """Add a body; return the positions of its ops."""
        ops, names = self._flat.ops, scope.names
        first = len(ops)
        by_node: dict[str, list[int]] = {}
        waiting: list[tuple[list[int], list[str], str]] = []
        for node in function.nodes:
            for output in node.outputs:
                if output and output not in names:
                    names[output] = scope.prefix + output
            positions = self._node(node, scope)
            by_node[node.name] = (
                by_node[node.name] + positions if node.name in by_node else positions
            )
            control = node.metadata.get(keys.CONTROL_AFTER_KEY)
            if control:
                # The first op of a call is its Enter, whose control edges hold back the body.
                waiting.append(
                    (positions, [name for name in control.split(",") if name], node.name)
                )
        for name, kind in function.kinds().items():
            if name in names:
                self._flat.types.setdefault(names[name], kind)
        for name, declared in function.types.items():
            if declared.shape is not None and name in names:
                self._flat.shapes.setdefault(names[name], declared.shape)
        for positions, control_after, node_name in waiting:
            held = [p for p in positions if ops[p].group == ops[positions[0]].group]
            for before in control_after:
                if before not in by_node:
                    raise self._wrong(
                        scope.prefix + node_name, f"control_after names no node {before!r}"
                    )
                for position in held:
                    ops[position].control.extend(by_node[before])
        return list(range(first, len(ops)))

    def _node(self, node: OpNode, scope: _Scope) -> list[int]:
        name, names = scope.prefix + node.name, scope.names
        try:
            inputs = tuple([names[read] if read else "" for read in node.inputs])
            after = tuple([names[read] for read in node.after])
        except KeyError as error:
            what = f"reads {error.args[0]!r}, which nothing before it makes"
            raise self._wrong(name, what) from None
        outputs = tuple([names[made] if made else "" for made in node.outputs])
        if node.graphs:  # what they read from outside has to be there as well
            after = (*[names[read] for read in node.captured if read in names], *after)
        if not after and not any(inputs):
            after = scope.start_after
        callee = self._library.get(call_key(node)) if self._library else None
        if callee is not None:
            return self._call(node, callee, scope, inputs, outputs, after)
        if node.domain != keys.SYSCALL_DOMAIN:
            return [self._add(name, "", node, inputs, outputs, after)]
        if is_join(node):
            return self._join(name, node, inputs, outputs, after)
        if node.op_type in _FIRST_OF:
            first = len(self._flat.ops)
            present = [read for read in inputs if read]
            for index, read in enumerate(present):
                self._add(f"{name}[{index}]", OP_RELAY, node, (read,), outputs, after, first)
            return list(range(first, len(self._flat.ops)))
        return [self._add(name, "", node, inputs, outputs, after)]

    def _join(
        self,
        name: str,
        node: OpNode,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        after: tuple[str, ...],
    ) -> list[int]:
        first = len(self._flat.ops)
        present = [read for read in inputs if read]
        if not present:
            raise self._wrong(name, f"{node.op_type} has no input, so that nothing can arrive")
        for index, read in enumerate(present):
            self._add(f"{name}[{index}]", OP_DEPOSIT, node, (read,), (), after, first)
        self._add(name, OP_JOINED, node, (), outputs, ())
        return list(range(first, len(self._flat.ops)))

    def _call(
        self,
        node: OpNode,
        callee: Function,
        scope: _Scope,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        after: tuple[str, ...],
    ) -> list[int]:
        inner = f"{scope.prefix}{node.name}/"
        if len(inputs) > len(callee.inputs) or len(outputs) > len(callee.outputs):
            raise self._wrong(
                inner[:-1],
                f"calls {callee.name} with {len(inputs)} inputs and {len(outputs)} outputs; it has "
                f"{len(callee.inputs)} and {len(callee.outputs)}",
            )
        pairs = zip(callee.inputs, inputs, strict=False)
        names = {formal: inner + formal for formal, given in pairs if given}
        entered = inner + "\0entered"
        given = tuple([name for name in inputs if name])
        enter = self._add(
            inner + OP_ENTER, OP_ENTER, node, given, (*names.values(), entered), after
        )
        # A result that the body makes gets the caller's name; one that is handed through (an
        # argument, or listed twice) needs an op that copies it.
        copies: list[tuple[str, str]] = []
        for formal, outer in zip(callee.outputs, outputs, strict=False):
            if outer and names.setdefault(formal, outer) != outer:
                copies.append((formal, outer))
        body = _Scope(names=names, prefix=inner, start_after=(entered,))
        made = self.body(callee, body)
        for formal, outer in copies:
            made.append(self._add(inner + outer, OP_ENTER, node, (names[formal],), (outer,), ()))
        return [enter, *made]

    def _add(
        self,
        name: str,
        op_type: str,
        node: OpNode,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        after: tuple[str, ...],
        group: int | None = None,
    ) -> int:
        """Add an op of the engine's own, or the node's op if `op_type` is empty."""
        position = len(self._flat.ops)
        if position >= MAX_FLAT_OPS:
            raise self._wrong(name, f"the target has over {MAX_FLAT_OPS} ops")
        needs = inputs + after if after else inputs
        if len(needs) > 1 or "" in needs:
            needs = tuple(dict.fromkeys(filter(None, needs)))
        self._flat.ops.append(
            FlatOp(
                position=position,
                name=name,
                domain=ENGINE_DOMAIN if op_type else node.domain,
                op_type=op_type or node.op_type,
                node=node,
                inputs=inputs,
                outputs=outputs,
                after=after,
                needs=needs,
                group=position if group is None else group,
            )
        )
        return position

    def _wrong(self, place: str, what: str) -> MalformedFlow:
        return MalformedFlow(f"{self._flat.name}: {place}" if place else self._flat.name, what)


def check_values(flat: FlatFunction) -> dict[str, list[int]]:
    """Return the positions that make each value. Raises MalformedFlow for rival makers."""
    makers: dict[str, list[int]] = {name: [] for name in flat.inputs}
    for op in flat.ops:
        for name in op.outputs:
            if not name:
                continue
            known = makers.setdefault(name, [])
            if name in flat.inputs or (known and any(flat.ops[p].group != op.group for p in known)):
                raise MalformedFlow(f"{flat.name}: {op.name}", f"makes {name!r} a second time")
            known.append(op.position)
    for op in flat.ops:
        for name in op.needs:
            if name not in makers:
                raise MalformedFlow(
                    f"{flat.name}: {op.name}", f"reads {name!r}, which nothing makes"
                )
    for name in flat.outputs:
        if name not in makers:
            raise MalformedFlow(flat.name, f"declares the output {name!r}, which nothing makes")
    return makers


def check_acyclic(flat: FlatFunction, makers: Mapping[str, Sequence[int]]) -> None:
    """Raise MalformedFlow if ops wait for each other in a cycle."""
    needs = [{p for name in op.needs for p in makers[name]} | {*op.control} for op in flat.ops]
    if all(not before or max(before) < at for at, before in enumerate(needs)):
        return
    waits = list(map(len, needs))
    followers: list[list[int]] = [[] for _ in flat.ops]
    for at, before in enumerate(needs):
        for position in before:
            followers[position].append(at)
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
        raise MalformedFlow(flat.name, f"ops wait for each other in a ring: {', '.join(stuck)}")
