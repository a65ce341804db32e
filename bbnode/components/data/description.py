"""The meaning of a data source's examples, as a model that was trained on them keeps it.

Rule: a description holds what is needed to read further examples in the same way, and no example.
It names no file: settings that name something of a machine are not among those of `SETTINGS`. One
that comes with a model is as good as whoever made the model; what it says is checked before it is
used, and a setting of another name is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from bbnode.components.data.schema import TensorSchema
from bbnode.ir.caps import MAX_DESCRIPTION_BYTES
from bbnode.ir.decoding import shown
from bbnode.ir.errors import DeploymentError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Kind = Literal["arrays", "images", "table", "text"]

_SCALING: Final = ("standardize", "mean", "std")
# Settings of the sources of each kind that say how an example is read.
SETTINGS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "arrays": ("features", "inputs", "dtype", "missing", *_SCALING),
    "images": ("size", "channels", "dtype", "max_pixels", "background", "skip", *_SCALING),
    "table": (
        *("features", "categories", "one_hot", "missing", "missing_words", "dtype"),
        *("delimiter", "encoding", "header", "comment", "skip_lines", "skip_rows"),
        *("decimal", "thousands", "parentheses", "units", "numbers", "dates", *_SCALING),
    ),
    "text": (
        *("task", "format", "text", "label", "classes", "length", "max_line_bytes"),
        *("tokenizer", "alphabet", "pad_id"),
    ),
}  # fmt: skip


class DescriptionRefused(DeploymentError):
    """A description of examples is none, or too long to be written into a model."""


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """The meaning of the positions of an example, without any example.

    Attributes:
        kind: of what the examples are read from.
        features: shape and type of one example, as the model gets it.
        inputs: name and values of each tensor, where an example has several.
        columns: names of the positions of an example, where it is a vector of columns.
        label: name of the column of labels, "" where there is none.
        classes: names of the labels 0, 1, …, where they have names.
        settings: those of the data source that say how an example is read; scaling is "given".
        fills: of the columns of a table, the number that stands for a missing value.
        vocabulary: the number of token ids, of text; else 0.
        tokenizer_sha256: of the file of a tokenizer, in hex, where it is one.
    """

    kind: Kind
    features: TensorSchema
    inputs: tuple[tuple[str, TensorSchema], ...] = ()
    columns: tuple[str, ...] = ()
    label: str = ""
    classes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    fills: Mapping[str, float] = field(default_factory=dict)
    vocabulary: int = 0
    tokenizer_sha256: str = ""

    def __post_init__(self) -> None:
        strange = sorted(self.settings.keys() - set(SETTINGS[self.kind]))
        if strange:
            raise ValueError(f"setting {shown(strange[0])} is none that reads {self.kind}")

    def to_json(self) -> str:
        """Return the description as JSON. Raises DescriptionRefused for one that is too long."""
        whole = asdict(self)
        text = json.dumps(
            {name: value for name, value in whole.items() if value not in ("", 0, (), {})},
            sort_keys=True, separators=(",", ":"),
        )  # fmt: skip
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise DescriptionRefused(
                f"what the data source says of its examples takes {len(text)} bytes, and a model "
                f"holds {MAX_DESCRIPTION_BYTES}; use fewer columns, categories or statistics"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> DataDescription:
        """Return the description in a model's metadata. Raises DescriptionRefused."""
        from pydantic import ValidationError  # takes 0.1 s, and most nodes describe nothing

        if len(text) > MAX_DESCRIPTION_BYTES:
            raise DescriptionRefused(
                f"what the model says of its examples takes {len(text)} bytes, and "
                f"{MAX_DESCRIPTION_BYTES} is the most"
            )
        try:
            return _adapter().validate_json(text)
        except (ValidationError, RecursionError) as error:
            raise DescriptionRefused(
                "what the model says of its examples is no description that bbnode wrote "
                f"({description_fault(error)}); export the model again"
            ) from error


def settings_of(kind: Kind, config: Any, left_out: Iterable[str] = _SCALING) -> dict[str, Any]:
    """Return the settings of a source of this kind that say how an example is read."""
    out = set(left_out)
    return {name: getattr(config, name) for name in SETTINGS[kind] if name not in out}


@cache
def _adapter() -> TypeAdapter[DataDescription]:
    from pydantic import TypeAdapter

    return TypeAdapter(DataDescription)


def description_fault(error: ValidationError | RecursionError) -> str:
    """Return what is wrong with a description, as pydantic has it, on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return shown(f"{where}: {first['msg']}" if where else first["msg"])
