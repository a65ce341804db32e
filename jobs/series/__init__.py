"""Forecasts of three series that stations keep: sunspots, a sea's warmth, carbon dioxide."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from jobs.job import Job, Outcome
from jobs.typed import Terminal
from reproduce.experiment import within

STEPS: Final = 24
STATIONS: Final = ("sunspots", "elnino", "co2")
Array = npt.NDArray[Any]


def series_of(name: str) -> Array:
    """Return a series that statsmodels carries, at mean 0 and deviation 1, without its trend."""
    found = find_spec("statsmodels")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "datasets" / name / f"{name}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    # A year a row with a number a month, or a time a row; holes are filled with what was before.
    cells = [cell for row in rows for cell in (row[1:] if name == "elnino" else row[-1:])]
    values: list[float] = []
    for cell in cells:
        values.append(float(cell) if cell.strip() else values[-1])
    numbers = np.array(values)
    if name == "co2":
        numbers = numbers[::4]  # a month has four weeks
    at = np.arange(len(numbers))
    numbers = numbers - np.polyval(np.polyfit(at, numbers, 2), at)
    return np.asarray((numbers - numbers.mean()) / numbers.std(), np.float32)


def windows(series: Array) -> tuple[Array, Array]:
    """Return all stretches of STEPS values, and the value after each as [N, 1]."""
    x = np.lib.stride_tricks.sliding_window_view(series, STEPS)[:-1]
    return np.ascontiguousarray(x), np.ascontiguousarray(series[STEPS:, None])


def run(terminal: Terminal, quick: bool) -> Outcome:
    """Train at the stations, and on all windows with PyTorch."""
    import torch

    import bbnode.torch
    from jobs.series.net import Forecast

    folder = terminal.folder
    terminal.bring(Path(__file__).with_name("program.py"))
    parts, tests = [], []
    for number, name in enumerate(STATIONS):
        whole = series_of(name)
        cut = len(whole) * 4 // 5
        x, y = windows(whole[:cut])
        np.savez(folder / f"station-{number}.npz", x=x, y=y)
        parts.append((x, y))
        tests.append(windows(whole[cut - STEPS :]))
    x_test, y_test = (np.concatenate(each) for each in zip(*tests, strict=True))
    np.savez(folder / "test.npz", x=x_test, y=y_test)
    torch.manual_seed(0)
    net = Forecast()
    model = bbnode.torch.export(net, torch.zeros(2, STEPS))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    rounds = 20 if quick else 120
    report = terminal.up(
        f"program.py --nodes server=1,client=3 --times {rounds} --best loss --mode min "
        "--set client.slots.data.path=station-{i}.npz --set server.slots.test.path=test.npz"
    )
    loss = min(report.series("loss"))
    best = reference(net, parts, x_test, y_test, rounds)
    errors = [reference(Forecast(), [part], x_test, y_test, rounds) for part in parts]
    alone = float(np.mean(errors))
    same = float(np.mean((x_test[:, -1:] - y_test) ** 2))
    return Outcome(
        result=f"squared error {loss:.3f}",
        reference=(
            f"PyTorch, pooled: {best:.3f}; one station alone: {alone:.3f}; "
            f"the last value again: {same:.3f}"
        ),
        claims=[
            within(
                "the error is near that of one owner of all series (stations differ much)",
                loss / best,
                0,
                1.5,
            ),
            within(
                "and less than that of a station alone, in the mean of the three",
                loss / alone,
                0,
                0.98,
            ),
            within("and less than that of the last value again", loss / same, 0, 0.8),
        ],
    )


def reference(
    net: Any, parts: list[tuple[Array, Array]], x_test: Array, y_test: Array, epochs: int
) -> float:
    """Return the least error on the test of the same net that PyTorch trains on all windows."""
    import torch

    x, y = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    errors = []
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            loss = torch.nn.functional.mse_loss(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            missed = net(torch.from_numpy(x_test)) - torch.from_numpy(y_test)
            errors.append(float((missed**2).mean()))
    return min(errors)


JOB = Job(
    says=(
        "three stations with a series of their own (sunspots, the warmth of a sea, carbon dioxide) "
        "forecast by one GRU; PyTorch on all of them"
    ),
    run=run,
    needs=("torch", "onnxscript", "statsmodels"),
)
