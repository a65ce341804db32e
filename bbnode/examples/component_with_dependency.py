"""A component of your own that depends on another one.

Run it with `python -m bbnode.examples.component_with_dependency`.

`HalfPrecision` is a codec: it makes float32 tensors half as large before they travel. It lets the
backend in the slot "compute" do so, which `depends` says: a program with nothing bound to that
slot is refused, and `self.dependency("backend")` is the component. The program never mentions it.
`storage` has the types of the ports, so that the compiler knows what will be on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto, helper

from bbnode.compiler import Compiler, target_names
from bbnode.components import (
    Backend,
    Codec,
    ComponentError,
    ConnectedView,
    OpContext,
    OrtBackend,
    register_component,
)
from bbnode.dsl import CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import Network

FLOAT16 = types.TENSOR_BY_ELEM[onnx.TensorProto.FLOAT16]


class OutOfRange(ComponentError):
    """A tensor holds numbers that half precision can't carry."""


@dataclass(frozen=True, kw_only=True)
class HalfPrecisionConfig:
    """Settings of `HalfPrecision`.

    Attributes:
        largest: magnitude that is encoded; a tensor with a larger one is refused.
    """

    largest: float = float(np.finfo(np.float16).max)


@register_component
class HalfPrecision(Codec):
    """float32 to float16 and back, on the bound backend."""

    TYPE_NAME: ClassVar[str] = "example.HalfPrecision"
    Config: ClassVar[type] = HalfPrecisionConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    storage: ClassVar[Mapping[str, types.TypeNode]] = {
        "*": types.TENSOR_FLOAT,
        "Encode.code": FLOAT16,
        "Decode.code": FLOAT16,
    }
    config: HalfPrecisionConfig

    def encode(self, ctx: OpContext, tensor: Any) -> Any:
        """Return a float32 tensor as float16; OutOfRange beyond the configured magnitude."""
        largest = float(np.abs(tensor).max(initial=0))
        if not largest <= self.config.largest:
            raise OutOfRange(f"{largest} is beyond {self.config.largest}; scale the tensor first")
        return self._cast(tensor, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)

    def decode(self, ctx: OpContext, code: Any) -> Any:
        """Return a float16 tensor as float32."""
        return self._cast(code, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)

    def train(self, ctx: OpContext, training: Any) -> None:
        """There is nothing to fit."""

    def _cast(self, tensor: Any, source: int, target: int) -> Any:
        backend: Backend = self.dependency("backend")
        return backend.execute(cast_model(source, target), {"x": tensor})["y"]


def cast_model(source: int, target: int) -> ModelProto:
    """Return a graph of one Cast, `x` to `y`, for tensors of any shape."""
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=target)],
        "cast",
        [helper.make_tensor_value_info("x", source, None)],
        [helper.make_tensor_value_info("y", target, None)],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


class Compressed(Module):
    """Send "tensor" ([…] float32) from class "sender" to class "receiver", half as large."""

    home = "sender"

    def body(self, g: Graph) -> None:
        tensor = g.input("tensor", types.TENSOR_FLOAT)
        receivers = PeerSelectorSlot("receivers", peer_class="receiver").current_view(
            g, after=tensor
        )
        # One codec per side: a slot is a component on each node that uses it.
        code = CodecSlot("codec").encode(g, tensor)
        received = g.net_out("code", receivers, code)
        g.output("restored", CodecSlot("codec").decode(g, received))


def compile_program() -> ModelProto:
    """Compile the program with our codec and ONNX Runtime."""
    return (
        Compiler()
        .bind_peer_selector("receivers", ConnectedView)
        .bind_codec("codec", HalfPrecision)
        .bind_backend("compute", OrtBackend)
        .compile(Compressed().build())
    )


def main() -> None:
    """Send a tensor, print what it cost and what it lost; then one that does not fit."""
    compiled = compile_program()
    for target in target_names(compiled):
        slots = sorted(
            f"{entry.key.rpartition('.')[2]} = {entry.value.split('|')[1]}"
            for entry in compiled.metadata_props
            if f".binding.{target}." in entry.key
        )
        print(f"{target}: {', '.join(slots)}")

    network = Network(seed=0)
    sender = network.add("sender", compiled, ["sender"], config={"codec": {"largest": 100.0}})
    receiver = network.add("receiver", compiled, ["receiver"])
    tensor = np.linspace(-1, 1, 10_000, dtype=np.float32)
    sender.invoke("sender", {"tensor": tensor})
    network.run_until_idle()
    (restored,) = receiver.values("restored")
    on_the_wire = network.counters()["envelopes.bytes"]
    print(f"{tensor.nbytes} bytes of float32 travelled as {on_the_wire} bytes")
    print(f"largest error: {np.abs(restored - tensor).max():.1e}")

    sender.invoke("sender", {"tensor": tensor * 1000})
    network.run_until_idle()
    (failed,) = sender.failures()
    print(f"refused: {failed.kind}: {failed.detail}")


if __name__ == "__main__":
    main()
