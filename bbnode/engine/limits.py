"""Caps on what comes in and on what may be under way.

Rule: a cap is checked before anything is stored, and going beyond it has a typed failure
or a counter. None is unbounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from bbnode.engine.errors import did_you_mean
from bbnode.ir.caps import (
    DEFAULT_WAIT_S,
    MAX_ADDRESS_BYTES,
    MAX_CLAIMED_ADDRESSES,
    MAX_DEADLINE_S,
    MAX_ENVELOPE_BYTES,
    MAX_FILLS,
)
from bbnode.ir.errors import DeploymentError

_KIB = 1024
_MIB = 1024 * _KIB


class InvalidLimit(DeploymentError):
    """A cap is unknown or out of its range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All caps of a node, with the defaults of a normal machine.

    Attributes:
        bus_events: events of the bus that wait; the oldest goes, counted `bus.dropped`.
        ingress_events: events that wait for a poll; more are refused, `ingress.dropped`.
        ingress_bytes: payload that waits or lives in executions.
        app_event_bytes: one `deliver_event`.
        invoke_inputs, invoke_bytes: of one `invoke`.
        completion_bytes: one result handed to an open completion.
        failure_detail_bytes: text of a failure; cut at a character boundary.
        envelope_bytes: one whole envelope, in and out.
        envelope_fills: fills of one envelope; more go into the next.
        sender_addresses, sender_address_bytes: addresses that an envelope may claim.
        cycle_ops: ops of one poll.
        pending_async: ops that are parked.
        frames: executions under way.
        frames_per_peer: the same, of those that one peer's messages started.
        outbound: envelopes of one poll.
        lost_peer_grace_ms: how long a request waits for a peer whose connection was lost.
        wait_s: the time of what waits (an op, a hop of a send or request, a join, a bootstrap for
            its turn) where neither its author nor its caller bounds it; None: a month.
    """

    bus_events: int | None = 1024
    ingress_events: int | None = 4 * 1024  # four times the bus
    ingress_bytes: int | None = 256 * _MIB
    app_event_bytes: int | None = _MIB
    invoke_inputs: int | None = 100
    invoke_bytes: int | None = 10 * _MIB
    completion_bytes: int | None = 4 * _MIB
    failure_detail_bytes: int | None = 4 * _KIB
    envelope_bytes: int | None = MAX_ENVELOPE_BYTES  # as much as the ingress takes
    envelope_fills: int | None = MAX_FILLS
    sender_addresses: int | None = MAX_CLAIMED_ADDRESSES
    sender_address_bytes: int | None = MAX_ADDRESS_BYTES
    cycle_ops: int | None = None
    pending_async: int | None = None
    frames: int | None = None
    frames_per_peer: int | None = 4 * 1024
    outbound: int | None = None
    lost_peer_grace_ms: int | None = 10_000  # a daemon that is restarted is back in 5 s
    wait_s: int | None = DEFAULT_WAIT_S

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidLimit(
                    f"limit {field.name} is {value!r}; give a positive integer, or None for no cap"
                )
        if self.wait_s is not None and self.wait_s > MAX_DEADLINE_S:
            raise InvalidLimit(
                f"limit wait_s is {self.wait_s}; give {MAX_DEADLINE_S} (a month) at most"
            )

    @property
    def wait_ns(self) -> int:
        """`wait_s` in nanoseconds: nothing waits for ever."""
        return (self.wait_s or MAX_DEADLINE_S) * 1_000_000_000

    @classmethod
    def edge(cls) -> Limits:
        """The preset for small devices."""
        return cls(
            ingress_bytes=8 * _MIB,
            app_event_bytes=64 * _KIB,
            invoke_inputs=16,
            invoke_bytes=256 * _KIB,
            completion_bytes=64 * _KIB,
            envelope_bytes=256 * _KIB,
            frames_per_peer=256,
        )

    @classmethod
    def from_caps(cls, caps: Mapping[str, int | None]) -> Limits:
        """Limits by name, defaults for those not named; InvalidLimit for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in caps:
            if name not in names:
                raise InvalidLimit(f"no limit {name!r}{did_you_mean(name, names)}")
        return cls(**caps)
