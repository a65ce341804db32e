"""Split learning equals the training of the whole model, and refuses what others send wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from bbnode.components import ArrayDataSource, ArrayDataSourceConfig, HeldModel, values
from bbnode.dsl import BadArgument
from bbnode.programs import SplitLearning
from bbnode.sim import Network
from tests.components.fakes import CTX, ort
from tests.programs.files import CLASSES, FEATURES, compiled, examples

CUT, SECOND = "layer0.active", "layer1.active"
STEPS = 4


class Steps(SplitLearning):
    model = (FEATURES, 8, 6, CLASSES)
    cut = CUT
    batch = 10


class Run:
    """A server and clients in the simulator, and one whole model in float32 beside them."""

    def __init__(
        self, folder: Path, program: SplitLearning, clients: int = 1, arrays: Any = ()
    ) -> None:
        self.net, self.program = Network(1), program
        artifact = compiled(program)
        self.server = self.net.add("server", artifact, ["server"])
        self.clients, self.batches = [], []
        for i in range(clients):
            path = examples(folder, f"c{i}", 30, seed=i)
            if arrays:
                np.savez(path, x=arrays[0], y=arrays[1])
            data = {"data": {"path": path}}
            self.clients.append(self.net.add(f"c{i}", artifact, ["client"], config=data))
            source = ArrayDataSource(ArrayDataSourceConfig(path=path, batch_size=10))
            self.batches.append([source.next_batch(CTX) for _ in range(STEPS)])
        self.net.run_until_idle()
        self.whole = HeldModel(program._config)
        self.whole.bind({"backend": ort()})

    def step(self, client: int = 0) -> float:
        node = self.clients[client]
        execution = node.invoke("client", {"tick": values.TRIGGER})
        self.net.run_until_idle()
        assert node.failures() == []
        assert self.server.failures() == []
        return float(node.outputs(execution)["loss"])

    def whole_step(self, x: Any, y: Any) -> float:
        grads, loss = self.whole.gradient(CTX, x, y)
        self.whole.step(CTX, grads)
        return float(loss)

    def weights(self, client: int = 0) -> Any:
        """The weights of all parts as one vector in the order of the whole model."""
        nodes = {"top": self.server, "bottom": self.clients[client], "head": self.clients[client]}
        prefix = "shared_" if self.program.shared else ""
        found: dict[str, Any] = {}
        for name in self.program.parts:
            kept = prefix and name != "top"
            node = self.server if kept else nodes[name]
            part = node.component(f"shared_{name}" if kept else name)
            found |= part.saved_weights(part.serialize())
        return np.concatenate([np.ravel(found[name]) for name in self.whole.trained])


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [{}, {"head": SECOND}], ids=["labels", "u"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "adam", "learning_rate": 0.01}, {"momentum": 0.9, "clip_value": 0.01}],
    ids=str,
)
def test_a_step_is_that_of_the_whole_model(
    tmp_path: Path, settings: dict[str, Any], shape: dict[str, Any]
) -> None:
    run = Run(tmp_path, Steps(**settings, **shape))
    for x, y in run.batches[0]:
        assert run.step() == pytest.approx(run.whole_step(x, y), abs=1e-6)
    close(run.weights(), run.whole.params(CTX))


@pytest.mark.parametrize("head", ["", SECOND])
def test_what_crosses_a_cut_may_be_encoded(tmp_path: Path, head: str) -> None:
    run = Run(tmp_path, Steps(codec="bbnode.Float16Codec", head=head))
    for x, y in run.batches[0]:
        assert run.step() == pytest.approx(run.whole_step(x, y), rel=2e-3)
    np.testing.assert_allclose(run.weights(), run.whole.params(CTX), rtol=0, atol=2e-3)
    assert not np.array_equal(run.weights(), run.whole.params(CTX))
    with pytest.raises(BadArgument, match=r"codec= encodes activations.*Int8Codec"):
        compiled(Steps(codec="bbnode.TopKCodec"))


@pytest.mark.parametrize("head", ["", SECOND])
def test_clients_in_turn_train_one_model(tmp_path: Path, head: str) -> None:
    """In any order of turns, and with an optimizer that has a state."""
    program = Steps(shared=True, head=head, optimizer="adam", learning_rate=0.01)
    run = Run(tmp_path, program, clients=3)
    for turn, client in enumerate([0, 2, 1, 1, 0]):
        taken = [0, 2, 1, 1, 0][:turn].count(client)
        assert run.step(client) == pytest.approx(
            run.whole_step(*run.batches[client][taken]), abs=1e-6
        )
    close(run.weights(), run.whole.params(CTX))


def test_clients_at_once_are_taken_as_they_come(tmp_path: Path) -> None:
    """Each is a step of the top; the bottoms are the clients' own, and move apart."""
    run = Run(tmp_path, Steps(), clients=3)
    begun = [node.invoke("client", {"tick": values.TRIGGER}) for node in run.clients]
    run.net.run_until_idle()
    assert [node.failures() for node in (run.server, *run.clients)] == [[]] * 4
    losses = [node.outputs(e)["loss"] for node, e in zip(run.clients, begun, strict=True)]
    assert np.isfinite(losses).all()
    assert run.server.component("top").progress.steps == 3
    bottoms = [np.asarray(node.component("bottom").params(CTX)) for node in run.clients]
    assert not np.array_equal(bottoms[0], bottoms[1])


def patched(change: Any, real: Any) -> Any:
    """Return an op of a part that hands out something else."""
    return lambda *given, **named: change(real(*given, **named))


LIES = {
    "nan": lambda a: np.where(np.arange(a.shape[1]) == 3, np.nan, a).astype(np.float32),
    "wider": lambda a: np.concatenate([a, a], axis=1),
    "narrower": lambda a: a[:, :1],
    "flat": lambda a: a[:, 0],
    "fewer rows": lambda a: a[:4],
    "one row": lambda a: a[:1],
    "no rows": lambda a: a[:0],
    "doubles": lambda a: a.astype(np.float64),
    "huge": lambda a: np.full_like(a, 3e38),
}


@pytest.mark.parametrize(
    ("lie", "head"), [*((lie, "") for lie in LIES), ("nan", SECOND), ("one row", SECOND)]
)
def test_activations_that_lie_leave_the_server_as_it_is(
    tmp_path: Path, lie: str, head: str
) -> None:
    """The client is told by its op that fails, and an honest one goes on."""
    run = Run(tmp_path, Steps(head=head, deadline_s=5.0), clients=2)
    before = run.server.component("top").params(CTX)
    liar = run.clients[0]
    part = liar.component("bottom")
    part.forward = patched(LIES[lie], part.forward)
    execution = liar.invoke("client", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    np.testing.assert_array_equal(run.server.component("top").params(CTX), before)
    assert "loss" not in liar.outputs(execution)
    assert liar.failures() != []
    own = liar.component("bottom")
    close(own.params(CTX), HeldModel(run.program.parts["bottom"]).params(CTX))
    honest = run.clients[1]
    execution = honest.invoke("client", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert honest.failures() == []
    assert np.isfinite(honest.outputs(execution)["loss"])


@pytest.mark.parametrize("lie", ["nan", "one row", "narrower"])
def test_a_gradient_that_lies_leaves_the_client_as_it_is(tmp_path: Path, lie: str) -> None:
    run = Run(tmp_path, Steps())
    part = run.server.component("top")
    part.gradient_with_input = patched(
        lambda out: (out[0], LIES[lie](out[1]), out[2]), part.gradient_with_input
    )
    client = run.clients[0]
    before = client.component("bottom").params(CTX)
    execution = client.invoke("client", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert "loss" not in client.outputs(execution)
    np.testing.assert_array_equal(client.component("bottom").params(CTX), before)


def test_a_server_that_never_answers_ends_the_step_at_the_deadline(tmp_path: Path) -> None:
    run = Run(tmp_path, Steps(deadline_s=5.0))
    run.net.partition([run.server], [run.clients[0]])
    run.clients[0].invoke("client", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert run.clients[0].failures() != []
    close(run.weights(), run.whole.params(CTX))
    run.net.heal_all()
    run.net.run_until_idle()
    execution = run.clients[0].invoke("client", {"tick": values.TRIGGER})
    run.net.run_until_idle()
    assert np.isfinite(run.clients[0].outputs(execution)["loss"])


@pytest.mark.parametrize("shape", [{}, {"head": SECOND}, {"shared": True}], ids=str)
def test_training_goes_on_after_a_restart(tmp_path: Path, shape: dict[str, Any]) -> None:
    run = Run(tmp_path, Steps(optimizer="adam", learning_rate=0.01, **shape))
    for x, y in run.batches[0][:2]:
        assert run.step() == pytest.approx(run.whole_step(x, y), abs=1e-6)
    for node in (run.server, run.clients[0]):
        node.checkpoint()
        run.net.crash(node)
        run.net.restart(node)
    run.net.run_until_idle()
    for x, y in run.batches[0][2:]:
        assert run.step() == pytest.approx(run.whole_step(x, y), abs=1e-6)
    close(run.weights(), run.whole.params(CTX))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cut": ""}, "cut='' has to be the name of a value"),
        ({"cut": "layer0.activ"}, "did you mean 'layer0.active'"),
        ({"cut": "logits"}, "the top would have no op"),
        ({"cut": SECOND, "head": CUT}, "the top needs 'x' beside 'layer1.active'"),
        ({"cut": CUT, "head": CUT}, "the top would have no op"),
        ({"trainable": ("layer0.*",)}, "the top has no weights that are trained"),
        ({"clip_norm": 1.0}, "take clip_value"),
        ({"accumulate": 2}, "each batch makes a step"),
        ({"epochs": 2}, "a step has one batch"),
        ({"precision": "mixed"}, "a form of its own"),
        ({"shared": 1}, "shared=1 has to be true or false"),
        ({"deadline_s": 0}, "deadline_s=0 has to be a number above 0"),
    ],
    ids=str,
)
def test_an_argument_that_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        Steps(**given).build()


def test_a_weight_in_two_parts_is_refused() -> None:
    weights = np.eye(FEATURES, dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])
    ]  # fmt: skip
    ports = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", FEATURES])]
        for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "tied", *ports, [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(BadArgument, match="'w' is trained in the bottom and in the top"):
        Steps(model=model, cut="h").build()


def test_tokens_go_into_a_bottom(tmp_path: Path) -> None:
    """A bottom whose input has no gradient: an embedding of int64 tokens, [N, 2]."""
    rng = np.random.default_rng(5)
    shapes = {"table": (7, 6), "w": (12, CLASSES)}
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    weights.append(numpy_helper.from_array(np.array([-1, 12]), "flat"))
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["found"]),
        helper.make_node("Reshape", ["found", "flat"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tokens",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x, y = rng.integers(0, 7, (30, 2)), rng.integers(0, CLASSES, 30)
    run = Run(tmp_path, Steps(model=model, cut="h"), arrays=(x, y))
    for batch, labels in run.batches[0]:
        assert run.step() == pytest.approx(run.whole_step(batch, labels), abs=1e-6)
    close(run.weights(), run.whole.params(CTX))


def test_two_steps_of_one_client_do_not_mix(tmp_path: Path) -> None:
    """Each goes back with its own batch, though the second went forward before the first's end."""
    run = Run(tmp_path, Steps(shared=False, learning_rate=1e-4))
    node = run.clients[0]
    begun = [node.invoke("client", {"tick": values.TRIGGER}) for _ in range(2)]
    run.net.run_until_idle()
    assert node.failures() == run.server.failures() == []
    pulls = []
    for (x, y), execution in zip(run.batches[0], begun, strict=False):
        grads, loss = run.whole.gradient(CTX, x, y)
        assert float(node.outputs(execution)["loss"]) == pytest.approx(float(loss), abs=1e-3)
        pulls.append(np.asarray(grads))
    moved = run.weights() - np.asarray(run.whole.params(CTX))
    close(moved, -1e-4 * (pulls[0] + pulls[1]))
