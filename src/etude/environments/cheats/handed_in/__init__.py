"""Cheats that are handed in: files that attack whoever grades them. Each is what an agent would write in earnest."""

from etude.environments.cheats.cheat import Cheat
from etude.environments.cheats.handed_in.code import clock, endings, equality, state
from etude.environments.cheats.handed_in.exhausting import exhausting
from etude.environments.cheats.handed_in.files import preload, rewards, tests
from etude.environments.cheats.handed_in.reports import forgery
from etude.environments.cheats.handed_in.second import second_look

HANDED_IN: tuple[Cheat, ...] = (
    *endings(), *equality(), *forgery(), *tests(), *preload(), *rewards(), *clock(), *state(), *exhausting(),
    *second_look(),
)  # fmt: skip
"""Every cheat that is handed in."""

__all__ = ["HANDED_IN"]
