"""Shared by the transport tests."""

from __future__ import annotations

import pytest
import trio

from bbnode.transport.libp2p.transport import Libp2pTransport
from tests.transport.hosts import OurHost


@pytest.fixture(params=["lean", "libp2p"])
def each_transport(request, monkeypatch):
    """Run the test without py-libp2p's host, and with it."""
    for made in (Libp2pTransport, OurHost):
        defaults = made.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "py_libp2p", request.param == "libp2p")
    return request.param


@pytest.fixture
async def nursery():
    """A nursery that is cancelled when the test ends."""
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()
