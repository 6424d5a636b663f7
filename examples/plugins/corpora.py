"""A corpus source: the text files of a folder, shuffled with the seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Folder:
    """Every file of a folder whose name ends with `ending`."""

    path: Path = Path("docs")
    ending: str = ".md"

    def documents(self, seed: int) -> Iterator[str]:
        files = sorted(self.path.rglob(f"*{self.ending}"))
        random.Random(seed).shuffle(files)
        for file in files:
            yield file.read_text()
