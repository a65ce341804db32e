"""`collapse_backend_subgraphs`: ops that a backend can run together become one graph.

Rule: the engine has one path for backend work, a prepared graph; a single op is a graph too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from bbnode.compiler.analysis.content_hash import HEX_DIGITS, AttributePrints, function_digest
from bbnode.compiler.analysis.functions import by_key
from bbnode.compiler.analysis.order import (
    add_control,
    control_of,
    is_sorted,
    needs_of,
    program_order,
    reorder,
    stands_in_order,
)
from bbnode.compiler.analysis.signatures import import_used, versions_of, write_canonical_domains
from bbnode.compiler.analysis.subgraph_groups import (
    Groups,
    annotation_parameters,
    backend_slot,
    find_groups,
    is_infallible,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass
from bbnode.ir import keys
from bbnode.ir.graph import (
    Function,
    FunctionKey,
    OpNode,
    ValueType,
    annotation_text,
    annotations_on,
    make_node,
)
from bbnode.ir.reopen import mark_call


class CollapseBackendSubgraphs(Pass):
    """Turns upstream ONNX ops of backend slots into functions of domain `backend_subgraph`.

    1. A group is ops of one slot that are connected, without a path out of the group and back
       in, whose outputs all come at the time at which they came without it, and are skipped or
       lost for the same reasons. A single op is a group; an op without a slot, or that refers to
       attributes of its function, stays.
    2. Each group becomes one function, named by a hash of its content: equal graphs share one.
       If and Loop stay inside with their bodies; a small constant goes into each of its
       readers' groups.
    3. The call carries the slot of its ops, waits for all that they waited for (`after`,
       `control_after`), and ops that had a member in `control_after` name the call instead.
    4. The function declares the types of its values as far as they are known.
    5. An op that nobody reads, and that may fail, makes an output of its function: so a backend
       runs it, and its failure is seen.
    6. Between two ops of one slot, a `PassThrough` that waits for nothing (what inlining leaves
       of a Module's border) does not keep them apart, unless it declares more of a shape than its
       input does; it goes when nobody else reads it.
    7. Bodies stay acyclic and in program order.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        table = by_key(unit.program.functions)
        ops = groups = 0
        for function in unit.bodies():
            if function.domain == keys.BACKEND_SUBGRAPH_DOMAIN:
                continue
            if not any(backend_slot(node) is not None for node in function.nodes):
                continue
            needs = needs_of(function.nodes)
            if not is_sorted(needs):
                reorder(function, program_order(function.nodes, needs))
                needs = needs_of(function.nodes)
            if _bypass_aliases(function):
                needs = needs_of(function.nodes)
            grouped = find_groups(function, needs, unit.prints)
            _Rewrite(unit, function, grouped, table).run()
            groups += len(grouped.members)
            ops += sum(map(len, grouped.members)) + len(grouped.copied)
        return {"ops_collapsed": ops, "subgraph_calls": groups}


def _bypass_aliases(function: Function) -> bool:
    """Make backend ops read the outputs of their slot's ops directly, past PassThroughs.

    Return True if that may have changed the function.
    """
    source: dict[str, str] = {}  # PassThrough's output -> input of the first in its chain
    aliases: list[OpNode] = []
    readers: list[OpNode] = []
    for node in function.nodes:
        if _is_alias(node) and not _may_refuse(node, function):
            read = node.inputs[0]
            source[node.outputs[0]] = source.get(read, read)
            aliases.append(node)
        elif not source.keys().isdisjoint(node.inputs) and backend_slot(node) is not None:
            readers.append(node)
    if not readers:
        return False
    producers = function.producers
    for node in readers:
        past = {
            name: source[name] for name in node.inputs
            if name in source and source[name] in producers
            and backend_slot(producers[source[name]]) == backend_slot(node)
        }  # fmt: skip
        if past:
            node.inputs = tuple([past.get(name, name) for name in node.inputs])
    unread: set[OpNode] = set()  # last ones first: one may be the only reader of another
    for node in reversed(aliases):
        name = node.outputs[0]
        if name not in function.outputs and unread.issuperset(function.readers(name)):
            unread.add(node)
    if unread:
        function.remove(*unread)
    return True


def _is_alias(node: OpNode) -> bool:
    return (
        node.domain == keys.SYSCALL_DOMAIN
        and node.op_type == "PassThrough"
        and bool(node.inputs and node.outputs)
        and not node.after
        and node.metadata.get(keys.CONTROL_AFTER_KEY) is None
    )


def _may_refuse(alias: OpNode, function: Function) -> bool:
    """Return True if a PassThrough declares more of a shape than its input does."""
    declared = function.types.get(alias.outputs[0])
    shape = None if declared is None else declared.shape
    if shape is None:
        return False
    source_type = function.types.get(alias.inputs[0])
    known = None if source_type is None else source_type.shape
    if known is None or len(known) != len(shape):
        return True
    named = [axis for axis in shape if isinstance(axis, str)]
    return known != shape and (
        len(set(named)) < len(named)
        or any(
            isinstance(axis, int) and axis != other
            for axis, other in zip(shape, known, strict=True)
        )
    )


class _Rewrite:
    """Replaces the groups of one function by calls."""

    def __init__(
        self,
        unit: CompilationUnit,
        function: Function,
        groups: Groups,
        table: dict[FunctionKey, Function],
    ) -> None:
        self._unit = unit
        self._function = function
        self._groups = groups
        self._table = table
        self._nodes: Sequence[OpNode] = list(function.nodes)
        self._group_of = {i: g for g, members in enumerate(groups.members) for i in members}

    def run(self) -> None:
        exposed = self._exposed()
        collapse = Collapser(
            self._function.types, versions_of(self._function, self._unit.program), self._unit.prints
        )
        constants = {self._nodes[i].outputs[0]: self._nodes[i] for i in self._groups.copied}
        calls: dict[int, OpNode] = {}  # index of the group's last node -> call
        renamed: dict[str, str] = {}
        for members in self._groups.members:
            nodes = [self._nodes[index] for index in members]
            nodes[:0] = _used_constants(nodes, constants)
            function, call = collapse(nodes, exposed)
            if function.key not in self._table:
                self._unit.program.functions.append(function)
                self._table[function.key] = function
            for node in nodes:
                self._unit.recording.mark(node)
            mark_call(call, nodes, [n for node in nodes for n in node.outputs if n])
            calls[members[-1]] = call
            for index in members:
                renamed[self._nodes[index].name] = call.name
        self._replace(calls, renamed)
        self._drop_types()

    def _exposed(self) -> set[str]:
        """Return the values of groups that are read outside of their group."""
        groups = {
            name: group for index, group in self._group_of.items()
            for name in self._nodes[index].outputs if name
        }  # fmt: skip
        group_of = self._group_of
        exposed = {name for name in self._function.outputs if name in groups}
        read = {name for node in self._nodes for name in node.reads}.union(exposed)
        for index in group_of:
            node = self._nodes[index]
            if read.isdisjoint(node.outputs) and not is_infallible(node, self._function):
                # A backend runs an op only for a named output, so an unread op exposes its last.
                exposed.update([name for name in node.outputs if name][-1:])
        for index, node in enumerate(self._nodes):
            group = group_of.get(index)
            for name in node.reads:
                if groups.get(name, group) != group:
                    exposed.add(name)
        return exposed

    def _replace(self, calls: dict[int, OpNode], renamed: dict[str, str]) -> None:
        nodes: list[OpNode] = []
        places = [-1] * len(self._nodes)  # -1: a copied constant has no place
        for index, node in enumerate(self._nodes):
            if index in calls:
                for member in self._groups.members[self._group_of[index]]:
                    places[member] = len(nodes)
                nodes.append(calls[index])
            elif index not in self._group_of and index not in self._groups.copied:
                _rename_control(node, renamed)
                places[index] = len(nodes)
                nodes.append(node)
        if not stands_in_order(nodes, self._function.inputs):
            order = program_order(nodes, self._needs_between(places, len(nodes)))
            nodes = [nodes[index] for index in order]
        self._function.nodes = nodes

    def _needs_between(self, places: Sequence[int], count: int) -> list[list[int]]:
        """Return the dependencies of the new nodes; `places` maps old to new indices."""
        needs: list[list[int]] = [[] for _ in range(count)]
        for before, place in zip(self._groups.needs, places, strict=True):
            if place >= 0:
                needs[place] += [p for p in [places[need] for need in before] if -1 != p != place]
        return needs

    def _drop_types(self) -> None:
        """Drop declarations of values that moved into a subgraph, which declares them itself."""
        left = set(self._function.inputs)
        left.update(name for node in self._function.nodes for name in node.outputs)
        self._function.keep_types(left)


def _used_constants(nodes: Sequence[OpNode], constants: dict[str, OpNode]) -> list[OpNode]:
    if not constants:
        return []
    used = dict.fromkeys(
        n for node in nodes
        for n in (*node.computes_with, *annotation_parameters(node)) if n in constants
    )  # fmt: skip
    return [constants[name] for name in used]


def _rename_control(node: OpNode, renamed: dict[str, str]) -> None:
    names = control_of(node) if keys.CONTROL_AFTER_KEY in node.metadata else ()
    if any(name in renamed for name in names):
        new = dict.fromkeys(renamed.get(name, name) for name in names)
        node.metadata[keys.CONTROL_AFTER_KEY] = ",".join(new)


# --- a group of backend ops as a function, and the call that replaces it ------------------
# Rule: the function is a pure ONNX graph in canonical form (names by position, none of our
# metadata, upstream domain ""), named by its content, so that equal graphs are one function
# wherever they occur.
#

NAME_PREFIX = "subgraph_"
# Metadata that the call inherits from its ops: their slot and their origin.
CALL_KEYS = frozenset(
    {
        keys.SLOT_KEY,
        keys.SLOT_ID_KEY,
        keys.REQUIRED_TRAIT_KEY,
        keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY,
        keys.HOME_CLASS_KEY,
        keys.MODULE_INSTANCE_KEY,
    }
)


class Collapser:
    """Turns the groups of one body into functions; equal groups share one function."""

    def __init__(
        self,
        types: Mapping[str, ValueType],
        versions: Mapping[str, int],
        prints: AttributePrints,
    ) -> None:
        """Create a collapser for one body.

        Args:
            types: declared types of values, as far as known.
            versions: opset versions by domain.
            prints: cache of attribute contents.
        """
        self._types = types
        self._versions = versions
        self._prints = prints
        self._known: dict[Hashable, Function] = {}

    def __call__(
        self, nodes: Sequence[OpNode], exposed: Collection[str]
    ) -> tuple[Function, OpNode]:
        """Return a function of `nodes`, and a call of it.

        Args:
            nodes: the group in topological order, with the constants that are copied into it first.
            exposed: values that are read outside the group.
        """
        values = {name: None for node in nodes for name in node.outputs if name}
        read = dict.fromkeys([name for node in nodes for name in node.computes_with])
        inputs = [name for name in read if name not in values]
        outputs = [name for name in values if name in exposed]
        if not outputs:  # nobody reads it, but a graph needs at least one output
            outputs = list(values)[-1:]
        names = _canonical_names(inputs, outputs, values)
        function = self._function(nodes, names, len(inputs), len(outputs))
        return function, _call(function, nodes, inputs, outputs, values)

    def _function(
        self, nodes: Sequence[OpNode], names: Mapping[str, str], inputs: int, outputs: int
    ) -> Function:
        types = {new: self._types[name] for name, new in names.items() if name in self._types}
        if any(node.graphs or keys.QUANTIZATION_KEY in node.metadata for node in nodes):
            return self._made(nodes, names, inputs, outputs, types)
        form = (inputs, outputs, tuple(types.items()), *[_said(node, names) for node in nodes])
        function = self._known.get(form)
        if function is None:
            function = self._made(nodes, names, inputs, outputs, types)
            self._known[form] = function
        return function

    def _made(
        self,
        nodes: Sequence[OpNode],
        names: Mapping[str, str],
        inputs: int,
        outputs: int,
        types: dict[str, ValueType],
    ) -> Function:
        function = Function(domain=keys.BACKEND_SUBGRAPH_DOMAIN, types=types)
        ports = list(names.values())
        function.inputs, function.outputs = ports[:inputs], ports[inputs : inputs + outputs]
        function.nodes = [_in_canonical_form(node, i, names) for i, node in enumerate(nodes)]
        write_canonical_domains(function.nodes)
        import_used(function, self._versions)
        digest = function_digest(function, self._prints)
        function.name = NAME_PREFIX + digest.hex()[:HEX_DIGITS]
        return function


def _said(node: OpNode, names: Mapping[str, str]) -> Hashable:
    """Return a key for the canonical form of an op, without its graphs and annotations."""
    # Attributes are compared by id, which is safe while the group's function keeps them alive.
    attributes = node.attributes
    return (
        *(node.op_type, node.domain, node.overload, node.doc_string, node.extras),
        tuple([names.get(read, read) for read in node.inputs]),
        tuple([names.get(value, value) for value in node.outputs]),
        tuple([(name, id(a)) for name, a in attributes.items()]) if attributes else (),
    )


def _in_canonical_form(node: OpNode, index: int, names: Mapping[str, str]) -> OpNode:
    # Not a full copy: order edges and the origin belong to the call.
    bare = make_node(
        *(node.op_type, node.domain, f"{node.op_type}_{index}"),
        tuple([names.get(read, read) for read in node.inputs]),
        tuple([names.get(value, value) for value in node.outputs]),
        *(node.attributes, (), {}, "", "", node.overload, node.doc_string, node.extras),
    )
    if keys.QUANTIZATION_KEY in node.metadata:
        kept = {
            names[value]: {key: names[read] for key, read in held.items() if read in names}
            for value, held in annotations_on(node).items() if value in names
        }  # fmt: skip
        if kept:
            bare.metadata[keys.QUANTIZATION_KEY] = annotation_text(kept)
    bare.rename_captured(names)
    return bare


def _canonical_names(
    inputs: Sequence[str], outputs: Sequence[str], values: Collection[str]
) -> dict[str, str]:
    # Nested graphs may use any names of their own; no exporter writes names like these.
    names = {name: f"bb_in_{index}" for index, name in enumerate(inputs)}
    names.update((name, f"bb_out_{index}") for index, name in enumerate(outputs))
    for index, name in enumerate(values):
        names.setdefault(name, f"bb_v_{index}")
    return names


def _call(
    function: Function,
    nodes: Sequence[OpNode],
    inputs: Sequence[str],
    outputs: Sequence[str],
    values: Collection[str],
) -> OpNode:
    last = nodes[-1]  # copied constants come first, so this is an op of the group
    call = OpNode(
        domain=function.domain,
        op_type=function.name,
        name=last.name + keys.SUBGRAPH_CALL_SUFFIX,
        inputs=inputs,
        outputs=outputs,
        metadata={key: text for key, text in last.metadata.items() if key in CALL_KEYS},
        source_line=last.source_line,
        made_by=CollapseBackendSubgraphs.name,
    )
    _inherit_waits(call, nodes, values)
    return call


def _inherit_waits(call: OpNode, nodes: Sequence[OpNode], inner: Collection[str]) -> None:
    """Make the call wait for everything that its ops waited for outside the group."""
    values: dict[str, None] = {}
    ops: dict[str, None] = {}
    for node in nodes:
        if node.after:
            values.update(dict.fromkeys(node.after))
        if keys.CONTROL_AFTER_KEY in node.metadata:
            ops.update(dict.fromkeys(control_of(node)))
    call.after = tuple([name for name in values if name not in inner])
    if ops:
        inside = {node.name for node in nodes}
        add_control(call, [name for name in ops if name not in inside])
