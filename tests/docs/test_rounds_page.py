"""docs/rounds.md: its programs print what the page says, and its configurations are taken."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bbnode.cli.commands import invoke, rounds
from bbnode.daemon.config import NodeConfig
from bbnode.daemon.history.trackers.mlflow import MlflowTracker
from bbnode.daemon.history.trackers.tensorboard import TensorBoardTracker
from bbnode.daemon.history.trackers.wandb import WandbTracker
from tests.patience import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "rounds.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S)
FACTORIES = {"mlflow": MlflowTracker, "tensorboard": TensorBoardTracker, "wandb": WandbTracker}
CONFIGURATIONS = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_programs_print_what_the_page_says(tmp_path: Path, program: str, printed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )
    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_configurations_are_taken(text: str) -> None:
    config = NodeConfig.model_validate(tomllib.loads(text))
    for each in config.trackers:
        FACTORIES[each.kind](each.settings)


def test_the_page_has_them_all() -> None:
    assert (len(PROGRAMS), len(CONFIGURATIONS)) == (2, 2)
    options = set(re.findall(r"(--[a-z]+)", PAGE))
    known = "".join(Path(module.__file__).read_text() for module in (invoke, rounds))
    own = {"--csv", "--follow", "--save", "--timeout"}
    assert own <= options
    assert all(f'"{option}"' in known for option in own)
