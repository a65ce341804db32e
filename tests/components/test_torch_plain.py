"""What PyTorch's exporters write of embeddings, graphs and copied layers, with its gradients."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest

from bbnode.components.autodiff.forward import read_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.models.weights import named
from bbnode.ir.values import Composite
from tests.components.fakes import CTX, onnx_model

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from bbnode.torch import ExportFailed, export  # noqa: E402

torch.set_num_threads(1)
LABELS = np.array([0, 1, 2, 0])
MODES = ("sum", "mean", "max")


def gradients(model: bytes, arguments, labels=LABELS) -> dict[str, np.ndarray]:
    component = onnx_model(OnnxModelConfig(model=model))
    arrays = [each.numpy() for each in arguments]
    found, _ = component.gradient(CTX, Composite(arrays) if len(arrays) > 1 else arrays[0], labels)
    return named(found, component.layout)


def assert_as_torch(module: nn.Module, *arguments, model: bytes | None = None) -> None:
    module.eval()
    if model is None:
        example = arguments if len(arguments) > 1 else arguments[0]
        model = export(module, example).SerializeToString()
    made = gradients(model, arguments)
    module.zero_grad()
    functional.cross_entropy(module(*arguments), torch.tensor(LABELS)).backward()
    wanted = {name: each.grad.numpy() for name, each in module.named_parameters()}
    assert wanted.keys() <= made.keys() or model is not None
    for name, grad in made.items():
        if name in wanted:
            np.testing.assert_allclose(grad, wanted[name], atol=1e-6)


class Bag(nn.Module):
    def __init__(self, form: str = "rows", **settings) -> None:
        super().__init__()
        self.bag, self.head, self.form = nn.EmbeddingBag(20, 6, **settings), nn.Linear(6, 3), form

    def forward(self, ids):
        rows, size = ids.shape
        if self.form == "rows":
            return self.head(self.bag(ids))
        if self.form == "weights":
            return self.head(self.bag(ids, per_sample_weights=0.5 + ids.to(torch.float32) / 9))
        starts = torch.arange(rows + (self.form == "ends")) * size
        return self.head(self.bag(ids.reshape(-1), starts))


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        *((form, {"mode": mode}) for form in ("rows", "offsets") for mode in MODES),
        ("weights", {"mode": "sum"}),
        ("ends", {"mode": "mean", "include_last_offset": True}),
        *((form, {"mode": mode, "padding_idx": 3})
          for form in ("rows", "offsets") for mode in MODES),
    ],
)  # fmt: skip
def test_bags_of_embeddings(form: str, settings) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[3, 1, 2, 3, 4], [5, 5, 19, 0, 3], [3, 3, 3, 3, 3], [7, 8, 9, 10, 11]])
    assert_as_torch(Bag(form, **settings), ids)


class Words(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 6, **settings), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class Given(nn.Module):
    def __init__(self, weight) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(weight), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(functional.embedding(ids, self.weight, padding_idx=0).mean(1))


IDS = torch.tensor([[0, 1, 2, 0, 4], [5, 5, 19, 0, 3], [1, 2, 3, 4, 5], [0, 19, 9, 10, 11]])


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 0}, {"padding_idx": -1}])
def test_the_row_of_padding_gets_no_gradient(settings) -> None:
    torch.manual_seed(0)
    assert_as_torch(Words(**settings), IDS)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: Given(torch.randn(20, 6)), "padding_idx=0 from its gradient"),
        (lambda: Words(max_norm=1.0), "max_norm changes its weight"),
        (lambda: Words(scale_grad_by_freq=True), "by the frequency of ids"),
        (lambda: Bag(max_norm=1.0), "max_norm changes its weight"),
    ],
)
def test_gradients_of_embeddings_that_onnx_cannot_say(module, says: str) -> None:
    with pytest.raises(ExportFailed, match=says):
        export(module(), IDS)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return -grad


class Hooked(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 8), nn.Linear(8, 3), how
        if how == "parameter":
            self.a.weight.register_hook(lambda grad: grad * 0)
        if how == "accumulated":
            self.a.weight.register_post_accumulate_grad_hook(lambda _: None)
        if how == "module":
            self.a.register_full_backward_hook(lambda *_: None)
        if how == "before":
            self.a.register_full_backward_pre_hook(lambda *_: None)

    def forward(self, x):
        h = self.a(x)
        if self.how == "inside" and h.requires_grad:
            h.register_hook(lambda grad: -grad)
        if self.how == "function":
            h = Reversed.apply(h)
        if self.how == "checkpoint":
            h = torch.utils.checkpoint.checkpoint(torch.relu, h, use_reentrant=False)
        return self.b(h)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("parameter", "a hook changes the gradient of 'a.weight'"),
        ("accumulated", "a hook changes the gradient of 'a.weight'"),
        ("module", "a backward hook of 'a' may change"),
        ("before", "a backward hook of 'a' may change"),
        ("inside", "forward changes gradients by a hook"),
        ("function", "Reversed .* has a gradient of its own"),
    ],
)
def test_gradients_that_are_changed_are_refused(how: str, says: str) -> None:
    with pytest.raises(ExportFailed, match=f"{says}.*which ONNX can't say"):
        export(Hooked(how), torch.randn(4, 4))


def test_a_checkpoint_computes_the_same_gradient() -> None:
    assert_as_torch(Hooked("checkpoint"), torch.randn(4, 4))


# --- graphs -------------------------------------------------------------------------------------


class Graphs(nn.Module):
    """Messages of a batch of graphs, nodes [B, N, 5] and edges [B, 2, E], gathered by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.own, self.head, self.how = nn.Linear(5, 6), nn.Linear(6, 3), how
        self.attention = nn.Parameter(torch.randn(12)) if how == "attention" else None

    def forward(self, nodes, edges):
        batch, count, _ = nodes.shape
        first = (torch.arange(batch) * count)[:, None]
        source, target = ((edges[:, at] + first).reshape(-1) for at in (0, 1))
        h = self.own(nodes.reshape(batch * count, -1))
        made = self.gathered(h, h[source], source, target)
        return self.head(made.reshape(batch, count, -1).mean(1))

    def gathered(self, h, sent, source, target):
        zeros, index = torch.zeros_like(h), target.unsqueeze(-1).expand(-1, h.shape[-1])
        match self.how:
            case "index_add":
                return h + zeros.index_add(0, target, sent)
            case "in_place":
                return h + zeros.index_add_(0, target, sent)
            case "scatter_add":
                return h + zeros.scatter_add(0, index, sent)
            case "index_put":
                return h + zeros.index_put((target,), sent, accumulate=True)
            case "normalized":
                degree = torch.zeros(h.shape[0]).index_add(0, target, torch.ones(target.shape[0]))
                weight = degree.clamp(min=1).pow(-0.5)
                scaled = sent * (weight[source] * weight[target]).unsqueeze(-1)
                return zeros.index_add(0, target, scaled)
            case "attention":
                score = (torch.cat([sent, h[target]], -1) * self.attention).sum(-1)
                score = functional.leaky_relu(score).exp()
                total = torch.zeros(h.shape[0]).scatter_add(0, target, score)
                return zeros.index_add(0, target, sent * (score / total[target]).unsqueeze(-1))
            case "index_reduce":
                return h + zeros.index_reduce(0, target, sent, "mean", include_self=False)
            case "mean_with_self":
                return h.scatter_reduce(0, index, sent, reduce="mean", include_self=True)
            case "mean_in_place":
                return zeros.scatter_reduce_(0, index, sent, reduce="mean", include_self=False)
            case kind:
                return h + zeros.scatter_reduce(0, index, sent, reduce=kind, include_self=False)


HOWS = [
    *("index_add", "in_place", "scatter_add", "index_put", "normalized", "attention"),
    *("index_reduce", "mean_with_self", "mean_in_place", "mean", "sum", "amax", "amin"),
]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning")
def test_graph_networks(how: str) -> None:
    torch.manual_seed(1)
    assert_as_torch(Graphs(how), torch.randn(4, 6, 5), torch.randint(0, 6, (4, 2, 9)))


def test_edges_without_a_batch_are_refused_with_what_to_do() -> None:
    with pytest.raises(ExportFailed, match=r"given with each example \(\[batch, 2, edges\]\), or"):
        export(Graphs("index_add"), (torch.randn(4, 6, 5), torch.randint(0, 6, (2, 9))))


# --- PyTorch's own exporters --------------------------------------------------------------------


def legacy(module: nn.Module, example, *, trains: bool = False, opset: int = 17) -> bytes:
    out, more = io.BytesIO(), {}
    if trains:
        more["training"] = torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, example, out, dynamo=False, input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "b"}}, opset_version=opset, **more,
        )  # fmt: skip
    return out.getvalue()


def dynamo(module: nn.Module, example) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            module.eval(), (example,), dynamo=True, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("b")},),
        ).model_proto  # fmt: skip


class Attention(nn.Module):
    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        if layers:
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.a = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        else:
            self.a = nn.MultiheadAttention(8, 2, batch_first=True)
        self.o, self.layers = nn.Linear(8, 3), layers

    def forward(self, x):
        h = self.a(x) if self.layers else self.a(x, x, x, need_weights=False)[0]
        return self.o(h.mean(1))


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("layers", [0, 2])
def test_attention_of_the_older_exporter_trains(layers: int, opset: int) -> None:
    """Copied layers are equal before any training, and the exporter keeps one of each tensor."""
    module, x = Attention(layers).eval(), torch.randn(4, 6, 8)
    model = legacy(module, x, opset=opset)
    trained = read_forward(onnx.load_from_string(model)).parameters
    count = sum(int(np.prod(tensor.dims)) for tensor in trained)
    assert count == sum(each.numel() for each in module.parameters())
    assert_as_torch(module, x, model=model)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("trains", "opset"), [(False, 17), (True, 17), (True, 13)])
def test_batch_norms_of_the_older_exporter_train_and_come_out(trains, opset, affine) -> None:
    module = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6, affine=affine), nn.ReLU(), nn.Linear(6, 6),
        nn.BatchNorm1d(6, affine=affine), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    model = legacy(module.train(trains), torch.randn(4, 5), trains=trains, opset=opset)
    component = onnx_model(OnnxModelConfig(model=model, mode="train"))
    statistics = set(component.layout) - set(component.trained)
    assert len(statistics) == 4
    component.gradient(CTX, np.random.default_rng(0).normal(size=(4, 5)).astype("f4"), LABELS)
    held = {tensor.name for tensor in component.export().graph.initializer}
    assert held >= statistics


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(1) * 0.7)
        self.place = nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("turns", 1e4 ** (-torch.arange(0, 8, 2) / 8.0))

    def forward(self, x):
        angle = torch.arange(x.shape[1]).unsqueeze(-1) * self.turns
        x = x + torch.cat([angle.sin(), angle.cos()], -1) + self.place
        logvar = self.l(x.mean(1))
        return (1 + logvar - logvar.exp()) * self.scale


def test_constants_of_a_formula_and_frequencies_are_left_in_both_exports() -> None:
    module, x = Variational(), torch.randn(4, 6, 8)
    new = read_forward(dynamo(module, x)).choice
    assert set(new.trained) == {"l.weight", "l.bias", "scale", "place"}
    old = read_forward(onnx.load_from_string(legacy(module, x))).choice
    assert set(old.trained) == {"l.weight", "l.bias", "place"}
    assert old.left["turns"].startswith("the frequencies of sines or cosines")
    assert "scale" in old.warnings  # which that file has no way to tell from the 1


def test_equal_norms_of_a_fresh_net_are_warned_of() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    choice = read_forward(dynamo(module, torch.randn(4, 8))).choice
    assert {"1.weight", "1.bias"} <= choice.warnings.keys()
    own = read_forward(export(module, torch.randn(4, 8))).choice
    assert own.warnings == {}
    assert len(own.trained) == 8
