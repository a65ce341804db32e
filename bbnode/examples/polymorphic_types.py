"""One program, several types: what is bound decides what travels.

Run it with `python -m bbnode.examples.polymorphic_types`.

The program below never says which numbers it works on. Its station measures a "Tensor", an
abstract type, which may not travel between peers: a receiver has to know what will come. The
`storage` of the component that is bound to the slot narrows it, and the compiler carries that on,
by ONNX's own type inference, through every op up to the wire. So the same Module compiles to a
program of floats or of doubles; one whose type stays open does not compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from bbnode.compiler import CompileError, Compiler
from bbnode.components import (
    ConnectedView,
    OpContext,
    OrtBackend,
    ProtocolComponent,
    register_component,
)
from bbnode.dsl import (
    BackendSlot,
    Graph,
    Module,
    PeerSelectorSlot,
    ProtocolSlot,
    protocol_op,
    types,
    values,
)
from bbnode.sim import Network

READINGS = [1 / 3, 2 / 3, 1.0]  # a float32 cannot hold a third

protocol_op("station", "Measure", {"go": types.TRIGGER}, {"readings": types.TENSOR})


@register_component
class Station(ProtocolComponent):
    """A weather station with three readings; it does not say how precise it is."""

    TYPE_NAME: ClassVar[str] = "example.Station"
    dtype: ClassVar[type[np.floating[Any]]] = np.float32

    def measure(self, ctx: OpContext, go: values.Trigger) -> Any:
        """Return the readings, [3]."""
        return np.array(READINGS, self.dtype)


@register_component
class SingleStation(Station):
    """Measures in float32, and says so."""

    TYPE_NAME: ClassVar[str] = "example.SingleStation"
    storage: ClassVar[Mapping[str, types.TypeNode]] = {"Measure.readings": types.TENSOR_FLOAT}


@register_component
class DoubleStation(Station):
    """Measures in float64, and says so."""

    TYPE_NAME: ClassVar[str] = "example.DoubleStation"
    dtype = np.float64
    storage: ClassVar[Mapping[str, types.TypeNode]] = {"Measure.readings": types.TENSOR_DOUBLE}


class Report(Module):
    """On "go" the station squares its readings and sends them to the office, which sums them."""

    home = "station"

    def body(self, g: Graph) -> None:
        compute = BackendSlot("compute")
        go = g.input("go", types.TRIGGER)
        offices = PeerSelectorSlot("offices", peer_class="office").current_view(g, after=go)
        readings = ProtocolSlot("readings", "station").measure(g, go)
        received = g.net_out("report", offices, compute.mul(g, readings, readings))
        g.output("sum", compute.reduce_sum(g, received, keepdims=False))


def compile_for(station: type[Station]) -> ModelProto:
    """Compile the one Module for one kind of station."""
    return (
        Compiler()
        .bind_peer_selector("offices", ConnectedView)
        .bind_protocol("readings", station)
        .bind_backend("compute", OrtBackend)
        .compile(Report().build())
    )


def run(model: ModelProto) -> Any:
    """Run the program once and return the sum at the office."""
    network = Network(seed=0)
    station = network.add("station", model, ["station"])
    office = network.add("office", model, ["office"])
    station.invoke("station", {"go": values.TRIGGER})
    network.run_until_idle()
    return office.values("sum")[0]


def main() -> None:
    """Two kinds of station, and one that leaves its type open."""
    for station in (SingleStation, DoubleStation):
        total = run(compile_for(station))
        print(f"{station.TYPE_NAME}: sum {float(total)!r} ({total.dtype})")
    try:
        compile_for(Station)
    except CompileError as error:
        print(f"{Station.TYPE_NAME} is refused: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
