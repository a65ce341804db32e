"""Schemas of custom ops, read from annotations, and what a declared function makes of them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import AttributeProto

from bbnode.dsl import Graph, Module
from bbnode.ir import types, values
from bbnode.ir.errors import AuthorError
from bbnode.ir.opset import REQUIRED, lookup_op
from bbnode.ir.values import Metadata, PeerIdVec
from bbnode.ops import CustomOp, CustomOpFailed, SchemaMismatch, custom_op
from bbnode.ops.schema import schema_of

T = TypeVar("T", bound=np.generic)
Pair = np.ndarray[tuple[Literal[2], int], np.dtype[np.float32]]


class Split(NamedTuple):
    head: NDArray[np.float32]
    rest: NDArray[np.float32]


def everything(
    x: NDArray[np.float32],
    same: NDArray[T],
    some: NDArray[Any],
    notes: Metadata,
    pair: Pair,
    left_out: NDArray[np.int64] | None = None,
    *,
    count: int,
    rate: float = 0.1,
    name: str = "a",
    axes: tuple[int, ...] = (),
    exact: bool = False,
) -> tuple[NDArray[T], PeerIdVec]:
    raise NotImplementedError


def test_annotations_say_the_schema() -> None:
    schema = schema_of(everything)
    assert [(each.port.name, each.port.type, each.port.optional) for each in schema.inputs] == [
        ("x", types.TENSOR_FLOAT, False),
        ("same", "T", False),
        ("some", types.TENSOR, False),
        ("notes", types.METADATA, False),
        ("pair", types.TENSOR_FLOAT, False),
        ("left_out", types.TENSOR_INT64, True),
    ]
    assert [each.shape for each in schema.inputs] == [None, None, None, None, (2, None), None]
    assert [(each.port.name, each.port.type) for each in schema.outputs] == [
        ("out_0", "T"),
        ("out_1", types.PEER_ID_VEC),
    ]
    assert not schema.is_single
    kinds = {name: each.kind for name, each in schema.attributes.items()}
    assert kinds == {
        "count": AttributeProto.INT,
        "rate": AttributeProto.FLOAT,
        "name": AttributeProto.STRING,
        "axes": AttributeProto.INTS,
        "exact": AttributeProto.INT,
    }
    assert schema.attributes["count"].default is REQUIRED
    assert schema.attributes["rate"].default == float(np.float32(0.1))


def test_the_fields_of_a_named_tuple_name_the_outputs() -> None:
    def split(x: NDArray[np.float32]) -> Split:
        raise NotImplementedError

    assert [each.port.name for each in schema_of(split).outputs] == ["head", "rest"]


def test_every_dtype_of_a_value_can_be_declared() -> None:
    for node in types.TENSOR_BY_ELEM.values():
        element = values.dtype_of(node).type

        def op(x: Any) -> Any:
            raise NotImplementedError

        op.__annotations__ = {"x": NDArray[element], "return": NDArray[element]}
        assert schema_of(op).inputs[0].port.type is node
    assert ml_dtypes.bfloat16 in {values.dtype_of(n).type for n in types.TENSOR_BY_ELEM.values()}


def no_annotation(x) -> NDArray[np.float32]:  # type: ignore[no-untyped-def]
    raise NotImplementedError


def no_return(x: NDArray[np.float32]):  # type: ignore[no-untyped-def]
    raise NotImplementedError


def returns_none(x: NDArray[np.float32]) -> None:
    raise NotImplementedError


def unknown_name(x: Nowhere) -> NDArray[np.float32]:  # type: ignore[name-defined]  # noqa: F821
    raise NotImplementedError


def any_number(x: NDArray[np.floating]) -> NDArray[np.float32]:  # type: ignore[type-arg]
    raise NotImplementedError


def complex_number(x: NDArray[np.complex64]) -> NDArray[np.float32]:
    raise NotImplementedError


def plain_float(x: float) -> NDArray[np.float32]:
    raise NotImplementedError


def open_output(x: NDArray[Any]) -> NDArray[Any]:
    raise NotImplementedError


def other_variable(x: NDArray[np.float32]) -> NDArray[T]:
    raise NotImplementedError


def optional_by_default(x: NDArray[np.float32] = None) -> NDArray[np.float32]:  # type: ignore[assignment]
    raise NotImplementedError


def default_array(x: NDArray[np.float32] | None = 1) -> NDArray[np.float32]:  # type: ignore[assignment]
    raise NotImplementedError


def more_attributes(x: NDArray[np.float32], **more: int) -> NDArray[np.float32]:
    raise NotImplementedError


def attribute_array(x: NDArray[np.float32], *, w: NDArray[np.float32]) -> NDArray[np.float32]:
    raise NotImplementedError


def wrong_default(x: NDArray[np.float32], *, k: int = "a") -> NDArray[np.float32]:  # type: ignore[assignment]
    raise NotImplementedError


def reserved(x: NDArray[np.float32], *, after: int = 1) -> NDArray[np.float32]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (no_annotation, "parameter 'x' has no annotation"),
        (no_return, "return value has to be annotated"),
        (returns_none, "return value has to be annotated"),
        (unknown_name, "annotations can't be read"),
        (any_number, "no tensor travels"),
        (complex_number, "no tensor travels"),
        (plain_float, "neither a tensor nor a value"),
        (open_output, "needs a dtype"),
        (other_variable, "type variable of an input"),
        (optional_by_default, r"annotate it as `… \| None`"),
        (default_array, "has the default None"),
        (more_attributes, "name each attribute"),
        (attribute_array, "is an attribute: int"),
        (wrong_default, "which has to be int"),
        (reserved, "none of them 'after'"),
    ],
)
def test_annotations_that_say_no_schema_are_named(function: Any, told: str) -> None:
    with pytest.raises(AuthorError, match=told):
        schema_of(function)


# --- declared functions ----------------------------------------------------------------


@custom_op("org.bbnode_tests.schema", version=2)
def scale(
    x: NDArray[np.float32], *more: NDArray[np.float32], factor: float = 2.0
) -> NDArray[np.float32]:
    """Scale what it gets.

    All of it.
    """
    return np.asarray(sum(more, x) * np.float32(factor))


@custom_op("org.bbnode_tests.schema", version=2)
def first_of(a: NDArray[T], b: NDArray[T], returned: Metadata) -> NDArray[T]:
    """Return whatever it is told."""
    made: Any = {"int": 1, "list": [a], "double": a.astype(np.float64), "pair": (a, a)}
    return made.get(returned["what"], a)  # type: ignore[no-any-return]


def test_the_op_table_knows_it() -> None:
    spec = lookup_op("org.bbnode_tests.schema", "Scale")
    assert spec is scale.spec
    assert (spec.version, spec.doc, spec.suspends) == (2, "Scale what it gets.", False)
    assert spec.package == "tests"
    assert spec.inputs[1].variadic
    assert scale.__name__ == "scale"
    assert "All of it" in (scale.__doc__ or "")
    assert lookup_op("org.bbnode_tests.schema", "Nothing") is None


def test_called_with_arrays_it_is_the_function() -> None:
    one = np.ones(3, np.float32)
    assert scale(one).tolist() == [2, 2, 2]
    assert scale(one, one, one, factor=3).tolist() == [9, 9, 9]
    assert not scale(one).flags.writeable
    assert one.flags.writeable


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: scale(x.astype(np.float64)), "input 'x' is Tensor.DOUBLE, not Tensor.FLOAT"),
        (lambda x: scale(x, x, [1.0]), "input 'more'"),
        (lambda _: scale(), "input 'x' is missing"),
        (lambda x: first_of(x, x.astype(np.int64), Metadata(what="")), "input 'b'"),
        (lambda x: first_of(x, b"text", Metadata(what="")), "is Bytes, not"),
        (lambda x: first_of(x, x, Metadata(what=""), x), "given 4 inputs"),
        (lambda x: first_of(x, x, Metadata(what="int")), "output 'out'"),
        (lambda x: first_of(x, x, Metadata(what="list")), "output 'out'"),
        (lambda x: first_of(x, x, Metadata(what="double")), "output 'out' is Tensor.DOUBLE"),
        (lambda x: first_of(x, x, Metadata(what="pair")), "output 'out'"),
    ],
)
def test_what_does_not_fit_is_told(call: Any, told: str) -> None:
    with pytest.raises(SchemaMismatch, match=told):
        call(np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"factor": "a"}, "which has to be float"),
        ({"factor": 1e60}, None),
        ({"size": 1}, "no attribute 'size'; it has: factor"),
    ],
)
def test_attributes_are_checked(attributes: dict[str, Any], told: str | None) -> None:
    if told is None:
        assert np.isinf(scale(np.ones(1, np.float32), **attributes)).all()
        return
    with pytest.raises(AuthorError, match=told):
        scale(np.ones(1, np.float32), **attributes)


def test_what_a_function_raises_is_named() -> None:
    @custom_op("org.bbnode_tests.raising")
    def breaks(x: NDArray[np.float32]) -> NDArray[np.float32]:
        x[0] = 1
        return x

    with pytest.raises(CustomOpFailed, match=r"Breaks of the package tests: ValueError.*read-only"):
        breaks(np.ones(1, np.float32))


def test_the_decorator_without_its_domain_is_told() -> None:
    with pytest.raises(AuthorError, match=r'needs the domain: @custom_op\("org\.example"'):
        custom_op(lambda_for_domains)  # type: ignore[arg-type]


def test_recorded_values_without_the_graph_are_told() -> None:
    class Forgetful(Module):
        def body(self, g: Graph) -> None:
            scale(g.input("x", types.TENSOR_FLOAT))

    with pytest.raises(SchemaMismatch, match="in a program, the Graph is the first argument"):
        Forgetful().build()


@pytest.mark.parametrize(
    "domain", ["", "ai.onnx", "ai.bytesandbrains.role", "Org.x", "word", "a..b"]
)
def test_a_domain_is_the_packages_own(domain: str) -> None:
    with pytest.raises(AuthorError, match="is not a domain for custom ops"):
        custom_op(domain)(lambda_for_domains)


def lambda_for_domains(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x


def test_a_domain_has_one_version_and_each_op_once() -> None:
    declared = custom_op("org.bbnode_tests.versions", version=3)(lambda_for_domains)
    assert isinstance(declared, CustomOp)
    with pytest.raises(AuthorError, match=r"version 4 of .* is of version 3"):
        custom_op("org.bbnode_tests.versions", version=4, op_type="Other")(lambda_for_domains)
    with pytest.raises(AuthorError, match="registered already"):
        custom_op("org.bbnode_tests.versions", version=3)(lambda_for_domains)
    with pytest.raises(AuthorError, match="not a version"):
        custom_op("org.bbnode_tests.versions_0", version=0)(lambda_for_domains)


# --- any schema ------------------------------------------------------------------------

ELEMENTS = st.sampled_from(
    [values.dtype_of(n) for n in types.TENSOR_BY_ELEM.values() if n is not types.TENSOR_STRING]
)


@given(ELEMENTS, st.integers(0, 3), st.data())
def test_a_value_is_taken_just_when_dtype_and_shape_are_declared(
    declared: np.dtype[Any], rank: int, data: st.DataObject
) -> None:
    lengths = data.draw(
        st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=rank, max_size=rank)
    )
    axes = tuple(int if length is None else Literal[length] for length in lengths)

    def op(x: Any) -> Any:
        raise NotImplementedError

    hint = np.ndarray[tuple[axes] if axes else tuple[()], np.dtype[declared.type]]  # type: ignore[misc,valid-type]
    op.__annotations__ = {"x": hint, "return": hint}
    port = schema_of(op).inputs[0]
    given_dtype = data.draw(ELEMENTS)
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    fits = (
        given_dtype == declared
        and len(shape) == rank
        and all(wanted in (None, length) for wanted, length in zip(lengths, shape, strict=True))
    )
    assert (port.misfit(np.zeros(shape, given_dtype), {}) == "") is fits


VALUES = st.one_of(
    st.integers(), st.floats(), st.text(), st.booleans(), st.binary(), st.none(),
    st.lists(st.integers(), max_size=3), st.lists(st.text(), max_size=3),
)  # fmt: skip


@given(VALUES, VALUES, VALUES)
def test_attributes_are_read_or_refused_and_reading_again_changes_nothing(
    count: Any, rate: Any, axes: Any
) -> None:
    schema = schema_of(everything)
    try:
        found = schema.read_attributes({"count": count, "rate": rate, "axes": axes})
    except AuthorError:
        return
    assert type(found["count"]) is int
    assert type(found["rate"]) is float
    assert type(found["axes"]) is tuple
    again = schema.read_attributes(found)
    assert np.array_equal(
        [again["rate"], again["count"]], [found["rate"], found["count"]], equal_nan=True
    )
