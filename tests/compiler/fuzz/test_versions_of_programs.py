"""Two versions of a random program: with an op more it keeps its ports, and the two work together.

Rule: the op that only one of them has reads a value that both read, or the other one would be
sent a trigger in its place, which is another port.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bbnode.dsl import syscalls
from tests.compiler.fuzz import world
from tests.compiler.fuzz.random_programs import RandomProgram
from tests.compiler.fuzz.wide_programs import WideRecording

NUMBERS = st.lists(st.integers(0, (1 << 16) - 1), min_size=20, max_size=160)
ADDED = "added"
STEPS = 16  # the op is added before one of so many

Site = tuple[int, bool, bool, str]


class VersionedProgram(RandomProgram):
    """`is_newer`: with one op more, somewhere."""

    def __init__(self, numbers: list[int], *, is_newer: bool) -> None:
        super().__init__(numbers, recording=VersionedRecording)
        self.is_newer = is_newer


class VersionedRecording(WideRecording):
    """Records as its base does, and somewhere an op that only the newer version has."""

    program: VersionedProgram

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps_left = self.tape.pick(STEPS)
        self.is_added = False

    def step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            self.add()
        super().step()

    def finish(self) -> None:
        self.add()
        super().finish()

    def add(self) -> None:
        if self.is_added:
            return
        self.is_added = True
        value, _ = self.tape.choose(self.scopes).tensor(self.tape)
        syscalls.app_emit(self.g, value, name="read")
        if self.program.is_newer:
            changed = self.compute.neg(self.g, value)
            syscalls.app_emit(self.g, changed, name=ADDED)


def sites(run: world.Run) -> dict[str, set[Site]]:
    """What crosses, by class of peer."""
    return {
        node.classes[0]: {(c.site, c.sends, c.takes, c.kind) for c in node.node.crossings}
        for node in run.network.nodes
    }


def check_versions(numbers: list[int]) -> bool:
    """Compare sites, and the events of mixed peers with the oracle; True if some were mixed."""
    programs = [VersionedProgram(numbers, is_newer=newer) for newer in (False, True)]
    if sum(numbers) % 2:
        programs.reverse()  # the home's first peer has the newer one
    recorded = [program.build() for program in programs]
    compiled = [world.compiler_for(model).compile(model) for model in recorded]
    alone = [world.invoked(programs[0], each) for each in compiled]
    assert sites(alone[0]) == sites(alone[1])
    run = world.invoked(programs[0], *compiled)
    run.network.run_until_idle()
    world.check_nothing_failed(run.network)
    new = next(at for at, each in enumerate(programs) if each.is_newer)
    wanted = world.multisets(world.meant(programs[new], recorded[new])[0])
    first = {group[0] for group in world.peer_names(programs[0]).values()}
    newer_peers = {node.name for node in run.network.nodes if (node.name in first) == (new == 0)}
    wanted = {
        (peer, topic): values
        for (peer, topic), values in wanted.items()
        if topic != ADDED or peer in newer_peers
    }
    assert world.multisets(world.handed_out(run)) == wanted
    return len(newer_peers) < len(run.network.nodes) and any(t == ADDED for _, t in wanted)


@settings(max_examples=30)
@given(NUMBERS)
def test_an_op_more_leaves_the_ports_what_they_are(numbers: list[int]) -> None:
    check_versions(numbers)


@pytest.mark.slow
@settings(max_examples=1000)
@given(NUMBERS)
def test_versions_long(numbers: list[int]) -> None:
    check_versions(numbers)


def test_versions_are_mixed() -> None:
    tapes = [[(n * 7919 + i * 104_729) ** 2 % 65_521 for i in range(60)] for n in range(15)]
    assert any(check_versions(tape) for tape in tapes)
