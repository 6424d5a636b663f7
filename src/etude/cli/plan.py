"""The command ``etude plan``: estimate memory, time and cost of a config, on known or measured hardware."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from etude.cli.locations import console, open_run
from etude.config import load, overridden, read, to_toml
from etude.dashboard.formatting import number
from etude.errors import CheckpointError, ConfigError, EtudeError, Exit, NoCheckpoint, nearest
from etude.harvest import HarvestConfig, harvested
from etude.harvest.config import Harvested
from etude.inference.config import EngineKind, devices_of
from etude.loop.config import RunConfig
from etude.loop.limits import build_config
from etude.loop.measured_steps import MeasuredSteps
from etude.models.config import ModelConfig
from etude.models.headers import check_rank
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.plan import (
    DEVICES,
    Device,
    Layout,
    Measured,
    Plan,
    Region,
    Shape,
    Training,
    device,
    engine_remedies,
    learner_remedies,
    plan,
    sensitivity,
)
from etude.plan.arithmetic import CODE_BYTES, FLOAT32_BYTES
from etude.plan.balance import Balance
from etude.plan.hardware import MATRIX_BYTES
from etude.scratch import ScratchDirectory
from etude.training.config import LearnerConfig, LiveWeights, Masters, Moments, OptimizerKind

CALIBRATE_S = 300.0


def print_plan(args: argparse.Namespace) -> int:
    """Print a plan; with `--against` also compare it with the measurements of a run. Returns the exit code.

    Raises `EtudeError` if the memory is not sufficient, with settings that would fit."""
    if args.balance and args.hardware == "cpu":
        facts = "learner and engines share the cores of this machine"
        raise ConfigError("--balance needs accelerators", facts, hint="name them, as in --hardware h200")
    config = _config(args)
    model = _model(config)
    check_rank(model, config.learner.lora_rank)
    run = open_run(args.against) if args.against is not None else None
    steps = MeasuredSteps.read(run, config) if run is not None else None
    shape, layout = _shape(args, config, steps), _layout(args, config, steps)
    _check(model, config, shape, layout)
    prices = _prices(args.price)
    hardware = _calibrated(config) if args.hardware == "cpu" else device(args.hardware)
    hardware = replace(hardware, dollars_h=prices.get(args.hardware, hardware.dollars_h))
    engines_on = _engines_on(args, hardware, prices)
    found = plan(model, shape, layout, hardware, engines_on)
    balances = _balances(args, model, shape, layout, hardware, engines_on)
    lent = harvested(load(args.production, HarvestConfig)) if args.production is not None else None
    cores = hardware.cores if isinstance(hardware, Measured) else 0
    beside = steps.compare(found, cores) if steps is not None and cores else {}
    if args.json:
        result = {"shape": asdict(shape), "layout": asdict(layout), "hardware": asdict(hardware), "plan": found.plain()}
        result |= {"balance": {name: asdict(one) for name, one in balances.items()}} if balances else {}
        result |= {"production": asdict(lent)} if lent is not None else {}
        print(json.dumps({**result, "against": {n: {"planned": p, "measured": m} for n, (p, m) in beside.items()}}))
        return _require_memory(model, layout, found)
    code = _require_memory(model, layout, found)
    screen = console()
    screen.print(_table(found, shape, layout, hardware))
    if beside:
        screen.print(_compared(beside))
    if balances:
        screen.print(_balanced(balances))
    if lent is not None:
        screen.print(_beside_production(lent, balances))
    return code


def _balances(
    args: argparse.Namespace,
    model: ModelConfig,
    shape: Shape,
    layout: Layout,
    hardware: Device | Measured,
    engines_on: Device | None,
) -> dict[str, Balance]:
    """The balance of devices and its variations, with `--balance`."""
    if not args.balance or isinstance(hardware, Measured):
        return {}
    return sensitivity(model, shape, layout, hardware, engines_on)


def _balanced(balances: dict[str, Balance]) -> Table:
    table = Table("rollouts : training", "devices", "engines", "decoding batch", "a step, planned / simulated")
    for name, one in balances.items():
        if not one.engines:
            table.add_row(name, "none is enough", "", "", "one rollout takes longer than the learner")
            continue
        error = f"{one.planned_s / one.simulated_s - 1:+.0%}"
        times = f"{_seconds(one.planned_s)} / {_seconds(one.simulated_s)} ({error})"
        table.add_row(name, f"{one.ratio:.2f} : 1", str(one.engines), f"{one.batch:.0f}", times)
    return table


def _beside_production(lent: Harvested, balances: dict[str, Balance]) -> str:
    late = 100 * (lent.late_share - lent.late_share_unlent)
    text = (
        f"production: of its {lent.engines} engines {lent.lent:.1f} are lent to rollouts on average over a day; "
        f"{late:+.2f} points of requests that are late; {number(lent.hand_backs, 'hand-back')}"
    )
    if needed := next((one.engines for one in balances.values()), 0):
        text += f". The learner needs {number(needed, 'engine')}: {max(0.0, needed - lent.lent):.1f} beside production"
    return text


def _require_memory(model: ModelConfig, layout: Layout, found: Plan) -> int:
    """The exit code 0. Raises `EtudeError` if learner or engines do not fit in memory, with settings that would."""
    learner, engine = found.learner_memory, found.engine_memory
    problems: list[str] = []
    for what, memory, remedies in (
        ("a rank of the learner", learner, learner_remedies(model, layout, learner.capacity)),
        ("a device of an engine", engine, engine_remedies(model, layout, engine.capacity)),
    ):
        if not memory.fits:
            would = " | ".join(remedies) or "no setting, only larger devices"
            problems.append(f"{what} needs {_bytes(memory.total)} of {_bytes(memory.capacity)}; would fit: {would}")
    if problems:
        raise EtudeError(
            "not enough memory",
            "; ".join(problems),
            hint="change one of these settings; --json prints the complete plan anyway",
        )
    return 0


def _prices(given: Iterable[str]) -> dict[str, float]:
    found = {}
    for one in given:
        name, _, price = one.partition("=")
        if name not in (*DEVICES, "cpu"):
            raise ConfigError(f"--price {one!r}: unknown hardware", hint=nearest(name, [*DEVICES, "cpu"]))
        found[name] = _number(f"--price {one!r}", price)
    return found


def _number(what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{what}: {text!r} is not a number of at least 0", hint="give a number, for example 2.5")
    return value


def _engines_on(args: argparse.Namespace, hardware: Device | Measured, prices: dict[str, float]) -> Device | None:
    if args.engine_hardware is None:
        return None
    if isinstance(hardware, Measured):
        raise ConfigError(
            "--engine-hardware cannot be used with --hardware cpu",
            "learner and engines share this machine",
            hint="remove --engine-hardware",
        )
    found = device(args.engine_hardware)
    return replace(found, dollars_h=prices.get(found.name, found.dollars_h))


def _regions(args: argparse.Namespace, engines: int) -> tuple[Region, ...]:
    """Parse regions, each given as ``NAME:ENGINES:GBITS:MS``. Raises `ConfigError`."""
    found = []
    for one in args.region:
        parts = one.split(":")
        if len(parts) != 4 or not parts[1].isdecimal() or int(parts[1]) < 1:
            raise ConfigError(
                f"--region {one!r} is invalid",
                "write it as NAME:ENGINES:GBITS:MS (bandwidth in Gbit/s, round trip in ms)",
                hint="write it like tokyo:4:10:160",
            )
        gbits, ms = (_number(f"--region {one!r}", part) for part in parts[2:])
        if not gbits:
            raise ConfigError(
                f"--region {one!r} has a bandwidth of 0", hint="give a bandwidth above 0, as in tokyo:4:10:160"
            )
        found.append(Region(parts[0], int(parts[1]), gbits * 1.25e8, ms / 1e3))
    if found and sum(one.engines for one in found) != engines:
        total = sum(one.engines for one in found)
        raise ConfigError(f"the regions have {total} engines", f"there are {engines}", hint=f"give --engines {total}")
    link = Layout().places[0].bytes_s if args.link_gbits is None else args.link_gbits * 1.25e8
    return tuple(found) or (Region("here", engines, link),)


def _config(args: argparse.Namespace) -> RunConfig:
    ranks = [] if args.learner_ranks is None else [f"learner.ranks={args.learner_ranks}"]
    settings = [*args.set, *ranks]  # validated like those of a run
    if args.config.is_dir():
        if not (args.config / "config.json").is_file():
            raise NoCheckpoint(
                f"{args.config} is not a checkpoint", "it has no config.json", hint="give a config.toml or a checkpoint"
            )
        return build_config({**overridden(settings), "start": str(args.config)})
    return build_config(read(args.config, settings))


def _model(config: RunConfig) -> ModelConfig:
    """The sizes of the model to train: from the config.json of the start checkpoint, if there is one."""
    if config.start is None:
        return config.model
    path = config.start / "config.json"
    try:
        return ModelConfig.from_hf(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", str(error), hint="give a checkpoint directory") from None


def _shape(args: argparse.Namespace, config: RunConfig, steps: MeasuredSteps | None) -> Shape:
    """The sizes of rollouts: from the arguments, else from the run, else from the limits of the harness (half of its
    turns and of its context).

    With `experience.signal_groups`, `groups` is the average number of groups per step.
    """
    limits = config.harness
    turns = limits.max_turns / 2
    sampled = min(turns * limits.turn_tokens, limits.context_tokens / 4)
    guess = Shape(
        groups=config.experience.groups_per_step,
        group_size=config.experience.group_size,
        turns=turns,
        prompt_tokens=limits.context_tokens / 2 - sampled,
        sampled_tokens=sampled,
        tool_tokens=0.0,
    )
    given = {name: getattr(args, name) for name in ("turns", "prompt_tokens", "sampled_tokens", "tool_tokens")}
    given |= {name: getattr(args, name) for name in ("tool_s", "signal_share", "solved_share")}
    shape = steps.shape if steps is not None else guess
    shape = replace(shape, **{name: value for name, value in given.items() if value is not None})
    if steps is None or args.signal_share is not None:
        shape = replace(shape, groups=config.experience.window.mean_size(shape.signal_share))
    return shape


def _layout(args: argparse.Namespace, config: RunConfig, steps: MeasuredSteps | None) -> Layout:
    engines = len(config.fleet.engines) if args.engines is None else args.engines
    if not engines:
        raise ConfigError(
            "the config has no engines",
            "fleet.engines = []",
            hint="give the number of engines that will join: --engines N",
        )
    changed = args.changed_share
    if changed is None:
        changed = steps.changed_share if steps is not None else Layout.changed_share
    kv_tokens, contexts = _engine_capacity(config)
    dtype_bytes = 4 if config.engine.dtype == "float32" else 2
    beside = config.evals.during_tasks / config.evals.every if config.evals.every else 0.0
    return Layout(
        learner_ranks=config.learner.ranks,
        engines=engines,
        engine_ranks=args.engine_ranks or _devices(config),
        max_sequences=contexts,
        kv_tokens=kv_tokens,
        max_lag=config.experience.max_lag,
        max_running=max(1, engines * contexts * 3 // 4),
        budget_tokens=_forwarded(config),
        regions=_regions(args, engines),
        changed_share=changed,
        evaluated=steps.evaluated if steps is not None else beside,
        dtype_bytes=dtype_bytes,
        matrix_bytes=MATRIX_BYTES.get(config.numerics.quantise, float(dtype_bytes)),
        training=training_of(config.learner, config.numerics),
    )


def _devices(config: RunConfig) -> int:
    """The largest number of devices that an engine uses, from engine.tensor_parallel or the sizes in its arguments."""
    foreign = set(config.fleet.engines) - {EngineKind.REFERENCE}
    return max((devices_of(config.foreign(kind).arguments) for kind in foreign), default=config.engine.tensor_parallel)


def _engine_capacity(config: RunConfig) -> tuple[int, int]:
    """(tokens in the KV cache of an engine, number of full contexts), for the kind of engine with the largest cache."""
    kinds = set(config.fleet.engines) or {EngineKind.REFERENCE}
    engine = config.engine
    rooms = [(engine.max_sequences * engine.context_tokens, engine.max_sequences)]
    foreign = [config.foreign(kind) for kind in kinds - {EngineKind.REFERENCE}]
    found = [(one.kv_capacity(engine), one.max_contexts(engine)) for one in foreign]
    return max([*found, *(rooms if EngineKind.REFERENCE in kinds else [])])


def _check(model: ModelConfig, config: RunConfig, shape: Shape, layout: Layout) -> None:
    """Raises `ConfigError` for rollouts and engines that no run can have."""
    limit = config.harness.context_tokens
    if shape.context > limit:
        raise ConfigError(
            f"rollouts of {shape.context:,.0f} tokens do not fit harness.context_tokens = {limit}",
            f"prompt {shape.prompt_tokens:,.0f}, sampled {shape.sampled_tokens:,.0f}, tools {shape.tool_tokens:,.0f}",
            hint="lower --prompt-tokens, --sampled-tokens or --tool-tokens; or --set harness.context_tokens=N "
            "--set engine.context_tokens=N",
        )
    if model.num_heads % layout.engine_ranks:
        raise ConfigError(
            f"--engine-ranks {layout.engine_ranks} does not divide {model.num_heads} attention heads",
            hint=f"give a number that divides {model.num_heads}",
        )


def _forwarded(config: RunConfig) -> int:
    """Tokens of one forward pass on a rank: the budget, or a longer sequence; context parallelism divides it."""
    return -(-max(config.learner.budget_tokens, config.harness.context_tokens) // config.learner.context_parallel)


def training_of(learner: LearnerConfig, numerics: NumericsConfig) -> Training:
    """Return what a learner with this config trains, in the form that `plan` needs."""
    narrow = learner.weights is LiveWeights.BF16 and learner.dtype == "bfloat16"
    return Training(
        lora_rank=learner.lora_rank,
        lora_on=str(learner.lora_on),
        muon=learner.optimizer is OptimizerKind.MUON,
        masters=learner.weights is not LiveWeights.F32 and learner.masters is Masters.F32,
        bf16_masters=learner.masters is Masters.BF16,
        moment_bytes=CODE_BYTES if learner.moments is Moments.INT8 else FLOAT32_BYTES,
        offload=learner.offload,
        recompute=learner.recompute,
        quantised=numerics.quantise is not Quantise.NONE,
        dtype_bytes=4 if learner.dtype == "float32" else 2,
        gathered_bytes=2 if narrow and numerics.mode is not Mode.EXACT else 4,
        expert_parallel=learner.expert_parallel,
    )


def _calibrated(config: RunConfig) -> Measured:
    """Constants of this machine, measured in a separate process, because that imports torch."""
    with ScratchDirectory("plan") as scratch:
        path = scratch / "config.toml"
        path.write_text(to_toml(config))
        print("measuring this machine, about ten seconds", file=sys.stderr)
        argv = [sys.executable, "-m", "etude.loop.calibration", "--config", str(path)]
        env = os.environ | {"TMPDIR": str(scratch)}  # if it is killed, its files are deleted with this folder
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=CALIBRATE_S, env=env)
        except subprocess.TimeoutExpired:
            raise EtudeError(
                f"measuring this machine took more than {CALIBRATE_S:g} s",
                hint="plan for other hardware, such as --hardware h200",
            ) from None
    lines = done.stdout.splitlines()
    if done.returncode == Exit.DONE:
        return Measured(**json.loads(lines[-1]))
    if lines:  # an `EtudeError` in three parts
        what, facts, hint = json.loads(lines[-1])
    else:
        what, facts, hint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], "", ""
    given = "give the hardware: --hardware h200"
    cause = f"{what}: {facts}" if facts else what
    raise EtudeError("this machine could not be measured", cause, hint=f"{hint}; or {given}" if hint else given)


def _table(found: Plan, shape: Shape, layout: Layout, hardware: Device | Measured) -> Table:
    on_cpu = isinstance(hardware, Measured)
    work = "CPU seconds" if on_cpu else "device seconds"
    engines = number(layout.engines, "engine")
    engines += ", CPU seconds of all" if on_cpu else f", {number(layout.engine_ranks, 'device')} each"
    batch = "per engine" if on_cpu else f"per engine; compute-bound from {found.critical_batch:.0f}"
    sync = f"{found.sync_bytes / 1e6:,.1f} MB, {layout.changed_share:.0%} of the weights changed"
    rollout = f"{shape.turns:.1f} turns, {shape.context:.0f} tokens, {shape.sampled_tokens:.0f} of them sampled"
    price = ", ".join(f"{part} ${dollars:.4f}" for part, dollars in found.dollars.items())
    table = Table("what", "planned", "details")
    table.add_row("step", _seconds(found.step_s), f"bound by {found.bound_by}; {_rollouts(shape)}")
    table.add_row("learner", _seconds(found.learner_s), _learner(layout))
    if found.communication_s:
        table.add_row("communication", _seconds(found.communication_s), "per rank: weights, and tokens to experts")
    table.add_row("engines", _seconds(found.engines_s), engines)
    if on_cpu:
        table.add_row("machines", _seconds(found.machines_s), "CPU seconds: worker, grader, conductor")
    table.add_row("one rollout", _seconds(found.rollout_s), rollout)
    table.add_row("a version to every engine", _seconds(found.sync_s), sync)
    table.add_row("inference : training", f"{found.inference_to_training:.2f} : 1", work)
    table.add_row("decoding batch", f"{found.batch:.0f}", batch)
    table.add_row("decoding", f"{found.decode_tokens_s:,.0f} tokens/s", "per engine")
    table.add_row("memory, learner rank", _bytes(found.learner_memory.total), _memory(found.learner_memory))
    on_device = sum(_device_parts(found, layout).values())
    table.add_row("bytes of a trained parameter", f"{on_device:.1f}", _parts(found, layout))
    table.add_row("memory, engine device", _bytes(found.engine_memory.total), _memory(found.engine_memory))
    table.add_row("cost of a step", f"${found.step_dollars:.4f}", price)
    table.add_row(
        "cost of a million sampled tokens", f"${found.million_tokens_dollars:.2f}", "including training and tools"
    )
    return table


def _rollouts(shape: Shape) -> str:
    return f"{shape.rollouts:,.0f} rollouts: {shape.groups:,.4g} groups of {shape.group_size}"


def _learner(layout: Layout) -> str:
    training = layout.training
    adapters = f", adapters of rank {training.lora_rank}" if training.lora_rank else ""
    rule, again = "Muon" if training.muon else "AdamW", ", activation recomputation" if training.recompute else ""
    return f"{number(layout.learner_ranks, 'rank')}, {rule}{adapters}{again}"


def _device_parts(found: Plan, layout: Layout) -> dict[str, float]:
    """The bytes of a trained parameter in the memory of a device, by part."""
    away = ("masters", "moments") if layout.training.offload else ()
    return {name: value for name, value in found.parameter_bytes.items() if value and name not in away}


def _parts(found: Plan, layout: Layout) -> str:
    """The parts of the bytes of a trained parameter, with those in the host's memory and those of a frozen one."""
    training, here = layout.training, _device_parts(found, layout)
    parts = ", ".join(f"{name} {value:.3g}" for name, value in here.items())
    there = ", ".join(
        f"{name} {value:.3g}" for name, value in found.parameter_bytes.items() if value and name not in here
    )
    away = f"; in the memory of the host: {there}" if there else ""
    return parts + away + (f"; a frozen parameter {training.gathered_bytes}" if training.lora_rank else "")


def _compared(beside: dict[str, tuple[float, float]]) -> Table:
    table = Table("per step", "planned", "measured", "error")
    for name, (planned, measured) in beside.items():
        error = f"{planned / measured - 1:+.0%}" if measured else ""
        table.add_row(name, f"{planned:,.4g}", f"{measured:,.4g}", error)
    return table


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{1e3 * value:,.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e8 else f"{value / 1e6:,.1f} MB"


def _memory(memory: Any) -> str:
    parts = {name: getattr(memory, name) for name in ("weights", "optimiser", "activations", "cache")}
    used = ", ".join(f"{name} {_bytes(value)}" for name, value in parts.items() if value)
    host = f"; {_bytes(memory.host)} in the memory of the host" if memory.host else ""
    return f"{used}; {'fits' if memory.fits else 'does NOT fit'} in {_bytes(memory.capacity)}{host}"
