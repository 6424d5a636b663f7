"""The history of a run's current weights: which steps can be replayed, and from which checkpoints.

After a restart a step number may have been trained more than once. It refers to the training that led to the current
weights, whose traces replaced the earlier ones. This module only reads, and does not load torch, so that a missing step
is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import CheckpointError, InputError, LedgerError, WeightsError
from etude.experience import read_trace
from etude.experience.trace_reader import RecordedBatch
from etude.experience.traces import trace_path
from etude.loop.locations import traces_folder, weights_store
from etude.loop.retention import steps_in
from etude.records import Version
from etude.run import RunFolder
from etude.telemetry import read_events
from etude.weights.chain.history import readable
from etude.weights.chain.manifest import Manifest


@dataclass(frozen=True)
class History:
    """The training steps that led to a run's current weights (their lineage), read from the run folder.

    - `versions`: the manifest of the published weights, by step.
    - `rollout_ids`: the rollouts that a step was trained on, by step; empty when that is not known.
    - `damaged`: the version whose manifest is damaged, so that earlier steps cannot be read; None: all can.
    - `numbers`: the last `rl.step` event, by step."""

    run: RunFolder
    versions: Mapping[int, Manifest]
    rollout_ids: Mapping[int, frozenset[str]]
    damaged: Version | None = None
    numbers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: RunFolder) -> History:
        """Read the history of a run. Raises `InputError` when the run has no weights."""
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
        """Return the version of the weights that the run published at this step; None when it is not known."""
        return self.versions[step].version if step in self.versions else None

    def require(self, step: int) -> None:
        """Check that this step led to the current weights, so that it can be replayed.

        Raises `InputError` with the reason if it did not, and `WeightsError` if its record was lost."""
        if step in self.versions and step > 0:
            return
        steps = [at for at in self.versions if at > 0]
        if self.damaged is not None and step <= self.damaged.step:
            raise WeightsError(
                f"the version of step {step} is no longer known",
                f"the history of the weights can be read back to {self.damaged}, whose manifest is missing or damaged",
                hint="copy that manifest back, or replay a later step",
            )
        facts = (
            f"its current weights come from steps {min(steps)} to {max(steps)}" if steps else "it has published no step"
        )
        lost = (
            "; this step was trained before a restart went back to an earlier checkpoint"
            if trace_path(traces_folder(self.run), step).exists()
            else ""
        )
        raise InputError(f"{self.run.path} has no step {step}", facts + lost, hint="choose a step in this range")

    def start_checkpoint(self, step: int, given: Path | None) -> Path:
        """Return the checkpoint from which to replay a step: `given` (a path or a name), or, if that is None, the
        nearest one before the step.

        Raises `CheckpointError` when it does not exist, and `InputError` when it is not from before this step."""
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
        """Raise `InputError` unless the step of the checkpoint `start`, which is `held`, is before `step`."""
        if held >= step:
            hint = self.other_checkpoints(step, start)
            raise InputError(f"{start} is not before step {step}", f"it is of step {held}", hint=hint)

    def other_checkpoints(self, step: int, start: Path) -> str:
        """Return a hint that names the other checkpoints from which the step can be replayed."""
        folder = self.run / "checkpoints"
        paths = [folder / "mid", *(path for at, path in sorted(steps_in(folder, "step-*")) if at < step)]
        names = ", ".join(path.name for path in paths if path.is_dir() and path.resolve() != start.resolve())
        return f"start from another: --from one of {names}" if names else "no other checkpoint is before that step"

    def batch(self, step: int) -> RecordedBatch:
        """Read the recorded batch that a step of the current weights was trained on. Raises `LedgerError`."""
        recorded = read_trace(trace_path(traces_folder(self.run), step))
        known = self.rollout_ids.get(step)
        if known and known != frozenset(recorded.batch.rollout_ids):
            raise LedgerError(
                f"the trace of step {step} is not that of the current weights",
                f"{len(known ^ set(recorded.batch.rollout_ids))} rollouts are in only one of trace and manifest",
                hint="restore the trace from a copy; other steps can be replayed without it",
            )
        return recorded
