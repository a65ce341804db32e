"""Settings that every test shares.

Rule: a test gives the same result every time. Hypothesis draws from a fixed seed and keeps
no database; nothing here reads a clock or the user's configuration.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Hundreds of tests start processes: without bytecode each compiles the whole package again, which
# is a fifth of the start of a daemon.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts what runs in the background with interrupts ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "bbnode",
    derandomize=True,
    database=None,
    deadline=None,  # the machine is shared: a slow example is not a failure
)
hypothesis.settings.load_profile("bbnode")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak")
    parser.addoption(
        "--chaos-minutes", type=float, default=3.0, help="how long a test of load or churn runs"
    )


# These come first: slow tests that broke most often, so that a run that is going to fail says so
# early; then folders whose tests start processes and wait for them, so that at the end no worker
# is alone with a long one.
BROKE_MOST = (
    "components/test_autodiff_spatial.py",
    "components/test_autodiff_node_tests.py",
    "compiler/fuzz",
    "e2e/test_talks_to_nobody.py",
    "test_lowest_versions.py",
)
LONG = ("e2e", "deploy", "templates", "docs")
# The mark of a test, and the option without which it is skipped.
OPTIONS = {"slow": "--all", "soak": "--soak"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> tuple[int, bool]:
        path = item.path.relative_to(here)
        broke = len(BROKE_MOST)
        if "slow" in item.keywords:
            broke = next((n for n, p in enumerate(BROKE_MOST) if path.is_relative_to(p)), broke)
        return broke, path.parts[0] not in LONG

    items.sort(key=rank)
    for mark, option in OPTIONS.items():
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"{mark}: runs with {option}")
        for item in items:
            if mark in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> None:
    """No test sees the configuration or the state of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("BBNODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "xdg-state"))


@pytest.fixture(autouse=True)
def _no_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test imports the modules that it writes, such as `program.py`, and none of another's."""
    before = set(sys.modules)
    yield
    made = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(made):
            del sys.modules[name]
