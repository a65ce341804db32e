"""One model over several classes of peers, each with a part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from onnx import ModelProto

from bbnode.components import ConnectedView, OrtBackend
from bbnode.dsl import Graph, OnnxModule, OnnxPipeline
from bbnode.programs.arguments import ReadyProgram


class Pipeline(ReadyProgram):
    """A model in stages, for inference: forward only, nothing is trained.

    Its inputs and outputs are those of the model, and live on the class "asker"; each stage
    is a class of peer of its own ("stage0", "stage1", … or `classes`). What comes out of a stage
    travels to a peer of the next one, and the result back to who asked. Several peers of a class
    share the work. Weights do not travel: each class holds those of its stage.

    `cuts` names the values behind each of which a stage ends (a list among them: values that end
    one together); without, the model is cut into `stages` of about equal weight.
    """

    home = "asker"

    model: str | os.PathLike[str] | ModelProto | None = None  # relative: to the working directory
    stages: int = 2
    cuts: Sequence[str | Sequence[str]] = ()
    classes: Sequence[str] = ()

    def body(self, g: Graph) -> None:
        """Record the way through the stages and back."""
        self.pipeline.body(g)

    @cached_property
    def pipeline(self) -> OnnxPipeline:
        """The stages. Raises BadArgument, and OnnxImportError for a model that can't be split."""
        self.require("model", self.model is not None, "the path of an ONNX file, or a ModelProto")
        assert self.model is not None
        module = OnnxModule(self.model, name=self.name, home=self.home)
        for name in ("cuts", "classes"):
            self.require(name, isinstance(getattr(self, name), list | tuple), "a list of names")
        classes = list(self.classes) or None
        if self.home in self.classes or len(set(self.classes)) < len(self.classes):
            raise self.bad(
                f"classes={list(self.classes)} have to differ from each other and from the one "
                f"that asks, {self.home!r}"
            )
        if self.cuts:
            return module.split(at=list(self.cuts), classes=classes)
        return module.split(self.stages, classes=classes)

    def bindings(self) -> Mapping[str, Any]:
        """Return the classes of the slots: a backend, and a selector for each stage."""
        return {"compute": OrtBackend} | dict.fromkeys(self.pipeline.classes, ConnectedView)
