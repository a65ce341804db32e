"""Prometheus' configuration and Grafana's dashboard: what they name is what a node serves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.metrics import render
from tests.daemon.live import running
from tests.deploy.compose import DEPLOY, load, mounts
from tests.patience import PATIENCE_S

COMPOSE = DEPLOY / "compose"
DASHBOARD: dict[str, Any] = json.loads(
    (COMPOSE / "grafana" / "dashboards" / "bbnode.json").read_text("utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# A metric in an expression: our own names, and those of the process collectors.
METRIC = re.compile(r"\b(?:bbnode|process|python)_[a-z0-9_]+")


class Made:
    """Rounds that a node could have made."""

    def as_json(self) -> dict[str, Any]:
        return {"target": "server", "done": 7}

    def finished(self) -> list[dict[str, Any]]:
        common = {"bytes": 10, "failures": []}
        return [
            {"ok": False, "seconds": 9.0, "responded": [], "missing": ["a"], "outputs": {}}
            | common,
            {
                "ok": True,
                "seconds": 1.5,
                "responded": ["a", "b", "c"],
                "missing": ["d"],
                "outputs": {"accuracy": 0.75, "model": {"dtype": "float32"}},
            }
            | common,
        ]


async def page(tmp_path: Path) -> dict[str, Any]:
    async with running(tmp_path) as live:
        live.plane.host.rounds = [Made()]
        live.plane.host.saved_s = live.plane.host.started_s
        async with AsyncControlClient(live.socket, timeout_s=PATIENCE_S) as client:
            body = {"target": "server", "inputs": {"question": [1.0]}, "wait_s": PATIENCE_S}
            await client.post("/v1/invoke", body)
        return {f.name: f for f in text_string_to_metric_families(render(live.plane.host).decode())}


async def test_every_metric_of_the_dashboard_exists_with_its_labels(tmp_path: Path) -> None:
    families = await page(tmp_path)
    for panel in PANELS:
        for target in panel["targets"]:
            names = METRIC.findall(target["expr"])
            assert names, target["expr"]
            for name in names:
                family = families.get(name.removesuffix("_total"))
                assert family is not None, f"{panel['title']}: {name}"
                counter = family.type == "counter"
                assert counter == name.endswith("_total"), f"{panel['title']}: {name}"
                # A counter is drawn as a rate, or as a number that it has come to.
                if counter and panel["type"] == "timeseries":
                    assert "rate(" in target["expr"], target["expr"]
                # What Prometheus adds, and what the families have.
                labels = {"job", "instance"}
                for sample in family.samples:
                    labels |= set(sample.labels)
                wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                if family.samples:
                    assert wanted <= labels, f"{panel['title']}: {wanted - labels}"
    for variable in DASHBOARD["templating"]["list"]:
        assert METRIC.findall(variable["definition"]) == ["bbnode_info"]


async def test_rounds_are_metrics(tmp_path: Path) -> None:
    families = await page(tmp_path)

    def one(name: str) -> tuple[dict[str, str], float]:
        (sample,) = families[name].samples
        return sample.labels, sample.value

    assert one("bbnode_rounds") == ({"target": "server"}, 7.0)
    assert one("bbnode_last_round_seconds") == ({"target": "server"}, 1.5)
    assert one("bbnode_last_round_ok") == ({"target": "server"}, 1.0)
    assert one("bbnode_last_round_responded") == ({"target": "server"}, 3.0)
    assert one("bbnode_last_round_missing") == ({"target": "server"}, 1.0)
    labels = {"target": "server", "name": "accuracy"}
    assert one("bbnode_last_round_output") == (labels, 0.75)


def test_panels_do_not_overlap_and_cover_what_was_asked_for() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    shown = " ".join(t["expr"] for p in PANELS for t in p["targets"])
    for name in (
        *("bbnode_rounds_total", "bbnode_executions_total", "bbnode_peers_connected"),
        *("bbnode_peer_received_bytes_total", "bbnode_peer_round_trip_seconds"),
        *("bbnode_gate_denials_total", "bbnode_transport_queued_envelopes"),
        *("process_resident_memory_bytes", "python_gc_collections_total"),
    ):
        assert name in shown


def test_grafana_finds_source_and_dashboard() -> None:
    provisioning = COMPOSE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    used = {panel["datasource"]["uid"] for panel in PANELS}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "bbnode.yaml").read_text())[
        "providers"
    ]
    grafana = load()["services"]["grafana"]
    seen = {target: source for source, target in mounts(grafana)}
    folder = DEPLOY / str(seen[provider["options"]["path"]])
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (folder / home.name).exists()


def test_prometheus_scrapes_every_node_with_the_token() -> None:
    compose = load()["services"]
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text("utf-8"))
    assert {job["job_name"] for job in config["scrape_configs"]} == {"server", "client"}
    targets = {target for _, target in mounts(compose["prometheus"])}
    for job in config["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        assert found["names"] == [job["job_name"]]
        assert (found["type"], found["port"]) == ("A", 9470)
        assert "testbed" in compose[job["job_name"]]["networks"]
        assert str(Path(job["authorization"]["credentials_file"]).parent) in targets
    assert "testbed" in compose["prometheus"]["networks"]
