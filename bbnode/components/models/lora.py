"""Low-rank adapters beside frozen weights (LoRA, Hu et al., 2021, arXiv:2106.09685).

Rule: an adapter is two initializers and a few plain nodes beside a MatMul, a Gemm or a Conv; the
weight stays as it is, of whatever type it is. B begins as zeros, so that the model first gives what
it gave without.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.autodiff import InvalidForwardModel
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.onnx_file import subgraph_of

Matrix = npt.NDArray[np.float32]

# Where torch's exporter says of a node which module made it: its path and those around it.
_TORCH_SCOPES = "pkg.torch.onnx.name_scopes"
_ADAPTED = ("MatMul", "Gemm", "Conv")
# A weight may come to its node through these.
_BETWEEN = frozenset({"Transpose", "DequantizeLinear", "Cast", "Identity"})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16,
                     TensorProto.BFLOAT16})  # fmt: skip
_TOLD = 8  # names in one message
_MOST_RANK = 65_536


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters beside layers of a model, which are trained in place of the weights.

    Attributes:
        targets: names of MatMuls, Gemms and Convs, or patterns as of `fnmatch` ("*.q_proj"). A
            layer has the name of its node, of its weight (with and without ".weight"), and of
            the torch module that it was exported from.
        rank: of an adapter; of each group, where a Conv has groups.
        alpha: an adapter counts alpha / rank times.
        seed: of the initial values of A, uniform in ±1 / sqrt(inputs of one output); B begins as
            zeros.
        merge: an export has the adapters in the weights. Otherwise, and where a weight is
            quantized, they stay beside them as nodes.
    """

    targets: tuple[str, ...]
    rank: int = 8
    alpha: float = 16.0
    seed: int = 0
    merge: bool = True

    def check(self) -> None:
        """Raise InvalidForwardModel for a number that is out of its range."""
        for good, what in (
            (bool(self.targets), "lora has no targets"),
            (1 <= self.rank <= _MOST_RANK, f"the rank of lora is {self.rank}"),
            (0 < self.alpha < math.inf, f"alpha of lora is {self.alpha}"),
            (self.seed >= 0, f"the seed of lora is {self.seed}"),
        ):
            if not good:
                raise InvalidForwardModel(
                    what=what,
                    remedy="name layers in `targets`; take a rank and a seed that are whole "
                    f"numbers (from 1 to {_MOST_RANK}, from 0), and an alpha above 0",
                )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer that can have an adapter.

    `shape` and `elem_type` are those of the weight as the node reads it; `at` is the node's place,
    `base` how adapters are called after it. A `plain` weight is an initializer that the node reads.
    """

    node: NodeProto
    at: int
    shape: tuple[int, ...]
    elem_type: int
    names: tuple[str, ...]
    base: str
    plain: bool

    @property
    def groups(self) -> int:
        return int(_attribute(self.node, "group", 1)) if self.node.op_type == "Conv" else 1

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        if self.node.op_type == "Conv":
            outputs, inputs, *kernel = self.shape
            return (self.groups * rank, inputs, *kernel), (outputs, rank, *(1 for _ in kernel))
        inputs, outputs = _product_shape(self.node, self.shape)
        return (inputs, rank), (rank, outputs)


def with_adapters(model: ModelProto, lora: Lora) -> tuple[ModelProto, tuple[str, ...]]:
    """Return a model with adapters beside the layers that `lora` names, and the adapters' names.

    These are `<layer>.lora_A` and `<layer>.lora_B`, float32: [K, rank] and [rank, N] of a product
    [.., K] x [K, N]; of a Conv the kernels of two Convs, one after the other, the first of which
    strides and pads as the layer does.

    Raises:
        InvalidForwardModel: a target fits no such layer, or a number is out of its range.
    """
    made, layers = _opened(model, lora)
    return made, _add(made, layers, lora)


def with_trained(model: ModelProto, lora: Lora, adapters: Mapping[str, Matrix]) -> ModelProto:
    """Return the author's model with trained adapters: in its weights, where `lora` merges.

    A quantized weight can't take one, so that its adapter stays beside it.

    Args:
        model: without adapters.
        adapters: values by the names that `with_adapters` gives.
    """
    made, layers = _opened(model, lora)
    beside = {}
    for base, layer in layers.items():
        if lora.merge and layer.plain:
            delta = _delta(layer, adapters[f"{base}.lora_A"], adapters[f"{base}.lora_B"])
            _merge(made, layer, lora.scale * delta)
        else:
            beside[base] = layer
    _add(made, beside, lora)
    for tensor in made.graph.initializer:
        if tensor.name in adapters:
            tensor.CopyFrom(numpy_helper.from_array(adapters[tensor.name], tensor.name))
    return made


def _opened(model: ModelProto, lora: Lora) -> tuple[ModelProto, dict[str, _Layer]]:
    """Return a copy of a model, and its layers that get adapters, by the adapters' names."""
    lora.check()
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    used = {name for node in graph.node for name in (*node.input, *node.output, node.name)}
    used |= {each.name for each in graph.input} | {each.name for each in graph.initializer}
    taken = {name.partition(".lora_")[0] for name in used if ".lora_" in name}
    named: dict[str, _Layer] = {}
    for layer in _chosen(made, lora.targets):
        base = _free(layer.base, taken | named.keys())
        named[base] = layer
    return made, named


def _add(model: ModelProto, layers: Mapping[str, _Layer], lora: Lora) -> tuple[str, ...]:
    graph = model.graph
    after: dict[int, list[NodeProto]] = {}
    names: list[str] = []
    for index, (base, layer) in enumerate(layers.items()):
        first, second, scale = (f"{base}.lora_{part}" for part in ("A", "B", "scale"))
        shape_a, shape_b = layer.shapes(lora.rank)
        fan_in = math.prod(shape_a[1:]) if layer.node.op_type == "Conv" else shape_a[0]
        bound = 1 / math.sqrt(max(fan_in, 1))
        # A generator for each: the values of one do not depend on the sizes of those before it.
        drawn = np.random.default_rng([lora.seed, index]).uniform(-bound, bound, shape_a)
        for name, values in (
            (first, drawn.astype(np.float32)),
            (second, np.zeros(shape_b, np.float32)),
            (scale, np.asarray(lora.scale, np.float32)),
        ):
            graph.initializer.append(numpy_helper.from_array(values, name))
        after[layer.at] = _beside(layer, base)
        names += (first, second)
    nodes = list(graph.node)
    graph.ClearField("node")
    for at, node in enumerate(nodes):
        graph.node.extend([node, *after.get(at, [])])
    return tuple(names)


def _merge(model: ModelProto, layer: _Layer, delta: Matrix) -> None:
    """Add `delta`, shaped like the weight, to it; a weight that others read too stays for them."""
    graph = model.graph
    name = layer.node.input[1]
    (held,) = [each for each in graph.initializer if each.name == name]
    value = numpy_helper.to_array(held)
    total = (value.astype(np.float64) + delta).astype(value.dtype)
    readers = sum(node.inputs.count(name) for node in subgraph_of(graph).all_nodes())
    if readers > 1 or any(each.name == name for each in graph.output):
        name = _free(f"{name}.lora_merged", {each.name for each in graph.initializer})
        layer.node.input[1] = name
        graph.initializer.append(numpy_helper.from_array(total, name))
    else:
        held.CopyFrom(numpy_helper.from_array(total, name))


def _delta(layer: _Layer, a: Matrix, b: Matrix) -> Matrix:
    """Return what an adapter adds to a weight, in the weight's shape, without its scale."""
    node, groups = layer.node, layer.groups
    if node.op_type == "Conv":
        outputs, rank = layer.shape[0], b.shape[1]
        down = a.astype(np.float64).reshape(groups, rank, -1)
        up = b.astype(np.float64).reshape(groups, outputs // groups, rank)
        return np.asarray((up @ down).reshape(layer.shape))
    product = a.astype(np.float64) @ b.astype(np.float64)
    if node.op_type == "Gemm":
        product = product / float(_attribute(node, "alpha", 1.0))
        if _attribute(node, "transB", 0):
            product = product.T
    return np.asarray(product)


def _beside(layer: _Layer, base: str) -> list[NodeProto]:
    """Return the nodes of an adapter, and let the layer give its own output another name."""
    node = layer.node
    made: list[NodeProto] = []

    def emit(op_type: str, inputs: Iterable[str], what: str, **attributes: Any) -> str:
        name = f"{base}.lora_{what}"
        made.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    x = node.input[0]
    if layer.elem_type != TensorProto.FLOAT:
        x = emit("Cast", [x], "input", to=TensorProto.FLOAT)
    if node.op_type == "Conv":
        same = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        same["kernel_shape"] = layer.shape[2:]
        down = emit("Conv", [x, f"{base}.lora_A"], "down", **same)
        up = emit("Conv", [down, f"{base}.lora_B"], "up", group=layer.groups)
    else:
        if node.op_type == "Gemm" and _attribute(node, "transA", 0):
            x = emit("Transpose", [x], "turned", perm=[1, 0])
        down = emit("MatMul", [x, f"{base}.lora_A"], "down")
        up = emit("MatMul", [down, f"{base}.lora_B"], "up")
    scaled = emit("Mul", [up, f"{base}.lora_scale"], "scaled")
    if layer.elem_type != TensorProto.FLOAT:
        scaled = emit("Cast", [scaled], "output", to=layer.elem_type)
    output = node.output[0]
    node.output[0] = f"{base}.lora_frozen"
    name = f"{base}.lora_sum"
    # ONNX Runtime makes a Gemm of a product and an Add, before it would fuse the product with the
    # DequantizeLinear of its weight.
    add = "Add" if layer.plain else "Sum"
    made.append(helper.make_node(add, [node.output[0], scaled], [output], name=name))
    return made


def _chosen(model: ModelProto, targets: Sequence[str]) -> list[_Layer]:
    """Return the layers that targets name, in the graph's order."""
    layers = _layers(model)
    chosen: set[int] = set()
    for target in targets:
        found = {
            layer.at
            for layer in layers
            if any(target == n or fnmatch.fnmatchcase(n, target) for n in layer.names)
        }
        if not found:
            known = list(dict.fromkeys(layer.base for layer in layers))
            near = difflib.get_close_matches(
                target, [name for layer in layers for name in layer.names], n=3
            )
            listed = ", ".join(known[:_TOLD]) + (", …" if len(known) > _TOLD else "")
            raise InvalidForwardModel(
                what=f"the target {target!r} of lora fits no MatMul, Gemm or Conv with a weight",
                remedy=f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"choose among {listed or '(none)'}",
            )
        chosen |= found
    return [layer for layer in layers if layer.at in chosen]


def _layers(model: ModelProto) -> list[_Layer]:
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    found = []
    for at, node in enumerate(model.graph.node):
        if node.op_type not in _ADAPTED or not is_onnx_domain(node.domain):
            continue
        weight = _weight(node.input[1], held, makers)
        if weight is None:
            continue
        name, shape, elem_type = weight
        if len(shape) < 2 or (node.op_type != "Conv" and len(shape) != 2):
            continue
        names = [node.name, name, name.removesuffix(".weight"), *_modules(node)]
        base = _modules(node)[-1] if _modules(node) else name.removesuffix(".weight")
        found.append(
            _Layer(
                node=node, at=at, shape=shape, elem_type=elem_type,
                names=tuple(dict.fromkeys(each for each in names if each)), base=base,
                plain=node.input[1] == name
                and elem_type in _FLOATS
                and _attribute(node, "alpha", 1.0) != 0,
            )
        )  # fmt: skip
    return found


def _weight(
    value: str, held: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
) -> tuple[str, tuple[int, ...], int] | None:
    """Return the initializer that a value is made of, the value's shape and its element type."""
    if value in held:
        tensor = held[value]
        return value, tuple(tensor.dims), int(tensor.data_type)
    node = makers.get(value)
    if node is None or node.op_type not in _BETWEEN or not is_onnx_domain(node.domain):
        return None
    inner = _weight(node.input[0], held, makers)
    if inner is None:
        return None
    name, shape, elem_type = inner
    if node.op_type == "Transpose":
        perm = _attribute(node, "perm", list(reversed(range(len(shape)))))
        shape = tuple(shape[axis] for axis in perm)
    elif node.op_type == "Cast":
        elem_type = int(_attribute(node, "to", elem_type))
    elif node.op_type == "DequantizeLinear":
        scale = held.get(node.input[1])
        if scale is None:
            return None
        elem_type = int(scale.data_type)
    return name, shape, elem_type


def _modules(node: NodeProto) -> list[str]:
    """Return the path of the torch module that a node was exported from, and those around it."""
    for prop in node.metadata_props:
        if prop.key == _TORCH_SCOPES:
            try:
                scopes = ast.literal_eval(prop.value)
            except (ValueError, SyntaxError):
                return []
            if isinstance(scopes, list) and all(isinstance(each, str) for each in scopes):
                return [each for each in scopes[:-1] if each]  # the last one is the op's
    return []


def _free(name: str, taken: Collection[str]) -> str:
    made, count = name, 1
    while made in taken:
        count += 1
        made = f"{name}.{count}"
    return made


def _product_shape(node: NodeProto, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the inputs and outputs of a product by a weight."""
    inputs, outputs = shape
    turned = node.op_type == "Gemm" and _attribute(node, "transB", 0)
    return (outputs, inputs) if turned else (inputs, outputs)


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default
