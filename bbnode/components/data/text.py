"""Text, as lines or as JSON lines, tokenised one batch at a time.

Rule: one pass over the file, when it is loaded, checks every line and keeps where it begins; from
then on only the lines of a batch are read and tokenised. The ids of a text depend on the text and
the tokenizer alone.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    get_origin,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

from bbnode.components.data.base import ByRow, SplitConfig, SplitDataSource
from bbnode.components.data.data_file import DataFile, named, read_whole
from bbnode.components.data.description import DataDescription, settings_of
from bbnode.components.data.shared_schema import SharedSchema
from bbnode.components.errors import DataUnavailable, InvalidComponentConfig
from bbnode.components.libraries import TOKENIZERS, OptionalLibrary
from bbnode.components.registry import register_component
from bbnode.components.settings import path_setting
from bbnode.ir.decoding import shown
from bbnode.ir.installation import install
from bbnode.ir.types import TENSOR_INT64, TypeNode

Ids: TypeAlias = npt.NDArray[np.int64]

_CHUNK_BYTES: Final = 4 << 20  # of the file, that the first pass reads at once
_MAX_TOKENIZER_BYTES: Final = 64 << 20  # tokenizer.json; those of large models have 20 MiB
_MAX_LENGTH: Final = 1 << 20  # tokens of an example
_MAX_LABEL: Final = (1 << 63) - 1
_WIDE_CHARS: Final = 16  # of a line: so many show that every other byte is NUL
_UTF8_BOM: Final = b"\xef\xbb\xbf"

# Those of the tokens that models pad with, in the order in which a tokenizer is asked for them.
_PAD_TOKENS: Final = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>", "</s>")

PRINTABLE: Final = "\n" + "".join(map(chr, range(32, 127)))


class Tokenizer(Protocol):
    """Turns texts into ids from 0 to `vocabulary` - 1; `pad` is the id behind the end of a text."""

    vocabulary: int
    pad: int

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[Ids]:
        """Return the ids of each text; with the model's special tokens where it is a `whole`."""


class ByteTokenizer:
    """The bytes of a text in UTF-8, each plus one; 0 pads."""

    vocabulary = 257
    pad = 0

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[Ids]:
        return [
            np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) + 1 for text in texts
        ]


class CharacterTokenizer:
    """The places of a text's characters in an alphabet, from 2; 0 pads, 1 is any other one."""

    pad = 0

    def __init__(self, alphabet: str) -> None:
        self.vocabulary = len(alphabet) + 2
        codes = np.array([ord(c) for c in alphabet], np.int64)
        self._order = np.argsort(codes)
        self._codes = codes[self._order]

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[Ids]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
        places = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
        ids: Ids = np.where(self._codes[places] == codes, self._order[places] + 2, 1)
        return ids


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face, run by its library `tokenizers`."""

    def __init__(self, path: Path, pad_id: int | None, component: str, cut: int = 0) -> None:
        """Load it; with `cut`, texts become at most so many tokens, special ones included.

        Raises DataUnavailable: the library, or a good file, is not there; InvalidComponentConfig:
        `cut` leaves no token for the text.
        """
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataUnavailable(
                f"{component}: {path.name} needs the library tokenizers; run: "
                f"{install(TOKENIZERS.requirement)}"
            ) from error
        content = read_whole(path, component, _MAX_TOKENIZER_BYTES)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._component = component
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
            # What the file says of padding and cutting would apply besides `length`.
            padding = self._tokenizer.padding
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            special = self._tokenizer.num_special_tokens_to_add(False)
            if cut > special:
                self._tokenizer.enable_truncation(cut)
            self.vocabulary = int(self._tokenizer.get_vocab_size())
        except BaseException as error:
            raise self._failed(f"{path} is no tokenizer.json", error) from error
        if 0 < cut <= special:
            raise InvalidComponentConfig(
                f"{component}: {cut} token(s) leave none for the text beside the {special} "
                f"special ones of {path}; raise max_tokens"
            )
        known = [self._tokenizer.token_to_id(token) for token in _PAD_TOKENS]
        found = [padding["pad_id"]] if padding else [each for each in known if each is not None]
        if pad_id is None and not found:
            raise DataUnavailable(
                f"{component}: {path} does not say which token pads; set `pad_id` to its id"
            )
        self.pad = found[0] if pad_id is None else pad_id
        if not 0 <= self.pad < self.vocabulary:
            raise DataUnavailable(
                f"{component}: pad_id {self.pad} is no token of {path}, which has "
                f"{self.vocabulary}; set `pad_id` to one of them"
            )

    def encode(self, texts: Sequence[str], *, whole: bool) -> list[Ids]:
        try:
            # Without the tokens' places in the text, which nobody asks for.
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=whole)
        except BaseException as error:
            raise self._failed("the tokenizer fails on a text", error) from error
        return [np.array(each.ids, np.int64) for each in found]

    def _failed(self, what: str, error: BaseException) -> BaseException:
        """Return our error for one of the library, and anything else as it is.

        The library raises Exception itself for most faults; a panic of its Rust code is no
        Exception at all.
        """
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return error
        return DataUnavailable(f"{self._component}: {what}: {shown(str(error))}")


class TextFile:
    """The examples of one file, by row.

    Attributes:
        labels: of each example, int64 [N]; None where the task is "language_model".
    """

    def __init__(
        self, path: Path, layout: TextDataSourceConfig, tokenizer: Tokenizer, component: str
    ) -> None:
        """Read and check the whole file once. Raises DataUnavailable, which names the line."""
        self._layout = layout
        self._tokenizer = tokenizer
        self._component = component
        self._number = {name: index for index, name in enumerate(layout.classes)}
        self._file = DataFile(path, component)
        classifies = layout.task == "classification"
        starts: list[Ids] = []
        sizes: list[Ids] = []
        numbers: list[Ids] = []
        labels: list[int] = []
        counts: list[Ids] = []
        least, greatest = tokenizer.vocabulary, 0
        for first, offsets, lines in self._chunks():
            texts: list[str] = []
            kept: list[int] = []
            for index, line in enumerate(lines):
                number = first + index
                if not line.strip() and (classifies or layout.format == "jsonl"):
                    continue
                text, label = self._parsed(line, number)
                kept.append(index)
                if classifies:
                    labels.append(label)
                else:
                    texts.append(text)
            starts.append(offsets[kept])
            sizes.append(np.array([len(lines[index]) for index in kept], np.int64))
            numbers.append(np.array(kept, np.int64) + first)
            if not classifies:
                encoded = tokenizer.encode(texts, whole=False)
                counts.append(np.array([len(ids) for ids in encoded], np.int64))
                stream = _joined(encoded)
                if len(stream):
                    least = min(least, int(stream.min()))
                    greatest = max(greatest, int(stream.max()))
        self._last_blocks: tuple[Ids | None, Ids] = None, np.zeros(0, np.int64)
        self._starts, self._sizes = _joined(starts), _joined(sizes)
        self._numbers = _joined(numbers)
        self.labels: Ids | None = None
        if classifies:
            self.labels = np.array(labels, np.int64)
            self._count = len(labels)
            found = "it has no line with an example"
        else:
            # Where the tokens of each line end in the stream of all of them.
            self._ends = np.cumsum(_joined(counts))
            self._token_range = least, greatest
            total = int(self._ends[-1]) if len(self._ends) else 0
            self._count = max(0, (total - 1) // layout.length)
            found = f"it has {total} token(s), and one block takes {layout.length + 1}"
        if not self._count:
            self._file.close()
            raise DataUnavailable(f"{component}: {named(path)}: {found}")

    def __len__(self) -> int:
        return self._count

    def examples(self) -> tuple[ByRow, ByRow]:
        """Return token ids [N, length], and labels.

        Labels are [N]; those of a language model [N, length]: at each place the next token.
        """
        shape = self._count, self._layout.length
        ids = 0, self._tokenizer.vocabulary - 1
        if self.labels is not None:
            return _Gathered(shape, self._padded, ids), self.labels
        return (
            _Gathered(shape, lambda rows: self._block_part(rows, slice(None, -1)), ids),
            _Gathered(
                shape, lambda rows: self._block_part(rows, slice(1, None)), self._token_range
            ),
        )

    def _padded(self, rows: Ids) -> Ids:
        self._file.check_unchanged()
        texts = [self._text(int(row)) for row in rows]
        return padded_ids(texts, self._tokenizer, self._layout.length)

    def _blocks(self, rows: Ids) -> Ids:
        """Return blocks of length + 1 tokens; features and labels ask for the same ones in turn."""
        rows_before, blocks = self._last_blocks
        if rows_before is rows:
            return blocks
        self._file.check_unchanged()
        length = self._layout.length
        blocks = np.empty((len(rows), length + 1), np.int64)
        tokens: dict[int, Ids] = {}  # of the lines of this batch; blocks share them
        for block, row in zip(blocks, rows, strict=True):
            begin = int(row) * length
            end = begin + length + 1
            first = int(np.searchsorted(self._ends, begin, side="right"))
            last = int(np.searchsorted(self._ends, end, side="left"))
            wanted = [line for line in range(first, last + 1) if line not in tokens]
            texts = [self._text(line) for line in wanted]
            encoded = self._tokenizer.encode(texts, whole=False)
            tokens.update(zip(wanted, encoded, strict=True))
            stream = np.concatenate([tokens[line] for line in range(first, last + 1)])
            skipped = begin - (int(self._ends[first - 1]) if first else 0)
            block[:] = stream[skipped : skipped + length + 1]
        self._last_blocks = rows, blocks
        return blocks

    def _block_part(self, rows: Ids, part: slice) -> Ids:
        return np.ascontiguousarray(self._blocks(rows)[:, part])

    def _text(self, line: int) -> str:
        raw = self._file.read(int(self._starts[line]), int(self._sizes[line]))
        return self._parsed(raw, int(self._numbers[line]))[0]

    def _chunks(self) -> Iterator[tuple[int, Ids, list[bytes]]]:
        """Yield the lines of the file by and by: number of the first, their offsets, the lines."""
        at = len(_UTF8_BOM) if self._starts_with_bom() else 0
        number = 1
        rest = b""
        while at < self._file.size:
            part = self._file.read(at, min(_CHUNK_BYTES, self._file.size - at))
            begin, at = at - len(rest), at + len(part)
            lines = (rest + part).split(b"\n")
            if at < self._file.size or not lines[-1]:
                rest = lines.pop()
            longest = max((*map(len, lines), len(rest)))
            if longest > self._layout.max_line_bytes:
                where = next(
                    i for i, line in enumerate((*lines, rest))
                    if len(line) > self._layout.max_line_bytes
                )  # fmt: skip
                raise self._bad(
                    number + where,
                    f"longer than {self._layout.max_line_bytes} bytes; break it, or raise "
                    "max_line_bytes",
                )
            lengths = np.array([len(line) + 1 for line in lines], np.int64)
            yield number, begin + np.cumsum(lengths) - lengths, lines
            number += len(lines)

    def _starts_with_bom(self) -> bool:
        return self._file.read(0, min(len(_UTF8_BOM), self._file.size)) == _UTF8_BOM

    def _parsed(self, line: bytes, number: int) -> tuple[str, int]:
        """Return text and label of one line; 0 where the task has no labels."""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            kind = "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
            what = f"it is {kind}, no UTF-8" if kind else f"no UTF-8 (byte {error.start + 1})"
            raise self._bad(number, f"{what}; convert the file to UTF-8") from error
        is_plain = self._layout.task == "language_model" and self._layout.format == "lines"
        nuls = text.count("\0")
        # A language model takes whatever a text has, but for every other byte of UTF-16.
        if nuls and (not is_plain or (len(text) >= _WIDE_CHARS and nuls >= len(text) // 2)):
            raise self._bad(
                number, "it has NUL bytes, as UTF-16 has; convert the file to UTF-8, if it is text"
            )
        classifies = self._layout.task == "classification"
        if self._layout.format == "jsonl":
            text, given = self._of_json(text, number)
        else:
            text, given = text.removesuffix("\r"), None
            if classifies:
                given, tab, text = text.partition("\t")
                if "\r" in given or ("\r" in text and "\t" in text.partition("\r")[2]):
                    raise self._bad(
                        number, "its lines end with a carriage return alone; write them with \\n"
                    )
                if not tab:
                    raise self._bad(number, "no tab; a line is a label, a tab and the text")
        if not classifies:
            return text + "\n", 0
        return text, self._label(given, number)

    def _of_json(self, text: str, number: int) -> tuple[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, json.JSONDecodeError) else "too deep or too large"
            raise self._bad(number, f"no JSON: {why}") from error
        if not isinstance(found, dict):
            raise self._bad(number, 'no JSON object such as {"text": …, "label": …}')
        wanted = [self._layout.text]
        if self._layout.task == "classification":
            wanted.append(self._layout.label)
        for name in wanted:
            if name not in found:
                has = ", ".join(shown(each) for each in list(found)[:8]) or "none"
                raise self._bad(number, f"no field {shown(name)}; it has {has}")
        value = found[self._layout.text]
        if not isinstance(value, str):
            raise self._bad(number, f"field {shown(self._layout.text)} is {shown(value)}, no text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._bad(number, "its text holds half a surrogate pair") from error
        return value, found.get(self._layout.label)

    def _label(self, given: Any, number: int) -> int:
        if self._number:
            label = self._number.get(given) if isinstance(given, str) else None
            if label is None:
                raise self._bad(number, f"label {shown(given)} is none of `classes`")
            return label
        if isinstance(given, str):
            text = given.strip()
            given = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else given
        if not isinstance(given, int) or not 0 <= given <= _MAX_LABEL:
            raise self._bad(
                number,
                f"label {shown(given)} is no integer from 0; name the labels in `classes`",
            )
        return int(given)

    def _bad(self, number: int, what: str) -> DataUnavailable:
        return DataUnavailable(
            f"{self._component}: {named(self._file.path)}, line {number}: {what}"
        )


class _Gathered:
    """Ids that a function gathers by row; `value_range` are their least and greatest, if known."""

    dtype = np.dtype(np.int64)

    def __init__(
        self, shape: tuple[int, ...], gather: Callable[[Ids], Ids],
        value_range: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.value_range = value_range
        self._gather = gather

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Ids:
        return self._gather(rows)


def padded_ids(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Ids:
    """Return the ids of whole texts, int64 [N, length]: cut, or padded."""
    ids = np.full((len(texts), length), tokenizer.pad, np.int64)
    for to, found in zip(ids, tokenizer.encode(texts, whole=True), strict=True):
        to[: len(found)] = found[:length]
    return ids


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class TextDataSourceConfig(SplitConfig):
    """Settings of `TextDataSource`, besides those of every source that can be split.

    Attributes:
        path: of a file of text in UTF-8.
        format: "lines", or "jsonl": one JSON object a line.
        task: "classification": each line is an example, and has a label (a line of text begins
            with it, and a tab). "language_model": the lines follow each other, and are cut into
            blocks; the label of each token is the next one.
        text: name of the field of a JSON object that holds the text.
        label: name of the field that holds its label.
        classes: names of the labels, in the order of their numbers, before peers agree. Empty:
            labels are integers from 0.
        length: tokens of an example; shorter texts are padded, longer ones cut.
        tokenizer: "bytes" (257 ids: 0 pads, then the bytes of UTF-8, each plus 1), "characters"
            (0 pads, 1 is unknown, then those of `alphabet`) or "file".
        tokenizer_file: path of a tokenizer.json, as Hugging Face's libraries write it.
        alphabet: of "characters"; empty is a new line and the printable characters of ASCII.
        pad_id: of "file", if the tokenizer does not say it.
        max_line_bytes: of one line.
    """

    path: str = path_setting()
    format: Literal["lines", "jsonl"] = "lines"
    task: Literal["classification", "language_model"] = "classification"
    text: str = "text"
    label: str = "label"
    classes: tuple[str, ...] = ()
    length: int = 128
    tokenizer: Literal["bytes", "characters", "file"] = "bytes"
    tokenizer_file: str = path_setting(default="")
    alphabet: str = ""
    pad_id: int | None = None
    max_line_bytes: int = 1 << 20


@register_component
class TextDataSource(SplitDataSource):
    """Lines of text: token ids [N, length] int64; labels [N], or [N, length] of a language model.

    The file stays where it is: a batch is read and tokenised when it is asked for.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TextDataSource"
    Config: ClassVar[type] = TextDataSourceConfig
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        "NextBatch.batch": TENSOR_INT64,
        "NextBatch.labels": TENSOR_INT64,
    }
    describes = "text"
    config: TextDataSourceConfig

    def __init__(self, config: TextDataSourceConfig) -> None:
        super().__init__(config)
        for name, kind in get_type_hints(type(config)).items():
            if get_origin(kind) is Literal:
                self.require_choice(name, kind)
        self.require(
            1 <= config.length <= _MAX_LENGTH,
            f"length {config.length} is not from 1 to {_MAX_LENGTH}",
        )
        self.require(config.max_line_bytes >= 1, "max_line_bytes has to be 1 or more")
        self.require(
            len(set(config.classes)) == len(config.classes), "`classes` names a label twice"
        )
        by_file = config.tokenizer == "file"
        self.require(
            by_file == bool(config.tokenizer_file),
            'tokenizer = "file" and tokenizer_file go together; set both or neither',
        )
        self.require(
            by_file or config.pad_id is None, 'pad_id is of tokenizer = "file"; the others have one'
        )
        alphabet = config.alphabet
        self.require(len(alphabet) == len(set(alphabet)), "alphabet has a character twice")
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def needed_libraries(cls, config: TextDataSourceConfig) -> tuple[OptionalLibrary, ...]:
        return (TOKENIZERS,) if config.tokenizer == "file" else ()

    @property
    def vocabulary(self) -> int:
        """The number of token ids: rows that an embedding needs. The source is loaded for it."""
        self._data()
        return self.tokenizer().vocabulary

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which is loaded once. Raises DataUnavailable."""
        if self._tokenizer is None:
            config = self.config
            if config.tokenizer == "characters":
                self._tokenizer = CharacterTokenizer(config.alphabet or PRINTABLE)
            elif config.tokenizer == "file":
                path = Path(config.tokenizer_file)
                self._tokenizer = FileTokenizer(path, config.pad_id, self.TYPE_NAME)
            else:
                self._tokenizer = ByteTokenizer()
        return self._tokenizer

    def forget(self) -> None:
        """Drop the examples and the tokenizer, so that the next use loads them again."""
        super().forget()
        self._tokenizer = None

    def load(self) -> tuple[ByRow, ByRow]:
        path = Path(self.config.path)
        return TextFile(path, self.config, self.tokenizer(), self.TYPE_NAME).examples()

    def describe(self) -> DataDescription:
        """Return how texts become ids, and the names of the classes."""
        made = super().describe()
        tokenizer = self.tokenizer()
        is_file = isinstance(tokenizer, FileTokenizer)
        settings = settings_of("text", self.config)
        return self.as_adopted(
            replace(
                made,
                kind="text",
                settings={**settings, "pad_id": tokenizer.pad if is_file else None},
                vocabulary=tokenizer.vocabulary,
                tokenizer_sha256=tokenizer.sha256 if isinstance(tokenizer, FileTokenizer) else "",
            )
        )

    def meaning(self, features: ByRow, labels: ByRow) -> SharedSchema:
        """Return how texts become ids, and the names of the classes."""
        tokenizer, config = self.tokenizer(), self.config
        reading: dict[str, str | int | float | bool | None] = {
            "task": config.task,
            "tokenizer": config.tokenizer,
            "vocabulary": tokenizer.vocabulary,
            "padding": tokenizer.pad,
        }
        if isinstance(tokenizer, FileTokenizer):
            reading["tokenizer sha256"] = tokenizer.sha256
        if config.tokenizer == "characters":
            reading["alphabet"] = config.alphabet or PRINTABLE
        return replace(super().meaning(features, labels), reading=reading)

    def label_meaning(self) -> tuple[str | None, tuple[str, ...] | None]:
        """Return no label's name: a field of JSON is where it lies; and those of the classes."""
        return None, self.config.classes

    def token_ids(self, texts: Sequence[str]) -> Ids:
        """Return the ids of texts as those of training, int64 [N, length]."""
        return padded_ids(texts, self.tokenizer(), self.config.length)

    def label_names(self) -> tuple[str, tuple[str, ...]]:
        """Return the name of the labels' field, and those of the classes."""
        named = self.config.format == "jsonl" and self.config.task == "classification"
        return self.config.label if named else "", self.config.classes
