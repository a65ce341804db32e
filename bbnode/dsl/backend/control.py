"""`if_` and `loop` of `BackendSlot`: control flow inside of a backend.

Rule: a branch is a Python callable that records once, when the op is recorded; at run time
the backend runs it as part of the op, as often as the values require. So a branch is a pure
ONNX graph with ops of that backend's slot alone. It may read the values of the enclosing Graphs.
Its own values are named `body.<depth>/<node>.<port>`, unlike any value outside of a branch, so
that a graph never shadows an outer name; its nodes carry none of our metadata.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from bbnode.dsl.backend.catalogue import BackendCore
from bbnode.dsl.core.attributes import WrongKind, constant_attribute
from bbnode.dsl.core.graph import After, Graph, Output
from bbnode.dsl.core.recorder import SlotUse
from bbnode.dsl.errors import BadArgument, BranchMismatch, BranchMisuse
from bbnode.ir import keys, types
from bbnode.ir.graph import Subgraph, ValueType
from bbnode.ir.types import TypeKind, TypeNode

Values = Sequence[Output]

# Protobuf parsers accept 100 nested messages, and each nested graph takes three.
MAX_BRANCH_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """The result of a `loop`'s body, if it returns more than the carried values.

    Attributes:
        carried: the carried values for the next iteration, in their order.
        scans: values of this iteration to be stacked over all of them.
        keep_going: bool tensor [] or [1]; true for a next iteration. None: always.
    """

    carried: Values = ()
    scans: Values = ()
    keep_going: Output | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """The result of a `loop`.

    Attributes:
        carried: the carried values after the last iteration, in their order.
        scans: for each scan of the body its values of all iterations, [iterations, …].
    """

    carried: tuple[Output, ...]
    scans: tuple[Output, ...]


class Branch(Graph):
    """The Graph that the callables of `if_` and `loop` record into, for one backend slot."""

    def __init__(self, parent: Graph, slot: SlotUse, title: str) -> None:
        super().__init__(parent.recorder, name=parent.name, home=parent.home)
        self._title = title
        self._slot = slot
        self._outside: tuple[Graph, ...] = (parent,)
        if isinstance(parent, Branch):
            self._outside = (*parent._outside, parent)
        if len(self._outside) > MAX_BRANCH_DEPTH:
            raise parent.error(
                BranchMisuse, f"branches nest deeper than {MAX_BRANCH_DEPTH}; make the inner ones "
                "an op of their own, or a Loop",
            )  # fmt: skip
        self._scopes.append(f"body.{len(self._outside)}")

    @property
    def title(self) -> str:
        """A description such as `the then branch of If`, for messages."""
        return self._title

    @property
    def way_out(self) -> str:
        """A hint how to use a value outside of the branch, for messages."""
        return "return it from the branch, and take it from the result of if_ or loop"

    def _admit(self, domain: str, op_type: str, slot: SlotUse | None, after: After) -> None:
        if domain or slot is None or slot.name != self._slot.name:
            whose = "" if slot is None else f" of slot {slot.name!r}"
            raise BranchMisuse(
                f"{op_type}{whose} can't stand in {self._title}, which runs whole in the backend "
                f"{self._slot.name!r}: only ops of that slot can; {self._instead(op_type)}"
            )
        if self._listed(after):
            raise BranchMisuse(
                f"{op_type} in {self._title} has after=…, but a branch runs as one; give "
                "the after to the if_ or loop"
            )
        self.recorder.slots.check(slot)

    def _instead(self, op_type: str) -> str:
        """Return the remedy for an op that the backend does not have."""
        if not self._title.endswith("If"):
            return "record it before the loop, or behind it with the loop's results"
        when = "g.when(condition)" if "then" in self._title else "g.unless(condition)"
        outside = f"record {op_type} outside, with after={when}, and it happens only then"
        return f"{outside}; syscalls.choose(g, condition, a, b) is one of two values"

    def _metadata(self, *_: object) -> dict[str, str]:
        return {}  # the op that owns the branch carries slot and source line

    def _source_line(self) -> str:
        return ""

    def _holds(self, graph: Graph) -> bool:
        return graph is self or graph in self._outside

    def formal(self, name: str, kind: TypeNode, *, scalar: bool = False) -> Output:
        """Return a value that the op passes to its body; `scalar`: its shape is []."""
        value = self.declare(f"{self._scopes[0]}/{name}", kind)
        if scalar:
            self._function.types[value.name] = ValueType.of(kind, ())
        return value

    def input(self, name: str, *_: object, **__: object) -> Output:
        """Raise BranchMisuse, since a branch uses the values around it directly."""
        raise BranchMisuse(
            f"{self._title} has no inputs of its own; use the values around it, or make {name!r} "
            "an input outside"
        )

    def output(self, name: str, *_: object, **__: object) -> None:
        """Raise BranchMisuse, since a branch returns its values."""
        raise BranchMisuse(f"{self._title} returns its values; return the one for {name!r}")

    def _constant(self, value: Any, after: After, **_: str) -> Output:
        try:
            attribute, kind = constant_attribute(value)
        except WrongKind as error:
            raise BadArgument(f"{value!r:.60} can't be a constant: {error}") from error
        if kind.kind is not TypeKind.TENSOR:
            raise BadArgument(
                f"{value!r:.60} is not a tensor; {self._title} computes with tensors only"
            )
        (output,) = self.emit(
            "", "Constant", outputs=(("output", kind),), attributes={"value": attribute},
            slot=self._slot, after=after, opset_version=keys.ONNX_OPSET_VERSION,
        )  # fmt: skip
        return output

    def close(self, formals: Sequence[Output], results: Sequence[Output]) -> Subgraph:
        """End the branch and return it as a graph with these inputs and outputs."""
        results_by_name: dict[str, Output] = {}
        own = {name for node in self._function.nodes for name in node.outputs}
        for value in results:
            # ONNX requires each output to be made in its own graph, and listed once.
            is_own = value.name in own and value.name not in results_by_name
            result = value if is_own else self._copy(value)
            results_by_name[result.name] = result
        self._closed = True
        graph = Subgraph(
            name=self._scopes[0],
            inputs=[value.name for value in formals],
            outputs=list(results_by_name),
            types={
                value.name: self._function.types[value.name]
                for value in (*formals, *results_by_name.values())
                if value.type.kind is TypeKind.TENSOR  # the runtime infers the others
            },
        )
        graph.nodes = self._function.nodes
        return graph

    def _copy(self, value: Output) -> Output:
        (copy,) = self.emit(
            "", "Identity", inputs=(value,), outputs=(("output", value.type),), slot=self._slot,
            opset_version=keys.ONNX_OPSET_VERSION,
        )  # fmt: skip
        return copy


class ControlOps(BackendCore):
    """Branches and loops that run inside of the backend."""

    @overload
    def if_(
        self, g: Graph, condition: Output, then_branch: Callable[[Graph], Output],
        else_branch: Callable[[Graph], Output], *, after: After = None,
    ) -> Output: ...  # fmt: skip

    @overload
    def if_(
        self, g: Graph, condition: Output, then_branch: Callable[[Graph], Values],
        else_branch: Callable[[Graph], Values], *, after: After = None,
    ) -> tuple[Output, ...]: ...  # fmt: skip

    def if_(
        self, g: Graph, condition: Output, then_branch: Callable[[Graph], Any],
        else_branch: Callable[[Graph], Any], *, after: After = None,
    ) -> Any:  # fmt: skip
        """One of two branches, as `condition` says; the other is not computed. ONNX `If`-25.

        ```python
        size = compute.if_(
            g,
            compute.greater(g, total, limit),
            lambda b: compute.div(b, x, total),
            lambda b: x,
        )
        ```

        Args:
            g: the Graph.
            condition: bool tensor, [] or [1].
            then_branch, else_branch: called with the branch's own Graph; they record ops of
                this slot into it, use values of the Graphs around as they are, and return a
                value, or a list of them. Shapes of the two may differ; number and dtypes may
                not.
            after: values that must be there before the op fires.

        Returns:
            One Output where the branches return one, a tuple where they return a list.

        Raises:
            BranchMismatch: the branches return different numbers or types of values.
            BranchMisuse: a branch records something else than ops of this slot.
            BadArgument: a branch is not callable, or returns no values.
        """
        graph = self._graph(g)
        graph.value_name(condition)
        recorded = [
            self._branch(graph, f"the {which} branch of If", branch)
            for which, branch in (("then", then_branch), ("else", else_branch))
        ]
        (then_values, then_graph), (else_values, else_graph) = recorded
        if isinstance(then_values, Output) != isinstance(else_values, Output) or len(
            _listed(then_values)
        ) != len(_listed(else_values)):
            raise BranchMismatch(
                f"the then branch of If returns {_count(then_values)} and the else branch "
                f"{_count(else_values)}; both have to return the same"
            )
        pairs = zip(_listed(then_values), _listed(else_values), strict=True)
        kinds = [
            _joined("If", f"value {index} of the then branch", yes, "the else branch's", no)
            for index, (yes, no) in enumerate(pairs)
        ]
        graphs = {"then_branch": then_graph, "else_branch": else_graph}
        outputs = self._record(graph, "If", (condition,), graphs, after, len(kinds), kinds)
        return outputs[0] if isinstance(then_values, Output) else outputs

    def _branch(
        self, g: Graph, title: str, record: Callable[[Graph], Any]
    ) -> tuple[Output | Values, Subgraph]:
        _need_callable(title, record, "its Graph")
        branch = Branch(g, self._use, title)
        with g.recording_branch(title):
            values = _checked_values(branch, title, record(branch))
            return values, branch.close((), _listed(values))

    def loop(
        self, g: Graph, body: Callable[..., Output | Values | LoopStep], *carried: Output,
        trip_count: Output | int | None = None, condition: Output | None = None,
        after: After = None,
    ) -> LoopResult:  # fmt: skip
        """Repeat `body`, handing values from one iteration to the next. ONNX `Loop`-25.

        ```python
        def body(b, i, total):
            bigger = compute.add(b, total, x)
            return LoopStep(
                carried=[bigger], scans=[bigger], keep_going=compute.less(b, bigger, limit)
            )

        made = compute.loop(g, body, start, trip_count=100)
        total, history = made.carried[0], made.scans[0]
        ```

        Args:
            g: the Graph.
            body: called once with the body's own Graph, the iteration (int64 [], from 0), and
                one value for each of `carried`; it records ops of this slot, may use values of
                the Graphs around, and returns the carried values for the next iteration (one,
                or a list), or a `LoopStep`.
            carried: the values in the first iteration. Their dtypes stay; their shapes
                may change.
            trip_count: iterations at most, a number or an int64 value [] or [1].
            condition: bool value [] or [1], true for a first iteration; always when left out.
            after: values that must be there before the op fires.

        Returns:
            The carried values after the last iteration, and the stacked scans.

        Raises:
            BranchMismatch: the body does not give one value of the same type for each of
                `carried`.
            BranchMisuse: the body records something else than ops of this slot.
            BadArgument: neither `trip_count` nor `keep_going` ends the loop, nothing is carried
                or scanned, or an argument is of the wrong kind.
        """
        graph = self._graph(g)
        start = [*carried, *([] if condition is None else [condition])]
        for value in start:
            graph.value_name(value)
        count = self._trip_count(graph, trip_count)
        step, body_graph = self._body(graph, body, carried)
        if count is None and step.keep_going is None:
            raise BadArgument(
                "the Loop never ends; give it trip_count=…, or return LoopStep(keep_going=…) "
                "from its body"
            )
        kinds = [
            _joined("Loop", f"carried value {index}", before, "what the body makes of it", now)
            for index, (before, now) in enumerate(zip(carried, step.carried, strict=True))
        ]
        kinds += [value.type for value in step.scans]
        if not kinds:
            raise BadArgument("the Loop has no results; hand it carried values, or return scans")
        inputs = (count, condition, *carried)
        outputs = self._record(
            graph, "Loop", inputs, {"body": body_graph}, after, len(kinds), kinds
        )
        return LoopResult(carried=outputs[: len(carried)], scans=outputs[len(carried) :])

    def _trip_count(self, g: Graph, given: Output | int | None) -> Output | None:
        if given is None or isinstance(given, Output):
            return given
        if type(given) is not int or not 0 <= given < 1 << 63:
            raise BadArgument(
                f"trip_count={given!r:.40} has to be a number from 0 on, or a recorded value"
            )
        return self._record(g, "Constant", (), {"value": np.array(given, np.int64)}, None)[0]

    def _body(
        self, g: Graph, record: Callable[..., Any], carried: Values
    ) -> tuple[LoopStep, Subgraph]:
        title = "the body of Loop"
        arguments = ("its Graph", "the iteration", *(f"carried_{i}" for i in range(len(carried))))
        _need_callable(title, record, *arguments)
        branch = Branch(g, self._use, title)
        formals = [
            branch.formal("iteration", types.TENSOR_INT64, scalar=True),
            branch.formal("keep_going", types.TENSOR_BOOL, scalar=True),
            *(branch.formal(f"carried_{i}", value.type) for i, value in enumerate(carried)),
        ]
        with g.recording_branch(title):
            step = _as_step(branch, title, record(branch, formals[0], *formals[2:]))
            if len(step.carried) != len(carried):
                raise BranchMismatch(
                    f"{title} gets {_count(carried)} from the previous iteration and returns "
                    f"{_count(step.carried)} for the next; return one for each (and values to be "
                    "stacked as scans of a LoopStep)"
                )
            keep_going = formals[1] if step.keep_going is None else step.keep_going
            return step, branch.close(formals, (keep_going, *step.carried, *step.scans))


def _need_callable(title: str, record: object, *arguments: str) -> None:
    if not callable(record):
        raise BadArgument(
            f"{title} is {record!r:.60}, which can't be called; give a function that records "
            "it (an onnx.GraphProto goes to op(g, …))"
        )
    try:
        inspect.signature(record).bind(*arguments)
    except TypeError as error:
        raise BadArgument(
            f"{title} is a function of {', '.join(arguments)}, and this one does not take that: "
            f"{error}"
        ) from None
    except ValueError:  # no signature available: the call itself will fail if it does not fit
        return


def _as_step(branch: Branch, title: str, result: object) -> LoopStep:
    if not isinstance(result, LoopStep):
        return LoopStep(carried=_listed(_checked_values(branch, title, result)))
    if result.keep_going is not None:
        branch.value_name(result.keep_going)
    return LoopStep(
        carried=_listed(_checked_values(branch, title, result.carried)),
        scans=_listed(_checked_values(branch, title, result.scans)),
        keep_going=result.keep_going,
    )


def _checked_values(branch: Branch, title: str, result: object) -> Output | Values:
    if not isinstance(result, Output | list | tuple):
        raise BadArgument(
            f"{title} returns {result!r:.60}; return a recorded value, or a list of them"
        )
    for value in _listed(result):
        branch.value_name(value)
    return result


def _listed(values: Output | Values) -> Values:
    return (values,) if isinstance(values, Output) else values


def _count(values: Output | Values) -> str:
    if isinstance(values, Output):
        return "one value"
    return f"a list of {len(values)}"


def _joined(op_type: str, what: str, one: Output, whose: str, other: Output) -> TypeNode:
    """Return the common type of two values. Raises BranchMismatch if there is none."""
    if one.type is other.type:
        return one.type
    common = types.meet(one.type, other.type)
    if common is None:
        raise BranchMismatch(
            f"{what} of {op_type} is a {one.type.name} and {whose} a {other.type.name}; cast one "
            "of them to the other's type"
        )
    return common if common.kind is TypeKind.TENSOR else types.ANY
