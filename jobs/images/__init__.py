"""Pictures of ten owners: those that have few classes each, and those whose cameras differ."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Report, Terminal
from reproduce.experiment import Claim, within

SIDE: Final = 32
ALPHA: Final = 0.3
BATCH, RATE = 50, 0.05  # as the programs have them
MEAN, STD = 128.0, 64.0
FAINTEST: Final = 0.1  # contrast of a camera
WANTED_S: Final = 180.0  # of a round in the long form, which is measured once and has to be 120
ALONE: Final = 2  # owners that are looked at alone, of all
Array = npt.NDArray[Any]


def draw(count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return pictures uint8 [N, 3, SIDE, SIDE] of five things, plain or striped, and which of ten.

    Colours of things and grounds, places, sizes and stripes are drawn.
    """
    labels = rng.integers(10, size=count)
    column = (count, 1, 1)
    across, down = (rng.uniform(13, SIDE - 13, column) for _ in "xy")
    size = rng.uniform(7, 11, column)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y = np.abs(columns - across), np.abs(rows - down)
    away = np.hypot(x, y)
    shapes = [
        away - size,
        np.maximum(x, y) - 0.9 * size,
        np.abs(away - 0.8 * size) - 2,
        np.maximum(x - size, y - 3),
        np.minimum(np.maximum(x - size, y - 2), np.maximum(y - size, x - 2)),
    ]
    shape = 1 / (1 + np.exp(2 * np.choose(labels[:, None, None] // 2, shapes)))
    angle, phase = (rng.uniform(0, top, column) for top in (np.pi, 6.0))
    waves = np.sin((columns * np.cos(angle) + rows * np.sin(angle)) * 1.6 + phase)
    filled = np.where(labels[:, None, None] % 2, 0.5 + 0.5 * waves, 1.0) * shape
    ground, thing = (rng.uniform(*ends, (count, 3, 1, 1)) for ends in ((0, 0.4), (0.5, 1)))
    mixed = ground + (thing - ground) * filled[:, None]
    mixed += rng.normal(scale=0.08, size=mixed.shape)
    return np.asarray(np.clip(mixed, 0, 1) * 255, np.uint8), labels


def seen_by(camera: float, rng: np.random.Generator, pictures: Array) -> Array:
    """Return pictures as a camera has them: 0, of full contrast, to 1, of a tenth of it.

    How bright each colour is, is drawn.
    """
    contrast = FAINTEST**camera * rng.uniform(0.7, 1, (3, 1, 1))
    brightness = rng.uniform(0, 255 * (1 - contrast))
    return np.asarray(pictures * contrast + brightness, np.uint8)


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train by FedAvg and SCAFFOLD on few classes each, by FedAvg and FedBN with cameras."""
    import torch

    import bbnode.torch
    from jobs.images.net import Pictures

    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("programs.py"))
    rng = np.random.default_rng(0)
    owners, total, width = (4, 2_000, 8) if quick else (10, 20_000, 32)
    rounds = 10 if quick else 6
    x, y = draw(total, rng)
    test = draw(2_000, rng)
    for name, (pictures, labels) in (("all", (x, y)), ("test", test)):
        np.savez(folder / f"{name}.npz", x=pictures, y=labels)
    cameras = []
    for owner in range(owners):
        mine = slice(owner, None, owners)
        cameras.append((seen_by(owner / (owners - 1), rng, x[mine]), y[mine]))
        np.savez(folder / f"camera-{owner}.npz", x=cameras[-1][0], y=cameras[-1][1])
    torch.manual_seed(0)
    net = Pictures(width)
    model = bbnode.torch.export(net, torch.zeros(2, 3, SIDE, SIDE))
    (folder / "model.onnx").write_bytes(model.SerializeToString())

    def train(program: str, where: str, out: str, epochs: int = 2, times: int = rounds) -> Report:
        return terminal.up(
            f"programs.py:{program} --nodes server=1,client={owners} --times {times} --out {out} "
            f"--arg clients={owners} --arg epochs={epochs} {where}"
        )

    mixture = f"partition=dirichlet alpha={ALPHA} shard={{i}} shards={owners}"
    few = f"{settings('client.slots.data', 'all.npz', mixture)} " + settings(
        "server.slots.test", "test.npz"
    )
    own = "--arg 'evaluate=\"clients\"' " + " ".join(
        settings(f"client.slots.{slot}", "camera-{i}.npz") for slot in ("data", "held_out")
    )
    epochs = 2
    if not quick:
        first = train("ByFedAvg", few, "first", 1, 2)
        epochs = max(1, math.ceil(WANTED_S / first.rounds[-1]["seconds"]))
    fedavg = train("ByFedAvg", few, "fedavg", epochs)
    scaffold = train("ByScaffold", few, "scaffold", epochs)
    averaged, kept = train("ByFedAvg", own, "averaged"), train("ByFedBN", own, "fedbn")

    def trained(part: tuple[Array, Array], passes: float) -> Any:
        return fit(deepcopy(net), part, max(3, math.ceil(passes)))

    shares = [share(folder / "all.npz", owner, owners) for owner in range(ALONE)]
    alone = float(np.mean([accuracy(trained(part, rounds * epochs), test) for part in shares]))
    # As many steps as an owner makes.
    best = accuracy(trained((x, y), rounds * epochs / owners), test)
    halves = [halved(folder / f"camera-{owner}.npz") for owner in range(owners)]
    everything = [np.concatenate(each) for each in zip(*(half[0] for half in halves), strict=True)]
    common = trained((everything[0], everything[1]), rounds)
    together = float(np.mean([accuracy(common, half[1]) for half in halves]))
    own_alone = float(
        np.mean([accuracy(trained(half[0], rounds * 2), half[1]) for half in halves[:ALONE]])
    )
    by_avg, by_scaffold, by_mean, by_bn = (
        float(np.mean(each.series("accuracy")[-3:])) for each in (fedavg, scaffold, averaged, kept)
    )
    reports = (fedavg, scaffold, averaged, kept)
    answers = {len(each["responded"]) for report in reports for each in report.rounds}
    seconds = float(np.median([each["seconds"] for each in fedavg.rounds]))
    # The quick form has no time for it.
    long = [within("an owner trains for minutes before it answers", seconds, 120, 3600)]
    return Outcome(
        result=(
            f"accuracy by FedAvg {by_avg:.3f}, by SCAFFOLD {by_scaffold:.3f}; with cameras of "
            f"their own by FedBN {by_bn:.3f}, by FedAvg {by_mean:.3f}; rounds of {seconds:.0f} s"
        ),
        reference=(
            f"PyTorch, pooled: {best:.3f}, all cameras {together:.3f}; one owner alone: "
            f"{alone:.3f}, one camera {own_alone:.3f}"
        ),
        claims=[
            Claim("every owner answers every round", answers == {owners}, f"{sorted(answers)}"),
            *([] if quick else long),
            within("FedAvg is better than an owner alone", by_avg - alone, 0.1, 1),
            within("and so is SCAFFOLD", by_scaffold - alone, 0.1, 1),
            within("FedAvg is near all pictures in one place", by_avg - best, -0.35, 1),
            within("and so is SCAFFOLD", by_scaffold - best, -0.25, 1),
            within("FedBN is better than FedAvg where cameras differ", by_bn - by_mean, 0.05, 1),
            within("and near all pictures in one place", by_bn - together, -0.25, 1),
        ],
    )


def settings(slot: str, path: str, more: str = "") -> str:
    """Return words of a command that say where a slot's pictures are, and how they are scaled."""
    given = [f"path={path}", "standardize=given", f"mean=[{MEAN}]", f"std=[{STD}]", *more.split()]
    return " ".join(f"--set {slot}.{each}" for each in given)


def share(path: Path, owner: int, owners: int) -> tuple[Array, Array]:
    """Return the pictures of an owner, as its node deals them."""
    return _read(path, shard=owner, shards=owners, partition="dirichlet", alpha=ALPHA)


def halved(path: Path) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return what an owner trains on, and what it holds out."""
    return _read(path, split="train"), _read(path, split="test")


def _read(path: Path, **more: Any) -> tuple[Array, Array]:
    from bbnode.components import ArrayDataSource, ArrayDataSourceConfig

    source = ArrayDataSource(ArrayDataSourceConfig(path=str(path), **more))
    pictures, labels = source.next_batch(None)  # type: ignore[arg-type]
    return np.asarray(pictures), np.asarray(labels)


def fit(net: Any, part: tuple[Array, Array], epochs: int) -> Any:
    """Return a module that PyTorch has trained on pictures, with the programs' settings."""
    import torch

    x, y = scaled(part[0]), torch.tensor(part[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


def scaled(pictures: Array) -> Any:
    """Return pictures as the nodes' settings scale them."""
    import torch

    return torch.from_numpy((pictures.astype(np.float32) - MEAN) / STD)


def accuracy(net: Any, test: tuple[Array, Array]) -> float:
    """Return the accuracy of a module on held-out pictures."""
    import torch

    with torch.no_grad():
        parts = [net.eval()(each).argmax(dim=1).numpy() for each in scaled(test[0]).split(500)]
    return float((np.concatenate(parts) == test[1]).mean())


JOB = Job(
    says=(
        "20,000 pictures of ten owners, a CNN with BatchNorm, by FedAvg and SCAFFOLD (Dirichlet "
        "0.3), and by FedBN where cameras differ; PyTorch on all pictures, and on an owner's alone"
    ),
    run=run,
    needs=("torch", "onnxscript"),
)
