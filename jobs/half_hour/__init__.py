"""Half an hour of rounds of five minutes: no deadline of a second's round cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

CLIENTS: Final = 3
ROUNDS: Final = 6
PIXELS: Final = 784
CLASSES: Final = 10
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, prototypes: Array) -> tuple[Array, Array]:
    """Return noisy pictures of ten things, each of which has three looks, and what they show."""
    y = rng.integers(CLASSES, size=rows)
    looks = prototypes[y, rng.integers(3, size=rows)]
    x = looks + rng.normal(scale=2.5, size=looks.shape)
    return x.astype(np.float32), y


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Find out how long an epoch takes, and train for so many that a round takes its time."""
    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("digits.py"))
    wanted_s = 35.0 if quick else 300.0
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(CLASSES, 3, PIXELS))
    parts = [draw(8_000, rng, prototypes) for _ in range(CLIENTS)]
    test = draw(4_000, rng, prototypes)
    for number, (x, y) in enumerate(parts):
        np.savez(folder / f"client-{number}.npz", x=x, y=y)
    np.savez(folder / "test.npz", x=test[0], y=test[1])
    line = (
        "digits.py --nodes server=1,client=3 --set client.slots.data.path=client-{i}.npz "
        "--set server.slots.test.path=test.npz"
    )
    first = terminal.up(f"{line} --times 2 --arg epochs=2 --out first")
    epochs = max(1, round(2 * wanted_s / first.rounds[-1]["seconds"]))
    report = terminal.up(f"{line} --times {2 if quick else ROUNDS} --arg epochs={epochs}")
    seconds = [each["seconds"] for each in report.rounds]
    accuracies = report.series("accuracy")
    best = reference(parts, test)
    answered = [len(each["responded"]) for each in report.rounds]
    return Outcome(
        result=f"accuracy {accuracies[-1]:.3f}; rounds of {np.mean(seconds):.0f} s",
        reference=f"scikit-learn's network, pooled: {best:.3f}",
        claims=[
            within("a round takes its time", min(seconds) / wanted_s, 0.2 if quick else 0.5, 10),
            Claim("every client answers every round", set(answered) == {CLIENTS}, f"{answered}"),
            within("accuracy is that of all pictures", accuracies[-1] - best, -0.03, 0.05),
        ],
    )


def reference(parts: list[tuple[Array, Array]], test: tuple[Array, Array]) -> float:
    """Return the accuracy of scikit-learn's network of the same size on all pictures."""
    from sklearn.neural_network import MLPClassifier

    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    network = MLPClassifier(
        (256,), solver="sgd", learning_rate_init=0.01, batch_size=64, early_stopping=True,
        random_state=0,
    )  # fmt: skip
    return float(network.fit(x, y).score(*test))


JOB = Job(
    says=(
        "half an hour of six rounds, of five minutes of training each, by three clients; "
        "scikit-learn's network on all pictures"
    ),
    run=run,
)
