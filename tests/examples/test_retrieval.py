"""Answers of many stores, merged by an aggregator of one's own while questions overlap."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.sim import MS
from tests.examples import retrieval


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gather_is_the_best_of_every_store(seed: int) -> None:
    network, door = retrieval.build_network(retrieval.compile_program(), seed)
    titles = retrieval.store_documents(network, door)
    assert sorted(titles.values()) == sorted(retrieval.DOCUMENTS)
    question = np.array([1, 5, 5], np.float32)
    door.deliver_event("door", "question", question)
    network.run_until_idle()
    (nearest,) = door.values("nearest")

    def unit(vector):
        return np.array(vector, np.float64) / np.linalg.norm(vector)

    best: dict[int, tuple[float, int]] = {}
    for number, title in titles.items():
        far = float(np.linalg.norm(unit(retrieval.DOCUMENTS[title]) - unit(question)))
        store = number // retrieval.IDS_PER_STORE
        best[store] = min(best.get(store, (far, number)), (far, number))
    expected = sorted(best.values())
    assert nearest[:, 0].astype(int).tolist() == [number for _, number in expected]
    np.testing.assert_allclose(nearest[:, 1], [far for far, _ in expected], atol=1e-6)
    assert not [failed for node in network.nodes for failed in node.failures()]


def test_two_questions_at_once_do_not_mix() -> None:
    network, door = retrieval.build_network(retrieval.compile_program())
    titles = retrieval.store_documents(network, door)
    for title in ("apples", "cars"):
        features = np.array(retrieval.DOCUMENTS[title], np.float32)
        door.deliver_event("door", "question", features)
    network.run_until_idle()
    firsts = {titles[int(rows[0, 0])] for rows in door.values("nearest")}
    assert firsts == {"apples", "cars"}


def test_a_store_that_is_gone_fails_the_question_by_its_deadline() -> None:
    network, door = retrieval.build_network(retrieval.compile_program())
    retrieval.store_documents(network, door)
    asked_ns = network.now_ns
    door.deliver_event("door", "question", np.ones(3, np.float32))
    network.run_until(lambda: network["encoder-0"].node.waiting() or
                      network["encoder-1"].node.waiting())  # fmt: skip
    network.crash("store-0")
    network.run_until_idle()
    assert not door.values("nearest")
    failed = [f.kind for name in ("encoder-0", "encoder-1") for f in network[name].failures()]
    assert failed == ["QuorumNotReached"]
    assert 5000 * MS <= network.now_ns - asked_ns < 5100 * MS
