"""The optimizers as ONNX nodes: a step from parameters, gradients and state to the new ones.

Rule: state is one tensor per parameter and kind, an input and an output of the graph; nothing is
kept inside. A step of each equals torch.optim's of the same name (Lion: Chen et al., 2023,
arXiv:2302.06675, algorithm 2; Yogi: Zaheer et al., 2018, algorithm 2, with Adam's bias correction),
nodes per parameter as few as its formula has operations. Adagrad, Adam and Yogi without
`bias_correction`, and with tau^2 as `initial_square`, are the server's of Reddi et al., 2020,
arXiv:2003.00295, algorithm 2, where `eps` is tau.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from onnx import NodeProto, TensorProto, helper

from bbnode.components.autodiff.builder import GraphBuilder, captured_names
from bbnode.components.autodiff.errors import TrainingSettingRefused

# torch.nn.utils.clip_grad_norm_ adds it to the norm.
_NORM_MARGIN = 1e-6
# Of torch.optim; of Yogi the authors' own.
DEFAULT_EPS = {"adam": 1e-8, "adamw": 1e-8, "yogi": 1e-3, "adagrad": 1e-10, "rmsprop": 1e-8}
_YOGI_SQUARE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimizer and its numbers; one that the optimizer does not know keeps its default.

    Attributes:
        name: "sgd", "adam", "adamw", "yogi", "adagrad", "rmsprop" or "lion".
        momentum: of sgd and rmsprop, from 0 to below 1.
        nesterov: of sgd: look ahead by the momentum.
        weight_decay: of adamw and lion the share of the weights that a step of rate 1 takes off,
            else what is added to the gradient per unit of weight; None is 0.01 for adamw, else 0.
        betas: of adam, adamw, yogi and lion; None is (0.9, 0.999), for lion (0.9, 0.99).
        bias_correction: of adam, adamw and yogi: divide the means by 1 - beta^step, since they
            begin with 0.
        initial_square: of adam, adamw, yogi and adagrad: the square that each parameter begins
            with; None is 1e-6 for yogi, else 0.
        smoothing: of rmsprop: the share of the old mean square (torch's `alpha`).
        centered: of rmsprop: subtract the squared mean.
        eps: beside a root in a denominator; None is 1e-8, for adagrad 1e-10, for yogi 1e-3.
        clip_value: the greatest size of one number of the gradient; 0 does not clip.
        clip_norm: the greatest Euclidean norm of the whole gradient, after `clip_value`; 0 does
            not clip.
    """

    name: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    bias_correction: bool = True
    initial_square: float | None = None
    smoothing: float = 0.99
    centered: bool = False
    eps: float | None = None
    clip_value: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The values of a step graph beside parameters, gradients and state.

    Attributes:
        rate: the learning rate, [] of the parameters' type.
        step: int64 [], the number of this step, 1 for the first one since the state was empty.
        elem_type: ONNX's number of the parameters' type.
    """

    b: GraphBuilder
    rate: str
    step: str
    elem_type: int

    def number(self, value: float) -> str:
        return self.b.scalar(value, self.elem_type)

    def correction(self, beta: float) -> str:
        """Emit 1 - beta^step. In float64: float32 loses four digits of it in the first steps."""
        double = int(TensorProto.DOUBLE)
        step = self.b.op("Cast", self.step, to=double)
        power = self.b.op("Pow", self.b.scalar(beta, double), step)
        return self.b.op("Sub", self.b.scalar(1.0, double), power)

    def cast(self, value: str) -> str:
        return self.b.op("Cast", value, to=self.elem_type)


# (inputs, settings, parameter, gradient, state by kind) -> (new parameter, new state by kind)
_Step: TypeAlias = Callable[
    [StepInputs, OptimizerSettings, str, str, Mapping[str, str]], tuple[str, dict[str, str]]
]


def _mixed(i: StepInputs, old: str, new: str, share: float) -> str:
    """Emit share * old + (1 - share) * new."""
    kept = i.b.op("Mul", old, i.number(share))
    return i.b.op("Add", kept, i.b.op("Mul", new, i.number(1 - share)))


def _decayed_gradient(i: StepInputs, s: OptimizerSettings, param: str, grad: str) -> str:
    """Emit grad + weight_decay * param: the gradient of half the squared weights beside it."""
    decay = s.weight_decay or 0.0
    if not decay:
        return grad
    return i.b.op("Add", grad, i.b.op("Mul", param, i.number(decay)))


def _shrunk(i: StepInputs, decay: float, param: str) -> str:
    """Emit param * (1 - rate * weight_decay): decoupled decay."""
    if not decay:
        return param
    share = i.b.op("Sub", i.number(1.0), i.b.op("Mul", i.rate, i.number(decay)))
    return i.b.op("Mul", param, share)


def _descended(i: StepInputs, param: str, direction: str) -> str:
    """Emit param - rate * direction."""
    return i.b.op("Sub", param, i.b.op("Mul", direction, i.rate))


def _sgd(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    grad = _decayed_gradient(i, s, param, grad)
    if not s.momentum:
        return _descended(i, param, grad), {}
    factor = i.number(s.momentum)
    velocity = i.b.op("Add", i.b.op("Mul", state["momentum"], factor), grad)
    ahead = velocity
    if s.nesterov:
        ahead = i.b.op("Add", grad, i.b.op("Mul", velocity, factor))
    return _descended(i, param, ahead), {"momentum": velocity}


def _adam(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    return _moments(i, s, param, _decayed_gradient(i, s, param, grad), state)


def _adamw(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    decay = 0.01 if s.weight_decay is None else s.weight_decay
    return _moments(i, s, _shrunk(i, decay, param), grad, state)


def _moments(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Emit Adam's step: param - rate / c1 * mean / (sqrt(square) / sqrt(c2) + eps).

    Yogi's differs in the square alone, which moves by a share of grad^2, not of the difference.
    """
    b = i.b
    first, second = s.betas or (0.9, 0.999)
    mean = _mixed(i, state["mean"], grad, first)
    new = b.op("Mul", grad, grad)
    if s.name == "yogi":
        sign = b.op("Sign", b.op("Sub", state["square"], new))
        less = b.op("Mul", b.op("Mul", new, sign), i.number(1 - second))
        square = b.op("Sub", state["square"], less)
    else:
        square = _mixed(i, state["square"], new, second)
    moved = {"mean": mean, "square": square}
    eps = i.number(DEFAULT_EPS[s.name] if s.eps is None else s.eps)
    if not s.bias_correction:
        below = b.op("Add", b.op("Sqrt", square), eps)
        return _descended(i, param, b.op("Div", mean, below)), moved
    root = i.cast(b.op("Sqrt", i.correction(second)))
    rate = b.op("Div", b.op("Cast", i.rate, to=int(TensorProto.DOUBLE)), i.correction(first))
    below = b.op("Add", b.op("Div", b.op("Sqrt", square), root), eps)
    move = b.op("Mul", b.op("Div", mean, below), i.cast(rate))
    return b.op("Sub", param, move), moved


def _adagrad(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    b = i.b
    grad = _decayed_gradient(i, s, param, grad)
    square = b.op("Add", state["square"], b.op("Mul", grad, grad))
    eps = i.number(DEFAULT_EPS[s.name] if s.eps is None else s.eps)
    below = b.op("Add", b.op("Sqrt", square), eps)
    return _descended(i, param, b.op("Div", grad, below)), {"square": square}


def _rmsprop(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    b = i.b
    grad = _decayed_gradient(i, s, param, grad)
    square = _mixed(i, state["square"], b.op("Mul", grad, grad), s.smoothing)
    new = {"square": square}
    spread = square
    if s.centered:
        mean = new["mean"] = _mixed(i, state["mean"], grad, s.smoothing)
        # Rounding may take a variance of nearly 0 below it.
        spread = b.op("Max", b.op("Sub", square, b.op("Mul", mean, mean)), i.number(0.0))
    eps = i.number(DEFAULT_EPS[s.name] if s.eps is None else s.eps)
    move = b.op("Div", grad, b.op("Add", b.op("Sqrt", spread), eps))
    if s.momentum:
        kept = b.op("Mul", state["momentum"], i.number(s.momentum))
        move = new["momentum"] = b.op("Add", kept, move)
    return _descended(i, param, move), new


def _lion(
    i: StepInputs, s: OptimizerSettings, param: str, grad: str, state: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    first, second = s.betas or (0.9, 0.99)
    direction = i.b.op("Sign", _mixed(i, state["momentum"], grad, first))
    updated = _descended(i, _shrunk(i, s.weight_decay or 0.0, param), direction)
    return updated, {"momentum": _mixed(i, state["momentum"], grad, second)}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A named optimizer: how a step is emitted, and which settings it knows."""

    name: str
    emit: _Step
    settings: frozenset[str]

    def kinds(self, s: OptimizerSettings) -> tuple[str, ...]:
        """Return the kinds of state that each parameter has."""
        match self.name:
            case "sgd":
                return ("momentum",) if s.momentum else ()
            case "adam" | "adamw" | "yogi":
                return ("mean", "square")
            case "adagrad":
                return ("square",)
            case "rmsprop":
                mean = ("mean",) if s.centered else ()
                return ("square", *mean, *(("momentum",) if s.momentum else ()))
            case _:
                return ("momentum",)

    def initial(self, s: OptimizerSettings) -> tuple[float, ...]:
        """Return the number that each of `kinds` begins with."""
        square = s.initial_square
        if square is None:
            square = _YOGI_SQUARE if self.name == "yogi" else 0.0
        return tuple(square if kind == "square" else 0.0 for kind in self.kinds(s))

    def counts_steps(self, s: OptimizerSettings) -> bool:
        """Return True if a step depends on its number."""
        return self.name in ("adam", "adamw", "yogi") and s.bias_correction


_ADAM = frozenset({"weight_decay", "betas", "eps", "bias_correction", "initial_square"})

OPTIMIZERS: dict[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer("sgd", _sgd, frozenset({"momentum", "nesterov", "weight_decay"})),
        Optimizer("adam", _adam, _ADAM),
        Optimizer("adamw", _adamw, _ADAM),
        Optimizer("yogi", _adam, _ADAM),
        Optimizer("adagrad", _adagrad, frozenset({"weight_decay", "eps", "initial_square"})),
        Optimizer(
            "rmsprop",
            _rmsprop,
            frozenset({"momentum", "weight_decay", "smoothing", "centered", "eps"}),
        ),
        Optimizer("lion", _lion, frozenset({"weight_decay", "betas"})),
    )
}
_OF_ALL = frozenset({"name", "clip_value", "clip_norm"})


def find_optimizer(settings: OptimizerSettings) -> Optimizer:
    """Return the optimizer that the settings name, once all of them mean something for it.

    Raises:
        TrainingSettingRefused: there is no such optimizer, it does not know a setting, or a number
            is out of its range.
    """
    found = OPTIMIZERS.get(settings.name)
    if found is None:
        raise TrainingSettingRefused(
            f"optimizer={settings.name!r}", "there is no such optimizer",
            f"choose one of {', '.join(sorted(OPTIMIZERS))}",
        )  # fmt: skip
    plain = OptimizerSettings()
    for field in fields(OptimizerSettings):
        name, value = field.name, getattr(settings, field.name)
        if name not in _OF_ALL | found.settings and value != getattr(plain, name):
            raise TrainingSettingRefused(
                f"{name}={value!r}",
                f"the optimizer {found.name!r} has {', '.join(sorted(found.settings))}",
                f"leave {name} out",
            )
    shares = {"momentum": settings.momentum, "smoothing": settings.smoothing}
    shares.update({f"betas[{at}]": beta for at, beta in enumerate(settings.betas or ())})
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise TrainingSettingRefused(
                f"{name}={share!r}", "it is the share of the past", "give 0 to below 1"
            )
    for name in ("weight_decay", "eps", "initial_square", "clip_value", "clip_norm"):
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise TrainingSettingRefused(
                f"{name}={value!r}", "it has to be finite", "give 0 or more"
            )
    if settings.nesterov and not settings.momentum:
        raise TrainingSettingRefused(
            "nesterov", "it looks ahead by the momentum, which is 0", "give a momentum"
        )
    return found


def subtracts_alone(s: OptimizerSettings) -> bool:
    """Return True if a step is param - rate * gradient."""
    return s.name == "sgd" and not (s.momentum or s.weight_decay or s.clip_value or s.clip_norm)


def descended(
    nodes: Sequence[NodeProto],
    params: Sequence[TensorProto],
    moves: Sequence[str],
    updated: Sequence[str],
) -> list[NodeProto]:
    """Return `nodes`, and `updated` as parameter less move.

    A product of two matrices that nothing else reads is subtracted by itself: one pass less over
    what is as large as the parameter.
    """
    uses = Counter(name for node in nodes for name in captured_names(node))
    uses.update(moves)
    made = {output: at for at, node in enumerate(nodes) for output in node.output}
    result = list(nodes)
    for param, move, name in zip(params, moves, updated, strict=True):
        at = made.get(move, -1)
        product = nodes[at] if at >= 0 and uses[move] == 1 else None
        flat = len(param.dims) == 2
        if product is not None and flat and _is_product(product, made, nodes):
            settings = {a.name: helper.get_attribute_value(a) for a in product.attribute}
            settings |= {"alpha": -settings.get("alpha", 1.0), "beta": 1.0}
            inputs = [*product.input, param.name]
            result[at] = helper.make_node("Gemm", inputs, [name], name=name, **settings)
        else:
            result.append(helper.make_node("Sub", [param.name, move], [name], name=name))
    return result


def _is_product(node: NodeProto, made: Mapping[str, int], nodes: Sequence[NodeProto]) -> bool:
    """Return True if a node that makes a matrix is a product of two, without a summand."""
    if node.op_type != "MatMul":
        return node.op_type == "Gemm" and len(node.input) == 2
    # An operand that was turned as a matrix is one.
    turned = [nodes[made[name]] for name in node.input if name in made]
    return any(
        each.op_type == "Transpose" and list(each.attribute[0].ints) == [1, 0] for each in turned
    )


def clipped(i: StepInputs, s: OptimizerSettings, grads: Sequence[str]) -> list[str]:
    """Emit the gradients, cut to `clip_value` each and to `clip_norm` together."""
    b = i.b
    if s.clip_value:
        low, high = i.number(-s.clip_value), i.number(s.clip_value)
        grads = [b.op("Clip", grad, low, high) for grad in grads]
    if not s.clip_norm:
        return list(grads)
    total = ""
    for grad in grads:
        square = b.op("ReduceSumSquare", grad, keepdims=0)
        total = b.op("Add", total, square) if total else square
    norm = b.op("Add", b.op("Sqrt", total), i.number(_NORM_MARGIN))
    factor = b.op("Min", b.op("Div", i.number(s.clip_norm), norm), i.number(1.0))
    return [b.op("Mul", grad, factor) for grad in grads]
