"""MLflow: a server where MLFLOW_TRACKING_URI names one, else mlflow.db in the folder the run was started in (`mlflow ui`)."""

from __future__ import annotations

import json
import re

from pronghorn.report.loggers.logger import About

TAG = "pronghorn.run"  # by which a resumed run finds itself: MLflow chooses the ids of runs
LONGEST = 500  # letters of a parameter's value, which older servers allow
MOST = 100  # parameters in one call


class MLflow:
    def __init__(self, about: About) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        known = self._client.get_experiment_by_name(about.project)
        experiment = known.experiment_id if known else self._client.create_experiment(about.project)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{about.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=about.name, tags={TAG: about.id}).info.run_id
            params = [Param(name, value[:LONGEST]) for name, value in _flat(about.config).items()]
            for start in range(0, len(params), MOST):
                self._client.log_batch(self._id, params=params[start : start + MOST])
        self.place = f"run {self._id} at {self._client.tracking_uri}"

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        at, names = int(time * 1000), {name: re.sub(r"[^\w\-. /]", "_", name) for name in figures}
        self._client.log_batch(
            self._id, metrics=[self._metric(names[name], value, at, step) for name, value in figures.items()]
        )

    def again(self, step: int) -> None:
        """Points of the same step stand beside the earlier ones."""

    def end(self, code: int) -> None:
        self._client.set_terminated(self._id, "FINISHED" if code == 0 else "KILLED" if code > 128 else "FAILED")


def _flat(config: dict[str, object], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[above + key] = value if isinstance(value, str) else json.dumps(value)
    return flat
