"""Reloading a configuration: keys that change while the node runs, and those that need a restart.

Rule: `RELOADABLE` is the one list; a key that is not in it is reported, never half applied. An
invalid file changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.daemon.config.sources import ResolvedConfig, shown

# Keys, and tables by their prefix, that take effect on SIGHUP.
RELOADABLE = (
    "node.log_level",
    "node.log_format",
    "node.snapshot_every_s",
    "node.stop_grace_s",
    "network.bootstrap",
    "discovery.min_peers",
    "upgrade.auto",
    # Without access.network, since the credentials on all connections depend on it.
    "access.allow",
    "access.block",
    "access.messages_per_s",
    "access.message_burst",
    "access.bytes_per_s",
    "access.byte_burst",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The result of a reload: keys that take effect, and keys that need a restart."""

    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]

    def __bool__(self) -> bool:
        """Return True if anything changed."""
        return bool(self.applied or self.needs_restart)

    def touch(self, prefix: str) -> bool:
        """Return True if a key that takes effect begins with `prefix`."""
        return any(key.startswith(prefix) for key in self.applied)


def compare(old: ResolvedConfig, new: ResolvedConfig) -> Changes:
    """Return the keys in which two configurations differ."""
    before, after = _values(old), _values(new)
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    return Changes(
        applied=tuple(key for key in changed if _reloads(key)),
        needs_restart=tuple(key for key in changed if not _reloads(key)),
    )


def _values(resolved: ResolvedConfig) -> Mapping[str, Any]:
    return {key: value for key, value, _ in shown(resolved)}


def _reloads(key: str) -> bool:
    return any(
        key.startswith(name) if name.endswith(".") else key.partition("[")[0] == name
        for name in RELOADABLE
    )
