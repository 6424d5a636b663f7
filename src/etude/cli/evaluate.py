"""The command ``etude eval``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial

from etude.cli.locations import existing_path, open_run
from etude.cli.progress import ProgressBar
from etude.config import build, overridden, read, to_plain
from etude.errors import ConfigError, NoCheckpoint
from etude.loop.config import RunConfig, read_config
from etude.records.task import Split


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint, or the newest checkpoint of a run. Returns 0.

    Prints JSON: what was evaluated, and the solve rate."""
    from etude.harness import ChatFormat
    from etude.loop.checkpoints import checkpoint_version, newest_checkpoint
    from etude.loop.evaluation import evaluate_checkpoint
    from etude.loop.limits import check_limits, first_tasks
    from etude.loop.preflight import check_machines, check_start, check_tasks

    path = existing_path(args.checkpoint)
    run = open_run(path) if (path / "run.json").is_file() else None

    checkpoint = newest_checkpoint(run) if run else path
    if not (checkpoint / "config.json").is_file():
        raise NoCheckpoint(
            f"{checkpoint} is not a checkpoint", "it has no config.json", hint="give a Hugging Face directory or a run"
        )
    if run is None and args.config is None:
        raise ConfigError(
            "--config is missing", "a checkpoint does not contain the tasks", hint="give the run's config.toml"
        )
    if args.config is not None:
        given = read(args.config, args.set)
    else:
        assert run is not None, "either a run or --config is given"
        given = overridden(args.set, to_plain(read_config(run)))
    config = build(RunConfig, given)
    report = partial(print, file=sys.stderr)
    check_start(checkpoint, context_tokens=config.engine.context_tokens, log=report)
    split = Split(args.split)
    source = check_tasks(config, [split])
    check_limits(config.harness, ChatFormat.load(checkpoint), first_tasks(source, [split]), report)
    check_machines(config)
    size = source.size(split)
    total = args.tries * (args.tasks if size is None else min(args.tasks, size))
    print(f"evaluating {checkpoint} with {total} rollouts; starting engines", file=sys.stderr, flush=True)
    with ProgressBar("rollouts", total) as progress:
        work = evaluate_checkpoint(
            checkpoint, config, split=split, num_tasks=args.tasks, tries=args.tries, out=None, each=progress.advance
        )
        result = asyncio.run(work)
    version = checkpoint_version(checkpoint)
    evaluated = {"checkpoint": str(checkpoint), "version": str(version) if version else None}
    print(json.dumps(evaluated | result.facts(), indent=2))
    return 0
