"""Draws rollouts as trees of turns: with colours and guides on a terminal, as indented lines into a pipe."""

from __future__ import annotations

import datetime
import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from etude.dashboard.formatting import number
from etude.records.rollout import TurnKind
from etude.records.view import Conversation, RolloutView, TurnView, conversations, shorten, turn_facts

_BEGIN = re.compile(r"\n(?=\[\w+\] )")  # of a message
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LINES, CHARS = 4, 160
"""The maximum number of lines of a message, and of characters of a line, without ``--full``."""
_COLOURS = {TurnKind.ACT: "bold", TurnKind.SUMMARY: "bold green", TurnKind.REFUSED: "bold red", TurnKind.SIDE: "dim"}


def print_views(views: Sequence[RolloutView], *, full: bool) -> None:
    """Print rollouts as trees. With `full` no text is shortened."""
    screen = Console(highlight=False, markup=False)
    for view in views:
        tree = _tree(view, full=full)
        if screen.is_terminal:
            screen.print(tree)
        else:
            print("\n".join(_lines(tree)))


def _lines(tree: Tree) -> Iterator[str]:
    """Yield the lines of a tree, those of each level indented by two blanks more."""
    waiting = [(tree, 0)]
    while waiting:
        at, depth = waiting.pop()
        label = at.label.plain if isinstance(at.label, Text) else str(at.label)
        yield from ("  " * depth + line for line in label.split("\n"))
        waiting += [(child, depth + 1) for child in reversed(at.children)]


def _tree(view: RolloutView, *, full: bool) -> Tree:
    root = Tree(_head(view), guide_style="dim")
    if view.history:
        history = root.add(Text("history", "bold"))
        for move in view.history:
            at = datetime.datetime.fromtimestamp(move["t"])  # local time
            history.add(
                Text(f"{at:%Y-%m-%d %H:%M:%S} {move['origin'] or '-'} -> {move['state']} {move['reason']}".rstrip())
            )
    waiting: list[tuple[Tree, Conversation]] = [(root, one) for one in reversed(conversations(view.turns))]
    while waiting:
        into, one = waiting.pop()
        node = into.add(Text(one.title, "cyan"))
        later = []
        for turn, branches in one.turns:
            leaf = node.add(_turn(turn, full=full))
            later += [(leaf, branch) for branch in branches]
        waiting += reversed(later)
    if view.transcript:
        root.add(Text("(recorded by an earlier version of etude, which kept the text and not the turns)"))
        root.add(Text(_visible(view.transcript if full else shorten(view.transcript, lines=100, chars=CHARS))))
    elif not view.turns:
        root.add(Text("(nothing was stored: the rollout did not finish)"))
    for attempt, log in view.logs:
        text = log.rstrip() if full else shorten(log.rstrip(), lines=20, chars=CHARS)
        root.add(Text(f"log of the agent program, attempt {attempt}:\n{_visible(text)}"))
    return root


def _head(view: RolloutView) -> Text:
    """The facts of a rollout: where it is from, its grade and reward, and its tokens."""
    facts = [view.source, view.family or "", f"task {view.task_id}" if view.task_id else ""]
    facts += [f"attempt {view.attempt}"] if view.attempt else []
    facts += [view.state or ""]
    if view.step is not None:
        facts += [f"step {view.step}, " + (f"{number(len(view.rows), 'sample')}" if view.rows else "no sample")]
    head = Text.assemble((view.rollout_id, "bold"), "  " + " · ".join(one for one in facts if one))
    if view.sign:
        head.append(f"\nquarantined, {view.sign}" if view.source == "training" else f"\nsign of cheating: {view.sign}")
    if view.reward is not None:
        trust = f" ({view.trust})" if view.trust else ""
        head.append(f"\nreward {view.reward:g}: {view.reason}{trust}", "green" if view.reward > 0 else "red")
        for term in view.terms:
            value = "unknown" if term.value is None else f"{term.value:g}"
            head.append(f"\n  {term.name} {value}{term.evidence and ': ' + term.evidence}")
    elif view.invalid:
        head.append(f"\ninvalid at {view.invalid}", "red")
    if view.turns:
        sampled = sum(turn.num_sampled for turn in view.turns)
        read, roots = sum(turn.num_new for turn in view.turns), sum(turn.parent is None for turn in view.turns)
        head.append(
            f"\nended: {view.ending or 'unknown'}; {number(len(view.turns), 'turn')} in"
            f" {number(roots, 'conversation')}; {sampled} tokens sampled, {read} read"
        )
    return head


def _turn(turn: TurnView, *, full: bool) -> Text:
    """One turn: a line of facts, then the new messages and the reply."""
    text = Text.assemble((f"{turn.number} {turn.kind}", _COLOURS[turn.kind]), (f"  {turn_facts(turn)}", "dim"))
    for part, style in ((turn.prompt, "dim"), (turn.reply, "")):
        if part:
            shown = part if full else "\n".join(shorten(one, lines=LINES, chars=CHARS) for one in _BEGIN.split(part))
            text.append("\n" + textwrap.indent(_visible(shown), "    "), style)
    return text


def _visible(text: str) -> str:
    """Return a text whose control characters are spelled out: tools and models must not control the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
