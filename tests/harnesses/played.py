"""One task through a real agent program with a scripted model: which requests are attributed, and the agent's result.

The agents are those of `requirements.txt` and `package.json` here, unchanged, with the configs of
`docs/guides/harnesses.md`. The model's words and tokens are a script; agent, endpoints and machine are real."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.parity import chats

from etude.cli.harness import Answer, ObservedEpisode, ScriptedModel
from etude.config import build
from etude.environments import prepare
from etude.environments.backends import open_runtime
from etude.experience.packing import paths
from etude.harness import Call, ChatFormat, HarnessConfig, RequestOptions, run_program, standard_tools
from etude.harness.chat import Message
from etude.harness.commands import Signature
from etude.records import Task
from etude.records.rollout import TurnKind
from etude.records.task import Split
from etude.rollouts.endpoints import RolloutEndpoints

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guides" / "harnesses.md"
TASK = Task(
    source="list",
    split=Split.TRAIN,
    index=0,
    family="demo",
    instruction="calc.py: price(n) must return n + 3. Change the file with one command, then say done.",
    files={"calc.py": 'def price(n):\n    """n plus 3"""\n    return n - 3\n'},
    exports=("calc.py",),
    test_command=("python", "-c", "import calc; assert calc.price(1) == 4"),
)
COMMANDS = ("cat calc.py", "sed -i 's/n - 3/n + 3/' calc.py")
FIXED = b"    return n + 3\n"
SHELLS = ("bash", "Bash", "shell", "exec_command", "shell_command", "run", "local_shell")

Answers = Callable[[int, str, Mapping[str, Signature]], str | Call]
"""Gives the next answer by the number of answers so far (without "ok"), the last message and the tools."""


@dataclass
class Played:
    """What came of one rollout.

    `fixed`: the edit of `COMMANDS` is in the machine (with `TASK`). `statuses`: HTTP answers of its endpoints, by path
    and status. `messages`: those of the last request."""

    ending: str
    fixed: bool
    num_requests: int
    num_turns: int
    num_side: int
    num_resampled: int
    branches: int
    rows: int
    wall_s: float
    statuses: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    messages: list[Message] = field(default_factory=list)
    log: str = ""

    @property
    def num_failed(self) -> int:
        """Answers with a status of 500 or more."""
        return sum(n for name, n in self.statuses.items() if int(name.rsplit(" ", 1)[1]) >= 500)

    @property
    def num_refused(self) -> int:
        """Requests for a completion that were refused (statuses 400 to 499)."""
        return self._num_answers(r"4\d\d")

    @property
    def attributed(self) -> float:
        """The part of the answered requests for a completion that are turns of the rollout."""
        answered = self._num_answers("200")
        return self.num_turns / answered if answered else 0.0

    def _num_answers(self, status: str) -> int:
        asked = re.compile(rf"(completions|responses|messages) {status}")
        return sum(n for name, n in self.statuses.items() if asked.search(name))


def config_of(
    name: str, *arguments: str, tools: str | None = None, env: Mapping[str, str] | None = None
) -> HarnessConfig:
    """The config of an agent, as the section `name` of the guide has it.

    `arguments` are put before the instruction's place, `tools` stands in place of "Bash", and `env` is added."""
    section = re.search(rf"^## {re.escape(name)}\n.*?```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert section, f"{GUIDE} has no section {name!r} with a config"
    harness: dict[str, Any] = tomllib.loads(section[1])["harness"]
    program = harness["program"]
    argv = [tools if word == "Bash" and tools else word for word in program["argv"]]
    at = argv.index("{instruction}") if arguments else 0
    options = at - (argv[at - 1] in ("-p", "-t"))  # the instruction is the value of an option
    program |= {"argv": [*argv[:options], *arguments, *argv[options:]], "env": program.get("env", {}) | (env or {})}
    return build(HarnessConfig, harness)


class _Episode(ObservedEpisode):
    last: list[Message]

    async def ask(self, messages: Any = None, **options: Any) -> Any:
        self.last = list(messages or ())
        return await super().ask(messages, **options)


def in_shell(command: str, tools: Mapping[str, Signature]) -> Call | None:
    """A call of the tool that takes a shell command; None if there is none."""
    shell = next((tools[name] for name in sorted(tools) if name.rpartition("__")[2] in SHELLS), None)
    if shell is None:
        return None
    names = [parameter.name for parameter in shell.parameters]
    return Call(shell.name, {next(n for n in ("command", "cmd") if n in names): command})


def by_shell(end: str | Call = "done", commands: Sequence[str] = COMMANDS) -> Answers:
    """The commands one after another, then the end; "ok" where no tool takes a shell command."""

    def answer(done: int, last: str, tools: Mapping[str, Signature]) -> str | Call:
        call = in_shell(commands[min(done, len(commands) - 1)], tools)
        return "ok" if call is None else call if done < len(commands) else end

    return answer


def by_summaries() -> Answers:
    """A command with a long output, the edit, and the end; meanwhile a summary, when the agent asks for one."""
    work, num_summaries = by_shell(commands=(f"seq 1 4000; {COMMANDS[0]}", COMMANDS[1])), 0

    def answer(done: int, last: str, tools: Mapping[str, Signature]) -> str | Call:
        nonlocal num_summaries
        if any(words in last for words in ("CONTEXT CHECKPOINT COMPACTION", "a <summary> block")):
            num_summaries += 1
            return "<summary>calc.py has n - 3 and must have n + 3. Next: edit it with sed.</summary>"
        return work(done - num_summaries, last, tools)

    return answer


def by_sub_agent(done: int, last: str, tools: Mapping[str, Signature]) -> str | Call:
    """Have the sub-agent "reader" look and say what it sees, then edit and end."""
    task = {"description": "read calc.py", "prompt": "What does price return?", "subagent_type": "reader"}
    plan = (
        Call("Agent", {**task, "run_in_background": False}),
        in_shell(COMMANDS[0], tools),
        "price returns n - 3",
        in_shell(COMMANDS[1], tools),
    )
    return (plan[done] if done < len(plan) else "done") or "ok"


def by_text(*answers: str) -> Answers:
    """These texts, then "ok"."""
    return lambda done, last, tools: answers[done] if done < len(answers) else "ok"


_REPLACE = "calc.py\n```python\n<<<<<<< SEARCH\n    return n - 3\n=======\n    return n + 3\n>>>>>>> REPLACE\n```\n"
ANSWERS: dict[str, Answers] = {
    "mini-swe-agent": by_shell(Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    "OpenAI Agents SDK": by_shell(),
    "Claude Code": by_shell(),
    "Codex": by_shell(),
    "Aider": by_text(_REPLACE),
    "Inspect": by_shell(Call("submit", {"answer": "done"})),
}
"""What the scripted model answers to each agent of the guide."""


def counted(answers: Answers) -> Answer:
    """The answers by the last message and the tools alone, which count themselves."""
    done = 0

    def answer(last: str, tools: Mapping[str, Signature]) -> str | Call:
        nonlocal done
        found = answers(done, last, tools)
        done += found != "ok"
        return found

    return answer


Front = Callable[[RolloutEndpoints, Any, Any, Any], Awaitable[None]]
"""What answers the requests of an agent: ASGI, with the endpoints of its rollout before the three arguments."""


def qwen() -> ChatFormat:
    """The chat format of a checkpoint of Qwen's shape, with tool calls and reasoning."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatFormat.load(chats.make(Path(folder), "qwen"))


def play(
    config: HarnessConfig, answers: Answers, task: Task = TASK, front: Front = RolloutEndpoints.__call__
) -> Played:
    """Run one rollout of the agent on a machine of namespaces, with `front` in place of its endpoints."""
    kept = {k: v for k, v in os.environ.items() if not re.match("CLAUDE|ANTHROPIC|OPENAI|CODEX|LITELLM", k)}
    with mock.patch.dict(os.environ, kept, clear=True):
        return asyncio.run(_play(config, answers, task, front))


async def _play(config: HarnessConfig, answers: Answers, task: Task, front: Front) -> Played:
    statuses, began, chat = Counter[str](), asyncio.get_running_loop().time(), qwen()

    async def noted(endpoints: RolloutEndpoints, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = re.sub(r"^/r/.*?(?=/v1/|/machine/)", "", scope["path"])
                statuses[f"{scope['method']} {path} {message['status']}"] += 1
            await send(message)

        await front(endpoints, scope, receive, sent)

    runtime = open_runtime("namespace")
    with mock.patch.object(RolloutEndpoints, "__call__", noted):
        try:
            (machine,) = await runtime.fork(await prepare(runtime, task), 1)
            episode = _Episode(
                task,
                machine,
                policy=ScriptedModel(chat, counted(answers)),
                chat=chat,
                tools=standard_tools(),
                limits=config,
                options=RequestOptions(session_id="g000001.0/0", seed=7),
            )
            episode.last = []
            run = await run_program(episode)
            fixed = task is TASK and FIXED in await machine.read("calc.py", max_bytes=10_000)
            await machine.close()
        finally:
            await runtime.close()
    trace = run.trace
    log = run.log.decode(errors="replace")
    requests = re.search(r"turns \d+, requests (\d+)", log)
    return Played(
        ending=str(run.ending or run.failure),
        fixed=fixed,
        num_requests=int(requests[1]) if requests else 0,
        num_turns=len(trace.turns),
        num_side=sum(turn.kind is TurnKind.SIDE for turn in trace.turns),
        num_resampled=episode.num_resampled,
        branches=len([leaf for leaf in trace.leaves() if trace.turns[leaf].kind is not TurnKind.SIDE]),
        rows=sum(path.mask.any() for path in paths(trace)),
        wall_s=round(asyncio.get_running_loop().time() - began, 1),
        statuses=dict(statuses),
        starts=dict(Counter(str(one.turn.node.start) for one in episode.observed)),
        prompt_tokens=len(trace.turns[0].prompt_ids) if trace.turns else 0,
        messages=episode.last,
        log=log,
    )
