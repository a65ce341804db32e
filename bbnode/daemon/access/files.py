"""Files of memberships, revocation lists and networks.

Rule: a file holds the line of text that commands print, so that it can be copied unchanged; it is
read with a bound, checked each time, and written whole. A node keeps its files in its state
directory; the owner of a network keeps a directory for each network, apart from any node, with the
key, the newest revocation list, and a line for each statement granted.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bbnode.access import revocation, statement
from bbnode.access.errors import GrantError
from bbnode.access.keys import SigningKey, create_key_file, read_key_file
from bbnode.access.revocation import REVOCATIONS, RevocationList
from bbnode.access.statement import MAX_MEMBERSHIP_BYTES, Membership
from bbnode.access.ticket import LEDGER, Ledger
from bbnode.daemon import paths
from bbnode.daemon.paths import StorageError
from bbnode.ir.caps import MAX_GRANTED, MAX_LISTED_PEERS
from bbnode.ir.errors import DecodeError, DeploymentError, MissingFile
from bbnode.ir.peer import PeerId

# Base64 turns 3 bytes into 4 characters; the rest is for the prefix and the end of the line.
_MEMBERSHIP_LINE_BYTES = MAX_MEMBERSHIP_BYTES * 4 // 3 + 64
_REVOCATIONS_LINE_BYTES = REVOCATIONS.max_bytes * 4 // 3 + 64
_NUMBER_BYTES = 24
# A PeerId in base58 is at most 91 characters.
_PEER_LINE_BYTES = 96

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_PRIVATE_MODE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """The files of a node's private network; an open node has no membership."""

    membership: Membership | None
    revocations: RevocationList | None

    @property
    def network(self) -> PeerId | None:
        """The private network, for `Policy`."""
        return None if self.membership is None else self.membership.own.network

    @property
    def credentials(self) -> bytes:
        """The credentials that the node shows in its hello."""
        return b"" if self.membership is None else self.membership.raw


def load_node(state_dir: Path, peer: PeerId) -> NodeAccess:
    """Return the membership of node `peer` and its revocation list, signatures checked.

    Raises AccessRefused for a file that is damaged or of another peer, and StorageError.
    """
    line = _read(state_dir / "membership", _MEMBERSHIP_LINE_BYTES)
    if line is None:
        return NodeAccess(membership=None, revocations=None)
    raw = statement.membership_from_text(line.decode("utf-8", "replace"))
    network = statement.peek(raw).network
    return NodeAccess(
        membership=statement.open_membership(raw, network, peer),
        revocations=_load_revocations(state_dir / "revocations", network),
    )


def save_membership(state_dir: Path, membership: Membership) -> None:
    """Store a membership of this node, replacing an older one. Raises StorageError.

    A membership of another network also removes the revocation list.
    """
    paths.make_state_dir(state_dir)
    with _locked(state_dir / "access.lock"):
        line = _read(state_dir / "membership", _MEMBERSHIP_LINE_BYTES)
        if line is not None:
            old = statement.peek(statement.membership_from_text(line.decode("utf-8", "replace")))
            if old.network != membership.own.network:
                (state_dir / "revocations").unlink(missing_ok=True)
        _write_line(state_dir / "membership", membership.text)


def save_revocations(state_dir: Path, offered: RevocationList) -> bool:
    """Store a newer list of this node's network; False if it is the stored one.

    Raises RevocationRefused for an older one, and StorageError.
    """
    with _locked(state_dir / "access.lock"):
        kept = _load_revocations(state_dir / "revocations", offered.network)
        if revocation.newer(kept, offered) is None:
            return False
        _write_line(state_dir / "revocations", offered.text)
        return True


def load_blocked(state_dir: Path) -> frozenset[PeerId]:
    """Return the peers that were blocked by hand while the node ran; raises StorageError."""
    path = state_dir / "blocked"
    raw = _read(path, MAX_LISTED_PEERS * _PEER_LINE_BYTES)
    try:
        return frozenset(
            PeerId.parse(line) for line in (raw or b"").decode("utf-8", "replace").splitlines()
        )
    except DecodeError as error:
        raise StorageError(
            f"{path}: a line is not a PeerId ({error}); correct it, or remove it to block nobody"
        ) from error


def save_blocked(state_dir: Path, blocked: Iterable[PeerId]) -> None:
    """Store blocked peers, one per line. Raises StorageError."""
    text = "".join(f"{peer}\n" for peer in sorted(blocked))
    paths.write_atomically(state_dir / "blocked", text.encode("ascii"), mode=_PRIVATE_MODE)


def read_line(path: Path) -> str:
    """Return the line of text in a file that a user named. Raises MissingFile, StorageError."""
    raw = _read(path, _REVOCATIONS_LINE_BYTES)
    if raw is None:
        raise MissingFile(
            f"{path}: no such file; give the line itself, or a file that has it as its only line"
        )
    return raw.decode("utf-8", "replace").strip()


def load_ledger(state_dir: Path) -> Ledger:
    """Return the ledger of redeemed tickets; raises TicketRefused for a damaged file."""
    raw = _read(state_dir / "tickets", LEDGER.max_bytes)
    return Ledger() if raw is None else Ledger.from_bytes(raw)


def save_ledger(state_dir: Path, ledger: Ledger) -> None:
    """Store the ledger; call it before the answer is sent. Raises StorageError."""
    paths.write_atomically(state_dir / "tickets", ledger.to_bytes(), mode=_PRIVATE_MODE)


def networks_dir(*, system: bool) -> Path:
    """Return the folder of owned networks: `$XDG_DATA_HOME/bbnode/networks`, or in /etc/bbnode."""
    return (paths.SYSTEM_CONFIG_DIR if system else paths.data_dir()) / "networks"


class OwnedNetwork:
    """The files of a network's owner."""

    def __init__(self, base: Path, name: str) -> None:
        """Name a network below `base`; raises GrantError for an invalid name."""
        if not _NAME.match(name):
            raise GrantError(
                f"{name!r} is not the name of a network: up to 64 letters, digits, '.', '_', '-'"
            )
        self.name = name
        self.directory = base / name
        self.key_file = self.directory / "owner.key"
        self._members = self.directory / "members"
        self._revocations = self.directory / "revocations"

    def create(self) -> SigningKey:
        """Create and return the owner's key; raises IdentityError if there is one already."""
        key = SigningKey.generate()
        create_key_file(self.key_file, key.seed)
        return key

    def key(self) -> SigningKey:
        """Return the owner's key; raises DeploymentError when there is no such network."""
        if not self.key_file.exists():
            raise DeploymentError(
                f"{self.key_file}: there is no network {self.name!r} here; make it with: bbnode "
                f"network new --name {self.name}"
            )
        return SigningKey.from_seed(read_key_file(self.key_file))

    def revocations(self) -> RevocationList | None:
        """Return the newest list, None before the first."""
        return _load_revocations(self._revocations, self.key().peer_id)

    def save_revocations(self, listed: RevocationList) -> None:
        """Store the next list."""
        _write_line(self._revocations, listed.text)

    def next_release(self, unix_s: float) -> int:
        """Return the number of the next release, above all before; the caller holds the lock.

        Raises StorageError.
        """
        path = self.directory / "releases"
        raw = (_read(path, _NUMBER_BYTES) or b"0").strip()
        if not raw.isdigit():
            raise StorageError(f"{path}: not a number; write the number of the last release to it")
        number = max(int(unix_s), int(raw) + 1)
        _write_line(path, str(number))
        return number

    def granted(self) -> list[Membership]:
        """Return every membership granted with the owner's key, oldest first."""
        raw = _read(self._members, MAX_GRANTED * _MEMBERSHIP_LINE_BYTES)
        network = self.key().peer_id
        memberships = []
        for line in (raw or b"").decode("utf-8", "replace").splitlines():
            data = statement.membership_from_text(line)
            memberships.append(
                statement.open_membership(data, network, statement.peek(data).member)
            )
        return memberships

    def add_granted(self, membership: Membership) -> None:
        """Record a membership; raises GrantError when there are too many, and StorageError."""
        lines = [each.text for each in self.granted()]
        if len(lines) >= MAX_GRANTED:
            raise GrantError(f"{self._members} holds {MAX_GRANTED} statements; make a new network")
        _write_line(self._members, "\n".join([*lines, membership.text]))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the network's files against other commands. Raises StorageError."""
        self.key()
        with _locked(self.directory / "lock"):
            yield


def owned_networks(base: Path) -> list[OwnedNetwork]:
    """Return the networks below a directory, by name."""
    names = sorted(path.parent.name for path in base.glob("*/owner.key"))
    return [OwnedNetwork(base, name) for name in names if _NAME.match(name)]


def _load_revocations(path: Path, network: PeerId) -> RevocationList | None:
    line = _read(path, _REVOCATIONS_LINE_BYTES)
    if line is None:
        return None
    raw = revocation.revocations_from_text(line.decode("utf-8", "replace"))
    return revocation.open_revocations(raw, network)


def _read(path: Path, max_bytes: int) -> bytes | None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise StorageError(f"{path}: larger than the {max_bytes} bytes it can have; remove it")
    return raw


def _write_line(path: Path, text: str) -> None:
    paths.write_atomically(path, f"{text}\n".encode("ascii"), mode=_PRIVATE_MODE)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = paths.open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
