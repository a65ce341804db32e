"""The whole snapshot: the state of all tables and components, with a checksum.

Rule: everything is checked before anything is loaded, except for the contents of tables and
components; so after SnapshotRefused the node has to be installed again.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack

from bbnode.components.contracts import CarriedOver
from bbnode.engine import ingress as ev
from bbnode.engine.errors import SnapshotFailed, SnapshotRefused, StateRefused, describe
from bbnode.engine.runtime import Runtime
from bbnode.engine.snapshot.events import IngressTable
from bbnode.ir.errors import BbnodeError
from bbnode.ir.interrupts import let_stop

SNAPSHOT_VERSION = 7
_MAGIC = b"BBSNAP01"
_DIGEST_BYTES = 32
# msgpack knows 64 bits; a deadline that a peer claims may lie beyond them.
_LONG_INT = "\0int"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Slots whose components took their state of another version, and why the others did not.

    `parts` says of the slots that were taken what they took and left, where they tell.
    """

    taken: tuple[str, ...]
    left: Mapping[str, str]
    parts: Mapping[str, CarriedOver]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection.

    Creating a hundred thousand rows would make Python search all objects of the process for cycles
    several times; what is created here has none.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Tables that snapshots of earlier versions do not have: these saved nothing that belongs there.
_EMPTY_BEFORE = frozenset({"topics"})


@_collector_paused()
def take_snapshot(rt: Runtime) -> bytes:
    """Return the state of a node between two polls.

    Raises SnapshotFailed, or NodeBusy when a component's state can't be had now.
    """
    ingress = IngressTable(rt.ingress)
    writer = rt.writer()
    components = [[c.slot, c.binding.type_name, c.state(ingress.done)] for c in rt.cells]
    saved = {name: table.state(writer) for name, table in rt.tables(ingress).items()}
    fields = {
        "version": SNAPSHOT_VERSION,
        "peer": rt.neighbours.self_peer.to_bytes(),
        "program": rt.program.digest,
        "components": components,
        "tables": saved,
        "lists": writer.lists(),
    }
    return seal(fields)


@_collector_paused()
def restore_snapshot(rt: Runtime, data: bytes, *, same_life: bool) -> None:
    """Load a snapshot into a node that has not polled yet. Raises SnapshotRefused."""
    neighbours = rt.neighbours
    tables = rt.tables(IngressTable(rt.ingress))
    fields = parse(data)
    if fields["peer"] != neighbours.self_peer.to_bytes():
        raise SnapshotRefused("the snapshot is another peer's; start this node without it")
    _check_components(rt, fields["components"])
    if fields["program"] != rt.program.digest:
        raise SnapshotRefused(
            "the snapshot was made with another artifact, or other targets of it; start this node "
            "without it"
        )
    for name in _EMPTY_BEFORE - set(fields["tables"]):
        del tables[name]
    if set(fields["tables"]) != set(tables):
        raise SnapshotRefused("the snapshot was made by another version of bbnode")
    incarnation, own = rt.incarnation, neighbours.own_addresses
    try:
        reader = rt.reader(fields["lists"])
        for name, table in tables.items():
            table.load(fields["tables"][name], reader)
    except (
        BbnodeError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as error:  # sealed by somebody who is not this version of bbnode
        raise SnapshotRefused(f"the snapshot is malformed: {':'.join(describe(error))}") from error
    saved = {slot: state for slot, _, state in fields["components"]}
    for cell in rt.cells:
        with _loading(cell.slot):
            cell.component.restore(saved[cell.slot])
        if cell.moves:
            cell.keep(saved[cell.slot])
    if same_life:
        neighbours.set_addresses(neighbours.book.lookup(neighbours.self_peer))
        return
    rt.begin_life(max(incarnation, rt.incarnation + 1))
    neighbours.set_addresses(own)
    # After events that waited in the snapshot, and before new ones.
    for peer in neighbours.peers.everyone():
        lost = ev.PeerDisconnected(peer=peer, reason="this node restarted", ours=True)
        rt.ingress.push(lost, must=True)


@_collector_paused()
def adopt_components(rt: Runtime, data: bytes, slots: Container[str] | None) -> Adopted:
    """Load the states of components from a snapshot of another version of the program.

    A component takes over (`carry_over`) the state that its slot had, if that one was of its type,
    and if it is among `slots` (None: all). Executions and tables of the other version are not
    looked at. Raises SnapshotRefused; StateRefused where a component refuses its state: then the
    node has to be installed again.
    """
    fields = parse(data)
    if fields["peer"] != rt.neighbours.self_peer.to_bytes():
        raise SnapshotRefused("the snapshot is another peer's; start this node without it")
    saved = {slot: (type_name, state) for slot, type_name, state in fields["components"]}
    taken: list[str] = []
    parts: dict[str, CarriedOver] = {}
    left = dict.fromkeys(saved, "this version has no such slot")
    for cell in rt.cells:
        slot = cell.slot
        if slot not in saved:
            continue
        type_name, state = saved[slot]
        if type_name != cell.binding.type_name:
            left[slot] = f"it is of a {type_name}, and the slot holds a {cell.binding.type_name}"
        elif slots is not None and slot not in slots:
            left[slot] = "its component refuses it"
        else:
            with _loading(slot):
                told = cell.component.carry_over(state)
            if told.taken or told.left:
                parts[slot] = told
            taken.append(slot)
            del left[slot]
    return Adopted(taken=tuple(taken), left=left, parts=parts)


def saved_components(data: bytes) -> dict[str, tuple[str, bytes]]:
    """Return type name and state of each slot in a snapshot. Raises SnapshotRefused."""
    return {slot: (type_name, state) for slot, type_name, state in parse(data)["components"]}


def _check_components(rt: Runtime, rows: Sequence[Sequence[Any]]) -> None:
    saved = {slot: type_name for slot, type_name, _ in rows}
    installed = {cell.slot: cell.binding.type_name for cell in rt.cells}
    if saved != installed:
        raise SnapshotRefused(
            f"the snapshot holds the components {sorted(saved)} and this node has "
            f"{sorted(installed)}, of these types; it belongs to another artifact"
        )


@contextmanager
def _loading(slot: str) -> Iterator[None]:
    """Turn whatever a component raises while it loads its state into StateRefused."""
    try:
        yield
    except BbnodeError as error:
        raise StateRefused(f"slot {slot!r}: {error}", slot) from error
    except BaseException as error:  # the boundary to a component's author
        let_stop(error)
        raise StateRefused(f"slot {slot!r}: {': '.join(describe(error))}", slot) from error


# -- bytes -----------------------------------------------------------------------------------

# Field -> type, of the body.
_FIELDS: Mapping[str, type] = {
    "version": int,
    "peer": bytes,
    "program": bytes,
    "components": list,
    "tables": dict,
    "lists": dict,
}


def pack(plain: Any) -> bytes:
    """Return plain data as msgpack, integers of any size included. Raises SnapshotFailed."""
    try:
        return bytes(msgpack.packb(plain, default=_long_int))
    except (ValueError, TypeError, OverflowError) as error:
        raise SnapshotFailed(f"the state can't be written: {error}") from error


def unpack(body: bytes) -> Any:
    """Read what `pack` wrote. Raises ValueError (or a kind of it) and msgpack's errors."""
    return msgpack.unpackb(body, max_ext_len=0, max_bin_len=len(body), object_hook=_read_long_int)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Return magic, digest and body."""
    body = pack(fields)
    return b"".join((_MAGIC, hashlib.sha256(body).digest(), body))


def _long_int(value: Any) -> dict[str, str]:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return {_LONG_INT: hex(value)}


def _read_long_int(found: dict[Any, Any]) -> Any:
    text = found.get(_LONG_INT)
    return found if text is None else int(text, 16)


def parse(data: bytes) -> dict[str, Any]:
    """Return the fields of a snapshot, checked as far as their forms go. Raises SnapshotRefused."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < start:
        raise SnapshotRefused("not a snapshot of this kind of node, or cut short")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise SnapshotRefused("the checksum does not fit: the snapshot is torn or was changed")
    try:
        fields = unpack(body)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise SnapshotRefused(f"the snapshot can't be read: {error}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != SNAPSHOT_VERSION:
        raise SnapshotRefused(
            f"the snapshot has format {version!r}, this bbnode reads {SNAPSHOT_VERSION}"
        )
    for name, kind in _FIELDS.items():
        if type(fields.get(name)) is not kind:
            raise SnapshotRefused(f"the snapshot's {name!r} is missing or of the wrong type")
    if not all(
        isinstance(row, list) and [type(item) for item in row] == [str, str, bytes]
        for row in fields["components"]
    ):
        raise SnapshotRefused("the snapshot's components are malformed")
    return dict(fields)
