"""Round-trip times of requests: an estimate per edge, and reports about edges further on.

Rule: an edge is the site that a request goes to. Each answer that is taken is one sample; the
estimate is that of Jacobson and Karels as RFC 6298 (sections 2.2 to 2.4) gives it, in integer
nanoseconds, so that it is the same on every machine. A peer's report of an edge further down counts
until this node measures the edge itself. The table is bounded: reported edges are dropped first,
then those that were measured longest ago.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bbnode.engine.snapshot.codec import PLAIN, RowForm, SnapshotReader, SnapshotWriter, many
from bbnode.ir.caps import MAX_EDGES, MAX_REPORTED
from bbnode.ir.envelope import EdgeRttReport

# RFC 6298, section 2.3: alpha = 1/8, beta = 1/4; section 2: K = 4.
ALPHA_DIVISOR = 8
BETA_DIVISOR = 4
K = 4
# RFC 6298, section 2.4: an estimate is at least a second (section 2.5: it may have an upper bound
# of at least 60 s). Ours is ten minutes: what waits here is training, not a segment.
MIN_ESTIMATE_NS = 1_000_000_000
MAX_ESTIMATE_NS = 600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """The estimate of one edge, in nanoseconds; `samples` is 0 where a peer reported it."""

    site: int
    srtt_ns: int
    rttvar_ns: int
    samples: int

    @property
    def estimate_ns(self) -> int:
        """The time within which an answer should be there: srtt + K * rttvar, within bounds."""
        estimate = self.srtt_ns + K * self.rttvar_ns
        return max(MIN_ESTIMATE_NS, min(estimate, MAX_ESTIMATE_NS))


_EDGES = many(RowForm(RoundTrip, site=PLAIN, srtt_ns=PLAIN, rttvar_ns=PLAIN, samples=PLAIN))


class RoundTrips:
    """The edges of one node, the one that changed last at the end."""

    __slots__ = (
        "_edges",
        "_reports",
    )

    def __init__(self) -> None:
        self._edges: dict[int, RoundTrip] = {}
        self._reports: tuple[EdgeRttReport, ...] | None = None  # until an edge changes

    def __len__(self) -> int:
        return len(self._edges)

    def all(self) -> list[RoundTrip]:
        """Return all edges, the one that changed last at the end."""
        return list(self._edges.values())

    def estimate_ns(self, site: int) -> int:
        """Return the time to allow for a send to a site; 0 if nothing is known about it."""
        edge = self._edges.get(site)
        return 0 if edge is None else edge.estimate_ns

    def sample(self, site: int, took_ns: int) -> None:
        """Add the sample of an answer that came `took_ns` after its request; ignores site 0."""
        if not site:
            return
        took_ns = max(took_ns, 0)
        known = self._edges.get(site)
        if known is None or not known.samples:
            # Section 2.2: the first measurement.
            srtt_ns, rttvar_ns, samples = took_ns, took_ns // 2, 0
        else:
            # Section 2.3: rttvar first, with the srtt of before.
            error_ns = abs(known.srtt_ns - took_ns)
            rttvar_ns = known.rttvar_ns + (error_ns - known.rttvar_ns) // BETA_DIVISOR
            srtt_ns = known.srtt_ns + (took_ns - known.srtt_ns) // ALPHA_DIVISOR
            samples = known.samples
        self._put(RoundTrip(site=site, srtt_ns=srtt_ns, rttvar_ns=rttvar_ns, samples=samples + 1))

    def learn(self, reports: Iterable[EdgeRttReport]) -> None:
        """Add the reports of an answering peer about edges further down.

        They are only claims: own measurements take precedence, and numbers are clamped.
        """
        for report in reports:
            known = self._edges.get(report.site)
            if not report.site or (known is not None and known.samples):
                continue
            if known is None and len(self._edges) >= MAX_EDGES and not self._forget_reported():
                return  # everything here was measured
            self._put(
                RoundTrip(
                    site=report.site,
                    srtt_ns=min(report.srtt_ns, MAX_ESTIMATE_NS),
                    rttvar_ns=min(report.rttvar_ns, MAX_ESTIMATE_NS),
                    samples=0,
                )
            )

    def reports(self) -> tuple[EdgeRttReport, ...]:
        """Return the reports that ride on a response: the edges that changed last."""
        if self._reports is None:
            newest = list(self._edges.values())[-MAX_REPORTED:]
            self._reports = tuple(
                EdgeRttReport(site=edge.site, srtt_ns=edge.srtt_ns, rttvar_ns=edge.rttvar_ns)
                for edge in newest
            )
        return self._reports

    def _put(self, edge: RoundTrip) -> None:
        self._edges.pop(edge.site, None)
        if len(self._edges) >= MAX_EDGES and not self._forget_reported():
            del self._edges[next(iter(self._edges))]
        self._edges[edge.site] = edge
        self._reports = None

    def _forget_reported(self) -> bool:
        """Drop the reported edge that changed longest ago; return False if there is none."""
        for site, known in self._edges.items():
            if not known.samples:
                del self._edges[site]
                return True
        return False

    def state(self, writer: SnapshotWriter) -> Any:
        """Return what a snapshot saves: all edges, in order."""
        return _EDGES.save(self._edges.values(), writer)

    def load(self, plain: Any, reader: SnapshotReader) -> None:
        """Load what `state` returned."""
        for edge in _EDGES.load(plain, reader):
            self._put(edge)
