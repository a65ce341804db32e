"""`Compiler`: what a caller says, and the run of the passes over it.

Rule: a Compiler is immutable; every method of the chain gives a new one, so one chain can be
the base of several. `compile` never touches the caller's model.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from onnx import ModelProto

from bbnode.compiler.driver import pipeline, seams
from bbnode.compiler.driver.admission import admit
from bbnode.compiler.driver.history import ValueHistory
from bbnode.compiler.driver.seams import History
from bbnode.compiler.driver.stage import CompilerStage, run_stage
from bbnode.compiler.driver.targets import split_targets
from bbnode.compiler.driver.telemetry import CompileReport, Stopwatch
from bbnode.compiler.errors import (
    BindingMismatch,
    CompileError,
    Internal,
    PassInvariantBroken,
    UnknownStage,
)
from bbnode.compiler.unit import CompilationUnit, CompileOptions, SlotBinding
from bbnode.components.contracts import CONTRACTS, Component
from bbnode.components.registry import UnknownComponentType, component_class
from bbnode.ir import keys
from bbnode.ir.errors import BbnodeError
from bbnode.ir.onnx_file import model_of
from bbnode.ir.seal import seal

# A day per hop: what is slower than that is no deadline but a mistake in the unit.
MAX_PER_HOP_BUDGET_NS = 86_400 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Compiler:
    """Binds components to slots and compiles recorded models.

    `Compiler().bind_backend("compute", OrtBackend).compile(model)`; immutable: each method of
    the chain returns a new Compiler.
    """

    options: CompileOptions = field(default_factory=CompileOptions)
    stages: tuple[CompilerStage, ...] = ()
    disabled: frozenset[str] = frozenset()

    # --- bindings -------------------------------------------------------------------------

    def bind_backend(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a Backend slot. All bind methods raise BindingMismatch on an unfit class."""
        return self.bind("Backend", slot, component)

    def bind_model(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a Model slot."""
        return self.bind("Model", slot, component)

    def bind_index(self, slot: str, component: type[Component]) -> Compiler:
        """Fill an Index slot."""
        return self.bind("Index", slot, component)

    def bind_aggregator(self, slot: str, component: type[Component]) -> Compiler:
        """Fill an Aggregator slot."""
        return self.bind("Aggregator", slot, component)

    def bind_codec(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a Codec slot."""
        return self.bind("Codec", slot, component)

    def bind_data_source(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a DataSource slot."""
        return self.bind("DataSource", slot, component)

    def bind_peer_selector(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a PeerSelector slot."""
        return self.bind("PeerSelector", slot, component)

    def bind_protocol(self, slot: str, component: type[Component]) -> Compiler:
        """Fill a Protocol slot."""
        return self.bind("Protocol", slot, component)

    def bind(self, role: str, slot: str, component: type[Component]) -> Compiler:
        """Fill a slot of any role, e.g. `bind("Model", "global", OnnxModel)`.

        Raises BindingMismatch when the class does not implement the role's contract, is
        abstract or not registered, or when the slot is bound to another class already.
        """
        _check_component(role, slot, component)
        binding = SlotBinding(slot=slot, role=role, component=component)
        for known in self.options.bindings:
            if known == binding:
                return self
            if known.slot == slot:
                detail = f"it is bound to {known.component.TYPE_NAME!r} ({known.role}) already"
                raise BindingMismatch(slot=slot, role=role, detail=detail)
        return self._with(bindings=(*self.options.bindings, binding))

    # --- options --------------------------------------------------------------------------

    def with_target_version(self, version: int) -> Compiler:
        """Take models of this ir_version (default: the one the DSL records)."""
        return self._with(target_version=version)

    def with_per_hop_budget_ns(self, budget_ns: int) -> Compiler:
        """Static deadline of a Send: chain depth times this, in nanoseconds.

        Raises ValueError when it is not between 1 ns and a day.
        """
        if not 0 < budget_ns <= MAX_PER_HOP_BUDGET_NS:
            raise ValueError(
                f"a per-hop budget of {budget_ns} ns is not between 1 ns and a day "
                f"({MAX_PER_HOP_BUDGET_NS} ns)"
            )
        return self._with(per_hop_budget_ns=budget_ns)

    def with_permissive_types(self) -> Compiler:
        """Let values keep an abstract type (they can't travel between nodes)."""
        return self._with(permissive_types=True)

    def without_stage(self, name: str) -> Compiler:
        """Leave out the user stage of that name, or else the pass of the pipeline's body.

        Raises UnknownStage when there is neither.
        """
        kept = tuple(stage for stage in self.stages if stage.name != name)
        if len(kept) < len(self.stages):
            return dataclasses.replace(self, stages=kept)
        if name in pipeline.body_pass_names():
            return dataclasses.replace(self, disabled=self.disabled | {name})
        raise UnknownStage(stage=name, detail="there is no pass or user stage of that name")

    def push_back_stage(self, stage: CompilerStage) -> Compiler:
        """Add a user stage after those there are."""
        return self.insert_stage(len(self.stages), stage)

    def push_front_stage(self, stage: CompilerStage) -> Compiler:
        """Add a user stage before those there are (still after the canonical passes)."""
        return self.insert_stage(0, stage)

    def insert_stage(self, index: int, stage: CompilerStage) -> Compiler:
        """Add a user stage at an index, clamped to the list of user stages.

        Raises UnknownStage when the name is taken, or the stage has no name or no `run`.
        """
        name = getattr(stage, "name", None)
        if not isinstance(name, str) or not name or not callable(getattr(stage, "run", None)):
            detail = "a stage needs a non-empty `name` and a method `run(model)`"
            raise UnknownStage(stage=str(name or type(stage).__name__), detail=detail)
        if name in pipeline.all_pass_names() or any(name == known.name for known in self.stages):
            raise UnknownStage(stage=name, detail="the name is taken; choose another one")
        at = max(0, min(index, len(self.stages)))
        return dataclasses.replace(self, stages=(*self.stages[:at], stage, *self.stages[at:]))

    # --- running --------------------------------------------------------------------------

    def compile(self, model: ModelProto) -> ModelProto:
        """Return the compiled form of a recorded model: one ModelProto with every target.

        Raises CompileError: a class per variant, in `bbnode.compiler.errors`.
        """
        return self.compile_with_report(model)[0]

    def compile_partitions(self, model: ModelProto) -> dict[str, ModelProto]:
        """As `compile`, but each target as a compiled model of its own, by target name."""
        return split_targets(self.compile(model))

    def compile_with_report(
        self,
        model: ModelProto,
        *,
        explain: bool = False,
        snapshot_after: Collection[str] = (),
        snapshots: MutableMapping[str, ModelProto] | None = None,
    ) -> tuple[ModelProto, CompileReport]:
        """As `compile`, with times and counters per pass.

        Args:
            model: what `Module.build()` returned; not touched.
            explain: also follow every node and value through the passes (`report.history`,
                `report.values`).
            snapshot_after: passes and stages after which the model is copied
                (`report.snapshots`).
            snapshots: where the copies go; it has those made so far when the compile fails.

        Raises:
            CompileError: as `compile`; UnknownStage for an unknown name in `snapshot_after`.
        """
        for name in snapshot_after:
            self._check_known(name)
        notes = _Notes(
            explain=explain,
            snapshot_after=frozenset(snapshot_after),
            snapshots={} if snapshots is None else snapshots,
        )
        with _collector_paused():
            run = _Run(model, self.options, notes)
            try:
                self._run_body(run)
                looks = [name for name in pipeline.STAGE_LOOKS if name not in self.disabled]
                for stage in self.stages:
                    run.run_stage(stage, looks)
                self._run_post(run)
            except CompileError as error:
                culprit = self._culprit(model, notes) if run.is_broken() else None
                if culprit is None:
                    raise
                raise culprit from error
            run.unit.recording.finish(run.unit.program)
            compiled = model_of(run.unit.program)
            seal(compiled)
            return compiled, run.report()

    def _run_body(self, run: _Run) -> None:
        for name in (*pipeline.PRE_PASS_NAMES, *pipeline.body_pass_names()):
            if name not in self.disabled:
                run.run_pass(name)

    @staticmethod
    def _run_post(run: _Run) -> None:
        for name in pipeline.POST_PASS_NAMES:
            run.run_pass(name)

    def _culprit(self, model: ModelProto, notes: _Notes) -> PassInvariantBroken | None:
        """The pass that broke the program before another one failed on it.

        Compiles again with a look behind every pass. Only for a program that is broken: what is
        wrong with a whole one is its author's to mend, and no pass is to blame. The caller's
        stages do not run again: what one of them breaks is found right behind it.
        """
        try:
            run = _Run(model, self.options, notes, careful=True)
            self._run_body(run)
            if not self.stages:
                self._run_post(run)
        except PassInvariantBroken as error:
            return error
        except CompileError:
            return None
        return None

    def _check_known(self, name: str) -> None:
        if name not in (*pipeline.all_pass_names(), *(stage.name for stage in self.stages)):
            raise UnknownStage(stage=name, detail="there is no pass or user stage of that name")

    def _with(self, **changes: object) -> Compiler:
        options = dataclasses.replace(self.options, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(self, options=options)


def _check_component(role: str, slot: str, component: type[Component]) -> None:
    def unfit(detail: str) -> BindingMismatch:
        return BindingMismatch(slot=slot, role=role, detail=detail)

    contract = CONTRACTS.get(role)
    if contract is None:
        raise unfit(f"there is no such role; the roles are {', '.join(CONTRACTS)}")
    if not slot:
        raise unfit(f"{slot!r} is no slot name")
    if not isinstance(component, type):
        raise unfit(f"{component!r:.80} is no class (give the class, its config comes at install)")
    if not issubclass(component, contract):
        raise unfit(f"{component.__qualname__} does not implement {contract.__qualname__}")
    if inspect.isabstract(component):
        missing = ", ".join(sorted(component.__abstractmethods__))
        raise unfit(f"{component.__qualname__} lacks the methods {missing}")
    type_name = component.__dict__.get("TYPE_NAME")
    if not isinstance(type_name, str):
        raise unfit(f"{component.__qualname__} has no TYPE_NAME of its own")
    try:
        registered = component_class(type_name)
    except UnknownComponentType as error:
        raise unfit(f"{type_name!r} is not registered (use @register_component)") from error
    if registered is not component:
        raise unfit(f"{type_name!r} is registered by the other class {registered.__qualname__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notes:
    """The notes that the caller wants of a compile."""

    explain: bool
    snapshot_after: frozenset[str]
    snapshots: MutableMapping[str, ModelProto]


class _Run:
    """One compile: the unit on its way through the passes, and what is noted of it.

    `careful` looks behind every pass and not only at the checkpoints.
    """

    def __init__(
        self, model: ModelProto, options: CompileOptions, notes: _Notes, *, careful: bool = False
    ) -> None:
        self._watch = Stopwatch()
        self.unit = admit(model, options)
        self._options = options
        self._notes = notes
        self._careful = careful
        self.well_formed = False
        self._histories = (History(), ValueHistory()) if notes.explain else None
        if self._histories is not None:
            for history in self._histories:
                history.observe(self.unit, "")

    def run_pass(self, name: str) -> None:
        """Run a pass, and check the program behind it at a checkpoint, or if careful.

        What `validate` did not vouch for is not checked: no pass could be blamed for it.
        """
        with self._watch.measure(name) as counters, _boundary(name):
            counters.update(pipeline.load_pass(name).run(self.unit, self._options))
        self.well_formed = self.well_formed or name == pipeline.FIRST_SEAM
        if self.well_formed and (self._careful or name in pipeline.CHECKPOINTS):
            seams.check(self.unit, name)
        self._note(name)

    def run_stage(self, stage: CompilerStage, looks: Sequence[str]) -> None:
        """Run a user stage, and let the passes called `looks` see what it leaves.

        Raises PassInvariantBroken, naming the stage, for what they find.
        """
        with self._watch.measure(stage.name), _boundary(stage.name):
            run_stage(self.unit, stage)
            for name in looks:
                try:
                    pipeline.load_pass(name).run(self.unit, self._options)
                except CompileError as error:
                    raise PassInvariantBroken(
                        pass_name=stage.name, detail=error.message(), where=error.where
                    ) from error
        self._note(stage.name)

    def _note(self, name: str) -> None:
        if self._histories is not None:
            for history in self._histories:
                history.observe(self.unit, name)
        if name in self._notes.snapshot_after:
            self._notes.snapshots[name] = _snapshot(self.unit)

    def is_broken(self) -> bool:
        """Return True if a pass left the program malformed: only then there is one to blame."""
        return self.well_formed and not seams.is_sound(self.unit)

    def _targets(self) -> tuple[str, ...]:
        """Names of the targets that were merged into the program."""
        functions = self.unit.program.functions
        return tuple(f.name for f in functions if keys.TARGET_KEY in f.metadata)

    def report(self) -> CompileReport:
        """Return the report."""
        return CompileReport(
            passes=tuple(self._watch.reports),
            total_ms=self._watch.total_ms(),
            targets=self._targets(),
            history=self._histories[0].result() if self._histories is not None else {},
            values=self._histories[1].result() if self._histories is not None else {},
            snapshots=self._notes.snapshots,
        )


def _snapshot(unit: CompilationUnit) -> ModelProto:
    """A copy of the program as it is, the mains of partitions first."""
    return model_of(unit.program, unit.bodies())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A program is many small objects that live as long as the compile and form no rings.

    Python's collector of rings would look through all of them again and again, for nothing: a
    fifth of the time of a large compile.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _boundary(name: str) -> Iterator[None]:
    """Whatever a pass trips over leaves the compiler as one typed error that names the pass."""
    try:
        yield
    except BbnodeError:
        raise
    except Exception as error:  # the boundary: a program must not get a KeyError out of us
        detail = f"pass {name!r} raised {type(error).__name__}: {error}"
        raise Internal(detail=detail) from error
