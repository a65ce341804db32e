"""The meaning of a model's inputs and outputs, in the metadata of its ONNX file.

Rule: nothing is guessed. Inputs are described by the data source that the program gives to the
model on this node, the first output by the loss that the program uses; without one, the file says
so instead. Names of inputs and outputs stay the author's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from bbnode.components.contracts import Component, DataSource, OutputKind
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.data.description import DataDescription, DescriptionRefused
from bbnode.components.data.shared_schema import SharedSchema, described
from bbnode.engine.errors import describe
from bbnode.engine.planning.feeds import feeds_of
from bbnode.ir import keys
from bbnode.ir.interrupts import let_stop

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

_DATA = keys.EXPORT_PREFIX + "data"
_OUTPUTS = keys.EXPORT_PREFIX + "outputs"
_UNDESCRIBED = keys.EXPORT_PREFIX + "undescribed"
_MOST_LISTED = 20  # classes listed in a text
_MOST_CHARS = 4096  # characters of an output's metadata that are read

_WORDS: dict[OutputKind, str] = {
    "logits": "logits",
    "log_probabilities": "logarithms of the probabilities",
    "probabilities": "probabilities",
    "logit": "logits of yes",
    "value": "values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of a model's inputs and outputs.

    Attributes:
        data: of its examples; None if it is unknown.
        why: the reason for that.
        uses_loss: the program uses the loss of the model's settings, so that its output is one of
            that loss.
        output, kind: name and kind of the first output; read from a file.
    """

    data: DataDescription | None = None
    why: str = "nothing is known of the examples of this model"
    uses_loss: bool = False
    output: str = ""
    kind: OutputKind = ""

    def stamp(self, model: onnx.ModelProto, kind: OutputKind, name: str = "") -> None:
        """Write the meaning into a model; `kind` is that of the output that its loss takes.

        That is the output of this `name`, or the first if there is none of that name.
        """
        why = self.why
        text = ""
        if self.data is not None:
            try:
                text = self.data.to_json()
            except DescriptionRefused as error:
                why = str(error)
        if text:
            model.metadata_props.add(key=_DATA, value=text)
        else:
            model.metadata_props.add(key=_UNDESCRIBED, value=why)
        if not (kind and self.uses_loss and model.graph.output):
            return
        named = (each for each in model.graph.output if each.name == name)
        output = next(named, model.graph.output[0])
        entry = {"name": output.name, "kind": kind}
        model.metadata_props.add(key=_OUTPUTS, value=json.dumps([entry]))
        if not output.doc_string:
            sizes = output.type.tensor_type.shape.dim
            output.doc_string = self._in_words(kind, sizes[-1].dim_value if sizes else 0)

    def _in_words(self, kind: OutputKind, size: int) -> str:
        words = _WORDS[kind]
        label = self.data.label if self.data is not None else ""
        classes = self.data.classes if self.data is not None else ()
        if kind in ("value", "logit"):
            return f"{words} of {label}" if label else words
        if (
            size and len(classes) != size
        ):  # found in data without one of them, so that their numbers mean others
            classes = ()
        listed = ", ".join(classes[:_MOST_LISTED]) + (", …" if classes[_MOST_LISTED:] else "")
        of_classes = f" of the classes {listed}" if classes else " of the classes 0, 1, …"
        return f"{words}{of_classes}{f' of {label}' if label else ''}"

    @classmethod
    def of_model(cls, model: onnx.ModelProto) -> Meaning | None:
        """Return the description in a model; None if bbnode wrote none.

        Raises DescriptionRefused for metadata that bbnode did not write.
        """
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        if metadata.keys().isdisjoint((_DATA, _OUTPUTS, _UNDESCRIBED)):
            return None
        data = DataDescription.from_json(metadata[_DATA]) if _DATA in metadata else None
        output, kind = _first_output(metadata.get(_OUTPUTS, ""))
        why = metadata.get(_UNDESCRIBED, "")
        return cls(data=data, why=why, uses_loss=bool(kind), output=output, kind=kind)


def meaning_of(
    model: onnx.ModelProto,
    targets: Sequence[str],
    slot: str,
    component: Callable[[str], Component],
    reference: Callable[[str], SharedSchema | None] = lambda _slot: None,
) -> Meaning:
    """Return what inputs and outputs of the model in a slot mean, on a node that plays `targets`.

    Takes long where the data are not loaded: run it in a worker thread.

    Args:
        model: the artifact.
        targets: names or classes.
        slot: of the model.
        component: returns the component of another slot.
        reference: returns what the examples of a slot mean in the federation; of "", those that the
            others have, of whom this node keeps the reference.
    """
    sources, uses_loss = feeds_of(model, targets, slot)
    if not sources and (kept := reference("")) is not None:
        data = described(kept)
        if data is not None:
            return Meaning(data=data, why="", uses_loss=uses_loss)
        why = "the peers with the data say too little of what they mean to read others by it"
        return Meaning(why=why, uses_loss=uses_loss)
    if len(sources) != 1:
        several = ", ".join(sources)
        why = (
            f"examples of several slots ({several}) go into the model on this node"
            if sources
            else "no data source of this node gives its examples to the model as they are"
        )
        return Meaning(why=why, uses_loss=uses_loss)
    (name,) = sources
    try:
        source: Any = component(name)
        kept = reference(name)
        if kept is not None and isinstance(source, MemoryDataSource):
            source.adopt(kept)  # as in a running node
        data = source.describe() if isinstance(source, DataSource) else None
        if not isinstance(data, DataDescription | None):
            raise TypeError(f"describe() gave a {type(data).__name__}")
    except BaseException as error:  # noqa: BLE001 - a component's own code
        let_stop(error)
        # The file goes to others, and must not contain paths of this machine.
        logger.warning("slot %r is not described: %s", name, ": ".join(describe(error)))
        why = f"the data source of slot {name!r} could not be read ({type(error).__name__})"
        return Meaning(why=why, uses_loss=uses_loss)
    if data is None:
        why = f"the data source of slot {name!r} does not say what its examples mean"
        return Meaning(why=why, uses_loss=uses_loss)
    return Meaning(data=data, why="", uses_loss=uses_loss)


def _first_output(text: str) -> tuple[str, OutputKind]:
    if not text:
        return "", ""
    try:
        if len(text) > _MOST_CHARS:
            raise ValueError(f"{len(text)} characters")
        entry = json.loads(text)[0]
        name, kind = entry["name"], entry["kind"]
        if not isinstance(name, str) or kind not in get_args(OutputKind):
            raise ValueError(f"kind {kind!r:.40}")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DescriptionRefused(
            f"what the model says of its outputs is nothing that bbnode wrote ({error}); export "
            "the model again"
        ) from error
    return name, kind
