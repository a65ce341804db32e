"""Everything that can be measured of a backend made of links, at one moment.

Rule: it looks and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from bbnode.transport.base import TransportMetrics
from bbnode.transport.inbox import Inbox
from bbnode.transport.limits import TransportLimits
from bbnode.transport.links.peers import PeerTable


def measure(
    table: PeerTable,
    inbox: Inbox,
    limits: TransportLimits,
    *,
    counters: Mapping[str, int],
    own_tasks: int,
    circuits: int,
) -> TransportMetrics:
    """The gauges of a backend and its peers; `own_tasks` are those that belong to no link."""
    links, sessions = table.links(), table.sessions()
    flows = [session.flow for session in sessions if session.flow is not None]
    up = sum(link.hello is not None for link in links)
    return TransportMetrics(
        connections=up,
        connections_opening=len(links) - up + table.admission.sockets,
        connection_slots=limits.max_connections,
        streams=sum(link.carrier.stream_count() for link in links),
        tasks=own_tasks + sum(link.tasks for link in links),
        unread_bytes=sum(link.carrier.unread_bytes() for link in links),
        held_bytes=sum(flow.held_bytes for flow in flows),
        inbox_bytes=inbox.envelope_bytes,
        partial_bytes=inbox.partial_bytes,
        queued_bytes=sum(session.queue.bytes for session in sessions),
        unacknowledged_bytes=sum(session.queue.unacknowledged_bytes for session in sessions),
        inbox_envelopes=inbox.envelopes,
        inbox_notices=inbox.notices,
        queued_envelopes=sum(session.queue.envelopes for session in sessions),
        circuits=circuits,
        sessions=len(sessions),
        denied=dict(table.gate.denied),
        counters=counters,
        peers=tuple(table.infos()),
    )
