"""The history of a run's current weights: which steps can be replayed, and from which checkpoint.

A step number may have been trained more than once, after a restart: what is meant is the one in the lineage of the
current weights, whose traces replaced the others'. Only reads, and loads no torch: a step that is not there is refused
in an instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import CheckpointError, InputError, LedgerError, WeightsError
from etude.experience import read_trace
from etude.experience.traces import RecordedBatch, trace_path
from etude.loop.locations import traces_folder, weights_store
from etude.loop.retention import steps_in
from etude.records import Version
from etude.run import RunFolder
from etude.telemetry import read_events
from etude.weights.chain.history import readable
from etude.weights.chain.manifest import Manifest


@dataclass(frozen=True)
class History:
    """The current lineage of a run, as its folder shows it."""

    run: RunFolder
    versions: Mapping[int, Manifest]  # by step
    rollout_ids: Mapping[int, frozenset[str]]  # by step; empty: published again, and so not known
    damaged: Version | None = None  # where the lineage can be read no further back
    numbers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by step: of its last `rl.step` event

    @classmethod
    def read(cls, run: RunFolder) -> History:
        manifests, damaged = readable(weights_store(run, readonly=True), "policy")
        ids: dict[int, frozenset[str]] = {}
        for manifest in manifests:
            step = manifest.version.step
            ids[step] = ids.get(step, frozenset()) | frozenset(manifest.rollout_ids)
        events = (event for event in read_events(run / "events") if event.get("kind") == "rl.step")
        numbers = {int(event.get("step", 0)): event for event in events}
        versions = {manifest.version.step: manifest for manifest in manifests}
        return cls(run, versions, ids, damaged.version if damaged else None, numbers)

    def version(self, step: int) -> Version | None:
        """The version that the run published at a step; None where that is not known any more."""
        return self.versions[step].version if step in self.versions else None

    def require(self, step: int) -> None:
        """Raise an error that says why a step cannot be redone, where its version is not in the lineage."""
        if step in self.versions and step > 0:
            return
        steps = [at for at in self.versions if at > 0]
        if self.damaged is not None and step <= self.damaged.step:
            raise WeightsError(
                f"what step {step} published is not known any more",
                f"the lineage can be read back to {self.damaged}, whose manifest is gone or damaged",
                hint="copy that manifest back, or redo a later step",
            )
        facts = f"its current lineage has steps {min(steps)} to {max(steps)}" if steps else "it has published no step"
        lost = (
            "; that one was trained in a lineage that is lost"
            if trace_path(traces_folder(self.run), step).exists()
            else ""
        )
        raise InputError(f"{self.run.path} has no step {step}", facts + lost, hint="name one of its lineage's steps")

    def start_checkpoint(self, step: int, given: Path | None) -> Path:
        """The checkpoint to redo a step from: the one that was given, by path or by name, or the nearest before it.
        Raises `CheckpointError`
        when there is none, `InputError` for one of a step that is not before it."""
        folder = self.run / "checkpoints"
        saved = [path for at, path in sorted(steps_in(folder, "step-*")) if at < step]
        start = given or (saved[-1] if saved else folder / "mid")
        if not start.exists() and len(start.parts) == 1:
            start = folder / start
        if not start.is_dir():
            raise CheckpointError(f"no checkpoint at {start}", hint=self.other_checkpoints(step, start))
        saved_at = {path.resolve(): at for at, path in steps_in(folder, "step-*")}
        self.require_before(step, start, saved_at.get(start.resolve(), 0))
        return start

    def require_before(self, step: int, start: Path, held: int) -> None:
        """Raise `InputError` for a checkpoint whose step does not lie before the one to redo."""
        if held >= step:
            hint = self.other_checkpoints(step, start)
            raise InputError(f"{start} does not lead to step {step}", f"it holds step {held}", hint=hint)

    def other_checkpoints(self, step: int, start: Path) -> str:
        """As a hint: what else than `start` a step can be redone from."""
        folder = self.run / "checkpoints"
        paths = [folder / "mid", *(path for at, path in sorted(steps_in(folder, "step-*")) if at < step)]
        names = ", ".join(path.name for path in paths if path.is_dir() and path.resolve() != start.resolve())
        return f"begin from another: --from one of {names}" if names else "no other checkpoint is before that step"

    def batch(self, step: int) -> RecordedBatch:
        """The record of a step of the lineage. Raises `LedgerError`."""
        recorded = read_trace(trace_path(traces_folder(self.run), step))
        known = self.rollout_ids.get(step)
        if known and known != frozenset(recorded.batch.rollout_ids):
            raise LedgerError(
                f"the record of step {step} is not of the step that the current weights were trained by",
                f"{len(known ^ set(recorded.batch.rollout_ids))} rollouts are in one and not in the other",
                hint="restore its trace from a copy; no other step needs it",
            )
        return recorded
