"""A search over shards that are daemons of their own, and what it takes above the slowest of them.

Rule: real `bbnode run` processes on loopback, and the program a user takes. A search's time is the
asker's own, from the invocation to the last output; of many the median. A shard says with its hits
how long its own search took. All processes share this machine's cores, each computes in one thread,
and processor time is what the kernel counts for a process while all are connected and search.

Metrics, where 8 is the number of shards:
    shards_8_overhead_ms: shards_8_search_ms - shards_8_slowest_ms.
    shards_8_search_ms: a search.
    shards_8_slowest_ms: the longest of the shards' own searches in one, by the clock; while shards
        wait for each other's cores it is longer than what it computes.
    shards_8_own_cpu_ms: processor time of one shard's own search.
    shards_8_overhead_ideal_ms: what shards_8_overhead_ms would be if nothing took time but the
        shards' own searches, by their processor time, one after the other on each core. On fewer
        cores than shards it is not 0, and no program can be below it.
    shards_8_asker_cpu_ms: processor time of the asker's whole process for a search.
    shards_8_shard_cpu_ms: processor time of a shard's whole process for a search, its own one left
        out.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
    """Return the metrics of the module's docstring."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the daemons that are started below
    query = [float(value) for value in np.linspace(-1, 1, 128)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asker, *others = _made(Path(folder), shards, query)
        shard_pids = [stack.enter_context(node.running())[0].pid for node in others]
        asker_pid = stack.enter_context(asker.running())[0].pid
        socket = paths.control_socket(asker.state_dir)
        # Not from the beginning: starting and connecting take a while, too.
        with ControlClient(socket, timeout_s=60.0) as control:
            first = next(iter(control.stream("/v1/events", {"type": "round_finished"})))
        before = _cpu_ms(asker_pid, shard_pids)
        made = asker.finished_rounds()
        after = _cpu_ms(asker_pid, shard_pids)
        control = stack.enter_context(ControlClient(socket, timeout_s=60.0))
        wanted = {
            "target": "asker", "inputs": {"query": query}, "exact": True, "wait_s": 30.0,
        }  # fmt: skip
        shown = [_own_times(control.post("/v1/invoke", wanted)) for _ in range(SHOWN_SEARCHES)]
    failed = [each["failures"] for each in made if not each["ok"]]
    if failed:
        raise SystemExit(f"searches failed: {failed[:3]}")
    search_ms = statistics.median(each["seconds"] for each in made[WARM_UP:]) * 1e3
    slowest_ms = statistics.median(max(took for took, _ in each) for each in shown) / 1e6
    own_ms = statistics.median(cpu for each in shown for _, cpu in each) / 1e6
    searches = SEARCHES - first["event"]["round"]
    asker_ms, shard_ms = ((b - a) / searches for a, b in zip(before, after, strict=True))
    in_turn = math.ceil(shards / len(os.sched_getaffinity(0)))
    return {
        "shards_8_overhead_ms": search_ms - slowest_ms,
        "shards_8_overhead_ideal_ms": (in_turn - 1) * own_ms,
        "shards_8_search_ms": search_ms,
        "shards_8_slowest_ms": slowest_ms,
        "shards_8_own_cpu_ms": own_ms,
        "shards_8_asker_cpu_ms": asker_ms,
        "shards_8_shard_cpu_ms": shard_ms / shards - own_ms,
    }


def _cpu_ms(asker: int, shards: Sequence[int]) -> tuple[float, float]:
    """Return the processor time of the asker's process, and of all shards', so far."""
    cpu_s = _daemon_metrics.cpu_s
    return cpu_s(asker) * 1e3, sum(map(cpu_s, shards)) * 1e3


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


def _own_times(told: dict[str, Any]) -> set[tuple[int, int]]:
    """Return of each shard that found something the (clock's, processor's) ns of its search."""
    found = decoded(told["values"]["results"])
    return {(each["took_ns"], each["cpu_ns"]) for each in found.metadata}
