"""Random programs with conditions: ops, Modules, sends, answers and outputs that may be skipped.

Rule: no slot here keeps more than one answer, so that what an op is skipped with are the values
that it reads, or else the op of its slot before it.
"""

from __future__ import annotations

from typing import Any

from bbnode.dsl import PeerSelectorSlot, syscalls
from bbnode.dsl.core.graph import Output
from tests.compiler.fuzz.random_programs import Action, Scope
from tests.compiler.fuzz.wide_programs import DEADLINE_S, WideRecording


class ConditionalRecording(WideRecording):
    """Records all that keeps no state, under conditions."""

    def actions(self) -> tuple[Action, ...]:
        return (
            *super().actions(),
            self.unary, self.emit, self.output, self.send, self.request, self.answer,
            self.either, self.either, self.call_pure,
        )  # fmt: skip

    def after(self, scope: Scope) -> Output | None:
        if not self.tape.pick(2):
            return super().after(scope)
        return self.tape.choose((self.g.when, self.g.unless))(self.condition(scope))

    def condition(self, scope: Scope) -> Output:
        total = self.compute.reduce_sum(self.g, scope.tensor(self.tape)[0], keepdims=False)
        return self.compute.greater(self.g, total, self.g.constant(float(self.tape.pick(5) - 1)))

    def either(self, scope: Scope) -> None:
        """Two branches of which one is skipped, and their value."""
        (a, size_a), (b, size_b) = scope.tensor(self.tape), scope.tensor(self.tape)
        holds = self.condition(scope)
        made = self.compute.op(self.g, "Neg", a, after=self.g.when(holds))
        other = self.compute.op(self.g, "Abs", b, after=self.g.unless(holds))
        scope.tensors.append((syscalls.any_of(self.g, made, other), max(size_a, size_b)))

    def output(self, scope: Scope) -> None:
        value, _ = scope.tensor(self.tape)
        self.g.output(self.output_name(), value, after=self.after(scope))

    def call_pure(self, scope: Scope) -> None:
        """Of one value: with two, of which one is skipped, it may be skipped or not."""
        if self.program.pure:
            x, size = scope.tensor(self.tape)
            call = self.tape.choose(self.program.pure).call().input("x", x).input("y", x)
            scope.tensors.append((call.build(self.g, after=self.after(scope)).output("z"), size))

    # -- the wire -----------------------------------------------------------------------------

    def peers_of(self, scope: Scope, cls: str) -> tuple[Output, str, int] | None:
        count = self.program.peers[cls] - (cls == scope.cls)
        if not count:
            return None
        slot = PeerSelectorSlot(f"view_{self.port()}", peer_class=cls)
        return slot.current_view(self.g, after=scope.any_value(self.tape)), cls, count

    def terms(self, count: int) -> dict[str, Any]:
        return {"quorum": self.tape.pick(count + 1), "deadline": DEADLINE_S}

    def collect(self, scope: Scope) -> None:
        """Nothing: without one of its values it fails, long after all others are done."""

    # -- what keeps state ---------------------------------------------------------------------

    def model(self, scope: Scope) -> None:
        self.unary(scope)

    def call_keeper(self, scope: Scope) -> None:
        self.call_pure(scope)

    def index(self, scope: Scope) -> None:
        self.encode(scope)
