"""Modules of PyTorch as forward models, and weights back; torch itself is the reference."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from bbnode.components.autodiff.forward import read_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from tests.components.fakes import CTX, onnx_model

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402

from bbnode.torch import ExportFailed, WeightsDoNotFit, export, load_weights  # noqa: E402

torch.set_num_threads(1)


class Small(nn.Module):
    """A weight that two layers share, a frozen one, a table that is none, dropout, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(48, dtype=torch.float32).reshape(6, 8) / 50)

    def forward(self, ids, mask):
        x = self.drop((self.embed(ids) + self.table) * self.scale * mask.unsqueeze(-1))
        return {"logits": self.head(self.norm(x.mean(1)))}


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(3)
    module = Small()
    ids, mask = torch.randint(0, 11, (2, 6)), torch.ones(2, 6)
    module(ids, mask)  # running statistics that are not the initial ones
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = export(module, (ids, mask))
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    return module, model


def test_initializers_are_the_parameters_and_running_statistics(small) -> None:
    module, model = small
    names = [tensor.name for tensor in model.graph.initializer]
    parameters = [name for name, _ in module.named_parameters()]
    assert names == [*parameters, "norm.running_mean", "norm.running_var"]
    assert [port.name for port in model.graph.input] == ["ids", "mask"]
    assert [port.type.tensor_type.elem_type for port in model.graph.input] == [7, 1]
    assert {p.type.tensor_type.shape.dim[0].dim_param for p in model.graph.input} == {"batch"}
    (dropout,) = (node for node in model.graph.node if node.op_type == "Dropout")
    assert len(dropout.input) == 2  # without the flag that it trains


def test_only_what_torch_trains_is_trained(small) -> None:
    module, model = small
    trained = [name for name, each in module.named_parameters() if each.requires_grad]
    assert [tensor.name for tensor in read_forward(model).parameters] == trained
    asked = read_forward(model, ["scale"])
    assert [tensor.name for tensor in asked.parameters] == ["scale"]


def test_weights_go_back_by_name(small, tmp_path) -> None:
    module, model = small
    other = Small()
    for tensor in model.graph.initializer:
        changed = numpy_helper.to_array(tensor) + np.float32(0.25)
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    load_weights(other, tmp_path / "m.onnx")
    state = module.state_dict()
    for name, value in other.state_dict().items():
        if name not in ("table", "norm.num_batches_tracked"):
            torch.testing.assert_close(value, state[name] + 0.25)
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.bias"), "no weights for 'norm.bias' of Small"),
        (lambda w: w.update(other=np.zeros(3, np.float32)), "Small has no 'other'"),
        (lambda w: w.update(scale=np.zeros(3, np.float32)), r"'scale' has the shape \[3\]"),
        (lambda w: w.update(scale=np.full(8, np.nan, np.float32)), "'scale' holds NaN"),
        (lambda w: w.update(scale=np.zeros(8, "U1")), "'scale' is <U1"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, message) -> None:
    module = Small()
    weights = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    weights["embed.weight"] += 1
    change(weights)
    before = module.embed.weight.clone()
    with pytest.raises(WeightsDoNotFit, match=message):
        load_weights(module, weights)
    assert torch.equal(module.embed.weight, before)


def test_a_file_that_is_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(WeightsDoNotFit, match="no ONNX model can be read"):
        load_weights(Small(), tmp_path / "absent.onnx")


class Detached(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).detach()


class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Unused(nn.Linear):
    def forward(self, x):
        return x @ self.weight


class Silent(nn.Linear):
    def forward(self, x):
        return None


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) * (self.calls + 1)


class SharedHeads(nn.Module):
    """Keys of one head, repeated for two: a Reshape whose sizes ONNX does not infer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x):
        q = self.q(x).view(x.shape[0], -1, 2, 4).transpose(1, 2)
        k = self.k(x).view(x.shape[0], -1, 1, 4).transpose(1, 2).repeat_interleave(2, 1)
        return nn.functional.scaled_dot_product_attention(q, k, k).mean((1, 2))


def test_attention_with_repeated_keys_trains() -> None:
    torch.manual_seed(0)
    module = SharedHeads()
    x, labels = torch.randn(5, 3, 4), torch.tensor([0, 1, 2, 3, 0])
    model = onnx_model(OnnxModelConfig(model=export(module, x).SerializeToString()))
    grads, loss = model.gradient(CTX, x.numpy(), labels.numpy())
    wanted = nn.functional.cross_entropy(module(x), labels)
    wanted.backward()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
    flat = np.concatenate([p.grad.numpy().reshape(-1) for p in module.parameters()])
    np.testing.assert_allclose(grads, flat, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (Counting(3, 3), torch.ones(2, 3), "changes the buffer 'calls' in training mode"),
        (nn.BatchNorm1d(3, momentum=None), torch.ones(2, 3), "has momentum=None"),
        (Detached(3, 3), torch.ones(2, 3), r"stops gradients with detach\(\)"),
        (Branch(3, 3), torch.ones(2, 3), "can't export Branch with an open batch axis"),
        (Unused(3, 3), torch.ones(2, 3), "lost the parameter 'bias'"),
        (Silent(3, 3), torch.ones(2, 3), "returns no tensor"),
        (nn.Linear(3, 2), torch.ones(2, 4), "Linear does not take the example"),
        (nn.Linear(3, 2), torch.ones(0, 3), r"has the shape \[0, 3\]"),
        (nn.Linear(3, 2), "x", "argument 0 of the example is str"),
        (nn.Bilinear(3, 3, 2), (torch.ones(2, 3), torch.ones(3, 3)), r"batches of \[2, 3\]"),
        (nn.Linear, torch.ones(2, 3), "type is not a torch.nn.Module"),
    ],
)
def test_what_would_come_out_wrong_is_refused(module, example, message) -> None:
    with pytest.raises(ExportFailed, match=message):
        export(module, example)


def test_names_and_open_axes_are_checked() -> None:
    linear = nn.Linear(3, 2)
    with pytest.raises(ExportFailed, match="dynamic names 'ids'; the inputs are input"):
        export(linear, torch.ones(2, 3), dynamic={"ids": {1: "time"}})
    with pytest.raises(ExportFailed, match="'input' has no axis 2"):
        export(linear, torch.ones(2, 3), dynamic={"input": {2: "time"}})
    with pytest.raises(ExportFailed, match=r"2 input name\(s\)"):
        export(linear, torch.ones(2, 3), inputs=["a", "b"])
    with pytest.raises(ExportFailed, match=r"2 output name\(s\) for 1 output"):
        export(linear, torch.ones(2, 3), outputs=["a", "b"])
    with pytest.raises(ExportFailed, match=r"'bias' is called like a parameter.*inputs="):
        export(linear, torch.ones(2, 3), inputs=["bias"])


def test_the_module_s_own_warnings_are_told() -> None:
    class Loud(nn.Linear):
        def forward(self, x):
            warnings.warn("take care", stacklevel=1)
            return super().forward(x)

    with pytest.warns(UserWarning, match="take care"):
        export(Loud(3, 2), np.ones((1, 3), np.float32))


class Between(torch.nn.Module):
    """Two layers, and what a function makes of the numbers between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.a, self.o, self.between = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), between

    def forward(self, x: Any) -> Any:
        return self.o(self.between(torch.relu(self.a(x))))


def stopped_in_place(h: Any) -> Any:
    return h.clone().detach_() + 0 * h


def mean_of_inference(h: Any) -> Any:
    with torch.inference_mode():
        mean = h.mean()
    return h - mean


def changed_in_place(h: Any) -> Any:
    h = h.clone()
    h[:, 0] = h[:, 1] * 2
    h[:, [2, 3]] += h[:, [4, 5]]
    return h


def scattered(h: Any) -> Any:
    index = torch.tensor([[0, 1, 1, 2, 3, 4, 5, 6]]).expand(h.shape[0], -1)
    return torch.zeros_like(h).scatter_add(1, index, h)


@pytest.mark.parametrize("between", [stopped_in_place, mean_of_inference])
def test_a_gradient_that_is_stopped_is_found_by_the_parameter(between: Any) -> None:
    net = Between(between)
    with pytest.raises(ExportFailed, match=r"the gradient of 'a\.weight' is another one"):
        export(net, torch.randn(3, 4))
    assert net.training
    assert export(net, torch.randn(3, 4), check_gradients=False).graph.initializer


@pytest.mark.parametrize("between", [changed_in_place, scattered])
def test_gradients_that_are_said_otherwise_pass(between: Any) -> None:
    assert export(Between(between), torch.randn(3, 4)).graph.initializer


def test_dropout_is_no_difference_and_statistics_of_batches_stay() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
            self.d, self.o = torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            h = torch.nn.functional.dropout(self.d(self.b(self.a(x))), 0.3, self.training)
            return self.o(h), h.sum(1)

    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert len(export(net, torch.randn(3, 4)).graph.output) == 2
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_what_the_author_means_is_a_switch() -> None:
    net = Between(lambda h: h.detach() + h)
    with pytest.raises(ExportFailed, match="export with check_gradients=False"):
        export(net, torch.randn(3, 4))
    assert export(net, torch.randn(3, 4), check_gradients=False).graph.initializer
