"""A rollout as text for people: its turns as a tree, with what was sampled, graded and trained on.

`etude.rollouts.view` makes these records. The command line, the report and the files of evaluations use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from etude.records.reward import Term
from etude.records.rollout import Start, TurnKind

MAX_DEPTH = 32
"""Branches nested deeper than this are shown beside the branch that they belong to."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one turn that a step trained on, in one sample of the batch.

    `row`: the position of the sample in the batch, from 0. `num_tokens`: sampled tokens of the turn with loss in this
    sample. `low`, `high`: the smallest and the largest advantage of these tokens."""

    row: int
    num_tokens: int
    low: float
    high: float


class TurnView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn as text.

    - `number`: its number in the rollout, from 0. `parent`: the number of its parent; None for a root.
    - `start`: the reason why it continues its parent's session or does not; None if unknown (files of earlier
      versions).
    - `prompt`, `reply`: the text of the new messages, and the text that the model sampled. Each message begins with its
      role, such as "[user] ".
    - `num_new`, `num_prompt`, `num_sampled`: tokens of the new messages, of the whole prompt, and sampled ones.
    - `num_cached`: tokens of the prompt whose keys and values the engine reused; None if unknown.
    - `stop_reason`, `engine`: as in `Completion`. `steps`: the version steps of the weights that sampled it, in order.
    - `same_prompt`: the number of an earlier turn with the same prompt; None if there is none.
    - `num_malformed`: number of tool calls that could not be parsed; 0 if it is unknown, as in traces.
    - `trained`: the samples in which it has tokens with loss."""

    number: int
    parent: int | None
    kind: TurnKind
    start: Start | None
    prompt: str
    reply: str
    num_new: int
    num_prompt: int
    num_sampled: int
    num_cached: int | None
    stop_reason: str
    engine: str
    steps: tuple[int, ...]
    same_prompt: int | None = None
    num_malformed: int = 0
    trained: tuple[Trained, ...] = ()


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of one turn, from token `start` of its `num_tokens`; all tuples have one value for each token.

    - `texts`: the token as text. A token that is a part of a character has a replacement character.
    - `logprobs`: the log-probability with which the engine sampled it.
    - `steps`: the version step of the weights that sampled it; None if unknown.
    - `trained`: whether it has loss in a sample of its batch. `advantages`: its advantage there, of the last such
      sample; None without loss."""

    turn: int
    start: int
    num_tokens: int
    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    steps: tuple[int | None, ...]
    trained: tuple[bool, ...]
    advantages: tuple[float | None, ...]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as text.

    - `source`: "training", or "evaluation NAME". `state`: the rollout's state in the ledger; None in an evaluation.
    - `step`: the version step that was trained on it; None: not trained on.
    - `rows`: the positions of its samples in the batch of that step.
    - `reward`, `reason`: None and "" unless graded. `terms`: the raw parts of the reward.
    - `invalid`: the part of the system that failed and why; "" for a valid rollout. `sign`: a sign of cheating, or "".
    - `history`: its transitions in the ledger. `logs`: (attempt, log) of its agent program."""

    rollout_id: str
    source: str
    task_id: str | None = None
    family: str | None = None
    attempt: int | None = None
    state: str | None = None
    step: int | None = None
    rows: tuple[int, ...] = ()
    ending: str | None = None
    reward: float | None = None
    reason: str = ""
    trust: str = ""
    terms: tuple[Term, ...] = ()
    invalid: str = ""
    sign: str = ""
    turns: tuple[TurnView, ...] = ()
    transcript: str = ""  # of an evaluation by an earlier version, which recorded no turns
    history: tuple[dict[str, Any], ...] = ()
    logs: tuple[tuple[int, str], ...] = ()


@dataclass
class Conversation:
    """Turns that follow each other, each with the branches (other conversations) that begin after it.

    `title` names the turns and says why they are a conversation of their own."""

    title: str
    turns: list[tuple[TurnView, list[Conversation]]] = field(default_factory=list)


def conversations(turns: Sequence[TurnView]) -> list[Conversation]:
    """Arrange the turns of a rollout as a tree. Returns its conversations in order; each contains its branches.

    The first continuation of a turn belongs to the turn's conversation; each further one begins a branch."""
    children: dict[int | None, list[TurnView]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    roots = list[Conversation]()
    waiting = [(turn, roots, 0) for turn in reversed(children.get(None, []))]
    while waiting:
        turn, into, depth = waiting.pop()
        found = Conversation(_title(turn, turns, len(roots) + 1))
        into.append(found)
        later = list[tuple[TurnView, list[Conversation], int]]()
        at: TurnView | None = turn
        while at is not None:
            branches = list[Conversation]()
            found.turns.append((at, branches))
            after, inside = children.get(at.number, []), depth < MAX_DEPTH
            later += [(one, branches if inside else into, depth + inside) for one in after[1:]]
            at = after[0] if after else None
        waiting += reversed(later)
    return roots


def _title(turn: TurnView, turns: Sequence[TurnView], number: int) -> str:
    if turn.parent is not None:
        again = "" if turn.same_prompt is None else f", the prompt of turn {turn.same_prompt} again"
        return f"branch from turn {turn.parent}{again}"
    summary = next((one for one in reversed(turns[: turn.number]) if _goes_on_from(one, turn)), None)
    if turn.same_prompt is not None:
        why = f"the prompt of turn {turn.same_prompt} again"
    elif summary is not None:
        why = f"goes on from the summary of turn {summary.number}"
    else:
        why = _WHY.get(turn.start, "") if turn.number and turn.start else ""
    return f"conversation {number}" + (f": {why}" if why else "")


def _goes_on_from(summary: TurnView, turn: TurnView) -> bool:
    """Whether `summary` is a summary whose text is in the prompt of `turn`."""
    text = summary.reply.removeprefix("[assistant] ").strip()
    return summary.kind is TurnKind.SUMMARY and bool(text) and text in turn.prompt


_WHY = {
    Start.TOOLS: "other tools than before",
    Start.SYSTEM: "begins with another message",
    Start.HISTORY: "its history repeats no turn",
}


def transcript(turns: Sequence[TurnView]) -> str:
    """Return all conversations of a rollout as text, each message with its role on a new line.

    Conversations after the first, and branches, begin with a line that says where they start."""
    parts, waiting = list[str](), [iter(conversations(turns))]
    while waiting:
        one = next(waiting[-1], None)
        if one is None:
            waiting.pop()
            continue
        if parts:
            parts.append(f"\n--- {one.title} ---")
        parts += [text for turn, _ in one.turns for text in (turn.prompt, turn.reply) if text]
        waiting.append(branch for _, branches in one.turns for branch in branches)
    return "\n".join(parts)


def shorten(text: str, *, lines: int, chars: int) -> str:
    """Shorten a text to `lines` lines of at most `chars` characters, and say how many lines were left out.

    >>> shorten("abcdef\\nx\\ny\\nz", lines=2, chars=4)
    'abc…\\nx\\n… 2 more lines'
    """
    found = text.splitlines()
    kept = [line if len(line) <= chars else line[: chars - 1] + "…" for line in found[:lines]]
    more = len(found) - lines
    return "\n".join([*kept, *([f"… {more} more line{'s' if more > 1 else ''}"] if more > 0 else [])])


def turn_facts(turn: TurnView) -> str:
    """Return the numbers of a turn in one line: its tokens, the weights that sampled it, and the tokens that were
    trained on.

    For example, "trained 12 × +0.75 (row 3)" means that 12 tokens have the advantage 0.75 in sample 3 of the batch."""
    facts = [f"prompt {turn.num_prompt}" + ("" if turn.num_cached is None else f" ({turn.num_cached} cached)")]
    facts[0] += f", sampled {turn.num_sampled}"
    facts += [] if turn.stop_reason == "stop" else [f"ended by {turn.stop_reason}"]
    facts += [f"{turn.num_malformed} malformed"] if turn.num_malformed else []
    facts += [f"step {' and '.join(map(str, turn.steps))}"] if turn.steps else []
    for one in turn.trained:
        span = f"{one.low:+.3g}" + (f" to {one.high:+.3g}" if one.high != one.low else "")
        facts.append(f"trained {one.num_tokens} × {span} (row {one.row})")
    return " · ".join(facts)
