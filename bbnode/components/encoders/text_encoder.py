"""A text encoder in the place of a model: `forward` takes texts.

Rule: what it computes with are files of this machine, named by its owner; nothing of it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import numpy as np

from bbnode.components.contracts import Model, OpContext, offload
from bbnode.components.encoders.files import Pooling, read_encoder
from bbnode.components.encoders.sentences import SentenceEncoder
from bbnode.components.errors import TextRefused, UnsupportedByModel
from bbnode.components.libraries import TOKENIZERS, OptionalLibrary
from bbnode.components.registry import checked_config, register_component
from bbnode.components.settings import local_setting, path_setting
from bbnode.ir.caps import MAX_BOOK_PEERS
from bbnode.ir.decoding import shown
from bbnode.ir.peer import PeerId
from bbnode.ir.types import TENSOR_FLOAT, TENSOR_STRING, TypeNode
from bbnode.ir.values import Value

_MINUTE_NS: Final = 60 * 10**9


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig:
    """Settings of `TextEncoder`.

    Attributes:
        model: the path of a directory as Hugging Face's libraries save it (config.json,
            model.safetensors, tokenizer.json), or of an .onnx file. All peers of a search need
            the same one.
        tokenizer: the path of a tokenizer.json; without it the one in the directory, or beside
            the file.
        max_tokens: of a text that count, special ones included; 0 is what the directory says, else
            256. Of a text no more than 128 characters for each are looked at.
        pooling: of the tokens' vectors to one: "mean", or "cls", the first one's; "auto" is what
            the directory says, else the mean.
        normalize: to the length 1; unset it is what the directory says, and done where that says
            nothing.
        batch: texts that the model gets at once; fewer, where they are long.
        max_texts: of one call; with more it is refused.
        texts_per_min: of one asking peer, and at once; beyond them it is refused. 0 is any number.
    """

    model: str = path_setting()
    tokenizer: str = path_setting(default="")
    max_tokens: int = 0
    pooling: Pooling = "auto"
    normalize: bool | None = None
    batch: int = 32
    max_texts: int = 4096
    texts_per_min: float = local_setting(default=0.0)


@register_component
class TextEncoder(Model):
    """Sentences to vectors: `forward` of texts [N], or one [], gives float32 [N, D], or [D].

    The encoder is run by the bound backend. Its weights are those of the files: they are neither
    trained, nor sent, nor in a snapshot; what would do so is refused (UnsupportedByModel).
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TextEncoder"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (TOKENIZERS,)
    Config: ClassVar[type] = TextEncoderConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        **Model.storage,
        "Forward.output": TENSOR_FLOAT,
        "Forward.input": TENSOR_STRING,
    }
    config: TextEncoderConfig

    def __init__(self, config: TextEncoderConfig) -> None:
        config = checked_config(type(self), config)
        super().__init__(config)
        self.require(bool(config.model), "`model` is empty; set it to the folder of an encoder")
        self.require(config.max_tokens >= 0, f"max_tokens is {config.max_tokens}; 0 or more")
        for name in ("batch", "max_texts"):
            value = getattr(config, name)
            self.require(value >= 1, f"{name} is {value}; 1 or more")
        rate = config.texts_per_min
        self.require(
            rate == 0 or 1 <= rate < math.inf, f"texts_per_min is {rate}; 0, or a number from 1"
        )
        self._left: dict[PeerId, tuple[float, int]] = {}  # texts, as of a moment
        self._encoder: SentenceEncoder | None = None
        self._texts = 0

    def facts(self) -> Mapping[str, int | float | str | bool]:
        """Return how many texts were encoded, and the length of a vector once that is known."""
        known = {} if self._encoder is None else {"dimensions": self._encoder.dimensions}
        return {"texts": self._texts, **known}

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Read the files, and have the backend prepare the model.

        Raises:
            DataUnavailable: a file is missing or damaged, or is of an encoder that is not known.
            ComponentError: the backend cannot run the model.
        """
        self._loaded()

    @offload(reads_only=True)
    def forward(self, ctx: OpContext, batch: Value) -> Value:
        """Return the vectors of texts [N] or []: float32 [N, D] or [D].

        An empty text has a vector like any other; where a tokenizer makes nothing of it, zeros.

        Raises:
            TextRefused: more than `max_texts` or `texts_per_min`, no texts, or one that is no
                Unicode text.
            DataUnavailable: as `bootstrap`, where that was not called.
        """
        texts: Any = batch
        if not isinstance(texts, np.ndarray) or texts.dtype != object or texts.ndim > 1:
            what = (
                f"{texts.dtype} of the shape {list(texts.shape)}"
                if isinstance(texts, np.ndarray)
                else shown(texts)
            )
            raise TextRefused(f"{self.TYPE_NAME} takes texts [N], or one [], and got {what}")
        listed = texts.reshape(-1).tolist()
        if len(listed) > self.config.max_texts:
            raise TextRefused(
                f"{self.TYPE_NAME}: {len(listed)} texts at once, and max_texts is "
                f"{self.config.max_texts}; send fewer, or raise it in the node's configuration"
            )
        wrong = next((i for i, text in enumerate(listed) if not isinstance(text, str)), None)
        if wrong is not None:
            raise TextRefused(f"{self.TYPE_NAME}: item {wrong} is no text: {shown(listed[wrong])}")
        if ctx.source_peer is not None and self.config.texts_per_min:
            self._count(ctx.source_peer, len(listed), ctx.now_ns)
        vectors = self._loaded().encode(listed)
        self._texts += len(listed)
        return vectors if texts.ndim else vectors[0]

    def _count(self, asker: PeerId, texts: int, now_ns: int) -> None:
        """Take texts from what a peer has left: a token bucket."""
        most = self.config.texts_per_min
        left, at_ns = self._left.pop(asker, (most, now_ns))
        left = min(most, left + max(0, now_ns - at_ns) / _MINUTE_NS * most)
        fits = texts <= left
        self._left[asker] = (left - texts if fits else left, now_ns)  # who asked last is last
        while len(self._left) > MAX_BOOK_PEERS:
            del self._left[next(iter(self._left))]
        if not fits:
            raise TextRefused(
                f"{texts} text(s) at once; {most:g} per minute are encoded for a peer here: send "
                "fewer, or wait"
            )

    def _loaded(self) -> SentenceEncoder:
        if self._encoder is None:
            config = self.config
            files = read_encoder(
                config.model, tokenizer=config.tokenizer, pooling=config.pooling,
                normalize=config.normalize, component=self.TYPE_NAME,
            )  # fmt: skip
            self._encoder = SentenceEncoder(
                files, self.dependency("backend").prepare, max_tokens=config.max_tokens,
                batch=config.batch, component=self.TYPE_NAME,
            )  # fmt: skip
        return self._encoder

    def compute_loss(self, ctx: OpContext, batch: Value, target: Value) -> NoReturn:
        """Refuse."""
        raise self._untrained("compute_loss")

    def backward(self, ctx: OpContext, grad: Value) -> NoReturn:
        """Refuse."""
        raise self._untrained("backward")

    def step(self, ctx: OpContext, grads: Value | None) -> NoReturn:
        """Refuse."""
        raise self._untrained("step")

    def apply_delta(self, ctx: OpContext, delta: Value) -> NoReturn:
        """Refuse."""
        raise self._untrained("apply_delta")

    def load_parameters(self, ctx: OpContext, params: Value) -> NoReturn:
        """Refuse."""
        raise self._untrained("load_parameters")

    def params(self, ctx: OpContext) -> NoReturn:
        """Refuse."""
        raise self._untrained("params")

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> NoReturn:
        """Refuse."""
        raise self._untrained("train")

    def _untrained(self, op: str) -> UnsupportedByModel:
        return UnsupportedByModel(component=self.TYPE_NAME, op=op)
