"""Weights & Biases: offline by default, into a folder that `wandb sync` takes later."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bbnode.daemon.history.trackers import RunInfo, TrackerRefused, need, take_settings

_MODES: Final = ("offline", "online", "disabled")
# Turns off error reports to the makers of the library, and its collection of data on this machine.
_ENVIRONMENT: Final = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
_KNOWN: Final[Mapping[str, type]] = {"mode": str, "project": str, "entity": str, "dir": str}


class WandbTracker:
    """A tracker with one W&B run for each run; online, a run that continues is resumed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take `mode`, `project`, `entity`, `dir`. Raises TrackerRefused, TrackerLibraryMissing."""
        self._given = take_settings("wandb", settings, _KNOWN)
        self._mode = self._given.get("mode", _MODES[0])
        if self._mode not in _MODES:
            raise TrackerRefused(
                f"[[trackers]] wandb: mode is {self._mode!r}; give one of {', '.join(_MODES)}"
            )
        need("wandb", "wandb>=0.31")
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Begin a run that contains only the given values."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        wandb = importlib.import_module("wandb")
        folder = Path(self._given.get("dir") or run.state_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=self._mode,
            project=self._given.get("project", "bbnode"),
            entity=self._given.get("entity"),
            dir=str(folder),
            name=run.name,
            id=hashlib.sha256(run.key.encode()).hexdigest()[:16],
            resume="allow" if self._mode == "online" else None,
            config={**run.settings, "target": run.target, "artifact": run.artifact},
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                quiet=True,
                save_code=False,
                x_save_requirements=False,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
            ),
        )

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the metrics of a round under its number as step."""
        self._run.log({**metrics, "_timestamp": at}, step=number)

    def end(self) -> None:
        """Finish the run, after which its file is complete."""
        self._run.finish()
        wandb = importlib.import_module("wandb")
        if wandb.run is None:
            # `finish` returns before the library's process has written the end; `teardown` waits
            # for it.
            wandb.teardown()
