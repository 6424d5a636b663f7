"""Trackio, Hugging Face's local tracker: one SQLite file per project, which `trackio show` displays.

The name of the Trackio run is etude's run id, so a resumed run continues it. Trackio cannot remove points, so a step
that is trained again has a second point."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.seams import TrackedRun
from etude.trackers.support import final_results, load_library


@dataclass
class Trackio:
    """Records the metrics of a run in Trackio.

    `folder` is where Trackio keeps its data; "" stands for TRACKIO_DIR, or else Trackio's folder in the home directory.
    With `system_metrics` Trackio also records CPU, memory and GPUs of the machine on which the run was started."""

    project: str = "etude"
    group: str = ""
    folder: str = ""
    system_metrics: bool = False

    def __post_init__(self) -> None:
        if self.folder:
            os.environ["TRACKIO_DIR"] = str(Path(self.folder).expanduser().absolute())  # read when it is imported
        load_library("trackio", "trackio")

    def start(self, run: TrackedRun) -> None:
        self._run_folder, self._last_step = run.folder, 0
        self._run = load_library("trackio", "trackio").init(
            project=self.project,
            name=run.run_id,
            group=self.group or None,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_cpu=self.system_metrics,
            auto_log_gpu=None if self.system_metrics else False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)
        self._last_step = step

    def finish(self, outcome: str) -> None:
        if results := final_results(self._run_folder):
            self._run.log(results, step=self._last_step)
        load_library("trackio", "trackio").finish()
