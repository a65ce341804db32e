"""The two forms of a model: as it is trained, and as it is evaluated.

Rule: BatchNormalization and Dropout in training mode are in the nodes that are trained, never in
those that are evaluated. Their state is visible: running statistics are inputs and outputs, and a
mask is a function of (seed, draw, node, position) alone, so that the same draw has the same bits on
every machine, and after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.autodiff.builder import GraphBuilder, InferredType
from bbnode.components.autodiff.errors import InvalidForwardModel
from bbnode.components.autodiff.forward import ForwardGraph
from bbnode.ir.graph import is_onnx_domain

TrainingMode: TypeAlias = Literal["as_written", "train"]
RunningVariance: TypeAlias = Literal["auto", "population", "sample"]

_NORM, _DROPOUT = "BatchNormalization", "Dropout"
_NORM_MOMENTUM = 0.9  # ONNX's default: the share of the old statistic
_DROPOUT_RATIO = 0.5  # ONNX's default

# Odd multipliers and shifts of MurmurHash3's 32-bit finalizer (Appleby, public domain); the first
# one spreads neighbouring positions (Knuth, The Art of Computer Programming 3, 6.4).
_SPREAD, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_UINT32 = int(TensorProto.UINT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """The nodes of both forms, and the state of training.

    Attributes:
        evaluated: without training mode.
        trained: with the updates of `statistics` and the masks.
        constants: initializers that `trained` has more.
        statistics: initial running means and variances, in the order of their nodes.
        variances: those of `statistics` that can't be negative.
        updated: name of a statistic to the name of its new value in `trained`.
        draws: True if a mask is drawn, from the int64 [] input `draw`.
    """

    evaluated: tuple[NodeProto, ...]
    trained: tuple[NodeProto, ...]
    constants: tuple[TensorProto, ...]
    statistics: tuple[TensorProto, ...]
    variances: frozenset[str]
    updated: Mapping[str, str]
    draws: bool


def part_modes(
    forward: ForwardGraph,
    *,
    mode: TrainingMode,
    seed: int,
    sample_variance: bool,
    draw: str,
    types: Mapping[str, InferredType],
    taken: Iterable[str],
) -> Modes:
    """Return both forms of a forward model.

    Args:
        mode: "train" turns every BatchNormalization and Dropout into training mode; "as_written"
            leaves them as they are.
        seed: of the masks.
        sample_variance: the running variance is made of n / (n - 1) of a batch's variance.
        draw: name of the input with the number of the draw.
        types: of the forward model's values.
        taken: names that nothing new may have.

    Raises:
        InvalidForwardModel: a node in training mode is in a subgraph, or has a setting or a
            statistic that is computed.
    """
    return _Parting(forward, mode, seed, sample_variance, draw, types, taken).made()


class _Parting:
    def __init__(
        self,
        forward: ForwardGraph,
        mode: TrainingMode,
        seed: int,
        sample_variance: bool,
        draw: str,
        types: Mapping[str, InferredType],
        taken: Iterable[str],
    ) -> None:
        self.f = forward
        self.everywhere = mode == "train"
        self.seed = seed
        self.sample = sample_variance
        self.draw = draw
        self.types = types
        self.b = GraphBuilder(taken, prefix="mode/")
        self.known = {t.name: t for t in (*forward.constants, *forward.parameters)}
        self.statistics: dict[str, TensorProto] = {}
        self.variances: set[str] = set()
        self.updated: dict[str, str] = {}
        self.masks = 0
        for node in forward.nodes:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.known[node.output[0]] = node.attribute[0].t

    def made(self) -> Modes:
        evaluated: list[NodeProto] = []
        trained: list[NodeProto] = []
        for node in self.f.nodes:
            for inner in _nested(node):
                if self._trains(inner):
                    raise InvalidForwardModel(
                        what=f"node {inner.name or inner.output[0]!r} ({inner.op_type}) is in "
                        "training mode inside a subgraph",
                        remedy='move it out of the subgraph, or leave out mode="train"',
                    )
            if not self._trains(node):
                evaluated.append(node)
                trained.append(node)
                continue
            if node.op_type == _NORM:
                evaluated.append(_plain_norm(node))
                normal = self._norm(node)
                trained += [*normal, *self.b.take()]
            else:
                evaluated.append(_plain_dropout(node))
                masked = self._dropout(node)
                trained += [*self.b.take(), *masked]
        return Modes(
            evaluated=tuple(evaluated),
            trained=tuple(trained),
            constants=tuple(self.b.initializers),
            statistics=tuple(self.statistics.values()),
            variances=frozenset(self.variances),
            updated=self.updated,
            draws=self.masks > 0,
        )

    def _trains(self, node: NodeProto) -> bool:
        """Return True if a node is in training mode in the form that is trained."""
        if not is_onnx_domain(node.domain):
            return False
        if node.op_type == _NORM:
            return self.everywhere or bool(_attribute(node, "training_mode", 0))
        if node.op_type != _DROPOUT:
            return False
        if self.everywhere:
            return True
        if len(node.input) < 3 or not node.input[2]:
            return False
        return bool(self._constant(node, 2, "training_mode"))

    def _norm(self, node: NodeProto) -> list[NodeProto]:
        """Return the node in training mode; emit the update of its statistics."""
        for at, extra in enumerate(node.output[1:], 1):
            if extra and self._is_read(extra):
                raise InvalidForwardModel(
                    what=f"output {at} of node {node.name or node.output[0]!r}, a running "
                    "statistic, is read by the graph",
                    remedy="leave it out: the statistics are kept beside the parameters",
                )
        b = self.b
        name = node.output[0]
        momentum = float(_attribute(node, "momentum", _NORM_MOMENTUM))
        elem_type = int(self._statistic(node, 3).data_type)
        batch = [b.fresh(f"{name}/mean"), b.fresh(f"{name}/variance")]
        made = NodeProto()
        made.CopyFrom(node)
        before = b.take()
        del made.attribute[:]
        kept = [a for a in node.attribute if a.name not in ("momentum", "training_mode")]
        made.attribute.extend(kept)
        # With momentum 0 its further outputs are the batch's own mean and variance.
        made.attribute.append(helper.make_attribute("momentum", 0.0))
        made.attribute.append(helper.make_attribute("training_mode", 1))
        del made.output[:]
        made.output.extend([name, *batch])
        for at, value in zip((3, 4), batch, strict=True):
            statistic = self._statistic(node, at)
            if at == 4 and self.sample:
                value = b.op("Mul", value, self._bessel(node.input[0], elem_type))
            old = self.updated.get(statistic.name, statistic.name)
            kept_part = b.op("Mul", old, b.scalar(momentum, elem_type))
            new_part = b.op("Mul", value, b.scalar(1 - momentum, elem_type))
            self.updated[statistic.name] = b.op("Add", kept_part, new_part)
            self.statistics.setdefault(statistic.name, statistic)
            if at == 4:
                self.variances.add(statistic.name)
        return [*before, made]

    def _bessel(self, x: str, elem_type: int) -> str:
        """Emit n / (n - 1) for the n values of each channel of x; 1 for a single one."""
        b = self.b
        one = b.constant(np.asarray(1, np.int64))
        channels = b.op("Gather", b.op("Shape", x), one, axis=0)
        count = b.op("Div", b.op("Size", x), channels)
        rest = b.op("Max", b.op("Sub", count, one), one)
        as_float = [b.op("Cast", each, to=elem_type) for each in (count, rest)]
        return b.op("Div", *as_float)

    def _statistic(self, node: NodeProto, at: int) -> TensorProto:
        name = node.input[at]
        found = next((t for t in self.f.constants if t.name == name), None)
        if found is None:
            what = "mean" if at == 3 else "variance"
            raise InvalidForwardModel(
                what=f"the running {what} {name!r} of node {node.name or node.output[0]!r} is no "
                "initializer, or one that is trained",
                remedy="store it as an initializer, and leave it out of what is trained",
            )
        return found

    def _dropout(self, node: NodeProto) -> list[NodeProto]:
        """Emit a mask; return the product with it, and what else the node had."""
        ratio = _DROPOUT_RATIO
        if len(node.input) > 1 and node.input[1]:
            ratio = float(self._constant(node, 1, "ratio"))
        if not 0 <= ratio < 1:
            raise InvalidForwardModel(
                what=f"the ratio {ratio} of node {node.name or node.output[0]!r} (Dropout)",
                remedy="give one from 0 to below 1",
            )
        b, x = self.b, node.input[0]
        keep = self._kept(x, node.output[0], ratio)
        known = self.types.get(x)
        elem_type = known.elem_type if known and known.elem_type else int(TensorProto.FLOAT)
        scale, none = b.scalar(1 / (1 - ratio), elem_type), b.scalar(0.0, elem_type)
        mask = b.op("Where", keep, scale, none)
        made = [helper.make_node("Mul", [x, mask], [node.output[0]], name=node.name)]
        if len(node.output) > 1 and node.output[1]:
            made.append(helper.make_node("Identity", [keep], [node.output[1]]))
        return made

    def _kept(self, x: str, name: str, ratio: float) -> str:
        """Emit a bool tensor like x, true with the probability 1 - ratio."""
        b = self.b
        digest = hashlib.sha256(f"{self.seed}/{self.masks}".encode()).digest()
        self.masks += 1
        keys = np.frombuffer(digest[:8], "<u4").astype(np.uint32)
        draw = b.op("Cast", b.op("Reshape", self.draw, b.ints([1])), to=_UINT32)
        first = self._stirred(b.op("Add", b.op("Mul", draw, _word(b, _SPREAD)), _word(b, keys[0])))
        second = self._stirred(b.op("BitwiseXor", first, _word(b, keys[1])))
        zero, one = (b.constant(np.asarray(n, np.int64)) for n in (0, 1))
        position = b.op("Cast", b.op("Range", zero, b.op("Size", x), one), to=_UINT32)
        bits = b.op("BitwiseXor", b.op("Mul", position, _word(b, _SPREAD)), first)
        bits = b.op("Mul", self._folded(bits, 16), _word(b, _FIRST))
        bits = b.op("Add", self._folded(bits, 13), second)
        bits = self._folded(b.op("Mul", bits, _word(b, _SECOND)), 16)
        least = _word(b, min(round(ratio * 2**32), 2**32 - 1))
        return b.reshape_like(b.op("GreaterOrEqual", bits, least), x)

    def _stirred(self, bits: str) -> str:
        b = self.b
        bits = b.op("Mul", self._folded(bits, 16), _word(b, _FIRST))
        bits = b.op("Mul", self._folded(bits, 13), _word(b, _SECOND))
        return self._folded(bits, 16)

    def _folded(self, bits: str, by: int) -> str:
        """Emit bits ^ (bits >> by)."""
        shifted = self.b.op("BitShift", bits, _word(self.b, by), direction="RIGHT")
        return self.b.op("BitwiseXor", bits, shifted)

    def _constant(self, node: NodeProto, at: int, what: str) -> npt.NDArray[np.generic]:
        tensor = self.known.get(node.input[at])
        if tensor is None:
            raise InvalidForwardModel(
                what=f"{what} of node {node.name or node.output[0]!r} ({node.op_type}) is computed",
                remedy="make it an initializer",
            )
        return numpy_helper.to_array(tensor)

    def _is_read(self, name: str) -> bool:
        readers = (name in node.input for node in self.f.nodes)
        return any(readers) or name in {info.name for info in self.f.outputs}


def _word(b: GraphBuilder, value: int | np.uint32) -> str:
    # Of one element: arithmetic of 0-D arrays is of numpy's scalars, which warn where they wrap.
    return b.constant(np.asarray([value], np.uint32), "word")


def _plain_norm(node: NodeProto) -> NodeProto:
    made = NodeProto()
    made.CopyFrom(node)
    del made.attribute[:]
    made.attribute.extend(a for a in node.attribute if a.name not in ("training_mode", "momentum"))
    del made.output[1:]
    return made


def _plain_dropout(node: NodeProto) -> NodeProto:
    made = NodeProto()
    made.CopyFrom(node)
    del made.input[2:]
    return made


def _nested(node: NodeProto) -> Sequence[NodeProto]:
    found: list[NodeProto] = []
    for attribute in node.attribute:
        graphs = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
        for graph in graphs:
            for inner in graph.node:
                found.append(inner)
                found += _nested(inner)
    return found


def _attribute(node: NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return float(helper.get_attribute_value(attribute))
    return default
