"""From slices to entry plans: numbers instead of names.

Rule: every value of a slice gets an index, constants become part of the template, and every
op its binder's `fire`. Constants that wait for nothing are not ops at all. A separate op
(`Surface`) hands each output of the target to the application, so that outputs cost nothing in
entries without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bbnode.engine.errors import InvalidArtifact, MissingOp
from bbnode.engine.frame import MISSING, SCRATCH, EntryPlan, Op
from bbnode.engine.joins import JoinPlan
from bbnode.engine.latches import LatchPlan
from bbnode.engine.ops import syscalls
from bbnode.engine.ops.build import Fire, Linker, OpBuild, binder_of
from bbnode.engine.ops.custom import bind_custom_op
from bbnode.engine.ops.graphs import GraphSpec, bind_graph, function_spec, single_spec
from bbnode.engine.ops.joins import join_plan
from bbnode.engine.ops.peer_lists import bind_peer_list_op, is_peer_list_op
from bbnode.engine.ops.role import bind_role_op
from bbnode.engine.places import OpPlace
from bbnode.engine.planning.latches import latches_of
from bbnode.engine.planning.sites import RecvSite, ResponseSite, recv_site, sender_classes
from bbnode.engine.stores import SemaphoreSpec, StorePlan
from bbnode.ir import keys
from bbnode.ir.address import site_suffix
from bbnode.ir.flatten import (
    ENGINE_DOMAIN,
    OP_JOINED,
    OP_RELAY,
    FlatFunction,
    FlatOp,
    check_values,
)
from bbnode.ir.graph import Function, FunctionKey, OpNode, call_key, is_onnx_domain, is_role
from bbnode.ir.opset import is_custom, lookup_op
from bbnode.ir.slices import INVOKE, Slice, is_entry, left_out
from bbnode.ir.types import TypeNode
from bbnode.ops.custom import find_custom_op, installed_version

# Entries that fire by themselves, and the attribute that says when (None: nothing to say).
SOURCE_ARGUMENTS: Mapping[str, tuple[str, int] | None] = {
    "Pulse": None,
    "Interval": ("period_ns", 1),
    "EventSource": ("kind", 0),
    "LifecyclePhase": ("phase", 0),
}


_MOST_LEFT_OUT = 8  # ops of an event that are named because they need more than it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSourcePlan:
    """An entry that fires by itself.

    `argument`: period of an Interval, kind of an EventSource, phase of a LifecyclePhase.
    """

    kind: str
    argument: int
    plan: EntryPlan


class Planner:
    """Builds the entry plans of all targets of one program."""

    def __init__(
        self,
        graphs: Mapping[FunctionKey, Function],
        slots: Sequence[str],
        opsets: Mapping[str, int],
        answers: Mapping[bytes, tuple[TypeNode, ...]],
    ) -> None:
        """Start a plan.

        Args:
            graphs: functions that backends run.
            slots: all that something is bound to, in their order.
            opsets: versions by domain, upstream ONNX as "".
            answers: the types of answers, by the suffix of the site where they come in.
        """
        self._answers = answers
        self._functions = graphs
        numbers = {slot: index for index, slot in enumerate(slots)}
        self.linker = Linker(slots=numbers, response_site_of=self._response_site_of)
        self._opsets = opsets
        self._places: dict[
            object, OpPlace
        ] = {}  # by line and Module; of a fused graph, by its call
        self._graph_at: dict[tuple[str, str], int] = {}
        self._slice: tuple[FlatFunction, Slice] | None = None
        self.graphs: list[GraphSpec] = []
        self.sites: dict[bytes, RecvSite | ResponseSite] = {}
        self.sources: list[EventSourcePlan] = []
        self._joins: dict[int, JoinPlan] = {}
        # By target and group: the number, and the slices whose executions open its rounds.
        self._latch_at: dict[tuple[str, int], tuple[int, frozenset[str]]] = {}
        self.latches: list[LatchPlan] = []
        self.unsupported: list[str] = []
        self.missing_ops: list[MissingOp] = []
        self.unreachable: list[str] = []

    # -- one slice ---------------------------------------------------------------------------

    def build(self, flat: FlatFunction, piece: Slice) -> EntryPlan:
        """Return the plan of one slice; raises InvalidArtifact."""
        self._slice = (flat, piece)
        plan = EntryPlan(piece.name, flat.name)
        indices: dict[str, int] = {}
        template = plan.template

        def index_of(name: str) -> int:
            if name not in indices:
                indices[name] = len(template)
                template.append(MISSING)
            return indices[name]

        plan.seed_names = piece.seeds
        plan.seeds = tuple(index_of(name) for name in piece.seeds)
        ops: list[Op] = []
        places: list[OpPlace | None] = []
        by_position: dict[int, Op] = {}
        ready_values = set(piece.seeds)
        chosen = [flat.ops[p] for p in piece.positions]
        for flat_op in chosen:
            if _is_plain_constant(flat_op):
                unused = Op(0, flat_op.name, flat_op.op_type, 0)
                build = self._op_build(flat, flat_op, unused, (), ())
                template[index_of(flat_op.outputs[0])] = syscalls.constant_value(build)
                ready_values.add(flat_op.outputs[0])
        absent = len(template)
        template.append(None)  # what an op reads for an input that its node leaves out
        rivals = Counter(op.group for op in chosen)
        relays: dict[int, list[Op]] = {}
        opening = self._opening(flat, piece)
        for group, number in opening.items():
            op = Op(len(ops), f"{flat.ops[group].node.name}#open", "OpenRound", 0)
            op.fire = syscalls.open_round(number)
            ops.append(op)
            places.append(self._place(flat.ops[group].node))
        for flat_op in chosen:
            if _is_plain_constant(flat_op):
                continue
            source = flat_op.node.metadata.get(keys.DEADLINE_FROM_KEY, "")
            deadline_ns = _deadline_ns(flat, flat_op)
            op = Op(len(ops), flat_op.name, flat_op.op_type, deadline_ns, source)
            inputs = tuple(index_of(n) if n else absent for n in flat_op.inputs)
            outputs = tuple(index_of(n) if n else SCRATCH for n in flat_op.outputs)
            build = self._op_build(flat, flat_op, op, inputs, outputs)
            if flat_op.is_a(ENGINE_DOMAIN, OP_RELAY):
                build.counter = index_of(f"\0fired {flat_op.group}")
                build.skips = index_of(f"\0skipped {flat_op.group}")
                build.rivals = rivals[flat_op.group]
                build.group = relays.setdefault(flat_op.group, [])
                build.group.append(op)
                latch = self._latch_at.get((flat.name, flat_op.group))
                build.latch = None if latch is None else latch[0]
                build.opens_round = flat_op.group in opening
            if len(outputs) == 1:
                op.out = outputs[0]
            elif outputs:
                op.outs = outputs
            binder = self._binder(flat_op)
            if binder is not None:  # else `report_unsupported` lists it, and nothing ever runs
                op.fire = binder(build)
            ops.append(op)
            places.append(build.place)
            by_position[flat_op.position] = op
        for position, op in by_position.items():
            op.needs = tuple(indices[n] for n in flat.ops[position].needs if n in indices)
        waits = _connect(flat, by_position, ready_values)
        ops += self._surfaces(flat, piece, indices, by_position, ready_values, waits, len(ops))
        plan.places = tuple(places)
        template.append(MISSING)  # scratch
        plan.in_turn = _runs_in_turn(chosen)
        plan.is_request = piece.source is not None and piece.source.op_type == keys.OP_RECV_REQ
        plan.in_order = _fires_in_order(chosen)
        plan.calls = frozenset(self._calls(chosen))
        plan.complete(ops, waits)
        return plan

    def _calls(self, ops: Iterable[FlatOp]) -> Iterator[tuple[int, str]]:
        """Yield slot and method of each op that calls a component."""
        for op in ops:
            spec = lookup_op(op.domain, op.op_type)
            number = self.linker.slots.get(op.node.metadata.get(keys.SLOT_KEY, ""))
            if spec is not None and spec.role is not None and number is not None:
                yield number, spec.method

    def find_latches(self, flat: FlatFunction, pieces: Sequence[Slice]) -> None:
        """Number the ops of a target that fire once over several of its slices."""
        for group, latch in latches_of(flat, check_values(flat), pieces).items():
            self._latch_at[flat.name, group] = len(self.latches), latch.opened_by
            self.latches.append(latch.plan)

    def _opening(self, flat: FlatFunction, piece: Slice) -> dict[int, int]:
        """Return the latches whose rounds the executions of a slice open: number by group."""
        groups = dict.fromkeys(flat.ops[p].group for p in piece.positions)
        known = {g: self._latch_at.get((flat.name, g)) for g in groups}
        return {g: each[0] for g, each in known.items() if each and piece.name in each[1]}

    def _op_build(
        self,
        flat: FlatFunction,
        flat_op: FlatOp,
        op: Op,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> OpBuild:
        return OpBuild(
            op=op,
            flat=flat_op,
            target=flat.name,
            inputs=inputs,
            outputs=outputs,
            types=flat.types,
            shapes=flat.shapes,
            place=self._place(flat_op.node),
            linker=self.linker,
        )

    def find_left_out(
        self, flat: FlatFunction, makers: Mapping[str, Sequence[int]], piece: Slice, plan: EntryPlan
    ) -> None:
        """Note what the executions of some inputs leave undone for want of the others."""
        if piece.source is not None or piece.name == INVOKE:
            return
        plan.left_out = tuple(
            (
                _authors_name(op),
                f"it needs {', '.join(lacking)} as well; invoke gives all inputs at once",
                self._place(op.node),
            )
            for op, lacking in left_out(flat, makers, piece)[:_MOST_LEFT_OUT]
        )

    def _place(self, node: OpNode) -> OpPlace:
        """Return the place of an op; ops of one line of a Module share theirs."""
        key: object = node
        if keys.MEMBERS_KEY not in node.metadata:
            key = node.source_line, node.metadata.get(keys.MODULE_INSTANCE_KEY, "")
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = OpPlace(node)
        return found

    def _surfaces(
        self,
        flat: FlatFunction,
        piece: Slice,
        indices: Mapping[str, int],
        by_position: Mapping[int, Op],
        ready: set[str],
        waits: dict[int, int],
        start: int,
    ) -> list[Op]:
        made: list[Op] = []
        for name in dict.fromkeys(flat.outputs):
            positions = [
                p for p in piece.positions if p in by_position and name in flat.ops[p].outputs
            ]
            makers = [by_position[p] for p in positions]
            if not makers and not (name in ready and name in indices):
                continue
            if len(makers) == 1 and _only_names(flat, flat.ops[positions[0]], makers[0]):
                # The PassThrough shows the value that it would have handed on.
                source = indices[flat.ops[positions[0]].inputs[0]]
                makers[0].op_type, makers[0].out = "Surface", SCRATCH
                makers[0].fire = syscalls.surface(flat.name, name, source)
                makers[0].skip = syscalls.surface_nothing(flat.name, name)
                continue
            op = Op(start + len(made), name, "Surface", 0)
            op.fire = syscalls.surface(flat.name, name, indices[name])
            op.skip = syscalls.surface_nothing(flat.name, name)
            op.needs = (indices[name],)
            for maker in makers:
                maker.consumers = (*maker.consumers, op)
            waits[op.index] = 1 if makers else 0
            made.append(op)
        return made

    def _binder(self, op: FlatOp) -> Callable[[OpBuild], Fire] | None:
        """Return the binder that makes the `fire` of an op; None if nothing here can run it."""
        binder = binder_of(op.domain, op.op_type)
        if binder is not None:
            return binder
        if is_onnx_domain(op.domain):
            return self._bind_onnx
        if op.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
            return self._bind_subgraph
        spec = lookup_op(op.domain, op.op_type)
        if spec is not None and spec.role is not None:
            return partial(bind_role_op, spec=spec)
        custom = find_custom_op(op.domain, op.op_type)
        if custom is not None and self._opsets.get(op.domain) == custom.spec.version:
            return partial(bind_custom_op, custom=custom)
        return None

    def _bind_onnx(self, build: OpBuild) -> Fire:
        if is_peer_list_op(build):
            return bind_peer_list_op(build)
        slot, cell_at = build.slot()
        spec = single_spec(build, slot, self._opsets.get("", keys.ONNX_OPSET_VERSION))
        graph_at = self._graph((slot, f"{build.target} {build.flat.name}"), spec)
        return bind_graph(build, graph_at, cell_at)

    def _bind_subgraph(self, build: OpBuild) -> Fire:
        key = call_key(build.node)
        function = self._functions.get(key)
        if function is None:
            raise build.wrong("calls a graph that the model does not hold")
        slot, cell_at = build.slot()
        # Calls of one function on one slot share a graph.
        spec = function_spec(build, function, slot)
        return bind_graph(build, self._graph((slot, "/".join(key)), spec), cell_at)

    def report_unsupported(self, flat: FlatFunction) -> None:
        """List the ops that nothing here can run."""
        for op in flat.ops:
            if is_entry(op):
                known = op.domain != keys.SYSCALL_DOMAIN or op.op_type in SOURCE_ARGUMENTS
            else:
                known = self._binder(op) is not None
            if known:
                continue
            if is_custom(op.domain):
                self.missing_ops.append(self._missing(flat, op))
            else:
                self.unsupported.append(f"{flat.name}: {op.name}: {op.domain}::{op.op_type}")

    def _missing(self, flat: FlatFunction, op: FlatOp) -> MissingOp:
        return MissingOp(
            where=f"{flat.name}: {op.name}",
            domain=op.domain,
            op_type=op.op_type,
            version=self._opsets.get(op.domain, 0),
            installed=installed_version(op.domain),
            package=op.node.metadata.get(keys.PACKAGE_KEY, ""),
        )

    def add_source(self, flat: FlatFunction, piece: Slice, plan: EntryPlan) -> None:
        """Register what starts a slice: a site or an event source."""
        if piece.source is None:
            return
        build = self._op_build(
            flat, piece.source, Op(0, piece.name, piece.source.op_type, 0), (), plan.seeds
        )
        if piece.source.domain == keys.WIRE_DOMAIN:
            self._add_site(build, recv_site(build, flat, plan, self.linker.slots))
            return
        if piece.source.is_a(ENGINE_DOMAIN, OP_JOINED):
            number = self.linker.join(flat.name, piece.source.name)
            self._joins[number] = join_plan(build, plan)
            return
        argument = SOURCE_ARGUMENTS.get(piece.source.op_type)
        value = 0 if argument is None else build.attr_int(argument[0], minimum=argument[1])
        if piece.source.op_type in SOURCE_ARGUMENTS:
            self.sources.append(
                EventSourcePlan(kind=piece.source.op_type, argument=value, plan=plan)
            )

    def _add_site(self, build: OpBuild, site: RecvSite | ResponseSite) -> None:
        suffix = site_suffix(site.site)
        known = self.sites.setdefault(suffix, site)
        if known is not site and known.name != site.name:
            raise build.wrong(f"has the site id of {known.name}")

    def _graph(self, key: tuple[str, str], spec: GraphSpec) -> int:
        if key not in self._graph_at:
            self._graph_at[key] = len(self.graphs)
            self.graphs.append(spec)
        return self._graph_at[key]

    @property
    def joins(self) -> tuple[JoinPlan, ...]:
        """The joins of all targets, by number."""
        return tuple(self._joins[number] for number in sorted(self._joins))

    def store_plan(self) -> StorePlan:
        """Return the plan of what all targets keep between executions.

        A semaphore that no op here acquires has no units, so releasing it fails.
        """
        return StorePlan(
            semaphores=tuple(
                SemaphoreSpec(name=name, units=units or 0)
                for name, (_, units, _) in self.linker.semaphores.items()
            ),
            queues=tuple(self.linker.queues),
            holds=tuple(self.linker.holds),
        )

    def _response_site_of(self, build: OpBuild) -> int | None:
        """Return the site where a request's answers arrive, if its slice collects them."""
        if self._slice is None or not build.flat.outputs:
            return None
        flat, piece = self._slice
        request = build.flat.outputs[0]
        for position in piece.positions:
            op = flat.ops[position]
            if op.op_type == keys.OP_RECV_RESP_BATCHED and request in op.inputs:
                other = self._op_build(flat, op, build.op, (), ())
                site = other.meta_int(keys.SITE_ID_KEY)
                found = ResponseSite(
                    site=site,
                    name=other.where,
                    senders=sender_classes(other),
                    answers=self._answers.get(site_suffix(site), ()),
                )
                self._add_site(other, found)
                return site
        return None


# Ops that another execution, maybe of the same entry, has to release.
_WAIT_FOR_OTHERS = frozenset({"Serialize.Dequeue", "Hold.Flush", "Limit.Acquire"})


def _runs_in_turn(ops: Iterable[FlatOp]) -> bool:
    """Return True if executions of these ops have to take turns (`bbnode.engine.turns`)."""
    uses: Counter[str] = Counter()
    changed: set[str] = set()
    for op in ops:
        if op.domain == keys.SYSCALL_DOMAIN and op.op_type in _WAIT_FOR_OTHERS:
            return False
        slot = op.node.metadata.get(keys.SLOT_KEY)
        spec = lookup_op(op.domain, op.op_type)
        if slot is not None and spec is not None and spec.role is not None:
            uses[slot] += 1
            if spec.changes:
                changed.add(slot)
    return any(uses[slot] > 1 for slot in changed)


def _authors_name(op: FlatOp) -> str:
    """Return the name that the author knows an op by."""
    if op.is_a(ENGINE_DOMAIN, OP_RELAY):
        return op.name[: op.name.rindex("[")]
    return op.name.removesuffix(keys.SUBGRAPH_CALL_SUFFIX)


# Syscalls whose values or effects depend on which of them fires first.
_TAKES_TURNS = frozenset(
    {"CorrelateTag", "MintDispatch", "RngU64", *_WAIT_FOR_OTHERS, "Hold.Stash", "Limit.Release",
     "Serialize.Enqueue"}
)  # fmt: skip


def _fires_in_order(ops: Sequence[FlatOp]) -> bool:
    """Return True if it can be seen which of several ready ops fires first.

    So it is with rivals for one value, and with two ops that send, draw, or call one component.
    """
    seen: set[str] = set()
    for op in ops:
        if op.is_a(ENGINE_DOMAIN, OP_RELAY):
            what = f"relay {op.group}"
        elif op.domain == keys.WIRE_DOMAIN:
            what = op.domain
        elif op.domain == keys.SYSCALL_DOMAIN:
            what = op.domain if op.op_type in _TAKES_TURNS else ""
        else:
            what = op.node.metadata.get(keys.SLOT_KEY, "") if is_role(op.node) else ""
        if what and what in seen:
            return True
        seen.add(what)
    return False


def _connect(flat: FlatFunction, by_position: Mapping[int, Op], ready: set[str]) -> dict[int, int]:
    """Set consumers; returns how many ops (or groups of relays) each op index waits for."""
    consumers: dict[int, list[Op]] = {position: [] for position in by_position}
    order_only: dict[int, list[int]] = {}
    makers: dict[str, list[int]] = {}
    for position in by_position:
        for name in flat.ops[position].outputs:
            if name:
                makers.setdefault(name, []).append(position)
    waits: dict[int, int] = {}
    for position, op in by_position.items():
        flat_op = flat.ops[position]
        before: dict[int, None] = {}
        for name in flat_op.needs:
            if name not in ready:
                before.update(dict.fromkeys(makers.get(name, ())))
        # Control edges to ops outside of the slice do not count.
        for p in flat_op.control:
            if p in by_position and p not in before:
                before[p] = None
                order_only.setdefault(p, []).append(op.index)
        groups = {flat.ops[p].group for p in before}
        waits[op.index] = len(groups)
        for p in before:
            consumers[p].append(op)
    for position, found in consumers.items():
        by_position[position].consumers = tuple(found)
    for position, indices in order_only.items():
        by_position[position].order_only = frozenset(indices)
    return waits


def _only_names(flat: FlatFunction, flat_op: FlatOp, op: Op) -> bool:
    """Return True if the op only names a value, as `g.output` records one, and checks nothing."""
    is_named = flat_op.is_a(keys.SYSCALL_DOMAIN, "PassThrough") and not op.consumers
    return is_named and flat_op.outputs[0] not in flat.shapes


def _is_plain_constant(op: FlatOp) -> bool:
    return (
        op.is_a(keys.SYSCALL_DOMAIN, "Constant")
        and not op.after
        and not op.control
        and len(op.outputs) == 1
    )


def _deadline_ns(flat: FlatFunction, op: FlatOp) -> int:
    text = op.node.metadata.get(keys.DEADLINE_NS_KEY)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise InvalidArtifact(f"{flat.name}: {op.name}", f"has the deadline {text!r}")
    return int(text)
