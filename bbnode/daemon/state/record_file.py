"""The record of a node's input on disk.

Rule: one frame per call, passed to the system at once, so that a crash of the process loses none of
them. An existing file is never overwritten or appended to.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from bbnode.daemon.paths import StorageError


class RecordFile:
    """The sink of `bbnode.engine.install(record=…)`; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Create the file, for its owner alone. Raises StorageError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._stream = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        except OSError as error:
            raise StorageError(
                f"{path}: the record can't be made: {error.strerror}; name a file that is not "
                "there yet, in a directory that this user can write"
            ) from error

    def __call__(self, data: bytes) -> None:
        """Write one frame; an OSError ends the record and not the node."""
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]

    def restart(self) -> None:
        """Discard the content, for another node's record. Raises StorageError."""
        try:
            self._stream.seek(0)
            self._stream.truncate()
        except OSError as error:
            raise StorageError(f"the record can't be written: {error.strerror}") from error

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.close()
