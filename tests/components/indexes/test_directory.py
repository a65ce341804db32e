"""Collections in directories: crashes at any moment, damage, locks, memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bbnode.components import (
    Collection,
    IndexDamaged,
    IndexInUse,
    IndexMismatch,
    IndexUnavailable,
)
from bbnode.components.indexes import directory
from bbnode.ir.values import Metadata
from tests.patience import PATIENCE_S


def filled(path: Path, batches: int = 3) -> None:
    with Collection.open(path, dimensions=4) as held:
        for batch in range(batches):
            vectors = np.random.default_rng(batch).standard_normal((10, 4))
            held.add(vectors, [{"n": 10 * batch + i, "t": "x" * i} for i in range(10)])
        held.remove([3, 14])


def test_a_collection_on_disk_is_the_same_as_one_in_memory(tmp_path) -> None:
    rng = np.random.default_rng(0)
    disk, memory = Collection.open(tmp_path / "made" / "here"), Collection()
    for step in range(24):
        vectors = rng.standard_normal((rng.integers(1, 200), 5)).astype(np.float32)
        metadata = [{"n": i} for i in range(len(vectors))]
        ids = None if step % 3 else rng.choice(5000, len(vectors), replace=False)
        assert (disk.add(vectors, metadata, ids) == memory.add(vectors, metadata, ids)).all()
        gone = rng.choice(3000, 200)
        assert disk.remove(gone) == memory.remove(gone)
        if step % 4 == 3:
            disk.close()
            disk = Collection.open(tmp_path / "made" / "here", create=False)
        query = rng.standard_normal((3, 5))
        assert disk.search(query, 7) == memory.search(query, 7)
        assert disk.search(query, 7, {"n <": 50}) == memory.search(query, 7, {"n <": 50})
    assert disk.stats()["dead_rows"] < len(disk)
    disk.verify()
    disk.compact()
    assert disk.search(query, 7) == memory.search(query, 7)
    disk.close()
    disk.close()
    for use in (lambda: disk.add(np.ones(5)), lambda: disk.search(np.ones(5))):
        with pytest.raises(IndexUnavailable, match=r"closed|opened|read"):
            use()


CHILD = """
import sys, numpy as np
from bbnode.components.indexes.collection import Collection
held = Collection.open(sys.argv[1], dimensions=8)
step = int(sys.argv[2])
while True:
    # Item i of step s: its vector and metadata say so. Each step replaces, adds, and removes.
    ids = np.arange(step * 20, step * 20 + 40)
    vectors = np.repeat(ids[:, None].astype(np.float32), 8, 1) + step
    held.add(vectors, [{"s": step, "i": int(i), "t": "y" * (int(i) % 50)} for i in ids], ids)
    print("added", step, flush=True)
    held.remove(np.arange(step * 20 - 400, step * 20 - 380))
    print("removed", step, flush=True)
    if step % 7 == 0:
        held.compact()
    step += 1
"""


def test_whatever_kills_the_process_what_was_done_is_there_and_nothing_else(tmp_path) -> None:
    """Kill -9 at random points, again and again over one directory."""
    path, drawn, step = tmp_path / "index", random.Random(4), 20
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(step)], stdout=subprocess.PIPE, text=True
        )
        try:
            lines = [child.stdout.readline().split() for _ in range(drawn.randrange(1, 60))]
            for _ in range(drawn.randrange(20_000)):  # somewhere within a change
                pass
            child.send_signal(signal.SIGKILL)
            lines += [line.split() for line in child.stdout]
        finally:
            child.kill()
            child.stdout.close()
            child.wait(PATIENCE_S)
        lines = [line for line in lines if len(line) == 2]
        with Collection.open(path) as held:
            held.verify()
            metadata = held.metadata_of(held.ids)
            vectors = held.vectors_of(held.ids)
            for number, told, vector in zip(held.ids.tolist(), metadata, vectors, strict=True):
                # No item is torn, and none is of a step that was not begun.
                assert told["i"] == number
                assert vector.tolist() == [number + told["s"]] * 8
            last = max(int(s) for what, s in lines if what == "added")
            newest = set(range(last * 20, last * 20 + 40))
            assert newest <= set(held.ids.tolist())
            steps = {m["s"] for m in metadata}
            assert max(steps) in (last, last + 1)
            begun = max(steps)
            # A step is there as a whole.
            assert sum(m["s"] == begun for m in metadata) == 40
            removed = [int(s) for what, s in lines if what == "removed"]
            if removed:
                gone = np.arange(max(removed) * 20 - 400, max(removed) * 20 - 380)
                assert not held.has(gone[gone >= 0]).any()
            step = begun + 1
        assert {p.name for p in path.iterdir()} <= {
            "index.json", "lock", *(p.name for p in path.glob("items.*")),
            *(p.name for p in path.glob("vectors.*")),
        }  # fmt: skip
        assert len(list(path.glob("items.*"))) == 1


def test_a_log_cut_off_anywhere_is_a_change_that_never_was(tmp_path) -> None:
    filled(tmp_path / "whole", batches=2)
    log = (tmp_path / "whole" / "items.0").read_bytes()
    states = set()
    for length in [*range(0, len(log), 17), len(log)]:
        path = tmp_path / "cut"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", path)
        # A power cut leaves zeros, too.
        (path / "items.0").write_bytes(log[:length] + bytes(length % 3 * 100))
        with Collection.open(path) as held:
            states.add(tuple(held.ids.tolist()))
            held.add(np.ones((1, 4)))
        with Collection.open(path) as held:
            assert len(held) == len(tuple(held.ids))
            held.verify()
    ten, twenty = tuple(range(10)), tuple(range(20))
    assert states == {(), ten, twenty, tuple(i for i in twenty if i not in (3, 14))}


def test_a_flipped_bit_is_told_as_damage(tmp_path) -> None:
    filled(tmp_path / "whole")
    log = bytearray((tmp_path / "whole" / "items.0").read_bytes())
    for at in range(0, len(log), 7):
        path = tmp_path / "bad"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", path)
        damaged = bytearray(log)
        damaged[at] ^= 0x10
        (path / "items.0").write_bytes(damaged)
        if at >= len(log) - 4:
            continue  # the last four bytes: they look like a record that never was whole
        with pytest.raises(IndexDamaged, match="restore it from a backup"):
            Collection.open(path)
    vectors = bytearray((tmp_path / "whole" / "vectors.0").read_bytes())
    vectors[100] ^= 1
    (tmp_path / "whole" / "vectors.0").write_bytes(vectors)
    with Collection.open(tmp_path / "whole") as held, pytest.raises(IndexDamaged, match="vectors"):
        held.verify()


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda p: (p / "items.0").unlink(), IndexDamaged, "items.0 is missing"),
        (lambda p: (p / "vectors.0").unlink(), IndexDamaged, "vectors.0 is missing"),
        (lambda p: os.truncate(p / "vectors.0", 100), IndexDamaged, "100 bytes, and 30 rows"),
        (lambda p: (p / "index.json").unlink(), IndexDamaged, "index.json is missing"),
        (lambda p: (p / "index.json").write_text("{"), IndexDamaged, "can't be read"),
        (lambda p: (p / "index.json").write_text("[]"), IndexDamaged, "no JSON object"),
        (lambda p: (p / "index.json").write_text("{}"), IndexDamaged, "says what none can"),
        (lambda p: (p / "index.json").write_text("[" * 60_000), IndexDamaged, "can't be read"),
        (lambda p: say(p, format=2), IndexMismatch, "format 2, of a newer bbnode"),
        (lambda p: say(p, generation=7), IndexDamaged, "vectors.7 is missing"),
        (lambda p: say(p, metric="x"), IndexDamaged, "says what none can"),
    ],
)
def test_files_that_are_not_as_they_were_are_told_with_what_to_do(
    tmp_path, change, error, told
) -> None:
    filled(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=told):
        Collection.open(tmp_path)
    with pytest.raises(error, match=told):  # and the lock is free
        Collection.open(tmp_path)


def say(path: Path, **told) -> None:
    manifest = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**manifest, **told}))


def test_a_file_that_is_cut_off_while_it_is_mapped_does_not_kill_the_process(tmp_path) -> None:
    filled(tmp_path)
    held = Collection.open(tmp_path)
    os.truncate(tmp_path / "vectors.0", 64)
    with pytest.raises(IndexDamaged, match="cut off while it was open"):
        held.search(np.ones(4))


def test_a_directory_is_open_once(tmp_path) -> None:
    held = Collection.open(tmp_path, dimensions=2)
    with pytest.raises(IndexInUse, match=f"is open in 'process {os.getpid()}"):
        Collection.open(tmp_path)
    other = subprocess.run(
        [
            sys.executable, "-c",
            "import sys; from bbnode.components import Collection; Collection.open(sys.argv[1])",
            str(tmp_path),
        ],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "IndexInUse" in other.stderr
    assert str(os.getpid()) in other.stderr
    held.close()
    Collection.open(tmp_path).close()


def test_what_is_asked_for_has_to_be_what_is_there(tmp_path) -> None:
    filled(tmp_path / "index")
    with pytest.raises(IndexMismatch, match="has the metric l2, not 'cosine'"):
        Collection.open(tmp_path / "index", metric="cosine")
    with pytest.raises(IndexMismatch, match="vectors of 4 numbers, not 5"):
        Collection.open(tmp_path / "index", dimensions=5)
    with pytest.raises(IndexMismatch, match="no index of the kind 'x'"):
        Collection.open(tmp_path / "index", kind="x")
    with pytest.raises(IndexMismatch, match="there is no index in"):
        Collection.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(IndexMismatch, match=r"no index: it holds 'thesis.tex'"):
        Collection.open(tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(IndexUnavailable, match="can't be opened"):
        Collection.open(tmp_path / "file")


def test_numbers_go_on_after_everything_was_removed(tmp_path) -> None:
    with Collection.open(tmp_path) as held:
        held.add(np.ones((300, 2)))
        held.remove(np.arange(300))
        assert held.stats()["dead_rows"] == 0
    with Collection.open(tmp_path) as held:
        assert held.add(np.ones((1, 2))).tolist() == [300]


@pytest.mark.parametrize("failing", ["_write_all", "_write_record"])
def test_a_full_disk_refuses_a_change_and_keeps_what_was(tmp_path, monkeypatch, failing) -> None:
    held = Collection.open(tmp_path)
    held.add(np.ones((5, 3)), [{"a": i} for i in range(5)])

    def full(*arguments) -> None:
        if failing == "_write_record":
            os.pwrite(held._store._log_fd, b"half a record", held._store._end)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        owner = directory if failing == "_write_all" else directory.DirectoryStore
        patched.setattr(owner, failing, full)
        with pytest.raises(IndexUnavailable, match="can't be written: No space left"):
            held.add(np.ones((5, 3)))
    assert len(held) == 5
    assert held.add(np.zeros((1, 3)), [{"a": 9}]).tolist() == [5]
    held.close()
    with Collection.open(tmp_path) as again:
        assert again.search(np.zeros(3), 1).hits()[0].metadata == Metadata(a=9)
        assert len(again) == 6


def test_vectors_are_mapped_and_take_no_memory_of_the_process(tmp_path) -> None:
    """64 MiB of vectors: the memory that only this process has does not grow by them."""
    rows = 1 << 17
    with Collection.open(tmp_path, dimensions=128) as held:
        part = np.random.default_rng(0).standard_normal((4096, 128)).astype(np.float32)
        for _ in range(rows // 4096):
            held.add(part)
    code = """
import sys
import numpy as np
from bbnode.components import Collection
def own():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) >> 10
import bbnode.components.indexes.collection
np.ones((64, 64)) @ np.ones((64, 64))
before = own()
held = Collection.open(sys.argv[1])
opened = own()
held.search(np.ones(128), 5)
print(opened - before, own() - before, len(held))
"""
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    opened, searched, items = map(int, made.stdout.split())
    assert items == rows
    assert opened <= 12
    assert searched <= 24
