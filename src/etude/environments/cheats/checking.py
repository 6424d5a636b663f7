"""Play every cheat on a runtime and a grader, and say what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from etude.environments.cheats.catalogue import CATALOGUE, EXPORTS
from etude.environments.cheats.cheat import Cheat, Finding, Kind
from etude.environments.cheats.playing import PLAY_S, PROGRAM_S, Stage, play
from etude.environments.cheats.stage import playable, problems, secrets_of_the_host
from etude.errors import MachineError
from etude.seams import Grader, Runtime


async def check(
    runtime: Runtime,
    grader: Grader,
    *,
    cheats: Sequence[Cheat] = CATALOGUE,
    at_once: int = 1,
    program_s: float = PROGRAM_S,
    play_s: float = PLAY_S,
) -> AsyncGenerator[Finding, None]:
    """What came of each cheat on each kind of task that it is for, in order. `grader` judges in machines of `runtime`.
    A program has `program_s`; a play that takes longer than `play_s` has hung the host.

    Raises `MachineError` where no kind of task can be judged at all: then nothing was tried.
    """
    async with secrets_of_the_host() as secrets:
        wanted = {kind for cheat in cheats for kind in cheat.kinds}
        staged = {kind: problem for kind, problem in problems(EXPORTS).items() if kind in wanted}
        unplayable = await playable(runtime, grader, staged, at_once=at_once)
        if unplayable and all(unplayable.values()):
            facts = "; ".join(f"{kind}: {why}" for kind, why in unplayable.items())
            raise MachineError(
                "no cheat can be played", facts, hint="mend what keeps honest work from being graded first"
            )
        stage = Stage(runtime, grader, secrets, staged, unplayable, program_s, play_s)
        room = asyncio.Semaphore(at_once)

        async def one(cheat: Cheat, kind: Kind) -> Finding:
            async with room:
                return await play(cheat, kind, stage)

        tasks = [asyncio.create_task(one(cheat, kind)) for cheat in cheats for kind in cheat.kinds]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
