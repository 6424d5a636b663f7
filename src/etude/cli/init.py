"""The command ``etude init``: write a folder with a config and example tasks."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from etude.errors import InputError, NoCheckpoint
from etude.tasks.example_tasks import write_examples

_MODEL_BEGIN, _MODEL_END = "# [model] begin\n", "# [model] end\n"


def init(args: argparse.Namespace) -> int:
    """Write DIR/config.toml and DIR/tasks/. Returns 0.

    With `--start` the config starts from that checkpoint, whose architecture must be supported."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists", "nothing is overwritten", hint="give a new folder")
    start: Path | None = args.start
    if start is not None and not (start / "config.json").is_file():
        raise NoCheckpoint(f"no checkpoint at {start}", "it has no config.json", hint="give a Hugging Face directory")
    if start is not None:
        from etude.loop.limits import start_model_config  # here, because a light install has no tokenizers

        start_model_config(start)
    text = resources.files("etude.cli").joinpath("init.toml").read_text()
    if start is None:
        text = text.replace(_MODEL_BEGIN, "").replace(_MODEL_END, "")
    else:
        before, _, rest = text.partition(_MODEL_BEGIN)
        text = f'start = "{start.resolve()}"\n\n'.join((before, rest.partition(_MODEL_END)[2].lstrip("\n")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        hint = "give another path: one part of it is not a folder, or does not exist"
        raise InputError(f"{folder} cannot be created", error.strerror or "", hint=hint) from None
    count = write_examples(folder / "tasks")
    (folder / "config.toml").write_text(text)
    print(f"wrote {folder}/config.toml and {count} tasks in {folder}/tasks; edit them, then run:")
    print(f"  cd {folder} && etude run config.toml")
    return 0
