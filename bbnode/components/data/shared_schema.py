"""The meaning of the positions of a data source's examples, as peers compare it.

Rule: a shared schema says what a number at each place of an example stands for, and holds nothing
that is one peer's own: no count, no range of its values, no fill, no name of a file. What a source
does not say is None: it is compared by shape and type alone, and whoever says it first fixes it.
Names map names: columns, classes and categories in another order are brought into the reference's,
and those that a peer has not seen keep their places; every other difference is refused, in one line
with both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from bbnode.components.data.description import DataDescription, Kind, description_fault
from bbnode.components.data.schema import TensorSchema
from bbnode.ir.caps import MAX_SCHEMA_BYTES
from bbnode.ir.decoding import clip, shown
from bbnode.ir.errors import DeploymentError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ColumnKind = Literal["number", "category", "one_hot", "list"]
LabelKind = Literal["class", "number", "sequence", "none"]
ScaledBy = Literal["none", "given", "federated"]
Reading = Mapping[str, str | int | float | bool | None]

_LISTED: Final = 8  # names that are written out; of longer lists, where they differ
_DIFFERING: Final = 4  # names of a longer list, from where it differs
_MOST_LEVELS: Final = 16  # of a schema as plain values: columns, and their categories
# Numbers of one scaling that are listed; of more, their digest says that they are the same.
_LISTED_NUMBERS: Final = 4096
# Relative difference of statistics that are the same: they may have gone through a text.
_SAME: Final = 1e-9
_PLAIN_CHARS: Final = 40
_COLUMN_WORDS: Final[Mapping[ColumnKind, str]] = {
    "number": "numbers",
    "category": "categories",
    "one_hot": "categories, one-hot",
    "list": "lists of numbers",
}
_LABEL_WORDS: Final[Mapping[LabelKind, str]] = {
    "class": "classes",
    "number": "numbers",
    "sequence": "one for each place of an example",
    "none": "none",
}


class SchemaRefused(DeploymentError):
    """A shared schema is malformed, or too long to be compared."""


@dataclass(frozen=True, kw_only=True)
class ColumnMeaning:
    """The meaning of one column of features.

    Attributes:
        name: as the table has it.
        kind: "number"; "category": the number of one of `categories`; "one_hot": a place for each
            of them; "list": `width` numbers.
        unit: such as "kg", "" where nobody says it.
        categories: names of the values 0, 1, …
        width: places of an example that it takes.
    """

    name: str
    kind: ColumnKind = "number"
    unit: str = ""
    categories: tuple[str, ...] = ()
    width: int = 1

    @property
    def places(self) -> tuple[str, ...]:
        """The names of its places: "column=value" of one-hot categories."""
        if self.kind == "one_hot":
            return tuple(f"{self.name}={value}" for value in self.categories)
        return (self.name,)

    def __str__(self) -> str:
        text = _COLUMN_WORDS[self.kind]
        if self.kind == "list":
            return f"{text} of {self.width}"
        return f"{text} {_listed(self.categories)}" if self.categories else text


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling of features: (value - mean) / std, by place of an example.

    Attributes:
        by: "given", by settings; "federated", by the statistics of all peers; "none".
        mean, std: one number for each feature, or one for all; empty where they are not there yet,
            and where there are too many to list.
        sha256: of these that are too many, in hex.
    """

    by: ScaledBy
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    sha256: str = ""

    @classmethod
    def of(
        cls,
        by: ScaledBy,
        mean: Sequence[float],
        std: Sequence[float],
        places: Sequence[str] = (),
    ) -> Scaling:
        """Return a scaling by these numbers, which are listed if they are few enough.

        Of more the digest is the same in any order, where `places` names each.
        """
        if max(len(mean), len(std)) <= _LISTED_NUMBERS:
            return cls(by=by, mean=tuple(map(float, mean)), std=tuple(map(float, std)))
        if len(places) == max(len(mean), len(std)):
            of_all = [each if len(each) > 1 else [each[0]] * len(places) for each in (mean, std)]
            order = sorted(range(len(places)), key=places.__getitem__)
            mean, std = ([each[at] for at in order] for each in of_all)
        text = json.dumps([[float(each) for each in mean], [float(each) for each in std]])
        return cls(by=by, sha256=hashlib.sha256(text.encode()).hexdigest())

    @property
    def is_known(self) -> bool:
        """Return True where the numbers are there."""
        return bool(self.mean or self.sha256)


@dataclass(frozen=True, kw_only=True)
class SharedSchema:
    """The meaning of the examples of a data source, or of all sources of a federation.

    Attributes:
        features: of one example, as the model gets it.
        labels: of one example; None of a reference that does not say.
        inputs: name and values of each tensor, where an example has several.
        columns: those of the features, in their order; None where they have no names.
        label: name of the column of labels; None where it has none.
        label_kind: "class" for integers, "number" for floats, "sequence" for several integers.
        classes: names of the labels 0, 1, …; () where labels are numbers without names; None where
            the source does not say.
        scaling: None where the source does not say.
        reading: the settings by which images or text become numbers; None for others.
        kind: of what the examples were read from, "" of Python; it is not compared.
    """

    features: TensorSchema | None = None
    labels: TensorSchema | None = None
    inputs: tuple[tuple[str, TensorSchema], ...] = ()
    columns: tuple[ColumnMeaning, ...] | None = None
    label: str | None = None
    label_kind: LabelKind = "none"
    classes: tuple[str, ...] | None = None
    scaling: Scaling | None = None
    reading: Reading | None = None
    kind: Kind | Literal[""] = ""

    def __post_init__(self) -> None:
        columns = self.columns or ()
        for what, names in (
            ("column", [each.name for each in columns]),
            ("class", self.classes or ()),
            ("input", [name for name, _ in self.inputs]),
            *((f"category of {_word(each.name)}", each.categories) for each in columns),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"a {what} is named twice")
        for each in columns:
            wanted = {"one_hot": len(each.categories), "list": each.width}.get(each.kind, 1)
            if each.width != wanted or each.width < 1:
                raise ValueError(f"the width of column {_word(each.name)} is not its own")
            if bool(each.categories) != (each.kind in ("category", "one_hot")):
                raise ValueError(f"column {_word(each.name)} has categories, or lacks them")
        scaling = self.scaling
        if scaling is not None and not all(map(math.isfinite, (*scaling.mean, *scaling.std))):
            raise ValueError("a scaling is NaN or infinity")

    @property
    def is_named(self) -> bool:
        """Return True where the source says what its numbers mean."""
        named = (self.columns, self.reading, self.classes or None, self.inputs or None)
        return any(each is not None for each in named)

    @property
    def places(self) -> tuple[str, ...]:
        """The names of the columns; "column=value" of those that are one-hot."""
        return tuple(name for each in self.columns or () for name in each.places)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex; equal for sources that mean the same."""
        return hashlib.sha256(replace(self, kind="").to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical form. Raises SchemaRefused for one that is too long."""
        text = json.dumps(
            _without_defaults(asdict(self)), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        if len(text) > MAX_SCHEMA_BYTES:
            raise SchemaRefused(
                f"the schema of the data takes {len(text)} bytes, and {MAX_SCHEMA_BYTES} is the "
                "most that peers compare; use fewer columns, categories and classes, shorter names"
            )
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> SharedSchema:
        """Return the schema of its canonical form, of any origin. Raises SchemaRefused."""
        from pydantic import ValidationError  # takes 0.1 s

        if len(text) > MAX_SCHEMA_BYTES:
            raise SchemaRefused(
                f"a schema of data takes {len(text)} bytes, and {MAX_SCHEMA_BYTES} is the most"
            )
        try:
            return _adapter().validate_json(text)
        except (ValidationError, RecursionError) as error:
            raise SchemaRefused(f"no schema of data ({description_fault(error)})") from error

    @classmethod
    def declared(cls, given: Mapping[str, Any]) -> SharedSchema:
        """Return the schema that an author writes, of plain values. Raises SchemaRefused.

        Columns are names or tables of the fields of `ColumnMeaning`; the width of one-hot
        categories follows from these.
        """
        if not isinstance(given, Mapping):
            raise SchemaRefused("a schema is a table of what it says")
        try:
            listed = given.get("columns")
            columns = None if listed is None else [_declared_column(each) for each in listed]
            text = json.dumps({**given, **({} if columns is None else {"columns": columns})})
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SchemaRefused(f"no schema of data ({clip(str(error))})") from error
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise SchemaRefused(f"a schema has no {_word(str(unknown[0]))}; it has {known}")
        return cls.from_json(text)

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> tuple[str, ...]:
        """Return the schema in words, one aspect a line."""
        made = []
        if self.inputs:
            made.append("inputs " + _listed([f"{name} {values}" for name, values in self.inputs]))
        elif self.features is not None:
            made.append(f"features {self.features}")
        for each in self.columns or ():
            unit = f" in {_word(each.unit)}" if each.unit else ""
            made.append(f"column {_word(each.name)}: {each}{unit}")
        if self.labels is not None:
            name = "" if self.label is None else f" {_word(self.label)}"
            made.append(f"label{name}: {_LABEL_WORDS[self.label_kind]}, {self.labels}")
        elif self.label is not None:
            made.append(f"label {_word(self.label)}")
        if self.classes:
            made.append(f"classes {_listed(self.classes)}")
        if self.scaling is not None and self.scaling.by != "none":
            made.append(f"scaled by {_scaled(self.scaling)}")
        made += [f"{name} {_value(value)}" for name, value in (self.reading or {}).items()]
        if not self.is_named:
            made.append("unnamed: compared by shape and type alone")
        return tuple(made)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The result of comparing a data source with the federation's reference.

    Attributes:
        refused: a line for each difference that no mapping mends; empty where they agree.
        mapped: a line for each that is mended: another order, classes that are not there.
    """

    refused: tuple[str, ...] = ()
    mapped: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """All that is refused, on one line."""
        return "; also ".join(self.refused)


def compare(reference: SharedSchema, own: SharedSchema) -> Agreement:
    """Compare what a data source means with the reference of the federation."""
    found = _Comparison()
    if not reference.inputs and not own.inputs:
        found.columns(reference, own)
        found.features(reference, own)
    else:
        found.inputs(reference, own)
    found.labels(reference, own)
    found.scaling(reference, own)
    for name, value in (own.reading or {}).items():
        other = (reference.reading or {}).get(name, value)
        if other != value or type(other) is not type(value):
            found.refuse(f"{name} {_value(value)}", _value(other))
    return Agreement(refused=tuple(found.refused), mapped=tuple(found.mapped))


def joined(reference: SharedSchema, own: SharedSchema, *, grows: bool = False) -> SharedSchema:
    """Return the reference with what it does not say yet and an agreeing source does.

    With `grows`, classes and categories that it has not are put behind its own, whose numbers stay.
    """
    columns = reference.columns
    if columns is None:
        columns = own.columns
    elif own.columns is not None:
        theirs = {each.name: each for each in own.columns}
        columns = tuple(_joined_column(each, theirs.get(each.name), grows) for each in columns)
    classes = reference.classes
    if classes is None:
        classes = own.classes
    elif grows and classes and own.classes:
        classes = (*classes, *(name for name in own.classes if name not in classes))
    scaling = reference.scaling
    brought = _scaling_in(columns, own)
    if scaling is None:
        scaling = brought
    elif (
        brought is not None
        and (brought.by, brought.is_known) == (scaling.by, True)
        and not scaling.is_known
    ):
        scaling = brought  # the statistics are there now
    features = reference.features if reference.features is not None else own.features
    if columns is not None and features is not None and len(features.shape) == 1:
        width = sum(each.width for each in columns)
        features = TensorSchema((width,), features.dtype) if width else features
    says_labels = reference.labels is not None
    return replace(
        reference,
        features=features,
        labels=reference.labels if says_labels else own.labels,
        label_kind=reference.label_kind if says_labels else own.label_kind,
        inputs=reference.inputs or own.inputs,
        columns=columns,
        label=own.label if reference.label is None else reference.label,
        classes=classes,
        scaling=scaling,
        reading={**(own.reading or {}), **(reference.reading or {})}
        if own.reading is not None or reference.reading is not None
        else None,
        kind=reference.kind or own.kind,
    )


def described(reference: SharedSchema) -> DataDescription | None:
    """Return the reference as a model carries it; None where it says too little to read by it."""
    kind, features = reference.kind, reference.features
    if not kind or features is None:
        return None
    scaling = reference.scaling
    scaled: dict[str, Any] = {}
    if scaling is not None and scaling.by != "none":
        if not scaling.mean:
            return None
        scaled = {"standardize": "given", "mean": scaling.mean, "std": scaling.std}
    settings: dict[str, Any] = {"dtype": features.dtype, **scaled}
    columns = reference.columns or ()
    reading = dict(reference.reading or {})
    extra: dict[str, Any] = {}
    if kind == "table":
        settings |= {
            "features": tuple(each.name for each in columns),
            "categories": {each.name: each.categories for each in columns if each.categories},
            "one_hot": tuple(each.name for each in columns if each.kind == "one_hot"),
        }
    elif kind == "arrays":
        if reference.inputs:
            settings["inputs"] = tuple(name for name, _ in reference.inputs)
        elif columns:
            settings["features"] = tuple(each.name for each in columns)
    elif kind == "images":
        height, width = features.shape[1:]
        settings |= {"size": (height, width), "channels": features.shape[0]}
        settings["dtype"] = reading.get("pixels", features.dtype)
    else:
        extra = {
            "vocabulary": reading.pop("vocabulary", 0),
            "tokenizer_sha256": reading.pop("tokenizer sha256", "") or "",
        }
        settings = {
            "task": reading.get("task"),
            "tokenizer": reading.get("tokenizer"),
            "alphabet": reading.get("alphabet", ""),
            "pad_id": reading.get("padding") if extra["tokenizer_sha256"] else None,
            "length": features.shape[0],
            "classes": reference.classes or (),
        }
    return DataDescription(
        kind=kind,
        features=features,
        inputs=reference.inputs,
        columns=reference.places,
        label=reference.label or "",
        classes=reference.classes or (),
        settings=settings,
        **extra,
    )


def described_as(made: DataDescription, meaning: SharedSchema) -> DataDescription:
    """Return a description of examples that were mapped to what is in force now."""
    settings = dict(made.settings)
    columns = meaning.columns
    names = tuple(each.name for each in columns or ())
    given = settings.get("features", ())
    if (
        given and not isinstance(given, str) and {*given} == {*names}
    ):  # bare arrays have names of their own
        settings["features"] = names
    if columns is not None and "categories" in settings:
        settings["categories"] = {each.name: each.categories for each in columns if each.categories}
    if meaning.inputs and settings.get("inputs"):
        settings["inputs"] = tuple(name for name, _ in meaning.inputs)
    if "classes" in settings and meaning.classes:
        settings["classes"] = meaning.classes
    return replace(made, settings=settings)


class _Comparison:
    """Lines of differences, as they are found."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.mapped: list[str] = []

    def refuse(self, own: str, reference: str) -> None:
        self.refused.append(f"{own}; the federation has {reference}")

    def columns(self, reference: SharedSchema, own: SharedSchema) -> None:
        if reference.columns is None or own.columns is None:
            return
        names, theirs = ([each.name for each in one.columns or ()] for one in (own, reference))
        if set(names) != set(theirs):
            self.refuse(*_both("columns", names, theirs))
            return
        if names != theirs:
            self.mapped.append(f"columns are brought into the order {_listed(theirs)}")
        by_name = {each.name: each for each in own.columns}
        for other in reference.columns:
            self._column(other, by_name[other.name])

    def _column(self, other: ColumnMeaning, mine: ColumnMeaning) -> None:
        name = _word(mine.name)
        if mine.unit and other.unit and mine.unit != other.unit:
            self.refuse(f"column {name} in {_word(mine.unit)}", _word(other.unit))
        if mine.kind != other.kind or (mine.kind == "list" and mine.width != other.width):
            self.refuse(f"column {name} of {mine}", str(other))
        elif not set(mine.categories) <= set(other.categories):
            self.refuse(*_both(f"categories of column {name}", mine.categories, other.categories))
        elif mine.categories != other.categories:
            self.mapped.append(
                f"categories of column {name} are numbered as {_listed(other.categories)}"
            )

    def features(self, reference: SharedSchema, own: SharedSchema) -> None:
        mine, other = own.features, reference.features
        if mine is None or other is None:
            return
        if reference.columns is not None and own.columns is not None:
            # Their widths follow from the columns, which were compared.
            if mine.dtype != other.dtype or len(mine.shape) != len(other.shape):
                self.refuse(f"features {mine}", str(other))
            return
        if mine != other:
            self.refuse(f"features {mine}", str(other))

    def inputs(self, reference: SharedSchema, own: SharedSchema) -> None:
        if not own.inputs or not reference.inputs:
            if own.features is None or reference.features is None:
                return
            self.refuse(_inputs_text(own), _inputs_text(reference))
            return
        mine, other = dict(own.inputs), dict(reference.inputs)
        if mine.keys() != other.keys():
            self.refuse(*_both("inputs", list(mine), list(other)))
            return
        for name, values in other.items():
            if mine[name] != values:
                self.refuse(f"input {_word(name)} {mine[name]}", str(values))
        if list(mine) != list(other):
            self.mapped.append(f"inputs are brought into the order {_listed(list(other))}")

    def labels(self, reference: SharedSchema, own: SharedSchema) -> None:
        if own.label is not None and reference.label not in (None, own.label):
            self.refuse(f"label {_word(own.label)}", _word(reference.label or ""))
        mine, other = own.labels, reference.labels
        if mine is not None and other is not None and mine != other:
            becomes_number = (
                *(own.label_kind == "class", reference.label_kind == "number"),
                *(not own.classes, mine.shape == other.shape),
            )
            if all(becomes_number):
                self.mapped.append(f"labels become {other.dtype}")
            else:
                words, others = _LABEL_WORDS[own.label_kind], _LABEL_WORDS[reference.label_kind]
                self.refuse(f"labels are {words}, {mine}", f"{others}, {other}")
                return
        if own.classes is None or reference.classes is None or reference.label_kind == "number":
            return
        if not own.classes and not reference.classes:
            return
        if not set(own.classes) <= set(reference.classes) or not own.classes:
            self.refuse(*_both("classes", own.classes, reference.classes))
        elif own.classes != reference.classes:
            self.mapped.append(f"classes are numbered as {_listed(reference.classes)}")

    def scaling(self, reference: SharedSchema, own: SharedSchema) -> None:
        mine, other = own.scaling, reference.scaling
        if mine is None or other is None:
            return
        if (mine.by, other.by) == ("federated", "given") and other.mean:
            # Such a source takes whatever the federation has.
            self.mapped.append(f"features are scaled by {_scaled(other)}")
            return
        if mine.by != other.by:
            self.refuse(f"features scaled by {_scaled(mine)}", _scaled(other))
            return
        if not mine.is_known or not other.is_known:
            return
        if mine.sha256 or other.sha256:
            if mine.sha256 != other.sha256:
                self.refuse("features scaled by other numbers", _scaled(other))
            return
        for what, ours, theirs in (("mean", mine.mean, other.mean), ("std", mine.std, other.std)):
            pairs = _by_place(reference, own, ours, theirs)
            if pairs is None:
                self.refuse(f"{what} of {len(ours)} columns", f"{len(theirs)}")
                return
            for name, a, b in pairs:
                if not math.isclose(a, b, rel_tol=_SAME, abs_tol=_SAME):
                    self.refuse(f"{what} of {_word(name)} {a:.6g}", f"{b:.6g}")
                    return


def _by_place(
    reference: SharedSchema, own: SharedSchema, ours: Sequence[float], theirs: Sequence[float]
) -> list[tuple[str, float, float]] | None:
    """Return names of places with both numbers of a scaling; None where these can't be matched."""
    if len(ours) == len(theirs) == 1:
        return [("all columns", ours[0], theirs[0])]
    mine, other = own.places, reference.places
    if mine and other:
        ours = tuple(ours) * len(mine) if len(ours) == 1 else ours
        theirs = tuple(theirs) * len(other) if len(theirs) == 1 else theirs
        if len(ours) == len(mine) and len(theirs) == len(other):
            known = dict(zip(mine, ours, strict=True))
            return [
                (name, known[name], value)
                for name, value in zip(other, theirs, strict=True)
                if name in known
            ]
    if len(ours) == 1 or len(theirs) == 1:
        count = max(len(ours), len(theirs))
        ours, theirs = (tuple(e) * count if len(e) == 1 else e for e in (ours, theirs))
    if len(ours) != len(theirs):
        return None
    names = [f"feature {at}" for at in range(len(ours))]
    return list(zip(names, ours, theirs, strict=True))


def _scaling_in(columns: tuple[ColumnMeaning, ...] | None, own: SharedSchema) -> Scaling | None:
    """Return a source's scaling in the order of other columns.

    Its numbers are left out where they are not one for each of these.
    """
    scaling = own.scaling
    if scaling is None or own.columns in (None, columns) or not scaling.is_known:
        return scaling
    place_of = {name: place for place, name in enumerate(own.places)}
    wanted = [name for each in columns or () for name in each.places]
    if place_of.keys() != set(wanted):
        return Scaling(by=scaling.by)
    if not scaling.mean:
        return scaling  # a digest, which has no order
    at = [place_of[name] for name in wanted]
    mean, std = (
        each if len(each) == 1 else tuple(each[place] for place in at)
        for each in (scaling.mean, scaling.std)
    )
    return replace(scaling, mean=mean, std=std)


def _joined_column(column: ColumnMeaning, own: ColumnMeaning | None, grows: bool) -> ColumnMeaning:
    if own is None:
        return column
    unit = column.unit or own.unit
    if not grows or not column.categories or own.kind != column.kind:
        return replace(column, unit=unit)
    new = (name for name in own.categories if name not in column.categories)
    categories = (*column.categories, *new)
    width = len(categories) if column.kind == "one_hot" else column.width
    return replace(column, unit=unit, categories=categories, width=width)


def _declared_column(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {"name": given}
    made = dict(given)
    unknown = sorted(made.keys() - ColumnMeaning.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(f"a column has no {_word(str(unknown[0]))}")
    if made.get("categories"):
        made.setdefault("kind", "category")
        if made["kind"] == "one_hot":
            made["width"] = len(made["categories"])
    return made


def _both(what: str, own: Sequence[str], reference: Sequence[str]) -> tuple[str, str]:
    """Return two lists of names in words: whole, or only where they differ."""
    if max(len(own), len(reference)) <= _LISTED:
        return (
            f"{what} {_listed(own) or 'without names'}",
            _listed(reference) or f"{what} without names",
        )
    known, mine = set(reference), set(own)
    extra = [name for name in own if name not in known]
    lacking = [name for name in reference if name not in mine]
    words = []
    if extra:
        words.append(f"with {_some(extra)}")
    if lacking:
        words.append(f"without {_some(lacking)}")
    noun = what.partition(" ")[0]
    return f"{len(own)} {what} {' and '.join(words)}", f"{len(reference)} {noun}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _DIFFERING
    listed = ", ".join(map(_word, names[:_DIFFERING]))
    return f"{listed} and {more} more" if more > 0 else listed


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(_word, names)) if len(names) <= _LISTED else _some(names)


def _word(name: str) -> str:
    """Return a name as it is where it can't be misread, else in quotes and cut."""
    plain = name and name.isprintable() and len(name) <= _PLAIN_CHARS
    return name if plain and not set(name) & set(",;'\"") and name.strip() == name else shown(name)


def _value(value: object) -> str:
    return _word(value) if isinstance(value, str) and value else shown(value)


def _scaled(scaling: Scaling) -> str:
    if scaling.by == "none":
        return "nothing"
    if scaling.by == "federated":
        return "the statistics of all peers"
    if not scaling.mean:
        return "given numbers"
    listed = ", ".join(f"{each:.6g}" for each in scaling.mean[:_DIFFERING])
    return f"given numbers (mean {listed}{', …' if len(scaling.mean) > _DIFFERING else ''})"


def _inputs_text(schema: SharedSchema) -> str:
    if schema.inputs:
        return f"inputs {_listed([name for name, _ in schema.inputs])}"
    return f"features {schema.features}"


def _without_defaults(value: Any, depth: int = _MOST_LEVELS) -> Any:
    """Return a tree without what says nothing, so that later fields change no digest."""
    if not depth:
        raise SchemaRefused(f"a schema has at most {_MOST_LEVELS} levels")
    if isinstance(value, dict):
        cleaned = {
            name: each if name == "reading" else _without_defaults(each, depth - 1)
            for name, each in value.items()
        }
        return {
            name: each
            for name, each in cleaned.items()
            if each is not None and each != "" and (name, each) not in _DEFAULTS
        }
    if isinstance(value, list | tuple):
        return [_without_defaults(each, depth - 1) for each in value]
    return value


# Of `ColumnMeaning`, `SharedSchema` and `Scaling`; () says something of classes and columns.
_DEFAULTS: Final[Iterable[tuple[str, Any]]] = (
    *(("kind", "number"), ("width", 1), ("categories", []), ("inputs", [])),
    *(("label_kind", "none"), ("mean", []), ("std", [])),
)


@cache
def _adapter() -> TypeAdapter[SharedSchema]:
    from pydantic import TypeAdapter

    return TypeAdapter(SharedSchema)
