"""A night of rounds, each of twenty minutes, on virtual time: real nodes and real components."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.compiler import Compiler
from bbnode.components import values
from bbnode.engine.steps import ExecutionFinished
from bbnode.programs import FederatedTraining
from bbnode.sim import MS, LinkModel, Network, S, SimNode, invariants
from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

CLIENTS: Final = 12
MINUTE: Final = 60 * S
TRAINING: Final = 20 * MINUTE
WARM: Final = 3  # rounds until each table has what it has in any round
CLASSES: Final = 4
FEATURES: Final = 20
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, weights: Array, shift: float) -> tuple[Array, Array]:
    """Return examples and their classes, which the weights say up to noise."""
    x = rng.normal(shift, 1.0, (rows, FEATURES)).astype(np.float32)
    scores = x @ weights + rng.gumbel(size=(rows, CLASSES))
    return x, scores.argmax(axis=1)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Let twelve clients train all night; one crashes and one is cut off in each third round."""
    rounds = 9 if quick else 36
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(FEATURES, CLASSES))
    parts = [draw(500, rng, weights, 0.2 * rng.normal()) for _ in range(CLIENTS)]
    x_test, y_test = draw(5_000, rng, weights, 0.0)
    for name, (x, y) in [
        *((f"client-{number}", part) for number, part in enumerate(parts)),
        ("test", (x_test, y_test)),
    ]:
        np.savez(terminal.folder / f"{name}.npz", x=x, y=y)
    network, server = _network(terminal)
    outcomes: list[dict[str, Any]] = []
    sizes: list[Mapping[str, int]] = []
    begun_ns = network.now_ns
    for number in range(rounds):
        if number % 3 == 1:
            _disturb(network, number)
        execution = server.invoke("server", {"tick": values.TRIGGER})
        network.run_until(partial(_is_over, server, execution))
        outcomes.append(server.outputs(execution))
        invariants.check_waits(network)
        network.run(until=network.now_ns + MINUTE)
        sizes.append(invariants.table_sizes(network))
    hours = (network.now_ns - begun_ns) / (60 * MINUTE)
    accuracies = [float(each["accuracy"]) for each in outcomes if "accuracy" in each]
    grown = [name for name in sizes[-1] if sizes[-1][name] > sizes[WARM][name]]
    best = reference(parts, x_test, y_test)
    return Outcome(
        result=f"accuracy {(accuracies or [0])[-1]:.3f} after {hours:.1f} virtual hours",
        reference=f"scikit-learn, pooled: {best:.3f}",
        claims=[
            Claim("every round gave a model", len(accuracies) == rounds, f"{len(accuracies)}"),
            within("a round takes twenty minutes of training", hours * 60 / rounds, 20, 32),
            within("accuracy is that of all examples", (accuracies or [0])[-1] - best, -0.01, 0.02),
            Claim("no table of a node grows over the night", not grown, ", ".join(grown) or "none"),
        ],
    )


def _network(terminal: Terminal) -> tuple[Network, SimNode]:
    program = FederatedTraining(
        model=(FEATURES, CLASSES), clients=CLIENTS, quorum=CLIENTS - 2, epochs=5,
        learning_rate=0.1, deadline_s=3600.0, metrics=("accuracy",),
    )  # fmt: skip
    compiled = Compiler().bind_all(program.bindings()).compile(program.build())
    network = Network(0, link=LinkModel(latency_ns=40 * MS, jitter_ns=20 * MS, loss=0.001))
    server = network.add(
        "server",
        compiled,
        ["server"],
        config={"test": {"path": str(terminal.folder / "test.npz")}},
    )
    for number in range(CLIENTS):
        path = str(terminal.folder / f"client-{number}.npz")
        network.add(
            f"client-{number}",
            compiled,
            ["client"],
            config={"data": {"path": path}},
            task_ns=TRAINING,
        )
    network.run(until=60 * MINUTE)  # to connect, and to load the data
    return network, server


def _disturb(network: Network, number: int) -> None:
    """Crash a client in the middle of its training, and cut another off for a while."""
    crashed, away = f"client-{number % CLIENTS}", f"client-{(number + 5) % CLIENTS}"
    now_ns = network.now_ns
    network.at(now_ns + 5 * MINUTE, network[crashed].checkpoint)
    network.at(now_ns + 7 * MINUTE, lambda: network.crash(crashed))
    network.at(now_ns + 9 * MINUTE, lambda: network.restart(crashed))
    network.at(now_ns + 3 * MINUTE, lambda: network.cut("server", away))
    network.at(now_ns + 15 * MINUTE, lambda: network.heal("server", away))


def _is_over(server: SimNode, execution: int) -> bool:
    return any(each.execution == execution for each in server.seen(ExecutionFinished))


def reference(parts: list[tuple[Array, Array]], x_test: Array, y_test: Array) -> float:
    """Return the accuracy of scikit-learn's regression on all examples."""
    from sklearn.linear_model import LogisticRegression

    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return float(LogisticRegression(C=1e6, max_iter=1000).fit(x, y).score(x_test, y_test))


JOB = Job(
    says=(
        "a night of rounds, each of twenty minutes, by twelve clients of whom some crash or "
        "are cut off, on virtual time; scikit-learn on all examples"
    ),
    run=run,
)
