"""Settings of the harness: tools and limits of an agent. Imports no torch; part of a run's config."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import Plugin, named, ranged

LAPTOP_TOOLS = ("ls", "cat", "test", "edit", "submit")
PROGRAMS = ("loop",)  # the built-in agent programs


@dataclass(frozen=True)
class HarnessConfig:
    """The limits of one rollout and the tools it may use.

    `rollout_deadline_s` counts the seconds that the agent's own commands took, less what other work on their host took
    from them where that is measured (`ExecResult.lost_s`). Waiting for an engine is not the agent's time.
    """

    tools: tuple[str | Plugin, ...] = LAPTOP_TOOLS
    max_turns: int = ranged(8, low=1, high=10_000)
    turn_tokens: int = ranged(24, low=1)  # tokens a turn may sample
    context_tokens: int = ranged(384, low=16)  # the whole conversation
    output_chars: int = ranged(400, low=16)  # of a tool's answer; a longer one loses its middle
    turn_deadline_s: float = ranged(60.0, low=0.01)  # without a token of a completion; then the rollout is invalid
    tool_deadline_s: float = ranged(5.0, low=0.01)  # one command; past it the command is dead
    rollout_deadline_s: float = ranged(30.0, low=0.01)  # all commands together
    export_bytes: int = ranged(1_048_576, low=1)  # of one exported file
    require_submit: bool = True  # a rollout that never submitted scores 0
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
