"""The seal of an artifact, looked at wherever a model is installed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import OrtBackend
from bbnode.dsl import BackendSlot, Graph, Module, types
from bbnode.engine import install, plan_program
from bbnode.engine.errors import BrokenSeal
from bbnode.engine.planning import program as planning
from bbnode.ir import keys
from bbnode.ir.graph import Function, OpNode, Program
from bbnode.ir.onnx_file import model_of
from bbnode.ir.peer import PeerId
from bbnode.ir.seal import is_intact, seal, sealed
from bbnode.sim import Network


class Doubled(Module):
    """Adds a value to itself."""

    def body(self, g: Graph) -> None:
        x = g.input("x", types.TENSOR_FLOAT)
        g.output("y", BackendSlot("compute").add(g, x, x))


@pytest.fixture
def artifact() -> ModelProto:
    return Compiler().bind_backend("compute", OrtBackend).compile(Doubled().build())


def change(model: ModelProto) -> None:
    for function in model.functions:
        for node in function.node:
            node.op_type = "Mul" if node.op_type == "Add" else node.op_type


def test_the_seal_of_a_long_program_covers_all_pieces_of_its_functions() -> None:
    body = Function("long", domain=keys.MODULE_DOMAIN, inputs=["v0"], outputs=["v900"])
    body.extend(
        OpNode("Abs", "", f"n{i}", [f"v{i}"], [f"v{i + 1}"], metadata={"note": "x" * (i % 300)})
        for i in range(900)
    )
    program = Program(name="long", functions=[body, Function("short", domain=keys.MODULE_DOMAIN)])
    made = sealed(program)
    assert made.ByteSize() > 2 << 16
    assert is_intact(made)
    seal(made)
    assert made == sealed(program)
    assert model_of(program).functions == made.functions
    del made.functions[0].node[899]
    assert not is_intact(made)


def test_a_changed_artifact_is_refused_by_install_and_by_the_simulator(
    artifact: ModelProto,
) -> None:
    install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    change(artifact)
    with pytest.raises(BrokenSeal, match="changed after it was compiled"):
        install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    with pytest.raises(BrokenSeal):
        plan_program(artifact, ["@self"])
    with pytest.raises(BrokenSeal):
        Network(seed=1).add("a", artifact, ["@self"])


def test_who_changes_it_on_purpose_seals_it_again_or_takes_the_seal_off(
    artifact: ModelProto,
) -> None:
    change(artifact)
    seal(artifact)
    assert is_intact(artifact)
    install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    kept = [entry for entry in artifact.metadata_props if entry.key != keys.SEAL_KEY]
    del artifact.metadata_props[:]
    artifact.metadata_props.extend(kept)
    node = install(artifact, ["@self"], peer_id=PeerId.from_seed(1))
    node.invoke("@self", {"x": np.array([3], np.float32)})
    (value,) = [step.value for step in node.poll(0) if hasattr(step, "value")]
    np.testing.assert_array_equal(value, [9])


def test_nodes_of_a_simulation_look_at_a_model_once(
    artifact: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ModelProto] = []

    def count(model: ModelProto) -> bool:
        seen.append(model)
        return is_intact(model)

    monkeypatch.setattr(planning, "is_intact", count)
    network = Network(seed=1)
    for number in range(20):
        network.add(f"n{number}", artifact, ["@self"])
    assert len(seen) == 1
