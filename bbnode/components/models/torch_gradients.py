"""The gradients of an exported model beside PyTorch's.

Rule: what a round computes is compared, the gradient graph of the exported model, with what PyTorch
computes for the module in training mode, but for dropout. So whatever ONNX can't say of a gradient
(detach(), hooks, functions with a gradient of their own) is seen by what comes of it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import ModelProto, numpy_helper

from bbnode.components.autodiff import TrainingGraphs, training_graphs
from bbnode.components.autodiff.errors import AutodiffError
from bbnode.components.autodiff.training import OutputLoss, TrainingOptions
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.contracts import Weights
from bbnode.components.errors import BackendError
from bbnode.components.models.torch_errors import ExportFailed

# A torch.nn.Module, a torch.Tensor: PyTorch is not there when this is type-checked.
Module: TypeAlias = Any
Tensor: TypeAlias = Any

# Of a gradient's greatest number, and of that of all gradients: sums in another order.
TOLERANCE: Final = 1e-3
LEAST: Final = 1e-5
_ROWS: Final = 4


def check_module_gradients(
    torch: Any, model: ModelProto, module: Module, tensors: Sequence[Tensor]
) -> None:
    """Raise ExportFailed where a parameter's gradient is another one in the exported model.

    The module is left as it was. An op that bbnode has no gradient of is not told here: a model may
    be exported to be run alone, and compiling a program that trains it says so.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for batch in _batches(torch, tensors):
                if _compared(torch, model, module, batch):
                    return
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def leaves_of(torch: Any, outputs: Any) -> list[Tensor]:
    """Return the tensors of a module's outputs, which may be nested, in PyTorch's order."""
    leaves = importlib.import_module("torch.utils._pytree").tree_leaves(outputs)
    found = [each for each in leaves if isinstance(each, torch.Tensor)]
    if not found:
        raise ExportFailed("the module returns no tensor; return what is to be predicted")
    return found


def _batches(torch: Any, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield random examples like those that were given, then these."""
    drawn = []
    for each in tensors:
        shape = (_ROWS, *each.shape[1:])
        if each.is_floating_point():
            spread = each.std() if each.numel() > 1 else torch.ones(())
            drawn.append((torch.randn(shape) * (spread + 0.1) + each.mean()).to(each))
        elif each.dtype == torch.bool:
            drawn.append(torch.rand(shape).to(each.device) < 0.5)
        else:
            low, high = min(0, int(each.min())), int(each.max())
            drawn.append(torch.randint(low, high + 1, shape).to(each))
    yield drawn
    rows = -(-_ROWS // len(tensors[0]))
    yield [torch.cat([each] * rows)[:_ROWS] for each in tensors]


def _compared(torch: Any, model: ModelProto, module: Module, batch: Sequence[Tensor]) -> bool:
    """Compare gradients for a batch; False where it has none that are finite numbers."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    held = {tensor.name for tensor in model.graph.initializer}
    names = [name for name in parameters if name in held]
    if not names:
        return True
    try:
        outputs, in_training = _mode(torch, module, batch)
    except Exception:  # noqa: BLE001 - the author's code, for examples that are not theirs
        return False
    rng = np.random.default_rng(0)
    targets = [
        rng.normal(size=tuple(each.shape)).astype(np.float32) if each.is_floating_point() else None
        for each in outputs
    ]
    wanted = _of_torch(torch, module, batch, [parameters[n] for n in names], targets, in_training)
    if wanted is None or not all(np.isfinite(each).all() for each in wanted):
        return False
    try:
        made = _of_model(model, batch, names, targets, in_training)
    except (AutodiffError, BackendError):
        return True
    greatest = max(float(np.abs(each).max(initial=0.0)) for each in wanted)
    for name, want in zip(names, wanted, strict=True):
        have = made[name]
        most = TOLERANCE * float(np.abs(want).max(initial=0.0)) + LEAST * max(greatest, 1e-3)
        off = np.abs(np.subtract(have, want))
        if have.shape != want.shape or not (off <= most).all():
            raise ExportFailed(
                f"{type(module).__name__}: the gradient of {name!r} is another one in the exported "
                f"model than in PyTorch, by up to {float(np.nanmax(off)):.2g} where the greatest "
                f"is {float(np.abs(want).max()):.2g}, so training would differ: something in "
                "forward stops or changes it, or an op has another gradient in ONNX; train with "
                "bbnode.TorchModel, or export with check_gradients=False where the gradients of "
                "the exported model are what you mean"
            )
    return True


def _mode(torch: Any, module: Module, batch: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Return a module's outputs, and True if its training mode can be compared.

    It can't where it gives other outputs there, or other ones each time.
    """
    plain = _called(torch, module, batch, in_training=False)
    try:
        first, second = (_called(torch, module, batch, in_training=True) for _ in range(2))
    except Exception:  # noqa: BLE001 - the author's code
        return plain, False
    same = len(first) == len(second) == len(plain) and all(
        a.shape == b.shape == c.shape and torch.allclose(a, b, equal_nan=True)
        for a, b, c in zip(first, second, plain, strict=True)
    )  # statistics of a batch are the same each time, and noise is not
    return plain, same


def _called(
    torch: Any, module: Module, batch: Sequence[Tensor], *, in_training: bool
) -> list[Tensor]:
    module.train(in_training)
    with without_dropout(torch):
        return leaves_of(torch, module(*(each.clone() for each in batch)))


def _of_torch(
    torch: Any,
    module: Module,
    batch: Sequence[Tensor],
    parameters: Sequence[Tensor],
    targets: Sequence[Weights | None],
    in_training: bool,
) -> list[Weights] | None:
    """Return PyTorch's gradients of the sum of the mean squared errors; None where it has none."""
    with torch.enable_grad():
        outputs = _called(torch, module, batch, in_training=in_training)
        total = None
        for output, target in zip(outputs, targets, strict=True):
            if target is None:
                continue
            goal = torch.from_numpy(target).to(output.device)
            error = torch.nn.functional.mse_loss(output.float(), goal)
            total = error if total is None else total + error
        if total is None or not total.requires_grad:
            return None
        found = torch.autograd.grad(total, parameters, allow_unused=True)
    module.eval()
    return [
        np.zeros(tuple(p.shape), np.float32) if g is None else g.detach().cpu().numpy()
        for g, p in zip(found, parameters, strict=True)
    ]


def _of_model(
    model: ModelProto,
    batch: Sequence[Tensor],
    names: Sequence[str],
    targets: Sequence[Weights | None],
    in_training: bool,
) -> Mapping[str, Weights]:
    """Return the gradients of the exported model, by parameter."""
    plain = ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:], node.output[1:]
    outputs = [info.name for info in model.graph.output]
    losses = tuple(
        OutputLoss(name, "mse", 1.0)
        for name, target in zip(outputs, targets, strict=True)
        if target is not None
    )
    options = TrainingOptions(
        mode="train" if in_training else "as_written",
        losses=losses,
        outputs=(losses[0].output,),
        labels_apart=len(losses) > 1,
    )
    graphs: TrainingGraphs = training_graphs(plain, "mse", list(names), options)
    values = {tensor.name: tensor for tensor in (*graphs.initial, *graphs.statistics)}
    feeds = [numpy_helper.to_array(tensor) for tensor in values.values()]
    feeds += [each.cpu().numpy() for each in batch]
    feeds += [target for target in targets if target is not None]
    _, *grads = OrtBackend(OrtBackendConfig()).prepare(graphs.gradients).run(feeds)
    return {
        name: np.asarray(grad) for name, grad in zip(graphs.parameter_names, grads, strict=False)
    }


@contextlib.contextmanager
def without_dropout(torch: Any) -> Iterator[None]:
    """Have PyTorch's dropout let everything through, in modules and as functions."""
    overrides = importlib.import_module("torch.overrides")
    functional = torch.nn.functional
    drops = {
        functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout,
        functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout,
    }  # fmt: skip
    attention = functional.scaled_dot_product_attention

    class NoDropout(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            if func in drops:
                return args[0] if args else given["input"]
            if func is attention:
                given.pop("dropout_p", None)
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            return func(*args, **given)

    with NoDropout():
        yield
