"""Clients that train a class of PyTorch beside clients that have ONNX Runtime alone."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import Claim, within

CLIENTS: Final = 4
BY_TORCH: Final = (0, 2)
FEATURES, CLASSES = 16, 4
BATCH: Final = 50  # as the program has it
RATE: Final = 0.1
Array = npt.NDArray[Any]


def draw(rows: int, rng: np.random.Generator, weights: Array, shift: float) -> tuple[Array, Array]:
    """Return examples and their classes, which no line tells apart."""
    x = rng.normal(shift, 1.0, (rows, FEATURES)).astype(np.float32)
    return x, np.asarray((np.tanh(x @ weights[0]) @ weights[1]).argmax(axis=1))


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train with clients of both kinds, with ONNX clients alone, and on all examples by PyTorch."""
    import torch

    import bbnode.torch
    from jobs.torch_class.net import Net

    folder, here = terminal.folder, Path(__file__).parent
    terminal.bring(here / "program.py", here / "net.py")
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(FEATURES, 8)), rng.normal(size=(8, CLASSES))
    rows, rounds = (1_500, 8) if quick else (25_000, 20)
    parts = [draw(rows, rng, weights, 0.2 * (number - 1.5)) for number in range(CLIENTS)]
    test = draw(5_000, rng, weights, 0.0)
    for name, (x, y) in [*((f"client-{n}", p) for n, p in enumerate(parts)), ("test", test)]:
        np.savez(folder / f"{name}.npz", x=x, y=y)
    torch.manual_seed(0)
    net = Net(FEATURES, classes=CLASSES)
    model = bbnode.torch.export(net, torch.zeros(2, FEATURES))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    alike = terminal.up(
        f"program.py --nodes server=1,client={CLIENTS} --times {rounds} "
        "--set client.slots.data.path=client-{i}.npz --set server.slots.test.path=test.npz"
    )
    outputs, counts = mixed(terminal, rounds)
    terminal.bbnode("export -c server/node.toml --slot global -o trained.onnx")
    accuracy, loss = outputs[-1]["accuracy"], outputs[-1]["loss"]
    best = reference(net, parts, test, rounds)
    again = Net(FEATURES, classes=CLASSES)
    bbnode.torch.load_weights(again, folder / "trained.onnx")
    apart = max(
        abs(one["loss"] / other - 1)
        for one, other in zip(outputs, alike.series("loss"), strict=True)
    )
    return Outcome(
        result=f"accuracy {accuracy:.4f}, cross-entropy {loss:.4f}",
        reference=(
            f"ONNX clients alone: {alike.series('accuracy')[-1]:.4f}, "
            f"{alike.series('loss')[-1]:.4f}; PyTorch, pooled: {best:.4f}"
        ),
        claims=[
            Claim("every client answers every round", set(counts) == {CLIENTS}, f"{counts}"),
            within("every round's loss is that of ONNX clients alone", apart, 0, 0.005),
            within("accuracy is that of all examples", accuracy - best, -0.02, 0.02),
            within(
                "the server's model in PyTorch is as good",
                accuracy_of(again, test) - accuracy,
                -1e-3,
                1e-3,
            ),
        ],
    )


def mixed(terminal: Terminal, rounds: int) -> tuple[list[dict[str, float]], list[int]]:
    """Return what each round gave with clients of both kinds, and how many answers it had."""
    terminal.bbnode("compile program.py -o by-onnx.onnx")
    terminal.bbnode("compile program.py --arg by_torch=true -o by-torch.onnx")
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    terminal.bbnode(
        f"init server --artifact by-onnx.onnx --target server --listen {address} "
        "--set slots.test.path=test.npz"
    )
    peer = terminal.bbnode("id -c server/node.toml").strip()
    configs = ["server/node.toml"]
    for number in range(CLIENTS):
        artifact = "by-onnx.onnx --target client"
        if number in BY_TORCH:
            artifact = "by-torch.onnx --target client --set slots.local.module=net:Net"
        terminal.bbnode(
            f"init client-{number} --artifact {artifact} --bootstrap {address}/p2p/{peer} "
            f"--set slots.data.path=client-{number}.npz"
        )
        configs.append(f"client-{number}/node.toml")
    # Where `net` is found by the nodes that import it.
    terminal.environment["PYTHONPATH"] = str(terminal.folder)
    outputs, counts = [], []
    with ExitStack() as stack:
        for config in configs:
            stack.enter_context(terminal.node(config))
        terminal.bbnode(f"wait --peers {CLIENTS} --class client -c server/node.toml")
        for _ in range(rounds):
            printed = terminal.bbnode(
                "invoke server -i tick=trigger --timeout 600 -c server/node.toml --json"
            )
            outputs.append(json.loads(printed)["outputs"])
            counts.append(int(outputs[-1]["stats"]["contributors"]))
    return outputs, counts


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def reference(
    net: Any, parts: list[tuple[Array, Array]], test: tuple[Array, Array], epochs: int
) -> float:
    """Return the accuracy of the same class that PyTorch trains on all examples in one place.

    It makes as many steps as a client, each on as many examples as all clients see in one.
    """
    import torch

    x, y = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(CLIENTS * BATCH):
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return accuracy_of(net, test)


def accuracy_of(net: Any, test: tuple[Array, Array]) -> float:
    """Return the accuracy of a module in evaluation mode."""
    import torch

    with torch.no_grad():
        scores = net.eval()(torch.from_numpy(test[0])).numpy()
    return float((scores.argmax(axis=1) == test[1]).mean())


JOB = Job(
    says=(
        "two clients that train a class by PyTorch and two by ONNX Runtime in one federation "
        "(100,000 rows, BatchNorm); ONNX clients alone, and PyTorch on all rows"
    ),
    run=run,
    needs=("torch", "onnxscript"),
)
