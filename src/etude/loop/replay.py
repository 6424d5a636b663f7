"""Repeats a recorded training step from disk and compares the weights with those that the run published (`etude
replay`).

Loads the nearest learner checkpoint before the step, trains on every recorded batch up to the step with the run's own
settings, and compares each version, tensor by tensor, with the digests in its manifest. `history` decides which step a
number refers to. It only reads the run folder, also of a live run. Equality is guaranteed when the software and
hardware are the same (`learner.computed_by`); otherwise the step is repeated all the same and the differences are
returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.config import build, to_plain
from etude.errors import CheckpointError, LedgerError, RunError
from etude.experience.traces import trace_path
from etude.loop.config import check_config_unchanged, read_config
from etude.loop.history import History
from etude.loop.learner import NUM_THREADS, PREFIXES, SHARED, computed_by, make_learner, reference_policy
from etude.loop.locations import read_ledger, traces_folder
from etude.loop.retention import replayable_after
from etude.records import Version
from etude.run import RunFolder
from etude.training import LearnerConfig, TorchLearner
from etude.weights.chain.manifest import table, table_digest

TIMED = {"cpu_s", "fresh_ratio_max"}  # metrics that depend on timing; the second on when a publish ended


@dataclass(frozen=True)
class ReplayedStep:
    """The result of one repeated step, compared with what the run recorded.

    `found` is the digest of the resulting weights, and `published` the one that the run published (None if that is
    lost). `different` names the tensors whose bytes differ. `numbers` has (recorded value or None, replayed value) by
    metric. `computed_by` has (the run's value, the replay's value) for each fact of software and hardware that differs.
    """

    step: int
    num_samples: int
    found: str
    published: str | None
    different: tuple[str, ...]
    numbers: Mapping[str, tuple[float | None, float]]
    computed_by: Mapping[str, tuple[str, str]]

    @property
    def equal(self) -> bool:
        """Whether the weights are equal bit for bit."""
        return self.found == self.published


@dataclass(frozen=True)
class Replay:
    """The result of repeating `step`. `steps` are all steps from the checkpoint `start` up to this one."""

    step: int
    start: Path
    steps: tuple[ReplayedStep, ...]

    @property
    def last(self) -> ReplayedStep:
        """The result of the requested step."""
        return self.steps[-1]

    @property
    def equal(self) -> bool:
        """Whether the weights of the requested step are equal bit for bit."""
        return self.last.equal

    @property
    def first_different(self) -> ReplayedStep | None:
        """The first step whose weights differ from the published ones; None if there is none."""
        return next((one for one in self.steps if one.published is not None and not one.equal), None)

    @property
    def computed_by(self) -> dict[str, tuple[str, str]]:
        """The facts of software and hardware that differ: name → (the run's value, the replay's value)."""
        return {name: pair for one in self.steps for name, pair in one.computed_by.items()}


def replay_step(
    run: RunFolder,
    step: int,
    *,
    start: Path | None = None,
    on_step: Callable[[ReplayedStep, int], None] | None = None,
    history: History | None = None,
) -> Replay:
    """Repeat a recorded training step, and compare the resulting weights with those that the run published.

    `start` is the checkpoint to begin from; None: the nearest before the step. `on_step` is called after each step with
    its result and the total number of steps. `history` is the run's history, if it was read already. Raises
    `InputError` for a step that does not exist, `LedgerError` for a damaged or missing record, `RunError` for a deleted
    one, and `CheckpointError` or `WeightsError` for a checkpoint or version that cannot be used."""
    check_config_unchanged(run)
    config, history = read_config(run), history or History.read(run)
    history.require(step)
    start = history.start_checkpoint(step, start)
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        reference = reference_policy(run, config) if config.learner.has_reference else None
        learner = make_learner(config, None, reference, refuse_mismatch=False)
        _load_start(learner, history, step, start)
        first, steps = learner.step, list[ReplayedStep]()
        while learner.step < step:
            steps.append(_replay_one(learner, history, to_plain(config.learner)))
            if on_step is not None:
                on_step(steps[-1], step - first)
    finally:
        torch.set_num_threads(threads)
    return Replay(step, start, tuple(steps))


def _replay_one(learner: TorchLearner, history: History, configured: Mapping[str, Any]) -> ReplayedStep:
    step = learner.step + 1
    recorded = history.batch(step)
    learner.share_prefixes = recorded.computed_by.get(PREFIXES) == SHARED
    here = computed_by(learner)
    learner.config = build(LearnerConfig, {**configured, **recorded.settings}, "learner")
    report = learner.forward_backward(recorded.batch)
    numbers = {name: getattr(report, name) for name in report.__struct_fields__} | dict(learner.optim_step())
    entries, manifest = table(learner.exported()), history.versions.get(step)
    digest = table_digest(entries)
    learner.version = history.version(step) or Version(step, "0" * 8, digest)
    known = {entry.name: entry for entry in manifest.tensors} if manifest else {}
    was, there = history.numbers.get(step, {}), recorded.computed_by
    return ReplayedStep(
        step=step,
        num_samples=len(recorded.batch.samples),
        found=digest,
        published=manifest.version.digest if manifest else None,
        different=tuple(e.name for e in entries if e != known.get(e.name)) if manifest else (),
        numbers={n: (was.get(n), v) for n, v in numbers.items() if n not in TIMED and isinstance(v, int | float)},
        computed_by={name: (there[name], here.get(name, "")) for name in there if there[name] != here.get(name, "")},
    )


def _load_start(learner: TorchLearner, history: History, step: int, start: Path) -> None:
    """Load the starting checkpoint, and check that it is of the run and that all needed batches exist."""
    others = history.other_checkpoints(step, start)
    try:
        learner.load(start)
    except CheckpointError as error:
        raise CheckpointError(error.what, error.facts, hint=others) from None
    history.require_before(step, start, learner.step)
    published, found = history.version(learner.step), table_digest(table(learner.exported()))
    if published is not None and published.digest != found:
        raise CheckpointError(
            f"{start} does not have the weights that step {learner.step} published",
            f"their digest is {found[:12]}, the published one is {published.digest[:12]}",
            hint=others,
        )
    learner.version = published or Version(learner.step, "0" * 8, found)  # used to recognise fresh samples
    _require_batches(history.run, range(learner.step + 1, step + 1))


def _require_batches(run: RunFolder, steps: range) -> None:
    """Raise when a needed batch is missing, before hours of computing."""
    traces = traces_folder(run)
    absent = next((at for at in steps if not trace_path(traces, at).exists()), None)
    if absent is None:
        return
    ledger = read_ledger(run)
    kept = replayable_after(ledger)
    ledger.close()
    if absent <= kept:
        raise RunError(
            f"the batch of step {absent} was deleted to keep within retention.disk_gb",
            f"steps up to {kept} can no longer be replayed",
            hint=f"replay a step after {kept}; a new run keeps more with --set retention.disk_gb=...",
        )
    raise LedgerError(
        f"the batch of step {absent} is missing",
        f"{trace_path(traces, absent)} does not exist",
        hint="copy it back, or start after it with --from CHECKPOINT",
    )
