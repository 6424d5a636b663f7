"""Reads and changes the reward settings of a run, which may differ between steps.

The first settings are those of the config. A change has all reward terms as they are from a step on. It is recorded in
rewards.json by `etude rewards set`, also while the run is running, or when a run is resumed with other `[rewards]`
settings. Earlier steps keep their settings, so a recorded step can be computed again. The format is in
`docs/formats/run.md`."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from etude.config import build, plugins_in, to_plain, with_digests
from etude.errors import ConfigError, InputError, RunError, RunRefused
from etude.experience import Ledger
from etude.file_checksums import sealed_list, verify_json
from etude.loop.config import RunConfig, check_same_plugins, read_config
from etude.plugins import Kind, check_all, found, import_path
from etude.records import Graded
from etude.records.summary import BatchPlan
from etude.rewards import Composition
from etude.rewards.config import RewardsConfig, TermConfig
from etude.rewards.effort import Tuned, next_weight
from etude.rewards.judges.terms import Mode
from etude.run import HINT_COPY, RunFolder, take_lock, write_durably

FILE, LOCK = "rewards.json", "rewards.lock"
TUNED = "reward_weights"  # in the ledger: version step → term → `Tuned`


@dataclass(frozen=True)
class RewardChange:
    """The reward settings of a run from step `from_step` on. `since`: when they were recorded (ISO 8601, UTC)."""

    from_step: int
    rewards: RewardsConfig
    since: str = ""


class RewardSettings:
    """The reward settings of a run, by step. Call `refresh` to read changes that were recorded meanwhile."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        self._run, self._config = run, config
        self._seen: tuple[int, int] | None = None
        self.tuned: Mapping[str, Tuned] = {}  # the state of self-tuned weights before the next step, by term
        self.changes: list[RewardChange] = []
        self.refresh()

    def refresh(self) -> bool:
        """Read rewards.json again if it was replaced, and return whether it was.

        Raises `RunError` for a damaged file."""
        try:
            found = os.stat(self._run / FILE)
            seen = found.st_ino, found.st_mtime_ns
        except FileNotFoundError:
            seen = None
        if self.changes and seen == self._seen:
            return False
        self._seen, self.changes = seen, [RewardChange(0, self._config.rewards), *read_changes(self._run)]
        return True

    def at(self, step: int) -> RewardsConfig:
        """Return the settings of version step `step`: the change recorded last whose `from_step` is at most `step`."""
        return next(one.rewards for one in reversed(self.changes) if one.from_step <= step)

    def measured(self, step: int) -> tuple[TermConfig, ...]:
        """Return the terms to measure for a group that `step` or a later step will train on.

        They are the terms of `step` and of all later changes. If several of them have the same term, the settings of
        the last one count."""
        first = next(i for i in range(len(self.changes) - 1, -1, -1) if self.changes[i].from_step <= step)
        return tuple({term.name: term for one in self.changes[first:] for term in one.rewards.terms}.values())

    def composition(self, step: int) -> Composition:
        """Return the settings by which the rewards of version step `step` are composed."""
        rewards = self.at(step)
        tuned = {name: state.weight for name, state in self.tuned.items()}
        weights, hints = rewards.weights(step, tuned), rewards.hints(step)
        own = self._config.composition
        return replace(own, weights=weights, when=rewards.gates, hints=hints, charges=rewards.charges)

    def deciding(self, step: int) -> tuple[tuple[TermConfig, ...], Composition]:
        """Return the terms that take part in the decision whether the later rollouts of a group run, and a composition.

        `step`: the version step whose settings are used. The composition computes the rewards that are compared for the
        decision: the grade and the weighted terms among these."""
        rewards, whole = self.at(step), self.composition(step)
        weights = {name: weight for name, weight in whole.weights.items() if name in rewards.beside_grades}
        return rewards.deciding(step), replace(whole, weights=weights)

    def recall(self, ledger: Ledger, step: int) -> None:
        """Load the state of self-tuned weights for version step `step` from the ledger into `tuned`."""
        self.tuned = _tuned(ledger, step)

    def remember(self, ledger: Ledger, plan: BatchPlan) -> dict[str, Tuned]:
        """Compute the state of self-tuned weights after the step of a plan, store it in the ledger, and return it.

        Call it in a transaction of the ledger. It deletes the states of steps that no restart can go back to."""
        solved = [
            member.summary.num_sampled
            for member in plan.members
            if member.summary is not None and isinstance(member.outcome, Graded) and member.outcome.grade > 0
        ]
        before = _tuned(ledger, plan.step)
        tuned = {
            one.name: next_weight(before.get(one.name, Tuned()), solved, target=one.target, limit=one.weight)
            for one in self.at(plan.step).terms
            if one.target and one.from_step <= plan.step
        }
        if tuned:
            pruned = int(ledger.recall("pruned") or 0)
            had = {step: one for step, one in (ledger.recall(TUNED) or {}).items() if pruned < int(step) <= plan.step}
            ledger.remember(TUNED, had | {str(plan.step + 1): msgspec.to_builtins(tuned)})
        return tuned


def _tuned(ledger: Ledger, step: int) -> dict[str, Tuned]:
    return msgspec.convert((ledger.recall(TUNED) or {}).get(str(step), {}), dict[str, Tuned])


def read_changes(run: RunFolder) -> list[RewardChange]:
    """Read the recorded changes of a run, oldest first. Raises `RunError` when rewards.json is damaged."""
    path = run / FILE
    if not path.exists():
        return []
    digests = {one["path"]: one["digest"] for one in run.plugins()}
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
        verify_json(found, path, kind=RunError)
        return [
            RewardChange(
                int(one["from_step"]), with_digests(build(RewardsConfig, one["rewards"]), digests), str(one["since"])
            )
            for one in found
        ]
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise RunError(f"{path} is damaged", str(error), hint=HINT_COPY) from None


@contextlib.contextmanager
def changing(run: RunFolder) -> Iterator[None]:
    """Lock the reward settings of a run for a `with` block that reads and changes them.

    Without the lock a change that another process makes meanwhile would be lost. Raises `RunRefused` if another process
    has the lock."""
    fd, holder = take_lock(run / LOCK)
    if fd is None:
        facts = f"process {holder} holds their lock"
        hint = "wait until that process has ended, then give the command again"
        raise RunRefused(f"the reward settings of {run.path} are being changed", facts, hint=hint)
    try:
        yield
    finally:
        os.close(fd)


def record_change(
    run: RunFolder,
    rewards: RewardsConfig,
    *,
    from_step: int | None,
    last_step: Callable[[], int],
    num_steps: int,
) -> RewardChange:
    """Record durably that a run composes its rewards with other settings from step `from_step` on.

    - `from_step`: None for the step after `last_step()`.
    - `last_step`: returns the last step whose batch is formed, or may be formed at this moment. Steps up to it keep
      their settings. It is called again at the end, since the run may form further batches meanwhile.
    - `num_steps`: the number of steps of the whole run.

    Call it in a block of `changing`. The code of new plug-ins is recorded, too.

    Raises `InputError` for a `from_step` that is not after the last step or is after the run's end, `ConfigError` for
    rewards that do not fit the run's other settings, `PluginRefused` and `RunRefused` for plug-ins that cannot be used
    or have changed, and `RunError` when rewards.json is damaged or cannot be written."""
    _require_open(from_step, last_step(), num_steps)
    config = replace(read_config(run), rewards=rewards)  # which checks it as a whole
    plugins = check_all(list(dict.fromkeys(plugins_in(rewards, "rewards"))))
    check_hints(rewards)
    check_stages(config)
    check_same_plugins(run, plugins, accept=False)
    known = {one["path"]: one for one in run.plugins()}
    if new := {one.path: msgspec.to_builtins(one) for one in plugins if one.path not in known}:
        run.record_plugins([*known.values(), *new.values()])
    last = last_step()
    _require_open(from_step, last, num_steps)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    change = RewardChange(last + 1 if from_step is None else from_step, rewards, since)
    plain = [
        {"from_step": one.from_step, "since": one.since, "rewards": to_plain(one.rewards)}
        for one in [*read_changes(run), change]
    ]
    write_durably(run / FILE, json.dumps(sealed_list(plain), indent=2).encode())
    return change


def check_hints(rewards: RewardsConfig) -> None:
    """Check that the terms with `hints` give hints, as their classes say (`seams.RewardTerm`), and that the text of a
    built-in one is not empty. Raises `ConfigError`."""
    for term in rewards.terms:
        path = import_path(Kind.REWARD, term.kind.path)
        if term.hints and not getattr(found(path), "gives_hints", False):
            raise ConfigError(
                f"the reward term {term.name!r} has hints = {term.hints:g}",
                f"{path} gives no hints, so the setting has no effect",
                hint=f"set {term.name}.hints = 0.0; if its scores have hints, give it the attribute gives_hints = True",
            )
        if term.hints and path.startswith("etude.rewards.process:") and term.kind.settings.get("hint") == "":
            raise ConfigError(
                f"the reward term {term.name!r} has hints = {term.hints:g}",
                'its text is hint = "", so it gives no hints and the setting has no effect',
                hint=f'set {term.name}.hints = 0.0, or leave out hint = "" for the usual text',
            )


def check_stages(config: RunConfig) -> None:
    """Raise `ConfigError` for a term that compares siblings and would take part in the decision about later rollouts.

    With `experience.min_group_size` the first rollouts of a group decide whether the others run
    (`RewardsConfig.deciding` returns the terms that take part). The value of a term that compares siblings is not known
    before all of them have ended. Other terms that compare siblings are allowed."""
    deciding = config.rewards.deciding(config.rl.steps) if config.experience.min_group_size else ()
    for term in deciding:
        path, mode = import_path(Kind.REWARD, term.kind.path), term.kind.settings.get("mode", Mode.POINTWISE)
        if hasattr(found(path), "score_group") or (term.is_judge and mode != Mode.POINTWISE):
            raise ConfigError(
                f"the reward term {term.name!r} cannot be used with experience.min_group_size",
                "it compares all siblings, but the rewards of the first ones decide whether the others run",
                hint=f"set experience.min_group_size = 0, or when = 'grade' in {term.name!r}: then it does not decide",
            )


def _require_open(from_step: int | None, last: int, num_steps: int) -> None:
    """Raise `InputError` if the rewards of `from_step` (None: of the step after `last`) cannot be changed."""
    if max(from_step or 0, last + 1) > num_steps:
        raise InputError(
            f"the rewards of step {from_step or last + 1} cannot be changed",
            f"the run has {num_steps} steps, and batches are formed up to step {last}",
            hint="choose a step without a batch, or start a new run from the last checkpoint of this one (start = ...)",
        )
    if from_step is not None and from_step <= last:
        raise InputError(
            f"the rewards of step {from_step} cannot be changed",
            f"the batch of step {last} was formed already, or is being formed",
            hint=f"choose a later one: --from-step {last + 1}",
        )
