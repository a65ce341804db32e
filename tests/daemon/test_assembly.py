from __future__ import annotations

import pytest

from bbnode.daemon.lifecycle.assembly import _transport_limits
from bbnode.transport.limits import TransportLimits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("envelope_bytes", "queue_bytes"),
    [(256 * KIB, 64 * MIB), (64 * MIB, 256 * MIB), (256 * MIB, GIB), (2 * GIB, GIB)],
)
def test_a_burst_of_the_largest_envelopes_fits(envelope_bytes: int, queue_bytes: int) -> None:
    limits = _transport_limits(envelope_bytes)
    assert (limits.max_message_bytes, limits.queue_bytes) == (envelope_bytes, queue_bytes)


def test_without_a_limit_the_transports_own_hold() -> None:
    assert _transport_limits(None) == TransportLimits()
