"""The metrics page: names, units, bounded labels, and that Prometheus' own parser reads it."""

from __future__ import annotations

import ast
import dataclasses
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import bbnode
from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.observing.metrics import counter_metrics, render
from bbnode.engine import steps
from bbnode.ir.caps import MAX_PEER_SERIES
from bbnode.ir.peer import PeerId
from tests.daemon.live import CLIENT, running
from tests.daemon.test_control_api import QUESTION, raw
from tests.patience import PATIENCE_S


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_has_what_the_node_counts_with_units(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            body = {"target": "server", "inputs": QUESTION, "wait_s": PATIENCE_S}
            await client.post("/v1/invoke", body)
        page = (await raw(live, "/metrics")).decode()
        head, _, text = page.partition("\r\n\r\n")
        assert "text/plain" in head
        found = samples(text)
        assert found["bbnode_ready", ()] == 1
        assert found["bbnode_executions_total", ()] >= 1
        assert found["bbnode_ops_fired_total", ()] > 1
        assert found["bbnode_peers_connected", ()] == 1
        assert found["bbnode_peer_received_bytes_total", (str(CLIENT),)] > 0
        assert found["bbnode_peer_sent_bytes_total", (str(CLIENT),)] > 0
        assert ("bbnode_peer_round_trip_seconds", (str(CLIENT),)) in found
        assert found["bbnode_peer_connections", ("inbound",)] == 1
        assert found["bbnode_transport_outbound_envelopes_total", ()] >= 1
        assert found["bbnode_transport_connections", ()] == 1
        assert found["bbnode_transport_queued_bytes", ()] == 0
        assert found["bbnode_uptime_seconds", ()] >= 0
        assert found["process_resident_memory_bytes", ()] > 1e6
        assert ("python_gc_collections_total", ("0",)) in found
        ours = [name for name, _ in found if not name.startswith(("process_", "python_"))]
        assert all(name.startswith("bbnode_") for name in ours)


async def test_peers_beyond_the_bound_are_summed_up(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        await live.until(steps.PeerUp)
        (one,) = live.backend.peers()
        many = [
            dataclasses.replace(one, peer=PeerId.from_seed(n), bytes_in=1000 - n, bytes_out=0)
            for n in range(MAX_PEER_SERIES + 5)
        ]
        live.backend.peers = lambda: many  # type: ignore[method-assign]
        found = samples(render(live.plane.host).decode())
        series = [k for k in found if k[0] == "bbnode_peer_received_bytes_total"]
        assert len(series) == MAX_PEER_SERIES + 1
        rest = sum(1000 - n for n in range(MAX_PEER_SERIES, MAX_PEER_SERIES + 5))
        assert found["bbnode_peer_received_bytes_total", ("other",)] == rest


def test_a_reason_is_a_label_and_a_gauge_has_no_total() -> None:
    made = {
        (sample.name, *sample.labels.items()): sample.value
        for metric in counter_metrics(
            {
                "gate.denied.blocklisted": 2,
                "receive.failed.DecodeFailed": 1,
                # Of a newer layer, not in any table.
                "receive.failed.Unheard": 1,
                "bus.waiting": 3,
                "driver.QueueFullError": 4,
            }
        )
        for sample in metric.samples
    }
    # What is known and has not happened is there, too.
    happened = {name: value for name, value in made.items() if value}
    assert happened == {
        ("bbnode_gate_denials_total", ("reason", "blocklisted")): 2.0,
        ("bbnode_receive_failures_total", ("kind", "DecodeFailed")): 1.0,
        ("bbnode_receive_failures_total", ("kind", "Unheard")): 1.0,
        ("bbnode_bus_waiting",): 3.0,
        ("bbnode_driver_queue_full_error_total",): 4.0,
    }
    zero = {name[1][1] for name in made if made[name] == 0}
    assert zero == {
        *("duplicate", "not_allowlisted", "cooldown"),
        *(kind for kind in steps.RECEIVE_FAILURES if kind != "DecodeFailed"),
        *("stranger", "late", "unknown", "duplicate"),
        *("sent", "withheld", "malformed", "accepted"),
    }


async def test_labelled_counters_begin_at_zero(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        found = samples(render(live.plane.host).decode())
    for name, value in (
        ("bbnode_gate_denials_total", "cooldown"),
        ("bbnode_receive_failures_total", "UnknownSite"),
        ("bbnode_responses_total", "late"),
        ("bbnode_access_denials_total", "not_a_member"),
        ("bbnode_peer_connections", "outbound"),
    ):
        assert found[name, (value,)] == 0, name


def test_every_kind_that_the_engine_refuses_with_is_in_the_table() -> None:
    # The position of the kind among the arguments of each call that takes one.
    places = {"_RefusedFill": 0, "_refuse": 3, "receive_failed": 4, "_note_refused": 2}
    used: set[str] = set()
    for file in (Path(bbnode.__file__).parent / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                func = node.func
                place = places.get(func.attr if isinstance(func, ast.Attribute) else func.id)
                if place is not None and len(node.args) > place:
                    kind = node.args[place]
                    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                        used.add(kind.value)
            if isinstance(node, ast.FunctionDef) and node.name in ("accepts", "push_inbound"):
                returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
                used |= {str(r.value) for r in returned if isinstance(r, ast.Constant) and r.value}
            if isinstance(node, ast.FunctionDef) and node.name in ("_make", "_value"):
                pairs = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
                kinds = [pair.elts[0] for pair in pairs if isinstance(pair, ast.Tuple)]
                used |= {str(kind.value) for kind in kinds if isinstance(kind, ast.Constant)}
    assert used == set(steps.RECEIVE_FAILURES)


async def test_the_clock_and_the_room_for_the_state_are_told(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        before = time.time()
        found = samples(render(live.plane.host).decode())
        # Written with the precision of a float.
        assert before - 1e-3 <= found["bbnode_clock_seconds", ()] <= time.time() + 1e-3
        free = found["bbnode_state_dir_free_bytes", ()]
        assert 0 < free <= found["bbnode_state_dir_size_bytes", ()]
