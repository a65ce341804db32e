"""Accuracy against epsilon: privacy of clients by the server's noise, and of examples by their own.

The paper has hundreds of thousands of users, so that noise is lost among them; here the same noise
is shared by few clients and by four times as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bbnode.components import epsilon_after
from bbnode.programs import DPFedAvg, DPSGDTraining, FederatedTraining
from reproduce._data import Examples, digits
from reproduce._federation import Federation
from reproduce.experiment import Claim, Experiment, Result, Table, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS: Final = 15
NOISES: Final = (1.0, 2.0, 4.0, 8.0)
FEW, MANY = 20, 80
BASE: Final[Mapping[str, Any]] = {"model": (64, 10), "deadline_s": 1e6}
CENTRAL: Final = {**BASE, "epochs": 5, "batch": 16, "learning_rate": 0.5}
LOCAL_CLIENTS: Final = 10
LOCAL: Final = {**BASE, "clients": LOCAL_CLIENTS, "epochs": 1, "batch": 48, "learning_rate": 2.0}
LOCAL_DELTA: Final = 1e-5  # Abadi et al.'s
TRAINED: Final = 1438  # digits of training
# Of an accuracy of 93 % on 359 digits of test.
ERROR: Final = float(np.sqrt(0.93 * 0.07 / 359))
# Abadi et al., 2016, section 5.2 and figure 4: test accuracy on MNIST at epsilon 8, 2 and 0.5.
MNIST: Final = {8.0: 0.97, 2.0: 0.95, 0.5: 0.90}


class Run(NamedTuple):
    """One training: noise multiplier (0: none), epsilon as told and by the library."""

    noise: float
    epsilon: float
    reference: float
    accuracy: float


def run(seed: int) -> Result:
    """Train with each noise, in both ways."""
    with TemporaryDirectory() as folder:
        data = digits(Path(folder), seed)
        central = {count: _central(data, count, seed) for count in (FEW, MANY)}
        local = _local(data, seed)
    tables = [
        _table(
            f"DPFedAvg, {count} clients, {ROUNDS} rounds, delta {_delta(count):.2g}",
            runs,
            "of the formula",
        )
        for count, runs in central.items()
    ]
    tables.append(
        _table(
            f"DP-SGD on {LOCAL_CLIENTS} clients, {ROUNDS} rounds, delta {LOCAL_DELTA:g}",
            local,
            "of the formula",
        )
    )
    tables.append(
        Table(
            "Abadi et al., figure 4: 60,000 examples of MNIST, one party",
            ["epsilon", "accuracy"],
            [[epsilon, accuracy] for epsilon, accuracy in MNIST.items()],
        )
    )
    return Result(tables, _claims(central, local), lambda figure: _draw(figure, central, local))


def _central(data: Examples, count: int, seed: int) -> list[Run]:
    settings: dict[str, Any] = {**CENTRAL, "clients": count}
    found = [_trained(FederatedTraining(**settings), data, seed, 0.0, 0.0)]
    for noise in NOISES:
        program = DPFedAvg(**settings, noise=noise, clip=1.0, epsilon=1e6, delta=_delta(count))
        wanted = epsilon_after(ROUNDS, noise=noise, delta=_delta(count))
        found.append(_trained(program, data, seed, noise, wanted))
    return found


def _local(data: Examples, seed: int) -> list[Run]:
    found = [_trained(FederatedTraining(**LOCAL), data, seed, 0.0, 0.0)]
    for noise in NOISES:
        program = DPSGDTraining(
            **LOCAL, example_noise=noise, example_epsilon=1e6, example_delta=LOCAL_DELTA
        )
        # Clients hold 143 or 144 examples: the most is spent by who has the fewest.
        count = TRAINED // LOCAL_CLIENTS
        steps, rate = ROUNDS * -(-count // LOCAL["batch"]), LOCAL["batch"] / count
        wanted = epsilon_after(steps, noise=noise, delta=LOCAL_DELTA, sampling=rate)
        found.append(_trained(program, data, seed, noise, wanted))
    return found


def _trained(
    program: FederatedTraining, data: Examples, seed: int, noise: float, reference: float
) -> Run:
    clients = [{"data": share} for share in data.shares(program.clients, "iid", seed=seed)]
    made = Federation(program, clients, {"test": data.tested}, seed=seed)
    (*_, last) = made.rounds(ROUNDS)
    epsilon = float(last["stats"].get("epsilon", 0.0))
    return Run(noise, epsilon, reference, float(last["accuracy"]))


def _delta(count: int) -> float:
    """Return the paper's delta for so many users: count^-1.1."""
    return float(count**-1.1)


def _table(title: str, runs: Sequence[Run], reference: str) -> Table:
    rows = [
        [each.noise, each.epsilon or None, each.reference or None, each.accuracy] for each in runs
    ]
    return Table(title, ["noise", "epsilon told", reference, "accuracy"], rows)


def _claims(central: Mapping[int, Sequence[Run]], local: Sequence[Run]) -> list[Claim]:
    few, many = ([runs[0].accuracy - each.accuracy for each in runs] for runs in central.values())
    noisy = [each for runs in (*central.values(), local) for each in runs[1:]]
    worst = max(abs(each.epsilon / each.reference - 1) for each in noisy)
    curves = [[each.accuracy for each in runs[1:]] for runs in (*central.values(), local)]
    return [
        within(
            f"{MANY} clients, noise {NOISES[0]:g}: what it costs in accuracy is within the error "
            "of the test, four standard errors",
            many[1],
            -4 * ERROR,
            4 * ERROR,
        ),
        within(
            f"noise {NOISES[-1]:g} costs {MANY} clients half of what it costs {FEW}, or less",
            many[-1] / few[-1],
            0,
            0.5,
        ),
        Claim(
            "accuracy falls with epsilon, of clients and of examples",
            all(curve[-1] < curve[0] for curve in curves),
            "; ".join(f"{curve[0]:.3f} to {curve[-1]:.3f}" for curve in curves),
        ),
        Claim(
            "nodes tell the epsilon that the accountant says of such rounds",
            worst < 1e-6,
            f"off by {worst:.1g} at most",
        ),
    ]


def _draw(figure: Figure, central: Mapping[int, Sequence[Run]], local: Sequence[Run]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for count, runs in central.items():
        _curve(axes[0], runs, f"{count} clients")
    _curve(axes[1], local, f"{LOCAL_CLIENTS} clients")
    axes[1].plot([*MNIST], [*MNIST.values()], "x", color="grey", label="Abadi et al., MNIST")
    for ax, title in zip(axes, ("a client: DPFedAvg", "an example: DP-SGD"), strict=True):
        ax.set(xscale="log", xlabel="epsilon", title=f"private is {title}")
        ax.legend(loc="lower right")
    axes[0].set_ylabel("accuracy on test digits")


def _curve(ax: Any, runs: Sequence[Run], label: str) -> None:
    plain, *noisy = runs
    (line,) = ax.plot(
        [each.epsilon for each in noisy], [each.accuracy for each in noisy], "o-", label=label
    )
    ax.axhline(plain.accuracy, ls="--", color=line.get_color(), lw=1, label=f"{label}, no privacy")


EXPERIMENT = Experiment(
    paper="McMahan et al., 2018, arXiv:1710.06963; Abadi et al., 2016, arXiv:1607.00133, figure 4",
    says="DPFedAvg and DP-SGD against epsilon: a linear model of scikit-learn's 1,797 digits and "
    "10 to 80 clients, for LSTMs of 763,430 users, and for MNIST",
    page="docs/methods/differential-privacy.md",
    run=run,
    methods=[
        "DPFedAvg",
        "DPFedAvg, noise",
        "DPFedAvg, epsilon",
        "DPFedAvg, both clip",
        "DP-SGD",
        "DP-SGD, noise",
        "DP-SGD, no clip",
    ],
)
