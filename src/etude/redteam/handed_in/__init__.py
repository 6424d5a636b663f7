"""Cheats that are files: code that attacks the grader, as an agent would write and hand it in."""

from etude.redteam.cheat import Cheat
from etude.redteam.handed_in.code import clock, endings, exhausting, state
from etude.redteam.handed_in.equality import equality
from etude.redteam.handed_in.files import preload, rewards, tests
from etude.redteam.handed_in.reports import forgery
from etude.redteam.handed_in.second import second_look

HANDED_IN: tuple[Cheat, ...] = (
    *endings(), *equality(), *forgery(), *tests(), *preload(), *rewards(), *clock(), *state(), *exhausting(),
    *second_look(),
)  # fmt: skip
"""All cheats that are handed in."""

__all__ = ["HANDED_IN"]
