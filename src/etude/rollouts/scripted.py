"""Scripts in place of a policy, for baselines and demonstrations.

A script is a generator. It yields ``(tool name, arguments)``, receives the tool's output, and ends after ``submit``. To
say a text it yields ``("", {"text": text})``. A request for a summary is the line `capture.context.REQUEST` after the
last output: the script then says the summary as a text, and receives the message with which the new conversation
begins. `ScriptedPolicy` encodes its calls as completions, so that an oracle or a random agent can run in place of a
model. `demonstrate` runs a script directly on a machine in memory, without an event loop or tokens, to get documents
for mid-training.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

import numpy as np

from etude.capture.context import REQUEST
from etude.errors import ContextFull, TaskError
from etude.harness import (
    Call,
    ChatFormat,
    Episode,
    HarnessConfig,
    RequestOptions,
    ToolSet,
    Workbench,
    run_agent,
    standard_tools,
)
from etude.harness.chat import Message, Reply
from etude.harness.episode import EpisodeEnded, assistant_message
from etude.records.completion import Completion, CompletionRequest, StopReason, Version, VersionSpan
from etude.records.task import Task
from etude.records.wire import I32
from etude.seams import Machine

Script = Generator[tuple[str, dict[str, str | int]], str, None]
T = TypeVar("T")

_DEADLINE_S = 10.0


class ScriptedPolicy:
    """A `Policy` that plays a script, once, in place of a model.

    It reads the last tool output from the prompt, as a model does. Its completions are made by `scripted_completion`.
    It ignores `max_tokens`. If the script ends without submitting, the policy submits. With `in_thread` the steps of
    the script run in threads: a script that blocks then holds up its own rollout only."""

    def __init__(self, script: Script, chat: ChatFormat, *, in_thread: bool = False) -> None:
        self._script, self._chat, self._in_thread = script, chat, in_thread
        self._begun = False

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return the script's next call as a completion."""
        output = self._last_output(request.prompt_ids) if self._begun else None
        self._begun = True
        step = partial(_next_call, self._script, output)
        call = (await asyncio.to_thread(step) if self._in_thread else step()) or Call("submit", {})
        return scripted_completion(request, self._chat, call if call.name else call.arguments["text"])

    def _last_output(self, prompt_ids: I32) -> str:
        """The last message of a prompt; before a request for a summary, also the message before it."""
        last = self._chat.last_message(prompt_ids)
        if last != REQUEST:
            return last
        ends = np.flatnonzero(prompt_ids == self._chat.end_id)
        return f"{self._chat.last_message(prompt_ids[: ends[-1]])}\n{REQUEST}"


def scripted_completion(
    request: CompletionRequest, chat: ChatFormat, answer: str | Call, *, max_tokens: int | None = None
) -> Completion:
    """Return a text or a tool call as the completion of a request, cut off after `max_tokens` (None: never).

    Its log-probabilities are 0, it has no expert routes, and its policy version is the requested one."""
    ids = chat.encode_call(answer) if isinstance(answer, Call) else [*chat.encode(answer), chat.stop_token_ids[0]]
    token_ids = np.array(ids, np.int32)[:max_tokens]
    step = request.pin_step if request.pin_step is not None else request.min_step
    return Completion(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        routes=np.zeros((0, 1, 1), np.uint8),
        routes_start=len(request.prompt_ids) + len(token_ids) - 1,
        spans=(VersionSpan(Version(step, "0" * 8, "0" * 64), len(token_ids)),),
        stop_reason=StopReason.STOP if len(token_ids) == len(ids) else StopReason.LENGTH,
        engine="script",
    )


def demonstrate(
    task: Task, script: Script, tools: ToolSet, machine: Machine, *, output_chars: int = HarnessConfig.output_chars
) -> list[Message]:
    """Run a script on a machine in memory and return the conversation, for `ChatFormat.encode_conversation`.

    Each tool output has at most `output_chars` characters. Without plug-ins it plays thousands of tasks a second, but
    only on machines whose coroutines never suspend (`etude.environments.memory`); for other machines it raises
    `RuntimeError`. Tools that are plug-ins may suspend. Raises `TaskError` for a call that does not fit the tools."""
    bench = Workbench.of(task, machine, key="demonstration", deadline_s=_DEADLINE_S, output_chars=output_chars)
    return _played(_converse(task, script, tools, bench), tools)


async def _converse(task: Task, script: Script, tools: ToolSet, bench: Workbench) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": task.instruction}]
    output: str | None = None
    while not bench.submitted and (call := _next_call(script, output)) is not None:
        if problem := tools.misfit(call):
            hint = "a script calls the tools of harness.tools and the standard tools, with their parameters"
            raise TaskError(f"a demonstration of {task.source} cannot be played", problem, hint=hint)
        output = await tools.run(call, bench)
        messages.append(assistant_message(Reply("", (call,)), turn=len(messages)))
        if not bench.submitted:
            call_id = messages[-1]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    return messages


def demonstrate_long(
    task: Task, script: Script, chat: ChatFormat, machine: Machine, limits: HarnessConfig, *, group_seed: int
) -> list[I32]:
    """Run a script that also writes summaries. Return the token ids of each of its conversations, [T] int32 each.

    The built-in agent program runs the script with the settings `limits`, so the conversations are like those of
    rollouts. `group_seed` decides at which length a conversation is summarised. The other arguments are those of
    `demonstrate`."""
    tools = standard_tools(limits.tools)
    episode = Episode(
        task,
        machine,
        policy=ScriptedPolicy(script, chat),
        chat=chat,
        tools=tools,
        limits=limits,
        options=RequestOptions(session_id="demonstration", seed=0, group_seed=group_seed),
    )
    with contextlib.suppress(ContextFull, EpisodeEnded):
        asyncio.run(run_agent(episode))
    trace = episode.result().trace
    return [trace.path(leaf).token_ids for leaf in trace.leaves()]


def _next_call(script: Script, output: str | None) -> Call | None:
    """The script's next call, with its arguments as text. None: the script has ended."""
    try:
        name, arguments = next(script) if output is None else script.send(output)
    except StopIteration:
        return None
    return Call(name, {k: str(v) for k, v in arguments.items()})


def _played(work: Coroutine[Any, Any, T], tools: ToolSet) -> T:
    """Run a coroutine without an event loop, unless one of its tools is a plug-in, which may wait."""
    return _at_once(work) if tools.is_standard else asyncio.run(work)


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("the machine suspended; demonstrations need a machine in memory")
