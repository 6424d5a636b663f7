"""One attempt of an agent at a task: model turns, tool calls, limits, and the record of the turns.

Everything that the agent can cause ends the episode with an `Ending`, and is graded: malformed calls, hanging commands,
too many turns, a full context. What it cannot cause (no engine answered, the machine died) becomes `AgentRun.failure`,
with the turns recorded so far."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from etude.capture import Cut, Prompt, TurnTree, complete_until_stop, cut_at_stop
from etude.capture.short_work import ShortWork
from etude.capture.tree import Node
from etude.errors import ContextFull, EngineError, EtudeError, MachineError
from etude.harness.chat import ChatFormat, Message, Reply
from etude.harness.commands import Call, Signature
from etude.harness.config import HarnessConfig
from etude.harness.tools import ToolSet, Workbench
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason
from etude.records.rollout import Ending, ToolCall, Trace, TurnKind
from etude.records.task import Task
from etude.seams import Machine, Policy

SPEAK_BY_TOOLS = "call a tool"
"""The user message that answers a turn without a tool call."""
T = TypeVar("T")
_SHORT_CHARS = 64 << 10  # a longer conversation is tokenised in a thread
_INT_END = 1 << 63  # integers of msgpack are below this


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Settings that all completion requests of one rollout share.

    - `session_id`: the name of the rollout's session at the engines.
    - `seed`: the rollout's seed. `turn_seed` derives the seed of each turn from it.
    - `group_seed`: the seed of its group, for what all its rollouts share: the length from which a conversation is
      summarised.
    - `keep_routes`: whether completions must have their routes (the experts that the MoE routers chose).

    The other fields are those of `CompletionRequest`. A repeated attempt has another session and the same seed, so it
    samples the same tokens."""

    session_id: str
    seed: int
    group_seed: int = 0
    temperature: float = 1.0
    min_step: int = 0
    pin_step: int | None = None
    keep_routes: bool = True


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The result of an agent program on one task. `Episode.result` makes one.

    Exactly one of `ending` and `failure` is set. `ending` is the reason why the agent stopped, and `failure` an error
    that the agent cannot cause. `trace` has the turns with their tokens, `messages` is the main conversation, and
    `tool_s` the time in tool calls, in seconds. `log` is the output of an agent program that is a process."""

    trace: Trace
    messages: list[Message]
    tool_s: float
    ending: Ending | None
    failure: EngineError | MachineError | None = None
    log: bytes = b""


class EpisodeEnded(EtudeError):
    """Raised when a model turn is requested after the end of the episode. `ending` is the reason of the end."""

    def __init__(self, ending: Ending) -> None:
        hint = "call `ask` only while `episode.ending` is None"
        super().__init__("the episode has ended", f"its ending is {ending.value!r}", hint=hint)
        self.ending = ending

    def __reduce__(self) -> tuple[object, ...]:
        return (EpisodeEnded, (self.ending,))


@dataclass(frozen=True, slots=True, eq=False)
class ModelTurn:
    """A turn that the model has sampled. `Episode.ask` returns one, and `Episode.act` runs its tool calls.

    - `reply`: the parsed completion.
    - `messages`: the conversation to which the turn was appended.
    - `num_tokens`: tokens of the conversation with this turn included.
    - `number`: how many turns of the episode came before.
    - `node`: the recorded turn with its tokens.
    - `completion`: the policy's completion, with all sampled tokens.
    - `cut`: how a stop text cut the completion off; None if none did.
    - `num_resampled`: the number of earlier replies of the model that had to be tokenised again, because a message
      before them was changed."""

    reply: Reply
    messages: list[Message]
    num_tokens: int
    number: int
    node: Node
    completion: Completion
    cut: Cut | None = None
    num_resampled: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP request of an agent program that was refused.

    `request` is method and path, such as "POST /v1/messages". `status`, `code` and `message` are those of the error."""

    request: str
    status: int
    code: str
    message: str


class Episode:
    """One attempt of an agent at a task: the task, its machine, the tools, the limits and the conversation.

    An agent program samples turns of the model with `ask` and runs the tool calls with `act`, until `ending` is set.
    This is the built-in program (`etude.harness.run_agent`):

        while episode.ending is None:
            await episode.act(await episode.ask())

    Every turn is recorded with its tokens, and is trained on. `messages` is a list of OpenAI messages that begins with
    `harness.prompt`, if it is set, and the task's instruction. A program may change it before a turn, or pass
    another list to `ask` (a sub-agent, a shortened context). Turns with the same history are recorded as branches of
    a tree.

    `policy` samples the completions; a program may replace it by an object that wraps it. `clock` returns seconds."""

    def __init__(
        self,
        task: Task,
        machine: Machine,
        *,
        policy: Policy,
        chat: ChatFormat,
        tools: ToolSet,
        limits: HarnessConfig,
        options: RequestOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task, self.machine, self.policy, self.chat = task, machine, policy, chat
        self.tools, self.limits, self.options = tools, limits, options
        self.messages: list[Message] = [{"role": "system", "content": limits.prompt}] if limits.prompt else []
        self.messages.append({"role": "user", "content": task.instruction})
        self.ending: Ending | None = None  # the reason why the episode is over
        self.failure: EngineError | MachineError | None = None  # the first one that `ask` or `act` raised
        self.num_turns = 0  # turns that were requested
        self.num_resampled = 0  # sampled replies that were tokenised again, since the text before them has changed
        self.log = b""  # see `AgentRun.log`
        self.ended_by = ""  # what of an agent program decided `ending`, such as "exit code 3"; "": another limit
        self.refused = Counter[Refusal]()  # requests of an agent program, at most 64 kinds
        self.tool_s = 0.0  # seconds of tool calls, less what other work on the host took from them
        self.bench = Workbench.of(
            task,
            machine,
            key=options.session_id,
            deadline_s=limits.tool_deadline_s,
            output_chars=limits.output_chars,
        )
        self.has_history = False  # files of `harness.compaction.write_history` are in the machine
        self.tree = TurnTree(chat, session_id=options.session_id)
        self._num_asked: Counter[bytes] = Counter()  # requests by the key of their prompt
        self._clock = clock
        self._short_work = ShortWork(_SHORT_CHARS)

    async def ask(
        self,
        messages: list[Message] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kind: TurnKind = TurnKind.ACT,
        max_tokens: int | None = None,
        strict: bool = True,
        stops: Sequence[str] = (),
    ) -> ModelTurn:
        """Sample a turn of the model, record it, and append its message to the conversation.

        `messages` is the conversation, by default `self.messages`; its last message must not be the model's. `tools`
        are those of the turn in OpenAI's format, by default the episode's. `kind` is the purpose of the turn.
        `max_tokens` is the maximum number of tokens of the turn, by default `harness.turn_tokens`. Without `strict` a
        call need not fit its tool's signature, and a completion whose calls cannot be parsed is plain text, as clients
        of the gateway get it. Sampling ends at the first of the stop texts `stops`, and the message ends before it.

        The seed of a turn depends only on its conversation and on how often it was sent before. So the order of
        the requests of sub-agents changes no token. The policy limits the time of a turn (`harness.turn_deadline_s`).

        Raises:

        - `EpisodeEnded` when `ending` is set, or when `harness.max_turns` turns were requested.
        - `ContextFull` when the conversation and `max_tokens` do not fit into `harness.context_tokens`. A program may
          catch it and continue with a shorter conversation; otherwise it ends the episode.
        - `EngineError` when no engine has answered. The rollout is then invalid in any case.
        - `ChatError` for a chat template that the user must fix."""
        await self._require_open()
        messages = self.messages if messages is None else messages
        signatures = self.tools.signatures if tools is None else self.chat.signatures(tools)
        prompt = await self._tokenised(partial(self.tree.prompt, messages, signatures, tools=tools or ()), messages)
        await self._require_open()  # other requests of the program may have been faster
        max_tokens = self.limits.turn_tokens if max_tokens is None else max_tokens
        if (num_tokens := len(prompt.token_ids) + max_tokens) > self.limits.context_tokens:
            facts = (
                f"{num_tokens} tokens with the next turn, and harness.context_tokens is {self.limits.context_tokens}"
            )
            raise ContextFull("the conversation is too long", facts, hint="send fewer messages")
        number, self.num_turns = self.num_turns, self.num_turns + 1
        self.num_resampled += prompt.num_resampled
        request = self._request(prompt, number, max_tokens, last=kind is TurnKind.SUMMARY)
        thinking = self.chat.in_reasoning(prompt.token_ids) if stops else None
        listed = self.tools.to_openai() if tools is None else tools
        completion = await self._complete(request, messages, listed, stops=stops, in_reasoning=thinking)
        reply = self._parse(completion, signatures, strict=strict)
        cut = cut_at_stop(
            self.chat, completion, reply.text, stops, num_prompt=len(prompt.token_ids), in_reasoning=thinking
        )
        if cut is not None:
            reply = Reply(cut.text, reasoning=cut.reasoning)
        message = assistant_message(reply, turn=number)
        node = self.tree.record(prompt, completion, message, sampling=request.sampling, kind=kind, cut=cut)
        messages.append(assistant_message(reply, turn=node.number))
        return ModelTurn(reply, messages, node.num_tokens, node.number, node, completion, cut, prompt.num_resampled)

    async def _require_open(self) -> None:
        if self.ending is None and self.num_turns >= self.limits.max_turns:
            self.ending = Ending.TURNS
        if self.ending is not None:
            await asyncio.sleep(0)  # a program that catches the error and tries again cannot block the event loop
            raise EpisodeEnded(self.ending)

    async def num_tokens(self, messages: list[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Return the number of tokens of the prompt of a request with these messages. `tools` is that of `ask`.

        Raises `ChatError` for a chat template that the user must fix."""
        signatures = self.tools.signatures if tools is None else self.chat.signatures(tools)
        count = partial(self.tree.prompt_tokens, messages, signatures, tools=tools or ())
        return await self._tokenised(count, messages)

    async def _tokenised(self, work: Callable[[], T], messages: Sequence[Message]) -> T:
        return await self._short_work.run(work, sum(len(message.get("content") or "") for message in messages))

    def _parse(self, completion: Completion, signatures: Mapping[str, Signature], *, strict: bool) -> Reply:
        reply = self.chat.parse(completion.token_ids, signatures, strict=strict)
        return Reply(self.chat.decode(completion.token_ids)) if reply.error and not strict else reply

    async def act(self, turn: ModelTurn) -> str:
        """Run the tool calls of a turn in order, append each output to its conversation, and return the last one.

        The output of a malformed call is its error message. For a turn without a call, the user message
        `SPEAK_BY_TOOLS` is appended and returned. A submission ends the episode: calls after it are not run. `ending`
        is set after a submission, after the last allowed turn, and when tools have taken `harness.rollout_deadline_s`
        seconds. Raises `MachineError`, after which the rollout is invalid, and `PluginError` for a tool plug-in that
        fails."""
        reply, output = turn.reply, turn.reply.error or SPEAK_BY_TOOLS
        turn.node.calls = ()
        for index, call in enumerate(reply.calls):
            output = await self._run_tool(call)
            arguments = {k: plain_argument(v) for k, v in call.arguments.items()}
            turn.node.calls += (ToolCall(name=call.name, arguments=arguments, output=output),)
            turn.messages.append({"role": "tool", "tool_call_id": _call_id(turn.number, index), "content": output})
            if self.bench.submitted or self.tool_s >= self.limits.rollout_deadline_s:
                break
        if reply.error:
            turn.node.calls = (ToolCall(name="", arguments={}, output=output, malformed=True),)
            turn.messages.append({"role": "tool", "tool_call_id": _call_id(turn.number), "content": output})
        elif not reply.calls:
            turn.messages.append({"role": "user", "content": output})
        if self.bench.submitted:
            self.submit()
        elif self.tool_s >= self.limits.rollout_deadline_s:
            self.ending = self.ending or Ending.DEADLINE
        elif self.num_turns >= self.limits.max_turns:
            self.ending = self.ending or Ending.TURNS
        return output

    def submit(self) -> None:
        """End the episode as submitted: the files on the machine are graded as they are.

        A call of the `submit` tool has the same effect."""
        self.ending = self.ending or Ending.SUBMITTED

    def result(self) -> AgentRun:
        """Return the result of the episode. Call it when the agent program has returned.

        Without a failure or an ending, the ending is `Ending.STOPPED`: the program stopped without a submission."""
        ending = None if self.failure else self.ending or Ending.STOPPED
        return AgentRun(self.tree.trace(), self.messages, self.tool_s, ending, self.failure, self.log)

    async def _run_tool(self, call: Call) -> str:
        began, lost_s = self._clock(), self.bench.lost_s
        self.bench.deadline_s = min(self.limits.tool_deadline_s, self.limits.rollout_deadline_s - self.tool_s)
        try:
            return await self.tools.run(call, self.bench)
        except MachineError as error:
            self.failure = self.failure or error
            raise
        finally:
            self.tool_s += max(0.0, self._clock() - began - (self.bench.lost_s - lost_s))

    async def _complete(
        self,
        request: CompletionRequest,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        stops: Sequence[str],
        in_reasoning: bool | None,
    ) -> Completion:
        """Have the policy sample, up to the first of the texts `stops`. The prompt was made of `messages` and
        `tools`, in OpenAI's form. `in_reasoning`: the result of `Chat.in_reasoning` for the prompt; None without
        `stops`."""
        try:
            completion = await complete_until_stop(self.policy, request, self.chat, stops, in_reasoning=in_reasoning)
            if completion.stop_reason is StopReason.CANCELLED:
                raise EngineError(f"{completion.engine} cancelled {request.request_id}", hint="see the engine's log")
            return completion
        except ContextFull:
            raise
        except EngineError as error:
            self.failure = self.failure or error
            raise

    def _request(self, prompt: Prompt, turn: int, max_tokens: int, *, last: bool) -> CompletionRequest:
        """Make the request of a turn. `last`: no other turn is likely to continue its session."""
        options, limits = self.options, self.limits
        num_before = self._num_asked[prompt.key]
        self._num_asked[prompt.key] += 1
        return CompletionRequest(
            request_id=f"{options.session_id}/{turn}",
            session_id=prompt.session_id,
            fork_from=prompt.fork_from,
            prompt_ids=prompt.token_ids,
            sampling=Sampling(
                max_tokens=max_tokens,
                stop_token_ids=self.chat.stop_token_ids,
                temperature=options.temperature,
                seed=turn_seed(options.seed, prompt.key, num_before),
            ),
            min_step=options.min_step,
            pin_step=options.pin_step,
            routes_from=prompt.routes_from if options.keep_routes else None,
            deadline_s=limits.turn_deadline_s,
            keep_session=turn + 1 < limits.max_turns and not last,
        )


def turn_seed(seed: int, key: bytes, num_before: int = 0) -> int:
    """Return the sampling seed of a turn, 63 bits: a hash of the rollout's seed and of the turn's conversation.

    `key` is the digest of tools and messages (`Prompt.key`). `num_before` is how often the same request was sent
    before. The order in which turns are sampled has no influence.

    >>> turn_seed(7, b"ls") == turn_seed(7, b"ls") != turn_seed(7, b"cat")
    True
    """
    digest = hashlib.blake2b(f"{seed}|{num_before}|".encode() + key, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def assistant_message(reply: Reply, *, turn: int) -> Message:
    """Return the assistant's message in OpenAI's format, except that the arguments of its tool calls stay dicts.

    `turn` is the turn's number, from which the ids of the calls are made."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": _call_id(turn, i), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(reply.calls)
        ]
    return message


def _call_id(turn: int, index: int = 0) -> str:
    return f"call_{turn}_{index}" if index else f"call_{turn}"


def plain_argument(value: Any) -> str | int:
    """Return an argument of a tool call in the form in which a trace stores it: a text, an integer below 2^63, or JSON
    text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -_INT_END <= value < _INT_END:
        return value
    return json.dumps(value)
