"""Checkpoints of a running node: at their period, on demand, and the newest that is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from bbnode.daemon import paths
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state import checkpoint as checkpoint_file
from bbnode.daemon.state.checkpoint import Checkpoint, Checkpointer, restore_or_install
from bbnode.engine.errors import SnapshotRefused
from bbnode.ir.peer import PeerId
from bbnode.transport.base import Unsent

SHA = "a" * 64


class _Node:
    """Refuses the snapshots that it is told to."""

    def __init__(self, refuse: tuple[bytes, ...] = ()) -> None:
        self.refuse = refuse
        self.restored: bytes | None = None
        self.taken = 0
        self.told_ns = -1

    def restore(self, data: bytes) -> None:
        if data in self.refuse:
            raise SnapshotRefused("not this one")
        self.restored = data

    def snapshot(self, now_ns: int) -> bytes:
        self.taken += 1
        self.told_ns = now_ns
        return b"%d" % self.taken


def _written(state_dir: Path, *states: bytes) -> None:
    for number, state in enumerate(states):
        checkpoint.write(
            state_dir, Checkpoint(artifact_sha256=SHA, node=state, rounds_done={"s": number})
        )


@pytest.mark.parametrize(
    ("refused", "taken_up", "installs"),
    [((), b"new", 1), ((b"new",), b"old", 2), ((b"new", b"old"), None, 3)],
)
def test_the_newest_that_the_node_accepts(
    tmp_path: Path, refused: tuple[bytes, ...], taken_up: bytes | None, installs: int
) -> None:
    _written(tmp_path, b"old", b"new")
    made: list[_Node] = []

    def install() -> _Node:
        made.append(_Node(refused))
        return made[-1]

    node, saved = restore_or_install(tmp_path, SHA, install)  # type: ignore[arg-type]
    assert node is made[-1]  # type: ignore[comparison-overlap]
    assert made[-1].restored == taken_up
    assert (None if saved is None else saved.node) == taken_up
    assert len(made) == installs


async def test_checkpoints_come_at_their_period(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    node = _Node()
    checkpointer = Checkpointer(tmp_path, SHA, node, [])  # type: ignore[arg-type]
    times: list[float] = []
    seen = trio.Event()

    def saved(now_s: float) -> None:
        nonlocal seen
        times.append(now_s)
        seen.set()
        seen = trio.Event()

    checkpointer.on_saved = saved
    began = trio.current_time()
    nursery.start_soon(checkpointer.run)
    with trio.move_on_after(1000):
        await seen.wait()
    assert times == []  # no period, none
    checkpointer.set_period(60)
    await seen.wait()
    await seen.wait()
    checkpointer.set_period(7)
    await seen.wait()
    assert [t - began for t in times] == pytest.approx([1060, 1120, 1127])
    assert node.told_ns == pytest.approx(times[-1] * 1e9)  # not when it was polled last


async def test_a_disk_that_refuses_costs_only_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    monkeypatch.setattr(
        checkpoint, "write", lambda *_: (_ for _ in ()).throw(paths.StorageError("disk full"))
    )
    await checkpointer.save()
    assert "no checkpoint" in caplog.text
    with pytest.raises(paths.StorageError):
        await checkpointer.save_now()
    monkeypatch.undo()
    assert await checkpointer.save_now() == 1


async def test_what_nobody_acknowledged_is_kept_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_file, "MAX_KEPT_UNSENT_BYTES", 10)
    made = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    peer = PeerId.from_seed("a")
    sizes = {1: 6, 2: 5, 3: 4}
    unsent = [
        Unsent(peer=peer, tag=tag, parts=(memoryview(b"x" * (size - 1)), memoryview(b"y")))
        for tag, size in sizes.items()
    ]
    assert await made.save_last(unsent)
    (found, *_) = checkpoint.usable(tmp_path, SHA)
    # A small one after a large one that did not fit is kept as well.
    assert [(each.tag, each.data) for each in found.unsent] == [
        (1, b"xxxxxy"),
        (2, None),
        (3, b"xxxy"),
    ]
    # Of a stop alone: while the node runs, the transport has them.
    assert await made.save_now() == 1
    (found, *_) = checkpoint.usable(tmp_path, SHA)
    assert found.unsent == ()
