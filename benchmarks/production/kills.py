"""kill -9 of the endless loop, its learner, its gate's evaluation and the gateway, at random, over cycles; the counts.

A small model that plays a game, made here. Loop and gateway are the real commands with their processes. Clients use the
gateway all the time, and try again when it is killed; its engines compute their answers. Beside them come users whose
answers no engine computes, so that a window is full soon.

    python -m benchmarks.production.kills [--kills 50] [--cycles 3] [--every-s 20] [--seed 0]

Between two kills are 0.5 to twice `--every-s` seconds. It has no time limit: it ends by error only if a window makes
no progress (`tests.production_users.STUCK`). A count that begins with `bad_` must be 0."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.conftest import QUIET, Cli, made_game
from tests.production_users import ServedLoop

from benchmarks.report import report

TARGETS = ("loop", "learner", "gate", "gateway")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="number of kills (default: %(default)s)")
    parser.add_argument("--cycles", type=int, default=3, help="windows that end at least (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=20.0, help="mean time between kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the times and targets (default: %(default)s)")
    args = parser.parse_args()
    draw, began = random.Random(args.seed), time.monotonic()
    delays = [draw.uniform(0.5, 2 * args.every_s - 0.5) for _ in range(args.kills)]
    with tempfile.TemporaryDirectory(prefix="etude-kills-") as folder:
        (Path(folder) / "game").mkdir()
        game = made_game(Path(folder) / "game")
        loop = ServedLoop(Path(folder), game.config, game.start, Cli(Path(folder), os.environ | QUIET), gateway=True)
        try:
            killed = loop.killed_at(delays, lambda: draw.choice(TARGETS), cycles=args.cycles)
            facts = loop.facts()
        finally:
            loop.close()
    wall_s = round(time.monotonic() - began, 1)
    report("production_kills", {"kills": len(killed), "killed": dict(Counter(killed)), **facts, "wall_s": wall_s})
    bad = [name for name, number in facts.items() if name.startswith("bad_") and number]
    if bad:
        raise SystemExit(f"not 0: {', '.join(bad)}")


if __name__ == "__main__":
    main()
