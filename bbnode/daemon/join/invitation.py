"""The argument of `bbnode join`: a ticket, or the address of a peer.

Rule: only the signed content of a ticket is trusted; a plain address just names a peer to ask. The
errors of joining are here, one class each, with a line that says what to do next; a bad ticket is
`TicketRefused` of `bbnode.access`, and the artifact's errors are in `bbnode.daemon.artifacts` and
`artifact_exchange`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multiaddr import Multiaddr

from bbnode.access.ticket import TICKET, Ticket, parse_ticket
from bbnode.daemon.access import files as access_files
from bbnode.ir.address import parse_address, peer_of_address
from bbnode.ir.errors import DecodeError, DeploymentError, EnvironmentFault, PeerError
from bbnode.ir.peer import PeerId

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class NotAnInvitation(DeploymentError):
    """The text is neither a ticket nor the address of a peer."""


class InviterUnreachable(EnvironmentFault):
    """No address of the inviting peer answers."""


class WrongPeer(PeerError):
    """Somebody else answers at the inviting peer's address."""


class InviterRefused(PeerError):
    """The inviting peer does not let this one connect, or talk."""


class InviterLost(EnvironmentFault):
    """The connection with the inviting peer broke, again and again."""


class ViaUnreachable(EnvironmentFault):
    """None of the peers that were to be asked about others lets this one in."""


class NobodyProvides(EnvironmentFault):
    """The inviting peer does not answer, and nobody knows another one with the artifact."""


class ViaNeeded(DeploymentError):
    """A digest alone names no peer: somebody has to be asked who has it."""


class MembershipNeeded(DeploymentError):
    """Only a member can ask in a private network, and this node is none."""


class NothingOffered(PeerError):
    """The peer does not say which artifact it runs."""


class TargetNeeded(DeploymentError):
    """The artifact has several targets, and none was chosen."""


class ComponentsMissing(DeploymentError):
    """The target needs component types that are not installed here."""


class SlotsNotConfigured(DeploymentError):
    """Slots of the target need settings that only this machine's user knows."""


class NotConfirmed(DeploymentError):
    """Nobody agreed to run what was offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A peer to dial, with its ticket if there is one.

    Without a ticket there may be a `digest` of the artifact (64 hex digits), and a private network.
    `via` are the peers to ask if the inviting one does not answer, or does not have the artifact.
    """

    inviter: PeerId
    addresses: tuple[Multiaddr, ...]
    ticket: Ticket | None = None
    digest: str = ""
    private: PeerId | None = None
    via: tuple[Multiaddr, ...] = ()

    @property
    def network(self) -> PeerId | None:
        """The private network that is joined; None for an open one."""
        return self.private if self.ticket is None else self.ticket.network

    @property
    def artifact_sha256(self) -> str:
        """The digest of the artifact; "" if the peer has to name it."""
        return self.digest if self.ticket is None else self.ticket.artifact_sha256.hex()

    @property
    def bootstrap(self) -> tuple[Multiaddr, ...]:
        """The peers that the node dials when it runs."""
        return tuple(dict.fromkeys((*self.addresses, *self.via)))

    @property
    def name(self) -> str:
        """The node's name unless another one is chosen: one for each network, or inviter."""
        return f"join-{str(self.network or self.inviter)[-8:]}"


def read_source(
    text: str,
    *,
    unix_s: float,
    via: Sequence[str] = (),
    network: str | None = None,
) -> Source:
    """Return the source in a ticket, an address, a digest, or in the file `@FILE`.

    `via` are addresses of peers to ask if no other answers, `network` the private network of a
    digest or address. Raises TicketRefused for a ticket that is damaged or has expired,
    NotAnInvitation for any other text, ViaNeeded for a digest alone, and StorageError for the file.
    """
    source = _read(text, unix_s, tuple(_address(each).addresses[0] for each in via))
    if network is None:
        return source
    try:
        private = PeerId.parse(network)
    except DecodeError as error:
        raise NotAnInvitation(f"--network: {error}; it is the id of a private network") from error
    if source.ticket is not None and source.network != private:
        raise NotAnInvitation(f"the ticket is to {source.network}, and --network says {private}")
    return replace(source, private=private)


def _read(text: str, unix_s: float, via: tuple[Multiaddr, ...]) -> Source:
    if text.startswith("@"):
        text = access_files.read_line(Path(text[1:]).expanduser())
    text = text.strip()
    if text.startswith("/"):
        return replace(_address(text), via=via)
    if _SHA256.fullmatch(text):
        if not via:
            raise ViaNeeded(
                "a digest names no peer: say whom to ask for those that have it, with --via and "
                "the address of any peer of its network (it needs routing.dht)"
            )
        asked = peer_of_address(via[0])
        same = tuple(each for each in via if peer_of_address(each) == asked)
        return Source(inviter=asked, addresses=same, digest=text.lower(), via=via)
    if not text.startswith(TICKET.prefix.rstrip("0123456789")):
        raise NotAnInvitation(
            f"{text[:40]!r} is neither a ticket ({TICKET.prefix}:…, from `bbnode invite`) nor an "
            "address like /ip4/192.0.2.1/tcp/4001/p2p/ID, nor the digest of an artifact; a file "
            "with one of them is @FILE"
        )
    ticket = parse_ticket(text)
    ticket.check(unix_s)
    return Source(inviter=ticket.inviter, addresses=ticket.dial_addresses, ticket=ticket, via=via)


def _address(text: str) -> Source:
    try:
        address = parse_address(text)
        peer = peer_of_address(address)
    except DecodeError as error:
        raise NotAnInvitation(f"{error}; write it as /ip4/192.0.2.1/tcp/4001/p2p/ID") from error
    return Source(inviter=peer, addresses=(address,))
