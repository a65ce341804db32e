"""`bbnode.open`: nodes for scripts and notebooks, and what users do to them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import bbnode
from bbnode.api import thread
from bbnode.api.settings import ConfigError
from bbnode.components import ResponseBatch
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.engine.errors import (
    InputTypeMismatch,
    MissingInput,
    UnknownInput,
    UnknownTarget,
)
from tests.api.programs import GO_ON, IS_WAITING, Batches, TellBack
from tests.daemon.live import compiled
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    GO_ON.clear()
    IS_WAITING.clear()
    yield
    GO_ON.set()


def worker(**more: object) -> bbnode.BlockingNode:
    return bbnode.open(Batches, transport="memory", **more)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[tuple[bbnode.BlockingNode, bbnode.BlockingNode]]:
    """A server and a client of `TellBack` on the memory transport."""
    with (
        bbnode.open(TellBack, targets="server", transport="memory") as server,
        bbnode.open(TellBack, targets="client", transport="memory", peers=[server]) as client,
    ):
        server.wait_for_peers(1, "client", timeout_s=PATIENCE_S)
        yield server, client


# -- what works -----------------------------------------------------------------------------------


def test_two_nodes_over_libp2p_answer_with_arrays(tmp_path: Path) -> None:
    artifact = tmp_path / "ask.onnx"
    artifact.write_bytes(serialize(compiled()))
    with (
        bbnode.open(artifact, targets="server", name="asks") as server,
        bbnode.open(compiled(), targets=["client"], peers=[server]) as client,
    ):
        (peer,) = server.wait_for_peers(1, "client", timeout_s=PATIENCE_S)
        assert peer["peer"] == client.peer_id
        outcome = server.invoke("server", {"question": 2.5}, timeout_s=PATIENCE_S)
        assert outcome.ok
        assert outcome["asked"].dtype == np.float32
        assert outcome["asked"] == np.float32(2.5)
        answers = outcome["answers"]
        assert isinstance(answers, ResponseBatch)
        assert [float(value) for _, value in answers.responses] == [2.5]
        assert server.status()["name"] == "asks"
        assert server.ping(client.peer_id, timeout_s=PATIENCE_S)["peer"] == client.peer_id
    assert not server.running
    assert not server.state_dir.exists()


def test_outputs_that_come_back_by_messages_are_awaited(
    pair: tuple[bbnode.BlockingNode, bbnode.BlockingNode],
) -> None:
    server, _client = pair
    said = np.arange(3, dtype=np.float32)
    outcome = server.invoke("server", {"said": said}, timeout_s=PATIENCE_S)
    assert outcome["echo"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        outcome["echo"][0] = 7
    with pytest.raises(KeyError, match="no output 'ech'; has: echo"):
        outcome["ech"]


def test_outputs_can_be_had_later_and_as_a_stream(
    pair: tuple[bbnode.BlockingNode, bbnode.BlockingNode],
) -> None:
    server, _client = pair
    with server.outputs() as outputs:
        for number in (1.0, 2.0):
            assert server.emit("server", "said", number, timeout_s=0).ok is None
        assert [float(next(outputs).value) for _ in range(2)] == [1.0, 2.0]
    assert next(outputs, None) is None
    # What an invoke returns is not there a second time.
    assert server.invoke("server", {"said": 3.0}, timeout_s=PATIENCE_S)["echo"] == 3
    found = [float(server.next_output("echo", timeout_s=PATIENCE_S)) for _ in range(2)]
    assert found == [1.0, 2.0]
    with pytest.raises(bbnode.WaitTimeout, match="gave no output 'echo' within 0 s"):
        server.next_output("echo", timeout_s=0)


def test_events_and_rounds_are_streams() -> None:
    rounds = [{"target": "worker", "inputs": {"tick": "trigger"}, "times": 2}]
    with worker(settings={"invoke": rounds}) as node:
        with node.events(["rounds_complete"], last=1) as events:
            assert next(events)["event"]["done"] == 2
        with node.events(["round_finished"], last=9, follow=False) as finished:
            assert [line["event"]["round"] for line in finished] == [1, 2]
        assert [each["ok"] for each in node.rounds()["rounds"]] == [True, True]


def test_a_folder_with_a_configuration_is_run_with_arguments_on_top(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        '[node]\nname = "written"\nstate_dir = "state"\n[artifact]\n'
        'module = "tests.api.programs:Batches"\ntargets = ["worker"]\n'
        '[network]\ntransport = "memory"\n'
    )
    with bbnode.open(tmp_path, slots={"data": {"batch_size": 1}}) as node:
        assert node.name == "written"
        assert node.invoke("worker", {"tick": "trigger"})["batch"].shape == (1, 3)
        assert node.state_dir == tmp_path / "state"
        identity = node.peer_id
    with bbnode.open(tmp_path / "node.toml", name="again") as node:
        assert (node.name, node.peer_id) == ("again", identity)


def test_eight_nodes_in_one_process() -> None:
    nodes = [worker(name=f"n{number}") for number in range(8)]
    assert len({node.peer_id for node in nodes}) == 8
    assert [node.invoke("worker", {"tick": "trigger"}).ok for node in nodes] == [True] * 8
    for node in nodes:
        node.stop()
    assert [thread_.name for thread_ in threading.enumerate()].count("bbnode") == 1


def test_it_works_inside_a_running_loop() -> None:
    async def cell() -> bool:
        with worker() as node:
            return bool(node.invoke("worker", {"tick": "trigger"}).ok)

    assert asyncio.run(cell())


@pytest.mark.timeout(0)  # which is by a timer of the process
def test_the_process_stays_as_it_is() -> None:
    def state() -> object:
        root = logging.getLogger()
        return (
            [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
            (list(root.handlers), root.level),
            resource.getrlimit(resource.RLIMIT_NOFILE),
            signal.getitimer(signal.ITIMER_REAL),
        )

    before = state()
    with worker() as node:
        node.invoke("worker", {"tick": "trigger"})
        assert state() == before
        node.set_log_level("debug")
        assert state() == before
    assert state() == before
    logging.getLogger("bbnode").setLevel(logging.NOTSET)


# -- what users do to it --------------------------------------------------------------------------


def test_wrong_inputs_are_refused_where_they_are_given(
    pair: tuple[bbnode.BlockingNode, bbnode.BlockingNode],
) -> None:
    server, _client = pair
    with pytest.raises(UnknownTarget, match="did you mean 'server'"):
        server.invoke("serve", {})
    with pytest.raises(UnknownInput, match="It has: said"):
        server.invoke("server", {"sad": 1.0})
    with pytest.raises(MissingInput, match="no value for said"):
        server.invoke("server")
    with pytest.raises(InputTypeMismatch, match=r"takes Tensor\.FLOAT"):
        server.invoke("server", {"said": np.ones(3)})
    with pytest.raises(bbnode.InputRefused, match="'said' is a object"):
        server.invoke("server", {"said": object()})
    with pytest.raises(bbnode.InputRefused, match="array of datetime64"):
        server.invoke("server", {"said": np.array(["2026-01-01"], "datetime64[D]")})
    with pytest.raises(bbnode.InputRefused, match="one length"):
        server.invoke("server", {"said": [[1], [1, 2]]})
    for timeout_s in ("1", float("nan"), float("inf")):
        with pytest.raises(bbnode.InputRefused, match="give a number of seconds"):
            server.invoke("server", {"said": 1.0}, timeout_s=timeout_s)  # type: ignore[arg-type]
    with pytest.raises(bbnode.InputRefused, match="inputs is a int"):
        server.invoke("server", 3)  # type: ignore[arg-type]
    assert server.executions()["executions"] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"program": 3}, "a int is no program"),
        ({"program": "nothing.txt", "targets": "x"}, "neither a .toml nor an .onnx file"),
        ({"program": "some.onnx"}, "targets='client'"),
        ({"program": TellBack}, "targets='client'; it has client, server"),
        ({"program": TellBack, "targets": "client", "args": {"x": 1}}, "no argument 'x'"),
        (
            {"program": TellBack(), "targets": "client", "args": {"x": 1}},
            "args are for a Module class",
        ),
        ({"program": Batches, "settings": {"node.nam": 1}}, "did you mean 'name'"),
        ({"program": TellBack, "targets": "client", "peers": [7]}, "which has no addresses"),
        ({"program": "absent.toml"}, "no such file"),
        ({"program": Batches, "slots": 3}, "slots is 3; give a dict"),
        ({"program": Batches, "slots": {"data": "x.npz"}}, "give a dict"),
        ({"program": Batches, "state_dir": 3}, "give a path"),
        ({"program": Batches, "peers": "/ip4/127.0.0.1/tcp/1"}, "names no peer"),
    ],
)
def test_wrong_arguments_say_what_to_give(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        bbnode.open(**arguments)  # type: ignore[arg-type]


def test_a_component_that_raises_fails_its_execution_alone() -> None:
    with worker(slots={"data": {"mode": "raise"}}) as node:
        with pytest.raises(bbnode.ExecutionFailed, match="the callback is broken") as failed:
            node.invoke("worker", {"tick": "trigger"})
        assert failed.value.result.ok is False
        assert node.running


def test_a_component_that_exits_ends_no_node_of_the_process() -> None:
    with worker(slots={"data": {"mode": "exit"}}) as node, worker() as other:
        with pytest.raises(bbnode.ExecutionFailed, match="SystemExit: 5"):
            node.invoke("worker", {"tick": "trigger"})
        assert node.running
        assert other.invoke("worker", {"tick": "trigger"}).ok


def test_an_execution_that_takes_too_long_goes_on() -> None:
    with worker(slots={"data": {"mode": "wait"}}) as node:
        with pytest.raises(bbnode.InvokeTimeout, match=r"not over after 0\.01 s") as late:
            node.invoke("worker", {"tick": "trigger"}, timeout_s=0.01)
        assert late.value.result.ok is None
        GO_ON.set()
        assert node.next_output("batch", timeout_s=PATIENCE_S).shape == (2, 3)


def test_an_execution_with_a_deadline_ends_by_it_and_says_so() -> None:
    with worker(slots={"data": {"mode": "wait"}}) as node:
        for ask in (
            lambda: node.invoke("worker", {"tick": "trigger"}, deadline_s=0.01),
            lambda: node.emit("worker", "tick", "trigger", deadline_s=0.01),
            lambda: bbnode.connect(node.socket).invoke(
                "worker", {"tick": "trigger"}, deadline_s=0.01
            ),
        ):
            with pytest.raises(bbnode.ExecutionFailed, match=r"invoke\(deadline_s=…\)"):
                ask()
        for wrong in (0, -1, "5", float("nan"), 1e12, True):
            with pytest.raises(bbnode.InputRefused, match="deadline_s is"):
                node.invoke("worker", {"tick": "trigger"}, deadline_s=wrong)  # type: ignore[arg-type]
        GO_ON.set()


def started(count: int, function: Callable[[], object]) -> Callable[[], list[object]]:
    """Call a function in so many threads until one waits; returns how to have what they got."""
    found: list[object] = []

    def call() -> None:
        try:
            found.append(function())
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            found.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for each in threads:
        each.start()
    assert IS_WAITING.wait(PATIENCE_S)

    def joined() -> list[object]:
        for each in threads:
            each.join(PATIENCE_S)
        return found

    return joined


def test_two_threads_invoke_at_the_same_time() -> None:
    with worker(slots={"data": {"mode": "wait"}}) as node:
        results = started(2, lambda: node.invoke("worker", {"tick": "trigger"}).ok)
        GO_ON.set()
        assert results() == [True, True]


def test_a_stop_ends_the_wait_of_every_thread() -> None:
    node = worker(slots={"data": {"mode": "wait"}}, settings={"node.stop_grace_s": 0.5})
    results = started(2, lambda: node.invoke("worker", {"tick": "trigger"}))
    node.stop()
    assert [type(each) for each in results()] == [bbnode.NodeStopped] * 2
    node.stop()
    with pytest.raises(bbnode.NodeStopped, match="has stopped; open it again"):
        node.peers()


def test_a_node_that_dies_tells_whoever_waits() -> None:
    wait = {"class": "worker", "peers": 1, "timeout_s": 0.0, "on_timeout": "fail"}
    rounds = [{"target": "worker", "inputs": {"tick": "trigger"}, "wait_for": wait}]
    with (
        pytest.raises(bbnode.NodeStopped, match="has died: 0 of 1 peers") as died,
        worker(settings={"invoke": rounds}) as node,
    ):
        node.next_output("never", timeout_s=PATIENCE_S)
    assert type(died.value.__cause__).__name__ == "TooFewPeers"
    # Nobody waits: the end of the block tells.
    with (
        pytest.raises(bbnode.NodeStopped, match="has died"),
        worker(settings={"invoke": rounds}) as node,
    ):
        thread.get().call(node._node._ended.wait)


def test_an_exception_in_the_block_stops_the_node_and_passes() -> None:
    with pytest.raises(ZeroDivisionError), worker() as node:
        1 / 0  # noqa: B018
    assert not node.running


def test_one_state_directory_has_one_node(tmp_path: Path) -> None:
    used = pytest.raises(bbnode.StateDirInUse, match="by a node of this process")
    with worker(state_dir=tmp_path / "state"), used:
        worker(state_dir=tmp_path / "state")
    with worker(state_dir=tmp_path / "state") as node:
        assert node.running


def test_a_node_that_nobody_refers_to_is_stopped(tmp_path: Path) -> None:
    node = worker(state_dir=tmp_path / "state")
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None
    # As in a notebook whose cell is run again: the directory is free once the old node has gone.
    with worker(state_dir=tmp_path / "state") as node:
        assert node.running


def test_a_blocking_call_on_the_loop_is_refused() -> None:
    with worker() as node:

        async def within() -> None:
            node.peers()

        with pytest.raises(bbnode.LoopBlocked, match="would wait for itself"):
            thread.get().call(within)


def test_an_interrupt_leaves_the_node_usable() -> None:
    with worker(slots={"data": {"mode": "wait"}}) as node:

        def interrupt() -> None:
            IS_WAITING.wait(PATIENCE_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            node.invoke("worker", {"tick": "trigger"}, timeout_s=PATIENCE_S)
        GO_ON.set()
        assert node.invoke("worker", {"tick": "trigger"}, timeout_s=PATIENCE_S).ok


def test_a_fork_is_refused() -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
import bbnode
from tests.api.programs import Batches
with bbnode.open(Batches, transport="memory") as node:
    pid = os.fork()
    if not pid:
        for use in (node.peers, lambda: bbnode.open(Batches)):
            try:
                use()
            except bbnode.ForkedProcess as error:
                print("refused:", str(error)[:41], flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(node.invoke("worker", {"tick": "trigger"}).ok)
"""
    assert run_script(code).splitlines() == [
        *["refused: this process is a fork of one that ran bb"] * 2,
        "True",
    ]


def test_the_interpreter_ends_with_nodes_still_open(tmp_path: Path) -> None:
    state = tmp_path / "state"
    code = f"""
import bbnode
from tests.api.programs import Batches
node = bbnode.open(Batches, transport="memory", state_dir={str(state)!r})
node.invoke("worker", {{"tick": "trigger"}})
print("done")
"""
    assert run_script(code) == "done\n"
    # An orderly stop: the last checkpoint is there.
    assert [each.name for each in state.iterdir() if "checkpoint" in each.name]


def run_script(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
