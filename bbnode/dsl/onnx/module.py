"""`OnnxModule`: a model that exists as an ONNX file, used as a Module.

Rule: the file is read and checked when the object is made, so that whatever is wrong with it
is told where its path stands; recording it never fails for the model's sake.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from onnx import ModelProto

from bbnode.dsl.backend.slot import BackendSlot
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.core.module import Module
from bbnode.dsl.core.names import check_class, check_name
from bbnode.dsl.errors import BadArgument
from bbnode.dsl.onnx.cuts import split_at, split_by_weight
from bbnode.dsl.onnx.graph import Part, index_model, whole
from bbnode.dsl.onnx.load import ModelSource, load_model
from bbnode.dsl.onnx_opset import to_recorded_opset
from bbnode.dsl.onnx_pipeline import OnnxPipeline
from bbnode.dsl.onnx_record import clean_name, port_names, record_part
from bbnode.ir import keys

DEFAULT_SLOT = "compute"


class OnnxPart(Module):
    """Some ops of an ONNX model as a Module: the whole model, or one stage of a split.

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
        self._ports = port_names(part.inputs, part.outputs)

    @property
    def input_ports(self) -> Mapping[str, str]:
        """ONNX name of each input, to the name of the Module's input."""
        return dict(self._ports.inputs)

    @property
    def output_ports(self) -> Mapping[str, str]:
        """ONNX name of each output, to the name of the Module's output."""
        return dict(self._ports.outputs)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the part holds."""
        return self._part.weight_bytes

    def body(self, g: Graph) -> None:
        """Record the ops of the part on its backend slot."""
        record_part(g, self._part, self._slot, self._ports)


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

    What becomes of the model:

    - Inputs and outputs keep their names where these are names (letters, digits, `_`, `-`);
      other characters become `_`, see `input_ports`. They have to be tensors of numbers or
      bools. An input that has an initializer is a weight, not a port.
    - Weights become constants of the backend's graph: loaded once, never copied by a call.
      Weights in other files are read if these lie beneath the model's own folder.
    - Local functions are inlined; If, Loop and Scan keep their graphs.
    - The opset is brought to the one that programs are recorded in: ops that mean the same
      stay as they are, others go through ONNX's converter.
    - Ops of other domains than `ai.onnx` and `ai.onnx.ml` are refused.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        name: str | None = None,
        slot: str | BackendSlot = DEFAULT_SLOT,
        home: str = keys.SELF_CLASS,
        outputs: Sequence[str] | None = None,
    ) -> None:
        """Read a model.

        Args:
            source: path of an ONNX file, or a ModelProto (copied).
            name: of the Module; the file's name, or the graph's, when left out.
            slot: the backend slot that runs the ops.
            home: class of peer on which its inputs live, when it is a program of its own.
            outputs: those to keep, by ONNX name; all of them when left out.

        Raises:
            OnnxImportError: one of its subclasses, see `bbnode.dsl.errors`.
            BadArgument, BadName: `slot`, `name` or `home` is none.
        """
        called = check_name("Module name", name or _default_name(source))
        backend = BackendSlot(slot) if isinstance(slot, str) else slot
        if not isinstance(backend, BackendSlot):
            raise BadArgument(f"slot={slot!r:.60} is no BackendSlot and no name", called)
        model = to_recorded_opset(load_model(source, called), called)
        graph = index_model(model, outputs, called)
        super().__init__(whole(graph), name=called, slot=backend, home=home)

    def split(
        self,
        stages: int | None = None,
        *,
        at: Sequence[str | Sequence[str]] | None = None,
        classes: Sequence[str] | None = None,
        home: str | None = None,
        name: str | None = None,
    ) -> OnnxPipeline:
        """The model as a pipeline over several classes of peers; see `OnnxPipeline`.

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
            stages: how many stages; cut so that all have about as many bytes of weights, and
                few values cross.
            at: instead of `stages`: names of values, behind each of which a stage ends; a list
                among them names values that end one stage together.
            classes: class of peer of each stage; `stage0`, `stage1`, … when left out.
            home: class of peer that has the inputs and gets the result; the Module's own when
                left out.
            name: of the pipeline; `<name>_pipeline` when left out.

        Raises:
            BadArgument: both or none of `stages` and `at`, or `classes` that do not fit.
            TooManyStages, BadCut, UnknownValue: the model cannot be cut like this.
        """
        if (stages is None) == (at is None):
            raise BadArgument("split takes either stages=<number> or at=[<values>]", self.name)
        if at is None:
            made = split_by_weight(self._part.graph, stages or 0, self.name)
        else:
            made = split_at(self._part.graph, at, self.name)
        parts = [
            OnnxPart(part, name=f"{self.name}_stage{index}", slot=self._slot, home=keys.SELF_CLASS)
            for index, part in enumerate(made.parts)
        ]
        return OnnxPipeline(
            parts,
            made.crossing,
            self._part.graph.kinds,
            ports=self._ports,
            classes=_classes(classes, len(parts), self.name),
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
        text = source.graph.name
    elif isinstance(source, str | os.PathLike):
        text = PurePath(source).stem
    return clean_name(text)[:100] or "OnnxModel"
