"""Strategies on real daemons, with clients that are killed, late, and lying."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bbnode.daemon.testbed.nodes import ChildNode, by_name, held_folder, write_nodes
from bbnode.daemon.testbed.plan import find_invocation, make_plan
from bbnode.daemon.testbed.program import find_program
from tests.e2e.cluster import Events, connected, start, stop
from tests.e2e.liar import LIES
from tests.patience import PATIENCE_S
from tests.programs.files import CLASSES, FEATURES, examples

DEADLINE_S = 4.0  # that a client which is killed or late costs a round
EVERY_S = 1.0  # few events, as whoever does not read them while a daemon starts is cut off
CLIENT = "client-0"


class Net:
    """A server and clients with a ready program; those that `LIES` names lie, if `liars`."""

    def __init__(
        self, folder: Path, program: str, *, clients: int, liars: bool = False,
        target: str = "server", settings: tuple[str, ...] = (), held_out: bool = False, **args: Any,
    ) -> None:  # fmt: skip
        given = {"model": [FEATURES, 8, CLASSES], "deadline_s": DEADLINE_S, **args}
        if target == "server":
            given["clients"] = clients
        found = find_program(f"bbnode.programs:{program}", given)
        own = [examples(folder, f"c{n}", 40 + n, seed=n) for n in range(clients)]
        slots = ("data", "held_out") if held_out else ("data",)
        told = [f"client.{n}.slots.{s}.path={path}" for n, path in enumerate(own) for s in slots]
        if "test" in found.classes["server"].slots:
            told.append(f"server.slots.test.path={examples(folder, 'test', 60, seed=99)}")
        rounds = find_invocation(
            found, target=target, inputs={}, times=0, options={"every_s": EVERY_S}
        )
        plan = make_plan(
            found, nodes=f"server=1,client={clients}", settings=(*settings, *told),
            invocation=rounds, base=folder,
        )  # fmt: skip
        with held_folder(folder / "net") as nodes:
            self.nodes = write_nodes(plan, nodes, port=0, wait_s=PATIENCE_S)
        self.by_name = by_name(self.nodes)
        self.lying = [name for name in LIES if liars and name in self.by_name]
        for name in self.lying:
            node = self.by_name[name]
            shutil.copy(Path(__file__).parent / "liar.py", node.folder / "liar.py")
            text = node.config.read_text()
            node.config.write_text(text.replace("[node]\n", '[node]\ncomponents = ["liar"]\n', 1))

    @property
    def honest(self) -> set[str]:
        """The PeerIds of the clients that do not lie."""
        names = {name for name in self.by_name if name.startswith("client")} - {*self.lying}
        return {self.by_name[name].peer for name in names}

    def start(self, *names: str) -> None:
        start(*(self.by_name[name] for name in names or self.by_name))

    def send(self, name: str, number: signal.Signals) -> None:
        process = self.by_name[name].process
        assert process is not None
        process.send_signal(number)
        if number is signal.SIGKILL:
            process.wait(PATIENCE_S)

    @contextmanager
    def events(self, *types: str) -> Iterator[Events]:
        """What the server says, from now on."""
        with connected(self.by_name["server"]) as client:
            yield Events(client, types or Events.TYPES)


@pytest.fixture
def net() -> Iterator[Callable[..., Net]]:
    """A maker of nets, each of which ends with the test."""
    made: list[ChildNode] = []

    def make(*args: Any, **given: Any) -> Net:
        net = Net(*args, **given)
        made.extend(net.nodes)
        return net

    yield make
    for node in made:
        stop(node)


def finished(events: Events, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return events.until(lambda e: e["type"] == "round_finished" and wanted(e))


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAdam": ("FedAdam", {}),
    "FedProx": ("FedProx", {}),
    "Scaffold": ("Scaffold", {}),
    "FedNova": ("FedNova", {}),
    "QFedAvg": ("QFedAvg", {}),
    "DiLoCo": ("DiLoCo", {"inner_steps": 10}),
    "Median": ("FederatedTraining", {"aggregator": "bbnode.Median"}),
    "NormClipping": ("FederatedTraining", {"aggregator": "bbnode.NormClipping", "deltas": True}),
    "FedPer": ("FedPer", {"local": ["layer1.*"], "held_out": True}),
    "Ditto": ("Ditto", {"held_out": True}),
}


def test_a_liar_is_named_and_a_killed_server_goes_on(
    tmp_path: Path, net: Callable[..., Net]
) -> None:
    made = net(tmp_path, "FedAdam", clients=3, liars=True, quorum=2)
    made.start()
    with made.events() as events:
        first = finished(events, lambda e: len(e["responded"]) == 3)
        liar = made.by_name["client-2"].peer
        assert first["refused"] == {liar: "its tensor holds NaN or infinity"}
        events.until(lambda e: e["type"] == "round_started")
        made.send("server", signal.SIGKILL)
    assert f"refused=\"{{'{liar}'" in made.by_name["server"].log.read_text()
    made.start("server")
    with made.events() as events:
        found = finished(events, lambda e: e["ok"] and {*e["responded"]} >= made.honest)
    assert found["round"] > first["round"]
    assert found["outputs"]["loss"] < first["outputs"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_liars_the_dead_and_the_late_cost_their_own_part_only(
    tmp_path: Path, net: Callable[..., Net], name: str
) -> None:
    program, args = BASES[name]
    made = net(tmp_path, program, clients=5, liars=True, quorum=1, **args)
    client = made.by_name[CLIENT].peer
    made.start()
    with made.events() as events:
        first = finished(events, lambda e: len(e["responded"]) == 5)
        events.until(lambda e: e["type"] == "round_started")
        made.send(CLIENT, signal.SIGKILL)
        finished(events, lambda e: client not in e["responded"])
        made.start(CLIENT)
        finished(events, lambda e: {*e["responded"]} >= made.honest)
        made.send(CLIENT, signal.SIGSTOP)
        finished(events, lambda e: client in e["missing"])
        made.send(CLIENT, signal.SIGCONT)
        last = finished(events, lambda e: {*e["responded"]} >= made.honest)
        rounds = [e for e in events.seen if e["type"] == "round_finished"]
    liars = {made.by_name[each].peer for each in made.lying}
    for each in rounds:
        assert each["ok"], each
        # What a codec can't read is a missing answer.
        assert {*each["refused"], *each["missing_why"]} >= liars & {*each["responded"]}
        # Who trained counts, though it was gone when it was asked to evaluate.
        counted = {*each["responded"]} & made.honest
        trained = counted | ({*each["lost"]} & made.honest)
        assert len(counted) <= each["outputs"]["stats"]["contributors"] <= len(trained)
    assert last["outputs"]["loss"] < first["outputs"]["loss"]


@pytest.mark.slow
def test_a_budget_outlives_a_kill_and_ends_the_rounds(
    tmp_path: Path, net: Callable[..., Net]
) -> None:
    made = net(tmp_path, "DPFedAvg", clients=2, quorum=1, noise=1.0, epsilon=10.0)
    made.start()
    with made.events() as events:
        before = finished(events, lambda e: e["ok"])["outputs"]["stats"]["epsilon"]
    made.send("server", signal.SIGKILL)
    made.start("server")
    with made.events(*Events.TYPES, "rounds_complete") as events:
        ended = events.until(lambda e: e["type"] == "rounds_complete")
    rounds = [e for e in events.seen if e["type"] == "round_finished"]
    spent = [e["outputs"]["stats"]["epsilon"] for e in rounds if e["ok"]]
    assert sorted(spent) == spent
    assert all(before < each <= 10 for each in spent)
    assert [e["ok"] for e in rounds[-2:]] == [True, False]
    assert "beyond the budget" in ended["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 6, 11, 16, 21])
def test_a_client_that_dies_in_a_phase_of_masking_costs_no_round(
    tmp_path: Path, net: Callable[..., Net], answers: int
) -> None:
    """Five clients answer five times a round; one is killed after so many answers."""
    made = net(tmp_path, "SecureTraining", clients=5, corrupt=0.2)
    made.start()
    with made.events(*Events.TYPES, "request.response") as events:
        finished(events, lambda e: e["ok"])
        events.until(lambda e: e["type"] == "round_started")
        for _ in range(answers):
            events.until(lambda e: e["type"] == "request.response")
        made.send(CLIENT, signal.SIGKILL)
        for _ in range(2):
            found = events.until(lambda e: e["type"] == "round_finished")
            assert found["ok"]
            assert found["outputs"]["stats"]["contributors"] >= 4
    made.start(CLIENT)
    with made.events() as events:
        finished(events, lambda e: e["ok"] and len(e["responded"]) == 5)


@pytest.mark.slow
def test_a_turn_without_a_client_fails_by_its_name(tmp_path: Path, net: Callable[..., Net]) -> None:
    made = net(tmp_path, "CyclicTraining", clients=2)
    made.start()
    with made.events() as events:
        finished(events, lambda e: e["ok"])
        made.send(CLIENT, signal.SIGKILL)
        failed = finished(events, lambda e: not e["ok"] and "0 of 0" in str(e["failures"]))
        assert "turn1" in str(failed["failures"])
        made.start(CLIENT)
        finished(events, lambda e: e["ok"])


@pytest.mark.slow
@pytest.mark.parametrize("program", ["FedAsync", "FedBuff"])
def test_a_server_without_rounds_goes_on_from_its_snapshot(
    tmp_path: Path, net: Callable[..., Net], program: str
) -> None:
    more = {"buffer": 2} if program == "FedBuff" else {}
    made = net(
        tmp_path, program, clients=5, liars=True, target="client",
        settings=("server.node.snapshot_every_s=0.5",), **more,
    )  # fmt: skip
    made.start()

    def version(at_least: int) -> int:
        def reached(e: dict[str, Any]) -> bool:
            return e.get("topic") == "version" and e["value"] >= at_least

        with made.events("app_event") as events:
            return int(events.until(reached)["value"])

    version(5)
    with connected(made.by_name["server"]) as client:
        assert client.post("/v1/snapshot", {})["bytes"] > 0
    made.send("server", signal.SIGKILL)
    made.start("server")
    with made.events("app_event") as events:
        first = events.until(lambda e: e.get("topic") == "version")["value"]
    assert first > 5
    version(first + 3)
    text = made.by_name["server"].log.read_text()
    for reason in ("holds NaN", f"shape [{2 * 67}]", "num_samples"):
        assert reason in text
