"""Eight laptops that train without rounds: three sleep and wake, one is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bbnode.daemon import paths
from bbnode.daemon.control.client import ControlClient
from jobs.job import Job, Outcome
from jobs.typed import CommandFailed, Terminal
from reproduce.experiment import Claim, within

LAPTOPS: Final = 8
SLEEPERS: Final = (1, 4, 6)
KILLED: Final = 3
FEATURES, CLASSES = 20, 3
PATIENCE_S: Final = 900.0  # of a busy machine; two minutes on an idle one
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, weights: Array, shift: float) -> tuple[Array, Array]:
    """Return examples and their classes, which the weights say up to noise."""
    x = rng.normal(shift, 1.0, (rows, FEATURES)).astype(np.float32)
    scores = x @ weights + rng.gumbel(size=(rows, CLASSES))
    return x, scores.argmax(axis=1)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Let all train, put three to sleep, kill one, wake them, start it again."""
    terminal.bring(Path(__file__).with_name("laptops.py"))
    rng = np.random.default_rng(0)
    weights = 0.7 * rng.normal(size=(FEATURES, CLASSES))
    rows, steps = (2_000, 15) if quick else (50_000, 60)
    parts = [draw(rows, rng, weights, 0.2 * rng.normal()) for _ in range(LAPTOPS)]
    test = draw(5_000, rng, weights, 0.0)
    for number, (x, y) in enumerate(parts):
        np.savez(terminal.folder / f"laptop-{number}.npz", x=x, y=y)
    np.savez(terminal.folder / "test.npz", x=test[0], y=test[1])
    with terminal.running(
        f"up laptops.py --nodes server=1,client={LAPTOPS} --times 0 "
        "--set client.slots.data.path=laptop-{i}.npz --set server.slots.test.path=test.npz",
        nodes=1 + LAPTOPS,
    ):
        node = "up-out/nodes/client-{}/node.toml".format
        awake = steps_of(terminal, steps)
        sleepers = [terminal.pid_of(node(number)) for number in SLEEPERS]
        for pid in sleepers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(terminal.pid_of(node(KILLED)), signal.SIGKILL)
        asleep = steps_of(terminal, steps)
        for pid in sleepers:
            os.kill(pid, signal.SIGCONT)
        with terminal.running(f"run -c {node(KILLED)}", nodes=1):
            before = [made(terminal, node(number)) for number in range(LAPTOPS)]
            together = steps_of(terminal, 2 * steps)
            after = [made(terminal, node(number)) for number in range(LAPTOPS)]
    best = reference(parts, test)
    accuracy = together.accuracy
    stale = max(awake.staleness, asleep.staleness, together.staleness)
    return Outcome(
        result=f"accuracy {accuracy:.3f} at version {together.version}; staleness up to {stale}",
        reference=f"scikit-learn, pooled: {best:.3f}",
        claims=[
            within("accuracy is that of all examples", accuracy - best, -0.02, 0.02),
            Claim(
                "the server steps on while half of the laptops are away",
                asleep.version >= awake.version + steps,
                f"versions {awake.version} to {asleep.version}",
            ),
            Claim(
                "all eight train again when they are back",
                all(new > old for old, new in zip(before, after, strict=True)),
                f"turns {before} to {after}",
            ),
        ],
    )


@dataclass(frozen=True)
class Steps:
    """The last of some steps: the version, how old updates were at most, the accuracy."""

    version: int
    staleness: int
    accuracy: float


def steps_of(terminal: Terminal, count: int) -> Steps:
    """Return what the server says after so many steps more. Raises CommandFailed."""
    state = terminal.folder / "up-out" / "nodes" / "server" / "state"
    until_s, versions, staleness = time.monotonic() + PATIENCE_S, [], 0
    with ControlClient(paths.control_socket(state), timeout_s=PATIENCE_S) as client:
        for line in client.stream("/v1/events", {"type": ["app_event"]}):
            topic, value = line["event"]["topic"], line["event"]["value"]
            if topic == "version":
                versions.append(int(value))
            elif topic == "stats":
                staleness = max(staleness, int(value["max_staleness"]))
            elif topic == "accuracy" and len(versions) > count:
                return Steps(versions[-1], staleness, float(value))
            if time.monotonic() > until_s:
                break
    raise CommandFailed(f"the server made {len(versions)} steps of {count}")


def made(terminal: Terminal, config: str) -> int:
    """Return how many turns a laptop has made."""
    told = json.loads(terminal.bbnode(f"rounds -c {config} --last 1 --json"))
    return int(told["invoke"][0]["done"])


def reference(parts: list[tuple[Array, Array]], test: tuple[Array, Array]) -> float:
    """Return the accuracy of scikit-learn's regression on all examples."""
    from sklearn.linear_model import LogisticRegression

    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return float(LogisticRegression(C=1e6, max_iter=1000).fit(x, y).score(*test))


JOB = Job(
    says=(
        "eight laptops train without rounds (FedBuff) while three sleep and wake and one is killed "
        "and comes back; scikit-learn on all examples"
    ),
    run=run,
)
