"""Sums under masks while clients drop out, and what noise costs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

CLIENTS: Final = 8
FEATURES, CLASSES = 20, 3
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, weights: Array, shift: float) -> tuple[Array, Array]:
    """Return examples and their classes, which the weights say up to noise."""
    x = rng.normal(shift, 1.0, (rows, FEATURES)).astype(np.float32)
    scores = x @ weights + rng.gumbel(size=(rows, CLASSES))
    return x, scores.argmax(axis=1)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train in the open, under masks with two clients killed on the way, and with noise."""
    terminal.bring(Path(__file__).with_name("programs.py"))
    rng = np.random.default_rng(0)
    weights = 0.7 * rng.normal(size=(FEATURES, CLASSES))
    rows, rounds = (500, 20) if quick else (20_000, 30)
    parts = [draw(rows, rng, weights, 0.1 * rng.normal()) for _ in range(CLIENTS)]
    test = draw(5_000, rng, weights, 0.0)
    for number, (x, y) in enumerate(parts):
        np.savez(terminal.folder / f"client-{number}.npz", x=x, y=y)
    np.savez(terminal.folder / "test.npz", x=test[0], y=test[1])
    line = (
        f"--nodes server=1,client={CLIENTS} --times {rounds} "
        "--set client.slots.data.path=client-{i}.npz --set server.slots.test.path=test.npz"
    )
    plain = terminal.up(f"programs.py:Plain {line} --out plain")
    over = threading.Event()
    killer = threading.Thread(target=_kill_two, args=(terminal, over))
    killer.start()
    try:
        secure = terminal.up(f"programs.py:Secure {line} --out secure")
    finally:
        over.set()
        killer.join()
    noisy = terminal.up(f"programs.py:Noisy {line} --out noisy")
    best = reference(parts, test)
    masked = secure.series("accuracy")[-1]
    lost = plain.series("accuracy")[-1] - noisy.series("accuracy")[-1]
    epsilon = float(noisy.rounds[-1]["outputs"]["stats"]["epsilon"])
    fewest = min(len(each["responded"]) for each in secure.rounds)
    return Outcome(
        result=(
            f"accuracy {masked:.3f} under masks with {CLIENTS - fewest} of {CLIENTS} dropped out; "
            f"noise of epsilon {epsilon:.0f} costs {100 * lost:.1f} points"
        ),
        reference=f"scikit-learn, pooled: {best:.3f}",
        claims=[
            within("accuracy under masks is that of all examples", masked - best, -0.02, 0.02),
            Claim("two clients dropped out", fewest == CLIENTS - 2, f"{fewest} answered"),
            Claim(
                "the last round gave a model without them",
                bool(secure.rounds[-1]["ok"]),
                f"round {len(secure.rounds)}",
            ),
            within("the loss to noise is told and small", 100 * lost, -1, 15),
        ],
    )


def _kill_two(terminal: Terminal, over: threading.Event) -> None:
    """Kill two clients after the second round, as a crash does: without a word."""
    log = terminal.folder / "secure" / "nodes" / "server" / "daemon.log"
    while not over.wait(0.1):
        if log.exists() and "round=2 ok=True" in log.read_text("utf-8", "replace"):
            for number in (2, 5):
                pid = terminal.pid_of(f"secure/nodes/client-{number}/node.toml")
                os.kill(pid, signal.SIGKILL)
            return


def reference(parts: list[tuple[Array, Array]], test: tuple[Array, Array]) -> float:
    """Return the accuracy of scikit-learn's regression on all examples."""
    from sklearn.linear_model import LogisticRegression

    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return float(LogisticRegression(C=1e6, max_iter=1000).fit(x, y).score(*test))


JOB = Job(
    says=(
        "eight clinics, sums under masks (secure aggregation) while two are killed, and DPFedAvg "
        "with what its noise costs; scikit-learn on all examples"
    ),
    run=run,
)
