"""The unit of a compile: the program between two passes.

Rule: admission builds the unit from the caller's model; passes then change this unit and nothing
else. A pass keeps no state of its own and is idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bbnode.compiler.analysis.content_hash import AttributePrints
from bbnode.compiler.errors import Where
from bbnode.components.contracts import Component
from bbnode.ir import keys
from bbnode.ir.caps import DEFAULT_WAIT_S
from bbnode.ir.graph import Function, FunctionKey, Program
from bbnode.ir.reopen import Recording

# The time of one hop without a declared bound: transfer, queueing and the receiver's work. It is
# no estimate: a client may train for hours, and only the author knows. A node replaces it with its
# own limit `wait_s`, which has the same default.
DEFAULT_PER_HOP_BUDGET_NS = DEFAULT_WAIT_S * 1_000_000_000

Counters = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBinding:
    """One `bind_<role>` call: the slot, its role, and the component class that fills it."""

    slot: str
    role: str
    component: type[Component]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The options of a compile."""

    bindings: tuple[SlotBinding, ...] = ()
    target_version: int = keys.FRAMEWORK_IR_VERSION
    per_hop_budget_ns: int = DEFAULT_PER_HOP_BUDGET_NS
    permissive_types: bool = False

    @property
    def is_bounded(self) -> bool:
        """True if the author gave a budget per hop."""
        return self.per_hop_budget_ns != DEFAULT_PER_HOP_BUDGET_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEdge:
    """One Send-flavoured node and the Recv-flavoured node that it feeds, by node name."""

    producer_class: str
    consumer_class: str
    value_name: str  # payload (or responses) value on the consumer's side
    send_node: str
    recv_node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeClaim:
    """The home of a value, as required by an inlined Module that was called with it."""

    value: str
    called: str
    home: str
    where: Where


@dataclass(slots=True, kw_only=True)
class CompilationUnit:
    """The program between two passes.

    Until `partition_by_wire_ops`, `program.functions[0]` is the root body; after it,
    `partitions` holds one main per class, in class order, and `program.functions` only the
    functions that they call (sub-Module bodies, backend subgraphs, bootstraps). `home_claims` keep
    the homes of inlined Modules, by the function that they were inlined into.
    """

    program: Program
    partitions: dict[str, Function] = field(default_factory=dict)
    wire_edges: list[WireEdge] = field(default_factory=list)
    prints: AttributePrints = field(default_factory=AttributePrints)
    recording: Recording = field(default_factory=Recording)
    home_claims: dict[FunctionKey, list[HomeClaim]] = field(default_factory=dict)

    @property
    def program_name(self) -> str:
        """The name of the root Module, never empty: ONNX requires a name."""
        return self.program.name or "program"

    @property
    def root(self) -> Function:
        """The root body, before partitioning."""
        return self.program.functions[0]

    def bodies(self) -> list[Function]:
        """Return all functions, mains first."""
        return [*self.partitions.values(), *self.program.functions]


class Pass(ABC):
    """A step of the compiler: one interface for shipped passes and for those of packages.

    A pass changes the unit in place and keeps nothing between two runs; its arguments are
    attributes. Running it twice changes nothing more. The docstring of the class is the
    numbered list of rules that hold after it.

    Attributes:
        name: the name in `Compiler.with_pass` and in reports; by default the class's name in
            snake case.
    """

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = keys.snake_case(cls.__name__)

    @abstractmethod
    def run(self, unit: CompilationUnit, options: CompileOptions) -> Counters | None:
        """Establish the rules of this pass in `unit`.

        Returns:
            Counters for the report, by name; None stands for none.

        Raises:
            CompileError: for a program that cannot be compiled. Any other exception becomes a
                `StageFailed` (a pass of the caller) or `Internal` (a shipped pass).
        """
