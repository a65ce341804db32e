"""deploy/compose.yaml as Compose reads it: merged, variables filled in, and run without an engine.

`Testbed` starts services' own commands as processes: a directory stands for each volume, loopback
for the network, and every path and address in commands, variables and files is rewritten to it.
They run as the image's user, for root may do what that user may not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_S

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
FILE = DEPLOY / "compose.yaml"
DOCKER = DEPLOY / "docker"


def _load_build_root() -> Any:
    spec = importlib.util.spec_from_file_location("build_root", DOCKER / "build_root.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build_root = _load_build_root()
DOCKERFILE = (DOCKER / "Dockerfile").read_text("utf-8")
STAGES = build_root.parse(DOCKERFILE)
# What the Dockerfile says for every service that is made from it.
ENTRYPOINT, COMMAND = ["bbnode"], ["run"]
IMAGE_ENV = dict(
    pair.split("=", 1)
    for step in STAGES[-1].steps
    if step.word == "ENV"
    for pair in shlex.split(step.rest)
)
(IMAGE_UID,) = (int(uid) for uid in re.findall(r"useradd --uid (\d+)", DOCKERFILE))

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::-([^}]*))?\})")


def load(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The file with its merges and variables, as `docker compose config` shows it."""
    filled = _fill(yaml.safe_load(FILE.read_text("utf-8")), environ or {})
    assert isinstance(filled, dict)
    return filled


def _fill(item: Any, environ: dict[str, str]) -> Any:
    if isinstance(item, dict):
        return {name: _fill(child, environ) for name, child in item.items()}
    if isinstance(item, list):
        return [_fill(child, environ) for child in item]
    if not isinstance(item, str):
        return item

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        assert found[3] is not None, f"{found[0]} has no default"
        return environ.get(found[2], found[3])

    return _VARIABLE.sub(value, item)


def mounts(service: dict[str, Any]) -> list[tuple[str | None, str]]:
    """Source (None for a volume without a name) and target of each mount."""
    found: list[tuple[str | None, str]] = []
    for text in service.get("volumes", []):
        parts = text.split(":")
        found.append((None, parts[0]) if len(parts) == 1 else (parts[0], parts[1]))
    return found


def argv(service: dict[str, Any]) -> list[str]:
    """What the container runs."""
    if "entrypoint" in service:
        return [*service["entrypoint"], *service.get("command", [])]
    return ENTRYPOINT + list(service.get("command", COMMAND))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def setpriv(uid: int, capabilities: str = "") -> list[str]:
    """The words before a command that make it a user's, with a few capabilities at most."""
    kept = f"-all{capabilities}"
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    words += [f"--inh-caps={kept}", f"--bounding-set={kept}"]
    return words if uid == 0 else [*words, f"--ambient-caps={kept}"]


def image_user() -> list[str]:
    """The words before a command that make it the image's user's.

    None without root: whoever runs the tests has no privilege either. Where root alone can read
    this checkout or its Python, as in root's home, that user may read everything, and write
    nothing more. Skips the test where even so it cannot run bbnode.
    """
    if os.geteuid() != 0:
        return []
    told = ""
    for words in (setpriv(IMAGE_UID), setpriv(IMAGE_UID, ",+dac_read_search")):
        tried = subprocess.run(
            # By a shell: the first program after setpriv is still opened with root's rights.
            [*words, "sh", "-c", f"{shlex.quote(sys.executable)} -c 'import bbnode.cli.main'"],
            env={"PYTHONPATH": str(DEPLOY.parent), "PATH": os.environ["PATH"]},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if tried.returncode == 0:
            return words
        told = tried.stderr.strip()
    pytest.skip(f"user {IMAGE_UID} cannot run bbnode from this checkout: {told}")


class Testbed:
    """Containers as processes; a context manager that ends all that it started."""

    __test__ = False

    def __init__(self, **environ: str) -> None:
        self.drop = image_user()
        # Short: a unix socket's path has a bound.
        self.root = Path(tempfile.mkdtemp(prefix="bb-", dir="/tmp"))
        self.root.chmod(0o755)
        self.file = load(environ)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._metrics: dict[str, int] = {}
        (self.root / "bin").mkdir()
        (self.root / "empty").mkdir(mode=0o555)
        script = self.root / "bin" / "bbnode"
        script.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(DEPLOY.parent))} "
            f'exec {shlex.quote(sys.executable)} -m bbnode "$@"\n'
        )
        script.chmod(0o755)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE_S)
        shutil.rmtree(self.root)

    def metrics_port(self, container: str) -> int:
        """Where that container's 9470 is."""
        return self._metrics.setdefault(container, free_port())

    def directory(self, container: str, target: str) -> Path:
        """What stands for a container's mount, or the file that is mounted there."""
        service = self.file["services"][container.partition("-")[0]]
        source = {t: s for s, t in mounts(service)}[target]
        if source is not None and source.startswith("."):
            return self._rewritten(container, DEPLOY / source, target)
        made = self.root / (f"anonymous-{container}" if source is None else source)
        if not made.exists():
            made.mkdir()
            if source is None and self.drop:
                # A volume without a name is made from the image's /data.
                os.chown(made, IMAGE_UID, IMAGE_UID)
        return made

    def _environ(self, container: str) -> dict[str, str]:
        """The image's variables, with this machine's paths."""
        local = {name: self._local(container, text) for name, text in IMAGE_ENV.items()}
        return local | {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.directory(container, "/data")),
        }

    def start(self, container: str, *, script: str | None = None) -> subprocess.Popen[bytes]:
        """Start `SERVICE` or `SERVICE-N`; its output goes to a file of that name.

        `script` is run in place of the service's own, which is one of `/bin/sh`.
        """
        service = self.file["services"][container.partition("-")[0]]
        words = argv(service)
        if script is not None:
            words = [*words[:-1], script]
        environ = {
            # As an engine names a container: twelve hex digits.
            "HOSTNAME": f"{0xC0FFEE000000 + len(self.processes):x}",
            **service.get("environment", {}),
        }
        with (self.root / f"{container}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(setpriv(0, ",+chown") if service.get("user") == "root" else self.drop),
                    *(self._local(container, word) for word in words),
                ],
                cwd=self.root / "empty",
                env=self._environ(container)
                | {n: self._local(container, str(v)) for n, v in environ.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[container] = process
        return process

    def run(self, container: str, *, script: str | None = None) -> None:
        """Run a service that ends; it has to end well."""
        assert self.start(container, script=script).wait(PATIENCE_S) == 0, self.log(container)

    def volumes(self) -> None:
        """Run the service that gives the volumes to the image's user; only root can do it."""
        for _, target in mounts(self.file["services"]["volumes"]):
            self.directory("volumes", target)
        if self.drop:
            self.run("volumes")

    def stop(self, container: str) -> int:
        """SIGTERM, as `docker compose stop`; returns the exit code."""
        process = self.processes[container]
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)

    def kill(self, container: str) -> None:
        """SIGKILL, as `docker kill`."""
        self.processes[container].kill()
        self.processes[container].wait(PATIENCE_S)

    def check_health(self, container: str, *, timeout_s: float | None = None) -> None:
        """Run the service's own health check until it says yes."""
        test = self.file["services"][container.partition("-")[0]]["healthcheck"]["test"]
        words = test[1:]
        if timeout_s is not None:
            words = [*words[:-1], str(timeout_s)]
        done = self.exec(container, *words)
        assert done.returncode == 0, done.stderr + self.log(container)

    def exec(self, container: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `docker compose exec`."""
        return subprocess.run(
            [*self.drop, *words],
            cwd=self.root / "empty",
            env=self._environ(container),
            timeout=PATIENCE_S,
            capture_output=True,
            text=True,
            check=False,
        )

    def log(self, container: str) -> str:
        """What a container wrote."""
        return (self.root / f"{container}.log").read_text("utf-8", "replace")

    def _local(self, container: str, text: str) -> str:
        """A text of the compose file with this machine's paths, addresses and ports."""
        service = self.file["services"][container.partition("-")[0]]
        for _, target in mounts(service):
            # Not within another word: /data is no part of slots.data.
            pattern = rf"(?<![\w.]){re.escape(target)}(?![\w-])"
            text = re.sub(pattern, str(self.directory(container, target)), text)
        return self._addresses(container, text)

    def _addresses(self, container: str, text: str) -> str:
        server = self.file["services"]["server"]["networks"]["testbed"]["ipv4_address"]
        text = text.replace(server, "127.0.0.1").replace("/tcp/4001", f"/tcp/{self.port}")
        return text.replace(":9470", f":{self.metrics_port(container)}")

    def _rewritten(self, container: str, file: Path, target: str) -> Path:
        made = self.root / "config" / target.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        # Files that init gives the server: their paths are the server's.
        text = self._addresses("server", file.read_text("utf-8"))
        for _, seen in mounts(self.file["services"]["server"]):
            text = text.replace(f'"{seen}/', f'"{self.directory("server", seen)}/')
        made.write_text(text)
        return made
