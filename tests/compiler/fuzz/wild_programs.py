"""Random programs that may be wrong: an op may read values of two executions, or of two classes.

Rule: nothing here keeps state, so that whether a program is right is a question of what its ops
read. The oracle answers it by itself: a program that it cannot give a meaning has to be refused.
"""

from __future__ import annotations

from tests.compiler.fuzz.random_programs import Scope
from tests.compiler.fuzz.wide_programs import WideRecording

STRAYS = 5  # one op in so many is given a value that it may not be able to read


class WildRecording(WideRecording):
    """Records as its base does, but now and then takes a value from another execution."""

    def step(self) -> None:
        if self.tape.pick(STRAYS) == 1:
            found, scope = self.tape.choose(self.scopes), self.tape.choose(self.scopes)
            scope.tensors.append(found.tensor(self.tape))
        super().step()

    def model(self, scope: Scope) -> None:
        self.unary(scope)

    def call_keeper(self, scope: Scope) -> None:
        self.call_pure(scope)

    def index(self, scope: Scope) -> None:
        self.encode(scope)
