"""What a node does with relays: offers to be one, uses them, and within which bounds.

Rule: every bound of a circuit is its relay's and stands here, with its unit and its reason.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The part a node plays; neither by default."""

    # Relay for peers that may connect with us.
    serve: bool = False
    # Be reached through relays when nobody can dial us, and dial through them.
    use: bool = False
    # Peers that may be reached through us, for how long without asking again (an hour, as in
    # libp2p's circuit relay).
    reservations: int = 128
    reservation_s: int = 3600
    # Circuits at a time, in all and with one peer as an end. What one end does not
    # read is kept here, 2 MiB a circuit at most.
    circuits: int = 256
    circuits_per_peer: int = 32
    # After this, and after so many bytes of both directions, a circuit is cut. Its dialler has a
    # new one before that, so that nothing waits; one that nobody cares for ends.
    circuit_s: int = 3600
    circuit_bytes: int = 4 * 1024**3
