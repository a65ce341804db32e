"""The training on a peer: how many epochs, by which loss and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bbnode.components import OnnxModelConfig
from bbnode.programs.composing import RoundPart

# Fields of `OnnxModelConfig` that a program says by arguments of its own.
_GIVEN = frozenset({"model", "loss", "losses", "learning_rate", "seed"})
_OF_NODES = frozenset({"check"})  # which each node says for itself
PASSED = tuple(f for f in dataclasses.fields(OnnxModelConfig) if f.name not in _GIVEN | _OF_NODES)

if TYPE_CHECKING:
    _ModelSettings = RoundPart
else:
    _ModelSettings = dataclasses.make_dataclass(
        "_ModelSettings",
        [
            (each.name, each.type, dataclasses.field(default=each.default, kw_only=True))
            for each in PASSED
        ],
        bases=(RoundPart,),
        frozen=True,
    )


@dataclass(frozen=True)
class LocalTraining(_ModelSettings):
    """The training on each peer.

    Every other setting of `OnnxModel` is one too, by its name: `optimizer`, `momentum`, `schedule`,
    `clip_norm`, `trainable`, `lora` and so on (`bbnode components show bbnode.OnnxModel` lists
    them).
    """

    slot: ClassVar[str] = "train"

    epochs: int = 1
    batch: int = 32
    learning_rate: float = 0.1
    # One of `bbnode.components.LOSSES`, of the first of `outputs`; or of several outputs, the first
    # of which metrics take: {"logits": "softmax_cross_entropy", "aux": ("mse", 0.3)}, weighted.
    loss: str | Mapping[str, str | tuple[str, float]] = "softmax_cross_entropy"
    seed: int = 0  # of the weights of an MLP, and of Dropout in training mode

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...
