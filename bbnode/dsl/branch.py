"""`Branch`: the Graph of one branch of an `if_`, or of the body of a `loop`.

Rule: a branch is a pure ONNX graph that runs as part of its op, in the backend; so it holds
nothing but ops of that backend's slot. It may read the values of the Graphs around it. Its own
values are called `body.<depth>/<node>.<port>`, which no value outside of a branch is, so that
a graph never hides a name of those around it; its nodes carry no metadata of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, ValueInfoProto

from bbnode.dsl.constants import constant_attribute
from bbnode.dsl.core.attributes import WrongKind
from bbnode.dsl.core.graph import Graph
from bbnode.dsl.errors import BadArgument, BranchMisuse
from bbnode.dsl.graph_core import GraphCore
from bbnode.dsl.output import After, Output
from bbnode.dsl.slot_table import SlotUse
from bbnode.ir import keys, types
from bbnode.ir.types import TypeKind, TypeNode

# Parsers of protobufs take 100 messages in one another, and a graph in a graph is three.
MAX_BRANCH_DEPTH = 16


class Branch(Graph):
    """What the callables of `if_` and `loop` record into; a Graph for one backend slot."""

    def __init__(self, parent: Graph, slot: SlotUse, title: str) -> None:
        super().__init__(parent.recorder, name=parent.name, home=parent.home)
        self._title = title
        self._slot = slot
        self._outside: tuple[GraphCore, ...] = (parent,)
        if isinstance(parent, Branch):
            self._outside = (*parent._outside, parent)
        if len(self._outside) > MAX_BRANCH_DEPTH:
            raise parent.error(
                BranchMisuse, f"branches nest deeper than {MAX_BRANCH_DEPTH}; make the inner ones "
                "an op of their own, or a Loop",
            )  # fmt: skip
        self._scopes.append(f"body.{len(self._outside)}")
        self._made: set[str] = set()  # by ops of this very branch
        self._scalars: set[str] = set()

    @property
    def title(self) -> str:
        """`the then branch of If`, for messages."""
        return self._title

    @property
    def way_out(self) -> str:
        """How a value of a branch gets out of it, for messages."""
        return "return it from the branch, and take it from what if_ or loop gives"

    def emit(
        self,
        domain: str,
        op_type: str,
        *,
        inputs: Iterable[Output | None] = (),
        outputs: Sequence[tuple[str, TypeNode]] = (),
        attributes: Iterable[AttributeProto] = (),
        metadata: Mapping[str, str] | None = None,  # noqa: ARG002  # ops of backends have none
        slot: SlotUse | None = None,
        after: After = None,
        opset_version: int = keys.BB_OPSET_VERSION,
        value_names: Sequence[str] = (),  # noqa: ARG002  # only inputs and outputs have some
    ) -> tuple[Output, ...]:
        """Record one op of the backend slot.

        Raises:
            BranchMisuse: it is another op, or waits for something with `after`.
        """
        self.check_open()
        if domain or slot is None or slot.name != self._slot.name:
            raise self._misplaced(op_type, slot)
        if self._listed(after):
            raise self.error(
                BranchMisuse,
                f"{op_type} in {self._title} has after=…, but a branch runs as one; give "
                "the after to the if_ or loop",
            )
        self._check_slot(slot)
        made = super().emit(
            domain, op_type, inputs=inputs, outputs=outputs, attributes=attributes,
            opset_version=opset_version,
        )  # fmt: skip
        self._made.update(value.name for value in made)
        return made

    def _misplaced(self, op_type: str, slot: SlotUse | None) -> BranchMisuse:
        whose = "" if slot is None else f" of slot {slot.name!r}"
        return self.error(
            BranchMisuse,
            f"{op_type}{whose} can't stand in {self._title}, which runs whole in the backend "
            f"{self._slot.name!r}: only ops of that slot can; record it outside, and use the value",
        )

    def _metadata(self, *_: object) -> dict[str, str]:
        return {}  # the op that the branch belongs to has slot and source line

    def _holds(self, graph: GraphCore) -> bool:
        return graph is self or graph in self._outside

    def formal(self, name: str, kind: TypeNode, *, scalar: bool = False) -> Output:
        """A value that the op hands to its body; `scalar`: its shape is []."""
        value = self.declare(f"{self._scopes[0]}/{name}", kind)
        if scalar:
            self._scalars.add(value.name)
        return value

    def input(self, name: str, type: TypeNode = types.ANY) -> Output:  # noqa: A002, ARG002
        """BranchMisuse: a branch reads the values around it as they are."""
        raise self.error(
            BranchMisuse,
            f"{self._title} has no inputs of its own; use the values around it, or make {name!r} "
            "an input outside",
        )

    def output(self, name: str, *_: object, **__: object) -> None:
        """BranchMisuse: a branch returns its values."""
        raise self.error(
            BranchMisuse, f"{self._title} returns its values; return the one for {name!r}"
        )

    def constant(self, value: Any, *, after: After = None) -> Output:
        """A tensor that rides in the branch.

        Raises:
            BadArgument: it is no tensor; nothing else can be computed with in a backend.
        """
        try:
            attribute, kind = constant_attribute(value)
        except WrongKind as error:
            raise self.error(BadArgument, f"{value!r:.60} can't be a constant: {error}") from error
        if kind.kind is not TypeKind.TENSOR:
            raise self.error(
                BadArgument, f"{value!r:.60} is no tensor; {self._title} computes with tensors only"
            )
        (made,) = self.emit(
            "", "Constant", outputs=(("output", kind),), attributes=(attribute,), slot=self._slot,
            after=after, opset_version=keys.ONNX_OPSET_VERSION,
        )  # fmt: skip
        return made

    def close(self, formals: Sequence[Output], results: Sequence[Output]) -> GraphProto:
        """End the branch and give it as a graph with these inputs and outputs."""
        given: dict[str, Output] = {}
        for value in results:
            # ONNX wants each output made in its graph, and none of them twice.
            is_own = value.name in self._made and value.name not in given
            made = value if is_own else self._copy(value)
            given[made.name] = made
        self._closed = True
        graph = GraphProto(name=self._scopes[0])
        graph.node.extend(self._function.node)
        graph.input.extend(_info(value) for value in formals)
        for port in graph.input:
            if port.name in self._scalars:  # ONNX Runtime wants to know
                port.type.tensor_type.shape.SetInParent()
        graph.output.extend(_info(value) for value in given.values())
        return graph

    def _copy(self, value: Output) -> Output:
        (copy,) = self.emit(
            "", "Identity", inputs=(value,), outputs=(("output", value.type),), slot=self._slot,
            opset_version=keys.ONNX_OPSET_VERSION,
        )  # fmt: skip
        return copy


def _info(value: Output) -> ValueInfoProto:
    info = ValueInfoProto(name=value.name)
    if value.type.kind is TypeKind.TENSOR:  # what is unknown here the runtime finds out
        info.type.tensor_type.elem_type = value.type.elem_type
    return info
