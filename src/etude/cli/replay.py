"""The command ``etude replay``: repeat a recorded training step from disk, and compare the weights bit by bit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from etude.cli.locations import console, open_run
from etude.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.loop.replay import Replay, ReplayedStep

SHOWN = ("loss", "ratio_max", "k3", "grad_norm")
NAMED = 5  # tensors in the message about a difference


def run(args: argparse.Namespace) -> int:
    """Repeat a training step. Returns exit code 1 if the resulting weights differ from those that the run published."""
    from etude.loop.history import History

    folder = open_run(args.run)
    history = History.read(folder)
    history.require(args.step)
    start = history.start_checkpoint(args.step, args.start)
    from etude.loop.replay import replay_step  # imports torch, which takes seconds: only after the checks above

    with _progress() as on_step:
        done = replay_step(folder, args.step, start=start, on_step=on_step, history=history)
    if args.json:
        print(json.dumps({"run": str(folder.path), **_plain(done)}, indent=2))
    else:
        _print(done)
    return Exit.DONE if done.equal else Exit.FAILED


@contextmanager
def _progress() -> Iterator[Callable[[ReplayedStep, int], None]]:
    """A callback for each repeated step. It updates a bar in a terminal, or prints a line per step, on stderr."""
    screen = Console(stderr=True, highlight=False)
    if not screen.is_terminal:
        yield lambda one, total: print(f"step {one.step}: {_verdict(one)}", file=sys.stderr, flush=True)
        return
    with Progress(console=screen, transient=True) as progress:
        task = progress.add_task("replay", total=None)
        yield lambda one, total: progress.update(task, advance=1, total=total, description=f"step {one.step}")


def _verdict(one: ReplayedStep) -> str:
    if one.published is None:
        return "cannot be compared: its manifest was deleted"
    return "equal" if one.equal else f"{len(one.different)} tensors differ"


def _print(done: Replay) -> None:
    from rich.table import Table

    screen = console()
    table = Table("step", "samples", *SHOWN, "weights")
    for one in done.steps:
        numbers = (_number(*one.numbers[name]) for name in SHOWN if name in one.numbers)
        table.add_row(str(one.step), str(one.num_samples), *numbers, _verdict(one))
    screen.print(table)
    for name, (original, here) in done.computed_by.items():
        screen.print(f"{name}: {original} in the run, {here} here")
    last, first = done.last, done.first_different
    begun = f"from {done.start}, {len(done.steps)} step{'s' * (len(done.steps) > 1)}"
    if last.equal:
        screen.print(f"step {done.step} is identical to the bit: {last.found} ({begun})")
        return
    screen.print(f"step {done.step} differs ({begun}):\n  replayed  {last.found}\n  published {last.published}")
    if first is not None:
        names = ", ".join(first.different[:NAMED]) + (" ..." if len(first.different) > NAMED else "")
        screen.print(f"the first step that differs is {first.step}, in {len(first.different)} tensors: {names}")
        for name, (recorded, redone) in first.numbers.items():
            if recorded is not None and recorded != redone:
                screen.print(f"  {name}: recorded {recorded!r}, replayed {redone!r}")


def _number(recorded: float | None, redone: float) -> str:
    return f"{redone:.4g}" if recorded in (None, redone) else f"{recorded:.6g} -> {redone:.6g}"


def _plain(done: Replay) -> Mapping[str, Any]:
    first = done.first_different
    return {
        "step": done.step,
        "from": str(done.start),
        "equal": done.equal,
        "found": done.last.found,
        "published": done.last.published,
        "first_different": None if first is None else first.step,
        "computed_by": {name: {"run": original, "here": here} for name, (original, here) in done.computed_by.items()},
        "steps": [
            {
                "step": one.step,
                "samples": one.num_samples,
                "equal": one.equal,
                "found": one.found,
                "published": one.published,
                "different": one.different,
                "numbers": {name: {"recorded": a, "redone": b} for name, (a, b) in one.numbers.items()},
            }
            for one in done.steps
        ],
    }
