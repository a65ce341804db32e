"""Training and inference of ONNX models: time beside torch's, and memory beside the weights.

Rule: one thread on both sides, and what is compared is measured in turn within one run; a ratio is
the median over pairs of turns that follow each other. The math is compared once before: the same
losses, step by step, from the same weights. Peaks are of fresh processes, from the imports on.
Without torch its ratios are left out, with a note.

Metrics (ratios unless the name says otherwise):
    mlp_vs_torch, lenet_vs_torch, resnet18_vs_torch, mobilenet_vs_torch, lstm_vs_torch,
    mamba_vs_torch, gpt_vs_torch, vit_vs_torch:
        time of a training step over torch's (forward, cross-entropy, backward, SGD): all of
        `OnnxModel.train` over an epoch, and the same loop in torch. Models and sizes:
        `_train_models.py`.
    ms_<model>, ms_torch_<model>: the best step of either, in milliseconds.
    train_peak_vs_weights: growth of the resident set of a fresh process that loads 200 MB of
        weights into an OnnxModel, by the path of its file, and trains two epochs of four batches,
        at its peak, over the size of the weights.
    infer_peak_vs_weights: the same of one that loads them and computes forwards.
    infer_kept_vs_weights: what of that is left afterwards.
    first_step_s_resnet18: from bytes to the end of the first step: derivation of the graphs, their
        preparation in ONNX Runtime, and the step.
    infer_overhead_us: what OnnxModel.forward takes on top of a bare `InferenceSession.run` of its
        session, for a model that takes few microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bbnode.components import OrtBackend, mlp_forward
from bbnode.components.backends.ort import OrtBackendConfig
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
from bbnode.ir.values import Value

MODELS = ("mlp", "lenet", "resnet18", "mobilenet", "lstm", "mamba", "gpt", "vit")
# What the design promises.
MOST = {
    **{f"{name}_vs_torch": 1.0 for name in MODELS},
    "mobilenet_vs_torch": 1.1,
    "mamba_vs_torch": 1.1,
    "train_peak_vs_weights": 3.5,
    "infer_peak_vs_weights": 1.3,
    "first_step_s_resnet18": 0.5,
    "infer_overhead_us": 25.0,
}
SECONDS = 6.0  # of turns for each model
LEAST_TURNS = 5
WIDTH, LAYERS = 2560, 8  # 8 matrices: 210 MB
CALLS = 20  # of a turn of forwards: short enough to fall between what else the machine does
TURNS = 400
NS_PER_US, NS_PER_MS = 1_000, 1_000_000
BYTES_PER_KIB = 1024


class Epochs(ArrayDataSource):
    """Batches of two arrays in their own order, as torch's loop takes them."""

    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        super().__init__(ArrayDataSourceConfig(path=os.devnull))
        self._pair = features, labels

    def epoch_batches(self, batch_size: int) -> Iterator[tuple[Value, Value]]:
        features, labels = self._pair
        for at in range(0, len(features), batch_size):
            yield features[at : at + batch_size], labels[at : at + batch_size]

    @property
    def num_samples(self) -> int:
        return len(self._pair[0])


def made(content: bytes | Path, source: ArrayDataSource | None, rate: float) -> OnnxModel:
    """The model as a node binds it; only its backend where there are no data."""
    model = OnnxModel(OnnxModelConfig(model=content, learning_rate=rate))
    backend = OrtBackend(OrtBackendConfig())
    model.bind({"backend": backend, **({} if source is None else {"data_source": source})})
    return model


# --- beside torch -------------------------------------------------------------------------------


def beside_torch(names: Sequence[str], seconds: float) -> dict[str, float]:
    """Ratios and times of a step for each model."""
    import _train_models
    import torch

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name in names:
        case = _train_models.cases()[name]()
        content = case.export().SerializeToString()
        _, theirs = case.torch_turn()
        steps = len(case.features) // case.batch
        began = perf_counter()
        source = Epochs(case.features, case.labels)
        model = made(content, source, _train_models.LEARNING_RATE)
        model.train(None, epochs=1, batch=case.batch)  # type: ignore[arg-type]
        if name == "resnet18":
            first = perf_counter() - began
            later = timed_epoch(model, case.batch, steps) * steps / 1e9
            found["first_step_s_resnet18"] = first - later * (steps - 1) / steps
        check_math(name, content, case)

        def ours(model: OnnxModel = model, case: Any = case, steps: int = steps) -> float:
            return timed_epoch(model, case.batch, steps)

        pairs = in_turn(ours, theirs, seconds)
        found[f"{name}_vs_torch"] = median(a / b for a, b in pairs)
        found[f"ms_{name}"] = min(a for a, _ in pairs) / NS_PER_MS
        found[f"ms_torch_{name}"] = min(b for _, b in pairs) / NS_PER_MS
    return found


def timed_epoch(model: OnnxModel, batch: int, steps: int) -> float:
    """One epoch: nanoseconds a step."""
    started = perf_counter_ns()
    model.train(None, epochs=1, batch=batch)  # type: ignore[arg-type]
    return (perf_counter_ns() - started) / steps


def in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], seconds: float
) -> list[tuple[float, float]]:
    pairs = []
    end = perf_counter() + seconds
    theirs()
    while perf_counter() < end or len(pairs) < LEAST_TURNS:
        pairs.append((ours(), theirs()))
    return pairs


def check_math(name: str, content: bytes, case: Any) -> None:
    """Compare the losses of the epoch's batches, one step each, with torch's from equal weights."""
    import _train_models
    import torch

    again = _train_models.cases()[name]()
    optimizer = torch.optim.SGD(again.module.parameters(), lr=_train_models.LEARNING_RATE)
    source = Epochs(case.features[: case.batch], case.labels[: case.batch])
    model = made(content, source, _train_models.LEARNING_RATE)
    for step in range(3):
        optimizer.zero_grad()
        x, y = (torch.from_numpy(each[: case.batch]) for each in (case.features, case.labels))
        loss = torch.nn.functional.cross_entropy(again.module(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        told = model.train(None, epochs=1, batch=case.batch)  # type: ignore[arg-type]
        expected = float(loss.item())
        if not np.isclose(float(told["loss"]), expected, rtol=1e-3):
            raise SystemExit(f"{name}: loss {told['loss']} in step {step}, torch has {expected}")


# --- memory -------------------------------------------------------------------------------------


def write_large(path: Path) -> None:
    """A model of 210 MB: eight dense layers of 2560."""
    rng = np.random.default_rng(0)
    nodes, tensors, value = [], [], "x"
    for layer in range(LAYERS):
        weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5)
        tensors.append(numpy_helper.from_array(weight, f"w{layer}"))
        tensors.append(numpy_helper.from_array(np.zeros(WIDTH, np.float32), f"b{layer}"))
        nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], [f"h{layer}"]))
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"]))
        value = f"r{layer}"
    tensors.append(numpy_helper.from_array(np.full((WIDTH, 10), 0.01, np.float32), "head"))
    nodes.append(helper.make_node("MatMul", [value, "head"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        tensors,
    )
    opset = helper.make_opsetid("", 21)
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=[opset])
                     .SerializeToString())  # fmt: skip


def peaks() -> dict[str, float]:
    """Memory of fresh processes, over the weights."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.onnx"
        write_large(path)
        for what in ("train", "infer"):
            command = [sys.executable, __file__, "--measure", what, "--model", str(path)]
            told = subprocess.run(command, check=True, capture_output=True, text=True)
            peak, kept = json.loads(told.stdout)
            found[f"{what}_peak_vs_weights"] = peak
            if what == "infer":
                found["infer_kept_vs_weights"] = kept
    return found


def measure_here(what: str, path: Path) -> tuple[float, float]:
    """Load a model and train or infer; return peak and rest of the growth over its size."""
    size_kib = path.stat().st_size / BYTES_PER_KIB
    rng = np.random.default_rng(0)
    features = rng.normal(size=(16, WIDTH)).astype(np.float32)
    source = Epochs(features, rng.integers(0, 10, 16))
    small = made(mlp_forward((4, 3)).SerializeToString(), None, 0.1)
    small.forward(None, features[:, :4])  # type: ignore[arg-type]
    before = status_kib("VmRSS")
    model = made(path, source, 0.001)
    for _ in range(2):
        if what == "train":
            model.train(None, epochs=1, batch=4)  # type: ignore[arg-type]
        else:
            model.forward(None, features)  # type: ignore[arg-type]
    return (status_kib("VmHWM") - before) / size_kib, (status_kib("VmRSS") - before) / size_kib


def status_kib(name: str) -> int:
    """A figure of this process; VmHWM is its peak, which unlike getrusage's is not its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- overhead -----------------------------------------------------------------------------------


def infer_overhead_us() -> float:
    """Microseconds of OnnxModel.forward on top of its bare session."""
    model = made(mlp_forward((16, 16, 4)).SerializeToString(), None, 0.1)
    x = np.ones((1, 16), np.float32)
    model.forward(None, x)  # type: ignore[arg-type]
    session: Any = model._prepare(model._graphs.forward)._session  # type: ignore[attr-defined]
    feeds = dict(zip([port.name for port in session.get_inputs()],
                     [*model._split(model._params), x], strict=True))  # fmt: skip
    names = [port.name for port in session.get_outputs()]

    def ours() -> float:
        started = perf_counter_ns()
        for _ in range(CALLS):
            model.forward(None, x)  # type: ignore[arg-type]
        return (perf_counter_ns() - started) / CALLS

    def bare() -> float:
        started = perf_counter_ns()
        for _ in range(CALLS):
            session.run(names, feeds)
        return (perf_counter_ns() - started) / CALLS

    pairs = [(ours(), bare()) for _ in range(TURNS)]
    # The best of either: whatever else the machine does can only add.
    return (min(mine for mine, _ in pairs) - min(its for _, its in pairs)) / NS_PER_US


def measure(names: Sequence[str], seconds: float) -> tuple[dict[str, float], list[str]]:
    """All metrics of the module's docstring, and notes on those left out."""
    found: dict[str, float] = {}
    notes = []
    if find_spec("torch") is None or find_spec("onnxscript") is None:
        notes.append("torch and onnxscript are not installed: nothing is compared with torch")
    else:
        found |= beside_torch(names, seconds)
    found |= peaks()
    found["infer_overhead_us"] = infer_overhead_us()
    return {name: round(value, 3) for name, value in found.items()}, notes


def main(argv: Sequence[str] | None = None) -> None:
    """Print the metrics, as text or (`--json`) as one object of name to number."""
    parser = argparse.ArgumentParser(prog="scripts/bench train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of turns for each model")
    parser.add_argument("--only", choices=MODELS, action="append", help="these models beside torch")
    parser.add_argument("--measure", choices=("train", "infer"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(measure_here(options.measure, options.model)))
        return
    if not 0 < options.seconds <= 3600:
        parser.error("--seconds takes a number from 0 to 3600")
    found, notes = measure(options.only or MODELS, options.seconds)
    for note in notes:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        most = f"  (at most {MOST[name]:g})" if name in MOST else ""
        print(f"{name:<36}{value:>10.3f}{most}")


if __name__ == "__main__":
    main()
