"""The state of a node as bytes, and back.

Rule: magic, SHA-256 of the body, body (one msgpack map). What is torn, changed, newer, of
another peer or of other components is refused with its reason. Sockets, threads' work and
executions are not in it; a restored node is a new incarnation, so that no id made before is
made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgpack

from bbnode.engine.errors import NodeBusy, SnapshotRefused
from bbnode.ir.errors import BbnodeError, DecodeError

if TYPE_CHECKING:
    from bbnode.engine.runtime import Runtime

SNAPSHOT_VERSION = 1
_MAGIC = b"BBSNAP01"
_DIGEST_BYTES = 32


def take_snapshot(rt: Runtime) -> bytes:
    """The state of a node between two polls; NodeBusy when a component works elsewhere."""
    components = []
    for cell in rt.cells:
        if cell.busy:
            raise NodeBusy(
                f"slot {cell.slot!r} is held by {cell.holder}; take the snapshot when it is done"
            )
        components.append((cell.slot, cell.binding.type_name, cell.component.serialize()))
    body = msgpack.packb(
        {
            "version": SNAPSHOT_VERSION,
            "peer": rt.self_peer.to_bytes(),
            "incarnation": rt.incarnation,
            "components": components,
            "address_book": rt.neighbours.book.export(),
            "counters": dict(rt.counts),
            "tokens": rt.parking.position,
        }
    )
    return _MAGIC + hashlib.sha256(body).digest() + bytes(body)


def restore_snapshot(rt: Runtime, data: bytes) -> None:
    """Take up a snapshot in a node that has not polled yet.

    Raises SnapshotRefused. Where a component refuses its part, others may have taken theirs:
    install the node anew then.
    """
    fields = _parse(data)
    if fields["peer"] != rt.self_peer.to_bytes():
        raise SnapshotRefused("the snapshot is another peer's; start this node without it")
    saved = {slot: (type_name, state) for slot, type_name, state in fields["components"]}
    installed = {cell.slot: cell.binding.type_name for cell in rt.cells}
    if {slot: type_name for slot, (type_name, _) in saved.items()} != installed:
        raise SnapshotRefused(
            f"the snapshot holds the components {sorted(saved)} and this node has "
            f"{sorted(installed)}, of these types; it belongs to another artifact"
        )
    for cell in rt.cells:
        try:
            cell.component.restore(saved[cell.slot][1])
        except BbnodeError as error:
            raise SnapshotRefused(f"slot {cell.slot!r}: {error}") from error
    own = rt.neighbours.own_addresses
    try:
        rt.neighbours.book.load(fields["address_book"])
    except (DecodeError, TypeError, ValueError) as error:
        raise SnapshotRefused(f"its address book can't be read: {error}") from error
    rt.neighbours.set_addresses(own)
    rt.counts.update(fields["counters"])
    rt.parking.skip_to(fields["tokens"])
    rt.set_incarnation(max(rt.incarnation, fields["incarnation"] + 1))


# Field -> type, of the body of version 1.
_FIELDS: Mapping[str, type] = {
    "version": int,
    "peer": bytes,
    "incarnation": int,
    "components": list,
    "address_book": list,
    "counters": dict,
    "tokens": int,
}


def _parse(data: bytes) -> dict[str, Any]:
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < start:
        raise SnapshotRefused("not a snapshot of this kind of node, or cut short")
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise SnapshotRefused("the checksum does not fit: the snapshot is torn or was changed")
    try:
        fields = msgpack.unpackb(body, max_ext_len=0, max_bin_len=len(body))
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
    rows = fields["components"]
    if not all(
        isinstance(row, list) and [type(item) for item in row] == [str, str, bytes] for row in rows
    ) or not all(type(n) is int for n in fields["counters"].values()):
        raise SnapshotRefused("the snapshot's components or counters are malformed")
    return dict(fields)
