"""The built-in process reward terms: they count faults of the agent, and record the turn of each fault.

The value of each term is minus the number of faults. A credit scheme by turn counts a fault for its turn only. Each
fault has a hint for its turn: the setting `hint`, in which ``{fault}`` is replaced by a text about the fault; "": no
hint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from etude.errors import ConfigError
from etude.records.reward import Score
from etude.records.rollout import Graded, Rollout, ToolCall

_PATHS, _OLD, _NEW, _WHOLE = (
    ("path", "file_path", "file"),
    ("old_str", "old_string", "old"),
    ("new_str", "new_string", "new"),
    ("text", "content", "file_text"),
)


class MalformedCalls(msgspec.Struct, frozen=True):
    """A reward term: minus the number of tool calls that could not be parsed. ``{fault}`` is the error message that the
    agent got."""

    gives_hints: ClassVar[bool] = True
    hint: str = "Write the next call exactly as its tool defines it. Avoid this error: {fault}"

    @property
    def version(self) -> str:
        """The version of the term's definition."""
        return "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return _faults([(at, call.output or "malformed") for at, call in _calls(rollout) if call.malformed], self.hint)


class RepeatedReads(msgspec.Struct, frozen=True):
    """A reward term: minus the number of tool calls that repeat an earlier call and get the same output.

    `tools`: names of the tools that count; () for all. A call repeats only calls in its own context, since another
    branch of the conversation may not have the output. ``{fault}`` is the call."""

    gives_hints: ClassVar[bool] = True
    tools: tuple[str, ...] = ()
    hint: str = "You have the output of this call already, do not repeat it: {fault}"

    @property
    def version(self) -> str:
        """The version of the term's definition."""
        return "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        turns, found = rollout.trace.turns, list[tuple[int, str]]()
        known = list[frozenset[tuple[str, str, str]]]()  # by turn: what its context has seen
        for at, turn in enumerate(turns):
            seen = set(known[turn.parent]) if turn.parent is not None else set[tuple[str, str, str]]()
            for call in turn.calls:
                key = (call.name, json.dumps(call.arguments, sort_keys=True), call.output)
                if not call.malformed and (not self.tools or call.name in self.tools):
                    found += [(at, _text(call))] if key in seen else []
                    seen.add(key)
            known.append(frozenset(seen))
        return _faults(found, self.hint)


class RevertedEdits(msgspec.Struct, frozen=True):
    """A reward term: minus the number of edits that restore what an earlier edit replaced. ``{fault}`` is the path of
    the file.

    An edit is a call with a path and one of these: a line and its text; the whole content; an old and a new text. The
    name of the tool does not matter."""

    gives_hints: ClassVar[bool] = True
    hint: str = "Do not take back your earlier edit of this file: {fault}"

    @property
    def version(self) -> str:
        """The version of the term's definition."""
        return "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        had, swapped = dict[tuple[str, str], list[str]](), set[tuple[str, str, str]]()
        found = list[tuple[int, str]]()
        for at, call in _calls(rollout):
            path, old, new, text = (_argument(call, names) for names in (_PATHS, _OLD, _NEW, _WHOLE))
            if call.malformed or path is None:
                continue
            if old is not None and new is not None:
                found += [(at, path)] if (path, new, old) in swapped else []
                swapped.add((path, old, new))
            elif text is not None:
                line = str(call.arguments.get("line", ""))
                states = had.setdefault((path, line), _original(rollout.task.files.get(path), line))
                found += [(at, path)] if text.strip() in states[:-1] else []
                if states[-1:] != [text.strip()]:
                    states.append(text.strip())
        return _faults(found, self.hint)


class NoTestsRun(msgspec.Struct, frozen=True):
    """A reward term: −1 if no call of the rollout ran tests, else 0. The hint is given at the last turn.

    `pattern`: a regular expression for calls that run tests, searched in the name and arguments of each call. Raises
    `ConfigError` if it is not a regular expression."""

    gives_hints: ClassVar[bool] = True
    pattern: str = r"\btests?\b|pytest|unittest|tox\b"
    hint: str = "Run the tests before you finish."

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            facts, hint = str(error), 'write e.g. pattern = "npm test|make check"'
            raise ConfigError(f"pattern = {self.pattern!r} is not a regular expression", facts, hint=hint) from None

    @property
    def version(self) -> str:
        """The version of the term's definition."""
        return "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        ran = re.compile(self.pattern)
        for at, call in _calls(rollout):
            if ran.search(_text(call)):
                return Score(value=0.0, evidence=f"run in turn {at}")
        return _faults([(len(rollout.trace.turns) - 1, "tests never run")] if rollout.trace.turns else [], self.hint)


def _calls(rollout: Rollout) -> Iterator[tuple[int, ToolCall]]:
    return ((at, call) for at, turn in enumerate(rollout.trace.turns) for call in turn.calls)


def _argument(call: ToolCall, names: tuple[str, ...]) -> str | None:
    return next((str(call.arguments[name]) for name in names if name in call.arguments), None)


def _original(content: str | None, line: str) -> list[str]:
    """What a line of a file, or the file (line ""), had at first; empty if that is not known."""
    if content is None:
        return []
    if not line:
        return [content.strip()]
    lines = content.splitlines()
    return [lines[int(line) - 1].strip()] if line.isdigit() and 0 < int(line) <= len(lines) else []


def _text(call: ToolCall) -> str:
    return " ".join([call.name, *map(str, call.arguments.values())])


def _faults(found: list[tuple[int, str]], hint: str) -> Score:
    """Return the score of some faults, as (turn, fault). A turn gets the hint for the first of its faults."""
    parts, hints = dict[int, float](), dict[int, str]()
    for at, fault in found:
        parts[at] = parts.get(at, 0.0) - 1.0
        if hint:
            hints.setdefault(at, hint.replace("{fault}", fault))
    evidence = "; ".join(f"turn {at}: {fault}" for at, fault in found[:8]) or "none"
    turns, texts = tuple(sorted(parts.items())), tuple(sorted(hints.items()))
    return Score(value=float(-len(found)), evidence=evidence, turns=turns, hints=texts)
