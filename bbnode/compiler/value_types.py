"""Types of a few values of a function, read and written in one walk each.

Rule: passes that add values declare them here, so that every value of a compiled function has
a type; a copy keeps the shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx
from onnx import FunctionProto

from bbnode.ir import types
from bbnode.ir.types import TypeNode


def types_of(function: FunctionProto, names: Collection[str]) -> dict[str, onnx.TypeProto]:
    """The declared types of `names`; what is not declared is left out."""
    wanted = names if isinstance(names, set | frozenset | dict) else set(names)
    return {info.name: info.type for info in function.value_info if info.name in wanted}


def declare_as(function: FunctionProto, pairs: Iterable[tuple[str, str]]) -> None:
    """Declare each new value with the type of another one: `(new, like)`, new ones in order.

    `like` may be a new value as well. One whose type nobody knows is declared as Any.
    """
    pairs = list(pairs)
    known = types_of(function, {name for pair in pairs for name in pair})
    for new, like in pairs:
        if new not in known:
            info = function.value_info.add(name=new)
            info.type.CopyFrom(known.get(like) or types.type_to_proto(types.ANY))
            known[new] = info.type


def declare(function: FunctionProto, new: Mapping[str, TypeNode]) -> None:
    """Declare values with a type of the lattice, unless they are declared already."""
    known = types_of(function, new)
    for name, node in new.items():
        if name not in known:
            function.value_info.add(name=name).type.CopyFrom(types.type_to_proto(node))
