"""The invitation that `bbnode join` was given: a ticket, or the address of a peer.

Rule: only the signed content of a ticket is believed; a plain address just names a peer to ask. The
errors of joining are here, one class each, with a line that says what to do next; a bad ticket is
`TicketRefused` of `bbnode.access`, and the artifact's errors are in `bbnode.daemon.artifacts` and
`artifact_exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from multiaddr import Multiaddr

from bbnode.access.ticket import TICKET, Ticket, parse_ticket
from bbnode.daemon.access import files as access_files
from bbnode.ir.address import parse_address, peer_of_address
from bbnode.ir.errors import DecodeError, DeploymentError, EnvironmentFault, PeerError
from bbnode.ir.peer import PeerId


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
    """A peer to dial, with the ticket where there is one."""

    inviter: PeerId
    addresses: tuple[Multiaddr, ...]
    ticket: Ticket | None = None

    @property
    def network(self) -> PeerId | None:
        """The private network that is joined; None for an open one."""
        return None if self.ticket is None else self.ticket.network

    @property
    def name(self) -> str:
        """The node's name unless another one is given: one for each network, or inviter."""
        return f"join-{str(self.network or self.inviter)[-8:]}"


def read_source(text: str, *, unix_s: float) -> Source:
    """Return the source in a ticket, an address, or in the file `@FILE`.

    Raises TicketRefused for a ticket that is damaged or has expired, NotAnInvitation for any
    other text, and StorageError for the file.
    """
    if text.startswith("@"):
        text = access_files.read_line(Path(text[1:]).expanduser())
    text = text.strip()
    if text.startswith("/"):
        return _address(text)
    if not text.startswith(TICKET.prefix.rstrip("0123456789")):
        raise NotAnInvitation(
            f"{text[:40]!r} is neither a ticket ({TICKET.prefix}:…, from `bbnode invite`) nor an "
            "address like /ip4/192.0.2.1/tcp/4001/p2p/ID; a file with one of them is @FILE"
        )
    ticket = parse_ticket(text)
    ticket.check(unix_s)
    return Source(inviter=ticket.inviter, addresses=ticket.dial_addresses, ticket=ticket)


def _address(text: str) -> Source:
    try:
        address = parse_address(text)
        peer = peer_of_address(address)
    except DecodeError as error:
        raise NotAnInvitation(f"{error}; write it as /ip4/192.0.2.1/tcp/4001/p2p/ID") from error
    return Source(inviter=peer, addresses=(address,))
