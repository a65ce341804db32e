"""The readiness of a node: slots that could not be prepared, and what it refuses for them.

Rule: a slot is not ready from the failure of its component's own bootstrap until that succeeds, or
for a node's life where its model has another size than the program counts on. As long as one is
not, messages whose ops would use it are refused on arrival, and all connected peers have been told
the classes of this node for which it does not work, and why. What peers say of themselves, sizes
among it, is theirs: it decides only that selectors leave them out of these classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bbnode.engine.cells import ComponentCell
from bbnode.engine.frame import EntryPlan
from bbnode.engine.peers.neighbours import Neighbours
from bbnode.engine.reports import Reports
from bbnode.engine.wire.outbound import EnvelopeOutbox
from bbnode.engine.wire.refusals import public_text
from bbnode.ir.address import REFUSED_SUFFIX
from bbnode.ir.caps import MAX_REFUSAL_PLACE_BYTES
from bbnode.ir.envelope import CorrelationKind, SlotFill
from bbnode.ir.peer import PeerId
from bbnode.ir.refusal import WireRefusal, encode_refusal
from bbnode.ir.texts import cut_text, listed

# Begins the reason for which a host holds a peer that it does not know yet.
PENDING: Final = "its data are not known yet"
NOT_READY: Final = "NotReady"
READY: Final = "Ready"
_SEPARATOR: Final = ","
# Of peers that can't be chosen, in the text of a failure: how many, and bytes of each reason.
_SHOWN_PEERS: Final = 4
_SHOWN_BYTES: Final = 120
_FAILED: Final = "it failed, and is not tried again yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReadyPeer:
    """A connected peer that is chosen for none of some classes now: it says so, or is held."""

    classes: tuple[str, ...]
    reason: str


class Plans(Protocol):
    """The entries of a node."""

    def of_classes(self) -> Mapping[str, Iterable[EntryPlan]]:
        """Return the plans of the executions of each class."""


class SlotReadiness:
    """The slots of a node that are not ready, and the peers that are to be told."""

    __slots__ = (
        "_cells",
        "_neighbours",
        "_outbound",
        "_reports",
        "failed",
        "plans",
        "unrunnable",
        "untold",
    )

    def __init__(
        self,
        cells: Sequence[ComponentCell],
        neighbours: Neighbours,
        outbound: EnvelopeOutbox,
        reports: Reports,
    ) -> None:
        self._cells = cells
        self._neighbours = neighbours
        self._outbound = outbound
        self._reports = reports
        self.plans: Plans | None = None  # once all are there
        self.failed: dict[int, str] = {}  # by number of the slot, why
        self.unrunnable: dict[int, str] = {}  # those of them that no bootstrap mends
        self.untold: dict[PeerId, None] = {}

    # -- this node ---------------------------------------------------------------------------

    def slots(self) -> dict[str, str]:
        """Return the slots that are not ready, each with the reason."""
        return {self._cells[number].slot: why for number, why in sorted(self.failed.items())}

    def can_not_run(self, number: int, why: str) -> None:
        """Refuse what uses a slot, whatever its bootstrap says: another start may mend it."""
        self.unrunnable[number] = why
        self.prepared(number, why)

    def prepared(self, number: int, failure: str) -> None:
        """Take the result of a component's bootstrap; `failure` is empty for a success."""
        failure = self.unrunnable.get(number, failure)
        if self.failed.get(number, "") == failure:
            return
        if failure:
            self.failed[number] = failure
        else:
            del self.failed[number]
        self._neighbours.not_ready(self._classes())
        self.untold.update(dict.fromkeys(self._neighbours.peers.everyone()))

    def refusal(self, plan: EntryPlan) -> str:
        """Return why the ops of an entry can't run now, or ""."""
        touched = self._touched(plan)
        failed = sorted((n, why) for n, why in self.failed.items() if n in touched)
        return reasons_text({self._cells[number].slot: why for number, why in failed})

    def _touched(self, plan: EntryPlan) -> set[int]:
        """Return the slots that the ops of an entry use, through dependencies too."""
        found: set[int] = set()
        numbers = {cell.slot: number for number, cell in enumerate(self._cells)}
        todo: list[tuple[int, str | None]] = list(plan.calls)
        while todo:
            number, method = todo.pop()
            found.add(number)
            component = self._cells[number].component
            for role, slot in component.depends.items():
                needed = method is None or method in component.needed_for.get(role, (method,))
                if needed and component.has_dependency(role) and numbers[slot] not in found:
                    todo.append((numbers[slot], None))
        return found

    def _classes(self) -> tuple[str, ...]:
        """Return the classes of this node that use a slot which is not ready."""
        return tuple(
            name
            for name, plans in (self.plans.of_classes() if self.plans else {}).items()
            if any(not self._touched(plan).isdisjoint(self.failed) for plan in plans)
        )

    # -- telling peers -----------------------------------------------------------------------

    def connected(self, peer: PeerId) -> None:
        """Have a new connection's peer told, if there is something to tell."""
        if self.failed:
            self.untold[peer] = None

    def tell(self) -> None:
        """Tell all that do not know yet (once at the end of a poll)."""
        classes = _SEPARATOR.join(self._classes())
        if not classes:
            notice = WireRefusal(READY)
        else:
            why = reasons_text(self.slots())
            # A list that would be cut names no class: then none of them works.
            where = classes if len(classes.encode()) <= MAX_REFUSAL_PLACE_BYTES else ""
            notice = WireRefusal(NOT_READY, public_text(why), where)
        fill = SlotFill(dest_suffix=REFUSED_SUFFIX, payload=encode_refusal(notice))
        untold, self.untold = sorted(self.untold), {}
        for peer in untold:
            if peer in self._neighbours.peers:
                self._outbound.refuse(peer, fill, CorrelationKind.NONE, 0)

    def heard(self, peer: PeerId, said: WireRefusal) -> None:
        """Take what a peer says of itself."""
        peers = self._neighbours.peers
        if said.kind == READY:
            if peers.now_ready(peer):
                self._reports.telemetry("peer.ready", peer=peer)
            return
        plays = peers.classes_of(peer)
        named = said.where.split(_SEPARATOR) if said.where else plays
        classes = tuple(name for name in plays if name in named)
        if peers.now_not_ready(peer, classes, said.detail):
            self._reports.telemetry(
                "peer.not_ready", peer=peer, classes=classes, reason=said.detail
            )

    def hold(self, peer: PeerId, classes: Sequence[str], reason: str) -> None:
        """Choose a peer for none of these classes, as the host wants; none: for all again."""
        before = self._neighbours.peers.held.get(peer)
        after = (tuple(classes), reason) if classes else None
        if before == after:
            return
        self._neighbours.peers.now_held(peer, after)
        if peer not in self._neighbours.peers:
            return  # nothing is known of it yet: it is about to be connected
        if after is None:
            self._reports.telemetry("peer.ready", peer=peer)
        else:
            held = {"classes": after[0], "reason": reason}
            self._reports.telemetry("peer.not_ready", peer=peer, **held)

    def peers(self) -> dict[PeerId, NotReadyPeer]:
        """Return the connected peers that are not ready, do not fit in size, or are held."""
        peers = self._neighbours.peers
        found = {
            peer: NotReadyPeer(classes=classes, reason=reason)
            for peer, (classes, reason) in peers.not_ready.items()
        }
        for peer, unfit in peers.unfit.items():
            if unfit.classes:  # else only some ports do not fit
                _add(found, peer, unfit.classes, unfit.reason)
        for peer, (classes, reason) in peers.held.items():
            if peer in peers:
                _add(found, peer, classes, reason)
        return found

    def left_out(self, peer_class: str, now_ns: int) -> str:
        """Return which connected peers of a class can't be chosen, and why, for behind a failure.

        "" where there are none. A class that no connected peer plays stands for all of them: a
        component that is given a list of peers does not know the class that they were chosen from.
        """
        playing = self._neighbours.peers.classes
        everybody = all(peer_class not in classes for classes in playing.values())
        reasons = {
            peer: said.reason
            for peer, said in self.peers().items()
            if everybody or peer_class in said.classes
        }
        for peer, classes in playing.items():
            is_asked = everybody or peer_class in classes
            if is_asked and peer not in reasons and not self._neighbours.usable(peer, now_ns):
                denied = self._neighbours.standing(peer, now_ns).denied
                reasons[peer] = _FAILED if denied is None else denied.value
        if not reasons:
            return ""
        lines = [f"{peer.short}: {_shortened(reasons[peer])}" for peer in sorted(reasons)]
        return f"; connected, and can't be chosen: {listed(lines, _SHOWN_PEERS)}"

    # -- snapshots ---------------------------------------------------------------------------

    def state(self, _writer: object) -> Any:
        """Return what a snapshot saves: reasons, and who is to be told."""
        # What another start may mend is found again there.
        failed = sorted((n, why) for n, why in self.failed.items() if n not in self.unrunnable)
        return [failed, sorted(p.to_bytes() for p in self.untold)]

    def load(self, plain: Any, _reader: object) -> None:
        """Load what `state` returned."""
        failed, untold = plain
        self.failed = dict(failed) | self.unrunnable
        self.untold = {PeerId.from_bytes(raw): None for raw in untold}
        if self.failed:
            self._neighbours.not_ready(self._classes())


def _add(
    found: dict[PeerId, NotReadyPeer], peer: PeerId, classes: tuple[str, ...], reason: str
) -> None:
    """Add why a peer is left out of classes, before what is known of it already."""
    own = found.get(peer, NotReadyPeer(classes=(), reason=""))
    found[peer] = NotReadyPeer(
        classes=tuple(dict.fromkeys((*own.classes, *classes))),
        # A peer that is held for what it says itself says it once.
        reason=reason if reason in own.reason else "; ".join(filter(None, (reason, own.reason))),
    )


def _shortened(reason: str) -> str:
    short = cut_text(reason, _SHOWN_BYTES)
    return reason if short == reason else f"{short}…"


def reasons_text(slots: Mapping[str, str]) -> str:
    """Return the slots that are not ready on one line, those of one reason together."""
    found: dict[str, list[str]] = {}
    for slot, why in slots.items():
        found.setdefault(why, []).append(slot)
    return "; ".join(
        f"slot{'s' if len(names) > 1 else ''} {', '.join(names)}: {why}"
        for why, names in found.items()
    )
