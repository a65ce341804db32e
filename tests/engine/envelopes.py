"""Envelopes by hand: as peers send them, and as they should not."""

from __future__ import annotations

from bbnode.ir import codec
from bbnode.ir.address import site_suffix
from bbnode.ir.envelope import (
    CorrelationKind,
    SlotFill,
    WireCorrelation,
    WireEnvelope,
    encode_envelope,
)
from bbnode.ir.values import type_of


def envelope(
    source,
    site,
    value,
    kind=CorrelationKind.NONE,
    wire_req_id=1,
    *,
    payload=None,
    type_hash=None,
    trigger_only=False,
    remaining_ns=0,
    claimed=(),
):
    fill = SlotFill(
        dest_suffix=site_suffix(site),
        payload=codec.encode_value(value) if payload is None else payload,
        type_hash=type_of(value).wire_hash if type_hash is None else type_hash,
        trigger_only=trigger_only,
    )
    return b"".join(
        encode_envelope(
            WireEnvelope(
                fills=(fill,),
                correlation=WireCorrelation(kind=kind, wire_req_id=wire_req_id),
                src_peer_bytes=source.to_bytes(),
                remaining_deadline_ns=remaining_ns,
                src_peer_addresses=claimed,
            )
        )
    )
