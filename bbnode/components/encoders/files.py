"""Encoders as files hold them: a directory of Hugging Face, or an ONNX model.

Rule: what the files say of pooling, normalisation and length is done as they say; what cannot be
done is refused by its name, never left out. Files are those of this machine, which its owner named;
none of them is code.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components.data.data_file import UNREADABLE, read_whole, told
from bbnode.components.encoders.bert import (
    ACTIVATIONS,
    MASK,
    SENTENCE,
    TOKENS,
    BertShape,
    Floats,
    bert_model,
)
from bbnode.components.errors import DataUnavailable
from bbnode.components.libraries import SAFETENSORS
from bbnode.ir import intake
from bbnode.ir.decoding import shown
from bbnode.ir.installation import install
from bbnode.ir.intake import ModelNotTaken

Pooling = Literal["auto", "mean", "cls"]

_MAX_JSON_BYTES: Final = 1 << 20
_TOKENIZER: Final = "tokenizer.json"
_WORDS: Final = "embeddings.word_embeddings.weight"
_ROBERTA: Final = ("roberta", "xlm-roberta", "camembert")
_BUILT: Final = ("bert", *_ROBERTA)
_WEIGHTS: Final = "model.safetensors"
_ONNX: Final = ("model.onnx", "onnx/model.onnx")
_DEFAULT_TOKENS: Final = 256  # where no file says how long a text may be
_UNSAID_TOKENS: Final = 1 << 20  # tokenizers that know no bound say numbers beyond any
_PARTS: Final = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFiles:
    """An encoder as its files describe it.

    Attributes:
        model: ONNX; its one output is the sentences' vectors, float32 [N, D].
        tokenizer: the path of a tokenizer.json.
        max_tokens: of a text, special ones included.
        most_tokens: that the model has positions for; 0 where the files do not say it.
        pad_id: of the token that pads; None where tokenizer.json has to say it.
    """

    model: ModelProto
    tokenizer: Path
    max_tokens: int
    most_tokens: int
    pad_id: int | None


def sentence_encoder(
    directory: str | Path, *, pooling: Pooling = "auto", normalize: bool | None = None
) -> ModelProto:
    """Return the sentence encoder in a directory as one ONNX model.

    Its inputs are "input_ids" and "attention_mask", int64 [N, T]; its output is
    "sentence_embedding", float32 [N, D]. Of BERT and RoBERTa it is built from config.json and
    model.safetensors (`pip install 'safetensors>=0.5'`), of others read from model.onnx.

    Args:
        directory: as Hugging Face's libraries save it.
        pooling: of tokens to one vector: their "mean", or "cls", the first one's; "auto" is what
            the directory says, else the mean.
        normalize: to the length 1; None is what the directory says, and True where it says nothing.

    Raises:
        DataUnavailable: a file is missing or damaged, or the encoder is of a kind that is not
            built here.
    """
    return read_encoder(directory, pooling=pooling, normalize=normalize).model


def read_encoder(
    path: str | Path,
    *,
    tokenizer: str | Path = "",
    pooling: Pooling = "auto",
    normalize: bool | None = None,
    component: str = "sentence_encoder",
) -> EncoderFiles:
    """Return the encoder in a directory, or of an .onnx file with such files beside it.

    Raises DataUnavailable, whose message begins with `component`.
    """
    reader = _EncoderReader(Path(path), component)
    if tokenizer:
        reader.tokenizer = Path(tokenizer)
    return reader.read(pooling, normalize)


class _EncoderReader:
    def __init__(self, path: Path, component: str) -> None:
        self._component = component
        self._model: Path | None = None
        self._folder = path
        if not path.is_dir():
            self._model = path
            # Exporters put the other files beside the model, or above its folder "onnx".
            near = (path.parent, path.parent.parent)
            self._folder = next((p for p in near if (p / _TOKENIZER).is_file()), near[0])
            if not path.is_file():
                raise self._bad(f"there is no {path}; name the folder of an encoder")
        steps = self._json(self._folder / "modules.json", list)
        self._steps = dict(map(self._step, steps))
        self._folders = [self._folder / self._steps.get("Transformer", ""), self._folder]
        self.tokenizer = self._find(_TOKENIZER) or self._folder / _TOKENIZER

    def read(self, pooling: Pooling, normalize: bool | None) -> EncoderFiles:
        config = self._json(self._find("config.json"), dict)
        weights = None if self._model else self._find(_WEIGHTS)
        shape = None
        if weights is not None and config.get("model_type") in _BUILT:
            shape = self._shape(config)
            model = bert_model(shape, _NamedWeights(weights, self._bad))
        else:
            model = self._onnx(config, weights)
        if normalize is None:
            normalize = not self._steps or "Normalize" in self._steps
        most = 0 if shape is None else shape.max_tokens
        return EncoderFiles(
            model=self._pooled(model, pooling, normalize),
            tokenizer=self.tokenizer,
            max_tokens=self._max_tokens(most),
            most_tokens=most,
            pad_id=self._count(config, "pad_token_id") if "pad_token_id" in config else None,
        )

    # --- files of JSON ---------------------------------------------------------------------

    def _find(self, name: str) -> Path | None:
        return next((path for f in self._folders if (path := f / name).is_file()), None)

    def _json(self, path: Path | None, kind: type) -> Any:
        """Return what a file holds, an object or a list (`kind`); an empty one without a file."""
        if path is None or not path.is_file():
            return kind()
        content = read_whole(path, self._component, _MAX_JSON_BYTES)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"{path} is no JSON ({told(error)}); download it again") from error
        if not isinstance(found, kind):
            wanted = "object" if kind is dict else "list"
            raise self._bad(f"{path} holds no {wanted} of JSON; download it again")
        return found

    def _step(self, given: Any) -> tuple[str, str]:
        """Return the kind and the folder of one step of a sentence-transformer."""
        known = isinstance(given, dict)
        kind, place = (given.get(name) for name in ("type", "path")) if known else (None, None)
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name not in _PARTS or not isinstance(place, str):
            raise self._bad(
                f"{self._folder / 'modules.json'} has the step {shown(kind)}, and an encoder is "
                f"made of {', '.join(_PARTS)} here; export the whole to ONNX and name that file"
            )
        inside = self._folder / place
        if not inside.resolve().is_relative_to(self._folder.resolve()):
            raise self._bad(f"modules.json names {shown(place)}, which is outside of its folder")
        return name, place

    def _count(self, config: Mapping[str, Any], name: str, least: int = 0) -> int:
        value = config.get(name)
        if type(value) is not int or not least <= value < 1 << 31:
            raise self._bad(f"config.json: {name} is {shown(value)}, no count; download it again")
        return value

    def _shape(self, config: Mapping[str, Any]) -> BertShape:
        kind = config["model_type"]
        sizes = {
            name: self._count(config, name, 1)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                         "num_attention_heads", "max_position_embeddings", "type_vocab_size")
        }  # fmt: skip
        eps, act = config.get("layer_norm_eps", 1e-12), config.get("hidden_act", "gelu")
        if type(eps) is not float or not 0 < eps < 1:
            raise self._bad(f"config.json: layer_norm_eps is {shown(eps)}")
        if act not in ACTIVATIONS:
            raise self._bad(
                f"config.json: hidden_act is {shown(act)}; known are {', '.join(ACTIVATIONS)}; "
                "export it to ONNX and name that file"
            )
        positions = config.get("position_embedding_type", "absolute")
        if positions != "absolute" or config.get("is_decoder"):
            raise self._bad(
                f"config.json: positions are {shown(positions)}, and only an encoder with "
                "absolute ones is built here; export it to ONNX and name that file"
            )
        if sizes["hidden_size"] % sizes["num_attention_heads"]:
            raise self._bad("config.json: num_attention_heads does not divide hidden_size")
        first = self._count(config, "pad_token_id") if kind in _ROBERTA else None
        shape = BertShape(**sizes, layer_norm_eps=eps, hidden_act=act, first_position=first)
        if shape.max_tokens < 1:
            raise self._bad("config.json: max_position_embeddings leaves no place for a token")
        return shape

    def _pooling(self) -> str:
        if "Pooling" not in self._steps:
            return "mean"
        path = self._folder / self._steps["Pooling"] / "config.json"
        config = self._json(path, dict)
        modes = [
            name.removeprefix("pooling_mode_")
            for name, value in config.items()
            if name.startswith("pooling_mode_") and value is True
        ]
        if "pooling_mode" in config:
            modes = [str(config["pooling_mode"])]
        known = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
        if len(modes) != 1 or modes[0] not in known:
            raise self._bad(
                f"{path} pools by {shown(', '.join(modes))}, and mean and cls are known; set "
                "`pooling` to one of them if that is what you want"
            )
        return known[modes[0]]

    def _max_tokens(self, most: int) -> int:
        said = (
            self._json(self._find("sentence_bert_config.json"), dict).get("max_seq_length"),
            self._json(self._find("tokenizer_config.json"), dict).get("model_max_length"),
        )
        found = [each for each in said if type(each) is int and 0 < each < _UNSAID_TOKENS]
        wanted = found[0] if found else most or _DEFAULT_TOKENS
        return min(wanted, most) if most else wanted

    # --- the model -------------------------------------------------------------------------

    def _onnx(self, config: Mapping[str, Any], weights: Path | None) -> ModelProto:
        path = self._model or next(filter(None, map(self._find, _ONNX)), None)
        if path is None:
            kind = shown(config.get("model_type"))
            raise self._bad(
                f"{self._folder} has no model.onnx, "
                + (
                    f"and its weights are of the model_type {kind}, while {', '.join(_BUILT)} are "
                    "built here; export it to ONNX"
                    if weights
                    else f"nor {_WEIGHTS}; name the folder of an encoder"
                )
            )
        try:
            return intake.brought_up(intake.read_model(path))
        except ModelNotTaken as error:
            raise self._bad(f"{path}: {error}") from error

    def _pooled(self, model: ModelProto, pooling: Pooling, normalize: bool) -> ModelProto:
        """Return the model with the vectors of sentences as its one output."""
        graph = model.graph
        ranks = {
            output.name: len(output.type.tensor_type.shape.dim)
            for output in graph.output
            if output.type.tensor_type.elem_type == TensorProto.FLOAT
        }
        sentences = [name for name, rank in ranks.items() if rank == 2]
        tokens = [name for name, rank in ranks.items() if rank == 3]
        if SENTENCE in sentences or (sentences and not tokens):
            of = SENTENCE if SENTENCE in sentences else sentences[0]
            made = of
        elif tokens:
            of = TOKENS if TOKENS in tokens else tokens[0]
            made = self._of_tokens(model, of, self._pooling() if pooling == "auto" else pooling)
        else:
            raise self._bad(
                f"of the model's outputs {', '.join(o.name for o in graph.output)} none is "
                "float32 of the shape [N, T, D] of tokens or [N, D] of sentences; export it again"
            )
        dim = next(o for o in graph.output if o.name == of).type.tensor_type.shape.dim[-1]
        names = {name for node in graph.node for name in node.output}
        last = "bbnode.sentences" if SENTENCE in names else SENTENCE
        norm: dict[str, Any] = {"axis": -1, "p": 2} if normalize else {}
        op = "LpNormalization" if normalize else "Identity"
        graph.node.append(helper.make_node(op, [made], [last], name=last, **norm))
        dims = ["batch", dim.dim_value or "dimensions"]
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info(last, TensorProto.FLOAT, dims))
        return model

    def _of_tokens(self, model: ModelProto, tokens: str, pooling: str) -> str:
        """Add nodes that pool `tokens` [N, T, D] to [N, D]; the name of what they make."""
        mask = next((each for each in model.graph.input if each.name == MASK), None)
        if pooling == "mean" and mask is None:
            raise self._bad(f"the model has no input {MASK}, by which the mean leaves padding out")
        steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
            ("Gather", [tokens, "bbnode.first"], "pooled", {"axis": 1})
        ]
        constants: dict[str, Any] = {"first": np.array(0, np.int64)}
        if pooling == "mean":
            constants = {"axis": np.array([1], np.int64), "least": np.ones((1, 1), np.float32)}
            steps = [
                ("Cast", [MASK], "shares", {"to": TensorProto.FLOAT}),
                ("Unsqueeze", ["bbnode.shares", "bbnode.axis"], "rows", {}),
                ("MatMul", ["bbnode.rows", tokens], "sums", {}),
                ("Squeeze", ["bbnode.sums", "bbnode.axis"], "sum", {}),
                ("ReduceSum", ["bbnode.shares", "bbnode.axis"], "count", {"keepdims": 1}),
                ("Max", ["bbnode.count", "bbnode.least"], "counted", {}),
                ("Div", ["bbnode.sum", "bbnode.counted"], "pooled", {}),
            ]
        for op, inputs, name, attributes in steps:
            output = f"bbnode.{name}"
            made = helper.make_node(op, inputs, [output], name=output, **attributes)
            model.graph.node.append(made)
        model.graph.initializer.extend(
            numpy_helper.from_array(value, f"bbnode.{name}") for name, value in constants.items()
        )
        return "bbnode.pooled"

    def _bad(self, what: str) -> DataUnavailable:
        return DataUnavailable(f"{self._component}: {what}")


class _NamedWeights:
    """Tensors of a model.safetensors by name, as float32, each read when it is asked for."""

    def __init__(self, path: Path, bad: Callable[[str], DataUnavailable]) -> None:
        self._path, self._bad = path, bad
        try:
            library: Any = importlib.import_module("safetensors")
        except ImportError as error:
            command = install(SAFETENSORS.requirement)
            raise bad(f"{path.name} needs the library safetensors; run: {command}") from error
        try:
            self._file = library.safe_open(path, framework="numpy")
            self._names = frozenset(self._file.keys())
        except (OSError, library.SafetensorError) as error:
            raise bad(f"cannot read {path}: {told(error)}; download it again") from error
        # A model with a head has its encoder below its own name, as "bert.".
        found = [name for name in self._names if name.endswith(_WORDS)]
        self._prefix = found[0].removesuffix(_WORDS) if len(found) == 1 else ""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Floats:
        name = self._prefix + name
        if name not in self._names:
            raise self._bad(f"{self._path} has no tensor {name}; is config.json of another model?")
        try:
            value = self._file.get_tensor(name)
        except UNREADABLE as error:
            raise self._bad(f"{self._path}: {name}: {told(error)}; download it again") from error
        if value.shape != shape:
            raise self._bad(
                f"{self._path}: {name} has the shape {list(value.shape)}, and by config.json it is "
                f"{list(shape)}; is that of another model?"
            )
        floats: Floats = value.astype(np.float32, copy=False)
        if not np.isfinite(floats).all():
            raise self._bad(f"{self._path}: {name} holds NaN or infinity; download it again")
        return floats
