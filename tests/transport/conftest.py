"""Shared by the transport tests."""

from __future__ import annotations

import pytest
import trio


@pytest.fixture
async def nursery():
    """A nursery that is cancelled when the test ends."""
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()
