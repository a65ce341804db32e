"""Reports of a node: the steps of a poll, counters, and events on the bus.

Rule: no exception leaves a poll. An error becomes a step, a counter, and an event for programs that
subscribe to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bbnode.engine import steps
from bbnode.engine.bus import Bus, BusKind
from bbnode.engine.counts import Counts
from bbnode.engine.errors import describe
from bbnode.engine.limits import Limits
from bbnode.engine.places import NOWHERE, SourcePlace
from bbnode.ir.errors import BbnodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.texts import cut_text, printable


class Reports:
    """Collects the steps of the next poll; counts; publishes."""

    __slots__ = (
        "_detail_bytes",
        "bus",
        "counts",
        "steps",
    )

    def __init__(self, limits: Limits, subscribed: Iterable[int] = ()) -> None:
        self.steps: list[steps.Step] = []
        self.counts = Counts()
        self.bus = Bus(limits.bus_events, subscribed, self.counts)
        self._detail_bytes = limits.failure_detail_bytes

    def take(self) -> list[steps.Step]:
        """Return the steps so far, and begin a new list."""
        made, self.steps = self.steps, []
        return made

    def telemetry(self, name: str, **attributes: Any) -> None:
        """Report an observation."""
        self.steps.append(steps.Telemetry(name=name, attributes=attributes))

    def op_failed(
        self,
        execution: int,
        target: str,
        op: str,
        error: BaseException,
        *,
        place: SourcePlace = NOWHERE,
        source_peer: PeerId | None = None,
        chain: int = 0,
        more: str = "",
    ) -> None:
        """Report a failure; outside of any execution, `execution` is 0.

        `more` goes behind the text of the error: what this node's operator may know, and peers may
        not.
        """
        kind, detail = describe(error)
        self.counts["ops.failed"] += 1
        self.steps.append(
            steps.OpFailed(
                execution=execution,
                target=target,
                op=op,
                kind=kind,
                detail=self._cut(f"{detail}{more}"),
                line=self._cut(place.line),
                module=self._cut(place.module),
                inner=self._cut(place.inner),
                source_peer=source_peer,
                chain=chain,
                is_final=isinstance(error, BbnodeError) and error.is_final,
            )
        )

    def op_not_run(
        self, execution: int, target: str, op: str, reason: str, place: SourcePlace, chain: int
    ) -> None:
        """Report an op that did not run."""
        self.counts["ops.not_run"] += 1
        self.steps.append(
            steps.OpNotRun(
                execution=execution,
                target=target,
                op=op,
                reason=self._cut(reason),
                line=self._cut(place.line),
                module=self._cut(place.module),
                chain=chain,
            )
        )

    def peers_changed(self, made: Sequence[steps.Step]) -> None:
        """Report changes of peers, on the bus as well."""
        self.steps.extend(made)
        for step in made:
            if isinstance(step, steps.PeerUp):
                self.bus.publish(BusKind.PEER_UP)
            elif isinstance(step, steps.PeerDown):
                self.bus.publish(BusKind.PEER_DOWN)

    def receive_failed(
        self, peer: PeerId, fill: int, type_hash: int, size: int, kind: str, detail: str
    ) -> None:
        """Report a fill, or with `fill` -1 an envelope, that was refused."""
        self.counts[f"receive.failed.{kind}"] += 1
        self.bus.publish(BusKind.WIRE_RECEIVE_FAILED)
        self.steps.append(
            steps.WireReceiveFailed(
                peer=peer,
                fill=fill,
                type_hash=type_hash,
                payload_size=size,
                kind=kind,
                detail=self._cut(detail),
            )
        )

    def refused_by_component(self, slot: str, execution: int, peer: PeerId, reason: str) -> None:
        """Report a contribution that a component did not take."""
        self.counts["contributions.refused"] += 1
        self.telemetry(
            "contribution.refused",
            slot=slot,
            execution=execution,
            peer=peer,
            reason=self._cut(reason),
        )

    def coded(
        self, what: str, slot: str, execution: int, *, raw_bytes: int, code_bytes: int
    ) -> None:
        """Report the bytes of tensors that a codec encoded or decoded, and those of their codes."""
        self.counts[f"codec.{what}.raw_bytes"] += raw_bytes
        self.counts[f"codec.{what}.code_bytes"] += code_bytes
        self.telemetry(
            f"codec.{what}",
            slot=slot,
            execution=execution,
            raw_bytes=raw_bytes,
            code_bytes=code_bytes,
        )

    def one_line(self, text: str) -> str:
        """Return the first line of a failure's text, printable and within the bound."""
        return self._cut(printable(text.partition("\n")[0]))

    def _cut(self, text: str) -> str:
        return cut_text(text, self._detail_bytes)

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: counters and the events that wait."""
        return [sorted(self.counts.items()), self.bus.state()]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned."""
        counts, bus = plain
        for name, count in counts:
            self.counts[name] += count
        self.bus.load(bus)
