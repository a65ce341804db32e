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
    parser.addoption(
        "--chaos-minutes", type=float, default=3.0, help="how long tests/chaos/test_churn.py runs"
    )


# Folders whose tests start processes and wait for them. They come first, so that at the end no
# worker is alone with a long one.
LONG = ("e2e", "deploy", "templates", "docs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in LONG)
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --all")
    for item in items:
        if "slow" in item.keywords:
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
