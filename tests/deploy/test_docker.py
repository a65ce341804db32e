"""The Dockerfile: slim, another user, healthy by the CLI; and the parser that builds it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bbnode.cli.main import main
from bbnode.daemon.config import sources
from tests.deploy import cli
from tests.deploy.compose import (
    COMMAND,
    DEPLOY,
    DOCKER,
    ENTRYPOINT,
    IMAGE_ENV,
    STAGES,
    build_root,
)
from tests.patience import PATIENCE_S

ROOT = DEPLOY.parent


RUN = STAGES[-1]


def test_the_last_stage_is_what_runs() -> None:
    assert [stage.name for stage in STAGES] == ["build", "netem", "run"]
    assert RUN.last("USER") == "bbnode"
    assert json.loads(RUN.last("ENTRYPOINT")) == ENTRYPOINT
    assert json.loads(RUN.last("CMD")) == COMMAND
    assert RUN.last("VOLUME") == "/data"
    assert RUN.last("STOPSIGNAL") == "SIGTERM"
    # A path that is counted from where it runs finds nothing.
    assert RUN.last("WORKDIR") == "/var/empty"
    assert any("install -d -m 0555 /var/empty" in step.rest for step in RUN.steps)
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


def test_a_node_of_the_image_is_in_the_volume_and_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in IMAGE_ENV.items():
        if name != "PATH":
            monkeypatch.setenv(name, value.replace("/data", str(tmp_path / "data")))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    module = "bbnode.examples.gossip_averaging:GossipAveraging"
    assert main(["init", "--name", "peer", "--module", module, "--target", "peer"]) == 0
    file = tmp_path / "data" / "node.toml"
    (address,) = sources.resolve(file, environ={}).config.network.listen
    # What the port that README.md publishes leads to.
    (exposed,) = [s.rest for s in RUN.steps if s.word == "EXPOSE"]
    assert address == f"/ip4/0.0.0.0/tcp/{exposed.removesuffix('/tcp')}"
    assert IMAGE_ENV["ORT_DISABLE_TELEMETRY"] == "1"
    assert list((tmp_path / "empty").iterdir()) == []


def test_every_stage_is_made_from_the_base_that_is_asked_for() -> None:
    text = (DOCKER / "Dockerfile").read_text("utf-8")
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}"] * 3
    assert {stage.base for stage in STAGES} == {"debian:bookworm-slim"}


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


def test_an_image_with_a_program_shares_all_but_the_environment() -> None:
    text = (DOCKER / "program.Dockerfile").read_text("utf-8")
    own, program, last = build_root.parse(text)
    # The image's own steps and settings; one folder of it is another.
    assert (own.base, own.steps, last.base) == ("bbnode", [], own.name)
    assert [(step.word, step.rest) for step in last.steps] == [
        ("COPY", "--from=program /opt/bbnode /opt/bbnode")
    ]
    # One Python, as the image has it, and lists of packages do not stay.
    assert program.base == RUN.base
    assert program.steps[0].rest.endswith("rm -rf /var/lib/apt/lists/*")
    assert "--python /opt/bbnode/bin/python /src" in program.steps[-1].rest
    assert not any("gcc" in step.rest for step in program.steps)


@pytest.mark.slow
def test_uv_installs_into_an_environment_that_has_none(tmp_path: Path) -> None:
    """The step of program.Dockerfile, with a root of its own in place of /opt/bbnode and /src."""
    pytest.importorskip("hatchling", reason="hatchling comes with the extra test")
    assert main(["new", str(tmp_path / "mine")]) == 0
    own = tmp_path / "own"
    words = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(own)]
    subprocess.run(words, check=True)
    (site,) = own.glob("lib/python3*/site-packages")
    # What this interpreter has stands in for what the image has; there is no network here.
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "here.pth").write_text(f"{here}\n")
    text = (DOCKER / "program.Dockerfile").read_text("utf-8")
    step = build_root.parse(text)[1].steps[-1].rest.replace("/opt/bbnode", str(own))
    step = step.replace("/src", str(tmp_path / "mine")).replace(
        "/uv/bin/uv", f"{sys.executable} -m uv"
    )
    step += " --no-build-isolation --offline --no-deps"
    subprocess.run(["/bin/sh", "-c", step], env=os.environ | {"PACKAGES": ""}, check=True)
    assert (site / "mine" / "program.py").exists()


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
    (only,) = build_root.parse("ARG BASE=debian:y\nFROM ${BASE} AS x\nRUN a ${BASE}\n")
    assert (only.base, only.steps[0].rest) == ("debian:y", "a ${BASE}")


@pytest.mark.parametrize("text", ["RUN x\n", "FROM\n", "FROM a AS b c\n", "FROM ${NONE}\n"])
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


def test_netem_without_the_kernels_module_says_so(tmp_path: Path) -> None:
    tc = tmp_path / "tc"
    tc.write_text('#!/bin/sh\necho "Error: Specified qdisc kind is unknown." >&2; exit 2\n')
    tc.chmod(0o755)
    (tmp_path / "ip").symlink_to("/bin/false")
    done = subprocess.run(
        ["/bin/sh", str(DOCKER / "netem.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("modprobe sch_netem")


def test_what_is_pruned_is_not_ours() -> None:
    # `bbnode new` writes the tests of its templates.
    (build,) = [stage for stage in STAGES if stage.name == "build"]
    (prune,) = [step.rest for step in build.steps if "-name tests" in step.rest]
    assert "find . -path ./bbnode -prune -o -type d -name tests" in prune
