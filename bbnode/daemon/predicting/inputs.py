"""Examples for a trained model, read as its training read them.

Rule: a file is read by the data source of the training, with the settings that the model carries; a
column, a size or a tokenizer that differs is refused. The path of the file is the user's, never the
model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bbnode.components.contracts import Component
from bbnode.components.data.arrays import ArrayDataSource
from bbnode.components.data.arrow_files import ENDINGS
from bbnode.components.data.base import ByRow
from bbnode.components.data.data_file import read_whole
from bbnode.components.data.description import DataDescription, Kind
from bbnode.components.data.images import ImageFolderDataSource
from bbnode.components.data.numpy_files import SUFFIX
from bbnode.components.data.tables import TableDataSource
from bbnode.components.data.text import FileTokenizer, TextDataSource
from bbnode.components.registry import build_config
from bbnode.ir.decoding import shown
from bbnode.ir.errors import DeploymentError

STDIN = "-"
_SOURCES: Mapping[Kind, type[Component]] = {
    "arrays": ArrayDataSource,
    "images": ImageFolderDataSource,
    "table": TableDataSource,
    "text": TextDataSource,
}
_WANTED: Mapping[Kind, str] = {
    "arrays": "an .npy or .npz file, or a table of numbers (.csv, .parquet, …)",
    "images": "an image, or a folder of images",
    "table": "a table (.csv, .tsv, .parquet, .arrow, .feather)",
    "text": "a file of text, or - for standard input",
}
_ARRAYS = (SUFFIX, ".npz")
_JSON_LINES = (".jsonl", ".ndjson")
_MAX_TEXT_BYTES = 1 << 30
_MAX_LABEL_CHARS = 19


class ExamplesRefused(DeploymentError):
    """Examples are not of the kind that a model takes."""


class TokenizerDiffers(ExamplesRefused):
    """The tokenizer is missing, or another one than in training."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Examples as the user names them.

    Attributes:
        path: of a file or folder, or "-".
        tokenizer: the file of the tokenizer, for models that were trained with one.
        read_stdin: returns at most the given number of bytes of standard input.
    """

    path: str
    tokenizer: Path | None = None
    read_stdin: Callable[[int], bytes] = lambda _: b""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples as a model takes them.

    Attributes:
        values: by row; a row of several inputs is a Composite.
        noun: of a row: "row" (counted from 0), "line" (from 1) or "file".
        names: of the rows.
        notes: lines for the user.
    """

    values: ByRow
    noun: str
    names: Sequence[str | int]
    notes: tuple[str, ...] = ()


def read_examples(data: DataDescription, given: Given) -> Examples:
    """Return the examples that the user named, in the form of the training.

    Raises ExamplesRefused, and DataUnavailable for files that can't be read or do not fit.
    """
    suffix = Path(given.path).suffix.lower()
    is_table = suffix in ENDINGS
    if given.path == STDIN and data.kind != "text":
        raise _unfit(data.kind, "standard input")
    if data.kind == "text":
        return _texts(data, given)
    _refuse_tokenizer(given, "takes no text")
    if data.kind == "images":
        source: Any = _source(data, {"path": given.path})
        values, paths = source.examples()
        return _fitting(data, Examples(values=values, noun="file", names=paths))
    if data.kind == "table":
        if not (is_table or Path(given.path).is_dir()):
            raise _unfit("table", given.path)
        values = _source(data, {"path": given.path}).examples(data.fills)
        return _fitting(data, _rows(values))
    if not is_table:
        if suffix not in _ARRAYS and not Path(given.path).is_dir():
            raise _unfit("arrays", given.path)
        return _fitting(data, _rows(_source(data, {"path": given.path}).examples()))
    if data.inputs:
        raise ExamplesRefused(
            f"{given.path}: a table is one tensor, and the model takes "
            f"{', '.join(name for name, _ in data.inputs)}; write these into an .npz file"
        )
    own = ("dtype", "missing", "standardize", "mean", "std")
    settings = {name: value for name, value in data.settings.items() if name in own}
    table = _made(TableDataSource, {**settings, "path": given.path})
    note = f"the columns of {given.path} are taken in their order; the model names none"
    return _fitting(data, _rows(table.examples({}), note))


def read_plain(given: Given, dtype: np.dtype[Any]) -> Examples:
    """Return the numbers in an .npy file or a table, for a model without a description.

    Raises ExamplesRefused, DataUnavailable.
    """
    _refuse_tokenizer(given, "does not say that it takes text")
    suffix = Path(given.path).suffix.lower()
    note = "the model does not say what it takes: numbers go in as they are, in their order"
    settings = {"path": given.path, "dtype": dtype.name}
    if suffix in ENDINGS:
        return _rows(_made(TableDataSource, settings).examples({}), note)
    if suffix in _ARRAYS:
        return _rows(_made(ArrayDataSource, settings).examples(), note)
    raise ExamplesRefused(
        f"{given.path}: the model does not say what it takes, so that only arrays (.npy, .npz) and "
        "tables of numbers can be given to it; export it again from a node with its data"
    )


def _rows(values: ByRow, *notes: str) -> Examples:
    return Examples(values=values, noun="row", names=range(len(values)), notes=notes)


def _made(cls: type[Component], settings: Mapping[str, Any]) -> Any:
    return cls(build_config(cls, "the model's data", b"", settings))


def _source(data: DataDescription, more: Mapping[str, Any]) -> Any:
    return _made(_SOURCES[data.kind], {**data.settings, **more})


def _unfit(kind: Kind, what: str) -> ExamplesRefused:
    return ExamplesRefused(f"{what} is not what the model takes; give it {_WANTED[kind]}")


def _refuse_tokenizer(examples: Given, why: str) -> None:
    if examples.tokenizer is not None:
        raise TokenizerDiffers(f"the model {why}; leave --tokenizer out")


def _fitting(data: DataDescription, examples: Examples) -> Examples:
    """Return the examples; ExamplesRefused if their shape is not that of the training."""
    wanted, has = data.features.shape, tuple(examples.values.shape[1:])
    if has != wanted:
        columns = f" ({', '.join(data.columns[:20])})" if data.columns else ""
        raise ExamplesRefused(
            f"an example has the shape {list(has)}, and those that the model was trained on "
            f"{list(wanted)}{columns}"
        )
    if len(examples.values) == 0:
        raise ExamplesRefused("there is no example in it")
    return examples


def _texts(data: DataDescription, given: Given) -> Examples:
    task = data.settings.get("task")
    if task != "classification":
        raise ExamplesRefused(
            f"the model was trained on text as {shown(task)}, and predicts no class of a text; run "
            "it with ONNX Runtime"
        )
    settings: dict[str, Any] = {"path": given.path}
    if data.tokenizer_sha256:
        if given.tokenizer is None:
            raise TokenizerDiffers(
                "the model was trained with a tokenizer.json (sha256 "
                f"{data.tokenizer_sha256[:12]}…); give that file with --tokenizer"
            )
        settings["tokenizer_file"] = str(given.tokenizer)
    else:
        own = shown(data.settings.get("tokenizer"))
        _refuse_tokenizer(given, f"was trained with the tokenizer {own}")
    source: TextDataSource = _source(data, settings)
    tokenizer = source.tokenizer()
    if isinstance(tokenizer, FileTokenizer) and tokenizer.sha256 != data.tokenizer_sha256:
        raise TokenizerDiffers(
            f"{given.tokenizer} (sha256 {tokenizer.sha256[:12]}…) is not the tokenizer of the "
            f"training ({data.tokenizer_sha256[:12]}…); give that one"
        )
    if tokenizer.vocabulary != data.vocabulary:
        raise TokenizerDiffers(
            f"the tokenizer has {tokenizer.vocabulary} tokens, and that of the training "
            f"{data.vocabulary}"
        )
    lines, texts, labelled = _lines(data, given)
    notes = [f"labels at the beginning of {labelled} line(s) are left out"] if labelled else []
    values = _Tokens(texts, source)
    return _fitting(data, Examples(values=values, noun="line", names=lines, notes=tuple(notes)))


class _Tokens:
    """Texts as token ids, by row."""

    dtype = np.dtype(np.int64)

    def __init__(self, texts: Sequence[str], source: TextDataSource) -> None:
        self._texts, self._source = texts, source
        self.shape = (len(texts), source.config.length)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Any:
        return self._source.token_ids([self._texts[int(row)] for row in rows])


def _lines(data: DataDescription, given: Given) -> tuple[list[int], list[str], int]:
    """Return number and text of each line that is not blank, and the count of labelled ones."""
    if given.path == STDIN:
        content = given.read_stdin(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise ExamplesRefused(f"standard input has more than {_MAX_TEXT_BYTES} bytes; split it")
    else:
        content = read_whole(Path(given.path), "the text", _MAX_TEXT_BYTES)
    try:
        whole = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExamplesRefused(
            f"{given.path} is no UTF-8 (byte {error.start + 1}); convert it to UTF-8"
        ) from error
    is_json = Path(given.path).suffix.lower() in _JSON_LINES
    numbers, texts, labelled = [], [], 0
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        text = line.removesuffix("\r")
        if is_json:
            text = _of_json(text, str(data.settings.get("text", "text")), f"line {number}")
        else:
            label, tab, rest = text.partition("\t")
            if tab and _is_label(label, data.classes):
                text, labelled = rest, labelled + 1
        numbers.append(number)
        texts.append(text)
    return numbers, texts, labelled


def _is_label(word: str, classes: Sequence[str]) -> bool:
    if classes:
        return word in classes
    text = word.strip()
    return text.isascii() and text.isdigit() and len(text) <= _MAX_LABEL_CHARS


def _of_json(line: str, field: str, where: str) -> str:
    try:
        fields = json.loads(line)
        text = fields[field]
        text.encode("utf-8")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ExamplesRefused(
            f"{where} is no JSON object with a text in {shown(field)}; write one for each line"
        ) from error
    return str(text)
