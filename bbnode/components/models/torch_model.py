"""A trainable model from a class of PyTorch, which the node's own configuration names.

Rule: an artifact never says what is imported here. To the program it is an `OnnxModel`: the same
settings, the same flat vector, the same saved state; PyTorch computes instead of ONNX graphs.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from bbnode.components.autodiff import TrainingGraphs
from bbnode.components.autodiff.ends import chain_ends, check_loss, check_values
from bbnode.components.autodiff.forward import read_forward
from bbnode.components.autodiff.losses import find_loss
from bbnode.components.autodiff.modes import TrainingMode
from bbnode.components.autodiff.optimizers import find_optimizer
from bbnode.components.autodiff.parameters import choose_parameters
from bbnode.components.contracts import CarriedOver, OpContext, Weights, offload
from bbnode.components.data.schema import DataSchema
from bbnode.components.errors import (
    ComponentError,
    DataDoesNotFit,
    NotExportable,
    ParameterMismatch,
)
from bbnode.components.libraries import TORCH, OptionalLibrary
from bbnode.components.models.dry_run import draw_features
from bbnode.components.models.fit import Wanted, check_labels
from bbnode.components.models.labels import Labels
from bbnode.components.models.onnx_model import (
    OnnxModel,
    OnnxModelConfig,
    initial_state,
    loss_settings,
    optimizer_settings,
    port_sizes,
)
from bbnode.components.models.onnx_model import read_model as model_bytes
from bbnode.components.models.stepping import Stepper
from bbnode.components.models.torch_export import (
    aliases,
    export,
    first_line,
    load_weights,
    read_model,
    require_torch,
)
from bbnode.components.models.torch_training import Recipe, TorchNet, TorchStepper
from bbnode.components.models.weights import named
from bbnode.components.registry import checked_config, register_component
from bbnode.components.settings import content_setting, local_setting
from bbnode.ir.errors import DeploymentError
from bbnode.ir.values import Composite, Value

logger = logging.getLogger(__name__)

_CLASS_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d{1,3})?\Z")
_EXAMPLE: Final = re.compile(r"([a-z]+\d*)\[([\d, ]*)\]\Z")
_OUTPUT: Final = re.compile(r"output(\d{0,3})\Z")  # as `bbnode.torch.export` calls them
_MAX_EXAMPLE: Final = 1 << 28  # numbers
_MAX_THREADS: Final = 1024
_STATISTICS: Final = ("running_mean", "running_var")


class TorchModuleUnusable(ComponentError, DeploymentError):
    """The class that a node names can't be imported, made, or trained."""


@dataclass(frozen=True, kw_only=True)
class TorchModelConfig(OnnxModelConfig):
    """Settings of `TorchModel`: those of `OnnxModel`, and what is computed where.

    Attributes:
        model: bytes or path of an ONNX model with the same parameters, whose values are the
            initial ones; the ones of PyTorch, drawn with `seed`, without it.
        module: "package.module:Class", a torch.nn.Module.
        arguments: keyword arguments of the class.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA where there is one.
        threads: of PyTorch, on the CPU; with more than one, sums are split and may differ.
        deterministic: refuse kernels of PyTorch whose results differ from run to run.
        mode: "train" puts the module into training mode while training; "as_written" leaves it in
            evaluation mode.
        example: of each input type and shape without the batch, such as "float32[3, 32, 32]", to
            export with; needed where there is no `model`.
    """

    model: bytes | str | Path = content_setting(model_bytes, default=b"")
    mode: TrainingMode = "train"
    module: str = local_setting(default="")
    arguments: Mapping[str, Any] | None = local_setting(default=None)
    device: str = "auto"
    threads: int = 1
    deterministic: bool = True
    example: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NetFacts:
    """Answers to all that `OnnxModel` asks its graphs for, besides running them."""

    statistics: tuple[str, ...]
    variances: frozenset[str]
    draws: bool
    scales_loss: bool
    state_kinds: tuple[str, ...]
    state_initial: tuple[float, ...]
    input_names: tuple[str, ...] = field(default=())

    def derive(self) -> None:
        """Do nothing: PyTorch differentiates what it has computed."""

    def check_loss(self) -> str:
        """Return "": what a module ends in is seen when it is called, by `_probe`."""
        return ""


@register_component
class TorchModel(OnnxModel):
    """Forward, loss, gradients and training of one module of PyTorch.

    The flat vector is the module's parameters that have `requires_grad`, in the order of
    `named_parameters()`; then come running statistics, unless they are local. Where the artifact
    has an ONNX model, the order is that model's, so that peers with `OnnxModel` have the same
    vector. Batches and outputs are as `OnnxModel` has them.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.TorchModel"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (TORCH,)
    Config: ClassVar[type] = TorchModelConfig
    config: TorchModelConfig

    def __init__(self, config: TorchModelConfig) -> None:
        """Import and make the module.

        Raises:
            TorchMissing: PyTorch is not installed.
            TorchModuleUnusable: the class can't be imported or made, or is no trainable module.
            InvalidComponentConfig: a setting is out of its range.
            AutodiffError: there is no such loss or optimizer, or a setting means nothing for it.
        """
        config = checked_config(type(self), config)
        super(OnnxModel, self).__init__(config)
        self._check_settings()
        settings = loss_settings(config)
        loss = find_loss(config.loss)
        loss.check(settings)
        chosen = optimizer_settings(config)
        optimizer = find_optimizer(chosen)
        kinds = optimizer.kinds(chosen)
        torch = require_torch()
        device = self._device(torch)
        module = self._module(torch)
        forward = read_model(config.model) if config.model else None
        if forward is not None:
            self._take_initial(module, forward)
        in_training = config.mode == "train"
        trained, moved = self._parts(module, forward, in_training)
        module.to(device)
        module.eval()
        self._begin(
            {name: _numpy(tensor) for name, tensor in trained.items()},
            {name: _numpy(tensor) for name, tensor in moved.items()},
        )
        recipe = Recipe(
            type_name=self.TYPE_NAME,
            loss=config.loss,
            loss_settings=settings,
            optimizer=chosen,
            kinds=kinds,
            schedule=self._schedule,
            in_training=in_training,
            mixed=config.precision == "mixed",
            seed=config.seed,
            threads=config.threads,
            deterministic=config.deterministic,
            outputs=self._output_places(forward),
        )
        self._net = TorchNet(torch, module, device, recipe, [*trained.values()], [*moved.values()])
        facts = _NetFacts(
            statistics=tuple(moved),
            variances=frozenset(name for name in moved if name.endswith("running_var")),
            draws=in_training,
            scales_loss=self._net.scales_loss,
            state_kinds=kinds,
            state_initial=optimizer.initial(chosen),
        )
        # The base asks no more of its graphs, where the methods below do not.
        self._graphs = cast(TrainingGraphs, facts)

    @classmethod
    def shapes_of(cls, config: OnnxModelConfig) -> None:  # noqa: ARG003
        """Return None: the module is each node's own."""
        return

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Check the data, where the program trains on them.

        Raises:
            DataUnavailable: the data source can't load them.
            DataDoesNotFit: the module does not take them, or its output not their labels.
            LossDoesNotFit: the module ends in what its loss does itself, as a Softmax.
        """
        if self.has_dependency("data_source"):
            self._check_data()
        self._rehearse(ctx)

    def output_names(self) -> tuple[str, ...]:
        """Return the names of what `forward` gives, where the settings or a model say them."""
        if self.config.outputs or not self.config.model:
            return self.config.outputs
        return tuple(port.name for port in read_model(self.config.model).graph.output)

    def example_batch(self, rows: int, *, draw: int = 0) -> tuple[Value, Value] | None:
        """Return made-up examples as `example` or the model says; None where neither is there."""
        features = [draw_features(*each, rows, draw) for each in self._example_types()]
        if not features:
            return None
        self._load_net()
        try:
            with self._net.computing(None), self._net.torch.no_grad():
                output = _numpy(self._net.outputs(features)[0])
        except ComponentError:  # which forward says in its own words
            output = np.zeros((rows, 1))
        settings = loss_settings(self.config)
        labels = Labels(self.TYPE_NAME, find_loss(self.config.loss), settings, output.shape)
        batch = features[0] if len(features) == 1 else Composite(features)
        return batch, labels.drawn(output, draw)

    def _example_types(self) -> list[tuple[int, list[int | str | None]]]:
        """Return ONNX type and sizes of each input, the batch's among them; [] if unknown."""
        if self.config.example:
            shapes = [_example(each) for each in self.config.example]
            return [
                (helper.np_dtype_to_tensor_dtype(dtype), [None, *shape]) for dtype, shape in shapes
            ]
        if not self.config.model:
            return []
        graph = read_model(self.config.model).graph
        held = {tensor.name for tensor in graph.initializer}
        ports = [port for port in graph.input if port.name not in held]
        return [(port.type.tensor_type.elem_type, port_sizes(port)) for port in ports]

    def _counted(self, labels: Value) -> Any:
        """Return for each example True if the loss counts a label of it."""
        array = np.asarray(labels)
        loss, settings = find_loss(self.config.loss), loss_settings(self.config)
        dims = (*array.shape[:1], None, *array.shape[1:]) if loss.class_labels else array.shape
        settings = replace(settings, class_axis=1) if loss.class_labels else settings
        return Labels(self.TYPE_NAME, loss, settings, dims).counted(array)

    @offload
    def forward(self, ctx: OpContext, input: Value) -> Value:
        """Return the outputs for a batch, which is kept for `backward`."""
        inputs = self._inputs(input)
        self._load_net()
        with self._net.computing(None), self._net.torch.no_grad():
            outputs = tuple(_output(each) for each in self._net.outputs(inputs))
        self._last_input = input
        return outputs[0] if len(outputs) == 1 else Composite(outputs)

    @offload(reads_only=True)
    def compute_loss(self, ctx: OpContext, input: Value, target: Value) -> Value:
        """Return the mean loss over a batch, float32 scalar."""
        inputs = self._inputs(input)
        self._load_net()
        with self._net.computing(None), self._net.torch.no_grad():
            loss = self._net.loss(self._net.outputs(inputs)[0], target)
            return np.asarray(float(loss), np.float32)

    @offload(reads_only=True)
    def evaluate(self, ctx: OpContext, input: Value, target: Value) -> Value:
        """Return `compute_loss`: its older name."""
        return self.compute_loss(ctx, input, target)

    @offload
    def backward(self, ctx: OpContext, grad: Value) -> None:
        """Pull `grad`, shaped like the last forward's output, back to the parameters; keep it.

        It is the gradient of the first output, and of the module in evaluation mode.

        Raises:
            ComponentError: there was no forward since the parameters were loaded, or `grad` has
                another shape or dtype than the output.
        """
        if self._last_input is None:
            raise ComponentError(
                f"{self.TYPE_NAME}: backward before any forward; call forward first"
            )
        given = np.asarray(grad)
        inputs = self._inputs(self._last_input)
        self._load_net()
        net = self._net
        with net.computing(None):
            output = net.outputs(inputs)[0]
            if given.dtype != np.float32 or given.shape != tuple(output.shape):
                raise ComponentError(
                    f"{self.TYPE_NAME}: the gradient is {given.dtype}{list(given.shape)}, the last "
                    f"output float32{list(output.shape)}"
                )
            found = net.torch.autograd.grad(
                output, net.trained, net.tensor(given).to(output.dtype), allow_unused=True
            )
            grads = [
                np.zeros(tuple(p.shape), np.float32) if each is None else _numpy(each)
                for each, p in zip(found, net.trained, strict=True)
            ]
        rest = self._split(self._params)[len(self._trained) :]
        self._kept_grads = self._join([*grads, *map(np.zeros_like, rest)])

    def twin(self) -> TorchModel:
        """Return another instance of the same module."""
        return type(self)(self.config)

    def export(self) -> ModelProto:
        """Return the module with the present parameters as an ONNX model.

        Of an artifact with an ONNX model it is that one, with these parameters.

        Raises:
            NotExportable: there is neither a model nor an `example`, or the module can't be
                exported.
        """
        if self.config.model:
            return super().export()
        if not self.config.example:
            raise NotExportable(
                f"{self.TYPE_NAME}: set `example` under [slots.…] in node.toml to export, the type "
                'and shape of each input without the batch, such as ["float32[3, 32, 32]"]'
            )
        self._load_net()
        shapes = [_example(each) for each in self.config.example]
        arguments = tuple(np.zeros((2, *shape), dtype) for dtype, shape in shapes)
        return export(self._net.module, arguments)

    @classmethod
    def initialized(
        cls, config: OnnxModelConfig, weights: Mapping[str, Weights]
    ) -> tuple[OnnxModelConfig, CarriedOver]:
        """Return the settings with weights in the place of the initial ones of `model`.

        Raises:
            NotExportable: the settings have no model; PyTorch draws the initial weights.
        """
        if not config.model:
            raise NotExportable(
                f"{cls.TYPE_NAME}: the program has no ONNX model to put weights into; give it one "
                "(bbnode.torch.export)"
            )
        return super().initialized(config, weights)

    def _check_settings(self) -> None:
        config = self.config
        self.require(
            not config.losses,
            "losses of several outputs are what OnnxModel has; let the module give the one output "
            "that is trained on, or bind bbnode.OnnxModel",
        )
        self.require(
            bool(_CLASS_NAME.match(config.module)),
            f'module is {config.module!r}; name a class as module = "package.module:Class" under '
            "[slots.…] in node.toml (an artifact can't)",
        )
        self.require(
            bool(_DEVICE.match(config.device)),
            f'device is {config.device!r}; choose "auto", "cpu", "cuda" or "cuda:0"',
        )
        self.require(
            1 <= config.threads <= _MAX_THREADS,
            f"threads is {config.threads}; 1 to {_MAX_THREADS}",
        )
        self.require(
            config.running_variance != "population",
            "running_variance is 'population', and PyTorch has that of the sample; leave it out",
        )
        for each in config.example:
            numbers = _numbers_of(each)
            self.require(numbers >= 0, f'example {each!r} is none, such as "int64[128]"')
            self.require(
                numbers <= _MAX_EXAMPLE,
                f"example {each!r} has {numbers} numbers, and at most {_MAX_EXAMPLE} are made for "
                "an export; give the shape of one example, without the batch",
            )

    def _device(self, torch: Any) -> str:
        wanted = self.config.device
        has_cuda = torch.cuda.is_available()
        if wanted == "auto":
            return "cuda" if has_cuda else "cpu"
        if wanted != "cpu":
            _, _, number = wanted.partition(":")
            count = torch.cuda.device_count() if has_cuda else 0
            self.require(
                int(number or 0) < count,
                f"device is {wanted!r}, and PyTorch {torch.__version__} finds {count} here",
            )
        return wanted

    def _module(self, torch: Any) -> Any:
        name, _, attribute = self.config.module.partition(":")
        try:
            cls = getattr(importlib.import_module(name), attribute)
        except Exception as error:
            raise TorchModuleUnusable(
                f"{self.TYPE_NAME}: {self.config.module!r} can't be imported: "
                f"{type(error).__name__}: {first_line(error)}; install its package, or set "
                "PYTHONPATH to the folder that it is in"
            ) from error
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.seed)
                module = cls(**(self.config.arguments or {}))
        except Exception as error:
            raise TorchModuleUnusable(
                f"{self.TYPE_NAME}: {self.config.module} can't be made of the arguments "
                f"{sorted(self.config.arguments or {})}: {first_line(error)}"
            ) from error
        if not isinstance(module, torch.nn.Module):
            raise TorchModuleUnusable(
                f"{self.TYPE_NAME}: {self.config.module} is no torch.nn.Module, but "
                f"{type(module).__name__}"
            )
        return module

    def _output_places(self, forward: ModelProto | None) -> tuple[int, ...]:
        """Return the places of the outputs that are named, among those of the module."""
        names = [port.name for port in forward.graph.output] if forward is not None else []
        found = []
        for name in self.config.outputs:
            numbered = _OUTPUT.match(name) if forward is None else None
            known = name in names or numbered is not None
            has = ", ".join(map(repr, names)) or "output0, output1, …"
            self.require(known, f"outputs names {name!r}, and the module has {has}")
            found.append(int(numbered[1] or 0) if numbered else names.index(name))
        return tuple(found)

    def _take_initial(self, module: Any, forward: ModelProto) -> None:
        """Put the initial weights of an ONNX model into the module, by name."""
        known = aliases(module)
        state = module.state_dict()
        given = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in forward.graph.initializer
            if tensor.name in known
        }
        missing = [name for name, _ in module.named_parameters() if name not in given]
        if missing:
            raise ParameterMismatch(
                f"{self.TYPE_NAME}: the program's model has no {missing[0]!r}, which "
                f"{self.config.module} has; export it from that class (bbnode.torch.export)"
            )
        load_weights(module, {name: given[name] for name in state if name in given})

    def _parts(
        self, module: Any, forward: ModelProto | None, in_training: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parameters to train and the statistics that move, in the vector's order."""
        parameters = dict(module.named_parameters())
        if forward is not None:
            graph = read_forward(forward, self.config.trainable or None)
            names = [tensor.name for tensor in graph.parameters]
            for name in names:
                if name not in parameters:
                    raise ParameterMismatch(
                        f"{self.TYPE_NAME}: the program trains {name!r}, which is no parameter of "
                        f"{self.config.module}; export it from that class (bbnode.torch.export)"
                    )
        else:
            names = self._chosen(parameters)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        wrong = [name for name in names if str(parameters[name].dtype) != "torch.float32"]
        if wrong or not names:
            why = f"{wrong[0]!r} is {parameters[wrong[0]].dtype}" if wrong else "it has none"
            raise TorchModuleUnusable(
                f"{self.TYPE_NAME}: {self.config.module}: parameters are trained in float32, and "
                f"{why}"
            )
        moved: dict[str, Any] = {}
        if in_training:
            moved = {
                name: buffer
                for name, buffer in module.named_buffers()
                if name.rpartition(".")[2] in _STATISTICS and buffer.is_floating_point()
            }
            if forward is not None:
                moved = {name: moved[name] for name in _statistics(forward) if name in moved}
        return {name: parameters[name] for name in names}, moved

    def _chosen(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return the names that `trainable` chooses, by the rules for initializers."""
        stand_in = ModelProto()
        for name in parameters:
            # Names, and whether it is trained by default, are all that counts.
            tensor = numpy_helper.from_array(np.ones(2, np.float32), name)
            stand_in.graph.initializer.append(tensor)
            stand_in.graph.node.append(helper.make_node("MatMul", ["", name], [f"{name}/used"]))
        hints = {n: "PARAMETER" if p.requires_grad else "BUFFER" for n, p in parameters.items()}
        return [*choose_parameters(stand_in, self.config.trainable, hints).trained]

    def _check_data(self) -> None:
        source = self.dependency("data_source")
        schema: DataSchema | None = source.schema()
        if schema is None:
            return
        where = f"{source.TYPE_NAME} of slot {self.depends['data_source']!r} does not fit "
        where += f"{self.TYPE_NAME}"
        try:
            self._probe(schema, where)
        except DataDoesNotFit:
            source.forget()  # others may stand there the next time
            raise

    def _probe(self, schema: DataSchema, where: str) -> None:
        """Call the module on examples of zeros, and compare its output with the labels."""
        self._load_net()
        net = self._net
        examples = np.zeros((2, *schema.features.shape), schema.features.dtype)
        if schema.feature_range is not None:
            examples[1:] = schema.feature_range[1]  # the greatest id of a token
        try:
            with net.computing(None):
                made = net.outputs([examples])[0]
        except ComponentError as error:
            raise DataDoesNotFit(f"{where}: {error}") from error
        output = tuple(made.shape)
        loss = find_loss(self.config.loss)
        axis = self.config.class_axis % len(output) if output else 0
        classes = output[axis] if output and loss.class_labels else None
        name = type(net.module).__name__
        remark = check_loss(loss.name, chain_ends(net.last_ops(made)), name, classes)
        if remark:
            logger.warning("%s: %s", self.TYPE_NAME, remark)
        check_values(loss.name, _numpy(made.float()), axis)
        sizes = output[1:]
        labels = sizes[: axis - 1] + sizes[axis:] if loss.class_labels else sizes
        dtype = "int64" if loss.class_labels else "float32"
        check_labels(
            schema,
            Wanted(dtype, labels),
            output,
            loss,
            loss_settings(self.config),
            where=where,
        )

    def _load_net(self) -> None:
        values = self._split(self._params)
        count = len(self._trained)
        self._net.load(values[:count], [*values[count:], *self._kept()])

    def _inputs(self, batch: Value, *, may_be_empty: bool = False) -> list[Value]:
        """Return the tensors of a batch; ComponentError for one without rows, or of no numbers."""
        several = isinstance(batch, Composite | tuple | list)
        parts = list(batch) if several else [batch]
        for at, part in enumerate(parts):
            if not isinstance(part, np.ndarray) or part.dtype.kind not in "fiub":
                raise ComponentError(
                    f"{self.TYPE_NAME}: input {at} is no tensor of numbers; give one for each "
                    f"argument of {self.config.module}"
                )
            if 0 in part.shape or not part.ndim:
                raise ComponentError(
                    f"{self.TYPE_NAME}: input {at} has the shape {list(part.shape)}: an empty "
                    "batch has no loss and no gradient; leave it out"
                )
        return parts

    def _target(self, target: Value, inputs: Sequence[Value]) -> Value:
        """Return labels as they come; they are checked against the output, once there is one."""
        return target

    def _stepper(
        self, adjustment: Sequence[Value] = (), frozen: frozenset[int] = frozenset()
    ) -> Stepper:
        values = self._split(self._params)
        count = len(self._trained)
        size = sum(map(np.size, values[:count]))
        vectors = self._state or initial_state(size, self._graphs.state_initial)
        made = TorchStepper(
            self._net,
            values=values[:count],
            statistics=[*values[count:], *self._kept()],
            state=[part for each in vectors for part in named(each, self._trained).values()],
            progress=self._progress,
            adjustment=adjustment,
            frozen=frozen,
        )
        return cast(Stepper, made)  # it has the same methods and attributes


def _statistics(forward: ModelProto) -> list[str]:
    """Return the running statistics of a model, in the order of its nodes."""
    return [
        name
        for node in forward.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    ]


def _numpy(tensor: Any) -> Weights:
    return np.array(tensor.detach().cpu().numpy())


def _output(tensor: Any) -> Value:
    """Return an output; one in half precision as float32, the type that programs have."""
    plain = tensor.float() if tensor.is_floating_point() else tensor
    return _numpy(plain)


def _numbers_of(text: str) -> int:
    """Return how many numbers an example of this text has; -1 where it is none."""
    try:
        _, shape = _example(text)
    except (ValueError, TypeError):
        return -1
    return math.prod(shape)


def _example(text: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of "float32[3, 32]"; ValueError or TypeError for other texts."""
    match = _EXAMPLE.match(text)
    if match is None:
        raise ValueError(text)
    return np.dtype(match[1]), tuple(int(size) for size in match[2].split(",") if size.strip())
