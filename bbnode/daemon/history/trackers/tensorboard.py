"""TensorBoard: event files, written by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bbnode.daemon.history.trackers import RunInfo, need, take_settings


class TensorBoardTracker:
    """A tracker that writes scalars to `<logdir>/<run>`; by default `<state_dir>/tensorboard`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take `logdir`. Raises TrackerRefused, TrackerLibraryMissing."""
        own = take_settings("tensorboard", settings, {"logdir": str})
        need("tensorboardX", "tensorboardX>=2.6.5")
        self._logdir = own.get("logdir")
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """Open an event file; rounds that are run again replace the earlier ones."""
        module = importlib.import_module("tensorboardX")
        logdir = Path(self._logdir or run.state_dir / "tensorboard").expanduser()
        self._writer = module.SummaryWriter(
            logdir=str(logdir / run.name), purge_step=run.first_round, write_to_disk=True
        )

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        """Write one point of each finite metric, and flush, so that readers see it."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, number, walltime=at)
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()
