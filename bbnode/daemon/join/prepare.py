"""The steps of `bbnode join`, from a ticket or an address to a node that is ready to run.

Rule: `prepare` collects everything and stores only the files that a second try needs (identity,
membership, cache); `Prepared.write` creates the node. The inviting peer is not trusted: the
handshake proves its identity, signatures prove its grants, and the digest proves the artifact.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bbnode.access import statement
from bbnode.access.errors import AccessRefused
from bbnode.access.revocation import open_revocations
from bbnode.access.statement import Membership
from bbnode.daemon import paths
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access import protocol as access_protocol
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.join.artifact import Obtained, obtain
from bbnode.daemon.join.dial import Dialled, dialled
from bbnode.daemon.join.folder import Folder
from bbnode.daemon.join.invitation import (
    InviterLost,
    InviterRefused,
    InviterUnreachable,
    MembershipNeeded,
    NobodyProvides,
    NothingOffered,
    Source,
    WrongPeer,
)
from bbnode.daemon.join.plan import Plan, choose_target, make_plan, with_absolute_paths
from bbnode.daemon.lifecycle import assembly
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.transport.artifact_exchange import ArtifactFetchError, Progress
from bbnode.transport.identity import Identity, load_or_create_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of the command line. `settings` are the `--set` keys of the configuration."""

    source: Source
    folder: Folder
    target: str | None = None
    settings: Mapping[str, str]
    # A statement for this node, as text; stored before anything else.
    statement: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A node that can be created, with its plan."""

    options: JoinOptions
    identity: Identity
    membership: Membership | None
    resolved: ResolvedConfig
    obtained: Obtained
    plan: Plan
    # The address that answered.
    address: str

    def write(self) -> ResolvedConfig:
        """Write the node's files, for `bbnode run`. Raises StorageError, and the errors of
        `Plan.check`.
        """
        self.plan.check()
        self.options.folder.write(self.resolved, self.obtained.file)
        return self.resolved

    def as_json(self) -> dict[str, Any]:
        """Return everything that a user has to know before it runs."""
        artifact = self.obtained.artifact
        member = self.membership
        return {
            "peer": str(self.options.source.inviter),
            "address": self.address,
            "peer_id": str(self.identity.peer_id),
            "network": None if member is None else str(member.own.network),
            "may_play": None if member is None else member.own.classes or "all",
            "member_until_unix_s": None if member is None else member.own.expires_s,
            "artifact_sha256": artifact.sha256,
            "artifact_bytes": artifact.size,
            "fetched": self.obtained.fetched,
            "config_file": str(self.options.folder.config_file),
            **self.plan.as_json(),
        }


async def prepare(
    options: JoinOptions,
    *,
    progress: Progress | None = None,
    unix_s: Callable[[], float] = time.time,
) -> Prepared:
    """Dial, fetch, plan, become a member. Nothing runs yet.

    A ticket is redeemed last, and only for a plan that can run (`Plan.check`), so that a join that
    stops on a missing setting leaves it as it was.

    Raises the errors of `join.errors`, TicketRefused, ArtifactFetchError, ArtifactNotStored,
    InvalidArtifact, ConfigError, StateDirInUse and StorageError.
    """
    source, state_dir = options.source, options.folder.state_dir
    paths.make_state_dir(state_dir)
    with paths.lock_state_dir(state_dir):
        identity = load_or_create_identity(paths.identity_file(state_dir))
        if options.statement:
            _keep(state_dir, identity, options.statement, unix_s())
        membership = await _membership(options, identity, unix_s)
        ticket = source.ticket
        is_guest = membership is None and ticket is not None and ticket.network is not None
        try:
            address, obtained = await _fetch(options, identity, membership, progress)
        except (*_NOT_THERE, InviterLost) as error:
            if is_guest and isinstance(error, ArtifactFetchError | InviterLost):
                # A guest may stay for half a minute, which is little for a large artifact.
                membership = await _redeem(options, identity, unix_s)
                is_guest = False
                address, obtained = await _fetch(options, identity, membership, progress)
            elif is_guest or not source.via:
                raise
            else:
                options, address, obtained = await _fetch_elsewhere(
                    options, identity, membership, progress
                )
                source = options.source
        wanted = options.target or (None if ticket is None else ticket.target)
        resolved = options.folder.configure(
            source,
            sha256=obtained.artifact.sha256,
            target=choose_target(obtained.artifact, wanted),
            settings=options.settings,
        )
        assembly.import_components(resolved)
        plan = make_plan(obtained.artifact, resolved.config)
        if is_guest and plan.can_run():
            membership = await _redeem(options, identity, unix_s)
    settled = with_absolute_paths(resolved.config, plan, Path.cwd())
    resolved = dataclasses.replace(resolved, config=settled)
    return Prepared(
        options=options,
        identity=identity,
        membership=membership,
        resolved=resolved,
        obtained=obtained,
        plan=plan,
        address=address,
    )


async def _fetch(
    options: JoinOptions,
    identity: Identity,
    membership: Membership | None,
    progress: Progress | None,
) -> tuple[str, Obtained]:
    """Return the address that answered, and the artifact."""
    source = options.source
    credentials = b"" if membership is None else membership.raw
    async with dialled(identity, source, _shown(source, credentials)) as connection:
        obtained = await obtain(
            connection,
            source.inviter,
            _offered(source, connection),
            own=identity.peer_id,
            state_dir=options.folder.state_dir,
            progress=progress,
        )
        return connection.address, obtained


# The inviting peer is gone, or does not have the artifact.
_NOT_THERE = (InviterUnreachable, WrongPeer, ArtifactFetchError)


async def _fetch_elsewhere(
    options: JoinOptions,
    identity: Identity,
    membership: Membership | None,
    progress: Progress | None,
) -> tuple[JoinOptions, str, Obtained]:
    """Fetch from the first peer that has the artifact, of those that other peers name.

    Returns the options with that peer instead of the inviting one.
    """
    from bbnode.daemon.join.search import other_sources

    source = options.source
    credentials = b"" if membership is None else membership.raw
    why: BbnodeError | None = None
    for other in await other_sources(identity, source, source.artifact_sha256, credentials):
        there = dataclasses.replace(options, source=other)
        try:
            return there, *await _fetch(there, identity, membership, progress)
        except (*_NOT_THERE, InviterRefused, InviterLost) as error:
            why = error
    raise NobodyProvides(f"nobody who was found gives the artifact: {why}") from why


def _shown(source: Source, membership: bytes) -> bytes:
    """Return the credentials to show: the membership, or a ticket to an open network."""
    if membership or source.ticket is None:
        return membership
    return source.ticket.raw


def _offered(source: Source, connection: Dialled) -> str:
    """Return the digest of the artifact: the ticket's, else that in the peer's hello."""
    if source.artifact_sha256:
        return source.artifact_sha256
    digest = connection.hello.artifact_sha256
    if not digest:
        raise NothingOffered(
            f"{source.inviter} says of no artifact that it runs it: it may be a relay or another "
            "node that joins; dial one that runs a program"
        )
    return digest


# -- membership ----------------------------------------------------------------------------


async def _membership(
    options: JoinOptions, identity: Identity, unix_s: Callable[[], float]
) -> Membership | None:
    """Return the membership of this node that is stored, or that the ticket carries."""
    source, state_dir = options.source, options.folder.state_dir
    ticket = source.ticket
    kept = access_files.load_node(state_dir, identity.peer_id)
    if ticket is None:
        if source.private is not None and (
            kept.membership is None or kept.network != source.private
        ):
            raise MembershipNeeded(
                f"this node, {identity.peer_id}, is no member of {source.private}: ask its owner "
                f"for `bbnode network grant {identity.peer_id}`, and give what that prints with "
                "--membership"
            )
        return kept.membership  # already a member
    network = ticket.network
    if network is None:
        return None
    if kept.network == network and kept.membership is not None:
        try:
            kept.membership.check(unix_s(), kept.revocations)
            async with dialled(identity, source, kept.membership.raw):
                return kept.membership
        except (InviterUnreachable, WrongPeer):
            if not source.via:
                raise
            # Other peers will decide if it is still valid.
            return kept.membership
        except (AccessRefused, InviterRefused):
            # It has expired or was revoked: the ticket may bring a new one.
            pass
    if ticket.invitation is None:
        return _take(state_dir, identity, network, ticket.membership, unix_s())
    return None


async def _redeem(
    options: JoinOptions, identity: Identity, unix_s: Callable[[], float]
) -> Membership:
    """Redeem the ticket; return the new membership, which is stored."""
    source, state_dir = options.source, options.folder.state_dir
    ticket = source.ticket
    if ticket is None or ticket.network is None:
        raise AssertionError("only a ticket to a private network is redeemed")
    async with dialled(identity, source, ticket.raw) as connection:
        member = await access_protocol.redeem(connection.backend, source.inviter, ticket.raw)
    membership = _take(state_dir, identity, ticket.network, member.membership, unix_s())
    if member.revocations:
        listed = open_revocations(member.revocations, ticket.network)
        before = access_files.load_node(state_dir, identity.peer_id).revocations
        if before is None or before.sequence < listed.sequence:
            access_files.save_revocations(state_dir, listed)
    return membership


def _keep(state_dir: Path, identity: Identity, text: str, unix_s: float) -> None:
    """Store a statement of the user; raises StatementRefused, StorageError."""
    raw = statement.membership_from_text(text.strip())
    _take(state_dir, identity, statement.peek(raw).network, raw, unix_s)


def _take(
    state_dir: Path, identity: Identity, network: PeerId, raw: bytes, unix_s: float
) -> Membership:
    """Store a membership after checking that it is this node's, of that network, and valid."""
    membership = statement.open_membership(raw, network, identity.peer_id)
    membership.check(unix_s)
    access_files.save_membership(state_dir, membership)
    return membership
