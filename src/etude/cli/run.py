"""The commands ``etude run``, ``status`` and ``stop``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group
from rich.live import Live

from etude.cli.arguments import LOCAL
from etude.cli.locations import RUNS, newest_run, open_run
from etude.config import Plugin, build, leaves, overridden, plugins_in, read, to_toml, with_digests
from etude.dashboard import RunView, plain_line, render, terms_legend
from etude.dashboard.progress import current_phase
from etude.errors import ConfigError, DeadlineExceeded, EtudeError, Exit, NothingLearnt, PluginError, RunError
from etude.experience.database import NoLedger
from etude.loop.config import RunConfig, check_same_plugins, config_to_resume
from etude.loop.limits import build_config
from etude.loop.locations import read_ledger
from etude.loop.preflight import check_ledger, preflight
from etude.loop.reward_settings import RewardChange, RewardSettings, changing, read_changes, record_change
from etude.models.family_lookup import own_family_names
from etude.plugins import check_all
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.mid_training_progress import resume_step

if TYPE_CHECKING:
    from etude.loop.placement import Placement

REDRAW_S, PLAIN_EVERY_S = 1.0, 5.0


def run(args: argparse.Namespace) -> int:
    """Run a config, or resume a run, and print the results at the end. Returns the exit code."""
    if args.name is not None and (not args.name or Path(args.name).name != args.name or args.name.startswith(".")):
        facts, hint = f"a run is one folder in {RUNS}/", "give a name without a path: --name first-try"
        raise ConfigError(f"--name {args.name!r} is not a valid name for a run", facts, hint=hint)
    given = read(args.config, args.set) if args.config else overridden(args.set)
    folder, config = _folder_and_config(args, given)
    if args.on != LOCAL:
        _connect(args.on, config, RUNS if folder is None else folder.path.parent)
    changes = [] if folder is None else read_changes(folder)
    if folder is not None and (args.config is not None or "rewards" in given):
        changes += changed_rewards(folder, config, given)
    later = [pair for one in changes for pair in plugins_in(one.rewards, "rewards")]
    uses = dict.fromkeys(
        [*plugins_in(config), *later, *(("model.family", Plugin(name)) for name in own_family_names())]
    )
    plugins = check_all(list(uses))
    if folder is not None:
        check_same_plugins(folder, plugins, accept=args.changed_plugins)
    config = with_digests(config, {one.path: one.digest for one in plugins})
    adopted = folder is not None and folder.ended("corpus")
    report = partial(print, file=sys.stderr)
    preflight(config, adopted=adopted, remote=args.on != LOCAL, given=leaves(given), log=report)
    if args.dry_run:
        print(to_toml(config), end="")
        return 0
    if folder is None:
        path = RUNS / (args.name if args.name is not None else _new_name(args.config))
        folder = RunFolder.create(path, config_toml=to_toml(config), seed=config.seed, given=leaves(given))
    folder.lock()
    if (code := msgspec.to_builtins(plugins)) != folder.plugins():
        folder.record_plugins(code)
    if changes and not changes[-1].since:
        step = changes[-1].from_step
        with changing(folder):
            record_change(
                folder, changes[-1].rewards, from_step=step, last_step=lambda: step - 1, num_steps=config.rl.steps
            )
        print(f"other rewards from step {step} on, as the settings say", flush=True)
    print(f"run {folder.path}", flush=True)
    return _run_to_end(folder, config, on=args.on)


def _folder_and_config(args: argparse.Namespace, given: Mapping[str, Any]) -> tuple[RunFolder | None, RunConfig]:
    """Return the run to resume, None for a new one, and its config. `given`: the settings that the user gave."""
    if args.resume is None:
        if args.config is None:
            hint = "etude run examples/laptop/config.toml"
            raise ConfigError("no CONFIG was given", "a new run needs one", hint=hint)
        return None, build_config(given).with_parity_budget()
    folder = open_run(Path(args.resume)) if args.resume else newest_run()
    config = config_to_resume(folder, given, complete=args.config is not None)
    check_ledger(folder)
    return folder, config


def _run_to_end(folder: RunFolder, config: RunConfig, *, on: str) -> int:
    """Run the phases that are left, and print the results. Returns the exit code."""
    from etude.loop import event_loop

    try:
        interrupted = event_loop.run(_run_phases(folder, config, on=on))
    except EtudeError as error:
        changed = " --changed-plugins" if isinstance(error, PluginError) else ""
        error.hint += f"; finished work is saved, resume with: etude run --resume {folder.path}{changed}"
        raise
    finally:
        if on != LOCAL:
            _disconnect()
    if interrupted:
        from etude.loop.phases import write_run_report

        write_run_report(folder)
        print(f"stopped{_resume_step(folder)}; resume with: etude run --resume {folder.path}", file=sys.stderr)
        return Exit.INTERRUPTED
    from etude.dashboard import nothing_learnt, result_lines

    print("\n".join(result_lines(folder.path)))
    if why := nothing_learnt(RunView(folder.path)):
        hint = f"look at some rollouts (etude rollouts list {folder.path}); use tasks that only some rollouts solve"
        raise NothingLearnt("the run had nothing to learn from", why, hint=hint)
    return 0


def changed_rewards(folder: RunFolder, config: RunConfig, given: Mapping[str, Any]) -> list[RewardChange]:
    """Return the change of reward settings when a run is resumed with the settings `given`; empty if there is none.

    There is no change if the settings equal those that were recorded last. If they equal those of the run's first
    config, there is no change either, since resuming with that file must not undo later changes; then the function
    prints a note."""
    rewards, next_step = build(RunConfig, given).rewards, 1
    with contextlib.suppress(NoLedger), contextlib.closing(read_ledger(folder)) as ledger:
        next_step += max(ledger.steps(), default=0)
    latest = RewardSettings(folder, config).at(next_step)
    if rewards == config.rewards != latest:
        print(
            f"[rewards] of this config is as when the run began; later changes of the run stay in force; to change it: "
            f"etude rewards set {folder.path} NAME.weight=...",
            flush=True,
        )
    return [] if rewards in (config.rewards, latest) else [RewardChange(next_step, rewards)]


def _resume_step(folder: RunFolder) -> str:
    """For a run that was stopped in mid-training: a note with the step from which it will resume; otherwise ""."""
    phase, out = current_phase(RunView(folder.path)), folder / "checkpoints" / "mid"
    if phase is None or phase.name != "mid-training" or phase.end is not None or out.is_dir():
        return ""
    every = "a checkpoint is written every mid_training.checkpoint_every steps"
    return f" (mid-training will resume from step {resume_step(out)}: {every})"


def _new_name(config: Path) -> str:
    stem = config.resolve().parent.name if config.stem == "config" else config.stem
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _connect(on: str, config: RunConfig, runs: Path) -> None:
    if config.fleet.ranks_away:
        facts, hint = (
            f"with --on {on} Ray starts the learner's processes (ranks)",
            "remove fleet.ranks_away and fleet.ranks_at",
        )
        raise ConfigError(f"fleet.ranks_away = {config.fleet.ranks_away} cannot be used with --on", facts, hint=hint)
    try:
        from etude.loop import ray_cluster
    except ImportError:
        hint = "pip install 'etude[ray]', here and on every node"
        raise ConfigError(f"--on {on} needs Ray", "it is not installed", hint=hint) from None
    ray_cluster.connect(on)
    ray_cluster.check(config, runs)


def _disconnect() -> None:
    from etude.loop import ray_cluster

    ray_cluster.disconnect()


def _placement(on: str, folder: RunFolder, config: RunConfig) -> Placement | None:
    if on == LOCAL:
        return None
    from etude.loop.ray_placement import RayPlacement

    return RayPlacement(folder.path, ranks=config.learner.ranks)


async def _run_phases(folder: RunFolder, config: RunConfig, *, on: str) -> bool:
    """Run the phases and show a view of the run. Returns True if a signal stopped it."""
    from etude.loop.phases import run_phases

    telemetry = Telemetry(folder / "events" / "conductor.jsonl", process="conductor")
    placement = _placement(on, folder, config)
    work = asyncio.create_task(run_phases(folder, config, telemetry, placement=placement), name="run")
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        work.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    view = asyncio.create_task(_show(folder), name="view")
    try:
        await work
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        view.cancel()
        await asyncio.gather(view, return_exceptions=True)
        telemetry.close()
    return stopped


async def _show(folder: RunFolder) -> None:
    """Show a live view in a terminal, or print a line every few seconds if the output is piped. Reads only the run
    folder."""
    console, view = Console(), RunView(folder.path)
    if not console.is_terminal:
        last = ""
        print(f"(for the meaning of the terms: etude status --words {folder.path})", flush=True)
        while True:
            view.refresh()
            line = plain_line(view)
            if line != last:
                print(line, flush=True)
            last = line
            await asyncio.sleep(PLAIN_EVERY_S)
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                view.refresh()
                live.update(Group(render(view), terms_legend(view)), refresh=True)
                await asyncio.sleep(REDRAW_S)
        finally:
            view.refresh()
            live.update(render(view), refresh=True)


def status(args: argparse.Namespace) -> int:
    """Print the state of a run; with `--words` also explain the terms. Returns 0."""
    folder = open_run(args.run)
    if args.watch and folder.holder() is not None:
        asyncio.run(_until_ended(folder))
    holder = folder.holder()
    console, view = Console(), RunView(folder.path)
    console.print(render(view))
    console.print(terms_legend(view) if args.words else "[dim]meaning of the terms: etude status --words[/dim]")
    console.print(_rollouts(folder), end="")
    console.print(f"{folder.path}: {_state(folder, holder)}", soft_wrap=True)
    return 0


def _state(folder: RunFolder, holder: int | None) -> str:
    if holder is not None:
        return f"running, process {holder}"
    return "ended" if folder.ended("report") else f"not running; resume with: etude run --resume {folder.path}"


async def _until_ended(folder: RunFolder) -> None:
    view = asyncio.create_task(_show(folder), name="view")
    try:
        while folder.holder() is not None and not view.done():  # noqa: ASYNC110  another process has it locked
            await asyncio.sleep(REDRAW_S)
    finally:
        view.cancel()
        await asyncio.gather(view, return_exceptions=True)


def _rollouts(folder: RunFolder) -> str:
    """One line with the number of training rollouts in each state of the ledger; "" if there is no ledger yet."""
    try:
        with contextlib.closing(read_ledger(folder)) as ledger:
            states, signs = ledger.states(), len(ledger.quarantined())
    except NoLedger:
        return ""
    except EtudeError as error:
        return f"rollouts: unknown, {error.what}: {error.facts}\n"
    counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    note = f"; {signs:,} of them quarantined: signs of cheating, reward 0" if signs else ""
    return f"rollouts: {counts}{note}\n" if states else ""


def stop(args: argparse.Namespace) -> int:
    """Ask the conductor, the main process of a run, to stop, and wait until it has. Returns the exit code."""
    folder = open_run(args.run)
    holder = folder.holder()
    if holder is None:
        hint = "give a run that is running; etude status shows the newest run"
        raise RunError(f"{folder.path} is not running", hint=hint)
    os.kill(holder, signal.SIGTERM)
    end = time.monotonic() + args.deadline
    while folder.holder() is not None:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"{folder.path} has not stopped",
                f"its process {holder} still runs after {args.deadline:g} s",
                hint="look at its logs; kill -9 is safe: the run can be resumed",
            )
        time.sleep(0.05)
    print(f"{folder.path} stopped{_resume_step(folder)}; it can be resumed")
    return 0
