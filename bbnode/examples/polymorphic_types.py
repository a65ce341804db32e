"""One program, several types: what is bound decides what travels.

Run it with `python -m bbnode.examples.polymorphic_types`.

The program below never says which numbers it works on. Its data source has outputs of "Tensor", an
abstract type, which may not travel between peers: a receiver has to know what will come. The
`storage` of the component that is bound to the slot narrows it, and the compiler carries that on,
by ONNX's own type inference, through every op up to the wire. So the same Module compiles to a
program of floats or of doubles, on either backend; an office of one kind refuses what a station of
the other sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from bbnode.compiler import CompileError, Compiler, target_names
from bbnode.components import (
    Backend,
    ConnectedView,
    DataSource,
    OpContext,
    OrtBackend,
    ReferenceBackend,
    register_component,
)
from bbnode.dsl import BackendSlot, DataSourceSlot, Graph, Module, PeerSelectorSlot, types, values
from bbnode.sim import Network

# A float32 cannot hold a third.
READINGS = [1 / 3, 2 / 3, 1.0]


class Station(DataSource):
    """A weather station with three readings; subclasses say how precise it is."""

    storage: ClassVar[Mapping[str, types.TypeNode]] = {"NextBatch.labels": types.TENSOR_INT64}
    dtype: ClassVar[type[np.floating[Any]]]

    def next_batch(self, ctx: OpContext) -> tuple[Any, Any]:
        """Return the readings [3] and their numbers [3]."""
        return np.array(READINGS, self.dtype), np.arange(len(READINGS))

    def reset(self, ctx: OpContext) -> None:
        """Do nothing: every batch is the first."""

    def on_data_loaded(self, ctx: OpContext) -> None:
        """Return: the readings are always there."""

    def epoch_batches(self, batch_size: int) -> Sequence[tuple[Any, Any]]:
        """Return all readings, `batch_size` at a time."""
        readings, numbers = np.array(READINGS, self.dtype), np.arange(len(READINGS))
        starts = range(0, len(READINGS), batch_size)
        return [(readings[s : s + batch_size], numbers[s : s + batch_size]) for s in starts]

    @property
    def num_samples(self) -> int:
        """The number of readings."""
        return len(READINGS)


@register_component
class SingleStation(Station):
    """Stores float32, and says so."""

    TYPE_NAME: ClassVar[str] = "example.SingleStation"
    dtype = np.float32
    storage: ClassVar[Mapping[str, types.TypeNode]] = {
        **Station.storage,
        "NextBatch.batch": types.TENSOR_FLOAT,
    }


@register_component
class DoubleStation(Station):
    """Stores float64, and says so."""

    TYPE_NAME: ClassVar[str] = "example.DoubleStation"
    dtype = np.float64
    storage: ClassVar[Mapping[str, types.TypeNode]] = {
        **Station.storage,
        "NextBatch.batch": types.TENSOR_DOUBLE,
    }


@register_component
class VagueStation(Station):
    """Stores float32, and does not say so."""

    TYPE_NAME: ClassVar[str] = "example.VagueStation"
    dtype = np.float32


class Report(Module):
    """On "go" the station squares its readings and sends them to the office, which sums them."""

    home = "station"

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        go = g.input("go", types.TRIGGER)
        offices = PeerSelectorSlot("offices", peer_class="office").current_view(g, after=go)
        readings, _ = DataSourceSlot("readings").next_batch(g, after=go)
        received = g.net_out("report", offices, compute.mul(g, readings, readings))
        g.output("sum", compute.reduce_sum(g, received, keepdims=False))


def compile_for(station: type[Station], backend: type[Backend]) -> ModelProto:
    """Compile the one Module for one kind of station and of backend."""
    return (
        Compiler()
        .bind_peer_selector("offices", ConnectedView)
        .bind_data_source("readings", station)
        .bind_backend("compute", backend)
        .compile(Report().build())
    )


def type_on_the_wire(model: ModelProto) -> str:
    """Return the type that the office expects, as the compiled model says."""
    for function in model.functions:
        for node in function.node:
            for attribute in node.attribute:
                if attribute.name == "payload_type":
                    return str(attribute.tp.denotation)
    return "nothing is received"


def run(model: ModelProto) -> Any:
    """Run the program once and return the sum at the office."""
    network = Network(seed=0)
    station = network.add("station", model, ["station"])
    office = network.add("office", model, ["office"])
    station.invoke("station", {"go": values.TRIGGER})
    network.run_until_idle()
    return office.values("sum")[0]


def main() -> None:
    """Two kinds of station on two backends; and one that leaves its type open."""
    for station in (SingleStation, DoubleStation):
        for backend in (OrtBackend, ReferenceBackend):
            compiled = compile_for(station, backend)
            total = run(compiled)
            print(
                f"{station.TYPE_NAME} on {backend.TYPE_NAME}: {type_on_the_wire(compiled)}, "
                f"sum {float(total)!r} ({total.dtype})"
            )
            print(f"  targets: {', '.join(target_names(compiled))}")
    try:
        compile_for(VagueStation, OrtBackend)
    except CompileError as error:
        print(f"{VagueStation.TYPE_NAME} is refused: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
