"""Examples from the user's own Python: a Dataset, a sequence, a generator, or two arrays.

Rule: what the user's code returns is checked example by example, and what it raises becomes one
typed error with the line that raised it. Where examples can be asked for by number they stay where
they are; others are gathered once, within a bound.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import FEATURE_TYPES, ByRow
from bbnode.components.data.shared_schema import ColumnMeaning
from bbnode.components.data.statistics import StandardizedConfig, StandardizedDataSource
from bbnode.components.errors import DataUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import local_setting
from bbnode.ir.authors_code import AuthorsCodeFailed
from bbnode.ir.class_names import ClassNotLoaded, load_function
from bbnode.ir.decoding import shown
from bbnode.ir.errors import AuthorError
from bbnode.ir.interrupts import let_stop
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_INT64, TypeNode

Array: TypeAlias = npt.NDArray[Any]

_MAX_NAME_CHARS: Final = 128

_provided: dict[str, Any] = {}
_provided_lock = threading.Lock()


def provide(name: str, data: Any) -> None:
    """Hand data to the nodes of this process: `provided = name` in a slot's settings.

    `data` is what a `factory` may return, or a function without arguments that returns it. The same
    name given again replaces it, for nodes that load it later.
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS:
        raise AuthorError(
            f"provide({shown(name)}, …): a name has 1 to {_MAX_NAME_CHARS} characters"
        )
    with _provided_lock:
        _provided[name] = data


def withdraw(name: str) -> None:
    """Forget data that `provide` was given; a node that has loaded them keeps them."""
    with _provided_lock:
        _provided.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class IterableDataSourceConfig(StandardizedConfig):
    """Settings of `IterableDataSource`, besides those of every source that can be split.

    Attributes:
        factory: "package.module:function" or "folder/file.py:function", which is imported and
            called once. Modules are searched in the current directory too.
        args: of that function, by name.
        provided: instead of a factory, the name under which Python code of this process gave the
            data to `provide`.
        columns: names of the places of an example, in their order: so that peers can compare them.
            By default those that the data say themselves, as an attribute `columns`.
        units: the unit of columns that have one, by column.
        label: name of the label.
        classes: names of the labels 0, 1, …; by default those that the data say themselves, as an
            attribute `classes`, which data sets of torchvision have.
        batched: each item is a batch: features [B, …] and labels [B, …].
        max_mib: MiB that the examples of a generator, or batches, may fill, since they are
            gathered once; and the labels of others.
    """

    factory: str = local_setting(default="")
    args: Mapping[str, Any] | None = local_setting(default=None)
    provided: str = local_setting(default="")
    columns: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    classes: tuple[str, ...] = ()
    batched: bool = False
    max_mib: int = 1024


@register_component
class IterableDataSource(StandardizedDataSource):
    """Pairs (features, label) of the user's own code.

    The function returns one of: two arrays (features [N, …], labels [N, …]); an object with
    `__len__` and `__getitem__`, such as a list or a PyTorch Dataset; any other iterable. What the
    places of an example and the numbers of the labels mean is said by `columns`, `label` and
    `classes`; without, the examples are compared with those of other peers by shape and type alone.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.IterableDataSource"
    Config: ClassVar[type] = IterableDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": FEATURE_TYPES,
        "NextBatch.labels": (TENSOR_INT64, TENSOR_FLOAT),
    }
    config: IterableDataSourceConfig

    def __init__(self, config: IterableDataSourceConfig) -> None:
        super().__init__(config)
        self.require(
            bool(config.factory) != bool(config.provided),
            'set either factory = "package.module:function" or provided = "NAME"',
        )
        module, _, function = config.factory.rpartition(":")
        self.require(
            not config.factory
            or (
                function.isidentifier()
                and (module.endswith(".py") or all(map(str.isidentifier, module.split("."))))
            ),
            f"factory {shown(config.factory)} is not of the form package.module:function or "
            "folder/file.py:function",
        )
        self.require(config.max_mib >= 1, "max_mib has to be 1 or more")
        for what in ("columns", "classes"):
            names = getattr(config, what)
            self.require(len(set(names)) == len(names), f"`{what}` has a name twice")
        self._columns: tuple[str, ...] = config.columns
        self._classes: tuple[str, ...] = config.classes
        self._code = _UserCode(self.TYPE_NAME, config.factory or config.provided)

    def load(self) -> tuple[ByRow, ByRow]:
        found = self._made()
        self._columns = self.config.columns or self._names(found, "columns")
        self._classes = self.config.classes or self._names(found, "classes")
        features, labels = self._read(found)
        count = math.prod(features.shape[1:])
        if self._columns and (len(features.shape) != 2 or len(self._columns) != count):
            raise self._code.wrong(
                f"gives examples {_row(features)}, and `columns` names {len(self._columns)}; it "
                "has to have one name for each place"
            )
        if strange := sorted(self.config.units.keys() - set(self._columns)):
            raise self._code.wrong(f"has no column {shown(strange[0])}, of which `units` are given")
        if self._classes and labels.dtype.kind in "iu" and isinstance(labels, np.ndarray):
            most = int(labels.max(initial=-1))
            if most >= len(self._classes):
                raise self._code.wrong(
                    f"gives the label {most}, and `classes` names {len(self._classes)}"
                )
        return features, labels

    def columns(self) -> tuple[ColumnMeaning, ...] | None:
        """Return the columns that are named; None where they are not."""
        units = self.config.units
        return tuple(
            ColumnMeaning(name=name, unit=units.get(name, "")) for name in self._columns
        ) or None  # fmt: skip

    def column_names(self) -> tuple[str, ...]:
        """Return the names of the places of an example, if they have any."""
        return self._columns

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the label and of the classes, if they have any."""
        return self.config.label, self._classes

    def label_meaning(self) -> tuple[str | None, tuple[str, ...] | None]:
        """Return the same; None for what is not said."""
        return self.config.label or None, self._classes or None

    def _names(self, found: Any, what: str) -> tuple[str, ...]:
        """Return the names that the user's data have as an attribute, if they are names."""
        given = getattr(found, what, ())
        if callable(given) or not isinstance(given, Iterable) or isinstance(given, str):
            return ()
        with self._code.running():
            names = tuple(given)
        if not all(isinstance(name, str) for name in names):
            return ()
        if len(set(names)) != len(names):
            raise self._code.wrong(f"has a name twice in its attribute `{what}`")
        return names

    def _read(self, found: Any) -> tuple[ByRow, ByRow]:
        if isinstance(found, tuple) and len(found) == 2 and all(map(_is_array, found)):
            features, labels = self._code.pair(found)
            if features.ndim == 0 or labels.ndim == 0:
                raise self._code.wrong("returned a number instead of arrays of examples")
            return features, labels
        if hasattr(found, "__len__") and hasattr(found, "__getitem__") and not self.config.batched:
            if isinstance(found, Mapping | str | bytes):
                raise self._code.wrong(f"returned a {type(found).__name__}")
            numbered = _Numbered(found, self._code, self.config.max_mib << 20)
            return numbered, numbered.labels
        if not isinstance(found, Iterable):
            raise self._code.wrong(
                f"returned {shown(found)}; it has to be an iterable of (features, label) pairs, "
                "something with __len__ and __getitem__, or two arrays"
            )
        return self._gathered(found)

    def _made(self) -> Any:
        config = self.config
        if config.provided:
            with _provided_lock:
                known = config.provided in _provided
                given = _provided.get(config.provided)
            if not known:
                raise DataUnavailable(
                    f"{self.TYPE_NAME}: nothing was provided as {shown(config.provided)}; call "
                    f"provide({shown(config.provided)}, data) before the node starts"
                )
            if callable(given) and not hasattr(given, "__getitem__"):
                with self._code.running():
                    return given()
            return given
        try:
            function = load_function(config.factory)
        except (ClassNotLoaded, AuthorsCodeFailed) as error:
            raise DataUnavailable(f"{self.TYPE_NAME}: factory: {error}") from error
        with self._code.running():
            return function(**(config.args or {}))

    def _gathered(self, items: Iterable[Any]) -> tuple[Array, Array]:
        """Return all examples as two arrays."""
        features: list[Array] = []
        labels: list[Array] = []
        room = self.config.max_mib << 20
        for number, item in enumerate(self._code.items(items)):
            pair = self._code.pair(item, number)
            if self.config.batched and (
                0 in (pair[0].ndim, pair[1].ndim) or len(pair[0]) != len(pair[1])
            ):
                raise self._code.wrong(
                    f"item {number} is no batch: {_shape(pair[0])} and {_shape(pair[1])}"
                )
            for kept, value in zip((features, labels), pair, strict=True):
                first = 1 if self.config.batched else 0
                if kept:
                    self._code.check_like(kept[0], value, number, first)
                kept.append(value.copy())  # its owner may use the same memory for the next one
                room -= value.nbytes
            if room < 0:
                raise self._code.wrong(
                    f"gives more than {self.config.max_mib} MiB of examples; let it return "
                    "something with __len__ and __getitem__, or raise max_mib"
                )
        if not features:
            raise self._code.wrong("gives no examples")
        if self.config.batched:
            return np.concatenate(features), np.concatenate(labels)
        return np.stack(features), np.stack(labels)


class _Numbered:
    """Features that an object gives by number.

    One pass, when it is made, checks every example against the first one and keeps its label.

    Attributes:
        labels: of all examples.
    """

    def __init__(self, data: Any, code: _UserCode, room: int) -> None:
        self._data = data
        self._code = code
        with code.running():
            count = len(data)
        if not count:
            raise code.wrong("gives no examples")
        first, label = self._item(0)
        if label.nbytes * count > room:
            raise code.wrong(f"gives labels of more than {room >> 20} MiB; raise max_mib")
        self.shape: tuple[int, ...] = (count, *first.shape)
        self.dtype = first.dtype
        self._first = first
        self.labels = np.empty((count, *label.shape), label.dtype)
        for row in range(count):
            features, self.labels[row] = self._item(row, label)
            code.check_like(first, features, row)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any, /) -> Array:
        batch = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for to, row in zip(batch, rows, strict=True):
            features, _ = self._item(int(row))
            self._code.check_like(self._first, features, int(row))
            to[...] = features
        return batch

    def _item(self, row: int, like: Array | None = None) -> tuple[Array, Array]:
        with self._code.running():
            item = self._data[row]
        features, label = self._code.pair(item, row)
        if like is not None:
            self._code.check_like(like, label, row)
        return features, label


class _UserCode:
    """The user's code as errors name it, and the checks of what it gives."""

    def __init__(self, component: str, name: str) -> None:
        self._component = component
        self._name = name

    def wrong(self, what: str) -> DataUnavailable:
        return DataUnavailable(f"{self._component}: {self._name} {what}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Turn what the user's code raises into a DataUnavailable that has its line."""
        try:
            yield
        except DataUnavailable:
            raise
        except BaseException as error:
            let_stop(error)
            frames = traceback.extract_tb(error.__traceback__)[1:]
            own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
            where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
            raise self.wrong(f"failed: {type(error).__name__}: {error}{where}") from error

    def items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of the user's iterable."""
        with self.running():
            iterator = iter(items)
        while True:
            with self.running():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def pair(self, item: Any, number: int | None = None) -> tuple[Array, Array]:
        """Return an item as features and labels.

        Floats become float32, and integer labels int64; integer features stay what they are.
        """
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self.wrong(
                f"gives {shown(item)} as item {number}; each has to be a pair (features, label)"
            )
        features, label = self._array(item[0], number), self._array(item[1], number)
        if label.dtype.kind != "f":
            label = label.astype(np.int64, copy=False)
        return features, label

    def _array(self, value: Any, number: int | None) -> Array:
        with self.running():
            array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            at = "" if number is None else f" in item {number}"
            raise self.wrong(f"gives {array.dtype}{at}; examples are arrays of numbers")
        return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array

    def check_like(self, first: Array, value: Array, number: int, axis: int = 0) -> None:
        """Raise DataUnavailable unless a value is like the first one, from an axis on."""
        if value.shape[axis:] != first.shape[axis:] or value.dtype != first.dtype:
            raise self.wrong(
                f"gives {_shape(value)} in item {number}, and {_shape(first)} before; all "
                "examples have one shape and type"
            )


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        hasattr(value, "__array__") and hasattr(value, "shape") and value.shape != ()
    )


def _row(values: ByRow) -> str:
    return f"{values.dtype}{list(values.shape[1:])}"


def _shape(value: Array) -> str:
    return f"{value.dtype}{list(value.shape)}"
