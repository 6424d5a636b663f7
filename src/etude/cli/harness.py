"""The command ``etude harness check``: one task through a config's agent program, with a scripted model.

It shows what of the program would be trained: the turns as a tree, why each branch began, what the chat template left
out, and how the program ended. It needs no engine and no training."""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.config import read
from etude.environments import prepare
from etude.environments.backends import runtime_from_config
from etude.errors import Exit, InputError
from etude.harness import (
    Call,
    ChatFormat,
    Episode,
    HarnessConfig,
    ModelTurn,
    RequestOptions,
    chat_template,
    run_program,
    standard_tools,
)
from etude.harness.chat import SPECIAL_TOKENS, Message
from etude.harness.commands import Signature
from etude.harness.episode import AgentRun
from etude.loop.config import open_tasks
from etude.loop.limits import build_config, smallest_call
from etude.loop.preflight import build_images
from etude.records import Completion, CompletionRequest, Task
from etude.records.rollout import Ending, Start, TurnKind
from etude.records.task import Split
from etude.rollouts.scripted import scripted_completion

_LAST = ("submit", "finish", "done", "exit", "complete", "attempt_completion", "end")  # tools that end an agent
_PROBE_CHARS = 40  # of a text that must be found in the rendering
_asked: contextvars.ContextVar[tuple[str, Mapping[str, Signature]]] = contextvars.ContextVar("the running request")

Answer = Callable[[str, Mapping[str, Signature]], str | Call]
"""Gives a model's answer to the last message of a request and its tools by name."""


def check(args: argparse.Namespace) -> int:
    """Run one task through the config's agent program, and print what of it would be trained.

    Returns exit code 1 when nothing was attributed to the rollout."""
    config = build_config(read(args.config, args.set))
    answer = _first_tool() if args.answers is None else _in_order(_read_answers(args.answers))
    asyncio.run(build_images(config, print))
    task = open_tasks(config, canaries=False).task(Split(args.split), args.task)
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatFormat.load(config.start) if config.start is not None else _small_chat(task, Path(folder))
    episode, run = asyncio.run(_play(task, config.machines, config.harness, chat, answer))
    print(f"task {task.task_id} of {config.tasks.source}; program {config.harness.program}")
    for line in _tree(episode):
        print(line)
    ended = f"failed: {run.failure}" if run.failure else f"ended: {run.ending}"
    print(f"{ended}; {run.tool_s:.1f} s of its own")
    for line in run.log.decode(errors="replace").splitlines()[-args.lines :]:
        print(f"  | {line}")
    problems = list(_problems(episode, run))
    for what, hint in problems:
        print(f"problem: {what}\n  hint: {hint}")
    if not problems:
        print("no problem found")
    return Exit.DONE if episode.observed and run.failure is None else Exit.FAILED


def _read_answers(path: Path) -> list[str | Call]:
    """Read the lines of a script: a JSON text, or a call as ``{"name": ..., "arguments": {...}}``."""
    answers: list[str | Call] = []
    try:
        for line in filter(str.strip, path.read_text().splitlines()):
            one = json.loads(line)
            answers.append(one if isinstance(one, str) else Call(str(one["name"]), dict(one["arguments"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = 'write one JSON value a line: "a text", or {"name": "run", "arguments": {"command": "ls"}}'
        raise InputError(f"{path} is not a file of scripted answers", repr(error), hint=hint) from None
    return answers


def _small_chat(task: Task, folder: Path) -> ChatFormat:
    """Make a chat format of etude's for a config without a starting checkpoint."""
    from etude.training.tokenizer import train_tokenizer

    texts, template = [task.instruction, *task.files.values()], chat_template()
    train_tokenizer(texts, folder, vocab_size=512, special_tokens=SPECIAL_TOKENS, chat_template=template)
    return ChatFormat.load(folder)


async def _play(
    task: Task, machines: Any, limits: HarnessConfig, chat: ChatFormat, answer: Answer
) -> tuple[ObservedEpisode, AgentRun]:
    runtime = runtime_from_config(machines)
    try:
        (machine,) = await runtime.fork(await prepare(runtime, task), 1)
        episode = ObservedEpisode(
            task,
            machine,
            policy=ScriptedModel(chat, answer),
            chat=chat,
            tools=standard_tools(limits.tools),
            limits=limits,
            options=RequestOptions(session_id="check/0", seed=0),
        )
        return episode, await run_program(episode)
    finally:
        await runtime.close()


@dataclass(frozen=True)
class Observed:
    """One turn, and what of its request is not in the tokens that the model read."""

    turn: ModelTurn
    lost: list[str] = field(default_factory=list)


class ObservedEpisode(Episode):
    """An episode that compares each request with its rendering. `observed` are its turns."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.observed: list[Observed] = []

    async def ask(
        self,
        messages: list[Message] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ModelTurn:
        asked = list(self.messages if messages is None else messages)
        last = str(asked[-1].get("content", "")) if asked else ""
        _asked.set((last, self.tools.signatures if tools is None else self.chat.signatures(tools)))
        turn = await super().ask(messages, tools=tools, **options)
        rendered = self.chat.decode(turn.node.prompt_context(), special=True)
        self.observed.append(Observed(turn, _lost(asked, tools or (), rendered)))
        return turn


def _lost(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], rendered: str) -> list[str]:
    """Name the tools and messages that a rendering lacks."""
    names = [str(tool["function"]["name"]) for tool in tools]
    missing = [f"tool {name!r}" for name in names if name not in rendered]
    packed = "".join(rendered.split())
    for message in messages:
        probe = "".join(str(message.get("content") or "").split())[:_PROBE_CHARS]
        if message["role"] != "assistant" and probe not in packed:
            missing.append(f"{message['role']} message {str(message['content'])[:_PROBE_CHARS]!r}")
    return missing


class ScriptedModel:
    """A policy that answers the requests of an `ObservedEpisode`.

    `answer` is called with the last message and the tools of a request, and returns a text or a call."""

    def __init__(self, chat: ChatFormat, answer: Answer) -> None:
        self._chat, self._answer = chat, answer

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return the answer as a completion."""
        answer = self._answer(*_asked.get())
        return scripted_completion(request, self._chat, answer, max_tokens=request.sampling.max_tokens)


def _in_order(answers: Sequence[str | Call]) -> Answer:
    """Return the answers one after another, then "ok"."""
    left = iter(answers)
    return lambda last, signatures: next(left, "ok")


def _first_tool() -> Answer:
    """Call the first tool of the first request that has tools; then a tool that ends the agent, or say "ok"."""
    called = False

    def answer(last: str, signatures: Mapping[str, Signature]) -> str | Call:
        nonlocal called
        if signatures and not called:
            called = True
            return smallest_call(next(iter(signatures.values())))
        ending = next((signatures[name] for name in _LAST if name in signatures), None)
        return "ok" if ending is None else smallest_call(ending)

    return answer


def _tree(episode: ObservedEpisode) -> list[str]:
    lines = [f"{len(episode.observed)} turns:"]
    for one in sorted(episode.observed, key=lambda one: one.turn.number):
        node = one.turn.node
        parent = "-" if node.parent is None else str(node.parent.number)
        said = ", ".join(f"calls {call.name}" for call in one.turn.reply.calls) or repr(one.turn.reply.text[:40])
        tokens = f"{len(node.prompt_ids)} new + {len(node.completion.token_ids)} sampled tokens"
        lines.append(f"  turn {node.number} after {parent} ({node.start}, {node.kind}): {tokens}, {said}")
    return lines


def _problems(episode: ObservedEpisode, run: AgentRun) -> list[tuple[str, str]]:
    """List what would keep the program from being trained well, each with a hint."""
    found: list[tuple[str, str]] = []
    if not episode.observed:
        hint = "it must use OPENAI_BASE_URL or ANTHROPIC_BASE_URL of its environment; its log is above"
        found.append(("the program sent no request to the model, so nothing would be trained", hint))
    again = [one.turn.node.number for one in episode.observed if one.turn.node.start is Start.HISTORY]
    if again:
        hint = "it changes or drops messages of the model; each such request is tokenised anew, as a branch of its own"
        found.append((f"turns {again} do not continue any earlier turn of the model", hint))
    lost = sorted({name for one in episode.observed for name in one.lost})
    if lost:
        hint = "the chat template leaves it out; a checkpoint's own template shows what it was trained with"
        found.append((f"the model never reads: {', '.join(lost)[:1000]}", hint))
    if episode.observed and all(one.turn.node.kind is TurnKind.SIDE for one in episode.observed):
        found.append(("all turns are side calls, which are not trained", "see the setting harness.program.side"))
    if run.ending is Ending.CONTEXT:
        size = f"harness.context_tokens = {episode.limits.context_tokens}"
        found.append((f"the context was full: {size}", "set it to more, or give the program shorter prompts"))
    if run.ending is Ending.DEADLINE:
        facts = f"harness.rollout_deadline_s = {episode.limits.rollout_deadline_s:g}"
        found.append((f"the program was killed at its deadline: {facts}", "set it to more, or see what it waits for"))
    if run.ending is Ending.STOPPED and episode.limits.require_submit:
        hint = "see its exit code in the log; harness.require_submit = false grades such rollouts, too"
        found.append(("the program ended without a submission, and with harness.require_submit the reward is 0", hint))
    return found
