"""Steps of training that PyTorch computes, in the place of those of ONNX graphs.

Rule: PyTorch has threads, random numbers and choices of kernels for a whole process; so one
computation has them at a time, and puts them back.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from bbnode.components.autodiff.losses import LossSettings, find_loss
from bbnode.components.autodiff.optimizers import DEFAULT_EPS, OptimizerSettings
from bbnode.components.errors import ComponentError, TrainingFailed
from bbnode.components.models.labels import Labels
from bbnode.components.models.schedule import Schedule
from bbnode.components.models.stepping import Progress
from bbnode.components.models.torch_export import first_line
from bbnode.components.models.torch_gradients import leaves_of
from bbnode.ir.values import Value

Module: TypeAlias = Any
Tensor: TypeAlias = Any

_ONE_AT_A_TIME = threading.Lock()

# Of each optimizer: its class in torch.optim, and what that calls each kind of state.
_OPTIMIZERS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "sgd": ("SGD", {"momentum": "momentum_buffer"}),
    "adam": ("Adam", {"mean": "exp_avg", "square": "exp_avg_sq"}),
    "adamw": ("AdamW", {"mean": "exp_avg", "square": "exp_avg_sq"}),
    "adagrad": ("Adagrad", {"square": "sum"}),
    "rmsprop": (
        "RMSprop", {"square": "square_avg", "mean": "grad_avg", "momentum": "momentum_buffer"}
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides a step, besides the network and its state.

    Attributes:
        type_name: of the component, for messages.
        in_training: dropout and statistics of batches are on while training.
        mixed: products in half precision.
        seed: of dropout's masks.
        threads: of one computation.
        deterministic: refuse kernels whose results differ from run to run.
        outputs: places of the module's outputs that are given, in this order; () is all.
    """

    type_name: str
    loss: str
    loss_settings: LossSettings
    optimizer: OptimizerSettings
    kinds: tuple[str, ...]
    schedule: Schedule
    in_training: bool
    mixed: bool
    seed: int
    threads: int
    deterministic: bool
    outputs: tuple[int, ...] = ()


class TorchNet:
    """A module on its device, and the tensors of it that training moves.

    Attributes:
        trained: its parameters, in the order of the flat vector.
        statistics: its running statistics.
    """

    def __init__(
        self,
        torch: Any,
        module: Module,
        device: str,
        recipe: Recipe,
        trained: Sequence[Tensor],
        statistics: Sequence[Tensor],
    ) -> None:
        self.torch = torch
        self.module = module
        self.device = torch.device(device)
        self.recipe = recipe
        self.trained = list(trained)
        self.statistics = list(statistics)
        held = {id(each) for each in (*trained, *statistics)}
        self._fixed = {
            name: (buffer, buffer.clone())
            for name, buffer in module.named_buffers()
            if id(buffer) not in held and not name.endswith("num_batches_tracked")
        }

    @property
    def scales_loss(self) -> bool:
        """True where gradients may leave the range of float16."""
        return self.recipe.mixed and self.device.type == "cuda"

    def load(self, values: Sequence[Value], statistics: Sequence[Value]) -> None:
        """Put values into the module."""
        with self.torch.no_grad():
            for own, value in zip(
                (*self.trained, *self.statistics), (*values, *statistics), strict=True
            ):
                own.copy_(self.tensor(value))

    def tensor(self, value: Value) -> Tensor:
        """Return an array as a tensor on the device."""
        array = np.asarray(value)
        # PyTorch has no tensors that can't be written to.
        writeable = array if array.flags.writeable and array.flags.aligned else array.copy()
        return self.torch.from_numpy(np.ascontiguousarray(writeable)).to(self.device)

    def outputs(self, inputs: Sequence[Value]) -> list[Tensor]:
        """Call the module, in the mode that it is in."""
        try:
            found = leaves_of(self.torch, self.module(*map(self.tensor, inputs)))
            return [found[at] for at in self.recipe.outputs] or found
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            # What modules raise for arguments that they don't take.
            shapes = ", ".join(f"{np.asarray(i).dtype}{list(np.shape(i))}" for i in inputs)
            raise ComponentError(
                f"{self.recipe.type_name}: {type(self.module).__name__} does not take a batch of "
                f"{shapes}: {first_line(error)}"
            ) from error

    def last_ops(self, output: Tensor) -> Iterator[str]:
        """Yield the types of the ops that made an output, the last one first, along one input."""
        step = output.grad_fn
        while step is not None:
            name, _, _ = type(step).__name__.partition("Backward")
            yield name.removesuffix("Forward")
            step = step.next_functions[0][0] if step.next_functions else None

    def loss(self, output: Tensor, target: Value) -> Tensor:
        """Return the mean loss, a scalar, with labels as they are for OnnxModel."""
        recipe = self.recipe
        if not output.is_floating_point():
            raise ComponentError(
                f"{recipe.type_name}: the first output is {output.dtype}; train towards a float"
            )
        dims = tuple(output.shape)
        loss = find_loss(recipe.loss)
        labels = Labels(recipe.type_name, loss, recipe.loss_settings, dims).checked(target, {})
        return _LOSSES[recipe.loss](
            self.torch, output.float(), self.tensor(labels), recipe.loss_settings
        )

    @contextlib.contextmanager
    def computing(self, draw: int | None) -> Iterator[None]:
        """Have PyTorch to oneself; with `draw`, in training mode with the masks of that number."""
        torch, recipe = self.torch, self.recipe
        devices = [self.device] if self.device.type == "cuda" else []
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=devices):
            threads = torch.get_num_threads()
            strict = torch.are_deterministic_algorithms_enabled()
            torch.set_num_threads(recipe.threads)
            torch.use_deterministic_algorithms(recipe.deterministic)
            self.module.train(draw is not None and recipe.in_training)
            if draw is not None:
                bits = np.random.SeedSequence([recipe.seed, draw]).generate_state(1, np.uint64)
                torch.manual_seed(int(bits[0]) >> 1)
            try:
                yield
            finally:
                self.module.eval()
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(strict)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if not self.recipe.mixed:
            yield
            return
        half = self.torch.float16 if self.device.type == "cuda" else self.torch.bfloat16
        with self.torch.autocast(self.device.type, dtype=half):
            yield

    def differentiate(
        self, inputs: Sequence[Value], target: Value, scale: float
    ) -> tuple[float, bool]:
        """Leave the gradients of a batch in the parameters; return its loss.

        False where they are not finite, though the loss was scaled down from what float16 holds.
        """
        for parameter in self.trained:
            parameter.grad = None
        with self._precision():
            output = self.outputs(inputs)[0]
        loss = self.loss(output, target)
        try:
            (loss * scale).backward()
        except RuntimeError as error:
            raise TrainingFailed(
                f"{self.recipe.type_name}: PyTorch has no gradient of "
                f"{type(self.module).__name__}: {first_line(error)}"
            ) from error
        finite = True
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = self.torch.zeros_like(parameter)
            elif scale != 1.0:
                parameter.grad.div_(scale)
                finite = finite and bool(self.torch.isfinite(parameter.grad).all())
        return float(loss.detach()), finite

    def check_buffers(self) -> None:
        """Refuse a module that trains a buffer which is not kept: TrainingFailed."""
        for name, (buffer, before) in self._fixed.items():
            if not self.torch.equal(buffer, before):
                buffer.copy_(before)
                raise TrainingFailed(
                    f"{self.recipe.type_name}: training changed the buffer {name!r} of "
                    f"{type(self.module).__name__}, and only running_mean and running_var are "
                    "kept; make it a parameter"
                )


class TorchStepper:
    """Moves parameters by batches; one object per run. As `Stepper`, with a module for graphs.

    `gradients_only`: no step is made, so that there need be no optimizer.
    """

    def __init__(
        self,
        net: TorchNet,
        *,
        values: list[Value],
        statistics: list[Value],
        state: list[Value],
        progress: Progress,
        adjustment: Sequence[Value] = (),
        frozen: frozenset[int] = frozenset(),
    ) -> None:
        self._frozen = frozen
        self._net = net
        self._adjustment = [net.tensor(each) for each in adjustment]
        self._shared: tuple[list[Value], list[Value]] | None = values, statistics
        self.progress = progress
        self.written: tuple[()] = ()  # torch has its own buffers
        self._first_state = state
        self._optimizer: Any = None
        self._own: Callable[[float, OptimizerSettings], None] | None = None  # not torch's step
        self._kept: list[Tensor] = []  # its state
        net.load(values, statistics)

    @property
    def values(self) -> list[Value]:
        """The parameters, one array each."""
        return self._moved()[0]

    @property
    def statistics(self) -> list[Value]:
        """The running statistics, one array each."""
        return self._moved()[1]

    @property
    def state(self) -> list[Value]:
        """The optimizer's state, kind by kind one array per parameter."""
        net = self._net
        if self._optimizer is None:
            return self._first_state
        if self._own is not None:
            return [_array(each) for each in self._kept]
        _, names = _OPTIMIZERS[net.recipe.optimizer.name]
        zeros: dict[Tensor, Tensor] = {}
        return [
            _array(self._optimizer.state[p].get(names[kind], zeros.setdefault(p, p * 0)))
            for kind in net.recipe.kinds
            for p in net.trained
        ]

    def train(self, inputs: Sequence[Value], labels: Value) -> float:
        """Make a step on a batch; return its loss, infinite where gradients stay beyond float16."""
        with self._net.computing(self.progress.draws):
            loss = self._differentiate(inputs, labels)
            self._net.check_buffers()
            if math.isfinite(loss):
                self._step()
                self.progress = self.progress.stepped()
        return loss

    def gradients(self, inputs: Sequence[Value], labels: Value) -> tuple[Value, list[Value]]:
        """Return loss and gradients of a batch in training mode; the statistics move.

        The loss is infinite where gradients stay beyond float16.
        """
        with self._net.computing(self.progress.draws):
            loss = self._differentiate(inputs, labels)
            self._net.check_buffers()
            values: list[Value] = [_array(each.grad) for each in self._net.trained]
        return np.asarray(loss, np.float32), values

    def step(self, grads: Sequence[Value]) -> None:
        """Make a step of the optimizer with gradients that were computed elsewhere."""
        net = self._net
        with net.computing(None):
            for parameter, grad in zip(net.trained, grads, strict=True):
                parameter.grad = net.tensor(grad).reshape(parameter.shape)
            self._step()
        self.progress = self.progress.stepped()

    def _differentiate(self, inputs: Sequence[Value], labels: Value) -> float:
        """Leave the gradients of a batch in the parameters; return the loss."""
        self._shared = None
        while True:
            scale = self.progress.loss_scale if self._net.scales_loss else 1.0
            loss, finite = self._net.differentiate(inputs, labels, scale)
            self.progress = replace(self.progress, draws=self.progress.draws + 1)
            if finite:
                return loss
            retried = self.progress.retried(loss)
            if retried is None:
                return math.inf
            self.progress = retried

    def _moved(self) -> tuple[list[Value], list[Value]]:
        if self._shared is None:
            net = self._net
            self._shared = (
                [_array(each) for each in net.trained],
                [_array(each) for each in net.statistics],
            )
        return self._shared

    def _step(self) -> None:
        net, settings = self._net, self._net.recipe.optimizer
        set_rate = self.progress.rate
        rate = net.recipe.schedule.at(self.progress.steps) if set_rate is None else set_rate
        self._shared = None
        if self._adjustment:
            *pulls, proximal = self._adjustment
            with net.torch.no_grad():
                for parameter, pull in zip(net.trained, pulls, strict=True):
                    parameter.grad.add_(pull.reshape(parameter.shape)).add_(parameter * proximal)
        for at in self._frozen:  # an optimizer passes over parameters without a gradient
            net.trained[at].grad = None
        if settings.clip_value:
            net.torch.nn.utils.clip_grad_value_(net.trained, settings.clip_value)
        if settings.clip_norm:
            net.torch.nn.utils.clip_grad_norm_(net.trained, settings.clip_norm)
        if self._optimizer is None:
            self._optimizer = self._made()
        if self._own is not None:
            self._own(rate, settings)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _made(self) -> Any:
        """Return the optimizer with the state that this run begins with."""
        net, settings = self._net, self._net.recipe.optimizer
        shaped = [
            net.tensor(value).reshape(p.shape).clone()
            for value, p in zip(self._first_state, net.trained * len(net.recipe.kinds), strict=True)
        ]
        self._kept = shaped
        if settings.name == "lion":
            self._own = self._lion_step
        elif settings.name == "yogi" or not settings.bias_correction:
            self._own = self._moments_step
        if self._own is not None:
            return settings
        name, names = _OPTIMIZERS[settings.name]
        options: dict[str, Any] = {"weight_decay": settings.weight_decay or 0.0}
        if settings.name == "sgd":
            options |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        elif settings.name == "rmsprop":
            options |= {"momentum": settings.momentum, "alpha": settings.smoothing}
            options |= {"centered": settings.centered}
        elif settings.name in ("adam", "adamw"):
            options["betas"] = settings.betas or (0.9, 0.999)
        if settings.name == "adamw" and settings.weight_decay is None:
            options["weight_decay"] = 0.01
        if settings.eps is not None:
            options["eps"] = settings.eps
        made = getattr(net.torch.optim, name)(net.trained, lr=1.0, **options)
        if self.progress.age or settings.initial_square:
            count = len(net.trained)
            for at, parameter in enumerate(net.trained):
                kept = {
                    names[kind]: shaped[number * count + at]
                    for number, kind in enumerate(net.recipe.kinds)
                }
                if settings.name != "sgd":
                    kept["step"] = net.torch.tensor(float(self.progress.age))
                made.state[parameter] = kept
        return made

    def _lion_step(self, rate: float, settings: OptimizerSettings) -> None:
        """Chen et al., 2023, arXiv:2302.06675, algorithm 2."""
        first, second = settings.betas or (0.9, 0.99)
        with self._net.torch.no_grad():
            for parameter, momentum in zip(self._net.trained, self._kept, strict=True):
                grad = parameter.grad
                if grad is None:
                    continue
                direction = (momentum * first + grad * (1 - first)).sign_()
                parameter.mul_(1 - rate * (settings.weight_decay or 0.0))
                parameter.sub_(direction, alpha=rate)
                momentum.mul_(second).add_(grad, alpha=1 - second)

    def _moments_step(self, rate: float, s: OptimizerSettings) -> None:
        """Adam's and AdamW's without bias correction, and Yogi's with and without."""
        net, count = self._net, len(self._net.trained)
        first, second = s.betas or (0.9, 0.999)
        at = self.progress.age + 1
        below = (1 - first**at, 1 - second**at) if s.bias_correction else (1.0, 1.0)
        decay = s.weight_decay or 0.0
        if s.name == "adamw" and s.weight_decay is None:
            decay = 0.01
        eps = DEFAULT_EPS[s.name] if s.eps is None else s.eps
        means, squares = self._kept[:count], self._kept[count:]
        with net.torch.no_grad():
            for parameter, mean, square in zip(net.trained, means, squares, strict=True):
                grad = parameter.grad
                if grad is None:
                    continue
                if s.name == "adamw":
                    parameter.mul_(1 - rate * decay)
                elif decay:
                    grad = grad.add(parameter, alpha=decay)
                new = grad * grad
                mean.mul_(first).add_(grad, alpha=1 - first)
                if s.name == "yogi":
                    square.sub_(new * (square - new).sign_(), alpha=1 - second)
                else:
                    square.mul_(second).add_(new, alpha=1 - second)
                root = (square / below[1]).sqrt_().add_(eps)
                parameter.addcdiv_(mean, root, value=-rate / below[0])


def _array(tensor: Tensor) -> Value:
    return np.array(tensor.detach().cpu().numpy(), np.float32)


def _classes_second(torch: Any, output: Tensor, s: LossSettings) -> Tensor:
    """Return the output with the axis of classes where torch's losses have it."""
    return torch.movedim(output, s.class_axis, 1) if output.dim() > 1 else output


def _class_options(torch: Any, output: Tensor, s: LossSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if s.class_weights:
        options["weight"] = torch.tensor(s.class_weights, device=output.device)
    if s.ignore_index is not None:
        options["ignore_index"] = s.ignore_index
    return options


def _cross_entropy(torch: Any, y: Tensor, labels: Tensor, s: LossSettings) -> Tensor:
    return torch.nn.functional.cross_entropy(
        _classes_second(torch, y, s), labels, label_smoothing=s.label_smoothing,
        **_class_options(torch, y, s),
    )  # fmt: skip


def _nll(torch: Any, y: Tensor, labels: Tensor, s: LossSettings) -> Tensor:
    return torch.nn.functional.nll_loss(
        _classes_second(torch, y, s), labels, **_class_options(torch, y, s)
    )


def _bce(torch: Any, y: Tensor, labels: Tensor, s: LossSettings) -> Tensor:
    weight = torch.tensor(s.pos_weight, device=y.device) if s.pos_weight else None
    return torch.nn.functional.binary_cross_entropy_with_logits(y, labels, pos_weight=weight)


def _kl(torch: Any, y: Tensor, labels: Tensor, _: LossSettings) -> Tensor:
    return torch.nn.functional.kl_div(y, labels, reduction="batchmean")


def _mse(torch: Any, y: Tensor, labels: Tensor, _: LossSettings) -> Tensor:
    return torch.nn.functional.mse_loss(y, labels)


def _mae(torch: Any, y: Tensor, labels: Tensor, _: LossSettings) -> Tensor:
    return torch.nn.functional.l1_loss(y, labels)


def _huber(torch: Any, y: Tensor, labels: Tensor, s: LossSettings) -> Tensor:
    return torch.nn.functional.huber_loss(y, labels, delta=s.huber_delta)


def _cosine(torch: Any, y: Tensor, labels: Tensor, _: LossSettings) -> Tensor:
    return (1 - torch.nn.functional.cosine_similarity(y, labels, dim=-1)).mean()


# (torch, first output, labels, settings) -> mean loss
_LOSSES: Mapping[str, Callable[[Any, Tensor, Tensor, LossSettings], Tensor]] = {
    "softmax_cross_entropy": _cross_entropy,
    "nll": _nll,
    "bce_with_logits": _bce,
    "kl": _kl,
    "mse": _mse,
    "mae": _mae,
    "huber": _huber,
    "cosine": _cosine,
}
