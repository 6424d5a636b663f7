"""The tools with which an agent acts on its machine.

A tool is a signature and a coroutine function over a `Workbench`. A call that fails returns a short message ("no such
file"). Only what the agent cannot cause is raised: `MachineError`, and `PluginError` for a plug-in that fails. Outputs
are short because they are prompt tokens of every later turn."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from etude.config import Plugin
from etude.errors import ConfigError, EtudeError, PluginError, PluginRefused, nearest
from etude.harness.commands import Call, Parameter, Signature
from etude.plugins import Kind, called, make, unusable
from etude.records.command import ExecResult
from etude.records.task import Task
from etude.seams import Machine

FILE_BYTES = 262_144
"""The largest file that `cat` and `edit` open."""
PLUGIN_GRACE_S = 30.0
"""Seconds that a plug-in may take beyond the deadline of its commands."""


@dataclass(slots=True)
class Workbench:
    """The machine of one rollout, with its state, on which the tools work.

    - `files`: the paths in the working directory, so that `ls` needs no command. None after the first command, which
      may have changed them.
    - `key`: prefix of the idempotency keys of commands. A machine runs a command with a known key only once.
    - `deadline_s`: the maximum time of the next command, in seconds.
    - `output_chars`: the maximum number of characters of an output that the model gets.
    - `submitted`: whether the agent has called `submit`.
    - `lost_s`: CPU seconds that other processes of the host took from the commands."""

    machine: Machine
    test_command: tuple[str, ...]
    files: set[str] | None
    key: str
    deadline_s: float
    output_chars: int
    num_commands: int = 0
    submitted: bool = False
    lost_s: float = 0.0

    @classmethod
    def of(cls, task: Task, machine: Machine, *, key: str, deadline_s: float, output_chars: int) -> Workbench:
        """Return the workbench for a machine that has just been prepared for `task`."""
        return cls(machine, task.test_command, set(task.files), key, deadline_s, output_chars)

    async def exec(self, argv: tuple[str, ...]) -> ExecResult:
        """Run a command on the machine, with the deadline and a new idempotency key. Raises `MachineError`."""
        self.num_commands += 1
        self.files = None
        result = await self.machine.exec(
            argv,
            key=f"{self.key}/{self.num_commands}",
            deadline_s=self.deadline_s,
            output_bytes=max(4096, 4 * self.output_chars),
        )
        self.lost_s += result.lost_s
        return result

    async def command(self, argv: tuple[str, ...]) -> str:
        """Run a command and return its output as text. Raises `MachineError`.

        "timed out" is appended when the command reached its deadline. A failed command without output gives "exit N",
        where N is the exit code."""
        result = await self.exec(argv)
        output = result.output.decode(errors="replace").strip("\n")
        if result.timed_out:
            return f"{output}\ntimed out".lstrip("\n")
        return output or (f"exit {result.exit_code}" if result.exit_code else "")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of an agent. `run` is a coroutine function: ``await run(workbench, **arguments)`` returns the output."""

    signature: Signature
    run: Callable[..., Awaitable[str]]


class ToolLike(Protocol):
    """The interface of a tool that is a plug-in of kind "tool"."""

    signature: Signature

    async def run(self, bench: Workbench, **arguments: Any) -> str:
        """Execute a call and return the output for the model.

        `arguments` are those of the call, by the names of the signature's parameters. Raise `OSError` or `ValueError`
        for what the agent caused: the model gets the message as output. Let `MachineError` pass. Any other exception,
        or no result within the deadline of a command plus 30 s, is a defect of the tool and ends the run with
        `PluginError`. Many rollouts use one object at the same time, so keep the state of a rollout out of it."""
        ...


class ToolSet:
    """The tools of an agent, by name. `standard_tools` makes one. Raises `ConfigError` when two tools have the same
    name.

    >>> tools = standard_tools(("ls", "cat"))
    >>> tools.signatures["cat"].to_openai()["function"]["parameters"]["required"]
    ['path']
    """

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self._tools: Mapping[str, Tool] = {t.signature.name: t for t in tools}
        if len(self._tools) < len(tools):
            names = [t.signature.name for t in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"two tools are named {twice!r}",
                "the name of a call decides which tool runs",
                hint="leave one of them out",
            )
        self.signatures: Mapping[str, Signature] = {n: t.signature for n, t in self._tools.items()}

    @property
    def is_standard(self) -> bool:
        """Whether all tools are standard tools, so that none is a plug-in."""
        return all(STANDARD_TOOLS.get(name) is tool for name, tool in self._tools.items())

    def misfit(self, call: Call) -> str:
        """Return why a scripted call does not fit the tools (unknown name or wrong arguments); "" if it fits."""
        if call.name not in self._tools:
            return f"it calls {call.name!r}, and the tools are {', '.join(self._tools)}"
        parameters = self.signatures[call.name].parameters
        given, needed = set(call.arguments), {p.name for p in parameters if p.required}
        if needed <= given <= {p.name for p in parameters}:
            return ""
        return f"it calls {call.name}({', '.join(call.arguments)}), expected ({', '.join(p.name for p in parameters)})"

    def with_standard(self) -> ToolSet:
        """Return a set of these tools and of all standard tools with other names."""
        others = (tool for name, tool in STANDARD_TOOLS.items() if name not in self._tools)
        return ToolSet((*self._tools.values(), *others))

    def to_openai(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI's `tools` list."""
        return [s.to_openai() for s in self.signatures.values()]

    async def run(self, call: Call, bench: Workbench) -> str:
        """Execute a call and return the tool's output, shortened to `bench.output_chars` characters.

        An error that the agent caused becomes the output. Raises `MachineError`, and `PluginError` for a plug-in that
        fails."""
        try:
            answer = await self._tools[call.name].run(bench, **call.arguments)
        except FileNotFoundError:
            answer = "no such file"
        except IsADirectoryError:
            answer = "is a directory"
        except (OSError, ValueError) as error:  # caused by the agent: a path outside, a file too large, a full disk
            answer = f"refused: {error}"
        return clip(answer, bench.output_chars)


def clip(text: str, limit_chars: int) -> str:
    """Shorten a text of more than `limit_chars` characters to its beginning and its end, joined by "...".

    >>> clip("0123456789" * 3, 16)
    '01234567...56789'
    """
    if len(text) <= limit_chars:
        return text
    head = limit_chars // 2
    return f"{text[:head]}...{text[len(text) - (limit_chars - head - 3) :]}"


def number_lines(text: str) -> str:
    """Prefix lines with their numbers (from 1), and shorten every four spaces of indentation to one.

    >>> print(number_lines("def f(n):\\n    return n\\n"))
    1 def f(n):
    2  return n
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        body = line.lstrip(" ")
        levels, rest = divmod(len(line) - len(body), 4)
        lines.append(f"{number} {' ' * (levels + rest)}{body}")
    return "\n".join(lines)


def find_line(lines: list[str], place: str) -> int | None:
    """Return the index of a line, or None when there is no such line.

    `place` is the line's number (from 1) or the name of a function. For a function this is the first line of its body,
    or the line after the docstring if the body begins with one."""
    if place.isascii() and place.isdigit() and len(place) < 10:
        index = int(place) - 1
    else:
        head = f"def {place}("
        index = next((i + 1 for i, line in enumerate(lines) if line.lstrip().startswith(head)), -1)
        if 0 <= index < len(lines) and lines[index].lstrip().startswith(('"""', "'''", '"', "'")):
            index += 1
    return index if 0 <= index < len(lines) else None


async def _ls(bench: Workbench) -> str:
    if bench.files is None:
        found = await bench.exec(("find", ".", "-type", "f"))
        lines = found.output.decode(errors="replace").splitlines()
        paths = {line[2:] for line in lines if line.startswith("./")}
        if not paths and found.exit_code:
            return f"exit {found.exit_code}"
    else:
        paths = bench.files
    shown = (p for p in paths if not any(part.startswith((".", "__pycache__")) for part in p.split("/")))
    return " ".join(sorted(shown))


async def _cat(bench: Workbench, path: str) -> str:
    return number_lines((await bench.machine.read(path, max_bytes=FILE_BYTES)).decode(errors="replace"))


async def _test(bench: Workbench) -> str:
    return await bench.command(bench.test_command) if bench.test_command else "no tests"


async def _edit(bench: Workbench, path: str, line: str, text: str) -> str:
    lines = (await bench.machine.read(path, max_bytes=FILE_BYTES)).decode().splitlines()
    index = find_line(lines, line)
    if index is None:
        return "no such line"
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    lines[index : index + 1] = [indent + part for part in text.split("\n")]
    await bench.machine.write(path, ("\n".join(lines) + "\n").encode())
    return "ok"


async def _write(bench: Workbench, path: str, text: str) -> str:
    await bench.machine.write(path, text.encode() if text.endswith("\n") else f"{text}\n".encode())
    if bench.files is not None:
        bench.files.add(str(PurePosixPath(path)))
    return "ok"


async def _run(bench: Workbench, command: str) -> str:
    return await bench.command(("sh", "-c", command))


async def _submit(bench: Workbench) -> str:
    bench.submitted = True
    return ""


_PATH = Parameter("path", "a file of the repository")
STANDARD_TOOLS: Mapping[str, Tool] = {
    tool.signature.name: tool
    for tool in (
        Tool(Signature("ls", "List the repository's files."), _ls),
        Tool(Signature("cat", "Show a file with line numbers.", (_PATH,)), _cat),
        Tool(Signature("test", "Run the repository's tests."), _test),
        Tool(
            Signature(
                "edit",
                "Replace one line, keeping its indentation.",
                (_PATH, Parameter("line", "its number, or a function's name for its body"), Parameter("text")),
            ),
            _edit,
        ),
        Tool(Signature("write", "Create or replace a file.", (_PATH, Parameter("text", "the whole content"))), _write),
        Tool(Signature("run", "Run a shell command.", (Parameter("command"),)), _run),
        Tool(Signature("submit", "Hand the work in; nothing can be done after."), _submit),
    )
}


@functools.lru_cache(maxsize=16)
def standard_tools(names: tuple[str | Plugin, ...] = tuple(STANDARD_TOOLS)) -> ToolSet:
    """Return the set of the named standard tools and plug-ins.

    Raises `ConfigError` for an unknown or repeated name, and `PluginRefused` for a plug-in that cannot be used.

    >>> standard_tools(("submti",))
    Traceback (most recent call last):
    etude.errors.ConfigError: unknown tool 'submti'
      hint: did you mean 'submit'?
    """
    for name in names:
        if isinstance(name, str) and name not in STANDARD_TOOLS:
            raise ConfigError(f"unknown tool {name!r}", hint=nearest(name, STANDARD_TOOLS))
    return ToolSet(
        tuple(plugin_tool(n, make(Kind.TOOL, n)) if isinstance(n, Plugin) else STANDARD_TOOLS[n] for n in names)
    )


def plugin_tool(plugin: Plugin, tool: ToolLike) -> Tool:
    """Wrap a tool plug-in with a deadline, and with errors that name the plug-in.

    The deadline is that of a command plus 30 s. Raises `PluginRefused` when the tool has no valid signature."""
    signature: object = tool.signature
    if not isinstance(signature, Signature):
        facts = f"it is {type(signature).__name__}, not etude.harness.commands.Signature"
        raise PluginRefused(
            f"the signature of tool {plugin} cannot be used",
            facts,
            hint="give the tool an attribute `signature` of this class",
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", signature.name):
        facts = f"its name is {signature.name!r}, and a call begins with the name"
        hint = "use 1 to 64 letters, digits, '_' and '-'"
        raise PluginRefused(f"the signature of tool {plugin} cannot be used", facts, hint=hint)
    try:
        inspect.signature(tool.run).bind(None, **dict.fromkeys(p.name for p in signature.parameters))
        inspect.signature(tool.run).bind(None, **dict.fromkeys(p.name for p in signature.parameters if p.required))
    except TypeError as error:
        facts = f"run{inspect.signature(tool.run)} cannot be called with them: {error}"
        hint = "give run the parameters of the signature; those that are not required need a default value"
        raise PluginRefused(f"the signature of tool {plugin} does not fit its run", facts, hint=hint) from None

    async def run(bench: Workbench, **arguments: Any) -> str:
        limit_s = bench.deadline_s + PLUGIN_GRACE_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                answer: object = await tool.run(bench, **arguments)
        except (OSError, ValueError, EtudeError) as error:
            if not limit.expired():
                raise
            facts = f"run has not returned within {limit_s:g} s"
            raise PluginError(f"tool {plugin} hangs", facts, hint="set a deadline for what it waits for") from error
        except Exception as error:
            with called(Kind.TOOL, plugin, "run"):
                raise error
        if not isinstance(answer, str):
            raise unusable(Kind.TOOL, plugin, f"run returned {type(answer).__name__}, not str")
        return answer

    return Tool(signature, run)
