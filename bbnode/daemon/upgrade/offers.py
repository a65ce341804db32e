"""Programs that connected peers offer as replacements of a node's own, and taking one of them.

Rule: an offer is the digest in the hello of a peer that this node trusts to bring one: a bootstrap
peer (for a joined node, the inviting peer), the owner of the private network, or a member that may
invite. It causes a line in the log. Nothing is fetched before the user asks for it, or, with
`upgrade.auto`, before the network's owner has signed it; and nothing changes before it is complete
and checked, and everything that it needs is installed. The node restarts between two rounds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from bbnode.access.errors import AccessRefused, Refusal
from bbnode.access.release import RELEASE, Release
from bbnode.access.statement import open_membership
from bbnode.daemon.artifacts.artifact import Artifact
from bbnode.daemon.config.sources import ResolvedConfig
from bbnode.daemon.control.host import NotOffered, RestartRefused, no_offers, no_restart
from bbnode.daemon.join.artifact import Obtained, obtain
from bbnode.daemon.join.dial import Dialled
from bbnode.daemon.network.versions import version_of
from bbnode.daemon.upgrade import releases
from bbnode.daemon.upgrade.candidate import make_candidate, most_bytes
from bbnode.daemon.upgrade.switch import NotUpgradable, not_again, present, switch
from bbnode.ir.errors import BbnodeError, EnvironmentFault
from bbnode.ir.peer import PeerId
from bbnode.transport.base import (
    ConnectionClosed,
    ConnectionOpened,
    Hello,
    Transport,
    TransportEvent,
)

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")

# The longest wait of a restart for a moment without executions, and the period of its checks.
QUIET_S: Final = 600.0
LOOK_EVERY_S: Final = 0.2
# Offers that were checked and are remembered.
_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A program that a connected peer runs and this one does not; `sha256` in lower case."""

    peer: PeerId
    sha256: str

    def as_json(self) -> dict[str, str]:
        """Return it for the status."""
        return {
            "peer": str(self.peer),
            "version": version_of(self.sha256),
            "artifact_sha256": self.sha256,
        }


@dataclass(slots=True)
class _Fetch:
    """A requested fetch."""

    have: int = 0
    size: int = 0
    release: str = ""
    failure: str = ""
    ended: bool = False

    def note(self, have: int, size: int) -> None:
        self.have, self.size = have, size


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradedNode:
    """The parts of a daemon that upgrades need."""

    peer: PeerId
    artifact: Artifact
    network: PeerId | None
    backend: Transport
    resolved: Callable[[], ResolvedConfig]
    is_bootstrap: Callable[[PeerId], bool]
    # True if a restart now interrupts nothing.
    is_quiet: Callable[[], bool]
    publish: Callable[[Mapping[str, Any]], None]
    # Stops cleanly and starts again; None if the process is not the node's own.
    restart: Callable[[], None] | None


class Upgrades:
    """The offers of one node's peers."""

    def __init__(self, node: UpgradedNode) -> None:
        """Watch the peers of a node; nothing is asked or fetched before `run`."""
        self._node = node
        self._offers: dict[PeerId, Offer] = {}
        self._told: dict[str, None] = {}
        self._refused: dict[tuple[PeerId, str], None] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._restart_wanted = trio.Event()
        self._auto_wanted = trio.Event()
        self._nursery: trio.Nursery | None = None
        try:
            present(node.resolved())
        except NotUpgradable:
            self._is_able = False
        else:
            self._is_able = True

    # -- what is offered -------------------------------------------------------------------

    def heard(self, event: TransportEvent) -> None:
        """Handle an event of the transport."""
        match event:
            case ConnectionOpened(peer=peer, hello=hello):
                self._offers.pop(peer, None)
                digest = hello.artifact_sha256.lower()
                is_news = self._is_able and digest and self._is_news(digest)
                if is_news and self._may_offer(peer, hello):
                    self._offered(Offer(peer=peer, sha256=digest))
            case ConnectionClosed(peer=peer):
                self._offers.pop(peer, None)

    def offers(self) -> Iterator[Offer]:
        """Yield the current offers of connected peers."""
        return (each for each in self._offers.values() if self._is_news(each.sha256))

    def as_json(self) -> list[dict[str, str]]:
        """Return the offers for the status."""
        return [each.as_json() for each in self.offers()]

    def _is_news(self, sha256: str) -> bool:
        return sha256 not in (self._node.artifact.sha256, not_again(self._node.resolved()))

    def _may_offer(self, peer: PeerId, hello: Hello) -> bool:
        node = self._node
        if node.is_bootstrap(peer) or peer == node.network:
            return True
        if node.network is None:
            return False
        try:
            return open_membership(hello.credentials, node.network, peer).own.may_grant
        except AccessRefused:
            return False

    def _offered(self, offer: Offer) -> None:
        self._offers[offer.peer] = offer
        if offer.sha256 not in self._told:
            _remember(self._told, offer.sha256)
            logged = {"peer": str(offer.peer), "program": version_of(offer.sha256)}
            logger.info("an upgrade is offered; see `bbnode upgrade`", extra=logged)
            self._node.publish({"type": "upgrade_offered", **offer.as_json()})
        self._auto_wanted.set()

    # -- fetching --------------------------------------------------------------------------

    def fetch(self, sha256: str, max_bytes: int | None) -> dict[str, Any]:
        """Start to fetch an offered artifact to the cache, or return the progress.

        Raises NotOffered.
        """
        known = self._fetches.get(sha256)
        if known is None or known.failure:
            offer = next((each for each in self.offers() if each.sha256 == sha256), None)
            if known is not None and known.failure:
                del self._fetches[sha256]  # the next request tries again
            elif offer is None or self._nursery is None:
                return no_offers(sha256, max_bytes)
            else:
                self._fetches.clear()  # only one is remembered
                known = self._fetches[sha256] = _Fetch()
                self._nursery.start_soon(self._fetch, known, offer, max_bytes)
        return {
            "have": known.have,
            "size": known.size,
            "done": known.ended,
            "failure": known.failure,
            "release": known.release,
        }  # fmt: skip

    async def _fetch(self, fetch: _Fetch, offer: Offer, max_bytes: int | None) -> None:
        try:
            await self._obtained(offer, max_bytes, fetch.note)
            network = self._node.network
            if network is not None:
                # Kept beside it, to show it to others, and as the number that later releases must
                # exceed.
                with contextlib.suppress(releases.NoRelease, AccessRefused):
                    asked = releases.ask(self._node.backend, offer.peer, network, offer.sha256)
                    fetch.release = (await asked).text
        except BbnodeError as error:
            fetch.failure = str(error)
        fetch.ended = True

    async def _obtained(
        self, offer: Offer, max_bytes: int | None, progress: Callable[[int, int], None]
    ) -> Obtained:
        node = self._node
        info = node.backend.peer_info(offer.peer)
        if info is None:
            raise NotOffered(f"{offer.peer} is not connected any more")
        return await obtain(
            Dialled(backend=node.backend, hello=info.hello, address=str(info.address)),
            offer.peer,
            offer.sha256,
            own=node.peer,
            state_dir=node.resolved().state_dir,
            progress=progress,
            max_bytes=most_bytes(node.artifact.size) if max_bytes is None else max_bytes,
        )

    # -- taking what the owner signed --------------------------------------------------------

    async def run(self) -> None:
        """Fetch requested programs, take those that the owner signed, and restart; for ever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._restart_when_quiet)
            while True:
                await self._auto_wanted.wait()
                self._auto_wanted = trio.Event()
                if not self._node.resolved().config.upgrade.auto:
                    continue
                for offer in list(self.offers()):
                    key = (offer.peer, offer.sha256)
                    if key not in self._refused and await self._take(offer):
                        self.restart()
                        return

    def look_again(self) -> None:
        """Check the offers again, since the configuration was reloaded."""
        self._auto_wanted.set()

    async def _take(self, offer: Offer) -> bool:
        """Switch to an offered program if the network's owner signed it; False if not."""
        logged = {"peer": str(offer.peer), "program": version_of(offer.sha256)}
        try:
            release = await self._release(offer)
            obtained = await self._obtained(offer, None, lambda _have, _size: None)
            resolved = self._node.resolved()
            await trio.to_thread.run_sync(_switch, resolved, obtained, release)
        except BbnodeError as error:
            # A failure of this machine or of a connection may not happen the next time.
            if not isinstance(error, EnvironmentFault | NotOffered):
                _remember(self._refused, (offer.peer, offer.sha256))
            logger.warning("upgrade not taken", extra={**logged, "reason": str(error)})
            return False
        logger.info("upgraded to what the owner signed", extra=logged)
        self._node.publish({"type": "upgraded", **offer.as_json()})
        return True

    async def _release(self, offer: Offer) -> Release:
        network = self._node.network
        if network is None or self._node.restart is None:
            raise RestartRefused(
                "upgrade.auto is for nodes of a private network that run as `bbnode run`: take the "
                "upgrade with `bbnode upgrade`"
            )
        release = await releases.ask(self._node.backend, offer.peer, network, offer.sha256)
        newest = await trio.to_thread.run_sync(
            newest_number, self._node.resolved(), network, self._node.artifact.sha256
        )
        if release.number <= newest:
            raise RELEASE.refuse(
                Refusal.STALE, f"number {release.number} is not newer than {newest}, which ran here"
            )
        return release

    # -- restarting ------------------------------------------------------------------------

    def restart(self) -> None:
        """Restart at the next moment without executions. Raises RestartRefused."""
        if self._node.restart is None:
            no_restart()
        self._restart_wanted.set()

    async def _restart_when_quiet(self) -> None:
        await self._restart_wanted.wait()
        with trio.move_on_after(QUIET_S) as scope:
            while True:
                if self._node.is_quiet():
                    break
                await trio.sleep(LOOK_EVERY_S)
        if scope.cancelled_caught:
            logger.warning("no quiet moment came, restarting", extra={"waited_s": QUIET_S})
        logger.info("restarting")
        assert self._node.restart is not None  # `restart` has checked that
        self._node.restart()


def _switch(resolved: ResolvedConfig, obtained: Obtained, release: Release) -> Path:
    candidate = make_candidate(resolved, obtained.artifact, obtained.file)
    candidate.plan.check()
    return switch(resolved, obtained.artifact, obtained.file, candidate.targets, release.text)


def newest_number(resolved: ResolvedConfig, network: PeerId, running: str) -> int:
    """Return the greatest number of the releases that this node runs, or ran before."""
    candidates = [(present(resolved), running)]
    previous = resolved.config.upgrade.previous
    if previous is not None:
        path = resolved.absolute(previous.path, "upgrade.previous.path")
        candidates.append((path, previous.sha256))
    return max(releases.release_number(path, network, sha256) for path, sha256 in candidates)


def _remember(seen: dict[_Key, None], key: _Key) -> None:
    seen[key] = None
    while len(seen) > _REMEMBERED:
        del seen[next(iter(seen))]
