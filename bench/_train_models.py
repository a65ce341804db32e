"""Models that `scripts/bench train` trains both ways, and torch's side of it.

Rule: a model is a torch module, exported by `torch.onnx`; so both sides have the same architecture,
the same initial weights, and the same batches. Sizes are those of small real tasks, so that a step
takes milliseconds: 28 x 28 pictures, rows of 32 tokens, 64 x 64 photographs. Normalization layers
of ResNet-18 use their stored statistics on both sides (a model that is tuned further).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from onnx import ModelProto
from torch import nn
from torch.nn import functional

LEARNING_RATE = 0.01
CLASSES = 10
TOKENS = 256  # of the vocabulary
CONTEXT = 32
WIDTH = 128  # of GPT and ViT
HEADS = 4
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A module in the state it is trained in, and the batches of one epoch."""

    module: nn.Module
    features: np.ndarray
    labels: np.ndarray
    batch: int
    whole: bool = False  # as it is written: or with normalizations in its convolutions

    def export(self) -> ModelProto:
        """The module as a model with an open batch and its weights as initializers."""
        example = torch.from_numpy(self.features[: self.batch])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                self.module,
                (example,),
                dynamo=True,
                verbose=False,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                optimize=not self.whole,
            )
        assert program is not None
        stored = io.BytesIO()
        program.save(stored)
        return ModelProto.FromString(stored.getvalue())

    def torch_turn(self) -> tuple[nn.Module, Callable[[], float]]:
        """The module that is trained, and one epoch of SGD over the batches: nanoseconds a step."""
        module = self.module
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        starts = range(0, len(self.features), self.batch)

        def once() -> float:
            started = perf_counter_ns()
            for at in starts:
                x = torch.from_numpy(self.features[at : at + self.batch])
                y = torch.from_numpy(self.labels[at : at + self.batch])
                optimizer.zero_grad()
                out = module(x)
                loss = functional.cross_entropy(out.flatten(0, -2), y.flatten())
                loss.backward()
                optimizer.step()
                loss.item()
            return (perf_counter_ns() - started) / len(starts)

        return module, once


def cases() -> dict[str, Callable[[], Case]]:
    """What there is, by name; each made anew from the same seed."""
    return {
        "mlp": lambda: _pictures(_mlp(), (784,), batch=32),
        "lenet": lambda: _pictures(_LeNet(), (1, 28, 28), batch=32),
        "resnet18": lambda: replace(
            _pictures(ResNet18().eval(), (3, 64, 64), batch=8, steps=2), whole=True
        ),
        "mobilenet": lambda: replace(
            _pictures(MobileNetV2().eval(), (3, 64, 64), batch=8, steps=2), whole=True
        ),
        "mamba": lambda: _pictures(_Mamba(), (CONTEXT, 28), batch=16, steps=4),
        "lstm": lambda: _pictures(_LSTM(), (28, 28), batch=32, steps=4),
        "gpt": _gpt,
        "vit": lambda: _pictures(_ViT(), (3, 32, 32), batch=16, steps=4),
    }


def _pictures(module: nn.Module, shape: tuple[int, ...], batch: int, steps: int = 8) -> Case:
    rng = np.random.default_rng(0)
    count = batch * steps
    return Case(
        _seeded(module),
        rng.normal(size=(count, *shape)).astype(np.float32),
        rng.integers(0, CLASSES, count),
        batch,
    )


def _gpt() -> Case:
    rng = np.random.default_rng(0)
    text = rng.integers(0, TOKENS, (8 * 4, CONTEXT + 1))
    return Case(_seeded(_GPT()), text[:, :-1].copy(), text[:, 1:].copy(), 8)


def _seeded(module: nn.Module) -> nn.Module:
    """Draw all weights anew, so that they are the same in every process.

    No two are equal: the exporter makes one tensor of those.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                spread = 1.0 / np.sqrt(parameter[0].numel())
                parameter.normal_(0.0, float(spread), generator=generator)
            else:
                noise = torch.empty_like(parameter).normal_(0.0, 0.01, generator=generator)
                parameter.copy_(parameter.round() + noise)
    return module


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
    )


class _LeNet(nn.Module):
    """LeCun et al., 1998, with ReLU and maximum pools."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.features(x)


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(outer)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(outer)
        self.short: nn.Module = nn.Identity()
        if stride != 1:
            self.short = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = functional.relu(self.norm_one(self.one(x)))
        return functional.relu(self.norm_two(self.two(made)) + self.short(x))


class ResNet18(nn.Module):
    """He et al., 2016 (arXiv:1512.03385): 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.Sequential(
            *(
                layer
                for inner, outer, stride in widths
                for layer in (_Block(inner, outer, stride), _Block(outer, outer, 1))
            )
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.flatten(
            functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))  # fmt: skip


class _Inverted(nn.Module):
    """A bottleneck of MobileNetV2: wide, each channel alone, narrow again."""

    def __init__(self, inner: int, outer: int, stride: int, wider: int) -> None:
        super().__init__()
        wide = inner * wider
        layers: list[nn.Module] = []
        if wider > 1:
            layers += [nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        layers += [
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        ]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """Sandler et al., 2018 (arXiv:1801.04381), at its full width."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()
        ]  # fmt: skip
        inner = 32
        for wider, outer, count, stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1),
        ):  # fmt: skip
            for at in range(count):
                layers.append(_Inverted(inner, outer, stride if at == 0 else 1, wider))
                inner = outer
        layers += [nn.Conv2d(inner, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(1280, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.features(x).mean((2, 3)))


class _Selective(nn.Module):
    """Gu and Dao, 2023 (arXiv:2312.00752): a state per channel, its steps chosen by the input."""

    STATES = 8

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = 2 * width
        self.enter = nn.Linear(width, 2 * self.inner, bias=False)
        self.near = nn.Conv1d(self.inner, self.inner, 4, padding=3, groups=self.inner)
        self.chosen = nn.Linear(self.inner, self.inner + 2 * self.STATES)
        self.decay = nn.Parameter(torch.ones(self.inner, self.STATES))
        self.skip = nn.Parameter(torch.ones(self.inner))
        self.leave = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        steps = x.shape[1]
        data, gate = self.enter(x).chunk(2, dim=-1)
        data = functional.silu(self.near(data.transpose(1, 2))[..., :steps].transpose(1, 2))
        size, write, read = self.chosen(data).split([self.inner, self.STATES, self.STATES], dim=-1)
        size = functional.softplus(size)
        kept = torch.exp(-size.unsqueeze(-1) * self.decay.exp())
        new = (size * data).unsqueeze(-1) * write.unsqueeze(2)
        state = torch.zeros_like(new[:, 0])
        seen = []
        for at in range(steps):
            state = kept[:, at] * state + new[:, at]
            seen.append((state * read[:, at].unsqueeze(1)).sum(-1))
        return self.leave((torch.stack(seen, 1) + data * self.skip) * functional.silu(gate))


class _Mamba(nn.Module):
    """Two selective layers over rows, the class read off behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(28, 64)
        self.layers = nn.ModuleList(_Selective(64) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x[:, -1])


class _LSTM(nn.Module):
    """Reads a picture row by row: an LSTM of 128 cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class _Attention(nn.Module):
    """A block of a transformer: normalized first, GELU, causal or not."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        parts = self.qkv(self.before(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(-1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(-1, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class _GPT(nn.Module):
    """Radford et al., 2019: predicts each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(_Attention(causal=True) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        places = self.places(torch.arange(CONTEXT))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


class _ViT(nn.Module):
    """Dosovitskiy et al., 2021 (arXiv:2010.11929): patches of 4 x 4 and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 65, WIDTH))
        self.blocks = nn.Sequential(*(_Attention(causal=False) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        first = self.first.expand(rows.shape[0], -1, -1)
        made = self.blocks(torch.cat([first, rows], dim=1) + self.places)
        return self.head(self.norm(made)[:, 0])
