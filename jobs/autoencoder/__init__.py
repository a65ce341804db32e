"""An autoencoder on pictures of five owners, each of things of its own."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import within

OWNERS: Final = 5
EPOCHS: Final = 4  # of a round, as the program has it
SIDE: Final = 24
Array = npt.NDArray[Any]


def draw(count: int, rng: np.random.Generator, favourite: int | None) -> Array:
    """Return pictures [N, 1, SIDE, SIDE] of disks, squares, rings, bars and crosses, 0 to 1.

    Nine tenths of an owner's pictures show its favourite of the five.
    """
    kinds = rng.integers(5, size=count)
    if favourite is not None:
        kinds[: count * 9 // 10] = favourite
    across, down = (rng.uniform(8, SIDE - 8, (count, 1, 1)) for _ in "xy")
    size = rng.uniform(4, 7, (count, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y = np.abs(columns - across), np.abs(rows - down)
    round_ = np.hypot(x, y)
    shapes = [
        round_ - size,
        np.maximum(x, y) - size,
        np.abs(round_ - size) - 1.5,
        np.maximum(x - size, y - 2),
        np.minimum(np.maximum(x - size, y - 1.5), np.maximum(y - size, x - 1.5)),
    ]
    edge = np.choose(kinds[:, None, None], shapes)
    light = rng.uniform(0.5, 1.0, (count, 1, 1)) / (1 + np.exp(2 * edge))
    noisy = np.clip(light + rng.normal(scale=0.03, size=light.shape), 0, 1)
    return noisy[:, None].astype(np.float32)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train at the owners, and on all pictures with PyTorch; run the exported file as well."""
    import torch

    import bbnode.torch
    from jobs.autoencoder.net import Autoencoder

    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("program.py"))
    rng = np.random.default_rng(0)
    each, rounds = (600, 8) if quick else (5_000, 12)
    parts = [draw(each, rng, owner) for owner in range(OWNERS)]
    test = draw(1_000, rng, None)
    for name, x in [*((f"owner-{n}", x) for n, x in enumerate(parts)), ("test", test)]:
        np.savez(folder / f"{name}.npz", x=x)
    torch.manual_seed(0)
    net = Autoencoder()
    model = bbnode.torch.export(net, torch.zeros(2, 1, SIDE, SIDE))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    report = terminal.up(
        f"program.py --nodes server=1,client={OWNERS} --times {rounds} "
        "--set client.slots.data.path=owner-{i}.npz --set client.slots.data.labels=x "
        "--set server.slots.test.path=test.npz --set server.slots.test.labels=x"
    )
    terminal.bbnode("export -c up-out/nodes/server/node.toml --slot global -o trained.onnx")
    loss = report.series("loss")[-1]
    epochs = EPOCHS * rounds
    alone = float(np.mean([reference(deepcopy(net), x, test, epochs, 32) for x in parts[:2]]))
    # As many steps as an owner makes, each on as many pictures as all owners see in one.
    best = reference(net, np.concatenate(parts), test, epochs, 32 * OWNERS)
    return Outcome(
        result=f"squared error {loss:.5f}",
        reference=f"PyTorch, pooled: {best:.5f}; one owner alone: {alone:.5f}",
        claims=[
            within("the error is near that of all pictures in one place", loss / best, 0, 1.8),
            within("and less than that of an owner alone", loss / alone, 0, 0.85),
            within(
                "the exported file makes the same pictures in plain ONNX Runtime",
                exported(folder / "trained.onnx", test) / loss,
                0.999,
                1.001,
            ),
            within(
                "and its weights make them in the PyTorch module",
                loaded(Autoencoder(), folder / "trained.onnx", test) / loss,
                0.999,
                1.001,
            ),
        ],
    )


def reference(net: Any, pictures: Array, test: Array, epochs: int, batch: int) -> float:
    """Return the error on the test of the same module that PyTorch trains in one place."""
    import torch

    x = torch.from_numpy(pictures)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.002)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            loss = torch.nn.functional.mse_loss(net(x[rows]), x[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return missed(net, test)


def missed(net: Any, test: Array) -> float:
    """Return the mean squared error of a module's pictures."""
    import torch

    with torch.no_grad():
        return float(((net(torch.from_numpy(test)) - torch.from_numpy(test)) ** 2).mean())


def exported(path: Path, test: Array) -> float:
    """Return the error of an exported model in plain ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    (again,) = session.run(None, {session.get_inputs()[0].name: test})
    return float(((again - test) ** 2).mean())


def loaded(net: Any, path: Path, test: Array) -> float:
    """Return the error of a module that has taken an exported model's weights."""
    import bbnode.torch

    bbnode.torch.load_weights(net, path)
    return missed(net, test)


JOB = Job(
    says=(
        "25,000 pictures of five owners, a convolutional autoencoder from PyTorch (ConvTranspose, "
        "Upsample); PyTorch on all pictures, and the exported file in ONNX Runtime and PyTorch"
    ),
    run=run,
    needs=("torch", "onnxscript"),
)
