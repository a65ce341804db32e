"""bbnode talks to nobody but its peers, and keeps nothing where it was not told to.

Rule: what is watched is a real run in a network namespace of its own. Every packet to anywhere but
the loopback interface, questions to a name server included, ends in a TUN device and is kept;
home, temporary and working directory are empty before and are listed afterwards.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.chaos.wire import NEEDS_NAMESPACES, ip, namespaces, tun_device
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
DEVICE = "bbquiet0"
NAME_SERVER = "192.0.2.53"
ELSEWHERE = "198.51.100.1"
TCP, UDP = 6, 17
IPV4_ADDRESS, IPV6_ADDRESS = "10.79.200.1", "fd79::1"
# The font list of matplotlib, which draws the demo's picture.
FONTS = {".cache/matplotlib"}
ORT = tuple(int(part) for part in version("onnxruntime").split(".")[:2])

# In a mount namespace: names are asked of the device, and what is written to the home directory
# of the password database, for who does not look at $HOME, is kept apart to be listed.
ENTER = """
set -e
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs "$1/overlay"
mkdir "$1/overlay/upper" "$1/overlay/work"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/overlay/upper,workdir=$1/overlay/work" "$2"
watched="$1" home="$2"
shift 2
code=0
"$@" || code=$?
(cd "$watched/overlay/upper" && find . ! -type d) > "$watched/written"
exit $code
"""


@dataclass
class Watched:
    """What a run did."""

    said: str = ""
    # As "udp 192.0.2.53:53" with the name that was asked for, if any.
    packets: list[str] = field(default_factory=list)
    # Below home, temporary and working directory; "~/…" below the user's real home.
    files: set[str] = field(default_factory=set)


def watch(folder: Path, *command: str) -> Watched:
    """Run a command, and see with whom it talks and what it leaves."""
    own = folder / "watch"
    for name in ("overlay", "home", "tmp", "cwd"):
        (own / name).mkdir(parents=True)
    (own / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n")
    (own / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(own / "home"),
        "TMPDIR": str(own / "tmp"),
    }
    with namespaces("quiet") as (namespace,), device(namespace) as packets:
        enter = ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", ENTER, "sh"]
        done = subprocess.run(
            [*enter, str(own), pwd.getpwuid(os.geteuid()).pw_dir, *command],
            cwd=own / "cwd",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S * 3,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        seen = Watched(said=done.stdout, packets=list(read(packets)))
    seen.files = {
        str(file.relative_to(own / name))
        for name in ("home", "tmp", "cwd")
        for file in (own / name).rglob("*")
        if not file.is_dir()
    }
    seen.files |= {f"~/{line[2:]}" for line in (own / "written").read_text().splitlines()}
    return seen


@contextmanager
def device(namespace: str) -> Iterator[int]:
    """The only way out of a namespace; nobody is behind it."""
    descriptor = tun_device(DEVICE, namespace)
    try:
        ip("-n", namespace, "addr", "add", f"{IPV4_ADDRESS}/24", "dev", DEVICE)
        ip("-n", namespace, "link", "set", DEVICE, "up")
        ip("-n", namespace, "route", "add", "default", "dev", DEVICE)
        ip("-n", namespace, "addr", "add", f"{IPV6_ADDRESS}/64", "dev", DEVICE, "nodad")
        ip("-n", namespace, "-6", "route", "add", "default", "dev", DEVICE)
        yield descriptor
    finally:
        os.close(descriptor)


def read(packets: int) -> Iterator[str]:
    """What waits in the device; a kernel's own talk, such as neighbour discovery, is left out."""
    while True:
        try:
            packet = os.read(packets, 65536)
        except BlockingIOError:
            return
        is_ipv6 = packet[0] >> 4 == 6
        protocol, head = (packet[6], 40) if is_ipv6 else (packet[9], (packet[0] & 15) * 4)
        if protocol not in (TCP, UDP):
            continue
        whom = packet[24:40].hex(":", 2) if is_ipv6 else ".".join(map(str, packet[16:20]))
        port = int.from_bytes(packet[head + 2 : head + 4])
        told = f"{'tcp' if protocol == TCP else 'udp'} {whom}:{port}"
        yield f"{told} asks for {question(packet[head + 8 :])}" if port == 53 else told


def question(message: bytes) -> str:
    """The name in a question of DNS (RFC 1035, section 4.1.2)."""
    labels, at = [], 12
    while at < len(message) and message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode("ascii", "replace"))
        at += 1 + message[at]
    return ".".join(labels)


def demo(folder: Path, *options: str) -> Watched:
    out = folder / "out"
    return watch(folder, sys.executable, "-m", "bbnode", "demo", "--out", str(out), *options)


def check(seen: Watched) -> None:
    assert seen.packets == []
    assert {file for file in seen.files if Path(file).parent.as_posix() not in FONTS} == set()


@NEEDS_NAMESPACES
def test_demo(tmp_path: Path) -> None:
    seen = demo(tmp_path, "--rounds", "2", "--clients", "1")
    check(seen)
    assert "round   2/2" in seen.said


@pytest.mark.slow
@NEEDS_NAMESPACES
def test_neither_does_the_whole_demo(tmp_path: Path) -> None:
    check(demo(tmp_path))


CHATTY = f"""
import pathlib, pwd, socket, os
try:
    socket.getaddrinfo("telemetry.example", 443)
except OSError:
    pass
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("{ELSEWHERE}", 443))
socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b"x", ("2001:db8::1", 443))
dialled = socket.socket()
dialled.setblocking(False)
dialled.connect_ex(("{ELSEWHERE}", 80))
pathlib.Path.home().joinpath("id").write_text("x")
pathlib.Path(pwd.getpwuid(os.geteuid()).pw_dir, "bbnode-test").write_text("x")
"""


@NEEDS_NAMESPACES
def test_the_watch_sees_who_does(tmp_path: Path) -> None:
    seen = watch(tmp_path, sys.executable, "-c", CHATTY)
    assert set(seen.packets) == {
        f"udp {NAME_SERVER}:53 asks for telemetry.example",
        f"udp {ELSEWHERE}:443",
        "udp 2001:0db8:0000:0000:0000:0000:0000:0001:443",
        f"tcp {ELSEWHERE}:80",
    }
    assert seen.files == {"id", "~/bbnode-test"}
    assert not Path(pwd.getpwuid(os.geteuid()).pw_dir, "bbnode-test").exists()


@NEEDS_NAMESPACES
@pytest.mark.skipif(ORT < (1, 29), reason="this ONNX Runtime has no telemetry")
def test_the_variable_is_needed(tmp_path: Path) -> None:
    seen = watch(tmp_path, sys.executable, "-c", "import onnxruntime")
    assert any(file.endswith("/deviceid") for file in seen.files)


@pytest.mark.parametrize(
    ("given", "value"), [(None, "1"), ("", "1"), ("1", "1"), ("0", "0"), ("true", "true")]
)
def test_importing_bbnode_sets_it_unless_somebody_did(given: str | None, value: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    if given is not None:
        environ["ORT_DISABLE_TELEMETRY"] = given
    code = "import bbnode, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.strip() == value
