"""ONNX Runtime as a backend.

Rule: numpy arrays go in and come out without a copy (ONNX Runtime reads the array's buffer
and hands out its own, small results aside); the same graph and inputs give the same bits every
time.

`InferenceSession.run` does that by itself for tensors in main memory, so that neither OrtValues
nor an IOBinding stand between: made anew for each call, they cost more than a small graph takes.
An IOBinding is for large outputs alone, which the caller has a place for.

It is loaded with the first graph: a node that runs none does without its 14 MB.
"""

from __future__ import annotations

import ctypes
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto

from bbnode.components.backends.caching import CachingBackend
from bbnode.components.backends.graphs import check_count, from_onnx, to_onnx, type_of_text
from bbnode.components.backends.guards import blamed, guarded
from bbnode.components.backends.isolation.supervisor import Supervisor
from bbnode.components.backends.lowering import all_nodes, lowered, mended
from bbnode.components.contracts import PreparedGraph
from bbnode.components.errors import BackendError, BackendUnavailable
from bbnode.components.registry import register_component
from bbnode.components.settings import host_setting
from bbnode.ir import keys, types
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.packing import packed, unpacked
from bbnode.ir.types import TypeNode
from bbnode.ir.values import OptionalValue, TensorSequence, Value, dtype_of, type_of

_AUTO = ("CUDAExecutionProvider", "CPUExecutionProvider")
# A result that is kept pins a place in ONNX Runtime's arena, and the next runs have to put their
# large intermediates elsewhere, in memory that no cache holds: measured, that costs a small CNN
# 7 % for results of 1 KiB. A copy of so little costs half a microsecond.
_SMALL_BYTES = 16 << 10
# In errors of a run, and of a graph that can't be prepared.
_NODE_NAME = re.compile(r" node\. Name:'([^']*)'|\bNode \(([^)]*)\)| node with name '([^']*)'")
_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node")
# Element types of which its binding makes no numpy arrays, though numpy has dtypes for them.
_AS_BYTES = frozenset(
    {TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ,
     TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ, *types.BITS_OF_ELEM}
)  # fmt: skip
# Of inputs, from which on memory counts for more than the time of allocations.
_LARGE_BYTES = 1 << 25
_MIN_MEMORY_BYTES = 64 << 20
_MAX_RANKS = 16  # combinations of ranks that one graph is kept prepared for
_MAX_FORMS = 8  # of one graph that are tried, each without a kernel that was missing before
# Of ONNX Runtime's optimizers, those that look for some op, or for one that a function op stands
# for: where none of these is in a graph they find nothing, in two passes over all of its nodes
# each. A name that a release does not know is passed over.
_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_SOFTMAX, _TANH = ("Softmax", "Attention"), ("Tanh", "Gelu", "Mish")
_LOOKS_FOR: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("QDQFinalCleanupTransformer", "QDQPropagationTransformer", "QDQS8ToU8Transformer",
         "QDQSelectorActionTransformer", "EnsureUniqueDQForNodeUnit", "DoubleQDQPairsRemover",
         "WeightBiasQuantization", "WhereDummyDq", "MatMulNBitsFusion"),
        _QUANTIZED,
    ),
    "DynamicQuantizeMatMulFusion": (*_QUANTIZED, "MatMulInteger"),
    "MatMulIntegerToFloatFusion": (*_QUANTIZED, "MatMulInteger"),
    **dict.fromkeys(
        ("AttentionFusion", "BiasSoftmaxFusion", "GroupQueryAttentionFusion",
         "GroupQueryAttentionPreNormFusion"),
        _SOFTMAX,
    ),
    "EmbedLayerNormFusion": ("Gather", "RotaryEmbedding"),
    "BiasDropoutFusion": ("Dropout",),
    "GeluFusionL1": ("Erf", "Gelu"), "GeluFusionL2": ("Erf", "Gelu"), "FastGeluFusion": _TANH,
    "BiasGeluFusion": ("Erf", *_TANH),
    "QuickGeluFusion": ("Sigmoid", "Swish", "CausalConvWithState"),
}  # fmt: skip
# 0 verbose .. 4 fatal; its warnings tell of dropped initializers and such, and what it logs as an
# error it raises as well.
_LOG_FATAL_ONLY = 4


@cache
def _runtime() -> Any:
    """Return the package, imported now at the latest."""
    import onnxruntime

    return onnxruntime


def load_runtime() -> None:
    """Import ONNX Runtime, which otherwise happens with the first graph."""
    _runtime()


@cache
def _failures() -> tuple[type[Exception], ...]:
    """Return what ONNX Runtime raises: its exceptions share no base, and differ between releases.

    Its Python layer adds three, for inputs that are no tensors or have the wrong dtype.
    """
    named = vars(_runtime().capi.onnxruntime_pybind11_state).values()
    own = (each for each in named if isinstance(each, type) and issubclass(each, Exception))
    return (*own, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class OrtBackendConfig:
    """Settings of `OrtBackend`.

    Attributes:
        intra_op_threads: threads inside one op. More than one makes a reduction add in another
            order, and takes cores from the node's other work.
        inter_op_threads: branches of one graph that run at once.
        providers: execution providers in order of preference, all of which have to be there;
            "auto" takes CUDA where it is, and the CPU.
        max_prepared: sessions kept.
        isolation: "process" runs graphs in a child process, on the CPU: native code that dies, or
            takes too much memory or time, fails one execution and not the node. A node of an open
            network that listens beyond loopback has it by default.
        max_memory_bytes: that all graphs of the child may take at once, and one handing over.
        max_run_s: that one run of a graph in the child may take.
    """

    intra_op_threads: int = 1
    inter_op_threads: int = 1
    providers: tuple[str, ...] | Literal["auto"] = "auto"
    max_prepared: int = 64
    isolation: Literal["none", "process"] = host_setting("none")
    max_memory_bytes: int = host_setting(4 << 30)
    max_run_s: float = host_setting(60.0)


class _OrtGraph:
    """One session, with its port names looked up once."""

    __slots__ = ("_inputs", "_label", "_nested", "_outputs", "_run", "_session")

    def __init__(self, session: Any, label: str) -> None:
        self._session = session
        # What `InferenceSession.run` calls once it has compared the names of inputs, which are
        # right here; its checks cost a small graph 2 %. A release without it has `run` alone.
        self._run = _quickest(session)
        self._label = label
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]
        # Outputs that are sequences or optionals, by position.
        self._nested = [
            (index, kind)
            for index, port in enumerate(session.get_outputs())
            if (kind := type_of_text(port.type)) is not None and kind.element is not None
        ]

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self._label, self._inputs, inputs)
        feeds = {}
        for name, value in zip(self._inputs, inputs, strict=False):
            feeds[name] = _dense(value)
        try:
            results: list[Value] = self._run(self._outputs, feeds, None)
        except _runtime().capi.onnxruntime_pybind11_state.EPFail as error:
            results = self._run_elsewhere(feeds, error)
        except _failures() as error:
            raise self._failed(feeds, error) from error
        for index, kind in self._nested:
            results[index] = from_onnx(results[index], kind)
        for index, result in enumerate(results):
            if type(result) is np.ndarray and result.nbytes <= _SMALL_BYTES:
                results[index] = result.copy()
        return results

    def _run_elsewhere(self, feeds: dict[str, Value], failed: Exception) -> list[Value]:
        """Run again after a provider failed: ONNX Runtime uses another one, if it has any."""
        try:
            results: list[Value] = self._session.run(self._outputs, feeds)
        except _failures() as error:
            raise self._failed(feeds, error) from failed
        self._run = _quickest(self._session)  # it may be another one now
        return results

    def _failed(self, feeds: dict[str, Value], error: Exception) -> BackendError:
        shapes = ", ".join(f"{name}: {_shown(value)}" for name, value in feeds.items())
        text = _first_line(error)
        node, text = blamed(_node_in(text), text)
        return BackendError(f"{self._label}: {text}; inputs were {shapes}", node=node)


class _GraphByRanks:
    """A graph with a Scan, whose kernel wants the ranks of what its body makes: prepared by them.

    ONNX Runtime infers these ranks from those of the graph's inputs, which a program may leave
    open.
    """

    __slots__ = ("_build", "_label", "_model", "_prepared")

    def __init__(
        self, model: ModelProto, label: str, build: Callable[[ModelProto], PreparedGraph]
    ) -> None:
        self._model = model
        self._label = label
        self._build = build
        self._prepared: dict[tuple[int, ...], PreparedGraph] = {}

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        ports = self._model.graph.input
        check_count(self._label, [port.name for port in ports], inputs)
        ranks = tuple(value.ndim if isinstance(value, np.ndarray) else -1 for value in inputs)
        prepared = self._prepared.get(ranks)
        if prepared is None:
            if len(self._prepared) >= _MAX_RANKS:
                self._prepared.clear()
            prepared = self._prepared[ranks] = self._build(self._with(ranks))
        return prepared.run(inputs)

    def _with(self, ranks: Sequence[int]) -> ModelProto:
        made = ModelProto()
        made.CopyFrom(self._model)
        for port, rank in zip(made.graph.input, ranks, strict=True):
            if rank >= 0 and not port.type.tensor_type.HasField("shape"):
                port.type.tensor_type.shape.SetInParent()
                for axis in range(rank):
                    port.type.tensor_type.shape.dim.add(dim_param=f"{port.name}.{axis}")
        return made


class _SmallElements:
    """A session with ports of element types that its binding for numpy does not know.

    They go in and out as the bytes that ONNX Runtime has of them.
    """

    __slots__ = ("_inputs", "_label", "_outputs", "_session")

    def __init__(self, session: Any, label: str) -> None:
        self._session = session
        self._label = label
        self._inputs = [port.name for port in session.get_inputs()]
        self._outputs = [port.name for port in session.get_outputs()]

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs in graph order for inputs in graph order."""
        check_count(self._label, self._inputs, inputs)
        kept: list[Any] = []  # ONNX Runtime reads these arrays, and holds none of them
        try:
            feeds = {n: _ort_value(v, kept) for n, v in zip(self._inputs, inputs, strict=True)}
            made = self._session.run_with_ort_values(self._outputs, feeds)
            return [_of_ort_value(value) for value in made]
        except _failures() as error:
            shapes = ", ".join(map(_shown, inputs))
            text = _first_line(error)
            node, text = blamed(_node_in(text), text)
            raise BackendError(f"{self._label}: {text}; inputs were {shapes}", node=node) from error


def _ort_value(value: Value, kept: list[Any]) -> Any:
    array = _dense(np.asarray(value))
    kind = type_of(array)
    bits = types.BITS_OF_ELEM.get(kind.elem_type)
    if bits is not None:
        # The shape is that of the array given; the elements are those in its first bytes.
        data = np.zeros(array.size, np.uint8)
        tight = packed(array, bits)
        data[: tight.size] = tight
        array = data.reshape(array.shape)
    elif kind.elem_type not in _AS_BYTES:
        return _runtime().OrtValue.ortvalue_from_numpy(array)
    kept.append(array)
    return _runtime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind.elem_type)


def _of_ort_value(value: Any) -> Value:
    kind = type_of_text(value.data_type())
    if kind is None or kind.elem_type not in _AS_BYTES:
        return value.numpy()
    shape, dtype = value.shape(), dtype_of(kind)
    count = math.prod(shape)
    bits = types.BITS_OF_ELEM.get(kind.elem_type)
    size = count * dtype.itemsize if bits is None else -(-count * bits // 8)
    data = np.frombuffer(ctypes.string_at(value.data_ptr(), size) if size else b"", np.uint8)
    flat = data.view(dtype) if bits is None else unpacked(data, count, bits, dtype)
    return flat.reshape(shape)


class _OrtGraphInMainMemory(_OrtGraph):
    """A session whose outputs are tensors in main memory, so that it can write them anywhere."""

    __slots__ = ()

    def run_into(
        self, inputs: Sequence[Value], places: Mapping[int, npt.NDArray[Any]]
    ) -> list[Value]:
        """Return the outputs in graph order; those with a place are written there."""
        check_count(self._label, self._inputs, inputs)
        # Held until the end of the run: the binding knows addresses alone.
        feeds = {n: _dense(v) for n, v in zip(self._inputs, inputs, strict=True)}
        try:
            binding = self._session.io_binding()
            for name, value in feeds.items():
                binding.bind_cpu_input(name, value)
            for index, name in enumerate(self._outputs):
                place = places.get(index)
                if place is None:
                    binding.bind_output(name)
                else:
                    at = place.ctypes.data
                    binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, at)
            self._session.run_with_iobinding(binding)
            made = binding.get_outputs()
            return [
                places[index] if index in places else value.numpy()
                for index, value in enumerate(made)
            ]
        except _failures() as error:
            raise self._failed(feeds, error) from error


@register_component
class OrtBackend(CachingBackend):
    """Runs graphs in ONNX Runtime; the default backend."""

    TYPE_NAME: ClassVar[str] = "bbnode.OrtBackend"
    Config: ClassVar[type] = OrtBackendConfig
    exposed_settings: ClassVar[Mapping[str, Any]] = {"isolation": "process"}
    config: OrtBackendConfig

    def __init__(self, config: OrtBackendConfig) -> None:
        super().__init__(config, config.max_prepared)
        self._isolated: Supervisor | None = None
        self.require(
            config.intra_op_threads >= 1 and config.inter_op_threads >= 1,
            f"thread counts have to be 1 or more, are {config.intra_op_threads} (intra) and "
            f"{config.inter_op_threads} (inter)",
        )
        self.require(
            config.max_memory_bytes >= _MIN_MEMORY_BYTES and config.max_run_s > 0,
            f"max_memory_bytes has to be {_MIN_MEMORY_BYTES} or more and max_run_s above 0, they "
            f"are {config.max_memory_bytes} and {config.max_run_s:g}",
        )
        if config.isolation == "process":
            self._isolated = self._isolate()
        elif config.providers != "auto":
            _ = self._providers

    def _isolate(self) -> Supervisor:
        if self.config.providers not in ("auto", ("CPUExecutionProvider",)):
            raise BackendUnavailable(
                f'{self.TYPE_NAME}: isolation = "process" runs graphs on the CPU alone, and '
                f"providers is {self.config.providers}; set one of the two otherwise"
            )
        settings = {
            name: getattr(self.config, name)
            for name in ("intra_op_threads", "inter_op_threads", "max_prepared",
                         "max_memory_bytes")
        }  # fmt: skip
        made = Supervisor(self.TYPE_NAME, settings, self.config.max_run_s)
        weakref.finalize(self, made.close)
        return made

    def facts(self) -> Mapping[str, int | float | str | bool]:
        """Return how often the child process died, and what holds it; nothing without one."""
        if self._isolated is None:
            return {}
        confined = self._isolated.confined
        return {"isolation": f"process, {confined}" if confined else "process",
                "child_deaths": self._isolated.deaths}  # fmt: skip

    def on_stop(self) -> None:
        """End the child process."""
        if self._isolated is not None:
            self._isolated.close()

    @cached_property
    def _providers(self) -> list[str]:
        available = _runtime().get_available_providers()
        wanted = self.config.providers
        if wanted == "auto":
            return [name for name in _AUTO if name in available]
        missing = [name for name in wanted if name not in available]
        if missing or not wanted:
            raise BackendUnavailable(
                f"{self.TYPE_NAME}: execution provider(s) {', '.join(missing) or '(none given)'} "
                f"not available; this onnxruntime has {', '.join(available)}"
            )
        return list(wanted)

    def supports(self, op_type: str, opset_version: int, domain: str = "") -> bool:
        """Return True if an op of ONNX can run here; of ONNX Runtime's own, preparing tells it."""
        if domain == keys.RUNTIME_DOMAIN:
            return True
        return super().supports(op_type, opset_version, domain)

    def materialize_from_wire(self, node: TypeNode, payload: memoryview) -> Value:
        """Return a received tensor: a view of its payload, copied only where it is not aligned.

        ONNX Runtime computes on aligned memory alone; copied here, it is not again at each use.
        """
        tensor = _dense(super().materialize_from_wire(node, payload))
        tensor.flags.writeable = False
        return tensor

    def build_graph(self, model: ModelProto) -> PreparedGraph:
        if self._isolated is not None:
            return self._isolated.add(model)
        prepared = self._build(model)
        open_ranks = any(
            port.type.HasField("tensor_type") and not port.type.tensor_type.HasField("shape")
            for port in model.graph.input
        )
        if not open_ranks or not _has_scan(model):
            return prepared
        kept = ModelProto()  # the caller may change its own
        kept.CopyFrom(model)
        return _GraphByRanks(kept, f"{self.TYPE_NAME}: graph {model.graph.name!r}", self._build)

    def _build(self, model: ModelProto) -> PreparedGraph:
        options = _runtime().SessionOptions()
        # Its ScatterND sums rows of one index on several threads at once, and loses some of them.
        races = _sums_at_indices(model)
        options.intra_op_num_threads = 1 if races else self.config.intra_op_threads
        options.inter_op_num_threads = self.config.inter_op_threads
        if self.config.inter_op_threads > 1:
            options.execution_mode = _runtime().ExecutionMode.ORT_PARALLEL
        options.use_deterministic_compute = True
        # It has the intermediates of a second run in one block more, beside those of the first.
        options.enable_mem_pattern = _fed_bytes(model) < _LARGE_BYTES
        options.log_severity_level = _LOG_FATAL_ONLY
        # Spinning waits burn the cores that the other daemons of this machine want.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Products by int4 weights otherwise round their other factor to int8.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        label = f"{self.TYPE_NAME}: graph {model.graph.name!r}"
        model = guarded(mended(model))
        try:
            session = self._session(model, options)
        except _failures() as error:
            text = _first_line(error)
            text += _types_told(model, text)
            raise BackendError(
                f"{label} cannot be prepared: {text}; check it with onnx.checker.check_model, and "
                "that its opset is one this onnxruntime runs",
                node=_node_in(text),
            ) from error
        lost = [name for name in self._providers if name not in session.get_providers()]
        if lost and self.config.providers != "auto":
            # Its library loads late: a provider that is listed may lack what it needs (a driver).
            raise BackendUnavailable(
                f"{label}: execution provider(s) {', '.join(lost)} could not be started; this "
                f"session has {', '.join(session.get_providers())}"
            )
        _forget_model(session)
        ports = (*session.get_inputs(), *session.get_outputs())
        kinds = [type_of_text(port.type) for port in ports]
        if any(kind is not None and kind.elem_type in _AS_BYTES for kind in kinds):
            return _SmallElements(session, label)
        plain = all(kind is not None and kind.element is None for kind in kinds)
        if plain and session.get_providers() == ["CPUExecutionProvider"]:
            return _OrtGraphInMainMemory(session, label)
        return _OrtGraph(session, label)

    def _session(self, model: ModelProto, options: Any) -> Any:
        """Return a session, of the model in another form where a kernel is missing for an op."""
        first: Exception | None = None
        for _ in range(_MAX_FORMS):
            try:
                return _runtime().InferenceSession(
                    model.SerializeToString(),
                    options,
                    providers=self._providers,
                    disabled_optimizers=_idle_optimizers(model),
                )
            except _failures() as error:
                first = first or error
                lacking = _NO_KERNEL.search(_first_line(error))
                other = lowered(model, lacking[1]) if lacking else None
                if other is None:
                    break
                model = other
        raise first if first is not None else AssertionError("no form was tried")


def _idle_optimizers(model: ModelProto) -> list[str]:
    """Return the optimizers that can't find what they look for in a model."""
    ops: set[str] = set()
    for node in all_nodes(model):
        if not is_onnx_domain(node.domain):
            return []  # a function of its own, or one of ONNX Runtime's, stands for whatever ops
        ops.add(node.op_type)
    return [name for name, wanted in _LOOKS_FOR.items() if ops.isdisjoint(wanted)]


def _types_told(model: ModelProto, text: str) -> str:
    """Return the element types of the op that an error says to have no kernel, in brackets."""
    lacking = _NO_KERNEL.search(text)
    if lacking is None:
        return ""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except (RuntimeError, ValueError):  # what ONNX's C++ part refuses
        return ""
    infos = (*graph.input, *graph.value_info, *graph.output)
    known = {info.name: info.type.tensor_type.elem_type for info in infos}
    known.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    name = _node_in(text)
    for node in graph.node:
        if node.op_type == lacking[1] and node.name == name:
            kinds = [
                TensorProto.DataType.Name(known.get(v, 0)) for v in (*node.input, *node.output)
            ]
            return f" (of {', '.join(kinds)})"
    return ""


def _fed_bytes(model: ModelProto) -> int:
    """Return the size of the inputs of a known shape, as float32."""
    total = 0
    for port in model.graph.input:
        dims = port.type.tensor_type.shape.dim
        if dims and all(dim.HasField("dim_value") for dim in dims):
            total += 4 * math.prod(dim.dim_value for dim in dims)
    return total


def _has_scan(model: ModelProto) -> bool:
    return any(node.op_type == "Scan" for node in all_nodes(model))


def _sums_at_indices(model: ModelProto) -> bool:
    """Return True if a ScatterND with a reduction is anywhere in the model."""
    return any(
        node.op_type == "ScatterND" and any(each.name == "reduction" for each in node.attribute)
        for node in all_nodes(model)
    )


def _forget_model(session: Any) -> None:
    """Drop the bytes that a session keeps for starting anew without a provider that failed."""
    if session.get_providers() == ["CPUExecutionProvider"] and hasattr(session, "_model_bytes"):
        session._model_bytes = None


def _quickest(session: Any) -> Any:
    return getattr(session, "_sess", session).run


def _dense(value: Value) -> Value:
    """Return the array itself where ONNX Runtime can read it, else a dense and aligned copy."""
    if type(value) is np.ndarray:
        flags = value.flags
        if flags.c_contiguous and flags.aligned:
            return value
    if type(value) is TensorSequence or type(value) is OptionalValue:
        return to_onnx(value)
    return np.require(value, requirements=("C", "A"))


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def _node_in(text: str) -> str:
    """Return the name of the node that an error of ONNX Runtime is about, or ""."""
    found = _NODE_NAME.search(text)
    return found[1] or found[2] or found[3] or "" if found else ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
