"""Checks before a run is started that it will not fail later: in about a second, and before a run folder is made.

The checkpoint can be computed here, the tools exist, and each split that is used has tasks. The first tasks are proven
on machines (the reference scores 1, the untouched state 0), which shows that machines can be made. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.config import leaves, to_plain
from etude.environments import MachineGrader, exports_of
from etude.environments.backends import runtime_of
from etude.environments.images import ImageStore
from etude.errors import ConfigError, RunError, TaskError
from etude.experience.database import NoLedger, check_server
from etude.harness import ChatFormat, standard_tools
from etude.inference.config import EngineKind
from etude.inference.external.environment import SERVER_KINDS
from etude.listening import bind
from etude.loop.config import RunConfig, open_tasks
from etude.loop.devices import check_devices, check_foreign_device
from etude.loop.joining import check_listen
from etude.loop.limits import check_limits, first_tasks, starting_model
from etude.loop.places import check_store, has_published, ledger_place, read_ledger
from etude.loop.task_images import with_images
from etude.loop.wire import MAX_FRAME_BYTES
from etude.models.config import ModelConfig
from etude.models.headers import check_blocks, check_rank, check_weights, tell_left_out
from etude.numerics.config import NumericsConfig
from etude.records.task import Split
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks import check, open_source
from etude.tasks.harbor import HarborSource
from etude.tasks.verifiers import grader_for
from etude.weights.chain.signing import read_signer

PROVEN_TASKS = 8


def preflight(
    config: RunConfig,
    *,
    adopted: bool = False,
    elsewhere: bool = False,
    given: Collection[str] = (),
    said: Callable[[str], None] = lambda _: None,
) -> None:
    """Check a config. Raises the `ConfigError`, `CheckpointError`, `TaskError` or `MachineError` that the run would end
    with later.

    `adopted`: the run has its own copy of the starting checkpoint, so the original may be gone. `elsewhere`: components
    run on other machines, where tasks and devices were checked before. `given`: names of the settings that the user
    gave. `said` is called with a line on each image that was built, layers of the checkpoint that are left out,
    settings that are not used, evaluations that ask for more tasks than there are, and steps that may be too large for
    this machine."""
    if config.start is not None and not adopted:
        context_tokens, numerics = config.engine.context_tokens, config.numerics
        rank = config.learner.lora_rank
        model = check_start(config.start, context_tokens=context_tokens, numerics=numerics, lora_rank=rank, said=said)
        check_experts(model, config.learner.expert_parallel)
        tell_other_model(config, model, given, said)
        check_step(config, model, said)
    if config.start is None:
        check_blocks(config.model, config.numerics.quantise)
        check_rank(config.model, config.learner.lora_rank)
        config.model.shared(config.numerics.degree)
        check_step(config, config.model, said)
        if config.learner.device.startswith("cuda"):
            said(f"mid-training computes on the CPU; learner.device = {config.learner.device!r} is where RL does")
    read_signer(config.stores.signing_key)
    for url in filter(None, (config.stores.weights, config.stores.traces)):
        check_store(url, said)
    if config.experience.ledger:
        check_server(config.experience.ledger)
    check_listen(config)
    if config.fleet.ranks_at:
        check_ranks_at(config.fleet.ranks_at)
    if not elsewhere:
        check_devices(config)
    check_foreign(config, adopted=adopted)
    standard_tools(config.harness.tools)
    if config.harness.require_submit and "submit" not in config.harness.tools:
        raise ConfigError(
            f"harness.tools = {list(map(str, config.harness.tools))}",
            "no rollout could submit, and harness.require_submit gives reward 0 to those that do not",
            hint="add 'submit', or set harness.require_submit=false",
        )
    asyncio.run(build_images(config, said))
    source = check_tasks(config, used_splits(config))
    tell_few_tasks(config, source, given, said)
    if config.start is not None and not adopted:
        check_limits(config.harness, ChatFormat.load(config.start), first_tasks(source, used_splits(config)), said)
    if not elsewhere:
        asyncio.run(_prove(source, config))


def check_ranks_at(address: str) -> None:
    """Check that this machine can listen at an address for the ranks of others. Raises `ConfigError`."""
    try:
        bind(address, 0).close()
    except ConfigError as error:
        hint = "give an address of this machine that the machines of the other ranks can reach"
        raise ConfigError(f"fleet.ranks_at = {address!r}: {error.what}", error.facts, hint=hint) from None


def prove_tasks(config: RunConfig) -> None:
    """Prove the first tasks on machines made here: the reference scores 1, the untouched state 0. Raises `TaskError`,
    `MachineError`."""
    asyncio.run(_prove(check_tasks(config, used_splits(config)), config))


def check_foreign(config: RunConfig, *, adopted: bool) -> None:
    """Check vLLM or SGLang where the config names one: that it is installed, in a tested version, and can follow this
    model's weights. The model is not checked again where the run has `adopted` it. Raises `EngineError`,
    `ConfigError`."""
    kinds = sorted({*config.fleet.engines} - {EngineKind.REFERENCE})
    for kind in kinds:
        check_foreign_device(config, kind)
    if not kinds or config.start is None or adopted:
        return
    model = starting_model(config.start)
    if model.architecture.foreign:
        raise ConfigError(
            f"fleet.engines = {list(map(str, config.fleet.engines))}",
            f"{SERVER_KINDS[kinds[0]].name} {model.architecture.foreign} (family {model.family})",
            hint="take reference engines for this model",
        )


def check_machines(config: RunConfig) -> None:
    """Whether machines of this config can be made here, with the bounds that it wants. Raises `MachineError`,
    `InputError`."""

    async def opened() -> None:
        await runtime_of(config.machines).close()

    asyncio.run(opened())


async def build_images(config: RunConfig, said: Callable[[str], None]) -> None:
    """Build the images of tasks that have a Dockerfile, where the config names a store for images."""
    source = open_source(config.tasks.source, config.tasks.seed)
    if not isinstance(source, HarborSource) or not config.machines.images:
        return
    runtime = runtime_of(config.machines)
    try:
        store = ImageStore(Path(config.machines.images))
        await with_images(source, store, runtime, lambda name: said(f"the image of {name} is there"))
    finally:
        await runtime.close()


def check_tasks(config: RunConfig, splits: Sequence[Split]) -> TaskSource:
    """Open the config's tasks and check that each of these splits has one. Raises `ConfigError`, `TaskError`."""
    source = open_tasks(config, canaries=False)
    for split in splits:
        if source.size(split) == 0:
            raise TaskError(
                f"{config.tasks.source} has no {split} task",
                "the run needs some",
                hint="add tasks; `split` in a task.toml puts one where you want it",
            )
    return source


def tell_few_tasks(config: RunConfig, source: TaskSource, given: Collection[str], said: Callable[[str], None]) -> None:
    """Report the evaluations for which the user asked for more tasks than their split has."""
    evals = config.evals
    asked = (
        (Split.HELDOUT, "heldout_tasks", evals.heldout_tasks),
        (Split.VALIDATION, "during_tasks", evals.during_tasks),
        (Split.TRANSFER, "transfer_tasks", evals.transfer_tasks),
    )
    used = used_splits(config)
    for split, setting, wanted in asked:
        size = source.size(split)
        if f"evals.{setting}" in given and split in used and size is not None and size < wanted:
            said(f"evals.{setting} = {wanted}: {config.tasks.source} has {size} {split} tasks, and these are used")


def check_ledger(run: RunFolder) -> None:
    """Check that a run which published weights still has the ledger that accounts for them. Raises `RunError` when it
    was deleted, `LedgerError` when it is damaged."""
    if not has_published(run):
        return  # no weights to account for: a ledger that is cut off was never used
    try:
        ledger = read_ledger(run)
    except NoLedger as error:
        raise RunError(
            f"{run.path} has published weights and no {_name(run)}",
            f"which rollouts they were trained on is not known; {error.what}: {error.facts}",
            hint=f"put it back; or begin anew from a checkpoint: --set start={run.path}/checkpoints/mid",
        ) from None
    try:
        ledger.prove()
    finally:
        ledger.close()


def _name(run: RunFolder) -> str:
    place = ledger_place(run)
    return place.name if isinstance(place, Path) else "ledger on its server"


def check_start(
    checkpoint: Path,
    *,
    context_tokens: int,
    numerics: NumericsConfig | None = None,
    lora_rank: int = 0,
    said: Callable[[str], None] = lambda _: None,
) -> ModelConfig:
    """Check a Hugging Face directory as a run's start; returns its model. `said` is called with a line on layers that
    are left out.

    Checked are: the architecture is one that etude computes; every weight is there (by the headers of the files); its
    widths fit the quantisation and the degree of `numerics` and are larger than `lora_rank`; it has `context_tokens`
    positions; and it has a tokeniser with a chat format. Raises `CheckpointError` or `ConfigError`."""
    numerics = numerics or NumericsConfig()
    model = starting_model(checkpoint)
    check_weights(checkpoint, model)
    check_blocks(model, numerics.quantise)
    check_rank(model, lora_rank)
    model.shared(numerics.degree)
    if context_tokens > model.context_tokens:
        raise ConfigError(
            f"engine.context_tokens = {context_tokens}",
            f"the checkpoint has positions for {model.context_tokens}",
            hint="lower it, and harness.context_tokens with it, or start from a model with a longer context",
        )
    ChatFormat.load(checkpoint)
    tell_left_out(checkpoint, model, said)
    return model


def tell_other_model(
    config: RunConfig, model: ModelConfig, given: Collection[str], said: Callable[[str], None]
) -> None:
    """Report the settings of `[model]` that the user gave and that differ from the starting checkpoint: they are not
    used."""
    wanted, is_ = (leaves({"model": to_plain(one)}) for one in (config.model, model))
    other = [name for name in sorted(given) if name in wanted and wanted[name] != is_.get(name)]
    if other:
        told = ", ".join(f"{name} = {wanted[name]!r} (it has {is_.get(name)!r})" for name in other)
        said(f"start = {str(config.start)!r} says what the model is; not used: {told}")


def check_experts(model: ModelConfig, expert_parallel: int) -> None:
    """Check that so many ranks can divide a model's experts evenly. Raises `ConfigError`."""
    if model.num_experts % expert_parallel or (expert_parallel > 1 and not model.num_experts):
        raise ConfigError(
            f"learner.expert_parallel = {expert_parallel}",
            f"the checkpoint has {model.num_experts} experts, and every rank must hold the same number of them",
            hint="take a divisor of the number of experts",
        )


def used_splits(config: RunConfig) -> list[Split]:
    during = 0 < config.evals.every < config.rl.steps
    used = {
        Split.TRAIN: config.rl.steps > 0,
        Split.VALIDATION: during,
        Split.HELDOUT: True,
        Split.TRANSFER: config.evals.transfer_tasks > 0,
    }
    return [split for split, is_used in used.items() if is_used]


async def _prove(source: TaskSource, config: RunConfig) -> None:
    runtime = runtime_of(config.machines)
    try:
        grader, export = grader_for(source, MachineGrader(runtime)), partial(exports_of, runtime)
        proof = await check(source, grader, used_splits(config)[0], PROVEN_TASKS, export=export)
    finally:
        await runtime.close()
    proof.require()


# ---------------------------------------------------------------------------- the largest step against memory and disk


TOKEN_BYTES = 17  # per token of a path: id, log-probability, version step and epoch of four bytes each, one of mask
PLANNED_BYTES = 1024  # per rollout in its step's plan: ids, counts, outcome and its reason; measured: 500 to 700
WIDE_ROUTES = 255  # experts above which a route takes two bytes


@dataclass(frozen=True)
class Weight:
    """The largest that a step can be: each rollout is one path that fills the context, and a step that looks for signal
    takes as many groups as it may. `num_bytes` is the batch's."""

    rollouts: int
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: RunConfig, model: ModelConfig) -> Weight:
        """The largest step of a config with the model that it trains."""
        rollouts = config.experience.window.most * config.experience.group_size
        tokens = rollouts * config.harness.context_tokens
        routes = model.num_moe_layers * model.top_k * (2 if model.num_experts > WIDE_ROUTES else 1)
        a_token = TOKEN_BYTES + (routes if config.wants_routes else 0)
        return cls(rollouts, tokens, tokens * a_token)


def check_step(
    config: RunConfig,
    model: ModelConfig,
    said: Callable[[str], None],
    *,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> None:
    """Compare a config's largest step with this machine. Raises `ConfigError` where a step's plan is larger than one
    call between processes may be.

    `said` is called with a warning where the largest step does not fit into `memory_bytes`, or the rollouts that are
    kept at once do not fit into `disk_bytes` (None: this machine's memory; the free disk of the working directory). It
    is no error, since few rollouts fill their context."""
    weight = Weight.of(config, model)
    shown = f"a step has at most {weight.tokens:,} tokens, {_gb(weight.num_bytes)}: {weight.rollouts} rollouts of "
    shown += f"harness.context_tokens = {config.harness.context_tokens}"
    if weight.rollouts * PLANNED_BYTES > max_frame_bytes:
        raise ConfigError(
            f"a step takes up to {config.experience.window.most} groups of {config.experience.group_size}: "
            f"{weight.rollouts} rollouts",
            f"their plan takes about {weight.rollouts * PLANNED_BYTES} bytes, without tokens; one call holds "
            f"{max_frame_bytes}",
            hint="make experience.groups_per_step or experience.group_size smaller"
            + (", or leave experience.signal_groups out" if config.experience.signal_groups else ""),
        )
    ranks = config.learner.ranks - config.fleet.ranks_away
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory_bytes is None else memory_bytes
    if ranks * weight.num_bytes > memory:
        each = f"each of {ranks} ranks" if ranks > 1 else "the learner"
        said(f"{shown}; {each} holds a step, and this machine has {_gb(memory)} of memory")
    steps = config.experience.max_lag + 1 + 2 * config.rl.checkpoint_every  # until two checkpoints lie behind them
    disk = shutil.disk_usage(Path.cwd()).free if disk_bytes is None else disk_bytes
    if steps * weight.num_bytes > disk:
        said(f"{shown}; rollouts of up to {steps} steps lie in the run folder, and {_gb(disk)} of disk are free here")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
