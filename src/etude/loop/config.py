"""The whole of a run's settings: the only place where the folders' own configs meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from etude.config import load, ranged
from etude.environments.config import MachineLimits
from etude.experience.config import ExperienceConfig
from etude.harness.config import HarnessConfig
from etude.inference.config import EngineConfig
from etude.models.config import ModelConfig
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks import open_source
from etude.tasks.config import CorpusConfig, TasksConfig
from etude.training.config import LearnerConfig, MidTrainingConfig


@dataclass(frozen=True)
class EvalsConfig:
    """The `[evals]` section. Settings are chosen on validation tasks; held-out ones are for before and after."""

    heldout_tasks: int = ranged(512, low=1)
    heldout_tries: int = ranged(1, low=1, high=64)  # rollouts a task; best-of-k is reported for k = tries
    during_tasks: int = ranged(128, low=1)  # validation tasks of an evaluation during RL
    every: int = ranged(10, low=1)  # steps between evaluations during RL
    baseline_tasks: int = ranged(64, low=1)  # held-out tasks for the oracle and the random agent
    temperature: float = ranged(1.0, low=0.0, high=4.0)


@dataclass(frozen=True)
class FleetConfig:
    """The `[fleet]` section: how many processes of each kind, and how patient their supervisor is."""

    num_engines: int = ranged(2, low=1, high=64)
    num_workers: int = ranged(1, low=1, high=64)
    num_graders: int = ranged(1, low=1, high=64)
    hung_s: float = ranged(30.0, low=1.0)  # a process that is silent for so long is killed and started again


@dataclass(frozen=True)
class RlConfig:
    """The `[rl]` section: how long, and how the policy samples."""

    steps: int = ranged(45, low=0)
    temperature: float = ranged(1.0, low=0.01, high=4.0)
    checkpoint_every: int = ranged(5, low=1)  # steps; a learner that dies loses at most so many
    probe_limit: float = ranged(1e-3, low=0.0)  # max |r - 1| of the version-matched probe; over it the run ends


@dataclass(frozen=True)
class RunConfig:
    """Everything. `start` is a Hugging Face directory to begin from; with it, corpus and mid-training are skipped."""

    seed: int = ranged(0, low=0)
    start: Path | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    mid_training: MidTrainingConfig = field(default_factory=MidTrainingConfig)
    machines: MachineLimits = field(default_factory=MachineLimits)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    evals: EvalsConfig = field(default_factory=EvalsConfig)

    def __post_init__(self) -> None:
        if self.harness.context_tokens > self.engine.context_tokens:
            raise ValueError(
                f"harness.context_tokens = {self.harness.context_tokens} does not fit "
                f"engine.context_tokens = {self.engine.context_tokens}"
            )
        if self.start is None and self.engine.context_tokens > self.model.context_tokens:
            raise ValueError(
                f"engine.context_tokens = {self.engine.context_tokens} is past "
                f"model.context_tokens = {self.model.context_tokens}"
            )

    @property
    def max_running(self) -> int:
        """Rollouts under way at once. Each keeps a KV slot between its turns, so there are fewer than slots: with more,
        engines would drop and compute contexts again."""
        return max(1, self.fleet.num_engines * self.engine.max_sequences * 3 // 4)


def read_config(run: RunFolder) -> RunConfig:
    """The effective config that a run was made with."""
    return load(run / "config.toml", RunConfig)


def open_tasks(config: RunConfig) -> TaskSource:
    """The run's task source. Raises `TaskError`."""
    tasks = config.tasks
    return open_source(tasks.source, tasks.seed, files=tasks.files, functions_per_file=tasks.functions_per_file)
