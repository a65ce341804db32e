"""MLflow, by mlflow-skinny: a local folder by default, else the place that `uri` names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Final

from bbnode.daemon.history.trackers import RunInfo, need, take_settings

_KEY_TAG: Final = "bbnode.run"
# The library sends telemetry unless these are set before its import. It refuses a local folder and
# recommends a database, which the skinny package does not have.
_ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
# Characters that MLflow takes in names; others become "_".
_ALLOWED: Final = frozenset("_-. :/")
_MAX_BATCH: Final = 1000


class MlflowTracker:
    """A tracker with one MLflow run for each run, found again after a restart by its tag."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Take `uri` and `experiment`. Raises TrackerRefused, TrackerLibraryMissing."""
        own = take_settings("mlflow", settings, {"uri": str, "experiment": str})
        need("mlflow", "mlflow-skinny>=3.17")
        self._uri = own.get("uri")
        self._experiment = own.get("experiment")
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunInfo) -> None:
        """Create the run in its experiment, or continue it."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        client_class = importlib.import_module("mlflow.tracking").MlflowClient
        self._client = client_class(self._uri or (run.state_dir / "mlruns").absolute().as_uri())
        name = self._experiment or "bbnode"
        existing = self._client.get_experiment_by_name(name)
        experiment = (
            self._client.create_experiment(name) if existing is None else existing.experiment_id
        )
        before = self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{run.key}'")
        if before:
            self._run_id = before[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_KEY_TAG: run.key, "bbnode.target": run.target, "bbnode.artifact": run.artifact}
        created = self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._run_id = created.info.run_id
        for key, value in run.settings.items():
            self._client.log_param(self._run_id, _name(key), str(value)[:500])

    def log(self, number: int, metrics: Mapping[str, float], at: float) -> None:
        """Log the metrics of a round under its number as step."""
        metric_class = importlib.import_module("mlflow.entities").Metric
        rows = [
            metric_class(_name(name), value, int(at * 1000), number)
            for name, value in metrics.items()
        ]
        for first in range(0, len(rows), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=rows[first : first + _MAX_BATCH])

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _name(text: str) -> str:
    name = "".join(c if c.isalnum() or c in _ALLOWED else "_" for c in text).strip("/")
    return name or "_"
