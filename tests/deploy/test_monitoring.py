"""Prometheus' configuration and Grafana's dashboard: what they name is what a node serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bbnode.daemon.control.async_client import AsyncControlClient
from bbnode.daemon.observing.metrics import render
from tests.daemon.live import running
from tests.deploy.compose import DEPLOY, load, mounts
from tests.patience import PATIENCE_S

COMPOSE = DEPLOY / "compose"
DASHBOARD: dict[str, Any] = json.loads(
    (COMPOSE / "grafana" / "dashboards" / "bbnode.json").read_text("utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((COMPOSE / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
ALERT_TESTS = Path(__file__).parent / "alerts_test.yml"
PROMTOOL = shutil.which("promtool")
# A metric in an expression: our own names, and those of the process collectors.
METRIC = re.compile(r"\b(?:bbnode|process|python)_[a-z0-9_]+")


class Made:
    """Rounds that a node could have made."""

    period_s = 5.0
    age_s = 2.5

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
            # Prometheus makes that one, of the rules.
            assert names or target["expr"].startswith("ALERTS{"), target["expr"]
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
    assert one("bbnode_round_period_seconds") == ({"target": "server"}, 5.0)
    assert one("bbnode_round_age_seconds") == ({"target": "server"}, 2.5)
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


async def test_every_metric_of_the_alerts_exists_with_its_labels(tmp_path: Path) -> None:
    families = await page(tmp_path)
    added = {"job", "instance"}
    for rule in RULES:
        names = METRIC.findall(rule["expr"])
        assert names, rule["alert"]
        has = set(added)
        for name in names:
            family = families.get(name.removesuffix("_total"))
            assert family is not None, f"{rule['alert']}: {name}"
            assert (family.type == "counter") == name.endswith("_total"), name
            # None is there only when something has happened: a rule over it would be blind.
            assert family.samples, f"{rule['alert']}: {name}"
            for sample in family.samples:
                has |= set(sample.labels)
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= has
        assert set(re.findall(r"without \((\w+)\)", rule["expr"])) <= has


def test_prometheus_loads_the_alerts_and_each_has_a_test() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text("utf-8"))
    (loaded,) = config["rule_files"]
    seen = {target: source for source, target in mounts(load()["services"]["prometheus"])}
    assert DEPLOY / str(seen[loaded]) == COMPOSE / "alerts.yml"
    cases = ALERT_TESTS.read_text("utf-8")
    for rule in RULES:
        assert f'alertname="{rule["alert"]}"' in cases, rule["alert"]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_alerts_fire_when_they_should() -> None:
    for words in (
        ("check", "rules", str(COMPOSE / "alerts.yml")),
        ("test", "rules", str(ALERT_TESTS)),
    ):
        done = subprocess.run(
            [str(PROMTOOL), *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
