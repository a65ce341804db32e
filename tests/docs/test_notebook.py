"""The notebook of the docs in a real kernel, and what its reader may do to it."""

from __future__ import annotations

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
NOTEBOOK = ROOT / "docs" / "notebooks" / "own_data.ipynb"

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


def test_it_has_no_outputs_of_its_own() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []


def test_it_runs_and_learns(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources=path(tmp_path)
    ).execute()
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] in ("display_data", "execute_result")
    ]
    assert sum("image/png" in each for each in shown) == 3
    assert "stopped" in shown[-1]["text/plain"]
    (said,) = (
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    )
    assert said["name"] == "stdout"  # no cell wrote a warning
    first, last = map(float, re.findall(r"\d+\.\d+", said["text"]))
    # The noise alone has 0.01.
    assert last < 0.03 < 0.2 < first


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
