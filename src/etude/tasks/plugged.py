"""A task source that is a plug-in: its calls have a deadline, and its errors and wrong results say whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from etude.config import Plugin
from etude.errors import PluginRefused
from etude.plugins import Kind, bounded, make, unusable
from etude.records.task import Answer, Split, Task
from etude.seams import TaskSource
from etude.tasks.config import SOURCES

CALL_S = 60.0
OPTIONAL = ("demonstration", "baseline", "copy_probe")
"""The methods of what a source may offer beside tasks: `etude.tasks.scripts`."""
T = TypeVar("T")


class PluggedSource:
    """A `TaskSource`: a plug-in. What it offers beside tasks, this offers too. Raises `PluginError`."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._source: TaskSource = make(Kind.SOURCE, plugin)
        self.name = self._source.name
        if self.name in SOURCES:
            facts = f"its tasks would have the name {self.name!r}, which is that of a built-in one"
            raise PluginRefused(f"task source {plugin} claims a name that is taken", facts, hint="give it another name")
        for method in OPTIONAL:
            if (offered := getattr(self._source, method, None)) is not None:
                setattr(self, method, self._guarded(method, offered))

    def _guarded(self, method: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return self._call(method, lambda: work(*arguments, **named))

        return call

    def _call(self, doing: str, work: Callable[[], T]) -> T:
        return bounded(Kind.SOURCE, self._plugin, doing, work, deadline_s=CALL_S)

    def size(self, split: Split) -> int | None:
        size = self._call(f"size({split})", lambda: self._source.size(split))
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise unusable(Kind.SOURCE, self._plugin, f"size({split}) is {size!r}, and a number or None is wanted")
        return size

    def task(self, split: Split, index: int) -> Task:
        task = self._call(f"task({split}, {index})", lambda: self._source.task(split, index))
        if not isinstance(task, Task):
            raise unusable(Kind.SOURCE, self._plugin, f"task({split}, {index}) is {type(task).__name__}, no Task")
        if (task.source, task.split, task.index) != (self.name, split, index):
            facts = f"task({split}, {index}) says that it is {task.split} task {task.index} of {task.source!r}"
            raise unusable(Kind.SOURCE, self._plugin, facts)
        return task

    def answer(self, task: Task) -> Answer:
        place = f"answer of {task.split} task {task.index}"
        answer = self._call(place, lambda: self._source.answer(task))
        if not isinstance(answer, Answer):
            raise unusable(Kind.SOURCE, self._plugin, f"the {place} is {type(answer).__name__}, no Answer")
        return answer
