"""The command ``etude harness check``: run one task through a config's agent program, with a scripted model.

It shows the turns that would be trained, as a tree; why each branch of the tree began; what the chat template left out;
and how the program ended. It needs no engine and no training."""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.cli.lost_text import lost_parts
from etude.cli.rollout_tree import print_views
from etude.config import leaves, read
from etude.dashboard.formatting import number
from etude.environments import prepare
from etude.environments.backends import runtime_from_config
from etude.errors import Exit, InputError, nearest
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
from etude.harness.commands import Signature, usage
from etude.harness.episode import AgentRun
from etude.loop.config import open_tasks
from etude.loop.limits import build_config, check_positions, smallest_call, start_model_config
from etude.loop.preflight import build_images, last_rope_factor
from etude.records import Completion, CompletionRequest, Task
from etude.records.rollout import Ending, Start, TurnKind
from etude.records.task import Split
from etude.records.view import RolloutView
from etude.rollouts.endpoints import ENDED
from etude.rollouts.scripted import scripted_completion
from etude.rollouts.view import view_turns
from etude.seams import TaskSource

_LAST = ("submit", "finish", "done", "exit", "complete", "attempt_completion", "end")  # tools that end an agent
_asked: contextvars.ContextVar[tuple[str, Mapping[str, Signature]]] = contextvars.ContextVar("the running request")

Answer = Callable[[str, Mapping[str, Signature]], str | Call]
"""Returns the model's answer, given the last message of a request and its tools by name."""


def check(args: argparse.Namespace) -> int:
    """Run one task through the config's agent program, and print the turns that would be trained.

    Returns exit code 1 when there is a problem. Notices do not change it."""
    given = read(args.config, args.set)
    config = build_config(given)
    if config.start is not None:
        check_positions(
            start_model_config(config.start),
            context_tokens=config.engine.context_tokens,
            rope_factor=last_rope_factor(config),
            given=leaves(given),
        )
    script = None if args.answers is None else Script(args.answers, _read_answers(args.answers))
    answer = _first_tool() if script is None else script.answer
    asyncio.run(build_images(config, print))
    task = _task(open_tasks(config, canaries=False), Split(args.split), args.task)
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatFormat.load(config.start) if config.start is not None else _small_chat(task, Path(folder))
    episode, run = asyncio.run(_play(task, config.machines, config.harness, chat, answer))
    print(f"program {config.harness.program}")
    print_views([_view(str(config.tasks.source), task, run, chat)], full=False)
    print(f"ran {run.tool_s:.1f} s, without waiting for the model")
    for line in run.log.decode(errors="replace").splitlines()[-args.lines :]:
        print(f"  | {line}".rstrip())
    problems = [*_problems(episode, run), *(script.problems if script is not None else ())]
    for one in problems:
        print(f"{'problem' if one.fatal else 'notice'}: {one.what}\n  hint: {one.hint}")
    fatal = run.failure is not None or any(one.fatal for one in problems)
    if not fatal:
        print("no problem found")
    return Exit.FAILED if fatal else Exit.DONE


def _read_answers(path: Path) -> list[tuple[int, str | Call]]:
    """Read a script, and return each answer with the number of its line, from 1.

    A line is a JSON text, or a call as ``{"name": ..., "arguments": {...}}``. Raises `InputError`."""
    hint = 'write one JSON value a line: "a text", or {"name": "run", "arguments": {"command": "ls"}}'
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read", str(error), hint=hint) from None
    answers: list[tuple[int, str | Call]] = []
    for at, line in enumerate(lines, 1):
        if line.strip():
            try:
                answers.append((at, _scripted(line)))
            except (ValueError, RecursionError) as error:
                raise InputError(f"line {at} of {path} is not a scripted answer", str(error), hint=hint) from None
    if not answers:
        raise InputError(f"{path} has no answers", "it is empty", hint=hint)
    return answers


def _scripted(line: str) -> str | Call:
    """Parse a line of a script. Raises `ValueError`, also for what is no JSON."""
    try:
        one = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if isinstance(one, str):
        return one
    if not isinstance(one, dict):
        raise ValueError(f"it is {_KINDS[type(one)]}, expected a text or an object")
    for key, kind in (("name", str), ("arguments", dict)):
        if key not in one:
            raise ValueError(f"{key} is missing")
        if not isinstance(one[key], kind):
            raise ValueError(f"{key} is {_KINDS[type(one[key])]}, expected {_KINDS[kind]}")
    return Call(one["name"], one["arguments"])


_KINDS: dict[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _task(source: TaskSource, split: Split, index: int) -> Task:
    """Return a task of the source. Raises `InputError` if it has none of this index."""
    size = source.size(split)
    if not 0 <= index < (math.inf if size is None else size):
        facts = "indices start at 0" if size is None else f"it has {number(size, 'task')}, with indices from 0"
        raise InputError(
            f"--task {index} is no task of the split {split}", facts, hint="give another --task or --split"
        )
    return source.task(split, index)


def _small_chat(task: Task, folder: Path) -> ChatFormat:
    """Make etude's chat format with a small tokeniser, for a config without a starting checkpoint."""
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
    """One turn of the checked program.

    `lost`: what of its request is not in the tokens that the model read (`lost_parts`). `num_resampled`: as in
    `ModelTurn`. `broken`: its request continues an earlier conversation, but the turn became a new root of the tree."""

    turn: ModelTurn
    lost: list[str]
    num_resampled: int
    broken: bool


class ObservedEpisode(Episode):
    """An episode that compares each request with the tokens that the model reads. `observed` has one entry per turn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.observed: list[Observed] = []
        self._prompts = list[list[Message]]()
        self._summaries = list[str]()

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
        again, broken = self._goes_on(asked, turn)
        self.observed.append(Observed(turn, lost_parts(asked, tools or (), rendered), again, broken))
        self._prompts.append(asked)
        if turn.node.kind is TurnKind.SUMMARY and turn.reply.text:
            self._summaries.append(turn.reply.text)
        return turn

    def _goes_on(self, asked: list[Message], turn: ModelTurn) -> tuple[int, bool]:
        """Return `num_resampled` and `broken` of `Observed`. One that continues from a summary is not broken.

        A new root continues an earlier conversation if it has messages of the model that no earlier request has, or
        has as often (others are examples in the prompt), or all messages of an earlier request and more."""
        if turn.node.parent is not None:
            return turn.num_resampled, False
        texts = [str(message.get("content") or "") for message in asked]
        if any(summary in text for summary in self._summaries for text in texts):
            return 0, False
        own = [one for one in asked if one["role"] == "assistant"]
        said = [one for one in own if all(p.count(one) < own.count(one) for p in self._prompts)]
        longer = any(len(one) < len(asked) and asked[: len(one)] == one for one in self._prompts)
        return turn.num_resampled, bool(turn.num_resampled or (self._prompts and said) or longer)


class ScriptedModel:
    """A policy that answers the requests of an `ObservedEpisode`.

    `answer` is called with the last message and the tools of a request, and returns a text or a call."""

    def __init__(self, chat: ChatFormat, answer: Answer) -> None:
        self._chat, self._answer = chat, answer

    async def complete(self, request: CompletionRequest) -> Completion:
        """Return the answer as a completion."""
        answer = self._answer(*_asked.get())
        return scripted_completion(request, self._chat, answer, max_tokens=request.sampling.max_tokens)


class Script:
    """The answers of the file `path`, each with the number of its line. `problems`: calls that do not fit the tools of
    the answered request."""

    def __init__(self, path: Path, answers: Sequence[tuple[int, str | Call]]) -> None:
        self.problems: list[Problem] = []
        self._path, self._left = path, iter(answers)

    def answer(self, last: str, signatures: Mapping[str, Signature]) -> str | Call:
        """Return the next answer of the script, or "ok" after the last one.

        A call of a tool that is not in `signatures`, or with wrong or missing arguments, is added to `problems`."""
        number, answer = next(self._left, (0, "ok"))
        what = f"line {number} of {self._path} calls"
        if isinstance(answer, Call) and answer.name not in signatures:
            hint = nearest(answer.name, signatures) if signatures else "script a text: the request has no tools"
            self.problems.append(Problem(f"{what} {answer.name!r}, a tool that the request does not offer", hint))
        elif isinstance(answer, Call) and (wrong := _misfit(answer, signatures[answer.name])):
            self.problems.append(Problem(f"{what} {answer.name!r} {wrong}", usage(signatures[answer.name])))
        return answer


def _misfit(call: Call, signature: Signature) -> str:
    """Return which arguments of a call its tool does not take, or which are missing; "" if the names fit."""
    known = [one.name for one in signature.parameters]
    schema = {} if signature.given is None else signature.given["function"].get("parameters") or {}
    closed = schema.get("additionalProperties", False) is False
    unknown = [name for name in call.arguments if closed and name not in known]
    missing = [one.name for one in signature.parameters if one.required and one.name not in call.arguments]
    parts = (("with the unknown argument", unknown), ("without the required argument", missing))
    return " and ".join(f"{what}{'s' * (len(names) > 1)} {', '.join(names)}" for what, names in parts if names)


def _first_tool() -> Answer:
    """Return a model that calls the first tool, then one that ends the agent (such as `submit`), or answers "ok"."""
    called = False

    def answer(last: str, signatures: Mapping[str, Signature]) -> str | Call:
        nonlocal called
        if signatures and not called:
            called = True
            return smallest_call(next(iter(signatures.values())))
        ending = next((signatures[name] for name in _LAST if name in signatures), None)
        return "ok" if ending is None else smallest_call(ending)

    return answer


def _view(source: str, task: Task, run: AgentRun, chat: ChatFormat) -> RolloutView:
    return RolloutView(
        rollout_id="check",
        source=source,
        family=task.family,
        task_id=task.task_id,
        ending=None if run.failure else str(run.ending),
        invalid=f"the run: {run.failure}" if run.failure else "",
        turns=view_turns(run.trace, chat),
    )


@dataclass(frozen=True)
class Problem:
    """A problem of an agent program, which makes training worse or impossible. `fatal`: whether it makes training
    impossible."""

    what: str
    hint: str
    fatal: bool = True


def _problems(episode: ObservedEpisode, run: AgentRun) -> Iterator[Problem]:
    """Yield the problems that prevent or impair training."""
    if not episode.observed and not episode.refused:
        hint = "it must use OPENAI_BASE_URL or ANTHROPIC_BASE_URL of its environment; its log is above"
        yield Problem("the program sent no request to the model, so nothing would be trained", hint)
    yield from _refused(episode)
    yield from _rewritten(episode.observed)
    lost = {part for one in episode.observed for part in one.lost}
    lost -= {part for part in lost if lost.intersection(part.split(" of ")[1:])}  # parts of a tool that is lost whole
    if lost:
        hint = "the chat template leaves it out; a checkpoint's own template shows what it was trained with"
        yield Problem(f"the model never reads: {'; '.join(sorted(lost))[:1000]}", hint, fatal=False)
    if episode.observed and all(one.turn.node.kind is TurnKind.SIDE for one in episode.observed):
        yield Problem("all turns are side calls, which are not trained", "see the setting harness.program.side")
    yield from _ending(episode, run)


def _refused(episode: ObservedEpisode) -> Iterator[Problem]:
    """Yield the refused requests by status, path and message. Those for a full context are left to `_ending`."""
    late = 0
    for one, count in episode.refused.items():
        if one.code == ENDED:
            late += count
        elif one.code != "context_length_exceeded":
            was = f"{number(count, 'request')} {'was' if count == 1 else 'were'} refused"
            fatal = one.request.startswith("POST ") and one.status != 429
            yield Problem(f"{was}: {one.status} {one.request}: {one.message}", _HINTS.get(one.status, _HINT), fatal)
    if late:
        what = f"{number(late, 'request')} came after the end of the rollout and got status 403"
        if episode.ending is Ending.TURNS:
            what += f": harness.max_turns = {episode.limits.max_turns} turns were used"
        hint = "nothing to do if the program stops then; else raise harness.max_turns, or script the end with --answers"
        yield Problem(what, hint, fatal=False)


_HINT = "change the request, or the program's settings; docs/guides/serving.md says what each dialect takes"
_HINTS = {
    401: "send the key of OPENAI_API_KEY or ANTHROPIC_API_KEY",
    404: "OpenAI's clients need {base_url} (it ends with /v1), Anthropic's the same without /v1",
    429: "nothing to do if the client of the program tries again; otherwise send fewer requests at the same time",
}


def _rewritten(observed: Sequence[Observed]) -> Iterator[Problem]:
    """Yield a problem if requests repeat a conversation in another form than the model has read and sampled it."""
    again = sum(one.num_resampled for one in observed)
    tokenised = f" ({again} sampled {'reply' if again == 1 else 'replies'} tokenised again)" if again else ""
    roots = [one for one in observed if one.broken]
    if roots:
        numbers = [one.turn.node.number for one in roots]
        starts = {one.turn.node.start for one in roots}
        hint = " ".join(text for start, text in _WHY.items() if start in starts)
        what = f"turns {numbers} do not continue any earlier turn of the model{tokenised}"
        yield Problem(what, f"{hint} Each such request begins a new conversation")
    elif again:
        numbers = [one.turn.node.number for one in observed if one.num_resampled]
        hint = "the program changes or drops an earlier message; send the conversation as it was"
        yield Problem(f"turns {numbers} continue an earlier turn only in part{tokenised}", hint)


_WHY = {
    Start.TOOLS: "The tools have changed: send the same ones in each request.",
    Start.SYSTEM: "The first message has changed (a time, a counter?): keep it as it was.",
    Start.HISTORY: "The messages of the model were changed or dropped: send them as they came.",
}


def _ending(episode: ObservedEpisode, run: AgentRun) -> Iterator[Problem]:
    if episode.ended_by and run.ending in (Ending.TURNS, Ending.CONTEXT, Ending.DEADLINE):
        what = f"the program ended by its own limit, as {run.ending}: {episode.ended_by}"
        hint = "nothing to do if the scripted model does not finish the task; else raise that limit of the program"
        yield Problem(what, hint, fatal=False)
    elif run.ending is Ending.CONTEXT:
        size = f"harness.context_tokens = {episode.limits.context_tokens}"
        yield Problem(f"the context was full: {size}", "set it to more, or give the program shorter prompts")
    elif run.ending is Ending.DEADLINE:
        facts = f"harness.rollout_deadline_s = {episode.limits.rollout_deadline_s:g}"
        yield Problem(f"the program was killed at its deadline: {facts}", "set it to more, or see what it waits for")
    elif run.ending is Ending.STOPPED and episode.ended_by not in ("", "exit code 0"):
        hint = "see the end of its log above; a rollout that ends so is graded as it is, or 0 with require_submit"
        yield Problem(f"the program failed: {episode.ended_by}", hint)
    elif run.ending is Ending.STOPPED and episode.limits.require_submit:
        hint = "with harness.require_submit = false such rollouts are graded, too"
        yield Problem("the program ended without a submission, and with harness.require_submit the reward is 0", hint)
