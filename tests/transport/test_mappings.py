"""Memory of large messages: used again when nobody looks at it, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.transport.links.mappings import allocate, free_bytes, trim

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def nothing_free():
    trim()
    trim()
    assert free_bytes() == 0
    yield
    trim()
    trim()


def place_of(view) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("size", [1, 1000, 2 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("anchor", [0, 1, 63, 1000])
def test_the_largest_part_is_aligned(size, anchor):
    view = allocate(size, min(anchor, size - 1))
    assert len(view) == size
    if size >= MIB:
        assert (place_of(view) + anchor) % 64 == 0


def test_memory_is_used_again_once_the_last_view_is_gone():
    view = allocate(4 * MIB, 0)
    at, kept = place_of(view), np.frombuffer(view.toreadonly()[MIB:], np.float32)
    del view
    assert free_bytes() == 0
    other = allocate(4 * MIB, 0)
    assert place_of(other) != at
    assert float(kept[-1]) == 0
    del kept
    assert free_bytes() == 4 * MIB
    again = allocate(4 * MIB - 1000, 0)
    assert place_of(again) == at
    assert free_bytes() == 0


def test_a_mapping_serves_only_what_nearly_fills_it():
    view = allocate(8 * MIB, 0)
    del view
    small = allocate(2 * MIB, 0)
    assert free_bytes() == 8 * MIB
    larger = allocate(9 * MIB, 0)
    assert free_bytes() == 8 * MIB
    del small, larger


def test_what_nobody_wants_goes_back_to_the_system():
    view = allocate(4 * MIB, 0)
    del view
    trim()
    assert free_bytes() == 4 * MIB
    trim()
    assert free_bytes() == 0


def test_what_is_wanted_now_and_then_stays():
    for _ in range(5):
        view = allocate(4 * MIB, 0)
        del view
        trim()
        assert free_bytes() == 4 * MIB


def test_free_memory_is_bounded():
    views = [allocate(100 * MIB, 0) for _ in range(4)]
    views.clear()
    assert free_bytes() == 200 * MIB
    view = allocate(300 * MIB, 0)
    del view
    assert free_bytes() == 200 * MIB
