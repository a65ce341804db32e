"""A server that is killed in the middle of a round and comes back as another version, twice."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from bbnode.daemon import paths
from bbnode.daemon.control.client import ControlClient
from jobs.job import Job, Outcome
from jobs.torch_class import free_port
from jobs.typed import CommandFailed, Terminal
from jobs.upgrade.net import CLASSES, FEATURES, network
from reproduce.experiment import Claim, within

CLIENTS: Final = 3
SERVER: Final = "server/node.toml"
PATIENCE_S: Final = 300.0
# Arguments of the versions: another learning rate, then one more layer.
VERSIONS: Final = (
    "--arg learning_rate=0.02",
    "--arg learning_rate=0.05",
    "--arg learning_rate=0.05 --arg model=deeper.onnx",
)
Array = npt.NDArray[Any]


def draw(
    rows: int, rng: np.random.Generator, teacher: tuple[Array, Array], shift: float
) -> tuple[Array, Array]:
    """Return examples and their classes, which a network says up to noise."""
    x = rng.normal(shift, 1.0, (rows, FEATURES)).astype(np.float32)
    scores = 3 * np.tanh(x @ teacher[0]) @ teacher[1]
    return x, (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Kill the server twice, give it the next version, and let the clients follow."""
    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("program.py"))
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(FEATURES, 8)) / np.sqrt(FEATURES), rng.normal(size=(8, CLASSES))
    rows, each, epochs = (10_000, 4, 4) if quick else (100_000, 10, 4)
    parts = [draw(rows, rng, teacher, 0.3 * (number - 1)) for number in range(CLIENTS)]
    test = draw(10_000, rng, teacher, 0.0)
    for name, (x, y) in [*((f"client-{n}", p) for n, p in enumerate(parts)), ("test", test)]:
        np.savez(folder / f"{name}.npz", x=x, y=y)
    for name, deeper in (("model", False), ("deeper", True)):
        onnx.save(network(deeper=deeper), folder / f"{name}.onnx")
    clients = [f"client-{number}/node.toml" for number in range(CLIENTS)]
    compiled(terminal, epochs, 0)
    make_server(terminal)
    with ExitStack() as until_the_end:
        with terminal.node(SERVER) as server:
            join(terminal)
            processes = [until_the_end.enter_context(terminal.node(each)) for each in clients]
            kill_in_round(terminal, server, each)
        made = [history(terminal)]
        compiled(terminal, epochs, 1)
        with terminal.node(SERVER) as server:
            follow(terminal, clients)
            kill_in_round(terminal, server, each)
        made.append(history(terminal))
        compiled(terminal, epochs, 2)
        with terminal.node(SERVER) as server:
            taken = status(terminal, SERVER)["upgrade"]["parameters"]["global"]["taken"]
            follow(terminal, clients)
            rounds_more(terminal, each)
            terminal.bbnode(f"export -c {SERVER} -o trained.onnx")
            made.append(history(terminal))
        same = all(process.poll() is None for process in processes)
        run_by = {status(terminal, config)["artifact_sha256"] for config in clients}
    rounds = made[-1]
    terminal.moved_bytes += sum(one["bytes_in"] + one["bytes_out"] for one in rounds)
    losses = [float(one["metrics"]["loss"]) for one in rounds]
    versions = [one["artifact"] for one in rounds]
    # Where the second and the third version begin, as indices of rounds.
    seconds = [len(each) for each in made[:-1]]
    old, new = weights(folder / "model.onnx"), weights(folder / "trained.onnx")
    accuracy = float(rounds[-1]["metrics"]["accuracy"])
    best = reference(parts, test)
    return Outcome(
        result=f"accuracy {accuracy:.4f} after {len(rounds)} rounds of three versions",
        reference=f"scikit-learn's network, pooled: {best:.4f}",
        claims=[
            Claim(
                "no round is lost but those in which the server is killed, and rounds count on",
                [one["round"] for one in rounds] == [*range(1, len(rounds) + 1)]
                and [len(set(versions[: n + 1])) for n in seconds] == [2, 3]
                and [len(set(versions[:n])) for n in seconds] == [1, 2]
                and all(one["ok"] for one in rounds),
                f"{len(rounds)} rounds; killed after {' and '.join(map(str, seconds))}",
            ),
            within(
                "the loss right after an upgrade is near that before",
                max(losses[n] / losses[n - 1] for n in seconds), 0, 1.1,
            ),
            Claim(
                "the deeper model takes over every weight that there was",
                sorted(taken) == sorted(old) and float(np.abs(new["more.weight"]).max()) > 1e-3,
                f"{len(taken)} of {len(new)}, and trains its own",
            ),
            Claim(
                "clients stay the same processes, and run the last version in the end",
                same and run_by == {versions[-1]} and len(rounds[-1]["responded"]) == CLIENTS,
                f"{len(rounds[-1]['responded'])} answered the last round",
            ),
            within("accuracy is that of all examples", accuracy - best, -0.02, 0.02),
        ],
    )  # fmt: skip


def compiled(terminal: Terminal, epochs: int, version: int) -> None:
    """Put a version of the program in place."""
    arguments = f"--arg epochs={epochs} {VERSIONS[version]}"
    terminal.bbnode(f"compile program.py {arguments} -o artifact.onnx")


def make_server(terminal: Terminal) -> None:
    """Make the node that makes rounds once all clients are there."""
    terminal.bbnode(
        "init server --artifact artifact.onnx --target server "
        f"--listen /ip4/127.0.0.1/tcp/{free_port()} --set slots.test.path=test.npz"
    )
    with (terminal.folder / SERVER).open("a", encoding="utf-8") as config:
        config.write(
            '\n[[invoke]]\ntarget = "server"\ninputs = { tick = "trigger" }\ntimes = 0\n'
            f'wait_for = {{ class = "client", peers = {CLIENTS} }}\n'
        )


def join(terminal: Terminal) -> None:
    """Let the clients join with a ticket of the server."""
    printed = terminal.bbnode(f"invite --target client --uses {CLIENTS} -c {SERVER}")
    ticket = next(line for line in printed.splitlines() if line.startswith("bbnode1:"))
    (terminal.folder / "ticket").write_text(ticket, "utf-8")
    for number in range(CLIENTS):
        terminal.bbnode(
            f"join @ticket --dir client-{number} --yes --no-run "
            f"--set slots.data.path=client-{number}.npz"
        )


def follow(terminal: Terminal, clients: list[str]) -> None:
    """Let the clients take the program that the server offers. Raises CommandFailed."""
    for config in clients:
        until_s = time.monotonic() + PATIENCE_S
        while not status(terminal, config)["offers"]:
            if time.monotonic() > until_s:
                raise CommandFailed(f"{config} is offered no upgrade")
            time.sleep(0.2)
        terminal.bbnode(f"upgrade --yes -c {config}")


def kill_in_round(terminal: Terminal, server: subprocess.Popen[bytes], after: int) -> None:
    """Kill the server in the middle of a round, as a crash does: without a word."""
    time.sleep(rounds_more(terminal, after) / 2)
    terminal.show(f"$ kill -9 {server.pid}")
    server.kill()
    server.wait()


def rounds_more(terminal: Terminal, count: int) -> float:
    """Wait for so many more rounds, and that another begins; return the seconds of the last."""
    seconds: list[float] = []
    for event in events(terminal, "round_started", "round_finished"):
        if event["type"] == "round_finished":
            seconds.append(event["seconds"])
        elif len(seconds) >= count:
            break
    return seconds[-1]


def events(terminal: Terminal, *kinds: str) -> Iterator[dict[str, Any]]:
    """Return what the server says from now on. Raises CommandFailed."""
    socket = paths.control_socket(terminal.folder / "server" / "state")
    with ControlClient(socket, timeout_s=PATIENCE_S) as client:
        for line in client.stream("/v1/events", {"type": list(kinds)}):
            yield line["event"]
    raise CommandFailed("the server ended")


def history(terminal: Terminal) -> list[dict[str, Any]]:
    """Return the server's rounds."""
    told = json.loads(terminal.bbnode(f"rounds -c {SERVER} --last 10000 --json"))
    return list(told["rounds"])


def status(terminal: Terminal, config: str) -> dict[str, Any]:
    """Return what a node says of itself."""
    return dict(json.loads(terminal.bbnode(f"status -c {config} --json")))


def weights(path: Path) -> dict[str, Array]:
    """Return the weights of a model."""
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def reference(parts: list[tuple[Array, Array]], test: tuple[Array, Array]) -> float:
    """Return the accuracy of scikit-learn's network on all examples."""
    from sklearn.neural_network import MLPClassifier

    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    network = MLPClassifier((64,), early_stopping=True, random_state=0)
    return float(network.fit(x, y).score(*test))


JOB = Job(
    says=(
        "a server that is killed in the middle of a round and comes back as another version, twice "
        "(a learning rate, a layer), while its clients stay and follow; scikit-learn on all "
        "examples"
    ),
    run=run,
)
