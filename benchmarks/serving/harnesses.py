"""Real agents, unmodified, with a scripted model: what of their requests is attributed, and what would be trained.

One rollout of each agent of ``tests/harnesses`` that is installed, with its config of docs/guides/harnesses.md; and of
those that summarise by themselves, or have a sub-agent. The agent, the endpoints and the machine are real; the answers
are a script, so the numbers are of the capture and not of a model.

`attributed`: the part of the answered requests that are turns. `refused`: requests with a status of 400 to 499."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import ANSWERS, config_of, play
from tests.harnesses.test_real_agents import (
    Given,
    claude_code_that_summarises,
    claude_code_with_a_sub_agent,
    codex_that_summarises,
)

from benchmarks.report import report


def agents_sdk_with_chat_completions() -> Given:
    name = "OpenAI Agents SDK"
    return config_of(name, env={"OPENAI_AGENTS_API": "chat_completions"}), ANSWERS[name]


CASES: dict[str, tuple[str, Callable[[], Given]]] = {
    **{name: (name, partial(lambda name: (config_of(name), ANSWERS[name]), name)) for name in AGENTS},
    "OpenAI Agents SDK, chat completions": ("OpenAI Agents SDK", agents_sdk_with_chat_completions),
    "Codex, summarises": ("Codex", codex_that_summarises),
    "Claude Code, summarises": ("Claude Code", claude_code_that_summarises),
    "Claude Code, sub-agent": ("Claude Code", claude_code_with_a_sub_agent),
}
"""The agent and what it is given, by the name of the case."""


def measure(given: Given) -> dict[str, Any]:
    """Play one agent and return its numbers."""
    played = play(*given)
    return {
        "ending": played.ending,
        "task_done": played.fixed,
        "requests": played.num_requests,
        "turns": played.num_turns,
        "attributed": played.attributed,
        "refused": played.num_refused,
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
    parser.add_argument("names", nargs="*", help="cases, by default all")
    names = parser.parse_args().names or list(CASES)
    missing = {name: why for name in names if (why := AGENTS[CASES[name][0]].why_not())}
    os.chdir(FOLDER)
    found = {name: measure(CASES[name][1]()) for name in names if name not in missing}
    report("harnesses", {"agents": found, "skipped": missing})


if __name__ == "__main__":
    main()
