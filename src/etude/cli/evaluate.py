"""The commands ``etude eval`` and ``etude leaderboard``."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.table import Table

from etude.cli.locations import console, existing_path, newest_run, open_run
from etude.cli.progress import ProgressBar
from etude.config import overridden, read
from etude.errors import ConfigError, EtudeError, GateFailed, InputError, NoCheckpoint, TaskError, nearest
from etude.evals.costs import NO_PRICE, Price, lacking, price_of
from etude.evals.curves import compare_curves
from etude.evals.intervals import mean_over_seeds
from etude.evals.records import (
    FILE_CHARACTERS,
    EvalRecord,
    SeedsRecord,
    gate_reports,
    plain,
    read_records,
    read_seeds,
    record_path,
    rows_beside,
    write_record,
)
from etude.evals.rows import read_rows
from etude.evals.suites import Suite, read_suite, values_of
from etude.evals.training_seeds import over_training_seeds
from etude.prices import read_prices
from etude.rollouts.model_url import PATIENCE_S, Endpoint

if TYPE_CHECKING:
    from etude.loop.config import RunConfig
    from etude.loop.evaluation import Model, WindowLoss
    from etude.loop.suites import Subject
    from etude.records.task import Task


def evaluate(args: argparse.Namespace) -> int:
    """Run a suite on checkpoints, the newest checkpoints of runs, a model at a URL, or a scripted agent. Returns 0.

    Several checkpoints count as training seeds of one recipe. Prints JSON: the result of one model, a list of results
    with `--beside`, or an object with `results` and `seeds` for training seeds. Raises `GateFailed` if the first model,
    or the recipe, does not pass a gate of the suite, and `InputError` for arguments that do not fit together."""
    suite = read_suite(args.suite, _suite_overrides(args))
    by_seed = _subjects(args, suite)
    check_labels(args.out, suite.name, [subject.label for group in by_seed for subject in group])
    given = _settings(args, by_seed[0][0])
    played = [[_play(suite, subject, given, args) for subject in group] for group in by_seed]
    if len(played) > 1:
        return _report_seeds(suite, played, args)
    [models] = played
    first, untrained = models[0], models[1] if len(models) > 1 else None
    if untrained is not None:
        _print_effect(args.out, first, untrained)
    record = _gated(suite, first, untrained)
    write_record(args.out, record)
    records = [record, *(one.record for one in models[1:])]
    print(json.dumps([plain(one) for one in records] if len(records) > 1 else plain(record), indent=2), flush=True)
    _print_unknown_judges(suite, records)
    _require(suite, record, rollouts=record_path(args.out, suite.name, record.label).with_suffix(".parquet"))
    return 0


def _print_unknown_judges(suite: Suite, records: Sequence[EvalRecord]) -> None:
    """Print a remark for each judge's term with unknown values: `judge_dollars` may pass its gate for that reason."""
    judges = {term.name for term in suite.rewards.terms if term.is_judge}
    for record in records:
        for name, mean in record.result.terms.items():
            if name in judges and mean.num_unknown:
                count = f"{mean.num_unknown} of {mean.num_unknown + mean.num_known} rollouts of {record.label}"
                why = "judge_dollars is less than if the judge had answered; the reasons are in etude judge accounts"
                print(f"remark: the judge's term {name} is unknown for {count}: {why}", file=sys.stderr, flush=True)


def check_labels(out: Path, suite: str, labels: Sequence[str]) -> None:
    """Raise `InputError` if the results of two models of a suite have the same file in the folder `out`."""
    by_file: dict[str, list[str]] = {}
    for label in labels:
        by_file.setdefault(record_path(out, suite, label).name, []).append(label)
    for file, same in by_file.items():
        if len(same) > 1:
            raise InputError(
                f"{len(same)} models have the same file for their results",
                f"{file} is that of the labels {', '.join(map(repr, same))}: in the name of a file, other characters "
                f"than {FILE_CHARACTERS} become '-'",
                hint="rename a run's folder, or evaluate the models one by one with --name",
            )


def _subjects(args: argparse.Namespace, suite: Suite) -> list[list[Subject]]:
    """Return what to play: for each training seed the model, and with `--beside` its untrained model."""
    from etude.loop.evaluation import Baseline, RunEngines
    from etude.loop.suites import Subject, subjects_of

    if args.beside and (args.run or args.baseline or args.url):
        facts = "only a checkpoint of a run has an untrained model, from which it started"
        raise InputError("--beside needs --checkpoint", facts, hint="remove --beside")
    if args.run:
        run = open_run(args.run)
        engines = RunEngines(run, args.share, args.seconds)
        return [[Subject(args.name or f"{run.path.resolve().name}@running", engines, run)]]
    if args.baseline:
        return [[Subject(args.name or args.baseline, Baseline(args.baseline))]]
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
        return [[Subject(args.name or args.model, endpoint)]]
    paths = [existing_path(one) for one in args.checkpoint or ()] or [newest_run().path]
    label = args.name if len(paths) == 1 else ""
    return [subjects_of(path, label=label, beside=args.beside, prompt=suite.prompt) for path in paths]


def _suite_overrides(args: argparse.Namespace) -> list[str]:
    found = [f"num_tasks={args.tasks}"] if args.tasks else []
    found += [f"samples={args.tries}"] if args.tries else []
    return found + ([f'splits=["{args.split}"]'] if args.split else [])


def _settings(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """Return the settings: those of --config, else those of the subject's run; without a checkpoint, the defaults.

    Raises `ConfigError` for a checkpoint outside of a run if there is no --config."""
    from etude.loop.suites import settings_of

    if args.config is not None:
        return read(args.config, args.set)
    if subject.run is not None:
        return overridden(args.set, settings_of(subject.run))
    if not isinstance(subject.model, Path):
        return overridden(args.set)
    raise ConfigError(
        "--config is missing", "a checkpoint does not contain the tasks and limits", hint="give the run's config.toml"
    )


class _Played(NamedTuple):
    """A model that has played a suite: its result, and its loss on each window of the general text."""

    record: EvalRecord
    general: list[WindowLoss]


def _play(suite: Suite, subject: Subject, given: Mapping[str, Any], args: argparse.Namespace) -> _Played:
    """Play a suite on one model, and store the result. Its gates are checked later."""
    from etude.loop.evaluation import RunEngines, bits_per_byte, evaluate_model
    from etude.loop.suites import general_text

    report = partial(print, file=sys.stderr, flush=True)
    price_name, price = _price(args)
    config, tasks, num_not_compared = _checked(suite, subject, given, source=args.source)
    model, text = subject.model, general_text(suite)
    total, path = suite.samples * len(tasks), record_path(args.out, suite.name, subject.label)
    where = f"asking {model.url}" if isinstance(model, Endpoint) else "starting its processes"
    report(f"evaluating {subject.label} on {suite.name} with {total} rollouts; {where}")
    if isinstance(model, Endpoint) and (why := model.unreachable()):
        report(f"{model.url} cannot be reached ({why}); each request is sent again for up to {PATIENCE_S:g} s")
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
        result, general, version = asyncio.run(work)
    _require_valid(path.with_suffix(".parquet"), subject.label)
    if args.prices and result.dollars is None:
        report(f"the dollars of {subject.label} are unknown: {unknown_dollars(model, price_name, price, args.prices)}")
    label = subject.label
    if isinstance(model, RunEngines) and not args.name:  # results of different steps of a run are separate files
        label = f"{label}-{result.step:06d}"
        path.with_suffix(".parquet").replace(record_path(args.out, suite.name, label).with_suffix(".parquet"))
    record = EvalRecord(
        suite=suite.name,
        purpose=suite.purpose,
        suite_digest=suite.digest(tasks),
        label=label,
        model=_shown(subject),
        url=model.url if isinstance(model, Endpoint) else "",
        version=str(version) if version else None,
        prompted=bool(config.harness.prompt),
        price_name=price_name,
        result=result,
        general_bits_per_byte=bits_per_byte(general),
        general_digest=hashlib.sha256(text.encode()).hexdigest()[:16] if general else "",
        gates=(),
        date=_now(),
        num_not_compared=num_not_compared,
    )
    write_record(args.out, record)
    return _Played(record, general)


def _require_valid(rollouts: Path, label: str) -> None:
    """Print to stderr how many rollouts of an evaluation are invalid, and why. Raises `EtudeError` if all are invalid.

    `rollouts`: the Parquet file of the rollouts. `label`: the name of the model in messages."""
    rows = read_rows(rollouts)
    reasons = Counter(f"{row.outcome}: {row.reason}" for row in rows if not row.valid)
    if not reasons:
        return
    facts = "; ".join(f"{count} by {reason}" for reason, count in reasons.most_common(3))
    if reasons.total() == len(rows):
        hint = f"the rollouts are in {rollouts}; there is no result"
        raise EtudeError(f"all {len(rows)} rollouts of {label} are invalid", facts, hint=hint)
    print(
        f"{reasons.total()} of {len(rows)} rollouts are invalid and do not count: {facts}", file=sys.stderr, flush=True
    )


def _checked(
    suite: Suite, subject: Subject, given: Mapping[str, Any], *, source: str
) -> tuple[RunConfig, list[Task], int]:
    """Return the config and the tasks of a suite, after checks that the model can play them on this machine; and the
    number of training tasks that were not compared with them (`refuse_trained`).

    Builds the images of the tasks. Raises `NoCheckpoint`, and the errors of the checks before a run."""
    from etude.harness import ChatFormat
    from etude.loop.evaluation import RunEngines
    from etude.loop.limits import check_limits
    from etude.loop.preflight import build_images, check_machines, check_start
    from etude.loop.suites import config_for, refuse_trained, suite_tasks

    model, report = subject.model, partial(print, file=sys.stderr)
    if isinstance(model, Path) and not (model / "config.json").is_file():
        raise NoCheckpoint(
            f"{model} is not a checkpoint", "it has no config.json", hint="give a Hugging Face directory, or a run"
        )
    config = config_for(suite, given, subject, source=source)
    if isinstance(model, Path):
        check_start(model, context_tokens=config.engine.context_tokens, log=report)
    if config.machines.images:
        asyncio.run(build_images(config, report))
    try:
        tasks = suite_tasks(suite, config)
    except TaskError as error:
        error.hint += "" if source else f"; --source names other tasks for the suite {suite.name}"
        raise
    num_not_compared = refuse_trained(suite, tasks, subject.run, report) if subject.run is not None else 0
    if num_not_compared:
        report(
            f"the first {num_not_compared} training tasks of {subject.label} are not compared with those of the suite"
        )
    if isinstance(model, Path | RunEngines):
        chat = ChatFormat.load(model if isinstance(model, Path) else model.run / "tokenizer")
        check_limits(config.harness, chat, tasks[:8], report)
    check_machines(config)
    return config, tasks, num_not_compared


def _shown(subject: Subject) -> str:
    """Return the model of a result: a path, the name of a model at a URL, or a baseline."""
    from etude.loop.evaluation import RunEngines

    model = subject.model
    if isinstance(model, Endpoint):
        return model.model
    return str(model.run.path if isinstance(model, RunEngines) else model)


def _price(args: argparse.Namespace) -> tuple[str, Price]:
    """Return the model's name in the table of prices, and its price. With --gpu, tokens have no price of their own.

    Raises `InputError` for a name or a kind of GPU that is not in the table, for one of them without a table, and for
    both together."""
    name = args.price_name or (args.model if args.url else "policy")
    if not args.prices:
        if args.gpu or args.price_name:
            given = "--gpu" if args.gpu else "--price-name"
            raise InputError(f"{given} needs --prices", "it names a price of a table", hint="add --prices FILE")
        return name, NO_PRICE
    if args.gpu and args.price_name:
        facts = "an engine is paid by the hour or by its tokens"
        raise InputError("--gpu and --price-name exclude each other", facts, hint="leave out one of them")
    prices = read_prices(args.prices)
    for kind, wanted, known in (("kind of GPU", args.gpu, prices.gpu_hours), ("model", args.price_name, prices.models)):
        if wanted and wanted not in known:
            hint = nearest(wanted, known) if known else f"add it to {args.prices}"
            raise InputError(f"there is no price of {wanted!r}", f"{args.prices} has no such {kind}", hint=hint)
    return name, price_of(replace(prices, models={}) if args.gpu else prices, name, gpu=args.gpu, num_gpus=args.gpus)


def unknown_dollars(model: Model, price_name: str, price: Price, path: Path) -> str:
    """Return, as a sentence, why the cost of an evaluation is unknown although a table of prices was given.

    `price_name`: the model's name in the table at `path`; `price`: what the table says about it."""
    from etude.loop.evaluation import Baseline

    if isinstance(model, Baseline):
        return "a script has no prices"
    if missing := lacking(price, price_name):
        return f"{path} does not have {', '.join(missing)}"
    return "the server does not say how many prompt tokens it read, or how many of them it had in its cache"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _values(played: _Played, untrained: _Played | None) -> dict[str, float | None]:
    """Return the numbers of a result that gates may name."""
    return values_of(
        played.record.result,
        general_bits_per_byte=played.record.general_bits_per_byte,
        untrained_bits_per_byte=untrained.record.general_bits_per_byte if untrained is not None else None,
    )


def _gated(suite: Suite, played: _Played, untrained: _Played | None) -> EvalRecord:
    """Return the result of a model with the reports of the suite's gates."""
    return msgspec.structs.replace(played.record, gates=gate_reports(suite, _values(played, untrained)))


def _require(suite: Suite, record: EvalRecord | SeedsRecord, *, rollouts: Path) -> None:
    """Raise `GateFailed` if the result does not pass a gate. `rollouts`: the path that the hint names."""
    failures = [report.failure for report in record.gates if report.failure]
    if failures:
        what = f"{record.label} does not pass {len(failures)} of {len(suite.gates)} gates of suite {suite.name}"
        raise GateFailed(what, "; ".join(failures), hint=f"the rollouts are in {rollouts}")


def _report_seeds(suite: Suite, played: Sequence[Sequence[_Played]], args: argparse.Namespace) -> int:
    """Store and print the result of a recipe over its training seeds. Returns 0."""
    records = [one.record for group in played for one in group]
    if len({record.suite_digest for record in records}) > 1:
        facts = f"the {len(records)} results have different suite digests"
        hint = "give the tasks by [tasks] of the suite or --source, so that they do not depend on a run"
        raise InputError("the models were not evaluated on the same tasks", facts, hint=hint)
    untrained = [group[1] if len(group) > 1 else None for group in played]
    before = [rows_beside(record_path(args.out, suite.name, one.record.label)) for one in untrained if one is not None]
    values = [_values(group[0], beside) for group, beside in zip(played, untrained, strict=True)]
    rises = [one["general_rise"] for one in values]
    labels = [group[0].record.label for group in played]
    result = over_training_seeds(
        {label: rows_beside(record_path(args.out, suite.name, label)) for label in labels},
        before,
        general_rises=[rise for rise in rises if rise is not None] if None not in rises else (),
    )
    means = {name: _mean([one.get(name) for one in values]) for name in values[0]}
    record = SeedsRecord(
        suite=suite.name,
        purpose=suite.purpose,
        suite_digest=records[0].suite_digest,
        label=args.name or f"{len(played)} seeds of {played[0][0].record.label}",
        result=result,
        gates=gate_reports(suite, means | {"rate": result.rate, "low": result.low, "high": result.high}),
        date=_now(),
    )
    write_record(args.out, record)
    print(seeds_line(record), file=sys.stderr, flush=True)
    print(json.dumps({"seeds": plain(record), "results": [plain(one) for one in records]}, indent=2), flush=True)
    _print_unknown_judges(suite, records)
    _require(suite, record, rollouts=args.out / suite.name)
    return 0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def seeds_line(record: SeedsRecord) -> str:
    """Return one line of text about the result of a recipe over training seeds."""
    result = record.result
    rates = ", ".join(f"{rate:.3f}" for rate in result.by_seed.values())
    line = f"{record.label}: {result.rate:.3f} ({result.low:.3f} to {result.high:.3f}) over training seeds {rates}"
    if result.gain is not None:
        line += "; above the untrained models by {:.3f} ({:+.3f} to {:+.3f})".format(*result.gain)
    if result.general_rise is not None:
        line += "; on general text {:+.3f} bits per byte ({:+.3f} to {:+.3f})".format(*result.general_rise)
    return line


def _print_effect(out: Path, trained: _Played, untrained: _Played) -> None:
    """Print to stderr how training changed pass@k and the loss on the general text."""
    found = compare_curves(
        *(rows_beside(record_path(out, one.record.suite, one.record.label)) for one in (untrained, trained))
    )
    points = "; ".join(f"k = {k}: {i.value:+.3f} ({i.low:+.3f} to {i.high:+.3f})" for k, i in found.differences.items())
    print(f"pass@k against the untrained model, on {found.num_tasks} tasks: {points}", file=sys.stderr)
    print(f"training {_EFFECTS[found.effect]}", file=sys.stderr, flush=True)
    windows = zip(trained.general, untrained.general, strict=True)
    rises = [a.bits / a.num_bytes - b.bits / b.num_bytes for a, b in windows]
    if len(rises) > 1:
        rise = mean_over_seeds(rises)
        line = f"general text against the untrained model: {rise.value:+.3f} bits per byte "
        line += f"({rise.low:+.3f} to {rise.high:+.3f}, {len(rises)} windows)"
        print(line, file=sys.stderr, flush=True)


_EFFECTS = {
    "expands": "expands what the model can solve: pass@k is higher at the largest k",
    "sharpens": "sharpens the model: pass@1 is higher, and pass@k at the largest k is not shown to be",
    "narrows": "narrows what the model can solve: pass@k is lower at the largest k",
    "undecided": "changes nothing that these tasks can show; use more tasks, or more --tries",
}


def leaderboard(args: argparse.Namespace) -> int:
    """Print a table of all results in a folder, and write them as one HTML page. Returns 0."""
    from etude.dashboard.formatting import money
    from etude.dashboard.leaderboard import term_text, write_leaderboard

    records = read_records(args.folder)
    terms = sorted({name for record, _ in records for name in record.result.terms})
    columns = ("suite", "model", "solve rate", "95 % interval", "pass@k", "$ per solved", "p50 s", "tokens out")
    table = Table(*columns, *terms)
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
            *(term_text(result.terms.get(name)) for name in terms),
        )
    console().print(table)
    seeds = read_seeds(args.folder)
    for recipe in seeds:
        print(f"{recipe.suite}, {seeds_line(recipe)}")
    print(write_leaderboard(args.html or args.folder / "leaderboard.html", records, seeds))
    return 0
