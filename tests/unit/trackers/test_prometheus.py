"""The Prometheus tracker, scraped over HTTP and read with prometheus_client's parser."""

from __future__ import annotations

import math
import urllib.error
import urllib.request

import pytest
from tests.unit.trackers.tracked_runs import LONG, tracked_run

parser = pytest.importorskip("prometheus_client.parser")
from etude.trackers.prometheus import Prometheus  # noqa: E402


def scrape(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    assert {family.type for family in families} == {"gauge"}
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = {name: value for name, value in sample.labels.items() if value}
        assert labels.pop("run") == "a"
        found[sample.name, *sorted(labels.items())] = sample.value
    return found


def test_the_latest_values_are_gauges_and_names_of_tasks_are_labels(tmp_path):
    tracker = Prometheus(listen="127.0.0.1:0")
    tracker.start(tracked_run(tmp_path))
    try:
        assert scrape(tracker.url) == {("etude_run_info", ("run_id", "a-0123abcd")): 1}
        tracker.log(900, {"mid-training/tokens_per_s": 5.0})
        tracker.log(1, {"rl/loss": 1.0, "rl/lag/0": 3.0})
        tracker.log(2, {"rl/loss": 0.5, "rl/k3": math.nan, "rl/ratio_max": math.inf, "rl/lag/1": 4.0, LONG: 7.0})
        tracker.log(2, {"eval/during/rate": 0.5, 'eval/during/by_family/größer\n"x"': 0.25})
        tracker.log(0, {"eval/before/rate": 0.125})
        found = scrape(tracker.url)
    finally:
        tracker.finish("finished")
    assert math.isnan(found.pop(("etude_rl_k3",)))
    assert found == {
        ("etude_run_info", ("run_id", "a-0123abcd")): 1,
        ("etude_mid_training_step",): 900,
        ("etude_mid_training_tokens_per_s",): 5,
        ("etude_rl_step",): 2,
        ("etude_rl_loss",): 0.5,
        ("etude_rl_ratio_max",): math.inf,
        ("etude_rl_lag", ("key", "0")): 3,
        ("etude_rl_lag", ("key", "1")): 4,
        (f"etude_rl_{'a' * 300}", ("key", "größer (b)")): 7,
        ("etude_eval_step", ("eval", "during")): 2,
        ("etude_eval_rate", ("eval", "during")): 0.5,
        ("etude_eval_by_family", ("eval", "during"), ("key", 'größer\n"x"')): 0.25,
        ("etude_eval_step", ("eval", "before")): 0,
        ("etude_eval_rate", ("eval", "before")): 0.125,
    }
    with pytest.raises(urllib.error.URLError):
        scrape(tracker.url)


def test_two_runs_of_one_process_share_no_registry(tmp_path):
    first, second = Prometheus(listen="127.0.0.1:0"), Prometheus(listen="127.0.0.1:0")
    for tracker in (first, second):
        tracker.start(tracked_run(tmp_path))
    first.log(1, {"rl/loss": 1.0})
    assert ("etude_rl_loss",) in scrape(first.url)
    assert ("etude_rl_loss",) not in scrape(second.url)
    for tracker in (first, second):
        tracker.finish("finished")
