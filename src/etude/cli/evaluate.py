"""The commands ``etude eval`` and ``etude leaderboard``."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from etude.cli.locations import console, existing_path, newest_run
from etude.cli.progress import ProgressBar
from etude.config import overridden, read
from etude.errors import ConfigError, GateFailed, InputError, NoCheckpoint
from etude.evals.costs import NO_PRICE, Price, price_of
from etude.evals.curves import compare_curves
from etude.evals.records import EvalRecord, gate_reports, plain, read_records, record_path, rows_beside, write_record
from etude.evals.suites import METRICS, Suite, read_suite, value_of
from etude.prices import Prices, read_prices
from etude.rollouts.model_url import Endpoint

if TYPE_CHECKING:
    from etude.loop.suites import Subject


def evaluate(args: argparse.Namespace) -> int:
    """Play a suite on a checkpoint, the newest checkpoint of a run, or a model at a URL. Returns 0.

    Prints JSON: a list of results, or the result if there is one only. Raises `GateFailed` when a gate of the suite is
    not passed by the first model."""
    from etude.loop.suites import Subject, subjects_of

    suite = read_suite(args.suite, _suite_overrides(args))
    prices = read_prices(args.prices) if args.prices else Prices()
    if args.url:
        if not args.model:
            raise InputError("--model is missing", "a server at a URL may have several", hint="add --model NAME")
        endpoint = Endpoint(
            url=args.url,
            model=args.model,
            dialect=args.dialect,
            key_variable=args.key_variable,
            parallel=args.parallel,
        )
        subjects = [Subject(args.name or args.model, endpoint)]
    else:
        path = existing_path(args.checkpoint) if args.checkpoint else newest_run().path
        subjects = subjects_of(path, label=args.name, beside=args.beside, prompt=suite.prompt)
    given = _settings(args, subjects[0])
    records = []
    for number, subject in enumerate(subjects):
        price_name = args.price_name or (args.model if args.url else "policy")
        gpu = price_of(prices, price_name, gpu=args.gpu, num_gpus=args.gpus) if args.prices else NO_PRICE
        records.append(_play(suite, subject, given, args, price=gpu, price_name=price_name, gated=number == 0))
    if len(records) > 1:
        _print_effect(args.out, records)
    print(json.dumps([plain(one) for one in records] if len(records) > 1 else plain(records[0]), indent=2), flush=True)
    failures = [report.failure for report in records[0].gates if report.failure]
    if failures:
        hint = f"the rollouts are in {record_path(args.out, suite.name, records[0].label).with_suffix('.parquet')}"
        what = f"{records[0].label} does not pass {len(failures)} of {len(suite.gates)} gates of suite {suite.name}"
        raise GateFailed(what, "; ".join(failures), hint=hint)
    return 0


def _suite_overrides(args: argparse.Namespace) -> list[str]:
    found = [f"num_tasks={args.tasks}"] if args.tasks else []
    found += [f"samples={args.tries}"] if args.tries else []
    return found + ([f'splits=["{args.split}"]'] if args.split else [])


def _settings(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """The settings to play with: of --config, else of the subject's run, else the defaults for a model at a URL."""
    from etude.loop.suites import settings_of

    if args.config is not None:
        return read(args.config, args.set)
    if subject.run is not None:
        return overridden(args.set, settings_of(subject.run))
    if isinstance(subject.model, Endpoint):
        return overridden(args.set)
    raise ConfigError(
        "--config is missing", "a checkpoint does not contain the tasks", hint="give the run's config.toml"
    )


def _play(
    suite: Suite,
    subject: Subject,
    given: Mapping[str, Any],
    args: argparse.Namespace,
    *,
    price: Price,
    price_name: str,
    gated: bool,
) -> EvalRecord:
    """Play a suite on one model, and store the result. `gated`: whether the suite's gates apply."""
    from etude.harness import ChatFormat
    from etude.loop.checkpoints import checkpoint_version
    from etude.loop.evaluation import evaluate_model
    from etude.loop.limits import check_limits
    from etude.loop.preflight import check_machines, check_start
    from etude.loop.suites import config_for, refuse_trained, suite_tasks

    model, report = subject.model, partial(print, file=sys.stderr)
    if isinstance(model, Path) and not (model / "config.json").is_file():
        raise NoCheckpoint(
            f"{model} is not a checkpoint", "it has no config.json", hint="give a Hugging Face directory, or a run"
        )
    config = config_for(suite, given, subject, source=args.source)
    if isinstance(model, Path):
        check_start(model, context_tokens=config.engine.context_tokens, log=report)
    tasks = suite_tasks(suite, config)
    if subject.run is not None:
        refuse_trained(suite, tasks, subject.run)
    if isinstance(model, Path):
        check_limits(config.harness, ChatFormat.load(model), tasks[:8], report)
    check_machines(config)
    total = suite.samples * len(tasks)
    where = "starting engines" if isinstance(model, Path) else f"asking {model.url}"
    print(f"evaluating {subject.label} on {suite.name} with {total} rollouts; {where}", file=sys.stderr, flush=True)
    text = _text(suite.general_text) if suite.general_text is not None else ""
    path = record_path(args.out, suite.name, subject.label)
    with ProgressBar("rollouts", total) as progress:
        work = evaluate_model(
            model,
            config,
            tasks,
            name=subject.label,
            split=" and ".join(suite.splits),
            tries=suite.samples,
            temperature=suite.temperature,
            out=path.with_suffix(".parquet"),
            price=price,
            general_text=text,
            each=progress.advance,
        )
        result, general = asyncio.run(work)
    version = checkpoint_version(model) if isinstance(model, Path) else None
    values = {name: value_of(result, name, general_bits_per_byte=general) for name in METRICS}
    record = EvalRecord(
        suite=suite.name,
        purpose=suite.purpose,
        suite_digest=suite.digest(tasks),
        label=subject.label,
        model=str(model) if isinstance(model, Path) else model.model,
        url="" if isinstance(model, Path) else model.url,
        version=str(version) if version else None,
        prompted=bool(config.harness.prompt),
        price_name=price_name,
        result=result,
        general_bits_per_byte=general,
        gates=gate_reports(suite, values) if gated else (),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    write_record(args.out, record)
    return record


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        hint = "give a text file in UTF-8, relative to the suite's file"
        raise ConfigError(f"general_text = {str(path)!r} cannot be read", str(error), hint=hint) from None


def _print_effect(out: Path, records: Sequence[EvalRecord]) -> None:
    """Print what training did to pass@k, on stderr."""
    trained, untrained = (rows_beside(record_path(out, one.suite, one.label)) for one in records[:2])
    found = compare_curves(untrained, trained)
    points = "; ".join(f"k = {k}: {i.value:+.3f} ({i.low:+.3f} to {i.high:+.3f})" for k, i in found.differences.items())
    print(f"pass@k against the untrained model, on {found.num_tasks} tasks: {points}", file=sys.stderr)
    print(f"training {_EFFECTS[found.effect]}", file=sys.stderr, flush=True)


_EFFECTS = {
    "expands": "expands what the model can solve: pass@k is higher at the largest k",
    "sharpens": "sharpens the model: pass@1 is higher, and pass@k at the largest k is not shown to be",
    "narrows": "narrows what the model can solve: pass@k is lower at the largest k",
    "undecided": "changes nothing that these tasks can show; use more tasks, or more --tries",
}


def leaderboard(args: argparse.Namespace) -> int:
    """Print a table of all results in a folder, and write them as one HTML page. Returns 0."""
    from etude.dashboard.formatting import money
    from etude.dashboard.leaderboard import write_leaderboard

    records = read_records(args.folder)
    table = Table("suite", "model", "solve rate", "95 % interval", "pass@k", "$ per solved", "p50 s", "tokens out")
    for record, _ in records:
        result = record.result
        k, best = max(result.pass_at_k.items(), default=(0, (0.0, 0.0, 0.0)))
        table.add_row(
            record.suite,
            record.label,
            f"{result.rate:.3f}",
            f"{result.low:.3f} to {result.high:.3f}",
            f"{best[0]:.3f} (k = {k})",
            money(result.dollars_per_solved),
            "–" if result.latency_p50_s is None else f"{result.latency_p50_s:.2f}",
            f"{result.sampled_mean:.0f}",
        )
    console().print(table)
    print(write_leaderboard(args.html or args.folder / "leaderboard.html", records))
    return 0
