"""`OnnxPipeline`: one ONNX model that runs over several peers, stage by stage.

Rule: a stage gets in one message what it and those behind it need and the model has made so
far, and nothing else; the result goes to the peer that asked, as one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import check_class, check_name
from bbnode.dsl.onnx_record import PortNames
from bbnode.dsl.roles import PeerSelectorSlot
from bbnode.ir import types
from bbnode.ir.types import TypeNode

if TYPE_CHECKING:
    from bbnode.dsl.onnx.module import OnnxPart


class OnnxPipeline(Module):
    """A model in stages, each on a class of peer of its own; `OnnxModule.split` makes it.

    ```python
    pipeline = OnnxModule("model.onnx", home="client").split(stages=2)
    pipeline.build()
    # client: inputs -> one peer of class stage0 -> one peer of class stage1 -> client: outputs
    ```

    - Inputs and outputs are those of the model, and live on `home`.
    - Who the peers are: for each stage there is a `PeerSelectorSlot` called like its class. It
      is asked on the class that sends to the stage, for one peer at a time, so that several
      peers of a class share the work. Bind each one, e.g. to `ConnectedView`.
    - The values that cross a cut travel as one message; values that a later stage needs pass
      through those between. With them goes the PeerId of who asked, to which the last stage
      sends the result.
    - The outputs appear on `home` in an execution of their own, when the result arrives: all
      together, as outputs of the program, or to ops that read nothing else of `home`.
    - `stages` are Modules as well: each can be called, compiled and run alone.
    """

    def __init__(
        self,
        stages: Sequence[OnnxPart],
        crossing: Sequence[Sequence[str]],
        kinds: Mapping[str, TypeNode],
        *,
        ports: PortNames,
        classes: Sequence[str],
        home: str,
        name: str,
    ) -> None:
        """Put stages into a row.

        Args:
            stages: in order.
            crossing: ONNX names of the values that travel to each stage, and of those that
                travel back.
            kinds: types of these values.
            ports: of the model.
            classes: class of peer of each stage.
            home: class of peer that has the inputs and gets the outputs.
            name: of the Module.

        Raises:
            BadName: `name`, `home` or a class is none.
        """
        self.name = check_name("Module name", name)
        self.home = check_class(home, module=self.name)
        self._stages = tuple(stages)
        self._crossing = tuple(tuple(names) for names in crossing)
        self._kinds = kinds
        self._ports = ports
        self._classes = tuple(classes)

    @property
    def stages(self) -> tuple[OnnxPart, ...]:
        """The stages, in order."""
        return self._stages

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of peer of each stage."""
        return self._classes

    @property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """ONNX names of the values that travel to each stage, and last of those that come back."""
        return self._crossing

    @property
    def input_ports(self) -> Mapping[str, str]:
        """ONNX name of each input, to the name of the Module's input."""
        return dict(self._ports.inputs)

    @property
    def output_ports(self) -> Mapping[str, str]:
        """ONNX name of each output, to the name of the Module's output."""
        return dict(self._ports.outputs)

    def body(self, g: Graph) -> None:
        """Record the way of the values through the stages and back."""
        here = {
            name: g.input(port, self._kinds.get(name, types.TENSOR))
            for name, port in self._ports.inputs.items()
        }
        origin: Output | None = None
        for index, (stage, peer_class) in enumerate(zip(self._stages, self._classes, strict=True)):
            crossing = self._crossing[index]
            # The choice of a peer belongs to the execution that has the values.
            selector = PeerSelectorSlot(peer_class, peer_class=peer_class)
            peers = selector.sample(g, n=1, after=here[crossing[0]])
            here, received, came_along = self._ship(
                g, f"stage{index}", peers, here, crossing, origin
            )
            origin = received.sender if came_along is None else came_along
            call = stage.call()
            for name, port in stage.input_ports.items():
                call.input(port, here[name])
            # A stage that reads nothing (it draws) starts when the others' values are there.
            made = call.build(g, after=None if stage.input_ports else received)
            here |= {name: made.output(port) for name, port in stage.output_ports.items()}
        if origin is not None:
            here, _, _ = self._ship(g, "result", origin, here, self._crossing[-1], None)
        for name, port in self._ports.outputs.items():
            g.output(port, here[name])

    def _ship(
        self,
        g: Graph,
        port: str,
        peers: Output,
        here: Mapping[str, Output],
        names: Sequence[str],
        origin: Output | None,
    ) -> tuple[dict[str, Output], Output, Output | None]:
        """Send values in one message; gives them, the message and `origin` as they arrive."""
        parts = [*([] if origin is None else [origin]), *(here[name] for name in names)]
        kinds = [*([] if origin is None else [types.PEER_ID]), *(self._kinds[n] for n in names)]
        if len(parts) == 1:
            received = g.net_out(port, peers, parts[0])
            return {names[0]: received}, received, None
        received = g.net_out(port, peers, g.bundle(parts))
        arrived = list(g.unbundle(received, kinds))
        came_along = None if origin is None else arrived.pop(0)
        return dict(zip(names, arrived, strict=True)), received, came_along
