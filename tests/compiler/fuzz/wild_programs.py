"""Random programs that may be wrong: an op may read values of two executions, or of two classes.

Rule: nothing here keeps state, so that whether a program is right is a question of what its ops
read. The oracle answers it by itself: a program that it cannot give a meaning has to be refused.
"""

from __future__ import annotations

from typing import Any

from bbnode.dsl.core.graph import Output
from tests.compiler.fuzz.random_programs import Recording, Scope, binary
from tests.compiler.fuzz.wide_programs import WideRecording

STRAYS = 5  # one op in so many is given a value that it may not be able to read


class WildRecording(WideRecording):
    """Records as its base does, but now and then takes a value from another execution."""

    def step(self) -> None:
        if self.tape.pick(STRAYS) == 1:
            found, scope = self.tape.choose(self.scopes), self.tape.choose(self.scopes)
            stray, size = found.tensor(self.tape)
            if scope is self.scopes[0]:
                # Here lists of peers wait for nothing, so that what reads them says where they are.
                binary(self.tape, self.g, self.compute, scope.tensor(self.tape)[0], stray)
            else:
                scope.tensors.append((stray, size))
        super().step()

    def model(self, scope: Scope) -> None:
        self.unary(scope)

    def call_keeper(self, scope: Scope) -> None:
        self.call_pure(scope)

    # A stray may move a list of peers to another class, where they are fewer.

    def terms(self, count: int) -> dict[str, Any]:
        return {}

    def peers_of(self, scope: Scope, cls: str) -> tuple[Output, str, int] | None:
        return Recording.peers_of(self, scope, cls)

    def index(self, scope: Scope) -> None:
        self.encode(scope)
