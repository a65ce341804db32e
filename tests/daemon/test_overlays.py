"""Selectors with an overlay, over libp2p: peers that know one of them meet the others."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from multiaddr import Multiaddr

from bbnode.components.selectors.cyclon import Cyclon
from bbnode.components.selectors.hyparview import HyParView
from bbnode.components.selectors.overlay import Overlay
from bbnode.engine import All, install
from bbnode.ir.values import TRIGGER
from bbnode.transport.base import Hello
from bbnode.transport.identity import Identity
from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.components.selectors.overlays import compiled
from tests.daemon.test_discovery import Peer, running, with_discovery

QUICK = {"period_s": 0.2, "deadline_s": 0.2}


def on_loopback(selector: type[Overlay], *bootstrap: Multiaddr, **config) -> Peer:
    identity = Identity.generate()
    model = compiled(selector)
    node = install(
        model, ["peer"], peer_id=identity.peer_id, config={"cohort": {**QUICK, **config}}
    )
    backend = Libp2pTransport(
        identity,
        listen=[Multiaddr("/ip4/127.0.0.1/tcp/0")],
        hello=Hello(classes=node.classes, targets=node.targets),
    )
    node.run_bootstrap(All())
    return with_discovery(node, backend, *bootstrap)


def view_of(one: Peer) -> set:
    (cell,) = (cell for cell in one.node._rt.cells if cell.slot == "cohort")
    return set(cell.component.neighbours())


@pytest.mark.parametrize(
    ("selector", "config"),
    [(Cyclon, {"view_size": 4, "shuffle_size": 3}), (HyParView, {"active_size": 3})],
    ids=["Cyclon", "HyParView"],
)
async def test_peers_that_know_one_meet_the_others_and_forget_who_left(selector, config) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(on_loopback(selector, **config)))
        (address,) = first.backend.listen_addresses()
        others = [
            await stack.enter_async_context(running(on_loopback(selector, address, **config)))
            for _ in range(2)
        ]
        known: dict = {}

        def all_met(one: Peer) -> bool:
            known.setdefault(one.node.peer_id, set()).update(view_of(one))
            return len(known[one.node.peer_id]) == 3

        async with running(on_loopback(selector, address, **config)) as last:
            for one in (first, *others, last):
                await one.until(lambda one=one: all_met(one))
            # A message to somebody that only the overlay told of.
            last.node.invoke("peer", {"tick": TRIGGER})
            stranger = others[0]
            await last.until(lambda: last.is_up(stranger))
        for one in (first, *others):
            await one.until(lambda one=one: last.node.peer_id not in view_of(one))
