"""Bases of data sources: batches by row, splits and shares.

Rule: which example comes when is a pure function of (settings, epoch), by random bits that numpy
promises never to change; so the same config gives the same batches on every machine. No epoch
copies the data: a batch is gathered when it is asked for.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, overload

import msgpack
import numpy as np
import numpy.typing as npt

from bbnode.components.contracts import ComponentError, DataSource, OpContext, offload
from bbnode.components.data import partition
from bbnode.components.data.adoption import in_force, mapped_features, mapped_labels
from bbnode.components.data.description import DataDescription, Kind
from bbnode.components.data.partition import Partition, Rows, Split, permutation
from bbnode.components.data.schema import DataSchema, TensorSchema
from bbnode.components.data.shared_schema import (
    ColumnMeaning,
    LabelKind,
    SharedSchema,
    compare,
    described_as,
)
from bbnode.components.errors import DataDiffers, DataDoesNotFit, DataUnavailable
from bbnode.ir import types
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Composite, Value

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = tuple[Value, Value]
LabelType = Literal["auto", "float32", "int64"]

_MAX_COUNT = (1 << 63) - 1  # epochs and cursors are int64
_ROWS_AT_ONCE = 1 << 16  # of labels that are looked through

# What features may be; the first is what they are unless a program says otherwise.
FEATURE_TYPES: tuple[TypeNode, ...] = (
    types.TENSOR_FLOAT,
    types.TENSOR_INT64,
    *(node for node in types.TENSOR_BY_ELEM.values()
      if node not in (types.TENSOR_FLOAT, types.TENSOR_INT64, types.TENSOR_STRING)),
)  # fmt: skip


class ByRow(Protocol):
    """Values of all examples, gathered by row: a numpy array, a mapped one, or a file's reader.

    `values[rows]` has the values of these rows as an array that is no one else's. Tokens and
    integer labels that are costly to look through have a `value_range`: least and greatest.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, ...]."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values that `[rows]` returns."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


class MemoryDataSource(DataSource):
    """Batches over two arrays that a subclass loads; configs have `seed` and `batch_size`.

    `describes` says what a model's user gives to such a source, "" for the user's own code.
    `batch_size` is that of NextBatch: 0 gives the whole source as one batch, in its own
    order, and the same again each time. Otherwise NextBatch goes through the shuffled epochs.
    """

    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": FEATURE_TYPES,
        "NextBatch.labels": (types.TENSOR_INT64, types.TENSOR_FLOAT),
    }
    describes: ClassVar[Kind | Literal[""]] = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.require(
            config.batch_size >= 0 and config.seed >= 0,
            f"batch_size and seed must not be negative (batch_size {config.batch_size}, seed "
            f"{config.seed})",
        )
        self._loaded: _Examples | None = None
        self._schema: DataSchema | None = None
        # The meaning of the examples: as loaded, as the federation has it, and what is in force.
        self._own: SharedSchema | None = None
        self._reference: SharedSchema | None = None
        self._meaning: SharedSchema | None = None
        self._as_loaded: tuple[ByRow, ByRow, Rows | None] | None = None
        self._shuffled: tuple[int, Rows] | None = None  # the last order, and its epoch
        self._epoch = 0
        self._cursor = 0  # examples of the epoch that NextBatch has given out
        # A model that trains in a worker thread and a NextBatch may meet here.
        self._lock = threading.RLock()

    @abstractmethod
    def load(self) -> tuple[ByRow, ByRow]:
        """Return features [N, ...] and labels [N, ...]; DataUnavailable when that fails.

        Numpy arrays (mapped ones too), or objects that gather rows when asked for (`ByRow`).
        """

    def served(self, features: ByRow) -> ByRow:
        """Return the features as batches have them, of those that were loaded."""
        return features

    def chosen(self, labels: ByRow) -> Rows | None:
        """Return the rows that this source consists of, ascending; None is all."""
        return None

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the columns that the features are made of, of a loaded source."""
        return ()

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the labels' column, and those of the classes, of a loaded source."""
        return "", ()

    def columns(self) -> tuple[ColumnMeaning, ...] | None:
        """Return what the columns of features mean, of a loaded source; None without names."""
        return None

    def label_meaning(self) -> tuple[str | None, tuple[str, ...] | None]:
        """Return the label's name and the classes' names as peers compare them; None: unsaid."""
        return None, None

    def meaning(self, features: ByRow, labels: ByRow) -> SharedSchema:
        """Return what the examples that were just loaded mean, before any adoption."""
        label, classes = self.label_meaning()
        kind = _label_kind(labels)
        return SharedSchema(
            features=_schema_of(features),
            labels=_schema_of(labels),
            inputs=_inputs_of(features),
            columns=self.columns(),
            label=label,
            label_kind=kind,
            classes=classes if kind == "class" else None,
            kind=self.describes,
        )

    def own_schema(self) -> SharedSchema:
        """Return what the examples mean as they lie here, of the source, which is loaded for it.

        Raises DataUnavailable, also where the data differ from what was adopted.
        """
        with self._lock:
            if self._own is None:
                with contextlib.suppress(DataDiffers):  # which is known after it was loaded
                    self._data()
            assert self._own is not None
            return self._own

    def adopt(self, reference: SharedSchema) -> None:
        """Take the federation's order, classes and categories; the next use loads by them.

        That raises DataDiffers where the data can't be mapped to the reference.
        """
        with self._lock:
            if reference == self._reference:
                return
            self._reference = reference
            loaded, own = self._as_loaded, self._own
            if loaded is None or own is None or compare(reference, own).refused:
                self.forget()
                return
            self._schema = self._shuffled = None
            try:
                self._loaded = self._mapped(*loaded, own)  # no file is read again for it
            except DataUnavailable:
                self.forget()

    def known_schema(self) -> SharedSchema | None:
        """Return what `own_schema` would, if that is known without loading; else None."""
        return self._own

    @property
    def num_samples(self) -> int:
        """The number of examples in this source, which is loaded for it."""
        return len(self._data())

    def schema(self) -> DataSchema:
        """Return what the source, which is loaded for it, gives out."""
        with self._lock:
            if self._schema is None:
                data = self._data()
                label_name, classes = self.label_names()
                names = self.column_names()
                if self._reference is not None and self._meaning is not None:
                    names = self._meaning.places or names
                    label_name = label_name or self._meaning.label or ""
                    classes = self._meaning.classes or classes
                self._schema = DataSchema(
                    features=_schema_of(data.features),
                    inputs=_inputs_of(data.features),
                    labels=_schema_of(data.labels),
                    num_samples=len(data),
                    label_range=data.label_range(),
                    value_range=data.value_range(),
                    feature_range=getattr(data.features, "value_range", None),
                    names=names,
                    label_name=label_name,
                    classes=classes,
                )
            return self._schema

    def first(self, rows: int) -> Batch:
        """Return the first examples of the source, which is loaded for it."""
        with self._lock:
            data = self._data()
            return data.take(np.arange(min(rows, len(data))))

    def describe(self) -> DataDescription:
        """Return what the positions of an example mean, of the source, which is loaded for it."""
        schema = self.schema()
        return DataDescription(
            kind="arrays",
            features=schema.features,
            inputs=schema.inputs,
            columns=schema.names,
            label=schema.label_name,
            classes=schema.classes,
            settings={"dtype": schema.features.dtype},
        )

    def forget(self) -> None:
        """Drop the examples, so that the next use loads them again."""
        with self._lock:
            self._loaded = self._schema = self._shuffled = None
            self._own = self._meaning = self._as_loaded = None

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Load, when the host prepares its components; else the first use does."""
        self._data()

    @offload(reads_only=True)
    def on_data_loaded(self, ctx: OpContext) -> None:
        """Return once the examples can be read."""
        self._data()

    @offload
    def next_batch(self, ctx: OpContext) -> Batch:
        """Return the next (batch [B, ...], labels [B, ...]); the last may be short."""
        with self._lock:
            data = self._data()
            if self.config.batch_size == 0:
                return data.take(None)
            if self._cursor >= len(data):  # of a state that was saved with more examples
                self._epoch, self._cursor = self._epoch + 1, 0
            rows = self._order(self._epoch)[self._cursor : self._cursor + self.config.batch_size]
            batch = data.take(rows)
            self._cursor += len(rows)
            if self._cursor >= len(data):
                self._epoch, self._cursor = self._epoch + 1, 0
            return batch

    def reset(self, ctx: OpContext) -> None:
        """Go back to the first batch of the first epoch."""
        with self._lock:
            self._epoch = self._cursor = 0

    def epoch_batches(self, batch_size: int) -> Sequence[Batch]:
        """Return the batches of the next epoch, shuffled; one that NextBatch began is skipped.

        Each batch is gathered when it is asked for, and again when it is asked for again.
        """
        if batch_size < 1:
            raise ComponentError(f"{self.TYPE_NAME}: a batch of {batch_size}; ask for 1 or more")
        with self._lock:
            data = self._data()
            if self._cursor:
                self._epoch, self._cursor = self._epoch + 1, 0
            order = self._order(self._epoch)
            self._epoch += 1
        return _Epoch(data, order, batch_size)

    def serialize(self) -> bytes:
        """Return epoch and cursor; the data itself is loaded again."""
        return bytes(msgpack.packb({"epoch": self._epoch, "cursor": self._cursor}))

    def restore(self, data: bytes) -> None:
        """Continue at a saved position; ComponentError for bytes of anything else."""
        if not data:
            return
        with self.restoring():
            state = msgpack.unpackb(data)
            epoch, cursor = state["epoch"], state["cursor"]
            if any(type(n) is not int or not 0 <= n <= _MAX_COUNT for n in (epoch, cursor)):
                raise ValueError(f"position {epoch!r}, {cursor!r} is not a count")
        self._epoch, self._cursor = epoch, cursor

    def _seeds(self) -> tuple[int, ...]:
        """Seeds of the shuffling, to which the epoch is added."""
        return (self.config.seed,)

    def _order(self, epoch: int) -> Rows:
        """Return the order of an epoch; kept, since NextBatch asks once a batch."""
        if self._shuffled is None or self._shuffled[0] != epoch:
            self._shuffled = epoch, permutation(self.num_samples, *self._seeds(), epoch)
        return self._shuffled[1]

    def _data(self) -> _Examples:
        with self._lock:
            if self._loaded is None:
                features, labels = self.load()
                if len(features) == 0 or len(features) != len(labels):
                    raise DataUnavailable(
                        f"{self.TYPE_NAME}: {len(features)} example(s) and {len(labels)} label(s); "
                        "there has to be one label for each, and at least one example"
                    )
                for values in (features, labels):
                    if isinstance(values, np.ndarray):
                        values.flags.writeable = False
                wanted = getattr(self.config, "label_dtype", "auto")
                if wanted != "auto" and labels.dtype != np.dtype(wanted):
                    labels = _Converted(labels, np.dtype(wanted))
                    labels.check(self.TYPE_NAME)
                own = self._own = self._meant(features, labels)
                # By the labels as they lie here: no reference moves an example to another part.
                rows = self.chosen(labels)
                loaded = self._mapped(features, labels, rows, own)
                least = getattr(self.config, "min_examples", 1)
                if len(loaded) < least:  # the number stays here: peers read why an op fails
                    raise DataUnavailable(
                        f"{self.TYPE_NAME}: there are fewer examples than min_examples={least}, "
                        "which this peer's owner has set; take more examples, or lower it"
                    )
                self._loaded, self._as_loaded = loaded, (features, labels, rows)
            return self._loaded

    def _mapped(
        self, features: ByRow, labels: ByRow, rows: Rows | None, own: SharedSchema
    ) -> _Examples:
        """Return examples as the reference has them. Raises DataDiffers."""
        if self._reference is not None:
            agreed = compare(self._reference, own)
            if agreed.refused:
                raise DataDiffers(agreed.line)
            features = mapped_features(features, self._reference, own)
            labels = mapped_labels(labels, self._reference, own)
            self._meaning = in_force(self._reference, own)
        return _Examples(self.served(features), labels, rows)

    def _meant(self, features: ByRow, labels: ByRow) -> SharedSchema:
        try:
            return self.meaning(features, labels)
        except ValueError as error:  # of names that no schema may have
            raise DataUnavailable(f"{self.TYPE_NAME}: {error}; rename them") from error

    def as_adopted(self, made: DataDescription) -> DataDescription:
        """Return a description in the order and with the names of what was adopted, if anything."""
        return made if self._meaning is None else described_as(made, self._meaning)


@dataclass(frozen=True)
class _Examples:
    """The examples of a source: those of the given rows, or all."""

    features: ByRow
    labels: ByRow
    rows: Rows | None

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    def take(self, at: Rows | None) -> Batch:
        """Return features and labels of the examples with these numbers; None is all of them."""
        rows = self.rows if at is None else at if self.rows is None else self.rows[at]
        return taken(self.features, rows), taken(self.labels, rows)

    def label_range(self) -> tuple[int, int] | None:
        """Return least and greatest of integer labels, a part of them in memory at a time."""
        if self.labels.dtype.kind not in "iub" or 0 in self.labels.shape:
            return None
        known: tuple[int, int] | None = getattr(self.labels, "value_range", None)
        if known is not None:
            return known
        ends = [(int(part.min()), int(part.max())) for part in self._label_parts()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def value_range(self) -> tuple[float, float] | None:
        """Return least and greatest of labels that are floats, likewise."""
        if self.labels.dtype.kind != "f" or 0 in self.labels.shape:
            return None
        ends = [(float(part.min()), float(part.max())) for part in self._label_parts()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _label_parts(self) -> Iterator[Array]:
        """Yield the labels, a part of them in memory at a time."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            at = np.arange(start, min(start + _ROWS_AT_ONCE, len(self)))
            yield self.labels[at if self.rows is None else self.rows[at]]


class _Epoch(Sequence[Batch]):
    """The batches of one epoch, each gathered when it is asked for."""

    def __init__(self, data: _Examples, order: Rows, batch_size: int) -> None:
        self._data, self._order, self._size = data, order, batch_size

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    def __iter__(self) -> Iterator[Batch]:
        return (self[at] for at in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[each] for each in at]
        return self._data.take(self._order[at * self._size : (at + 1) * self._size])


class _Converted:
    """Values by row, in another type; each batch is converted when it is gathered."""

    def __init__(self, values: ByRow, dtype: np.dtype[Any]) -> None:
        self._values = values
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any, /) -> Any:
        return np.asarray(self._values[rows]).astype(self.dtype)

    def check(self, component: str) -> None:
        """Raise DataUnavailable for the first number that an integer type would cut."""
        if self.dtype.kind not in "iu" or self._values.dtype.kind != "f":
            return
        for start in range(0, len(self), _ROWS_AT_ONCE):
            part = self._values[np.arange(start, min(start + _ROWS_AT_ONCE, len(self)))]
            bad = np.argwhere(np.trunc(part) != part)  # NaN too
            if len(bad):
                raise DataUnavailable(
                    f"{component}: label_dtype = {self.dtype.name!r}, and the label of row "
                    f"{start + int(bad[0][0])} is {part[tuple(bad[0])]:g}, which is no whole "
                    "number; store the number of the class, or leave label_dtype out (counted "
                    "from 0)"
                )


def taken(values: ByRow, rows: Rows | None) -> Any:
    """Return the values of some rows, or of all, as a read-only array, or a Composite of these."""
    if rows is not None:
        array = values[rows]
    else:
        array = values if isinstance(values, np.ndarray) else values[np.arange(len(values))]
    if isinstance(array, Composite):
        return array
    plain = np.asarray(array).view()  # not a numpy.memmap
    plain.flags.writeable = False
    return plain


def _label_kind(labels: ByRow) -> LabelKind:
    if labels.dtype.kind == "f":
        return "number"
    return "class" if len(labels.shape) == 1 else "sequence"


def _inputs_of(features: ByRow) -> tuple[tuple[str, TensorSchema], ...]:
    parts = getattr(features, "parts", {})
    return tuple((name, _schema_of(part)) for name, part in parts.items())


def _schema_of(values: ByRow) -> TensorSchema:
    return TensorSchema(tuple(int(size) for size in values.shape[1:]), values.dtype.name)


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Settings of every source that can be split and shared out.

    Attributes:
        split: "all" examples, or the part for "train", "test" or "validation".
        test_fraction: part of the examples that is held out for the split "test", of each class
            alike where labels are classes; 0 to 1, with the validation fraction below 1.
        validation_fraction: the same for the split "validation".
        split_seed: of the split. Apart from `seed`, so that runs with different seeds are
            measured on the same held-out examples.
        shard: number of this peer's share of the split, from 0; for experiments that share one
            data set out.
        shards: number of shares into which the split is divided.
        partition: how it is shared out. "iid" deals shuffled examples; "shards" sorts them by
            label, cuts two pieces per peer, and deals those, so that a peer sees few classes;
            "dirichlet" gives each peer a drawn mix of classes, "quantity" a drawn number of
            examples.
        alpha: of "dirichlet" and "quantity": small values make peers differ more.
        batch_size: examples of a NextBatch; 0 is all at once.
        min_examples: a peer with fewer gives none of them out, to training or statistics: what is
            told of very few examples tells of each of them.
        seed: of deal and shuffling; the same on all peers that share a data set.
        label_dtype: of labels that are numbers. "auto": as the source has them, integers as
            classes (int64); "float32" for the targets of a regression that are whole numbers;
            "int64" for classes that are stored as floats, none of which may have a fraction.
        metrics: that a program computes of these examples alone; examples that have no such
            metric (`auc` of one class, `r2` of one value) are refused.
    """

    split: Split = "all"
    test_fraction: float = 0.2
    validation_fraction: float = 0.0
    split_seed: int = 0
    shard: int = 0
    shards: int = 1
    partition: Partition = "iid"
    alpha: float = 0.5
    batch_size: int = 0
    min_examples: int = 1
    seed: int = 0
    label_dtype: LabelType = "auto"
    metrics: tuple[str, ...] = ()


class SplitDataSource(MemoryDataSource):
    """A source of which a peer has one split, and of that one share; its Config is a `SplitConfig`.

    Every peer computes the same split and the same deal from the same seeds.
    """

    config: SplitConfig

    def __init__(self, config: SplitConfig) -> None:
        super().__init__(config)
        self.require_choice("split", Split)
        self.require_choice("partition", Partition)
        self.require_choice("label_dtype", LabelType)
        self.require(
            0 <= config.shard < config.shards,
            f"shard {config.shard} of {config.shards}; shards count from 0 to shards - 1",
        )
        test, validation = config.test_fraction, config.validation_fraction
        self.require(0 < test < 1, f"test_fraction {test} is not between 0 and 1")
        self.require(
            0 <= validation < 1 - test,
            f"validation_fraction {validation} has to be from 0 to below 1 - test_fraction "
            f"({1 - test:g})",
        )
        self.require(
            config.split != "validation" or validation > 0,
            'split "validation" is empty; set validation_fraction, 0.1 say, on all peers',
        )
        least = config.min_examples
        self.require(least >= 1, f"min_examples {least} has to be 1 or more")
        seed = config.split_seed
        self.require(seed >= 0, f"split_seed must not be negative ({seed})")
        alpha = config.alpha
        self.require(0 < alpha < math.inf, f"alpha {alpha} is not a positive number")

    def require_choice(self, name: str, choices: Any) -> None:
        """Raise InvalidComponentConfig unless the setting is one of a Literal's values."""
        value, known = getattr(self.config, name), get_args(choices)
        self.require(value in known, f"unknown {name} {value!r}; choose one of {', '.join(known)}")

    def split_of(self, labels: ByRow) -> dict[Split, Rows]:
        """Return the rows of the parts "train", "test" and "validation" of all that was loaded."""
        config = self.config
        return partition.split_rows(
            len(labels), _classes(labels), config.test_fraction, config.validation_fraction,
            config.split_seed,
        )  # fmt: skip

    def chosen(self, labels: ByRow) -> Rows | None:
        """Return the rows of this peer's share of its split; None is all."""
        config = self.config
        rows = None if config.split == "all" else self.split_of(labels)[config.split]
        if rows is not None and len(rows) == 0:
            raise DataUnavailable(
                f"{self.TYPE_NAME}: the split {config.split!r} of {len(labels)} example(s) is "
                "empty; take more examples, or another test_fraction and validation_fraction"
            )
        if config.shards == 1:
            return rows
        whole = np.arange(len(labels)) if rows is None else rows
        needs_labels = config.partition in ("shards", "dirichlet")
        try:
            dealt = partition.deal(
                taken(labels, whole) if needs_labels else whole,
                config.partition, config.shards, config.seed, config.alpha,
            )[config.shard]  # fmt: skip
        except ValueError as error:
            raise DataUnavailable(f"{self._share()}: {error}") from error
        if len(dealt) == 0:
            raise DataUnavailable(f"{self._share()} is empty; use fewer shards")
        return whole[dealt]

    def _data(self) -> _Examples:
        """Return the examples, loaded once; DataDoesNotFit for those without a metric of theirs."""
        with self._lock:
            is_new = self._loaded is None
            data = super()._data()
            why = ""
            if is_new and self.config.metrics:
                why = undefined_metric(self.schema(), self.config.metrics)
            if why:
                self.forget()  # others may stand there the next time
                raise DataDoesNotFit(f"{self.TYPE_NAME}: {why}")
            return data

    def _share(self) -> str:
        config = self.config
        part = "" if config.split == "all" else f" of the split {config.split!r}"
        return f"{self.TYPE_NAME}: shard {config.shard} of {config.shards}{part}"

    def _seeds(self) -> tuple[int, ...]:
        return self.config.seed, partition.SHUFFLE, self.config.shard


def undefined_metric(schema: DataSchema, metrics: Sequence[str]) -> str:
    """Return why these examples have no value of one of the metrics; "" where they have all."""
    span = schema.label_range or schema.value_range
    if span is None or span[0] != span[1]:
        return ""
    column = f" in {schema.label_name!r}" if schema.label_name else ""
    needs = {
        "auc": "examples of both classes",
        "r2": "labels that differ",
    }
    for name in metrics:
        if name in needs:
            return (
                f"the metric {name!r} needs {needs[name]}, and all {schema.num_samples} label(s)"
                f"{column} are {span[0]:g}; give it other examples, or leave {name!r} out of "
                "the program's metrics"
            )
    return ""


def _classes(labels: ByRow) -> Array | None:
    """Return the labels if they may be classes: integers, one for each example."""
    one_integer_each = len(labels.shape) == 1 and labels.dtype.kind in "iub"
    return taken(labels, None) if one_integer_each else None
