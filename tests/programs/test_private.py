"""DPFedAvg: rounds by the formulas of the papers, attacks on them, and the budget."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import PrivateSum, PrivateSumConfig, epsilon_after, values
from bbnode.components.privacy.accounting import PrivacyLedger, epsilon_of, library
from bbnode.components.privacy.errors import (
    AccountantUnavailable,
    BudgetSpent,
    LedgerUnavailable,
    NoSuchRelease,
)
from bbnode.components.secure_aggregation import noise as discrete
from bbnode.dsl import BadArgument
from bbnode.engine import install
from bbnode.engine.record.replay import RecordReader, Replay
from bbnode.ir.peer import PeerId
from bbnode.ir.values import Composite, ResponseBatch
from bbnode.programs import (
    DPFedAvg,
    FedAdam,
    FederatedTraining,
    FedNova,
    FedProx,
    Scaffold,
    SecureTraining,
)
from tests.programs.files import compiled
from tests.programs.strategies.federation import SOFTMAX, Federation, close

SMALL: dict[str, Any] = {"noise": 1e-4, "epsilon": 1e30, "clip": 0.05}


def made(base: type[FederatedTraining] = DPFedAvg, **given: Any) -> Any:
    return base(**{**SOFTMAX, **given})


def moves(federation: Federation, w: np.ndarray) -> list[np.ndarray]:
    return [client.trained(w) - w for client in federation.clients]


def test_a_round_is_the_clipped_sum_over_a_fixed_number(tmp_path: Path) -> None:
    """With next to no noise it is the formula: 1/3 sum of moves, each of length 0.05 at most."""
    federation = Federation(tmp_path, made(**SMALL))
    w = federation.start
    for found in federation.rounds(3):
        clipped = [d * min(1, 0.05 / np.linalg.norm(d)) for d in moves(federation, w)]
        assert max(map(np.linalg.norm, moves(federation, w))) > 0.05
        w = w + sum(clipped) / 3
        close(found["model"], w, 2e-5)
        w = np.asarray(found["model"], np.float64)
        assert found["stats"]["contributors"] == 3
        assert found["stats"]["noise_deviation"] == pytest.approx(0.05 * 1e-4 / 3)


def test_it_goes_with_optimizers_of_the_server_and_training_of_clients(tmp_path: Path) -> None:
    class Private(DPFedAvg, FedProx, FedAdam): ...

    federation = Federation(tmp_path, made(Private, proximal=0.0, tau=1e-2, **SMALL))
    w = federation.start
    (found,) = federation.rounds(1)
    d = sum(x * min(1, 0.05 / np.linalg.norm(x)) for x in moves(federation, w)) / 3
    v = 0.99 * 1e-4 + 0.01 * d**2
    rate = federation.program.server_learning_rate
    close(found["model"], w + rate * 0.1 * d / (np.sqrt(v) + 1e-2), 2e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"evaluate": "clients"}, {"weighted": True}, {"deltas": False}, {"noise": 0},
        {"noise": 1e-9}, {"delta": 1.0}, {"delta": 0}, {"epsilon": float("inf")}, {"clip": 0},
        {"population": 2}, {"accountant": "moments"}, {"aggregator": "bbnode.Median"},
        {"codec": "bbnode.Int8Codec"}, {"quantile": 0.5, "noise": 1.0, "clients": 3},
        {"quantile": 1.0},
        {"quantile": 0.5, "count_noise": 9, "codec_down": "bbnode.BFloat16Codec"},
    ],
)  # fmt: skip
def test_what_would_not_be_private_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        made(**given).check()


@pytest.mark.parametrize("other", [SecureTraining, Scaffold, FedNova])
def test_strategies_with_steps_of_their_own_are_refused(other: type[FederatedTraining]) -> None:
    for bases in ((DPFedAvg, other), (other, DPFedAvg)):
        with pytest.raises(BadArgument):
            made(type("Mixed", bases, {}), optimizer="sgd").check()


def test_a_round_beyond_the_budget_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    budget = epsilon_after(2, noise=1.0, delta=1e-5) + 1e-9
    federation = Federation(tmp_path, made(noise=1.0, epsilon=budget))
    spent = [found["stats"]["epsilon"] for found in federation.rounds(2)]
    assert spent == [pytest.approx(epsilon_after(n, noise=1.0, delta=1e-5)) for n in (1, 2)]
    asked = [len(node.failures()) for node in federation.nodes]
    before = federation.nodes[0].component("local").params(None).copy()
    execution = federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    assert "model" not in federation.server.outputs(execution)
    failures = federation.server.failures()
    assert any("beyond the budget" in str(each) for each in failures)
    assert [each.is_final for each in failures if "beyond the budget" in str(each)] == [True]
    np.testing.assert_array_equal(federation.nodes[0].component("local").params(None), before)
    assert [len(node.failures()) for node in federation.nodes] == asked


def test_rounds_at_once_do_not_overspend(tmp_path: Path) -> None:
    budget = epsilon_after(2, noise=1.0, delta=1e-5) + 1e-9
    federation = Federation(tmp_path, made(noise=1.0, epsilon=budget))
    _ = federation.start
    runs = [federation.server.invoke("server", {"tick": values.TRIGGER}) for _ in range(5)]
    federation.net.run_until_idle()
    made_models = ["model" in federation.server.outputs(each) for each in runs]
    assert sum(made_models) == 2


def test_poisson_samples_are_drawn_and_charged_as_such(tmp_path: Path) -> None:
    program = made(noise=1.0, clients=2, population=3, epsilon=1e3, deadline_s=5.0)
    federation = Federation(tmp_path, program)
    counts = []
    for _ in range(8):
        execution = federation.server.invoke("server", {"tick": values.TRIGGER})
        federation.net.run_until_idle()
        found = federation.server.outputs(execution)
        if "stats" in found:
            counts.append(found["stats"]["contributors"])
            spent = found["stats"]["epsilon"]
            rounds = found["stats"]["rounds"]
    assert len(set(counts)) > 1
    assert spent == pytest.approx(epsilon_after(rounds, noise=1.0, delta=1e-5, sampling=2 / 3))


def test_a_round_that_nobody_is_drawn_for_fails_and_is_charged(tmp_path: Path) -> None:
    federation = Federation(tmp_path, made(noise=1.0, clients=1, population=10**6))
    _ = federation.start
    federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    (failure,) = federation.server.failures()
    assert failure.kind == "QuorumNotReached"
    assert federation.server.component("privacy")._ledger.charges == {(1e-6, 1.0): 1}


def test_the_norm_follows_a_quantile(tmp_path: Path) -> None:
    """Andrew et al., algorithm 1, by numpy: C <- C exp(-0.2 (share - 0.5))."""
    program = made(quantile=0.5, count_noise=0.01, noise=1e-4, epsilon=1e30, clip=0.05)
    federation = Federation(tmp_path, program)
    w, norm = federation.start, 0.05
    for found in federation.rounds(4):
        lengths = [float(np.linalg.norm(d)) for d in moves(federation, w)]
        stats = found["stats"]
        assert stats["clip"] == pytest.approx(norm)
        w = (
            w
            + sum(d * min(1, norm / n) for d, n in zip(moves(federation, w), lengths, strict=True))
            / 3
        )
        close(found["model"], w, 2e-5)
        w = np.asarray(found["model"], np.float64)
        share = sum(n <= norm for n in lengths) / 3
        assert stats["unclipped"] == pytest.approx(share, abs=0.03)
        norm *= np.exp(-0.2 * (stats["unclipped"] - 0.5))
        assert stats["next_clip"] == pytest.approx(norm)


def test_a_server_that_crashed_goes_on_with_what_it_spent(tmp_path: Path) -> None:
    budget = epsilon_after(2, noise=1.0, delta=1e-5) + 1e-9
    file = tmp_path / "ledger.json"
    told = {"privacy": {"ledger": str(file)}}
    federation = Federation(tmp_path, made(noise=1.0, epsilon=budget), server=told)
    _ = federation.start
    federation.server.checkpoint()  # before anything was spent: an old snapshot
    assert len(list(federation.rounds(1))) == 1
    federation.net.crash(federation.server)
    federation.net.restart(federation.server)
    federation.net.run_until_idle()
    (second,) = federation.rounds(1)
    assert second["stats"]["rounds"] == 2
    execution = federation.server.invoke("server", {"tick": values.TRIGGER})
    federation.net.run_until_idle()
    assert "model" not in federation.server.outputs(execution)
    assert json.loads(file.read_text()) == [[1.0, 1.0, 2]]


def test_a_record_of_the_server_replays_without_its_randomness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: dict[PeerId, list[bytes]] = {}

    def recording(*args: Any, peer_id: PeerId, **settings: Any) -> Any:
        sink = frames.setdefault(peer_id, []).append
        return install(*args, peer_id=peer_id, record=sink, **settings)

    monkeypatch.setattr("bbnode.sim.network.install", recording)
    program = made(quantile=0.5, count_noise=1.0, noise=1.0, epsilon=1e3)
    federation = Federation(tmp_path, program)
    _ = federation.start
    assert len(list(federation.rounds(2))) == 2
    data = b"".join(frames[federation.server.peer_id])
    first, *entries = list(RecordReader(io.BytesIO(data).read))
    replay = Replay(first, compiled(program))
    polls = [found for entry in entries if (found := replay.feed(entry)) is not None]
    assert len(polls) > 5
    assert all(poll.same for poll in polls)


# -- the component --------------------------------------------------------------------------


class Context:
    """The parts of an OpContext that the component uses."""

    def __init__(self, execution: int = 1, seed: int = 0) -> None:
        self.execution = execution
        self._rng = np.random.default_rng(seed)

    def random_bytes(self, count: int) -> bytes:
        return self._rng.bytes(count)


PEERS = [PeerId(bytes([0, 8, 8, 1, 0x12, 4, 0, 0, 0, i])) for i in range(6)]


def component(**given: Any) -> PrivateSum:
    settings = {"size": 4, "clients": 3, "noise": 1.0, "epsilon": 100.0, "delta": 1e-5, **given}
    return PrivateSum(PrivateSumConfig(**settings))


def answers(*updates: Any) -> ResponseBatch:
    rows = [(p, Composite((u, values.Metadata()))) for p, u in zip(PEERS, updates, strict=False)]
    return ResponseBatch(responses=tuple(rows))


def released(made: PrivateSum, *updates: Any, execution: int = 1) -> Any:
    context: Any = Context(execution)
    made.begin(context, values.PeerIdVec(PEERS[: made.config.clients]))
    return made.release(context, answers(*updates))


def f32(*given: float) -> np.ndarray:
    return np.array(given, np.float32)


def test_a_client_that_lies_moves_the_sum_by_the_norm_at_most() -> None:
    mean, stats = released(
        component(noise=1e-5, epsilon=1e30),
        f32(3e38, 0, 0, 0), f32(np.nan, 0, 0, 0), f32(0, np.inf, 0, 0), f32(1),
        np.zeros(4), "nothing",
    )  # fmt: skip
    close(mean, [1 / 3, 0, 0, 0], 1e-4)
    assert (stats["contributors"], stats["refused"]) == (1, 5)


def test_the_noise_has_the_deviation_that_is_told() -> None:
    mean, stats = released(component(size=200_000, clip=2.0, noise=1.5))
    deviation = float(np.asarray(mean, np.float64).std())
    assert deviation == pytest.approx(2.0 * 1.5 / 3, rel=0.01)
    assert stats["noise_deviation"] == pytest.approx(1.0)
    assert abs(float(mean.mean())) < 0.01


def test_the_noise_is_split_between_the_sum_and_the_count() -> None:
    """Andrew et al., theorem 1: z_delta = (z^-2 - (2 sigma_b)^-2)^-1/2."""
    made = component(quantile=0.5, count_noise=2.0, noise=1.2)
    assert made.update_noise == pytest.approx((1.2**-2 - 4.0**-2) ** -0.5)
    both = epsilon_of({(1.0, made.update_noise): 1, (1.0, 4.0): 1}, 1e-5)
    assert both == pytest.approx(epsilon_of({(1.0, 1.2): 1}, 1e-5), rel=1e-6)


def test_a_round_is_released_once_and_only_where_it_was_charged() -> None:
    made = component()
    released(made, f32(1, 0, 0, 0))
    for execution in (1, 2):
        with pytest.raises(NoSuchRelease):
            made.release(Context(execution), answers(f32(1, 0, 0, 0)))  # type: ignore[arg-type]


def test_a_restart_or_other_settings_do_not_reset_what_was_spent(tmp_path: Path) -> None:
    budget = epsilon_after(2, noise=1.0, delta=1e-5) + 1e-9
    first = component(epsilon=budget)
    for execution in (1, 2):
        released(first, execution=execution)
    second = component(epsilon=budget, noise=3.0)  # other rounds to come, the same past
    second.restore(first.serialize())
    with pytest.raises(BudgetSpent):
        released(second, execution=3)
    assert second.serialize() == first.serialize()


def test_a_file_keeps_what_an_old_snapshot_forgot(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.json")
    budget = epsilon_after(2, noise=1.0, delta=1e-5) + 1e-9
    first = component(epsilon=budget, ledger=path)
    old = first.serialize()
    for execution in (1, 2):
        released(first, execution=execution)
    second = component(epsilon=budget, ledger=path)
    second.restore(old)
    with pytest.raises(BudgetSpent):
        released(second, execution=3)
    assert json.loads(Path(path).read_text()) == [[1.0, 1.0, 2]]


def test_no_round_begins_without_its_ledger(tmp_path: Path) -> None:
    made = component(ledger=str(tmp_path / "missing" / "ledger.json"))
    with pytest.raises(LedgerUnavailable):
        released(made)
    bad = tmp_path / "bad.json"
    for text in ("[[2.0, 1.0, 1]]", "[[1.0, 1.0, -1]]", "{", "[" * 100_000, "7"):
        bad.write_text(text)
        with pytest.raises(LedgerUnavailable):
            PrivacyLedger(str(bad))


def test_epsilon_is_that_of_the_library() -> None:
    """Sampling 0.01, noise 1.1, 10,000 steps; both accountants on their own give this."""
    dp = library()
    event = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.1))
    rdp = dp.rdp.RdpAccountant().compose(event, 10_000).get_epsilon(1e-5)
    found = epsilon_after(10_000, noise=1.1, delta=1e-5, sampling=0.01)
    assert found == pytest.approx(rdp) == pytest.approx(5.632, abs=1e-3)
    close_one = epsilon_after(100, noise=1.1, delta=1e-5, sampling=0.01, accountant="pld")
    assert close_one < epsilon_after(100, noise=1.1, delta=1e-5, sampling=0.01)


def test_without_the_library_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bbnode.components.libraries.find_spec", lambda _: None)
    with pytest.raises(AccountantUnavailable, match="pip install 'dp-accounting"):
        component()


def test_rounding_makes_no_update_longer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        long = rng.normal(size=64) * 10
        steps = (discrete.clipped(long, 1 - 2.0**-40) * 1000).astype(np.int64)
        assert np.linalg.norm(steps.astype(np.float64)) <= 1000
