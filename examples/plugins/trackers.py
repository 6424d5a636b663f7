"""A tracker: metrics as CSV, for a spreadsheet."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.seams import TrackedRun


@dataclass
class Csv:
    """Writes ``name,step,value`` lines to a file in the run folder."""

    file: str = "numbers.csv"

    def start(self, run: TrackedRun) -> None:
        self._out = (Path(run.folder) / self.file).open("a", newline="", buffering=1)
        self._writer = csv.writer(self._out)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.writerows((name, step, value) for name, value in values.items())

    def finish(self, outcome: str) -> None:
        self._out.close()
