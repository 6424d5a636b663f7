"""Real agents, unmodified, with a scripted model: what of their requests is attributed, and what would be trained.

One rollout of each agent of ``tests/harnesses`` that is installed, with its config of docs/guides/harnesses.md. The
agent, the endpoints and the machine are real; the answers are a script, so the numbers are of the capture and not of a
model."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import ANSWERS, config_of, play

from benchmarks.report import report


def measure(name: str) -> dict[str, Any]:
    """Play one agent and return its numbers."""
    played = play(config_of(name), ANSWERS[name])
    return {
        "ending": played.ending,
        "task_done": played.fixed,
        "requests": played.num_requests,
        "turns": played.num_turns,
        "attributed": played.attributed,
        "answers_5xx": played.num_failed,
        "replies_tokenised_again": played.num_resampled,
        "side_calls": played.num_side,
        "branches": played.branches,
        "rows_per_branch": played.rows / played.branches if played.branches else None,
        "starts": played.starts,
        "statuses": played.statuses,
        "first_prompt_tokens": played.prompt_tokens,
        "wall_s": played.wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents, by default all")
    names = parser.parse_args().names or list(AGENTS)
    missing = {name: why for name in names if (why := AGENTS[name].why_not())}
    os.chdir(FOLDER)
    report("harnesses", {"agents": {n: measure(n) for n in names if n not in missing}, "skipped": missing})


if __name__ == "__main__":
    main()
