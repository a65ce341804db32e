"""The lower bounds of pyproject.toml are true: bbnode works with the lowest versions of all.

Rule: a bound that no test has seen is a guess. Direct dependencies are installed in the lowest
version, what they need in turn as pip chooses it; then tests that reach every one of them run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# What runs the tests there, in the version that runs them here.
TOOLS = ("pytest", "pytest-trio", "pytest-timeout", "hypothesis", "psutil", "packaging")
# Extras that the tests below reach; trackers and torch have tests that need much more.
EXTRAS = ("demo", "tables", "images", "text", "zstd", "indexes", "trees", "privacy")
# The codec, the DSL and ONNX's checker, components with their libraries, configuration, control
# plane, joining over libp2p, the command line, and a whole federated training.
TESTS = (
    "tests/ir",
    "tests/examples",
    "tests/dsl",
    "tests/components",
    "tests/cli/test_control_commands.py",
    "tests/daemon/test_config.py",
    "tests/daemon/test_control_metrics.py",
    "tests/daemon/test_join.py",
    "tests/transport/test_mdns.py",
    "tests/e2e/test_demo.py",
)
# An environment of some 60 packages; then the tests.
INSTALL_PATIENCE_S, TESTS_PATIENCE_S = 1800.0, 3600.0


def lowest(text: str) -> str:
    """A requirement, with the lowest version that it allows."""
    requirement = Requirement(text)
    (floor,) = (c.version for c in requirement.specifier if c.operator in (">=", "=="))
    return f"{requirement.name}=={floor}"


def test_a_floor_is_what_the_requirement_says() -> None:
    assert lowest("protobuf>=6.32.1,<7") == "protobuf==6.32.1"
    assert lowest("multiaddr==0.2") == "multiaddr==0.2"


@pytest.mark.slow
def test_bbnode_works_with_the_lowest_versions(tmp_path: Path) -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(text for name in EXTRAS for text in extras[name])]
    floors = [lowest(text) for text in asked]
    tools = [f"{name}=={version(name)}" for name in TOOLS]
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", str(python.parent.parent))
    # libp2p pins what has no wheel: as the scripts install it.
    uv = ("-m", "uv", "pip", "install", "--quiet", "--python", str(python))
    instead = ("--override", str(ROOT / "deploy" / "overrides.txt"))
    install = ("bash", "-c", '. scripts/lib.sh; uv_settings; exec "$@"', "-", sys.executable, *uv)
    run(
        *install,
        *instead,
        f"{ROOT}[{','.join(EXTRAS)}]",
        *floors,
        *tools,
        patience_s=INSTALL_PATIENCE_S,
    )
    code = "import importlib.metadata as m, sys; print(*(m.version(n) for n in sys.argv[1:]))"
    names = [floor.partition("==")[0] for floor in floors]
    for floor, found in zip(floors, run(str(python), "-c", code, *names).split(), strict=True):
        # 2.1 and 2.1.0 are one version.
        assert Requirement(floor).specifier.contains(found), (floor, found)
    run(
        *(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS),
        patience_s=TESTS_PATIENCE_S,
    )


def run(*command: str, patience_s: float = 120.0) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
