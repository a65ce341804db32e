"""TorchModel: the contract of a model, computed by PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bbnode.components.autodiff.errors import LossDoesNotFit  # noqa: E402
from bbnode.components.contracts import ComponentError, is_offloaded  # noqa: E402
from bbnode.components.data.arrays import (  # noqa: E402
    ArrayDataSource,
    ArrayDataSourceConfig,
)
from bbnode.components.errors import (  # noqa: E402
    DataDoesNotFit,
    InvalidComponentConfig,
    NotExportable,
    ParameterMismatch,
    TrainingFailed,
)
from bbnode.components.models.onnx_model import OnnxModelConfig  # noqa: E402
from bbnode.components.models.torch_model import (  # noqa: E402
    TorchModel,
    TorchModelConfig,
    TorchModuleUnusable,
)
from bbnode.components.registry import build_config, concrete  # noqa: E402
from bbnode.components.settings import LocalSettingRefused  # noqa: E402
from bbnode.ir.values import Composite  # noqa: E402
from tests.components.fakes import CTX, onnx_model, ort  # noqa: E402

torch.set_num_threads(1)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, size=60)


class Net(nn.Module):
    """Dropout, running statistics, a frozen parameter."""

    def __init__(self, hidden: int = 8, drop: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.drop = nn.Dropout(drop)
        self.scale = nn.Parameter(torch.ones(hidden), requires_grad=False)
        self.last = nn.Linear(hidden, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))) * self.scale)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, ids, weight):
        return {"y": self.head((self.table(ids) * weight[..., None]).sum(1)), "n": weight.sum(1)}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.first(x)


class Broken(nn.Module):
    def __init__(self) -> None:
        raise KeyError("weights of last year")


def settings(name: str = "Net", **more) -> TorchModelConfig:
    return TorchModelConfig(**{"module": f"{__name__}:{name}", "device": "cpu", **more})


def made(source=None, **more) -> TorchModel:
    model = TorchModel(settings(**more))
    model.bind({"backend": ort()} | ({} if source is None else {"data_source": source}))
    return model


@pytest.fixture
def source(tmp_path) -> ArrayDataSource:
    np.savez(tmp_path / "d.npz", x=X, y=LABELS)
    return ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "d.npz")))


def test_the_vector_is_the_parameters_then_the_statistics() -> None:
    model = made()
    module = model._net.module
    parts = [module.first.weight, module.first.bias, module.norm.weight, module.norm.bias,
             module.last.weight, module.last.bias, module.norm.running_mean,
             module.norm.running_var]  # fmt: skip
    flat = np.concatenate([part.detach().numpy().reshape(-1) for part in parts])
    np.testing.assert_array_equal(model.params(CTX), flat)
    local = made(running_statistics="local")
    np.testing.assert_array_equal(local.params(CTX), flat[:-16])
    assert made(seed=1).params(CTX)[0] != flat[0]
    np.testing.assert_array_equal(made().params(CTX), flat)


def test_training_is_repeatable_moves_statistics_and_lowers_the_loss(source) -> None:
    assert all(is_offloaded(getattr(TorchModel, name)) for name in ("train", "forward", "backward"))
    first, again = made(source, optimizer="adam", learning_rate=0.01), None
    first.bootstrap(CTX)
    before = first.params(CTX)
    told = first.train(CTX, epochs=2, batch=16)
    assert (told["num_samples"], told["steps"]) == (60, 8)
    assert not np.array_equal(first.params(CTX)[-16:], before[-16:])
    source.reset(CTX)
    torch.rand(7)  # the process's random numbers count for nothing
    again = made(source, optimizer="adam", learning_rate=0.01)
    assert again.train(CTX, epochs=2, batch=16) == told
    assert again.params(CTX).tobytes() == first.params(CTX).tobytes()
    assert first.train(CTX, epochs=30, batch=16)["loss"] < told["loss"]


def test_steps_are_those_of_torch_optim() -> None:
    model = made(name="Net", arguments={"drop": 0.0}, optimizer="adamw", learning_rate=0.02)
    torch.manual_seed(0)
    net = Net(drop=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for at in range(0, 40, 10):
        rows = slice(at, at + 10)
        grads, loss = model.gradient(CTX, X[rows], LABELS[rows])
        optimizer.zero_grad()
        wanted = nn.functional.cross_entropy(
            net(torch.from_numpy(X[rows])), torch.from_numpy(LABELS[rows])
        )
        wanted.backward()
        optimizer.step()
        assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
        model.step(CTX, grads)
    own = model._net.module
    model._load_net()
    for name, value in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(own.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("adam", {"clip_norm": 0.5}),
        ("adamw", {"clip_value": 0.1}),
        ("adagrad", {}),
        ("rmsprop", {"momentum": 0.5, "centered": True}),
        ("lion", {"weight_decay": 0.1}),
        ("yogi", {}),
        ("adagrad", {"initial_square": 1e-4}),
        ("adam", {"bias_correction": False, "initial_square": 1e-4, "weight_decay": 0.1}),
    ],
)
def test_a_saved_state_goes_on_where_it_was(source, optimizer, more) -> None:
    more = {"optimizer": optimizer, "learning_rate": 0.01, "schedule": "cosine",
            "decay_steps": 20, **more}  # fmt: skip
    one, two = made(source, **more), made(source, **more)
    one.train(CTX, epochs=1, batch=20)
    two.restore(one.serialize())
    assert two.params(CTX).tobytes() == one.params(CTX).tobytes()
    told = one.train(CTX, epochs=1, batch=60)
    source.reset(CTX)
    source.epoch_batches(60)
    assert two.train(CTX, epochs=1, batch=60)["loss"] == pytest.approx(told["loss"], rel=1e-6)
    np.testing.assert_allclose(two.params(CTX), one.params(CTX), rtol=1e-5, atol=1e-6)


def test_several_inputs_and_outputs_are_composites() -> None:
    model = made(name="TwoInputs", loss="mse", learning_rate=0.5)
    ids = RNG.integers(0, 5, size=(6, 4))
    weight = np.ones((6, 4), np.float32)
    outputs = model.forward(CTX, Composite((ids, weight)))
    assert isinstance(outputs, Composite)
    assert [each.shape for each in outputs] == [(6, 1), (6,)]
    target = np.ones(6, np.float32)
    start = float(model.compute_loss(CTX, Composite((ids, weight)), target))
    model.backward(CTX, np.full((6, 1), -1 / 6, np.float32))
    model.step(CTX, None)
    assert float(model.compute_loss(CTX, Composite((ids, weight)), target)) != start


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((0, 4), np.float32), "an empty batch has no loss"),
        (np.zeros((2, 5), np.float32), r"Net does not take a batch of float32\[2, 5\]"),
        ("text", "input 0 is no tensor of numbers"),
        (Composite((X[:2], X[:2])), "Net does not take a batch"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message) -> None:
    with pytest.raises(ComponentError, match=message):
        made().forward(CTX, batch)
    with pytest.raises(ComponentError, match=message):
        made().compute_loss(CTX, batch, LABELS[:2])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS[:2] * 1.0, "classes are integers"),
        (np.array([0, 3]), "label 3; the model tells 3 classes apart"),
        (np.array([0, -1]), "label -1"),
        (LABELS[:3], "labels have the shape"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, message) -> None:
    with pytest.raises(ComponentError, match=message):
        made().compute_loss(CTX, X[:2], labels)


def test_parameters_from_peers_are_checked() -> None:
    model = made()
    bad = model.params(CTX).copy()
    bad[-1] = -1.0
    for vector, message in (
        (bad, "variance"),
        (np.full(model.size, np.nan, np.float32), "NaN"),
        (np.zeros(3, np.float32), "shape"),
        (np.zeros(model.size), "float64"),
    ):
        with pytest.raises(ParameterMismatch, match=message):
            model.load_parameters(CTX, vector)
    model.forward(CTX, X[:2])
    with pytest.raises(ComponentError, match="the gradient is float64"):
        model.backward(CTX, np.zeros((2, 3)))


def test_a_loss_that_leaves_the_numbers_changes_nothing(source) -> None:
    model = made(source, learning_rate=1e38, momentum=0.9)
    before = model.params(CTX)
    with pytest.raises(TrainingFailed, match="lower learning_rate"):
        model.train(CTX, epochs=3, batch=16)
    assert model.params(CTX) is before
    assert np.isfinite(model.forward(CTX, X)).all()


def test_a_buffer_that_would_be_lost_is_refused(source) -> None:
    with pytest.raises(TrainingFailed, match="changed the buffer 'seen' of Counting"):
        made(source, name="Counting").train(CTX, epochs=1, batch=16)


def test_data_that_do_not_fit_are_told_before_the_first_round(tmp_path) -> None:
    for name, x, y, message in (
        ("width", X[:, :3], LABELS, "Net does not take a batch"),
        ("classes", X, LABELS + 1, "tells 3 classes apart"),
    ):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
        data = ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / f"{name}.npz")))
        with pytest.raises(DataDoesNotFit, match=message):
            made(data).bootstrap(CTX)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"module": ""}, InvalidComponentConfig, "name a class as module"),
        ({"module": "../evil.py"}, InvalidComponentConfig, "name a class as module"),
        ({"module": "no_such_package.nets:Net"}, TorchModuleUnusable, "can't be imported"),
        ({"module": f"{__name__}:Absent"}, TorchModuleUnusable, "can't be imported"),
        ({"module": f"{__name__}:Broken"}, TorchModuleUnusable, "weights of last year"),
        ({"module": f"{__name__}:settings"}, TorchModuleUnusable, "is no torch.nn.Module"),
        ({"arguments": {"width": 3}}, TorchModuleUnusable, "can't be made of the arguments"),
        ({"device": "tpu"}, InvalidComponentConfig, "device is 'tpu'"),
        ({"device": "cuda:99"}, InvalidComponentConfig, "device is 'cuda:99'"),
        ({"threads": 0}, InvalidComponentConfig, "threads is 0"),
        ({"learning_rate": 0.0}, InvalidComponentConfig, "learning_rate"),
        ({"mode": "eval"}, InvalidComponentConfig, "'mode'.*it is 'eval'"),
        ({"running_variance": "population"}, InvalidComponentConfig, "running_variance"),
        ({"example": ("float32[1",)}, InvalidComponentConfig, "example"),
    ],
)
def test_settings_that_are_wrong_are_told(more, error, message) -> None:
    with pytest.raises(error, match=message):
        TorchModel(settings(**more))


def test_an_artifact_never_names_the_class() -> None:
    stored = concrete(TorchModel, settings()).config
    with pytest.raises(LocalSettingRefused, match="the artifact sets 'module'"):
        build_config(TorchModel, "model", stored, {})
    own = {"module": f"{__name__}:Counting", "arguments": {}}
    config = build_config(TorchModel, "model", stored, own)
    assert config.module.endswith("Counting")


def test_it_exports_itself_or_says_what_is_missing() -> None:
    with pytest.raises(NotExportable, match="set `example`"):
        made().export()
    pytest.importorskip("onnxscript")
    model = made(example=("float32[4]",))
    exported = model.export()
    names = [tensor.name for tensor in exported.graph.initializer]
    assert names[:3] == ["scale", "first.weight", "first.bias"]
    # The same vector, from the same model, for a peer that has no PyTorch.
    content = exported.SerializeToString()
    plain = onnx_model(OnnxModelConfig(model=content, mode="train"))
    np.testing.assert_array_equal(plain.params(CTX), model.params(CTX))
    np.testing.assert_allclose(plain.forward(CTX, X), model.forward(CTX, X), rtol=1e-5, atol=1e-5)
    other = TorchModel(replace(settings(seed=5), model=content))
    np.testing.assert_array_equal(other.params(CTX), model.params(CTX))
    with pytest.raises(ParameterMismatch, match="model has no 'table"):
        TorchModel(replace(settings("TwoInputs"), model=content))


class Ending(nn.Module):
    """A linear layer, and what stands behind it."""

    def __init__(self, end: str, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, outputs)
        self.end = end

    def forward(self, x):
        y = self.first(x)
        return {
            "linear": lambda: y,
            "module": lambda: nn.Softmax(dim=1)(y),
            "function": lambda: y.softmax(-1).view(-1, 3),
            "sigmoid": lambda: torch.sigmoid(y).clone(),
            "log": lambda: torch.log_softmax(y, -1),
            "log sigmoid": lambda: nn.functional.logsigmoid(y),
            "transposed": lambda: y.t().softmax(0).t(),
            "scaled": lambda: y.softmax(-1) * 50,
            "by hand": lambda: y.exp() / y.exp().sum(1, keepdim=True),
        }[self.end]()


@pytest.mark.parametrize(
    ("end", "loss", "fits"),
    [
        ("linear", "softmax_cross_entropy", True), ("log", "softmax_cross_entropy", True),
        ("log", "nll", True), ("module", "mse", True), ("scaled", "softmax_cross_entropy", True),
        ("module", "softmax_cross_entropy", False), ("function", "softmax_cross_entropy", False),
        ("transposed", "softmax_cross_entropy", False), ("sigmoid", "bce_with_logits", False),
        ("log sigmoid", "bce_with_logits", False), ("linear", "nll", False),
        ("module", "nll", False), ("by hand", "softmax_cross_entropy", False),
    ],
)  # fmt: skip
def test_what_a_module_ends_in_fits_its_loss(tmp_path, end: str, loss: str, fits: bool) -> None:
    of_classes = loss in ("softmax_cross_entropy", "nll")
    y = LABELS if of_classes else np.eye(3, dtype=np.float32)[LABELS]
    np.savez(tmp_path / "ends.npz", x=X, y=y)
    data = ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "ends.npz")))
    config = TorchModelConfig(module=f"{__name__}:Ending", arguments={"end": end}, loss=loss)
    made = TorchModel(config)
    made.bind({"backend": ort(), "data_source": data})
    if fits:
        made.bootstrap(CTX)
        return
    with pytest.raises(LossDoesNotFit, match="does not fit the model"):
        made.bootstrap(CTX)
