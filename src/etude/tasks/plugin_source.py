"""Task sources from plug-ins: every call has a deadline, and errors name the plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from etude.config import Plugin
from etude.errors import PluginRefused
from etude.plugins import Kind, bounded, make, unusable
from etude.records.task import Answer, Split, Task
from etude.seams import TaskSource
from etude.tasks.config import SOURCES

CALL_S = 60.0
OPTIONAL = ("demonstration", "conversation", "baseline", "copy_probe")
"""Optional methods of a source: see `etude.tasks.scripts`."""
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
        for method in OPTIONAL:
            if (optional := getattr(self._source, method, None)) is not None:
                setattr(self, method, self._guarded(method, optional))

    def _guarded(self, method: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            returned = self._call(method, lambda: work(*arguments, **named))
            if method == "conversation" and not is_conversation(returned):
                facts = "conversation returned no list of messages, each with a role, a text, and calls with arguments"
                raise unusable(Kind.SOURCE, self._plugin, facts)
            return returned

        return call

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
