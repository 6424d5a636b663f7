"""States of machines that accounts keep, by ids and names: each leads to a snapshot of the runtime. Bounded.

What somebody has named is held in the runtime. What clients of ours keep is not: they keep it again.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from etude.environments.remote.holds import Hold
from etude.environments.remote.refusal import Refused

PREPARED = "etude-"  # how what clients of ours have prepared is named
MAX_KEPT = 1024  # of one account


class _Kept(NamedTuple):
    state: str  # the runtime's snapshot
    names: tuple[str, ...]
    hold: Hold | None = None


class KeptStates:
    """Of one account. Where there is too much, what clients of ours have kept goes, least recently used first; what
    others have named is theirs to delete.

    >>> kept = KeptStates(lambda state: None)
    >>> first = kept.keep("tree", "mine")
    >>> kept.find("mine") == kept.find(first) == "tree"
    True
    """

    def __init__(self, hold: Callable[[str], Hold | None]) -> None:
        self._hold = hold
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by id, least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: str) -> str | None:
        """The runtime's snapshot by an id, or the newest of a name."""
        for kept_id, kept in reversed(self._kept.items()):
            if name == kept_id or name in kept.names:
                self._kept.move_to_end(kept_id)
                return kept.state
        return None

    def keep(self, state: str, name: str | None) -> str:
        """Its id. Raises `Refused` (429)."""
        if len(self._kept) >= MAX_KEPT:
            passing = next((kept_id for kept_id, kept in self._kept.items() if _is_passing(kept.names)), None)
            if passing is None:
                raise Refused(429, f"{len(self._kept)} snapshots are kept", hint="delete those that are done with")
            del self._kept[passing]
        kept_id = f"snap-{secrets.token_hex(10)}"
        names = (name,) if name else ()
        self._kept[kept_id] = _Kept(state, names, None if _is_passing(names) else self._hold(state))
        return kept_id

    def adopt(self, state: str) -> str:
        """The id of a state that came from elsewhere: the same one as long as it is kept."""
        wanted = _Kept(state, ())
        known = next((kept_id for kept_id, kept in self._kept.items() if kept == wanted), None)
        return known or self.keep(state, None)

    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of all by their ids."""
        return {kept_id: kept.names for kept_id, kept in self._kept.items()}

    def forget(self, name: str) -> bool:
        """Whether there was one of this id or name; there is none now."""
        gone = [kept_id for kept_id, kept in self._kept.items() if name == kept_id or name in kept.names]
        for kept_id in gone:
            hold = self._kept.pop(kept_id).hold
            if hold is not None:
                hold.release()
        return bool(gone)


def _is_passing(names: tuple[str, ...]) -> bool:
    """Nobody misses it."""
    return all(name.startswith(PREPARED) for name in names)
