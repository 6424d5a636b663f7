"""Task sources with random access, their validation, and documents for mid-training.

`open_source` opens a source by name or path. A task's position is a split and an index, so every run can resume. A hash
of its content assigns each task to the training, validation or held-out split.

>>> from etude.records.task import Split
>>> source = open_source("repair", seed=0)
>>> print(source.task(Split.HELDOUT, 0).instruction)
fix the failing test
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.config import Plugin, named
from etude.errors import NoSource, nearest
from etude.seams import TaskSource
from etude.tasks.config import SOURCES, CorpusConfig, TasksConfig
from etude.tasks.corpus import assert_no_heldout, code_documents, library_documents
from etude.tasks.files import DirectorySource
from etude.tasks.harbor import HarborSource
from etude.tasks.humaneval import HumanEvalSource
from etude.tasks.plugin_source import PluginSource
from etude.tasks.proof import Proof, check, show
from etude.tasks.repair import RepairSource
from etude.tasks.scripts import Script, write_reference
from etude.tasks.sessions import SessionSource
from etude.tasks.swe import SweSource
from etude.tasks.verifiers import VerifiersSource, interpreter
from etude.tasks.written import GENERATED

__all__ = [
    "CorpusConfig", "DirectorySource", "HumanEvalSource", "Proof", "RepairSource", "Script", "TasksConfig",
    "assert_no_heldout", "check", "code_documents", "library_documents", "open_source", "show", "write_reference",
]  # fmt: skip


_BY_PATH: dict[str, Callable[[str], TaskSource]] = {
    "humaneval": HumanEvalSource,
    "swe": SweSource,
    "harbor": HarborSource,
    "sessions": SessionSource,
    "verifiers": lambda name: VerifiersSource(name, interpreter()),
}


def open_source(source: str | Plugin, seed: int, *, files: int = 3, functions_per_file: int = 1) -> TaskSource:
    """Open a task source by its name or path.

    `source` is "repair", "following" or "interruption" (generated tasks), "humaneval:PATH" or "swe:PATH" (JSON lines),
    "harbor:PATH" (task folders), "verifiers:NAME", "sessions:DIR" (a privacy folder), a directory of task folders, or a
    plug-in. Only generated tasks use `seed`, and only "repair" `files` and `functions_per_file`. Raises `NoSource` if
    there is none, `PluginRefused`, and `TaskError` for a damaged source."""
    source = named(source, SOURCES)
    if isinstance(source, Plugin):
        return PluginSource(source)
    name, _, path = source.partition(":")
    if source == "repair":
        return RepairSource(seed, files=files, functions_per_file=functions_per_file)
    if source in GENERATED:
        return GENERATED[source](seed)
    if path and name in _BY_PATH:
        return _BY_PATH[name](path)
    if Path(source).is_dir():
        return DirectorySource(source)
    raise NoSource(
        f"no task source {source!r}",
        f"neither a known name nor a directory: {Path(source).absolute()} does not exist",
        hint=nearest(
            name,
            [
                "repair",
                *GENERATED,
                *(f"{known}:PATH" for known in _BY_PATH),
                "a directory of task folders",
                "my_package.module:Name",
            ],
        ),
    )
