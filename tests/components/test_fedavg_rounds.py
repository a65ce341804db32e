"""FedAvg with several rounds at once: what belongs to whom."""

from __future__ import annotations

import numpy as np
import pytest

from bbnode.components import errors
from bbnode.components.contracts import ComponentError
from bbnode.ir import codec
from bbnode.ir.values import Composite, Metadata, ResponseBatch
from tests.components.fakes import PEERS, Context, fedavg


def part(value: float, samples: int = 1) -> Composite:
    return Composite([np.full(2, value, np.float32), Metadata(num_samples=samples)])


def answers(value: float, *indices: int) -> ResponseBatch:
    return ResponseBatch(responses=tuple((PEERS[n], part(value)) for n in indices))


def of(execution: int, sender: int | None = None) -> Context:
    return Context(execution=execution, source_peer=None if sender is None else PEERS[sender])


def mean(aggregator, execution: int) -> tuple[float, int]:
    tensor, metadata = aggregator.aggregate(of(execution))
    return float(tensor[0]), int(metadata["contributors"])


def test_cohorts_of_rounds_at_the_same_time_do_not_mix() -> None:
    aggregator = fedavg()
    aggregator.contribute_all(of(1), answers(1.0, 0, 1))
    aggregator.contribute_all(of(2), answers(5.0, 0, 1, 2))
    assert mean(aggregator, 1) == (1.0, 2)
    assert mean(aggregator, 2) == (5.0, 3)


def test_a_nodes_own_contribution_stays_in_its_round() -> None:
    aggregator = fedavg()
    for execution, value in ((1, 1.0), (2, 9.0)):
        aggregator.contribute(of(execution), *part(value))
        aggregator.contribute_all(of(execution), answers(value, 1))
    assert mean(aggregator, 2) == (9.0, 2)
    assert mean(aggregator, 1) == (1.0, 2)


def test_what_was_sent_one_way_belongs_to_the_next_aggregate() -> None:
    aggregator = fedavg()
    aggregator.contribute(of(10, sender=1), *part(2.0))
    aggregator.contribute(of(11, sender=2), *part(4.0))
    aggregator.contribute_all(of(3), answers(6.0, 3))
    assert mean(aggregator, 3) == (4.0, 3)
    with pytest.raises(errors.NothingToAggregate):
        aggregator.aggregate(of(3))


def test_of_a_peer_that_did_both_the_answer_counts() -> None:
    aggregator = fedavg()
    aggregator.contribute(of(10, sender=1), *part(100.0))
    aggregator.contribute_all(of(3), answers(6.0, 1))
    assert mean(aggregator, 3) == (6.0, 1)


def test_rounds_that_never_aggregate_give_way() -> None:
    aggregator = fedavg(max_rounds=2)
    for execution in (1, 2, 3):
        aggregator.contribute_all(of(execution), answers(float(execution), 0))
    with pytest.raises(errors.NothingToAggregate, match="max_rounds"):
        aggregator.aggregate(of(1))
    assert mean(aggregator, 2) == (2.0, 1)
    assert mean(aggregator, 3) == (3.0, 1)
    with pytest.raises(ComponentError, match="max_rounds"):
        fedavg(max_rounds=0)


def test_rounds_survive_a_restore() -> None:
    aggregator = fedavg()
    aggregator.contribute(of(10, sender=1), *part(2.0))
    aggregator.contribute_all(of(1), answers(1.0, 0, 2))
    aggregator.contribute_all(of(2), answers(5.0, 0))
    aggregator.contribute_all(
        of(2), ResponseBatch(responses=((PEERS[4], part(1.0)), (PEERS[5], b"nonsense")))
    )
    again = fedavg()
    again.restore(aggregator.serialize())
    assert again.serialize() == aggregator.serialize()
    _, metadata = again.aggregate(of(2))
    assert (metadata["contributors"], metadata["refused"]) == (3, 1)
    assert mean(again, 1) == (1.0, 2)


def test_a_state_from_before_there_were_rounds_is_read() -> None:
    old = Composite(
        [
            Composite([Composite([PEERS[1], np.ones(2, np.float32), Metadata(num_samples=3)])]),
            Composite([Composite([PEERS[2], Metadata(reason="late")])]),
            Composite([]),
        ]
    )
    aggregator = fedavg()
    aggregator.restore(codec.encode_value(old))
    _, metadata = aggregator.aggregate(of(1))
    assert (metadata["num_samples"], metadata["refused"]) == (3, 1)


def test_the_bound_on_contributors_is_of_each_round() -> None:
    aggregator = fedavg(max_contributors=2)
    aggregator.contribute_all(of(1), answers(1.0, 0, 1, 2))
    aggregator.contribute_all(of(2), answers(1.0, 0, 1))
    assert mean(aggregator, 2) == (1.0, 2)
    assert mean(aggregator, 1) == (1.0, 2)


def test_a_state_of_the_release_before_is_read() -> None:
    waits = Composite([PEERS[1], np.full(2, 3, np.float32), Metadata(num_samples=3, loss=0.5)])
    late = Composite([PEERS[2], Metadata(reason="late")])
    head = Metadata(execution=7, missing=1, missing_why="gone")
    last = Composite([np.ones(2, np.float32)])
    rounds = Composite([Composite([head, Composite([waits]), Composite([late])])])
    saved = codec.encode_value(Composite([Composite([]), Composite([]), last, rounds]))
    aggregator = fedavg()
    aggregator.restore(saved)
    assert aggregator.serialize() == saved
    np.testing.assert_array_equal(aggregator.current_tensor(of(7)), [1, 1])
    # The answer that came before the restart counts, and is not replaced.
    again = ResponseBatch(responses=((PEERS[0], part(1.0)), (PEERS[1], part(9.0))))
    aggregator.contribute_all(of(7, sender=3), again)
    tensor, metadata = aggregator.aggregate(of(7, sender=3))
    np.testing.assert_array_equal(tensor, [2.5, 2.5])
    assert (metadata["missing"], metadata["refused"], metadata["loss"]) == (1, 2, 0.5)


def test_a_peer_that_answers_twice_counts_once_and_is_named() -> None:
    aggregator, ctx = fedavg(), of(1, sender=7)
    aggregator.contribute_all(ctx, answers(1.0, 1, 2, 1))
    aggregator.contribute_all(ctx, answers(9.0, 2, 3))
    tensor, metadata = aggregator.aggregate(ctx)
    assert metadata["contributors"] == 3
    assert sorted(ctx.refused) == [PEERS[1], PEERS[2]]
    assert str(PEERS[2]) in str(metadata["refused_why"])
    assert "answered in this round already" in str(metadata["refused_why"])
    np.testing.assert_allclose(tensor, 11 / 3, rtol=1e-6)
