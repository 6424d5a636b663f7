"""The `[harness]` section: tools, program and limits of an agent. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import Plugin, named, ranged

LAPTOP_TOOLS = ("ls", "cat", "test", "edit", "submit")
PROGRAMS = ("loop",)  # the built-in agent programs


@dataclass(frozen=True)
class HarnessConfig:
    """Tools, program and limits of one rollout. Raises `ValueError` for limits that contradict each other.

    `rollout_deadline_s` limits the time of the agent's commands, without the time that other work on the host took from
    them where that is measured (`ExecResult.lost_s`). Waiting for an engine does not count.
    """

    tools: tuple[str | Plugin, ...] = LAPTOP_TOOLS
    max_turns: int = ranged(8, low=1, high=10_000)
    turn_tokens: int = ranged(24, low=1)  # most tokens of one completion
    context_tokens: int = ranged(384, low=16)  # longest conversation in tokens
    output_chars: int = ranged(400, low=16)  # longest tool output; a longer one loses its middle
    turn_deadline_s: float = ranged(60.0, low=0.01)  # longest time without a new token; then the rollout is invalid
    tool_deadline_s: float = ranged(5.0, low=0.01)  # for one command, which is then killed
    rollout_deadline_s: float = ranged(30.0, low=0.01)  # for all commands together
    export_bytes: int = ranged(1_048_576, low=1)  # largest exported file
    require_submit: bool = True  # a rollout that never submitted gets reward 0
    program: str | Plugin = PROGRAMS[0]  # the agent program: the built-in loop, or a plug-in

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(named(tool, ()) for tool in self.tools))
        object.__setattr__(self, "program", named(self.program, PROGRAMS))
        if isinstance(self.program, str) and self.program not in PROGRAMS:
            raise ValueError(f"program = {self.program!r} is neither 'loop' nor an import path: my_package.module:Name")
        if self.turn_tokens >= self.context_tokens:
            raise ValueError(
                f"turn_tokens = {self.turn_tokens} leaves no room in context_tokens = {self.context_tokens}"
            )
