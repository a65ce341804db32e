"""Federated training on lines of text, on folders of images, and on a Dataset of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from PIL import Image

from bbnode.components import provide, values, withdraw
from bbnode.programs import FederatedTraining
from bbnode.sim import Network
from tests.programs.files import compiled

LENGTH, WIDTH = 12, 8
VOCABULARY = 257


def model(
    nodes: list[Any], weights: dict[str, np.ndarray], kind: int, shape: list[Any], out: list[Any]
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=shape) * 0.1).astype(np.float32)


def bag_of_words() -> ModelProto:
    """The mean of the embeddings of all tokens, and a linear layer."""
    return model(
        [
            helper.make_node("Gather", ["table", "x"], ["words"], axis=0),
            helper.make_node("ReduceMean", ["words", "axis"], ["mean"], keepdims=0),
            helper.make_node("MatMul", ["mean", "w"], ["y"]),
        ],
        {"table": normal(VOCABULARY, WIDTH), "w": normal(WIDTH, 2), "axis": np.array([1])},
        TensorProto.INT64, ["n", LENGTH], ["n", 2],
    )  # fmt: skip


def next_word() -> ModelProto:
    """A bigram model: of each token the logits of the next one."""
    return model(
        [helper.make_node("Gather", ["table", "x"], ["y"], axis=0)],
        {"table": np.zeros((VOCABULARY, VOCABULARY), np.float32)},
        TensorProto.INT64, ["n", LENGTH], ["n", LENGTH, VOCABULARY],
    )  # fmt: skip


def convolution() -> ModelProto:
    return model(
        [
            helper.make_node("Conv", ["x", "kernel"], ["maps"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["maps"], ["active"]),
            helper.make_node("GlobalAveragePool", ["active"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["y"]),
        ],
        {"kernel": normal(6, 3, 3, 3), "w": normal(6, 2)},
        TensorProto.FLOAT, ["n", 3, 8, 8], ["n", 2],
    )  # fmt: skip


def trained(program: FederatedTraining, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs of three rounds; the last settings are those of the server's slot."""
    artifact = compiled(program)
    net = Network(1)
    *clients, test = settings
    server = net.add("server", artifact, ["server"], config={"test": test})
    for i, data in enumerate(clients):
        net.add(f"client-{i}", artifact, ["client"], config={"data": data})
    found = []
    for _ in range(3):
        execution = server.invoke("server", {"tick": values.TRIGGER})
        net.run_until_idle()
        assert server.failures() == []
        found.append(server.outputs(execution))
    return found


def test_lines_of_text(tmp_path) -> None:
    random = np.random.default_rng(1)
    words = (("good", "fine", "nice"), ("bad", "poor", "ugly"))
    settings = []
    for name, count in (("a", 60), ("b", 40), ("test", 30)):
        labels = random.integers(0, 2, count)
        lines = [f"{('neg', 'pos')[1 - y]}\t{' '.join(random.choice(words[y], 2))}" for y in labels]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        path = str(tmp_path / f"{name}.txt")
        settings.append({"path": path, "length": LENGTH, "classes": ["neg", "pos"]})
    program = FederatedTraining(
        model=bag_of_words(), data="bbnode.TextDataSource", clients=2, epochs=30, learning_rate=2.0
    )
    assert trained(program, settings)[-1]["accuracy"] > 0.9


def test_a_language_model(tmp_path) -> None:
    settings = []
    for name in ("a", "b", "test"):
        path = tmp_path / f"{name}.txt"
        path.write_text("the cat sat on the mat.\n" * 20)
        settings.append({"path": str(path), "length": LENGTH, "task": "language_model"})
    program = FederatedTraining(
        model=next_word(), data="bbnode.TextDataSource", clients=2, epochs=20, learning_rate=20.0
    )
    found = trained(program, settings)
    assert found[-1]["loss"] < found[0]["loss"] < np.log(VOCABULARY)
    assert found[-1]["accuracy"] > 0.6


@pytest.mark.parametrize("standardize", [{}, {"standardize": "given", "mean": [0.5], "std": [0.2]}])
def test_folders_of_images(tmp_path, standardize) -> None:
    random = np.random.default_rng(2)
    settings = []
    for name in ("a", "b", "test"):
        for label, kind in enumerate(("blue", "red")):
            (tmp_path / name / kind).mkdir(parents=True)
            for i in range(20):
                pixels = random.integers(0, 100, (9, 10, 3)).astype(np.uint8)
                pixels[..., 0 if label else 2] += 120
                Image.fromarray(pixels).save(tmp_path / name / kind / f"{i}.png")
        settings.append({"path": str(tmp_path / name), "size": [8, 8], **standardize})
    program = FederatedTraining(
        model=convolution(), data="bbnode.ImageFolderDataSource", clients=2, epochs=10,
        learning_rate=0.5, batch=8,
    )  # fmt: skip
    assert trained(program, settings)[-1]["accuracy"] > 0.9


class Points:
    """A Dataset as PyTorch has them."""

    def __init__(self, seed: int) -> None:
        self.x = np.random.default_rng(seed).normal(size=(50, 4))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.x[index], int(self.x[index].sum() > 0)


def test_a_dataset_of_ones_own() -> None:
    names = ("own-a", "own-b", "own-test")
    for seed, name in enumerate(names):
        provide(name, Points(seed))
    program = FederatedTraining(
        model=(4, 8, 2), data="bbnode.IterableDataSource", clients=2, epochs=10
    )
    found = trained(program, [{"provided": name} for name in names])
    for name in names:
        withdraw(name)
    assert found[-1]["accuracy"] > 0.85
