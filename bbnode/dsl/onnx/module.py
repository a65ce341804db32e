"""ONNX models as Modules: a whole one, a part of one, and a pipeline of parts on several peers.

Rule: the file is read and checked when the object is created, so that an error in it points at the
line with its path; recording never fails because of the model. Every op becomes one op of the
backend slot, in the model's order; weights become `Constant`s just before the first op that reads
them, so that a backend loads them into its graph once and no call copies them. Only names change,
to the recorder's own. A stage of a pipeline receives the values that it and the later stages need
in one message; the result returns to the requesting peer in one message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from onnx import ModelProto

from bbnode.dsl.backend.slot import BackendSlot
from bbnode.dsl.core.graph import Graph, Output
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import MAX_NAME_LENGTH, check_class, check_name
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BadArgument
from bbnode.dsl.onnx.copying import NodeCopier, clean_name
from bbnode.dsl.onnx.cuts import Split, split_at, split_by_weight
from bbnode.dsl.onnx.graph import Part, index_model, whole
from bbnode.dsl.onnx.load import load_model
from bbnode.dsl.roles import PeerSelectorSlot
from bbnode.ir import keys, types
from bbnode.ir.graph import Attribute, OpNode, is_onnx_domain
from bbnode.ir.intake import ModelSource

DEFAULT_SLOT = "compute"


def free_port_names(values: Iterable[str], taken: set[str]) -> dict[str, str]:
    """Return a valid and distinct port name for each value.

    Other characters become `_`, a leading digit gets `_` before it, and a duplicate name gets a
    number appended.
    """
    names = {}
    for value in values:
        base = clean_name(value) or "value"
        tails = ("", *(f"_{number}" for number in range(2, len(taken) + 3)))
        free = (base[: MAX_NAME_LENGTH - len(tail)] + tail for tail in tails)
        names[value] = next(name for name in free if name not in taken)
        taken.add(names[value])
    return names


class OnnxPart(Module):
    """A part of an ONNX model as a Module: the whole model, or one stage of a split.

    Attributes:
        input_ports: name of the Module's input for each input of the part, by ONNX name.
        output_ports: the same for its outputs.
        weight_bytes: bytes of the weights that it holds.
    """

    def __init__(self, part: Part, *, name: str, slot: BackendSlot, home: str) -> None:
        self.name = check_name("Module name", name)
        self.home = check_class(home, module=self.name)
        self._part = part
        self._slot = slot
        taken: set[str] = set()
        self.input_ports: Mapping[str, str] = free_port_names(part.inputs, taken)
        self.output_ports: Mapping[str, str] = free_port_names(part.outputs, taken)
        self.weight_bytes = part.weight_bytes

    def body(self, g: Graph) -> None:
        """Record the ops of the part on its backend slot."""
        _Recording(g, self._part, self._slot).run(self.input_ports, self.output_ports)


class OnnxPipeline(Module):
    """A model in stages, each on its own class of peer; `OnnxModule.split` creates it.

    ```python
    pipeline = OnnxModule("model.onnx", home="client").split(stages=2)
    pipeline.build()
    # client: inputs -> one peer of class stage0 -> one peer of class stage1 -> client: outputs
    ```

    - Inputs and outputs are those of the model, and live on `home`.
    - For each stage there is a `PeerSelectorSlot` named like its class. It runs on the class
      that sends to the stage and chooses one peer at a time, so that several peers of a class
      share the work. Bind each one, e.g. to `ConnectedView`.
    - The values that cross a cut travel as one message; values for a later stage pass through
      the stages between. The PeerId of the requesting peer travels with them, and the last stage
      sends the result there.
    - The outputs appear on `home` in an execution of their own, when the result arrives: all
      together, as outputs of the program, or to ops that read nothing else on `home`.
    - `stages` are Modules as well: each can be called, compiled and run alone.

    Attributes:
        stages: in order.
        classes: class of peer of each stage.
        crossing: ONNX names of the values that travel to each stage; the last entry has those
            that come back.
        input_ports, output_ports: as those of the model.
    """

    def __init__(
        self, model: OnnxPart, split: Split, *, classes: Sequence[str], home: str, name: str
    ) -> None:
        """Connect the stages of a model, each on its own class of peer.

        Raises BadName.
        """
        self.name = check_name("Module name", name)
        self.home = check_class(home, module=self.name)
        self.stages = tuple(
            OnnxPart(
                part, name=f"{model.name}_stage{index}", slot=model._slot, home=keys.SELF_CLASS
            )
            for index, part in enumerate(split.parts)
        )
        self.classes = tuple(classes)
        self.crossing = split.crossing
        self.input_ports = model.input_ports
        self.output_ports = model.output_ports
        self._kinds = model._part.graph.kinds

    def body(self, g: Graph) -> None:
        """Record the sends of the values through the stages and back."""
        here = {
            name: g.input(port, self._kinds.get(name, types.TENSOR))
            for name, port in self.input_ports.items()
        }
        origin: Output | None = None
        for index, (stage, peer_class) in enumerate(zip(self.stages, self.classes, strict=True)):
            crossing = self.crossing[index]
            # `after` puts the choice of a peer into the execution that has the values.
            selector = PeerSelectorSlot(peer_class, peer_class=peer_class)
            peers = selector.sample(g, n=1, after=here[crossing[0]])
            here, received, came_along = self._ship(
                g, f"stage{index}", peers, here, crossing, origin
            )
            origin = received.sender if came_along is None else came_along
            call = stage.call()
            for name, port in stage.input_ports.items():
                call.input(port, here[name])
            # A stage without inputs (with random ops alone) starts when the message arrives.
            made = call.build(g, after=None if stage.input_ports else received)
            here |= {name: made.output(port) for name, port in stage.output_ports.items()}
        if origin is not None:
            here, _, _ = self._ship(g, "result", origin, here, self.crossing[-1], None)
        for name, port in self.output_ports.items():
            g.output(port, here[name])

    def _ship(
        self, g: Graph, port: str, peers: Output, here: Mapping[str, Output],
        names: Sequence[str], origin: Output | None,
    ) -> tuple[dict[str, Output], Output, Output | None]:  # fmt: skip
        """Send values in one message; return them, the message and `origin` as they arrive."""
        parts = [*([] if origin is None else [origin]), *(here[name] for name in names)]
        kinds = [*([] if origin is None else [types.PEER_ID]), *(self._kinds[n] for n in names)]
        if len(parts) == 1:
            received = g.net_out(port, peers, parts[0])
            return {names[0]: received}, received, None
        received = g.net_out(port, peers, g.bundle(parts))
        arrived = list(g.unbundle(received, kinds))
        came_along = None if origin is None else arrived.pop(0)
        return dict(zip(names, arrived, strict=True)), received, came_along


class OnnxModule(OnnxPart):
    """An ONNX model as a Module: its inputs and outputs are ports, its ops run on one slot.

    ```python
    class Classify(Module):
        home = "edge"

        def body(self, g):
            image = g.input("image", types.TENSOR_FLOAT)
            digits = OnnxModule("digits.onnx")
            g.output("scores", digits.call().input("x", image).build(g).output("logits"))
    ```

    The model in the program:

    - Inputs and outputs keep their names where these are names (letters, digits, `_`, `-`);
      other characters become `_`, see `input_ports`. They have to be tensors of numbers or
      bools. An input that has an initializer is a weight, not a port.
    - Weights become constants of the backend's graph: loaded once, never copied by a call.
      Weights in other files are read if these lie beneath the model's own folder.
    - Local functions are inlined; If, Loop and Scan keep their graphs.
    - The opset is converted to the one that programs are recorded in: ops with the same meaning
      stay as they are, others go through ONNX's converter. A model with newer ops (CumProd,
      LinearAttention, …) is recorded at the first opset that has them.
    - Ops that only ONNX Runtime has in `ai.onnx` (SimplifiedLayerNormalization) are rewritten in
      ONNX's own, and the maps of a ZipMap at the end become its tensor, [rows, classes].
    - Ops of other domains than `ai.onnx` and `ai.onnx.ml` are refused.
    """

    def __init__(
        self, source: ModelSource, *, name: str | None = None,
        slot: str | BackendSlot = DEFAULT_SLOT, home: str = keys.SELF_CLASS,
        outputs: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Read a model.

        Args:
            source: path of an ONNX file, or a ModelProto (copied).
            name: name of the Module; None for the file's name, or the graph's.
            slot: the backend slot that runs the ops.
            home: class of peer of its inputs, if the model is a program of its own.
            outputs: ONNX names of the outputs to keep; None for all.

        Raises:
            OnnxImportError: one of its subclasses, see `bbnode.dsl.errors`.
            BadArgument, BadName: `slot`, `name` or `home` is invalid.
        """
        called = check_name("Module name", name or _default_name(source))
        backend = BackendSlot(slot) if isinstance(slot, str) else slot
        if not isinstance(backend, BackendSlot):
            raise BadArgument(f"slot={slot!r:.60} is neither a BackendSlot nor a name", called)
        graph = index_model(load_model(source, called), outputs, called)
        super().__init__(whole(graph), name=called, slot=backend, home=home)

    def split(
        self, stages: int | None = None, *, at: Sequence[str | Sequence[str]] | None = None,
        classes: Sequence[str] | None = None, home: str | None = None, name: str | None = None,
    ) -> OnnxPipeline:  # fmt: skip
        """Return the model as a pipeline over several classes of peers; see `OnnxPipeline`.

        ```python
        pipeline = OnnxModule("resnet.onnx").split(stages=3)
        artifact = (
            Compiler()
            .bind_backend("compute", OrtBackend)
            .bind_peer_selector("stage0", ConnectedView)
            .bind_peer_selector("stage1", ConnectedView)
            .bind_peer_selector("stage2", ConnectedView)
            .compile(pipeline.build())
        )
        ```

        Args:
            stages: number of stages, cut so that all have about as many bytes of weights, and
                few values cross.
            at: instead of `stages`: names of values, each of which ends a stage; a list among
                them names values that end one stage together.
            classes: class of peer of each stage; None for `stage0`, `stage1`, ….
            home: class of peer that has the inputs and gets the result; None for the Module's.
            name: name of the pipeline; None for `<name>_pipeline`.

        Raises:
            BadArgument: both or neither of `stages` and `at`, or `classes` that do not fit.
            TooManyStages, BadCut, UnknownValue: the model cannot be cut like this.
        """
        if (stages is None) == (at is None):
            raise BadArgument("split takes either stages=<number> or at=[<values>]", self.name)
        graph = self._part.graph
        cut = (
            split_by_weight(graph, stages or 0, self.name)
            if at is None
            else split_at(graph, at, self.name)
        )
        return OnnxPipeline(
            self,
            cut,
            classes=_classes(classes, len(cut.parts), self.name),
            home=self.home if home is None else home,
            name=f"{self.name}_pipeline" if name is None else name,
        )


def _classes(classes: Sequence[str] | None, stages: int, module: str) -> tuple[str, ...]:
    if classes is None:
        return tuple(f"stage{index}" for index in range(stages))
    if not isinstance(classes, list | tuple) or len(classes) != stages:
        raise BadArgument(
            f"classes={classes!r:.80} has to name the class of peer of each of {stages} stages",
            module,
        )
    return tuple(check_name("peer class", each, module=module) for each in classes)


def _default_name(source: object) -> str:
    text = ""
    if isinstance(source, ModelProto):
        text = str(
            source.graph.name
        )  # bytes if the model is damaged, which is refused when it is read
    elif isinstance(source, str | os.PathLike):
        text = PurePath(source).stem
    return clean_name(text)[:100] or "OnnxModel"


# --- recording -----------------------------------------------------------------------------


class _Recording(NodeCopier):
    """A part of a model, recorded as the body of a Module."""

    def __init__(self, g: Graph, part: Part, slot: BackendSlot) -> None:
        super().__init__(g, part.graph.kinds)
        self._part = part
        self._graph = part.graph
        self._use = SlotUse(name=slot.name, role=slot.ROLE, concrete=slot.concrete)
        self._first_input: Output | None = None

    def run(self, input_ports: Mapping[str, str], output_ports: Mapping[str, str]) -> None:
        part = self._part
        self.g.recorder.keep_extras(self._graph.extras)
        for name in part.inputs:
            self.input(name, input_ports[name])
        if part.inputs:
            self._first_input = self.known[part.inputs[0]]
        fixed = self._graph.fixed_for(part.nodes, part.outputs)
        for index in sorted({*part.nodes, *fixed}):
            self._record(self._graph.nodes[index], is_fixed=self._graph.fixed[index])
        self._annotate()
        for name in part.outputs:
            # A value of weights alone is handed out when and where the other outputs are.
            waits = self._first_input if self._graph.is_fixed_value(name) else None
            self.g.output(output_ports[name], self.value(name, "an output"), after=waits)

    def _annotate(self) -> None:
        """Record the quantization annotations of the part's values whose parameters are in it."""
        for value, held in self._graph.annotations.items():
            if value not in self.known:
                continue
            names = {k: n for k, n in held.items() if n in self.known or n in self._graph.weights}
            parameters = {key: self.value(name, "") for key, name in names.items()}
            self.g.annotate(self.known[value], parameters)

    def _record(self, node: OpNode, *, is_fixed: bool) -> None:
        # An op without inputs that is no constant draws random values: once per input.
        waits = None if is_fixed or node.computes_with else self._first_input
        for name in node.computes_with:
            self.value(name, node.name)  # weights are recorded outside of the op's scopes
        domain = "" if is_onnx_domain(node.domain) else node.domain
        version = self._graph.opsets.get(domain, keys.ONNX_OPSET_VERSION)
        with self.scopes_of(node):
            self.copy(node, version, slot=self._use, after=waits)

    def value(self, name: str, reader: str) -> Output:
        """Return a recorded value, or a weight, which is recorded now."""
        tensor = None if name in self.known else self._graph.weights.get(name)
        if tensor is not None:
            kind = types.TENSOR_BY_ELEM.get(tensor.elem_type, types.ANY)
            attribute = "sparse_value" if tensor.is_sparse else "value"
            (self.known[name],) = self.g.emit(
                "",
                "Constant",
                outputs=(("output", kind),),
                attributes={attribute: Attribute.of(tensor)},
                slot=self._use,
                opset_version=self._graph.opsets.get("", keys.ONNX_OPSET_VERSION),
            )
        return super().value(name, reader)
