"""The services of compose.yaml, their own commands as processes: a round goes through."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose import Testbed
from tests.patience import PATIENCE_S

CLIENTS = ("client-1", "client-2", "client-3", "client-4")


def scrape(testbed: Testbed, container: str, token: str) -> str:
    url = f"http://127.0.0.1:{testbed.metrics_port(container)}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_clients_join_and_train_and_come_back() -> None:
    with Testbed() as testbed:
        # `volumes` only gives them to the image's user.
        for target in ("/data", "/owner", "/shared", "/scrape"):
            testbed.directory("init", target)
        testbed.run("init")
        server = testbed.start("server")
        testbed.check_health("server", timeout_s=60)
        testbed.run("ticket")
        for name in CLIENTS:
            testbed.start(name)
        waited = testbed.exec(
            "server", "bbnode", "wait", "--peers", "4", "--class", "client", "--timeout", "90"
        )
        assert waited.returncode == 0, waited.stderr + testbed.log("client-1")
        for name in CLIENTS:
            testbed.check_health(name, timeout_s=60)

        invoked = testbed.exec(
            "server",
            "bbnode",
            "invoke",
            "server",
            "-i",
            "tick=trigger",
            "--timeout",
            "60",
            "--json",
        )
        assert invoked.returncode == 0, invoked.stdout + invoked.stderr
        assert json.loads(invoked.stdout)["ok"] is True

        token = (testbed.directory("init", "/scrape") / "token").read_text()
        for name in ("server", *CLIENTS):
            families = list(text_string_to_metric_families(scrape(testbed, name, token)))
            info = next(f for f in families if f.name == "bbnode_info")
            assert info.samples[0].labels["name"].startswith(name.partition("-")[0])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(testbed, "server", "wrong" * 10)

        # A container that starts again is the same member, and fetches nothing anew.
        before = testbed.exec("client-1", "bbnode", "id").stdout
        assert testbed.stop("client-1") == 0, testbed.log("client-1")
        testbed.start("client-1")
        testbed.check_health("client-1", timeout_s=60)
        assert testbed.exec("client-1", "bbnode", "id").stdout == before

        # So is everything after `down` and `up` again.
        for name in CLIENTS:
            assert testbed.stop(name) == 0, testbed.log(name)
        assert testbed.stop("server") == 0
        assert server.returncode == 0
        identity = testbed.exec("server", "bbnode", "id").stdout
        testbed.run("init")
        assert testbed.exec("server", "bbnode", "id").stdout == identity
        testbed.start("server")
        testbed.check_health("server", timeout_s=60)
        testbed.run("ticket")
        testbed.start("client-2")
        testbed.check_health("client-2", timeout_s=60)
