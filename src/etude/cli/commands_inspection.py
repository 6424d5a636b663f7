"""The arguments of the commands that inspect a run, among them rollouts, rewards and judge. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, add_run, add_set, group, output_file, port, positive


def add_inspection_commands(commands: Commands[Parser]) -> None:
    """Add the commands that read a recorded run, from ``etude dash`` to ``etude ledger``."""
    _add_dash_command(commands)
    _add_report_commands(commands)
    _add_rollout_commands(commands)
    _add_reward_commands(commands)
    _add_judge_commands(commands)
    ledger = group(commands, "ledger", "check a run's record of its rollouts")
    audit = add(ledger, "audit", "reports:audit_ledger", "check that no rollout was lost or trained on twice")
    add_run(audit)
    audit.add_argument("--new", action="store_true", help="only what came after the last successful audit")


def _add_report_commands(commands: Commands[Parser]) -> None:
    compare = add(commands, "compare", "reports:compare", "compare the held-out results of two runs, with intervals")
    compare.add_argument("run_a", type=Path, metavar="RUN", help="a run folder")
    compare.add_argument("run_b", type=Path, metavar="RUN", help="another run folder")
    add_run(add(commands, "report", "reports:report", "write report.html and summary.json of a run again"))
    add_run(add(commands, "fsck", "reports:fsck", "verify every file of a run against its checksum"))
    replay = add(commands, "replay", "replay:run", "repeat a training step from disk; exit code 1 if any bit differs")
    add_run(replay)
    replay.add_argument("step", type=positive, metavar="STEP", help="a step that led to the current weights, from 1")
    replay.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="CHECKPOINT",
        help="where to start (default: the nearest before STEP)",
    )
    replay.add_argument("--json", action="store_true", help="print digests and metrics of every step as JSON")


def _add_rollout_commands(commands: Commands[Parser]) -> None:
    rollouts = group(commands, "rollouts", "list and show rollouts")
    listing = add(rollouts, "list", "rollouts:list_rollouts", "list the last rollouts of a run, newest last")
    add_run(listing)
    listing.add_argument("--state", help="only rollouts in this state (not with --eval)")
    listing.add_argument(
        "--eval", metavar="NAME", help="rollouts of evals/NAME.parquet instead: before, after, during-000010, ..."
    )
    listing.add_argument("--limit", type=positive, default=40, help="maximum number of rows (default: %(default)s)")
    show = add(rollouts, "show", "rollouts:show", "show one rollout of training or of an evaluation as a tree of turns")
    add_run(show)
    show.add_argument("rollout_id", metavar="ROLLOUT", help="its id, for example g000003.2")
    show.add_argument("--full", action="store_true", help="print all texts in full")
    show.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_reward_commands(commands: Commands[Parser]) -> None:
    rewards = group(commands, "rewards", "list, change, recompute and explain the rewards of a run")
    terms = add(rewards, "list", "rewards:list_terms", "list the reward terms of a run, with means by step")
    add_run(terms)
    terms.add_argument("--steps", type=positive, default=4, metavar="N", help="the last N steps (default: %(default)s)")
    change = add(rewards, "set", "rewards:set_terms", "change, add or remove reward terms for the later steps of a run")
    change.add_argument("run", type=Path, metavar="RUN", help="a run folder; the run may be running")
    change.add_argument("change", nargs="*", metavar="TERM.KEY=VALUE", help="e.g. brief.weight=0.5, brief.kind=a.b:C")
    change.add_argument(
        "--remove", action="append", default=[], metavar="TERM", help="neither measure nor count this term (repeatable)"
    )
    change.add_argument(
        "--from-step", type=positive, metavar="STEP", help="the first step (default: the next possible)"
    )
    again = add(rewards, "recompute", "rewards:recompute_run", "compute rewards again; exit code 1 if any bit differs")
    add_run(again)
    again.add_argument(
        "--set", action="append", default=[], metavar="TERM.weight=N", help="other settings (repeatable)"
    )
    again.add_argument("--step", type=positive, metavar="STEP", help="only this step")
    again.add_argument("--json", action="store_true", help="print JSON, with digests of the batches")
    explain = add(rewards, "explain", "rewards:explain", "show how the reward and advantage of a rollout were computed")
    add_run(explain)
    explain.add_argument("rollout_id", metavar="ROLLOUT", help="its id, for example g000003.2")


def _add_judge_commands(commands: Commands[Parser]) -> None:
    judge = group(commands, "judge", "calibrate and train judges, show their costs")
    calibrate = add(judge, "calibrate", "judge:calibrate_judge", "measure how a judge agrees with labels by people")
    calibrate.add_argument("labels", type=Path, metavar="LABELS", help="a file of labels, JSON lines")
    calibrate.add_argument("--config", type=Path, required=True, help="the config that has the judge as a reward term")
    calibrate.add_argument("--term", required=True, metavar="NAME", help="name of the reward term")
    calibrate.add_argument("--auditor", metavar="NAME", help="also measure the distance to this other judge")
    calibrate.add_argument(
        "--half",
        choices=["report", "tune"],
        default="report",
        help="which half of the labels: to report, or to tune the rubric with (default: %(default)s)",
    )
    calibrate.add_argument("--run", type=Path, metavar="RUN", help="the run that has the rollouts of the labels")
    calibrate.add_argument("--json", type=output_file, metavar="FILE", help="write the numbers there, too")
    add_set(calibrate)
    labels = add(judge, "labels", "judge:write_labels", "write the graded rollouts of a run as labels")
    labels.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    tune = add(judge, "tune", "judge:tune", "train a checkpoint to judge with one token, from labels")
    tune.add_argument("labels", type=Path, metavar="LABELS", help="a file of labels; the half for tuning is used")
    tune.add_argument("--start", type=Path, required=True, metavar="CHECKPOINT", help="a Hugging Face directory")
    tune.add_argument("--run", type=Path, metavar="RUN", help="the run that has the rollouts of the labels")
    for parser in (labels, tune):
        parser.add_argument("--config", type=Path, required=True, help="the config that has the judge as a reward term")
        parser.add_argument("--term", required=True, metavar="NAME", help="name of the reward term")
        add_set(parser)
    labels.add_argument("--out", type=output_file, required=True, metavar="FILE", help="the file of labels to write")
    tune.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the checkpoint to write")
    spent = add(judge, "accounts", "judge:accounts", "show calls, missing verdicts and costs of judges")
    spent.add_argument("cache", nargs="?", type=Path, default=Path("judges.sqlite"), help="default: %(default)s")


def _add_dash_command(commands: Commands[Parser]) -> None:
    about = "serve web pages of a run: versions, batches, rollouts with tokens, evaluations, fleet, releases, consent"
    dash = add(commands, "dash", "dash:dash", about)
    dash.add_argument(
        "run", nargs="?", type=Path, metavar="RUN|FOLDER", help="a run, or a folder of runs (default: the newest run)"
    )
    dash.add_argument("--releases", type=Path, metavar="FILE", help="also show the releases in this file")
    dash.add_argument("--privacy", type=Path, metavar="DIR", help="also show the counts of this folder of consent")
    dash.add_argument("--feedback", type=Path, metavar="FILE", help="also show the signals in this file, by version")
    dash.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    dash.add_argument("--port", type=port, default=8080, help="port to listen on (default: %(default)s)")
    dash.add_argument("--key", help="key that browsers must send as password (default: $ETUDE_API_KEY, else none)")
    dash.add_argument("--keys", type=Path, metavar="FILE", help="TOML file of keys, as for etude serve")
