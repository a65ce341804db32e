"""The folder of a joined node: `node.toml`, `artifact.onnx` and `state`, as for `bbnode run`.

Rule: a join writes an ordinary node, without a trace of the join. The user's settings in an
existing node.toml are kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bbnode.daemon import paths
from bbnode.daemon.config import sources
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.join.invitation import Source

CONFIG_NAME = "node.toml"
ARTIFACT_NAME = "artifact.onnx"
STATE_NAME = "state"
_COMMENT = (
    "Written by `bbnode join`; start the node again with `bbnode run -c` and this file.\n"
    "Only what differs from the defaults is listed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files of a joined node."""

    name: str
    # The argument of `bbnode run -c`; the artifact is in the same directory.
    config_file: Path
    artifact_file: Path
    state_dir: Path

    @property
    def directory(self) -> Path:
        """The folder of the configuration and the artifact."""
        return self.config_file.parent

    def configure(
        self,
        source: Source,
        *,
        sha256: str,
        target: str,
        settings: Mapping[str, str],
        earlier: Path | None = None,
    ) -> ResolvedConfig:
        """Return the configuration of the node; nothing is written. `settings` (`--set`) win.

        Settings in the existing file are kept; without one, those of `earlier`. Raises ConfigError.
        """
        network = source.network
        flags: dict[str, Any] = {
            "node.name": self.name,
            "node.state_dir": self._from_here(self.state_dir),
            "artifact.path": self._from_here(self.artifact_file),
            "artifact.sha256": sha256,
            "artifact.targets": [target],
            # A joining node dials, and may well be behind a NAT.
            "network.listen": [],
            "network.bootstrap": [str(address) for address in source.bootstrap],
            "access.network": None if network is None else str(network),
            # A peer that was found by asking may be gone by then, and another one have its address.
            **({"routing.dht": "client"} if source.via else {}),
            **settings,
        }
        file = self.config_file if self.config_file.exists() else earlier
        resolved = sources.resolve(file, environ={}, flags=flags)
        # Other settings than the user's count as those of the file, so that paths are relative to
        # it.
        origins = {
            key: origin if key in settings else "file" for key, origin in resolved.origins.items()
        }
        return ResolvedConfig(
            config=resolved.config, file=self.config_file.absolute(), origins=origins
        )

    def write(self, resolved: ResolvedConfig, artifact: Path) -> None:
        """Write all files, the configuration last, so that it never names a missing one.

        Raises StorageError.
        """
        paths.make_state_dir(self.directory)
        self._place(artifact)
        self.write_config(resolved)

    def write_config(self, resolved: ResolvedConfig) -> None:
        """Write only the configuration. Raises StorageError."""
        sources.write(self.config_file, resolved.config, comment=_COMMENT)

    def _from_here(self, path: Path) -> str:
        """Return a path for the configuration: relative if it is below its directory."""
        below = path.is_relative_to(self.directory)
        return str(path.relative_to(self.directory) if below else path)

    def _place(self, artifact: Path) -> None:
        """Put the artifact under its name here, since the cache may be emptied at any time."""
        file = self.artifact_file
        draft = file.with_name(f".{file.name}.new")
        try:
            draft.unlink(missing_ok=True)
            try:
                os.link(artifact, draft)
            except OSError:
                # Another file system, or one without links.
                shutil.copyfile(artifact, draft)
            draft.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise paths.StorageError(
                f"{file}: {error.strerror}; free space, or choose another folder with --dir"
            ) from error


def folder(source: Source, *, name: str | None, directory: Path | None) -> Folder:
    """Return the folder for a source: `directory`, or one below the XDG state directory."""
    called = name or source.name
    if directory is None:
        directory = paths.default_state_dir(called)
    where = directory.expanduser().absolute()
    return Folder(
        name=called,
        config_file=where / CONFIG_NAME,
        artifact_file=where / ARTIFACT_NAME,
        state_dir=where / STATE_NAME,
    )
