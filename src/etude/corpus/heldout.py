"""Gathers the held-out texts of a config: files, and the answers and held-out tasks of task sources."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from etude import progress
from etude.config import Plugin, named
from etude.corpus.config import HeldOutConfig
from etude.corpus.contamination import CODE_GRAM, MIN_CODE, MIN_PROSE, PROSE_GRAM, HeldOutText
from etude.corpus.documents import MAX_BYTES
from etude.errors import ConfigError
from etude.plugins import Kind, make
from etude.records.task import Split
from etude.seams import TaskSource

_LARGER_TASKS = (
    "remove it, or use larger tasks here and in the run, such as "
    '{kind = "etude.tasks.repair.source:RepairSource", seed = 0, functions_per_file = 3}'
)


@runtime_checkable
class WithHeldOut(Protocol):
    """A `TaskSource` with the optional method `heldout`, which returns the texts that no training text may contain."""

    def heldout(self) -> Iterable[tuple[str, str]]:
        """Yield (name, text) of each answer and each held-out text. The ending of the name, such as ".py" or ".md",
        decides whether the text is code or prose."""
        ...


def heldout_texts(config: HeldOutConfig) -> Iterator[HeldOutText]:
    """Yield the held-out texts of a config, in a fixed order.

    Raises `ConfigError` for a pattern that matches no file, for a file that is too large or not UTF-8, and for a
    pattern or task source of which all texts are too short to be found. Raises `PluginRefused`, `NoSource` or
    `TaskError` for a task source that cannot be used."""
    for pattern in config.files:
        paths = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not paths:
            raise ConfigError(f"heldout.files: no file matches {pattern!r}", hint="correct the pattern, or remove it")
        hint = "name longer texts, or remove the pattern"
        yield from _long_enough(_texts_of_files(paths), f"heldout.files: {pattern!r}", hint)
    for tasks in config.tasks:
        named_as = tasks.path if isinstance(tasks, Plugin) else tasks
        yield from _long_enough(_texts_of_tasks(tasks, config), f"heldout.tasks: {named_as!r}", _LARGER_TASKS)


def _long_enough(texts: Iterable[HeldOutText], where: str, hint: str) -> Iterator[HeldOutText]:
    """Yield texts. Raises `ConfigError` at the end if all of them were too short to be found."""
    total = num_short = 0
    for text in texts:
        total, num_short = total + 1, num_short + (not text.segments)
        yield text
    if total and num_short == total:
        code, prose = CODE_GRAM + MIN_CODE - 1, PROSE_GRAM + MIN_PROSE - 1
        facts = f"texts of fewer than {code} tokens of code or {prose} words, and repetitive ones, are not searched for"
        raise ConfigError(
            f"{where}: {num_short:,} of {total:,} held-out texts are too short to be found", facts, hint=hint
        )


def _texts_of_files(paths: Iterable[str]) -> Iterator[HeldOutText]:
    for path in paths:
        progress.begin(f"reading held-out text {path}")
        yield HeldOutText.of(path, _text_of(Path(path)))


def _source(tasks: str | Plugin, seed: int) -> TaskSource:
    from etude.tasks import open_source
    from etude.tasks.config import SOURCES

    tasks = named(tasks, SOURCES)
    if isinstance(tasks, Plugin):
        source: TaskSource = make(Kind.SOURCE, tasks, where="heldout.tasks")
        return source
    return open_source(tasks, seed)


def _text_of(path: Path) -> str:
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else None
        if data is not None:
            return data.decode("utf-8-sig")
        facts = f"it is larger than {MAX_BYTES >> 20} MiB"
    except (OSError, UnicodeDecodeError) as error:
        facts = str(error)
    hint = "a held-out text that is not read could be in the corpus: convert it, or name other files"
    raise ConfigError(f"heldout.files: {path} cannot be read as UTF-8 text", facts, hint=hint)


def _texts_of_tasks(tasks: str | Plugin, config: HeldOutConfig) -> Iterator[HeldOutText]:
    source = _source(tasks, config.tasks_seed)
    if isinstance(source, WithHeldOut):
        for name, text in source.heldout():
            yield HeldOutText.of(name, text)
        return
    for split in Split:
        size = source.size(split)
        for index in range(config.num_tasks if size is None else min(size, config.num_tasks)):
            progress.begin(f"reading held-out task {index} ({split}) of {tasks}")
            task = source.task(split, index)
            answer, name = source.answer(task), f"{source.name}/{split}/{index}"
            texts = {f"{name}/{path}": text for path, text in answer.reference.items()}
            texts |= (
                {f"{name}/hidden/{path}": text for path, text in answer.tests.files.items()} if answer.tests else {}
            )
            texts |= {f"{name}/check.py": answer.test_code} if answer.test_code else {}
            if split is not Split.TRAIN:
                texts[f"{name}/instruction.md"] = task.instruction
            for where, text in texts.items():
                yield HeldOutText.of(where, text)
