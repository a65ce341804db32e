"""Readings that stations publish on a topic, and nobody asks for.

Run it with `python -m bbnode.examples.bulletin`.

Every station follows the topic "readings" of its network and publishes what it measures; each
message passes from station to station, so that it reaches those too that the publisher is not
connected with, and does not know. Each one that arrives is an event, and the event starts an
execution that takes it. In the run below the stations stand in a row; the last one joins late,
and hears what is published from then on.

The program runs in a node too, where `network.transport` is "libp2p": there the messages travel by
GossipSub.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from onnx import ModelProto

from bbnode.compiler import Compiler
from bbnode.components import Topic
from bbnode.dsl import Graph, Module, ProtocolSlot, syscalls, types, values
from bbnode.sim import Network, S, SimNode

MESSAGE = 1024  # the kind of the event that a message publishes: Topic's default


class Bulletin(Module):
    """Outputs "reading" (float32) and "station" (its PeerId) with each message that arrives.

    Input "join" follows the topic; input "measured" (float32) is published.
    """

    home = "station"

    def body(self, g: Graph) -> None:
        topic = ProtocolSlot("readings", "topic")
        topic.subscribe(g, after=g.input("join", types.TRIGGER))
        topic.publish(g, g.input("measured", types.TENSOR_FLOAT))
        reading, station = topic.take(g, after=syscalls.event_source(g, kind=MESSAGE))
        g.output("reading", reading)
        g.output("station", station)

    def bindings(self) -> Mapping[str, Any]:
        return {"readings": Topic}


def compile_program() -> ModelProto:
    """Compile the program with its component."""
    return Compiler().bind_protocol("readings", Topic).compile(Bulletin().build())


def row(network: Network, count: int) -> list[SimNode]:
    """Add stations, each connected with the next one."""
    compiled = compile_program()
    stations = [network.add(f"station-{i}", compiled, ["station"]) for i in range(count)]
    for one, other in pairwise(stations):
        network.connect(one, other)
    return stations


def main() -> None:
    """Run four stations in a row, of which the last one joins late."""
    network = Network(seed=1, mesh=False)
    stations = row(network, 4)
    names = {station.peer_id: station.name for station in stations}
    for station in stations[:3]:
        station.deliver_event("station", "join", values.TRIGGER)
    network.run(until=1 * S)
    for second, measured in enumerate((12.5, 13.0), 1):
        stations[0].deliver_event("station", "measured", np.float32(measured))
        network.run(until=2 * second * S)
        stations[3].deliver_event("station", "join", values.TRIGGER)
        network.run(until=(2 * second + 1) * S)
    for station in stations:
        heard = [
            f"{float(reading)} of {names[who]}"
            for reading, who in zip(
                station.values("reading"), station.values("station"), strict=True
            )
        ]
        print(f"{station.name} heard: {', '.join(heard) or 'nothing'}")


if __name__ == "__main__":
    main()
