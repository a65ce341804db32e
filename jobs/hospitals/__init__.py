"""Five hospitals with tables of their own: the outcome of a stay by logistic regression."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.hospitals import data
from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import within

SETTINGS = (
    "--set CLASS.slots.SLOT.label=outcome --set CLASS.slots.SLOT.missing=mean "
    """--set 'CLASS.slots.SLOT.missing_words=["n/a"]' """
    """--set 'CLASS.slots.SLOT.one_hot=["ward"]' """
    """--set 'CLASS.slots.SLOT.categories={smoker = ["no", "yes"], """
    """ward = ["emergency", "surgery", "ward"], outcome = ["home", "longer", "transfer"]}' """
)


def settings(peer_class: str, slot: str) -> str:
    """Return the settings of a slot of data: what every site says of its table."""
    return SETTINGS.replace("CLASS", peer_class).replace("SLOT", slot)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Learn at the sites, and from all tables in one place with scikit-learn."""
    terminal.bring(Path(__file__).with_name("hospitals.py"))
    data.make(terminal.folder, rows=2_000 if quick else 40_000)
    sites = (
        "--nodes server=1,client=5 --set client.slots.data.path=site-{i}.csv "
        "--set server.slots.test.path=test.csv "
        + settings("client", "data")
        + settings("server", "test")
    )
    statistics = (
        "--set client.slots.data.statistics=statistics-{i}.json "
        "--set server.slots.test.statistics=statistics-server.json "
    )
    terminal.up(
        "bbnode.programs:FederatedStatistics --arg clients=5 --arg test=true --times 1 "
        "--arg 'data=\"bbnode.TableDataSource\"' --out statistics " + sites + statistics
    )
    report = terminal.up(
        f"hospitals.py --times {20 if quick else 30} "
        "--best loss --mode min --set client.slots.data.standardize=federated "
        "--set server.slots.test.standardize=federated " + sites + statistics
    )
    losses, accuracies = report.series("loss"), report.series("accuracy")
    best = int(np.argmin(losses))
    loss, accuracy = reference(terminal.folder)
    return Outcome(
        result=f"accuracy {accuracies[best]:.3f}, cross-entropy {losses[best]:.3f}",
        reference=f"scikit-learn, pooled: {accuracy:.3f}, {loss:.3f}",
        claims=[
            within(
                "cross-entropy is that of all tables in one place", losses[best] / loss, 0, 1.02
            ),
            within("and so is accuracy", accuracies[best] - accuracy, -0.01, 0.02),
        ],
    )


def reference(folder: Path) -> tuple[float, float]:
    """Return cross-entropy and accuracy of scikit-learn's regression on all tables together."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    parts = [_read(folder / f"site-{site}.csv") for site in range(5)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    model = LogisticRegression(C=1e6, max_iter=1000).fit((x - mean) / deviation, y)
    test, truth = _read(folder / "test.csv")
    chances = model.predict_proba((test - mean) / deviation)
    return log_loss(truth, chances), float((chances.argmax(axis=1) == truth).mean())


def _read(path: Path) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return a table as scikit-learn wants it; a hole is the mean of its column at the site."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = np.array(
        [[np.nan if row[n] in data.MARKS else float(row[n]) for n in data.NUMBERS] for row in rows]
    )
    numbers = np.where(np.isnan(numbers), np.nanmean(numbers, axis=0), numbers)
    smoker = np.array([[row["smoker"] == "yes"] for row in rows])
    wards = np.array([[row["ward"] == ward for ward in data.WARDS] for row in rows])
    outcome = np.array([data.OUTCOMES.index(row["outcome"]) for row in rows])
    return np.concatenate([numbers, smoker, wards], axis=1).astype(np.float64), outcome


JOB = Job(
    says=(
        "tables of five hospitals (200,000 rows; holes, other orders of columns, an outcome that "
        "one site lacks), logistic regression by FedAvg; scikit-learn on all rows in one place"
    ),
    run=run,
)
