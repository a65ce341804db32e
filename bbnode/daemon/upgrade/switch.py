"""The switch of a node to another program: its file beside the old one, then the configuration.

Rule: the artifact is complete on disk before the configuration names it, and the configuration is
replaced atomically: a crash leaves the node with the old program or the new one. The old artifact
stays, and `[upgrade.previous]` names it, so that the switch back works in the same way. Only the
tables `artifact` and `upgrade` of the configuration change.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomli_w

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import Artifact, load_artifact
from bbnode.daemon.config.sources import ConfigError, ResolvedConfig
from bbnode.daemon.upgrade.releases import release_file
from bbnode.ir.errors import DeploymentError

_TABLES: Final = ("artifact", "upgrade")
_ARTIFACT_MODE: Final = 0o644
_SHA256_DIGITS: Final = 8
# A file name that an upgrade chose.
_OURS: Final = re.compile(r"(?P<stem>.+)\.[0-9a-f]{8}")
# The first line of a table, or of one in a list of tables.
_HEADING: Final = re.compile(r"\s*\[\[?\s*(?P<name>[A-Za-z0-9_-]+)")


class NotUpgradable(DeploymentError):
    """A node's program does not come from a file that its configuration names."""


class NothingBefore(DeploymentError):
    """There is no program to go back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An artifact in a configuration; `path` is as in the file."""

    path: str
    sha256: str
    targets: Sequence[str]


def present(resolved: ResolvedConfig) -> Path:
    """Return the file of the node's artifact. Raises NotUpgradable."""
    section = resolved.config.artifact
    named_there = (
        resolved.origins.get("artifact.path") == "file"
        and resolved.origins.get("artifact.targets") == "file"
        and resolved.origins.get("artifact.sha256", "file") == "file"
    )
    if resolved.file is None or section.path is None or not named_there:
        raise NotUpgradable(
            "the program is not one that the configuration's file names (artifact.path): give the "
            "node the new one where it gets it from"
        )
    return resolved.absolute(section.path, "artifact.path")


def not_again(resolved: ResolvedConfig) -> str:
    """Return the digest of the previous program, which is not offered; "" without one."""
    previous = resolved.config.upgrade.previous
    return "" if previous is None else previous.sha256.lower()


def switch(
    resolved: ResolvedConfig, artifact: Artifact, source: Path, targets: Sequence[str],
    release: str = "",
) -> Path:  # fmt: skip
    """Switch a node to that artifact, from its next start on; return the artifact's file.

    Args:
        resolved: the node's configuration.
        artifact: the content of `source`, checked.
        source: its file, for example in the cache.
        targets: the targets that the node plays.
        release: the owner's release, a line of text; "" without one.

    Raises NotUpgradable, ConfigError, StorageError, and as `load_artifact` for the present one.
    """
    now = present(resolved)
    before = load_artifact(now, expected_sha256=resolved.config.artifact.sha256)
    named = _OURS.fullmatch(now.stem)
    stem = named["stem"] if named else now.stem
    file = now.with_name(f"{stem}.{artifact.sha256[:_SHA256_DIGITS]}{now.suffix}")
    try:
        data = source.read_bytes()
    except OSError as error:
        raise paths.StorageError(f"{source}: cannot be read: {error.strerror}") from error
    paths.write_atomically(file, data, mode=_ARTIFACT_MODE)
    load_artifact(file, expected_sha256=artifact.sha256)
    if release:
        line = f"{release}\n".encode("ascii")
        paths.write_atomically(release_file(file), line, mode=_ARTIFACT_MODE)
    section = resolved.config.artifact
    oldest = resolved.config.upgrade.previous
    _name(
        resolved,
        Named(
            path=str(Path(str(section.path)).with_name(file.name)),
            sha256=artifact.sha256,
            targets=targets,
        ),
        Named(path=str(section.path), sha256=before.sha256, targets=section.targets),
    )
    if oldest is not None:
        _drop(resolved.absolute(oldest.path, "upgrade.previous.path"), keep=(now, file))
    return file


def back(resolved: ResolvedConfig) -> Named:
    """Switch a node to the program before the last upgrade, from its next start on; return it.

    A second call returns to the newer one. Raises NothingBefore, NotUpgradable, ConfigError,
    StorageError, and as `load_artifact` if the file is gone or changed.
    """
    now = present(resolved)
    previous = resolved.config.upgrade.previous
    if previous is None:
        raise NothingBefore(f"{resolved.file}: no upgrade was made, so that there is no way back")
    path = resolved.absolute(previous.path, "upgrade.previous.path")
    load_artifact(path, expected_sha256=previous.sha256)
    section = resolved.config.artifact
    sha256 = section.sha256 or load_artifact(now).sha256
    after = Named(path=str(previous.path), sha256=previous.sha256, targets=previous.targets)
    _name(resolved, after, Named(path=str(section.path), sha256=sha256, targets=section.targets))
    return after


def set_auto(resolved: ResolvedConfig, *, auto: bool) -> None:
    """Write `upgrade.auto`. Raises NotUpgradable, ConfigError, StorageError."""
    present(resolved)
    raw = _raw(resolved)
    _write(resolved, raw, {"upgrade": {**raw.get("upgrade", {}), "auto": auto}})


def _name(resolved: ResolvedConfig, now: Named, previous: Named) -> None:
    raw = _raw(resolved)
    artifact = {**raw["artifact"], **_table(now)}
    upgrade = {**raw.get("upgrade", {}), "previous": _table(previous)}
    _write(resolved, raw, {"artifact": artifact, "upgrade": upgrade})


def _table(named: Named) -> dict[str, Any]:
    return {"path": named.path, "sha256": named.sha256, "targets": list(named.targets)}


def _drop(file: Path, keep: Sequence[Path]) -> None:
    """Remove the program before the last two, if an upgrade wrote its file."""
    if file in keep or not _OURS.fullmatch(file.stem):
        return
    for each in (file, release_file(file)):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)


def _raw(resolved: ResolvedConfig) -> dict[str, Any]:
    return tomllib.loads(_text(resolved))


def _text(resolved: ResolvedConfig) -> str:
    file = resolved.file
    assert file is not None  # `present` has checked that
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _write(resolved: ResolvedConfig, raw: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Replace tables of the file; comments outside of them stay."""
    file = resolved.file
    assert file is not None
    wanted = {**raw, **tables}
    text = _without(_text(resolved), tables).rstrip("\n")
    text = f"{text}\n\n{tomli_w.dumps(dict(tables))}".lstrip("\n")
    try:
        is_right = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        # The tables are written in a form that lines cannot separate, so the whole file is written
        # again, without its comments.
        text = tomli_w.dumps(wanted)
    paths.write_atomically(file, text.encode("utf-8"), mode=0o644)


def _without(text: str, tables: Mapping[str, Any]) -> str:
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading is not None:
            inside = heading["name"] in tables
        if not inside:
            kept.append(line)
    return "\n".join(kept)
