"""The same encoder in PyTorch, from the same file, with adapters of its own.

Rule: nothing here comes from bbnode, so that its encoder and its training have something to be
compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

HEADS = 12


class Encoder(nn.Module):
    """BERT of `model.safetensors`, frozen, whose tokens become one vector: their mean.

    With a rank it has adapters beside queries and values, which are trained.
    """

    def __init__(self, folder: Path, layers: int, rank: int = 0, alpha: float = 16.0) -> None:
        super().__init__()
        self.weights = load_file(folder / "model.safetensors")
        self.layers = layers
        self.scale = alpha / max(1, rank)
        self.adapters = nn.ParameterDict()
        width = self.weights["embeddings.word_embeddings.weight"].shape[1]
        for layer in range(layers if rank else 0):
            for part in ("query", "value"):
                first = (2 * torch.rand(width, rank) - 1) / width**0.5
                self.adapters[f"{layer}_{part}_A"] = nn.Parameter(first)
                self.adapters[f"{layer}_{part}_B"] = nn.Parameter(torch.zeros(rank, width))

    def forward(self, ids: Any) -> Any:
        """Return float32 [N, D] of int64 [N, T], in which 0 pads."""
        words = ids != 0
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self._norm(
            x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm"
        )
        for layer in range(self.layers):
            key = f"encoder.layer.{layer}"
            query, value = (self._adapted(x, layer, part) for part in ("query", "value"))
            keys = self._linear(x, f"{key}.attention.self.key")
            parted = [
                each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, keys, value)
            ]
            mixed = functional.scaled_dot_product_attention(
                *parted, attn_mask=words[:, None, None, :]
            )
            mixed = mixed.transpose(1, 2).flatten(2)
            out = self._linear(mixed, f"{key}.attention.output.dense")
            x = self._norm(x + out, f"{key}.attention.output.LayerNorm")
            wide = functional.gelu(self._linear(x, f"{key}.intermediate.dense"))
            out = self._linear(wide, f"{key}.output.dense")
            x = self._norm(x + out, f"{key}.output.LayerNorm")
        counted = words[..., None].to(x.dtype)
        return (x * counted).sum(1) / counted.sum(1)

    def _linear(self, x: Any, key: str) -> Any:
        return functional.linear(x, self.weights[f"{key}.weight"], self.weights[f"{key}.bias"])

    def _norm(self, x: Any, key: str) -> Any:
        weight, bias = self.weights[f"{key}.weight"], self.weights[f"{key}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-12)

    def _adapted(self, x: Any, layer: int, part: str) -> Any:
        out = self._linear(x, f"encoder.layer.{layer}.attention.self.{part}")
        if not self.adapters:
            return out
        first, second = (self.adapters[f"{layer}_{part}_{each}"] for each in "AB")
        return out + self.scale * (x @ first @ second)


def accuracy_of_adapters(
    folder: Path, layers: int, rank: int, train: tuple[Any, Any], test: tuple[Any, Any], epochs: int
) -> float:
    """Return the accuracy of adapters and a layer of two classes that are trained on all texts.

    It makes as many steps as one of three clients, each on as many texts as all see in one.
    """
    torch.manual_seed(0)
    encoder = Encoder(folder, layers, rank)
    width = encoder.weights["embeddings.word_embeddings.weight"].shape[1]
    model = nn.Sequential(encoder, nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    ids, labels = map(torch.from_numpy, train)
    for _ in range(epochs):
        for rows in torch.randperm(len(ids)).split(48):
            loss = functional.cross_entropy(model(ids[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in torch.from_numpy(test[0]).split(100)])
    return float((found == torch.from_numpy(test[1])).float().mean())
