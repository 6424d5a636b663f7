"""A document source: the questions and answers of a support desk, one file for each ticket."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.corpus import Document, Dropped


@dataclass(frozen=True)
class Tickets:
    """Every file of a folder whose name ends with `ending`, without the lines that begin with `private`."""

    path: Path = Path("docs")
    ending: str = ".md"
    private: str = "From:"

    def documents(self) -> Iterator[Document | Dropped]:
        for file in sorted(self.path.rglob(f"*{self.ending}")):
            name = str(file.relative_to(self.path))
            lines = file.read_text().splitlines()
            text = "\n".join(line for line in lines if not line.startswith(self.private))
            yield Document(name, text, path=name, licence="LicenseRef-own") if text else Dropped(name, "empty")
