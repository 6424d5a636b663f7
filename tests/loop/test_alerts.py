"""The alerts for runs name metrics that a run exports: events of a real conductor, through the Prometheus tracker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.loop.test_drift import SETS, terms, train
from tests.played_run import PlayedRun
from tests.unit.test_operations_examples import alerts, names_in

from etude.seams import TrackedRun
from etude.trackers.prometheus import Prometheus
from etude.trackers.tracking import metrics_of

pytestmark = pytest.mark.timeout(1800)


def test_every_metric_of_the_alerts_for_runs_is_exported_by_the_tracker(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2", "evals.every=1", *terms("hold", 1000))
    assert train(run) == 2
    tracker = Prometheus("127.0.0.1:0")
    told = TrackedRun(name="r", run_id="r-1", folder=str(tmp_path), resumed=False, config={}, facts={})
    tracker.start(told)
    try:
        lines = [line for path in (run.folder / "events").glob("*.jsonl") for line in path.read_bytes().splitlines()]
        for step, values in filter(None, map(metrics_of, lines)):
            tracker.log(step, values)
        samples = [sample for gauge in tracker.collect() for sample in gauge.samples]
    finally:
        tracker.finish("finished")
    exported = {sample.name for sample in samples}
    named = {name for rule in alerts() for name in names_in(str(rule["expr"]))}
    of_runs = {name for name in named if re.match("etude_(rl|eval|mid_training)_", name)}
    assert len(of_runs) >= 6
    assert of_runs - exported == set()
    assert [s.labels["key"] for s in samples if s.name == "etude_rl_audits" and s.labels["key"].endswith("/e_value")]
