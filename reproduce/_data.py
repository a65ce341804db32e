"""Data of experiments: files that all nodes of a federation read, and each client's share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Settings = dict[str, Any]  # of one slot of one node

DIGITS_MAX = 16.0  # a pixel of scikit-learn's digits counts 0 .. 16 dots
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Examples:
    """Examples in files on disk: of training, which clients share, and of test, the server's."""

    train: Path
    test: Path

    @property
    def tested(self) -> Settings:
        """The settings of a slot with the examples of test."""
        return {"path": str(self.test)}

    def shares(
        self, clients: int, partition: str, *, seed: int = 0, alpha: float = 1.0
    ) -> list[Settings]:
        """Return each client's settings of the slot "data".

        `partition`, `seed` and `alpha` are those of `ArrayDataSource`: "iid"; "shards", two of the
        examples sorted by label (McMahan et al., 2017); "dirichlet" (Hsu et al., 2019); "quantity".
        """
        common = {
            "path": str(self.train), "partition": partition, "shards": clients,
            "seed": seed, "alpha": alpha,
        }  # fmt: skip
        return [{**common, "shard": client} for client in range(clients)]


def written(folder: Path, name: str, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Path:
    """Write examples as features "x" and labels "y"; return the path."""
    path = folder / f"{name}.npz"
    np.savez_compressed(path, x=x, y=y)  # which is read into memory: mapped rows cost more
    return path


def digits(folder: Path, seed: int = 0) -> Examples:
    """Write scikit-learn's 1,797 digits, 8 x 8 pixels from 0 to 1: 1,438 of training, 359 of test.

    The test has the same share of each class as the training.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / DIGITS_MAX).astype(np.float32), labels.astype(np.int64)
    x, x_test, y, y_test = train_test_split(
        x, y, test_size=int(len(y) * TEST_SHARE), random_state=seed, stratify=y
    )
    return Examples(written(folder, "train", x, y), written(folder, "test", x_test, y_test))
