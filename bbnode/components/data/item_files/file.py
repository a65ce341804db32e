"""`ItemFile`: items for an index from a file of any kind, a batch at a time."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

from bbnode.components.data.data_file import UNREADABLE, told
from bbnode.components.data.item_files.arrays import ItemArrays
from bbnode.components.data.item_files.base import (
    READER,
    ItemBatch,
    ItemFileRefused,
    ItemLayout,
    OpenItems,
)
from bbnode.components.data.item_files.rows import ItemRows
from bbnode.components.data.item_files.sources import ArrowRows, Csv, JsonLines, TextLines
from bbnode.components.errors import DataUnavailable
from bbnode.ir.decoding import shown

# Of each ending what reads the items of such a file.
_READERS: Final[dict[str, Callable[[OpenItems], ItemArrays | ItemRows]]] = {
    **dict.fromkeys((".npy", ".npz"), ItemArrays),
    **dict.fromkeys((".jsonl", ".ndjson"), lambda file: ItemRows(file, JsonLines(file))),
    **dict.fromkeys((".csv", ".tsv"), lambda file: ItemRows(file, Csv(file))),
    **dict.fromkeys(
        (".parquet", ".pq", ".arrow", ".feather", ".ipc"),
        lambda file: ItemRows(file, ArrowRows(file)),
    ),
    ".txt": lambda file: ItemRows(file, TextLines(file)),
}


class ItemFile:
    """A file of items.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, layout: ItemLayout | None = None) -> None:
        """Open a file and look at its columns. Raises ItemFileRefused."""
        self.path = path
        layout = layout or ItemLayout()
        ending = path.suffix.lower()
        if ending not in _READERS:
            raise ItemFileRefused(
                f"{path} ends with {shown(ending)}; files of items end with {', '.join(_READERS)}"
            )
        if ending == ".txt" and not layout.text:
            raise ItemFileRefused(
                f"{path} has texts; give an encoder that makes vectors of them (--encoder DIR)"
            )
        self._held = contextlib.ExitStack()
        with contextlib.ExitStack() as stack, _Reading(path):
            self._file = OpenItems(path, layout, stack)
            self._reader = _READERS[ending](self._file)
            self._held = stack.pop_all()

    @property
    def count(self) -> int | None:
        """The number of its rows; None where only reading it to its end would tell."""
        return self._file.count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._held.close()

    def batches(self, size: int, *, skip_bad: bool = False) -> Iterator[ItemBatch]:
        """Yield the items by and by, at most `size` of them at a time.

        A row that is no item raises ItemFileRefused, which names it, once those before it have been
        yielded; with `skip_bad` it is left out and told in `skipped`. Afterwards `count` is known.
        """
        with _Reading(self.path):
            yield from self._reader.batches(size, skip_bad)


class _Reading:
    """Turns what readers raise for bytes that are not theirs into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ItemFileRefused):
            return
        if isinstance(error, DataUnavailable):
            text = str(error).removeprefix(f"{READER}: ").partition("; set `path`")[0]
            raise ItemFileRefused(text) from error
        if isinstance(error, UnicodeDecodeError):
            raise ItemFileRefused(
                f"{self._path} is no UTF-8 ({told(error)}); convert it to UTF-8"
            ) from error
        if isinstance(error, (*UNREADABLE, csv.Error)) or _is_arrows(error):
            raise ItemFileRefused(f"{self._path} can't be read: {told(error)}") from error


def _is_arrows(error: BaseException) -> bool:
    return type(error).__module__.startswith("pyarrow")
