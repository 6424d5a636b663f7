from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from etude.dashboard import RunView, plain_line, render, result_lines, summarise, terms_legend
from etude.dashboard.glossary import GLOSSARY
from etude.dashboard.panels import deltas
from etude.dashboard.report import page
from etude.dashboard.terminal import terms_in
from etude.dashboard.utilisation import cpu_s, idle, lanes


def documented(value, keys):
    return {*keys} <= {*value}


def test_a_finished_run_has_every_documented_number(finished):
    summary = summarise(finished)
    json.dumps(summary)
    assert summary["format"] == 1
    assert summary["finished"] is True
    assert summary["run_id"] == "laptop-0a1b2c3d"
    keys = ["rate", "low", "high", "num_tasks", "solved", "best_of_k", "turns_mean", "sampled_mean"]
    assert documented(summary["heldout"]["before"], keys)
    assert documented(summary["heldout"]["after"], keys)
    assert [one["step"] for one in summary["heldout"]["during"]] == [10, 20, 30, 40]
    assert summary["heldout"]["after"]["num_tasks"] == 512
    assert summary["baselines"] == {"oracle": 1.0, "random": 0.02}
    assert summary["wall_s"]["total"] == pytest.approx(293)
    assert documented(summary["wall_s"], ["corpus", "mid-training", "eval-before", "rl", "eval-after"])
    assert summary["rollouts"] == {"admitted": 2, "cancelled": 1}
    assert summary["invalid"] == {"machine": 2}
    assert summary["rl"]["steps"] == 45
    assert summary["weights"]["num_publishes"] == 46
    assert 0.9 < summary["weights"]["share_of_bound"] < 1
    assert (
        summary["weights"]["pause_ms_p50"] <= summary["weights"]["pause_ms_p99"] <= summary["weights"]["pause_ms_max"]
    )
    assert summary["peak_memory_bytes"] == 1_800_000_000
    assert summary["parity"]["probe_ratio_max"] < 1e-4


def test_what_a_run_did_not_come_to_is_null_and_not_zero(writer):
    writer.everything(until="mid-training")
    summary = summarise(writer.path)
    assert summary["finished"] is False
    assert summary["heldout"] == {"before": None, "during": [], "after": None}
    assert summary["transfer"] == {"before": None, "after": None}
    assert summary["idle"] == {"learner": None, "engines": None}
    assert summary["drafts"] == {"computed": 0, "accepted": 0, "accepted_share": None, "share_of_tokens": None}
    assert summary["lag"]["max"] is None
    assert summary["weights"]["share_of_bound"] is None
    assert summary["parity"]["k3_mean"] is None


def test_transfer_tasks_are_reported_apart_from_heldout_tasks(writer):
    writer.evaluation("after", "heldout", 40, 0.9, 512, 1.0)
    writer.evaluation("after-transfer", "transfer", 40, 0.2, 256, 2.0)
    summary = summarise(writer.path)
    assert (summary["heldout"]["after"]["rate"], summary["transfer"]["after"]["rate"]) == (0.9, 0.2)
    assert any("0.200" in line for line in result_lines(writer.path))


def test_cheats_are_shown_beside_the_solve_rate_that_excludes_them(writer):
    writer.everything()
    writer.evaluation("after", "heldout", 45, 0.5, 512, 3e9, cheats=3)
    said = "(3 cheats, not counted as solved)"
    assert summarise(writer.path)["heldout"]["after"]["cheats"] == 3
    assert any(said in line for line in result_lines(writer.path))
    assert said in page(RunView(writer.path))
    assert said in " ".join(shown(RunView(writer.path)).split())


def test_a_run_that_had_nothing_to_learn_from_says_why(writer):
    assert summarise(writer.path)["nothing_learnt"] is None
    for step in (1, 2):
        writer.event(step, "conductor", "rl.step", step=step, no_signal_share=1.0, reward_mean=0.0)
    for i in range(6):
        facts = {"outcome": "graded", "reward": 0.0, "ending": "context", "turns": 0}
        writer.event(0.5, "conductor", "rollout", rollout_id=f"g{i}", **facts)
    why = summarise(writer.path)["nothing_learnt"]
    assert why == (
        "in none of 2 steps did a rollout have an advantage; all 6 rollouts have reward 0; "
        "they ended by context (6), before the model was called"
    )
    assert f"Nothing could be learned</strong>: {why}." in page(RunView(writer.path))
    writer.event(3.0, "conductor", "rl.step", step=3, no_signal_share=0.9, reward_mean=0.1)
    assert summarise(writer.path)["nothing_learnt"] is None
    assert "Nothing could be learned" not in page(RunView(writer.path))


def test_steps_on_production_episodes_are_told_apart_from_those_on_tasks(writer):
    writer.event(1.0, "conductor", "rl.step", step=1, lag={"0": 6}, num_groups=2, reward_mean=0.0)
    shares = {"deployed": 0.5, "before": 0.5, "other": 0.0}
    facts = {"origin": "production", "sampled_by": shares}
    writer.event(2.0, "conductor", "rl.step", step=2, lag={"1": 3}, num_groups=3, reward_mean=1.0, **facts)
    writer.event(3.0, "conductor", "rl.step", step=3, lag={"2": 1}, num_groups=1, reward_mean=0.0, origin="production")
    summary = summarise(writer.path)
    assert summary["lag"]["histogram"] == {"0": 6}
    assert summary["production"] == {
        "steps": 2,
        "episodes": 4,
        "reward_mean": 0.75,
        "lag": {"mean": 1.25, "max": 2, "histogram": {"1": 3, "2": 1}},
        "sampled_by": {"before": 0.5, "deployed": 0.5, "other": 0.0},
        "mixed_steps": 0,
        "simulated_groups": 0,
        "dollars_per_kept": {},
    }


def test_the_lag_and_the_rewards_of_a_mixed_step_are_told_apart_by_origin(writer):
    writer.event(1.0, "conductor", "rl.step", step=1, lag={"0": 6}, num_groups=2, reward_mean=0.0)
    users = {"num_groups": 4, "num_rollouts": 4, "reward_mean": 0.75, "lag": {"3": 4}}
    tasks = {"num_groups": 2, "num_rollouts": 8, "reward_mean": 0.25, "lag": {"0": 7, "1": 1}}
    facts = {"lag": {"0": 7, "1": 1, "3": 4}, "num_groups": 6, "reward_mean": 0.417, "origin": "mixed"}
    writer.event(2.0, "conductor", "rl.step", step=2, **facts, origins={"production": users, "simulated": tasks})
    summary = summarise(writer.path)
    assert summary["lag"]["histogram"] == {"0": 13, "1": 1}
    assert summary["production"] == {
        "steps": 1,
        "episodes": 4,
        "reward_mean": 0.75,
        "lag": {"mean": 3.0, "max": 3, "histogram": {"3": 4}},
        "sampled_by": {},
        "mixed_steps": 1,
        "simulated_groups": 2,
        "dollars_per_kept": {},
    }
    assert "steps on 4 episodes of users; lag 3; 2 simulated groups in 1 of them" in page(RunView(writer.path))


def test_the_report_tells_the_dollars_per_kept_change_of_the_last_release_that_knows_them(writer):
    ended = {"state": "ended", "result": "held"}
    for number, kept in enumerate(({"stable": 0.5, "canary": 0.25}, {"stable": 0.42, "canary": None}, {}), 1):
        writer.event(number, "conductor", "production.window", number=number, **ended, dollars_per_kept=kept)
    writer.event(9.0, "conductor", "rl.step", step=3, lag={"3": 4}, num_groups=4, reward_mean=0.7, origin="production")
    assert summarise(writer.path)["production"]["dollars_per_kept"] == {"stable": 0.42}, "unknown is not 0"
    told = page(RunView(writer.path))
    assert "dollars per kept change" in told
    assert "stable $0.42" in told


def test_lag_is_counted_over_rollouts(writer):
    writer.event(1.0, "conductor", "rl.step", step=1, lag={"0": 6})
    writer.event(2.0, "conductor", "rl.step", step=2, lag={"0": 1, "2": 3})
    assert summarise(writer.path)["lag"] == {"mean": 0.6, "max": 2, "histogram": {"0": 7, "2": 3}}


def test_the_bound_is_compared_over_deltas_alone(writer):
    writer.event(
        1.0, "learner", "weights.publish", step=0, anchor=True, object_bytes=100, snapshot_bytes=100, bound_bytes=100.0
    )
    facts = {"anchor": True, "anchor_bytes": 100, "snapshot_bytes": 100}  # a snapshot beside the delta
    writer.event(2.0, "learner", "weights.publish", step=1, object_bytes=20, bound_bytes=15.0, **facts)
    writer.event(3.0, "learner", "weights.publish", step=2, object_bytes=20, bound_bytes=20.0, **facts)
    found = summarise(writer.path)["weights"]
    assert (found["num_publishes"], found["object_bytes"]) == (3, 140)
    assert (found["ratio"], found["share_of_bound"]) == (5.0, 0.875)


def test_where_most_weights_change_no_share_of_the_bound_is_told(writer):
    facts = {"anchor": False, "snapshot_bytes": 100, "object_bytes": 30, "bound_bytes": 81.0, "changed_share": 0.99}
    writer.everything(until="rl", rl_steps=3)
    for path in (writer.path / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line | facts if line["kind"] == "weights.publish" and not line["anchor"] else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summarise(writer.path)["weights"]
    assert found["ratio"] == pytest.approx(100 / 30)
    assert found["share_of_bound"] is None
    said = "\n".join(result_lines(writer.path)) + shown(RunView(writer.path))
    assert "3.3x smaller than the weights" in said
    assert "3.3x smaller than a snapshot" in said
    assert "of the bound" not in said
    assert "no weight" not in said
    panel = deltas(RunView(writer.path))
    assert panel is not None
    assert "Most values change in a step" in panel.note


def test_pauses_count_where_requests_were_in_flight(writer):
    writer.event(1.0, "engine-0", "engine.adopt", step=0, pause_s=9.0, num_running=0)
    for i in range(1, 101):
        writer.event(1.0 + i, "engine-0", "engine.adopt", step=i, pause_s=i / 1000, num_running=4)
    found = summarise(writer.path)["weights"]
    assert [found[f"pause_ms_{q}"] for q in ("p50", "p99", "max")] == pytest.approx([50, 99, 100])


def usage(writer, t, **processes):
    writer.event(
        t, "conductor", "usage", processes={name.replace("_", "-"): {"cpu_s": s} for name, s in processes.items()}
    )


def test_idle_shares_come_from_cpu_time_of_the_rl_phase(writer):
    writer.event(10.0, "conductor", "phase", phase="rl", state="start")
    writer.event(20.0, "conductor", "phase", phase="rl", state="end", wall_s=10.0)
    usage(writer, 0.0, learner=0.0, engine_0=0.0, engine_1=0.0)
    usage(writer, 10.0, learner=10.0, engine_0=0.0, engine_1=0.0)  # before RL: does not count
    usage(writer, 15.0, learner=12.0, engine_0=5.0, engine_1=1.0)
    usage(writer, 20.0, learner=14.0, engine_0=10.0, engine_1=2.0)
    shares = idle(RunView(writer.path))
    assert shares == {"learner": pytest.approx(0.6), "engines": pytest.approx((0.0 + 0.8) / 2)}


def test_the_drafts_of_all_engines_are_counted(writer):
    for engine, drafted, accepted in (("engine-0", 8, 5), ("engine-1", 4, 1), ("engine-0", 0, 0)):
        writer.event(1.0, engine, "engine.load", tokens=10, drafted_tokens=drafted, accepted_tokens=accepted)
    assert summarise(writer.path)["drafts"] == {
        "computed": 12, "accepted": 6, "accepted_share": 0.5, "share_of_tokens": 0.2
    }  # fmt: skip


def test_a_restarted_process_counts_on_from_zero(writer):
    usage(writer, 0.0, learner=1.0)
    usage(writer, 1.0, learner=2.0)
    usage(writer, 2.0, learner=0.5)  # a new process
    usage(writer, 3.0, learner=1.0)
    view = RunView(writer.path)
    assert cpu_s(view) == {"learner": pytest.approx(1.0 + 1.0 + 0.5 + 0.5)}
    assert lanes(view)["learner"].cpu_s() == pytest.approx(2.0)
    assert lanes(view)["learner"].cpu_s(2.5, 3.0) == pytest.approx(0.25)


def test_a_reading_that_misses_ended_processes_counts_nothing_twice(writer):
    for t, seconds in enumerate((0.0, 10.0, 9.2, 10.5, 11.0)):
        usage(writer, float(t), worker=seconds)
    view = RunView(writer.path)
    assert cpu_s(view) == {"worker": pytest.approx(11.0)}
    assert lanes(view)["worker"].cpu_s() == pytest.approx(11.0)


def shown(view, as_what=render) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(as_what(view))
    return console.export_text()


def test_the_terminal_shows_what_matters_during_rl(writer):
    writer.everything(until="rl", rl_steps=23)
    said = shown(RunView(writer.path))
    for part in ("rl 23/45", "51 %", "left", "reward", "validation", "lag", "mean", "idle", "bound", "machine 1"):
        assert part in said, part
    assert "✓ mid-training 1:50" in said
    assert "▸ rl" in said


def test_the_terminal_names_hung_and_restarted_processes(writer):
    writer.everything(until="rl", rl_steps=3)
    writer.event(2e9, "conductor", "process", name="engine-1", state="hung")
    writer.event(2e9 + 1, "conductor", "process", name="engine-1", state="restart")
    assert "engine-1 did not answer and was killed" in shown(RunView(writer.path))
    assert "before it" not in shown(RunView(writer.path)), "its restart belongs to the same loss"
    writer.event(2e9 + 2, "conductor", "process", name="engine-1", state="ready")
    writer.event(2e9 + 3, "conductor", "process", name="engine-1", state="restart")
    assert "engine-1 was restarted; before it 1 more" in shown(RunView(writer.path))


def test_a_learner_that_was_lost_stays_in_sight_whatever_went_wrong_since(writer):
    writer.everything(until="rl", rl_steps=3)
    assert "lost and replaced" not in shown(RunView(writer.path))
    writer.event(2e9, "conductor", "process", name="learner", state="restart")
    writer.event(2e9, "conductor", "lineage", state="lost", step=3, reason="the learner has ended")
    writer.event(2e9 + 1, "conductor", "process", name="worker-0", state="restart")
    for said in (shown(RunView(writer.path)), plain_line(RunView(writer.path))):
        assert "learner lost and replaced 1 time, the last time at step 3: the learner has ended" in " ".join(
            said.split()
        )
        assert "worker-0 was restarted" in said


def test_an_engine_that_is_lost_is_named_as_such_and_one_that_is_back_is_not(writer):
    writer.everything(until="rl", rl_steps=3)
    for t, (name, state) in enumerate([("west", "serving"), ("east", "serving"), ("west", "lost")]):
        writer.event(2e9 + t, "conductor", "fleet.state", engine=name, region=name, state=state, url="http://e")
    assert "engines 2 serving, 1 lost (west)" in plain_line(RunView(writer.path))
    writer.event(2e9 + 9, "conductor", "fleet.state", engine="west", region="west", state="serving", url="http://e")
    assert "engines 3 serving" in plain_line(RunView(writer.path))


def test_the_terminal_says_what_an_alarm_of_parity_did(writer):
    writer.everything(until="rl", rl_steps=3)
    writer.event(2e9, "conductor", "parity.alarm", engine="engine-1", step=2, defence="replay")
    said = " ".join(shown(RunView(writer.path)).split())
    assert "engine-1: over the parity budget at step 2; the learner now uses replay" in said


def test_the_terminal_names_the_reward_term_that_a_group_waits_for(writer):
    writer.everything(until="rl", rl_steps=3)
    facts = {"group_id": "g000003", "terms": ["polite"], "reasons": {"g000003.1 polite": "status 401"}}
    writer.event(2e9, "conductor", "rewards.unknown", state="waiting", **facts)
    said = " ".join(shown(RunView(writer.path)).split())
    assert "a group waits for the reward term polite, which is unknown: status 401" in said
    writer.event(2e9 + 1, "conductor", "rewards.unknown", state="known", **facts)
    assert "reward term" not in shown(RunView(writer.path))


def test_a_run_whose_reward_term_was_often_unknown_says_so_at_its_end_and_in_its_report(writer):
    writer.everything()
    weights = {"reward_weights": {"tone": 0.5, "brief": 0.5}}
    for step, unknown in enumerate(({"tone": 1.0, "brief": 0.1}, {"tone": 0.5}, {}), 1):
        writer.event(2e9 + step, "conductor", "rl.step", step=step, num_steps=3, **weights, unknown_terms=unknown)
    view = RunView(writer.path)
    said = "the reward term tone was unknown for 50% of the rollouts of 3 steps"
    assert next(line for line in result_lines(writer.path) if "the reward term" in line).startswith(said)
    assert said in page(view)
    assert "reward term brief" not in "".join([*result_lines(writer.path), page(view)])


def test_one_plain_line_says_what_matters_without_graphics(writer):
    writer.everything(until="rl", rl_steps=23)
    line = plain_line(RunView(writer.path))
    assert "\n" not in line
    for part in ("rl  23/45", "reward 0.8", "validation 0.79"):
        assert part in line, part
    assert not set("▁▂▃▄▅▆▇█") & set(line)


def test_the_last_words_of_a_run_name_its_result_and_what_to_do_next(finished, writer):
    first, *rest = result_lines(finished)
    assert first == "held-out solve rate 0.310 [0.270, 0.350] → 0.940 [0.919, 0.961] on 512 tasks"
    assert any(line.startswith("4:53 in all: corpus 3.0 s, mid-training 1:50") for line in rest)
    assert rest[-1] == f"talk to it: etude serve {finished}"


def test_a_run_in_which_nothing_was_learned_says_so_and_not_how_well_nothing_travelled(writer):
    writer.everything(until="rl", rl_steps=3)
    for path in (writer.path / "events").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        still = {"bound_bytes": 0.0, "object_bytes": 6, "changed_share": 0.0}
        lines = [line | still if line["kind"] == "weights.publish" and not line["anchor"] else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    view = RunView(writer.path)
    assert summarise(writer.path)["weights"]["share_of_bound"] is None
    said = "\n".join(result_lines(writer.path)) + shown(view)
    assert "without any difference" in said
    assert "no weight has changed" in said
    assert "of the bound" not in said
    assert "smaller" not in said


def test_the_words_of_the_view_are_explained_where_they_are_used_as_the_list_of_words_has_them(writer):
    writer.everything(until="rl", rl_steps=23)
    view = RunView(writer.path)
    assert {"lag", "delta", "bound", "pause"} <= set(terms_in(view))
    rows = (Path(__file__).parents[3] / "docs" / "concepts" / "words.md").read_text()
    for word, meaning in GLOSSARY.items():
        assert f"| {word} | {meaning} |" in rows
    assert GLOSSARY["bound"] in " ".join(shown(view, terms_legend).split())
    assert GLOSSARY["bound"] not in " ".join(shown(view).split())


def test_a_share_of_the_bound_over_one_is_not_called_impossible(writer):
    writer.everything()
    said = "\n".join([*result_lines(writer.path), page(RunView(writer.path))])
    assert "above or below" in said
    assert "beat" not in said
