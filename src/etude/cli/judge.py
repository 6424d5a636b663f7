"""The commands ``etude judge calibrate``, ``labels``, ``tune`` and ``accounts``."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from etude.cli.locations import console, open_ledger, open_run
from etude.config import read
from etude.errors import Exit, InputError, TaskError, nearest
from etude.harness import ChatFormat
from etude.loop.limits import build_config
from etude.loop.locations import rollout_files
from etude.plugins import Kind, make
from etude.records import Graded
from etude.rewards.config import RewardsConfig
from etude.rewards.judges.agreement import Estimate
from etude.rewards.judges.calibration import (
    AspectReport,
    Half,
    Label,
    as_json,
    calibrate,
    distance,
    order_of,
    read_labels,
)
from etude.rewards.judges.evidence import Evidence
from etude.rewards.judges.store import Account, JudgeStore
from etude.rewards.judges.terms import GroupJudgeTerm, JudgeTerm, Mode
from etude.rewards.judges.tuning import check_sections, exchanges, label_of, row_of
from etude.rewards.judges.verdicts import Form

FEW_LABELS = 30
"""With fewer labels in a half, the report on a judge has a remark."""
MANY_TIMES = 2.0
"""How often a judge may be shown a label in tuning before a hint is printed. After 2.6 times the judge of
`benchmarks.rewards.own_judge` was overconfident."""


def calibrate_judge(args: argparse.Namespace) -> int:
    """Ask a judge of a config to score labelled texts or rollouts, and print how well it agrees with the labels.

    Returns 0. Raises `InputError` for an unknown judge, and for a label of a rollout that is not stored."""
    rewards = build_config(read(args.config, args.set)).rewards
    term = _judge(rewards, args.term)
    auditor = _judge(rewards, args.auditor) if args.auditor else None
    half = Half(args.half)
    every = read_labels(args.labels, term.judge.rubric, _evidence_of(args.run, term))
    labels = [label for label in every if label.half is half]
    reports, far, order = asyncio.run(_measure(term, auditor, labels))
    useful = any(one.low > 0.5 for one in order.values())
    tolerance = max(0.001, far.high) if far is not None and useful else None
    screen = console()
    screen.print(
        f"judge {args.term}, {term.mode}, version {term.version}: {len(labels)} of {len(every)} labels, half {half}"
    )
    table = Table("aspect", "labels", "unknown", "kappa", "AUC", "exact", "length", "first", "biases")
    for one in reports:
        table.add_row(*_row(one))
    screen.print(table)
    for remark in _remarks(reports):
        screen.print(f"remark: {remark}", markup=False)
    if half is Half.TUNE:
        screen.print("these labels are for tuning the rubric: report the numbers of --half report")
    if far is not None:
        screen.print(f"distance to {args.auditor}: {_shown(far)}")
        if tolerance is None:
            auc = "; ".join(f"AUC of {name} {_shown(one)}" for name, one in order.items())
            why = f"{args.auditor} does not order these works better than chance would ({auc})"
            screen.print(f"no tolerance for [[rewards.audits]]: {why}", markup=False)
        else:
            screen.print(f"[[rewards.audits]]: tolerance = {tolerance:.3f}", markup=False)
    if args.json is not None:
        facts = {"term": args.term, "version": term.version, "half": str(half), "auditor": args.auditor}
        args.json.write_text(as_json(reports, **facts, tolerance=tolerance))
    return Exit.DONE


async def _measure(
    term: JudgeTerm | GroupJudgeTerm, auditor: JudgeTerm | GroupJudgeTerm | None, labels: list[Label]
) -> tuple[list[AspectReport], Estimate | None, dict[str, Estimate]]:
    reports = await calibrate(term.judge, labels, term.mode)
    if auditor is None:
        return reports, None, {}
    works: dict[str, dict[str, Evidence]] = {}
    for label in labels:
        if label.other is None:
            works.setdefault(label.cluster, {})[label.work.digest] = label.work
    fewest = 1 if term.mode is Mode.POINTWISE else 2
    groups = [[*some.values()] for some in works.values() if len(some) >= fewest]
    return reports, await distance(term, auditor, groups), await order_of(auditor, labels, groups)


def _remarks(reports: Sequence[AspectReport]) -> Iterator[str]:
    for one in reports:
        if one.num_labels < FEW_LABELS:
            count = f"{one.num_labels} labels of {one.aspect} in this half have a verdict"
            yield f"{count}, fewer than {FEW_LABELS}: the intervals are wide; add labels"
        if one.num_unknown:
            of = f"{one.num_unknown} of {one.num_labels + one.num_unknown} verdicts on {one.aspect}"
            yield f"{of} are unknown, most often: {one.why_unknown}"


def _judge(rewards: RewardsConfig, name: str) -> JudgeTerm | GroupJudgeTerm:
    terms = {term.name: term for term in rewards.terms}
    if name not in terms:
        hint = nearest(name, terms) if terms else "write [[rewards.terms]] with kind = {kind = 'judge', ...}"
        raise InputError(f"the config has no reward term {name!r}", hint=hint)
    found = make(Kind.REWARD, terms[name].kind, where=f"rewards.terms: {name}")
    if not isinstance(found, JudgeTerm | GroupJudgeTerm):
        raise InputError(
            f"the reward term {name!r} is not a judge",
            f"its kind is {terms[name].kind}",
            hint="give the name of a term whose kind is a judge",
        )
    return found


def _evidence_of(path: Path | None, term: JudgeTerm | GroupJudgeTerm) -> Callable[[str], Evidence]:
    """Return a function that makes evidence of a stored rollout of a run, by its id, as the run's term does."""

    def evidence(rollout_id: str) -> Evidence:
        if path is None:
            facts = "no run is given from which it could be read"
            raise InputError(f"a label refers to rollout {rollout_id}", facts, hint="add --run RUN")
        run = open_run(path)
        ledger = open_ledger(run)
        try:
            found = ledger.finished(rollout_id)
        finally:
            ledger.close()
        if found is None or found.summary is None or found.summary.stored is None:
            hint = "label rollouts of the last steps, or write the text of the rollout into its label"
            raise InputError(f"rollout {rollout_id} is not stored in {run.path}", hint=hint)
        if not isinstance(found.outcome, Graded):
            facts = f"it is invalid: {found.outcome.reason}"
            raise InputError(f"rollout {rollout_id} was not graded", facts, hint="remove its label")
        term.readable = ChatFormat.load(run / "tokenizer").readable
        return term.evidence(rollout_files(run).read(found.summary), found.outcome)

    return evidence


def write_labels(args: argparse.Namespace) -> int:
    """Write a file of labels from the graded rollouts of a run. The grade of each rollout is its label.

    Each line also has the text that the judge reads of the rollout. Returns 0. Raises `InputError` for a rubric with
    several aspects, and for a run without stored, graded rollouts."""
    term = _judge(build_config(read(args.config, args.set)).rewards, args.term)
    check_sections(term.sections)
    if len(term.judge.rubric.aspects) > 1:
        facts = f"the rubric has {len(term.judge.rubric.aspects)} aspects, and a rollout has only one grade"
        hint = "give the name of a judge whose rubric has one aspect"
        raise InputError("labels from grades need a rubric with one aspect", facts, hint=hint)
    [aspect] = term.judge.rubric.aspects
    run = open_run(args.run)
    ledger, files = open_ledger(run), rollout_files(run)
    term.readable = ChatFormat.load(run / "tokenizer").readable
    rows, num_high = list[str](), 0
    try:
        cheats = ledger.quarantined()
        for summary in ledger.stored_summaries():
            found = ledger.finished(summary.rollout_id)
            if found is None or not isinstance(found.outcome, Graded) or summary.rollout_id in cheats:
                continue
            work = term.evidence(files.read(summary), found.outcome)
            label = label_of(aspect, found.outcome)
            rows.append(json.dumps(row_of(aspect, work, label, group=summary.problem)))
            num_high += label == aspect.highest
    finally:
        ledger.close()
    if not rows:
        hint = "raise rl.checkpoint_every: a run keeps the rollouts since its second newest checkpoint"
        raise InputError(f"{run.path} has no stored rollouts that were graded", hint=hint)
    args.out.write_text("".join(f"{row}\n" for row in rows))
    console().print(f"{len(rows)} rollouts of {run.path}, {num_high} with label {aspect.highest}: {args.out}")
    return Exit.DONE


def tune(args: argparse.Namespace) -> int:
    """Train a checkpoint as a judge: to answer the questions of a rubric with the scores of labelled examples.

    It trains on the half of the labels that is for tuning, and prints how often it shows each. Returns 0. Raises
    `InputError` for a judge whose settings are not form = 'token' and tuned = true, for a score of several tokens, for
    a question that is too long for the model, or for a folder without a checkpoint."""
    from etude.loop.corpus import encoded, num_tokens
    from etude.models.config import ModelConfig
    from etude.training import mid_train, write_corpus
    from etude.training.mid_training import default_ranks

    config = build_config(read(args.config, args.set))
    term = _judge(config.rewards, args.term)
    judge = term.judge
    if judge.form is not Form.TOKEN or not judge.tuned:
        facts = f"form is '{judge.form}', and tuned is {str(judge.tuned).lower()}"
        hint = "write form = 'token' and tuned = true"
        raise InputError(f"the settings of judge {args.term!r} are not those of a tuned judge", facts, hint=hint)
    check_sections(term.sections)
    labels = read_labels(args.labels, judge.rubric, _evidence_of(args.run, term))
    own = [label for label in labels if label.half is Half.TUNE]
    chat, model = ChatFormat.load(args.start), ModelConfig.from_hf(_hf_config(args.start))
    for aspect in judge.rubric.aspects:
        for score in map(str, range(aspect.lowest, aspect.highest + 1)):
            if len(chat.encode(score)) != 1:
                facts = f"it has {len(chat.encode(score))} tokens in the tokeniser of {args.start}"
                hint = "use a scale in the rubric whose scores are one token each, or another checkpoint"
                raise InputError(f"score {score!r} of aspect {aspect.name!r} is not one token", facts, hint=hint)
    settings = replace(config.mid_training, corpus=None, phases=())  # those are of a run; a judge learns its labels
    most = settings.longest(model.context_tokens)
    texts = exchanges(judge.rubric, own, max_chars=judge.limits.max_chars, seed=config.seed, hide=judge.hide)
    try:
        documents = [encoded(chat, text, most=most) for text in texts]
    except TaskError as error:
        hint = f"lower evidence_chars of the term {args.term} (it is {judge.limits.max_chars}), or show less: evidence"
        raise InputError("the question about a label is too long for the model", error.facts, hint=hint) from None
    corpus = args.out.absolute().with_name(f"{args.out.name}.corpus")
    write_corpus(corpus, documents)
    times = settings.num_tokens / sum(map(num_tokens, documents))
    labelled = f"{len(own)} of {len(labels)} labels, each {times:.1f} times ({settings.num_tokens:,} tokens)"
    console().print(f"tuning {args.start} with {labelled}")
    if times > MANY_TIMES:
        console().print("hint: a small model learns labels by heart: add labels, or lower mid_training.num_tokens")
    done = mid_train(
        settings,
        corpus,
        args.out,
        model=model,
        ranks=default_ranks(config.learner),
        seed=config.seed,
        start=args.start,
        assets=args.start,
        learner=config.learner,
        numerics=config.numerics,
    )
    shutil.rmtree(corpus)
    console().print(f"{args.out}: {done.num_steps} steps, loss {done.loss:.3f} nats per token of an answer")
    return Exit.DONE


def _hf_config(checkpoint: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((checkpoint / "config.json").read_bytes()))
    except (OSError, ValueError) as error:
        hint = "give a Hugging Face directory, such as runs/NAME/checkpoints/mid"
        raise InputError(f"{checkpoint} is not a checkpoint", str(error), hint=hint) from None


def _row(one: AspectReport) -> list[str]:
    numbers = [_shown(one.kappa), _shown(one.auc), f"{one.exact:.0%}", _shown(one.length), _shown(one.prefers_first)]
    return [one.aspect, str(one.num_labels), str(one.num_unknown), *numbers, "; ".join(one.biases) or "none found"]


def _shown(one: Estimate | None) -> str:
    return "" if one is None else f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


def _spent(one: Account) -> str:
    """Show the dollars that an account has spent. The cost of some or all calls may be unknown: that is not 0."""
    spent = f"{max(0.0, one.dollars - one.reserved):.4f}"
    if not one.unpriced:
        return spent
    return "unknown" if float(spent) == 0.0 else f"at least {spent}"


def accounts(args: argparse.Namespace) -> int:
    """Print what each judge in a cache file has answered and cost: model, counts of questions, dollars. Returns 0.

    Dollars that are only reserved, for calls in flight and for calls whose cost is unknown, have their own column.
    Raises `InputError` if the path is not a file, and `StoreError` if the file cannot be read."""
    if not args.cache.is_file():
        facts = "it is a folder" if args.cache.is_dir() else "it does not exist"
        raise InputError(f"{args.cache} is not a file of verdicts", facts, hint="give the judge's setting `cache`")
    store = JudgeStore(args.cache)
    table = Table("judge", "model", "answered", "cached", "unknown", "dollars", "reserved", "cost unknown")
    table.add_column("last unknown")
    for one in store.accounts():
        counts = (str(one.calls), str(one.cached), str(one.unknown), _spent(one), f"{one.reserved:.4f}")
        table.add_row(one.judge, one.model, *counts, str(one.unpriced), one.last_unknown)
    store.close()
    console().print(table)
    return Exit.DONE
