"""The units of systemd: verified, hardened, and starting what the CLI has."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bbnode.cli import exits
from bbnode.daemon import paths
from tests.deploy import cli
from tests.deploy.compose import DEPLOY
from tests.patience import PATIENCE_S

UNITS = DEPLOY.parent / "bbnode" / "daemon" / "units"
FILES = ("bbnode@.service", "bbnode-user@.service")
MAX_EXPOSURE = 3.0
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze"
)


def settings(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text("utf-8").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def installed(name: str, folder: Path) -> Path:
    """The unit as instance "peer", with a program that this machine has."""
    text = (UNITS / name).read_text("utf-8")
    program = folder / "bbnode"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / name.replace("@", "@peer")
    unit.write_text(re.sub(r"(Exec(?:Start|Reload))=\S+", rf"\1={program}", text))
    return unit


def analyze(*words: str, **environ: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize("name", FILES)
def test_verify_finds_nothing(name: str, tmp_path: Path) -> None:
    who = ["--user"] if "user" in name else []
    unit = installed(name, tmp_path)
    # A manager of a user has a runtime directory; this machine may run none.
    (tmp_path / "runtime").mkdir(mode=0o700)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    told = analyze(*who, "--man=no", "--recursive-errors=no", "verify", str(unit), **environ)
    # Of the units of this machine it may say something; of ours, nothing.
    assert [line for line in told.splitlines() if "bbnode" in line] == []


@needs_systemd
@pytest.mark.parametrize("name", FILES)
def test_exposure_is_low(name: str, tmp_path: Path) -> None:
    # A user's unit is judged as a system's: offline there is only that.
    unit = installed(name, tmp_path)
    told = analyze("security", "--offline=true", "--no-pager", str(unit))
    overall = re.search(r"Overall exposure level for \S+: ([0-9.]+)", told)
    assert overall is not None, told
    assert float(overall[1]) < MAX_EXPOSURE


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("key", ["ExecStart", "ExecReload"])
def test_what_it_starts_is_a_command_of_the_cli(name: str, key: str) -> None:
    (start,) = settings(name)[key]
    program, *words = shlex.split(start)
    assert program.endswith("/bin/bbnode")
    cli.check(words)


@pytest.mark.parametrize("name", FILES)
def test_a_reload_is_answered_by_the_daemon(name: str) -> None:
    # A signal has no answer: systemctl would say that all is well.
    assert shlex.split(settings(name)["ExecReload"][0])[1] == "reload"


def test_a_reload_of_a_users_unit_can_be_started() -> None:
    # ExecReload's process gets a user namespace of its own, which does not own the daemon's IPC
    # namespace: systemd 252 to 257 fail it with 226/NAMESPACE.
    assert "PrivateIPC" not in settings("bbnode-user@.service")


@pytest.mark.parametrize("name", FILES)
def test_the_daemon_says_what_is_missing(name: str) -> None:
    # Of an assertion that fails systemd says so and not which, in the log and in its status.
    assert not [key for key in settings(name) if key.startswith(("Assert", "Condition"))]


@pytest.mark.parametrize("name", FILES)
def test_it_works_in_an_empty_directory_of_its_own(name: str) -> None:
    found = settings(name)
    (where,) = found["WorkingDirectory"]
    made = found["RuntimeDirectory"][0].split()
    runtime = "%t" if "user" in name else "/run"
    assert where in {f"{runtime}/{directory}" for directory in made}
    assert where.endswith("/empty")


@pytest.mark.parametrize("name", FILES)
def test_onnx_runtime_reports_nothing(name: str) -> None:
    assert "ORT_DISABLE_TELEMETRY=1" in settings(name)["Environment"]


def test_what_is_no_command_is_found() -> None:
    with pytest.raises(Exception, match="--confg"):
        cli.check(["run", "--confg", "x"])
    with pytest.raises(AssertionError, match="no command"):
        cli.check(["runn"])


def test_directories_are_those_that_the_daemon_uses() -> None:
    found = settings("bbnode@.service")
    assert f"/var/lib/{found['StateDirectory'][0]}" == f"{paths.SYSTEM_STATE_DIR}/%i"
    assert f"/run/{found['RuntimeDirectory'][0].split()[0]}" == f"{paths.SYSTEM_RUNTIME_DIR}/%i"
    assert f"/var/cache/{found['CacheDirectory'][0]}" == str(paths.SYSTEM_CACHE_DIR)
    assert f"/etc/{found['ConfigurationDirectory'][0]}" == str(paths.SYSTEM_CONFIG_DIR)
    users = (UNITS / "bbnode.sysusers.conf").read_text("utf-8").splitlines()
    user = next(line for line in users if line.startswith("u "))
    assert user.split()[1] == found["User"][0] == found["Group"][0] == paths.SYSTEM_USER
    # What `bbnode reload` asks is the daemon that the unit runs.
    assert found["ExecReload"][0].endswith(f" --state-dir {paths.SYSTEM_STATE_DIR}/%i")
    user_unit = settings("bbnode-user@.service")
    assert user_unit["ExecReload"][0].endswith(" --state-dir %h/.local/state/bbnode/%i")


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_configuration_is_not_started_again(name: str) -> None:
    found = settings(name)
    codes = {int(code) for code in found["RestartPreventExitStatus"][0].split()}
    assert codes == {exits.USAGE, exits.REFUSED}
    assert found["Type"] == ["notify"]
