"""Ops on the address book.

Rule: Insert and InsertMany add a reference to a peer that is new, and append to one that is
known; Lookup fails for a peer that cannot be routed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multiaddr import Multiaddr

from bbnode.engine.errors import CannotRoute, InvalidOperand
from bbnode.engine.frame import Frame
from bbnode.engine.ops.build import Fire, OpBuild, binds
from bbnode.ir import keys
from bbnode.ir.peer import PeerId
from bbnode.ir.values import TRIGGER, AddressVec, Value

BOOK = keys.ADDRESS_BOOK_DOMAIN


@binds(BOOK, "Insert")
def _insert(build: OpBuild) -> Fire:
    build.arity(2, 0)
    peer_at, address_at = build.inputs
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        address = frame.values[address_at]
        if not isinstance(address, Multiaddr):
            raise InvalidOperand(f"{name}: {type(address).__name__} is not an address")
        _add(frame, _peer(name, frame.values[peer_at]), (address,))
        return TRIGGER

    return fire


@binds(BOOK, "InsertMany")
def _insert_many(build: OpBuild) -> Fire:
    build.arity(2, 0)
    peer_at, addresses_at = build.inputs
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        addresses = frame.values[addresses_at]
        if not isinstance(addresses, AddressVec):
            raise InvalidOperand(f"{name}: {type(addresses).__name__} is not a list of addresses")
        _add(frame, _peer(name, frame.values[peer_at]), addresses)
        return TRIGGER

    return fire


@binds(BOOK, "Lookup")
def _lookup(build: OpBuild) -> Fire:
    build.arity(1, 1)
    (peer_at,) = build.inputs
    name = build.flat.name

    def fire(frame: Frame) -> Any:
        peer = _peer(name, frame.values[peer_at])
        addresses = frame.rt.neighbours.book.lookup(peer)
        if not addresses:
            raise CannotRoute(f"{name}: no address of {peer} is known")
        return AddressVec(addresses)

    return fire


def _peer(name: str, value: Value) -> PeerId:
    if not isinstance(value, PeerId):
        raise InvalidOperand(f"{name}: {type(value).__name__} is not a peer")
    return value


def _add(frame: Frame, peer: PeerId, addresses: Sequence[Multiaddr]) -> None:
    book = frame.rt.neighbours.book
    if not addresses:
        raise InvalidOperand(f"no address given for {peer}")
    if peer not in book:
        book.add_peer(peer, addresses)
        return
    for address in addresses:
        book.register_address(peer, address)
