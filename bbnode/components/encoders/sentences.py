"""Texts to vectors: tokenised, run in bounded batches, and put back into their order.

Rule: memory is bounded whatever the texts are. Of a text only its first characters are tokenised,
the tokens that a run has are bounded, and so are the texts that are tokenised at once. The same
texts give the same bits; the vector of one text differs in its last bits by which others are
encoded with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto

from bbnode.components.backends.graphs import PreparedGraph
from bbnode.components.data.text import FileTokenizer, Ids
from bbnode.components.encoders.bert import IDS, MASK
from bbnode.components.encoders.files import EncoderFiles, read_encoder
from bbnode.components.errors import ComponentError, DataUnavailable, TextRefused

Vectors = npt.NDArray[np.float32]

# Of a text that are tokenised for each token that counts: words of a language have 5 or so, and
# text that is mostly blanks has more.
_CHARS_PER_TOKEN: Final = 128
_TYPES: Final = "token_type_ids"
_TOKENS_AT_ONCE: Final = 1 << 12  # in one run, padding included; scores take 4 T bytes a head each
_CHARS_AT_ONCE: Final = 1 << 21  # tokenised at once; a token takes a hundred bytes there
_TEXTS_AT_ONCE: Final = 1 << 10
_INTEGERS: Final = {TensorProto.INT64: np.int64, TensorProto.INT32: np.int32}


class SentenceEncoder:
    """An encoder that is ready to run.

    ```python
    vectors = SentenceEncoder.open("all-MiniLM-L6-v2").encode(["How are you?", "Fine, thanks."])
    ```

    Attributes:
        dimensions: of a vector, D.
        max_tokens: of a text that count, special ones included.
    """

    def __init__(
        self,
        files: EncoderFiles,
        prepare: Callable[[ModelProto], PreparedGraph],
        *,
        max_tokens: int = 0,
        batch: int = 32,
        component: str = "SentenceEncoder",
    ) -> None:
        """Load the tokenizer, have the model prepared, and encode one text.

        Raises:
            DataUnavailable: no such tokenizer, or one that is not the model's.
            InvalidComponentConfig: `max_tokens` leaves no place for a text.
            ComponentError: the model cannot be run.
        """
        self._component = component
        self._batch = batch
        most = files.most_tokens
        self.max_tokens = max_tokens or files.max_tokens
        if most and self.max_tokens > most:
            raise DataUnavailable(
                f"{component}: max_tokens is {max_tokens}, and the model has positions for {most}"
            )
        self._tokenizer = FileTokenizer(
            files.tokenizer, files.pad_id, component, cut=self.max_tokens
        )
        self._ports = [self._port(each) for each in files.model.graph.input]
        self._graph = prepare(files.model)
        try:
            self.dimensions = int(self._run([np.zeros(1, np.int64)]).shape[-1])
            # A tokenizer of another model has ids that this one has no rows for.
            self._run([np.array([self._tokenizer.vocabulary - 1])])
        except ComponentError as error:
            raise DataUnavailable(
                f"{component}: the model does not take the tokens of {files.tokenizer}; is that "
                f"the tokenizer of another model? {error}"
            ) from error

    @classmethod
    def open(
        cls, path: str | Path, *, tokenizer: str | Path = "", max_tokens: int = 0, threads: int = 1
    ) -> SentenceEncoder:
        """Return the encoder in a directory or an .onnx file, run by ONNX Runtime without a node.

        The arguments are settings of `bbnode.TextEncoder`, and the threads of one op.
        """
        from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig

        name = cls.__name__
        files = read_encoder(path, tokenizer=tokenizer, component=name)
        backend = OrtBackend(OrtBackendConfig(intra_op_threads=threads, max_prepared=1))
        return cls(files, backend.prepare, max_tokens=max_tokens, component=name)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts, float32 [N, D].

        Raises:
            TextRefused: one holds half a surrogate pair, or is no text.
            ComponentError: the model fails, or gives what is no finite vector.
        """
        made = np.zeros((len(texts), self.dimensions), np.float32)
        most = self.max_tokens * _CHARS_PER_TOKEN
        for first, some in _parts(texts, most):
            ids = self._ids(some, first)
            # Those of about one length together, so that little is padded. Nothing is zeros.
            order = sorted(
                (i for i, each in enumerate(ids) if len(each)), key=lambda i: len(ids[i])
            )
            while order:
                longest = len(ids[order[-1]])
                rows = max(1, min(self._batch, _TOKENS_AT_ONCE // longest))
                chosen, order = order[-rows:], order[:-rows]
                made[[first + i for i in chosen]] = self._run([ids[i] for i in chosen])
        return made

    def _ids(self, texts: Sequence[str], first: int) -> list[Ids]:
        try:
            return self._tokenizer.encode(texts, whole=True)
        except DataUnavailable:
            for index, text in enumerate(texts):
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise TextRefused(
                        f"{self._component}: text {first + index} holds half a surrogate pair at "
                        f"character {error.start}; decode it by its own encoding"
                    ) from error
            raise

    def _run(self, ids: Sequence[Ids]) -> Vectors:
        tokens = np.full((len(ids), max(map(len, ids))), self._tokenizer.pad, np.int64)
        mask = np.zeros_like(tokens)
        for row, each in enumerate(ids):
            tokens[row, : len(each)] = each
            mask[row, : len(each)] = 1
        given = {IDS: tokens, MASK: mask, _TYPES: np.zeros_like(tokens)}
        feeds = [given[name].astype(dtype, copy=False) for name, dtype in self._ports]
        (made,) = self._graph.run(feeds)
        vectors = np.asarray(made)
        if vectors.ndim != 2 or len(vectors) != len(ids) or vectors.dtype != np.float32:
            raise ComponentError(
                f"{self._component}: the model gives {vectors.dtype} {list(vectors.shape)} of "
                f"{len(ids)} text(s), and float32 [N, D] is what an encoder gives"
            )
        if not np.isfinite(vectors).all():
            raise ComponentError(f"{self._component}: the model gives NaN or infinity of a text")
        return vectors

    def _port(self, port: Any) -> tuple[str, Any]:
        kind = _INTEGERS.get(port.type.tensor_type.elem_type)
        if kind is None or port.name not in (IDS, MASK, _TYPES):
            raise DataUnavailable(
                f"{self._component}: the model has an input {port.name!r}; an encoder of texts "
                f"takes {IDS}, {MASK} and {_TYPES}, of integers"
            )
        return port.name, kind


def _parts(texts: Sequence[str], most: int) -> Iterator[tuple[int, list[str]]]:
    """Yield texts by and by, each cut to `most` characters, and the place of the first."""
    some: list[str] = []
    size = first = 0
    for index, text in enumerate(texts):
        cut = text[:most]
        if some and (size + len(cut) > _CHARS_AT_ONCE or len(some) == _TEXTS_AT_ONCE):
            yield first, some
            some, size, first = [], 0, index
        some.append(cut)
        size += len(cut)
    if some:
        yield first, some
