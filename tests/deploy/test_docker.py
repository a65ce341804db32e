"""The Dockerfile: slim, another user, healthy by the CLI; and the parser that builds it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import cli
from tests.deploy.compose import COMMAND, DEPLOY, ENTRYPOINT
from tests.patience import PATIENCE_S

DOCKER = DEPLOY / "docker"
ROOT = DEPLOY.parent


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("build_root", DOCKER / "build_root.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build_root = _load()
STAGES = build_root.parse((DOCKER / "Dockerfile").read_text("utf-8"))
RUN = STAGES[-1]


def test_the_last_stage_is_what_runs() -> None:
    assert [stage.name for stage in STAGES] == ["build", "netem", "run"]
    assert RUN.last("USER") == "bbnode"
    assert json.loads(RUN.last("ENTRYPOINT")) == ENTRYPOINT
    assert json.loads(RUN.last("CMD")) == COMMAND
    assert RUN.last("VOLUME") == RUN.last("WORKDIR") == "/data"
    assert RUN.last("STOPSIGNAL") == "SIGTERM"
    # Compilers stay behind.
    assert not any("gcc" in step.rest for step in RUN.steps)


def test_the_commands_are_those_of_the_cli() -> None:
    cli.check(COMMAND)
    check = re.search(r"CMD (\[.*\])", RUN.last("HEALTHCHECK"))
    assert check is not None
    words = json.loads(check[1])
    assert words[0] == "bbnode"
    cli.check(words[1:])
    script = build_root.smoke_script(RUN, demo=True)
    calls = [line for line in script.splitlines() if line.startswith("bbnode ")]
    assert len(calls) >= 5
    for line in calls:
        cli.check(shlex.split(line.partition("&")[0])[1:])


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [
        line[1:]
        for line in (DOCKER / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    ]
    for stage in STAGES:
        for step in stage.steps:
            if step.word != "COPY" or "--from=" in step.rest:
                continue
            *sources, _ = [w for w in step.rest.split() if not w.startswith("--")]
            for source in (source.removeprefix("./") for source in sources):
                assert (ROOT / source).exists(), source
                assert source in kept, source
    assert sorted(kept) == sorted(set(kept))
    assert all((ROOT / each).exists() for each in kept)


def test_lists_of_packages_do_not_stay_in_a_layer() -> None:
    for stage in STAGES:
        for step in stage.steps:
            if "apt-get install" in step.rest:
                assert "--no-install-recommends" in step.rest
                assert step.rest.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_parser_joins_lines_and_names_stages() -> None:
    (first, second) = build_root.parse(
        'FROM debian:x AS one\n# note\nRUN a \\\n  # in between\n  && b\nFROM y\nARG Z="1"\n'
    )
    assert (first.name, first.base, second.name, second.base) == ("one", "debian:x", "1", "y")
    assert re.sub(r"\s+", " ", first.steps[0].rest) == "a && b"
    assert second.last("ARG") == 'Z="1"'
    assert second.last("USER") is None


@pytest.mark.parametrize("text", ["RUN x\n", "FROM\n", "FROM a AS b c\n"])
def test_what_it_does_not_know_is_an_error(text: str) -> None:
    with pytest.raises(build_root.BuildError):
        build_root.parse(text)


def test_an_unknown_instruction_is_an_error(tmp_path: Path) -> None:
    step = build_root.Instruction(word="ONBUILD", rest="RUN x")
    root = build_root.Root(path=tmp_path, binds={}, env={})
    with pytest.raises(build_root.BuildError, match="ONBUILD"):
        build_root._apply(step, root, {}, {})


def test_what_a_step_sees_of_this_machine_is_read_only(tmp_path: Path) -> None:
    text = build_root._bind(Path("/etc/hosts"), tmp_path, "/run/hosts")
    assert re.search(r"mount --bind /etc/hosts (\S+); mount -o remount,bind,ro \1$", text)


@pytest.mark.parametrize(
    ("setting", "value"), [("NETEM_DELAY_MS", "x"), ("NETEM_LOSS_PCT", "1; reboot")]
)
def test_netem_takes_numbers_alone(setting: str, value: str) -> None:
    done = subprocess.run(
        ["/bin/sh", str(DOCKER / "netem.sh")],
        env={"PATH": "/nonexistent", setting: value},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "numbers" in done.stderr


def test_netem_impairs_both_directions_and_undoes_it(tmp_path: Path) -> None:
    for name in ("tc", "ip"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n')
        stub.chmod(0o755)
    process = subprocess.Popen(
        ["/bin/sh", str(DOCKER / "netem.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "NETEM_DELAY_MS": "50", "NETEM_LOSS_PCT": "2.5"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "50±10 ms and 2.5 % loss for what leaves and enters" in process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()
    calls = (tmp_path / "calls").read_text().splitlines()
    impaired = [call for call in calls if " netem " in call]
    assert len(impaired) == 2
    assert all("delay 50ms 10ms loss 2.5%" in call for call in impaired)
    assert calls[-3:] == [
        "tc qdisc del dev eth0 root",
        "tc qdisc del dev eth0 ingress",
        "ip link del ifb-netem",
    ]
