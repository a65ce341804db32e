"""A component of your own that depends on another one.

Run it with `python -m bbnode.examples.component_with_dependency`.

`HalfPrecision` is a codec: it makes float32 tensors half as large before they travel. It lets the
backend in the slot "compute" do so, which `depends` says: a program with nothing bound to that
slot is refused, and `self.dependency("backend")` is the component. The program never mentions it.
`storage` has the types of the ports, so that the compiler knows what will be on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto, helper

from bbnode.compiler import Compiler
from bbnode.components import (
    Backend,
    Codec,
    ConnectedView,
    OpContext,
    OrtBackend,
    register_component,
)
from bbnode.dsl import CodecSlot, Graph, Module, PeerSelectorSlot, types
from bbnode.sim import Network

FLOAT16 = types.TENSOR_BY_ELEM[onnx.TensorProto.FLOAT16]


@register_component
class HalfPrecision(Codec):
    """float32 to float16 and back, on the bound backend."""

    TYPE_NAME: ClassVar[str] = "example.HalfPrecision"
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    storage: ClassVar[Mapping[str, types.TypeNode]] = {
        "*": types.TENSOR_FLOAT,
        "Encode.code": FLOAT16,
        "Decode.code": FLOAT16,
    }

    def encode(self, ctx: OpContext, tensor: Any) -> Any:
        """Return a float32 tensor as float16."""
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
        receiver = PeerSelectorSlot("receivers", peer_class="receiver").sample(g, n=1, after=tensor)
        # One codec per side: a slot is a component on each node that uses it.
        codec = CodecSlot("codec")
        received = g.net_out("code", receiver, codec.encode(g, tensor))
        g.output("restored", codec.decode(g, received))


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
    """Send a tensor; print what it cost and what it lost."""
    compiled = compile_program()
    network = Network(seed=0)
    sender = network.add("sender", compiled, ["sender"])
    receiver = network.add("receiver", compiled, ["receiver"])
    tensor = np.linspace(-1, 1, 10_000, dtype=np.float32)
    sender.invoke("sender", {"tensor": tensor})
    network.run_until_idle()
    (restored,) = receiver.values("restored")
    on_the_wire = network.counters()["envelopes.bytes"]
    print(f"{tensor.nbytes} bytes of float32 travelled as {on_the_wire} bytes")
    print(f"largest error: {np.abs(restored - tensor).max():.1e}")


if __name__ == "__main__":
    main()
