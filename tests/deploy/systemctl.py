"""Stands in for systemctl where no manager of units runs: what `bbnode@NAME` says is done.

Rule: of a unit only that is read which a node needs to run: its user, folders and commands.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNIT = Path("/etc/systemd/system/bbnode@.service")
PIDS = Path("/run/units")
BASES = {"StateDirectory": "/var/lib", "RuntimeDirectory": "/run", "CacheDirectory": "/var/cache"}
PATIENCE_S = 60.0


def settings(name: str) -> dict[str, str]:
    lines = UNIT.read_text("utf-8").replace("%i", name).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def start(unit: str, found: dict[str, str]) -> bool:
    """Start a unit of the type "notify", and wait until it says that it is ready."""
    name = f"units/{unit}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(f"\0{name}")
        supervisor.settimeout(PATIENCE_S)
        process = as_user(found, found["ExecStart"], NOTIFY_SOCKET=f"@{name}")
        (PIDS / unit).write_text(str(process.pid))
        while "READY=1" not in supervisor.recv(1 << 16).decode().splitlines():
            if process.poll() is not None:
                return False
    return True


def as_user(found: dict[str, str], command: str, **environ: str) -> subprocess.Popen[bytes]:
    user = pwd.getpwnam(found["User"])
    for key, base in BASES.items():
        for folder in found[key].split():
            place = Path(base, folder)
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, user.pw_uid, user.pw_gid)
    return subprocess.Popen(
        shlex.split(command),
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd=found["WorkingDirectory"],
        env=os.environ | {"HOME": user.pw_dir} | environ,
        stdin=subprocess.DEVNULL,
        umask=0o077,
    )


def stop(file: Path) -> None:
    pid = int(file.read_text())
    file.unlink()
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < until:
        time.sleep(0.1)


def main(words: list[str]) -> int:
    verb, *names = [word for word in words if not word.startswith("--")]
    PIDS.mkdir(exist_ok=True)
    if verb == "daemon-reload" or "bbnode@.service" in names:
        return 0
    for name in names:
        running = sorted(PIDS.glob(name))
        wanted = [file.name for file in running] if "*" in name else [name]
        if verb in ("stop", "restart"):
            for file in running:
                stop(file)
        for unit in wanted:
            found = settings(unit.partition("@")[2])
            if verb in ("enable", "start", "restart"):
                if not start(unit, found):
                    return 1
            elif verb == "reload":
                return as_user(found, found["ExecReload"]).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
