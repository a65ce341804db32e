"""Is the slot metadata of an op well-formed?

Rule: an op of a slot says which one (`slot`, `slot_id`), and either what it requires
(`required_trait`) or what stands there (`concrete_type`, `instance`), never both.
"""

from __future__ import annotations

from bbnode.compiler.analysis.order import is_graph_op
from bbnode.compiler.analysis.slots import TRAIT_SUFFIX
from bbnode.compiler.driver.seams import is_natural
from bbnode.compiler.errors import MalformedSlotMetadata, Where
from bbnode.ir import keys, opset
from bbnode.ir.plain import Node

_ROLE_OF_DOMAIN = {keys.role_domain(role): role for role in opset.ROLES}


def check_slot(node: Node) -> None:
    """Raise MalformedSlotMetadata when an op does not say, or contradicts, its slot."""
    role = role_of(node)
    if role is None and not is_graph_op(node):
        return
    meta = node.metadata
    if role is None and keys.SLOT_KEY not in meta:
        return  # a plain ONNX op: any backend may run it
    fault = _fault(meta, role or "Backend")
    if fault is not None:
        raise MalformedSlotMetadata(node_name=node.name, detail=fault, where=Where.of(node))


def role_of(node: Node) -> str | None:
    """The role whose contract an op calls, or None."""
    if node.domain.startswith(keys.PROTOCOL_DOMAIN_PREFIX):
        return "Protocol"
    return _ROLE_OF_DOMAIN.get(node.domain)


def _fault(meta: dict[str, str], role: str) -> str | None:
    if not meta.get(keys.SLOT_KEY):
        return "it names no slot"
    trait = meta.get(keys.REQUIRED_TRAIT_KEY)
    concrete = meta.get(keys.CONCRETE_TYPE_KEY)
    if trait is None and concrete is None:
        return "it carries neither required_trait nor concrete_type"
    if trait is not None and concrete is not None:
        return "it carries required_trait and concrete_type, which exclude each other"
    if not is_natural(meta.get(keys.SLOT_ID_KEY, "")):
        return f"slot_id is {meta.get(keys.SLOT_ID_KEY, 'missing')!r}, not a natural number"
    if trait is not None and trait != role + TRAIT_SUFFIX:
        return f"required_trait is {trait!r}, but the op calls {role + TRAIT_SUFFIX!r}"
    if concrete is not None and not is_natural(meta.get(keys.INSTANCE_KEY, "")):
        return f"instance is {meta.get(keys.INSTANCE_KEY, 'missing')!r}, not a natural number"
    return None
