"""Access control of a running node: its policy, created from configuration and files.

Rule: this is the only writer of the `Policy`. A change takes effect on every connection at once
(`on_change`); a change by hand is on disk before it takes effect. All methods are for the trio
thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bbnode.access.conduct import Offence
from bbnode.access.decision import Decision, PeerRates, Rate
from bbnode.access.errors import PolicyError, Refusal, StatementRefused
from bbnode.access.policy import Policy, PolicyAuthorizer
from bbnode.access.revocation import RevocationList
from bbnode.access.ticket import Ledger
from bbnode.daemon.access import files as access_files
from bbnode.daemon.access.files import NodeAccess
from bbnode.daemon.config import AccessSection
from bbnode.ir.errors import DeploymentError
from bbnode.ir.peer import PeerId

logger = logging.getLogger(__name__)


class NotAMember(DeploymentError):
    """This node has no valid membership of its configured network."""


class BlockedByConfig(DeploymentError):
    """A peer cannot be allowed by hand while the configuration blocks it."""


def apply_access(policy: Policy, config: AccessSection, blocked: Iterable[PeerId] = ()) -> None:
    """Set lists and rates of a configuration, with the peers that were blocked by hand.

    Raises PolicyError when a list is too long.
    """
    policy.block_only({*map(PeerId.parse, config.block), *blocked})
    policy.allow_only(map(PeerId.parse, config.allow) if config.allow else None)
    policy.set_limits(
        PeerRates(
            messages=_rate(config.messages_per_s, config.message_burst),
            bytes=_rate(config.bytes_per_s, config.byte_burst),
        )
    )


def _rate(per_second: float | None, burst: float | None) -> Rate | None:
    if not per_second:
        return None
    return Rate(per_second=per_second, burst=per_second if burst is None else burst)


class AccessControl:
    """The policy of one node, and the operations that change it."""

    def __init__(
        self,
        state_dir: Path,
        peer: PeerId,
        config: AccessSection,
        *,
        unix_s: Callable[[], float] = time.time,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Read the files of node `peer`.

        Raises NotAMember, AccessRefused for damaged files, PolicyError and StorageError.
        """
        self._state_dir = state_dir
        self._peer = peer
        self._config = config
        self._unix_s = unix_s
        self._monotonic_ns = monotonic_ns
        access = access_files.load_node(state_dir, peer)
        _check(access, config, peer, unix_s())
        self._access = access
        self._revocations = access.revocations
        self._blocked = access_files.load_blocked(state_dir)
        self.policy = Policy(network=access.network, revocations=access.revocations, inviter=peer)
        self.policy.set_ledger(access_files.load_ledger(state_dir))
        apply_access(self.policy, config, self._blocked)
        # Called after every change, so that the transport checks its connections again.
        self.on_change: Callable[[], None] = lambda: None
        # Called with the new credentials when the membership was renewed.
        self.on_credentials: Callable[[bytes], None] = lambda _credentials: None
        # Called after a newer revocation list, to pass it on to other members.
        self.on_list: Callable[[RevocationList], None] = lambda _list: None

    @property
    def credentials(self) -> bytes:
        """The credentials that this node shows in its hello."""
        return self._access.credentials

    @property
    def network(self) -> PeerId | None:
        """The private network; None for an open node."""
        return self._access.network

    @property
    def authorizer(self) -> PolicyAuthorizer:
        """The policy in the form that the transport asks."""
        return PolicyAuthorizer(self.policy, monotonic_ns=self._monotonic_ns, unix_s=self._unix_s)

    def own_standing(self) -> str:
        """Return why this node's own membership is not valid now, or ""."""
        if self._access.membership is None:
            return ""
        try:
            self._access.membership.check(self._unix_s(), self._revocations)
        except StatementRefused as error:
            return str(error)
        return ""

    def explain(self, peer: PeerId) -> tuple[Decision, ...]:
        """Return each rule's decision on a peer."""
        return self.policy.explain(peer, now_ns=self._monotonic_ns(), unix_s=self._unix_s())

    def offence(self, peer: PeerId, offence: Offence) -> bool:
        """Count an offence of a peer; return True if it was cut off for that just now."""
        is_cut = self.policy.conduct.note(peer, offence, self._monotonic_ns())
        if is_cut:
            self.on_change()
        return is_cut

    def block(self, peer: PeerId) -> None:
        """Deny a peer, also after a restart. Raises PolicyError and StorageError."""
        self._set_blocked(self._blocked | {peer})

    def allow(self, peer: PeerId) -> None:
        """Unblock a peer, and forget its offences. Raises BlockedByConfig and StorageError."""
        if str(peer) in self._config.block:
            raise BlockedByConfig(
                f"{peer} is in access.block of the configuration; take it out there and reload "
                "(SIGHUP)"
            )
        self._set_blocked(self._blocked - {peer})
        self.policy.conduct.pardon(peer)

    def _set_blocked(self, blocked: frozenset[PeerId]) -> None:
        before = self._blocked
        apply_access(self.policy, self._config, blocked)
        try:
            access_files.save_blocked(self._state_dir, blocked)
        except BaseException:
            apply_access(self.policy, self._config, before)
            raise
        self._blocked = blocked
        self.on_change()

    def reload(self, config: AccessSection) -> None:
        """Apply other lists and rates, and the files as they are now.

        Raises PolicyError, AccessRefused and StorageError; then nothing has changed.
        """
        loaded = access_files.load_node(self._state_dir, self._peer)
        try:
            apply_access(self.policy, config, self._blocked)
        except PolicyError:
            apply_access(self.policy, self._config, self._blocked)
            raise
        self._config = config
        self._apply_files(loaded)

    def reload_files(self) -> bool:
        """Load a membership or a revocation list that was put into the state directory.

        A valid membership of the same network is shown on new connections. For any other, this
        returns False and the node keeps its membership until a restart. Raises AccessRefused and
        StorageError.
        """
        loaded = access_files.load_node(self._state_dir, self._peer)
        self._apply_files(loaded)
        return loaded.credentials == self.credentials

    def dates_passed(self) -> None:
        """Check connected peers again, since statements expire without an event."""
        if self.network is not None:
            self.on_change()

    def took(self, revocations: RevocationList) -> None:
        """Apply a newer list from another member, which is stored already."""
        self._apply_files(NodeAccess(membership=self._access.membership, revocations=revocations))

    def redeemed(self, ledger: Ledger) -> None:
        """Apply the ledger after a ticket was used; it is stored already."""
        self.policy.set_ledger(ledger)

    def _apply_files(self, loaded: NodeAccess) -> None:
        before = self._revocations
        if loaded.network == self.network and loaded.revocations is not None:
            self._revocations = loaded.revocations
            self.policy.set_network(self.network, loaded.revocations)
        if loaded.credentials != self.credentials and self._is_renewal(loaded):
            self._access = loaded
            logger.info("membership renewed", extra={"network": str(loaded.network)})
            self.on_credentials(loaded.credentials)
        self.on_change()
        if self._revocations is not None and (
            before is None or before.sequence < self._revocations.sequence
        ):
            self.on_list(self._revocations)

    def _is_renewal(self, loaded: NodeAccess) -> bool:
        """Return True for a membership of the same network that is valid now."""
        if loaded.membership is None or loaded.network != self.network:
            return False
        try:
            loaded.membership.check(self._unix_s(), self._revocations)
        except StatementRefused as error:
            logger.warning("membership not applied", extra={"reason": str(error)})
            return False
        return True


def _check(access: NodeAccess, config: AccessSection, peer: PeerId, unix_s: float) -> None:
    """Raise NotAMember unless the membership is of the configured network, and valid now."""
    if config.network is None:
        return
    wanted = f"access.network is {config.network}"
    how = f"get one (`bbnode network grant {peer}`) and: bbnode network import STATEMENT"
    if access.membership is None:
        raise NotAMember(f"{wanted}, and this node has no membership; {how}")
    if str(access.network) != config.network:
        raise NotAMember(f"{wanted}, and this node's membership is of {access.network}; {how}")
    try:
        access.membership.check(unix_s, access.revocations)
    except StatementRefused as error:
        if error.reason is Refusal.NOT_YET_VALID:
            raise NotAMember(f"{wanted}: {error}") from error
        raise NotAMember(f"{wanted}: {error}; {how}") from error
