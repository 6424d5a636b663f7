"""How versions, weights, batches, rollouts, evaluations and releases of a run belong together.

The table of versions is that of the store of weights; where that cannot be read, it is the steps of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.dash.overview import evaluations
from etude.dash.runs import Part, ShownRun, part
from etude.dash.versions import VersionFacts, VersionPage
from etude.experience.groups import Row
from etude.experience.ledger_queries import StepCounts
from etude.experience.transitions import State
from etude.records.completion import Version
from etude.releases import Release
from etude.releases.states import shares_now
from etude.signals import Summary

NO_COUNTS: Mapping[int, StepCounts] = {}


@dataclass(frozen=True)
class Traffic:
    """What a release has to do with a version: `role` is "candidate" or "stable". `share` is the percent of users that
    get the version now, of the newest release that concerns it; 0 of the others."""

    release: Release
    role: str
    share: int


@dataclass(frozen=True)
class VersionRow:
    """A version step with all that belongs to it.

    `version`: None if the store of weights cannot be read. `batch`: None if the ledger has no batch of it. `names`: the
    pointers that name it. `rate`: the newest solve rate at this step; None: not evaluated."""

    step: int
    version: VersionFacts | None
    batch: StepCounts | None
    names: Sequence[str] = ()
    is_abandoned: bool = False
    rate: float | None = None
    traffic: Sequence[Traffic] = ()


@dataclass(frozen=True)
class Lineage:
    """A page of the table of versions. `next_page`: the query of the next page; "" at the end. `notes`: sentences on
    parts that cannot be read."""

    rows: Sequence[VersionRow]
    next_page: str
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class VersionDetail:
    """The page of a version step: its versions (more than one if the step was repeated after a restart), its batch, a
    page of its rollouts, its evaluations, and the signals of users about answers of its versions."""

    step: int
    rows: Sequence[VersionRow]
    batch: StepCounts | None
    rollouts: Sequence[tuple[int, Row]]
    before: int | None
    state: State | None
    limit: int
    trace_bytes: int | None
    evaluations: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]
    signals: Part[Sequence[Summary]]
    notes: Sequence[str]


def versions_page(
    run: ShownRun,
    *,
    limit: int,
    after: tuple[str, str] | None,
    before: int | None,
    releases: Part[Sequence[Release]],
) -> Lineage:
    """Return a page of the versions of a run, the newest first.

    `after`: where another page of versions ended (`VersionPage.after`). `before`: only steps below it, where the
    versions come from the ledger."""
    found: Part[VersionPage] = part(lambda: run.versions.page(limit, after)) if before is None else Part(None)
    notes = [found.missing] if found.missing else []
    if found.value is not None:
        page = found.value
        notes += [page.problem] if page.problem else []
        pointers = part(run.versions.pointers).value or {}
        counts = _counts(run, [one.version.step for one in page.versions], notes)
        rates = _rates(run)
        rows = [
            _row(one, counts, pointers, rates, releases.value or (), abandoned=one.name in page.abandoned)
            for one in page.versions
        ]
        query = "" if page.after is None else f"?at={page.after[0]}&of={page.after[1]}"
        return Lineage(rows, query, notes)

    def steps() -> list[int]:
        with run.ledger() as ledger:
            return ledger.last_steps(limit=limit, before=before)

    listed = part(steps)
    notes += [f"the ledger: {listed.missing}"] if listed.missing else []
    numbers = listed.value or []
    counts, rates = _counts(run, numbers, notes), _rates(run)
    rows = [VersionRow(step, None, counts.get(step), rate=rates.get(step)) for step in numbers]
    return Lineage(rows, f"?before={numbers[-1]}" if len(numbers) == limit else "", notes)


def version_page(
    run: ShownRun,
    step: int,
    *,
    limit: int,
    before: int | None,
    state: State | None,
    releases: Part[Sequence[Release]],
    signals: Part[Sequence[Summary]],
) -> VersionDetail:
    """Return the page of a version step with at most `limit` rollouts, those admitted before the position `before`."""
    notes = list[str]()
    stored = part(lambda: run.versions.of_step(step))
    notes += [f"weights: {stored.missing}"] if stored.missing else []
    pointers = part(run.versions.pointers).value or {}
    counts, rates = _counts(run, [step], notes), _rates(run)

    def listed() -> list[tuple[int, Row]]:
        with run.ledger() as ledger:
            return ledger.page(limit=limit, before=before, step=step, state=state)

    rollouts = part(listed)
    with run.frozen() as view:
        results = [one for one in evaluations(view) if one["step"] == step]
        metrics = next((event for event in reversed(view.by_step("rl.step")) if event.get("step") == step), {})
    names = {one.name for one in stored.value or ()}
    return VersionDetail(
        step=step,
        rows=[_row(one, counts, pointers, rates, releases.value or (), abandoned=False) for one in stored.value or ()],
        batch=counts.get(step),
        rollouts=rollouts.value or [],
        before=before,
        state=state,
        limit=limit,
        trace_bytes=part(lambda: run.trace_bytes(step)).value,
        evaluations=results,
        metrics=metrics,
        signals=Part([one for one in signals.value or () if one.version in names], signals.missing),
        notes=notes,
    )


def _row(
    one: VersionFacts,
    counts: Mapping[int, StepCounts],
    pointers: Mapping[str, str],
    rates: Mapping[int, float],
    releases: Sequence[Release],
    *,
    abandoned: bool,
) -> VersionRow:
    return VersionRow(
        step=one.version.step,
        version=one,
        batch=counts.get(one.version.step),
        names=[name for name, version in pointers.items() if version == one.name],
        is_abandoned=abandoned,
        rate=rates.get(one.version.step),
        traffic=traffic_of(one.version, releases),
    )


def traffic_of(version: Version, releases: Sequence[Release]) -> list[Traffic]:
    """Return what releases, the newest first, have to do with a version."""
    share = shares_now(releases[0] if releases else None).get(version, 0)
    concern = [one for one in releases if version in (one.candidate, one.stable)]
    roles = ["candidate" if one.candidate == version else "stable" for one in concern]
    return [Traffic(one, roles[i], 0 if i else share) for i, one in enumerate(concern)]


def _counts(run: ShownRun, steps: Sequence[int], notes: list[str]) -> Mapping[int, StepCounts]:
    def read() -> dict[int, StepCounts]:
        with run.ledger() as ledger:
            return ledger.step_counts(steps)

    found = part(read)
    if found.missing:
        notes.append(f"the ledger: {found.missing}")
    return NO_COUNTS if found.value is None else found.value


def _rates(run: ShownRun) -> dict[int, float]:
    """The newest solve rate by step."""
    with run.frozen() as view:
        return {
            int(one["step"]): one["rate"]
            for one in reversed(evaluations(view))
            if one["step"] is not None and one["rate"] is not None
        }
