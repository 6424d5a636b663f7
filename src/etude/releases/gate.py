"""The gate of a release: evaluations of the candidate are compared with those of the stable version.

A candidate passes if for each suite the whole confidence interval of the difference of solve rates is above minus its
margin (non-inferiority), the suite's own gates are passed, and its tasks cost not much more; and if engine and learner
compute the same, where parity is required. A number that is unknown passes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from etude.errors import InputError
from etude.evals import Comparison, EvalRow, compare
from etude.evals.records import EvalRecord, read_record, record_path, rows_beside
from etude.records.completion import Version
from etude.releases.settings import ReleaseSettings, SuiteGate


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a candidate with the stable version on one suite.

    `value`, `low`, `high`: solve rate of the candidate minus that of the stable version, with its 95 % interval.
    `margin`: by how much the solve rate may be lower. `cost_rise`: by how much a task costs more, as a fraction (0.1:
    10 per cent); None: unknown."""

    suite: str
    digest: str
    value: float
    low: float
    high: float
    margin: float
    cost_rise: float | None


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gate for two versions. `failures`: the reasons why the candidate does not pass; empty if it
    passes."""

    candidate: str
    stable: str
    suites: tuple[SuiteReport, ...]
    failures: tuple[str, ...]


class Played(msgspec.Struct, frozen=True):
    """The result of a suite on one version (`record`), and its rollouts (`rows`)."""

    record: EvalRecord
    rows: Sequence[EvalRow]


def read_played(folder: Path, suite: str, label: str) -> Played:
    """Read the result of a suite on the model `label` from a folder that `etude eval` wrote.

    Raises `StoreError` if it is missing or damaged."""
    path = record_path(folder, suite, label)
    return Played(read_record(path), rows_beside(path))


def loop_evals(releases: Path) -> Path:
    """Return the folder with the gate's results of `etude learn --releases`: `<name>.evals` beside that file."""
    return releases.with_name(f"{releases.name}.evals")


def check_gate(
    settings: ReleaseSettings,
    candidate: Version,
    stable: Version,
    played: Mapping[str, tuple[Played, Played]],
    *,
    parity: str | None = None,
) -> GateResult:
    """Compare a candidate with the stable version on every suite of a release's gate.

    `played` maps the name of each suite in the settings to (result of the candidate, result of the stable version).
    `parity`: the verdict of `etude parity` on the candidate; None: unknown. Raises `InputError` where a result is
    missing, unknown, or of other versions or tasks, so that the candidate is neither passed nor refused."""
    reports, failures, unknown = list[SuiteReport](), list[str](), list[str]()
    for gate in settings.gate:
        if gate.suite not in played:
            unknown.append(f"{gate.name}: not evaluated")
            continue
        new, old = played[gate.suite]
        wrong = not_comparable(new.record, old.record, candidate, stable)
        if wrong:
            unknown.append(f"{gate.name}: {wrong}")
            continue
        rise = cost_rise(new.record, old.record)
        if gate.cost_rise is not None and rise is None:
            unknown.append(f"{gate.name}: the cost per task is unknown (evaluate both versions with --prices FILE)")
            continue
        found = compare(old.rows, new.rows, names=("stable", "candidate"))
        reports.append(_report(gate, new.record, found, rise))
        failures += _failures(gate, new.record, found, rise)
    if settings.parity and parity is None:
        unknown.append("parity: unknown (give the output of etude parity --json with --parity FILE)")
    elif settings.parity and parity not in ("equal", "near"):
        failures.append(f"parity: {parity}, must be equal or near")
    if unknown:
        hint = "complete the results, then call it again: the release is as before"
        raise InputError("the gate cannot be decided", "; ".join(unknown), hint=hint)
    return GateResult(candidate=str(candidate), stable=str(stable), suites=tuple(reports), failures=tuple(failures))


def read_parity(path: Path) -> str:
    """Return the verdict in the output of `etude parity --json`. Raises `InputError` if the file is not such an
    output."""
    try:
        verdict = json.loads(path.read_bytes())["verdict"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "create it with: etude parity CANDIDATE --json > FILE"
        raise InputError(f"{path} is not a result of etude parity", str(error), hint=hint) from None
    return str(verdict)


def not_comparable(new: EvalRecord, old: EvalRecord, candidate: Version, stable: Version) -> str:
    """Return why the results `new` and `old` cannot decide between `candidate` and `stable`; "" if they can."""
    if is_of(new, stable) and is_of(old, candidate):
        return "the results of the candidate and of the stable version are exchanged"
    for record, version, name in ((new, candidate, "candidate"), (old, stable, "stable version")):
        if not is_of(record, version):
            return f"the result of the {name} is that of {record.version or 'an unknown version'}"
    if new.suite_digest != old.suite_digest:
        return "the two versions were not evaluated on the same tasks with the same settings"
    if new.prompted != old.prompted:
        return "one of the two versions was evaluated with the suite's prompt"
    return ""


def is_of(record: EvalRecord, version: Version) -> bool:
    """Return whether `record` is of the weights of `version`: its step and digest are the same.

    The incarnation, which is new at each start of a learner, may differ."""
    step, _, digest = str(version).split("-")
    return record.version is not None and record.version.split("-")[::2] == [step, digest]


def cost_rise(new: EvalRecord, old: EvalRecord) -> float | None:
    """Return how much more a task of `new` costs than one of `old`, as a fraction (.1: 10 percent).

    None: a cost is unknown, `old` cost nothing, or one of them has no tasks."""
    a, b = (one.result.dollars for one in (new, old))
    tasks = [one.result.num_tasks for one in (new, old)]
    if a is None or not b or not all(tasks):
        return None
    return (a / tasks[0]) / (b / tasks[1]) - 1.0


def _report(gate: SuiteGate, record: EvalRecord, found: Comparison, rise: float | None) -> SuiteReport:
    between = found.decisive
    return SuiteReport(
        suite=gate.name,
        digest=record.suite_digest,
        value=between.value,
        low=between.low,
        high=between.high,
        margin=gate.margin,
        cost_rise=rise,
    )


def _failures(gate: SuiteGate, record: EvalRecord, found: Comparison, rise: float | None) -> list[str]:
    failures = [f"{gate.name}: {report.failure}" for report in record.gates if report.failure]
    between = found.decisive
    if not found.a.num_tasks or not found.b.num_tasks:
        failures.append(f"{gate.name}: no valid rollout")
    elif between.low <= -gate.margin:
        shown = f"{between.value:+.3f} ({between.low:+.3f} to {between.high:+.3f})"
        failures.append(f"{gate.name}: solve rate {shown} is not shown to be above -{gate.margin:g}")
    if gate.cost_rise is not None:
        assert rise is not None, "checked before"
        if rise > gate.cost_rise:
            failures.append(f"{gate.name}: cost per task {rise:+.1%}, must be at most {gate.cost_rise:+.1%}")
    return failures
