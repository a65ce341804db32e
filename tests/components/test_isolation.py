"""Graphs in a child process: the same results, and a death that costs one run."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.helper import make_node as node

from bbnode.components.backends.graphs import one_op_model
from bbnode.components.backends.isolation import sandbox, shared, supervisor
from bbnode.components.backends.isolation.child import ChildDied
from bbnode.components.backends.isolation.supervisor import Supervisor
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
from bbnode.components.errors import (
    BackendError,
    BackendUnavailable,
    GraphKilled,
    InvalidComponentConfig,
)
from bbnode.components.models.mlp import mlp_forward
from bbnode.components.models.onnx_model import OnnxModelConfig
from bbnode.components.registry import build_config, encode_config
from bbnode.components.settings import LocalSettingRefused
from bbnode.ir.errors import DecodeError
from bbnode.ir.types import TENSOR_FLOAT
from bbnode.ir.values import OptionalValue, TensorSequence
from tests.components.fakes import CTX, onnx_model

F32 = np.float32
END_S = 60.0


def isolated(**settings: Any) -> OrtBackend:
    return OrtBackend(OrtBackendConfig(isolation="process", **settings))


@pytest.fixture(scope="module")
def backend() -> Iterator[OrtBackend]:
    made = isolated(max_memory_bytes=256 << 20)
    yield made
    made.on_stop()


@pytest.fixture(scope="module")
def plain() -> OrtBackend:
    return OrtBackend(OrtBackendConfig())


def added(backend: OrtBackend, x: Any) -> Any:
    return backend.prepare(one_op_model("Add", [x, x])).run([x, x])[0]


def endless() -> Any:
    """Return a graph that loops as often as it is told to."""
    body = helper.make_graph(
        [node("Identity", ["c"], ["go"]), node("Add", ["v", "v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, []),
        ],
    )
    graph = helper.make_graph(
        [node("Loop", ["n", "", "x"], ["y"], body=body, name="turning")],
        "loops",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# --- values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=F32).reshape(2, 3),
        np.float64(2.5),
        np.array(7, np.int64),
        np.zeros((0, 3), F32),
        np.arange(12, dtype=np.int32)[::3],
        np.ones((300, 400), np.float16),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_tensors_come_back_as_they_would(backend, plain, value) -> None:
    mine, theirs = added(backend, value), added(plain, value)
    np.testing.assert_array_equal(mine, theirs)
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert mine.flags.owndata or mine.base.flags.owndata


def test_texts_sequences_optionals_and_small_elements_come_back(backend, plain) -> None:
    texts = np.array([["a", ""], ["bé", "日本"]], object)
    model = one_op_model("StringConcat", [texts, texts])
    np.testing.assert_array_equal(
        backend.prepare(model).run([texts, texts])[0], plain.prepare(model).run([texts, texts])[0]
    )
    sequence = TensorSequence([np.ones(2, F32), np.zeros((1, 2), F32)])
    for value in (sequence, OptionalValue(sequence), OptionalValue(None, TENSOR_FLOAT)):
        writer = shared.Writer()
        described = writer.add(value)
        region, _ = writer.write(shared.Region.create, b"")
        assert shared.read_value(region.bytes, described, copy=True) == value
        region.close()
    ports = helper.make_tensor_sequence_value_info
    graph = helper.make_graph(
        [node("SequenceInsert", ["s", "x"], ["y"])],
        "g",
        [ports("s", TensorProto.FLOAT, None), helper.make_tensor_value_info("x", 1, None)],
        [ports("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (made,) = backend.prepare(model).run([sequence, np.ones(1, F32)])
    assert made == TensorSequence([*sequence, np.ones(1, F32)])
    small = np.array([1.5, -2], ml_dtypes.bfloat16)
    model = one_op_model("Cast", [small], to=TensorProto.FLOAT)
    np.testing.assert_array_equal(backend.prepare(model).run([small])[0], [1.5, -2])


def test_outputs_are_written_where_the_caller_wants_them(backend) -> None:
    x, place = np.ones((3, 4), F32), np.zeros((3, 4), F32)
    graph = backend.prepare(one_op_model("Add", [x, x]))
    (made,) = graph.run_into([x, x], {0: place})
    assert made is place
    np.testing.assert_array_equal(place, x + x)


def test_an_error_names_the_op_and_the_child_goes_on(backend) -> None:
    x = np.ones((2, 3), F32)
    graph = backend.prepare(one_op_model("MatMul", [x, x]))
    with pytest.raises(BackendError, match="MatMul") as refused:
        graph.run([x, x])
    assert not isinstance(refused.value, GraphKilled)
    assert refused.value.node == "MatMul"
    with pytest.raises(BackendError, match="1 input"):
        graph.run([x])
    np.testing.assert_array_equal(added(backend, x), x + x)
    assert backend.facts()["child_deaths"] == 0


@pytest.mark.parametrize(
    "described",
    [
        ["tensor", TENSOR_FLOAT.id, [1 << 40], [0, 8]],
        ["tensor", TENSOR_FLOAT.id, [2], [1 << 40, 8]],
        ["tensor", TENSOR_FLOAT.id, [2], [-8, 8]],
        ["tensor", TENSOR_FLOAT.id, [-2], [0, 8]],
        ["tensor", TENSOR_FLOAT.id, [2], [4, 8]],
        ["tensor", "Tensor", [2], [0, 8]],
        ["tensor", "nonsense", [2], [0, 8]],
        ["tensor", TENSOR_FLOAT.id, [2, True], [0, 8]],
        ["texts", [1], [0, 8], [0, 4]],
        ["texts", [1 << 60], [0, 8], [0, 4]],
        ["sequence", "nonsense", []],
        ["else"],
        None,
    ],
    ids=str,
)
def test_what_a_child_says_is_not_believed(described) -> None:
    region = np.full(64, 0xFF, np.uint8)
    with pytest.raises(DecodeError):
        shared.read_value(region, described, copy=True)


def test_shared_memory_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("plain")
    os.ftruncate(fd, 4096)
    with pytest.raises(DecodeError, match="seals"):
        shared.Region.received(fd, 1 << 20)
    region = shared.Region.create(1 << 21)
    with pytest.raises(DecodeError, match="bytes"):
        shared.Region.received(os.dup(region.fd), 1 << 20)
    region.close()


# --- limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100 << 20, 1 << 40])
def test_a_result_beyond_the_memory_fails_alone(backend, count) -> None:
    size = np.array([count])
    graph = backend.prepare(one_op_model("ConstantOfShape", [size]))
    with pytest.raises(GraphKilled, match="max_memory_bytes") as killed:
        graph.run([size])
    assert (killed.value.reason, killed.value.node) == ("memory", "ConstantOfShape")
    assert graph.run([np.array([3])])[0].shape == (3,)
    assert backend.facts()["child_deaths"] == 0


def test_inputs_beyond_the_memory_are_refused(backend) -> None:
    large = np.zeros(300 << 20, np.uint8)  # pages that nothing has touched
    with pytest.raises(GraphKilled, match="max_memory_bytes"):
        backend.prepare(one_op_model("Identity", [large])).run([large])
    np.testing.assert_array_equal(added(backend, np.ones(2, F32)), [2, 2])


def test_a_run_beyond_its_time_ends_alone() -> None:
    backend = isolated(max_run_s=0.5)
    graph = backend.prepare(endless())
    for _ in range(2):
        with pytest.raises(GraphKilled, match=r"max_run_s, 0\.5 s") as killed:
            graph.run([np.array(2**62), F32(0)])
        assert (killed.value.reason, killed.value.node) == ("time", "turning")
    assert graph.run([np.array(3), F32(1)]) == [8]
    assert backend.facts()["child_deaths"] == 2
    backend.on_stop()
    with pytest.raises(BackendUnavailable, match="stopped"):
        graph.run([np.array(3), F32(1)])


# --- deaths ------------------------------------------------------------------------------


def test_a_crash_costs_one_run_and_says_of_which_ops(monkeypatch) -> None:
    backend = isolated()
    x = np.ones(2, F32)
    graph = backend.prepare(one_op_model("Add", [x, x]))
    child = backend._isolated._child
    receive = shared.ChildLine.receive

    def dies(line: shared.ChildLine) -> Any:
        # Not SIGFPE: the kernel lets threads run on until the one that is to dump core has it.
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGCONT)
        monkeypatch.setattr(shared.ChildLine, "receive", receive)
        return receive(line)

    monkeypatch.setattr(shared.ChildLine, "receive", dies)
    os.kill(child.pid, signal.SIGSTOP)  # so that it has not answered by then
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(GraphKilled, match=r"\(of Add\).*SIGTERM") as killed:
        graph.run([x, x])
    assert (killed.value.reason, killed.value.node) == ("crash", "Add")
    np.testing.assert_array_equal(graph.run([x, x])[0], [2, 2])
    assert backend.facts()["child_deaths"] == 1
    backend.on_stop()


def test_a_child_that_died_between_runs_costs_none() -> None:
    backend = isolated()
    x = np.ones(2, F32)
    graph = backend.prepare(one_op_model("Add", [x, x]))
    child = backend._isolated._child
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    np.testing.assert_array_equal(graph.run([x, x])[0], [2, 2])
    assert backend.facts()["child_deaths"] == 1
    backend.on_stop()


def test_runs_of_several_threads_go_on_at_once(backend) -> None:
    """One that does not end for a while holds up no other."""
    slow = backend.prepare(endless())
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.extend(slow.run([np.array(200_000), F32(0)])), daemon=True
    )
    thread.start()
    before = [added(backend, np.ones(2, F32)) for _ in range(3)]
    thread.join()
    assert len(before) == 3
    assert ended == [0]


def test_a_killed_node_takes_its_child_along(tmp_path) -> None:
    code = """
import numpy as np, sys, time
from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.backends.graphs import one_op_model
backend = OrtBackend(OrtBackendConfig(isolation="process"))
x = np.ones(2, np.float32)
backend.prepare(one_op_model("Add", [x, x])).run([x, x])
print(backend._isolated._child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    ready, _, _ = select.select([child], [], [], END_S)
    os.close(child)
    assert ready


def test_a_stopped_backend_leaves_no_child_and_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    backend = isolated()
    added(backend, np.ones(1 << 20, F32))
    pid = backend._isolated._child.pid
    backend.on_stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- blame, with children that are none -----------------------------------------------------


class Fakes:
    """Children whose runs end as a script says, the first child's first."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.now = 1000.0

    def __call__(self, settings: Any, max_run_s: float) -> Any:
        return FakeChild(self.scripts.pop(0))


class FakeChild:
    confined = "seccomp"

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.prepared: set[int] = set()
        self.is_alive = True

    def call(self, kind: int, graph: int, values: Any, **_: Any) -> list[Any]:
        if kind == shared.PREPARE:
            return []
        outcome = self.script.pop(0)
        if isinstance(outcome, Exception):
            self.is_alive = False
            raise outcome
        return [outcome]

    def close(self) -> None:
        self.is_alive = False


def died(to_blame: bool | None, reason: str = "crash") -> ChildDied:
    return ChildDied(reason, "it died of SIGSEGV", to_blame=to_blame)


def supervised(monkeypatch, fakes: Fakes) -> Any:
    monkeypatch.setattr(supervisor, "Child", fakes)
    made = Supervisor("T", {"max_memory_bytes": 1}, 1.0, lambda: fakes.now)
    return made.add(one_op_model("Relu", [np.ones(2, F32)]))


def test_one_that_was_not_alone_is_tried_alone(monkeypatch) -> None:
    graph = supervised(monkeypatch, Fakes([died(None)], ["fine"], ["on"]))
    assert graph.run([0]) == ["fine"]
    assert graph.run([0]) == ["on"]


def test_one_that_kills_again_is_to_blame(monkeypatch) -> None:
    graph = supervised(monkeypatch, Fakes([died(None)], [died(True)], ["on"]))
    with pytest.raises(GraphKilled, match="SIGSEGV"):
        graph.run([0])
    assert graph.run([0]) == ["on"]


def test_one_whose_child_ran_out_of_anothers_time_is_made_again(monkeypatch) -> None:
    graph = supervised(monkeypatch, Fakes([died(False, "time")], ["fine"]))
    assert graph.run([0]) == ["fine"]


def test_many_deaths_put_the_next_start_off(monkeypatch) -> None:
    fakes = Fakes(*([[died(True)]] * 0), *[[died(True)] for _ in range(6)], ["fine"])
    graph = supervised(monkeypatch, fakes)
    for _ in range(4):
        with pytest.raises(GraphKilled):
            graph.run([0])
    with pytest.raises(BackendUnavailable, match=r"died 4 times .* in 0.5 s"):
        graph.run([0])
    fakes.now += 0.5
    with pytest.raises(GraphKilled):
        graph.run([0])
    with pytest.raises(BackendUnavailable, match=r"in 1.0 s"):
        graph.run([0])
    fakes.now += 100
    with pytest.raises(GraphKilled):
        graph.run([0])
    assert graph.run([0]) == ["fine"]  # calm between: starts are immediate again


# --- the sandbox ---------------------------------------------------------------------------

_TRIES = {
    "socket": "import socket; socket.socket()",
    "write": "open('/tmp/x-of-a-child', 'w')",
    "append": "import os; os.open('/etc/hosts', os.O_RDWR)",
    "unlink": "import os; os.unlink('/tmp/nothing-here')",
    "mkdir": "import os; os.mkdir('/tmp/x-of-a-child')",
    "fork": "import os; os.fork()",
    "run": "import subprocess; subprocess.run(['/bin/true'])",
    "kill": "import os; os.kill(os.getppid(), 0)",
    "ptrace": (
        "import ctypes, os; l = ctypes.CDLL(None, use_errno=True)\n"
        "if l.ptrace(16, os.getppid(), 0, 0): raise OSError(ctypes.get_errno(), '')"
    ),
}


@pytest.mark.skipif(
    os.uname().machine not in sandbox._NUMBERS, reason="no system call filter for this machine"
)
@pytest.mark.parametrize("what", _TRIES)
def test_a_confined_process_is_refused(what) -> None:
    code = (
        "import errno, subprocess, socket, os\n"
        "from bbnode.components.backends.isolation import sandbox\n"
        "assert sandbox.confine() == 'seccomp'\n"
        f"try:\n    exec({_TRIES[what]!r})\n"
        "except PermissionError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_a_confined_process_computes_reads_and_has_threads() -> None:
    code = (
        "import threading\n"
        "from bbnode.components.backends.isolation import sandbox\n"
        "sandbox.limit(1 << 30); sandbox.confine()\n"
        "made = []\n"
        "t = threading.Thread(target=lambda: made.append(open('/proc/self/status').read(4)))\n"
        "t.start(); t.join(); print(made)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['Name']\n"


def test_the_filter_lets_what_a_line_needs_pass(backend) -> None:
    assert backend.facts()["isolation"] in ("process, seccomp",) or "no system call" in str(
        backend.facts()["isolation"]
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ours.fileno() != theirs.fileno()


# --- settings ------------------------------------------------------------------------------


def test_the_settings_of_the_machine_are_not_of_a_program() -> None:
    stored = encode_config(OrtBackendConfig())
    assert b"isolation" not in stored
    assert b"max_memory" not in stored
    told = encode_config(OrtBackendConfig(isolation="process"))
    with pytest.raises(LocalSettingRefused, match="isolation"):
        build_config(OrtBackend, "compute", told, {})
    config = build_config(OrtBackend, "compute", stored, {"isolation": "process", "max_run_s": 2})
    assert (config.isolation, config.max_run_s) == ("process", 2.0)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidComponentConfig, match="max_memory_bytes"):
        isolated(max_memory_bytes=1)
    with pytest.raises(BackendUnavailable, match="on the CPU alone"):
        isolated(providers=("CUDAExecutionProvider",))


def test_a_child_that_can_not_start_says_so(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(BackendUnavailable, match='isolation = "none"'):
        added(isolated(), np.ones(2, F32))


def test_training_in_a_child_is_the_same_to_the_bit(tmp_path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=random.normal(size=(40, 4)).astype(F32),
             y=random.integers(0, 3, 40))  # fmt: skip
    config = OnnxModelConfig(
        model=mlp_forward((4, 8, 3)).SerializeToString(), optimizer="adam", learning_rate=0.01
    )
    made = []
    for backend in (OrtBackend(OrtBackendConfig()), isolated()):
        source = ArrayDataSource(ArrayDataSourceConfig(path=str(tmp_path / "d.npz")))
        model = onnx_model(config, source, backend)
        stats = model.train(CTX, epochs=2, batch=16)
        made.append((stats, model.params(CTX).tobytes(), model.serialize()))
        backend.on_stop()
    assert made[0] == made[1]
