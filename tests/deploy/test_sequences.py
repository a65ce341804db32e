"""The commands of the pages that install and run nodes, verbatim, in a root of their own.

Rule: the root is this machine's, below an overlay that is thrown away, without a network; the
processes end with it. A line that cannot run so stands in LEFT_OUT, with the reason: a new one is
run, or named there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY

ROOT = DEPLOY.parent
PAGES = ("README.md", "docs/nodes.md", "deploy/README.md", "docs/for-real.md")
PATIENCE_S = 850.0

BLOCK = re.compile(r"^#+ ([^\n]+)$|^```sh ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The start of a line -> why it is not run.
LEFT_OUT = {
    "./scripts/demo": "makes .venv from PyPI",
    ". .venv/bin/activate": "PATH has the environment that the page of services makes",
    "bbnode join @ticket  ": "asks somebody at a terminal",
    "bbnode join @ticket --user": "asks somebody at a terminal",
    "bbnode join @ticket --system": "asks somebody at a terminal",
    "pipx ": "pipx",
    "uv tool ": "a network",
    "loginctl ": "a manager of users",
    "systemctl --user ": "a manager of users",
    "nft ": "the machine's firewall",
    "git pull": "a network",
    "journalctl ": "a journal",
    "bbnode logs -f": "goes on until somebody ends it",
    "bbnode peers --why PEER_ID": "stands for a peer",
    "docker ": "an engine of containers",
}
# Whole blocks: headings of deploy/README.md.
SECTIONS_LEFT_OUT = {
    "The image": "an engine of containers",
    "With a program of your own": "an engine of containers",
    "The testbed": "an engine of containers",
}
# What is needed around a block, by a word of it.
AROUND = {"kill %1 %2": "wait"}
# By which uv takes what is installed here, and nothing from an index.
UV_SETTINGS = "--offline --no-deps --no-build-isolation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Commands below a heading."""

    heading: str
    machine: str  # of docs/for-real.md
    lines: tuple[str, ...]

    def script(self) -> str:
        """The block as it is run."""
        kept = [f": left out: {n}" if reason(line) else line for n, line in enumerate(self.lines)]
        # It reads none of pip's settings below.
        kept = [line.replace("uv pip install", f"uv pip install {UV_SETTINGS}") for line in kept]
        after = [extra for word, extra in AROUND.items() if any(word in line for line in kept)]
        return "\n".join([*kept, *after])


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text("utf-8")
    heading = ""
    for found in BLOCK.finditer(text):
        if found[1]:
            heading = found[1]
            continue
        lines = found[3].replace("\\\n", "\\\0").splitlines()
        yield Block(
            heading=heading,
            machine=found[2],
            lines=tuple(line.replace("\0", "\n") for line in lines),
        )


def reason(line: str) -> str:
    """Why a line is not run; "" for one that is."""
    return next((why for start, why in LEFT_OUT.items() if line.startswith(start)), "")


def section(page: str, heading: str) -> str:
    return "\n".join(each.script() for each in blocks(page) if each.heading == heading)


def test_what_is_left_out_is_there() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in block.lines]
    for start in LEFT_OUT:
        assert any(line.startswith(start) for line in lines), start
    headings = {block.heading for block in blocks("deploy/README.md")}
    assert set(SECTIONS_LEFT_OUT) <= headings


ROOT_SETUP = """
set -e
mount -t tmpfs tmpfs "$BASE"; cd "$BASE"; mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
mount --rbind /dev root/dev; mount -t proc proc root/proc; mount -t tmpfs tmpfs root/run
mount -t tmpfs tmpfs root/tmp; chmod 1777 root/tmp
ip link set lo up; ip address add 192.0.2.10/32 dev lo
exec chroot root /bin/bash -euo pipefail -c "$SCRIPT"
"""


def in_a_root(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as root in an overlay, network, and tree of processes of its own."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c"]
    folder.mkdir(exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("w") as stream:
        done = subprocess.run(
            [*words, ROOT_SETUP],
            env=os.environ | {"BASE": str(folder), "SCRIPT": script},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            timeout=PATIENCE_S,
            check=False,
        )
    return subprocess.CompletedProcess(words, done.returncode, log.read_text("utf-8"))


def can_have_a_root(folder: Path) -> bool:
    needed = all(shutil.which(name) for name in ("unshare", "ip", "systemd-sysusers", "runuser"))
    # The checkout may be on another file system, which the overlay does not show.
    seen = f"test -e {ROOT}/pyproject.toml && test -e {sys.executable}"
    return needed and os.geteuid() == 0 and in_a_root(folder, seen).returncode == 0


def stubs() -> str:
    """Commands that the machine of the page has, and a root without a network does not."""
    python = getattr(sys, "_base_executable", sys.executable)
    made = {
        "apt-get": "exit 0",
        "python3": f'exec {python} "$@"',
        "systemctl": f'exec {python} {ROOT}/tests/deploy/systemctl.py "$@"',
    }
    return "mkdir -p /stubs\n" + "".join(
        f"printf '#!/bin/sh\\n%s\\n' '{text}' > /stubs/{name}; chmod 755 /stubs/{name}\n"
        for name, text in made.items()
    )


def environment() -> str:
    """Settings by which pip takes what is installed here, and nothing from an index."""
    here = next(path for path in sys.path if path.endswith("site-packages"))
    return f"""
export PATH=/opt/bbnode/bin:/stubs:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root PYTHONPATH={here} PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
unset XDG_CONFIG_HOME XDG_STATE_HOME XDG_CACHE_HOME XDG_DATA_HOME BBNODE_CONFIG VIRTUAL_ENV
# The service's user runs this interpreter, wherever it is.
chmod o+x /root
rm -rf /opt/bbnode /etc/bbnode /var/lib/bbnode /usr/local/bin/bbnode
"""


END_OF_PAGE = "kill $(jobs -p); wait; cd /\n"


def scripts() -> dict[str, str]:
    """What is run, in order; each leaves no process."""
    deploy = [b for b in blocks("deploy/README.md") if b.heading not in SECTIONS_LEFT_OUT]
    (install, *rest) = deploy
    first = "\n".join(
        block.script() for page in ("README.md", "docs/nodes.md") for block in blocks(page)
    )
    real = [
        "mkdir -p /srv/server /srv/laptop; export HOME=/srv/server",
        "HERE_server=/srv/server HERE_laptop=/srv/laptop",
    ]
    for block in blocks("docs/for-real.md"):
        machine = block.machine
        if any("@ticket" in line for line in block.lines):
            real.append("cp $HERE_server/ticket $HERE_laptop/")
        if any("bbnode export" in line for line in block.lines):
            # Rounds take a while; the page says so.
            real.append(
                "until bbnode rounds --json -c $HERE_server/node/node.toml | grep -q '\"round\"'; "
                "do sleep 1; done"
            )
        real += [f"cd $HERE_{machine}", block.script(), f"HERE_{machine}=$PWD"]
    real.append("test -s $HERE_server/model.onnx")
    return {
        "install": f"cd {ROOT}\n{install.script()}\nbbnode version\n",
        "README.md, docs/nodes.md": "mkdir -p /srv/own; cd /srv/own; export HOME=/srv/own\n"
        f"{first}\ntest -s trained.onnx\ncd /\n",
        "docs/for-real.md": "\n".join(real) + f"\n{END_OF_PAGE}",
        "deploy/README.md": f"cd {ROOT}; export HOME=/root\n"
        + "\n".join(block.script() for block in rest)
        + "\ntest ! -e /opt/bbnode; test ! -e /var/lib/bbnode; if id bbnode; then exit 1; fi\n",
    }


@pytest.mark.slow
def test_the_pages_run_as_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling comes with the extra test")
    if not can_have_a_root(tmp_path / "probe"):
        pytest.skip("needs root, overlays and namespaces")
    parts = [
        f"echo '=== {name}'\nset -x\n{text}\n{{ set +x; }} 2>/dev/null"
        for name, text in scripts().items()
    ]
    done = in_a_root(tmp_path / "root", "\n".join([environment(), stubs(), *parts, "echo ALL"]))
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.endswith("ALL\n")
