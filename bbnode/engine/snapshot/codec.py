"""How tables refer to each other inside of a snapshot.

Rule: what several tables share stands once in a list of its own, and a reference is its number
there; what the program says (plans, ops, slots) is referred to by its place in the program.
Saving walks each value once, however many frames hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multiaddr import Multiaddr

from bbnode.engine.errors import SavedFailure, SnapshotFailed, describe
from bbnode.engine.frame import MISSING, EntryPlan, Frame
from bbnode.ir import codec, types
from bbnode.ir.address import address_from_bytes
from bbnode.ir.decoding import unbounded
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Value, type_of

if TYPE_CHECKING:
    from bbnode.engine.cells import ComponentCell
    from bbnode.engine.ingress import ByteBudget, Charge
    from bbnode.engine.runtime import Runtime
    from bbnode.engine.scheduler import Timer

# What a row of the list of values holds.
_CARRIER = 0  # wire hash of its type, payload
_PLAIN = 1  # None, or a Python number or text that an op keeps for itself
_MISSING = 2
_SEVERAL = 3  # a tuple: what a method with several outputs returned
_PAYLOAD = 4  # bytes as they came, not decoded yet

Line = dict[int, None]


class SavedNames:
    """Numbers for what is saved, and the lists that they count in."""

    def __init__(self, rt: Runtime, plans: Sequence[EntryPlan]) -> None:
        self._plans = {id(plan): number for number, plan in enumerate(plans)}
        self._lines = {id(line): number for number, line in enumerate(lines_of(rt))}
        self._cells = {id(cell): number for number, cell in enumerate(rt.cells)}
        self._peers: dict[PeerId, int] = {}
        self._values: dict[int, int] = {}
        self._value_rows: list[list[Any]] = []
        self._charges: dict[int, int] = {}
        self._charge_sizes: list[int] = []
        self._ended: dict[int, Frame] = {}
        self._kept: list[Any] = []  # so that no id is given to a second object

    def peer(self, peer: PeerId) -> int:
        """A peer."""
        return self._peers.setdefault(peer, len(self._peers))

    def peer_or_none(self, peer: PeerId | None) -> int | None:
        """A peer, if there is one."""
        return None if peer is None else self.peer(peer)

    def address(self, address: Multiaddr) -> bytes:
        """An address."""
        return bytes(address.to_bytes())

    def plan(self, plan: EntryPlan) -> int:
        """A plan of the program."""
        return self._plans[id(plan)]

    def line(self, line: Line) -> int:
        """The line of a component, semaphore or queue."""
        return self._lines[id(line)]

    def cell(self, cell: ComponentCell) -> int:
        """A slot's component."""
        return self._cells[id(cell)]

    def timer(self, timer: Timer | None) -> int | None:
        """A timer; None for one that is not armed any more."""
        return timer.order if timer is not None and timer.live else None

    def charge(self, charge: Charge) -> int:
        """One hold on a charge."""
        number = self._charges.get(id(charge))
        if number is None:
            number = self._charges[id(charge)] = len(self._charge_sizes)
            self._charge_sizes.append(charge.size)
            self._kept.append(charge)
        return number

    def frame(self, frame: Frame) -> int:
        """An execution; one that has ended is remembered as such."""
        if frame.ended:
            self._ended[frame.execution] = frame
        return frame.execution

    def value(self, value: Value) -> int:
        """A value, or what stands where none is; raises SnapshotFailed."""
        number = self._values.get(id(value))
        if number is None:
            row = self._row(value)
            number = self._values[id(value)] = len(self._value_rows)
            self._value_rows.append(row)
            self._kept.append(value)
        return number

    def _row(self, value: Value) -> list[Any]:
        if value is MISSING:
            return [_MISSING]
        if value is None or type(value) in (bool, int, float, str):
            return [_PLAIN, value]
        if type(value) is memoryview:
            return [_PAYLOAD, bytes(value)]
        if type(value) is tuple:
            return [_SEVERAL, [self.value(child) for child in value]]
        try:
            return [_CARRIER, type_of(value).wire_hash, codec.encode_value(value)]
        except (BbnodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise SnapshotFailed(
                f"a value of class {type(value).__qualname__} can't be saved: {error}; register a "
                "codec for its type"
            ) from error

    def result(self, result: Any, error: BaseException | None) -> list[Any]:
        """What an op was completed with."""
        if error is None:
            try:
                return [self.value(result)]
            except SnapshotFailed as reason:
                error = reason  # it is no value: the op would have failed with it as well
        return list(describe(error))

    def lists(self) -> dict[str, Any]:
        """What the numbers count in; to be asked after everything else was saved."""
        ended = [
            [
                f.execution,
                self.plan(f.plan),
                f.failures,
                f.from_bus,
                self.peer_or_none(f.source_peer),
            ]
            for f in self._ended.values()
        ]
        return {
            "values": self._value_rows,
            "charges": self._charge_sizes,
            "ended": ended,
            "peers": [peer.to_bytes() for peer in self._peers],
        }


class LoadedNames:
    """What the numbers of a snapshot stand for, in the node that takes it up."""

    def __init__(self, rt: Runtime, plans: Sequence[EntryPlan], lists: dict[str, Any]) -> None:
        self._plans = plans
        self._lines = lines_of(rt)
        self._cells = rt.cells
        self._peers = [PeerId.from_bytes(raw) for raw in lists["peers"]]
        self._values: list[Value] = []
        for row in lists["values"]:
            self._values.append(self._value_of(row))
        self._budget: ByteBudget = rt.ingress.budget
        self._sizes: list[int] = lists["charges"]
        self._charges: dict[int, Charge] = {}
        self._timers: dict[int, Timer] = {}
        self._frames: dict[int, Frame] = {}
        for execution, plan, failures, from_bus, source in lists["ended"]:
            frame = Frame(rt, self.plan(plan), execution, 0)
            frame.ended = True
            frame.values, frame.pending = [], []
            frame.failures, frame.from_bus = failures, from_bus
            frame.source_peer = self.peer_or_none(source)
            self.add_frame(frame)

    def peer(self, number: int) -> PeerId:
        """A peer."""
        return self._peers[number]

    def peer_or_none(self, number: int | None) -> PeerId | None:
        """A peer, if there is one."""
        return None if number is None else self._peers[number]

    def address(self, raw: bytes) -> Multiaddr:
        """An address."""
        return address_from_bytes(raw)

    def plan(self, number: int) -> EntryPlan:
        """A plan of the program."""
        return self._plans[number]

    def line(self, number: int) -> Line:
        """The line of a component, semaphore or queue."""
        return self._lines[number]

    def cell(self, number: int) -> ComponentCell:
        """A slot's component."""
        return self._cells[number]

    def add_timer(self, timer: Timer) -> None:
        """The scheduler's part: a timer that others may refer to."""
        self._timers[timer.order] = timer

    def timer(self, order: int | None) -> Timer | None:
        """A timer, if it is armed."""
        return None if order is None else self._timers[order]

    def charge(self, number: int) -> Charge:
        """One hold on a charge."""
        known = self._charges.get(number)
        if known is None:
            known = self._charges[number] = self._budget.force(self._sizes[number])
            return known
        return known.hold()

    def add_frame(self, frame: Frame) -> None:
        """A frame that others may refer to."""
        self._frames[frame.execution] = frame

    def frame(self, execution: int) -> Frame:
        """An execution, under way or ended."""
        return self._frames[execution]

    def value(self, number: int) -> Value:
        """A value."""
        return self._values[number]

    def result(self, plain: list[Any]) -> tuple[Value, BaseException | None]:
        """What an op was completed with: a result, or an error."""
        if len(plain) == 1:
            return self.value(plain[0]), None
        kind, detail = plain
        return None, SavedFailure(kind, detail)

    def _value_of(self, row: list[Any]) -> Value:
        if row[0] == _CARRIER:
            node = types.type_by_hash(row[1])
            if node is None:
                raise DecodeError(f"a value has the type {row[1]:#018x}, which is not known here")
            return codec.decode_value(node, row[2], unbounded())
        if row[0] == _PLAIN:
            return row[1]
        if row[0] == _PAYLOAD:
            return memoryview(row[1])
        if row[0] == _SEVERAL:
            return tuple(self._values[number] for number in row[1])
        return MISSING


def lines_of(rt: Runtime) -> list[Line]:
    """Everything in front of which ops wait for their turn; the order is the program's."""
    stores = rt.stores
    return [
        *(cell.line for cell in rt.cells),
        *(semaphore.line for semaphore in stores.semaphores),
        *(queue.line for queue in stores.queues),
    ]
