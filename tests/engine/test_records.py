"""What Record keeps is bounded in number and in bytes, and paid for."""

from __future__ import annotations

from collections import Counter

import numpy as np

from bbnode.engine import stores
from bbnode.engine.ingress import ByteBudget
from bbnode.engine.stores import Records


def table(limit=None):
    budget, counts = ByteBudget(limit), Counter()
    return Records(budget, counts), budget, counts


def kept(ring):
    return [row[1] for row in ring.rows()]


def test_the_newest_stay_when_there_are_too_many(monkeypatch) -> None:
    monkeypatch.setattr(stores, "MAX_RECORDS", 3)
    ring, budget, _ = table()
    for n in range(5):
        ring.add(0, n, "a", np.zeros(10, np.uint8))
    assert kept(ring) == [2, 3, 4]
    assert budget.used == 30


def test_the_newest_stay_when_they_are_too_large(monkeypatch) -> None:
    monkeypatch.setattr(stores, "MAX_RECORD_BYTES", 100)
    ring, budget, counts = table()
    for n in range(5):
        ring.add(0, n, "a", np.zeros(40, np.uint8))
    assert kept(ring) == [3, 4]
    ring.add(0, 9, "a", np.zeros(101, np.uint8))
    assert kept(ring) == [3, 4]
    assert counts["records.dropped"] == 1
    assert budget.used == 80


def test_the_nodes_budget_holds_too() -> None:
    ring, budget, counts = table(100)
    ring.add(0, 1, "a", bytes(60))
    other = budget.charge(30)
    ring.add(0, 2, "a", bytes(60))
    assert kept(ring) == [2]
    other.release()
    blocked = budget.charge(40)
    ring.add(0, 3, "a", bytes(80))
    assert kept(ring) == []
    assert counts["records.dropped"] == 1
    blocked.release()
    assert budget.used == 0


def test_a_record_does_not_keep_its_envelope_alive() -> None:
    ring, _, _ = table()
    envelope = np.zeros(1000, np.uint8)
    ring.add(0, 1, "a", envelope[10:20])
    assert ring.rows()[0][3].base is None
