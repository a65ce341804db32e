"""Personal layers and personal models: clients that know two classes each, and twenty rounds."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bbnode.programs import Ditto, FederatedTraining, FedPer, FedRep
from reproduce._data import Examples, digits
from reproduce._federation import Federation, Slots
from reproduce.experiment import Cell, Claim, Experiment, Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 20
ROUNDS = 20
PARTITIONS = {"two shards each": "shards", "IID": "iid"}
HEAD = ("layer1.*",)
COMMON: dict[str, Any] = {
    "model": (64, 32, 10), "clients": CLIENTS, "epochs": 2, "batch": 10, "learning_rate": 0.1,
    "evaluate": "clients",
}  # fmt: skip
# Methods, and the arguments that they need.
METHODS: dict[str, tuple[type[FederatedTraining], dict[str, Any]]] = {
    "FedAvg": (FederatedTraining, {}),
    "FedPer": (FedPer, {"local": HEAD}),
    "FedRep": (FedRep, {"local": HEAD}),
    "Ditto": (Ditto, {"proximal": 0.1}),
}


def curve(examples: Examples, method: str, partition: str, seed: int) -> list[float]:
    """Return the mean accuracy of clients, on examples of their own that they do not train on."""
    program, given = METHODS[method]
    clients: list[Slots] = []
    for share in examples.shares(CLIENTS, partition, seed=seed):
        halves = ({**share, "split": split, "split_seed": seed} for split in ("train", "test"))
        clients.append(dict(zip(("data", "held_out"), halves, strict=True)))
    federation = Federation(program(**COMMON, **given), clients, seed=seed)
    return [float(each["accuracy"]) for each in federation.rounds(ROUNDS)]


def run(seed: int) -> Result:
    """Train by each method, where clients differ and where they are alike."""
    with TemporaryDirectory() as folder:
        examples = digits(Path(folder), seed)
        curves = {
            (method, name): curve(examples, method, partition, seed)
            for name, partition in PARTITIONS.items()
            for method in METHODS
        }
    last = {key: found[-1] for key, found in curves.items()}
    rows: list[list[Cell]] = [
        [method, *(last[method, name] for name in PARTITIONS)] for method in METHODS
    ]
    differ, alike = PARTITIONS
    own = [method for method in METHODS if method != "FedAvg"]

    def figures(name: str) -> str:
        return ", ".join(f"{method} {last[method, name]:.3f}" for method in METHODS)

    claims = [
        Claim(
            f"{differ}: a part, or a model, of one's own is better than the common model",
            all(last[method, differ] > last["FedAvg", differ] for method in own),
            figures(differ),
        ),
        Claim(
            f"{alike}: clients that are alike lose by layers of their own",
            all(last[method, alike] < last["FedAvg", alike] for method in ("FedPer", "FedRep")),
            figures(alike),
        ),
    ]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(PARTITIONS), sharey=True)
        for axes, name in zip(panels, PARTITIONS, strict=True):
            for method in METHODS:
                axes.plot(range(1, 1 + ROUNDS), curves[method, name], label=method)
            axes.set(title=name, xlabel="round", ylim=(0, 1))
        panels[0].set_ylabel("mean accuracy on clients' own test")
        panels[1].legend()

    title = f"mean accuracy on clients' own test after {ROUNDS} rounds"
    return Result([Table(title, ["", *PARTITIONS], rows)], claims, draw)


EXPERIMENT = Experiment(
    paper=(
        "Arivazhagan et al., 2019, arXiv:1912.00818; Collins et al., 2021, arXiv:2102.07078; "
        "Li et al., 2021, arXiv:2012.04221"
    ),
    says=(
        "20 clients with 72 of scikit-learn's digits each, an MLP 64-32-10, measured on examples "
        "of their own (the papers: CIFAR, FEMNIST and others, up to thousands of clients)"
    ),
    page="docs/methods/fedper.md",
    run=run,
    methods=[
        "FedPer",
        "FedRep",
        "Ditto",
    ],
)
