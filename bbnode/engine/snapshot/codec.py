"""References between tables inside a snapshot, and rows of dataclasses.

Rule: objects that several tables share are stored once, in lists, and a reference is a number in
such a list; parts of the program (plans, ops, slots) are referred to by their place in the program.
Saving visits each value once, however many frames hold it. This module knows no tables: each table
saves and loads itself with its helpers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from bbnode.engine.errors import SavedFailure, SnapshotFailed, describe
from bbnode.engine.frame import MISSING, EntryPlan, Frame
from bbnode.engine.ingress import ByteBudget, Charge
from bbnode.engine.scheduler import Timer
from bbnode.ir import codec, types
from bbnode.ir.address import address_from_bytes
from bbnode.ir.crossing import Unfit
from bbnode.ir.decoding import unbounded
from bbnode.ir.errors import BbnodeError, DecodeError
from bbnode.ir.peer import PeerId
from bbnode.ir.values import ResponseBatch, Value, type_of

# Kinds of rows in the list of values.
_CARRIER = 0  # wire hash of its type, payload
_PLAIN = 1  # None, or a Python number or text that an op keeps for itself
_MISSING = 2
_SEVERAL = 3  # a tuple: what a method with several outputs returned
_PAYLOAD = 4  # bytes as they came, not decoded yet

Line: TypeAlias = dict[int, None]  # tokens of ops that wait, in order
T = TypeVar("T")


class SnapshotWriter:
    """Numbers what is saved, and keeps the lists that the numbers count in.

    `lines` and `cells` are the program's, in its order.
    """

    def __init__(
        self,
        plans: Sequence[EntryPlan] = (),
        lines: Sequence[Line] = (),
        cells: Sequence[object] = (),
    ) -> None:
        self._places = {
            id(item): at for them in (plans, lines, cells) for at, item in enumerate(them)
        }
        self._peers: dict[PeerId, int] = {}
        self._values: dict[int, int] = {}
        self._value_rows: list[list[Any]] = []
        self._charges: dict[int, int] = {}
        self._charge_sizes: list[int] = []
        self._ended: dict[int, Frame] = {}
        self._kept: list[Any] = []  # so that no id is given to a second object

    def place(self, item: object) -> int:
        """Return the place of a plan, a line or a cell in the program."""
        return self._places[id(item)]

    def peer(self, peer: PeerId) -> int:
        """Return the number of a peer."""
        return self._peers.setdefault(peer, len(self._peers))

    def timer(self, timer: Timer | None) -> int | None:
        """Return the number of a timer; None for one that is not armed any more."""
        return timer.order if timer is not None and timer.live else None

    def charge(self, charge: Charge) -> int:
        """Return the number of a charge, for one hold on it."""
        number = self._charges.get(id(charge))
        if number is None:
            number = self._charges[id(charge)] = len(self._charge_sizes)
            self._charge_sizes.append(charge.size)
            self._kept.append(charge)
        return number

    def frame(self, frame: Frame) -> int:
        """Return the number of an execution, under way or ended."""
        if frame.ended:
            self._ended[frame.execution] = frame
        return frame.execution

    def value(self, value: Value) -> int:
        """Return the number of a value, or of MISSING. Raises SnapshotFailed."""
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
            row: list[Any] = [_CARRIER, type_of(value).wire_hash, codec.encode_value(value)]
        except (BbnodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise SnapshotFailed(
                f"a value of class {type(value).__qualname__} can't be saved: {error}; register a "
                "codec for its type"
            ) from error
        if type(value) is ResponseBatch and value.took_ns:  # which never travels
            row.append([[peer.to_bytes(), took_ns] for peer, took_ns in value.took_ns])
        return row

    def result(self, result: Any, error: BaseException | None) -> list[Any]:
        """Return the row of a parked op's result, or of its error."""
        if error is None:
            try:
                return [self.value(result)]
            except SnapshotFailed as reason:
                error = reason  # not a value: the op would have failed with it as well
        return list(describe(error))

    def lists(self) -> dict[str, Any]:
        """Return what the numbers count in; to be called after everything else was saved."""
        ended = [
            [
                f.execution,
                self.place(f.plan),
                f.failures,
                f.from_bus,
                None if f.source_peer is None else self.peer(f.source_peer),
            ]
            for f in self._ended.values()
        ]
        return {
            "values": self._value_rows,
            "charges": self._charge_sizes,
            "ended": ended,
            "peers": [peer.to_bytes() for peer in self._peers],
        }


class SnapshotReader:
    """Finds what the numbers of a snapshot stand for, in the node that loads it.

    `rt` is that of loaded frames.
    """

    def __init__(
        self,
        lists: dict[str, Any],
        plans: Sequence[EntryPlan] = (),
        lines: Sequence[Line] = (),
        cells: Sequence[Any] = (),
        *,
        budget: ByteBudget | None = None,
        rt: Any = None,
    ) -> None:
        self.plans = plans
        self.lines = lines
        self.cells = cells
        self.rt = rt
        self._peers = [PeerId.from_bytes(raw) for raw in lists["peers"]]
        self._values: list[Value] = []
        for row in lists["values"]:
            self._values.append(self._value_of(row))
        self._budget = budget or ByteBudget(None)
        self._sizes: list[int] = lists["charges"]
        self._charges: dict[int, Charge] = {}
        self._timers: dict[int, Timer] = {}
        self._frames: dict[int, Frame] = {}
        for execution, plan, failures, from_bus, source in lists["ended"]:
            frame = Frame(rt, plans[plan], execution, 0)
            frame.ended = True
            frame.values, frame.pending = [], []
            frame.failures, frame.from_bus = failures, from_bus
            frame.source_peer = None if source is None else self.peer(source)
            self.add_frame(frame)

    def peer(self, number: int) -> PeerId:
        """Return a peer."""
        return self._peers[number]

    def add_timer(self, timer: Timer) -> None:
        """Enter a timer that others may refer to."""
        self._timers[timer.order] = timer

    def timer(self, order: int | None) -> Timer | None:
        """Return a timer; None if there was none, KeyError if it is not armed."""
        return None if order is None else self._timers[order]

    def charge(self, number: int) -> Charge:
        """Return one hold on a charge."""
        known = self._charges.get(number)
        if known is None:
            known = self._charges[number] = self._budget.force(self._sizes[number])
            return known
        return known.hold()

    def add_frame(self, frame: Frame) -> None:
        """Enter a frame that others may refer to."""
        self._frames[frame.execution] = frame

    def frame(self, execution: int) -> Frame:
        """Return an execution, under way or ended."""
        return self._frames[execution]

    def value(self, number: int) -> Value:
        """Return a value."""
        return self._values[number]

    def result(self, plain: list[Any]) -> tuple[Value, BaseException | None]:
        """Return a parked op's result, or its error."""
        if len(plain) == 1:
            return self.value(plain[0]), None
        kind, detail = plain
        return None, SavedFailure(kind, detail)

    def _value_of(self, row: list[Any]) -> Value:
        if row[0] == _CARRIER:
            node = types.type_by_hash(row[1])
            if node is None:
                raise DecodeError(f"a value has the type {row[1]:#018x}, which is not known here")
            value = codec.decode_value(node, row[2], unbounded())
            if len(row) > 3:
                took_ns = tuple((PeerId.from_bytes(raw), int(ns)) for raw, ns in row[3])
                value = replace(value, took_ns=took_ns)
            return value
        if row[0] == _PLAIN:
            return row[1]
        if row[0] == _PAYLOAD:
            return memoryview(row[1])
        if row[0] == _SEVERAL:
            return tuple(self._values[number] for number in row[1])
        return MISSING


# -- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Via:
    """A form: the way from one kind of thing to plain data, and back."""

    save: Callable[[Any, SnapshotWriter], Any]
    load: Callable[[Any, SnapshotReader], Any]


PLAIN = Via(lambda it, _: it, lambda plain, _: plain)
PEER = Via(lambda it, writer: writer.peer(it), lambda plain, reader: reader.peer(plain))
ADDRESS = Via(lambda it, _: bytes(it.to_bytes()), lambda plain, _: address_from_bytes(plain))
VALUE = Via(lambda it, writer: writer.value(it), lambda plain, reader: reader.value(plain))
CHARGE = Via(lambda it, writer: writer.charge(it), lambda plain, reader: reader.charge(plain))
FRAME = Via(lambda it, writer: writer.frame(it), lambda plain, reader: reader.frame(plain))
PLAN = Via(lambda it, writer: writer.place(it), lambda plain, reader: reader.plans[plain])
LINE = Via(lambda it, writer: writer.place(it), lambda plain, reader: reader.lines[plain])
CELL = Via(lambda it, writer: writer.place(it), lambda plain, reader: reader.cells[plain])
TIMER = Via(lambda it, writer: writer.timer(it), lambda plain, reader: reader.timer(plain))


def armed(plain: Any, reader: SnapshotReader) -> Timer:
    """Load a timer that has to be there; ValueError where it is not armed."""
    timer = reader.timer(plain)
    if timer is None:
        raise ValueError("a timer that something waits for is not armed")
    return timer


ARMED = Via(TIMER.save, armed)


def optional(form: Via | RowForm[Any]) -> Via:
    """Return the form of something that may be None."""
    return Via(
        lambda it, writer: None if it is None else form.save(it, writer),
        lambda plain, reader: None if plain is None else form.load(plain, reader),
    )


def many(form: Via | RowForm[Any], make: Callable[[Iterable[Any]], Any] = tuple) -> Via:
    """Return the form of a collection, which `make` makes of its items."""
    return Via(
        lambda it, writer: [form.save(each, writer) for each in it],
        lambda plain, reader: make(form.load(each, reader) for each in plain),
    )


def mapping(key: Via, value: Via | RowForm[Any]) -> Via:
    """Return the form of a dict."""
    return Via(
        lambda it, writer: [[key.save(k, writer), value.save(v, writer)] for k, v in it.items()],
        lambda plain, reader: {key.load(k, reader): value.load(v, reader) for k, v in plain},
    )


def member(of: type[enum.Enum]) -> Via:
    """Return the form of a member of an enum, by its name."""
    return Via(lambda it, _: it.name, lambda plain, _: of[plain])


class RowForm(Generic[T]):
    """The form of an object as a list: of each field its own form, in this order."""

    def __init__(self, make: Callable[..., T], **fields: Via | RowForm[Any]) -> None:
        self._make = make
        self._fields = tuple(fields.items())

    def save(self, item: T, writer: SnapshotWriter) -> list[Any]:
        """Make the list."""
        return [form.save(getattr(item, name), writer) for name, form in self._fields]

    def load(self, plain: Any, reader: SnapshotReader) -> T:
        """Make the object; ValueError for a list of another length."""
        pairs = zip(self._fields, plain, strict=True)
        return self._make(**{name: form.load(saved, reader) for (name, form), saved in pairs})


UNFIT: RowForm[Unfit] = RowForm(Unfit, classes=many(PLAIN), suffixes=many(PLAIN), reason=PLAIN)
