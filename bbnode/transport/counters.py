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
    "links.evicted": "strangers' connections closed to make room for another peer",
    "links.silent": "connections closed because the peer sent nothing for too long",
    "links.stalled": "connections closed because a transfer made no progress for too long",
    "links.slow": "connections closed because a large message or a frame came too slowly",
    "sockets.refused": "sockets closed at once: too many wait for a hello, in all or of a prefix",
    "sockets.dropped": "connections without a hello that were closed to make room for another",
    "sockets.late": "connections that did not prove in time who they are",
    "hello.refused": "connections closed because of their first message, or for want of one",
    "protocol.violations": "connections closed because of what came after the hello",
    "streams.write_failed": "outgoing streams that broke and were opened again",
    "streams.truncated": "incoming streams that ended in the middle of a frame",
    "streams.reaped": "streams reset because they were idle, half closed or never negotiated",
    "streams.handler_errors": "exceptions caught at the edge of a stream handler",
    "inbound.envelopes": "envelopes received",
    "inbound.bytes": "bytes read from our streams",
    "inbound.duplicates": "envelopes that had come before and were dropped",
    "inbound.superseded": "frames of a connection or round that another has replaced",
    "inbound.unallocated": "large envelopes thrown away for want of memory",
    "inbound.flooded": "connections dropped because the peer ignored its window, or sent what a "
    "muxer must not",
    "inbound.evicted": "large envelopes whose room went to a faster one: they begin again later",
    "inbound.delayed": "times that an envelope was held because its sender was over its rate",
    "access.denied": "connections, hellos and envelopes that the authorizer refused",
    "outbound.envelopes": "envelopes written to our streams, those written again included",
    "outbound.bytes": "bytes written to our streams",
    "outbound.refused": "sends refused: not connected, queue full, too large, not allowed",
    "outbound.failed": "queued envelopes that were given up",
    "protocols.opened": "streams of other protocols, in both directions",
    "protocols.refused": "streams of other protocols refused: no hello yet, or too many",
    "protocols.failed": "handlers of other protocols that ended with an exception",
    "relay.reserved": "reservations given to peers, renewals included",
    "relay.refused": "requests to relay that were refused",
    "relay.circuits_opened": "circuits that were made here between two peers",
    "relay.circuits_closed": "circuits that ended, for whatever reason",
    "relay.circuits_cut": "circuits that were cut at their bound of time or bytes",
    "relay.bytes": "bytes passed on between peers",
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
