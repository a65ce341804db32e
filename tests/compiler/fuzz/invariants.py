"""What every pass has to leave behind, by the text of the specification (`001`, part 14).

Rule: a checker of its own. It looks at protobufs with the names of docs/ir.md and calls nothing
of the compiler, so that a mistake there cannot hide itself here.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto

P = "ai.bytesandbrains."
WIRE, SYSCALL, MODULE = P + "wire", P + "syscall", P + "module"
SENDS = {"Send", "SendReqBatched", "SendResp"}
INBOUND = {"Recv", "RecvReq"}
RECVS = INBOUND | {"RecvRespBatched"}
RX_GATES = ["DedupGateRx", "PeerHealthGateRx", "BackoffGateRx"]
SUSPENDING = {"After", "Sleep", "Limit.Acquire", "Serialize.Dequeue"}
TARGET_NAME = re.compile(r"[\w@-]+#[0-9a-f]{16}")


def meta(proto: Any, key: str) -> str | None:
    found = [entry.value for entry in proto.metadata_props if entry.key == P + key]
    assert len(found) <= 1, f"{key} is there {len(found)} times"
    return found[0] if found else None


def attribute(node: NodeProto, name: str) -> Any:
    found = [a for a in node.attribute if a.name == name]
    assert len(found) <= 1, f"{node.name} has {name} {len(found)} times"
    return onnx.helper.get_attribute_value(found[0]) if found else None


def is_onnx(node: NodeProto) -> bool:
    return node.domain in ("", "ai.onnx")


def waits(node: NodeProto, key: str) -> list[str]:
    return [name for name in (meta(node, key) or "").split(",") if name]


def reads(node: NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    yield from waits(node, "after")
    for one in node.attribute:
        if one.type == onnx.AttributeProto.GRAPH:
            yield from _free(one.g)


def _free(graph: onnx.GraphProto) -> Iterator[str]:
    made = {port.name for port in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        for name in reads(node):
            if name not in made:
                yield name
        made.update(node.output)
    yield from (port.name for port in graph.output if port.name not in made)


def functions_of(model: ModelProto) -> dict[tuple[str, str], FunctionProto]:
    table = {(f.domain, f.name): f for f in model.functions}
    assert len(table) == len(model.functions), "two functions of one name"
    return table


def mains_of(model: ModelProto) -> list[FunctionProto]:
    return [f for f in model.functions if meta(f, "target") == "true"]


def wire_nodes(model: ModelProto, *kinds: str) -> list[NodeProto]:
    return [
        node
        for function in model.functions
        for node in function.node
        if node.domain == WIRE and (not kinds or node.op_type in kinds)
    ]


# --- the rows of the table -------------------------------------------------------------------


def wire_ops_are_in_the_root(model: ModelProto) -> None:
    """1 `inline_for_partition`."""
    for function in model.functions[1:]:
        assert not any(node.domain == WIRE for node in function.node), function.name


def sends_have_deadlines(model: ModelProto) -> None:
    """2 `derive_wire_deadlines`."""
    for node in wire_nodes(model, "Send"):
        assert int(meta(node, "deadline_ns") or 0) > 0, node.name


def well_formed(model: ModelProto) -> None:
    """3 `validate`: ops known, inputs reachable, outputs unique, acyclic."""
    table = functions_of(model)
    for function in model.functions:
        made = set(function.input)
        names: set[str] = set()
        for node in function.node:
            assert node.name, "a node without a name"
            assert node.name not in names, node.name
            names.add(node.name)
            if node.domain in (MODULE, P + "backend_subgraph"):
                callee = table[node.domain, node.op_type]
                assert len(node.input) <= len(callee.input), node.name
                assert len(node.output) <= len(callee.output), node.name
            for name in reads(node):
                assert name in made, f"{function.name}: {node.name} reads {name} too early"
            for name in node.output:
                assert name not in made, f"{name} is made twice"
                made.update([name] if name else [])
        assert set(function.output) <= made, function.name


def opsets_are_imported(model: ModelProto) -> None:
    """3 `validate`, and of the ops that the compiler made, 17: by the model and the function."""
    general = {o.domain or "ai.onnx" for o in model.opset_import}
    for function in model.functions:
        own = {o.domain or "ai.onnx" for o in function.opset_import}
        for node in function.node:
            assert (node.domain or "ai.onnx") in general | own, (function.name, node.name)


def attributes_are_full(model: ModelProto) -> None:
    """4 `expand_ops`, for the ops that the random programs use."""
    wanted = {
        "Tee": ["fanout"], "AppEmit": ["name"], "Record": ["name"], "Constant": ["value"],
        "Bundle": ["child_count", "child_types"], "Unbundle": ["child_count", "child_types"],
        "SendReqBatched": ["quorum", "deadline_ns"],
    }  # fmt: skip
    for function in model.functions:
        for node in function.node:
            for name in wanted.get(node.op_type, ()) if not is_onnx(node) else ():
                assert attribute(node, name) is not None, (node.name, name)
            assert not any(a.ref_attr_name for a in node.attribute), node.name


def values_are_typed(model: ModelProto) -> None:
    """5 `type_solver`: strict, so that no value stays abstract."""
    for function in model.functions:
        infos = Counter(info.name for info in function.value_info)
        assert max(infos.values(), default=0) <= 1, function.name
        typed = {info.name: info.type for info in function.value_info}
        if function.domain == P + "backend_subgraph":
            continue
        for name in (*function.input, *(n for node in function.node for n in node.output if n)):
            assert name in typed, f"{function.name}: {name} has no type"
            kind = typed[name]
            assert kind.denotation not in ("", P + "Any", P + "Tensor"), (name, kind.denotation)
            assert kind.WhichOneof("value") is not None, name


def sends_say_their_peer_class(model: ModelProto) -> None:
    """6 `infer_peer_classes`."""
    for node in wire_nodes(model, *SENDS):
        assert meta(node, "peer_class"), node.name
    for function in model.functions:
        for node in function.node:
            if node.domain == P + "role.peer_selector":
                assert meta(node, "peer_class"), node.name


def every_send_has_its_recv(model: ModelProto) -> None:
    """7 `synthesize_wire_recvs`: paired, on the class that it goes to."""
    recvs: dict[str, list[NodeProto]] = {}
    for node in wire_nodes(model, *RECVS):
        recvs.setdefault(meta(node, "synthesized_from") or "", []).append(node)
        assert attribute(node, "payload_type") is not None or node.op_type == "RecvRespBatched"
    seen: set[str] = set()
    for node in wire_nodes(model, "Send", "SendReqBatched"):
        if node.op_type == "Send":
            (sentinel,) = node.output
            index, wanted = sentinel.removeprefix("__send_sentinel_"), ["Recv"]
            assert index != sentinel
            joined = meta(node, "synthesized_from")
            if joined is not None:  # it feeds the receiver of an earlier send of its port
                assert index not in recvs, node.name
                assert joined in seen, node.name
                index = joined
                seen.discard(joined)
        else:
            index, wanted = meta(node, "synthesized_from") or "", ["RecvReq", "RecvRespBatched"]
            assert len(node.output) == 1
        assert index not in seen
        seen.add(index)
        pair = {recv.op_type: recv for recv in recvs.get(index, [])}
        assert sorted(pair) == wanted, (node.name, pair)
        assert meta(pair[wanted[0]], "home_class") == meta(node, "peer_class"), node.name
        if node.op_type != "Send":
            assert meta(pair["RecvRespBatched"], "home_class") == meta(node, "home_class")
    assert seen == set(recvs)
    for node in wire_nodes(model, "SendResp"):
        (asked,) = [
            r for r in recvs[meta(node, "synthesized_from") or ""] if r.op_type == "RecvReq"
        ]
        assert meta(asked, "home_class") == meta(node, "home_class")


def one_function_per_class(model: ModelProto) -> None:
    """8 `partition_by_wire_ops`: one main per class, no value crosses but by the wire."""
    mains = mains_of(model)
    assert mains
    homes = [meta(main, "home") for main in mains]
    assert homes == sorted(set(homes)), homes  # type: ignore[type-var]
    for main in mains:
        assert TARGET_NAME.fullmatch(main.name), main.name
        assert main.name.split("#")[0] == meta(main, "home")
        for node in main.node:
            assert meta(node, "home_class") == meta(main, "home"), node.name
    others = [f for f in model.functions if meta(f, "target") is None]
    for function in others:
        assert not any(node.domain == WIRE for node in function.node)
    called = {(n.domain, n.op_type) for f in model.functions for n in f.node}
    for function in others:
        is_bootstrap = meta(function, "module_phase") == "bootstrap"
        assert is_bootstrap or (function.domain, function.name) in called, function.name


def slots_are_listed(model: ModelProto) -> None:
    """9 `resolve_slots`: every slot that a node names is one of its function's."""
    ids: dict[str, str] = {}
    for function in model.functions:
        listed = set(function.attribute) | {a.name for a in function.attribute_proto}
        for node in function.node:
            slot = meta(node, "slot")
            if slot is not None and function.domain == MODULE:
                assert slot in listed, (function.name, slot)
                assert meta(function, f"slot_role.{slot}"), slot
                assert ids.setdefault(slot, meta(node, "slot_id") or "") == meta(node, "slot_id")
                concrete = meta(node, "concrete_type")
                assert concrete or meta(node, "required_trait"), node.name


def wire_ops_are_stamped(model: ModelProto) -> None:
    """10 `analyze_wire_edges`: transport, batch group, and where everything lands."""
    sites: dict[int, NodeProto] = {}
    for node in wire_nodes(model, *RECVS):
        site = int(meta(node, "site_id") or "x")
        assert site not in sites
        assert 0 <= site < 1 << 64
        sites[site] = node
    landed: dict[int, set[str | None]] = {}  # groups of what lands at each site
    senders: dict[int, set[str | None]] = {}  # classes that send to each site
    for node in wire_nodes(model):
        assert meta(node, "wire_transport") in ("data", "trigger_only"), node.name
        assert meta(node, "batch_group_id"), node.name
        assert int(meta(node, "deadline_ns") or 0) > 0, node.name
    for node in wire_nodes(model, *SENDS):
        suffixes = [a for a in node.attribute if a.name.startswith(P + "dest_suffix.")]
        (suffix,) = suffixes
        # Bytes that are no UTF-8 are a tensor, so that ONNX's printer takes them.
        address = suffix.s or onnx.numpy_helper.to_array(suffix.t).tobytes()
        site = int.from_bytes(address[-8:], "big")
        assert address[:-8] == b"\xe2\x01", address  # the varint of 0xE2
        landed.setdefault(site, set()).add(meta(node, "batch_group_id"))
        senders.setdefault(site, set()).add(meta(node, "home_class"))
        name = suffix.name.removeprefix(P + "dest_suffix.")
        assert meta(node, f"dest_site_name.{name}") == sites[site].output[0], node.name
        assert meta(node, "wire_transport") == meta(sites[site], "wire_transport"), node.name
    assert set(landed) == set(sites)
    for site, classes in senders.items():
        named = (meta(sites[site], "sender_class") or "").split(",")
        assert set(named) == classes, sites[site].name
        assert named == sorted(named), sites[site].name
    for site, groups in landed.items():  # a receiver of several sends names one of their groups
        assert meta(sites[site], "batch_group_id") in groups, site


def gates_are_complete(model: ModelProto) -> None:
    """11 to 15, the gates: behind every inbound op the whole chain, in order, and once."""
    for main in mains_of(model):
        readers: dict[str, list[NodeProto]] = {}
        for node in main.node:
            for name in reads(node):
                readers.setdefault(name, []).append(node)
        gates = Counter(node.op_type for node in main.node if node.op_type in RX_GATES)
        inbound = [n for n in main.node if n.domain == WIRE and n.op_type in INBOUND]
        assert all(gates[gate] == len(inbound) for gate in RX_GATES), gates
        for node in inbound:
            at = node.output[0]
            for gate in RX_GATES:
                (reader,) = readers[at]
                assert reader.op_type == gate, (node.name, at, reader.op_type)
                at = reader.output[0]
            # What the partition hands out is behind the gates as well.
            assert node.output[0] not in main.output or at == node.output[0]


def suspending_ops_have_deadlines(model: ModelProto) -> None:
    """16 `insert_async_deadlines`: a deadline, and a check right before the op."""
    for function in model.functions:
        checks = {
            meta(node, "deadline_check_source"): node
            for node in function.node
            if node.op_type == "DeadlineCheck"
        }
        for node in function.node:
            role = node.domain.startswith(P + "role.")
            if role or (node.domain == SYSCALL and node.op_type in SUSPENDING):
                assert int(meta(node, "deadline_ns") or 0) > 0, node.name
            is_checked = meta(node, "deadline_ns") is not None and not (
                node.op_type in RECVS or node.op_type in RX_GATES or node.op_type == "DeadlineCheck"
            )
            assert is_checked == (node.name in checks), node.name
            if is_checked:
                check = checks[node.name]
                assert attribute(check, "deadline_ns") > 0
                (out,) = check.output
                assert out in set(reads(node)), node.name


def runtime_is_complete(model: ModelProto) -> None:
    """17 `validate_runtime_complete`, and what is stamped at the end."""
    assert meta(model, "compiled") == "v1"
    bare = ModelProto()
    bare.CopyFrom(model)
    kept = [e for e in model.metadata_props if e.key != P + "seal"]
    del bare.metadata_props[:]
    bare.metadata_props.extend(kept)
    digest = hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()
    assert meta(model, "seal") == digest
    table = functions_of(model)
    assert not model.graph.node
    for main in mains_of(model):
        slots: set[str] = set()
        todo, seen = [main], set()
        while todo:
            function = todo.pop()
            for node in function.node:
                slot = meta(node, "slot")
                slots.update([slot] if slot else [])
                key = (node.domain, node.op_type)
                if key in table and key not in seen:
                    seen.add(key)
                    todo.append(table[key])
        for slot in slots:
            bound = meta(model, f"binding.{main.name}.{slot}")
            assert bound, (main.name, slot)
            role, type_name, slot_id = bound.split("|")
            assert role, bound
            assert type_name, bound
            assert int(slot_id) >= 0, bound
    onnx.checker.check_model(model)


def slot_effects_are_in_order(model: ModelProto) -> None:
    """`sequence_slot_effects`: control edges name ops of the same main that come before."""
    for main in mains_of(model):
        before: set[str] = set()
        for node in main.node:
            for name in waits(node, "control_after"):
                assert name in before, (node.name, name)
            before.add(node.name)


Check = Callable[[ModelProto], None]

# In which order the passes establish them; what holds once, holds to the end.
BY_PASS: dict[str, tuple[Check, ...]] = {
    "inline_for_partition": (wire_ops_are_in_the_root,),
    "derive_wire_deadlines": (sends_have_deadlines,),
    "validate": (well_formed,),
    "expand_ops": (attributes_are_full,),
    "type_solver": (values_are_typed,),
    "infer_peer_classes": (sends_say_their_peer_class,),
    "synthesize_wire_recvs": (every_send_has_its_recv,),
    "partition_by_wire_ops": (one_function_per_class,),
    "resolve_slots": (slots_are_listed,),
    "sequence_slot_effects": (slot_effects_are_in_order,),
    "analyze_wire_edges": (wire_ops_are_stamped,),
    "insert_backoff_gate_rx": (gates_are_complete,),
    "insert_async_deadlines": (suspending_ops_have_deadlines,),
}
AT_THE_END: tuple[Check, ...] = (opsets_are_imported, runtime_is_complete)
