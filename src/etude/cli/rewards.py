"""The commands ``etude rewards list``, ``set``, ``recompute`` and ``explain``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from etude.cli.locations import console, open_ledger, open_run
from etude.config import Plugin, build, overridden, to_plain
from etude.errors import Exit, InputError, RunError, nearest
from etude.experience import SCHEMES, Ledger
from etude.experience.admission import LittleSignal
from etude.experience.credit import Credit, better_than
from etude.experience.database import NoLedger
from etude.experience.group_credit import staged_credit
from etude.experience.groups import in_first_stage
from etude.experience.packing import exceeds_lag
from etude.experience.recomputing import RecomputedStep, recompute, recorded_composition
from etude.experience.trace_reader import RecordedRollout, read_outcomes, read_step
from etude.experience.traces import TraceFolder, recorded_steps, trace_path
from etude.loop.config import RunConfig, read_config
from etude.loop.hint_format import hint_format
from etude.loop.locations import traces_folder
from etude.loop.reward_settings import RewardChange, RewardSettings, changing, record_change
from etude.plugins import Kind, make
from etude.production.episodes import SIMULATED, SOURCE
from etude.records import Graded
from etude.records.reward import BUILT_IN, GRADE, K1, Term
from etude.records.summary import oldest_steps, turn_places
from etude.rewards import Composition
from etude.rewards.composition import MOST_CHARGED
from etude.rewards.config import RewardsConfig, TermConfig
from etude.run import RunFolder
from etude.seams import CreditScheme, PairCreditScheme, TurnCreditScheme
from etude.telemetry import read_events

NAMED = 5  # rollouts in the message about a difference


def list_terms(args: argparse.Namespace) -> int:
    """Print the reward terms of a run: settings, versions, share of unknown values, and means by step. Returns 0."""
    run = open_run(args.run)
    settings, folder = RewardSettings(run, read_config(run)), traces_folder(run)
    steps = recorded_steps(folder)
    values: dict[str, dict[int, list[Term]]] = defaultdict(lambda: defaultdict(list))
    weights: dict[int, Mapping[str, float]] = {}
    for step in steps:
        rewards, rollouts = read_outcomes(trace_path(folder, step))
        weights[step] = rewards.get("weights", settings.composition(step).weights)
        for one in rollouts:
            if isinstance(one.outcome, Graded):
                for term in one.outcome.terms:
                    values[term.name][step].append(term)
    last = steps[-max(1, args.steps) :]
    table = Table(
        "term", "kind", "version", "weight", "from step", "when", "unknown", *(f"mean {step}" for step in last)
    )
    configured: dict[str, tuple[RewardChange, TermConfig]] = {}
    removed: dict[str, int] = {}  # the step from which a term is not there any more
    for change in settings.changes:
        names = {own.name for own in change.rewards.terms}
        removed = {name: removed.get(name, change.from_step) for name in configured if name not in names}
        for own in change.rewards.terms:
            if own.name not in configured or configured[own.name][1] != own:
                configured[own.name] = change, own
    for name in dict.fromkeys([*BUILT_IN, *values, *configured]):
        found = [term for some in values[name].values() for term in some]
        if not found and name not in configured:
            continue
        since, now = configured.get(name, (None, None))
        unknown = sum(one.value is None for one in found)
        table.add_row(
            name,
            "grader or host" if now is None else now.kind.path,
            ", ".join(sorted({one.version for one in found})),
            _weight(name, None if now is None else now.weight, weights),
            "" if now is None or since is None else _steps_of(since, now, removed.get(name)),
            "" if now is None else now.when,
            f"{unknown / len(found):.1%}" if found else "",
            *(_mean(values[name][step]) for step in last),
        )
    screen = console()
    screen.print(table)
    for event in _waiting(run):
        reason = next(iter(event["reasons"].values()), "")
        screen.print(f"{event['group_id']} waits for {', '.join(event['terms'])}: {reason}")
        for name in event.get("held", ()):
            screen.print(f"  to go on without it: etude rewards set {run.path} {name}.missing=without")
    return 0


def _steps_of(since: RewardChange, term: TermConfig, removed: int | None) -> str:
    first = str(max(since.from_step, term.from_step))
    return first if removed is None else f"{first}, removed from {removed} on"


def _weight(name: str, configured: float | None, used: Mapping[int, Mapping[str, float]]) -> str:
    """The weights of a term as steps used them: one, or the first and the last."""
    found = [weights[name] for _, weights in sorted(used.items()) if name in weights]
    if not found:
        return "" if configured is None else f"{configured:g}"
    return f"{found[-1]:.4g}" if len(set(found)) == 1 else f"{found[0]:.4g} -> {found[-1]:.4g}"


def _mean(terms: Sequence[Term]) -> str:
    known = [term.value for term in terms if term.value is not None]
    return f"{sum(known) / len(known):.4g}" if known else ""


def _waiting(run: RunFolder) -> Iterator[dict[str, Any]]:
    """The last event of each group that waits for a term now."""
    found = {e["group_id"]: e for e in read_events(run / "events") if e.get("kind") == "rewards.unknown"}
    return (event for event in found.values() if event["state"] == "waiting" and run.holder() is not None)


def set_terms(args: argparse.Namespace) -> int:
    """Change the reward settings of a run, running or stopped, for its later steps. Returns 0.

    Raises `InputError` if the run has these settings already, or for a term that does not exist."""
    run = open_run(args.run)
    with changing(run):
        return _set_terms(run, args)


def _set_terms(run: RunFolder, args: argparse.Namespace) -> int:
    config = read_config(run)
    settings = RewardSettings(run, config)

    def last_step() -> int:
        running = run.holder() is not None  # then the next batch may be formed right now
        try:
            return max(_steps(run), default=0) + running
        except NoLedger:  # RL has not begun
            return 0

    before = settings.at(args.from_step or last_step() + 1)
    rewards = changed_rewards(before, args.change, args.remove)
    if rewards == before:
        hint = f"see: etude rewards list {run.path}"
        raise InputError("the change has no effect", "the run already has these reward settings", hint=hint)
    change = record_change(run, rewards, from_step=args.from_step, last_step=last_step, num_steps=config.rl.steps)
    print(f"from step {change.from_step} on:")
    for term in rewards.terms:
        gate = f", when {term.when}" if term.when else ""
        hints = f", hints {term.hints:g}" if term.hints else ""
        print(f"  {term.name} ({term.kind}): weight {term.weight:g}{gate}{hints}, missing {term.missing}")
    for name in dict.fromkeys(args.remove):
        print(f"  {name}: removed")
    for audit in before.audits:
        if audit not in rewards.audits:
            print(f"  audit {audit.name}: removed, since it names a removed term")
    return 0


def changed_rewards(rewards: RewardsConfig, changes: Sequence[str], removed: Sequence[str] = ()) -> RewardsConfig:
    """Return reward settings with changes such as "brief.weight=0.5" applied, and without the terms in `removed` and
    the audits that name them.

    A change with a new name and a `kind` adds a term. Raises `InputError` for an unknown term without a `kind`, and
    `ConfigError` for an invalid value, or if another setting names a removed term."""
    plain = {one["name"]: one for one in to_plain(rewards)["terms"]}
    for name, new in overridden(changes, plain).items():
        if not isinstance(new, Mapping):
            facts = "it names no setting of the term"
            raise InputError(f"{name}={new!r} is invalid", facts, hint=f"write e.g. {name}.weight=0.5")
        if name not in plain and "kind" not in new:
            hint = f"{_terms_like(name, plain)}; a new term needs its class: {name}.kind=my_package.module:Name"
            raise InputError(f"there is no reward term {name!r}", hint=hint)
        plain[name] = {"name": name, **new}
    for name in dict.fromkeys(removed):
        if plain.pop(name, None) is None:
            raise InputError(f"there is no reward term {name!r} to remove", hint=_terms_like(name, plain))
    audits = [to_plain(one) for one in rewards.audits if not {one.term, one.by} & set(removed)]
    return build(RewardsConfig, {"terms": list(plain.values()), "audits": audits}, "rewards")


def _terms_like(name: str, terms: Collection[str]) -> str:
    return nearest(name, terms) if terms else "the run has no terms but those of the graders"


def _steps(run: RunFolder) -> list[int]:
    ledger = open_ledger(run)
    try:
        return ledger.steps()
    finally:
        ledger.close()


def recompute_run(args: argparse.Namespace) -> int:
    """Compute rewards, advantages and batches of a run again from its stored terms, and compare them.

    Returns exit code 1 if they differ from the recorded ones. With `--set` it computes with changed settings, prints
    the rewards and advantages that would differ, and returns 0. Raises `RunError` if the run has no recorded step."""
    run = open_run(args.run)
    config, folder = read_config(run), traces_folder(run)
    settings, experience = RewardSettings(run, config), config.experience
    changes = overridden(args.set)
    _check_numbers(changes)
    full = experience.signal_groups if experience.little_signal is LittleSignal.SCALE else 0
    done = list[RecomputedStep]()
    steps = recorded_steps(folder) if args.step is None else [args.step]
    if not steps:
        raise RunError(
            f"{run.path} has no recorded step", hint="RL has not formed a batch yet; wait for its first step"
        )
    of_production, erased = list[int](), list[int]()
    for step in steps:
        recorded = read_step(trace_path(folder, step))
        if any(tree.rollout.group_id.startswith(SOURCE) for tree in recorded.trees):
            of_production.append(step)
            continue
        if recorded.erased:
            erased.append(step)
            continue
        composition = recorded_composition(recorded.rewards, settings.composition(step))
        known = {
            term.name
            for tree in recorded.trees
            if isinstance(tree.rollout.outcome, Graded)
            for term in tree.rollout.outcome.terms
        }
        for name in [name for name, value in changes.items() if isinstance(value, Mapping) and name not in known]:
            _report_steps_of(name, folder, step)
        how, scheme = _changed(composition, config, changes, known, step)
        hints = hint_format(run, config) if how.hints else None
        done.append(recompute(recorded, how, scheme, max_lag=experience.max_lag, full_groups=full, hint_format=hints))
    if of_production:
        listed = ", ".join(map(str, of_production))
        print(f"left out: steps of production, which have credit rules of their own: {listed}", file=sys.stderr)
    if erased:
        listed = ", ".join(map(str, erased))
        print(f"left out: steps from which rollouts were erased: {listed}", file=sys.stderr)
    equal = all(one.equal for one in done)
    if args.json:
        print(json.dumps({"run": str(run.path), "equal": equal, "steps": [_plain(one) for one in done]}, indent=2))
    else:
        _print_recomputed(done, others=bool(changes))
    return Exit.DONE if equal or changes else Exit.FAILED


def _scheme(config: RunConfig) -> CreditScheme:
    credit = config.experience.credit
    found: CreditScheme = make(Kind.CREDIT, credit) if isinstance(credit, Plugin) else SCHEMES[credit]
    return found


def _check_numbers(changes: Mapping[str, Any]) -> None:
    """Raise `InputError` for a weight that is not a finite number."""
    for name, value in changes.items():
        for key in ("weight", "hints"):
            if isinstance(value, Mapping) and key in value:
                _number(name, key, value[key])


def _report_steps_of(name: str, folder: TraceFolder, step: int) -> None:
    """Raise `InputError` if other recorded steps have the term `name`, which `step` does not have."""
    found = [
        one
        for one in recorded_steps(folder)
        if any(
            name in rollout.outcome.values
            for rollout in read_outcomes(trace_path(folder, one))[1]
            if isinstance(rollout.outcome, Graded) and not rollout.group_id.startswith(SOURCE)
        )
    ]
    if found:
        raise InputError(
            f"step {step} cannot be recomputed with --set {name}",
            f"it has no values of term {name!r}: the first step with values is {found[0]}, the last one {found[-1]}",
            hint=f"recompute a step with values: --step {found[0]}",
        )


def _changed(
    composition: Composition, config: RunConfig, changes: Mapping[str, Any], known: set[str], step: int
) -> tuple[Composition, CreditScheme]:
    """Return how a step is composed and credited with changes such as {"brief": {"weight": 0.5}, "kl": 0.1}."""
    scheme, plain = _scheme(config), dict[str, Any]()
    weights, when, hints = dict(composition.weights), dict(composition.when), dict(composition.hints)
    for name, value in changes.items():
        if name == "credit":
            if value not in list(Credit):
                raise InputError(f"--set credit: there is no credit scheme {value!r}", hint=nearest(str(value), Credit))
            scheme = SCHEMES[Credit(value)]
        elif name == "kl":
            plain[name] = _penalty(value, known)
        elif name in ("require_submit", "quarantine") and isinstance(value, bool):
            plain[name] = value
        elif name in known - {GRADE} and isinstance(value, Mapping) and value.keys() <= {"weight", "when", "hints"}:
            if "weight" in value:
                weights[name] = _number(name, "weight", value["weight"])
            if "when" in value:
                when[name] = str(value["when"])
            if "hints" in value:
                hints[name] = _number(name, "hints", value["hints"])
        else:
            others = [*sorted(known - {GRADE}), "kl", "require_submit", "quarantine", "credit"]
            close = "" if name in others else f"{nearest(name, others)}; "
            hint = f"{close}write e.g. --set NAME.weight=0.5, --set NAME.when=tests, --set quarantine=true"
            raise InputError(
                f"--set {name}: {value!r} cannot be recomputed",
                f"{name!r} is neither a term that step {step} has stored nor a setting that can be changed afterwards, "
                "or has no such value",
                hint=hint,
            )
    when = {name: gate for name, gate in when.items() if gate}
    for name in when.keys() & changes.keys():
        _check_gate(name, when, known)
    weights = {name: weight for name, weight in weights.items() if weight}
    hints = {name: weight for name, weight in hints.items() if weight}
    return replace(composition, weights=weights, when=when, hints=hints, **plain), scheme


def _penalty(value: object, known: set[str]) -> float:
    """Return the weight of the KL penalty. Raises `InputError`."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0.0:
        raise InputError(f"--set kl = {value!r} is not a number from 0 on", hint="write e.g. --set kl=0.1")
    if value and K1 not in known:
        facts = "it needs the log-probabilities of the starting checkpoint, and the run had kl = 0, so it has none"
        raise InputError("the KL penalty cannot be recomputed", facts, hint="leave out --set kl")
    return float(value)


def _check_gate(name: str, when: Mapping[str, str], known: set[str]) -> None:
    """Raise `InputError` for a gate that no rollout of the step has, and for gates that form a circle."""
    at, passed = name, list[str]()
    while (gate := when.get(at)) is not None and at not in passed:
        if gate not in known:
            facts = f"the step has no stored term {gate!r}"
            raise InputError(f"--set {name}.when = {gate!r} cannot be recomputed", facts, hint=nearest(gate, known))
        passed.append(at)
        at = gate
    if at in passed:
        facts = f"the gates form a circle: {' -> '.join([*passed, at])}"
        raise InputError(f"--set {name}.when = {when[name]!r} cannot be recomputed", facts, hint="use another gate")


def _number(name: str, key: str, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    hint = f"write e.g. --set {name}.{key}=0.5"
    raise InputError(f"--set {name}.{key} = {value!r} is not a finite number", hint=hint)


def _plain(one: RecomputedStep) -> dict[str, Any]:
    return {
        "step": one.step,
        "equal": one.equal,
        "digest": one.digest,
        "recorded_digest": one.recorded_digest,
        "rollouts": [
            {
                "rollout_id": rollout.rollout_id,
                "recorded": rollout.recorded,
                "reward": rollout.reward.value,
                "advantage": rollout.advantage,
                "missing": rollout.reward.missing,
            }
            for rollout in one.rollouts
        ],
    }


def _print_recomputed(done: Sequence[RecomputedStep], *, others: bool) -> None:
    screen = console()
    table = Table(
        "step", "rollouts", "reward mean, recorded", "recomputed", "other rewards", "groups with a signal", "batch"
    )
    for one in done:
        recorded = [rollout.recorded for rollout in one.rollouts if rollout.recorded is not None]
        again = [rollout.reward.value for rollout in one.rollouts]
        signal = {rollout.group_id for rollout in one.rollouts if rollout.trained_with is not None}
        table.add_row(
            str(one.step),
            str(len(one.rollouts)),
            f"{sum(recorded) / max(1, len(recorded)):.4g}",
            f"{sum(again) / max(1, len(again)):.4g}",
            str(len(one.different)),
            str(len(signal)),
            "equal" if one.equal else f"differs: {one.digest[:12]}",
        )
    screen.print(table)
    if all(one.equal for one in done):
        screen.print(f"equal bit for bit: rewards, advantages and batches of {len(done)} steps")
        return
    different = [one for one in done if not one.equal]
    what = "would have been other ones" if others else "differ from what was recorded"
    screen.print(f"{len(different)} of {len(done)} steps {what}")
    for rollout in [rollout for one in different for rollout in one.different][:NAMED]:
        screen.print(
            f"  {rollout.rollout_id}: reward {rollout.recorded!r} recorded, {rollout.reward.value!r} recomputed"
        )


def explain(args: argparse.Namespace) -> int:
    """Print how the reward and the advantage of a rollout were computed: each term, gate and weight. Returns 0.

    Raises `InputError` for a rollout that was not graded."""
    run = open_run(args.run)
    config, ledger = read_config(run), open_ledger(run)
    try:
        row = ledger.row(args.rollout_id)
        step, siblings, composition, late = _siblings(run, config, ledger, row.group_id, row.step)
    finally:
        ledger.close()
    screen = console()
    outcome = next((one.outcome for one in siblings if one.rollout_id == args.rollout_id), None)
    if not isinstance(outcome, Graded):
        facts = f"it is {row.state}" + (f": {outcome.reason}" if outcome else "")
        raise InputError(f"rollout {args.rollout_id} has no reward", facts, hint="give the id of a graded rollout")
    judged = [one for one in siblings if isinstance(one.outcome, Graded)]
    scheme, ids = _scheme(config), [one.rollout_id for one in judged]
    first = in_first_stage(ids, config.experience.min_group_size)
    graded = [one.outcome for one in judged if isinstance(one.outcome, Graded)]
    places, forks = [one.places for one in judged], [one.fork for one in judged]
    given = staged_credit(graded, places, first, composition, scheme, forks)
    credit = dict(zip(ids, given, strict=True))
    pairs = dict(zip(ids, better_than([one.reward for one in given], ids, scheme, without=late), strict=True))
    reward, advantage, by_turn = credit[args.rollout_id]
    early = [i for i, is_first in zip(ids, first, strict=True) if is_first]
    compared = early if args.rollout_id in early else ids  # as `staged_credit` does
    table = Table("term", "value", "gate", "weight", "adds", "version", "evidence")
    named = {term.name: term for term in outcome.terms}
    counted = composition.counted(named, reward.missing)
    for name in dict.fromkeys([*named, *composition.weights]):
        term, weight = named.get(name), 1.0 if name == GRADE else composition.weights.get(name)
        value, gate = (None if term is None else term.value), composition.when.get(name)
        is_open = composition.counts(name, named)
        added = value if name == GRADE else counted[name] * value if name in counted and value is not None else None
        table.add_row(
            name,
            "unknown" if value is None else f"{value:g}",
            "" if gate is None else f"{gate}: {'unknown' if is_open is None else 'open' if is_open else 'closed'}",
            "" if weight is None else f"{weight:.6g}",
            "" if added is None else f"{added:+.6g}",
            "" if term is None else term.version,
            "" if term is None else term.evidence,
        )
    screen.print(f"{args.rollout_id}, {'step ' + str(step) if step else 'not in a batch yet'}")
    screen.print(table)
    for name in reward.missing:
        screen.print(
            f"{name} counts for no sibling: it is not known, of one version, for every sibling whose gate is open"
        )
    if reduced := [name for name, weight in counted.items() if weight != composition.weights[name]]:
        screen.print(
            f"charges of {', '.join(reduced)} are reduced: together they take at most {MOST_CHARGED:g} of a grade"
        )
    removed = f", removed by {', '.join(reward.gates)}" if reward.gates else ""
    penalty = f"; minus the KL penalty {composition.kl:g} times k1" if composition.kl else ""
    screen.print(f"reward {reward.value:.6g} ({reward.raw:.6g} before a penalty{removed}{penalty}): {reward.reason}")
    for turn, part in reward.turns:
        screen.print(f"  of it turn {turn}: {part:+.6g}")
    for hint in composition.hints_of(outcome):
        screen.print(f"  hint for turn {hint.turn}, weight {hint.weight:g}: {hint.text}", markup=False)
    others = ", ".join(f"{i} {credit[i].reward.value:.4g}" for i in compared)
    screen.print(f"advantage {advantage:+.6g} by {scheme.name} among the rewards {others}")
    for turn, value in enumerate(by_turn):
        screen.print(f"  turn {turn}: advantage {value:+.6g}")
    if isinstance(scheme, PairCreditScheme):
        over = [i for i in ids if args.rollout_id in pairs[i]]
        screen.print(
            f"preferred to {', '.join(pairs[args.rollout_id]) or 'none'}; {', '.join(over) or 'none'} preferred to it"
        )
        if args.rollout_id in late:
            screen.print("it is in no pair: some of its tokens are older than experience.max_lag allows")
    return 0


def _siblings(
    run: RunFolder, config: RunConfig, ledger: Ledger, group_id: str, step: int | None
) -> tuple[int | None, list[RecordedRollout], Composition, list[str]]:
    """Return the step of a group, its rollouts with their terms and turns, how they are composed, and the ids of those
    that are too old for a preference pair."""
    settings, max_lag = RewardSettings(run, config), config.experience.max_lag
    if step is not None:
        path = trace_path(traces_folder(run), step)
        rewards, rollouts = read_outcomes(path)
        simulated = rewards.get(SIMULATED) if not group_id.startswith(SOURCE) else None
        composition = recorded_composition(simulated or rewards, settings.composition(step))
        siblings, late = [one for one in rollouts if one.group_id == group_id], list[str]()
        if isinstance(_scheme(config), TurnCreditScheme | PairCreditScheme):
            traces = {one.rollout.rollout_id: one.trace for one in read_step(path).trees}
            siblings = [replace(one, places=turn_places(traces[one.rollout_id])) for one in siblings]
            ids = [one.rollout_id for one in siblings]
            late = [one for one in ids if exceeds_lag(oldest_steps(traces[one]), step - 1, max_lag)]
        return step, siblings, composition, late
    next_step = max(ledger.steps(), default=0) + 1
    settings.recall(ledger, next_step)
    found = [
        RecordedRollout(
            one.rollout_id, group_id, None, None, None, None, one.outcome,
            places=one.summary.places if one.summary is not None else (),
            fork=one.summary.fork if one.summary is not None else None,
        )
        for one in ledger.group(group_id).finished
    ]  # fmt: skip
    return None, found, settings.composition(next_step), []
