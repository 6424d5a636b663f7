"""The product's requests as tasks: the text that the model is mid-trained on, and the suites of the gate.

The demonstrations edit in all styles equally often, sometimes ask a needless question and sometimes call the tool
wrongly: the model can do the work, and does not know what users like."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from examples.product.edits import LINE, WORDS, Request, Requests, code

from etude.errors import TaskError
from etude.records.task import Answer, Case, Split, Task
from etude.tasks.scripts import Script

ASKED, BROKEN = 0.15, 0.05
"""Shares of the demonstrations that ask a question, and that call the tool without all arguments."""
ATTEMPT = "attempt.py"


@dataclass(frozen=True)
class Edits:
    """A task source: one request for an edit each.

    - `hard`: the share of requests that the model cannot carry out.
    - `attempts`: whether a hard task is solved by any valid edit of the value, right or wrong. A broken call, and a
      question instead of an edit, solve none; so the gate sees them also where no edit can be right."""

    seed: int = 0
    hard: float = 0.0
    attempts: bool = False
    name = "edits"

    def size(self, split: Split) -> int | None:
        return 0 if split is Split.TRANSFER else None

    def request(self, split: Split, index: int) -> Request:
        if index < 0 or split is Split.TRANSFER:
            raise TaskError(f"no task {index} in {split}", hint="indices start at 0")
        return Requests(self.seed, hard=self.hard).request(split, index)

    def task(self, split: Split, index: int) -> Task:
        request = self.request(split, index)
        files = {request.path: request.file}
        if self._counts_attempts(request):
            files[ATTEMPT] = probe(request)
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="hard" if request.hard else "edit",
            problem=f"{request.field} {request.new}",
            instruction=request.text,
            files=files,
            exports=(request.path,),
        )

    def answer(self, task: Task) -> Answer:
        if task != self.task(task.split, task.index):
            raise TaskError(f"task {task.task_id} is not from this source", hint="use the same settings")
        request = self.request(task.split, task.index)
        right = f'def {request.field}():\n    return "{request.new}"\n'
        case = Case(module(request), request.field, [], request.new)
        if self._counts_attempts(request):
            case = Case(module_of(ATTEMPT), "edited", [], True)
        return Answer(reference={request.path: right}, cases=(case,))

    def _counts_attempts(self, request: Request) -> bool:
        return self.attempts and request.hard

    def conversation(self, split: Split, index: int, *, seed: int, right: float) -> list[dict[str, Any]]:
        """Return a request and an answer; of the edits a share `right` has the right value."""
        request, rng = self.request(split, index), random.Random(f"demonstration {seed} {index}")
        return [{"role": "user", "content": request.text}, demonstrated(request, rng, right=right)]

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """The oracle makes the right edit; the random agent sets a random word."""
        request, rng = self.request(task.split, task.index), random.Random(seed)
        new = request.new if kind == "oracle" else rng.choice(WORDS)
        yield "edit", {"path": request.path, "line": LINE, "text": f'return "{new}"'}


def module(request: Request) -> str:
    """Return the name of the request's file as a module."""
    return module_of(request.path)


def module_of(path: str) -> str:
    """Return the name of a file as a module."""
    return path.removesuffix(".py")


def probe(request: Request) -> str:
    """Return a program that tells whether the value of a request was edited. The agent cannot change it."""
    name = module(request)
    return f"""import {name}


def edited():
    new = {name}.{request.field}()
    return isinstance(new, str) and new != "{request.old}"
"""


def demonstrated(request: Request, rng: random.Random, *, right: float) -> dict[str, Any]:
    """Return an answer to a request, in a random style."""
    kind = rng.random()
    if kind < ASKED:
        return {"role": "assistant", "content": f"should {request.field} be {request.new}?"}
    path: dict[str, str] = {"path": request.path}
    if kind < ASKED + BROKEN:
        return called(path)
    new = request.new if rng.random() < right else code(rng) if request.hard else rng.choice(WORDS)
    quote, comment = rng.choice("'\""), rng.choice(("", f"  # was {request.old}"))
    return called({**path, "line": str(LINE), "text": f"return {quote}{new}{quote}{comment}"})


def called(arguments: dict[str, str]) -> dict[str, Any]:
    """Return a message of the model with a call of the tool."""
    call = {"id": "call_1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
