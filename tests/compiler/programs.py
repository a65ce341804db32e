"""Small recorded programs, built by hand in the form of docs/ir.md section 1.

Rule: a test says only what it is about; the builder fills in what every recorded op has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, helper

from bbnode.compiler import Compiler
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.driver.pipeline import load_pass
from bbnode.compiler.unit import CompilationUnit, CompileOptions, SlotBinding
from bbnode.components.contracts import Aggregator, Backend, DataSource, Model, PeerSelector
from bbnode.components.registry import register_component
from bbnode.ir import graph, keys, onnx_file, opset, types
from bbnode.ir.graph import Attribute, Function, OpNode, Program
from bbnode.ir.onnx_file import attribute_of
from bbnode.ir.types import TypeNode

Values = Sequence[str]


class Body:
    """One function in the making."""

    def __init__(self, name: str, *, home: str = keys.SELF_CLASS, root: bool = False) -> None:
        self.function = Function(name=name, domain=keys.MODULE_DOMAIN)
        self.function.metadata[keys.HOME_KEY] = home
        if root:
            self.function.metadata[keys.ROOT_KEY] = "true"
        self._types: dict[str, TypeNode] = {}
        self._slots: dict[str, int] = {}
        self._opsets: set[tuple[str, int]] = {("", keys.ONNX_OPSET_VERSION)}

    def input(self, name: str, kind: TypeNode = types.ANY) -> str:
        self.function.inputs.append(name)
        self._types[name] = kind
        return name

    def output(self, name: str, value: str) -> str:
        self.op(keys.SYSCALL_DOMAIN, "PassThrough", [value], [name])
        self.function.outputs.append(name)
        return name

    def op(
        self,
        domain: str,
        op_type: str,
        inputs: Values = (),
        outputs: Values = (),
        *,
        name: str | None = None,
        after: Values = (),
        slot: str | None = None,
        role: str | None = None,
        concrete: str | None = None,
        kinds: Sequence[TypeNode] = (),
        meta: Mapping[str, str] | None = None,
        line: int = 0,
        **attributes: Any,
    ) -> OpNode:
        """Record any op; its outputs are typed by the op table, or by `kinds`."""
        stamps = {keys.MODULE_INSTANCE_KEY: self.function.name}
        if slot is not None:
            stamps |= self._slot(slot, role or "Backend", concrete)
        made = OpNode(
            *(op_type, domain, name or f"{op_type}_{len(self.function.nodes)}"),
            *(inputs, outputs),
            {k: attribute_of(helper.make_attribute(k, v)) for k, v in attributes.items()},
            after=after,
            metadata={**stamps, **(meta or {})},
            source_line=f"program.py:{line or len(self.function.nodes) + 1}",
        )
        spec = opset.lookup_op(domain, op_type)
        for index, value in enumerate(outputs):
            kind = types.ANY if spec is not None else types.TENSOR
            if index < len(kinds):
                kind = kinds[index]
            elif spec is not None:
                port = spec.outputs[min(index, len(spec.outputs) - 1)]
                kind = port.type if isinstance(port.type, TypeNode) else types.ANY
            if value:
                self._types[value] = kind
        self._opsets.add(("" if graph.is_onnx_domain(domain) else domain, _version(domain)))
        return self.function.append(made)

    def role(
        self,
        role: str,
        op_type: str,
        slot: str,
        inputs: Values = (),
        outputs: Values = (),
        **more: Any,
    ) -> OpNode:
        return self.op(
            keys.role_domain(role), op_type, inputs, outputs, slot=slot, role=role, **more
        )

    def onnx(self, op_type: str, inputs: Values, outputs: Values, **more: Any) -> OpNode:
        more.setdefault("slot", "compute")
        return self.op("", op_type, inputs, outputs, **more)

    def syscall(self, op_type: str, inputs: Values, outputs: Values, **more: Any) -> OpNode:
        return self.op(keys.SYSCALL_DOMAIN, op_type, inputs, outputs, **more)

    def sample(self, peer_class: str, out: str, *, slot: str = "", n: int = 2, **more: Any) -> str:
        self.role(
            "PeerSelector", "Sample", slot or f"pick_{peer_class}", [], [out],
            meta={keys.PEER_CLASS_KEY: peer_class}, n=n, **more,
        )  # fmt: skip
        return out

    def send(self, data: str, peers: str, out: str, **more: Any) -> tuple[str, str]:
        values = (out, f"{out}.sender")
        self.op(keys.WIRE_DOMAIN, keys.OP_SEND, [data, peers], values, **more)
        return values

    def request(self, data: str, peers: str, out: str, **more: Any) -> tuple[str, ...]:
        """Gives (req_id, responses, received, sender, remote_req_id), named `<out>.<port>`."""
        spec = opset.lookup_op(keys.WIRE_DOMAIN, keys.OP_SEND_REQ_BATCHED)
        assert spec is not None
        values = tuple(f"{out}.{port.name}" for port in spec.outputs)
        self.op(keys.WIRE_DOMAIN, keys.OP_SEND_REQ_BATCHED, [data, peers], values, **more)
        return values

    def respond(self, data: str, request: Sequence[str], **more: Any) -> OpNode:
        return self.op(
            keys.WIRE_DOMAIN, keys.OP_SEND_RESP, [data, request[3], request[4]], [], **more
        )

    def call(self, callee: Function, inputs: Values, outputs: Values, **more: Any) -> OpNode:
        return self.op(callee.domain, callee.name, inputs, outputs, **more)

    def typed(self, value: str, kind: TypeNode) -> None:
        self._types[value] = kind

    def build(self) -> Function:
        self.function.types.clear()
        self.function.declare(self._types)
        self.function.opset_imports = graph.sorted_opsets(self._opsets)
        return self.function

    def _slot(self, slot: str, role: str, concrete: str | None) -> dict[str, str]:
        slot_id = self._slots.setdefault(slot, len(self._slots))
        key = keys.SLOT_ROLE_PREFIX + slot
        if self.function.metadata.get(key) is None:
            self.function.metadata[key] = f"{role}|{slot_id}"
            if concrete is None:
                self.function.attributes.append(slot)
            else:
                self.function.defaults[slot] = Attribute.of(b"\x80")
                self.function.metadata[keys.CONCRETE_TYPE_SLOT_PREFIX + slot] = concrete
        stamps = {keys.SLOT_KEY: slot, keys.SLOT_ID_KEY: str(slot_id)}
        if concrete is None:
            stamps[keys.REQUIRED_TRAIT_KEY] = f"{role}Runtime"
        else:
            stamps |= {keys.CONCRETE_TYPE_KEY: concrete, keys.INSTANCE_KEY: "0"}
        return stamps


def _version(domain: str) -> int:
    return keys.ONNX_OPSET_VERSION if graph.is_onnx_domain(domain) else keys.BB_OPSET_VERSION


def program_of(*bodies: Body) -> Program:
    """A recorded program; the first body is the root."""
    functions = [body.build() for body in bodies]
    return Program(
        producer_name=keys.PRODUCER_NAME,
        name=functions[0].name,
        functions=functions,
        opset_imports=graph.sorted_opsets(e for f in functions for e in f.opset_imports),
    )


def model_of(*bodies: Body) -> ModelProto:
    """A recorded program as a file."""
    return onnx_file.model_of(program_of(*bodies))


def unit_of(*bodies: Body) -> CompilationUnit:
    """A unit on a copy of the model of these bodies."""
    return admit(program_of(*bodies), CompileOptions())


def run(
    unit: CompilationUnit, *names: str, options: CompileOptions | None = None
) -> dict[str, int]:
    """Run passes on a unit; gives the counters of the last."""
    counters: Mapping[str, int] = {}
    for name in names:
        counters = load_pass(name).run(unit, options or CompileOptions())
    return dict(counters)


def node_named(function: Function, name: str) -> OpNode:
    return next(node for node in function.nodes if node.name == name)


def node_making(function: Function, value: str) -> OpNode:
    return next(node for node in function.nodes if value in node.outputs)


def home_of(function: Function, value: str) -> str | None:
    """Class of the op that makes a value."""
    return node_making(function, value).metadata.get(keys.HOME_CLASS_KEY)


# --- components that exist only for their class attributes ---------------------------------


def _never(*_: Any, **__: Any) -> None:
    raise RuntimeError("a compile uses no component")


def _fake(contract: type, name: str, storage: Mapping[str, TypeNode] | None = None) -> Any:
    methods = dict.fromkeys(contract.__abstractmethods__, _never)  # type: ignore[attr-defined]
    space: dict[str, Any] = {**methods, "TYPE_NAME": f"test.{name}", "__module__": __name__}
    if storage is not None:
        space["storage"] = storage
    return register_component(type(name, (contract,), space))


FakeBackend: Any = _fake(Backend, "FakeBackend")
FakeModel: Any = _fake(Model, "FakeModel")
DoubleModel: Any = _fake(Model, "DoubleModel", {"*": types.TENSOR_DOUBLE})
FakeAggregator: Any = _fake(Aggregator, "FakeAggregator")
FakeSelector: Any = _fake(PeerSelector, "FakeSelector")
FakeData: Any = _fake(
    DataSource, "FakeData",
    {"NextBatch.batch": types.TENSOR_FLOAT, "NextBatch.labels": types.TENSOR_INT64},
)  # fmt: skip

BINDINGS = (
    SlotBinding(slot="global", role="Model", component=FakeModel),
    SlotBinding(slot="local", role="Model", component=FakeModel),
    SlotBinding(slot="fedavg", role="Aggregator", component=FakeAggregator),
    SlotBinding(slot="pick_client", role="PeerSelector", component=FakeSelector),
    SlotBinding(slot="pick_server", role="PeerSelector", component=FakeSelector),
    SlotBinding(slot="data", role="DataSource", component=FakeData),
)
BOUND = CompileOptions(bindings=BINDINGS)


FAKES = {b.role: b.component for b in BINDINGS} | {"Backend": FakeBackend}


def bound(model: ModelProto) -> Compiler:
    """A compiler in which every slot of a recorded program has a component."""
    compiler = Compiler()
    for function in onnx_file.program_of(model).functions:
        for slot in function.attributes:
            role = function.metadata[keys.SLOT_ROLE_PREFIX + slot].split("|")[0]
            compiler = compiler.bind(role, slot, FAKES[role])
    return compiler


# --- programs ------------------------------------------------------------------------------


def local_program() -> Body:
    """One class, no wire: two tensors added."""
    body = Body("Local", root=True)
    a = body.input("a", types.TENSOR_FLOAT)
    b = body.input("b")
    body.onnx("Add", [a, b], ["sum"])
    body.onnx("Shape", ["sum"], ["shape"])
    body.output("result", "sum")
    body.output("size", "shape")
    return body


def federated_program() -> Body:
    """A round of one request/response cohort, and the average back home."""
    body = Body("Round", home="server", root=True)
    tick = body.input("tick", types.TRIGGER)
    body.sample("client", "cohort", after=[tick])
    body.role("Model", "Params", "global", [], ["weights"], after=["cohort"])
    request = body.request("weights", "cohort", "round", quorum=1, meta={keys.PORT_KEY: "round"})
    body.role("Model", "LoadParameters", "local", [request[2]], ["loaded"])
    body.role("Model", "Train", "local", [], ["stats"])
    body.role("Model", "Params", "local", [], ["update"])
    body.op(keys.COMPOSITE_DOMAIN, keys.OP_BUNDLE, ["update", "stats"], ["both"])
    body.respond("both", request)
    body.role("Aggregator", "ContributeAll", "fedavg", [request[1]], ["counted"])
    body.role("Aggregator", "Aggregate", "fedavg", [], ["mean", "info"])
    body.role("Model", "LoadParameters", "global", ["mean"], ["taken"])
    body.output("model", "mean")
    body.output("info_out", "info")
    return body


def gossip_program() -> Body:
    """A class that sends to itself: what is received is averaged with one's own."""
    body = Body("Gossip", home="peer", root=True)
    tick = body.input("tick")
    body.sample("peer", "others", slot="pick_client", n=1, after=[tick])
    body.role("Model", "Params", "global", [], ["mine"], after=["others"])
    received, _ = body.send("mine", "others", "theirs")
    body.role("Model", "ApplyDelta", "global", [received], ["applied"])
    return body


def ring_program() -> Body:
    """a sends to b, b to c, and c back to a by the sender of what b got."""
    body = Body("Ring", home="a", root=True)
    value = body.input("value", types.TENSOR_FLOAT)
    at_b, _ = body.send(value, body.sample("b", "bs", slot="pick_b"), "at_b")
    body.sample("c", "cs", slot="pick_c", after=[at_b])
    at_c, _ = body.send(at_b, "cs", "at_c")
    body.sample("a", "as", slot="pick_a", after=[at_c])
    back, _ = body.send(at_c, "as", "back")
    body.output("result", back)
    return body


def nested_program() -> tuple[Body, ...]:
    """A root that calls a sending Module, a pure one twice, and a stateful one twice."""
    pure = Body("Pure")
    x = pure.input("x", types.TENSOR_FLOAT)
    pure.onnx("Neg", [x], ["negated"])
    pure.output("y", "negated")
    stateful = Body("Stateful")
    x = stateful.input("x", types.TENSOR_FLOAT)
    stateful.role("Model", "ApplyDelta", "global", [x], ["applied"])
    stateful.output("done", "applied")
    sender = Body("Sender")
    data = sender.input("data", types.TENSOR_FLOAT)
    peers = sender.input("peers", types.PEER_ID_VEC)
    received, _ = sender.send(data, peers, "received")
    sender.output("there", received)
    root = Body("Nested", home="server", root=True)
    value = root.input("value", types.TENSOR_FLOAT)
    root.call(pure.function, [value], ["n1"], kinds=[types.TENSOR_FLOAT])
    root.call(pure.function, ["n1"], ["n2"], kinds=[types.TENSOR_FLOAT])
    root.call(stateful.function, ["n1"], ["d1"], kinds=[types.COMMAND_ID])
    root.call(stateful.function, ["n2"], ["d2"], kinds=[types.COMMAND_ID])
    root.sample("client", "peers", after=["d2"])
    root.call(sender.function, ["n2", "peers"], ["far"], kinds=[types.TENSOR_FLOAT])
    root.syscall("Record", ["far"], [], name="Record_far")
    root.function.nodes[-1].set_attr("name", "far")
    return root, pure, stateful, sender


PROGRAMS = {
    "local": lambda: (local_program(),),
    "federated": lambda: (federated_program(),),
    "gossip": lambda: (gossip_program(),),
    "ring": lambda: (ring_program(),),
    "nested": nested_program,
}
