"""The agent program "command": any program that calls the model over HTTP, in the machine or beside the worker.

    [harness]
    program = { kind = "command", argv = ["python", "agent.py"], where = "outside" }

The program gets the URL and key of the rollout's endpoints (`etude.rollouts.endpoints`) in the environment variables
that OpenAI's and Anthropic's clients read. It needs no change for etude, and its model turns are trained on."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import enum
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from etude.config import ranged
from etude.environments.network.build_network import ListensOnLoopback
from etude.environments.output import OutputBuffer
from etude.errors import ConfigError, MachineError
from etude.harness.episode import Episode
from etude.harness.programs import DeadlinePausingPolicy
from etude.records.command import OutputChunk, ProcessStarted
from etude.records.rollout import Ending
from etude.rollouts.attribution import Attribution
from etude.rollouts.endings import MAX_STATUS_BYTES, StatusFile, ending_of, read_regular, settings_fault
from etude.rollouts.endpoints import serve_rollout
from etude.rollouts.processes import Launcher, launcher_of, uncancelled
from etude.scratch import ScratchDirectory

END_GRACE_S = 5.0
"""Seconds that a program has to exit once its requests are refused; then it is killed."""
_NOT_RUN = (126, 127)  # exit codes of a program that was not found, or cannot be executed
_WORDS = ("instruction", "base_url", "model", "workdir", "cwd", "python")
_WORD = re.compile(r"(?<!\$)\{(\w+)\}")  # not ${NAME} of a shell
_ENV_BYTES = 100_000  # Linux takes 131,071 in one variable


class Where(enum.StrEnum):
    """Where an agent program runs: inside the rollout's machine, or outside, on the worker's host."""

    INSIDE = "inside"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class CommandProgram:
    """An agent program that is a command. Its fields are the settings under ``[harness.program]``.

    - `argv`: the command line. In it and in `env` the placeholders {instruction}, {base_url}, {model}, {workdir}, {cwd}
      (the folder in which the run was started) and {python} (the interpreter of etude) are replaced. Other text in
      braces is not changed, but a misspelt placeholder is an error.
    - `where`: "outside" runs it on the worker's host in a new folder, "inside" in the working directory of the machine.
    - `env`: environment variables to add.
    - `warm`: Python modules to import once for all rollouts. Each rollout then starts as a fork of an interpreter that
      has them. They are imported with the variables of `env`, except for those with {instruction}, {base_url} or
      {workdir}. Needs `where` "outside" and a Python interpreter as the first word of `argv`.
    - `model`: the value of {model}. The endpoints accept any model name.
    - `endings`: what exit codes of the program mean ({0 = "stopped", 3 = "turns"}). Exit code 0 is a submission unless
      it is here, and other codes are "stopped".
    - `status`: a JSON file and its field in which the program says how it ended. Then `endings` also has the texts of
      that field, and only what it names "submitted" is a submission.
    - `side`: patterns (as in `fnmatch`). A request whose model name or system message matches one is not trained on.
    - `log_bytes`: the maximum number of bytes of output that are kept for each rollout.

    Raises `ConfigError` for settings that contradict each other."""

    argv: tuple[str, ...]
    where: Where = Where.OUTSIDE
    env: Mapping[str, str] = field(default_factory=dict)
    warm: tuple[str, ...] = ()
    model: str = "etude"
    endings: Mapping[str, Ending] = field(default_factory=dict)
    status: StatusFile | None = None
    side: tuple[str, ...] = ()
    log_bytes: int = ranged(65_536, low=1024, high=16 << 20)

    def __post_init__(self) -> None:
        wrong = settings_fault(self.endings, self.status)
        if not self.argv or not self.argv[0]:
            wrong = "argv is empty: give the program and its arguments"
        elif self.warm and self.where is Where.INSIDE:
            wrong = "warm is for programs outside: no interpreter of this host can be forked into a machine"
        elif self.warm and len(self.argv) < 2:
            wrong = "warm needs argv = [python, script], [python, '-m', module] or [python, '-c', code]"
        hint = "change the settings that the error names"
        for text in (*self.argv, *self.env.values()):
            for word in _WORD.findall(text):
                if word not in _WORDS and (close := difflib.get_close_matches(word, _WORDS, n=1, cutoff=0.65)):
                    wrong, hint = f"{text!r} has the unknown word {{{word}}}", f"did you mean {{{close[0]}}}?"
        if wrong:
            raise ConfigError("[harness.program] is invalid", wrong, hint=hint)

    async def run(self, episode: Episode) -> None:
        """Run the program on an episode until it ends. Sets the episode's ending or failure, and its log.

        Raises `ConfigError` for a program that cannot be started, and for a machine without the programs that it needs.
        """
        log, limit_s = OutputBuffer(self.log_bytes), episode.limits.rollout_deadline_s

        def note(line: str) -> None:
            log.add(f"etude: {line}\n".encode())

        attribution = Attribution(episode, side=self.side, log=note)
        try:
            if self.where is Where.OUTSIDE:
                await self.launcher().start()  # not in the program's time
            async with self._endpoints(episode, attribution, note) as (program, variables):
                await self._watch(episode, attribution, program, variables, limit_s, note)
        finally:
            attribution.finish()
            note(
                f"turns {len(attribution.calls)}, requests {attribution.num_requests}, "
                f"repeated {attribution.num_joined}, replies tokenised again {episode.num_resampled}"
            )
            episode.log = log.value()

    def launcher(self) -> Launcher:
        """Return the launcher that starts the program on the worker's host, with the modules `warm` imported.

        They are imported with those variables of `env` that are the same in all rollouts."""
        if not self.warm:
            return launcher_of(sys.executable, (), ())
        fixed = self._fixed()
        python = _filled(self.argv[0], fixed)
        same = {name: text for name, text in self.env.items() if not any(f"{{{word}}}" in text for word in _VARYING)}
        env = tuple((name, _filled(text, fixed)) for name, text in same.items())
        return launcher_of(shutil.which(python) or python, self.warm, env)

    def _fixed(self) -> dict[str, str]:
        return {"model": self.model, "cwd": os.getcwd(), "python": sys.executable}

    async def _watch(
        self,
        episode: Episode,
        attribution: Attribution,
        program: Starter,
        variables: Mapping[str, str],
        limit_s: float,
        note: Any,
    ) -> None:
        """Run the program until it exits, the episode ends or the deadline passes, and set the ending."""
        pausing: DeadlinePausingPolicy | None = None
        try:
            async with asyncio.timeout(limit_s) as limit:
                policy = episode.policy
                episode.policy = pausing = DeadlinePausingPolicy(policy, limit, limit_s)
                code = await program.run(variables, attribution.failed)
        except TimeoutError:
            if not limit.expired():
                raise
            note(f"killed after {limit_s:g} s without waiting for the model (harness.rollout_deadline_s)")
            episode.ending = episode.ending or Ending.DEADLINE
            return
        finally:
            if pausing is not None:
                episode.tool_s = min(limit_s, pausing.used_s())
        if episode.failure is not None:
            return
        if code is None:
            note("killed: it did not end after the rollout had")
            return
        note(f"exit code {code}")
        if code in _NOT_RUN and not attribution.num_requests and self.where is Where.INSIDE:
            facts = f"{_filled(self.argv[0], self._fixed())!r} ended with exit code {code} before it sent a request"
            raise ConfigError(
                "harness.program.argv cannot be executed in the machine",
                facts,
                hint="check that the machine's image has this program",
            )
        if attribution.context_full:
            episode.ending = episode.ending or Ending.CONTEXT
        elif episode.ending is None:
            episode.ending, episode.ended_by = await ending_of(code, self.endings, self.status, program.read)
            if episode.ended_by != f"exit code {code}":
                note(f"{episode.ended_by}: {episode.ending}")

    @contextlib.asynccontextmanager
    async def _endpoints(
        self, episode: Episode, attribution: Attribution, note: Any
    ) -> AsyncIterator[tuple[Starter, dict[str, str]]]:
        """Open the rollout's endpoints. Yields what starts the program, and its environment variables."""
        inside, instruction = self.where is Where.INSIDE, _without_nul(episode.task.instruction)
        listener = await _listener(episode.machine) if inside else None
        async with serve_rollout(episode, attribution, listener, log=note) as (url, key):
            variables = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_BASE": f"{url}/v1",
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": key,
                "ETUDE_ROLLOUT": episode.options.session_id,
                "ETUDE_TASK": instruction.encode()[:_ENV_BYTES].decode(errors="ignore"),
                "NO_PROXY": "127.0.0.1,localhost",
                "no_proxy": "127.0.0.1,localhost",
            }
            if inside:
                yield _Inside(self, episode, note), variables
                return
            scratch = await asyncio.to_thread(ScratchDirectory, "program")
            try:
                variables |= _write_tools(scratch.path, url)
                yield _Outside(self, episode, scratch.path / "work", note), variables
            finally:
                await uncancelled(asyncio.create_task(asyncio.to_thread(scratch.close)))  # it may have many files

    def words(self, episode: Episode, variables: Mapping[str, str], workdir: str) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment variables, with their placeholders replaced.

        `variables` are those that every program gets, and `workdir` is the folder in which it runs."""
        values = {
            "instruction": _without_nul(episode.task.instruction),
            "base_url": variables["OPENAI_BASE_URL"],
            "workdir": workdir,
            **self._fixed(),
        }
        added = {name: _filled(value, values) for name, value in self.env.items()}
        return [_filled(word, values) for word in self.argv], {**variables, **added}


_VARYING = {"instruction", "base_url", "workdir"}
"""Placeholders that have another value in each rollout."""


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders that have a value."""
    parts = text.split("{")
    for i, part in enumerate(parts[1:], start=1):
        name, brace, rest = part.partition("}")
        parts[i] = values[name] + rest if brace and name in values else "{" + part
    return "".join(parts)


class Starter(Protocol):
    """The interface to start the program of one rollout, inside or outside of the machine."""

    async def run(self, variables: Mapping[str, str], over: asyncio.Event) -> int | None:
        """Run the program and return its exit code, or None if it was killed because the rollout is over.

        `variables` are its environment variables. `over` is set when the rollout is over. Cancelling the call kills the
        program and waits for its end."""
        ...

    async def read(self, path: str) -> bytes:
        """Return a file of the program's working directory, when it has ended. Raises `OSError` and `ValueError`."""
        ...


@dataclass(frozen=True)
class _Outside:
    settings: CommandProgram
    episode: Episode
    folder: Path
    note: Any

    async def run(self, variables: Mapping[str, str], over: asyncio.Event) -> int | None:
        self.folder.mkdir(exist_ok=True)
        argv, added = self.settings.words(self.episode, variables, str(self.folder))
        path = f"{variables['PATH']}:{os.environ.get('PATH', os.defpath)}"
        env = {**os.environ, **added, "PATH": added["PATH"] if "PATH" in self.settings.env else path}
        launcher = self.settings.launcher()
        program = await launcher.launch(
            argv, env=env, cwd=self.folder, fork=bool(self.settings.warm), log_bytes=self.settings.log_bytes
        )
        if launcher.notes:
            self.note(launcher.notes)
        try:
            code: int | None = await _first(program.wait(), over)
            return code
        finally:
            await uncancelled(asyncio.create_task(program.close(), name="end a program"))
            self.note(f"output of the program:\n{program.output.value().decode(errors='replace')}")

    async def read(self, path: str) -> bytes:
        return await asyncio.to_thread(read_regular, self.folder / path)


@dataclass(frozen=True)
class _Inside:
    settings: CommandProgram
    episode: Episode
    note: Any

    async def run(self, variables: Mapping[str, str], over: asyncio.Event) -> int | None:
        limits, output = self.episode.limits, OutputBuffer(self.settings.log_bytes)
        argv, env = self.settings.words(self.episode, variables, ".")

        def tell(event: ProcessStarted | OutputChunk) -> None:
            if isinstance(event, OutputChunk):
                output.add(event.data)

        longest_s = limits.rollout_deadline_s + limits.max_turns * limits.turn_deadline_s
        running = self.episode.machine.exec(
            argv, key=f"{self.episode.options.session_id}/program", deadline_s=longest_s, env=env, on_output=tell
        )
        try:
            result = await _first(running, over)
            return None if result is None else result.exit_code
        except MachineError as error:
            self.episode.failure = self.episode.failure or error
            raise
        finally:
            self.note(f"output of the program:\n{output.value().decode(errors='replace')}")

    async def read(self, path: str) -> bytes:
        return await self.episode.machine.read(path, max_bytes=MAX_STATUS_BYTES)


async def _first(running: Any, over: asyncio.Event) -> Any:
    """Wait for a program and return its result; None if it still runs `END_GRACE_S` seconds after `over` was set."""
    work, ended = asyncio.ensure_future(running), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=END_GRACE_S)
        return work.result() if work.done() else None
    finally:
        for one in (work, ended):
            one.cancel()
        await asyncio.gather(work, ended, return_exceptions=True)


async def _listener(machine: object) -> socket.socket:
    if not isinstance(machine, ListensOnLoopback):
        facts = f"{type(machine).__name__} has no loopback on which this host can listen; namespace machines have one"
        hint = 'set machines.backend = "namespace", or harness.program.where = "outside"'
        raise ConfigError("a program inside the machine cannot reach the model", facts, hint=hint)
    return await machine.listen()


def _without_nul(text: str) -> str:
    """Return a text without NUL and lone surrogates, which arguments and environment variables cannot have."""
    return text.replace("\0", "").encode(errors="replace").decode()


def _write_tools(folder: Path, url: str) -> dict[str, str]:
    """Write the program `etude-machine` into a folder, and return the environment variables that it needs."""
    script = folder / "bin" / "etude-machine"
    script.parent.mkdir()
    client = Path(__file__).with_name("machine_client.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{client}" "$@"\n')
    script.chmod(0o755)
    return {"PATH": str(script.parent), "ETUDE_MACHINE": str(script), "ETUDE_MACHINE_URL": f"{url}/machine"}
