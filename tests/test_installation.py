"""bbnode is installed in each way that its pages name, with a compiler and without.

Rule: an environment of its own for each way, from the index that pip is set to; "without a
compiler" is a PATH on which every name of one fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILERS = ("gcc", "cc", "g++", "c++", "clang", "x86_64-linux-gnu-gcc", "aarch64-linux-gnu-gcc")
INSTALL_PATIENCE_S = 1200.0

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a checkout has, without its .venv."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            target = tmp_path / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return tmp_path / "checkout"


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a compiler, whose caches are empty of what one made."""
    folder = tmp_path / "no-compiler"
    folder.mkdir()
    for name in COMPILERS:
        (folder / name).write_text("#!/bin/sh\necho no compiler here >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "CC": "gcc", "PIP_NO_CACHE_DIR": "1"}
    return os.environ | own


def run(*words: str | Path, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in env.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=clean | {"BBNODE_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_PATIENCE_S,
        check=False,
    )


def environment(folder: Path) -> Path:
    """The interpreter of a new environment, which has pip."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


NODE = """
import bbnode
from bbnode.transport import Identity, TransportSetup, make_transport
made = make_transport("{transport}", TransportSetup(identity=Identity.generate()))
print("made", type(made.libp2p_host).__name__ if "{transport}" == "libp2p" else "lean")
"""


def test_the_two_commands_need_no_compiler(checkout: Path, no_compiler: dict[str, str]) -> None:
    done = run("bash", "-c", ". scripts/lib.sh; setup demo", cwd=checkout, env=no_compiler)
    assert done.returncode == 0, done.stdout[-4000:]
    python = checkout / ".venv" / "bin" / "python"
    done = run(python, "-c", NODE.format(transport="libp2p"), cwd=checkout, env=no_compiler)
    assert done.stdout == "made NodeHost\n", done.stdout
    demo = ("demo", "--rounds", "1", "--clients", "2", "--out", "out")
    done = run(python.with_name("bbnode"), *demo, cwd=checkout, env=no_compiler)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_service_is_installed_without_a_compiler(
    checkout: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    """The commands of deploy/README.md, for another folder than /opt."""
    text = (checkout / "deploy" / "README.md").read_text("utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.startswith("(umask 022; ")][:3]
    script = "set -e\n" + "\n".join(lines).replace("/opt/bbnode", str(tmp_path / "bbnode"))
    script = f'. scripts/lib.sh\nBBNODE_VENV="{tmp_path}/bbnode"\n' + script.replace(
        "(umask 022; " + str(tmp_path / "bbnode") + "/bin/python -m uv",
        "(umask 022; uv_settings; " + str(tmp_path / "bbnode") + "/bin/python -m uv",
    )
    done = run(
        "bash", "-c", script.replace("python3", sys.executable), cwd=checkout, env=no_compiler
    )
    assert done.returncode == 0, done.stdout[-4000:]
    python = tmp_path / "bbnode" / "bin" / "python"
    done = run(python, "-c", NODE.format(transport="libp2p"), cwd=tmp_path, env=no_compiler)
    assert done.stdout == "made NodeHost\n", done.stdout


def test_pip_without_a_compiler_names_what_it_could_not_make(
    checkout: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    """All that can be said there is pip's; the pages say what to do about the name in it."""
    python = environment(tmp_path / "venv")
    done = run(python, "-m", "pip", "install", checkout, cwd=tmp_path, env=no_compiler)
    assert done.returncode != 0
    assert "fastecdsa" in "\n".join(done.stdout.strip().splitlines()[-4:]), done.stdout[-4000:]
    for page in ("docs/install.md", "deploy/README.md"):
        told = (checkout / page).read_text("utf-8")
        assert "fastecdsa" in told
        assert "libgmp-dev" in told


def test_pip_with_a_compiler_installs_it(checkout: Path, tmp_path: Path) -> None:
    code = (
        "#include <Python.h>\n#include <gmp.h>\nint main(void) { mpz_t x; mpz_init(x); return 0; }"
    )
    include = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if (
        shutil.which("gcc") is None
        or subprocess.run(
            ["gcc", f"-I{include}", "-x", "c", "-", "-fsyntax-only"],
            input=code,
            text=True,
            check=False,
        ).returncode
    ):
        pytest.skip("needs gcc, Python's headers and GMP's")
    python, env = environment(tmp_path / "venv"), dict(os.environ)
    done = run(python, "-m", "pip", "install", "-q", checkout, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    done = run(python, "-c", NODE.format(transport="libp2p"), cwd=tmp_path, env=env)
    assert done.stdout == "made NodeHost\n", done.stdout
    done = run(python, "-m", "pip", "check", cwd=tmp_path, env=env)
    assert done.stdout == "No broken requirements found.\n"


def test_without_libp2p_a_node_says_both_ways_at_its_start_or_is_lean(
    checkout: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    python = environment(tmp_path / "venv")
    pyproject = checkout / "pyproject.toml"
    (wanted,) = [line for line in pyproject.read_text().splitlines() if '"libp2p>=' in line]
    pyproject.write_text(pyproject.read_text().replace(wanted, ""))
    done = run(python, "-m", "pip", "install", "-q", checkout, cwd=tmp_path, env=no_compiler)
    assert done.returncode == 0, done.stdout[-4000:]
    bbnode = python.with_name("bbnode")
    made = ("--module", "bbnode.examples.gossip_averaging:GossipAveraging", "--target", "peer")
    done = run(bbnode, "init", "node", *made, cwd=tmp_path, env=no_compiler)
    assert done.returncode == 0, done.stdout[-4000:]
    done = run(bbnode, "run", "-c", "node/node.toml", cwd=tmp_path, env=no_compiler)
    assert done.returncode not in (0, None)
    (line,) = [each for each in done.stdout.splitlines() if "libp2p" in each]
    for part in ("uv pip install", "--override -", "libgmp-dev", 'network.transport = "lean"'):
        assert part in line, line
    done = run(python, "-c", NODE.format(transport="lean"), cwd=tmp_path, env=no_compiler)
    assert done.stdout == "made lean\n", done.stdout
