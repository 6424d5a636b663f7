from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import pytest
from tests.unit.harness.test_tools import TASK, ShellMachine, result
from tests.unit.harness.tokeniser import laptop_chat

from etude.config import Plugin, build
from etude.errors import ConfigError, ContextFull, EngineError, MachineError
from etude.harness import Call, Episode, EpisodeEnded, HarnessConfig, RequestOptions, run_program, standard_tools
from etude.harness.chat import Message
from etude.harness.episode import SPEAK_BY_TOOLS, AgentRun
from etude.harness.programs import run_plugin
from etude.records import Completion, CompletionRequest
from etude.records.completion import StopReason
from etude.records.rollout import Ending, TurnKind
from etude.records.wire import pack
from etude.testing import EnginePolicy, MemoryMachine, ScriptedEngine

CHAT = laptop_chat()
ROOMY = HarnessConfig(max_turns=8, turn_tokens=48, context_tokens=1024)


def say(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


def act(
    answers: Sequence[Sequence[int]],
    limits: HarnessConfig = ROOMY,
    machine: MemoryMachine | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **ask: object,
) -> tuple[AgentRun, ScriptedEngine]:
    engine = ScriptedEngine(answers)
    machine = machine or MemoryMachine({p: t.encode() for p, t in TASK.files.items()})
    episode = Episode(
        TASK,
        machine,
        policy=EnginePolicy(engine),
        chat=CHAT,
        tools=standard_tools(limits.tools),
        limits=limits,
        options=RequestOptions(session_id="g000001.0/0", seed=7, **ask),  # type: ignore[arg-type]
        clock=clock,
    )
    return asyncio.run(run_program(episode)), engine


def test_an_agent_that_repairs_and_submits_leaves_a_trace_whose_path_is_what_the_model_saw() -> None:
    edit = say("edit", path="calc.py", line="3", text="return n + 3")
    run, engine = act([say("ls"), say("test"), edit, say("submit")])
    assert run.ending is Ending.SUBMITTED
    path = run.trace.path(run.trace.leaves()[0])
    last = engine.requests[-1]
    assert path.token_ids.tolist() == [*last.prompt_ids.tolist(), *say("submit")]
    assert path.token_ids.tolist() == CHAT.encode_conversation(run.messages[:-1], standard_tools().signatures).tolist()
    assert int(path.mask.sum()) == sum(len(t.completion.token_ids) for t in run.trace.turns)
    assert CHAT.readable(path.token_ids) == (
        "[user] fix\n[call] ls\n[tool] calc.py tests.py\n[call] test\n[tool] -2 of 4\n"
        "[call] edit calc.py 3 return n + 3\n[tool] ok\n[call] submit"
    )


def test_each_turn_stores_only_the_tokens_it_adds_and_asks_only_for_the_routes_it_lacks() -> None:
    run, engine = act([say("ls"), say("test"), say("submit")])
    for turn, request in zip(run.trace.turns[1:], engine.requests[1:], strict=True):
        before = run.trace.turns[turn.parent or 0]
        start = before.completion.routes_start + len(before.completion.routes)
        assert request.routes_from == start
        assert request.prompt_ids[-len(turn.prompt_ids) :].tolist() == turn.prompt_ids.tolist()
    path = run.trace.path(2)
    assert (path.routes[:-1] != 255).all()
    assert (path.routes[-1] == 255).all()


def test_requests_carry_ids_keyed_seeds_and_the_versions_demands() -> None:
    _, engine = act([say("ls"), say("submit")], temperature=0.5, min_step=0, pin_step=0)
    _, again = act([say("ls"), say("submit")], temperature=0.5, min_step=0, pin_step=0)
    first, second = engine.requests
    assert (first.request_id, second.request_id, first.session_id) == ("g000001.0/0/0", "g000001.0/0/1", "g000001.0/0")
    assert first.sampling.seed != second.sampling.seed
    assert [r.sampling.seed for r in again.requests] == [first.sampling.seed, second.sampling.seed]
    assert (first.sampling.temperature, first.pin_step, first.sampling.max_tokens) == (0.5, 0, 48)
    assert first.sampling.stop_token_ids == (CHAT.end_id,)


def test_routes_that_nobody_wants_are_neither_asked_for_nor_kept() -> None:
    run, engine = act([say("ls"), say("submit")], keep_routes=False)
    assert [r.routes_from for r in engine.requests] == [None, None]
    assert all(len(t.completion.routes) == 0 for t in run.trace.turns)
    assert (run.trace.path(1).routes == 255).all()


def test_malformed_calls_are_answered_as_errors_and_kept_as_such() -> None:
    nonsense = [CHAT.end_id + 100, CHAT.end_id]
    bad = say("edit", path="calc.py")
    run, _ = act([bad, nonsense, say("submit")])
    (first,), none, (third,) = (turn.calls for turn in run.trace.turns)
    assert first.malformed
    assert (first.name, first.output) == ("", "usage: edit PATH LINE TEXT")
    assert none == ()  # it spoke without a call
    assert third.name == "submit"
    assert run.messages[4] == {"role": "user", "content": SPEAK_BY_TOOLS}
    assert run.ending is Ending.SUBMITTED


def test_a_call_of_half_a_character_is_malformed_and_the_rollout_can_be_kept() -> None:
    half = [say("ls")[0], *CHAT.encode(r'edit "\ud800" 3 x').tolist(), CHAT.end_id]
    run, _ = act([half, say("submit")])
    (first,) = run.trace.turns[0].calls
    assert (first.malformed, first.output) == (True, "path holds half of a character")
    assert run.ending is Ending.SUBMITTED
    assert pack(run.trace)


def test_a_completion_cut_off_by_length_is_malformed_and_its_message_is_ended_for_it() -> None:
    limits = HarnessConfig(max_turns=3, turn_tokens=4, context_tokens=256)
    run, engine = act([say("cat", path="calc.py")[:-1] * 2, say("submit")], limits)
    first = run.trace.turns[0]
    assert first.completion.stop_reason is StopReason.LENGTH
    assert [call.malformed for call in first.calls] == [True]
    assert run.trace.turns[1].prompt_ids[0] == CHAT.end_id
    assert run.ending is Ending.SUBMITTED
    assert len(engine.requests) == 2


def test_a_context_that_would_overflow_ends_the_rollout_before_the_engine_is_asked() -> None:
    run, engine = act([say("ls")] * 50, HarnessConfig(max_turns=50, turn_tokens=24, context_tokens=100))
    assert run.ending is Ending.CONTEXT
    assert all(len(r.prompt_ids) + 24 <= 100 for r in engine.requests)


def test_the_deadline_counts_the_agents_own_commands_only() -> None:
    ticks = iter(range(0, 1000, 4))
    limits = HarnessConfig(max_turns=50, turn_tokens=24, context_tokens=2000, rollout_deadline_s=10.0)
    run, engine = act([say("ls")] * 50, limits, clock=lambda: float(next(ticks)))
    assert run.ending is Ending.DEADLINE
    assert run.tool_s == 12.0
    assert len(engine.requests) == 3


def test_what_its_host_took_from_a_command_is_not_the_agents_time() -> None:
    ticks = iter(range(0, 1000, 4))
    limits = HarnessConfig(max_turns=6, turn_tokens=24, context_tokens=2000, rollout_deadline_s=10.0)
    late = ShellMachine(msgspec.structs.replace(result(b"x"), wall_s=4.0, lost_s=3.0))
    run, _ = act([say("test")] * 6, limits, late, lambda: float(next(ticks)))
    assert run.ending is Ending.TURNS
    assert run.tool_s == 6.0


def test_a_command_gets_no_more_time_than_the_rollout_has_left() -> None:
    seen: list[float] = []

    class Slow(ShellMachine):
        async def exec(self, argv, *, key, deadline_s, **options):  # type: ignore[no-untyped-def]
            seen.append(deadline_s)
            return self.result

    ticks = iter(range(0, 1000, 4))
    limits = HarnessConfig(turn_tokens=24, context_tokens=500, rollout_deadline_s=10.0, tool_deadline_s=5.0)
    act([say("test")] * 3, limits, Slow(result(b"x")), lambda: float(next(ticks)))
    assert seen == [5.0, 5.0, 2.0]


class Refusing:
    """A policy that fails at its second call."""

    def __init__(self, error: Exception) -> None:
        self.error, self.engine = error, ScriptedEngine([say("ls")])

    async def complete(self, request: CompletionRequest) -> Completion:
        if self.engine.requests:
            raise self.error
        return await self.engine.generate(request)


def refused(error: Exception) -> AgentRun:
    machine = MemoryMachine({p: t.encode() for p, t in TASK.files.items()})
    options, tools = RequestOptions(session_id="s", seed=0), standard_tools()
    episode = Episode(TASK, machine, policy=Refusing(error), chat=CHAT, tools=tools, limits=ROOMY, options=options)
    return asyncio.run(run_program(episode))


def test_an_engine_that_fails_is_a_failure_that_keeps_the_turns_before_it() -> None:
    error = EngineError("engine-0 is gone", hint="restart it")
    run = refused(error)
    assert (run.ending, run.failure, len(run.trace.turns)) == (None, error, 1)


def test_a_context_the_engine_cannot_hold_is_graded_for_the_agent_filled_it() -> None:
    run = refused(ContextFull("too long", hint="shorten"))
    assert (run.ending, run.failure) == (Ending.CONTEXT, None)


def program(run: Callable[[Episode], Awaitable[None]], answers: Sequence[Sequence[int]], **limits: int) -> AgentRun:
    """The record of an agent program that is no loop of etude's."""

    class Own:
        async def run(self, episode: Episode) -> None:
            await run(episode)

    machine = MemoryMachine({p: t.encode() for p, t in TASK.files.items()})
    policy, settings = EnginePolicy(ScriptedEngine(answers)), dataclasses.replace(ROOMY, **limits)
    options = RequestOptions(session_id="s", seed=0)
    episode = Episode(TASK, machine, policy=policy, chat=CHAT, tools=standard_tools(), limits=settings, options=options)
    return asyncio.run(run_plugin(Plugin("own:Own"), Own(), episode))


def test_a_program_that_returns_without_a_submission_has_stopped_and_is_graded() -> None:
    async def run(episode: Episode) -> None:
        await episode.act(await episode.ask())

    done = program(run, [say("ls")])
    assert (done.ending, done.failure, len(done.trace.turns)) == (Ending.STOPPED, None, 1)


def test_a_program_may_submit_by_itself() -> None:
    async def run(episode: Episode) -> None:
        await episode.ask()
        episode.submit()

    assert program(run, [say("ls")]).ending is Ending.SUBMITTED


def test_a_program_that_asks_after_the_end_keeps_the_first_ending_and_blocks_nobody() -> None:
    async def run(episode: Episode) -> None:
        async with asyncio.timeout(0.4):
            while True:
                with contextlib.suppress(EpisodeEnded):
                    await episode.ask()

    async def stubborn(episode: Episode) -> None:
        with contextlib.suppress(TimeoutError):
            await run(episode)

    done = program(stubborn, [say("ls")] * 9, max_turns=2)
    assert (done.ending, len(done.trace.turns)) == (Ending.TURNS, 2)


def test_a_program_cannot_hide_that_an_engine_failed() -> None:
    error = EngineError("engine-0 is gone", hint="restart it")

    async def run(episode: Episode) -> None:
        episode.policy = Refusing(error)
        with contextlib.suppress(EngineError):
            while True:
                await episode.act(await episode.ask())
        episode.submit()

    done = program(run, [])
    assert (done.ending, done.failure) == (None, error)


def test_a_sub_agent_is_a_conversation_of_its_own_in_the_same_trace() -> None:
    async def run(episode: Episode) -> None:
        await episode.act(await episode.ask())
        helper: list[Message] = [{"role": "user", "content": "which files are there?"}]
        side = await episode.ask(helper, kind=TurnKind.SIDE)
        assert await episode.act(side) == "calc.py tests.py"
        await episode.act(await episode.ask())

    done = program(run, [say("ls"), say("ls"), say("submit")])
    assert done.ending is Ending.SUBMITTED
    assert [turn.parent for turn in done.trace.turns] == [None, None, 0]
    assert [turn.kind for turn in done.trace.turns] == [TurnKind.ACT, TurnKind.SIDE, TurnKind.ACT]
    assert "which files" in CHAT.readable(done.trace.path(1).token_ids)
    assert "which files" not in CHAT.readable(done.trace.path(2).token_ids)


def test_a_program_may_go_on_with_a_shorter_conversation_when_the_context_is_full() -> None:
    shortened = 0

    async def run(episode: Episode) -> None:
        nonlocal shortened
        while episode.ending is None:
            try:
                turn = await episode.ask()
            except ContextFull:
                shortened += 1
                del episode.messages[1:]
                continue
            await episode.act(turn)

    done = program(run, [say("ls")] * 5 + [say("submit")], max_turns=6, context_tokens=80, turn_tokens=24)
    assert done.ending is Ending.SUBMITTED
    assert shortened >= 1
    assert len(done.trace.turns) == 6
    leaves = [done.trace.path(leaf) for leaf in done.trace.leaves()]
    assert all(len(path.token_ids) <= 80 for path in leaves)
    assert sum(int(path.mask.sum()) for path in leaves) >= sum(len(t.completion.token_ids) for t in done.trace.turns)


def test_a_machine_that_dies_is_a_failure() -> None:
    class Dying(MemoryMachine):
        async def read(self, path: str, *, max_bytes: int = 0) -> bytes:
            raise MachineError("the launcher is gone", hint="see its log")

    run, _ = act([say("cat", path="calc.py")], machine=Dying({}))
    assert run.ending is None
    assert isinstance(run.failure, MachineError)


def test_limits_that_leave_no_room_are_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match="harness"):
        build(HarnessConfig, {"turn_tokens": 400}, "harness")


def test_tokens_are_int32_from_end_to_end() -> None:
    run, engine = act([say("ls"), say("submit")])
    assert all(r.prompt_ids.dtype == np.int32 for r in engine.requests)
    assert run.trace.path(1).token_ids.dtype == np.int32
