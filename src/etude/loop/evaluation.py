"""Evaluates published weights or a checkpoint: the same rollouts as in training, on tasks that are never trained on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.config import to_toml
from etude.evals import EvalResult, EvalRow, make_row, write_rows
from etude.evals import evaluate as sum_up
from etude.evals.costs import NO_PRICE, Price, price_of
from etude.harness import ChatFormat
from etude.inference.config import EngineKind
from etude.loop.adjustable_semaphore import AdjustableSemaphore
from etude.loop.checkpoints import checkpoint_version, copy_start_checkpoint
from etude.loop.config import RunConfig
from etude.loop.engine_leases import Lease, borrowed_engines
from etude.loop.error_groups import first_cause
from etude.loop.processes import Supervisor
from etude.loop.rollout_result import RolloutResult
from etude.loop.rollout_scheduler import (
    composed_reward,
    counted_signs,
    grade_and_drop,
    grade_rollout,
    run_once,
    siblings,
)
from etude.loop.run_in_thread import run_in_thread
from etude.loop.run_processes import RunProcesses, open_processes
from etude.prices import read_prices
from etude.records import Graded, Outcome, RolloutSpec, Version
from etude.records.summary import RolloutSummary
from etude.records.task import Split, Task
from etude.rewards import Composition
from etude.rewards.config import TermConfig
from etude.rollouts.model_url import Endpoint, write_byte_tokeniser, write_endpoint
from etude.run import RunFolder
from etude.scratch import ScratchDirectory
from etude.seams import TaskSource
from etude.telemetry import Telemetry

PROGRESS_EVERY_S = 1.0
AGAIN_S = 1.0
"""Seconds after which an unknown reward term is measured again for the first time. The wait doubles each time."""
POLICY = "policy"
"""The name of a run's model in tables of prices."""
Done = tuple[RolloutResult, Outcome]
Each = Callable[[], None]


class Baseline(enum.StrEnum):
    """A scripted agent that plays in place of a model.

    ORACLE writes the reference solution of each task; RANDOM makes random valid edits, or only submits."""

    ORACLE = "oracle"
    RANDOM = "random"


async def evaluate(
    processes: RunProcesses,
    tasks: Sequence[Task],
    *,
    name: str,
    split: str,
    step: int,
    tries: int,
    seed: int,
    temperature: float,
    out: Path,
    telemetry: Telemetry,
    price: Price = NO_PRICE,
    terms: Sequence[TermConfig] = (),
    script: Baseline | None = None,
    each: Each = lambda: None,
) -> EvalResult:
    """Evaluate the weights of training step `step` on tasks, `tries` rollouts each. `split`: stored in the result.

    With `script` a scripted agent plays instead. Returns the solve rate and related numbers, and writes them as an
    `eval.result` event. Every rollout is written with its turns as text to the Parquet file `out`, which a repeated
    evaluation replaces. A rollout with signs of cheating counts as not solved. `price`: prices of tokens and machines,
    from which the costs are computed; a script has no price. `terms`: reward terms that are measured as well; their
    means are in the result, and the solve rate does not depend on them. `each` is called after every rollout. Raises
    `PluginError` for a term that fails."""
    began, keep = time.perf_counter(), bool(terms)

    async def one(spec: RolloutSpec) -> Done:
        if script is None:
            return await run_once(processes, spec, keep=keep)
        return await _run_script(processes, spec, script, keep=keep)

    specs = _specs(tasks, tries, seed=seed, temperature=temperature, pin_step=step)
    done = await run_all(processes, specs, one, name=name, telemetry=telemetry, each=each)
    wall_s = round(time.perf_counter() - began, 3)
    if terms:
        done = await _with_terms(processes, terms, done)
    rows = [_row(*one, processes.config.composition, terms) for one in done]
    write_rows(out, rows)
    spent = judge_dollars(await processes.judge_accounts(terms)) if terms else None
    price = price if script is None else NO_PRICE  # its tokens are not those of a model
    result = sum_up(rows, name=name, split=split, step=step, wall_s=wall_s, price=price, judge_dollars=spent)
    telemetry.event("eval.result", **result.facts())
    return result


def run_price(config: RunConfig) -> Price:
    """Return the prices of the rollouts of a run's evaluations, from the table `evals.prices`.

    Without a table the price is unknown. Tokens have the prices of the model "policy" in the table. If the table does
    not have this model, the engines' GPUs are paid by the hour, and the table must have exactly one kind of GPU. Raises
    `ConfigError` for an unreadable table."""
    if config.evals.prices is None:
        return NO_PRICE
    prices = read_prices(config.evals.prices)
    kinds, num_gpus = list(prices.gpu_hours), sum(map(config.devices_of, config.fleet.engines))
    return price_of(prices, POLICY, gpu=kinds[0] if len(kinds) == 1 else "", num_gpus=num_gpus)


async def _with_terms(processes: RunProcesses, terms: Sequence[TermConfig], done: Sequence[Done]) -> list[Done]:
    """Measure reward terms of finished rollouts, the rollouts of each task together, and delete the rollouts' files."""
    groups, found = dict[str, list[int]](), list(done)
    for i, (played, outcome) in enumerate(done):
        if isinstance(outcome, Graded):
            groups.setdefault(played.summary.group_id, []).append(i)

    async def measure(rows: Sequence[int]) -> None:
        graded = [one for i in rows if isinstance(one := done[i][1], Graded)]
        summaries = [done[i][0].summary for i in rows]
        for i, one in zip(rows, await _measured(processes, terms, summaries, graded), strict=True):
            found[i] = (done[i][0], one)

    try:
        async with asyncio.TaskGroup() as tasks:
            for rows in groups.values():
                tasks.create_task(measure(rows), name="measure reward terms")
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        for played, _ in done:
            processes.files.drop(played.summary)
    return found


async def _measured(
    processes: RunProcesses, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
) -> list[Graded]:
    """Measure reward terms of a group. A value that may be known later is measured again at least once, and
    for the term's `retry_s` after the first failure."""
    graded, pause_s, failed_at = list(graded), AGAIN_S, dict[str, float]()
    retry_s = {term.name: term.retry_s for term in terms}
    while True:
        found = await processes.measure(terms, summaries, graded)
        graded = [one.with_terms(*(new.term for new in some)) for one, some in zip(graded, found, strict=True)]
        now, unknown = time.monotonic(), {new.term.name for some in found for new in some if new.retry}
        left_s = [retry_s[name] + failed_at.setdefault(name, now) - now for name in unknown]
        if max(left_s, default=0.0) <= 0.0:
            return graded
        await asyncio.sleep(min(pause_s, max(left_s)))
        pause_s *= 2


def judge_dollars(accounts: Mapping[str, float | None] | None, known: Collection[str] = ()) -> float | None:
    """Return what judges have cost in dollars: the sum of their accounts. None if unknown, or if there are none.

    `accounts`: as `RunProcesses.judge_accounts` returns them. `known`: the keys of all accounts that were seen earlier.
    If one of them is missing now, and the same judge has another account, a host is gone with its file: the sum is
    unknown."""
    if not accounts:
        return None
    names = {key.partition(" ")[2] for key in accounts}
    lost = [key for key in known if key not in accounts and key.partition(" ")[2] in names]
    found = [one for one in accounts.values() if one is not None]
    return None if lost or len(found) < len(accounts) else math.fsum(found)


def _row(
    played: RolloutResult, outcome: Outcome, composition: Composition, terms: Sequence[TermConfig] = ()
) -> EvalRow:
    reward = composed_reward(outcome, composition.without_weights)  # without weighted terms: 1.0 when solved
    signs = counted_signs(played, outcome, reward)
    names = {term.name for term in terms}
    values = outcome.values if isinstance(outcome, Graded) else {}
    measured = {name: value for name, value in values.items() if name in names}
    return make_row(played.summary, reward, turns=played.turns, sign=str(signs[0]) if signs else "", terms=measured)


def file_name(name: str, split: Split, step: int) -> str:
    """Return the name of the file with the rollouts of an evaluation, in the run's folder evals.

    It is ``<name>-<step>.parquet`` for validation tasks, ``<name>.parquet`` for others."""
    return f"{name}-{step:06d}.parquet" if split is Split.VALIDATION else f"{name}.parquet"


async def run_all(
    processes: RunProcesses,
    specs: Sequence[RolloutSpec],
    one: Callable[[RolloutSpec], Awaitable[Done]],
    *,
    name: str,
    telemetry: Telemetry,
    each: Each = lambda: None,
) -> list[Done]:
    """Await `one(spec)` for every spec, as many concurrently as the engines allow, and return the results in order.

    `each` is called after every rollout. `name` is the evaluation in `eval.progress` events."""
    semaphore, num_done, reported_at = AdjustableSemaphore(processes.max_running), 0, float("-inf")

    async def in_slot(spec: RolloutSpec) -> Done:
        nonlocal num_done, reported_at
        async with semaphore.slot():
            result = await one(spec)
        num_done += 1
        each()
        if num_done == len(specs) or time.monotonic() - reported_at >= PROGRESS_EVERY_S:
            reported_at = time.monotonic()
            telemetry.event("eval.progress", name=name, done=num_done, total=len(specs))
        return result

    telemetry.event("eval.progress", name=name, done=0, total=len(specs))
    return await asyncio.gather(*(in_slot(spec) for spec in specs))


async def baseline(
    processes: RunProcesses, source: TaskSource, kind: Baseline, *, num_tasks: int, seed: int, telemetry: Telemetry
) -> float:
    """Return the solve rate, 0 to 1, of a scripted agent on held-out tasks, with the same rollout code."""

    async def one(spec: RolloutSpec) -> Done:
        return await _run_script(processes, spec, kind)

    tasks = tasks_of(source, [Split.HELDOUT], num_tasks)
    specs = _specs(tasks, 1, seed=seed, temperature=1.0, pin_step=None)
    done = await run_all(processes, specs, one, name=kind, telemetry=telemetry)
    rows = [_row(*one, processes.config.composition) for one in done]
    return sum_up(rows, name=kind, split=Split.HELDOUT, step=0, wall_s=0.0).rate


async def _run_script(processes: RunProcesses, spec: RolloutSpec, kind: Baseline, *, keep: bool = False) -> Done:
    rollout = await processes.baseline(spec, kind)
    return rollout, await (grade_rollout if keep else grade_and_drop)(processes, rollout)


def tasks_of(source: TaskSource, splits: Sequence[Split], num_tasks: int) -> list[Task]:
    """Return the first `num_tasks` tasks of the splits, one split after the other; fewer if they have fewer."""
    tasks = list[Task]()
    for split in splits:
        size, left = source.size(split), num_tasks - len(tasks)
        tasks += [source.task(split, index) for index in range(left if size is None else min(left, size))]
    return tasks


def _specs(
    tasks: Sequence[Task], tries: int, *, seed: int, temperature: float, pin_step: int | None
) -> list[RolloutSpec]:
    return [
        spec
        for task in tasks
        for spec in siblings(
            f"{task.split}{task.index:06d}", task, tries, seed=seed, temperature=temperature, pin_step=pin_step
        )
    ]


def without_remote_engines(config: RunConfig) -> RunConfig:
    """Return the config without remote engines, since these load the weights of a run and cannot serve a checkpoint."""
    engines = config.fleet.engines or (EngineKind.REFERENCE,)
    return dataclasses.replace(config, fleet=dataclasses.replace(config.fleet, engines=engines, listen=""))


class RunEngines(NamedTuple):
    """The newest weights of a running run, to be evaluated on some of its own engines, which the run lends.

    `share`: the largest share of its engines to borrow, 0 to 1. `seconds`: the longest time."""

    run: RunFolder
    share: float
    seconds: float


class Evaluated(NamedTuple):
    """The result of `evaluate_model`.

    `general`: the loss on each window of the general text; empty: not measured. `version`: the version of the weights;
    None if it is unknown, or if the model has no weights."""

    result: EvalResult
    general: list[WindowLoss]
    version: Version | None


Model = Path | Endpoint | Baseline | RunEngines
"""What is evaluated: a checkpoint, a model at a URL, a scripted agent, or the weights on a run's engines."""


async def evaluate_model(
    model: Model,
    config: RunConfig,
    tasks: Sequence[Task],
    *,
    name: str,
    split: str,
    tries: int,
    temperature: float,
    out: Path,
    price: Price,
    general_text: str = "",
    each: Each,
) -> Evaluated:
    """Evaluate a model on tasks of the config's source, without a run and its learner.

    There are `tries` rollouts per task. `out`: the Parquet file for the rollouts. `price`: prices of tokens and
    machines. `each` is called after every rollout. `general_text`: the text on which the loss of a checkpoint is
    measured; "": not measured. Raises `EngineError`, `CheckpointError`, `MachineError`, and `RunRefused` for a run that
    lends no engines."""
    version = checkpoint_version(model) if isinstance(model, Path) else None
    config = without_remote_engines(config)
    with ScratchDirectory("eval") as scratch:
        # its name is that of the accounts of judges, so that this evaluation has its own
        run = RunFolder.create(scratch / scratch.name, config_toml=to_toml(config), seed=config.seed)
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        if isinstance(model, Path):
            await run_in_thread(functools.partial(copy_start_checkpoint, model, run, telemetry))
        elif isinstance(model, Endpoint):
            write_endpoint(run.path, model)
        elif isinstance(model, RunEngines):
            await asyncio.to_thread(shutil.copytree, model.run / "tokenizer", run / "tokenizer")
        else:
            write_byte_tokeniser(run.path)
        processes = open_processes(run, config, telemetry, Supervisor(telemetry, hung_s=config.fleet.hung_s))
        async with processes as members, contextlib.AsyncExitStack() as stack:
            if isinstance(model, Path):
                await members.start_sampling()
            else:
                await members.start_workers_and_graders()
            if isinstance(model, Endpoint):
                members.max_running.set(model.parallel * config.fleet.num_workers)
            lease: Lease | None = None
            if isinstance(model, RunEngines):
                lent = borrowed_engines(model.run, share=model.share, seconds=model.seconds)
                lease = await stack.enter_async_context(lent)
                await members.borrow(lease.engines)

            async def work() -> Evaluated:
                result = await evaluate(
                    members,
                    tasks,
                    name=name,
                    split=split,
                    step=lease.version.step if lease else 0,  # engines start with a checkpoint's weights as step 0
                    tries=tries,
                    seed=config.seed,
                    temperature=temperature,
                    out=out,
                    telemetry=telemetry,
                    price=price,
                    terms=config.rewards.terms,
                    script=model if isinstance(model, Baseline) else None,
                    each=each,
                )
                general = list[WindowLoss]()
                if general_text and members.engines:
                    general = await general_loss(members, ChatFormat.load(run / "tokenizer"), general_text)
                return Evaluated(result, general, lease.version if lease else version)

            found = await (lease.during(work()) if lease else work())
    step = found.version.step if found.version else 0
    return found._replace(result=dataclasses.replace(found.result, step=step))


class WindowLoss(NamedTuple):
    """The loss on a window of a text, in bits, and the number of UTF-8 bytes of the window."""

    bits: float
    num_bytes: int


def bits_per_byte(windows: Sequence[WindowLoss]) -> float | None:
    """Return the loss on a text in bits per byte; None without windows."""
    return math.fsum(one.bits for one in windows) / sum(one.num_bytes for one in windows) if windows else None


async def general_loss(processes: RunProcesses, chat: ChatFormat, text: str) -> list[WindowLoss]:
    """Measure the loss of the engines' weights on a text. Raises `EngineError` if an engine fails.

    The text is split into windows as long as the engines' context. Losses in bits per byte can be compared between
    models with different tokenisers, but only roughly between models with different context lengths."""
    engines, window = list(processes.engines.values()), processes.config.engine.context_tokens
    token_ids, found = chat.encode(text), list[WindowLoss]()
    for start in range(0, len(token_ids), window):
        piece = token_ids[start : start + window]
        if len(piece) > 1:
            _, logprobs = await engines[len(found) % len(engines)].verify(piece.tolist())
            found.append(WindowLoss(-math.fsum(logprobs) / math.log(2), len(chat.decode(piece[1:]).encode())))
    return found
