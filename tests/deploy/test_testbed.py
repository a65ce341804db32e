"""The services of compose.yaml, their own commands as processes: a round goes through, and `up`
may come again at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose import IMAGE_UID, Testbed, argv
from tests.patience import PATIENCE_S

CLIENTS = ("client-1", "client-2", "client-3", "client-4")
# What a second `up` leaves as it is, by the service that sees it and where.
KEPT = (
    ("init", "/data", "state/identity.key"),
    ("init", "/owner", "testbed/owner.key"),
    ("init", "/shared", "metrics.token"),
    ("init", "/scrape", "token"),
    ("init", "/data", "artifact.onnx"),
    ("init", "/data", "node.toml"),
)

KEYS = ("/data/state/identity.key", "/owner/testbed/owner.key", "/shared/metrics.token")


def scrape(testbed: Testbed, container: str, token: str) -> str:
    url = f"http://127.0.0.1:{testbed.metrics_port(container)}/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def kept(testbed: Testbed) -> dict[str, bytes]:
    """The bytes of what is there."""
    files = {f"{t}/{n}": testbed.directory(c, t) / n for c, t, n in KEPT}
    return {name: file.read_bytes() for name, file in files.items() if file.exists()}


def beginnings(script: str) -> list[str]:
    """The script up to each line after which a shell has nothing left open."""
    lines = script.splitlines()
    found = []
    for end in range(1, len(lines)):
        text = "\n".join(lines[:end])
        if lines[end - 1].endswith("\\") or lines[end - 1].lstrip().startswith("#"):
            continue
        parsed = subprocess.run(
            ["sh", "-n", "-c", text], capture_output=True, timeout=PATIENCE_S, check=False
        )
        if parsed.returncode == 0:
            found.append(text)
    return found


def leave_drafts(testbed: Testbed) -> None:
    """What one that was killed in the middle leaves behind, with the modes that it gets."""
    for container, target, name in KEPT:
        final = testbed.directory(container, target) / name
        draft = final.with_name(f"{final.name}.new")
        shutil.copy(final, draft)
        if testbed.drop:
            os.chown(draft, IMAGE_UID, IMAGE_UID)


def test_a_second_up_makes_nothing_new_and_does_not_fail() -> None:
    with Testbed() as testbed:
        testbed.volumes()
        testbed.run("init")
        before = kept(testbed)
        assert len(before) == len(KEPT)
        token = testbed.directory("init", "/scrape") / "token"
        # Prometheus is another user, and nobody writes it.
        assert stat.S_IMODE(token.stat().st_mode) == 0o444
        assert before["/scrape/token"] == before["/shared/metrics.token"]
        assert len(before["/scrape/token"]) == 64
        leave_drafts(testbed)
        testbed.volumes()
        testbed.run("init")
        assert kept(testbed) == before


@pytest.mark.slow
def test_an_up_that_was_killed_anywhere_is_made_good_by_the_next() -> None:
    with Testbed() as testbed:
        testbed.volumes()
        script = argv(testbed.file["services"]["init"])[-1]
        cuts = beginnings(script)
        assert len(cuts) >= 10
        keys: dict[str, bytes] = {}
        for cut in cuts:
            testbed.run("init", script=cut)
            made = kept(testbed)
            # A key that was made once stays, whatever else is missing.
            assert {name: made.get(name) for name in keys} == keys
            keys |= {name: made[name] for name in KEYS if name in made}
        testbed.run("init")
        assert {name: kept(testbed)[name] for name in KEYS} == keys
        assert len(kept(testbed)) == len(KEPT)


@pytest.mark.slow
def test_clients_join_and_train_and_come_back() -> None:
    with Testbed() as testbed:
        testbed.volumes()
        testbed.run("init")
        server = testbed.start("server")
        testbed.check_health("server", timeout_s=60)
        testbed.run("ticket")
        for name in CLIENTS:
            testbed.start(name)
        wait_for_clients(testbed)
        for name in CLIENTS:
            testbed.check_health(name, timeout_s=60)
        check_round(testbed)

        token = (testbed.directory("init", "/scrape") / "token").read_text()
        for name in ("server", *CLIENTS):
            families = list(text_string_to_metric_families(scrape(testbed, name, token)))
            info = next(f for f in families if f.name == "bbnode_info")
            assert info.samples[0].labels["name"].startswith(name.partition("-")[0])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(testbed, "server", "wrong" * 10)

        # `up` again, beside all that runs: nothing ends, and rounds go on.
        before = kept(testbed)
        testbed.volumes()
        testbed.run("init")
        testbed.check_health("server", timeout_s=60)
        testbed.run("ticket")
        assert kept(testbed) == before
        assert all(testbed.processes[name].poll() is None for name in ("server", *CLIENTS))
        check_round(testbed)
        # One more, as `--scale`, with the new ticket.
        testbed.start("client-5")
        wait_for_clients(testbed, 5)
        testbed.check_health("client-5", timeout_s=60)
        assert testbed.stop("client-5") == 0, testbed.log("client-5")

        # A container that starts again is the same member, and fetches nothing anew.
        client = testbed.exec("client-1", "bbnode", "id").stdout
        assert testbed.stop("client-1") == 0, testbed.log("client-1")
        testbed.start("client-1")
        testbed.check_health("client-1", timeout_s=60)
        assert testbed.exec("client-1", "bbnode", "id").stdout == client
        # So is one that was killed, and the server.
        for name in ("client-2", "server"):
            testbed.kill(name)
        server = testbed.start("server")
        testbed.check_health("server", timeout_s=60)
        testbed.start("client-2")
        wait_for_clients(testbed)

        # So is everything after `down` and `up` again.
        for name in CLIENTS:
            assert testbed.stop(name) == 0, testbed.log(name)
        assert testbed.stop("server") == 0
        assert server.returncode == 0
        identity = testbed.exec("server", "bbnode", "id").stdout
        testbed.volumes()
        testbed.run("init")
        assert testbed.exec("server", "bbnode", "id").stdout == identity
        testbed.start("server")
        testbed.check_health("server", timeout_s=60)
        testbed.run("ticket")
        testbed.start("client-2")
        testbed.check_health("client-2", timeout_s=60)


def wait_for_clients(testbed: Testbed, count: int = 4) -> None:
    words = ("wait", "--peers", str(count), "--class", "client", "--timeout", "90")
    waited = testbed.exec("server", "bbnode", *words)
    assert waited.returncode == 0, waited.stderr + testbed.log("client-1")


def check_round(testbed: Testbed) -> None:
    words = ("invoke", "server", "-i", "tick=trigger", "--timeout", "60", "--json")
    invoked = testbed.exec("server", "bbnode", *words)
    assert invoked.returncode == 0, invoked.stdout + invoked.stderr
    assert json.loads(invoked.stdout)["ok"] is True
