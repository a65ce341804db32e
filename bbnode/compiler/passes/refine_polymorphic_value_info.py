"""`refine_polymorphic_value_info`: tensor types that the bound components determine.

Rule: it needs the bindings, so it runs before the pipeline that contains the type solver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bbnode.compiler.analysis.slots import Storage, by_slot, component_of, slot_roles, stored_at
from bbnode.compiler.errors import (
    BindingMismatch,
    IncompatibleStorageOnEdge,
    RoleMethodFailed,
    TypeConstraintFailed,
    Where,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions, Counters, Pass, SlotBinding
from bbnode.components.contracts import Component
from bbnode.ir import keys, opset, types
from bbnode.ir.graph import Function, OpNode, is_role, is_wire
from bbnode.ir.opset import OpSpec
from bbnode.ir.types import TypeNode


class RefinePolymorphicValueInfo(Pass):
    """Narrows the placeholder "Tensor" to what each bound component stores.

    1. A tensor port of a role's or a protocol's op takes the leaf type that the component's
       `storage` gives for `<op_type>.<port>`, else for `*`; the value at the port narrows to it.
       A port of an op of a protocol may be of any type; what `<op_type>.<port>` says holds there.
       Where `storage` gives several types, `type_solver` chooses.
    2. A value that meets two different leaf types is TypeConstraintFailed; one that was sent
       as one and is taken as the other is IncompatibleStorageOnEdge.
    3. A bound component has the method that each op of its slot calls (RoleMethodFailed), and
       it is bound under the role that the program gives the slot (BindingMismatch).
    4. Slots that are not bound are left as they are: `validate_all_slots_bound` names them.
    """

    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters:
        bound = by_slot(options.bindings)
        narrowed = 0
        for function in unit.bodies():
            _check_roles(function, bound)
            known: dict[str, TypeNode] | None = None
            changed: dict[str, TypeNode] = {}
            for node in function.nodes:
                spec = opset.lookup_op(node.domain, node.op_type) if is_role(node) else None
                component = component_of(node, bound)
                if spec is None or component is None:
                    continue
                _check_method(node, spec, component)
                for value, leaf in _stored(node, spec, component.storage):
                    if known is None:
                        known = function.kinds()
                    before = known.get(value, types.ANY)
                    after = types.meet(before, leaf)
                    if after is None:
                        raise _clash(function, node, value, before, leaf, component)
                    if after is not before:
                        known[value] = changed[value] = after
            if changed:
                function.declare(changed)
                narrowed += len(changed)
        return {"values_refined": narrowed}


def _stored(node: OpNode, spec: OpSpec, storage: Storage) -> Iterator[tuple[str, TypeNode]]:
    """Yield the values at tensor ports with the leaf types that the component stores there."""
    for names, ports in ((node.inputs, spec.inputs), (node.outputs, spec.outputs)):
        for port, value in zip(ports, names, strict=False):
            leaf = stored_at(node, port, storage)
            if value and isinstance(leaf, TypeNode):
                yield value, leaf


def _check_roles(function: Function, bound: Mapping[str, SlotBinding]) -> None:
    for slot, role in slot_roles(function).items():
        binding = bound.get(slot)
        if binding is not None and binding.role != role:
            raise BindingMismatch(
                slot=slot,
                role=binding.role,
                detail=f"function {function.name!r} uses it as a {role} slot",
            )


def _check_method(node: OpNode, spec: OpSpec, component: type[Component]) -> None:
    if not callable(getattr(component, spec.method, None)):
        raise RoleMethodFailed(
            slot=node.metadata.get(keys.SLOT_KEY) or "",
            op_type=spec.op_type,
            source=f"{component.TYPE_NAME!r} has no method {spec.method!r}",
            where=Where.of(node),
        )


def _clash(
    function: Function,
    node: OpNode,
    value: str,
    before: TypeNode,
    leaf: TypeNode,
    component: type[Component],
) -> TypeConstraintFailed | IncompatibleStorageOnEdge:
    for send in function.nodes:
        if is_wire(send) and send.op_type in keys.SEND_OPS and value in send.outputs:
            return IncompatibleStorageOnEdge(
                send_node=send.name,
                recv_node=node.name,
                sent=before.name,
                received=leaf.name,
                where=Where.of(send),
            )
    return TypeConstraintFailed(
        op=node.name,
        detail=f"{value!r} is {before.name}, but {component.TYPE_NAME!r} takes {leaf.name} there",
        where=Where.of(node),
    )
