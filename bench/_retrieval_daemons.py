"""A search over shards that are daemons of their own, and what it takes above the slowest of them.

Rule: real `bbnode run` processes on loopback, and the program a user takes. A search's time is the
asker's own, from the invocation to the last output; of many the median. A shard says with its hits
how long its own search took. All processes share this machine, so each computes in one thread.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import _daemon_metrics
import numpy as np

from bbnode.daemon import paths
from bbnode.daemon.artifacts.artifact import serialize
from bbnode.daemon.artifacts.build import compile_module
from bbnode.daemon.control.client import ControlClient
from bbnode.daemon.invoke.exact import decoded
from bbnode.daemon.testbed.nodes import choose_port

PROGRAM = "_retrieval_program"
SHARDS = 8
SEARCHES, SHOWN_SEARCHES = 200, 20
WARM_UP = 5


def measure(shards: int = SHARDS) -> dict[str, float]:
    """Return shards_8_overhead_ms, and the two times that it is the difference of."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the daemons that are started below
    query = [float(value) for value in np.linspace(-1, 1, 128)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asker, *others = _made(Path(folder), shards, query)
        for node in (*others, asker):
            stack.enter_context(node.running())
        made = asker.finished_rounds()
        control = stack.enter_context(
            ControlClient(paths.control_socket(asker.state_dir), timeout_s=60.0)
        )
        wanted = {
            "target": "asker", "inputs": {"query": query}, "exact": True, "wait_s": 30.0,
        }  # fmt: skip
        slowest = [_slowest_ms(control.post("/v1/invoke", wanted)) for _ in range(SHOWN_SEARCHES)]
    failed = [each["failures"] for each in made if not each["ok"]]
    if failed:
        raise SystemExit(f"searches failed: {failed[:3]}")
    search_ms = statistics.median(each["seconds"] for each in made[WARM_UP:]) * 1e3
    slowest_ms = statistics.median(slowest)
    return {
        "shards_8_overhead_ms": search_ms - slowest_ms,
        "shards_8_search_ms": search_ms,
        "shards_8_slowest_ms": slowest_ms,
    }


def _made(folder: Path, shards: int, query: list[float]) -> list[_daemon_metrics.Node]:
    """Return the asker and the shards."""
    sys.path.insert(0, str(_daemon_metrics.HERE))
    artifact = folder / "artifact.onnx"
    artifact.write_bytes(serialize(compile_module(f"{PROGRAM}:TimedSearch", {})))
    listen = f"/ip4/127.0.0.1/tcp/{choose_port(0)}"
    wait = {"class": "shard", "peers": shards, "timeout_s": _daemon_metrics.PATIENCE_S}
    entry = {"target": "asker", "inputs": {"query": query}, "times": SEARCHES, "wait_for": wait}
    asker = _daemon_metrics.Node(
        folder / "asker", artifact, "asker", program=PROGRAM,
        network={"listen": [listen]}, invoke=[entry],
    )  # fmt: skip
    bootstrap = {"network": {"bootstrap": [f"{listen}/p2p/{asker.peer}"]}}
    return [
        asker,
        *(
            _daemon_metrics.Node(
                folder / f"shard-{n}", artifact, "shard", program=PROGRAM, **bootstrap
            )
            for n in range(shards)
        ),
    ]


def _slowest_ms(told: dict[str, object]) -> float:
    found = decoded(told["values"]["results"])  # type: ignore[index]
    return max(float(each["took_ns"]) for each in found.metadata) / 1e6
