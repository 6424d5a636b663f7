"""Task sources from plug-ins: every call has a deadline, and errors name the plug-in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from etude.config import Plugin
from etude.errors import PluginRefused
from etude.plugins import Kind, bounded, make, unusable
from etude.records.task import Answer, Split, Task
from etude.seams import TaskSource
from etude.tasks.config import SOURCES
from etude.tasks.scripts import Demonstration, Script

CALL_S = 60.0
OPTIONAL: Mapping[str, type] = {
    "demonstration": Demonstration,
    "conversation": list,
    "baseline": Generator,
    "copy_probe": tuple,
    "withdrawn": set,
}
"""Optional methods of a source and the types of their results: see `etude.tasks.scripts` and
`etude.seams.WithdrawingSource`."""
T = TypeVar("T")


class PluginSource:
    """A `TaskSource` that calls a plug-in, including the optional methods that it has.

    Every method raises `PluginError` if the plug-in fails, takes longer than `CALL_S` seconds, or returns a wrong type.
    Raises `PluginRefused` if its name is that of a built-in source."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._source: TaskSource = make(Kind.SOURCE, plugin)
        self.name = self._source.name
        if self.name in SOURCES:
            facts = f"its name is {self.name!r}, like that of a built-in task source"
            raise PluginRefused(f"task source {plugin} has a reserved name", facts, hint="change its `name`")
        for method, kind in OPTIONAL.items():
            if (optional := getattr(self._source, method, None)) is not None:
                setattr(self, method, self._guarded(method, optional, kind))

    def _guarded(self, method: str, work: Callable[..., Any], kind: type) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            made = self._call(method, lambda: work(*arguments, **named))
            if method == "conversation":
                if not is_conversation(made):
                    facts = (
                        "conversation returned no list of messages, each with a role, a text, and calls with arguments"
                    )
                    raise unusable(Kind.SOURCE, self._plugin, facts)
                return made
            if not isinstance(made, kind):
                facts = f"{method} returned {type(made).__name__}, expected {kind.__name__}"
                raise unusable(Kind.SOURCE, self._plugin, facts)
            if isinstance(made, Demonstration):
                return Demonstration(made.task, self._steps(method, made.script))
            if isinstance(made, tuple):
                return tuple(self._steps(method, part) if isinstance(part, Generator) else part for part in made)
            return self._steps(method, made)

        return call

    def _steps(self, method: str, script: object) -> Script:
        """The steps of a script, with the deadline and the errors of a call."""
        if not isinstance(script, Generator):
            facts = f"the script of its {method} is {type(script).__name__}, expected a generator"
            raise unusable(Kind.SOURCE, self._plugin, facts)
        output: Any = None  # the first `send` takes None

        def step() -> Any:
            try:
                return script.send(output)
            except StopIteration:
                return None

        while (call := self._call(f"the script of its {method}", step)) is not None:
            if not (isinstance(call, tuple) and len(call) == 2 and isinstance(call[1], Mapping)):
                facts = f"the script of its {method} yields {str(call)[:80]!r}, expected (tool name, arguments)"
                raise unusable(Kind.SOURCE, self._plugin, facts)
            output = yield call

    def _call(self, doing: str, work: Callable[[], T]) -> T:
        return bounded(Kind.SOURCE, self._plugin, doing, work, deadline_s=CALL_S)

    def size(self, split: Split) -> int | None:
        size = self._call(f"size({split})", lambda: self._source.size(split))
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise unusable(Kind.SOURCE, self._plugin, f"size({split}) returned {size!r}, expected a number or None")
        return size

    def task(self, split: Split, index: int) -> Task:
        task = self._call(f"task({split}, {index})", lambda: self._source.task(split, index))
        if not isinstance(task, Task):
            raise unusable(
                Kind.SOURCE, self._plugin, f"task({split}, {index}) returned {type(task).__name__}, expected Task"
            )
        if (task.source, task.split, task.index) != (self.name, split, index):
            facts = f"task({split}, {index}) returned {task.split} task {task.index} of {task.source!r}"
            raise unusable(Kind.SOURCE, self._plugin, facts)
        return task

    def answer(self, task: Task) -> Answer:
        what = f"answer of {task.split} task {task.index}"
        answer = self._call(what, lambda: self._source.answer(task))
        if not isinstance(answer, Answer):
            raise unusable(Kind.SOURCE, self._plugin, f"the {what} is {type(answer).__name__}, expected Answer")
        return answer


def is_conversation(value: object) -> bool:
    """Return whether a value is a conversation as `etude.tasks.scripts.Conversing` returns it: a list of messages."""
    try:
        messages = msgspec.convert(value, list[_Message])
    except msgspec.ValidationError:
        return False
    return bool(messages)


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, str | int | float | bool]


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[_Call] = []
