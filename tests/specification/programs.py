"""Programs of probes: recorded, compiled and run in a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from onnx import FunctionProto, ModelProto, NodeProto

from bbnode.compiler import Compiler
from bbnode.components import ConnectedView, FedAvg, OnnxModel, OrtBackend
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.models.mlp import mlp_forward
from bbnode.dsl import BackendSlot, Graph, Output, PeerSelectorSlot, types
from bbnode.ir import keys
from bbnode.sim import Network, SimNode
from tests.dsl.programs import FromFunction
from tests.engine import support

MS = support.MS
S = support.S
Body = Callable[[Graph], object]

COMPUTE = BackendSlot("compute")
WORKERS = PeerSelectorSlot("workers", peer_class="worker")


def compiler() -> Compiler:
    """Return a compiler that knows the slots of the programs here."""
    return (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_peer_selector("workers", ConnectedView)
        .bind_aggregator("mean", FedAvg)
        .bind_model("net", support.ScriptModel)
    )


def recorded(body: Body, home: str = "asker") -> ModelProto:
    return FromFunction(body, home=home).build()


def compiled(body: Body, home: str = "asker", using: Compiler | None = None) -> ModelProto:
    return (using or compiler()).compile(recorded(body, home))


def number(g: Graph, name: str = "x") -> Output:
    return g.input(name, types.TENSOR_FLOAT)


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def echo(g: Graph) -> None:
    """Send `x` to all workers, and hand out what comes back."""
    x = number(g)
    there = g.net_out("there", WORKERS.current_view(g, after=x), x)
    g.output("back", g.net_out("back", there.sender, there))


def asks(g: Graph) -> None:
    """Ask all workers for twice `x`."""
    x = number(g)
    asked = g.request("ask", WORKERS.current_view(g, after=x), x, deadline=5.0)
    asked.respond(COMPUTE.add(g, asked.received, asked.received))
    g.output("answers", asked.responses)


def main_of(model: ModelProto, peer_class: str) -> FunctionProto:
    """Return the partition of a class."""
    (found,) = (f for f in model.functions if f.name.startswith(f"{peer_class}#"))
    return found


def nodes(model: ModelProto, *op_types: str) -> list[NodeProto]:
    """Return all nodes, or those of these types, in every function of a model."""
    made = (node for function in model.functions for node in function.node)
    return [node for node in made if not op_types or node.op_type in op_types]


def meta(proto: Any, key: str) -> str:
    """Return an entry of the metadata, "" where there is none."""
    return next((e.value for e in proto.metadata_props if e.key == key), "")


def attributes(node: NodeProto) -> set[str]:
    return {attribute.name for attribute in node.attribute}


def target_names(model: ModelProto) -> Iterator[str]:
    return (f.name for f in model.functions if meta(f, keys.TARGET_KEY))


def network(model: ModelProto, home: str = "asker", workers: int = 1) -> tuple[Network, SimNode]:
    """Return a simulated network of one node of the home class and some workers, at rest."""
    made = Network(seed=0)
    node = made.add(home, model, [home])
    for index in range(workers):
        made.add(f"worker {index}", model, ["worker"])
    made.run_until_idle()
    return made, node


def alone(body: Body, inputs: Mapping[str, Any], **more: Any) -> SimNode:
    """Return a node that has run a program of one class with these inputs."""
    made, node = network(compiled(body, **more), workers=0)
    node.invoke("asker", inputs)
    made.run_until_idle()
    return node


@dataclass(frozen=True, kw_only=True)
class PointsConfig:
    seed: int = 0
    batch_size: int = 0


@support._once
class Points(MemoryDataSource):
    """Eight points of the plane, in two classes."""

    TYPE_NAME: ClassVar[str] = "test.Points"
    Config = PointsConfig

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        at = np.arange(16, dtype=np.float32).reshape(8, 2) / 16
        return at, np.arange(8) % 2


def learner() -> Compiler:
    """Return a compiler with a real model in slot `net`, and data for it."""
    return (
        Compiler()
        .bind_backend("compute", OrtBackend)
        .bind_data_source("data", Points)
        .bind_model("net", OnnxModel)
    )


def learning(body: Body, inputs: Mapping[str, Any]) -> SimNode:
    """Return a node that has run a program over a linear model of two inputs and outputs."""
    made = Network(seed=0)
    forward = mlp_forward((2, 2)).SerializeToString()
    node = made.add("asker", compiled(body, using=learner()), ["asker"],
                    config={"net": {"model": forward}})  # fmt: skip
    node.invoke("asker", inputs)
    made.run_until_idle()
    assert node.failures() == []
    return node
