"""The arguments of ``etude learn``. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, add_set, positive, within


def add_learn_command(commands: Commands[Parser]) -> None:
    """Add ``etude learn``."""
    learn = add(commands, "learn", "learn:learn", "train a finished run further on production use, step after step")
    learn.add_argument("run", type=Path, metavar="RUN", help="the run whose model is served")
    learn.add_argument(
        "--privacy", type=Path, required=True, metavar="DIR", help="folder of etude serve --capture: answers, consent"
    )
    learn.add_argument(
        "--feedback", type=Path, required=True, metavar="FILE", help="file of etude serve --feedback: users' signals"
    )
    learn.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the settings of learning (TOML)")
    add_set(learn)
    learn.add_argument(
        "--releases",
        type=Path,
        metavar="FILE",
        help="release each window's version: gate, canary, promotion or rollback, then the next window",
    )
    number = learn.add_mutually_exclusive_group()
    number.add_argument(
        "--steps", type=positive, metavar="N", help="end after this number of steps (default: go on until Ctrl-C)"
    )
    number.add_argument(
        "--cycles", type=positive, metavar="N", help="with --releases: end after the release of this number of windows"
    )
    learn.add_argument(
        "--poll-s",
        type=within(0.01, 86_400),
        default=60.0,
        metavar="S",
        help="seconds between checks for new answers (default: %(default)g)",
    )
