"""Networks of PyTorch as people write them, small, each with inputs and targets for a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 5 * 5, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.head(self.features(x))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = norm(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = norm(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), norm(outer)
            )

    def forward(self, x):
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 with fewer channels."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU())
        blocks, inner = [], width
        for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [Residual(inner, outer, stride, norm), Residual(outer, outer, 1, norm)]
            inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inner, 10)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Recurrent(nn.Module):
    """Tokens to a class, by the last state."""

    def __init__(self, cell: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.cell = cell(12, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 5)

    def forward(self, ids):
        return self.head(self.cell(self.embed(ids))[0][:, -1])


class Block(nn.Module):
    """A block of GPT: causal attention by hand, as in minGPT, and a GELU."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attn(self.norm1(x)).split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        y = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous()
        x = x + self.proj(y.view(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 30, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 2, length) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[:, : ids.size(1)]
        return self.head(self.norm(self.blocks(x)))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def _twice(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
        nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Images to images, up by a transposed convolution and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _twice(1, 6), _twice(6, 8), _twice(8, 12)
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.join2, self.join1 = _twice(16, 8), _twice(14, 6)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        low = self.bottom(functional.max_pool2d(two, 2))
        y = self.join2(torch.cat([self.up(low), two], 1))
        y = functional.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.out(self.join1(torch.cat([y, one], 1)))


class Bert(nn.Module):
    """Tokens and their mask to a class."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 16, padding_idx=0)
        self.positions = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, ids, mask):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.positions(places))
        x = self.encoder(x, src_key_padding_mask=mask == 0)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class LoraLinear(nn.Module):
    """A frozen layer, and beside it a trained product of two thin matrices."""

    def __init__(self, inner: int, outer: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner) * 0.1)
        self.b = nn.Parameter(torch.zeros(outer, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)


def _images(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(6, *shape),)


def _tokens(count: int, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randint(0, count, (6, length)),)


def _tokens_and_mask() -> tuple[torch.Tensor, ...]:
    lengths = torch.randint(3, 9, (6, 1))
    mask = (torch.arange(8) < lengths).long()
    return torch.randint(1, 30, (6, 8)) * mask, mask


def _classes(count: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, count, (6, *shape))


@dataclass(frozen=True)
class Case:
    """A network, and what makes its batches."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    targets: Callable[[], torch.Tensor]
    loss: str = "softmax_cross_entropy"


def _norm_net(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    )  # fmt: skip


CASES: dict[str, Case] = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)),
        _images(12), _classes(5),
    ),
    "lenet": Case(LeNet, _images(1, 28, 28), _classes(10)),
    "resnet": Case(ResNet, _images(3, 16, 16), _classes(10)),
    "group_norm": Case(
        lambda: ResNet(lambda channels: nn.GroupNorm(4, channels)), _images(3, 16, 16), _classes(10)
    ),
    "instance_norm": Case(
        _norm_net(lambda c: nn.InstanceNorm2d(c, affine=True)), _images(3, 8, 8), _classes(4)
    ),
    "rms_norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Mish(), nn.Linear(8, 1)),
        _images(6), lambda: torch.randn(6, 1), "mse",
    ),
    "rnn": Case(lambda: Recurrent(nn.RNN), _tokens(20, 6), _classes(5)),
    "lstm": Case(lambda: Recurrent(nn.LSTM), _tokens(20, 6), _classes(5)),
    "lstm_deep": Case(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), _tokens(20, 6), _classes(5)
    ),
    "gru": Case(lambda: Recurrent(nn.GRU), _tokens(20, 6), _classes(5)),
    "gpt": Case(Gpt, _tokens(30, 8), _classes(30, 8)),
    "vit": Case(Vit, _images(3, 16, 16), _classes(10)),
    "unet": Case(UNet, _images(1, 16, 16), lambda: torch.randn(6, 1, 16, 16), "mse"),
    "bert": Case(Bert, _tokens_and_mask, _classes(3)),
    "lora": Case(
        lambda: nn.Sequential(LoraLinear(12, 16), nn.GELU(), LoraLinear(16, 5)),
        _images(12), _classes(5),
    ),
}  # fmt: skip
