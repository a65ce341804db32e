"""Ops of a protocol of one's own.

Rule: an op is registered once, under the name of its protocol, before a `ProtocolSlot` records
it; by whoever ships the component that carries it out, in the module that registers that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bbnode.dsl.core.names import check_name
from bbnode.ir import keys, opset
from bbnode.ir.opset import OpSpec, Port
from bbnode.ir.types import TypeNode


def protocol_op(
    protocol: str,
    op_type: str,
    inputs: Mapping[str, TypeNode],
    outputs: Mapping[str, TypeNode],
    **attributes: Any,
) -> OpSpec:
    """Register an op of a protocol; its component has a method of that name in snake case.

    Args:
        protocol: what `ProtocolSlot(name, protocol)` names.
        op_type: in camel case, for instance "PassOn".
        inputs, outputs: name to type, in order.
        attributes: name to default.

    Raises:
        AuthorError: the op is registered already.
    """
    return opset.register_op(
        OpSpec(
            domain=keys.PROTOCOL_DOMAIN_PREFIX + check_name("protocol", protocol),
            op_type=op_type,
            inputs=tuple(Port(name=name, type=node) for name, node in inputs.items()),
            outputs=tuple(Port(name=name, type=node) for name, node in outputs.items()),
            attributes=attributes,
            role="Protocol",
            suspends=True,
        )
    )
