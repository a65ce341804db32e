"""`Slot`: a named place for a component, and how its ops are recorded.

Rule: a slot is its name. Two slot objects of one name are one slot; where and how often the
objects are made means nothing. All ops of all roles are recorded by `Slot.op`, which reads the
op table; the methods of the role slots are thin names for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from bbnode.dsl.core.graph import After, Graph, Output, as_graph
from bbnode.dsl.core.names import check_name, hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BadArgument, NoSuchOp
from bbnode.ir import keys, opset
from bbnode.ir.opset import OpSpec
from bbnode.ir.slots import ConcreteSpec

# What a recorded op gives: None, one value, or as many as the op has outputs.
Recorded = Any


class Slot:
    """Base of the slot classes.

    A generic slot is filled by the compiler's bind chain. A concrete one carries a component
    type with its config, `concrete=bbnode.components.concrete(Class, Config(…))`, into the
    artifact.
    """

    ROLE: ClassVar[str]

    def __init__(self, name: str, *, concrete: ConcreteSpec | None = None) -> None:
        """Name the slot.

        Raises:
            BadName: the name cannot stand in the artifact.
            BadArgument: `concrete` is no ConcreteSpec, or of another role.
        """
        self._use = SlotUse(
            name=check_name("slot", name),
            role=self.ROLE,
            concrete=self._checked(name, concrete),
        )

    @property
    def name(self) -> str:
        """The slot's name."""
        return self._use.name

    @property
    def concrete(self) -> ConcreteSpec | None:
        """The component that the slot holds, or None when it is generic."""
        return self._use.concrete

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def op(
        self, g: Graph, op_type: str, /, *inputs: Output | None, after: After = None,
        **attributes: Any,
    ) -> Recorded:  # fmt: skip
        """Record an op of this slot by its op type, e.g. `"ComputeLoss"`.

        Args:
            g: the Graph.
            op_type: as in the op table.
            inputs: values, in port order; None for an optional one left out.
            after: values that must be there before the op fires.
            attributes: by name; those left out take their defaults.

        Returns:
            None, one Output, or a tuple of them: as many as the op has outputs.

        Raises:
            NoSuchOp: the slot's role has no such op.
            BadArgument: inputs or attributes do not fit the op.
        """
        graph = self._graph(g)
        for spec in self._specs():
            if spec.op_type == op_type:
                return shaped(graph.record(spec, inputs, attributes, slot=self._use, after=after))
        known = [spec.op_type for spec in self._specs()]
        raise graph.error(
            NoSuchOp, f"{type(self).__name__} has no op {op_type!r}{hint(str(op_type), known)}"
        )

    def __getattr__(self, name: str) -> Callable[..., Recorded]:
        """Ops by the name of their method: those that third parties added to the table."""
        if name.startswith("_"):
            raise AttributeError(name)
        for spec in self._specs():
            if spec.method == name:
                return _method(self, spec.op_type, spec.method, spec.doc)
        raise NoSuchOp(
            f"{type(self).__name__} has no op {name!r}"
            f"{hint(name, [spec.method for spec in self._specs()])}"
        )

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *(spec.method for spec in self._specs())})

    def _specs(self) -> tuple[OpSpec, ...]:
        """Rows of the ops that this slot records."""
        return opset.ops_of(keys.role_domain(self.ROLE))

    def _graph(self, g: object) -> Graph:
        return as_graph(g, f"{self.name}.op(g, …)")

    def _checked(self, name: str, concrete: object) -> ConcreteSpec | None:
        if concrete is None:
            return None
        if not isinstance(concrete, ConcreteSpec):
            what = f"concrete={concrete!r:.60} of slot {name!r} is no ConcreteSpec"
        elif concrete.role != self.ROLE:
            what = f"slot {name!r} is a {self.ROLE} slot; {concrete.type_name} is a {concrete.role}"
        else:
            return concrete
        raise BadArgument(
            f"{what}; make one with bbnode.components.concrete(Class, Config(…)) of a class of "
            "this role"
        )


def shaped(outputs: tuple[Output, ...]) -> Recorded:
    """None, the one output, or all of them."""
    if len(outputs) > 1:
        return outputs
    return outputs[0] if outputs else None


def _method(slot: Slot, op_type: str, name: str, doc: str) -> Callable[..., Recorded]:
    def call(g: Graph, /, *inputs: Output | None, after: After = None, **attributes: Any) -> Any:
        return slot.op(g, op_type, *inputs, after=after, **attributes)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call
