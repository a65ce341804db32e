"""`custom_op`: a function as an op of a program.

Rule: the function is stateless: what it returns depends on its arguments alone, so that any node
may run it, at any time and in any thread. What goes in and comes out is checked against the
schema; tensors are read-only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bbnode.ir import keys, opset
from bbnode.ir.errors import AuthorError
from bbnode.ir.graph import Program
from bbnode.ir.interrupts import let_stop
from bbnode.ir.opset import OpSpec
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Value
from bbnode.ops.schema import Schema, schema_of

_DOMAIN = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+\Z")
_OP_TYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_MAX_VERSION = (1 << 31) - 1
_MAX_TEXT = 400  # of what a function raised


class CustomOpFailed(AuthorError):
    """The function of a custom op raised an error."""


class SchemaMismatch(CustomOpFailed):
    """An input or output of a custom op does not fit its schema."""


@runtime_checkable
class OpRecorder(Protocol):
    """The part of a Graph that a custom op needs."""

    def record(
        self,
        spec: OpSpec,
        inputs: Sequence[Any] = (),
        attributes: Mapping[str, Any] | None = None,
        *,
        after: Any = None,
        deadline: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[Any, ...]:
        """Record one op and return its outputs."""


_OPS: dict[tuple[str, str], CustomOp] = {}
_VERSIONS: dict[str, tuple[int, str]] = {}  # by domain: version, and the op that declared it


class CustomOp:
    """A function as an op; `custom_op` makes it.

    Attributes:
        spec: the row of the op table.
        offload: a worker thread runs it.
    """

    def __init__(
        self, function: Callable[..., Any], spec: OpSpec, schema: Schema, *, offload: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.spec = spec
        self.schema = schema
        self.offload = offload

    def __call__(
        self, *inputs: Any, after: Any = None, deadline: float = 0.0, **attributes: Any
    ) -> Any:
        """Record the op in the Graph that is the first argument, or run it on values.

        Args:
            inputs: the Graph and Outputs of it; or values alone.
            after: values of the Graph that have to exist before the op fires.
            deadline: seconds that it may take, of an op in a worker thread; 0 for none of its own.
            attributes: by name; those left out have their defaults.
        """
        if deadline and "deadline" in self.spec.attributes:  # the function's own argument
            attributes["deadline"], deadline = deadline, 0.0
        if not inputs or not isinstance(inputs[0], OpRecorder):
            made = self.bound(attributes)(inputs)
            return made[0] if self.schema.is_single else made
        recorded = inputs[0].record(
            self.spec,
            inputs[1:],
            attributes,
            after=after,
            deadline=deadline,
            metadata={keys.PACKAGE_KEY: self.spec.package},
        )
        return recorded[0] if self.schema.is_single else recorded

    def bound(
        self, attributes: Mapping[str, Any], name: str = ""
    ) -> Callable[[Sequence[Value | None]], tuple[Value, ...]]:
        """Return a function from inputs to outputs; `name` begins the text of its errors.

        Raises AuthorError for attributes that do not fit. The function raises CustomOpFailed.
        """
        known = f"{self.spec.domain}::{self.spec.op_type} of the package {self.spec.package}"
        what = f"{name} ({known})" if name else known
        try:
            settings = self.schema.read_attributes(attributes)
        except AuthorError as error:
            raise AuthorError(f"{what} {error}") from error
        function = self.function

        def run(inputs: Sequence[Value | None]) -> tuple[Value, ...]:
            variables: dict[str, TypeNode] = {}
            given = self._checked_inputs(what, inputs, variables)
            try:
                result = function(*given, **settings)
            except BaseException as error:
                let_stop(error)
                try:
                    text = f"{type(error).__name__}: {error}"
                except BaseException as odd:  # noqa: BLE001 - `__str__` is the author's code as well
                    let_stop(odd)
                    text = type(error).__name__
                raise CustomOpFailed(f"{what}: {text:.{_MAX_TEXT}}") from error
            return self._checked_outputs(what, result, variables)

        return run

    def _checked_inputs(
        self, what: str, inputs: Sequence[Value | None], variables: dict[str, TypeNode]
    ) -> list[Value | None]:
        given: list[Value | None] = []
        for index, value in enumerate(inputs):
            port = self.schema.input_at(index)
            if port is None:
                raise SchemaMismatch(f"{what} was given {len(inputs)} inputs")
            if value is None and port.port.optional:
                given.append(None)
                continue
            if isinstance(getattr(value, "graph", None), OpRecorder):  # a value of a program
                raise SchemaMismatch(f"{what}: in a program, the Graph is the first argument")
            misfit = port.misfit(value, variables)
            if misfit:
                raise SchemaMismatch(f"{what}: input {port.port.name!r} {misfit}")
            given.append(_read_only(value))
        for port in self.schema.inputs[len(inputs) :]:
            if not port.port.optional and not port.port.variadic:
                raise SchemaMismatch(f"{what}: input {port.port.name!r} is missing")
        return given

    def _checked_outputs(
        self, what: str, result: Any, variables: dict[str, TypeNode]
    ) -> tuple[Value, ...]:
        ports = self.schema.outputs
        if self.schema.is_single:
            result = (result,)
        if not isinstance(result, tuple) or len(result) != len(ports):
            count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise SchemaMismatch(f"{what}: it returned {count}, not a tuple of {len(ports)}")
        for port, value in zip(ports, result, strict=True):
            misfit = port.misfit(value, variables)
            if misfit:
                raise SchemaMismatch(f"{what}: output {port.port.name!r} {misfit}")
        return tuple([_read_only(value) for value in result])

    def __repr__(self) -> str:
        return f"<custom op {self.spec.domain}::{self.spec.op_type}>"


def _read_only(value: Value) -> Value:
    """Return a tensor that nobody can change through it; other values never change."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def custom_op(
    domain: str, *, version: int = 1, offload: bool = False, op_type: str = ""
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Declare a function as an op of the opset `domain` (decorator).

    Args:
        domain: of the package's ops, such as "org.example".
        version: of the opset: one for all ops of a domain. Raise it whenever an op of it changes;
            a node runs programs of the very version that it has installed.
        offload: run it in a worker thread: what takes longer than about a millisecond.
        op_type: the op's name in the program; the function's in camel case if left out.

    Raises:
        AuthorError: the annotations give no schema (`bbnode.ops.schema`), the domain is reserved,
            or an op of the name is declared already.
    """

    if not isinstance(domain, str):
        raise AuthorError('@custom_op needs the domain: @custom_op("org.example", version=1)')

    def declare(function: Callable[..., Any]) -> CustomOp:
        schema = schema_of(function)
        spec = OpSpec(
            domain=domain,
            op_type=op_type or "".join(w[:1].upper() + w[1:] for w in function.__name__.split("_")),
            inputs=tuple(each.port for each in schema.inputs),
            outputs=tuple(each.port for each in schema.outputs),
            attributes={name: each.default for name, each in schema.attributes.items()},
            kinds={name: each.kind for name, each in schema.attributes.items()},
            suspends=offload,
            doc=(function.__doc__ or "").strip().partition("\n")[0],
            version=version,
            package=function.__module__.partition(".")[0],
        )
        _check_name(spec)
        said, by = _VERSIONS.setdefault(domain, (version, spec.op_type))
        if said != version:
            raise AuthorError(
                f"custom op {spec.op_type} is of version {version} of {domain}, and {by} is of "
                f"version {said}; declare all ops of a domain with one version"
            )
        opset.register_op(spec)
        made = _OPS[domain, spec.op_type] = CustomOp(function, spec, schema, offload=offload)
        return made

    return declare


def _check_name(spec: OpSpec) -> None:
    if not _DOMAIN.match(spec.domain) or not opset.is_custom(spec.domain):
        raise AuthorError(
            f"{spec.domain!r:.80} is not a domain for custom ops; use a name of your own with a "
            "dot in it, such as 'org.example'"
        )
    if not _OP_TYPE.match(spec.op_type):
        raise AuthorError(f"{spec.op_type!r:.80} can't name an op; give op_type='…'")
    if type(spec.version) is not int or not 1 <= spec.version <= _MAX_VERSION:
        raise AuthorError(f"{spec.version!r:.80} is not a version; give an integer of 1 or more")


def find_custom_op(domain: str, op_type: str) -> CustomOp | None:
    """Return a declared op, or None; imports the package that brings the domain."""
    return _OPS.get((domain, op_type)) if opset.lookup_op(domain, op_type) else None


def custom_ops_of(program: Program) -> list[dict[str, Any]]:
    """Return the custom ops of a program as plain data, each with the package that adds it."""
    versions = dict(program.opset_imports)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for node in chain.from_iterable(function.nodes for function in program.functions):
        if opset.is_custom(node.domain):
            row = {
                "domain": node.domain,
                "op": node.op_type,
                "version": versions.get(node.domain, 0),
                "package": node.metadata.get(keys.PACKAGE_KEY, ""),
                "nodes": 0,
            }
            found.setdefault((node.domain, node.op_type), row)["nodes"] += 1
    return [found[key] for key in sorted(found)]


def installed_version(domain: str) -> int | None:
    """Return the version of a domain that is declared in this process, or None."""
    return _VERSIONS[domain][0] if domain in _VERSIONS else None
