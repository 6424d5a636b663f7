from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from examples.long.tasks import Logs, Script, play
from tests.unit.environments.judging import on_machines
from tests.unit.harness.tokeniser import laptop_chat
from tests.unit.rollouts.reader import Reader

from etude.capture import TurnTree
from etude.capture.context import HISTORY
from etude.errors import ContextFull, MachineError
from etude.harness import Call, Episode, HarnessConfig, RequestOptions, standard_tools
from etude.harness.compaction import remove_history, write_history
from etude.loop.rollout_scheduler import siblings
from etude.records import Completion, CompletionRequest, Rollout, Task
from etude.records.rollout import Boundary, Ending, TurnKind
from etude.records.task import Split
from etude.rollouts import ScriptedPolicy, demonstrate_long, run_rollout
from etude.rollouts.attribution import Attribution
from etude.rollouts.endpoints import serve_rollout
from etude.testing import MemoryMachine, MemoryRuntime

CHAT = laptop_chat()
LIMITS = HarnessConfig(
    tools=("cat", "edit", "submit"), max_turns=60, turn_tokens=80, context_tokens=320, summary_tokens=60
)
SOURCE = Logs(num_logs=13)


def roll(task: Task, script: Script, limits: HarnessConfig = LIMITS) -> Rollout:
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = ScriptedPolicy(script, CHAT)
    return asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=CHAT, harness=limits))


def num_tokens(rollout: Rollout) -> int:
    """Tokens of tool outputs and calls, which a single conversation would have to hold."""
    acts = [turn for turn in rollout.trace.turns if turn.kind is TurnKind.ACT]
    return sum(len(CHAT.encode(call.output)) for turn in acts for call in turn.calls) + sum(
        len(turn.completion.token_ids) for turn in acts
    )


def test_a_policy_that_summarises_well_solves_a_task_three_times_its_window() -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    rollout = roll(task, play(SOURCE.num_logs, random.Random(0), right=1.0))
    assert rollout.ending is Ending.SUBMITTED
    assert rollout.exports["answer.py"].decode() == SOURCE.answer(task).reference["answer.py"]
    assert num_tokens(rollout) > 3 * LIMITS.context_tokens
    assert all(len(rollout.trace.path(leaf).token_ids) <= LIMITS.context_tokens for leaf in rollout.trace.leaves())
    assert sum(turn.kind is TurnKind.SUMMARY for turn in rollout.trace.turns) >= 3


@pytest.mark.parametrize("carries", [True, False])
def test_what_a_policy_knows_after_a_summary_is_only_what_the_summary_carries(carries: bool) -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = Reader(CHAT, SOURCE.num_logs, carries=carries)
    rollout = asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=CHAT, harness=LIMITS))
    solved = rollout.exports["answer.py"].decode() == SOURCE.answer(task).reference["answer.py"]
    assert solved == carries
    assert rollout.ending is (Ending.SUBMITTED if carries else Ending.TURNS), "without memory it begins again"
    assert sum(turn.kind is TurnKind.SUMMARY for turn in rollout.trace.turns) >= 3


@pytest.mark.parametrize("limits", [dataclasses.replace(LIMITS, summary_tokens=0)])
def test_without_summaries_the_long_task_fills_the_context(limits: HarnessConfig) -> None:
    task = SOURCE.task(Split.HELDOUT, 0)
    assert roll(task, play(SOURCE.num_logs, random.Random(0), right=1.0), limits).ending is Ending.CONTEXT


def test_a_policy_that_forgets_in_its_summaries_fails() -> None:
    task = SOURCE.task(Split.HELDOUT, 1)
    rollout = roll(task, play(SOURCE.num_logs, random.Random(0), right=0.0))
    assert rollout.ending is Ending.SUBMITTED
    assert rollout.exports["answer.py"].decode() != SOURCE.answer(task).reference["answer.py"]


def test_demonstrations_are_the_conversations_of_rollouts() -> None:
    found = SOURCE.demonstration(Split.TRAIN, 5, seed=0, right=1.0)
    files = {path: text.encode() for path, text in found.task.files.items()}
    documents = demonstrate_long(found.task, found.script, CHAT, MemoryMachine(files), LIMITS, group_seed=3)
    (spec,) = siblings("g000000", found.task, 1, seed=0, temperature=1.0)
    script = SOURCE.demonstration(Split.TRAIN, 5, seed=0, right=1.0).script
    rollout = asyncio.run(
        run_rollout(
            msgspec.structs.replace(spec, group_seed=3),
            runtime=MemoryRuntime(),
            policy=ScriptedPolicy(script, CHAT),
            chat=CHAT,
            harness=LIMITS,
        )
    )
    paths = [rollout.trace.path(leaf).token_ids for leaf in rollout.trace.leaves()]
    assert len(documents) == len(paths) > 3
    assert all(np.array_equal(one, other) for one, other in zip(documents, paths, strict=True))


def test_siblings_share_the_seed_of_their_group() -> None:
    task = SOURCE.task(Split.TRAIN, 0)
    one, other = (siblings(group, task, 4, seed=0, temperature=1.0) for group in ("g000000", "g000001"))
    assert len({spec.group_seed for spec in one}) == 1
    assert len({spec.seed for spec in one}) == 4
    assert one[0].group_seed != other[0].group_seed


def test_held_out_keys_are_in_no_training_task() -> None:
    held = {SOURCE.problem(Split.HELDOUT, i).answer for i in range(200)}
    assert not held & {SOURCE.problem(Split.TRAIN, i).answer for i in range(2000)}


# programs that ask over HTTP


class Lost(MemoryMachine):
    """A machine that fails when the history is written."""

    error: Exception = MachineError("the machine is lost", hint="none")

    async def write(self, path: str, data: bytes) -> None:
        if path == HISTORY:
            raise self.error
        await super().write(path, data)


class FullDisk(Lost):
    error = OSError("no space left")


@asynccontextmanager
async def endpoints(
    policy: Any, *, machine: type[MemoryMachine] = MemoryMachine, limits: HarnessConfig = LIMITS
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Episode, Attribution]]:
    task = SOURCE.task(Split.HELDOUT, 0)
    episode = Episode(
        task,
        machine({path: content.encode() for path, content in task.files.items()}),
        policy=policy,
        chat=CHAT,
        tools=standard_tools(limits.tools),
        limits=limits,
        options=RequestOptions(session_id="g000000.0/0", seed=7, group_seed=3),
    )
    asked = Attribution(episode, log=lambda _: None)
    async with (
        serve_rollout(episode, asked, None, log=lambda _: None) as (url, key),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) as client,
    ):
        yield client, episode, asked


async def work(client: openai.AsyncOpenAI, episode: Episode, messages: list[Any]) -> None:
    """A program that knows nothing of summaries: it sends its whole conversation each time, until it has submitted."""
    while not episode.bench.submitted:
        answer = await client.chat.completions.create(
            model="any", messages=messages, tools=episode.tools.to_openai(), max_tokens=80
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            called = Call(call.function.name, json.loads(call.function.arguments))
            output = await episode.tools.run(called, episode.bench)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(300):
            await body()

    asyncio.run(bounded())


def started() -> list[Any]:
    return [{"role": "user", "content": SOURCE.task(Split.HELDOUT, 0).instruction}]


def test_a_program_that_asks_over_http_gets_summaries_that_are_sampled_turns_of_its_rollout() -> None:
    reader = Reader(CHAT, SOURCE.num_logs)

    async def body() -> None:
        async with endpoints(reader) as (client, episode, _):
            await work(client, episode, started())
            machine, task = episode.machine, episode.task
            assert isinstance(machine, MemoryMachine)
            assert machine.files["answer.py"].decode() == SOURCE.answer(task).reference["answer.py"]
            history = machine.files[HISTORY].decode()
            trace = episode.result().trace
        kinds = Counter(turn.kind for turn in trace.turns)
        assert kinds[TurnKind.SUMMARY] >= 3
        assert kinds.keys() == {TurnKind.ACT, TurnKind.SUMMARY}
        assert len(trace.leaves()) == kinds[TurnKind.SUMMARY] + 1, "each summary begins a new conversation"
        assert all(len(trace.path(leaf).token_ids) <= LIMITS.context_tokens for leaf in trace.leaves())
        calls = [call for turn in trace.turns for call in turn.calls if call.name == "cat"]
        assert [call.output.splitlines()[0] for call in calls] == [f"1 log {n}" for n in range(1, 14)]
        assert history.startswith("[user] write the keys of all logs\n[assistant] cat 1.log\n[tool] 1 log 1\n")
        assert history.count("[user]") == 1

    run(body)
    summarised = [text for text in reader.texts if "[summary 1, " in text]
    assert re.search(
        r"^\[summary 1, \d+ turns left, history: \.etude/history\.txt\]\nread ", summarised[0], re.MULTILINE
    )


def test_its_conversations_are_summarised_where_the_built_in_program_summarises_them() -> None:
    """Up to the estimate of the longest exchange."""
    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    built_in, program = Reader(CHAT, SOURCE.num_logs), Reader(CHAT, SOURCE.num_logs)
    spec = msgspec.structs.replace(spec, group_seed=3)
    asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=built_in, chat=CHAT, harness=LIMITS))

    async def body() -> None:
        async with endpoints(program) as (client, episode, _):
            await work(client, episode, started())

    run(body)
    assert program.texts == built_in.texts


@pytest.mark.parametrize("bad", [[CHAT.end_id], CHAT.encode("so " * 80).tolist(), CHAT.encode_call(Call("submit", {}))])
def test_a_program_whose_summaries_are_all_refused_is_told_that_the_context_is_full(bad: list[int]) -> None:
    reader = Reader(CHAT, SOURCE.num_logs, says=list(bad))

    async def body() -> None:
        async with endpoints(reader) as (client, episode, asked):
            with pytest.raises(openai.BadRequestError, match="its summary was refused") as refused:
                await work(client, episode, started())
            assert refused.value.code == "context_length_exceeded"
            assert asked.context_full
            kinds = [turn.kind for turn in episode.result().trace.turns]
            assert kinds[-3:] == [TurnKind.REFUSED] * 3
            assert set(kinds[:-3]) == {TurnKind.ACT}

    run(body)


def test_without_room_for_another_turn_no_summary_is_written() -> None:
    async def body() -> None:
        reader = Reader(CHAT, SOURCE.num_logs)
        async with endpoints(reader) as (client, episode, _):
            await work(client, episode, started())
            acts = [turn.kind for turn in episode.result().trace.turns].index(TurnKind.SUMMARY)
        limits = dataclasses.replace(LIMITS, max_turns=acts + 1)
        async with endpoints(reader, limits=limits) as (client, episode, _):
            with pytest.raises((openai.PermissionDeniedError, openai.BadRequestError)):
                await work(client, episode, started())
            assert TurnKind.SUMMARY not in {turn.kind for turn in episode.result().trace.turns}

    run(body)


def test_conversations_of_one_program_have_files_of_their_own() -> None:
    async def body() -> None:
        reader = Reader(CHAT, SOURCE.num_logs)
        async with endpoints(reader, limits=dataclasses.replace(LIMITS, max_turns=120)) as (client, episode, _):
            other = [{"role": "system", "content": "you are another agent"}, *started()]
            await asyncio.gather(work(client, episode, started()), work(client, episode, other))
            machine = episode.machine
            assert isinstance(machine, MemoryMachine)
            texts = [machine.files[path].decode() for path in (HISTORY, HISTORY.replace(".txt", "-2.txt"))]
            assert ["[system]" in text for text in texts] == [False, True]

    run(body)


def test_a_machine_that_is_lost_with_the_history_makes_the_rollout_invalid() -> None:
    async def body() -> None:
        async with endpoints(Reader(CHAT, SOURCE.num_logs), machine=Lost) as (client, episode, asked):
            with pytest.raises(openai.APIStatusError):
                await work(client, episode, started())
            assert isinstance(episode.result().failure, MachineError)
            assert asked.failed.is_set()

    run(body)

    class Losing(MemoryRuntime):
        async def fork(self, snapshot: str, count: int) -> list[Any]:
            return [Lost(machine.files) for machine in await super().fork(snapshot, count)]

    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = Reader(CHAT, SOURCE.num_logs)
    rollout = asyncio.run(run_rollout(spec, runtime=Losing(), policy=policy, chat=CHAT, harness=LIMITS))
    assert rollout.invalid is not None
    assert rollout.invalid.boundary is Boundary.MACHINE


def test_a_history_that_cannot_be_written_is_left_out_of_the_prompt() -> None:
    reader = Reader(CHAT, SOURCE.num_logs)

    async def body() -> None:
        async with endpoints(reader, machine=FullDisk) as (client, episode, _):
            await work(client, episode, started())
            assert episode.failure is None

    run(body)
    assert re.search(r"^\[summary 1, \d+ turns left\]$", "\n".join(reader.texts), re.MULTILINE)


def test_a_summarised_rollout_leaves_no_history_in_its_machine() -> None:
    class Removing(MemoryMachine):
        """A machine that has `rm`, which a memory machine lacks."""

        async def exec(self, argv: Sequence[str], **options: Any) -> Any:
            if argv[0] == "sh" and argv[2].startswith("rm -f .etude/history*.txt .etude/.gitignore;"):
                had.append(set(self.files))
                self.files = {path: data for path, data in self.files.items() if not path.startswith(".etude/")}
            return await super().exec(argv, **options)

    class Runtime(MemoryRuntime):
        async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Any]:
            made.extend(Removing(machine.files, self) for machine in await super().fork(snapshot, n))
            return made[-n:]

    made: list[Removing] = []
    had: list[set[str]] = []
    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = Reader(CHAT, SOURCE.num_logs)
    rollout = asyncio.run(run_rollout(spec, runtime=Runtime(), policy=policy, chat=CHAT, harness=LIMITS))
    assert rollout.invalid is None
    assert [HISTORY in paths for paths in had] == [True]
    assert made[0].files.keys() == task.files.keys()


@pytest.mark.parametrize("own", ["", "mine"])
def test_the_history_is_ignored_by_git_and_gone_before_the_machine_is_graded(own: str) -> None:
    async def body(runtime: Any) -> None:
        [machine] = await runtime.fork(await runtime.prepare({"calc.py": b"x"}), 1)

        async def sh(script: str) -> str:
            done = await machine.exec(["sh", "-c", script], key=script, deadline_s=10)
            return str(done.output.decode().strip())

        if own:
            await sh(f"mkdir .etude; echo 1 > .etude/{own}")
        async with endpoints(Reader(CHAT, 1)) as (_, episode, _):
            episode.machine = machine
            await remove_history(episode)
            assert await sh("ls -A; true") == ("calc.py" if not own else ".etude\ncalc.py"), (
                "there was nothing to remove"
            )
            for path in (HISTORY, HISTORY.replace(".txt", "-2.txt")):
                assert await write_history(episode, started(), path) == path
            assert await sh("cat .etude/.gitignore") == "*"
            assert "write the keys" in await sh(f"cat {HISTORY}")
            await remove_history(episode)
        left = await sh("find . -type f | sort")
        assert left == (f"./.etude/{own}\n./calc.py" if own else "./calc.py")
        assert await sh("find . -name .etude") == ("./.etude" if own else "")

    on_machines(body)


def test_an_engine_whose_context_is_full_at_a_summary_ends_the_rollout_with_context() -> None:
    class Small(Reader):
        async def complete(self, request: CompletionRequest) -> Completion:
            if request.sampling.max_tokens == LIMITS.summary_tokens:
                raise ContextFull("the engine is full", hint="none")
            return await super().complete(request)

    task = SOURCE.task(Split.HELDOUT, 0)
    (spec,) = siblings("g000000", task, 1, seed=0, temperature=1.0)
    policy = Small(CHAT, SOURCE.num_logs)
    rollout = asyncio.run(run_rollout(spec, runtime=MemoryRuntime(), policy=policy, chat=CHAT, harness=LIMITS))
    assert rollout.ending is Ending.CONTEXT

    async def body() -> None:
        async with endpoints(policy) as (client, episode, asked):
            with pytest.raises(openai.BadRequestError) as refused:
                await work(client, episode, started())
            assert refused.value.code == "context_length_exceeded"
            assert asked.context_full

    run(body)


def test_a_long_conversation_is_tokenised_in_a_thread() -> None:
    class Noting(type(CHAT)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__.update(CHAT.__dict__)
            self.threads = set[int]()

        def encode_prompt(self, *args: Any, **options: Any) -> Any:
            self.threads.add(threading.get_ident())
            return super().encode_prompt(*args, **options)

    async def body() -> None:
        for size, same in ((10, True), (100_000, False)):
            chat = Noting()
            limits = dataclasses.replace(LIMITS, context_tokens=300_000)
            async with endpoints(Reader(CHAT, 1), limits=limits) as (_, episode, _):
                episode.chat = episode.tree._chat = chat
                await episode.num_tokens([{"role": "user", "content": "x" * size}])
            assert (chat.threads == {threading.get_ident()}) is same

    run(body)


def test_a_prompt_that_was_counted_is_not_tokenised_again() -> None:
    asked: list[int] = []
    encode = CHAT.encode_prompt
    chat: Any = SimpleNamespace(encode_prompt=lambda *a, **k: asked.append(1) or encode(*a, **k))
    tree, talk = TurnTree(chat, session_id="s"), started()
    assert tree.prompt_tokens(talk, {}) == tree.prompt_tokens(talk, {}) == len(tree.prompt(talk, {}).token_ids)
    assert len(asked) == 1
    talk[0]["content"] += " else"
    assert tree.prompt(talk, {}).token_ids.tolist() == encode(talk, {}).tolist()
