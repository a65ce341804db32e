"""Tables of five hospitals, as hospitals have them: holes, other orders, a missing outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NUMBERS: Final = ("age", "pressure", "cholesterol", "bmi", "glucose")
WARDS: Final = ("emergency", "surgery", "ward")
OUTCOMES: Final = ("home", "longer", "transfer")
MISSING: Final = 0.05  # of each number, marked in the way of the site
MARKS: Final = ("", "NA", "NULL", "", "n/a")
SCALES: Final = {"age": (58, 17), "pressure": (131, 19), "cholesterol": (5.2, 1.1),
                 "bmi": (27, 5), "glucose": (6.1, 1.6)}  # fmt: skip
# Of the numbers as deviations from their means, smoker, and the wards: what an outcome depends on.
WEIGHTS: Final = np.array(
    [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
     [0.9, 0.4, 0.1, 0.5, 0.3, 0.7, 0.4, 0.2, -0.6],
     [1.3, -0.5, 0.2, -0.2, 0.8, 0.2, 1.1, -0.7, -0.4]]
)  # fmt: skip
BIAS: Final = np.array([0.6, 0.0, -0.9])

Columns = dict[str, npt.NDArray[Any]]


def draw(rows: int, seed: int, shift: float) -> Columns:
    """Return columns of so many stays; `shift` moves the patients of a site, in deviations."""
    rng = np.random.default_rng(seed)
    z = rng.normal(shift, 1.0, (rows, len(NUMBERS)))
    smoker = rng.random(rows) < 0.25
    ward = rng.integers(len(WARDS), size=rows)
    features = np.concatenate([z, smoker[:, None], np.eye(len(WARDS))[ward]], axis=1)
    scores = features @ WEIGHTS.T + BIAS + rng.gumbel(size=(rows, len(OUTCOMES)))
    columns: Columns = {
        name: np.round(mean + deviation * z[:, at], 2)
        for at, (name, (mean, deviation)) in enumerate(SCALES.items())
    }
    columns["smoker"] = np.where(smoker, "yes", "no")
    columns["ward"] = np.array(WARDS)[ward]
    columns["outcome"] = np.array(OUTCOMES)[scores.argmax(axis=1)]
    return columns


def write(path: Path, columns: Columns, order: list[str], mark: str, seed: int) -> None:
    """Write a table with its columns in an order, and `mark` for what nobody measured."""
    rng = np.random.default_rng(seed)
    rows = len(columns["outcome"])
    cells = []
    for name in order:
        text = columns[name].astype(str).astype(object)
        if name in NUMBERS:
            text[rng.random(rows) < MISSING] = mark
        cells.append(text)
    lines = (",".join(row) for row in zip(*cells, strict=True))
    path.write_text("\n".join([",".join(order), *lines]) + "\n", "utf-8")


def make(folder: Path, rows: int, seed: int = 0) -> None:
    """Write site-0.csv to site-4.csv of `rows` stays each, and test.csv."""
    names = [*SCALES, "smoker", "ward", "outcome"]
    for site in range(5):
        columns = draw(rows, seed + site, shift=0.3 * (site - 2))
        if site == 4:  # this one transfers nobody
            stays = columns["outcome"] != OUTCOMES[2]
            columns = {name: values[stays] for name, values in columns.items()}
        order = list(np.random.default_rng(seed + site).permutation(names)) if site > 2 else names
        write(folder / f"site-{site}.csv", columns, order, MARKS[site], seed + 10 + site)
    columns = draw(max(2000, rows // 4), seed + 5, shift=0.0)
    write(folder / "test.csv", columns, names, "NA", seed + 20)
