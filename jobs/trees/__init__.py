"""Three banks with loans of their own kind: boosted trees, beside LightGBM on all loans."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import within

COLUMNS: Final = 12
GAPS: Final = 0.1  # of the numbers of each column but the first
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, shift: float) -> tuple[Array, Array]:
    """Return loans and if they were lost: thresholds and products that no line tells apart."""
    x = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
    x[:, 0] += shift
    score = (
        1.5 * (x[:, 0] > 0.5)
        + x[:, 1] * x[:, 2]
        - 1.2 * (np.abs(x[:, 3]) < 0.4)
        + np.sin(2 * x[:, 4])
        - 0.8
    )
    y = (rng.random(rows) < 1 / (1 + np.exp(-2 * score))).astype(np.int64)
    gaps = rng.random(x.shape) < GAPS
    gaps[:, 0] = False
    x[gaps] = np.nan
    return x, y


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Grow trees at the banks, and from all loans in one place with LightGBM."""
    terminal.bring(Path(__file__).with_name("trees.py"))
    rng = np.random.default_rng(0)
    rows, rounds = (4_000, 15) if quick else (200_000, 40)
    parts = [draw(rows, rng, 0.7 * (bank - 1)) for bank in range(3)]
    for bank, (x, y) in enumerate(parts):
        np.savez(terminal.folder / f"bank-{bank}.npz", x=x, y=y)
    test, truth = draw(rows, rng, 0.0)
    np.savez(terminal.folder / "test.npz", x=test, y=truth)
    report = terminal.up(
        f"trees.py --nodes server=1,client=3 --times {rounds + 1} "
        "--set client.slots.data.path=bank-{i}.npz --set client.slots.data.missing=keep "
        "--set server.slots.test.path=test.npz --set server.slots.test.missing=keep"
    )
    terminal.bbnode("export -c up-out/nodes/server/node.toml --slot global -o trees.onnx")
    loss, accuracy = report.series("loss")[-1], report.series("accuracy")[-1]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    best_loss, best_accuracy = reference(x, y, test, truth, rounds)
    return Outcome(
        result=f"accuracy {accuracy:.3f}, cross-entropy {loss:.3f}",
        reference=f"LightGBM, pooled: {best_accuracy:.3f}, {best_loss:.3f}",
        claims=[
            within("accuracy is LightGBM's on all loans", accuracy - best_accuracy, -0.015, 0.015),
            within("cross-entropy is LightGBM's on all loans", loss / best_loss, 0, 1.05),
            within(
                "the exported file predicts as the server does",
                exported(terminal.folder / "trees.onnx", test, truth) - accuracy,
                -1e-6,
                1e-6,
            ),
        ],
    )


def reference(x: Array, y: Array, test: Array, truth: Array, rounds: int) -> tuple[float, float]:
    """Return cross-entropy and accuracy of LightGBM with the program's settings."""
    import lightgbm
    from sklearn.metrics import log_loss

    settings = {
        "objective": "binary", "num_leaves": 15, "learning_rate": 0.3, "verbosity": -1,
        "num_threads": 1, "deterministic": True, "force_row_wise": True,
    }  # fmt: skip
    chances = np.asarray(lightgbm.train(settings, lightgbm.Dataset(x, y), rounds).predict(test))
    return log_loss(truth, chances), float(((chances > 0.5) == truth).mean())


def exported(path: Path, test: Array, truth: Array) -> float:
    """Return the accuracy of an exported model in plain ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    chances = session.run(["probabilities"], {"x": test})[0]
    return float((chances.argmax(axis=1) == truth).mean())


JOB = Job(
    says=(
        "loans of three banks (600,000 rows, gaps, each bank of its own kind), boosted trees grown "
        "together; LightGBM on all loans in one place, and the exported file in ONNX Runtime"
    ),
    run=run,
)
