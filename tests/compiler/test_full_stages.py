"""User stages on a program of an author's: where they run, and what they may not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.compiler.errors import AmbiguousRole, PassInvariantBroken, RuntimeIncomplete
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, ModelSlot, types
from bbnode.ir import keys
from bbnode.ir.bounds import OutOfBounds
from bbnode.ir.caps import MAX_NAME_CHARS
from tests.compiler import files
from tests.compiler.programs import FakeModel, FakeSelector
from tests.compiler.test_full_chains import Written, peers

Action = Callable[[ModelProto], object]


class Stage:
    """A user stage made of a function."""

    def __init__(self, name: str, action: Action) -> None:
        self.name = name
        self._action = action

    def run(self, model: ModelProto) -> None:
        self._action(model)


def program(g: Graph) -> None:
    compute = BackendSlot("compute")
    x = g.input("x", types.TENSOR_FLOAT)
    received = g.net_out("there", peers(g, "b", after=x), compute.add(g, x, x))
    model = ModelSlot("m")
    model.load_parameters(g, received)
    g.output("params", model.params(g))


def compiler() -> Compiler:
    return (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_model("m", FakeModel)
        .bind_peer_selector("pick_b", FakeSelector)
    )


def compiled(*stages: tuple[str, Action], base: Compiler | None = None) -> ModelProto:
    made = base or compiler()
    for name, action in stages:
        made = made.push_back_stage(Stage(name, action))
    return made.compile(Written(program).build())


def test_a_stage_sees_each_partition_once_with_all_that_it_calls() -> None:
    seen: list[tuple[str, list[str]]] = []

    def look(model: ModelProto) -> None:
        main = model.functions[0]
        domains = [f.domain for f in model.functions[1:]]
        seen.append((files.get_meta(main, keys.HOME_KEY) or "", domains))

    model = compiled(("look", look))
    assert seen == [("a", [keys.BACKEND_SUBGRAPH_DOMAIN]), ("b", [])]
    assert any(f.domain == keys.BACKEND_SUBGRAPH_DOMAIN for f in model.functions)
    parts = compiler().compile_partitions(Written(program).build())
    held = {name[0]: [f.domain for f in part.functions[1:]] for name, part in parts.items()}
    assert held == dict(seen)


def test_order_is_that_of_push_back_push_front_and_insert() -> None:
    order: list[str] = []

    def note(name: str) -> Stage:
        return Stage(name, lambda _: order.append(name))

    made = compiler().push_back_stage(note("two")).push_front_stage(note("one"))
    made = made.insert_stage(1, note("middle")).insert_stage(-5, note("zero"))
    made = made.push_back_stage(note("gone")).without_stage("gone")
    compiled(base=made)
    assert order == [name for name in ("zero", "one", "middle", "two") for _ in "ab"]


def nodes(model: ModelProto, op_type: str) -> list[NodeProto]:
    return [node for node in model.functions[0].node if node.op_type == op_type]


def drop_gate(model: ModelProto) -> None:
    """Takes the dedup gate out, and rewires so that nothing dangles."""
    main = model.functions[0]
    for gate in nodes(model, keys.OP_DEDUP_GATE_RX):
        for node in main.node:
            for index, name in enumerate(node.input):
                if name == gate.output[0]:
                    node.input[index] = gate.input[0]
        main.node.remove(gate)


def mistype(model: ModelProto) -> None:
    for send in nodes(model, keys.OP_SEND):
        files.set_meta(send, keys.WIRE_TRANSPORT_KEY, "pigeon")


def misdirect(model: ModelProto) -> None:
    for recv in nodes(model, keys.OP_RECV):
        files.set_meta(recv, keys.SITE_ID_KEY, "12345")


def unknown(model: ModelProto) -> None:
    model.functions[0].node.add(domain="com.example", op_type="Fuse", name="fuse")


def make_concrete(model: ModelProto) -> None:
    for node in nodes(model, "Params"):
        files.del_meta(node, keys.REQUIRED_TRAIT_KEY)
        files.set_meta(node, keys.CONCRETE_TYPE_KEY, "test.FakeModel")


def shout(model: ModelProto) -> None:
    model.functions[0].node[0].name = "!" * (MAX_NAME_CHARS + 1)


def test_a_stage_keeps_within_what_any_model_may_hold() -> None:
    with pytest.raises(PassInvariantBroken, match="characters") as caught:
        compiled(("loud", shout))
    assert caught.value.pass_name == "loud"
    assert isinstance(caught.value.__cause__, OutOfBounds)


@pytest.mark.parametrize(
    ("action", "says", "cause"),
    [
        (drop_gate, "has no DedupGateRx", RuntimeIncomplete),
        (mistype, "does not say what it transports", RuntimeIncomplete),
        (misdirect, "sends to a site that no receiver", RuntimeIncomplete),
        (unknown, "is of the unknown type com.example::Fuse", RuntimeIncomplete),
        (make_concrete, "concrete ('test.FakeModel') in one place", AmbiguousRole),
    ],
)
def test_what_a_stage_takes_from_the_run_time_is_laid_to_it(
    action: Action, says: str, cause: type[Exception]
) -> None:
    with pytest.raises(PassInvariantBroken) as caught:
        compiled(("fine", lambda _: None), ("culprit", action), ("later", lambda _: None))
    assert caught.value.pass_name == "culprit"
    assert says in caught.value.detail
    assert isinstance(caught.value.__cause__, cause)


def test_who_leaves_the_look_out_may_take_gates_out() -> None:
    made = compiler().without_stage("validate_runtime_complete")
    model = compiled(("bare", drop_gate), base=made)
    assert not any(n.op_type == keys.OP_DEDUP_GATE_RX for f in model.functions for n in f.node)
