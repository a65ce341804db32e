"""Trees that many clients grew, as those of one round of boosting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bbnode.components.aggregators.collecting import Told
from bbnode.components.aggregators.pooling import PoolingAggregator, PoolingConfig, need_tensor
from bbnode.components.models.trees import COLUMNS, checked_trees, nodes_of, scaled
from bbnode.components.registry import register_component
from bbnode.ir import types
from bbnode.ir.decoding import shown
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Metadata, Value


@dataclass(frozen=True, kw_only=True)
class PooledTreesConfig(PoolingConfig):
    """Settings of `PooledTrees`; most are as of `BoostedTrees`.

    Attributes:
        features: numbers of an example.
        leaves: of one tree, at most.
        outputs: trees of one round of boosting.
        trees: for each output, that one client may grow in a round.
        max_leaf: the largest absolute value of a leaf that is believed.
    """

    features: int
    leaves: int = 31
    outputs: int = 1
    trees: int = 1
    max_leaf: float = 1e6


@register_component
class PooledTrees(PoolingAggregator):
    """Puts the clients' trees side by side, each client's scaled by its share of the examples.

    Together they are the mean of what the clients would add to the model: bagging. Answers are
    composites of trees, float32 [P] as of `BoostedTrees`, and Metadata with `num_samples`.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.PooledTrees"
    Config: ClassVar[type] = PooledTreesConfig
    storage: ClassVar[dict[str, TypeNode]] = {"*": types.TENSOR_FLOAT}
    answers: ClassVar[TypeNode | tuple[TypeNode, ...]] = (types.TENSOR_FLOAT, types.METADATA)
    config: PooledTreesConfig

    def __init__(self, config: PooledTreesConfig) -> None:
        super().__init__(config)
        c = config
        self.require(
            min(c.features, c.outputs, c.trees, c.leaves - 1) >= 1,
            "features, outputs and trees are 1 or more, leaves 2 or more",
        )
        self.require(0 < c.max_leaf < math.inf, f"max_leaf {c.max_leaf} is not positive")

    def checked(self, tensor: Value, metadata: Metadata) -> None:
        """Check a client's trees, and what they are grown on."""
        c = self.config
        told = need_tensor(tensor, np.float32)
        of_one = nodes_of(c.leaves) * COLUMNS
        if told.ndim != 1 or not 0 < told.size <= c.trees * c.outputs * of_one:
            raise ValueError(
                f"its tensor has the shape {list(told.shape)}; {c.trees} tree(s) for each of "
                f"{c.outputs} output(s) are at most {c.trees * c.outputs * of_one} numbers"
            )
        checked_trees(told, c.features, c.leaves, c.outputs, c.max_leaf)
        samples = metadata.get("num_samples")
        if type(samples) is not int or not 1 <= samples <= c.max_samples:
            raise ValueError(
                f"num_samples is {shown(samples)}, not an integer in 1 .. "
                f"{c.max_samples} (max_samples)"
            )
        loss = metadata.get("loss", 0.0)
        if type(loss) is not float or not math.isfinite(loss):
            raise ValueError(f"loss is {shown(loss)}, not a finite number")

    def result_checked(self, tensor: Value) -> None:
        """Check saved trees."""
        c = self.config
        checked_trees(need_tensor(tensor, np.float32), c.features, c.leaves, c.outputs, c.max_leaf)

    def sort(self, tensor: Any) -> tuple[int, ...]:
        """Return nothing: clients may grow different numbers of trees."""
        return ()

    def merge(self, parts: Sequence[tuple[Any, Metadata]]) -> tuple[npt.NDArray[Any], int, Told]:
        """Return all trees, and the clients' mean `loss` before them."""
        c = self.config
        samples = [int(metadata["num_samples"]) for _, metadata in parts]
        total = sum(samples)
        table = [
            scaled(tensor.reshape(-1, nodes_of(c.leaves), COLUMNS), count / total)
            for (tensor, _), count in zip(parts, samples, strict=True)
        ]
        told: Told = {"trees": sum(map(len, table))}
        if all("loss" in metadata for _, metadata in parts):
            losses = (float(metadata["loss"]) for _, metadata in parts)
            weighted = zip(losses, samples, strict=True)
            told["loss"] = math.fsum(loss * (n / total) for loss, n in weighted)
        return np.concatenate(table).reshape(-1), total, told
