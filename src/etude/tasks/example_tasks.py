"""Example task folders for `etude init`: generated repair tasks in the format of user-written tasks."""

from __future__ import annotations

import json
from pathlib import Path

from etude import config
from etude.records.task import Split
from etude.tasks.files import TaskFile
from etude.tasks.repair.source import RepairSource
from etude.tasks.text_files import write_tree

COUNTS = {Split.TRAIN: 48, Split.VALIDATION: 8, Split.HELDOUT: 16}


def write_examples(root: Path, *, seed: int = 0) -> int:
    """Write example task folders for three splits under `root`, and return their number.

    The format is that of docs/guides/your-tasks.md."""
    source = RepairSource(seed)
    for split, count in COUNTS.items():
        for index in range(count):
            task = source.task(split, index)
            answer = source.answer(task)
            task_file = TaskFile(
                instruction=task.instruction,
                exports=task.exports,
                test_command=task.test_command,
                family=task.family,
                problem=task.problem,
                split=split,
            )
            cases = [
                {"module": one.module, "function": one.function, "args": list(one.args), "expected": one.expected}
                for one in answer.cases
            ]
            folder = root / f"{split}-{index:03d}"
            write_tree(folder / "files", task.files)
            write_tree(folder / "answer" / "reference", answer.reference)
            write_tree(folder / "answer", {"cases.json": json.dumps(cases, indent=1) + "\n"})
            write_tree(folder, {"task.toml": config.to_toml(task_file)})
    return sum(COUNTS.values())
