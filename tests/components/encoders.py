"""Tiny encoders of texts, as directories of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

WORDS = [
    "a",
    "the",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "mat",
    "tree",
    "news",
    "of",
    "market",
    "fell",
    "rose",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CONFIG: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 12,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer.json of whole words between [CLS] and [SEP]."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(path))


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    made: dict[str, np.ndarray] = {}

    def draw(name: str, *shape: int) -> None:
        made[name] = rng.normal(0, 0.4, shape).astype(np.float32)

    def linear(name: str, out: int, into: int) -> None:
        draw(f"{name}.weight", out, into)
        draw(f"{name}.bias", out)

    def norm(name: str) -> None:
        draw(f"{name}.weight", size)
        draw(f"{name}.bias", size)

    rows = {"word": "vocab_size", "position": "max_position_embeddings"}
    for kind, key in {**rows, "token_type": "type_vocab_size"}.items():
        draw(f"embeddings.{kind}_embeddings.weight", config[key], size)
    norm("embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        key = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{key}.attention.{part}", size, size)
        norm(f"{key}.attention.output.LayerNorm")
        linear(f"{key}.intermediate.dense", inner, size)
        linear(f"{key}.output.dense", size, inner)
        norm(f"{key}.output.LayerNorm")
    return made


def tiny_encoder(folder: Path, prefix: str = "", **changes: Any) -> Path:
    """Write an encoder of random weights; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    found = {prefix + name: value for name, value in tensors(config).items()}
    save_file(found, folder / "model.safetensors")
    save_tokenizer(folder / "tokenizer.json")
    return folder
