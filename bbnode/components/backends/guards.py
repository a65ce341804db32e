"""Guards for values that end the process in ONNX Runtime's native code.

Rule: a guard fails the op on such a value and changes no other result; an op whose operands can't
have such a value gets none. What kills was found by running each op of ONNX on extreme values in
processes of their own (`tests/components/test_backend_guards.py` does it again):

- Div of int32 or int64, the least number by -1: SIGFPE. A divisor is 0 in place of such a -1, and
  the kernel refuses to divide by 0. (8 and 16 bits wrap around, as all sums of integers do.)
- GRU and LSTM of an empty batch, GRU of an empty sequence: a check inside of the kernel aborts. X
  is reshaped to its own sizes, which are multiplied by their product over itself.
- STFT with a window or frames of length 0: SIGFPE. Unique along an axis whose entries have no
  elements: aborts. Conv with a kernel of size 0 along an axis: never ends. ConvTranspose of three
  axes, one of size 0: SIGSEGV. RoiAlign, and GridSample, of a map without positions: reads beside
  it. As above.

Sizes and counts of loops that a value says take memory and time. No graph can bound these:
`isolation = "process"` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bbnode.components.backends.lowering import Emitter, all_nodes, graphs_of
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.onnx_file import onnx_schema
from bbnode.ir.versions import onnx_version

# Between the name of a guarded node, in that of a node that guards it, and what is wrong there.
_MARK: Final = " fails: "
# Axes of X whose size must not be 0; of an LSTM that of the batch alone.
_ABORTS_AT: Final[Mapping[str, list[int]]] = {"GRU": [0, 1, 2], "LSTM": []}
_LEAST: Final[Mapping[int, int]] = {
    TensorProto.INT32: np.iinfo(np.int32).min,
    TensorProto.INT64: np.iinfo(np.int64).min,
}
# Element types of which no quotient traps.
_SAFE: Final = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16,
     TensorProto.INT8, TensorProto.INT16, TensorProto.UINT8, TensorProto.UINT16,
     TensorProto.UINT32, TensorProto.UINT64}
)  # fmt: skip
_OF_FIELD: Final = {
    "value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT,
    "value_int": TensorProto.INT64, "value_ints": TensorProto.INT64,
    "value_string": TensorProto.STRING, "value_strings": TensorProto.STRING,
}  # fmt: skip
# Ops whose results are sizes, and those that hand on some of the numbers they read.
_COUNTS: Final = frozenset({"Shape", "Size"})
_SELECTS: Final = frozenset(
    {"Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
     "Unsqueeze"}
)  # fmt: skip
_MAX_STEPS: Final = 64  # nodes that are looked through for the type or the range of a value
_WHERE_SINCE, _SLICE_READS_SINCE, _CAST_LIKE_SINCE = 9, 10, 15
_MAX_RANK: Final = 1 << 30  # beyond any


def guarded(model: ModelProto) -> ModelProto:
    """Return a model whose ops fail on values that would end the process; itself without such."""
    if not any(node.op_type in _GUARDS for node in all_nodes(model)):
        return model
    version = onnx_version(model)
    made = ModelProto()
    made.CopyFrom(model)
    taken = {name for node in all_nodes(made) for name in (*node.input, *node.output)}
    changed = False
    todo: list[tuple[GraphProto | FunctionProto, _Values | None]] = [(made.graph, None)]
    todo += [(function, None) for function in made.functions]
    while todo:
        body, outer = todo.pop()
        scope = _Values.of(body, version, outer)
        nodes: list[NodeProto] = []
        for node in body.node:
            held = NodeProto.FromString(node.SerializeToString())
            guard = _GUARDS.get(held.op_type) if is_onnx_domain(held.domain) else None
            before = guard(held, scope, taken) if guard else []
            changed |= bool(before)
            nodes += [*before, held]
        del body.node[:]
        body.node.extend(nodes)
        todo += [(graph, scope) for node in body.node for graph in graphs_of(node)]
    return made if changed else model


def blamed(node: str, text: str) -> tuple[str, str]:
    """Return the name of the guarded node and the text of an error, by those of the runtime."""
    name, mark, what = node.partition(_MARK)
    if mark:
        return name, f"op {name!r}: {what}"
    if "Integer division by zero" in text:
        text += " (or of the least integer by -1)"
    return node, text


@dataclass(slots=True)
class _Values:
    """Types, makers and constants of one graph's values; `outer` has those around it."""

    version: int
    outer: _Values | None
    kinds: dict[str, int] = field(default_factory=dict)
    makers: dict[str, NodeProto] = field(default_factory=dict)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    shapes: dict[str, list[int | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, body: GraphProto | FunctionProto, version: int, outer: _Values | None) -> _Values:
        scope = cls(version, outer)
        if isinstance(body, GraphProto):
            ports = {port.name for port in body.input}
            for info in (*body.input, *body.value_info, *body.output):
                if info.type.tensor_type.elem_type:
                    scope.kinds[info.name] = info.type.tensor_type.elem_type
                scope.shapes[info.name] = [
                    dim.dim_value if dim.HasField("dim_value") else None
                    for dim in info.type.tensor_type.shape.dim
                ]
            for tensor in body.initializer:
                scope.kinds[tensor.name] = tensor.data_type
                scope.shapes[tensor.name] = list(tensor.dims)
                if tensor.name not in ports:  # else it may be fed
                    scope.constants[tensor.name] = tensor
        else:
            for entry in body.opset_import:
                scope.version = entry.version if is_onnx_domain(entry.domain) else scope.version
        scope.makers = {name: node for node in body.node for name in node.output if name}
        return scope

    def home(self, name: str) -> _Values | None:
        """Return the scope that has a value, this one or one around it."""
        scope: _Values | None = self
        while scope and name not in scope.makers and name not in scope.kinds:
            scope = scope.outer
        return scope

    def kind(self, name: str, steps: int = _MAX_STEPS) -> int:
        """Return the element type of a value, 0 where it is not known."""
        scope = self.home(name)
        if scope is None or not steps:
            return 0
        if name not in scope.kinds:
            node = scope.makers[name]
            scope.kinds[name] = scope.made(node, list(node.output).index(name), steps - 1)
        return scope.kinds[name]

    def made(self, node: NodeProto, position: int, steps: int) -> int:
        """Return the element type of an output of a node, 0 where it is not known."""
        if not is_onnx_domain(node.domain):
            return 0
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype"):
                return int(attribute.i)
            if attribute.name == "value" and attribute.HasField("t"):
                return int(attribute.t.data_type)
            if attribute.name in _OF_FIELD and node.op_type == "Constant":
                return int(_OF_FIELD[attribute.name])
        inner = graphs_of(node)
        if inner:
            at = position + (node.op_type == "Loop")
            body = inner[0]
            if at >= len(body.output):
                return 0
            return _Values.of(body, self.version, self).kind(body.output[at].name, steps)
        schema = onnx_schema(node.op_type, self.version, "")
        if schema is None or not schema.outputs:
            return 0
        said = schema.outputs[min(position, len(schema.outputs) - 1)].type_str
        if said.startswith("tensor("):
            return _ELEM_OF_TEXT.get(said, 0)
        for at, name in enumerate(node.input):
            port = schema.inputs[min(at, len(schema.inputs) - 1)]
            if name and port.type_str == said:
                return self.kind(name, steps)
        return 0

    def constant(self, name: str) -> npt.NDArray[Any] | None:
        """Return the numbers of a value that is the same in each run, or None."""
        scope = self.home(name)
        if scope is None:
            return None
        tensor = scope.constants.get(name)
        node = scope.makers.get(name)
        if tensor is None and node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name in ("value_int", "value_ints"):
                    return np.asarray(helper.get_attribute_value(attribute), np.int64)
                if attribute.name == "value":
                    tensor = attribute.t
        return None if tensor is None else numpy_helper.to_array(tensor)

    def sizes(self, name: str) -> list[int | None]:
        """Return the shape of a value as far as it is stated, else nothing."""
        scope = self.home(name)
        if scope is None or scope.shapes.get(name):
            return [] if scope is None else scope.shapes[name]
        node = scope.makers.get(name)
        if node is None or not is_onnx_domain(node.domain):
            return []
        if node.op_type == "Reshape":
            shape = scope.constant(node.input[1]) if len(node.input) > 1 else None
            return [] if shape is None else [int(n) if n > 0 else None for n in shape.reshape(-1)]
        tensor = scope.constant(name)
        return [] if tensor is None else list(tensor.shape)

    def counts(self, name: str) -> bool:
        """Return True for a value that holds sizes alone, which are 0 or more."""
        for _ in range(_MAX_STEPS):
            scope = self.home(name)
            node = scope.makers.get(name) if scope else None
            if node is None or not is_onnx_domain(node.domain):
                return False
            if node.op_type in _COUNTS:
                return True
            if node.op_type not in _SELECTS or not node.input:
                return False
            name = node.input[0]
        return False


def _div(node: NodeProto, scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that make a divisor of 0 out of each -1 under the least number."""
    if len(node.input) != 2:
        return []
    over, by = node.input
    kind = scope.kind(over) or scope.kind(by)
    if kind in _SAFE or scope.counts(over) or scope.counts(by):
        return []
    divisors, dividends = scope.constant(by), scope.constant(over)
    if divisors is not None and not np.any(divisors == -1):
        return []
    if dividends is not None and kind and not np.any(dividends == _LEAST[kind]):
        return []
    emit = Emitter(node, "guard", taken)
    number = partial(_number, emit, kind)
    if kind:
        zero = number(0)
        traps = emit(
            "And", emit("Equal", over, number(_LEAST[kind])), emit("Equal", by, number(-1))
        )
    elif scope.version >= _CAST_LIKE_SINCE:
        # The least number alone is its own negative besides 0; floats have none.
        zero, minus = (emit("CastLike", _number(emit, TensorProto.INT64, n), over) for n in (0, -1))
        least = emit("And", emit("Equal", over, emit("Sub", zero, over)),
                     emit("Not", emit("Equal", over, zero)))  # fmt: skip
        below = emit("And", emit("Equal", by, minus), emit("Less", minus, zero))
        traps = emit("And", least, below)
    else:
        return []
    if scope.version >= _WHERE_SINCE:
        node.input[1] = emit("Where", traps, zero, by)
    else:
        node.input[1] = emit("Mul", by, emit("Cast", emit("Not", traps), to=kind))
    return emit.nodes


def _recurrent(node: NodeProto, _scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where the X of a GRU or LSTM has an axis of size 0 that aborts it."""
    emit, x = Emitter(node, "guard", taken), node.input[0]
    batch_first = any(each.name == "layout" and each.i for each in node.attribute)
    axes = _ABORTS_AT[node.op_type] or ([0] if batch_first else [1])
    counted = emit("ReduceProd", emit("Gather", emit("Shape", x), _numbers(emit, axes)), keepdims=0)
    node.input[0] = _unless_zero(emit, node, x, counted, "of an empty batch or sequence")
    return emit.nodes


def _unique(node: NodeProto, _scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where a Unique has entries along its axis, and these no elements."""
    axis = next((int(each.i) for each in node.attribute if each.name == "axis"), None)
    if axis is None:
        return []
    emit, x = Emitter(node, "guard", taken), node.input[0]
    sizes = emit("Shape", x)
    along = emit("Gather", sizes, _number(emit, TensorProto.INT64, axis))
    none = emit("Cast", emit("Equal", along, _number(emit, TensorProto.INT64, 0)),
                to=TensorProto.INT64)  # fmt: skip
    counted = emit("Add", emit("ReduceProd", sizes, keepdims=0), none)
    node.input[0] = _unless_zero(emit, node, x, counted, "of slices without elements")
    return emit.nodes


def _stft(node: NodeProto, scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where an STFT has a window or frames of length 0."""
    emit = Emitter(node, "guard", taken)
    names = [*node.input, "", ""]
    window, length = names[2], names[3]
    if window and scope.constant(window) is None:
        counted = emit("Size", window)
        node.input[2] = _unless_zero(emit, node, window, counted, "with an empty window")
    known = scope.constant(length) if length else None
    if length and (known is None or np.any(known == 0)):
        node.input[3] = emit("Mul", length, _unless(emit, node, length, "with frames of length 0"))
    return emit.nodes


def _conv(node: NodeProto, scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where the kernel of a Conv has an axis of size 0: it never ends."""
    weights = node.input[1]
    said = next((each.ints for each in node.attribute if each.name == "kernel_shape"), None)
    sizes = scope.sizes(weights)[2:] if said is None else said  # which the op compares
    if sizes and all(size is not None and size > 0 for size in sizes):
        return []
    emit = Emitter(node, "guard", taken)
    shape = emit("Shape", weights)
    if scope.version >= _SLICE_READS_SINCE:
        shape = emit("Slice", shape, _numbers(emit, [2]), _numbers(emit, [_MAX_RANK]))
    counted = emit("ReduceProd", shape, keepdims=0)
    node.input[1] = _unless_zero(emit, node, weights, counted, "with an empty kernel")
    return emit.nodes


def _conv_transpose(node: NodeProto, scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where the X of a ConvTranspose of three axes has one of size 0."""
    said = next((each.ints for each in node.attribute if each.name == "kernel_shape"), None)
    rank = len(scope.sizes(node.input[1])[2:] if said is None else said)
    return [] if rank in (1, 2) else _reads_space(node, scope, taken)


def _reads_space(node: NodeProto, scope: _Values, taken: set[str]) -> list[NodeProto]:
    """Return nodes that fail where the X of an op has an axis behind its channels of size 0."""
    sizes = scope.sizes(node.input[0])[2:]
    if sizes and all(size is not None and size > 0 for size in sizes):
        return []
    emit, x = Emitter(node, "guard", taken), node.input[0]
    shape = emit("Shape", x)
    if scope.version >= _SLICE_READS_SINCE:
        shape = emit("Slice", shape, _numbers(emit, [2]), _numbers(emit, [_MAX_RANK]))
    counted = emit("ReduceProd", shape, keepdims=0)
    node.input[0] = _unless_zero(emit, node, x, counted, "of an empty input")
    return emit.nodes


def _unless_zero(emit: Emitter, node: NodeProto, x: str, counted: str, what: str) -> str:
    """Return x, or a failure of `node` where the scalar int64 `counted` is 0."""
    share = _unless(emit, node, counted, what)
    return emit("Reshape", x, emit("Mul", emit("Shape", x), share))


def _unless(emit: Emitter, node: NodeProto, counted: str, what: str) -> str:
    """Return the number 1, or a failure of `node` where `counted` is 0."""
    share = emit("Div", counted, counted)
    emit.nodes[-1].name = f"{node.name}{_MARK}{node.op_type} {what}"
    return share


def _numbers(emit: Emitter, numbers: list[int]) -> str:
    kind = TensorProto.INT64
    return emit("Constant", value=helper.make_tensor("numbers", kind, [len(numbers)], numbers))


def _number(emit: Emitter, kind: int, number: int) -> str:
    return emit("Constant", value=helper.make_tensor("number", kind, [], [number]))


_ELEM_OF_TEXT: Final[Mapping[str, int]] = {
    "tensor(int64)": TensorProto.INT64, "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL, "tensor(float)": TensorProto.FLOAT,
    "tensor(double)": TensorProto.DOUBLE, "tensor(uint8)": TensorProto.UINT8,
}  # fmt: skip
_GUARDS: Final[Mapping[str, Callable[[NodeProto, _Values, set[str]], list[NodeProto]]]] = {
    "Div": _div,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GridSample": _reads_space,
    "RoiAlign": _reads_space,
    "STFT": _stft,
    "Unique": _unique,
    **dict.fromkeys(_ABORTS_AT, _recurrent),
}
