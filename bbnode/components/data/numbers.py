"""Types that the values of a file take on the way into batches.

Rule: nothing changes its value unseen. What the wanted type can't hold (NaN, infinity, a number
out of range, a fraction as an integer) is refused when the source is loaded, by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import Array, ByRow, taken
from bbnode.components.data.data_file import DataFile
from bbnode.components.data.partition import Rows
from bbnode.components.errors import DataUnavailable
from bbnode.ir.values import Composite

NUMBERS: Final = "fiub"  # kinds of dtype that are numbers
AUTO, KEEP = "auto", "keep"
# Those that ONNX has.
NAMES: Final = (
    "float32", "float64", "float16", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
DTYPES: Final = (AUTO, KEEP, *NAMES)

_BYTES_AT_ONCE = 1 << 24  # of values that are looked through
_TOKEN_BYTES = 4  # integers of at least this size are numbers of things, smaller ones quantities


def feature_dtype(setting: str, stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of features that are stored as `stored`, by the setting `dtype`.

    "auto": integers of 32 and 64 bits become int64 (tokens), all else float32.
    """
    if setting == KEEP:
        return stored.newbyteorder("=")
    if setting != AUTO:
        return np.dtype(setting)
    token = stored.kind in "iu" and stored.itemsize >= _TOKEN_BYTES
    return np.dtype(np.int64 if token else np.float32)


def label_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of labels: int64 for integers and bools, float32 for floats."""
    return np.dtype(np.int64 if stored.kind in "iub" else np.float32)


def most_whole(dtype: np.dtype[Any]) -> int:
    """Return up to which number a float type tells whole numbers apart."""
    return 1 << (int(np.finfo(dtype).nmant) + 1)


def exact(part: Array, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Return for each whole number whether a float type holds it as it is."""
    wide = part.astype(dtype).astype(np.float64)
    most = float(np.iinfo(part.dtype).max)  # rounded up to a power of two: the first one beyond
    inside = np.isfinite(wide) & (wide < most if part.dtype.itemsize == 8 else wide <= most)
    back = np.where(inside, wide, 0).astype(part.dtype)
    same: npt.NDArray[np.bool_] = inside & (back == part)
    return same


def _is_large(part: Array, dtype: np.dtype[Any]) -> bool:
    most = most_whole(dtype)
    return bool(int(part.max()) > most or int(part.min()) < -most)


class FileArray:
    """Values of a file, of some rows or all, converted a batch at a time.

    `files` are those that are mapped: they are checked before each batch.
    """

    def __init__(
        self,
        stored: ByRow,
        dtype: np.dtype[Any],
        files: Sequence[DataFile] = (),
        rows: Rows | None = None,
    ) -> None:
        self.stored = stored
        self._files, self._rows = files, rows
        self.dtype = dtype
        count = len(stored) if rows is None else len(rows)
        self.shape: tuple[int, ...] = (count, *stored.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        for file in self._files:
            file.check_unchanged()
        gathered: Array = self.stored[self._file_rows(rows)]
        return gathered.astype(self.dtype, copy=False)

    def refuse_misfits(
        self, component: str, what: str, *, nan: bool = False, rounded: bool = False,
        line_of: Callable[[int], str] = lambda _: "",
    ) -> None:  # fmt: skip
        """Raise DataUnavailable for the first value of `what` that the type cannot hold.

        Args:
            component: its name, for the error.
            what: the values are, for the error.
            nan: NaN is one that float types hold: it stands for a missing value.
            rounded: whole numbers may lose digits that a float type has no place for.
            line_of: returns where a row stands in its file, for the error.
        """
        whole = self.stored.dtype.kind in "iu" and self.dtype.kind == "f" and not rounded
        if np.can_cast(self.stored.dtype, self.dtype, "safe") and self.dtype.kind != "f":
            return
        a_row = max(1, self.stored.dtype.itemsize * int(np.prod(self.shape[1:])))
        step = max(1, _BYTES_AT_ONCE // a_row)
        for file in self._files:
            file.check_unchanged()
        for start in range(0, len(self), step):
            rows = self._file_rows(np.arange(start, min(start + step, len(self))))
            part: Array = self.stored[rows]
            with np.errstate(over="ignore", invalid="ignore"):
                cast = part.astype(self.dtype)
            good = np.isfinite(cast) if self.dtype.kind == "f" else cast == part
            if whole and part.size and _is_large(part, self.dtype):
                with np.errstate(over="ignore"):
                    good &= exact(part, self.dtype)
            if nan and self.dtype.kind == "f" and part.dtype.kind == "f":
                good |= np.isnan(part)
            if not good.all():
                at = np.argwhere(~good)[0]
                inside = f"[{', '.join(map(str, at[1:]))}]" if len(at) > 1 else ""
                row, value = int(rows[at[0]]), part[tuple(at)]
                if whole and np.isfinite(cast[tuple(at)]):
                    remedy = (
                        f"whole numbers beyond {most_whole(self.dtype)} lose digits there; leave "
                        "such a column out, scale it in the file, set `numbers` to its name if it "
                        "is a quantity that may be rounded (tables), or another `dtype`"
                    )
                else:
                    remedy = "mend or leave out such rows (counted from 0)"
                raise DataUnavailable(
                    f"{component}: {what}{line_of(row)}, row {row}{inside}: {value} is no "
                    f"{self.dtype} number; {remedy}"
                )

    def _file_rows(self, rows: Rows) -> Rows:
        return rows if self._rows is None else self._rows[rows]


class Joined:
    """Several arrays as one of columns: [N, ...] each, flattened and side by side."""

    def __init__(self, parts: Sequence[ByRow], dtype: np.dtype[Any]) -> None:
        self._parts = parts
        self.dtype = dtype
        columns = sum(int(np.prod(part.shape[1:])) for part in parts)
        self.shape = (len(parts[0]), columns)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        made: Array = np.empty((len(rows), self.shape[1]), self.dtype)
        start = 0
        for part in self._parts:
            values = part[rows].reshape(len(rows), -1)
            made[:, start : start + values.shape[1]] = values
            start += values.shape[1]
        return made


class ApartArrays:
    """Several arrays of the same examples, each a tensor of its own: gathered as a Composite."""

    def __init__(self, parts: Mapping[str, ByRow]) -> None:
        self.parts = dict(parts)
        first = next(iter(self.parts.values()))
        self.shape, self.dtype = first.shape, first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Composite:
        return Composite(taken(part, rows) for part in self.parts.values())


def in_memory(values: ByRow) -> Array:
    """Return all values as one array, a part of them converted at a time."""
    made: Array = np.empty(values.shape, values.dtype)
    a_row = max(1, values.dtype.itemsize * int(np.prod(values.shape[1:])))
    step = max(1, _BYTES_AT_ONCE // a_row)
    for start in range(0, len(made), step):
        made[start : start + step] = values[np.arange(start, min(start + step, len(made)))]
    return made
