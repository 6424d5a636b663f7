"""One rollout: its facts and changes of state from the ledger, its turns and tokens from the trace of its step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from etude.dash.runs import Part, ShownRollout, ShownRun, part
from etude.dash.text import cut
from etude.experience.groups import Row
from etude.records.view import RolloutView, TurnTokens, TurnView

MAX_TRACE_BYTES = 64 << 20
"""Larger traces are not read by the server: the command line shows their rollouts."""
STRIP_TOKENS, TURN_TOKENS = 1500, 2000
"""Tokens of the strips on the page of a rollout, all turns together; and on a page of one turn."""
TEXT_CHARS, ALL_CHARS, TURN_CHARS = 6_000, 200_000, 40_000
"""Characters of a message, and of all messages, on the page of a rollout; and on a page of one turn."""
MAX_TURNS, MAX_ROWS = 400, 200


@dataclass(frozen=True)
class RolloutPage:
    """A rollout of training.

    `siblings`: the rollouts of its group. `shown`: None if its turns cannot be read, and `problem` says why. `strips`:
    the first sampled tokens of its first turns, by the number of the turn. `num_hidden`: turns that are not shown."""

    row: Row
    history: Sequence[Mapping[str, Any]]
    siblings: Sequence[Row]
    shown: ShownRollout | None
    problem: str
    strips: Mapping[int, TurnTokens]
    num_hidden: int

    @property
    def view(self) -> RolloutView | None:
        """The rollout as text; None if it cannot be read."""
        return None if self.shown is None else self.shown.view

    @functools.cached_property
    def turns(self) -> Sequence[TurnView]:
        """The turns that the page shows, with texts of bounded length."""
        return () if self.view is None else _bounded(self.view.turns[:MAX_TURNS])

    @staticmethod
    def row_of(run: ShownRun, rollout_id: str) -> Part[Row | None]:
        """Return the row of a rollout; its value is None if the ledger does not have it."""

        def read() -> list[Row]:
            with run.ledger() as ledger:
                return ledger.find_rows([rollout_id])

        found = part(read)
        return Part(found.value[0] if found.value else None, found.missing)

    @staticmethod
    def read(run: ShownRun, row: Row) -> RolloutPage:
        """Read all of a rollout."""
        with run.ledger() as ledger:
            history: Sequence[Mapping[str, Any]] = part(lambda: ledger.history(row.rollout_id)[-MAX_ROWS:]).value or []
            siblings = part(lambda: ledger.group_rows(row.group_id)[:MAX_ROWS]).value or []
            size = part(lambda: None if row.step is None else run.trace_bytes(row.step)).value
            if size is not None and size > MAX_TRACE_BYTES:
                problem = (
                    f"its trace has {size >> 20} MiB, and this server reads at most {MAX_TRACE_BYTES >> 20}; "
                    f"to see it: etude rollouts show {row.rollout_id} {run.path.name}"
                )
                found: Part[ShownRollout] = Part(None, problem)
            else:
                found = part(lambda: run.rollout(ledger, row))
        strips, left = dict[int, TurnTokens](), STRIP_TOKENS
        shown = found.value
        turns = () if shown is None else shown.view.turns
        for turn in turns[:MAX_TURNS]:
            if shown is not None and left > 0 and (tokens := shown.tokens(turn.number, 0, left)) is not None:
                strips[turn.number] = tokens
                left -= len(tokens.texts)
        return RolloutPage(
            row=row,
            history=history,
            siblings=siblings,
            shown=shown,
            problem=found.missing,
            strips=strips,
            num_hidden=max(0, len(turns) - MAX_TURNS),
        )


@dataclass(frozen=True)
class TurnPage:
    """A part of one turn that fits on a page: characters of its text, and tokens.

    `text`: the characters from number `text_at` of `num_chars` in the whole text. `text_step`, `token_step`: the number
    of characters and tokens of a part."""

    turn: TurnView
    text: str
    text_at: int
    num_chars: int
    tokens: TurnTokens | None
    text_step: int = TURN_CHARS
    token_step: int = TURN_TOKENS


def turn_page(page: RolloutPage, number: int, *, text_at: int, token_at: int) -> TurnPage | None:
    """Return a page of turn `number` (from 0) of a rollout; None if there is no such turn.

    `text_at`, `token_at`: index of the first character and of the first token on the page."""
    shown = page.shown
    if shown is None or not 0 <= number < len(shown.view.turns):
        return None
    turn = shown.view.turns[number]
    text = "\n".join(one for one in (turn.prompt, turn.reply) if one)
    return TurnPage(
        turn=turn,
        text=text[text_at : text_at + TURN_CHARS],
        text_at=text_at,
        num_chars=len(text),
        tokens=shown.tokens(number, token_at, token_at + TURN_TOKENS),
    )


def _bounded(turns: Sequence[TurnView]) -> list[TurnView]:
    """Copies of turns whose texts are cut, each and all together."""
    found, left = list[TurnView](), ALL_CHARS
    for turn in turns:
        prompt, reply = (cut(text, min(TEXT_CHARS, left)) for text in (turn.prompt, turn.reply))
        left = max(0, left - len(prompt) - len(reply))
        found.append(replace(turn, prompt=prompt, reply=reply))
    return found
