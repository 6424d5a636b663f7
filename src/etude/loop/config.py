"""All settings of a run: the configs of the other packages in one dataclass, and checks between them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from etude import __version__
from etude.config import BuiltIn, Plugin, build, leaves, like, load, ranged, to_plain, with_digests
from etude.environments.config import MachinesConfig
from etude.environments.images import ImageStore
from etude.errors import ConfigError, ConfigUnreadable, RunError, RunRefused, StoreError
from etude.experience import SCHEMES, Credit
from etude.experience.config import ExperienceConfig
from etude.harness.config import HarnessConfig
from etude.inference.config import EngineConfig, EngineKind, ExternalEngineConfig, Speculation, check_ranks
from etude.inference.external.environment import SERVER_KINDS
from etude.loop.parity import OverBudget, ParityConfig
from etude.loop.task_images import with_built_images
from etude.models.config import ModelConfig
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig, Quantise
from etude.plugins import Identity
from etude.rewards import Composition
from etude.rewards.config import RewardsConfig
from etude.run import HINT_COPY, RunFolder
from etude.seams import CreditScheme, PairCreditScheme, TaskSource
from etude.stores.locations import parse_bucket_url
from etude.tasks import open_source
from etude.tasks.canaries import WithCanaries
from etude.tasks.config import CorpusConfig, TasksConfig
from etude.tasks.harbor import HarborSource
from etude.trackers import BUILT_IN as TRACKERS
from etude.training.config import LearnerConfig, LiveWeights, MidTrainingConfig, PolicyLossKind

MAX_ENGINES = 64
_SPECULATION = re.compile(r"--spec|-sc\b")  # servers accept abbreviations of their arguments


@dataclass(frozen=True)
class EvalsConfig:
    """The `[evals]` section: number of tasks and rollouts of each evaluation.

    Evaluations during RL use validation tasks, one every `every` steps (0: none); held-out tasks are used before and
    after RL. `heldout_tries` is the number of rollouts per held-out task. `transfer_tasks` are tasks of families that
    are never trained on. `baseline_tasks` are held-out tasks for the scripted agents "oracle" and "random".
    `prices` is the path of a table of prices (`etude.prices`); with it evaluations report dollars per solved task."""

    heldout_tasks: int = ranged(512, low=1)
    heldout_tries: int = ranged(1, low=1, high=64)  # rollouts per task; best-of-k is reported for k = tries
    transfer_tasks: int = ranged(0, low=0)  # tasks of kinds never trained on, before and after RL; 0: none
    during_tasks: int = ranged(128, low=1)  # validation tasks of an evaluation during RL
    every: int = ranged(10, low=0)  # steps between evaluations during RL; 0: none

    def is_due(self, step: int, of: int) -> bool:
        """Return whether an evaluation follows step `step` of a run of `of` steps.

        After the last step it is False, since the final evaluation follows anyway.

        >>> [step for step in range(9) if EvalsConfig(every=3).is_due(step, 8)]
        [3, 6]
        >>> any(EvalsConfig(every=0).is_due(step, 8) for step in range(9))
        False
        """
        return bool(self.every) and 0 < step < of and step % self.every == 0

    baseline_tasks: int = ranged(64, low=1)  # held-out tasks for the oracle and the random agent
    temperature: float = ranged(1.0, low=0.0, high=4.0)
    prices: Path | None = None  # a table of prices (etude.prices): evaluations then tell dollars per solved task


@dataclass(frozen=True)
class FleetConfig:
    """The `[fleet]` section: which processes a run has, and how many of each.

    `engines` has one entry per engine, and `num_workers` and `num_graders` are numbers of processes. A process that
    does not answer for `hung_s` seconds is killed and restarted; time in which it waited for a core does not count.
    `listen` is HOST:PORT, at which remote engines join the run; "" for none. `ranks_away` is the number of the
    learner's ranks that run on other machines; they connect to the learner's machine at the address `ranks_at`."""

    engines: tuple[EngineKind, ...] = (EngineKind.REFERENCE, EngineKind.REFERENCE)  # engine-0, engine-1, ...
    num_workers: int = ranged(1, low=1, high=64)
    num_graders: int = ranged(1, low=1, high=64)
    hung_s: float = ranged(30.0, low=1.0)  # a process that does not answer for so long is killed and restarted
    listen: str = like("0.0.0.0:8790")  # "HOST:PORT": where remote engines join the run; "": disabled
    ranks_away: int = ranged(0, low=0)  # how many of learner.ranks run on other machines, see loop/rank_hosts.py
    ranks_at: str = like("10.0.0.1")  # the address of the learner's machine that these ranks connect to

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if self.listen and not (host and "/" not in host and port.isdigit() and int(port) < 65_536):
            raise ValueError(f"listen = {self.listen!r} is not HOST:PORT, such as '0.0.0.0:8790'")
        if bool(self.ranks_away) != bool(self.ranks_at):
            given = f"ranks_away = {self.ranks_away} and ranks_at = {self.ranks_at!r}"
            raise ValueError(f"{given}: set both, or neither")
        least = 0 if self.listen else 1  # with a registry all engines may be remote
        if not least <= len(self.engines) <= MAX_ENGINES:
            why = (
                ""
                if self.engines or self.listen
                else "; it may have none if remote engines can join: listen = 'HOST:PORT'"
            )
            raise ValueError(f"engines has {len(self.engines)} entries: a run has 1 to {MAX_ENGINES} engines{why}")


@dataclass(frozen=True)
class RlConfig:
    """The `[rl]` section: number of steps, sampling temperature, and steps between checkpoints."""

    steps: int = ranged(45, low=0)
    temperature: float = ranged(1.0, low=0.01, high=4.0)
    checkpoint_every: int = ranged(5, low=1)  # steps; at most so many are lost when the learner dies


@dataclass(frozen=True)
class StoresConfig:
    """The `[stores]` section: where weights and traces (records of batches) are stored; "": in the run folder.

    A store is `s3://bucket/prefix`, gs://, az:// or file://, in which each run has its own prefix. Credentials come
    from the environment. `signing_key` is a file made by `etude weights key`: with it versions of the weights are
    signed, and the run's engines accept no others."""

    weights: str = ""
    traces: str = ""
    signing_key: Path | None = None

    def __post_init__(self) -> None:
        for name, url in (("weights", self.weights), ("traces", self.traces)):
            if url and not url.startswith("file:///"):
                try:
                    parse_bucket_url(url)
                except StoreError as error:
                    raise ValueError(f"stores.{name}: {error.what}; {error.hint}") from None


@dataclass(frozen=True)
class RetentionConfig:
    """The `[retention]` section: the disk space in GB for checkpoints and traces (the recorded batches of steps).

    When they exceed it the oldest are deleted, except the last two checkpoints. A step can be replayed only if its
    trace and an earlier checkpoint are still there."""

    disk_gb: float = ranged(100.0, low=0.0)  # checkpoints and traces; above it the oldest are deleted, not the last two


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run: one field for each section of config.toml.

    Each section's class describes its settings. `seed` is the seed of the run. `start` is a Hugging Face directory with
    the starting checkpoint; with it, no corpus is made, and the model is mid-trained only if `mid_training.corpus` is
    set."""

    seed: int = ranged(0, low=0)
    start: Path | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    mid_training: MidTrainingConfig = field(default_factory=MidTrainingConfig)
    machines: MachinesConfig = field(default_factory=MachinesConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    vllm: ExternalEngineConfig = field(default_factory=ExternalEngineConfig)
    sglang: ExternalEngineConfig = field(default_factory=ExternalEngineConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    stores: StoresConfig = field(default_factory=StoresConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    evals: EvalsConfig = field(default_factory=EvalsConfig)
    trackers: tuple[Annotated[Plugin, BuiltIn(tuple(TRACKERS))], ...] = ()  # where metrics go, too: `seams.Tracker`

    def __post_init__(self) -> None:
        if self.numerics.mode is Mode.EXACT and self.engine.dtype is not self.learner.dtype:
            raise ValueError(
                f"engine.dtype = {str(self.engine.dtype)!r} differs from learner.dtype = {str(self.learner.dtype)!r}: "
                f"numerics.mode = 'exact' needs the same dtype in both; set one of them, or numerics.mode = 'native'"
            )
        if self.learner.lora_rank and self.numerics.quantise is not Quantise.NONE:
            raise ValueError(
                f"learner.lora_rank = {self.learner.lora_rank} and numerics.quantise = "
                f"{str(self.numerics.quantise)!r} cannot be combined: adapters are merged into weights that are not "
                f"quantised; set lora_rank = 0 or quantise = 'none'"
            )
        self._check_engine_numerics()
        self._check_engine_dtype()
        self._check_ranks()
        self._check_pairs()
        self._check_forks()
        self._check_mid_training()
        if self.harness.context_tokens > self.engine.context_tokens:
            raise ValueError(
                f"harness.context_tokens = {self.harness.context_tokens} is larger than "
                f"engine.context_tokens = {self.engine.context_tokens}: set it to at most that"
            )
        if self.start is None:
            context_tokens = self.mid_training.models(self.model)[-1].context_tokens
            if self.engine.context_tokens > context_tokens:
                longer = "" if context_tokens == self.model.context_tokens else ", with mid-training's rope_factor"
                raise ValueError(
                    f"engine.context_tokens = {self.engine.context_tokens} is larger than "
                    f"model.context_tokens = {context_tokens}{longer}: set it to at most that"
                )

    def _check_engine_numerics(self) -> None:
        """Refuse engine kinds that cannot compute what `[numerics]` asks for. Raises `ConfigError`, `ValueError`."""
        what = f"fleet.engines = {list(map(str, self.fleet.engines))}"
        check_ranks(self.engine, self.numerics)
        if self.engine.tensor_parallel > 1 and self.learner.lora_rank:
            raise ConfigError(
                f"engine.tensor_parallel = {self.engine.tensor_parallel} is not possible",
                f"learner.lora_rank = {self.learner.lora_rank}: an engine with ranks cannot merge adapters",
                hint="set learner.lora_rank = 0, or engine.tensor_parallel = 1",
            )
        for kind in sorted({*self.fleet.engines} - {EngineKind.REFERENCE}):
            foreign, make = self.foreign(kind), SERVER_KINDS[kind].name
            if not foreign.max_contexts(self.engine):
                raise ValueError(
                    f"{kind}.kv_tokens = {foreign.kv_tokens} is too small for one full context of "
                    f"engine.context_tokens = {self.engine.context_tokens} tokens"
                )
            if self.numerics.mode is Mode.EXACT:
                raise ConfigError(
                    what,
                    f"{make} uses its own order of summation, and numerics.mode = 'exact' needs one order everywhere",
                    hint="set numerics.mode = 'native': the parity budget of engine.dtype then applies, see [parity]",
                )
            if self.numerics.quantise is not Quantise.NONE:
                raise ConfigError(
                    what,
                    f"{make} does not round as numerics.quantise = {str(self.numerics.quantise)!r} does",
                    hint="set numerics.quantise = 'none', or use reference engines only",
                )
            if self.engine.speculation is not Speculation.OFF:
                raise ConfigError(
                    what,
                    f"{make} has no engine.speculation = {str(self.engine.speculation)!r}",
                    hint="set engine.speculation = 'off', or use reference engines only",
                )
            if drafts := next((word for word in foreign.arguments if _SPECULATION.match(word)), ""):
                raise ConfigError(
                    what,
                    f"{kind}.arguments has {drafts!r}: with speculation of its own, vLLM's CPU build (0.32) returns "
                    "log-probabilities that are not finite, and other builds and SGLang were not tested with it",
                    hint=f"remove it from {kind}.arguments, or use reference engines with engine.speculation",
                )
            if self.engine.tensor_parallel > 1:
                raise ConfigError(
                    what,
                    f"engine.tensor_parallel = {self.engine.tensor_parallel} is for reference engines",
                    hint=f'set {kind}.arguments = ["--tensor-parallel-size={self.engine.tensor_parallel}"] instead',
                )
            if kind is EngineKind.SGLANG and self.learner.lora_rank:
                raise ConfigError(
                    what,
                    f"SGLang cannot load the adapters that learner.lora_rank = {self.learner.lora_rank} publishes",
                    hint="set learner.lora_rank = 0, or use vLLM or reference engines",
                )

    def _check_engine_dtype(self) -> None:
        """Refuse an `engine.dtype` that cannot represent the learner's published weights exactly. Raises `ValueError`.
        SGLang casts the weights it loads, and quantised formats and adapters always fit."""
        if self.learner.lora_rank or self.numerics.quantise is not Quantise.NONE:
            return
        if self.fleet.engines and not {*self.fleet.engines} - {EngineKind.SGLANG}:
            return
        held = [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16][: 1 if self.learner.weights is LiveWeights.F32 else 2]
        if self.engine.dtype not in held:
            raise ValueError(
                f"learner.weights = {str(self.learner.weights)!r} cannot be represented exactly in engine.dtype = "
                f"{str(self.engine.dtype)!r}: set engine.dtype to {' or '.join(held)}"
            )

    def _check_ranks(self) -> None:
        learner, experts = self.learner, self.model.num_experts
        if self.fleet.ranks_away >= learner.ranks:
            raise ValueError(
                f"fleet.ranks_away = {self.fleet.ranks_away} is not below learner.ranks = {learner.ranks}: "
                f"at least rank 0 must run on the run's own machine"
            )
        if self.start is None and (experts % learner.expert_parallel if experts else learner.expert_parallel > 1):
            raise ValueError(
                f"learner.expert_parallel = {learner.expert_parallel} is not a divisor of model.num_experts = {experts}"
            )

    def _check_pairs(self) -> None:
        """Refuse settings of rewards and credit that the DPO loss cannot use. Raises `ConfigError`."""
        if not isinstance(self.experience.credit, Plugin):  # the conductor loads and checks plug-ins
            check_forms_pairs(self.learner, SCHEMES[self.experience.credit])
        if self.learner.policy_loss is not PolicyLossKind.DPO:
            return
        what = "learner.policy_loss = 'dpo'"
        if self.experience.kl:
            facts = f"with experience.kl = {self.experience.kl} pairs would depend on the KL to the starting checkpoint"
            hint = "set experience.kl = 0; DPO limits the distance to its reference by learner.dpo_beta"
            raise ConfigError(what, facts, hint=hint)
        if self.experience.min_group_size:
            facts = "with experience.min_group_size the first rewards decide which siblings run: pairs would be biased"
            raise ConfigError(what, facts, hint="set experience.min_group_size = 0")
        if hinted := [term.name for term in self.rewards.terms if term.hints]:
            facts = f"the term {hinted[0]!r} has hints, which change advantages; this loss does not use advantages"
            raise ConfigError(what, facts, hint="set hints = 0.0 in the term, or use another loss")

    def _check_forks(self) -> None:
        """Refuse settings that do not go with forks of machines. Raises `ConfigError`."""
        if self.harness.forks == 1:
            return
        experience, machines = self.experience, self.machines
        refused = (
            (
                experience.credit != Credit.FORK,
                f"experience.credit = {str(experience.credit)!r} does not compare the continuations of one summary",
                "set experience.credit = 'fork'",
            ),
            (
                experience.min_group_size > 0,
                "with experience.min_group_size first rewards decide which siblings run; here a sibling has several",
                "set experience.min_group_size = 0",
            ),
            (
                experience.kl > 0,
                f"with experience.kl = {experience.kl} the penalty of shared turns counts for one continuation only",
                "set experience.kl = 0",
            ),
            (
                machines.backend == "remote",
                "machines of the remote backend may be of a service without snapshots",
                "set machines.backend to 'namespace' or 'microvm'",
            ),
            (
                machines.backend == "gvisor" and bool(machines.images),
                "snapshots of gvisor machines of images have only the working directory",
                "set machines.backend to 'namespace' or 'microvm'",
            ),
        )
        for wrong, facts, hint in refused:
            if wrong:
                raise ConfigError(f"harness.forks = {self.harness.forks}", facts, hint=f"{hint}, or harness.forks = 1")

    def _check_mid_training(self) -> None:
        """Refuse corpora of mid-training that do not go with `start`. Raises `ConfigError`."""
        corpora = [phase.corpus for phase in self.mid_training.settings()]
        if self.mid_training.lora_rank and self.start is None:
            hint = "set mid_training.lora_rank = 0, or start from a checkpoint"
            raise ConfigError("mid_training.lora_rank is set and `start` is not", "a new model has no base", hint=hint)
        if self.start is None and self.mid_training.uses_corpus:
            facts = "a run without `start` trains a tokeniser of its own, and this corpus has another one"
            hint = "set start to a checkpoint with the tokeniser of the corpus"
            raise ConfigError("mid_training.corpus is set and `start` is not", facts, hint=hint)
        if self.start is not None and self.mid_training.phases and None in corpora:
            name = self.mid_training.phases[corpora.index(None)].name
            facts = "a run with `start` makes no corpus of its own"
            hint = "set mid_training.corpus to a folder of `etude corpus build`, or `corpus` in each phase"
            raise ConfigError(f"phase {name!r} of mid_training has no corpus", facts, hint=hint)

    @property
    def mid_trains(self) -> bool:
        """Whether the run has mid-training. A run with `start` has it only if `mid_training.corpus` is set."""
        return self.start is None or self.mid_training.uses_corpus

    def with_parity_budget(self) -> RunConfig:
        """Return this config with the parity budget filled in, so that config.toml has the numbers.

        The budget is the largest accepted difference between the probabilities of engine and learner; its default
        depends on the engines' dtype. In exact mode, where all probabilities must be equal, the config is unchanged."""
        if self.numerics.mode is Mode.EXACT and self.parity.over_budget is not OverBudget.FALL_BACK:
            return self  # exact mode needs no budget
        budget = self.parity.budget(self.engine.dtype)
        return replace(self, parity=replace(self.parity, k3=budget.k3, ratio_p99=budget.ratio_p99))

    @property
    def wants_routes(self) -> bool:
        """Whether engines must return routes, the experts that they chose for each token.

        They do if the learner uses the same experts, or may have to when probabilities differ too much."""
        return self.learner.replays(self.numerics.mode) or self.parity.over_budget is OverBudget.FALL_BACK

    @property
    def composition(self) -> Composition:
        """The settings by which rewards are composed, without the terms of `[rewards]`, which may change in a run.

        `RewardSettings.composition` adds the terms of a step."""
        experience = self.experience
        return Composition(
            require_submit=self.harness.require_submit, quarantine=experience.quarantine, kl=experience.kl
        )

    @property
    def ledger_slots(self) -> int:
        """How many rollouts may be admitted and not trained yet, continuations after a fork included."""
        return self.experience.window.max_open_groups * self.experience.group_size * self.harness.forks

    @property
    def max_running(self) -> int:
        """How many rollouts run at the same time on the run's own engines."""
        return rollouts_on(self.own_contexts)

    @property
    def own_contexts(self) -> int:
        """How many full contexts the KV caches of the run's own engines can hold together."""
        return sum(map(self.contexts_of, self.fleet.engines))

    def contexts_of(self, kind: EngineKind) -> int:
        """Return how many full contexts the KV cache of one engine of this kind can hold."""
        if kind is EngineKind.REFERENCE:
            return self.engine.max_sequences
        return self.foreign(kind).max_contexts(self.engine)

    def devices_of(self, kind: EngineKind) -> int:
        """Return how many accelerators one engine of this kind uses, on a machine that has any."""
        if kind is EngineKind.REFERENCE:
            return int(self.engine.device != "cpu")
        return self.foreign(kind).devices

    def foreign(self, kind: EngineKind) -> ExternalEngineConfig:
        """Return the config section of an external kind of engine: `vllm` or `sglang`."""
        return self.vllm if kind is EngineKind.VLLM else self.sglang


def check_forms_pairs(learner: LearnerConfig, scheme: CreditScheme) -> None:
    """Raise `ConfigError` if the learner's loss is DPO and the credit scheme forms no preference pairs."""
    if learner.policy_loss is PolicyLossKind.DPO and not isinstance(scheme, PairCreditScheme):
        pairs = [str(name) for name, one in SCHEMES.items() if isinstance(one, PairCreditScheme)]
        raise ConfigError(
            "learner.policy_loss = 'dpo'",
            f"experience.credit = {scheme.name!r} forms no pairs of rollouts",
            hint=f"set experience.credit = {' or '.join(map(repr, pairs))}, or use another loss",
        )


def rollouts_on(num_contexts: int) -> int:
    """Return how many rollouts run concurrently on engines that can hold `num_contexts` full contexts.

    It is three quarters of that: each rollout keeps its KV cache between its turns, and with more rollouts engines
    would evict contexts and compute them again."""
    return max(1, num_contexts * 3 // 4) if num_contexts else 0


def read_config(run: RunFolder) -> RunConfig:
    """Read the config of a run, with all defaults, from its config.toml.

    Raises `RunError` when config.toml is missing or damaged, and `RunRefused` when another version of etude wrote it.
    """
    path = run / "config.toml"
    if not path.is_file():
        raise RunError(f"{path} is missing", "it contains the settings of the run", hint=HINT_COPY)
    try:
        return with_digests(load(path, RunConfig), {one["path"]: one["digest"] for one in run.plugins()})
    except ConfigUnreadable as error:
        raise RunError(f"{path} is damaged", error.facts, hint=HINT_COPY) from None
    except ConfigError as error:
        wrote = run.identity().get("etude", "unknown")
        raise RunRefused(
            f"{path} was written by etude {wrote}",
            f"this is etude {__version__}, which reports: {error.what}",
            hint=f"resume with etude {wrote}, or start a new run: --set start=(one of {run / 'checkpoints'})",
        ) from None


def config_to_resume(run: RunFolder, given: Mapping[str, Any], *, complete: bool = True) -> RunConfig:
    """Return the config of a run to resume, after a check that the settings `given` now (nested dicts) are the same.

    With `complete`, `given` is a full config file, so a setting that is missing from it counts as changed; otherwise
    only the settings in `given` are compared. Changed defaults of etude do not count, nor does `[rewards]`, which may
    change in a run (`loop.reward_settings`). Raises `RunRefused`, which names each differing setting, also when
    config.toml was edited; `ConfigError` for settings that are not valid."""
    had = read_config(run)
    check_config_unchanged(run)
    now_plain, had_plain = leaves(to_plain(build(RunConfig, given))), leaves(to_plain(had))
    now, then = set(leaves(given)), set(map(str, run.identity().get("given", ())))
    other = [
        f"{name} is {_shown(now_plain, name)}, the run has {_shown(had_plain, name)}"
        for name in sorted({*now_plain, *had_plain})
        if now_plain.get(name) != had_plain.get(name)
        and not name.startswith("rewards.")
        and any(_overlap(name, one) for one in (now | then if complete and given else now))
    ]
    if other:
        raise RunRefused(
            f"{run.path} was made with other settings",
            "; ".join(other[:5]) + (f"; and {len(other) - 5} more" if len(other) > 5 else ""),
            hint=f"resume with its own settings: etude run --resume {run.path}; or start a new run",
        )
    return had


def _overlap(name: str, other: str) -> bool:
    """Whether two dotted names are equal or one is a section of the other. A plug-in may be written in both forms."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def check_same_plugins(run: RunFolder, now: Sequence[Identity], *, accept: bool) -> None:
    """Check that the plug-ins of a run to resume have the code that its steps so far used.

    `now` identifies their code as installed now. Raises `RunRefused` if the code differs, unless `accept` is True."""
    then = {one["path"]: one for one in run.plugins()}
    other = [one for one in now if one.path in then and msgspec.to_builtins(one) != then[one.path]]
    if other and not accept:
        facts = "; ".join(f"now {one}, the run has {msgspec.convert(then[one.path], Identity)}" for one in other)
        hint = "restore that version; or continue with the new code: "
        hint += f"etude run --resume {run.path} --changed-plugins"
        raise RunRefused(f"{run.path} was made with another version of a plug-in", facts, hint=hint)


def check_config_unchanged(run: RunFolder) -> None:
    """Check that a run's config.toml is unchanged since the run was created. Raises `RunRefused` if it is not."""
    digest = run.identity().get("config_digest")
    if digest not in (None, hashlib.sha256((run / "config.toml").read_bytes()).hexdigest()):
        raise RunRefused(
            f"{run.path}/config.toml was changed since the run was made",
            "the steps so far were trained with other settings",
            hint=f"undo the change; or start a new run: etude run {run.path}/config.toml --name NAME",
        )


def _shown(plain: Mapping[str, Any], name: str) -> str:
    return repr(plain[name]) if name in plain else "not set"


def open_tasks(config: RunConfig, *, canaries: bool = True) -> TaskSource:
    """Open the run's task source, with the images that `preflight` has built. Raises `TaskError` if it is damaged.

    With `canaries` some training tasks are canaries as configured: they cannot be solved honestly, so a reward shows
    cheating."""
    tasks = config.tasks
    source = open_source(tasks.source, tasks.seed, files=tasks.files, functions_per_file=tasks.functions_per_file)
    if isinstance(source, HarborSource) and config.machines.images:
        source = with_built_images(source, ImageStore(Path(config.machines.images)))
    return WithCanaries(source, tasks.canaries, tasks.seed) if canaries and tasks.canaries else source
