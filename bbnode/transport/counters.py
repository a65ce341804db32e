"""Counters of a backend.

Rule: every name stands in COUNTERS with what it counts, all are there from the start, and none
ever shrinks.
"""

from __future__ import annotations

from typing import Final

COUNTERS: Final[dict[str, str]] = {
    "dial.attempts": "addresses dialled",
    "dial.failed": "addresses that could not be dialled, or where somebody else answered",
    "links.opened": "secured connections, in both directions",
    "links.closed": "connections that ended, for whatever reason",
    "links.duplicate": "second connections with one peer that were closed",
    "links.refused": "connections refused because a bound was reached",
    "links.silent": "connections closed because the peer sent nothing for too long",
    "hello.refused": "connections closed because of their first message, or for want of one",
    "protocol.violations": "connections closed because of what came after the hello",
    "streams.write_failed": "outgoing streams that broke and were opened again",
    "streams.truncated": "incoming streams that ended in the middle of a frame",
    "streams.handler_errors": "exceptions caught at the edge of a stream handler",
    "inbound.envelopes": "envelopes received",
    "inbound.bytes": "bytes read from our streams",
    "inbound.flooded": "connections dropped because the driver could not keep up",
    "outbound.envelopes": "envelopes handed to the operating system",
    "outbound.bytes": "bytes written to our streams",
    "outbound.refused": "sends refused: not connected, queue full, too large",
    "outbound.failed": "queued envelopes that could not be sent",
}


class Counters:
    """A fixed set of counters."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count; `name` is one of COUNTERS."""
        self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """A copy of all values."""
        return dict(self._values)
