"""The dry run of a compiled program: its models, and the ops on their outputs.

Rule: each model of the program runs once for all slots that have the same settings, by
`bbnode.components.models.dry_run`. Then the ops between a batch of examples and the outputs of a
class are run, as far as they need nothing from another peer: so a metric meets an output here, and
not first in a round. A component that only a node's own settings can create (a class of PyTorch,
for example) is left out, and the report says so.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
from onnx import ModelProto, NodeProto, helper

from bbnode.components.contracts import Backend, Component, DataSource, Model, OpContext
from bbnode.components.errors import ComponentError
from bbnode.components.models.dry_run import (
    SIZES,
    Batch,
    DryRun,
    DryRunFailed,
    FewExamples,
    Ran,
    RehearsalContext,
    dry_run,
    tried,
)
from bbnode.components.registry import UnknownComponentType, build_config, component_class
from bbnode.daemon.artifacts.inspect import mains_of
from bbnode.engine.errors import describe
from bbnode.engine.ops.syscalls import carried_by
from bbnode.engine.planning.feeds import feeds_of
from bbnode.engine.planning.program import SlotPlan, plan_program
from bbnode.ir import keys
from bbnode.ir.errors import (
    AuthorError,
    BbnodeError,
    DecodeError,
    DeploymentError,
    EnvironmentFault,
)
from bbnode.ir.flatten import OP_ENTER, FlatOp, flatten
from bbnode.ir.graph import Function, OpNode, Program, is_onnx_domain
from bbnode.ir.interrupts import let_stop
from bbnode.ir.onnx_file import node_proto, program_of
from bbnode.ir.values import Composite, Value

# Parameters of a model up to which a program is tried while it is compiled.
MOST_PARAMETERS: Final = 1 << 22
# Seconds after which compiling leaves the rest of a model's dry run out.
COMPILE_BUDGET_S: Final = 5.0

_NEXT_BATCH: Final = "NextBatch"
# Ops of models that run on the way from a batch to the outputs, with their methods.
_OF_MODELS: Final[Mapping[str, str]] = {
    "Forward": "forward",
    "ComputeLoss": "compute_loss",
    "Evaluate": "evaluate",
    "Gradient": "gradient",
}
# Methods of models that take examples.
_NEED_EXAMPLES: Final = frozenset(
    {*_OF_MODELS.values(), "train", "train_adjusted", "gradient_with_input", "pull_back"}
)
# Ops that return their first input unchanged.
_HAND_ON: Final = frozenset({keys.OP_DEADLINE_CHECK, "PassThrough", *keys.GATE_OPS})


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRow:
    """A step of the dry run.

    Attributes:
        where: class and slot of the model, as "client/local"; the first of several equal ones.
        step: the call.
        rows: the number of examples.
        result: the outcome of the call.
    """

    where: str
    step: str
    rows: int
    result: str


@dataclass(slots=True, kw_only=True)
class ProgramDryRun:
    """The report of a program's dry run; lists as `DryRun` has them."""

    rows: list[DryRunRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    postponed: list[str] = field(default_factory=list)
    examples: str = "made up"
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "examples": self.examples,
            "steps": [
                {"where": r.where, "step": r.step, "examples": r.rows, "result": r.result}
                for r in self.rows
            ],
            "warnings": self.warnings,
            "skipped": [*self.skipped, *self.postponed],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenData:
    """Examples that a user names: settings of data sources by slot, "" for all slots."""

    settings: Mapping[str, Mapping[str, Any]]

    def of(self, slot: str) -> Mapping[str, Any]:
        """Return the settings for a slot."""
        return {**self.settings.get("", {}), **self.settings.get(slot, {})}


@dataclass(slots=True, kw_only=True)
class _TriedModel:
    """A model of the program: the slots that have it, and the methods that are called on it."""

    slot: SlotPlan
    slots: list[tuple[str, str]]  # class and slot
    methods: set[str]
    trains: bool


def check_program(
    model: ModelProto,
    *,
    own: bool,
    given: GivenData | None = None,
    most_parameters: float = math.inf,
    budget_s: float = math.inf,
) -> ProgramDryRun:
    """Make the dry run of a compiled program.

    Args:
        model: the artifact.
        own: it was compiled here, so that its settings may name what is on this machine.
        given: examples; made-up ones without.
        most_parameters: models that are larger are left out.
        budget_s: seconds for each model.

    Raises:
        DryRunFailed: a model, or what is computed of its outputs, fails.
        DeploymentError: data that were given can't be read.
        AuthorError: a model can't be made of its settings.
    """
    began = time.monotonic()
    program = program_of(model)
    report = ProgramDryRun(examples="made up" if given is None else "given")
    mains = {main.name: main for main in mains_of(program)}
    for use, main in _models(model, mains.values()):
        where = "/".join(use.slots[0])
        try:
            component = _make(model, main, use, own=own)
        except _LeftOut as error:
            report.skipped.append(f"{where}: {error}")
            continue
        size = int(np.size(component.params(cast(OpContext, RehearsalContext()))))
        if size > most_parameters:
            report.postponed.append(
                f"{where}: no dry run, as {size} parameters are many; `bbnode check` makes it"
            )
            continue
        trial = _Trial(program, model, mains, use, component, given, own=own, budget_s=budget_s)
        try:
            rows, report_of_model = trial.run(main)
        except DryRunFailed as error:
            raise DryRunFailed(f"{where}: {error}", of_values=error.of_values) from error
        except BbnodeError:
            raise
        except Exception as error:  # the boundary to a component's author
            let_stop(error)
            why = ": ".join(describe(error))
            raise DryRunFailed(
                f"{where}: {component.TYPE_NAME} fails on {report.examples} examples: {why}"
            ) from error
        report.rows.extend(replace(row, where=where) for row in rows)
        report.warnings.extend(f"{where}: {line}" for line in report_of_model.warnings)
        report.skipped.extend(f"{where}: {line}" for line in report_of_model.skipped)
        report.postponed.extend(f"{where}: {line}" for line in report_of_model.postponed)
    report.seconds = time.monotonic() - began
    return report


def check_compiled(model: ModelProto, *, own: bool) -> ProgramDryRun:
    """Dry-run a program during its compilation, within bounds. Raises as `check_program`."""
    return check_program(model, own=own, most_parameters=MOST_PARAMETERS, budget_s=COMPILE_BUDGET_S)


class _LeftOut(Exception):
    """A model is not tried; the text says why."""


def _models(
    model: ModelProto, mains: Iterator[Function] | Any
) -> Iterator[tuple[_TriedModel, Function]]:
    """Yield the models of a program, each with a class that has it; equal settings only once."""
    by_settings: dict[bytes, tuple[_TriedModel, Function]] = {}
    for main in mains:
        plan = plan_program(model, [main.name])
        for slot in plan.slots:
            if slot.binding.role != Model.ROLE:
                continue
            called = {each.method for each in plan.methods if each.slot == slot.name}
            if called.isdisjoint(_NEED_EXAMPLES):
                continue  # a vector that is stored, for example
            name = main.metadata[keys.HOME_KEY], slot.name
            trains = not called.isdisjoint({"train", "train_adjusted"})
            key = slot.config or repr(name).encode()
            use, _ = by_settings.setdefault(
                key, (_TriedModel(slot=slot, slots=[], methods=set(), trains=trains), main)
            )
            use.slots.append(name)
            use.methods |= called
            if (
                trains and not use.trains
            ):  # a class that trains calls everything that one without training does
                use.slot, use.trains = slot, True
                use.slots.insert(0, use.slots.pop())
                by_settings[key] = use, main
    yield from by_settings.values()


def _make(model: ModelProto, main: Function, use: _TriedModel, *, own: bool) -> Model:
    """Return the model of a slot, bound to its backend. Raises _LeftOut, AuthorError."""
    slots = {slot.name: slot for slot in plan_program(model, [main.name]).slots}
    component = _built(use.slot, own=own)
    dependencies: dict[str, Component] = {}
    for role, name in component.depends.items():
        if role == "data_source":
            continue
        if name not in slots or role != "backend":
            raise _LeftOut(f"{component.TYPE_NAME} needs a {role}, which a dry run has none of")
        dependencies[role] = _built(slots[name], own=own)
    if not isinstance(component, Model):
        raise _LeftOut(f"{component.TYPE_NAME} is no model")
    component.bind(dependencies)
    return component


def _built(slot: SlotPlan, *, own: bool, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the component of a slot. Raises _LeftOut if only a node can create it."""
    try:
        cls = component_class(slot.binding.type_name)
    except UnknownComponentType as error:
        raise _LeftOut(str(error)) from error
    try:
        return cls(build_config(cls, slot.name, slot.config, settings or {}, own_artifact=own))
    except (DeploymentError, EnvironmentFault) as error:
        if settings is not None or isinstance(error, AuthorError):
            raise
        raise _LeftOut(f"only a node's own settings make it ({error})") from error
    except BbnodeError:
        raise
    except Exception as error:  # the boundary to a component's author
        let_stop(error)
        raise _LeftOut(
            f"{cls.TYPE_NAME} can't be made here: {': '.join(describe(error))}"
        ) from error


class _Trial:
    """The dry run of one model."""

    def __init__(
        self,
        program: Program,
        model: ModelProto,
        mains: Mapping[str, Function],
        use: _TriedModel,
        made: Model,
        given: GivenData | None,
        *,
        own: bool,
        budget_s: float,
    ) -> None:
        self._program = program
        self._artifact = model
        self._mains = mains
        self._use = use
        self._made = made
        self._given = given
        self._own = own
        self._budget_s = budget_s
        self._ctx = RehearsalContext()
        self._rows: list[DryRunRow] = []

    def run(self, main: Function) -> tuple[list[DryRunRow], DryRun]:
        """Run the model, then the ops on its outputs."""
        batch = self._given_batch(main)
        report = self._once(batch) if batch is not None else tried(self._made, self._once)
        if report is None:
            report = DryRun()
            report.skipped.append(
                f"{self._made.TYPE_NAME} does not say what examples it takes; give some with "
                "`bbnode check --data`"
            )
        return self._rows, report

    def _once(self, batch: Batch) -> DryRun:
        few = FewExamples(batch)
        other = copy.copy(self._made)
        backend = {"backend": self._made.dependency("backend")} if self._has_backend() else {}
        other.bind({**backend, **({"data_source": few} if self._use.trains else {})})
        report = dry_run(
            other,
            self._ctx,
            few,
            methods=self._use.methods,
            made_up=self._given is None,
            config=self._config(),
            budget_s=self._budget_s,
        )
        self._rows = [_row(ran) for ran in report.ran]
        for rows in SIZES:
            for main in self._mains.values():
                self._rows.extend(self._computed(main, other, few, rows))
        return report

    def _has_backend(self) -> bool:
        return self._made.has_dependency("backend")

    def _config(self) -> Any:
        slot = self._use.slot
        cls = component_class(slot.binding.type_name)
        return build_config(cls, slot.name, slot.config, {}, own_artifact=self._own)

    def _given_batch(self, main: Function) -> Batch | None:
        """Return the first examples of the data that the user named for this model."""
        if self._given is None:
            return None
        slots = {slot.name: slot for slot in plan_program(self._artifact, [main.name]).slots}
        sources, _ = feeds_of(self._artifact, [main.name], self._use.slot.name)
        if not sources:
            return None
        slot = slots[sources[0]]
        source: DataSource = _built(slot, own=self._own, settings=self._given.of(slot.name))
        batch = source.first(SIZES[-1])
        if batch is None:
            batch = next(iter(source.epoch_batches(SIZES[-1])))
        count = len(np.atleast_1d(np.asarray(batch[1])))
        if count < SIZES[-1]:
            raise DryRunFailed(
                f"the data of slot {slot.name!r} have {count} example(s); give {SIZES[-1]} or more"
            )
        return batch

    def _computed(
        self, main: Function, model: Model, few: FewExamples, rows: int
    ) -> Iterator[DryRunRow]:
        """Run the ops of a class on a batch; yield its outputs that have a name."""
        home = main.metadata[keys.HOME_KEY]
        slots = {slot for each, slot in self._use.slots if each == home}
        if not slots:
            return
        library = {f.key: f for f in self._program.functions if f.name not in self._mains}
        walk = _OpByOp(self._program, model, slots, self._backend(), few.show(rows), self._ctx)
        flat = flatten(main, library)
        outputs = walk.outputs(flat.ops, flat.outputs)
        for name, value in outputs.items():
            yield DryRunRow(where="", step=name, rows=rows, result=_shown(value))
        if walk.computed and not outputs:  # the answer of a client has no name of its own
            result = f"{walk.computed} ops of {home}"
            yield DryRunRow(where="", step="metrics", rows=rows, result=result)

    def _backend(self) -> Backend | None:
        return self._made.dependency("backend") if self._has_backend() else None


class _OpByOp:
    """Runs the ops of a class that need nothing but a batch, constants and one model."""

    def __init__(
        self,
        program: Program,
        model: Model,
        slots: AbstractSet[str],
        backend: Backend | None,
        batch: Batch,
        ctx: Any,
    ) -> None:
        self._opsets = [(each.domain, each.version) for each in program.opset_imports]
        self._model = model
        self._slots = slots
        self._backend = backend
        self._batch = batch
        self._ctx = ctx
        self._values: dict[str, Value] = {}
        self._waiting: list[FlatOp] = []  # ONNX ops, which are run together
        self._coming: set[str] = set()  # outputs of these ops
        self.computed = 0  # number of ONNX ops that were run

    def outputs(self, ops: Sequence[FlatOp], names: Sequence[str]) -> dict[str, Value]:
        """Run the ops; return the outputs of the class that were computed, by name."""
        for name in _batches(ops, self._slots):
            features, labels = name
            self._values[features] = self._batch[0]
            if labels:
                self._values[labels] = self._batch[1]
        for op in ops:
            self._one(op)
        self._run_waiting()
        # A batch that is only passed through is no result.
        mine = {id(self._batch[0]), id(self._batch[1])}
        by_name = {name: self._values[name] for name in names if name in self._values}
        return {name: value for name, value in by_name.items() if id(value) not in mine}

    def _one(self, op: FlatOp) -> None:
        if op.op_type == "Constant" and op.domain == keys.SYSCALL_DOMAIN:
            try:
                self._values[op.outputs[0]] = carried_by(op.node)
            except (ValueError, TypeError, DecodeError, AuthorError):
                return
        needed = [name for name in op.inputs if name]
        if not needed or not all(name in self._values or name in self._coming for name in needed):
            return
        if is_onnx_domain(op.domain) and not op.node.graphs:
            self._waiting.append(op)
            self._coming.update(filter(None, op.outputs))
            return
        is_call = op.op_type == OP_ENTER
        slot = op.node.metadata.get(keys.SLOT_KEY, "")
        calls = op.op_type in _OF_MODELS and slot in self._slots
        if not (is_call or calls or op.op_type in _HAND_ON):
            return
        self._run_waiting()
        arguments = [self._values[name] for name in needed]
        if calls:
            output = getattr(self._model, _OF_MODELS[op.op_type])(self._ctx, *arguments)
            results = output if op.op_type == "Gradient" else (output,)
        else:
            results = arguments if is_call else arguments[:1]
        self._values.update(
            (name, value) for name, value in zip(op.outputs, results, strict=False) if name
        )

    def _run_waiting(self) -> None:
        """Run the waiting ONNX ops as one graph; DryRunFailed names the op that fails."""
        ops, self._waiting, self._coming = self._waiting, [], set()
        if not ops or self._backend is None:
            return
        self.computed += len(ops)
        try:
            self._values.update(self._run(ops))
            return
        except DryRunFailed:
            raise
        except ComponentError as error:
            whole = error
        for op in ops:  # one by one, to name the op at fault
            try:
                self._values.update(self._run([op]))
            except ComponentError as error:
                raise self._failed(op, error) from error
        raise DryRunFailed(f"what is computed of the model's outputs fails: {whole}")

    def _run(self, ops: Sequence[FlatOp]) -> dict[str, Value]:
        inside = {name for op in ops for name in op.outputs}
        inputs_needed = dict.fromkeys(
            name for op in ops for name in op.inputs if name and name not in inside
        )
        for name in inputs_needed:
            if not isinstance(self._values[name], np.ndarray | np.generic):
                op = next(each for each in ops if name in each.inputs)
                kind = self._values[name]
                several = f"{len(kind)} tensors" if isinstance(kind, Composite) else "no tensor"
                raise self._failed(
                    op, f"it takes one tensor and gets {several}; say which output of the model "
                    "it is of, with outputs="
                )  # fmt: skip
        outputs = [name for op in ops for name in op.outputs if name]
        inputs = [_info(name, self._values[name]) for name in inputs_needed]
        graph = helper.make_graph(
            [_node(op) for op in ops],
            "dry_run",
            inputs,
            [helper.make_empty_tensor_value_info(name) for name in outputs],
        )
        model = helper.make_model(
            graph,
            ir_version=keys.FRAMEWORK_IR_VERSION,
            opset_imports=[
                helper.make_opsetid("" if is_onnx_domain(domain) else domain, version)
                for domain, version in self._opsets
                if is_onnx_domain(domain) or domain == keys.ONNX_ML_DOMAIN
            ],
        )
        assert self._backend is not None
        prepared = self._backend.prepare(model)
        results = prepared.run([np.asarray(self._values[name]) for name in inputs_needed])
        return dict(zip(outputs, results, strict=True))

    def _failed(self, op: FlatOp, why: Exception | str) -> DryRunFailed:
        line = f" at {op.node.source_line}" if op.node.source_line else ""
        return DryRunFailed(
            f"{op.op_type} ({op.name}{line}), which the program computes of the model's output and "
            f"the labels, fails: {why}"
        )


def _batches(ops: Sequence[FlatOp], slots: AbstractSet[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of examples and labels of each batch that goes into one of the models."""
    comes_from: dict[str, str] = {}
    for op in ops:
        if op.op_type in _HAND_ON and op.inputs and op.outputs:
            comes_from[op.outputs[0]] = op.inputs[0]
    taken = set()
    for op in ops:
        if op.op_type in _OF_MODELS and op.node.metadata.get(keys.SLOT_KEY, "") in slots:
            name = op.inputs[0] if op.inputs else ""
            while name in comes_from:
                name = comes_from[name]
            taken.add(name)
    for op in ops:
        if op.op_type == _NEXT_BATCH and op.outputs and op.outputs[0] in taken:
            yield op.outputs[0], op.outputs[1] if len(op.outputs) > 1 else ""


def _node(op: FlatOp) -> NodeProto:
    node = op.node
    return node_proto(
        OpNode(op.op_type, "" if is_onnx_domain(op.domain) else op.domain, op.name,
               op.inputs, op.outputs, node.attributes)
    )  # fmt: skip


def _info(name: str, value: Value) -> Any:
    array = np.asarray(value)
    elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, elem_type, [None] * array.ndim)


def _row(ran: Ran) -> DryRunRow:
    return DryRunRow(where="", step=ran.step, rows=ran.rows, result=ran.result)


def _shown(value: Value) -> str:
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else None
    if array is None:
        return type(value).__name__
    if array.size == 1 and array.dtype.kind in "fiub":
        return f"{float(array.reshape(())):.6g}"
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
