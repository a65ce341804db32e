"""The file of rounds: SQLite in the state directory.

Rule: one row per round, with the fields that queries use as columns and the whole round as JSON;
metrics have a table of their own. A target's rounds are numbered from 1. A new `run` begins when
numbering restarts, because the state of the node was removed, and when another program or other
settings run the rounds. A round that is run again after a crash replaces the one of its number. One
process writes, any number read, also while it writes (WAL).

A file that SQLite refuses, or that a later release wrote, is moved aside and a new one created.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bbnode.daemon.paths import StorageError
from bbnode.ir.texts import cut_text

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
# Bytes of one round as JSON; beyond that, its outputs are left out and its texts cut.
MAX_ROUND_BYTES: Final = 64 << 10
# Bounds of a larger round: peers and failures, and each of their texts.
_MAX_PEERS: Final = 64
_MAX_REASON_BYTES: Final = 256
# Readers never block a writer; another writer is a bug, or a backup that locks the file.
BUSY_TIMEOUT_MS: Final = 2000
_SCHEMA: Final = """
CREATE TABLE rounds (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    target TEXT NOT NULL,
    run INTEGER NOT NULL,
    number INTEGER NOT NULL,
    ok INTEGER NOT NULL,
    started_at REAL NOT NULL,
    seconds REAL NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (target, run, number)
);
CREATE TABLE metrics (
    round INTEGER NOT NULL REFERENCES rounds (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (round, name)
) WITHOUT ROWID;
"""


def rounds_file(state_dir: Path) -> Path:
    """Return the file of a node's rounds."""
    return state_dir / "rounds.sqlite"


class UnknownSchema(sqlite3.DatabaseError):
    """The file has another schema than this release writes."""


class RoundStore:
    """The open file of a running node. For one thread at a time."""

    def __init__(self, path: Path, *, keep: int) -> None:
        """Open the file, or create a new one; the newest `keep` rounds stay in it.

        Raises StorageError if it can be neither opened nor created.
        """
        self._keep = keep
        try:
            self._db = _opened(path)
        except sqlite3.DatabaseError as error:
            if _is_of_the_disk(error):
                raise _storage_error(path, error) from error
            aside = _move_aside(path)
            logged = {"path": str(aside), "reason": str(error)}
            logger.warning("the rounds on disk can't be used, and were moved aside", extra=logged)
            try:
                self._db = _opened(path)
            except sqlite3.DatabaseError as again:
                raise _storage_error(path, again) from again
        with contextlib.suppress(OSError):
            path.chmod(0o600)

    def close(self) -> None:
        """Close the file; the write-ahead log is merged into it."""
        self._db.close()

    def run_of(
        self, target: str, done: int, maker: Mapping[str, str], *, anew: bool = False
    ) -> int:
        """Return the run of a target that continues after `done` rounds; with `anew` the next one.

        `maker` has the fields of a round that identify its program and settings.
        """
        row = self._db.execute(
            "SELECT run, content FROM rounds WHERE target = ? ORDER BY run DESC, number DESC",
            (target,),
        ).fetchone()
        if row is None:
            return 1
        last, content = int(row[0]), json.loads(row[1])
        # Earlier releases wrote no settings.
        is_same = all((content.get(name) or value) == value for name, value in maker.items())
        return last if done and is_same and not anew else last + 1

    def add(self, finished: Mapping[str, Any], run: int) -> None:
        """Write one round. Raises sqlite3.Error."""
        with self._db:
            key = (finished["target"], run, finished["round"])
            self._db.execute("DELETE FROM rounds WHERE (target, run, number) = (?, ?, ?)", key)
            cursor = self._db.execute(
                "INSERT INTO rounds (target, run, number, ok, started_at, seconds, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *key,
                    bool(finished["ok"]),
                    finished["started_at"],
                    finished["seconds"],
                    _json(finished),
                ),
            )
            self._db.executemany(
                "INSERT INTO metrics (round, name, value) VALUES (?, ?, ?)",
                # SQLite stores NaN as NULL.
                [(cursor.lastrowid, name, value) for name, value in finished["metrics"].items()],
            )
            self._prune(cursor.lastrowid or 0)

    def _prune(self, newest: int) -> None:
        self._db.execute("DELETE FROM rounds WHERE id <= ?", (newest - self._keep,))

    def series(self, target: str, run: int, metric: str) -> list[tuple[int, bool, float | None]]:
        """Return number, outcome and metric (None: missing) of a run's rounds, oldest first."""
        rows = self._db.execute(
            "SELECT number, ok, metrics.round IS NOT NULL, value FROM rounds "
            "LEFT JOIN metrics ON metrics.round = rounds.id AND metrics.name = ? "
            "WHERE target = ? AND run = ? ORDER BY number",
            (metric, target, run),
        )
        return [
            (n, bool(ok), (math.nan if value is None else value) if there else None)
            for n, ok, there, value in rows
        ]


class FoundRounds(list[dict[str, Any]]):
    """Rounds, oldest first; `left_out` counts older ones that had no room."""

    left_out: int = 0


def read_rounds(
    path: Path, *, last: int | None = None, since: int = 0, max_bytes: int | None = None
) -> FoundRounds:
    """Return the rounds in a file that another process may be writing, oldest first.

    For each target the `last` newest, of those with a number above `since`; together at most
    `max_bytes` of JSON. Empty if there is no file. Raises StorageError for an unreadable one.
    """
    if not path.exists():
        return FoundRounds()
    try:
        with contextlib.closing(_connect(path, read_only=True)) as db:
            _check_schema(db)
            return _selected(db, last, since, math.inf if max_bytes is None else max_bytes)
    except (sqlite3.Error, ValueError) as error:
        raise _storage_error(path, error) from error


def newest(rounds: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Return the `last` newest rounds of each target, from rounds that are oldest first."""
    by_target: dict[str, list[dict[str, Any]]] = {}
    for each in rounds:
        by_target.setdefault(each["target"], []).append(each)
    return [each for ones in by_target.values() for each in ones[-last:]]


def _selected(
    db: sqlite3.Connection, last: int | None, since: int, max_bytes: float
) -> FoundRounds:
    targets = [row[0] for row in db.execute("SELECT DISTINCT target FROM rounds")]
    rounds = FoundRounds()
    for target in sorted(targets):
        left = max_bytes / len(targets)
        rows = db.execute(
            "SELECT run, content FROM rounds WHERE target = ? AND number > ? "
            "ORDER BY run DESC, number DESC LIMIT ?",
            (target, since, -1 if last is None else last),
        )
        newest_first = []
        for run, content in rows:
            left -= len(content)
            if left < 0:
                rounds.left_out += 1
                continue
            newest_first.append({**json.loads(content), "run": run})
        rounds += reversed(newest_first)
    return rounds


def _opened(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    try:
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        is_new = not tables and not db.execute("PRAGMA user_version").fetchone()[0]
        if not is_new:
            _check_schema(db)  # before anything is changed in a file that is not ours
        # WAL if the file system supports it; else the default journal, which is as safe.
        db.execute("PRAGMA journal_mode = WAL").fetchone()
        # A power cut may lose the last rounds; the file stays intact.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        if is_new:
            with db:
                # One transaction: a crash in the middle leaves an empty file. Python's sqlite3
                # begins none for such statements.
                db.execute("BEGIN IMMEDIATE")
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return db
    except BaseException:
        db.close()
        raise


def _check_schema(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise UnknownSchema(f"schema {version}; this bbnode reads {SCHEMA_VERSION}")
    # Check that the tables exist, and that their first pages can be read.
    db.execute("SELECT max(id), max(run) FROM rounds").fetchone()
    db.execute("SELECT max(round) FROM metrics").fetchone()


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    mode = "mode=rwc"
    if read_only:
        # A file that no process has open is read without the files that a writer keeps beside it.
        is_closed = not path.with_name(f"{path.name}-wal").exists()
        mode = "mode=ro&immutable=1" if is_closed else "mode=ro"
    address = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(
        address,
        uri=True,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level="IMMEDIATE",
        check_same_thread=False,
    )


def _is_of_the_disk(error: sqlite3.DatabaseError) -> bool:
    """Return True for an error that another file would not fix: no room, no permission, a lock."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM),
    )


def _move_aside(path: Path) -> Path:
    """Move a file, with its log, to `<name>.broken`, replacing an earlier one."""
    aside = path.with_name(f"{path.name}.broken")
    for end in ("", "-wal", "-shm"):
        try:
            path.with_name(path.name + end).replace(aside.with_name(aside.name + end))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(f"{path}: can't be moved aside: {error.strerror}") from error
    return aside


def _storage_error(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{path}: the rounds can't be read or written: {error}")


def _json(finished: Mapping[str, Any]) -> str:
    """Return a round as ASCII JSON: SQLite refuses half a surrogate pair."""
    text = json.dumps(finished, default=str)
    if len(text) <= MAX_ROUND_BYTES:
        return text
    bare = {**finished, "outputs": {}, "outputs_left_out": True}
    for name in ("peers", "refused", "missing_why", "failures", "skipped"):
        kept = bare.get(name)
        if isinstance(kept, list):
            bare[name] = [cut_text(text, _MAX_REASON_BYTES) for text in kept[:_MAX_PEERS]]
        elif isinstance(kept, dict):
            bare[name] = {
                key: cut_text(item, _MAX_REASON_BYTES) if isinstance(item, str) else item
                for key, item in list(kept.items())[:_MAX_PEERS]
            }
    return json.dumps(bare, default=str)
