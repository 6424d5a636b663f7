"""The agent loop: sample a turn, run its tool call, append the output, until the agent submits or reaches a limit.

Everything that the agent can cause is an `Ending` and will be graded: malformed calls, hanging commands, too many
turns, a full context. What it cannot cause (no engine answered, the machine died) is returned as `AgentRun.failure`,
with the completed turns.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.capture import Prompt, TurnTree
from etude.errors import ContextFull, EngineError, MachineError
from etude.harness.chat import ChatFormat, Message, Reply
from etude.harness.commands import Call
from etude.harness.config import HarnessConfig
from etude.harness.tools import ToolSet, Workbench
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason
from etude.records.rollout import Ending, ToolCall, Trace
from etude.records.task import Task
from etude.seams import Machine, Policy

SPEAK_BY_TOOLS = "call a tool"
"""The user message after a turn without a tool call."""
_INT_END = 1 << 63  # integers of records have 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Settings of all completion requests of one rollout, with the fields of `RolloutSpec` and `CompletionRequest`.

    A repeated attempt has another session and the same seed, so a fault changes no token.
    """

    session_id: str
    seed: int
    temperature: float = 1.0
    min_step: int = 0
    pin_step: int | None = None
    keep_routes: bool = True


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The result of an agent's run. Exactly one of `ending` and `failure` is set. `failure`: something outside the
    agent's reach failed."""

    trace: Trace
    messages: list[Message]
    tool_s: float  # time in tool calls, in seconds
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
    options: RequestOptions,
    clock: Callable[[], float] = time.monotonic,
) -> AgentRun:
    """Run the built-in agent loop on a task's machine.

    `limits`: turns, tokens and deadlines. `clock`: returns seconds, for `tool_s`. The time of a turn is limited by the
    policy only, which sees whether tokens still arrive (`CompletionRequest.deadline_s`). Raises `ChatError` when the
    chat template fails, which the user has to fix."""
    tree = TurnTree(chat, session_id=options.session_id)
    messages: list[Message] = [{"role": "user", "content": task.instruction}]
    bench = Workbench.of(
        task, machine, key=options.session_id, deadline_s=limits.tool_deadline_s, output_chars=limits.output_chars
    )
    tool_s = 0.0

    def ended(ending: Ending | None, failure: EngineError | MachineError | None = None) -> AgentRun:
        return AgentRun(tree.trace(), messages, tool_s, ending, failure)

    try:
        for turn in range(limits.max_turns):
            prompt = tree.prompt(messages, tools.signatures)
            if len(prompt.token_ids) + limits.turn_tokens > limits.context_tokens:
                return ended(Ending.CONTEXT)
            request = _request(prompt, turn, options, limits, chat.stop_token_ids)
            completion = await _complete(policy, request)
            reply = chat.parse(completion.token_ids, tools.signatures)
            began, lost_s = clock(), bench.lost_s
            bench.deadline_s = min(limits.tool_deadline_s, limits.rollout_deadline_s - tool_s)
            output = await tools.run(reply.call, bench) if reply.call else reply.error
            tool_s += max(0.0, clock() - began - (bench.lost_s - lost_s)) if reply.call else 0.0
            calls, call_id = _tool_calls(reply, output), f"call_{turn}"
            messages.append(assistant_message(reply.text, reply.call, call_id=call_id))
            tree.record(prompt, completion, messages[-1], sampling=request.sampling, calls=calls)
            if calls:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            else:
                messages.append({"role": "user", "content": SPEAK_BY_TOOLS})
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
    """The 63-bit sampling seed of a turn, derived from the rollout's seed and the turn's index.

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


def _request(
    prompt: Prompt, turn: int, options: RequestOptions, limits: HarnessConfig, stop_token_ids: tuple[int, ...]
) -> CompletionRequest:
    return CompletionRequest(
        request_id=f"{options.session_id}/{turn}",
        session_id=prompt.session_id,
        fork_from=prompt.fork_from,
        prompt_ids=prompt.token_ids,
        sampling=Sampling(
            max_tokens=limits.turn_tokens,
            stop_token_ids=stop_token_ids,
            temperature=options.temperature,
            seed=turn_seed(options.seed, turn),
        ),
        min_step=options.min_step,
        pin_step=options.pin_step,
        routes_from=prompt.routes_from if options.keep_routes else None,
        deadline_s=limits.turn_deadline_s,
        keep_session=turn + 1 < limits.max_turns,
    )


def assistant_message(text: str, call: Call | None, *, call_id: str) -> Message:
    """Make the assistant's message in OpenAI's format, except that the arguments of a call are a mapping."""
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
