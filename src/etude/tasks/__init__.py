"""What to learn: sources of tasks with random access, the corpus that prepares for them, and their proof.

A source is opened by name or path; a cursor into it is one integer per split, so every run can resume. Tasks are
split by hash of their content into training, validation (settings are chosen there) and held-out.

>>> from etude.records.task import Split
>>> source = open_source("repair", seed=0)
>>> print(source.task(Split.HELDOUT, 0).instruction)
fix the failing test
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.errors import NoSource, nearest
from etude.seams import TaskSource
from etude.tasks.config import CorpusConfig, TasksConfig
from etude.tasks.corpus import assert_no_heldout, code_documents, library_documents
from etude.tasks.files import DirectorySource
from etude.tasks.harbor import HarborSource
from etude.tasks.humaneval import HumanEvalSource
from etude.tasks.proof import Proof, check, show
from etude.tasks.repair import RepairSource
from etude.tasks.scripts import Script, write_reference
from etude.tasks.swe import SweSource
from etude.tasks.verifiers import VerifiersSource, interpreter

__all__ = [
    "CorpusConfig",
    "DirectorySource",
    "HumanEvalSource",
    "Proof",
    "RepairSource",
    "Script",
    "TasksConfig",
    "assert_no_heldout",
    "check",
    "code_documents",
    "library_documents",
    "open_source",
    "show",
    "write_reference",
]


_BY_PATH: dict[str, Callable[[str], TaskSource]] = {
    "humaneval": HumanEvalSource,
    "swe": SweSource,
    "harbor": HarborSource,
    "verifiers": lambda name: VerifiersSource(name, interpreter()),
}


def open_source(name_or_path: str, seed: int, *, files: int = 3, functions_per_file: int = 1) -> TaskSource:
    """The source "repair", "humaneval:PATH" and "swe:PATH" (JSON lines), "harbor:PATH" (folders), "verifiers:NAME", or
    a directory of task folders. Raises `NoSource`, and `TaskError` for one that is damaged.

    `seed`, `files` and `functions_per_file` are for the generated source; the others are what they are.
    """
    name, _, path = name_or_path.partition(":")
    if name_or_path == "repair":
        return RepairSource(seed, files=files, functions_per_file=functions_per_file)
    if path and name in _BY_PATH:
        return _BY_PATH[name](path)
    if Path(name_or_path).is_dir():
        return DirectorySource(name_or_path)
    raise NoSource(
        f"no task source {name_or_path!r}",
        f"neither a known name nor a directory: {Path(path or name_or_path).absolute()} is none",
        hint=nearest(name, ["repair", *(f"{known}:PATH" for known in _BY_PATH), "a directory of task folders"]),
    )
