"""The testbed's page with an engine of containers, where this machine has one.

Rule: a project and a network of its own, so that a testbed that runs here is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.deploy.compose import DEPLOY
from tests.deploy.test_sequences import blocks

PATIENCE_S = 1200.0
PROJECT = "bbnode-test"
ENVIRON = {
    "COMPOSE_PROJECT_NAME": PROJECT,
    "BBNODE_SUBNET": "10.214.0.0/20",
    "BBNODE_IP_RANGE": "10.214.8.0/21",
    "BBNODE_SERVER_IP": "10.214.0.2",
}
COMPOSE = "docker compose -f deploy/compose.yaml"


def run(command: str, *, check: bool = True) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=DEPLOY.parent,
        env=os.environ | ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture
def engine() -> Iterator[None]:
    if shutil.which("docker") is None:
        pytest.skip("this machine has no docker")
    if "Server Version" not in run("docker info", check=False):
        pytest.skip("no docker daemon answers")
    if not re.search(r"\bv?[2-9]\.", run("docker compose version", check=False)):
        pytest.skip("this docker has no Compose 2")
    try:
        yield
    finally:
        run(f'{COMPOSE} --profile "*" down --volumes', check=False)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_the_page_of_the_testbed() -> None:
    """Build, start, make a round, and leave nothing, by the page's own commands."""
    first = next(b for b in blocks("deploy/README.md") if b.heading == "The testbed")
    up, status, down = first.lines
    run(f"{up} --detach")
    inside = f"{COMPOSE} exec -T server bbnode"
    run(f"{inside} wait --peers 8 --class client --timeout 120")
    invoked = run(f"{inside} invoke server -i tick=trigger --timeout 60 --json 2>/dev/null")
    assert json.loads(invoked)["ok"] is True
    assert "8 connected" in run(status.replace("exec", "exec -T"))
    run(down)
    mine = f"--filter label=com.docker.compose.project={PROJECT}"
    for kind in ("volume ls", "network ls", "container ls --all"):
        assert run(f"docker {kind} --quiet {mine}") == "", kind
