"""SecureTraining: the mean of the survivors' updates, whoever drops out or lies."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbnode.components import ComponentError, offload, values
from bbnode.components.secure_aggregation.messages import pack_by_peer, pack_peers
from bbnode.components.secure_aggregation.plan import RoundPlan
from bbnode.dsl import BadArgument
from bbnode.engine import install, steps
from bbnode.engine.record.replay import RecordReader, Replay
from bbnode.ir.peer import PeerId
from bbnode.programs import FedAdam, FederatedTraining, SecureTraining
from bbnode.sim import Network, SimNode
from tests.programs.files import CLASSES, FEATURES, compiled, examples

CLIENTS = 7  # 5 have to stay
STEPS = ("advertise_keys", "share_keys", "mask", "confirm", "reveal")


class Secure(SecureTraining):
    model = (FEATURES, 8, CLASSES)
    clients = CLIENTS
    evaluate = "none"
    deadline_s = 5.0


class Federation:
    """A server and its clients; `updates` is what each client masked, by name."""

    def __init__(
        self, program: FederatedTraining, folder: Path, *, keys: bool = True, **settings: Any
    ) -> None:
        self.net = Network(1, keys=keys)
        artifact = _artifact(type(program), *sorted(vars(program).items()))
        self.program = program
        test = {"test": {"path": examples(folder, "test", 40, seed=99)}}
        on_server = {} if program.evaluate == "none" else test
        self.server = self.net.add("server", artifact, ["server"], config=on_server)
        self.updates: dict[str, tuple[np.ndarray, int]] = {}
        self.clients = {}
        for i in range(program.clients):
            config = {"data": {"path": examples(folder, f"c{i}", 20 + 3 * i, seed=i)}}
            if settings:
                config["masking"] = settings
            node = self.net.add(f"c{i}", artifact, ["client"], config=config)
            self.clients[node.name] = node
            if isinstance(program, SecureTraining):
                self._listen(node)

    def _listen(self, node: SimNode) -> None:
        masking = self.component(node)
        mask = masking.mask

        @offload
        def heard(ctx: Any, mail: Any, tensor: Any, metadata: Any) -> Any:
            self.updates[node.name] = np.array(tensor), int(metadata["num_samples"])
            return mask(ctx, mail, tensor, metadata)

        masking.mask = heard

    @staticmethod
    def component(node: SimNode) -> Any:
        return node.component("masking")

    def change(self, name: str, step: str, answer: Callable[..., Any]) -> None:
        """Have a client take a step by `answer(step, ctx, *inputs)`."""
        component = self.component(self.clients[name])
        real = getattr(component, step)
        setattr(component, step, offload(lambda ctx, *inputs: answer(real, ctx, *inputs)))

    def round(self) -> dict[str, Any]:
        execution = self.server.invoke("server", {"tick": values.TRIGGER})
        self.net.run_until_idle()
        return self.server.outputs(execution)

    def weights(self) -> np.ndarray:
        return self.server.component("global").params(None)

    def mean(self, *left_out: str) -> np.ndarray:
        """The mean of the updates, of numpy's sum of quantised values."""
        ring = RoundPlan.of(self.program.privacy.agreed(self.program)).ring
        weighted = self.program.weighted
        summed, total = np.zeros(self.program.size, np.int64), 0
        for name, (update, weight) in self.updates.items():
            weight = weight if weighted else 1
            if name not in left_out:
                clipped = np.clip(update.astype(np.float64), -ring.clip, ring.clip)
                summed += weight * np.rint(clipped * (ring.levels / ring.clip)).astype(np.int64)
                total += weight
        return (summed * (ring.clip / ring.levels / total)).astype(np.float32)


@cache
def _artifact(program: type[FederatedTraining], *arguments: Any) -> Any:
    return compiled(program(**{k: v for k, v in arguments if not k.startswith("_")}))


def failing(_real: Any, _ctx: Any, *_inputs: Any) -> Any:
    raise ComponentError("dropped out")


@pytest.mark.parametrize("weighted", [False, True])
def test_the_new_weights_are_moved_by_the_mean_of_the_quantised_updates(
    tmp_path: Path, weighted: bool
) -> None:
    made = Federation(Secure(weighted=weighted), tmp_path)
    for _ in range(2):
        before = made.weights()
        found = made.round()
        np.testing.assert_array_equal(found["model"], before + made.mean())
        assert dict(found["stats"]) == {
            "num_samples": sum(20 + 3 * i if weighted else 1 for i in range(CLIENTS)),
            "contributors": CLIENTS,
            "refused": 0,
        }
    assert made.server.failures() == []


def test_it_is_fedavg_but_for_the_rounding(tmp_path: Path) -> None:
    class Plain(FederatedTraining):
        model = (FEATURES, 8, CLASSES)
        clients = CLIENTS
        deltas = True

    secure = Federation(Secure(evaluate="server", weighted=True), tmp_path).round()
    plain = Federation(Plain(), tmp_path, keys=True).round()
    np.testing.assert_allclose(secure["model"], plain["model"], atol=1e-4)
    assert secure.keys() == plain.keys()


def test_the_server_is_sent_no_update(tmp_path: Path) -> None:
    """Nothing that a client sends holds its update, its number of examples, or its loss."""
    sent: list[bytes] = []

    def observe(_now: int, node: SimNode, step: Any) -> None:
        if isinstance(step, steps.SendEnvelope) and node.name != "server":
            sent.append(b"".join(map(bytes, step.parts)))

    made = Federation(Secure(), tmp_path)
    made.net._observe = observe
    made.round()
    everything = b"".join(sent)
    assert len(everything) > CLIENTS * made.program.size * 4
    for update, _ in made.updates.values():
        assert update.tobytes()[:16] not in everything
    for word in (b"num_samples", b"loss"):
        assert word not in everything


@pytest.mark.parametrize("step", STEPS)
def test_clients_may_drop_out_at_every_step(tmp_path: Path, step: str) -> None:
    """One fails, and one crashes: two are as many as seven clients can lose."""
    made = Federation(Secure(), tmp_path)
    made.change("c3", step, failing)

    def crashing(name: str) -> Callable[..., Any]:
        def crash(real: Any, ctx: Any, *inputs: Any) -> Any:
            made.net.at(made.net.now_ns, lambda: made.net.crash(name))
            return real(ctx, *inputs)

        return crash

    made.change("c5", step, crashing("c5"))
    before = made.weights()
    found = made.round()
    early = step in ("advertise_keys", "share_keys", "mask")
    left_out = ("c3", "c5") if early else ()
    np.testing.assert_array_equal(found["model"], before + made.mean(*left_out))
    assert found["stats"]["contributors"] == CLIENTS - len(left_out)


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_the_round_fails_and_the_next_one_works(
    tmp_path: Path, step: str
) -> None:
    made = Federation(Secure(), tmp_path)
    for i in range(3):
        made.change(f"c{i}", step, failing)
    before = made.weights()
    assert "model" not in made.round()
    (failure,) = made.server.failures()
    assert failure.kind in ("QuorumNotReached", "TooFewClients")
    np.testing.assert_array_equal(made.weights(), before)
    for i in range(3):
        delattr(made.component(made.clients[f"c{i}"]), step)
    assert made.round()["stats"]["contributors"] == CLIENTS


def test_a_client_that_restarts_drops_out_and_comes_back(tmp_path: Path) -> None:
    """A snapshot in the middle of a round holds its id alone, and masks are not used again."""
    made = Federation(Secure(), tmp_path)
    saved: list[bytes] = []

    def restart(real: Any, ctx: Any, *inputs: Any) -> Any:
        node = made.clients["c4"]

        def act() -> None:
            node.checkpoint()
            saved.append(made.component(node).serialize())
            made.net.crash(node)
            made.net.restart(node)

        made.net.at(made.net.now_ns + 1, act)
        return real(ctx, *inputs)

    made.change("c4", "share_keys", restart)
    before = made.weights()
    found = made.round()
    assert [len(each) for each in saved] == [16]
    assert found["stats"]["contributors"] == CLIENTS - 1
    np.testing.assert_array_equal(found["model"], before + made.mean("c4"))
    assert made.round()["stats"]["contributors"] == CLIENTS


def test_a_server_that_restarts_ends_the_round(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path)

    def restart(real: Any, ctx: Any, *inputs: Any) -> Any:
        def act() -> None:
            made.server.checkpoint()
            made.net.crash(made.server)
            made.net.restart(made.server)

        made.net.at(made.net.now_ns + 1, act)
        return real(ctx, *inputs)

    made.change("c4", "share_keys", restart)
    assert "model" not in made.round()
    delattr(made.component(made.clients["c4"]), "share_keys")
    assert made.round()["stats"]["contributors"] == CLIENTS


def test_answers_of_a_liar_are_left_out_by_name(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path)
    lies: dict[str, tuple[str, Any]] = {
        "c0": ("advertise_keys", b"no keys"),
        "c1": ("share_keys", b"no letters"),
    }
    for name, (step, lie) in lies.items():
        made.change(name, step, lambda _real, _ctx, *_inputs, lie=lie: lie)
    before = made.weights()
    found = made.round()
    np.testing.assert_array_equal(found["model"], before + made.mean(*lies))
    assert found["stats"]["refused"] == 2
    for name in lies:
        assert str(made.clients[name].peer_id) in found["stats"]["refused_why"]


def test_a_vector_of_a_wrong_size_is_left_out_by_name(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path)
    short = (np.zeros(3, np.uint8), values.Metadata())
    made.change("c2", "mask", lambda _real, _ctx, *_inputs: short)
    assert "is not 68 words of 4 bytes" in made.round()["stats"]["refused_why"]


def test_a_client_whose_update_is_not_finite_drops_out(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path)

    def with_nan(real: Any, ctx: Any, mail: Any, tensor: Any, metadata: Any) -> Any:
        changed = np.array(tensor)
        changed[0] = np.nan
        return real(ctx, mail, changed, metadata)

    made.change("c2", "mask", with_nan)
    found = made.round()
    assert found["stats"]["contributors"] == CLIENTS - 1
    assert "NaN or infinity" in str(made.clients["c2"].failures())


def test_a_server_with_two_lists_learns_nothing(tmp_path: Path) -> None:
    """It has half of the clients sign a list without one of them, who is there."""
    made = Federation(Secure(), tmp_path)
    victim = made.clients["c6"].peer_id
    told: dict[str, bytes] = {}
    for i in range(CLIENTS - 1):
        name = f"c{i}"

        def other(real: Any, ctx: Any, listing: Any, name: str = name, i: int = i) -> Any:
            if i % 2:
                everybody = [node.peer_id for node in made.clients.values()]
                listing = listing[:16] + pack_peers(p for p in everybody if p != victim)
            told[name] = listing
            return real(ctx, listing)

        made.change(name, "confirm", other)
    before = made.weights()
    made.round()
    assert len(set(told.values())) == 2
    assert "did not sign the list" in str(made.server.failures())
    np.testing.assert_array_equal(made.weights(), before)


def test_a_server_that_hides_the_difference_is_caught_by_the_clients(tmp_path: Path) -> None:
    """It hands signatures of two lists on as if they were of one."""
    made = Federation(Secure(), tmp_path)
    server = made.server.component("secagg")
    victim = made.clients["c6"].peer_id
    signed: dict[PeerId, bytes] = {}
    for i in range(CLIENTS - 1):

        def other(real: Any, ctx: Any, listing: Any, i: int = i) -> Any:
            if i % 2:
                everybody = [node.peer_id for node in made.clients.values()]
                listing = listing[:16] + pack_peers(p for p in everybody if p != victim)
            signed[ctx.self_peer] = real(ctx, listing)
            return signed[ctx.self_peer]

        made.change(f"c{i}", "confirm", other)

    def collect(ctx: Any, responses: Any) -> Any:
        kept = np.array([True for _ in responses.responses])
        return kept, server._round(ctx).round_id + pack_by_peer(signed)

    server.collect_signatures = collect
    made.round()
    caught = [node for node in made.clients.values() if "did not sign" in str(node.failures())]
    assert len(caught) >= CLIENTS - 2
    assert made.server.failures()


def test_without_keys_of_their_own_nodes_do_not_take_part(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path, keys=False)
    assert "model" not in made.round()
    assert "Network(keys=True)" in str(made.clients["c0"].failures())


def test_a_node_with_other_settings_does_not_take_part(tmp_path: Path) -> None:
    made = Federation(Secure(), tmp_path, clip=100.0)
    made.round()
    assert "other settings" in str(made.clients["c0"].failures())


def test_members_are_each_nodes_own_setting(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(CLIENTS)]
    known = Federation(Secure(), tmp_path)
    ids = tuple(str(known.clients[name].peer_id) for name in names)
    found = Federation(Secure(), tmp_path, members=ids).round()
    assert found["stats"]["contributors"] == CLIENTS
    strict = Federation(Secure(), tmp_path, members=ids[:-1])
    strict.round()
    assert "none of this client's members" in str(strict.clients["c0"].failures())


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    def trace() -> Any:
        made = Federation(Secure(), tmp_path)
        made.round()
        return made.net.trace.digest

    assert trace() == trace()


def test_a_record_has_no_secret_and_replays_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: dict[PeerId, list[bytes]] = {}

    def recording(*args: Any, peer_id: PeerId, **settings: Any) -> Any:
        sink = frames.setdefault(peer_id, []).append
        return install(*args, peer_id=peer_id, record=sink, **settings)

    monkeypatch.setattr("bbnode.sim.network.install", recording)
    made = Federation(Secure(), tmp_path)
    client = made.clients["c1"]
    secrets: list[bytes] = []

    def look(real: Any, ctx: Any, *inputs: Any) -> Any:
        (_, found), *_ = made.component(client)._rounds.values()
        secrets.extend((found._letters, found._pairs, found._seed))
        return real(ctx, *inputs)

    made.change("c1", "confirm", look)
    made.round()
    data = b"".join(frames[client.peer_id])
    assert len(set(secrets)) == 3
    assert not any(secret in data for secret in secrets)

    first, *entries = list(RecordReader(io.BytesIO(data).read))
    replay = Replay(first, _artifact(Secure, *sorted(vars(made.program).items())))
    polls = [found for entry in entries if (found := replay.feed(entry)) is not None]
    assert len(polls) > 5
    assert all(poll.same for poll in polls)


def test_it_is_a_base_for_strategies(tmp_path: Path) -> None:
    class SecureAdam(Secure, FedAdam):
        weighted = True

    class PlainAdam(FedAdam):
        model = (FEATURES, 8, CLASSES)
        clients = CLIENTS
        evaluate = "none"

    secure = Federation(SecureAdam(), tmp_path)
    plain = Federation(PlainAdam(), tmp_path)
    for _ in range(2):
        one, other = secure.round(), plain.round()
    assert secure.server.failures() == []
    # Adam divides by the size of a step, so that rounding shows where that is next to nothing.
    assert np.median(np.abs(one["model"] - other["model"])) < 1e-3


def test_each_client_counts_once_where_it_is_told_so(tmp_path: Path) -> None:
    made = Federation(Secure(weighted=False, codec_down="bbnode.ZstdCodec"), tmp_path)
    before = made.weights()
    found = made.round()
    assert found["stats"]["num_samples"] == CLIENTS
    np.testing.assert_array_equal(found["model"], before + made.mean())


def test_clients_add_noise_and_the_server_says_how_private_it_is(tmp_path: Path) -> None:
    made = Federation(Secure(weighted=False, norm=0.5, client_noise=1.0), tmp_path)
    before = made.weights()
    found = made.round()
    assert 0 < found["stats"]["zcdp_rho"] < 0.5
    moved = (found["model"] - before) * CLIENTS
    clipped = [u * min(1, 0.5 / np.linalg.norm(u)) for u, _ in made.updates.values()]
    noise = moved - sum(clipped)
    assert 0.3 < noise.std() / (0.5 * np.sqrt(CLIENTS / 3)) < 3


def test_fewer_neighbours(tmp_path: Path) -> None:
    made = Federation(Secure(clients=12, corrupt=0.0, neighbours=8, evaluate="none"), tmp_path)
    made.change("c3", "mask", failing)
    before = made.weights()
    found = made.round()
    np.testing.assert_array_equal(found["model"], before + made.mean("c3"))


def test_with_groups_a_client_that_sends_junk_costs_its_group(tmp_path: Path) -> None:
    made = Federation(Secure(clients=9, groups=3, corrupt=0.0), tmp_path)
    before = made.weights()
    found = made.round()
    assert found["stats"]["groups"] == 3
    assert found["stats"]["contributors"] == 9
    assert 1e-4 < np.abs(found["model"] - before - made.mean()).max() < 0.1  # a median, and no mean

    def junk(real: Any, ctx: Any, *inputs: Any) -> Any:
        words, told = real(ctx, *inputs)
        return np.random.default_rng(0).integers(0, 256, words.size).astype(np.uint8), told

    made.change("c2", "mask", junk)
    found = made.round()
    assert (found["stats"]["groups"], found["stats"]["contributors"]) == (2, 6)
    assert "one of them lied" in found["stats"]["groups_lost"]
    assert made.server.failures() == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"groups": 2}, "groups=2 is not 1, nor 3 to 7"),
        ({"groups": 3}, "take fewer groups or a smaller corrupt"),
        ({"groups": 0}, "groups=0 has to be"),
        ({"clients": 1}, "clients=1 has to be an integer of at least 2"),
        ({"threshold": 3}, "threshold=3 is outside 5 .. 7"),
        ({"neighbours": 5}, "no even number"),
        ({"clip": 0}, "clip=0 has to be"),
        ({"clip": "1"}, "clip='1' has to be"),
        ({"norm": -1}, "norm=-1 has to be"),
        ({"client_noise": True}, "client_noise=True has to be"),
        ({"client_noise": 1.0}, "needs a norm"),
        ({"corrupt": 1}, "corrupt=1 has to be"),
        ({"corrupt": "all"}, "corrupt='all' has to be"),
        ({"levels": -1}, "levels=-1"),
        ({"levels": 1 << 62}, "64 are the most"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"max_samples": 50}, "max_samples=50 has to be left out"),
        ({"weighted": 1}, "weighted=1"),
        ({"codec": "bbnode.Int8Codec"}, "codec="),
        ({"deltas": False}, "deltas=False"),
        ({"quorum": 5}, "quorum=5"),
        ({"aggregator": "bbnode.FedAvg"}, "aggregator="),
        ({"evaluate": "clients"}, "no secret"),
        ({"evaluate": "both"}, "no secret"),
    ],
)
def test_arguments_that_can_not_be_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(BadArgument, match=why):
        Secure(**wrong).build()


def test_a_client_that_weighs_less_than_its_examples_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Federation(Secure(weighted=True, max_samples=30), tmp_path)
    for _ in range(2):
        assert made.round()["stats"]["num_samples"] == sum(
            min(30, 20 + 3 * i) for i in range(CLIENTS)
        )
    told = [each.getMessage() for each in caplog.records if "max_samples" in each.getMessage()]
    assert len(told) == sum(20 + 3 * i > 30 for i in range(CLIENTS))
    assert "count as 30, the most that one client weighs" in told[0]
