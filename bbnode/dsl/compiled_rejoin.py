"""From the targets of a compiled model back to the one program that they were cut from.

Rule: what the compiler put in goes out again (receivers, gates, deadline checks, subgraph
calls, addresses, homes), so that the program can be compiled anew inside of another one, which
puts all of that where it then belongs. What the author wrote stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.dsl import onnx_walk
from bbnode.dsl.errors import BrokenArtifact
from bbnode.ir import keys, protos, types
from bbnode.ir.types import TypeNode

# Metadata of a node that its author's recording gave it, and that recording it again needs.
_KEPT_KEYS = frozenset(
    {
        keys.SLOT_KEY, keys.SLOT_ID_KEY, keys.REQUIRED_TRAIT_KEY, keys.CONCRETE_TYPE_KEY,
        keys.INSTANCE_KEY, keys.PEER_CLASS_KEY, keys.AFTER_KEY, keys.PORT_KEY, keys.HOME_KEY,
        keys.SOURCE_LINE_KEY, keys.MODULE_INSTANCE_KEY,
    }
)  # fmt: skip
_SLOT_KEYS = (
    keys.SLOT_KEY, keys.SLOT_ID_KEY, keys.REQUIRED_TRAIT_KEY, keys.CONCRETE_TYPE_KEY,
    keys.INSTANCE_KEY,
)  # fmt: skip
_WIRE_ATTRIBUTES = frozenset({keys.ATTR_QUORUM, keys.ATTR_DEADLINE_NS, keys.ATTR_PEER})

_FunctionKey = tuple[str, str, str]


def is_compiled(model: ModelProto) -> bool:
    """Whether the compiler made the model."""
    return protos.get_meta(model, keys.COMPILED_KEY) is not None


def rejoin(model: ModelProto, mains: Sequence[FunctionProto], module: str) -> ModelProto:
    """The recorded form of the program that these targets of `model` make together.

    Raises BrokenArtifact when a wire op's other end is in none of them.
    """
    subgraphs = {
        protos.function_key(f): f
        for f in model.functions
        if f.domain == keys.BACKEND_SUBGRAPH_DOMAIN
    }
    root = FunctionProto(name=model.graph.name or "Program", domain=keys.MODULE_DOMAIN)
    protos.set_meta(root, keys.ROOT_KEY, "true")
    protos.set_meta(root, keys.HOME_KEY, _home_of_inputs(mains))
    bodies: list[list[NodeProto]] = []
    kinds: dict[str, TypeNode] = {}
    for main in mains:
        home = protos.get_meta(main, keys.HOME_KEY) or keys.SELF_CLASS
        own, known = _restored(main, subgraphs)
        for node in own:
            if home != keys.SELF_CLASS and not onnx_walk.reads(node):
                protos.set_meta(node, keys.HOME_KEY, home)
        bodies.append(own)
        kinds.update(known)
        root.input.extend(_new(root.input, main.input))
        root.output.extend(_new(root.output, main.output))
        _take_slots(root, main)
    slots = {
        protos.function_key(f): [*f.attribute, *(a.name for a in f.attribute_proto)]
        for f in model.functions
    }
    root.node.extend(_program_order(_paired(bodies, kinds, module), slots, module))
    protos.write_types(root, kinds)
    made = ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    made.graph.name = root.name
    made.opset_import.extend(model.opset_import)
    made.functions.append(root)
    targets = {protos.function_key(f) for f in model.functions if _is_target(f)}
    for function in model.functions:
        key = protos.function_key(function)
        if key not in targets and key not in subgraphs:
            made.functions.append(_body(function, subgraphs))
    return made


def _is_target(function: FunctionProto) -> bool:
    return protos.get_meta(function, keys.TARGET_KEY) is not None


def _home_of_inputs(mains: Sequence[FunctionProto]) -> str:
    """Inputs live on the program's home class; without any, every op says its own."""
    homes = [protos.get_meta(f, keys.HOME_KEY) or keys.SELF_CLASS for f in mains if f.input]
    return homes[0] if homes else keys.SELF_CLASS


def _new(known: Iterable[str], more: Iterable[str]) -> list[str]:
    there = set(known)
    return [name for name in more if name not in there]


def _take_slots(root: FunctionProto, main: FunctionProto) -> None:
    root.attribute.extend(_new(root.attribute, main.attribute))
    known = {attribute.name for attribute in root.attribute_proto}
    root.attribute_proto.extend(a for a in main.attribute_proto if a.name not in known)
    for entry in main.metadata_props:
        if entry.key.startswith((keys.SLOT_ROLE_PREFIX, keys.CONCRETE_TYPE_SLOT_PREFIX)):
            protos.set_meta(root, entry.key, entry.value)


def _body(
    function: FunctionProto, subgraphs: Mapping[_FunctionKey, FunctionProto]
) -> FunctionProto:
    """A sub-Module's body or a bootstrap, with what the compiler put in gone."""
    made = FunctionProto()
    made.CopyFrom(function)
    nodes, kinds = _restored(function, subgraphs)
    del made.node[:]
    made.node.extend(nodes)
    del made.value_info[:]
    protos.write_types(made, kinds)
    return made


def _restored(
    function: FunctionProto, subgraphs: Mapping[_FunctionKey, FunctionProto]
) -> tuple[list[NodeProto], dict[str, TypeNode]]:
    """Nodes and types of a body without gates, checks and subgraph calls."""
    kinds = protos.value_types(function)
    alias: dict[str, str] = {}
    gone: set[str] = set()
    nodes: list[NodeProto] = []
    for node in function.node:
        subgraph = subgraphs.get(protos.call_key(node))
        if subgraph is not None:
            nodes.extend(_expanded(node, subgraph, kinds))
        elif _is_inserted(node):
            if node.input and node.output:
                alias[node.output[0]] = node.input[0]
            gone.update(node.output)
        else:
            copy = NodeProto()
            copy.CopyFrom(node)
            nodes.append(copy)
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = _origin(name, alias)
        waits = [_origin(name, alias) for name in _names(node, keys.AFTER_KEY)]
        kept = [(e.key, e.value) for e in node.metadata_props if e.key in _KEPT_KEYS]
        index_of_pair = protos.get_meta(node, keys.SYNTHESIZED_FROM_KEY)
        transport = protos.get_meta(node, keys.WIRE_TRANSPORT_KEY)
        _forget_derived(node, kept)
        del node.metadata_props[:]
        for key, text in kept:
            protos.set_meta(node, key, text)
        _write_after(node, [name for name in waits if name not in gone])
        if protos.is_wire(node):
            protos.del_meta(node, keys.PEER_CLASS_KEY)  # the compiler finds it again
            for key, pair_text in (
                (keys.SYNTHESIZED_FROM_KEY, index_of_pair),
                (keys.WIRE_TRANSPORT_KEY, transport),
            ):
                if pair_text is not None:
                    protos.set_meta(node, key, pair_text)
    return nodes, {name: kind for name, kind in kinds.items() if name not in gone}


def _forget_derived(node: NodeProto, kept: list[tuple[str, str]]) -> None:
    """Chain depths and deadlines are the author's where there are such, else derived anew."""
    if not protos.is_wire(node):
        return
    hops = protos.get_meta(node, keys.HOPS_KEY)
    if hops is not None:
        kept.append((keys.CHAIN_DEPTH_KEY, hops))
    if protos.get_meta(node, keys.DEADLINE_DERIVED_KEY) is not None:
        protos.set_attr(node, keys.ATTR_DEADLINE_NS, 0)


def _is_inserted(node: NodeProto) -> bool:
    made_by_compiler = (*keys.GATE_OPS, keys.OP_DEADLINE_CHECK)
    return node.domain == keys.SYSCALL_DOMAIN and node.op_type in made_by_compiler


def _origin(name: str, alias: Mapping[str, str]) -> str:
    seen = {name}
    while name in alias and alias[name] not in seen:
        name = alias[name]
        seen.add(name)
    return name


def _names(node: NodeProto, key: str) -> list[str]:
    return [name for name in (protos.get_meta(node, key) or "").split(",") if name]


def _write_after(node: NodeProto, names: Sequence[str]) -> None:
    if names:
        protos.set_meta(node, keys.AFTER_KEY, ",".join(dict.fromkeys(names)))
    else:
        protos.del_meta(node, keys.AFTER_KEY)


def _expanded(
    call: NodeProto, subgraph: FunctionProto, kinds: dict[str, TypeNode]
) -> list[NodeProto]:
    """The ops of a backend subgraph in the place of its call."""
    names = dict(zip(subgraph.input, call.input, strict=False))
    names.update(zip(subgraph.output, call.output, strict=False))
    for node in subgraph.node:
        for name in node.output:
            if name:
                names.setdefault(name, f"{call.name}/{name}")
    made_inside = {name for node in subgraph.node for name in node.output}
    for name, kind in protos.value_types(subgraph).items():
        kinds.setdefault(names.get(name, name), kind)
    waits = _names(call, keys.AFTER_KEY)
    nodes = []
    for index, inner in enumerate(subgraph.node):
        node = NodeProto()
        node.CopyFrom(inner)
        node.name = f"{call.name}/{inner.op_type}_{index}"
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
        for position, name in enumerate(node.output):
            node.output[position] = names.get(name, name)
        _rename_captured(node, names)
        for key in _SLOT_KEYS:
            text = protos.get_meta(call, key)
            if text is not None:
                protos.set_meta(node, key, text)
        is_first = inner.op_type != "Constant" and not made_inside.intersection(inner.input)
        if waits and is_first:
            _write_after(node, waits)
        nodes.append(node)
    return nodes


def _rename_captured(node: NodeProto, names: Mapping[str, str]) -> None:
    """Graphs of If and Loop read values of the subgraph by name."""
    captured = set(onnx_walk.reads(node)) - set(node.input)
    outer = {name: names[name] for name in captured if name in names}
    if not outer:
        return
    for attribute in node.attribute:
        if attribute.HasField("g"):
            onnx_walk.rename_captured(attribute.g, outer)
        for graph in attribute.graphs:
            onnx_walk.rename_captured(graph, outer)


# --- wires ---------------------------------------------------------------------------------


def _paired(
    bodies: Sequence[Sequence[NodeProto]], kinds: dict[str, TypeNode], module: str
) -> list[list[NodeProto]]:
    """Sends get back what lives on the far side; receivers go."""
    receivers: dict[tuple[str, str], NodeProto] = {}
    for node in (node for body in bodies for node in body):
        if protos.is_wire(node) and node.op_type in keys.RECV_OPS:
            pair = protos.get_meta(node, keys.SYNTHESIZED_FROM_KEY) or ""
            receivers[node.op_type, pair] = node
    kept: list[list[NodeProto]] = []
    fed = 0
    for body in bodies:
        kept.append([n for n in body if not protos.is_wire(n) or n.op_type in keys.SEND_OPS])
        sends = (node for node in kept[-1] if protos.is_wire(node))
        fed += sum(_restore_send(node, receivers, kinds, module) for node in sends)
    if fed < len(receivers):
        raise BrokenArtifact(
            "something is received that no target in hand sends; replay the whole program: "
            "CompiledModule(model) without a target",
            module,
        )
    return kept


def _restore_send(
    send: NodeProto,
    receivers: Mapping[tuple[str, str], NodeProto],
    kinds: dict[str, TypeNode],
    module: str,
) -> int:
    """Give one Send its recorded outputs; gives the number of receivers that it had."""
    kept = [a for a in send.attribute if a.name in _WIRE_ATTRIBUTES]
    fresh = NodeProto()
    fresh.attribute.extend(kept)
    pair = protos.get_meta(send, keys.SYNTHESIZED_FROM_KEY)
    protos.del_meta(send, keys.SYNTHESIZED_FROM_KEY)
    protos.del_meta(send, keys.WIRE_TRANSPORT_KEY)
    del send.attribute[:]
    send.attribute.extend(fresh.attribute)
    if send.op_type == keys.OP_SEND_RESP:
        return 0
    if send.op_type == keys.OP_SEND:
        sentinel = send.output[0] if send.output else ""
        kinds.pop(sentinel, None)
        joined = receivers.get((keys.OP_RECV, pair)) if pair is not None else None
        if joined is not None and joined.output:
            _restore_joined(send, joined, kinds)
            return 0
        recv = receivers.get((keys.OP_RECV, sentinel.removeprefix(keys.SEND_SENTINEL_PREFIX)))
        outputs, used = (list(recv.output) if recv else []), 1
    else:
        recv = receivers.get((keys.OP_RECV_REQ, pair or ""))
        answer = receivers.get((keys.OP_RECV_RESP_BATCHED, pair or ""))
        if answer is None:
            recv = None
        outputs, used = [*send.output[:1], *(answer.output if answer else ())], 2
        outputs += list(recv.output) if recv else []
    if recv is None or not recv.output or not send.input:
        raise BrokenArtifact(
            f"no target in hand receives what {send.name!r} sends; replay the whole program: "
            "CompiledModule(model) without a target",
            module,
        )
    if protos.get_meta(recv, keys.WIRE_TRANSPORT_KEY) == keys.TRANSPORT_TRIGGER_ONLY:
        # Only the signal travels; as recorded, it was the value that was sent.
        kinds[recv.output[0]] = kinds.get(send.input[0], types.ANY)
    del send.output[:]
    send.output.extend(outputs)
    return used


def _restore_joined(send: NodeProto, recv: NodeProto, kinds: dict[str, TypeNode]) -> None:
    """A later send of a port gets outputs of its own; what arrives is the first send's value."""
    protos.set_meta(send, keys.FAN_IN_KEY, recv.output[0])
    del send.output[:]
    for port, like in zip(("received", "sender"), recv.output, strict=False):
        send.output.append(f"{send.name}.{port}")
        kinds[send.output[-1]] = kinds.get(like, types.ANY)


def _program_order(
    mains: Sequence[Sequence[NodeProto]], slots: Mapping[_FunctionKey, Sequence[str]], module: str
) -> list[NodeProto]:
    """All nodes, each after what it needs, and else as they stand in their targets.

    Ops of one slot of one target keep their order, since components have state.
    """
    nodes = [node for main in mains for node in main]
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [
        [
            maker[n]
            for n in (
                *onnx_walk.reads(node),
                *_names(node, keys.AFTER_KEY),
                *_names(node, keys.FAN_IN_KEY),
            )
            if n in maker
        ]
        for node in nodes
    ]
    start = 0
    for main in mains:
        last: dict[str, int] = {}
        for index, node in enumerate(main, start):
            for slot in _stateful_slots(node, slots):
                if slot in last:
                    needs[index].append(last[slot])
                last[slot] = index
        start += len(main)
    return [nodes[index] for index in _needs_first(needs, module)]


def _stateful_slots(node: NodeProto, slots: Mapping[_FunctionKey, Sequence[str]]) -> Sequence[str]:
    slot = protos.get_meta(node, keys.SLOT_KEY)
    if slot is None:
        return slots.get(protos.call_key(node), ())
    is_backend = protos.is_onnx_domain(node.domain) or node.domain == onnx_walk.ONNX_ML_DOMAIN
    return () if is_backend else (slot,)


def _needs_first(needs: Sequence[Sequence[int]], module: str) -> list[int]:
    order: list[int] = []
    placed: dict[int, bool] = {}  # False while on the path
    for root in range(len(needs)):
        path = [] if root in placed else [(root, iter(needs[root]))]
        placed.setdefault(root, False)
        while path:
            index, rest = path[-1]
            before = next(rest, None)
            if before is None:
                placed[index] = True
                order.append(index)
                path.pop()
            elif before not in placed:
                placed[before] = False
                path.append((before, iter(needs[before])))
            elif not placed[before]:
                raise BrokenArtifact("its ops wait for each other in a ring", module)
    return order
