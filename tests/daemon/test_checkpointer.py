"""Checkpoints of a running node: at their period, on demand, and the newest that is accepted."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from bbnode.components.errors import ComponentError
from bbnode.daemon import paths
from bbnode.daemon.state import checkpoint
from bbnode.daemon.state import checkpoint as checkpoint_file
from bbnode.daemon.state.checkpoint import BestRound, Checkpoint, Checkpointer, restore_or_install
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

    def adopt(self, data: bytes, slots: object) -> None:
        raise SnapshotRefused("nor any of it")

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
    [((), b"new", 1), ((b"new",), b"old", 2), ((b"new", b"old"), None, 4)],
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
    kept = {path.name for path in tmp_path.glob("checkpoint.aaaaaaaa*")}
    assert kept == {f"checkpoint.aaaaaaaa{number}" for number in ("", ".2")[: len(refused)]}


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


BEST = BestRound(target="server#1", round=3, output="accuracy", value=0.75)


async def test_the_checkpoint_of_the_best_round_stays_until_a_better_one(tmp_path: Path) -> None:
    node = _Node()
    checkpointer = Checkpointer(tmp_path, SHA, node, [])  # type: ignore[arg-type]
    assert checkpoint.best_round(tmp_path, SHA) is None
    assert await checkpointer.save_best(BEST) == 1
    await checkpointer.save()
    assert checkpoint.best_round(tmp_path, SHA) == BEST
    best = checkpoint.read(checkpoint.best_file(tmp_path))
    assert (best.node, best.best) == (b"1", BEST)
    (newest,) = checkpoint.usable(tmp_path, SHA)
    assert (newest.node, newest.best) == (b"2", None)
    better = replace(BEST, round=9, value=0.875)
    await checkpointer.save_best(better)
    assert checkpoint.best_round(tmp_path, SHA) == better
    assert checkpoint.best_file(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_the_best_round_of_another_version_is_no_bar_and_is_kept(tmp_path: Path) -> None:
    node, newer = _Node(), "b" * 64
    await Checkpointer(tmp_path, SHA, node, []).save_best(BEST)  # type: ignore[arg-type]
    before = checkpoint.best_file(tmp_path).read_bytes()
    assert checkpoint.best_round(tmp_path, newer) is None
    await Checkpointer(tmp_path, newer, node, []).save_best(BEST)  # type: ignore[arg-type]
    assert (tmp_path / "best.checkpoint.aaaaaaaa").read_bytes() == before
    assert checkpoint.best_round(tmp_path, newer) == BEST
    assert checkpoint.best_round(tmp_path, SHA) is None


async def test_the_best_round_under_other_settings_is_kept(tmp_path: Path) -> None:
    slow, fast = replace(BEST, settings="1"), replace(BEST, settings="2", round=4)
    checkpointer = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    await checkpointer.save_best(slow)
    before = checkpoint.best_file(tmp_path).read_bytes()
    await checkpointer.save_best(fast)
    assert (tmp_path / "best.checkpoint.aaaaaaaa").read_bytes() == before
    assert checkpoint.best_round(tmp_path, SHA) == fast


async def test_a_torn_best_checkpoint_is_refused_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    await checkpointer.save_best(BEST)
    path = checkpoint.best_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert checkpoint.best_round(tmp_path, SHA) is None
    assert "checksum" in caplog.records[-1].reason  # type: ignore[attr-defined]
    await checkpointer.save_best(BEST)
    assert checkpoint.best_round(tmp_path, SHA) == BEST


async def test_a_full_disk_leaves_the_best_checkpoint_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    await checkpointer.save_best(BEST)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(paths.os, "fsync", full)
    with pytest.raises(paths.StorageError, match="No space left"):
        await checkpointer.save_best(replace(BEST, value=0.9))
    monkeypatch.undo()
    assert checkpoint.best_round(tmp_path, SHA) == BEST


class _Disk:
    """A disk that writes when it is told to, and knows how many write at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let = threading.Semaphore(0)
        self.asked = trio.Event()
        self.written: list[bytes] = []
        self.at_once = self.most = 0
        token, self.write = trio.lowlevel.current_trio_token(), checkpoint.write
        self._announce = lambda: token.run_sync_soon(self.asked.set)
        monkeypatch.setattr(checkpoint, "write", self)

    def __call__(self, state_dir: Path, saved: Checkpoint, good: object = None) -> object:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self._announce()
        self.let.acquire()
        version = self.write(state_dir, saved)
        self.written.append(saved.node)
        self.at_once -= 1
        return version


async def test_a_round_does_not_wait_for_the_checkpoint_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    disk, node = _Disk(monkeypatch), _Node()
    checkpointer = Checkpointer(tmp_path, SHA, node, [])  # type: ignore[arg-type]
    await nursery.start(checkpointer.run)
    told: list[int] = []
    await checkpointer.save_beside(lambda: told.append(1))
    await disk.asked.wait()
    assert (node.taken, disk.written, told) == (1, [], [])

    second = trio.Event()

    async def save() -> None:
        await checkpointer.save_beside(lambda: told.append(2))
        second.set()

    nursery.start_soon(save)
    await trio.testing.wait_all_tasks_blocked()
    # Not before the first one is on disk: one is in memory, and none is overtaken.
    assert (node.taken, second.is_set()) == (1, False)
    disk.let.release()
    await second.wait()
    disk.let.release(2)
    assert await checkpointer.save_last(())
    assert disk.written == [b"1", b"2", b"3"]
    assert disk.most == 1
    assert told == [1, 2]
    (newest, before) = checkpoint.usable(tmp_path, SHA)
    assert (newest.node, before.node) == (b"3", b"2")


async def test_what_fails_beside_a_round_is_logged_and_bars_no_later_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nursery: trio.Nursery,
) -> None:
    node = _Node()
    checkpointer = Checkpointer(tmp_path, SHA, node, [])  # type: ignore[arg-type]
    await nursery.start(checkpointer.run)

    told: list[int] = []

    def full(*_: object) -> None:
        raise paths.StorageError("disk full")

    def busy(_: int) -> bytes:
        raise ComponentError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write", full)
        await checkpointer.save_beside(lambda: told.append(1))
        patched.setattr(node, "snapshot", busy)
        await checkpointer.save_beside(lambda: told.append(2))
    reasons = [record.reason for record in caplog.records]  # type: ignore[attr-defined]
    assert reasons == ["disk full", "not now"]
    assert told == [1, 2]  # a round that can't be saved is one nevertheless
    assert await checkpointer.save_last(())


async def test_the_one_before_is_read_only_where_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, SHA, _Node(), [])  # type: ignore[arg-type]
    read: list[Path] = []
    genuine = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda path: read.append(path) or genuine(path))
    newest = checkpoint.checkpoint_file(tmp_path)
    _written(tmp_path, b"0")
    read.clear()
    for number, reads in enumerate([1, 1, 1], 1):
        await checkpointer.save_now()
        assert len(read) == reads, number
    newest.write_bytes(newest.read_bytes()[:-1])
    await checkpointer.save_now()
    assert len(read) == 2
    (found, before) = checkpoint.usable(tmp_path, SHA)
    # The torn one did not become the one before.
    assert (found.node, before.node) == (b"4", b"2")
