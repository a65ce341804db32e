"""The `[relay]` table of a configuration.

Rule: the defaults and their reasons are those of RelaySettings; here stand their bounds and words.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bbnode.daemon.config.values import Section, key
from bbnode.transport.libp2p.relay_settings import RelaySettings

DEFAULTS = RelaySettings()

# What a relay's answers have room for: 32 bits of seconds, 64 bits of bytes.
Seconds = Annotated[int, Field(ge=1, lt=2**32)]
Bytes = Annotated[int, Field(ge=1, lt=2**63)]
# A node has 1,024 connections at most, and each circuit takes two streams.
Circuits = Annotated[int, Field(ge=1, le=1024)]


class RelaySection(Section):
    """Whether it relays for others, and is reached through relays itself."""

    serve: bool = key(
        DEFAULTS.serve, "relay for peers that may connect with this node and that nobody can dial"
    )
    use: bool = key(
        True,
        "dial through relays; and while nobody can dial this node, as far as its addresses tell, "
        "be reached through those among the peers that it dials",
    )
    reservations: Circuits = key(
        DEFAULTS.reservations, "peers that may be reached through this node", unit="peers"
    )
    reservation_s: Seconds = key(
        DEFAULTS.reservation_s, "time after which they have to ask again", unit="s"
    )
    circuits: Circuits = key(
        DEFAULTS.circuits, "circuits through this node at a time", unit="circuits"
    )
    circuits_per_peer: Circuits = key(
        DEFAULTS.circuits_per_peer,
        "of those, with one peer as an end; of a node that uses relays, through each of them",
        unit="circuits",
    )
    circuit_s: Seconds = key(
        DEFAULTS.circuit_s,
        "time after which a circuit is cut; whoever dialled it takes another before that",
        unit="s",
    )
    circuit_bytes: Bytes = key(
        DEFAULTS.circuit_bytes,
        "bytes of both directions after which a circuit is cut, likewise",
        unit="bytes",
    )
