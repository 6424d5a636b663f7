"""Scripts in the policy's place: baselines through the very rollout code, and demonstrations without any tokens.

A script is a generator that yields ``(tool name, arguments)`` and is sent the tool's output; after ``submit`` it ends.
`ScriptedPolicy` spells its calls as completions, so an oracle or a random agent runs where a model would.
`demonstrate` plays one straight against a machine in memory: no event loop, no tokens, for mid-training documents.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import numpy as np

from etude.harness import Call, ChatFormat, HarnessConfig, ToolSet, Workbench
from etude.harness.chat import Message
from etude.harness.episode import assistant_message
from etude.records.completion import Completion, CompletionRequest, StopReason, Version, VersionSpan
from etude.records.task import Task
from etude.seams import Machine

Script = Generator[tuple[str, dict[str, str | int]], str, None]
T = TypeVar("T")

_DEADLINE_S = 10.0


class ScriptedPolicy:
    """A `Policy` that plays one script in one session, whatever it is asked.

    It reads the tool's last output from the prompt, as a model does. Its completions carry log-probability 0, no
    routes, and a version named by the step that was asked for; `max_tokens` does not bind it, for nothing
    is sampled. A script that ends without submitting submits.
    """

    def __init__(self, script: Script, chat: ChatFormat) -> None:
        self._script, self._chat = script, chat
        self._begun = False

    async def complete(self, request: CompletionRequest) -> Completion:
        told = self._chat.last_message(request.prompt_ids) if self._begun else None
        self._begun = True
        call = _next_call(self._script, told)
        ids = self._chat.spell(call if call is not None else Call("submit", {}))
        step = request.pin_step if request.pin_step is not None else request.min_step
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            routes=np.zeros((0, 1, 1), np.uint8),
            routes_start=len(request.prompt_ids) + len(ids) - 1,
            spans=(VersionSpan(Version(step, "0" * 8, "0" * 64), len(ids)),),
            stop_reason=StopReason.STOP,
            engine="script",
        )


def demonstrate(
    task: Task, script: Script, tools: ToolSet, machine: Machine, *, output_chars: int = HarnessConfig.output_chars
) -> list[Message]:
    """Play a script on a machine in memory; the conversation, as `ChatFormat.whole` encodes it.

    For machines whose coroutines never really wait (`etude.environments.memory`): thousands a second. Raises
    `RuntimeError` for one that waits, and `MachineError` from the machine.
    """
    bench = Workbench.of(task, machine, key="demonstration", deadline_s=_DEADLINE_S, output_chars=output_chars)
    messages: list[Message] = [{"role": "user", "content": task.instruction}]
    told: str | None = None
    while not bench.submitted and (call := _next_call(script, told)) is not None:
        told = _at_once(tools.run(call, bench))
        call_id = f"call_{len(messages)}"
        messages.append(assistant_message("", call, call_id=call_id))
        if not bench.submitted:
            messages.append({"role": "tool", "tool_call_id": call_id, "content": told})
    return messages


def _next_call(script: Script, told: str | None) -> Call | None:
    """The script's next call, its arguments as the text that a policy would write. None: the script is over."""
    try:
        name, arguments = next(script) if told is None else script.send(told)
    except StopIteration:
        return None
    return Call(name, {k: str(v) for k, v in arguments.items()})


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never waits to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("the machine waited; demonstrations need one in memory")
