"""Whole networks of image, attention and product ops, written in ONNX by hand and trained.

Each is written a second time in torch: after the same steps of plain gradient descent both have the
same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
from bbnode.components.data.base import MemoryDataSource
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.models.weights import named
from tests.components.fakes import CTX, onnx_model

Arrays = dict[str, np.ndarray]
OPSET, IR_VERSION = 25, 13
STEPS, RATE = 20, 0.05


@dataclass(frozen=True)
class HeldConfig:
    seed: int = 0
    batch_size: int = 0


class Held(MemoryDataSource):
    """Two arrays."""

    Config: ClassVar[type] = HeldConfig
    arrays: tuple[np.ndarray, np.ndarray]

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays


def source(x: np.ndarray, labels: np.ndarray) -> Held:
    made = Held(HeldConfig())
    made.arrays = (x, labels)
    return made


@dataclass(frozen=True)
class Network:
    """A network in both libraries, and data for it."""

    nodes: Sequence[NodeProto]
    weights: Arrays
    constants: Arrays
    x: np.ndarray
    labels: np.ndarray
    torch: Callable[[Any, Mapping[str, Any], Any], Any]  # torch, weights, x to logits

    def model(self) -> ModelProto:
        dims: list[int | str] = ["batch", *self.x.shape[1:]]
        elem = helper.np_dtype_to_tensor_dtype(self.x.dtype)
        out = [None] * self.labels.ndim + [None]
        graph = helper.make_graph(
            list(self.nodes), "network", [helper.make_tensor_value_info("x", elem, dims)],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, out)],
            [numpy_helper.from_array(a, n) for n, a in {**self.weights, **self.constants}.items()],
        )  # fmt: skip
        return helper.make_model(
            graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
        )


class Draw:
    """Weights at random, by name."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.made: Arrays = {}

    def __call__(self, name: str, *shape: int, scale: float = 0.4) -> str:
        self.made[name] = self.rng.normal(0, scale, shape).astype(np.float32)
        return name

    def ones(self, name: str, size: int) -> str:
        self.made[name] = np.ones(size, np.float32)
        return name


def unet(up: str) -> Network:
    """Ronneberger et al., 2015 (arXiv:1505.04597), of one level; a class for each pixel."""
    w = Draw()
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        node("Conv", ["x", w("down", 4, 1, 3, 3), w("down.b", 4)], ["a0"], **same),
        node("Relu", ["a0"], ["a"]),
        node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p", w("deep", 6, 4, 3, 3)], ["d0"], **same),
        node("Relu", ["d0"], ["d"]),
    ]
    constants: Arrays = {}
    if up == "transposed":
        kernel = [w("up", 6, 4, 2, 2), w("up.b", 4)]
        nodes.append(node("ConvTranspose", ["d", *kernel], ["u"], strides=[2, 2]))
    else:
        constants["scales"] = np.array([1, 1, 2, 2], np.float32)
        how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        nodes += [
            node("Resize", ["d", "", "scales"], ["r"], mode=up, **(how if up == "nearest" else {})),
            node("Conv", ["r", w("up", 4, 6, 3, 3), w("up.b", 4)], ["u"], **same),
        ]
    nodes += [
        node("Concat", ["a", "u"], ["c"], axis=1),
        node("Conv", ["c", w("head", 3, 8, 1, 1), w("head.b", 3)], ["h"]),
        node("Transpose", ["h"], ["logits"], perm=[0, 2, 3, 1]),
    ]

    def torch(t: Any, p: Mapping[str, Any], x: Any) -> Any:
        f = t.nn.functional
        a = f.relu(f.conv2d(x, p["down"], p["down.b"], padding=1))
        d = f.relu(f.conv2d(f.max_pool2d(a, 2), p["deep"], padding=1))
        if up == "transposed":
            u = f.conv_transpose2d(d, p["up"], p["up.b"], stride=2)
        else:
            mode = {"linear": "bilinear", "nearest": "nearest"}[up]
            u = f.conv2d(f.interpolate(d, scale_factor=2, mode=mode), p["up"], p["up.b"], padding=1)
        return f.conv2d(t.cat([a, u], 1), p["head"], p["head.b"]).permute(0, 2, 3, 1)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 1, 6, 8)).astype(np.float32)
    return Network(nodes, w.made, constants, x, rng.integers(0, 3, (3, 6, 8)), torch)


def vit() -> Network:
    """Dosovitskiy et al., 2021 (arXiv:2010.11929): patches, one block with Attention of 4 axes."""
    w = Draw()
    size, heads, tokens = 8, 2, 4
    nodes = [
        node("Conv", ["x", w("patch", size, 1, 4, 4)], ["q0"], strides=[4, 4]),
        node("Reshape", ["q0", "flat"], ["q1"]),
        node("Transpose", ["q1"], ["q2"], perm=[0, 2, 1]),
        node("Add", ["q2", w("place", tokens, size)], ["h"]),
        node("LayerNormalization", ["h", w.ones("n", size), w("n.b", size)], ["n0"]),
        node("MatMul", ["n0", w("qkv", size, 3 * size)], ["all"]),
        node("Reshape", ["all", "parts"], ["five"]),  # batch, tokens, 3, heads, width
        node("Transpose", ["five"], ["turned"], perm=[2, 0, 3, 1, 4]),
        node("Split", ["turned"], ["q3", "k3", "v3"], axis=0, num_outputs=3),
        *(node("Squeeze", [f"{each}3", "zero"], [each]) for each in "qkv"),
        node("Attention", ["q", "k", "v"], ["o4"]),
        node("Transpose", ["o4"], ["o5"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o5", "joined"], ["o6"]),
        node("MatMul", ["o6", w("out", size, size)], ["o7"]),
        node("Add", ["h", "o7"], ["h1"]),
        node("MatMul", ["h1", w("mlp", size, size)], ["m0"]),
        node("Gelu", ["m0"], ["m1"]),
        node("Add", ["h1", "m1"], ["h2"]),
        node("ReduceMean", ["h2", "one"], ["mean"], keepdims=0),
        node("Gemm", ["mean", w("head", size, 3), w("head.b", 3)], ["logits"]),
    ]
    constants = {
        "flat": np.array([0, size, -1]), "parts": np.array([0, 0, 3, heads, size // heads]),
        "zero": np.array([0]), "one": np.array([1]), "joined": np.array([0, 0, size]),
    }  # fmt: skip

    def torch(t: Any, p: Mapping[str, Any], x: Any) -> Any:
        f = t.nn.functional
        h = f.conv2d(x, p["patch"], stride=4).flatten(2).transpose(1, 2) + p["place"]
        n = f.layer_norm(h, (size,), p["n"], p["n.b"])
        q, k, v = (n @ p["qkv"]).reshape(-1, tokens, 3, heads, size // heads).permute(2, 0, 3, 1, 4)
        o = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, tokens, size)
        h = h + o @ p["out"]
        h = h + f.gelu(h @ p["mlp"])
        return h.mean(1) @ p["head"] + p["head.b"]

    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 1, 8, 8)).astype(np.float32)
    return Network(nodes, w.made, constants, x, rng.integers(0, 3, 6), torch)


def bert() -> Network:
    """Devlin et al., 2019 (arXiv:1810.04805): tokens, attention by Einsum, padding masked out."""
    w = Draw()
    size, heads, words = 8, 2, 7
    width = size // heads
    nodes = [
        node("Gather", [w("words", words, size), "x"], ["e"]),
        *(
            node("Einsum", ["e", w(each, size, heads, width)], [f"{each}1"],
                 equation="bsd,dhw->bhsw")
            for each in "qkv"
        ),
        node("Einsum", ["q1", "k1"], ["s0"], equation="bhiw,bhjw->bhij"),
        node("Mul", ["s0", "scale"], ["s1"]),
        node("Equal", ["x", "pad"], ["padded"]),
        node("Unsqueeze", ["padded", "axes"], ["hidden"]),
        node("Where", ["hidden", "low", "s1"], ["s2"]),
        node("Softmax", ["s2"], ["s3"], axis=-1),
        node("Einsum", ["s3", "v1"], ["o0"], equation="bhij,bhjw->bihw"),
        node("Einsum", ["o0", w("out", heads, width, size)], ["o1"], equation="...hw,hwd->...d"),
        node("Add", ["e", "o1"], ["r"]),
        node("LayerNormalization", ["r", w.ones("n", size), w("n.b", size)], ["n0"]),
        node("MatMul", ["n0", w("head", size, words)], ["logits"]),
    ]  # fmt: skip
    constants = {
        "scale": np.array(width**-0.5, np.float32), "pad": np.array(0), "axes": np.array([1, 2]),
        "low": np.array(-1e9, np.float32),
    }  # fmt: skip

    def torch(t: Any, p: Mapping[str, Any], x: Any) -> Any:
        f = t.nn.functional
        e = p["words"][x]
        q, k, v = (t.einsum("bsd,dhw->bhsw", e, p[each]) for each in "qkv")
        s = t.einsum("bhiw,bhjw->bhij", q, k) * width**-0.5
        s = s.masked_fill((x == 0)[:, None, None], -1e9).softmax(-1)
        o = t.einsum("bhij,bhjw->bihw", s, v)
        r = e + t.einsum("...hw,hwd->...d", o, p["out"])
        return f.layer_norm(r, (size,), p["n"], p["n.b"]) @ p["head"]

    rng = np.random.default_rng(1)
    x = rng.integers(1, words, (4, 5))
    x[0, 3:] = 0
    return Network(nodes, w.made, constants, x, rng.integers(0, words, (4, 5)), torch)


def gpt() -> Network:
    """Grouped queries, rotary places, RMS normalization: the ops that opset 23 brought."""
    w = Draw()
    size, heads, shared, words, length = 8, 4, 2, 6, 5
    width = size // heads
    angles = np.arange(length)[:, None] * 10.0 ** -np.arange(width // 2)[None]
    nodes = [
        node("Gather", [w("words", words, size), "x"], ["e"]),
        node("RMSNormalization", ["e", w.ones("n1", size)], ["a"], axis=-1, epsilon=1e-5),
        node("MatMul", ["a", w("q", size, size)], ["q0"]),
        node("MatMul", ["a", w("k", size, shared * width)], ["k0"]),
        node("MatMul", ["a", w("v", size, shared * width)], ["v0"]),
        node("RotaryEmbedding", ["q0", "cos", "sin", "places"], ["q1"], num_heads=heads),
        node("RotaryEmbedding", ["k0", "cos", "sin", "places"], ["k1"], num_heads=shared),
        node("Attention", ["q1", "k1", "v0"], ["o"], is_causal=1, q_num_heads=heads,
             kv_num_heads=shared),
        node("MatMul", ["o", w("out", size, size)], ["o1"]),
        node("Add", ["e", "o1"], ["h"]),
        node("RMSNormalization", ["h", w.ones("n2", size)], ["b"], axis=-1, epsilon=1e-5),
        node("MatMul", ["b", w("gate", size, 12)], ["g0"]),
        node("Swish", ["g0"], ["g1"]),
        node("MatMul", ["b", w("wide", size, 12)], ["g2"]),
        node("Mul", ["g1", "g2"], ["g3"]),
        node("MatMul", ["g3", w("back", 12, size)], ["g4"]),
        node("Add", ["h", "g4"], ["h2"]),
        node("MatMul", ["h2", w("head", size, words)], ["logits"]),
    ]  # fmt: skip
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    batch = 4
    constants = {"cos": cos, "sin": sin, "places": np.tile(np.arange(length), (batch, 1))}

    def torch(t: Any, p: Mapping[str, Any], x: Any) -> Any:
        f = t.nn.functional

        def turned(value: Any, count: int) -> Any:
            split = value.reshape(batch, length, count, width).transpose(1, 2)
            one, two = split.chunk(2, -1)
            c, s = t.from_numpy(cos), t.from_numpy(sin)
            return t.cat([one * c - two * s, one * s + two * c], -1)

        e = p["words"][x]
        a = f.rms_norm(e, (size,), p["n1"], 1e-5)
        q, k = turned(a @ p["q"], heads), turned(a @ p["k"], shared)
        v = (a @ p["v"]).reshape(batch, length, shared, width).transpose(1, 2)
        k, v = (each.repeat_interleave(heads // shared, 1) for each in (k, v))
        o = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = e + o.transpose(1, 2).reshape(batch, length, size) @ p["out"]
        b = f.rms_norm(h, (size,), p["n2"], 1e-5)
        h = h + (f.silu(b @ p["gate"]) * (b @ p["wide"])) @ p["back"]
        return h @ p["head"]

    rng = np.random.default_rng(1)
    x = rng.integers(0, words, (batch, length))
    return Network(nodes, w.made, constants, x, rng.integers(0, words, (batch, length)), torch)


def warped() -> Network:
    """Jaderberg et al., 2015 (arXiv:1506.02025): the network chooses what it looks at."""
    w = Draw()
    nodes = [
        node("Flatten", ["x"], ["f"]),
        node("MatMul", ["f", w("where", 30, 6, scale=0.05)], ["t0"]),
        node("Add", ["t0", "unit"], ["t1"]),
        node("Reshape", ["t1", "matrix"], ["theta"]),
        node("AffineGrid", ["theta", "size"], ["grid"], align_corners=0),
        node("GridSample", ["x", "grid"], ["seen"], mode="linear", padding_mode="border"),
        node("Flatten", ["seen"], ["s"]),
        node("MatMul", ["s", w("head", 30, 3)], ["logits"]),
    ]
    constants = {
        "unit": np.array([0.9, 0.1, 0.05, -0.1, 0.8, 0.03], np.float32),
        "matrix": np.array([-1, 2, 3]), "size": np.array([6, 1, 5, 6]),
    }  # fmt: skip

    def torch(t: Any, p: Mapping[str, Any], x: Any) -> Any:
        f = t.nn.functional
        theta = (x.flatten(1) @ p["where"] + t.from_numpy(constants["unit"])).reshape(-1, 2, 3)
        grid = f.affine_grid(theta, list(x.shape), align_corners=False)
        seen = f.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return seen.flatten(1) @ p["head"]

    rng = np.random.default_rng(1)
    # Smooth: where pixels meet the slope jumps, and rounding decides on which side it is.
    phase = rng.uniform(0, 3, (6, 1, 1, 1)) + np.arange(5)[:, None] * 0.3 + np.arange(6) * 0.2
    x = np.sin(phase).astype(np.float32)
    return Network(nodes, w.made, constants, x, rng.integers(0, 3, 6), torch)


NETWORKS: dict[str, Callable[[], Network]] = {
    "unet-transposed": lambda: unet("transposed"),
    "unet-nearest": lambda: unet("nearest"),
    "unet-linear": lambda: unet("linear"),
    "vit": vit,
    "bert": bert,
    "gpt": gpt,
    "spatial-transformer": warped,
}


def trained(network: Network) -> tuple[float, float, Arrays]:
    """The loss before and after, and the weights."""
    config = OnnxModelConfig(
        model=network.model().SerializeToString(),
        learning_rate=RATE,
        trainable=tuple(network.weights),
    )
    data = source(network.x, network.labels)
    model = onnx_model(config, data)
    x, labels = data.next_batch(CTX)
    before = float(model.compute_loss(CTX, x, labels))
    model.train(CTX, epochs=STEPS, batch=len(network.x))
    after = float(model.compute_loss(CTX, x, labels))
    shapes = {name: array.shape for name, array in network.weights.items()}
    return before, after, dict(named(np.asarray(model.params(CTX)), shapes))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_learns(name: str) -> None:
    before, after, _ = trained(NETWORKS[name]())
    assert after < before


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_learns_as_torch_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    network = NETWORKS[name]()
    _, _, found = trained(network)
    weights = {n: torch.tensor(a, requires_grad=True) for n, a in network.weights.items()}
    x, labels = torch.tensor(network.x), torch.tensor(network.labels)
    for _ in range(STEPS):
        logits = network.torch(torch, weights, x)
        classes = logits.shape[-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))
        grads = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, grad in zip(weights.values(), grads, strict=True):
                weight -= RATE * grad
    for key, weight in weights.items():
        np.testing.assert_allclose(found[key], weight.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["unet-transposed", "vit", "bert", "gpt"])
def test_both_backends_agree(name: str) -> None:
    network = NETWORKS[name]()
    config = OnnxModelConfig(
        model=network.model().SerializeToString(), trainable=tuple(network.weights)
    )
    found = []
    for backend in (None, ReferenceBackend(ReferenceBackendConfig())):
        model = onnx_model(config, backend=backend)
        found.append(model.gradient(CTX, network.x, network.labels))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
