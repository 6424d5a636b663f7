"""The agent loop: ask the policy, do what it says, tell it what came of it, until it submits or a limit is reached.

What the agent can cause ends here as an `Ending` and will be graded: nonsense, hung commands, too many turns, a full
context. What it cannot cause (no engine answered, the machine died) comes back as `AgentRun.failure`, with the turns
that were complete. Knows nothing of where machines and engines come from, nor of rewards.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import ContextFull, EngineError, MachineError
from etude.harness.chat import ChatFormat, Message, Reply
from etude.harness.commands import Call
from etude.harness.config import HarnessConfig
from etude.harness.tools import ToolSet, Workbench
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason
from etude.records.rollout import Ending, ToolCall, Trace, Turn
from etude.records.task import Task
from etude.records.wire import I32
from etude.seams import Machine, Policy

SPEAK_BY_TOOLS = "call a tool"
"""What a turn without a tool call is answered with."""
_INT_END = 1 << 63  # what a record can hold of a whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How the policy is asked during one rollout; the fields are those of `RolloutSpec` and `CompletionRequest`.

    A rollout that is run again has another session but the same seed: a fault changes no token.
    """

    session_id: str
    seed: int
    temperature: float = 1.0
    min_step: int = 0
    pin_step: int | None = None
    keep_routes: bool = True


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The result of an agent's run. `ending` is None exactly when `failure` is set: something outside its reach
    broke."""

    trace: Trace
    messages: list[Message]
    tool_s: float
    ending: Ending | None
    failure: EngineError | MachineError | None = None


async def run_agent(
    task: Task,
    machine: Machine,
    *,
    policy: Policy,
    chat: ChatFormat,
    tools: ToolSet,
    limits: HarnessConfig,
    ask: Ask,
    clock: Callable[[], float] = time.monotonic,
) -> AgentRun:
    """Work at a task on its machine. How long a turn may take is the policy's to bound, which sees whether tokens still
    come (`CompletionRequest.deadline_s`). Raises `ChatError` for a template that only etude's user can mend."""
    talk = _Talk(chat, tools, task.instruction)
    bench = Workbench.of(
        task, machine, key=ask.session_id, deadline_s=limits.tool_deadline_s, output_chars=limits.output_chars
    )
    tool_s = 0.0

    def ended(ending: Ending | None, failure: EngineError | MachineError | None = None) -> AgentRun:
        return AgentRun(Trace(tuple(talk.turns)), talk.messages, tool_s, ending, failure)

    try:
        for _ in range(limits.max_turns):
            prompt_ids = talk.prompt()
            if talk.num_tokens + len(prompt_ids) + limits.turn_tokens > limits.context_tokens:
                return ended(Ending.CONTEXT)
            request = talk.request(prompt_ids, ask, limits)
            completion = await _complete(policy, request)
            reply = chat.parse(completion.token_ids, tools.signatures)
            began, lost_s = clock(), bench.lost_s
            bench.deadline_s = min(limits.tool_deadline_s, limits.rollout_deadline_s - tool_s)
            output = await tools.run(reply.call, bench) if reply.call else reply.error
            tool_s += max(0.0, clock() - began - (bench.lost_s - lost_s)) if reply.call else 0.0
            talk.add(prompt_ids, request.sampling, completion, reply, output)
            if bench.submitted:
                return ended(Ending.SUBMITTED)
            if tool_s >= limits.rollout_deadline_s:
                return ended(Ending.DEADLINE)
        return ended(Ending.TURNS)
    except ContextFull:
        return ended(Ending.CONTEXT)
    except (EngineError, MachineError) as error:
        return ended(None, error)


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of a rollout's turn, 63 bits: keyed, so that no order of events changes it.

    >>> turn_seed(7, 0) == turn_seed(7, 0) != turn_seed(7, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed}|{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


async def _complete(policy: Policy, request: CompletionRequest) -> Completion:
    completion = await policy.complete(request)
    if completion.stop_reason is StopReason.CANCELLED:
        raise EngineError(f"{completion.engine} cancelled {request.request_id}", hint="see the engine's log")
    return completion


class _Talk:
    """A linear conversation: its messages, its turns and its tokens, each token once."""

    def __init__(self, chat: ChatFormat, tools: ToolSet, instruction: str) -> None:
        self._chat, self._signatures = chat, tools.signatures
        self.messages: list[Message] = [{"role": "user", "content": instruction}]
        self.turns: list[Turn] = []
        self._context: I32 = np.zeros(0, np.int32)
        self._num_said = 0  # messages whose tokens are in the context
        self._ended = True  # whether the last completion ended with a stop token

    @property
    def num_tokens(self) -> int:
        return len(self._context)

    def prompt(self) -> I32:
        """The tokens that the messages since the last completion add, the generation prompt included."""
        if not self.turns:
            return self._chat.first(self.messages, self._signatures)
        said, new = self.messages[: self._num_said], self.messages[self._num_said :]
        return self._chat.continuation(said, new, self._signatures, ended=self._ended)

    def request(self, prompt_ids: I32, ask: Ask, limits: HarnessConfig) -> CompletionRequest:
        context = np.concatenate([self._context, prompt_ids])
        last = self.turns[-1].completion if self.turns else None
        known = last.routes_start + len(last.routes) if last else 0
        turn = len(self.turns)
        return CompletionRequest(
            request_id=f"{ask.session_id}/{turn}",
            session_id=ask.session_id,
            prompt_ids=context,
            sampling=Sampling(
                max_tokens=limits.turn_tokens,
                stop_token_ids=self._chat.stop_token_ids,
                temperature=ask.temperature,
                seed=turn_seed(ask.seed, turn),
            ),
            min_step=ask.min_step,
            pin_step=ask.pin_step,
            routes_from=known if ask.keep_routes else None,
            deadline_s=limits.turn_deadline_s,
            keep_session=turn + 1 < limits.max_turns,
        )

    def add(self, prompt_ids: I32, sampling: Sampling, completion: Completion, reply: Reply, output: str) -> None:
        """Record a turn: what was asked, what came, and what it will be told."""
        turn = len(self.turns)
        parent = turn - 1 if turn else None
        calls = _tool_calls(reply, output)
        self.turns.append(
            Turn(parent=parent, prompt_ids=prompt_ids, completion=completion, sampling=sampling, calls=calls)
        )
        self._context = np.concatenate([self._context, prompt_ids, completion.token_ids])
        self._ended = completion.stop_reason is StopReason.STOP
        self.messages.append(assistant_message(reply.text, reply.call, call_id=f"call_{turn}"))
        self._num_said = len(self.messages)
        if not calls:
            self.messages.append({"role": "user", "content": SPEAK_BY_TOOLS})
        else:
            self.messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": output})


def assistant_message(text: str, call: Call | None, *, call_id: str) -> Message:
    """The assistant's message in OpenAI's format, except that a call's arguments stay a mapping."""
    message: Message = {"role": "assistant", "content": text}
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message


def _tool_calls(reply: Reply, output: str) -> tuple[ToolCall, ...]:
    if reply.call is not None:
        arguments = {k: _plain(v) for k, v in reply.call.arguments.items()}
        return (ToolCall(name=reply.call.name, arguments=arguments, output=output),)
    return (ToolCall(name="", arguments={}, output=output, malformed=True),) if reply.error else ()


def _plain(value: Any) -> str | int:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -_INT_END <= value < _INT_END:
        return value
    return json.dumps(value)
