"""`Slot`: a named place for a component, and the recording of its ops.

Rule: a slot is identified by its name: two slot objects with one name are one slot, wherever they
are created. `Slot.op` records all ops of all roles from the op table; the methods of the role
slots are thin wrappers of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from bbnode.dsl.core.calls import takes_graph, wants_graph
from bbnode.dsl.core.graph import After, Graph, Output, as_graph
from bbnode.dsl.core.names import check_name, hint
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BadArgument, NoSuchOp
from bbnode.ir import keys, opset
from bbnode.ir.opset import OpSpec
from bbnode.ir.slots import ConcreteSpec

# The result of a recorded op: None, one value, or as many as the op has outputs.
Recorded = Any


class Slot:
    """Base of the slot classes.

    The compiler's bind chain fills a generic slot. A concrete one brings a component type and
    its config, `concrete=bbnode.components.concrete(Class, Config(…))`, into the artifact.
    """

    ROLE: ClassVar[str]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, function in list(vars(cls).items()):
            if wants_graph(function):
                setattr(cls, name, takes_graph(function))

    def __init__(self, name: str, *, concrete: ConcreteSpec | None = None) -> None:
        """Create a slot.

        Raises:
            BadName: the name cannot stand in the artifact.
            BadArgument: `concrete` is not a ConcreteSpec, or is of another role.
        """
        self._use = SlotUse(
            name=check_name("slot name", name),
            role=self.ROLE,
            concrete=self._checked(name, concrete),
        )

    @property
    def name(self) -> str:
        """The slot's name."""
        return self._use.name

    @property
    def concrete(self) -> ConcreteSpec | None:
        """The component of a concrete slot, or None for a generic one."""
        return self._use.concrete

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def op(
        self, g: Graph, op_type: str, /, *inputs: Output | None, deadline: float = 0.0,
        after: After = None, **attributes: Any,
    ) -> Recorded:  # fmt: skip
        """Record an op of this slot by its op type, e.g. `"ComputeLoss"`.

        Args:
            g: the Graph.
            op_type: as in the op table.
            inputs: values, in port order; None for an optional one left out.
            deadline: seconds that the op may take, its wait for its component included; 0 for the
                rest of the request, message or call that started its execution, else for the
                limit `wait_s` of the node.
            after: values that must be there before the op fires.
            attributes: by name; omitted ones take their defaults.

        Returns:
            None, one Output, or a tuple of them: as many as the op has outputs.

        Raises:
            NoSuchOp: the slot's role has no such op.
            BadArgument: inputs or attributes do not fit the op, or `deadline` is out of range.
        """
        graph = self._graph(g)
        spec = next((spec for spec in self._specs() if spec.op_type == op_type), None)
        if spec is None:
            known = [spec.op_type for spec in self._specs()]
            raise NoSuchOp(f"{self._owner} has no op {str(op_type)!r}{hint(str(op_type), known)}")
        if (
            deadline and "deadline" in spec.attributes
        ):  # a protocol's op with an attribute of that name
            attributes["deadline"], deadline = deadline, 0.0
        outputs = graph.record(
            spec, inputs, attributes, slot=self._use, after=after, deadline=deadline
        )
        return shaped(outputs)

    def __getattr__(self, name: str) -> Callable[..., Recorded]:
        """Return the method of an op, third-party ops of the table included."""
        if name.startswith("_"):
            raise AttributeError(name)
        known = self._methods()
        if name not in known:
            raise NoSuchOp(f"{self._owner} has no op {name!r}{hint(name, known)}")
        op_type, doc = known[name]

        def call(
            g: Graph | None = None, /, *inputs: Output | None, after: After = None,
            **attributes: Any,
        ) -> Recorded:  # fmt: skip
            graph = as_graph(g, f"{self.name}.{name}(g, …)")
            return self.op(graph, op_type, *inputs, after=after, **attributes)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = doc
        return call

    def __dir__(self) -> Iterable[str]:
        return sorted({*object.__dir__(self), *self._methods()})

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _methods(self) -> Mapping[str, tuple[str, str]]:
        """Return op type and docstring of each op of this slot, by method name."""
        return {spec.method: (spec.op_type, spec.doc) for spec in self._specs()}

    def _specs(self) -> tuple[OpSpec, ...]:
        """Return the rows of the ops that this slot records."""
        return opset.ops_of(keys.role_domain(self.ROLE))

    def _graph(self, g: object) -> Graph:
        return as_graph(g, f"{self.name}.op(g, …)")

    def _checked(self, name: str, concrete: object) -> ConcreteSpec | None:
        if concrete is None:
            return None
        if not isinstance(concrete, ConcreteSpec):
            what = f"concrete={concrete!r:.60} of slot {name!r} is not a ConcreteSpec"
        elif concrete.role != self.ROLE:
            what = f"slot {name!r} is a {self.ROLE} slot; {concrete.type_name} is a {concrete.role}"
        else:
            return concrete
        raise BadArgument(
            f"{what}; make one with bbnode.components.concrete(Class, Config(…)) of a class of "
            "this role"
        )


def shaped(outputs: tuple[Output, ...]) -> Recorded:
    """Return None without outputs, a single output, or the tuple of several."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None
