"""``etude eval``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial

from etude.cli.places import existing, open_run
from etude.cli.task_progress import Steps
from etude.config import build, overridden, read, to_plain
from etude.errors import ConfigError, NoCheckpoint
from etude.loop.config import RunConfig, read_config
from etude.records.task import Split


def evaluate(args: argparse.Namespace) -> int:
    """Solve rate of a checkpoint or of a run's newest one; JSON on stdout, which says what was evaluated."""
    from etude.harness import ChatFormat
    from etude.loop.checkpoints import checkpoint_version, newest_checkpoint
    from etude.loop.evaluation import evaluate_checkpoint
    from etude.loop.limits import check_limits, first_tasks
    from etude.loop.preflight import check_machines, check_start, check_tasks

    place = existing(args.checkpoint)
    run = open_run(place) if (place / "run.json").is_file() else None

    checkpoint = newest_checkpoint(run) if run else place
    if not (checkpoint / "config.json").is_file():
        raise NoCheckpoint(
            f"{checkpoint} is no checkpoint", "it has no config.json", hint="give a Hugging Face directory or a run"
        )
    if run is None and args.config is None:
        raise ConfigError(
            "--config is missing", "a checkpoint alone does not say which tasks", hint="give the run's config.toml"
        )
    if args.config is not None:
        given = read(args.config, args.set)
    else:
        assert run is not None, "one of the two was given"
        given = overridden(args.set, to_plain(read_config(run)))
    config = build(RunConfig, given)
    said = partial(print, file=sys.stderr)
    check_start(checkpoint, context_tokens=config.engine.context_tokens, log=said)
    split = Split(args.split)
    source = check_tasks(config, [split])
    check_limits(config.harness, ChatFormat.load(checkpoint), first_tasks(source, [split]), said)
    check_machines(config)
    size = source.size(split)
    total = args.tries * (args.tasks if size is None else min(args.tasks, size))
    print(f"evaluating {checkpoint} on {total} rollouts; starting its engines", file=sys.stderr, flush=True)
    with Steps("rollouts", total) as steps:
        work = evaluate_checkpoint(
            checkpoint, config, split=split, num_tasks=args.tasks, tries=args.tries, out=None, each=steps.done
        )
        result = asyncio.run(work)
    version = checkpoint_version(checkpoint)
    of = {"checkpoint": str(checkpoint), "version": str(version) if version else None}
    print(json.dumps(of | result.facts(), indent=2))
    return 0
