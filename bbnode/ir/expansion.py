"""Ops that are functions, the model's own and those of ONNX, as the ops that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper, inliner

from bbnode.ir.calls import check_calls
from bbnode.ir.graph import is_onnx_domain
from bbnode.ir.onnx_file import function_of, onnx_schema
from bbnode.ir.versions import means_the_same, onnx_version

_MAX_IMPORTS = 8  # of one domain by one function; more are not looked at


def is_function_op(op_type: str, version: int) -> bool:
    """Return True if ONNX defines an `ai.onnx` op by others, at an opset version."""
    schema = onnx_schema(op_type, version, "")
    if schema is None:
        return False
    # ONNX's stubs lack both.
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def without_op(model: ModelProto, op_type: str) -> ModelProto:
    """Return a model in which the ops that define a function op of `ai.onnx` stand in its place.

    The model is not changed. An op of a dtype or arity that ONNX has no body for stays; and so do
    ops of its name in local functions, which are to be inlined first.

    Raises RuntimeError or ValueError, as ONNX's C++ parts do.
    """
    made = ModelProto()
    made.CopyFrom(model)
    schema = onnx_schema(op_type, onnx_version(model), "")
    if schema is None:
        return made
    defaults = {n: a.default_value for n, a in schema.attributes.items() if a.default_value.type}
    for node in _nodes(made.graph):
        if node.op_type == op_type and is_onnx_domain(node.domain):
            # The inliner leaves references to absent attributes open, defaults or not.
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for name, a in defaults.items() if name not in given)
    # A body may follow from the types of what it reads.
    typed = onnx.shape_inference.infer_shapes(made)
    # The inliner looks for a type among the values alone.
    told = {info.name for info in (*typed.graph.value_info, *typed.graph.input)}
    typed.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in typed.graph.initializer
        if tensor.name not in told
    )
    typed.graph.value_info.add(name="", type=TypeProto())  # of inputs that are left out
    return inliner.inline_selected_functions(typed, [("", op_type)], inline_schema_functions=True)


def without_functions(model: ModelProto) -> ModelProto:
    """Return a model with the calls of its local functions inlined; it is not changed.

    A function of another opset than the model is brought to the model's.

    Raises InliningRefused where that would make too much of it, and RuntimeError or ValueError, as
    ONNX's C++ parts do.
    """
    if not model.functions:
        return model
    check_calls(model)
    made = ModelProto()
    made.CopyFrom(model)
    version = onnx_version(made)
    for function in made.functions:
        # Where that changes nothing, by its number alone: the inliner's converter fails on
        # functions that call others.
        imported = [each for each in function.opset_import if is_onnx_domain(each.domain)]
        nodes = [n for n in function_of(function).all_nodes() if is_onnx_domain(n.domain)]
        same = {
            number: all(means_the_same(node, number, version) for node in nodes)
            for number in {each.version for each in imported[:_MAX_IMPORTS]}
        }
        for entry in imported:
            if same.get(entry.version):
                entry.version = version
    return inliner.inline_local_functions(made, convert_version=True)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    todo: list[Any] = list(graph.node)
    while todo:
        node = todo.pop()
        yield node
        for attribute in node.attribute:
            todo.extend(attribute.g.node)
            for inner in attribute.graphs:
                todo.extend(inner.node)
