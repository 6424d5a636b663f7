"""What a fleet's snapshots were prepared from, and where they are: so that they can be prepared again. Bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.records.image import Image

MAX_BYTES = 256 << 20  # of all files
MAX_RECIPES = 16_384


@dataclass
class Recipe:
    """Of one snapshot. Without files and image where it is the state of a machine in use: there is no other."""

    files: dict[str, bytes] = field(default_factory=dict)
    image: Image | None = None
    on: dict[str, str] = field(default_factory=dict)  # host: the snapshot's id there
    of_machine: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))


class Recipes:
    """By the fleet's names of snapshots, least recently used first."""

    def __init__(self) -> None:
        self._recipes: OrderedDict[str, Recipe] = OrderedDict()
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Recipe]:
        return iter(self._recipes.values())

    def get(self, snapshot: str) -> Recipe | None:
        """One of them, used now."""
        if snapshot in self._recipes:
            self._recipes.move_to_end(snapshot)
        return self._recipes.get(snapshot)

    def put(self, snapshot: str, recipe: Recipe) -> Recipe:
        """Keep it, in the place of another."""
        self.drop(snapshot)
        self._recipes[snapshot] = recipe
        self._num_bytes += recipe.num_bytes
        return recipe

    def drop(self, snapshot: str) -> None:
        """Idempotent."""
        if (recipe := self._recipes.pop(snapshot, None)) is not None:
            self._num_bytes -= recipe.num_bytes

    def surplus(self) -> Iterator[str]:
        """Names of those that are dropped now, because there is too much."""
        while len(self._recipes) > 1 and (len(self._recipes) > MAX_RECIPES or self._num_bytes > MAX_BYTES):
            snapshot = next(iter(self._recipes))
            self.drop(snapshot)
            yield snapshot
