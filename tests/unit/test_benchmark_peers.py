"""What the long benchmarks beside peers compute from their rows, and that they go on where they ended."""

from __future__ import annotations

import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from benchmarks import journal, report
from benchmarks.learning import asynchrony, controls, rewards, seeds, trl
from benchmarks.report import HOME, code
from benchmarks.weights import delta
from benchmarks.weights.delta_peers import peers, side
from hypothesis import given
from hypothesis import strategies as st

from etude.config import load, to_toml
from etude.evals.intervals import mean_over_seeds
from etude.loop.config import RunConfig
from etude.weights import Tensor

KEY = {"setting": "sync", "seed": 0}


def counted(values):
    """A measurement, and the list of how often it was made."""
    made = []

    def measure():
        made.append(len(made))
        return {"value": values[len(made) - 1]}

    return measure, made


class TestJournal:
    def test_a_row_is_measured_once_also_by_another_process(self, tmp_path):
        measure, made = counted([1.5, 2.5])
        first = journal.Journal("some", folder=tmp_path)
        assert first.once(KEY, measure) == first.once(KEY, measure)
        again = journal.Journal("some", folder=tmp_path).once(dict(reversed(KEY.items())), measure)
        assert (again["value"], len(made)) == (1.5, 1)
        assert again["commit"] == first.commit

    def test_another_setting_or_other_code_is_measured_anew(self, tmp_path, monkeypatch):
        measure, made = counted([1, 2, 3])
        journal.Journal("some", folder=tmp_path).once(KEY, measure)
        journal.Journal("some", folder=tmp_path).once({**KEY, "seed": 1}, measure)
        monkeypatch.setattr(journal, "code", lambda: "0" * 12)
        assert journal.Journal("some", folder=tmp_path).once(KEY, measure)["value"] == 3
        assert len(made) == 3

    def test_a_line_that_a_kill_tore_is_measured_again_and_harms_no_other(self, tmp_path):
        measure, _ = counted([1, 2, 3])
        written = journal.Journal("some", folder=tmp_path)
        written.once(KEY, measure)
        written.once({**KEY, "seed": 1}, measure)
        text = written.path.read_text()
        written.path.write_text(text[:-9])
        resumed = journal.Journal("some", folder=tmp_path)
        assert resumed.once({**KEY, "seed": 1}, measure)["value"] == 3
        rows = journal.Journal("some", folder=tmp_path)
        assert [rows.once({**KEY, "seed": seed}, measure)["value"] for seed in (0, 1)] == [1, 3]

    def test_fresh_measures_a_known_row_again(self, tmp_path):
        measure, _ = counted([1, 2])
        journal.Journal("some", folder=tmp_path).once(KEY, measure)
        assert journal.Journal("some", fresh=True, folder=tmp_path).once(KEY, measure)["value"] == 2

    def test_the_digest_of_the_code_is_of_every_file_but_results(self, tmp_path):
        for name in ("src/a.py", "benchmarks/b.py", "benchmarks/results/c.json", "examples/d.toml"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("1")
        before = code(tmp_path)
        (tmp_path / "benchmarks/results/c.json").write_text("2")
        (tmp_path / "src/__pycache__").mkdir()
        (tmp_path / "src/__pycache__/a.pyc").write_text("2")
        assert code(tmp_path) == before
        (tmp_path / "src/a.py").write_text("2")
        assert code(tmp_path) != before

    def test_a_checkpoint_is_known_by_its_weights(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"1")
        first = journal.digest(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"2")
        assert journal.digest(tmp_path) != first


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("benchmarks.weights.delta", "python -m benchmarks.weights.delta --repeats 1 model"),
        ("benchmarks.gpu.__main__", "python -m benchmarks.gpu --repeats 1 model"),
    ],
)
def test_a_result_names_the_module_that_was_run(tmp_path, monkeypatch, module, command):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None))
    monkeypatch.setattr(sys, "argv", ["…", "--repeats", "1", "/somewhere/model"])
    report.report("delta", {"ratio": 2})
    result = json.loads((tmp_path / "delta.json").read_text())
    assert (result["benchmark"], result["command"], result["ratio"]) == ("delta", command, 2)


class TestSeeds:
    def test_a_ratio_has_the_interval_of_its_pairs_and_its_inverse_the_inverse(self):
        above, below = [40.0, 50.0, 45.0], [20.0, 22.0, 21.0]
        found, inverse = seeds.ratio(above, below), seeds.ratio(below, above)
        assert found["ratio"] == pytest.approx(135 / 63, abs=1e-4)
        assert found["low"] < found["paired"] < found["high"]
        assert found["low"] == pytest.approx(1 / inverse["high"], rel=1e-3)
        assert found["paired"] == pytest.approx(1 / inverse["paired"], rel=1e-3)

    def test_a_mean_and_a_ratio_of_one_seed_have_no_interval(self):
        assert seeds.mean([30.0]) == {"mean": 30.0}
        assert seeds.ratio([30.0], [20.0]) == {"ratio": 1.5}

    def test_seconds_are_not_cut_to_the_range_of_a_rate(self):
        assert mean_over_seeds([30.0, 34.0]).high == pytest.approx(32 + 12.706 * 2)
        assert mean_over_seeds([1.0, 3.0]).low < 0


class TestRewards:
    def test_a_window_that_is_not_full_has_reached_nothing(self):
        seen = rewards.Rewards(batch=64, window=128)
        seen.add(1.0)
        assert not seen.reached(0.5)
        seen.add(0.0)
        assert seen.reached(0.5)
        assert not seen.reached(0.51)

    def test_the_batch_that_brings_the_mean_to_the_rate_is_found(self):
        assert rewards.first_reached([0.2, 0.6, 0.8, 0.9], 64, 128, 0.7) == 3
        assert rewards.first_reached([0.2, 0.6], 64, 128, 0.7) is None


class TestBesideTrl:
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.data())
    def test_neighbours_around_the_rate_are_found_and_no_checkpoint_is_evaluated_twice(self, rates, data):
        first = data.draw(st.integers(0, len(rates) - 1))
        asked = []

        def rate_at(index):
            asked.append(index)
            return rates[index]

        found = trl.neighbours(len(rates), rate_at, 0.5, first)
        assert len(set(asked)) == len(asked)
        if found is None:
            assert rates[-1] < 0.5
        else:
            low, high = found
            assert high == low + 1
            assert rates[high] >= 0.5
            assert low == -1 or rates[low] < 0.5
            assert {low, high} - {-1} <= set(asked)

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=64).map(sorted), st.data())
    def test_of_rising_rates_the_crossing_is_the_only_one_and_found_in_few_evaluations(self, rates, data):
        first, asked = data.draw(st.integers(0, len(rates) - 1)), []

        def rate_at(index):
            asked.append(index)
            return rates[index]

        found = trl.neighbours(len(rates), rate_at, 0.5, first)
        reached = [i for i, rate in enumerate(rates) if rate >= 0.5]
        assert found == ((reached[0] - 1, reached[0]) if reached else None)
        assert len(asked) <= 2 * math.ceil(math.log2(len(rates) + 1)) + 1

    def test_two_evaluations_suffice_if_the_guess_is_right(self):
        asked = []

        def rate_at(index):
            asked.append(index)
            return [0.1, 0.3, 0.6, 0.7, 0.9, 0.95][index]

        assert trl.neighbours(6, rate_at, 0.85, 4) == (3, 4)
        assert sorted(asked) == [3, 4]

    def test_seconds_at_a_rate_are_interpolated_linearly(self):
        low, high = {"rate": 0.8, "cpu_s": 40.0}, {"rate": 0.9, "cpu_s": 50.0}
        assert trl.between(low, high, 0.85) == 45.0

    def test_the_first_checkpoint_to_evaluate_is_where_the_training_rewards_had_reached_the_rate(self):
        points = [{"step": step} for step in (4, 8, 12, 16)]
        run = {"points": points, "batch": trl.WINDOW, "rewards": [(s, s / 16) for s in range(1, 17)]}
        assert trl.expected(run, 0.85) == 3  # at step 14
        assert trl.expected(run, 0.4) == 1  # at step 7
        assert trl.expected({**run, "rewards": []}, 0.85) == 3

    def test_a_run_ends_a_step_after_a_checkpoint_that_was_good_enough(self):
        past = trl.past(0.9, batch=trl.WINDOW, every=4)
        means = {1: 0.5, 2: 0.95, 3: 0.95, 4: 0.8, 5: 0.95, 8: 0.95}
        ended = [past({"step": step, "reward_mean": means.get(step, 0.95)}) for step in range(1, 10)]
        assert ended == [False] * 8 + [True]

    def test_the_best_setting_of_trl_by_its_mean_counts(self):
        costs = {"etude": [30, 37, 32], "a": [50, 60, 55], "b": [48, 90, 60], "c": [49, None, 50], "d": [70]}
        rows = [
            {"name": name, "seed": seed, "cpu_s_to_rate": cpu_s}
            for name, found in costs.items()
            for seed, cpu_s in enumerate(found)
        ]
        found = trl.compare(rows)
        assert found["best_of_trl"] == "a"
        assert found["share"]["ratio"] == pytest.approx(99 / 165, abs=1e-4)
        assert found["share"]["low"] < 0.6 < found["share"]["high"]
        assert found["not_in_every_seed"] == {"c": 49, "d": 70}
        assert trl.finalists({"a": 50.0, "b": 48.0, "c": 49.0, "d": None}, 2) == ["b", "c"]

    def test_there_is_no_share_where_etude_did_not_reach_the_rate(self):
        rows = [{"name": name, "seed": 0, "cpu_s_to_rate": cpu_s} for name, cpu_s in (("etude", None), ("a", 50.0))]
        assert trl.compare(rows)["share"] is None

    def test_each_setting_splits_into_whole_forwards_of_whole_groups(self):
        for setting in trl.SETTINGS.values():
            rollouts = setting.groups * 8
            assert rollouts % (setting.updates * setting.rows) == 0
            assert setting.rows % 8 == 0


class TestAsynchrony:
    def test_a_setting_trains_with_its_batch_and_rate_and_as_many_rollouts(self):
        start, example = Path("some"), load(asynchrony.LAPTOP, RunConfig)
        for name, setting in asynchrony.SETTINGS.items():
            config = asynchrony.configure(start, setting, 200, 3, ["rl.steps=20"])
            assert config.experience.groups_per_step == example.experience.groups_per_step * setting.batches, name
            assert config.rl.steps * config.experience.groups_per_step >= 20 * example.experience.groups_per_step
            assert config.learner.lr == pytest.approx(example.learner.lr * setting.rate, rel=1e-5)
            assert (config.experience.max_lag > 0) == name.startswith("async")
            assert config.seed == 3

    def test_a_run_is_given_up_against_the_fastest_of_its_kind(self):
        times = {"async": 40.0, "sync": 50.0, "sync, half batch": None}
        assert asynchrony.limit_of(times, "sync, double batch", 1.3) == pytest.approx(65.0)
        assert asynchrony.limit_of(times, "async, lag 1", 1.5) == 60.0
        assert asynchrony.limit_of(times, "async", 1.3) is None
        assert asynchrony.limit_of({"async": 40.0}, "sync", 1.3) is None

    def test_a_limit_counts_from_the_start_of_the_run(self):
        clock = iter([100.0, 119.9, 120.1])
        until = asynchrony.any_of(lambda step: False, 10.0, now=lambda: next(clock))
        assert [until({}), until({})] == [False, True]

    def test_more_seeds_run_the_fastest_of_each_kind_and_the_default(self):
        times = {"async": 60.0, "async, lag 1": 40.0, "async, lag 4": 45.0, "sync": None, "sync, double batch": 50.0}
        assert asynchrony.finalists(times, 2) == ["async", "async, lag 1", "async, lag 4", "sync, double batch"]
        assert asynchrony.finalists(times, 1) == ["async", "async, lag 1", "sync, double batch"]

    def test_the_best_are_those_of_all_seeds_and_ratios_are_of_pairs(self):
        times = {
            "async": [40.0, 44.0],
            "async, lag 1": [42.0, 38.0],
            "sync": [60.0, 50.0],
            "sync, double batch": [48.0, None],
            "sync, half batch": [45.0],
        }
        rows = [
            {"setting": name, "latency_ms": 200, "seed": seed, "time_s": time_s}
            for name, found in times.items()
            for seed, time_s in enumerate(found)
        ]
        found = asynchrony.compare([*rows, {**rows[0], "latency_ms": 0, "time_s": 1.0}], 200)
        assert (found["best_sync"], found["best_async"]) == ("sync", "async, lag 1")
        assert found["ratio"]["ratio"] == pytest.approx(110 / 84, abs=1e-4)
        assert found["ratio_best"]["ratio"] == pytest.approx(110 / 80, abs=1e-4)
        assert found["ratio_best"]["paired"] == pytest.approx(math.sqrt(60 / 42 * 50 / 38), abs=1e-4)
        assert found["not_in_every_seed"] == {"sync, double batch": 48.0, "sync, half batch": 45.0}

    def test_rows_of_the_last_result_are_added_where_it_is_of_the_same_facts(self, tmp_path, monkeypatch):
        monkeypatch.setattr(asynchrony, "RESULTS", tmp_path)
        facts = {"rate": 0.85, "start": "abc"}
        old = [{"setting": "sync", "latency_ms": 0, "seed": seed, "time_s": 9.0} for seed in (0, 1)]
        (tmp_path / "asynchrony.json").write_text(json.dumps({**facts, "rows": old}))
        assert asynchrony.earlier([{**old[0], "time_s": 8.0}], facts) == old[1:]
        with pytest.raises(SystemExit, match="abc"):
            asynchrony.earlier([], {**facts, "start": "def"})


class TestControls:
    def test_a_trial_is_done_once_for_a_run_and_its_checkpoint_kept(self, tmp_path):
        (tmp_path / "run/checkpoints/mid").mkdir(parents=True)
        (tmp_path / "run/config.toml").write_text(to_toml(load(asynchrony.LAPTOP, RunConfig)))
        run, done = controls.Measured(tmp_path / "run", 100.0, 64, 128), []

        def trial(run, out):
            done.append(out)
            return {"lr": 0.1, "cpu_s": 99.0}

        for _ in range(2):
            trials = controls.Trials(journal.Journal("controls", folder=tmp_path))
            row = trials.trained(run, "mid-0.1", trial)
        assert (len(done), Path(row["checkpoint"])) == (1, done[0].absolute())
        trials.trained(controls.Measured(tmp_path / "run", 50.0, 64, 128), "mid-0.1", trial)
        assert len(done) == 2

    def test_the_best_trial_on_validation_tasks_is_chosen(self):
        tried = {name: {"validation": {"rate": rate}} for name, rate in (("a", 0.3), ("b", 0.5), ("c", 0.5))}
        assert controls.chosen_of(tried) == "b"

    def test_rl_is_ahead_of_a_control_by_the_mean_over_runs_with_the_spread_between_them(self):
        def rates(value):
            return {"rate": value, "low": value - 0.03, "high": value + 0.03}

        control = {"chosen": "a", "runs": [{"heldout": rates(0.8)}, {"heldout": rates(0.9)}]}
        rl = [{"before": rates(0.3), "after": rates(0.95)}, {"before": rates(0.3), "after": rates(0.97)}]
        found = controls.against(control, rl)
        assert [row["rl_ahead"]["difference"] for row in found["by_run"]] == [0.15, 0.07]
        assert found["rl_ahead"]["mean"] == pytest.approx(0.11)
        assert found["rl_ahead"]["low"] < 0 < found["rl_ahead"]["high"]


class TestDeltas:
    def test_a_mode_is_told_beside_the_best_ratio_and_beside_the_fastest(self):
        def coder(ratio, encode, apply, write=None):
            speeds = {"encode_codec": encode, "apply_codec": apply, "apply_kernels": write}
            return {"ratio": ratio, **{what: {"gb_per_s": gb} for what, gb in speeds.items() if gb}}

        coders = {
            "best": coder(180.0, 6.0, 2.0, 6.0),
            "fast": coder(120.0, 8.0, 4.0, 12.0),
            "dense": coder(150.0, 0.5, 1.0),
            "quick": coder(60.0, 3.0, 8.0, 16.0),
            "absent": {"missing": "not here"},
        }
        found = delta.ahead(coders)
        assert found["best"]["best_ratio"] == {"peer": "dense", "ratio": 1.2, "encode_codec": 12.0, "apply_codec": 2.0}
        assert found["fast"]["best_ratio"]["ratio"] == 0.8
        assert found["fast"]["fastest"]["apply_kernels"] == {"peer": "quick", "times": 0.75, "ratio": 2.0}
        assert found["fast"]["fastest_of_our_ratio"]["encode_codec"] == {"peer": "dense", "times": 16.0, "ratio": 0.8}
        assert set(found["best"]["fastest_of_our_ratio"].values()) == {None}
        assert delta.ahead({name: coders[name] for name in ("best", "fast", "absent")}) == {}

    @pytest.mark.parametrize("dtype", ["bf16", "f8_e4m3", "f32"])
    def test_every_peer_that_is_here_gives_back_the_new_version(self, dtype):
        width = {"bf16": 2, "f8_e4m3": 1, "f32": 4}[dtype]
        rng = np.random.default_rng(width)
        old = rng.integers(0, 200, 20_000, dtype=f"u{width}")
        new = np.where(rng.random(old.size) < 0.02, old + old.dtype.type(1), old)
        before, after = (side([Tensor(dtype, (old.size,), codes)]) for codes in (old, new))
        here = [peer for peer in peers() if not peer.why_not]
        assert sum(peer.usual for peer in here) >= 3
        for peer in here:
            coded = peer.encode(before, after)
            (made,) = peer.decode(coded, before)
            assert made.dtype == new.dtype
            assert (made == new).all(), peer.name
            if peer.write:
                live = [old.copy()]
                peer.write(coded, live)
                assert (live[0] == new).all(), peer.name

    def test_peers_have_different_names(self):
        names = [peer.name for peer in peers()]
        assert len(set(names)) == len(names)


def test_the_journals_lie_where_git_does_not_look():
    assert journal.FOLDER.relative_to(HOME).parts[0] == "build"
