"""The `[harness]` section: tools, program and limits of an agent. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from etude.capture import SummaryLimits
from etude.config import BuiltIn, Plugin, named, ranged

LAPTOP_TOOLS = ("ls", "cat", "test", "edit", "submit")
LOOP, COMMAND = "loop", "command"
PROGRAMS = {LOOP: "etude.harness.programs:Loop", COMMAND: "etude.rollouts.command:CommandProgram"}
"""The built-in agent programs: name → import path."""


@dataclass(frozen=True)
class HarnessConfig:
    """Tools, agent program and limits of one rollout. Raises `ValueError` for limits that contradict each other.

    - `tools`: names of standard tools, and plug-ins.
    - `max_turns`: the maximum number of completions of the model, summaries included.
    - `turn_tokens`: the maximum number of tokens of one completion.
    - `context_tokens`: the maximum number of tokens of a conversation.
    - `summary_tokens`: the maximum number of tokens of a summary. The model summarises a conversation that has reached
      50 to 80 % of the context (the share differs between groups of rollouts) and continues from the summary. 0: no
      summaries; a full context ends the rollout.
    - `output_chars`: the maximum length of a tool output, in characters. A longer one loses its middle.
    - `turn_deadline_s`: the maximum time without progress of an engine, in seconds. After it the rollout is invalid.
    - `tool_deadline_s`: the maximum time of one command, in seconds. Then it is killed.
    - `rollout_deadline_s`: the maximum time of all commands together, or of a `program` that is a command, in seconds.
      Two things do not count: waiting for an engine, and CPU time that other processes took from the commands, if
      it is measured (`ExecResult.lost_s`).
    - `export_bytes`: the maximum size of a file that is exported from the machine for grading.
    - `require_submit`: give reward 0 to a rollout whose agent never called `submit`.
    - `prompt`: the system message before the task's instruction. A program that is a command has its own. "": none.
    - `program`: the agent program: "loop", the built-in one; "command", a program that calls the model over HTTP, with
      the settings of `etude.rollouts.command.CommandProgram`; or a plug-in."""

    tools: tuple[str | Plugin, ...] = LAPTOP_TOOLS
    max_turns: int = ranged(8, low=1, high=10_000)
    turn_tokens: int = ranged(24, low=1)
    context_tokens: int = ranged(384, low=16)
    summary_tokens: int = ranged(0, low=0)
    output_chars: int = ranged(400, low=16)
    turn_deadline_s: float = ranged(60.0, low=0.01)
    tool_deadline_s: float = ranged(5.0, low=0.01)
    rollout_deadline_s: float = ranged(30.0, low=0.01)
    export_bytes: int = ranged(1_048_576, low=1)
    require_submit: bool = True
    prompt: str = ""
    program: Annotated[str | Plugin, BuiltIn(tuple(PROGRAMS))] = LOOP

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(named(tool, ()) for tool in self.tools))
        program = named(self.program, PROGRAMS)
        object.__setattr__(self, "program", LOOP if program == Plugin(LOOP) else program)
        if isinstance(self.program, str) and self.program != LOOP:
            raise ValueError(f"program = {self.program!r} is neither 'loop' nor an import path: my_package.module:Name")
        if self.turn_tokens >= self.context_tokens:
            raise ValueError(
                f"turn_tokens = {self.turn_tokens} leaves no room in context_tokens = {self.context_tokens}"
            )
        if 4 * self.summary_tokens > self.context_tokens:
            raise ValueError(
                f"summary_tokens = {self.summary_tokens} is more than a quarter of "
                f"context_tokens = {self.context_tokens}: a summary must leave room for the work"
            )

    @property
    def summaries(self) -> SummaryLimits | None:
        """The limits of summaries of conversations; None: conversations are not summarised."""
        if not self.summary_tokens:
            return None
        return SummaryLimits(
            context_tokens=self.context_tokens,
            summary_tokens=self.summary_tokens,
            turn_tokens=self.turn_tokens,
            max_turns=self.max_turns,
        )

    @property
    def is_command(self) -> bool:
        """Whether the agent program is a command (`CommandProgram`), which has its own tools."""
        return isinstance(self.program, Plugin) and self.program.path == COMMAND
