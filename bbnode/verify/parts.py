"""Models in parts: normalisation that stays on a client, and a model that is cut in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.programs import FedBN, SplitLearning
from bbnode.verify import reference as numpy_
from bbnode.verify.check import Compared, checked
from bbnode.verify.reference import CLASSES, FEATURES, RATE, STEPS, Client, Vector
from bbnode.verify.rounds import ROUNDS, made
from bbnode.verify.runs import Star

WIDTH, EPSILON = 5, 1e-5
Net = dict[str, Vector]


def normalised() -> ModelProto:
    """Return the model x @ w, normalised over the batch, @ head."""
    draw = np.random.default_rng(3)
    tensors = {
        "w": draw.normal(size=(FEATURES, WIDTH)), "bn.scale": np.ones(WIDTH),
        "bn.bias": np.zeros(WIDTH), "bn.mean": np.zeros(WIDTH), "bn.var": np.ones(WIDTH),
        "head": draw.normal(size=(WIDTH, CLASSES)),
    }  # fmt: skip
    norm = ["h", "bn.scale", "bn.bias", "bn.mean", "bn.var"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("BatchNormalization", norm, ["n"], epsilon=EPSILON),
        helper.make_node("MatMul", ["n", "head"], ["y"]),
    ]
    shapes = (("x", FEATURES), ("y", CLASSES))
    xs, ys = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])]
        for name, size in shapes
    )
    held = [numpy_helper.from_array(t.astype(np.float32), name) for name, t in tensors.items()]
    graph = helper.make_graph(nodes, "normalised", xs, ys, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _stepped(client: Client, net: Net) -> Net:
    """Return the net after a step of SGD on all examples, normalised over these."""
    h = client.x @ net["w"]
    apart = h - h.mean(axis=0)
    inverse = 1 / np.sqrt((apart**2).mean(axis=0) + EPSILON)
    unit = apart * inverse
    n = unit * net["bn.scale"] + net["bn.bias"]
    scores = n @ net["head"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = powers / powers.sum(axis=1, keepdims=True)
    wrong[np.arange(client.count), client.y] -= 1
    wrong /= client.count
    by_n = wrong @ net["head"].T
    by_unit = by_n * net["bn.scale"]
    by_h = inverse * (by_unit - by_unit.mean(axis=0) - unit * (by_unit * unit).mean(axis=0))
    grads = {
        "w": client.x.T @ by_h, "bn.scale": (by_n * unit).sum(axis=0), "bn.bias": by_n.sum(axis=0),
        "head": n.T @ wrong,
    }  # fmt: skip
    return {name: net[name] - RATE * grads[name] for name in net}


def _split(vector: Any, layout: Any, names: Any) -> Net:
    found, at = {}, 0
    for name, shape in layout.items():
        size = int(np.prod(shape))
        if name in names:
            found[name] = np.asarray(vector[at : at + size], np.float64).reshape(shape)
        at += size
    return found


@checked("FedBN", "fedbn", "normalisation of a client's own, and the rest in common")
def _(folder: Path) -> Iterator[Compared]:
    star = Star(folder, made(FedBN, model=normalised()), numpy_.clients())
    layout, names = star.program.layout, ("w", "bn.scale", "bn.bias", "head")
    common = _split(star.start, layout, names)
    own = [dict(common) for _ in star.peers]
    counts = [each.count for each in star.peers]
    for found in star.rounds(ROUNDS):
        for at, client in enumerate(star.peers):
            net = {**own[at], "w": common["w"], "head": common["head"]}
            for _ in range(STEPS):
                net = _stepped(client, net)
            own[at] = net
        for name in ("w", "head"):
            common[name] = numpy_.mean([net[name] for net in own], counts)
            yield Compared(_split(found["model"], layout, names)[name], common[name], name)
        for node, net in zip(star.nodes, own, strict=True):
            kept = _split(node.component("local").params(None), layout, names)
            for name in ("bn.scale", "bn.bias"):
                yield Compared(kept[name], net[name], name)


@checked("SplitLearning", "split-learning", "the step of the whole model, cut behind a layer")
def _(folder: Path) -> Iterator[Compared]:
    client = numpy_.table(30, 6)
    program = SplitLearning(
        model=(FEATURES, 6, CLASSES), cut="layer0.out", batch=30, learning_rate=RATE
    )
    star = Star(folder, program, [client])
    net: Net = {}
    for node, slot in ((star.nodes[0], "bottom"), (star.server, "top")):
        part = node.component(slot)
        for name, value in part.saved_weights(part.serialize()).items():
            net[name] = np.asarray(value, np.float64)
    w0, b0, w1, b1 = _layers(net)
    for _ in range(ROUNDS):
        found = star.begin(star.nodes[0])
        inner = client.x @ w0 + b0
        hidden = np.maximum(inner, 0)
        scores = hidden @ w1 + b1
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong = powers / powers.sum(axis=1, keepdims=True)
        loss = -np.log(wrong[np.arange(client.count), client.y]).mean()
        wrong[np.arange(client.count), client.y] -= 1
        wrong /= client.count
        back = (wrong @ w1.T) * (inner > 0)
        w1, b1 = w1 - RATE * hidden.T @ wrong, b1 - RATE * wrong.sum(axis=0)
        w0, b0 = w0 - RATE * client.x.T @ back, b0 - RATE * back.sum(axis=0)
        yield Compared(float(found["loss"]), loss, "loss")
    trained: Net = {}
    for node, slot in ((star.nodes[0], "bottom"), (star.server, "top")):
        part = node.component(slot)
        for name, value in part.saved_weights(part.serialize()).items():
            trained[name] = np.asarray(value, np.float64)
    for mine, theirs in zip((w0, b0, w1, b1), _layers(trained), strict=True):
        yield Compared(theirs, mine, "weights")


def _layers(net: Net) -> tuple[Vector, Vector, Vector, Vector]:
    """Return weights and biases of two layers, the first one first."""
    names = sorted(net, key=lambda name: (name.partition(".")[0], net[name].ndim == 1))
    w0, b0, w1, b1 = (net[name] for name in names)
    return w0, b0, w1, b1
