"""Valid commands of a machine, and that each runs once."""

from __future__ import annotations

import asyncio

import pytest

from etude.environments.command_registry import CommandRegistry
from etude.records.command import Command, ExecResult

DONE = ExecResult(exit_code=0, output=b"", timed_out=False, truncated=False, wall_s=0.0)


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ([], {}),
        ([""], {}),
        (["a\0b"], {}),
        ("ls -l", {}),
        (["a"], {"cwd": "x\0y"}),
        (["a"], {"user": "x\0y"}),
        (["a"], {"env": {"": "x"}}),
        (["a"], {"env": {"x=y": "z"}}),
        (["a" * 2**20], {}),
        ([""] * 2**17, {}),
        (["\ud800"], {}),
        (["a", 1], {}),
        (["a", None], {}),
        (["a"], {"env": {"x": 1}}),
        (["a"], {"stdin": "text"}),
        (["a"], {"stdin": [b"x"]}),
        (["a"], {"output_bytes": -1}),
    ],
)
def test_an_invalid_command_is_refused(argv, options):
    with pytest.raises(ValueError, match=r"command|variable|surrogates"):
        Command.of(argv, key="1", deadline_s=1, **options)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_a_deadline_is_a_time_to_come(deadline_s):
    with pytest.raises(ValueError, match="deadline_s"):
        Command.of(["a"], key="1", deadline_s=deadline_s)


def test_a_user_that_an_image_cannot_know_is_refused_with_the_reason():
    command = Command.of(["a"], key="1", deadline_s=1, user="root")
    with pytest.raises(ValueError, match="names no users"):
        command.check_user([])
    with pytest.raises(ValueError, match="users are bob, eve"):
        command.check_user(["bob", "eve"])


def test_a_misspelt_option_is_an_error():
    with pytest.raises(TypeError, match="output_byte"):
        Command.of(["a"], key="1", deadline_s=1, output_byte=3)


def test_a_command_outlives_who_asked_for_it_and_is_found_by_its_key():
    async def main():
        commands, go, begun, times = CommandRegistry(), asyncio.Event(), asyncio.Event(), []

        async def run(command):
            times.append(1)
            begun.set()
            await go.wait()
            return DONE

        first = asyncio.create_task(commands.run_once(run, ["true"], key="a", deadline_s=1))
        await begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert await commands.run_once(run, ["true"], key="a", deadline_s=1) is DONE
        assert len(times) == 1

    asyncio.run(main())


def test_a_command_that_could_not_begin_leaves_its_key_free_and_one_that_failed_does_not():
    async def main():
        commands = CommandRegistry()

        def refused(command):
            raise ValueError("no")

        async def failing(command):
            raise OSError("gone")

        async def run(command):
            return DONE

        with pytest.raises(ValueError, match="no"):
            await commands.run_once(refused, ["true"], key="a", deadline_s=1)
        assert not commands
        assert await commands.run_once(run, ["true"], key="a", deadline_s=1) is DONE
        for again in (failing, run):
            with pytest.raises(OSError, match="gone"):
                await commands.run_once(again, ["true"], key="b", deadline_s=1)

    asyncio.run(main())
