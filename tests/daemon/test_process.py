from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon.lifecycle import app
from bbnode.daemon.lifecycle.process import OwnProcess, SharedProcess
from bbnode.daemon.observing import logs


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_a_started_daemon_collects_garbage_among_what_is_new() -> None:
    gc.disable()
    OwnProcess().started()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_the_collector_of_another_program_is_left_alone() -> None:
    gc.disable()
    SharedProcess().started()
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_run_starts_without_collecting_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[node]\nname = "n"\n[artifact]\npath = "a.onnx"\ntargets = ["t"]\n')
    seen = []
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(app, "run_daemon", lambda *_, **__: seen.append(gc.isenabled()) or 0)
    assert main(["run", "--config", str(config)]) == 0
    assert seen == [False]
    assert gc.isenabled()


def test_a_refused_configuration_leaves_the_collector_on(tmp_path: Path) -> None:
    assert main(["run", "--config", str(tmp_path / "none.toml")]) != 0
    assert gc.isenabled()


def test_a_start_loads_nothing_that_only_some_nodes_need() -> None:
    script = (
        "import sys\n"
        "from bbnode.cli.commands import run\n"
        "from bbnode.components.backends import ort\n"
        "from bbnode.components.data import sklearn\n"
        "from bbnode.components.models import onnx_model\n"
        "from bbnode.components.selectors import views\n"
        "from bbnode.daemon.lifecycle import app\n"
        "from bbnode.transport.libp2p import transport\n"
        "heavy = {'libp2p', 'onnxruntime', 'sklearn', 'scipy', 'asyncio', 'rich', 'zeroconf',\n"
        "         'prometheus_client', 'numpy.random', 'bbnode.compiler', 'bbnode.dsl',\n"
        "         'bbnode.sim', 'bbnode.components.selectors.kademlia', 'cryptography.x509',\n"
        "         'cryptography.hazmat.primitives.serialization'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
