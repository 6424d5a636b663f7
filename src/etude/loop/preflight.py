"""Checks a run's config before the run starts: in about a second, and before a run folder is created.

Checks that the checkpoint can be computed, the tools exist, and each split that is used has tasks. The first tasks are
validated on machines (the reference solution scores 1, the untouched state 0), which shows that machines can be
created. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.config import leaves, to_plain
from etude.environments import MachineGrader, simulate_exports
from etude.environments.backends import runtime_from_config
from etude.environments.images import ImageStore
from etude.errors import ConfigError, RunError, TaskError
from etude.experience.database import NoLedger
from etude.experience.open_database import check_server
from etude.harness import ChatFormat, standard_tools
from etude.http_server import bind
from etude.inference.config import EngineKind, Speculation
from etude.inference.external.environment import SERVER_KINDS
from etude.loop.config import RunConfig, open_tasks
from etude.loop.devices import check_devices, check_foreign_device
from etude.loop.engine_registry import check_listen
from etude.loop.limits import check_limits, check_positions, first_tasks, start_model_config
from etude.loop.locations import check_store, has_published, ledger_location, read_ledger
from etude.loop.reward_settings import check_hints, check_stages
from etude.loop.rpc import MAX_FRAME_BYTES
from etude.loop.task_images import with_images
from etude.models.config import ModelConfig
from etude.models.headers import check_blocks, check_rank, check_weights, report_unused_layers
from etude.numerics.config import NumericsConfig
from etude.prices import read_prices
from etude.records.task import Split
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks import check, open_source
from etude.tasks.harbor import HarborSource
from etude.tasks.verifiers import grader_for
from etude.training.mid_training_phases import plan_phases
from etude.weights.chain.signing import read_signer

VALIDATED_TASKS = 8


def preflight(
    config: RunConfig,
    *,
    adopted: bool = False,
    remote: bool = False,
    given: Collection[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> None:
    """Check a config, and raise the error with which the run would fail later.

    The error is an `EtudeError`: a `ConfigError` for settings; for what they name e.g. a `CheckpointError`,
    `TaskError`, `MachineError`, `EngineError`, `StoreError` or `LedgerError`.

    - `adopted`: the run has its own copy of the starting checkpoint, so the original may be missing.
    - `remote`: the run's processes are on other machines, where tasks and devices were checked before.
    - `given`: the dotted names of the settings that the user set.
    - `log`: called with a line on each image that was built, on layers of the checkpoint that are left out, on settings
      that are not used, on reward terms that never count, on evaluations with more tasks than exist, and on steps that
      may be too large for this machine.
    """
    _check_model(config, adopted=adopted, given=given, log=log)
    check_hints(config.rewards)
    check_stages(config)
    for term in config.rewards.terms:
        if term.from_step > config.rl.steps:
            facts = f"its from_step is {term.from_step}, and rl.steps = {config.rl.steps}"
            log(f"reward term {term.name!r} is only measured in this run: {facts}")
    read_signer(config.stores.signing_key)
    if config.evals.prices is not None:
        read_prices(config.evals.prices)
    for url in filter(None, (config.stores.weights, config.stores.traces)):
        check_store(url, log)
    if config.experience.ledger:
        check_server(config.experience.ledger)
    check_listen(config)
    if config.fleet.ranks_at:
        check_ranks_at(config.fleet.ranks_at)
    if not remote:
        check_devices(config)
    check_foreign(config, adopted=adopted)
    _check_tools(config)
    asyncio.run(build_images(config, log))
    source = check_tasks(config, used_splits(config))
    log_short_splits(config, source, given, log)
    if config.start is not None and not adopted:
        check_limits(config.harness, ChatFormat.load(config.start), first_tasks(source, used_splits(config)), log)
    if not remote:
        asyncio.run(_validate(source, config))


def _check_model(config: RunConfig, *, adopted: bool, given: Collection[str], log: Callable[[str], None]) -> None:
    """Check that the model can be computed as configured; not that of an adopted checkpoint, which was checked."""
    if config.start is not None and adopted:
        return
    if config.start is None:
        model = config.model
        check_blocks(model, config.numerics.quantise)
        check_rank(model, config.learner.lora_rank)
        model.per_rank(config.numerics.degree)
    else:
        model = check_start(
            config.start,
            context_tokens=config.engine.context_tokens,
            numerics=config.numerics,
            lora_rank=config.learner.lora_rank,
            rope_factor=last_rope_factor(config),
            given=given,
            log=log,
        )
        check_mid_training(config, model, given, log)
        check_experts(model, config.learner.expert_parallel)
    model.per_rank(config.engine.tensor_parallel)
    check_heads(config, model)
    check_attention(config, model)
    if config.start is not None:
        log_unused_model_settings(config, model, given, log)
    check_step(config, model, log)


def _check_tools(config: RunConfig) -> None:
    standard_tools(config.harness.tools)
    if config.harness.require_submit and not config.harness.is_command and "submit" not in config.harness.tools:
        raise ConfigError(
            f"harness.tools = {list(map(str, config.harness.tools))} lacks 'submit'",
            "with harness.require_submit, rollouts that do not submit have reward 0",
            hint="add 'submit', or set harness.require_submit=false",
        )


def check_ranks_at(address: str) -> None:
    """Check that this machine can listen at an address to which learner ranks on other machines connect.

    Raises `ConfigError` if it cannot."""
    try:
        bind(address, 0).close()
    except ConfigError as error:
        hint = "give an address of this machine that the machines of the other ranks can reach"
        raise ConfigError(f"fleet.ranks_at = {address!r}: {error.what}", error.facts, hint=hint) from None


def validate_tasks(config: RunConfig) -> None:
    """Validate the first tasks on machines created here: the reference solution must score 1, and the unchanged machine
    0.

    Raises `TaskError` for a task that is not valid, and `MachineError` if machines cannot be created."""
    asyncio.run(_validate(check_tasks(config, used_splits(config)), config))


def check_foreign(config: RunConfig, *, adopted: bool) -> None:
    """Check that a config's vLLM or SGLang engines are installed in a tested version and can run this model.

    With `adopted` the model was checked before. Raises `EngineError` for a missing or untested installation, and
    `ConfigError` for a model that these engines cannot serve."""
    kinds = sorted({*config.fleet.engines} - {EngineKind.REFERENCE})
    for kind in kinds:
        check_foreign_device(config, kind)
    if not kinds or config.start is None or adopted:
        return
    model = start_model_config(config.start)
    for kind in kinds:
        if why := model.architecture.unserved(model, kind):
            raise ConfigError(
                f"fleet.engines = {list(map(str, config.fleet.engines))} cannot serve this model",
                f"{SERVER_KINDS[kind].name} {why} (family {model.family})",
                hint="use reference engines for this model",
            )


def check_machines(config: RunConfig) -> None:
    """Check that machines with the limits of this config can be created here.

    Raises `MachineError` or `InputError` if they cannot."""

    async def opened() -> None:
        await runtime_from_config(config.machines).close()

    asyncio.run(opened())


async def build_images(config: RunConfig, log: Callable[[str], None]) -> None:
    """Build the images of tasks with a Dockerfile, if the config has a store for images.

    `log` is called with a line for each image."""
    source = open_source(config.tasks.source, config.tasks.seed)
    if not isinstance(source, HarborSource) or not config.machines.images:
        return
    runtime = runtime_from_config(config.machines)
    try:
        store = ImageStore(Path(config.machines.images))
        await with_images(source, store, runtime, lambda name: log(f"the image of {name} is ready"))
    finally:
        await runtime.close()


def check_tasks(config: RunConfig, splits: Sequence[Split]) -> TaskSource:
    """Open the config's task source, check that each of these splits has a task, and return the source.

    Raises `TaskError` for a split without tasks or a damaged source, and `ConfigError` for invalid settings."""
    source = open_tasks(config, canaries=False)
    for split in splits:
        if source.size(split) == 0:
            raise TaskError(
                f"{config.tasks.source} has no {split} task",
                "the run needs tasks of this split",
                hint="add tasks; `split` in a task.toml sets the split of a task",
            )
    return source


def log_short_splits(config: RunConfig, source: TaskSource, given: Collection[str], log: Callable[[str], None]) -> None:
    """Log the evaluations for which the user set more tasks than their split has.

    `given` are the dotted names of the settings that the user set."""
    evals = config.evals
    settings = (
        (Split.HELDOUT, "heldout_tasks", evals.heldout_tasks),
        (Split.VALIDATION, "during_tasks", evals.during_tasks),
        (Split.TRANSFER, "transfer_tasks", evals.transfer_tasks),
    )
    used = used_splits(config)
    for split, setting, wanted in settings:
        size = source.size(split)
        if f"evals.{setting}" in given and split in used and size is not None and size < wanted:
            log(f"evals.{setting} = {wanted}: {config.tasks.source} has only {size} {split} tasks; all are used")


def check_ledger(run: RunFolder) -> None:
    """Check that a run which has published weights has its ledger, the database of its rollouts.

    Raises `RunError` when it is missing, and `LedgerError` when it is damaged."""
    if not has_published(run):
        return  # nothing was trained, so the ledger was never used
    try:
        ledger = read_ledger(run)
    except NoLedger as error:
        raise RunError(
            f"{run.path} has published weights and no {_name(run)}",
            f"without it, it is unknown which rollouts these weights were trained on; {error.what}: {error.facts}",
            hint=f"restore it; or start a new run from a checkpoint: --set start={run.path}/checkpoints/mid",
        ) from None
    try:
        ledger.verify()
    finally:
        ledger.close()


def _name(run: RunFolder) -> str:
    place = ledger_location(run)
    return place.name if isinstance(place, Path) else "ledger on its server"


def last_rope_factor(config: RunConfig) -> float:
    """Return the factor by which the model of a run has more positions after mid-training; 1 without it."""
    return config.mid_training.settings()[-1].rope_factor if config.mid_trains else 1.0


def check_start(
    checkpoint: Path,
    *,
    context_tokens: int,
    numerics: NumericsConfig | None = None,
    lora_rank: int = 0,
    rope_factor: float = 1.0,
    given: Collection[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> ModelConfig:
    """Check a Hugging Face directory as a run's starting checkpoint, and return its model config.

    It checks that etude supports the architecture; that every weight exists (from the headers of the files); that the
    layer sizes fit `numerics` (format of quantisation, tensor-parallel degree) and are larger than `lora_rank`; that
    the model has `context_tokens` positions, of which mid-training makes `rope_factor` times as many; and that there is
    a tokeniser with a chat format. `given`: as in `check_positions`. `log` is called with a line on layers that are
    left out. Raises `CheckpointError` or `ConfigError`."""
    numerics = numerics or NumericsConfig()
    model = start_model_config(checkpoint)
    check_weights(checkpoint, model)
    check_blocks(model, numerics.quantise)
    check_rank(model, lora_rank)
    model.per_rank(numerics.degree)
    check_positions(model, context_tokens=context_tokens, rope_factor=rope_factor, given=given)
    ChatFormat.load(checkpoint)
    report_unused_layers(checkpoint, model, log)
    return model


def log_unused_model_settings(
    config: RunConfig, model: ModelConfig, given: Collection[str], log: Callable[[str], None]
) -> None:
    """Log the `[model]` settings that are not used because they differ from the starting checkpoint.

    `given` are the dotted names of the settings that the user set; only these are considered."""
    wanted, is_ = (leaves({"model": to_plain(one)}) for one in (config.model, model))
    other = [name for name in sorted(given) if name in wanted and wanted[name] != is_.get(name)]
    if other:
        unused = ", ".join(f"{name} = {wanted[name]!r} (it has {is_.get(name)!r})" for name in other)
        log(f"start = {str(config.start)!r} defines the model; these settings are not used: {unused}")


def check_mid_training(
    config: RunConfig, model: ModelConfig, given: Collection[str], log: Callable[[str], None]
) -> None:
    """Check the mid-training of a starting checkpoint and its corpora, and log what it does.

    `given` are the dotted names of the settings that the user set. Raises `ConfigError`, and `InputError` or
    `CorpusError` for a corpus that is missing, unfinished, damaged, or of another tokenizer."""
    if not config.mid_trains:
        if unused := sorted(name for name in given if name.startswith("mid_training.")):
            log(f"start is set and mid_training.corpus is not: no mid-training; not used: {', '.join(unused)}")
        return
    for plan in plan_phases(config.mid_training, None, model=model, tokenizer=config.start):
        assert plan.built is not None, "with a start, every phase has a corpus"
        wanted, has = plan.settings.num_tokens, plan.built.facts.tokens
        once = "each document once" if wanted is None or not has else f"{wanted / has:.3g} times all of them"
        log(f"mid-training on {plan.folder}, phase {plan.built.facts.name!r}: {has:,} tokens, {once}")


def check_experts(model: ModelConfig, expert_parallel: int) -> None:
    """Check that a model's experts can be divided evenly among `expert_parallel` ranks. Raises `ConfigError` if not."""
    if model.num_experts % expert_parallel or (expert_parallel > 1 and not model.num_experts):
        raise ConfigError(
            f"learner.expert_parallel = {expert_parallel} is not possible",
            f"the checkpoint has {model.num_experts} experts, and every rank must hold the same number of them",
            hint="set it to a divisor of the number of experts",
        )


def check_heads(config: RunConfig, model: ModelConfig) -> None:
    """Check that a run can train the MTP heads of its model, and that its engines have those that they draft with.

    `model`: the model before mid-training. Raises `ConfigError` if not."""
    heads = config.mid_training.models(model)[-1].mtp_heads if config.mid_trains else model.mtp_heads
    drop = "give the model no heads: [model] mtp_heads, or num_nextn_predict_layers in a copy's config.json"
    if config.engine.speculation is Speculation.HEADS and not heads:
        raise ConfigError(
            "engine.speculation = 'heads' is not possible",
            "the model has no MTP heads",
            hint="set model.mtp_heads = 1, or mid_training.mtp_heads = 1 for a starting checkpoint; or set "
            "engine.speculation = 'look-up' or 'off'",
        )
    if heads and config.learner.ranks > 1:
        raise ConfigError(
            f"learner.ranks = {config.learner.ranks} is not possible",
            f"the model has {heads} MTP heads, which one process trains",
            hint=f"set learner.ranks = 1; or {drop}",
        )
    if heads and (kinds := sorted({*config.fleet.engines} - {EngineKind.REFERENCE})):
        raise ConfigError(
            f"fleet.engines = {list(map(str, config.fleet.engines))} cannot serve this model",
            f"it has {heads} MTP heads, and {SERVER_KINDS[kinds[0]].name} has no memory for their weights",
            hint=f"use reference engines; or {drop}",
        )


def check_attention(config: RunConfig, model: ModelConfig) -> None:
    """Check that a run uses nothing that the attention of its model cannot do. Raises `ConfigError` if not."""
    if model.linear_layers and config.engine.speculation is not Speculation.OFF:
        raise ConfigError(
            f"engine.speculation = {str(config.engine.speculation)!r} is not possible",
            f"the model, a {model.family}, has gated delta layers: rejected tokens cannot be removed from their states",
            hint="set engine.speculation = 'off'",
        )
    if model.linear_layers and config.learner.context_parallel > 1:
        raise ConfigError(
            f"learner.context_parallel = {config.learner.context_parallel} is not possible",
            f"the model, a {model.family}, has gated delta layers: each token needs the state after those before it",
            hint="set learner.context_parallel = 1; data and expert parallelism are possible",
        )


def used_splits(config: RunConfig) -> list[Split]:
    """Return the splits of tasks that a run of this config uses. Tasks of the first one are validated before the
    run."""
    during = 0 < config.evals.every < config.rl.steps
    used = {
        Split.TRAIN: config.rl.steps > 0,
        Split.VALIDATION: during,
        Split.HELDOUT: True,
        Split.TRANSFER: config.evals.transfer_tasks > 0,
    }
    return [split for split, is_used in used.items() if is_used]


async def _validate(source: TaskSource, config: RunConfig) -> None:
    runtime = runtime_from_config(config.machines)
    try:
        grader, export = grader_for(source, MachineGrader(runtime)), partial(simulate_exports, runtime)
        proof = await check(source, grader, used_splits(config)[0], VALIDATED_TASKS, export=export)
    finally:
        await runtime.close()
    proof.require()


# Size of the largest step, compared with memory and disk


TOKEN_BYTES = 17  # per token of a path: id, log-probability, version step, epoch (four bytes each), and mask (one)
PLANNED_BYTES = 1024  # per rollout in its step's plan: ids, counts, outcome and reason; measured: 500 to 700
WIDE_ROUTES = 255  # with more experts a route takes two bytes


@dataclass(frozen=True)
class StepSize:
    """The size of the largest possible training step: numbers of rollouts and tokens, and bytes of the batch.

    In such a step each rollout fills the context and is forked, and as many groups as allowed are tried to find some
    with signal."""

    rollouts: int
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: RunConfig, model: ModelConfig) -> StepSize:
        """Compute the largest step of a config with this model."""
        rollouts = config.experience.window.max_groups * config.experience.group_size * config.harness.forks
        tokens = rollouts * config.harness.context_tokens
        routes = model.num_moe_layers * model.top_k * (2 if model.num_experts > WIDE_ROUTES else 1)
        a_token = TOKEN_BYTES + (routes if config.wants_routes else 0)
        return cls(rollouts, tokens, tokens * a_token)


def check_step(
    config: RunConfig,
    model: ModelConfig,
    log: Callable[[str], None],
    *,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> None:
    """Check that a config's largest step fits this machine. Raises `ConfigError` if its plan exceeds an RPC message.

    `log` is called with a warning when the step does not fit into `memory_bytes`, or the rollouts kept at once do not
    fit into `disk_bytes` (None: this machine's memory; the free disk of the working directory). This is not an error,
    since few rollouts fill their context."""
    size = StepSize.of(config, model)
    shown = f"a step has at most {size.tokens:,} tokens, {_gb(size.num_bytes)}: {size.rollouts} rollouts of "
    shown += f"harness.context_tokens = {config.harness.context_tokens}"
    if size.rollouts * PLANNED_BYTES > max_frame_bytes:
        raise ConfigError(
            f"a step may have {config.experience.window.max_groups} groups of {config.experience.group_size}: "
            f"{size.rollouts} rollouts",
            f"their plan takes about {size.rollouts * PLANNED_BYTES} bytes, without tokens; the limit of a message is "
            f"{max_frame_bytes}",
            hint="reduce experience.groups_per_step or experience.group_size"
            + (", or remove experience.signal_groups" if config.experience.signal_groups else ""),
        )
    ranks = config.learner.ranks - config.fleet.ranks_away
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory_bytes is None else memory_bytes
    if ranks * size.num_bytes > memory:
        each = f"each of {ranks} ranks" if ranks > 1 else "the learner"
        log(f"{shown}; {each} has one step in memory, and this machine has {_gb(memory)} of memory")
    steps = config.experience.max_lag + 1 + 2 * config.rl.checkpoint_every  # kept until two later checkpoints exist
    disk = shutil.disk_usage(Path.cwd()).free if disk_bytes is None else disk_bytes
    if steps * size.num_bytes > disk:
        log(f"{shown}; the run folder keeps rollouts of up to {steps} steps, and {_gb(disk)} of disk are free here")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
